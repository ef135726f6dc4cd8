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

from pallas_kernels.layouts import broadcast, load, record_rows, spread, store, zeros
from pallas_kernels.problem import BLOCK, CHUNK, TILE, Config, Mode, Problem, blocks
from pallas_kernels.products import ACC, LHS, RHS, multiply, split, term_pairs, tile_terms
from pallas_kernels.program import F32, Program
from pallas_kernels.read_copy import ReadCopy
from pallas_kernels.scratch import BETA, DECAY, SINCE, Scratch


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
        self.value = value
        if not self.p.channel:
            self.make_gates()
        if self.p.has_solve_keys:
            self.make_solve_keys()
        plgpu.commit_smem()
        self.make_system()
        plgpu.commit_smem()  # all threads have read the window

    def make_gates(self) -> None:
        """Scalar decay of the records, for each head; dead records do not decay."""
        since = self.constant(0.0)
        for j in range(self.p.window):
            decay = self.load_heads(self.sm.decay, j)
            since = since + decay
            self.store_heads(jnp.exp(decay), self.sm.solve_gate, DECAY, j)
            self.store_heads(jnp.exp(since), self.sm.solve_gate, SINCE, j)

    def make_solve_keys(self) -> None:
        """The keys that are multiplied with the state; dead ones may be anything."""
        p, sm = self.p, self.sm
        since = zeros((p.key_dim,), self.channels)
        for j in range(p.window):
            key = load(sm.key.at[j], self.channels).astype(F32)
            if p.channel:
                since = since + load(sm.gate.at[j], self.channels)
                key = key * jnp.exp(since)
            store(sm.solve_key.at[j, pl.ds(0, p.key_dim)], key)

    def make_system(self) -> None:
        """<k_j, k_i> of the records j < i, decayed from one to the other, head by head."""
        p, sm = self.p, self.sm
        shape = (BLOCK, p.key_dim)
        live = jnp.minimum(self.length, p.window)

        @pl.loop(0, self.c.heads)
        def _(head: jax.Array) -> None:
            for first in blocks(p.padded_window):
                row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=self.block) + first

                def advance(
                    i: jax.Array, keys: jax.Array, first: int = first, row: Any = row
                ) -> Any:
                    """The block's keys before record i as it sees them, its own among them."""
                    key = load(sm.key.at[i], self.block.reduce(0)).astype(F32)
                    key = broadcast(key, shape, (1,), self.block)
                    if p.channel:
                        decay = jnp.exp(load(sm.gate.at[i], self.block.reduce(0)))
                        keys = keys * broadcast(decay, shape, (1,), self.block)
                    else:
                        keys = keys * sm.solve_gate[DECAY, i, head]
                    place = sm.system.at[head, i, pl.ds(first, BLOCK)]
                    store(place, jnp.sum(keys * key, axis=1))
                    return jnp.where(row == i, key, keys)

                lax.fori_loop(jnp.int32(first), live, advance, zeros(shape, self.block))

    def solve_tile(self, slot: Any, i: Any) -> None:
        """The updates of the window's records in the rows of state tile i, once that is there."""
        sm = self.sm
        layout = spread(8, TILE)
        early = self.load_rows(self.value, i, 0, layout)
        plgpu.barrier_wait(sm.state_bar.at[slot])
        for first in blocks(self.p.padded_window):

            @pl.when(first < self.length)
            def _(first: int = first) -> None:
                values = self.load_rows(self.value, i, first, layout) if first else early
                for n, value in values.items():
                    store(sm.solve_value.at[pl.ds(n, 8)], value)
                self.read_keys(slot, first)
                plgpu.commit_smem()
                self.substitute(i, first)
                plgpu.commit_smem()

    def load_rows(self, ref: Any, i: Any, first: int, layout: Any) -> dict[int, jax.Array]:
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
        return {n: load(place, layout) for n, place in zip(found, places, strict=True)}

    def read_keys(self, slot: Any, first: int) -> None:
        """Products of the state tile with 16 keys of the window, some key channels at a time."""
        p, sm = self.p, self.sm
        interpret = self.mode.interpret
        sums = [zeros((TILE, BLOCK), ACC)] * 3
        width = 32 if p.key_dim % 32 == 0 else 16  # what one span of the tile's swizzle holds
        for channel in range(0, p.key_dim, width):
            if channel and p.has_solve_keys:
                plgpu.commit_smem()  # not sooner, for the registers that the terms take
            here = pl.ds(channel, width)
            tile = load(sm.state.at[slot, :, here], LHS, optimized=not interpret)
            state = tile_terms(jnp.where(self.fresh, 0.0, tile), 3)
            if p.has_solve_keys:
                keys = sm.solve_key
            else:
                keys = sm.key if sm.fold_key is None else sm.fold_key.at[0]
            keys = load(keys.at[pl.ds(first, BLOCK), here].transpose((1, 0)), RHS)
            factors = split(keys, p.key_terms)
            for a, b in term_pairs(p.key_terms):
                operands = state[a], factors[b]
                sums[a] = multiply(sums[a], *operands, (LHS, RHS), interpret=interpret)
        store(sm.solve_read.at[:, pl.ds(0, BLOCK)], sums[0] + (sums[1] + sums[2]))

    def substitute(self, i: Any, first: int) -> None:
        """Forward substitution in the rows of state tile i, a thread each, for 16 records."""
        p, sm = self.p, self.sm
        layout = spread(TILE, vector=1)

        def record(j: Any) -> Any:
            return sm.solved.at[j]

        def gate(kind: int, j: Any) -> jax.Array:
            return self.of_tile(lambda head: sm.solve_gate[kind, j, head], i, layout)

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
                read = load(sm.solve_read.at[:, j - first], layout)
                if not p.channel:
                    read = read * gate(SINCE, j)
                total = sums[n]
                for m, update in enumerate(updates):
                    total = total + update * score(j, here[m])
                update = gate(BETA, j) * (value - read - total)
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
