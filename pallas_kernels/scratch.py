"""Shared memory of a program."""

from __future__ import annotations

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


class Scratch(NamedTuple):
    """Shared memory of a program; see `scratch_types` for shapes."""

    state: Any  # state tiles in flight
    key: Any  # keys of the window
    record: Any  # updates or values of the window
    gate: Any  # channel decay: log-decays of the window, then its decayed keys
    q: Any
    k: Any
    v: Any
    g: Any  # channel decay: new log-decays
    column: Any  # channel decay: q and k times their decay since the window
    operand: Any  # T > 1, or a copy: bf16 terms of the columns as the state sees them
    apart: Any  # scalar decay, T > 1: decay by the new tokens from one to another
    total: Any  # decay of the checkpoint by the window, for each channel or head
    row_total: Any  # scalar decay: the same for each state row
    decay: Any  # scalar decay: log-decay of each record, for each head
    weight: Any  # scalar decay: decay (times beta) of each record
    new_gate: Any  # log-decay and beta of the new tokens, for each head
    score: Any  # <k_j, r> for each q and each k, window and new records j
    read: Any  # S r for each column r; T > 1: for each row
    fold_record: Any  # bf16 terms of the weighted records, one tile
    fold_key: Any  # bf16 terms of the keys, where they are not taken as they are
    shared: Any  # None, or gate and key in one place with what is made of them
    copy: Any  # read copy: its tiles in flight
    encoded: Any  # read copy: a tile of the new one
    scale: Any  # 8-bit read copy: for each state row
    solve_gate: Any  # for each record and head: beta; scalar decay also DECAY and SINCE
    again: Any  # read copy under the delta rule: what it takes to solve for updates again
    either: Any  # None, or in one place what a fold needs, encoded in the state's, and copy
    state_bar: Any
    copy_bar: Any
    record_bar: Any  # apart where a fold brings no records
    window_bar: Any
    packed: Any = None  # None, or small arrays of those above in one: each would take a kilobyte

    def unpacked(self, p: Problem) -> Scratch:
        """The same with the parts of `shared` and `either` as fields of their own."""
        found = self
        if self.either is not None:
            (state, *again), (_, fold_record), encoded, *read = self.either
            found = found._replace(state=state, fold_record=fold_record, encoded=encoded)
            if again:
                found = found._replace(again=again[0])
            if read:
                copy, *record = read[0]
                found = found._replace(copy=copy, record=record[0] if record else self.record)
        if self.packed is not None:
            found = found._replace(**self.packed.views())
        if self.q is None:
            first = 0 if p.packs_tokens else p.padded_columns - 2
            rows = (pl.ds(first + i, 1) for i in (0, 1))
            q, k = (self.operand.at[0, row, pl.ds(0, p.key_dim)] for row in rows)
            found = found._replace(q=q, k=k)
        if self.shared is not None:
            window, *decayed, fold_key = self.shared
            *gate, key = window
            found = found._replace(gate=gate[0] if gate else None, key=key, fold_key=fold_key)
            if decayed:
                found = found._replace(column=decayed[0][1])
        return found


# Of `Scratch.solve_gate`: beta, the decay of each record by itself, of the checkpoint up to each.
BETA, DECAY, SINCE = range(3)


class Again(NamedTuple):
    """What it takes to solve for the updates of a window again."""

    key: Any  # where the fold's are others: in float32, by channel decayed from the checkpoint on
    system: Any  # <k_j, k_i> of the window's records j < i, decayed from one to the other
    value: Any  # 16 raw values of a tile's rows
    read: Any  # S k for each row of a tile and 16 of the keys
    record: Any  # updates of a tile's rows


