"""What `replayssm_jax.kernels` asks of `pallas_kernels`: Pallas Mosaic GPU, arrays as Refs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels import conventional, replay
from pallas_kernels.configs import why_not as why_no_kernel
from pallas_kernels.fused_step import Ring, Rows
from pallas_kernels.problem import Mode, Problem
from pallas_kernels.read_copy import ReadCopy
from replayssm_jax import dispatch
from replayssm_jax.precision import Scaled, Stored
from replayssm_jax.spec import ReplaySpec
from replayssm_jax.state import InputBuffer

# Of its steps, see `kernels.takes_flush`.
TAKES_FLUSH = True


def why_not(spec: ReplaySpec, num_tokens: int) -> str | None:
    """Why no kernel runs T tokens of a layer; None where one does."""
    return why_no_kernel(problem_of(spec, 1, num_tokens), Mode())


def step(
    spec: ReplaySpec,
    implementation: str,
    masked: bool,
    flush: replay.Flush,
    rows: Any,
    stored: Stored,
    buffer: InputBuffer,
    tokens: tuple[jax.Array, ...],
) -> tuple[jax.Array, Stored, InputBuffer]:
    """As `kernels.step`, for arrays of as many rows as come."""

    def run(state: Any, copy: ReadCopy | None, ring: Ring) -> jax.Array:
        return replay.step(
            state,
            ring,
            Rows(*rows),
            tokens,
            window=spec.window,
            flush=flush,
            masked=masked,
            copy=copy,
            **_target(implementation),
        )

    output, stored, ring = _with_refs(stored, buffer, run)
    return output, stored, dataclasses.replace(buffer, **ring._asdict())


def fold(
    spec: ReplaySpec, implementation: str, rows: Any, stored: Stored, buffer: InputBuffer
) -> Stored:
    """As `kernels.fold`."""

    def run(state: Any, copy: ReadCopy | None, ring: Ring) -> None:
        target = _target(implementation)
        replay.fold(state, ring, Rows(*rows), window=spec.window, copy=copy, **target)

    return _with_refs(stored, buffer, run)[1]


def recurrent_step(
    spec: ReplaySpec, state: jax.Array, tokens: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """As `kernels.recurrent_step`."""
    shape = state.shape
    flat = jax.new_ref(state.reshape(shape[0], -1, shape[3]))
    output = conventional.launch(problem_of(spec, shape[0], 1), flat, tokens)
    return output, jax.freeze(flat).reshape(shape)


def verify_snapshots(
    spec: ReplaySpec,
    states: jax.Array,
    position: jax.Array,
    num_new: jax.Array,
    tokens: tuple[jax.Array, ...],
) -> tuple[jax.Array, jax.Array]:
    """As `kernels.verify_snapshots`."""
    shape = states.shape
    problem = problem_of(spec, shape[0], tokens[2].shape[1])
    flat = jax.new_ref(states.reshape(*shape[:2], -1, shape[4]))
    output = conventional.launch_snapshots(problem, flat, position, num_new, tokens)
    return output, jax.freeze(flat).reshape(shape)


def _with_refs(
    stored: Stored, buffer: InputBuffer, run: Callable[[Any, ReadCopy | None, Ring], Any]
) -> tuple[Any, Stored, Ring]:
    """What `run` returns, and the checkpoint, its copy and the ring that it leaves."""
    shape, copy = stored.checkpoint.shape, stored.read_copy
    flat = jax.new_ref(_flat(stored.checkpoint))
    values = copy_refs = None
    if copy is not None:
        values, scale = (copy.values, copy.scale) if isinstance(copy, Scaled) else (copy, None)
        copy_refs = jax.tree.map(jax.new_ref, ReadCopy(_flat(values), scale))
    refs = jax.tree.map(jax.new_ref, Ring(*(getattr(buffer, name) for name in Ring._fields)))
    output = run(flat, copy_refs, refs)
    if copy_refs is not None:
        values, scale = jax.tree.map(jax.freeze, copy_refs)
        values = values.reshape(shape)
        copy = values if scale is None else Scaled(values, scale)
    stored = stored._replace(checkpoint=jax.freeze(flat).reshape(shape), read_copy=copy)
    return output, stored, jax.tree.map(jax.freeze, refs)


def _flat(state: jax.Array) -> jax.Array:
    """[B, H, P, N] as [B, H P, N]."""
    return state.reshape(state.shape[0], -1, state.shape[3])


def _target(implementation: str) -> dict[str, bool]:
    interpret = implementation == "mosaic_gpu_interpret"
    return {"interpret": interpret, "wgmma": not interpret and dispatch.target_is_hopper()}


def problem_of(spec: ReplaySpec, batch_size: int, num_tokens: int) -> Problem:
    """A step of T tokens as the kernels know it."""
    return Problem(
        batch=batch_size,
        num_heads=spec.num_heads,
        num_groups=spec.num_groups,
        value_dim=spec.value_dim,
        key_dim=spec.key_dim,
        capacity=spec.capacity,
        window=spec.window,
        num_tokens=num_tokens,
        delta=spec.rule == "delta",
        channel=spec.decay == "channel",
        key_dtype=spec.key_dtype,
        value_dtype=spec.value_dtype,
        read_dtype=spec.read_dtype,
        cached_dtype=spec.cached_dtype,
        read_decay_dtype=spec.read_decay_dtype,
    )
