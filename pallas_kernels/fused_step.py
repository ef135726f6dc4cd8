"""The decode step as one kernel: append, decays, scores, evaluation, and the fold of rows due.

A program is one warpgroup with the heads `Config.heads` of one key head of one batch row. Its state
tiles stream through shared memory, and everything but the products with key vectors is local to a
state row, so that programs never wait for each other:

    scores   <k_j, r> of the window's and the new keys with every new q (and k, delta rule)
    reads    S r for the same vectors, one pass over the state tiles
    rows     replay of the window, the triangular solve, and the output, a thread for each row

A row whose window is full first folds: tile by tile S <- S diag(exp G) + U^T K on tensor cores,
with the operands split into bf16 terms, written back in place, and read in the same pass. Whether
to fold is read from the pointer in device memory, program by program, where `Mode.decides`.

Decays are kept as exponentials of sums of log-decays over segments that meet at the end of the
window (all at most 1), so products of them neither overflow nor lose small gates behind large ones.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tf32
from pallas_kernels.configs import choose, completed, why_not
from pallas_kernels.fold import Fold, gather
from pallas_kernels.layouts import (
    broadcast,
    is_replicated,
    load,
    spread,
    state_rows,
    store,
    system_rows,
    token_rows,
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
    PAIR,
    SUMS,
    column_of,
    dot_pairs,
    multiply,
    multiply_rows,
    operand_layouts,
    plain_layouts,
    rows_layout,
    split,
    sum_terms,
    term_pairs,
    tile_terms,
)
from pallas_kernels.program import F32
from pallas_kernels.read_copy import ReadCopy
from pallas_kernels.scratch import Scratch, places, unpack


class Ring(NamedTuple):
    """Arrays of the ring as Refs, updated in place; None where the recurrence has no use for it.

    Attributes:
      log_decay: [B, R, H] or [B, R, H, N] float32.
      key: [B, R, G, N].
      value: [B, R, H, P], additive rule, or where there is a read copy.
      beta: [B, R, H] float32, as `value`.
      update: [B, R, H, P] `Problem.cached_dtype`, delta rule.
      read_log_decay: [B, R, H, N] `Problem.read_decay_dtype`, where steps read others than folds.
    """

    log_decay: Any
    key: Any
    value: Any
    beta: Any
    update: Any
    read_log_decay: Any


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


class Gates(NamedTuple):
    """What was loaded of the gates of the window's records, eight at a time.

    Attributes:
      betas: empty under the delta rule.
      decays: log-decays, empty with channel decay.
    """

    betas: dict[int, jax.Array]
    decays: dict[int, jax.Array]


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
        self.gates = spread(*((8, config.heads) if config.heads > 1 else (8,)), vector=1)
        # The ring whose rows are the records.
        self.records = ring.update if problem.delta else ring.value
        self.values = ring.value

    def read_pointer(self) -> None:
        """Where this row stands, from device memory."""
        p, mode = self.p, self.mode
        self.start, self.length, self.fresh = (
            ref[self.b] for ref in (self.rows.start, self.rows.length, self.rows.fresh)
        )
        if not mode.masked:
            self.num_new = p.num_tokens
        # More records than the window holds would be lost without a word: NaN instead.
        room = p.window if mode.fold or not mode.append else p.window - self.num_new
        self.outrun = jnp.where(self.length > room, jnp.nan, 0.0)
        decides = mode.fold and mode.decides and p.num_tokens > 0
        self.due = self.length + self.num_new > p.window if decides else mode.fold

    @property
    def first_tiles(self) -> Literal["at once", "by the pointer", "behind the window", "after it"]:
        """When the copies of the first tiles start.

        Bulk copies hold up what is behind them. With channel decay products wait for the window,
        and with many tokens it is large: its copies go ahead then (eight tokens of Mamba-2 in 16
        rows take an H200 35 us before a flush, not 39). A solve has long work to do before it needs
        a tile (a fold of Kimi Linear with an int8 copy takes 474 us, not 503).
        """
        if self.p.solves_again and self.mode.folds_all:
            return "after it"
        if self.p.channel or self.p.num_tokens >= 8:
            return "behind the window"
        return "at once" if self.reads_state else "by the pointer"

    @property
    def reads_state(self) -> bool:
        """Whether tiles are of the state whatever the pointer says."""
        return self.copy is None or self.mode.folds_all

    def start_tiles(self) -> None:
        """Start the copies of the first tiles."""
        if self.reads_state:
            self.start_state()
        else:
            self.branch(self.start_state, self.start_copy)

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
        one = p.num_tokens == 1
        every: Any = 0 if one else pl.ds(0, p.num_tokens)

        def pair(place: Any, source: Any, layout: Any, *shape: int) -> tuple[Any, jax.Array]:
            if not one:  # as wide as it goes; one token's threads may use what they load themselves
                layout = spread(*shape, vector=16 // jnp.dtype(source.dtype).itemsize)
            return place.at[every], load(source, layout)

        vectors = self.channels, p.num_tokens, p.key_dim
        loads = [
            pair(sm.q, q.at[b, every, self.group], *vectors),
            pair(sm.k, k.at[b, every, self.group], *vectors),
        ]
        if not p.brings_records_late:
            rows = self.shape if self.c.heads > 1 else (p.num_tokens, *self.shape)
            loads.append(pair(sm.v, self.rows_of(v, b, every), self.layout, *rows))
        if p.channel:
            loads.append(pair(sm.g, g.at[b, every, self.head], *vectors))
        if self.copy is not None and sm.scale is not None:
            loads.append((sm.scale, load(self.rows_of(self.copy.scale, b), self.layout)))
        return loads

    def start_window(self) -> None:
        """Start the copies of the committed records: all of it, but for what comes apart."""
        p, sm, b, ring = self.p, self.sm, self.b, self.ring
        bar = sm.window_bar

        def copies(log_decay: Any, gate: Any, *records: Any) -> list[Any]:
            found = [(lambda slots: ring.key.at[b, slots, self.group], sm.key, bar)]
            if p.channel:
                found.append((lambda slots: log_decay.at[b, slots, self.head], gate, bar))
            found.extend(records)
            # Or the barrier would not complete.
            assert sum(one is bar for *_, one in found) == p.window_copies(self.c, self.mode)
            return found

        exact = ring.log_decay, sm.gate
        if p.solves_again:  # a fold brings raw values itself
            rounded = ring.read_log_decay, sm.read_gate
            folds = copies(*exact)
            records = self.copy_of_records(sm.record_bar)
            reads = copies(*(exact if p.read_decay_dtype is None else rounded), records)
            self.branch(lambda: self.start_chunks(*folds), lambda: self.start_chunks(*reads))
        else:
            apart = p.brings_records_late or self.records_follow
            records = [] if apart else [self.copy_of_records(bar)]
            self.start_chunks(*copies(*exact, *records))

    def copy_of_records(self, bar: Any) -> tuple[Callable[[Any], Any], Any, Any]:
        """The copy of the records, for `start_chunks`."""
        return lambda slots: self.rows_of(self.records, self.b, slots), self.sm.record, bar

    def start_chunks(self, *copies: tuple[Callable[[Any], Any], Any, Any]) -> None:
        """Start copies of the committed records' slots, in chunks, live ones only.

        Each is (source of slots, array in shared memory, barrier); barriers count dead chunks, too.
        """
        for chunk in range(self.p.num_chunks):
            self.start_chunk(chunk * self.p.chunk, *copies)

    def start_chunk(self, first: Any, *copies: tuple[Callable[[Any], Any], Any, Any]) -> None:
        """The same of one chunk, from record `first` on."""
        slots, here = pl.ds(self.slot(first), self.p.chunk), pl.ds(first, self.p.chunk)

        def start() -> None:
            for source, place, bar in copies:
                plgpu.copy_gmem_to_smem(source(slots), place.at[here], bar)

        def skip() -> None:
            for *_, bar in copies:
                plgpu.barrier_arrive(bar)

        lax.cond(self.length > first, start, skip)

    @property
    def records_follow(self) -> bool:
        """Whether records come in the place of tiles; see `Problem.records_follow`."""
        return self.p.records_follow(self.c, self.mode)

    def start_records_after(self, i: Any) -> None:
        """Start the copies of the records that have a place now that tile i was read."""
        for first, exists in self.p.records_after(self.c, i):

            @pl.when(exists)
            def _(first: Any = first) -> None:
                self.start_chunk(first, self.copy_of_records(self.sm.record_bar))

    def start_late_records(self) -> None:
        """Start the copies of the committed records in the place of keys that were scored."""
        plgpu.commit_smem()  # all threads have scored
        self.start_chunks(self.copy_of_records(self.sm.record_bar))

    def wait_window(self) -> None:
        """Wait for what came of the window, all but records that come apart."""
        plgpu.barrier_wait(self.sm.window_bar)

    def load_new_gates(self) -> dict[int, jax.Array]:
        """Start loading the gates of the new tokens, by where `Scratch.new_gate` has them."""
        b, found = self.b, {}
        for t in range(self.p.num_tokens):
            *_, g, beta = self.inputs
            found[self.new(1, t)] = self.load_gate(beta, b, t)
            if not self.p.channel:
                found[self.new(0, t)] = self.load_gate(g, b, t)
        return found

    def load_gates(self) -> Gates:
        """Start loading the gates of the window; all of them come at once."""
        betas = {} if self.p.delta else self.gates_of_window(self.ring.beta)
        decays = {} if self.p.channel else self.gates_of_window(self.ring.log_decay)
        return Gates(betas, decays)

    def store_decays(self, gates: Gates) -> None:
        """What others need of the gates, for `weigh_records` after a barrier."""
        for first, log in gates.decays.items():
            store(self.gate_rows(self.sm.decay, first), self.live_gates(first, log))

    def weigh_records(self, betas: dict[int, jax.Array]) -> None:
        """Weights of the records, and decay of the checkpoint.

        The weight of a record is its decay to the window's end times its beta. Threads share the
        records; `betas` are empty under the delta rule.
        """
        p, sm = self.p, self.sm
        chunks = [*range(0, p.window, 8)]
        since = {} if p.channel else self.decay_to_end(chunks)
        if sm.weight is None:
            return
        for first in chunks:
            weight = jnp.exp(since[first]) if since else None
            if first in betas:
                beta = self.live_gates(first, betas[first])
                weight = beta if weight is None else weight * beta
            store(self.gate_rows(sm.weight, first), weight)

    def new(self, kind: int, t: int) -> int:
        """Where the log-decay (0) or beta (1) of new token t is."""
        return kind * self.p.num_tokens + t

    @property
    def weighs_late(self) -> bool:
        """Whether gates are on their way until a tile was read, whose products need none."""
        return not self.p.channel and (self.p.num_tokens > 1 or self.p.packs_terms)

    def weigh_late(self, gates: Gates) -> None:
        """All that is made of the gates, where `weighs_late`."""
        self.store_decays(gates)
        self.meet()
        self.weigh_records(gates.betas)
        if self.p.num_tokens > 1:
            self.decay_between()

    def gates_of_window(self, ref: Any) -> dict[int, jax.Array]:
        """A gate [B, R, H] of the window's records, eight at a time, [8, heads]."""
        heads = self.head if self.c.heads == 1 else pl.ds(self.head, self.c.heads)
        return {
            first: load(ref.at[self.b, pl.ds(self.first_slot(first), 8), heads], self.gates)
            for first in range(0, self.p.window, 8)
        }

    def first_slot(self, first: int) -> jax.Array:
        """Slot of the first of eight records; if it is dead, of the first of all.

        That is loaded anyway: gates of dead ones would cost traffic, beside a copy more than a
        hundredth of the step's.
        """
        slot = self.slot(first)
        if self.copy is None or not first:
            return slot
        return jnp.where(self.length > first, slot, self.start)

    def live_gates(self, first: int, value: jax.Array) -> jax.Array:
        """Eight records' gates from `first` on, dead ones zero; waits for them, unlike a load."""
        index = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=self.gates)
        return jnp.where(index + first < self.length, value, 0.0)

    def gate_rows(self, ref: Any, first: int) -> Any:
        """Eight records' values for each head of a shared array [W, heads]."""
        here = pl.ds(first, 8)
        return ref.at[here, 0] if self.c.heads == 1 else ref.at[here]

    def decay_to_end(self, chunks: list[int]) -> dict[int, jax.Array]:
        """Log-decay from each record to the window's end; stores the decay of the checkpoint."""
        shape = (8, self.c.heads) if self.c.heads > 1 else (8,)
        index = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=self.gates)
        since = {first: zeros(shape, self.gates) + self.outrun for first in chunks}
        total = self.gate_at(None) + self.outrun
        for i in range(self.p.window - 1, -1, -1):
            decay = self.gate_at(self.sm.decay, i)
            total = total + decay
            if self.c.heads > 1:
                decay = broadcast(decay, shape, (1,), self.gates)
            for first in chunks:
                if first + 8 <= i:
                    since[first] = since[first] + decay
                elif first < i:
                    since[first] = since[first] + jnp.where(index + first < i, decay, 0.0)
        if self.c.heads == 1:
            self.sm.total[0] = jnp.exp(total)
        else:
            store(self.sm.total, jnp.exp(total))
        return since

    def gate_at(self, ref: Any, *index: Any) -> jax.Array:
        """ref[index] of a shared array [..., heads], for threads that share gates; None is zero."""
        if self.c.heads == 1:
            return jnp.float32(0) if ref is None else ref[(*index, 0)]
        layout = self.gates.reduce(0)
        return zeros((self.c.heads,), layout) if ref is None else load(ref.at[index], layout)

    def decay_keys(self) -> None:
        """Channel decay: the window's keys as seen from its end, in place of its log-decays."""
        if self.p.read_decay_dtype is not None:
            folds, reads = self.sm.gate, self.sm.read_gate
            self.branch(lambda: self.decay_keys_by(folds), lambda: self.decay_keys_by(reads))
        else:
            self.decay_keys_by(self.sm.gate)

    def decay_keys_by(self, gate: Any) -> None:
        """The same by the log-decays at `gate`."""
        p, sm = self.p, self.sm

        def load_block(block: range) -> list[tuple[int, jax.Array, jax.Array]]:
            """Records, with their keys and log-decays."""
            decays = [load(gate.at[j], self.channels).astype(F32) for j in block]
            keys = [load(sm.key.at[j], self.channels).astype(F32) for j in block]
            return [*zip(block, keys, decays, strict=True)]

        def advance(found: Any, since: jax.Array) -> jax.Array:
            for j, key, log in reversed(found):
                store(sm.gate.at[j], key * self.exp(since, self.channels))
                since = since + jnp.where(j < self.length, log, 0.0)
            return since

        # All loads before the first store: the compiler cannot tell that they do not overlap.
        in_place = p.decays_keys_in_place(self.mode)
        every = load_block(range(p.window)) if in_place else []
        if in_place:
            self.meet()

        def advance_block(block: range, since: jax.Array) -> jax.Array:
            if in_place:
                return advance(every[block.start : block.stop], since)
            found = load_block(block)
            if is_replicated(p.key_dim):
                self.meet()
            return advance(found, since)

        since = zeros((p.key_dim,), self.channels) + self.outrun
        if p.packs_terms:  # live ones only
            for first in reversed(range(0, p.window, CHUNK)):
                chunk = range(first, min(first + CHUNK, p.window))
                more = functools.partial(advance_block, chunk)
                since = lax.cond(self.length > first, more, lambda since: since, since)
        else:
            for first in reversed(blocks(p.padded_window)):
                since = advance_block(range(first, min(first + BLOCK, p.window)), since)
        store(sm.total, jnp.exp(since))

    def make_columns(self) -> None:
        """By channel: q and k of the new tokens times their decay since the window, in float32.

        Also as operands of tensor-core products with the state, where there are such; it is yet to
        decay over the window by channel, unless that was folded.
        """
        p, sm = self.p, self.sm
        since = window = None
        if p.channel:
            since = zeros((p.key_dim,), self.channels)
            window = jnp.where(self.due, 1.0, load(sm.total, self.channels))
        for t in range(p.num_tokens):
            if since is not None:
                since = since + self.new_decay(t, self.channels)
            for c in self.columns_of(t):
                value = load(self.raw_column(c), self.channels).astype(F32)
                if since is not None:
                    value = value * self.exp(since, self.channels)
                    store(sm.column.at[c], value)
                if sm.operand is not None:
                    rest = value if window is None else value * window
                    here = pl.ds(0, p.key_dim)
                    terms = [rest] if p.has_float_operand else split(rest, p.key_terms, away=True)
                    for b, term in enumerate(terms):
                        at = (0, b * p.num_columns + c) if p.packs_terms else (b, c)
                        store(sm.operand.at[(*at, here)], term)

    def new_decay(self, t: int, layout: Any) -> jax.Array:
        """Channel decay: the log-decays of new token t, as later steps will read them."""
        return self.read_decay(load(self.sm.g.at[t], layout)).astype(F32)

    def read_decay(self, log: jax.Array) -> jax.Array:
        """Log-decays by channel as the ring has them for steps."""
        dtype = self.p.read_decay_dtype
        return log if dtype is None else jnp.maximum(log, float(jnp.finfo(dtype).min)).astype(dtype)

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

    def tile_operands(self, folded: bool) -> list[jax.Array]:
        """For one token, what tiles of the state, or of its copy, are multiplied by."""
        p, sm = self.p, self.sm
        if p.packs_terms:
            count, layout = p.distinct_columns, self.tile_layouts[1]
            return [load(self.operand(0, here, count), layout) for here in self.tile_parts]
        if p.num_tokens > 1:
            return []
        layout = state_rows(p.key_dim).reduce(0)
        columns = [self.column(c, layout) for c in range(p.num_columns)]
        if p.channel and not folded:
            columns = [column * load(sm.total, layout) for column in columns]
        return columns

    def read_tile(self, ref: Any, i: Any, operands: list[jax.Array]) -> jax.Array | None:
        """S r for the rows of tile i at `ref` and each column r; for one token it is stored."""
        p = self.p
        if p.num_tokens > 1:
            return self.multiply_tile(ref)
        if p.packs_terms:
            self.multiply_tile_once(ref, i, operands)
            return None
        layout = state_rows(p.key_dim)
        state = load(ref, layout)
        for c, column in enumerate(operands):
            column = broadcast(column, (TILE, p.key_dim), (1,), layout)
            store(self.tile_rows(self.sm.read, c, i=i), jnp.sum(state * column, axis=1))
        return None

    def read_folded(self, ref: Any, i: Any) -> jax.Array | None:
        """The same for a tile that was just folded."""
        return self.read_tile(ref, i, self.tile_operands(folded=True))

    def multiply_tile(self, ref: Any) -> jax.Array:
        """The same for the columns of several tokens, on tensor cores; the tile is at `ref`."""
        p, interpret = self.p, self.mode.interpret
        shape = TILE, p.padded_columns
        if p.read_dtype is None:
            operand = self.sm.operand
            found = tf32.TileProducts(
                p.key_dim, p.padded_columns, operand.dtype, interpret=interpret
            )
            # Some channels at a time, for the registers that their terms take.
            width = tf32.width(p.key_dim)
            for first in range(0, p.key_dim, width):
                here = pl.ds(first, width)
                columns = operand.at[0, pl.ds(0, p.padded_columns), here]
                found.add(load(ref.at[:, here], found.rows), load(columns, found.columns))
            return found.total()
        layouts = lhs, rhs = operand_layouts(p.key_dim, p.read_bytes)
        sums = [zeros(shape, ACC)] * 3
        state = tile_terms(load(ref, lhs), p.read_terms, lhs, interpret=interpret)
        factors = [load(self.operand(b, pl.ds(0, p.key_dim)), rhs) for b in range(p.key_terms)]
        for a, b in term_pairs(p.key_terms, p.read_terms):
            for part in state[a]:
                sums[a + b] = multiply(sums[a + b], part, factors[b], layouts, interpret=interpret)
        return sums[0] + (sums[1] + sums[2])

    @property
    def tile_parts(self) -> list[Any]:
        """Key channels of a copy's tile for two sums: each product of one waits for the last."""
        n = self.p.key_dim
        width = n // 2 if n * self.p.read_bytes % 256 == 0 else n
        return [pl.ds(first, width) for first in range(0, n, width)]

    @property
    def tile_layouts(self) -> tuple[Any, Any]:
        """Of the operands, for one token. Lanes read the 16-bit ones as `plgpu.mma` wants them."""
        if self.p.read_bytes == 2:
            return plain_layouts(self.p.distinct_columns)
        return operand_layouts(self.p.key_dim, 1, self.p.distinct_columns)

    def multiply_tile_once(self, ref: Any, i: Any, factors: list[jax.Array]) -> None:
        """One product of a copy's tile with all terms of one token's columns beside each other."""
        p, sm, interpret, layouts = self.p, self.sm, self.mode.interpret, self.tile_layouts
        sums = [zeros((TILE, p.padded_columns), ACC)] * 2
        for n, (here, factor) in enumerate(zip(self.tile_parts, factors, strict=True)):
            tile = load(ref.at[:, here], layouts[0])
            terms = tile_terms(tile, p.read_terms, layouts[0], interpret=interpret)
            for m, part in enumerate(itertools.chain(*terms), n):
                sums[m % 2] = multiply(sums[m % 2], part, factor, layouts, interpret=interpret)
        total = sums[0] + sums[1]
        if p.key_terms == 1:
            for c in range(p.num_columns):
                store(self.tile_rows(sm.read, c, i=i), column_of(total, c, interpret=interpret))
            return
        if p.num_columns == 2 and not interpret:
            both = self.tile_rows(sm.read, slice(None), i=i).transpose((1, 0))
            store(both, sum_terms(total))
            return
        place = plgpu.broadcasted_iota(jnp.int32, total.shape, 1, layout=ACC)
        for c in range(p.num_columns):
            column = place == c
            for term in range(1, p.key_terms):
                column = column | (place == c + term * p.num_columns)
            found = jnp.sum(jnp.where(column, total, 0.0), axis=1)
            store(self.tile_rows(sm.read, c, i=i), found)

    def reads(self, folded: bool) -> list[jax.Array]:
        """What `read_tile` or `multiply_tile` found, for each column."""
        p, found = self.p, self.sm.read_folded if folded else self.sm.read
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

    def read_state(self, gates: Gates) -> list[jax.Array] | None:
        """Stream the tiles of the state, or of its copy, past the columns.

        While the last tile is on its way gates are weighed and keys scored, and for one token and a
        copy records replayed; where they follow the tiles, after all of these. Returns what
        `replay` found then.
        """
        p, sm = self.p, self.sm
        if self.copy is None:
            tiles, arrived, stages = sm.state, sm.state_bar, self.c.stages
            tile_at = self.tile
        else:
            tiles, arrived, stages = sm.copy, sm.copy_bar, self.c.copies
            tile_at = self.copy_tile
        operands = self.tile_operands(folded=False)
        last = self.c.num_tiles - 1

        def read_one(i: Any, reads: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            slot = lax.rem(i, stages)
            if p.num_tokens > 1:

                @pl.when(i == last)
                def _() -> None:
                    if self.weighs_late:
                        self.weigh_late(gates)
                        self.wait_window()
                    self.score_keys(window=True)
                    if p.brings_records_late:
                        self.start_late_records()

            plgpu.barrier_wait(arrived.at[slot])
            read = self.read_tile(tiles.at[slot], i, operands)
            if read is not None:
                reads = gather(reads, i, read)
            if self.c.num_tiles > stages and (p.num_tokens > 1 or i is not last):
                self.meet()  # all threads have read the tile
                if self.records_follow:
                    self.start_records_after(i)

                @pl.when(i + stages < self.c.num_tiles)
                def _() -> None:
                    plgpu.copy_gmem_to_smem(tile_at(i + stages), tiles.at[slot], arrived.at[slot])

            return reads

        if p.packs_terms:
            before_scores = self.c.num_tiles if self.records_follow else last
            if before_scores:
                pl.loop(0, before_scores, init_carry=())(read_one)
            if self.weighs_late:
                self.weigh_late(gates)
            if not p.channel:
                self.wait_window()
            self.score_keys(window=True)
            self.meet()
            if sm.record_bar is not None:
                plgpu.barrier_wait(sm.record_bar)
            found = self.replay()
            if before_scores == last:
                read_one(last, ())
            return found
        reads = pl.loop(0, self.c.num_tiles, init_carry=self.no_reads())(read_one)
        if reads:
            self.meet()  # they may take the place of the tiles
            self.store_reads(reads, sm.read)
        return None

    def score_keys(self, window: bool) -> None:
        """<k, r> of the window's keys, if asked for, and of the new ones, with each column.

        By channel new keys are decayed to the column's token, a key at a time.
        """
        p, sm = self.p, self.sm
        firsts = list(blocks(p.padded_window)) if window else []
        # Sums before the first of them is stored: the compiler cannot tell that no load is of what
        # a store wrote, and a sum alone waits for every exchange between lanes.
        new = []
        if p.packs_terms:
            new = self.score_new_key()
        elif p.channel and p.num_tokens > 1:
            self.score_new_by_channel()
            if firsts and p.score_warps:
                return self.score_window_by_channel(*p.score_warps)
        else:
            firsts.append(p.padded_window)
        if p.has_token_operand:
            self.multiply_keys(firsts)
        else:
            self.sum_scores(firsts)
        for c, scores in enumerate(new):
            store(sm.score.at[pl.ds(p.padded_window, 4), c], scores)

    def sum_scores(self, firsts: list[int]) -> None:
        """The same by sums over channels, of 16 keys from each of `firsts` on."""
        p, sm = self.p, self.sm
        in_pairs = p.channel and p.num_tokens == 1 and p.num_columns == 2
        layout = system_rows(p.key_dim) if in_pairs else self.block
        keys = {}
        for first in firsts:
            if first < p.padded_window:
                of_block = load((sm.gate if p.channel else sm.key).at[pl.ds(first, BLOCK)], layout)
            elif p.num_tokens > 1:
                of_block = load(sm.k, layout)
            else:
                of_block = load(sm.k.at[0], layout.reduce(0))
                of_block = broadcast(of_block, (BLOCK, p.key_dim), (1,), layout)
            keys[first] = of_block.astype(F32)

        def column(c: int, first: int) -> jax.Array:
            is_new = first == p.padded_window
            ref = self.raw_column(c) if is_new or not p.channel else sm.column.at[c]
            column = load(ref, layout.reduce(0)).astype(F32)
            return broadcast(column, (BLOCK, p.key_dim), (1,), layout)

        def score(c: int, first: int) -> jax.Array:
            return jnp.sum(keys[first] * column(c, first), axis=1)

        if in_pairs:  # fewer loads of columns, which are float32, for more lanes that share a sum
            for first, of_block in keys.items():
                pairs = [(of_block, column(c, first)) for c in range(2)]
                scores = dot_pairs(pairs, layout, interpret=self.mode.interpret)
                if first < p.padded_window:
                    index = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=PAIR)
                    scores = jnp.where(index + first < self.length, scores, 0.0)
                here = sm.score.at[pl.ds(first, BLOCK), pl.ds(0, 2)]
                store(here.transpose((1, 0)), scores)
            return

        places = [(c, first) for c in range(p.num_columns) for first in keys]
        for i in range(0, len(places), 8):
            found = [(score(*place), place) for place in places[i : i + 8]]
            for scores, (c, first) in found:
                self.store_scores(scores, first, self.score_at(c))

    def score_window_by_channel(self, row_warps: int, column_warps: int) -> None:
        """The same for the window on tensor cores, with keys and columns that have decayed."""
        p, sm = self.p, self.sm
        for first in range(0, p.padded_window, BLOCK * row_warps):
            for c in range(0, p.num_columns, 8 * column_warps):
                shares = tf32.Shares(row_warps, column_warps, interpret=self.mode.interpret)
                keys, columns = (pl.ds(n, m) for n, m in zip((first, c), shares.shape, strict=True))
                for channel in range(0, p.key_dim, 32):
                    here = pl.ds(channel, 32)
                    rows = load(sm.gate.at[keys, here], shares.rows)
                    shares.add(rows, load(sm.column.at[columns, here], shares.columns))
                scores = self.mask_dead(shares.total(), first, shares.layout)
                store(sm.score.at[keys, columns], scores)

    def multiply_keys(self, firsts: list[int]) -> None:
        """The same on tensor cores, for bf16 keys and columns: their products are exact."""
        p, sm = self.p, self.sm
        if firsts:
            factor = load(self.operand(0, pl.ds(0, p.key_dim)), operand_layouts(p.key_dim)[1])
        for first in firsts:
            if first == p.padded_window:
                ref = sm.operand.at[0, pl.ds(self.first_new, BLOCK), pl.ds(0, p.key_dim)]
            else:
                ref = sm.key.at[pl.ds(first, BLOCK)]
            keys = load(ref, rows_layout(p.key_dim))
            scores = multiply_rows(keys, factor, interpret=self.mode.interpret)
            self.store_scores(scores, first, pl.ds(0, p.padded_columns))

    def operand(self, term: int, channels: Any, count: int | None = None) -> Any:
        """A bf16 term of the columns, or of some, in shared memory, [channels, columns]."""
        columns = pl.ds(0, self.p.padded_columns if count is None else count)
        return self.sm.operand.at[term, columns, channels].transpose((1, 0))

    def store_scores(self, scores: jax.Array, first: int, columns: Any) -> None:
        """Store scores of 16 keys from `first` on; of dead ones of the window zero."""
        if first < self.p.padded_window:
            layout = SUMS if scores.ndim == 2 else self.block.reduce(1)
            scores = self.mask_dead(scores, first, layout)
        store(self.sm.score.at[pl.ds(first, BLOCK), columns], scores)

    @property
    def first_new(self) -> int:
        """The first of the 16 new q and k, one behind the other, whose scores are kept."""
        p = self.p
        return max(0, 2 * p.num_tokens - BLOCK) if p.num_tokens > 1 and p.key_terms == 1 else 0

    def new_key(self, i: int) -> int:
        """The row of the scores of new key i."""
        p = self.p
        among = p.num_tokens - self.first_new if p.num_tokens > 1 and p.key_terms == 1 else 0
        return p.padded_window + among + i

    def score_at(self, c: int) -> int:
        """Where the scores of column c are."""
        if not self.p.channel:
            return c
        tokens = self.p.num_tokens
        return c // tokens * self.p.token_rows + c % tokens

    def score_new_key(self) -> list[jax.Array]:
        """The same of one new key with each column, a warp for itself; yet to be stored."""
        p, sm = self.p, self.sm
        layout, shape = token_rows(p.key_dim), (4, p.key_dim)
        key = load(sm.k.at[0], layout.reduce(0)).astype(F32)
        columns = [load(self.raw_column(c), layout.reduce(0)) for c in range(p.num_columns)]
        products = [broadcast(key * x.astype(F32), shape, (1,), layout) for x in columns]
        return [jnp.sum(x, axis=1) for x in products]

    def score_new_by_channel(self) -> None:
        """The same by channel: key by key, for all later tokens at once, over whose rows lie warps.

        Sums of log-decays grow from a key to each token, so that small ones are not lost.
        """
        p, sm = self.p, self.sm
        layout, shape = token_rows(p.key_dim), (4, p.key_dim)

        def spread_rows(row: jax.Array) -> jax.Array:
            return broadcast(row, shape, (1,), layout)

        index = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
        found = []
        for first in range(0, p.token_rows, 4):
            here = pl.ds(first, 4)
            columns = [load(ref.at[here], layout) for ref in ((sm.q, sm.k) if p.delta else (sm.q,))]
            columns = [column.astype(F32) for column in columns]
            since = None
            for i in range(min(first + 4, p.num_tokens) - 1, -1, -1):
                key = spread_rows(load(sm.k.at[i], layout.reduce(0)).astype(F32))
                if since is not None:
                    key = key * self.exp(since, layout)
                for kind, column in enumerate(columns):
                    found.append((i, kind * p.token_rows + first, jnp.sum(column * key, axis=1)))
                if i:
                    decay = spread_rows(self.new_decay(i, layout.reduce(0)))
                    if i > first:
                        decay = jnp.where(index + first >= i, decay, 0.0)
                    since = decay if since is None else since + decay
        if p.brings_records_late:
            plgpu.commit_smem()  # all threads have read what gives way to scores and values
            values = self.rows_of(self.inputs[2], self.b, pl.ds(0, p.num_tokens))
            plgpu.copy_gmem_to_smem(values, sm.v, sm.value_bar)
        # Stores last, as in `score_keys`.
        for i, here, scores in found:
            store(sm.score.at[p.padded_window + i, pl.ds(here, 4)], scores)

    def decay_between(self) -> None:
        """Scalar decay: from each new token i to each t, and (first) from the window's end to t."""
        p, sm = self.p, self.sm
        heads = self.c.heads
        shape = (p.num_tokens, heads) if heads > 1 else (p.num_tokens,)
        layout = spread(*shape, vector=1)
        index = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
        since = zeros(shape, layout)
        for i in range(p.num_tokens - 1, -1, -1):
            if heads == 1:
                decay = sm.new_gate[i, 0]
            else:
                decay = load(sm.new_gate.at[i], layout.reduce(0))
                decay = broadcast(decay, shape, (1,), layout)
            since = since + jnp.where(index >= i, decay, 0.0)
            store(sm.apart.at[i] if heads > 1 else sm.apart.at[i, :, 0], jnp.exp(since))

    def replay(self) -> list[jax.Array]:
        """Sum over the window's records of score times weighted record, for each column."""
        p, sm = self.p, self.sm

        def add_chunk(chunk: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            for i in range(CHUNK):
                j = chunk * CHUNK + i
                live = j < self.length
                record = load(sm.record.at[j], self.layout).astype(F32)
                record = jnp.where(live, record, 0.0)
                if sm.weight is not None:
                    record = record * self.over_rows(self.load_heads(sm.weight, j))
                scores = [sm.score[j, self.score_at(c)] for c in range(p.num_columns)]
                sums = tuple(s + record * x for s, x in zip(sums, scores, strict=True))
            return sums

        sums = (zeros(self.shape, self.layout),) * p.num_columns
        live = jnp.minimum(self.length, p.window)
        return list(lax.fori_loop(0, lax.div(live + CHUNK - 1, CHUNK), add_chunk, sums))

    def finish(self, folded: bool, replayed: list[jax.Array] | None = None) -> None:
        """Updates and outputs of the new tokens, row by row."""
        p, sm = self.p, self.sm
        tokens = p.num_tokens
        reads = self.reads(folded)
        if not folded:
            reads = [jnp.where(self.fresh, 0.0, read) for read in reads]
            if not p.channel:
                total = self.over_rows(self.load_heads(sm.total))
                reads = [read * total for read in reads]
            reads = [a + b for a, b in zip(reads, replayed or self.replay(), strict=True)]
        updates: list[jax.Array] = []
        for t in range(tokens):
            beta = self.over_rows(self.load_heads(sm.new_gate, self.new(1, t)))
            value = load(sm.v.at[t], self.layout).astype(F32)
            query, *key = (reads[c] for c in self.columns_of(t))
            if not p.channel:
                decay = self.over_rows(self.decay_since(0, t))
                query, key = query * decay, [k * decay for k in key]
            between = {} if p.channel else {i: self.decay_since(i + 1, t) for i in range(t)}

            def pair(c: int, i: int, between: dict[int, jax.Array] = between) -> jax.Array:
                score = sm.score[self.new_key(i), self.score_at(c)]
                return self.over_rows(between[i] * score) if i in between else score

            if p.delta:
                value = value - key[0]
                for i in range(t):
                    value = value - updates[i] * pair(tokens + t, i)
            updates.append((value * beta).astype(p.cached_dtype).astype(F32))
            for i in range(t + 1):
                query = query + updates[i] * pair(t, i)
            if self.mode.masked:
                query = jnp.where(t < self.num_new, query, 0.0)
            self.write_output(t, query)
            if self.mode.append:
                self.append(t, folded, updates[t])

    def decay_since(self, first: int, t: int) -> jax.Array:
        """Scalar decay by the new tokens from `first` to t, for each head."""
        if self.p.num_tokens == 1:
            return jnp.exp(self.load_heads(self.sm.new_gate, 0))
        return self.load_heads(self.sm.apart, first, t)

    def append(self, t: int, folded: bool, update: jax.Array) -> None:
        """Record new token t, with what the rule keeps of it, behind the committed ones."""
        p, sm, b, ring = self.p, self.sm, self.b, self.ring
        value = load(sm.v.at[t], self.layout) if p.keeps_raw_values else None

        @(pl.when(t < self.num_new) if self.mode.masked else lambda keep: keep())
        def _() -> None:
            slot = self.new_slot(t, folded)
            if p.delta:
                store(self.rows_of(ring.update, b, slot), update.astype(p.cached_dtype))
            if value is not None:
                store(self.rows_of(ring.value, b, slot), value)
            if not p.channel:
                decay = self.load_heads(sm.new_gate, self.new(0, t))
                self.store_gate(decay, ring.log_decay, b, slot)
            if p.keeps_raw_values:
                beta = self.load_heads(sm.new_gate, self.new(1, t))
                self.store_gate(beta, ring.beta, b, slot)
            if p.num_tokens == 1:
                self.append_shared(t, folded)

    def append_shared(self, t: int, folded: Any) -> None:
        """Record what programs of the same key head, or head, have in common of new token t."""
        p, sm, b, ring = self.p, self.sm, self.b, self.ring

        def leads(found: jax.Array) -> Any:
            if self.mode.masked and p.num_tokens > 1:
                found = found & (t < self.num_new)
            return pl.when(found)

        @leads(self.leads_group)
        def _() -> None:
            slot = self.new_slot(t, folded)
            store(ring.key.at[b, slot, self.group], load(sm.k.at[t], self.channels))

        if p.channel:

            @leads(self.leads_head)
            def _() -> None:
                slot, decay = self.new_slot(t, folded), load(sm.g.at[t], self.channels)
                store(ring.log_decay.at[b, slot, self.head], decay)
                if p.read_decay_dtype is not None:
                    store(ring.read_log_decay.at[b, slot, self.head], self.read_decay(decay))

    def new_slot(self, t: int, folded: Any) -> jax.Array:
        """Slot of new token t: behind the committed records, or where a window may start."""
        first = self.start + self.length
        if folded is not False:
            window = lax.div(first + 7, 8) * 8
            first = window if folded is True else jnp.where(folded, window, first)
        return lax.rem(first + t, self.p.capacity)

    def write_output(self, t: int, value: jax.Array) -> None:
        """Write the output of new token t."""
        store(self.rows_of(self.output, self.b, t), value.astype(self.p.value_dtype))

    def work(self) -> None:
        """Everything, for a row that has new tokens (or, without tokens, is to be folded)."""
        p, sm = self.p, self.sm
        first_tiles = self.first_tiles
        if first_tiles == "at once":
            self.start_tiles()
        tokens = self.load_tokens() if p.num_tokens else []
        new_gates = self.load_new_gates()
        self.read_pointer()
        if first_tiles == "by the pointer":
            self.start_tiles()
        self.start_window()
        if first_tiles == "behind the window":
            self.start_tiles()
        gates = self.load_gates()
        if not self.weighs_late:
            self.store_decays(gates)
            if not p.channel:
                self.meet()
            self.weigh_records(gates.betas)
        for place, value in tokens:
            store(place, value)
        for at, value in new_gates.items():
            self.store_heads(value, sm.new_gate, at)
        if p.channel:
            self.wait_window()
            if p.solves_again:
                self.branch(self.solve_window, lambda: None)
            self.decay_keys()
        if sm.column is not None or (sm.operand is not None and p.key_terms > 1):
            if not p.packs_terms:  # else threads read what they wrote themselves
                self.meet()
            self.make_columns()
        self.meet()
        if self.mode.append and p.num_tokens > 1:
            # Here once, with registers to spare for many addresses: to other programs that read
            # these slots they are dead.
            for t in range(p.num_tokens):
                self.append_shared(t, self.due)

        def with_fold() -> None:
            if self.weighs_late:
                self.weigh_late(gates)
                self.meet()
            if not p.channel:
                self.wait_window()
                if p.solves_again:
                    self.solve_window()
            self.fold()
            after(True)

        def without_fold() -> None:
            replayed = self.read_state(gates)
            if not p.channel and p.num_tokens == 1 and replayed is None:
                self.wait_window()
            after(False, replayed)

        def after(folded: bool, replayed: list[jax.Array] | None = None) -> None:
            if not p.num_tokens:
                return
            if folded or (p.num_tokens == 1 and replayed is None):
                self.score_keys(window=not folded)
            if p.num_tokens > 1 and sm.record_bar is not None and not folded:
                plgpu.barrier_wait(sm.record_bar)
            if sm.value_bar is not None:
                plgpu.barrier_wait(sm.value_bar)
            self.meet()
            self.finish(folded, replayed)

        self.branch(with_fold, without_fold)

    def branch(self, with_fold: Callable[[], None], without_fold: Callable[[], None]) -> None:
        """What a row does that is due, or is not; decided here where all rows do the same."""
        if isinstance(self.due, bool):
            (with_fold if self.due else without_fold)()
        else:
            pl.when(self.due)(with_fold)
            pl.when(jnp.logical_not(self.due))(without_fold)

    def solve_window(self) -> None:
        """What the fold's solve needs of the raw records, before others take their place."""
        if self.first_tiles == "after it":
            self.start_tiles()
        for first, beta in self.gates_of_window(self.ring.beta).items():
            store(self.gate_rows(self.sm.solve_beta, first), self.live_gates(first, beta))
        self.prepare_solve()

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
        if self.mode.fold:
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
    config = choose(problem, mode) if config is None else completed(problem, config)
    assert config is not None
    p = problem

    def body(*args: Any) -> None:
        refs, scratch = args[:-1], unpack(args[-1], p)
        given = refs[4 : 4 + len(inputs)]
        output = refs[-1] if p.num_tokens else None
        rows = Rows(*refs[:4])
        Step(p, config, mode, checkpoint, copy, ring, rows, given, output, scratch).run()

    body.__name__ = "replay_step" if p.num_tokens else "replay_fold"
    output = jax.ShapeDtypeStruct((p.batch, p.num_tokens, p.num_heads, p.value_dim), p.value_dtype)
    return plgpu.kernel(
        body,
        out_type=output if p.num_tokens else (),
        scratch_types=(places(p, config, mode),),
        grid=(p.batch * programs_per_row(p, config),),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,  # rows lie within warps
        ),
    )(*rows, *inputs)
