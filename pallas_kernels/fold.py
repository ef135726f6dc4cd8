"""The fold: the window's records go into the state, tile by tile, on tensor cores.

S <- S diag(exp G) + U^T K, with both operands split into bf16 terms, so that it is as exact as
float32 sums. The tile is read in the same pass: from the low-precision copy that was just made of
it, where there is one.
"""

from __future__ import annotations

import functools
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
    load,
    operand_rows,
    state_rows,
    store,
    zeros,
)
from pallas_kernels.problem import BLOCK, TILE, blocks
from pallas_kernels.products import (
    ACC,
    RECORDS,
    RHS,
    as_operand,
    split,
    term_pairs,
    transpose,
)
from pallas_kernels.program import F32
from pallas_kernels.read_copy import encode, largest_magnitude, make_scale
from pallas_kernels.solve import Solve
from pallas_kernels.tf32 import READS


def gather(reads: tuple[jax.Array, ...], i: Any, read: Any) -> tuple[jax.Array, ...]:
    """`reads` with that of tile i."""
    return tuple(jnp.where(i == tile, read, other) for tile, other in enumerate(reads))


class Fold(Solve):
    """The part of a step's program that folds; what reads a tile is the step's."""

    # The ring's [B, R, H, P] that has the records.
    records: Any

    def read_folded(self, ref: Any, i: Any) -> jax.Array | None:
        """Read the columns from tile i at `ref`; returned for several tokens, else stored."""
        raise NotImplementedError

    def no_reads(self) -> tuple[jax.Array, ...]:
        """Where the reads of several tokens are gathered, for each tile; () for one token."""
        if self.p.num_tokens < 2:
            return ()
        layout = READS if self.copy is None else ACC
        return (zeros((TILE, self.p.padded_columns), layout),) * self.c.num_tiles

    def store_reads(self, reads: tuple[jax.Array, ...], ref: Any) -> None:
        """Store what was gathered."""
        for i, read in enumerate(reads):
            store(self.tile_rows(ref, i=i), read)

    def fold(self) -> None:
        """Fold the window into the state, tile by tile, and read the columns in the same pass."""
        p, sm, stages = self.p, self.sm, self.c.stages
        if sm.row_total is not None:
            total = self.over_rows(self.load_heads(sm.total))
            store(sm.row_total, zeros(self.shape, self.layout) + total)
        self.make_fold_keys()
        plgpu.commit_smem()

        @pl.loop(0, self.c.num_tiles, init_carry=self.no_reads())
        def reads(i: jax.Array, reads: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            slot = lax.rem(i, stages)
            if self.c.num_tiles > stages:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile has left its slot
                self.meet()  # all threads have read it
                following = i - 1 + stages

                @pl.when((i > 0) & (following < self.c.num_tiles))
                def _() -> None:
                    place = lax.rem(following, stages)
                    plgpu.copy_gmem_to_smem(
                        self.tile(following), sm.state.at[place], sm.state_bar.at[place]
                    )

            records = self.load_records(i) if p.brings_records_late else {}
            updates = None
            if p.solves_again:
                updates = [self.operand_terms(u) for u in self.solve_tile(slot, i)]
            else:
                plgpu.barrier_wait(sm.state_bar.at[slot])
            for n in range(len(self.parts)):
                self.fold_part(slot, i, n, records, updates)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(sm.state.at[slot], self.tile(i))
            if self.copy is not None:
                self.encode_tile(slot, i)
            read = None
            if p.num_tokens:  # as later steps will
                read = self.read_folded(sm.state.at[slot] if self.copy is None else sm.encoded, i)
            return reads if read is None else gather(reads, i, read)

        if reads:
            self.store_reads(reads, sm.read_folded)
        if self.copy is not None and sm.scale is not None:
            store(self.rows_of(self.copy.scale, self.b), load(sm.scale, self.layout))

    @property
    def parts(self) -> list[Any]:
        """Key channels that are folded at once."""
        n, width = self.p.key_dim, self.c.channels
        return [pl.ds(first, width) for first in range(0, n, width)]

    def load_records(self, i: Any) -> dict[int, jax.Array]:
        """The window's records in the rows of state tile i from device memory, by sixteens."""
        found = {}
        for first in blocks(self.p.padded_window):
            eights = self.load_rows(self.records, i, first, RECORDS)
            if len(eights) == 1:
                eights.append(zeros((8, TILE), RECORDS).astype(eights[0].dtype))
            found[first] = beside(eights, RECORDS, interpret=self.mode.interpret, axis=0)
        return found

    def fold_part(
        self, slot: Any, i: Any, part: int, records: dict[int, jax.Array], updates: Any
    ) -> None:
        """Fold some key channels of tile i.

        `records` has those that are not in shared memory, `updates` terms of the solved ones.
        """
        p, sm = self.p, self.sm
        channels = self.parts[part]
        place = sm.state.at[slot, :, channels]
        state = load(place, ACC, optimized=True)
        if p.channel:
            total = load(sm.total.at[channels], ACC.reduce(0))
            total = broadcast(total, state.shape, (1,), ACC)
        elif sm.row_total is None:
            total = sm.total[lax.div(i * TILE, self.c.rows)]
        else:
            total = load(self.tile_rows(sm.row_total, i=i), ACC.reduce(1))
            total = broadcast(total, state.shape, (0,), ACC)
        state = jnp.where(self.fresh, 0.0, state * total)
        for n, first in enumerate(blocks(p.padded_window)):
            terms = updates[n] if updates else self.record_terms(first, i, records.get(first))
            state = self.add_products(state, first, terms, channels)
        store(place, state, optimized=True)
        if sm.amax is not None:  # here, as the next part takes these registers
            store(sm.amax.at[part], largest_magnitude(state, interpret=self.mode.interpret))

    def encode_tile(self, slot: Any, i: Any) -> None:
        """Make and write tile i of the new copy, in the place of the state once that has left."""
        p, sm, layout, interpret = self.p, self.sm, state_rows(self.p.key_dim), self.mode.interpret

        scale = None
        if sm.scale is not None:
            found = [load(sm.amax.at[n], layout.reduce(1)) for n in range(len(self.parts))]
            scale = make_scale(functools.reduce(jnp.maximum, found), p.read_dtype)
            store(self.tile_rows(sm.scale, i=i), scale)
        values = []
        width = tf32.width(p.key_dim)
        for first in range(0, p.key_dim, width):
            if first:
                self.meet()  # not sooner, for the registers that it takes
            part = load(sm.state.at[slot, :, pl.ds(first, width)], layout)
            values.append(encode(part, scale, p.read_dtype, layout, interpret=interpret))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # all threads have read it, too
        store(sm.encoded, beside(values, layout, interpret=interpret))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sm.encoded, self.copy_tile(i))

    def make_fold_keys(self) -> None:
        """The window's keys as bf16 terms in shared memory, dead ones zero."""
        p, sm, layout = self.p, self.sm, operand_rows()
        masked = {}
        for first in blocks(p.padded_window):
            keys = load((sm.gate if p.channel else sm.key).at[pl.ds(first, BLOCK)], layout)
            masked[first] = self.mask_dead(keys, first, layout)
        self.meet()  # the terms may lie where the keys lay
        for first, keys in masked.items():
            here = pl.ds(first, BLOCK)
            if sm.fold_key is None:
                store(sm.key.at[here], keys)
            else:
                terms = split(keys.astype(F32), p.key_terms, away=True)
                for b, term in enumerate(terms):
                    store(sm.fold_key.at[b, here], term)

    def fold_records(self, first: int, i: Any, given: jax.Array | None) -> jax.Array:
        """The 16 weighted records from `first` on, in the rows of state tile i; dead ones zero."""
        here = pl.ds(first, BLOCK)
        if given is None:
            given = load(self.tile_rows(self.sm.record, here, i=i), RECORDS)
        records = given.astype(F32)
        if self.sm.weight is not None:
            records = records * self.tile_weights(here, i)
        return self.mask_dead(records, first, RECORDS)

    def tile_weights(self, here: Any, i: Any) -> jax.Array:
        """Weights of 16 records in the rows of state tile i, which may be of several heads."""
        shape, rows, layout = (BLOCK, TILE), self.c.rows, RECORDS

        def of_head(head: Any) -> jax.Array:
            weight = load(self.sm.weight.at[here, head], layout.reduce(1))
            return broadcast(weight, shape, (0,), layout)

        if self.c.heads == 1:
            return of_head(0)
        head = lax.div(i * TILE, rows)
        weights = of_head(head)
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        for other in self.other_heads:
            known = jnp.minimum(head + other, self.c.heads - 1)
            begins = (head + other) * rows - i * TILE
            weights = jnp.where(column >= begins, of_head(known), weights)
        return weights

    def mask_dead(self, x: jax.Array, first: int, layout: Any) -> jax.Array:
        """Zero the dead ones of the records [16 m, n] from `first` on, whatever they hold."""
        index = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=layout)
        return jnp.where(index + first < self.length, x, jnp.zeros((), x.dtype))

    def record_terms(self, first: int, i: Any, given: jax.Array | None) -> list[jax.Array]:
        """[64, 16] weighted records from `first` on in the rows of state tile i, as bf16 terms."""
        records = self.fold_records(first, i, given)
        if self.mode.interpret:
            records = records.T
        else:
            records = transpose(records)
        return self.operand_terms(records)

    def operand_terms(self, records: jax.Array) -> list[jax.Array]:
        """bf16 terms of [64, 16] records in `ACC`, as the fold's products take them."""
        if not (self.mode.wgmma or self.mode.interpret):
            records = as_operand(records)
        return split(records, 3, away=True)

    def add_products(self, state: jax.Array, first: int, terms: Any, channels: Any) -> jax.Array:
        """Part of state tile i plus the product of 16 records and their keys, term by term."""
        p, sm, here = self.p, self.sm, pl.ds(first, BLOCK)
        if sm.fold_key is None:
            keys = [sm.key.at[here, channels]]
        else:
            keys = [sm.fold_key.at[b, here, channels] for b in range(p.key_terms)]
        pairs = term_pairs(p.key_terms)
        if self.mode.interpret:  # it has no warp-level products
            for a, b in pairs:
                state = state + terms[a].astype(F32) @ load(keys[b], operand_rows()).astype(F32)
            return state
        if not self.mode.wgmma:
            for a, b in pairs:
                state = plgpu.mma(state, terms[a], load(keys[b], RHS))
            return state

        def accumulate(acc: Any) -> None:
            for a, b in pairs:
                plgpu.wgmma(acc, terms[a], keys[b])
            plgpu.wgmma_wait(0)

        return pl.run_state(accumulate)(plgpu.ACC.init(state))
