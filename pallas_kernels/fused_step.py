"""The decode step as one kernel: append, decays, scores, evaluation, and the fold of rows due.

A program is one warpgroup with the heads `Config.heads` of one key head of one batch row. Its state
tiles stream through shared memory, and everything but the products with key vectors is local to a
state row, so that programs never wait for each other:

    scores   <k_j, r> of the window's and the new keys with every new q (and k, delta rule)
    reads    S r for the same vectors, one pass over the state tiles
    rows     replay of the window, the triangular solve, and the output, a thread for each row

A row whose window is full first folds: tile by tile S <- S diag(exp G) + U^T K on tensor cores,
with the operands split into bf16 terms, written back in place, and read in the same pass. Whether
to fold is read from the pointer in device memory, program by program.

Decays are kept as exponentials of sums of log-decays over segments that meet at the end of the
window (all at most 1), so products of them neither overflow nor lose small gates behind large ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.configs import choose, why_not
from pallas_kernels.fold import Fold
from pallas_kernels.layouts import (
    broadcast,
    copy_rows,
    is_replicated,
    load,
    state_rows,
    store,
    zeros,
)
from pallas_kernels.problem import (
    BLOCK,
    CHUNK,
    TILE,
    Config,
    Mode,
    Problem,
    blocks,
    programs_per_row,
)
from pallas_kernels.products import (
    ACC,
    LHS,
    multiply,
    operand_layouts,
    split,
    term_pairs,
    terms,
)
from pallas_kernels.program import F32
from pallas_kernels.read_copy import ReadCopy, load_tile
from pallas_kernels.scratch import Scratch, scratch_types


class Ring(NamedTuple):
    """Arrays of the ring as Refs, updated in place; None where the recurrence has no use for it.

    Attributes:
      log_decay: [B, R, H] or [B, R, H, N] float32.
      key: [B, R, G, N].
      value: [B, R, H, P], additive rule, or where there is a read copy.
      beta: [B, R, H] float32, as `value`.
      update: [B, R, H, P] float32, delta rule.
    """

    log_decay: Any
    key: Any
    value: Any
    beta: Any
    update: Any


class Rows(NamedTuple):
    """[B] each: what the pointer says of a row; int32, but for `fresh`.

    Attributes:
      start: slot of the oldest committed record, a multiple of 8.
      length: committed records.
      num_new: how many of the T tokens are real; a row with 0 is left untouched.
      fresh: bool, whether the checkpoint counts as zero, whatever it holds.
    """

    start: Any
    length: Any
    num_new: Any
    fresh: Any


class Step(Fold):
    """One program of the step; its methods are the stages in the order in which they run."""

    def __init__(
        self,
        problem: Problem,
        config: Config,
        mode: Mode,
        state: Any,
        copy: ReadCopy | None,
        ring: Ring,
        rows: Rows,
        inputs: Any,
        output: Any,
        scratch: Scratch,
    ):
        super().__init__(problem, config, mode, state, copy, scratch)
        self.ring, self.rows, self.inputs, self.output = ring, rows, inputs, output

    def read_pointer(self) -> None:
        """Where this row stands, from device memory."""
        self.start, self.length, self.fresh = (
            ref[self.b] for ref in (self.rows.start, self.rows.length, self.rows.fresh)
        )
        # More records than the window holds would be lost without a word: NaN instead.
        self.outrun = jnp.where(self.length > self.p.window, jnp.nan, 0.0)
        if not self.mode.masked:
            self.num_new = self.p.num_tokens

    def start_state(self) -> None:
        """Start the copies of the first state tiles."""
        for i in range(self.c.stages):
            plgpu.copy_gmem_to_smem(self.tile(i), self.sm.state.at[i], self.sm.state_bar.at[i])

    def start_copy(self) -> None:
        """Start the copies of the first tiles of the read copy."""
        for i in range(self.c.copies):
            plgpu.copy_gmem_to_smem(self.copy_tile(i), self.sm.copy.at[i], self.sm.copy_bar.at[i])

    def load_tokens(self) -> list[tuple[Any, jax.Array]]:
        """Start loading the new tokens, as (place in shared memory, value) pairs.

        Too little for bulk copies: each would cost the host a descriptor at every launch.
        """
        p, sm, b = self.p, self.sm, self.b
        q, k, v, g, _ = self.inputs
        loads = []
        for t in range(p.num_tokens):
            loads += [
                (sm.q.at[t], load(q.at[b, t, self.group], self.channels)),
                (sm.k.at[t], load(k.at[b, t, self.group], self.channels)),
                (sm.v.at[t], load(self.rows_of(v, b, t), self.layout)),
            ]
            if p.channel:
                loads.append((sm.g.at[t], load(g.at[b, t, self.head], self.channels)))
        if self.copy is not None and sm.scale is not None:
            loads.append((sm.scale, load(self.rows_of(self.copy.scale, b), self.layout)))
        return loads

    def start_window(self) -> None:
        """Start the copies of the committed records, in chunks, live ones only."""
        p, sm, b = self.p, self.sm, self.b

        def start_records(slots: Any, here: Any, bar: Any) -> None:
            def start(ring: Any, place: Any) -> None:
                plgpu.copy_gmem_to_smem(self.rows_of(ring, b, slots), place.at[here], bar)

            if p.solves_again:
                self.branch(
                    lambda: start(self.ring.value, sm.again.value),
                    lambda: start(self.ring.update, sm.record),
                )
            else:
                start(self.ring.update if p.delta else self.ring.value, sm.record)

        for chunk in range(p.num_chunks):

            @pl.when(self.length > chunk * CHUNK)
            def _(chunk: int = chunk) -> None:
                bar = sm.window_bar.at[chunk]
                slots, here = pl.ds(self.slot(chunk * CHUNK), CHUNK), pl.ds(chunk * CHUNK, CHUNK)
                plgpu.copy_gmem_to_smem(
                    self.ring.key.at[b, slots, self.group], sm.key.at[here], bar
                )
                start_records(slots, here, bar)
                if p.channel:
                    plgpu.copy_gmem_to_smem(
                        self.ring.log_decay.at[b, slots, self.head], sm.gate.at[here], bar
                    )

    def wait_window(self) -> None:
        """Wait for the records of the window."""
        for chunk in range(self.p.num_chunks):

            @pl.when(self.length > chunk * CHUNK)
            def _(chunk: int = chunk) -> None:
                plgpu.barrier_wait(self.sm.window_bar.at[chunk])

    def weigh_records(self) -> None:
        """Weights of the records, decay of the checkpoint, and the gates of the new tokens.

        The weight of a record is its decay to the window's end times its beta. All loads come
        first, so that they wait for device memory once.
        """
        p, sm, b = self.p, self.sm, self.b
        tokens, order = range(p.num_tokens), range(p.window - 1, -1, -1)
        decays = betas = None
        if p.num_tokens:
            *_, g, beta = self.inputs
            new_betas = [self.load_gate(beta, b, t) for t in tokens]
            new_decays = [] if p.channel else [self.load_gate(g, b, t) for t in tokens]
        if not p.channel:
            decays = {j: self.load_gate(self.ring.log_decay, b, self.slot(j)) for j in order}
        if not p.delta:
            betas = {j: self.load_gate(self.ring.beta, b, self.slot(j)) for j in order}
        if p.num_tokens:
            for t, value in enumerate(new_betas):
                self.store_heads(value, sm.new_gate, 1, t)
            for t, value in enumerate(new_decays):
                self.store_heads(value, sm.new_gate, 0, t)
        since = self.constant(0.0) + self.outrun
        for j in order:
            weight = self.constant(1.0)
            if decays is not None:
                weight = jnp.exp(since)
                since = since + jnp.where(j < self.length, decays[j], 0.0)
            if betas is not None:
                weight = weight * betas[j]
            if self.weighs_records:
                self.store_heads(weight, sm.weight, j)
        if decays is not None:
            total = jnp.exp(since)
            self.store_heads(total, sm.total)
            if self.mode.fold:
                store(sm.row_total, zeros(self.shape, self.layout) + self.over_rows(total))

    def decay_keys(self) -> None:
        """Channel decay: the window's keys as seen from its end, in place of its log-decays."""
        sm = self.sm
        since = zeros((self.p.key_dim,), self.channels) + self.outrun
        for first in reversed(blocks(self.p.padded_window)):
            block = range(first, min(first + BLOCK, self.p.window))
            # All loads before the first store: the compiler cannot tell that they do not overlap.
            decays = {j: load(sm.gate.at[j], self.channels) for j in block}
            keys = {j: load(sm.key.at[j], self.channels).astype(F32) for j in block}
            if is_replicated(self.p.key_dim):
                plgpu.commit_smem()
            for j in reversed(block):
                store(sm.gate.at[j], keys[j] * jnp.exp(since))
                since = since + jnp.where(j < self.length, decays[j], 0.0)
        store(sm.total, jnp.exp(since))

    def make_columns(self) -> None:
        """q and k of the new tokens in float32, by channel times their decay since the window.

        For several tokens also as operands of tensor-core products with the state, which by channel
        is yet to decay over the window, unless that was folded.
        """
        p, sm = self.p, self.sm
        since = window = None
        if p.channel:
            since = zeros((p.key_dim,), self.channels)
            window = jnp.where(self.due, 1.0, load(sm.total, self.channels))
        for t in range(p.num_tokens):
            if since is not None:
                since = since + load(sm.g.at[t], self.channels)
            for c in self.columns_of(t):
                value = load(self.raw_column(c), self.channels).astype(F32)
                if since is not None:
                    value = value * jnp.exp(since)
                store(sm.column.at[c], value)
                if sm.operand is not None:
                    rest = value if window is None else value * window
                    here = pl.ds(0, p.key_dim)
                    for b, term in enumerate(split(rest, p.key_terms)):
                        store(sm.operand.at[b, c, here], term)

    def columns_of(self, t: int) -> list[int]:
        """Columns that belong to new token t: its q, and its k under the delta rule."""
        return [t, self.p.num_tokens + t] if self.p.delta else [t]

    def raw_column(self, c: int) -> Any:
        """The q or k that is column c."""
        tokens = self.p.num_tokens
        return self.sm.q.at[c] if c < tokens else self.sm.k.at[c - tokens]

    def column(self, c: int, layout: Any) -> jax.Array:
        """Column c as the window's end sees it, [N]."""
        ref = self.raw_column(c) if self.sm.column is None else self.sm.column.at[c]
        return load(ref, layout).astype(F32)

    def read_tile(self, state: jax.Array, i: Any, columns: list[jax.Array], layout: Any) -> None:
        """S r for the rows of tile i and each column r of one token."""
        for c, column in enumerate(columns):
            column = broadcast(column, (TILE, self.p.key_dim), (1,), layout)
            store(self.tile_rows(self.sm.read, c, i=i), jnp.sum(state * column, axis=1))

    def multiply_tile(self, ref: Any, i: Any) -> None:
        """The same for the columns of several tokens, on tensor cores; the tile is at `ref`."""
        p, sm = self.p, self.sm
        lhs, rhs = operand_layouts(p.key_dim)
        narrow = lhs is LHS and not self.mode.interpret and p.read_dtype is None
        state = terms(load(ref, lhs, optimized=narrow), p.read_terms)
        # Sums of their own, as each product of a sum waits for the one before.
        sums = [zeros((TILE, p.padded_columns), ACC)] * 3
        columns = sm.operand.at[:, :, pl.ds(0, p.key_dim)]
        factors = [load(columns.at[b].transpose((1, 0)), rhs) for b in range(p.key_terms)]
        for a, b in term_pairs(p.key_terms, p.read_terms):
            n = a if p.read_dtype is None else a + b
            sums[n] = multiply(sums[n], state[a], factors[b], interpret=self.mode.interpret)
        store(self.tile_rows(sm.read, i=i), sums[0] + (sums[1] + sums[2]))

    def reads(self) -> list[jax.Array]:
        """What `read_tile` or `multiply_tile` found, for each column."""
        p, found = self.p, self.sm.read
        if p.num_tokens == 1:
            places = [found.at[c] for c in range(p.num_columns)]
        else:
            every = (slice(None),) * len(self.shape)
            places = [found.at[(*every, c)] for c in range(p.num_columns)]
        reads = [load(place, self.layout) for place in places]
        if self.sm.scale is not None:
            scale = load(self.sm.scale, self.layout)
            reads = [read * scale for read in reads]
        return reads

    def read_state(self) -> None:
        """Stream the tiles of the state, or of its copy, past the columns."""
        p, sm = self.p, self.sm
        if self.copy is None:
            tiles, arrived, stages = sm.state, sm.state_bar, self.c.stages
            tile_at, layout = self.tile, state_rows(p.key_dim)
        else:
            tiles, arrived, stages = sm.copy, sm.copy_bar, self.c.copies
            tile_at, layout = self.copy_tile, copy_rows(p.key_dim, p.read_bytes)[1]

        def load_state(ref: Any) -> jax.Array:
            if self.copy is None:
                return load(ref, layout)
            return load_tile(ref, p.read_dtype, p.key_dim, self.mode.interpret)

        columns = []
        if p.num_tokens == 1:
            columns = [self.column(c, layout.reduce(0)) for c in range(p.num_columns)]
        if p.num_tokens == 1 and p.channel:
            columns = [column * load(sm.total, layout.reduce(0)) for column in columns]

        @pl.loop(0, self.c.num_tiles)
        def _(i: jax.Array) -> None:
            slot = lax.rem(i, stages)
            plgpu.barrier_wait(arrived.at[slot])
            if p.num_tokens == 1:
                self.read_tile(load_state(tiles.at[slot]), i, columns, layout)
            else:
                self.multiply_tile(tiles.at[slot], i)
            if self.c.num_tiles > stages:
                plgpu.commit_smem()  # all threads have read the tile

                @pl.when(i + stages < self.c.num_tiles)
                def _() -> None:
                    plgpu.copy_gmem_to_smem(tile_at(i + stages), tiles.at[slot], arrived.at[slot])

    def score_window(self) -> None:
        """<k_j, r> of the window's keys and each column."""
        p, sm = self.p, self.sm
        for first in blocks(p.padded_window):
            here = pl.ds(first, BLOCK)
            keys = load((sm.gate if p.channel else sm.key).at[here], self.block).astype(F32)
            for c in range(p.num_columns):
                self.score(c, here, keys, self.column(c, self.block.reduce(0)))

    def score(self, c: int, here: Any, keys: jax.Array, column: jax.Array) -> None:
        """<k, r> of 16 keys and column c."""
        column = broadcast(column, (BLOCK, self.p.key_dim), (1,), self.block)
        store(self.sm.score.at[c, here], jnp.sum(keys * column, axis=1))

    def score_new(self) -> None:
        """<k_i, r> of the new keys and each column, decayed from one to the other by channel."""
        p, sm = self.p, self.sm
        here = pl.ds(p.padded_window, BLOCK)
        if not p.channel or p.num_tokens == 1:
            if p.num_tokens == 1:
                key = load(sm.k.at[0], self.block.reduce(0))
                keys = broadcast(key, (BLOCK, p.key_dim), (1,), self.block).astype(F32)
            else:
                keys = load(sm.k, self.block).astype(F32)
            for c in range(p.num_columns):
                column = self.raw_column(c) if p.channel or sm.column is None else sm.column.at[c]
                self.score(c, here, keys, load(column, self.block.reduce(0)).astype(F32))
            return
        for t in range(p.num_tokens):
            since = zeros((p.key_dim,), self.channels)
            for i in range(t, -1, -1):
                key = load(sm.k.at[i], self.channels).astype(F32)
                store(sm.pair.at[i], key * jnp.exp(since))
                since = since + load(sm.g.at[i], self.channels)
            plgpu.commit_smem()
            keys = load(sm.pair, self.block)
            for c in self.columns_of(t):
                self.score(
                    c, here, keys, load(self.raw_column(c), self.block.reduce(0)).astype(F32)
                )
            plgpu.commit_smem()  # all threads have read the keys

    def replay(self) -> list[jax.Array]:
        """Sum over the window's records of score times weighted record, for each column."""
        p, sm = self.p, self.sm

        def add_chunk(chunk: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            for i in range(CHUNK):
                j = chunk * CHUNK + i
                live = j < self.length
                record = load(sm.record.at[j], self.layout).astype(F32)
                if self.weighs_records:
                    record = record * self.over_rows(self.load_heads(sm.weight, j))
                record = jnp.where(live, record, 0.0)
                scores = [jnp.where(live, sm.score[c, j], 0.0) for c in range(p.num_columns)]
                sums = tuple(s + record * x for s, x in zip(sums, scores, strict=True))
            return sums

        sums = (zeros(self.shape, self.layout),) * p.num_columns
        return list(lax.fori_loop(0, (self.length + CHUNK - 1) // CHUNK, add_chunk, sums))

    def finish(self, folded: bool) -> None:
        """Updates and outputs of the new tokens, row by row."""
        p, sm = self.p, self.sm
        tokens = p.num_tokens
        reads = self.reads()
        if not folded:
            reads = [jnp.where(self.fresh, 0.0, read) for read in reads]
            if not p.channel:
                total = self.over_rows(self.load_heads(sm.total))
                reads = [read * total for read in reads]
            reads = [a + b for a, b in zip(reads, self.replay(), strict=True)]
        since = self.constant(0.0)
        updates: list[jax.Array] = []
        for t in range(tokens):
            beta = self.over_rows(self.load_heads(sm.new_gate, 1, t))
            value = load(sm.v.at[t], self.layout).astype(F32)
            query, *key = (reads[c] for c in self.columns_of(t))
            if not p.channel:
                since = since + self.load_heads(sm.new_gate, 0, t)
                decay = self.over_rows(jnp.exp(since))
                query, key = query * decay, [k * decay for k in key]
            between = self.decays_to(t)
            if p.delta:
                value = value - key[0]
                for i in range(t):
                    value = value - updates[i] * self.pair_score(tokens + t, i, between)
            updates.append(value * beta)
            for i in range(t + 1):
                query = query + updates[i] * self.pair_score(t, i, between)
            if self.mode.masked:
                query = jnp.where(t < self.num_new, query, 0.0)
            self.write_output(t, query)
            if self.mode.append:
                self.append(t, folded, updates[t])

    def decays_to(self, t: int) -> dict[int, jax.Array]:
        """Scalar decay: decay from each new token i < t to t, for each row."""
        if self.p.channel:
            return {}
        found = {}
        since = self.constant(0.0)
        for i in range(t - 1, -1, -1):
            since = since + self.load_heads(self.sm.new_gate, 0, i + 1)
            found[i] = self.over_rows(jnp.exp(since))
        return found

    def pair_score(self, c: int, i: int, between: dict[int, jax.Array]) -> jax.Array:
        """Decayed score of column c and new key i."""
        score = self.sm.score[c, self.p.padded_window + i]
        return between[i] * score if i in between else score

    def append(self, t: int, folded: bool, update: jax.Array) -> None:
        """Record new token t, with what the rule keeps of it, behind the committed ones."""
        p, sm, b, ring = self.p, self.sm, self.b, self.ring
        first = self.start + self.length
        if folded:
            first = (first + 7) // 8 * 8

        value = load(sm.v.at[t], self.layout) if p.keeps_raw_values else None

        @(pl.when(t < self.num_new) if self.mode.masked else lambda keep: keep())
        def _() -> None:
            slot = lax.rem(first + t, p.capacity)
            if p.delta:
                store(self.rows_of(ring.update, b, slot), update)
            if value is not None:
                store(self.rows_of(ring.value, b, slot), value)
            if not p.channel:
                self.store_gate(self.load_heads(sm.new_gate, 0, t), ring.log_decay, b, slot)
            if p.keeps_raw_values:
                self.store_gate(self.load_heads(sm.new_gate, 1, t), ring.beta, b, slot)

            @pl.when(self.leads_group)
            def _() -> None:
                store(ring.key.at[b, slot, self.group], load(sm.k.at[t], self.channels))

            if p.channel:

                @pl.when(self.leads_head)
                def _() -> None:
                    kept = ring.log_decay.at[b, slot, self.head]
                    store(kept, load(sm.g.at[t], self.channels))

    def write_output(self, t: int, value: jax.Array) -> None:
        """Write the output of new token t."""
        store(self.rows_of(self.output, self.b, t), value.astype(self.p.value_dtype))

    def work(self) -> None:
        """Everything, for a row that has new tokens (or, without tokens, is to be folded)."""
        p, sm = self.p, self.sm
        if self.copy is None:
            self.start_state()
        tokens = self.load_tokens() if p.num_tokens else []
        self.read_pointer()
        self.due = self.mode.fold & (self.length + self.num_new > p.window)
        if self.copy is not None:
            self.branch(self.start_state, self.start_copy)
        self.start_window()
        self.weigh_records()
        for place, value in tokens:
            store(place, value)
        if p.channel:
            self.wait_window()
            if p.solves_again:
                self.branch(self.solve_window, lambda: None)
            self.decay_keys()
        if sm.column is not None:
            if is_replicated(p.key_dim):
                plgpu.commit_smem()
            self.make_columns()
        plgpu.commit_smem()

        def with_fold() -> None:
            if not p.channel:
                self.wait_window()
                if p.solves_again:
                    self.solve_window()
            self.fold()
            after(folded=True)

        def without_fold() -> None:
            self.read_state()
            if not p.channel:
                self.wait_window()
            self.score_window()
            after(folded=False)

        def after(folded: bool) -> None:
            if not p.num_tokens:
                return
            self.score_new()
            plgpu.commit_smem()
            self.finish(folded)

        self.branch(with_fold, without_fold)

    def branch(self, with_fold: Callable[[], None], without_fold: Callable[[], None]) -> None:
        """What a row does that is due, or is not; decided here where all rows do the same."""
        if not self.p.num_tokens:
            with_fold()
        elif not self.mode.fold:
            without_fold()
        else:
            pl.when(self.due)(with_fold)
            pl.when(jnp.logical_not(self.due))(without_fold)

    def solve_window(self) -> None:
        """What the fold's solve needs of the raw records, before others take their place."""
        self.prepare_solve(self.ring.log_decay, self.ring.beta)

    def idle(self) -> None:
        """A row without new tokens: zero outputs, everything else stays."""
        for t in range(self.p.num_tokens):
            self.write_output(t, zeros(self.shape, self.layout))

    def run(self) -> None:
        """The whole program."""
        if self.mode.masked:
            self.num_new = self.rows.num_new[self.b]
            active = self.num_new > 0
            pl.when(active)(self.work)
            pl.when(jnp.logical_not(active))(self.idle)
        else:
            self.work()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def launch(
    problem: Problem,
    mode: Mode,
    checkpoint: Any,
    ring: Ring,
    rows: Rows,
    inputs: Any,
    config: Config | None = None,
    copy: ReadCopy | None = None,
) -> jax.Array | None:
    """Run a step over Refs: the checkpoint [B, H P, N], its copy and the ring, updated in place.

    Args:
      problem: shapes; `why_not(problem, mode)` must be None.
      mode: which parts of the step to run.
      checkpoint: Ref of [B, H P, N] float32.
      ring: Refs.
      rows: arrays.
      inputs: (q, k, v, g, beta), or () for a flush of the rows whose `num_new` is not 0.
      config: None for the one that `choose` finds.
      copy: Refs of the read copy, None without one.

    Returns:
      Outputs [B, T, H, P] in the dtype of v; None for a flush.

    Raises:
      ValueError: no kernel for the problem.
    """
    reason = why_not(problem, mode)
    if reason:
        raise ValueError(reason)
    config = config or choose(problem, mode)
    assert config is not None
    p = problem

    def body(*args: Any) -> None:
        refs, scratch = args[:-1], args[-1].unpacked()
        given = refs[4 : 4 + len(inputs)]
        output = refs[-1] if p.num_tokens else None
        rows = Rows(*refs[:4])
        Step(p, config, mode, checkpoint, copy, ring, rows, given, output, scratch).run()

    body.__name__ = "replay_step" if p.num_tokens else "replay_fold"
    output = jax.ShapeDtypeStruct((p.batch, p.num_tokens, p.num_heads, p.value_dim), p.value_dtype)
    return plgpu.kernel(
        body,
        out_type=output if p.num_tokens else (),
        scratch_types=(scratch_types(p, config, mode),),
        grid=(p.batch * programs_per_row(p, config),),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(*rows, *inputs)
