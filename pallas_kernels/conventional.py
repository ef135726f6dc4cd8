"""Conventional decoding, tuned: the baseline that the replay step is measured against.

Every state tile is read, decayed, updated by the token, multiplied with its query and written back.
Where drafts may be rejected it is read once, and written once for each of them: a snapshot.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.configs import choose, why_not
from pallas_kernels.layouts import (
    broadcast,
    load,
    state_rows,
    store,
    swizzled,
    zeros,
)
from pallas_kernels.problem import TILE, Config, Mode, Problem, programs_per_row
from pallas_kernels.program import F32, Program

# Programs from which one of them with more tiles in flight beats two on a multiprocessor.
_MANY_PROGRAMS = 1024


class Scratch(NamedTuple):
    """Shared memory of a program; what is of a token has the tokens in front."""

    state: Any
    snapshot: Any  # of several tokens: states on their way to device memory
    q: Any
    k: Any
    v: Any
    g: Any  # channel decay: exp(g)
    decay: Any  # scalar decay: for each state row
    beta: Any  # for each state row
    output: Any
    state_bar: Any


def scratch_types(p: Problem, c: Config, snapshots: bool) -> Scratch:
    """Shapes of the shared memory of a program."""
    sm, tokens = plgpu.SMEM, p.num_tokens
    rows = (tokens, c.heads, c.rows) if c.heads > 1 else (tokens, c.rows)
    tiles = swizzled(F32, p.key_dim)
    return Scratch(
        state=sm((c.stages, TILE, p.key_dim), F32, transforms=tiles),
        snapshot=sm((2, TILE, p.key_dim), F32, transforms=tiles) if snapshots else None,
        q=sm((tokens, p.key_dim), p.key_dtype),
        k=sm((tokens, p.key_dim), p.key_dtype),
        v=sm(rows, p.value_dtype),
        g=sm((tokens, p.key_dim), F32) if p.channel else None,
        decay=None if p.channel else sm(rows, F32),
        beta=sm(rows, F32),
        output=sm(rows, p.value_dtype),
        state_bar=plgpu.Barrier(num_barriers=c.stages),
    )


class ConventionalStep(Program):
    """One program of the conventional step of one token, in place."""

    def __init__(
        self,
        problem: Problem,
        config: Config,
        state: Any,
        inputs: Any,
        output: Any,
        sm: Scratch,
    ):
        super().__init__(problem, config, state)
        self.inputs, self.output, self.sm = inputs, output, sm
        self.over_tile = state_rows(problem.key_dim)

    def load_tokens(self) -> None:
        """The tokens in shared memory, with decay and beta as one value for each state row."""
        p, sm, b = self.p, self.sm, self.b
        q, k, v, g, beta = self.inputs
        nothing = zeros(self.shape, self.layout)
        places = []  # all loads come first, so that they wait for device memory once
        for t in range(p.num_tokens):
            places += [
                (sm.q.at[t], load(q.at[b, t, self.group], self.channels)),
                (sm.k.at[t], load(k.at[b, t, self.group], self.channels)),
                (sm.v.at[t], load(self.rows_of(v, b, t), self.layout)),
                (sm.beta.at[t], nothing + self.over_rows(self.load_gate(beta, b, t))),
            ]
            if p.channel:
                decay = jnp.exp(load(g.at[b, t, self.head], self.channels))
                places.append((sm.g.at[t], decay))
            else:
                decay = jnp.exp(self.load_gate(g, b, t))
                places.append((sm.decay.at[t], nothing + self.over_rows(decay)))
        for place, value in places:
            store(place, value)
        plgpu.commit_smem()

    def along_rows(self, ref: Any, t: int, i: Any) -> jax.Array:
        """Values of token t for the rows of tile i."""
        return load(self.tile_rows(ref, t, i=i), self.over_tile.reduce(1)).astype(F32)

    def columns(self, ref: Any, t: int) -> jax.Array:
        """A vector of token t over the key channels, for every row of a tile."""
        vector = load(ref.at[t], self.over_tile.reduce(0)).astype(F32)
        return broadcast(vector, (TILE, self.p.key_dim), (1,), self.over_tile)

    def advance(self, state: jax.Array, t: int, i: Any, key: jax.Array, query: jax.Array) -> Any:
        """Tile i after token t, and the token's output in its rows."""
        p, sm, shape = self.p, self.sm, (TILE, self.p.key_dim)
        if p.channel:
            state = state * self.columns(sm.g, t)
        else:
            decay = self.along_rows(sm.decay, t, i)
            state = state * broadcast(decay, shape, (0,), self.over_tile)
        value = self.along_rows(sm.v, t, i)
        if p.delta:
            value = value - jnp.sum(state * key, axis=1)
        update = value * self.along_rows(sm.beta, t, i)
        state = state + broadcast(update, shape, (0,), self.over_tile) * key
        return state, jnp.sum(state * query, axis=1)

    def run(self) -> None:
        """The whole program."""
        p, sm, stages = self.p, self.sm, self.c.stages
        for i in range(stages):
            plgpu.copy_gmem_to_smem(self.tile(i), sm.state.at[i], sm.state_bar.at[i])
        self.load_tokens()
        key, query = self.columns(sm.k, 0), self.columns(sm.q, 0)

        @pl.loop(0, self.c.num_tiles)
        def _(i: jax.Array) -> None:
            slot = lax.rem(i, stages)
            if self.c.num_tiles > stages:
                # The tile before the last has left its slot: refill it, then work on this one.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                following = i - 1 + stages

                @pl.when((i > 0) & (following < self.c.num_tiles))
                def _() -> None:
                    place = lax.rem(following, stages)
                    plgpu.copy_gmem_to_smem(
                        self.tile(following), sm.state.at[place], sm.state_bar.at[place]
                    )

            plgpu.barrier_wait(sm.state_bar.at[slot])
            state = load(sm.state.at[slot], self.over_tile)
            state, output = self.advance(state, 0, i, key, query)
            store(sm.state.at[slot], state)
            store(self.tile_rows(sm.output, 0, i=i), output.astype(p.value_dtype))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(sm.state.at[slot], self.tile(i))

        plgpu.commit_smem()
        store(self.rows_of(self.output, self.b, 0), load(sm.output.at[0], self.layout))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


