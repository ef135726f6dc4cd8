"""The conventional decode step, tuned: the baseline that the replay step is measured against.

Every state tile is read, decayed, updated by the token, multiplied with its query and written back.
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
    """Shared memory of a program."""

    state: Any
    q: Any
    k: Any
    v: Any
    g: Any  # channel decay: exp(g)
    decay: Any  # scalar decay: for each state row
    beta: Any  # for each state row
    output: Any
    state_bar: Any


def scratch_types(p: Problem, c: Config) -> Scratch:
    """Shapes of the shared memory of a program."""
    sm = plgpu.SMEM
    rows = (c.heads, c.rows) if c.heads > 1 else (c.rows,)
    return Scratch(
        state=sm((c.stages, TILE, p.key_dim), F32, transforms=swizzled(F32, p.key_dim)),
        q=sm((p.key_dim,), p.key_dtype),
        k=sm((p.key_dim,), p.key_dtype),
        v=sm(rows, p.value_dtype),
        g=sm((p.key_dim,), F32) if p.channel else None,
        decay=None if p.channel else sm(rows, F32),
        beta=sm(rows, F32),
        output=sm(rows, p.value_dtype),
        state_bar=plgpu.Barrier(num_barriers=c.stages),
    )


class ConventionalStep(Program):
    """One program of the conventional step."""

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

    def load_token(self) -> None:
        """The token in shared memory, with decay and beta as one value for each state row."""
        p, sm, b = self.p, self.sm, self.b
        q, k, v, g, beta = self.inputs
        nothing = zeros(self.shape, self.layout)
        # All loads come first, so that they wait for device memory once.
        places = [
            (sm.q, load(q.at[b, 0, self.group], self.channels)),
            (sm.k, load(k.at[b, 0, self.group], self.channels)),
            (sm.v, load(self.rows_of(v, b, 0), self.layout)),
            (sm.beta, nothing + self.over_rows(self.load_gate(beta, b, 0))),
        ]
        if p.channel:
            places.append((sm.g, jnp.exp(load(g.at[b, 0, self.head], self.channels))))
        else:
            decay = jnp.exp(self.load_gate(g, b, 0))
            places.append((sm.decay, nothing + self.over_rows(decay)))
        for place, value in places:
            store(place, value)

    def run(self) -> None:
        """The whole program."""
        p, sm, stages = self.p, self.sm, self.c.stages
        layout, shape = state_rows(p.key_dim), (TILE, p.key_dim)
        for i in range(stages):
            plgpu.copy_gmem_to_smem(self.tile(i), sm.state.at[i], sm.state_bar.at[i])
        self.load_token()
        plgpu.commit_smem()

        def along_rows(ref: Any, i: Any) -> jax.Array:
            return load(self.tile_rows(ref, i=i), layout.reduce(1)).astype(F32)

        def columns(ref: Any) -> jax.Array:
            return broadcast(load(ref, layout.reduce(0)).astype(F32), shape, (1,), layout)

        key, query = columns(sm.k), columns(sm.q)

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
            state = load(sm.state.at[slot], layout)
            if p.channel:
                state = state * columns(sm.g)
            else:
                state = state * broadcast(along_rows(sm.decay, i), shape, (0,), layout)
            value = along_rows(sm.v, i)
            if p.delta:
                value = value - jnp.sum(state * key, axis=1)
            update = value * along_rows(sm.beta, i)
            state = state + broadcast(update, shape, (0,), layout) * key
            store(sm.state.at[slot], state)
            output = jnp.sum(state * query, axis=1)
            store(self.tile_rows(sm.output, i=i), output.astype(p.value_dtype))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(sm.state.at[slot], self.tile(i))

        plgpu.commit_smem()
        store(self.rows_of(self.output, self.b, 0), load(sm.output, self.layout))
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
    p, mode = problem, Mode()
    reason = why_not(p, mode)
    if reason:
        raise ValueError(reason)
    chosen = config or choose(p, mode)
    assert chosen is not None
    if config is None:
        stages = 4 if p.batch * programs_per_row(p, chosen) >= _MANY_PROGRAMS else 2
        chosen = dataclasses.replace(chosen, stages=min(stages, chosen.num_tiles))

    def body(*refs: Any) -> None:
        ConventionalStep(p, chosen, state, refs[:5], refs[5], refs[6]).run()

    body.__name__ = "conventional_step"
    output = jax.ShapeDtypeStruct((p.batch, 1, p.num_heads, p.value_dim), p.value_dtype)
    return plgpu.kernel(
        body,
        out_type=output,
        scratch_types=(scratch_types(p, chosen),),
        grid=(p.batch * programs_per_row(p, chosen),),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(*inputs)
