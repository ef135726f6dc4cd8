"""Updates of a window, solved again from its raw records: the delta rule beside a read copy.

The updates in the ring were computed from the copy; a fold of them would feed its rounding back
into the recurrence. So a fold solves, with the float32 checkpoint S and G_i = g_1 + ... + g_i,

    u_i = beta_i (v_i - S (exp(G_i) k_i) - sum_{j<i} <k_j, exp(G_i - G_j) k_i> u_j)

The products with S are a tensor-core product for each state tile; what is left is local to a state
row: products with the inverse of the system, which all rows of a head share. Nothing here depends
on the format of the copy.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tf32
from pallas_kernels.layouts import (
    beside,
    broadcast,
    decay,
    load,
    meet,
    record_rows,
    spread,
    store,
    system_rows,
    zeros,
)
from pallas_kernels.problem import BLOCK, TILE, Config, Mode, Problem, blocks
from pallas_kernels.products import (
    ACC,
    LHS,
    PAIR,
    RHS,
    SUMS,
    as_left,
    dot_pairs,
    multiply,
    multiply_rows,
    operand_layouts,
    rows_layout,
    split,
    term_pairs,
)
from pallas_kernels.program import F32, Program
from pallas_kernels.read_copy import ReadCopy
from pallas_kernels.scratch import SINCE, WEIGHT, Scratch
from pallas_kernels.tf32 import READS


class Solve(Program):
    """The part of a step's program that solves for the updates of a window."""

    # Of the row: where it stands, and whether its checkpoint counts as zero.
    start: jax.Array
    length: jax.Array
    fresh: jax.Array
    # The ring's [B, R, H, P] that has the raw values.
    values: Any

    def __init__(
        self,
        problem: Problem,
        config: Config,
        mode: Mode,
        state: Any,
        copy: ReadCopy | None,
        sm: Scratch,
    ):
        super().__init__(problem, config, state)
        self.mode, self.copy, self.sm = mode, copy, sm
        self.block = record_rows(problem.key_dim)

    def meet(self) -> None:
        """Wait for all threads, whose stores the others see then."""
        meet(interpret=self.mode.interpret)

    def copy_tile(self, i: Any) -> Any:
        """Tile i of the read copy in device memory."""
        assert self.copy is not None
        return self.copy.values.at[self.b, pl.ds(self.first_row + i * TILE, TILE)]

    def slot(self, j: Any) -> jax.Array:
        """Slot of record j of the window."""
        if isinstance(j, int):  # the same, as `start` is a multiple of 8: eight share an address
            return lax.rem(self.start + j // 8 * 8, self.p.capacity) + j % 8
        return lax.rem(self.start + j, self.p.capacity)

    def prepare_solve(self) -> None:
        """What the systems of all state rows share, from the keys and gates of the window."""
        p = self.p
        if p.channel:
            self.make_decays()
        else:
            self.make_gates()
        self.meet()
        if p.key_terms == 1:
            self.multiply_system()
        else:
            self.make_system()
        self.meet()  # all threads have read the window
        self.invert()
        self.meet()  # other threads split what one has made
        self.split_inverse()
        if p.channel:
            self.make_solve_keys()  # in the place of the system

    def make_gates(self) -> None:
        """Scalar decay, for each head: of the checkpoint up to each record, and between records.

        The latter as the system [i, j] of records j < i, whose scores are yet to come. Sums grow
        from one record to the other, so that small gates are not lost; dead records do not decay.
        """
        p, c, sm = self.p, self.c, self.sm
        shape = (c.heads, p.padded_window) if c.heads > 1 else (p.padded_window,)
        layout = spread(*shape, vector=1)
        index = plgpu.broadcasted_iota(jnp.int32, shape, len(shape) - 1, layout=layout)
        since = between = zeros(shape, layout)
        weights = sm.weight.at[:, 0] if c.heads == 1 else sm.weight.transpose((1, 0))
        weight = load(weights, layout)
        found = []
        for i in range(p.window):
            gate = sm.decay[i, 0] if c.heads == 1 else load(sm.decay.at[i], layout.reduce(1))
            if c.heads > 1:
                gate = broadcast(gate, shape, (0,), layout)
            since = since + jnp.where(index >= i, gate, 0.0)
            between = between + jnp.where(index < i, gate, 0.0)
            found.append(between)
        # Stores last: the compiler cannot tell that no load is of what they write.
        head: Any = 0 if c.heads == 1 else slice(None)
        store(sm.solve_gate.at[SINCE, head], self.exp(since, layout))
        store(sm.solve_gate.at[WEIGHT, head], weight)
        for i, between in enumerate(found):
            store(sm.system.at[head, i], self.exp(between, layout))

    def exp(self, log: jax.Array, layout: Any) -> jax.Array:
        """exp of log-decays."""
        return decay(log, layout, interpret=self.mode.interpret)

    def make_decays(self) -> None:
        """Channel decay: of each record by itself."""
        sm = self.sm
        for first in blocks(self.p.padded_window):
            block = range(first, min(first + BLOCK, self.p.window))
            decays = {j: load(sm.gate.at[j], self.channels) for j in block}
            for j, log in decays.items():
                store(sm.solve_decay.at[j], self.exp(log, self.channels))

    def make_solve_keys(self) -> None:
        """The keys as the checkpoint sees them, by channel; dead ones may be anything."""
        p, sm = self.p, self.sm
        since = zeros((p.key_dim,), self.channels)
        for first in blocks(p.padded_window):
            block = range(first, min(first + BLOCK, p.window))
            keys = {j: load(sm.key.at[j], self.channels).astype(F32) for j in block}
            decays = {j: load(sm.gate.at[j], self.channels) for j in block}
            for j, key in keys.items():
                since = since + decays[j]
                decayed = key * self.exp(since, self.channels)
                store(sm.solve_key.at[j, pl.ds(0, p.key_dim)], decayed)

    def multiply_system(self) -> None:
        """<k_j, k_i> of the records j < i, decayed from one to the other: exactly, of bf16 keys."""
        p, sm = self.p, self.sm
        for first in blocks(p.padded_window):
            rows = pl.ds(first, BLOCK)
            keys = load(sm.key.at[rows], rows_layout(p.key_dim))
            for other in blocks(first + BLOCK):
                columns = pl.ds(other, BLOCK)
                earlier = sm.key.at[columns].transpose((1, 0))
                factor = load(earlier, operand_layouts(p.key_dim)[1])
                scores = multiply_rows(keys, factor, interpret=self.mode.interpret)
                places = [sm.system.at[head, rows, columns] for head in range(self.c.heads)]
                decayed = [load(place, SUMS) * scores for place in places]
                self.meet()  # every warp has all of it
                for place, value in zip(places, decayed, strict=True):
                    store(place, value)

    def make_system(self) -> None:
        """The same in float32, channel by channel."""
        p, sm = self.p, self.sm
        shape, layout = (BLOCK, p.key_dim), system_rows(p.key_dim)
        live = jnp.minimum(self.length, p.window)

        def spread_rows(ref: Any) -> jax.Array:
            return broadcast(load(ref, layout.reduce(0)).astype(F32), shape, (1,), layout)

        @pl.loop(0, self.c.heads)
        def _(head: jax.Array) -> None:
            for first in blocks(p.padded_window):
                row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + first

                def advance(
                    pair: jax.Array, keys: jax.Array, first: int = first, row: Any = row
                ) -> Any:
                    """The block's keys as a record sees them that come before it."""
                    ahead = [pair * 2 + n for n in range(2)]
                    own = [spread_rows(sm.key.at[i]) for i in ahead]
                    gates = [spread_rows(sm.solve_decay.at[i]) for i in ahead if p.channel]
                    found = []
                    for n, i in enumerate(ahead):
                        if p.channel:
                            keys = jnp.where(row < i, keys * gates[n], keys)
                        found.append((keys, own[n]))
                    place = sm.system.at[head, pl.ds(pair * 2, 2), pl.ds(first, BLOCK)]
                    scores = dot_pairs(found, layout, interpret=self.mode.interpret)
                    if not p.channel:
                        scores = scores * load(place, PAIR)
                    store(place, scores)
                    return keys

                start = load(sm.key.at[pl.ds(first, BLOCK)], layout).astype(F32)
                lax.fori_loop(jnp.int32(first // 2), lax.div(live + 1, 2), advance, start)

    def invert(self) -> None:
        """The inverse of each head's system, times beta, by substitution: a thread has a column."""
        p, c, sm = self.p, self.c, self.sm
        shape = (c.heads, p.padded_window) if c.heads > 1 else (p.padded_window,)
        layout = spread(*shape, vector=1)
        column = plgpu.broadcasted_iota(jnp.int32, shape, len(shape) - 1, layout=layout)
        every: Any = 0 if c.heads == 1 else slice(None)

        def of_heads(ref: Any, *index: Any) -> jax.Array:
            """ref[index] of an array whose dimension of heads is `every`."""
            if c.heads == 1:
                return ref[index]
            return broadcast(load(ref.at[index], layout.reduce(1)), shape, (0,), layout)

        for first in blocks(p.padded_window):
            block = range(first, min(first + BLOCK, p.window))

            def add(j: jax.Array, sums: Any, block: range = block) -> Any:
                row = load(sm.float_inverse.at[every, j], layout)
                return tuple(
                    s + row * of_heads(sm.system, every, i, j)
                    for s, i in zip(sums, block, strict=True)
                )

            sums = (zeros(shape, layout),) * len(block)
            if first:
                sums = lax.fori_loop(jnp.int32(0), jnp.int32(first), add, sums)
            rows: list[jax.Array] = []
            for total, i in zip(sums, block, strict=True):
                for j, row in enumerate(rows, first):
                    total = total + row * of_heads(sm.system, every, i, j)
                beta = of_heads(sm.solve_beta, i, every)
                rows.append(beta * (jnp.where(column == i, 1.0, 0.0) - total))
            for i, row in zip(block, rows, strict=True):
                store(sm.float_inverse.at[every, i], row)

    def split_inverse(self) -> None:
        """The terms of the inverse, as tensor cores take it."""
        sm, n = self.sm, self.p.padded_window
        layout = spread(n, n)
        found = [load(sm.float_inverse.at[head], layout) for head in range(self.c.heads)]
        self.meet()  # the terms take its place
        for head, inverse in enumerate(found):
            for b, term in enumerate(split(inverse, 3, away=True)):
                store(sm.inverse.at[head, b, :, pl.ds(0, n)], term)

    def solve_tile(self, slot: Any, i: Any) -> list[jax.Array]:
        """The updates in the rows of state tile i, once that is there, with their weights.

        [64, 16] for each 16 records, in `ACC`; dead ones zero.
        """
        firsts = blocks(self.p.padded_window)
        values = [self.load_values(i, first) for first in firsts]
        plgpu.barrier_wait(self.sm.state_bar.at[slot])
        reads = [self.read_keys(slot, first) for first in firsts]
        if self.c.heads == 1:
            return self.solve_head(0, values, reads)
        rows = self.c.rows
        head = lax.div(i * TILE, rows)
        found = self.solve_head(head, values, reads)
        row = plgpu.broadcasted_iota(jnp.int32, (TILE, BLOCK), 0, layout=ACC) + i * TILE
        for other in self.other_heads:
            known = jnp.minimum(head + other, self.c.heads - 1)
            solved = self.solve_head(known, values, reads)
            here = row >= (head + other) * rows
            found = [jnp.where(here, x, y) for x, y in zip(solved, found, strict=True)]
        return found

    def solve_head(
        self, head: Any, values: list[jax.Array], reads: list[jax.Array]
    ) -> list[jax.Array]:
        """The updates as if all rows of a state tile were of one head."""
        p, sm, interpret = self.p, self.sm, self.mode.interpret

        def live(first: int, layout: Any) -> jax.Array:
            index = plgpu.broadcasted_iota(jnp.int32, (TILE, BLOCK), 1, layout=layout)
            return index + first < self.length

        gaps: list[list[jax.Array]] = []
        found = []
        for first, value, read in zip(blocks(p.padded_window), values, reads, strict=True):
            here = pl.ds(first, BLOCK)
            if not p.channel:
                since = load(sm.solve_gate.at[SINCE, head, here], READS.reduce(0))
                read = read * broadcast(since, read.shape, (1,), READS)
            gap = jnp.where(live(first, READS), value - read, 0.0)
            terms = split(gap, 3, cut=True)
            gaps.append([as_left(term, interpret=interpret) for term in terms])
            sums = [zeros((TILE, BLOCK), ACC)] * 3
            for other, terms in zip(blocks(first + BLOCK), gaps, strict=True):
                factors = [sm.inverse.at[head, b, here, pl.ds(other, BLOCK)] for b in range(3)]
                factors = [load(factor.transpose((1, 0)), RHS) for factor in factors]
                for a, b in term_pairs(3):
                    operands = terms[a], factors[b]
                    sums[a] = multiply(sums[a], *operands, (LHS, RHS), interpret=interpret)
            update = sums[0] + (sums[1] + sums[2])
            if not p.channel:
                weight = load(sm.solve_gate.at[WEIGHT, head, here], ACC.reduce(0))
                update = update * broadcast(weight, update.shape, (1,), ACC)
            found.append(jnp.where(live(first, ACC), update, 0.0))
        return found

    def load_values(self, i: Any, first: int) -> jax.Array:
        """Raw values of 16 records in the rows of tile i, from device memory, [64, 16] in `READS`.

        Where a window ends before the sixteenth, the others are zero.
        """
        interpret = self.mode.interpret
        values = self.load_rows(self.values, i, first, tf32.TURNED)
        values = [tf32.turn(value.astype(F32), interpret=interpret) for value in values]
        if len(values) == 1:
            values.append(zeros((TILE, 8), READS))
        return beside(values, READS, interpret=interpret)

    def load_rows(self, ref: Any, i: Any, first: int, layout: Any) -> list[jax.Array]:
        """16 records' [B, R, H, P] in the rows of state tile i, from device memory, by eights."""
        found = range(0, min(BLOCK, self.p.window - first), 8)
        slots = [pl.ds(self.slot(first + n), 8) for n in found]
        if self.c.rows % TILE == 0:
            per_head = self.c.rows // TILE
            head = self.head + i // per_head
            rows = pl.ds(self.row_in_head + lax.rem(i, per_head) * TILE, TILE)
            places = [ref.at[self.b, slot, head, rows] for slot in slots]
        else:
            flat = ref.reshape(*ref.shape[:2], -1)
            rows = pl.ds(self.first_row + i * TILE, TILE)
            places = [flat.at[self.b, slot, rows] for slot in slots]
        return [load(place, layout) for place in places]

    def read_keys(self, slot: Any, first: int) -> jax.Array:
        """Products of the state tile with 16 keys of the window, in `READS`."""
        p, sm = self.p, self.sm
        if p.channel:
            terms = [sm.solve_key]
        elif sm.fold_key is None:
            terms = [sm.key]
        else:  # whose sum is exact
            terms = [sm.fold_key.at[b] for b in range(p.key_terms)]
        dtype = F32 if p.key_terms > 1 else p.key_dtype
        found = tf32.TileProducts(p.key_dim, BLOCK, dtype, interpret=self.mode.interpret)
        width = tf32.width(p.key_dim)
        records = pl.ds(first, BLOCK)
        for channel in range(0, p.key_dim, width):
            if channel and channel % 64 == 0:
                self.meet()  # not sooner, for the registers that the terms take
            here = pl.ds(channel, width)
            *rest, columns = [load(term.at[records, here], found.columns) for term in terms]
            for term in reversed(rest):
                columns = columns.astype(F32) + term.astype(F32)
            found.add(load(sm.state.at[slot, :, here], found.rows), columns)
        return jnp.where(self.fresh, 0.0, found.total())