class SnapshotStep(ConventionalStep):
    """One program of several tokens, with the state behind each kept in a ring of its own."""

    def snapshot(self, position: Any, i: Any) -> Any:
        """Tile i of the state after `position` tokens, in device memory."""
        slot = lax.rem(position, self.state.shape[1])
        return self.state.at[self.b, slot, pl.ds(self.first_row + i * TILE, TILE)]

    def work(self, position: Any, num_new: Any) -> None:
        """Advance a row that has new tokens."""
        p, sm, stages = self.p, self.sm, self.c.stages

        def bring(i: Any) -> None:
            slot = lax.rem(i, stages)
            place, arrived = sm.state.at[slot], sm.state_bar.at[slot]
            plgpu.copy_gmem_to_smem(self.snapshot(position, i), place, arrived)

        for i in range(stages):
            bring(jnp.int32(i))
        self.load_tokens()

        @pl.loop(0, self.c.num_tiles)
        def _(i: jax.Array) -> None:
            slot = lax.rem(i, stages)
            plgpu.barrier_wait(sm.state_bar.at[slot])
            state = load(sm.state.at[slot], self.over_tile)
            if self.c.num_tiles > stages:
                plgpu.commit_smem()  # all threads have read the tile
                pl.when(i + stages < self.c.num_tiles)(lambda: bring(i + stages))
            for t in range(p.num_tokens):
                key, query = self.columns(sm.k, t), self.columns(sm.q, t)
                state, output = self.advance(state, t, i, key, query)
                output = jnp.where(t < num_new, output, 0.0)
                store(self.tile_rows(sm.output, t, i=i), output.astype(p.value_dtype))

                @pl.when(t < num_new)
                def _(t: int = t, state: jax.Array = state) -> None:
                    place = sm.snapshot.at[lax.rem(i * num_new + t, 2)]
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the last but one has left it
                    store(place, state)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(place, self.snapshot(position + t + 1, i))

        plgpu.commit_smem()
        for t in range(p.num_tokens):
            store(self.rows_of(self.output, self.b, t), load(sm.output.at[t], self.layout))

    def run_row(self, position: Any, num_new: Any) -> None:
        """The whole program; a row without new tokens has zero outputs."""

        def idle() -> None:
            for t in range(self.p.num_tokens):
                nothing = zeros(self.shape, self.layout).astype(self.p.value_dtype)
                store(self.rows_of(self.output, self.b, t), nothing)

        pl.when(num_new > 0)(lambda: self.work(position, num_new))
        pl.when(num_new == 0)(idle)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def launch(
    problem: Problem,
    state: Any,
    inputs: Any,
    config: Config | None = None,
) -> jax.Array:
    """Advance the recurrent state, a Ref [B, H P, N] float32, by one token, in place.

    Args:
      problem: shapes, with T = 1; its window and capacity do not matter.
      state: Ref of [B, H P, N] float32.
      inputs: (q, k, v, g, beta) as in `fused_step`, T = 1.
      config: None for the one that `choose` finds.

    Returns:
      Outputs [B, 1, H, P] in the dtype of v.

    Raises:
      ValueError: no kernel for the problem.
    """
    p = problem
    chosen = config or _cut(p)
    if config is None:
        stages = 4 if p.batch * programs_per_row(p, chosen) >= _MANY_PROGRAMS else 2
        chosen = dataclasses.replace(chosen, stages=min(stages, chosen.num_tiles))

    def body(*refs: Any) -> None:
        ConventionalStep(p, chosen, state, refs[:5], refs[5], refs[6]).run()

    return _launch("conventional_step", body, p, chosen, False, inputs)


