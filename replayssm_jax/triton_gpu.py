"""What `replayssm_jax.kernels` asks of `replayssm_triton`: Triton through jax-triton."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from replayssm_jax.spec import ReplaySpec
from replayssm_jax.state import InputBuffer


def why_not(spec: ReplaySpec, num_tokens: int) -> str | None:
    """Why no kernel runs T tokens of a layer; None where one does."""
    from replayssm_triton import configs

    dtypes = (spec.key_dtype, spec.value_dtype)
    if not set(dtypes) <= {jnp.dtype(x) for x in (jnp.bfloat16, jnp.float16, jnp.float32)}:
        return f"inputs must be bf16, fp16 or fp32, found {dtypes[0]} and {dtypes[1]}"
    return configs.why_not(spec.key_dim, num_tokens)


def step(
    spec: ReplaySpec,
    implementation: str,
    masked: bool,
    rows: Any,
    checkpoint: jax.Array,
    buffer: InputBuffer,
    tokens: tuple[jax.Array, ...],
) -> tuple[jax.Array, jax.Array, InputBuffer]:
    """As `kernels.step`, for arrays of as many rows as come."""
    from replayssm_triton import fused_step

    output, checkpoint, ring = fused_step.step(
        checkpoint,
        _ring(buffer),
        fused_step.Rows(*rows),
        tokens,
        window=spec.window,
        masked=masked,
    )
    return output, checkpoint, dataclasses.replace(buffer, **ring._asdict())


def fold(
    spec: ReplaySpec, implementation: str, rows: Any, checkpoint: jax.Array, buffer: InputBuffer
) -> jax.Array:
    """As `kernels.fold`."""
    from replayssm_triton import fused_step

    rows = fused_step.Rows(*rows)
    return fused_step.fold(checkpoint, _ring(buffer), rows, window=spec.window)


def recurrent_step(
    spec: ReplaySpec, state: jax.Array, tokens: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """As `kernels.recurrent_step`."""
    from replayssm_triton import conventional

    return conventional.step(state, tokens, delta=spec.rule == "delta")


def _ring(buffer: InputBuffer) -> Any:
    from replayssm_triton.fused_step import Ring

    return Ring(*(getattr(buffer, name) for name in Ring._fields))
