"""Updates of a window, solved again from its raw records: the delta rule beside a read copy.

The updates in the ring were computed from the copy; a fold of them would feed its rounding back
into the recurrence. So a fold solves, with the float32 checkpoint S and G_i = g_1 + ... + g_i,

    u_i = beta_i (v_i - S (exp(G_i) k_i) - sum_{j<i} <k_j, exp(G_i - G_j) k_i> u_j)

The products with S are a tensor-core product for each state tile; what is left is local to a state
row, by forward substitution. Nothing here depends on the format of the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts import broadcast, decay, load, record_rows, spread, store, zeros
from pallas_kernels.problem import BLOCK, CHUNK, TILE, Config, Mode, Problem, blocks
from pallas_kernels.products import (
    ACC,
    LHS,
    RHS,
    SUMS,
    multiply,
    multiply_rows,
    operand_layouts,
    rows_layout,
    split,
    term_pairs,
    tile_terms,
    transpose_sums,
)
from pallas_kernels.program import F32, Program
from pallas_kernels.read_copy import ReadCopy
from pallas_kernels.scratch import Scratch


class Solve(Program):
    """The part of a step's program that solves for the updates of a window."""

    # Of the row: where it stands, and whether its checkpoint counts as zero.
    start: jax.Array
    length: jax.Array
    fresh: jax.Array

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

    def copy_tile(self, i: Any) -> Any:
        """Tile i of the read copy in device memory."""
        assert self.copy is not None
        return self.copy.values.at[self.b, pl.ds(self.first_row + i * TILE, TILE)]

    def slot(self, j: int) -> jax.Array:
        """Slot of record j of the window."""
        return lax.rem(self.start + j // 8 * 8, self.p.capacity) + j % 8

    def prepare_solve(self, value: Any) -> None:
        """What the systems of all state rows share, from the keys and gates of the window.

        Args:
          value: the ring's, [B, R, H, P] in device memory, which is read later.
        """
        p = self.p
        self.value = value
        if p.channel:
            self.make_decays()
        else:
            self.make_gates()
            if p.has_solve_keys:
                self.make_solve_keys()
        plgpu.commit_smem()
        if p.key_terms == 1:
            self.multiply_system()
        else:
            self.make_system()
        plgpu.commit_smem()  # all threads have read the window
        if p.channel:
            self.make_solve_keys()

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
        store(sm.solve_since.at[head], self.exp(since, layout))
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
        """Terms of the keys that are multiplied with the state; dead ones may be anything."""
        p, sm = self.p, self.sm
        since = zeros((p.key_dim,), self.channels)
        for first in blocks(p.padded_window):
            block = range(first, min(first + BLOCK, p.window))
            keys = {j: load(sm.key.at[j], self.channels).astype(F32) for j in block}
            decays = {j: load(sm.gate.at[j], self.channels) for j in block} if p.channel else {}
            for j, key in keys.items():
                if decays:
                    since = since + decays[j]
                    key = key * self.exp(since, self.channels)
                for b, term in enumerate(split(key, p.key_terms, away=True)):
                    store(sm.solve_key.at[b, j, pl.ds(0, p.key_dim)], term)

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
                plgpu.commit_smem()  # every warp has all of it
                for place, value in zip(places, decayed, strict=True):
                    store(place, value)

    def make_system(self) -> None:
        """The same in float32, channel by channel."""
        p, sm = self.p, self.sm
        shape, columns = (BLOCK, p.key_dim), self.block.reduce(0)
        live = jnp.minimum(self.length, p.window)

        def spread_rows(ref: Any) -> jax.Array:
            return broadcast(load(ref, columns).astype(F32), shape, (1,), self.block)

        @pl.loop(0, self.c.heads)
        def _(head: jax.Array) -> None:
            for first in blocks(p.padded_window):
                row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=self.block) + first

                def advance(
                    pair: jax.Array, keys: jax.Array, first: int = first, row: Any = row
                ) -> Any:
                    """The block's keys before a record as it sees them, its own among them."""
                    ahead = [pair * 2 + n for n in range(2)]
                    own = [spread_rows(sm.key.at[i]) for i in ahead]
                    gates = [spread_rows(sm.solve_decay.at[i]) for i in ahead if p.channel]
                    found = []
                    for n, i in enumerate(ahead):
                        if p.channel:
                            keys = keys * gates[n]
                        found.append(jnp.sum(keys * own[n], axis=1))
                        keys = jnp.where(row == i, own[n], keys)
                    for i, scores in zip(ahead, found, strict=True):
                        place = sm.system.at[head, i, pl.ds(first, BLOCK)]
                        if not p.channel:
                            scores = scores * load(place, self.block.reduce(1))
                        store(place, scores)
                    return keys

                start = zeros(shape, self.block)
                lax.fori_loop(jnp.int32(first // 2), lax.div(live + 1, 2), advance, start)

    def solve_tile(self, slot: Any, i: Any) -> None:
        """The updates of the window's records in the rows of state tile i, once that is there."""
        sm = self.sm
        early = self.load_values(i, 0)
        plgpu.barrier_wait(sm.state_bar.at[slot])
        for first in blocks(self.p.padded_window):

            @pl.when(first < self.length)
            def _(first: int = first) -> None:
                values = self.load_values(i, first) if first else early
                for n, value in values.items():
                    store(sm.solve_value.at[pl.ds(n, 8)], value)
                self.read_keys(slot, first)
                plgpu.commit_smem()
                self.substitute(i, first)
                plgpu.commit_smem()

    def load_values(self, i: Any, first: int) -> dict[int, jax.Array]:
        """Raw values of 16 records in the rows of state tile i, from device memory, by eights."""
        found = range(0, min(BLOCK, self.p.window - first), 8)
        slots = [pl.ds(self.slot(first + n), 8) for n in found]
        layout = spread(8, TILE)
        if self.c.rows % TILE == 0:
            per_head = self.c.rows // TILE
            head = self.head + i // per_head
            rows = pl.ds(self.row_in_head + lax.rem(i, per_head) * TILE, TILE)
            places = [self.value.at[self.b, slot, head, rows] for slot in slots]
        else:
            flat = self.value.reshape(*self.value.shape[:2], -1)
            rows = pl.ds(self.first_row + i * TILE, TILE)
            places = [flat.at[self.b, slot, rows] for slot in slots]
        return {n: load(place, layout) for n, place in zip(found, places, strict=True)}

    def read_keys(self, slot: Any, first: int) -> None:
        """Products of the state tile with 16 keys of the window, some key channels at a time."""
        p, sm = self.p, self.sm
        interpret = self.mode.interpret
        sums = [zeros((TILE, BLOCK), ACC)] * 3
        width = 32 if p.key_dim % 32 == 0 else 16  # what one span of the tile's swizzle holds
        records = pl.ds(first, BLOCK)
        if p.has_solve_keys:
            terms = [sm.solve_key.at[b, records] for b in range(p.key_terms)]
        else:
            terms = [(sm.key if sm.fold_key is None else sm.fold_key.at[0]).at[records]]
        for channel in range(0, p.key_dim, width):
            if channel and p.has_solve_keys:
                plgpu.commit_smem()  # not sooner, for the registers that the terms take
            here = pl.ds(channel, width)
            tile = load(sm.state.at[slot, :, here], LHS, optimized=not interpret)
            state = tile_terms(tile, 3)
            factors = [load(term.at[:, here].transpose((1, 0)), RHS) for term in terms]
            for a, b in term_pairs(p.key_terms):
                operands = state[a], factors[b]
                sums[a] = multiply(sums[a], *operands, (LHS, RHS), interpret=interpret)
        read = jnp.where(self.fresh, 0.0, sums[0] + (sums[1] + sums[2]))
        read = transpose_sums(read, interpret=interpret)
        store(sm.solved.at[records, pl.ds(0, TILE)], read)

    def substitute(self, i: Any, first: int) -> None:
        """Forward substitution in the rows of state tile i, a thread each, for 16 records."""
        p, sm = self.p, self.sm
        layout = spread(TILE, vector=1)

        def record(j: Any) -> Any:
            return sm.solved.at[j, pl.ds(0, TILE)]

        def score(later: Any, j: Any) -> jax.Array:
            return self.of_tile(lambda head: sm.system[head, later, j], i, layout)

        chunks = jnp.minimum(self.length, first + BLOCK) + CHUNK - 1

        @pl.loop(jnp.int32(first // CHUNK), lax.div(chunks, CHUNK))
        def _(chunk: jax.Array) -> None:
            here = [chunk * CHUNK + n for n in range(CHUNK)]

            def add_chunk(earlier: jax.Array, sums: tuple[jax.Array, ...]) -> Any:
                for n in range(CHUNK):
                    j = earlier * CHUNK + n
                    update = load(record(j), layout)
                    sums = tuple(
                        s + update * score(later, j) for s, later in zip(sums, here, strict=True)
                    )
                return sums

            sums = lax.fori_loop(0, chunk, add_chunk, (zeros((TILE,), layout),) * CHUNK)
            updates: list[jax.Array] = []
            for n, j in enumerate(here):
                value = load(sm.solve_value.at[j - first], layout).astype(F32)
                read = load(record(j), layout)
                if not p.channel:
                    read = read * self.of_tile(lambda head, j=j: sm.solve_since[head, j], i, layout)
                total = sums[n]
                for m, update in enumerate(updates):
                    total = total + update * score(j, here[m])
                beta = self.of_tile(lambda head, j=j: sm.solve_beta[j, head], i, layout)
                update = beta * (value - read - total)
                updates.append(jnp.where(j < self.length, update, 0.0))
                store(record(j), updates[n])

    def of_tile(self, of_head: Callable[[Any], jax.Array], i: Any, layout: Any) -> jax.Array:
        """What depends on the head, for the rows of state tile i, which may be of several."""
        if self.c.heads == 1:
            return of_head(0)
        rows = self.c.rows
        head = lax.div(i * TILE, rows)
        if rows % TILE == 0:
            return of_head(head)
        row = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=layout) + i * TILE
        found = zeros((TILE,), layout) + of_head(head)
        for other in range(1, (TILE - 1) // rows + (TILE % rows != 0) + 1):
            known = jnp.minimum(head + other, self.c.heads - 1)
            found = jnp.where(row >= (head + other) * rows, of_head(known), found)
        return found