def launch_snapshots(
    problem: Problem,
    states: Any,
    position: jax.Array,
    num_new: jax.Array,
    inputs: Any,
    config: Config | None = None,
) -> jax.Array:
    """Run T tokens from the state after `position` tokens, and keep the state behind each.

    Args:
      problem: shapes; its window and capacity do not matter.
      states: Ref of [B, S, H P, N] float32, S > T: the state after n tokens lies in slot n mod S.
      position: int32 [B].
      num_new: int32 [B], how many of the T tokens of a row are real; the outputs of others are 0.
      inputs: (q, k, v, g, beta) as in `fused_step`.
      config: None for the one that `choose` finds.

    Returns:
      Outputs [B, T, H, P] in the dtype of v.

    Raises:
      ValueError: no kernel for the problem.
    """
    p = problem
    # Two programs on a multiprocessor, each with a tile that comes and two that go.
    chosen = config or dataclasses.replace(_cut(p), stages=1)

    def body(position: Any, num_new: Any, *refs: Any) -> None:
        program = SnapshotStep(p, chosen, states, refs[:5], refs[5], refs[6])
        program.run_row(position[program.b], num_new[program.b])

    return _launch("snapshot_step", body, p, chosen, True, (position, num_new, *inputs))


def _cut(p: Problem) -> Config:
    one = dataclasses.replace(p, num_tokens=1)
    reason = why_not(one, Mode())
    if reason:
        raise ValueError(reason)
    chosen = choose(one, Mode())
    assert chosen is not None
    return chosen


def _launch(name: str, body: Any, p: Problem, c: Config, snapshots: bool, arrays: Any) -> Any:
    body.__name__ = name
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(
            (p.batch, p.num_tokens, p.num_heads, p.value_dim), p.value_dtype
        ),
        scratch_types=(scratch_types(p, c, snapshots),),
        grid=(p.batch * programs_per_row(p, c),),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(*arrays)