def scratch_types(p: Problem, c: Config, mode: Mode) -> Scratch:
    """Shapes of the shared memory of a program."""
    sm, bf16 = plgpu.SMEM, jnp.bfloat16
    rows = (c.heads, c.rows) if c.heads > 1 else (c.rows,)
    window, n = p.padded_window, p.key_dim
    several = p.num_tokens > 1
    new = p.padded_tokens if several and not p.channel else p.token_rows
    tokens, columns = max(p.num_tokens, 1), max(p.num_columns, 1)
    heads = (c.heads,)
    channel = p.channel
    beside = p.packs_terms and p.key_dtype == bf16  # the operand has room for them
    operand = (1 if p.packs_terms else p.key_terms, p.padded_columns, operand_width(n))
    key = sm((window, n), p.key_dtype)
    gate = sm((window, n), F32) if channel else None
    column = sm((columns, n), F32) if channel else None
    # The swizzle under which a tensor-core product takes operands from shared memory.
    swizzle: Any = swizzled(bf16, n, 32) if mode.wgmma else ()
    fold_key = shared = None
    if mode.fold and (mode.wgmma or p.key_terms > 1):
        fold_key = sm((p.key_terms, window, n), bf16, transforms=swizzle)
        # By channel keys give way to the columns of several tokens once they are decayed. The one
        # token's are also read after the fold's keys have taken this place.
        apart = column is None or not several
        windows = [(gate, key) if channel else (key,)] + ([] if apart else [(gate, column)])
        shared = plgpu.RefUnion(*windows, fold_key)
        column = column if apart else None
    state: Any = sm((c.stages, TILE, n), F32, transforms=swizzled(F32, n))
    record: Any = sm((window, *rows), p.record_dtype)
    fold_record: Any = None
    if mode.fold:
        fold_record = sm((3, window, TILE), bf16, transforms=swizzle)
    copy = either = solve_gate = None
    if p.read_dtype is not None:
        if p.num_tokens:
            copy = sm((c.copies, TILE, n), p.read_dtype, transforms=swizzled(p.read_dtype, n))
        if mode.fold:
            encoded = sm((TILE, n), p.read_dtype, transforms=swizzled(p.read_dtype, n))
            folds = [state, _again_types(p, c)] if p.solves_again else [state]
            # A tile's updates, and what they were solved from, give way to their terms.
            kept = [state, *folds[1][:2]] if p.solves_again else folds
            before = sm((_bytes(kept),), jnp.int8)
            reads = [] if copy is None else [(copy, record) if p.solves_again else (copy,)]
            either = plgpu.RefUnion(tuple(folds), (before, fold_record), encoded, *reads)
            fold_record = copy = None
            if p.solves_again:
                record, solve_gate = None, sm((1 if channel else 3, window, *heads), F32)
        state = None
    found = Scratch(
        state=state,
        key=None if shared else key,
        record=record,
        gate=None if shared else gate,
        q=None if beside else sm((p.token_rows if channel and several else tokens, n), p.key_dtype),
        k=None if beside else sm((new, n), p.key_dtype),
        v=sm((tokens, *rows), p.value_dtype),
        g=sm((tokens, n), F32) if channel else None,
        column=column,
        operand=sm(operand, bf16) if several or p.packs_terms else None,
        apart=sm((tokens, tokens, *heads), F32) if several and not channel else None,
        total=sm((n,) if channel else heads, F32),
        row_total=sm(rows, F32) if mode.fold and not channel else None,
        decay=None if channel else sm((window, *heads), F32),
        weight=None if p.delta and channel else sm((window, *heads), F32),
        new_gate=sm((2, tokens, *heads), F32),
        score=sm((window + p.padded_tokens, p.score_columns), F32),
        read=sm((*rows, p.padded_columns) if several else (columns, *rows), F32),
        fold_record=fold_record,
        fold_key=None,
        shared=shared,
        copy=copy,
        encoded=None,
        scale=sm(rows, F32) if p.read_bytes == 1 else None,
        solve_gate=solve_gate,
        again=None,
        either=either,
        state_bar=plgpu.Barrier(num_barriers=c.stages),
        copy_bar=plgpu.Barrier(num_barriers=c.copies) if p.read_dtype is not None else None,
        record_bar=plgpu.Barrier(num_barriers=p.num_chunks) if p.solves_again else None,
        window_bar=plgpu.Barrier(
            num_arrivals=1 + channel + (not p.solves_again), num_barriers=p.num_chunks
        ),
    )
    # The interpreter cannot reshape parts of an array.
    return _pack(found) if p.packs_terms and not mode.interpret else found


@jax.tree_util.register_pytree_node_class
class Packed:
    """Arrays of float32 in one.

    Attributes:
      ref: [n] what has them all.
      shapes: of each, by its name in `Scratch`.
    """

    def __init__(self, ref: Any, shapes: tuple[tuple[str, tuple[int, ...]], ...]):
        self.ref, self.shapes = ref, shapes

    def views(self) -> dict[str, Any]:
        """The arrays by name."""
        found, first = {}, 0
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
_SMALL = ("g", "column", "total", "row_total", "decay", "weight", "solve_gate", "new_gate")
_SMALL += ("score", "read", "scale")


def _pack(scratch: Scratch) -> Scratch:
    every = ((name, getattr(scratch, name)) for name in _SMALL)
    shapes = tuple((name, x.shape) for name, x in every if x is not None)
    length = sum(round_up(math.prod(shape), _APART) for _, shape in shapes)
    packed = Packed(plgpu.SMEM((length,), F32), shapes)
    return scratch._replace(packed=packed, **{name: None for name, _ in shapes})


def _again_types(p: Problem, c: Config) -> Again:
    sm, window = plgpu.SMEM, p.padded_window
    return Again(
        # Read in pairs of elements, from rows in other banks.
        key=sm((window, p.key_dim + 8), F32) if p.has_solve_keys else None,
        system=sm((c.heads, window, window), F32),
        value=sm((BLOCK, TILE), p.value_dtype),
        # A thread has a row: longer ones lie in other banks.
        read=sm((TILE, BLOCK + 2), F32),
        record=sm((window, TILE), F32),
    )


def shared_bytes(problem: Problem, config: Config, mode: Mode) -> int:
    """Shared memory that a program takes; every array is aligned to 1024 bytes."""
    total = 1024  # barriers
    for x in jax.tree.leaves(scratch_types(problem, config, mode)):
        if isinstance(x, plgpu.RefUnion):
            total += max(_bytes(group) for group in x.refs)
        elif not isinstance(x, plgpu.Barrier):
            total += _bytes(x)
    return total


def _bytes(arrays: Any) -> int:
    sizes = (math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(arrays))
    return sum(round_up(size, 1024) for size in sizes)
