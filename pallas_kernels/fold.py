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

from pallas_kernels.layouts import broadcast, copy_rows, load, operand_rows, store, zeros
from pallas_kernels.problem import BLOCK, TILE, blocks
from pallas_kernels.products import ACC, LHS, RHS, split, term_pairs
from pallas_kernels.program import F32
from pallas_kernels.read_copy import encode, load_tile
from pallas_kernels.solve import Solve


def gather(reads: tuple[jax.Array, ...], i: Any, read: Any) -> tuple[jax.Array, ...]:
    """`reads` with that of tile i."""
    return tuple(jnp.where(i == tile, read, other) for tile, other in enumerate(reads))


class Fold(Solve):
    """The part of a step's program that folds; what reads a tile is the step's."""

    def column(self, c: int, layout: Any) -> jax.Array:
        """Column c as the window's end sees it, [N]."""
        raise NotImplementedError

    def read_tile(self, state: jax.Array, i: Any, columns: list[jax.Array], layout: Any) -> None:
        """S r for the rows of tile i and each column r of one token."""
        raise NotImplementedError

    def multiply_tile(self, ref: Any) -> jax.Array:
        """S r for the rows of the tile at `ref` and each column r of several tokens."""
        raise NotImplementedError

    def no_reads(self) -> tuple[jax.Array, ...]:
        """Where the reads of several tokens are gathered, for each tile; () for one token."""
        if self.p.num_tokens < 2:
            return ()
        return (zeros((TILE, self.p.padded_columns), ACC),) * self.c.num_tiles

    def store_reads(self, reads: tuple[jax.Array, ...], ref: Any) -> None:
        """Store what was gathered."""
        for i, read in enumerate(reads):
            store(self.tile_rows(ref, i=i), read)

    def fold(self) -> None:
        """Fold the window into the state, tile by tile, and read the columns in the same pass."""
        p, sm, stages = self.p, self.sm, self.c.stages
        operand = operand_rows()
        if sm.row_total is not None:
            total = self.over_rows(self.load_heads(sm.total))
            store(sm.row_total, zeros(self.shape, self.layout) + total)
        self.make_fold_keys(operand)
        plgpu.commit_smem()

        @pl.loop(0, self.c.num_tiles, init_carry=self.no_reads())
        def reads(i: jax.Array, reads: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            slot = lax.rem(i, stages)
            if not p.solves_again:
                self.make_fold_records(0, i, operand)
            if self.c.num_tiles > stages:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile has left its slot
                following = i - 1 + stages

                @pl.when((i > 0) & (following < self.c.num_tiles))
                def _() -> None:
                    place = lax.rem(following, stages)
                    plgpu.copy_gmem_to_smem(
                        self.tile(following), sm.state.at[place], sm.state_bar.at[place]
                    )

            plgpu.barrier_wait(sm.state_bar.at[slot])
            if p.solves_again:
                self.solve_tile(slot, i)
                self.make_fold_records(0, i, operand)
            state = load(sm.state.at[slot], ACC, optimized=True)
            shape = (TILE, p.key_dim)
            if p.channel:
                total = broadcast(load(sm.total, ACC.reduce(0)), shape, (1,), ACC)
            elif sm.row_total is None:
                total = sm.total[lax.div(i * TILE, self.c.rows)]
            else:
                total = load(self.tile_rows(sm.row_total, i=i), ACC.reduce(1))
                total = broadcast(total, shape, (0,), ACC)
            state = jnp.where(self.fresh, 0.0, state * total)
            for first in blocks(p.padded_window):
                if first:
                    plgpu.commit_smem()  # all threads have used the records before
                    self.make_fold_records(first, i, operand)
                if self.mode.wgmma:
                    accumulate = functools.partial(self.accumulate, first)
                    state = pl.run_state(accumulate)(plgpu.ACC.init(state))
                else:
                    state = self.add_products(state, first)
            store(sm.state.at[slot], state, optimized=True)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(sm.state.at[slot], self.tile(i))
            if self.copy is not None:
                self.encode_tile(state, i)
                read = self.read_encoded(i)
            elif p.num_tokens == 1:
                columns = [self.column(c, ACC.reduce(0)) for c in range(p.num_columns)]
                self.read_tile(state, i, columns, ACC)
            elif p.num_tokens:
                read = self.multiply_tile(sm.state.at[slot])
            return gather(reads, i, read) if reads else reads

        self.store_reads(reads, sm.read_folded)
        if self.copy is not None and sm.scale is not None:
            store(self.rows_of(self.copy.scale, self.b), load(sm.scale, self.layout))

    def encode_tile(self, state: jax.Array, i: Any) -> None:
        """Make and write tile i of the new copy, in the place of the state once that has left."""
        sm = self.sm
        values, scale = encode(state, self.p.read_dtype, ACC)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        store(sm.encoded, values)
        if scale is not None:
            store(self.tile_rows(sm.scale, i=i), scale)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sm.encoded, self.copy_tile(i))

    def read_encoded(self, i: Any) -> jax.Array | None:
        """Read the columns from tile i of the new copy, as later steps will."""
        p, sm = self.p, self.sm
        if p.num_tokens == 1:
            layout = copy_rows(p.key_dim, p.read_bytes)[1]
            columns = [self.column(c, layout.reduce(0)) for c in range(p.num_columns)]
            tile = load_tile(sm.encoded, p.read_dtype, p.key_dim, self.mode.interpret)
            self.read_tile(tile, i, columns, layout)
        elif p.num_tokens:
            return self.multiply_tile(sm.encoded)
        return None

    def make_fold_records(self, first: int, i: Any, layout: Any) -> None:
        """16 weighted records from `first` on in the rows of state tile i, as bf16 terms."""
        records = self.fold_records(first, i, layout)
        for term, part in enumerate(split(records, 3, away=self.p.num_tokens > 1)):
            store(self.sm.fold_record.at[term], part)
        plgpu.commit_smem()

    def make_fold_keys(self, layout: Any) -> None:
        """The window's keys as bf16 terms in shared memory, dead ones zero."""
        p, sm = self.p, self.sm
        masked = {}
        for first in blocks(p.padded_window):
            keys = load((sm.gate if p.channel else sm.key).at[pl.ds(first, BLOCK)], layout)
            masked[first] = self.mask_dead(keys, first, layout)
        plgpu.commit_smem()  # the terms may lie where the keys lay
        for first, keys in masked.items():
            here = pl.ds(first, BLOCK)
            if sm.fold_key is None:
                store(sm.key.at[here], keys)
            else:
                terms = split(keys.astype(F32), p.key_terms, away=p.num_tokens > 1)
                for b, term in enumerate(terms):
                    store(sm.fold_key.at[b, here], term)

    def fold_records(self, first: int, i: Any, layout: Any) -> jax.Array:
        """The 16 weighted records from `first` on, in the rows of state tile i; dead ones zero."""
        here = pl.ds(first, BLOCK)
        records = load(self.tile_rows(self.sm.record, here, i=i), layout).astype(F32)
        if self.sm.weight is not None:
            records = records * self.tile_weights(here, i, layout)
        return self.mask_dead(records, first, layout)

    def tile_weights(self, here: Any, i: Any, layout: Any) -> jax.Array:
        """Weights of 16 records in the rows of state tile i, which may be of several heads."""
        shape, rows = (BLOCK, TILE), self.c.rows

        def of_head(head: Any) -> jax.Array:
            weight = load(self.sm.weight.at[here, head], layout.reduce(1))
            return broadcast(weight, shape, (0,), layout)

        if self.c.heads == 1:
            return of_head(0)
        head = lax.div(i * TILE, rows)
        weights = of_head(head)
        others = 0 if rows % TILE == 0 else (TILE - 1) // rows + (TILE % rows != 0)
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        for other in range(1, others + 1):
            known = jnp.minimum(head + other, self.c.heads - 1)
            begins = (head + other) * rows - i * TILE
            weights = jnp.where(column >= begins, of_head(known), weights)
        return weights

    def mask_dead(self, x: jax.Array, first: int, layout: Any) -> jax.Array:
        """Zero the dead ones of the 16 records [16, n] from `first` on, whatever they hold."""
        index = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=layout)
        return jnp.where(index + first < self.length, x, jnp.zeros((), x.dtype))

    def accumulate(self, first: int, acc: Any) -> None:
        """Add the product of 16 records and their keys to an accumulator (Hopper)."""
        p, sm, here = self.p, self.sm, pl.ds(first, BLOCK)
        for a, b in term_pairs(p.key_terms):
            records = sm.fold_record.at[a].transpose((1, 0))
            plgpu.wgmma(acc, records, sm.fold_key.at[b, here])
        plgpu.wgmma_wait(0)

    def add_products(self, state: jax.Array, first: int) -> jax.Array:
        """State tile plus the product of 16 records and their keys, term by term."""
        p, sm, here = self.p, self.sm, pl.ds(first, BLOCK)
        for a, b in term_pairs(p.key_terms):
            records = sm.fold_record.at[a]
            keys = sm.key.at[here] if sm.fold_key is None else sm.fold_key.at[b, here]
            if self.mode.interpret:  # it has no warp-level products
                records, keys = (load(x, operand_rows()).astype(F32) for x in (records, keys))
                state = state + records.T @ keys
            else:
                records, keys = load(records.transpose((1, 0)), LHS), load(keys, RHS)
                state = plgpu.mma(state, records, keys)
        return state
