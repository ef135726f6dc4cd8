"""Shared memory of a program."""

from __future__ import annotations

import collections
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.layouts import swizzled
from pallas_kernels.problem import BLOCK, TILE, Config, Mode, Problem, round_up
from pallas_kernels.products import operand_width
from pallas_kernels.program import F32

# Of `Scratch.solve_gate`: decay of the checkpoint up to each record, and `Scratch.weight`.
SINCE, WEIGHT = range(2)


class Scratch(NamedTuple):
    """Arrays in shared memory; see `places` for shapes, and for those that share a place."""

    window_bar: Any
    state_bar: Any = None
    copy_bar: Any = None
    record_bar: Any = None  # apart where records come late, or a fold brings none
    value_bar: Any = None  # of new values that come late

    state: Any = None  # state tiles in flight
    key: Any = None  # keys of the window
    record: Any = None  # updates or values of the window
    gate: Any = None  # channel decay: log-decays of the window, if not apart, then decayed keys
    read_gate: Any = None  # beside a copy: rounded log-decays of the window
    q: Any = None
    k: Any = None
    v: Any = None
    g: Any = None  # channel decay: new log-decays
    column: Any = None  # channel decay: q and k times their decay since the window
    operand: Any = None  # T > 1, or a copy: the columns as the state sees them, or bf16 terms
    apart: Any = None  # scalar decay, T > 1: decay by the new tokens from one to another
    total: Any = None  # decay of the checkpoint by the window, for each channel or head
    row_total: Any = None  # scalar decay: the same for each state row, if tiles have several heads
    decay: Any = None  # scalar decay: log-decay of each record, for each head
    weight: Any = None  # of each record, for each head: scalar decay times, additive rule, beta
    new_gate: Any = None  # log-decays of the new tokens, then their betas, for each head
    score: Any = None  # <k_j, r> for each q and each k, window and new records j
    read: Any = None  # S r for each column r; T > 1: for each row
    read_folded: Any = None  # T > 1: the same where the row folds
    fold_key: Any = None  # bf16 terms of the keys, where they are not taken as they are
    copy: Any = None  # read copy: its tiles in flight
    encoded: Any = None  # read copy: a tile of the new one
    scale: Any = None  # 8-bit read copy: for each state row
    amax: Any = None  # 8-bit read copy: largest magnitude in a tile's rows, in parts of channels
    # Read copy under the delta rule, to solve for updates again:
    solve_beta: Any = None  # of each record, for each head
    solve_gate: Any = None  # scalar decay, head by head: SINCE and WEIGHT of the records
    solve_key: Any = None  # channel decay: keys decayed from the checkpoint, in float32
    solve_decay: Any = None  # channel decay: of each record by itself
    system: Any = None  # <k_j, k_i> of the window's records j < i, decayed from one to the other
    float_inverse: Any = None  # the matrix that takes v - S k of records to their updates
    inverse: Any = None  # its bf16 terms


# Arrays by name, side by side in this order.
Group = collections.OrderedDict[str, Any]


