"""Rotary position embedding of a part of each head."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, positions: jax.Array, *, dim: int, base: float = 10000.0) -> jax.Array:
    """Rotate the first `dim` channels of `x` [B, T, heads, D] by `positions` [B, T].

    Channel i pairs with channel i + dim / 2. Angles are computed in float32.
    """
    if dim == 0:
        return x
    half = dim // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = x[..., :dim].astype(jnp.float32)
    first, second = turned[..., :half], turned[..., half:]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., dim:]], axis=-1)
