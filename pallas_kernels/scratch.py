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
    operand: Any  # T > 1: bf16 terms of the columns as the state sees them; of one term, q and k
    apart: Any  # scalar decay, T > 1: decay by the new tokens from one to another
    total: Any  # decay of the checkpoint by the window, for each channel or head
    row_total: Any  # scalar decay: the same for each state row; T > 1: if tiles have several heads
    decay: Any  # scalar decay: log-decay of each record, for each head
    weight: Any  # scalar decay: decay (times beta) of each record
    new_gate: Any  # log-decays of the new tokens, then their betas, for each head
    gates: Any  # None, or weight, total and new_gate one behind the other
    score: Any  # <k_j, r> for each q and each k, window and new records j
    read: Any  # S r for each column r; T > 1: for each row
    read_folded: Any  # T > 1: the same where the row folds
    fold_record: Any  # bf16 terms of 16 weighted records, one tile
    fold_key: Any  # bf16 terms of the keys, where they are not taken as they are
    shared: Any  # None, or gate and key in one place with what is made of them
    copy: Any  # read copy: its tiles in flight
    encoded: Any  # read copy: a tile of the new one
    scale: Any  # 8-bit read copy: for each state row
    again: Any  # read copy under the delta rule: what it takes to solve for updates again
    either: Any  # None, or in one place what a fold needs, encoded in the state's, and copy
    tiles: Any  # None, or state and read in one place
    records: Any  # None, or record and read_folded in one place
    passing: Any  # None, or in one place score, decay, and what a fold needs of the records
    state_bar: Any
    copy_bar: Any
    window_bar: Any

    def unpacked(self, p: Problem) -> Scratch:
        """The same with all that shares a place with others as fields of their own."""
        found, tokens = self, p.num_tokens
        if self.tiles is not None:
            state, read = self.tiles
            found = found._replace(state=state, read=read, read_folded=read)
        if self.records is not None:
            record, read_folded = self.records
            found = found._replace(record=record, read_folded=read_folded)
        if self.passing is not None:
            score, (fold_record, row_total), decay = self.passing
            found = found._replace(
                score=score, fold_record=fold_record, row_total=row_total, decay=decay
            )
        if self.q is None:
            here = pl.ds(0, p.key_dim)
            q, k = (self.operand.at[0, pl.ds(n, tokens), here] for n in (0, tokens))
            found = found._replace(q=q, k=k)
        if self.gates is not None:
            window = p.padded_window
            found = found._replace(
                weight=self.gates.at[pl.ds(0, window)],
                total=self.gates.at[window],
                new_gate=self.gates.at[pl.ds(window + 1, 2 * tokens)],
            )
        if found.read_folded is None:
            found = found._replace(read_folded=found.read)
        if self.either is not None:
            (state, fold_record, *again), encoded, *copy = self.either
            found = found._replace(
                state=state,
                fold_record=fold_record,
                again=again[0] if again else None,
                encoded=encoded,
                copy=copy[0] if copy else None,
            )
        if self.shared is not None:
            window, *decayed, fold_key = self.shared
            *gate, key = window
            found = found._replace(gate=gate[0] if gate else None, key=key, fold_key=fold_key)
            if decayed:
                found = found._replace(column=decayed[0][1])
        return found