def places(p: Problem, c: Config, mode: Mode) -> tuple[Any, ...]:
    """What a program has of shared memory: groups of arrays, and unions of groups in one place."""
    sm, bf16 = plgpu.SMEM, jnp.bfloat16
    rows = (c.heads, c.rows) if c.heads > 1 else (c.rows,)
    heads = (c.heads,)
    window, n, tokens = p.padded_window, p.key_dim, p.num_tokens
    several, channel, copied = tokens > 1, p.channel, p.read_dtype is not None
    late, follow = p.brings_records_late, p.records_follow(c, mode)
    reads_copy = copied and tokens > 0 and not mode.folds_all
    alone: Group = Group()
    small: Group = Group()
    found: list[Any] = [alone]

    # New tokens
    vectors = p.padded_columns
    if p.has_token_operand and several:  # 16 rows of which are scored at once
        vectors = max(BLOCK, round_up(2 * tokens, 8))
    if p.has_float_operand:  # rows in other banks
        small["operand"] = sm((1, vectors, n if n % 32 else n + 4), F32)
    elif several or p.packs_terms:
        alone["operand"] = sm(
            (1 if p.packs_terms else p.key_terms, vectors, operand_width(n)), bf16
        )
    if tokens and p.tokens_in_operand is None:
        alone["q"] = alone["k"] = sm((p.token_rows, n), p.key_dtype)
        if several and not channel:
            alone["k"] = sm((p.padded_tokens, n), p.key_dtype)
    if tokens:
        alone["v"] = sm((tokens, *rows), p.value_dtype)
        small["new_gate"] = sm((2 * tokens, *heads), F32)
    if several and not channel:
        small["apart"] = sm((tokens, tokens, *heads), F32)
    if late:  # what keys are scored with gives way to the scores
        score = sm((window + p.token_rows, p.score_columns), F32)
        new = Group(q=alone.pop("q"), k=alone.pop("k"), g=sm((tokens, n), F32))
        found.append(_union([new, Group(score=score, v=alone.pop("v"))]))
    elif tokens and channel:
        small["g"] = sm((tokens, n), F32)

    # Window
    key, gate, record = (
        sm((window, n), p.key_dtype),
        sm((window, n), F32),
        sm((window, *rows), p.record_dtype),
    )
    column = sm((p.num_columns, n), F32)
    read = sm((*rows, p.padded_columns) if several else (p.num_columns, *rows), F32)
    keys = [Group(gate=gate, key=key) if channel else Group(key=key)]
    if reads_copy and p.read_decay_dtype is not None:
        read_gate = sm((window, n), p.read_decay_dtype)
        if p.decays_keys_in_place(mode):
            keys = [Group(read_gate=read_gate, key=key), Group(gate=gate)]
        else:
            keys[0]["read_gate"] = read_gate
    if mode.fold and (mode.wgmma or p.key_terms > 1):
        if several and channel:
            # Keys give way to the columns of several tokens once they are decayed. The one token's
            # are also read after the fold's keys have taken this place.
            keys.append(Group(gate=gate, column=column))
        # The swizzle under which a tensor-core product takes operands from shared memory.
        swizzle: Any = swizzled(bf16, n, 32) if mode.wgmma else ()
        keys.append(Group(fold_key=sm((p.key_terms, window, n), bf16, transforms=swizzle)))
    if late:
        keys += [Group(record=record), *([Group(read_folded=read)] if mode.fold else [])]
    found.append(_union(keys))
    if channel and tokens and not (several and mode.fold):
        small["column"] = column
    small["total"] = sm((n,) if channel else heads, F32)
    if not channel:
        small["decay"] = sm((window, *heads), F32)
        if mode.fold and c.rows % TILE:
            small["row_total"] = sm(rows, F32)
    if not (p.delta and channel):
        small["weight"] = sm((window, *heads), F32)
    if tokens and not late:
        small["score"] = sm((window + p.padded_tokens, p.score_columns), F32)

    # State
    state = Group(state=sm((c.stages, TILE, n), F32, transforms=swizzled(F32, n)))
    records = [] if late else [Group(record=record)]
    if copied:
        copy = swizzled(p.read_dtype, n)
        reads = Group()
        if reads_copy:
            reads["copy"] = sm((c.copies, TILE, n), p.read_dtype, transforms=copy)
        uses = [reads]
        if mode.fold:
            encoded = Group(encoded=sm((TILE, n), p.read_dtype, transforms=copy))
            solved = _solve_arrays(p, c) if p.solves_again else [Group()]
            uses = [*(state | arrays for arrays in solved), encoded, reads]
            if p.solves_again:
                small["solve_beta"] = sm((window, *heads), F32)
                if not channel:
                    small["solve_gate"] = sm((2, *heads, window), F32)
        if follow:
            # Records come while tiles are still read here: both begin at the same byte.
            assert [*reads] == ["copy"]
            uses += records
            records = []
        elif p.solves_again:
            reads |= records[0] if reads_copy else {}
            records = []
        found.append(_union([use for use in uses if use]))
        if p.read_bytes == 1:
            small["scale"] = sm(rows, F32)
            if mode.fold:
                small["amax"] = sm((n // c.channels, TILE), F32)
        if several:
            alone["read"] = read
        elif tokens:
            small["read"] = read
    elif several:
        # What tiles gave stays in registers until the last of them is read; records are dead once
        # they are folded.
        found.append(_union([state, Group(read=read)]))
        records += [Group(read_folded=read)] if mode.fold and not late else []
    else:
        alone |= state
        if tokens:
            small["read"] = read
    if records:
        found.append(_union(records))

    # The interpreter cannot reshape parts of an array, and plain steps of one token do not gain.
    if mode.interpret or not (copied or several):
        alone |= small
    else:
        found.append(Packed.of(small))
    bars = Group(window_bar=plgpu.Barrier(num_arrivals=p.window_copies(c, mode) * p.num_chunks))
    if mode.fold or not copied:
        bars["state_bar"] = plgpu.Barrier(num_barriers=c.stages)
    if reads_copy:
        bars["copy_bar"] = plgpu.Barrier(num_barriers=c.copies)
    if late:
        bars["value_bar"] = plgpu.Barrier()
    if (late and not mode.folds_all) or (reads_copy and p.solves_again) or follow:
        bars["record_bar"] = plgpu.Barrier(num_arrivals=p.num_chunks)
    return (*found, bars)


def _solve_arrays(p: Problem, c: Config) -> list[Group]:
    """What a solve has, in the same place.

    The inverse comes first, larger than in float32: that is made in its place out of the system,
    which lies behind and stays.
    """
    sm, window = plgpu.SMEM, p.padded_window
    # Rows of operands lie in different banks.
    inverse = Group(inverse=sm((c.heads, 3, window, window + 8), jnp.bfloat16))
    square = sm((c.heads, window, window), F32)
    system, float_inverse = inverse | Group(system=square), Group(float_inverse=square)
    if not p.channel:
        return [system, float_inverse]
    system["solve_decay"] = sm((window, p.key_dim), F32)
    return [system, float_inverse, inverse | Group(solve_key=sm((window, p.key_dim + 4), F32))]


def _union(groups: list[Group]) -> Any:
    return groups[0] if len(groups) == 1 else plgpu.RefUnion(*groups)


@jax.tree_util.register_pytree_node_class
class Packed:
    """Small arrays of float32 in one: each by itself would take a kilobyte.

    Attributes:
      ref: [n] what has them all.
      shapes: of each, by its name in `Scratch`.
    """

    def __init__(self, ref: Any, shapes: tuple[tuple[str, tuple[int, ...]], ...]):
        self.ref, self.shapes = ref, shapes

    @classmethod
    def of(cls, arrays: Group) -> Packed:
        """The place of arrays."""
        shapes = tuple((name, x.shape) for name, x in arrays.items())
        length = sum(round_up(math.prod(shape), _APART) for _, shape in shapes)
        return cls(plgpu.SMEM((length,), F32), shapes)

    def views(self) -> Group:
        """The arrays."""
        found, first = Group(), 0
        for name, shape in self.shapes:
            size = math.prod(shape)
            found[name] = self.ref.at[pl.ds(first, size)].reshape(shape)
            first += round_up(size, _APART)
        return found

    def tree_flatten(self) -> tuple[Any, Any]:
        """As JAX asks for."""
        return (self.ref,), self.shapes

    @classmethod
    def tree_unflatten(cls, shapes: Any, children: Any) -> Packed:
        """As JAX asks for."""
        return cls(*children, shapes)


# Elements from one packed array to the next begin at multiples of this.
_APART = 32


def unpack(found: tuple[Any, ...], p: Problem) -> Scratch:
    """The arrays of `places` by name, as a kernel gets them."""
    arrays = Group()
    for place in found:
        groups = [place.views()] if isinstance(place, Packed) else place
        for group in [groups] if isinstance(place, dict) else groups:
            arrays |= group
    arrays.setdefault("read_folded", arrays.get("read"))
    if p.tokens_in_operand is not None:
        first, apart = p.tokens_in_operand
        here = pl.ds(0, p.key_dim)
        for name, row in (("q", first), ("k", first + apart)):
            arrays[name] = arrays["operand"].at[0, pl.ds(row, p.num_tokens), here]
    return Scratch(**arrays)


def shared_bytes(problem: Problem, config: Config, mode: Mode) -> int:
    """Shared memory that a program takes; every array is aligned to 1024 bytes."""
    total = 1024  # barriers
    for x in jax.tree.leaves(places(problem, config, mode)):
        if isinstance(x, plgpu.RefUnion):
            total += max(_bytes(group) for group in x.refs)
        elif not isinstance(x, plgpu.Barrier):
            total += _bytes(x)
    return total


def _bytes(arrays: Any) -> int:
    sizes = (math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(arrays))
    return sum(round_up(size, 1024) for size in sizes)
