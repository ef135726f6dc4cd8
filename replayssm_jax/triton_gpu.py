"""What `replayssm_jax.kernels` asks of `replayssm_triton`: Triton through jax-triton."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from replayssm_jax.precision import Stored
from replayssm_jax.spec import ReplaySpec
from replayssm_jax.state import InputBuffer

# Of its steps, see `kernels.takes_flush`.
TAKES_FLUSH = False


def why_not(spec: ReplaySpec, num_tokens: int) -> str | None:
    """Why no kernel runs T tokens of a layer; None where one does."""
    if spec.read_dtype is not None:
        return f"its kernels read no low-precision copy, found read_dtype={spec.read_dtype.name}"
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
    stored: Stored,
    buffer: InputBuffer,
    tokens: tuple[jax.Array, ...],
) -> tuple[jax.Array, Stored, InputBuffer]:
    """As `kernels.step`, for arrays of as many rows as come."""
    from replayssm_triton import fused_step

    output, checkpoint, ring = fused_step.step(
        stored.checkpoint,
        _ring(buffer),
        fused_step.Rows(*rows),
        tokens,
        window=spec.window,
        masked=masked,
    )
    stored = stored._replace(checkpoint=checkpoint)
    return output, stored, dataclasses.replace(buffer, **ring._asdict())


def fold(
    spec: ReplaySpec, implementation: str, rows: Any, stored: Stored, buffer: InputBuffer
) -> Stored:
    """As `kernels.fold`."""
    from replayssm_triton import fused_step

    rows = fused_step.Rows(*rows)
    checkpoint = fused_step.fold(stored.checkpoint, _ring(buffer), rows, window=spec.window)
    return stored._replace(checkpoint=checkpoint)


def recurrent_step(
    spec: ReplaySpec, state: jax.Array, tokens: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """As `kernels.recurrent_step`."""
    from replayssm_triton import conventional

    return conventional.step(state, tokens, delta=spec.rule == "delta")


def _ring(buffer: InputBuffer) -> Any:
    from replayssm_triton.fused_step import Ring

    return Ring(*(getattr(buffer, name) for name in Ring._fields))