class Again(NamedTuple):
    """What it takes to solve for the updates of a window again."""

    value: Any  # raw values of the window
    beta: Any  # for each record and head
    decay: Any  # scalar decay: of each record by itself
    since: Any  # scalar decay: of the checkpoint up to each record
    key: Any  # the keys in float32, by channel times the decay of the checkpoint up to each
    system: Any  # <k_j, k_i> of the window's records j < i, decayed from one to the other
    read: Any  # S k for each row of a tile and 16 of these keys


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
    # Columns that are one bf16 term are q and k themselves, of which 16 rows are scored at once.
    is_term = several and p.key_terms == 1
    vectors = max(BLOCK, round_up(2 * tokens, 8)) if is_term else p.padded_columns
    operand = (p.key_terms, vectors, operand_width(n))
    q = k = None
    if not is_term:
        q = sm((p.token_rows if channel and several else tokens, n), p.key_dtype)
        k = sm((new, n), p.key_dtype)
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
    fold_record: Any = None
    if mode.fold:
        fold_record = sm((3, BLOCK, TILE), bf16, transforms=swizzle)
    copy = either = None
    if p.read_dtype is not None:
        if p.num_tokens:
            copy = sm((c.copies, TILE, n), p.read_dtype, transforms=swizzled(p.read_dtype, n))
        if mode.fold:
            again = (_again_types(p, c),) if p.solves_again else ()
            encoded = sm((TILE, n), p.read_dtype, transforms=swizzled(p.read_dtype, n))
            either = plgpu.RefUnion(
                (state, fold_record, *again), encoded, *([] if copy is None else [copy])
            )
            fold_record = copy = None
        state = None
    record = sm((window, *rows), p.record_dtype)
    score = sm((window + p.padded_tokens, p.score_columns), F32)
    read = sm((*rows, p.padded_columns) if several else (columns, *rows), F32)
    decay = None if channel else sm((window, *heads), F32)
    weight = None if p.delta and channel else sm((window, *heads), F32)
    row_total = None
    if mode.fold and not channel and not (several and c.rows % TILE == 0):
        row_total = sm(rows, F32)
    tiles = records = passing = None
    together = several and p.read_dtype is None
    if together:
        # What tiles gave stays in registers until the last of them is read; records are dead once
        # they are folded, and their log-decays once they are weights. Scores come after the fold.
        tiles = plgpu.RefUnion(state, read)
        state = read = None
        if mode.fold:
            records = plgpu.RefUnion(record, tiles.refs[1])
            passing = plgpu.RefUnion(score, (fold_record, row_total), decay)
            record = score = fold_record = row_total = decay = None
    gates = sm((window + 1 + 2 * tokens, *heads), F32) if several and not channel else None
    return Scratch(
        state=state,
        key=None if shared else key,
        record=record,
        gate=None if shared else gate,
        q=q,
        k=k,
        v=sm((tokens, *rows), p.value_dtype),
        g=sm((tokens, n), F32) if channel else None,
        column=column,
        operand=sm(operand, bf16) if several else None,
        apart=sm((tokens, tokens, *heads), F32) if several and not channel else None,
        total=None if gates else sm((n,) if channel else heads, F32),
        row_total=row_total,
        decay=decay,
        weight=None if gates else weight,
        new_gate=None if gates else sm((2 * tokens, *heads), F32),
        gates=gates,
        score=score,
        read=read,
        read_folded=None,
        fold_record=fold_record,
        fold_key=None,
        shared=shared,
        copy=copy,
        encoded=None,
        scale=sm(rows, F32) if p.read_bytes == 1 else None,
        again=None,
        either=either,
        tiles=tiles,
        records=records,
        passing=passing,
        state_bar=plgpu.Barrier(num_barriers=c.stages),
        copy_bar=plgpu.Barrier(num_barriers=c.copies) if p.read_dtype is not None else None,
        window_bar=plgpu.Barrier(num_arrivals=3 if channel else 2, num_barriers=p.num_chunks),
    )


def _again_types(p: Problem, c: Config) -> Again:
    sm, window = plgpu.SMEM, p.padded_window
    rows = (c.heads, c.rows) if c.heads > 1 else (c.rows,)
    gates = sm((window, c.heads), F32)
    return Again(
        value=sm((window, *rows), p.value_dtype),
        beta=gates,
        decay=None if p.channel else gates,
        since=None if p.channel else gates,
        # Read in pairs of elements, from rows in other banks.
        key=sm((window, p.key_dim + 8), F32),
        system=sm((c.heads, window, window), F32),
        # A thread has a row: longer ones lie in other banks.
        read=sm((TILE, BLOCK + 2), F32),
    )


def shared_bytes(problem: Problem, config: Config, mode: Mode) -> int:
    """Shared memory that a program takes; every array is aligned to 1024 bytes."""
    total = 1024 if problem.read_dtype is None else 2048  # barriers
    for x in jax.tree.leaves(scratch_types(problem, config, mode)):
        if isinstance(x, plgpu.RefUnion):
            total += max(_bytes(group) for group in x.refs)
        elif not isinstance(x, plgpu.Barrier):
            total += _bytes(x)
    return total


def _bytes(arrays: Any) -> int:
    sizes = (math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(arrays))
    return sum(round_up(size, 1024) for size in sizes)
