"""Activations by name, and initialisers of the decay parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

Activation = Literal["silu", "sigmoid", "gelu", "relu2"]

ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "gelu": jax.nn.gelu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def log_uniform_rate(low: float = 1.0, high: float = 16.0) -> Any:
    """Return an initialiser of A_log: the log of a rate drawn uniformly from [low, high]."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        rate = jax.random.uniform(key, shape, jnp.float32, minval=low, maxval=high)
        return jnp.log(rate).astype(dtype)

    return init


def inverse_softplus_dt(low: float = 1e-3, high: float = 1e-1, floor: float = 1e-4) -> Any:
    """Return an initialiser of dt_bias: softplus(dt_bias) is log-uniform in [low, high]."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        log_dt = jax.random.uniform(
            key, shape, jnp.float32, minval=math.log(low), maxval=math.log(high)
        )
        dt = jnp.maximum(jnp.exp(log_dt), floor)
        return (dt + jnp.log(-jnp.expm1(-dt))).astype(dtype)

    return init


def scaled(init: Any, factor: float) -> Any:
    """Return `init` with its values multiplied by `factor` (depth-scaled output projections)."""
    if factor == 1.0:
        return init

    def scaled_init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        return init(key, shape, dtype) * jnp.asarray(factor, dtype)

    return scaled_init


default_kernel_init = nnx.initializers.lecun_normal()
default_A_log_init = log_uniform_rate()
default_dt_bias_init = inverse_softplus_dt()
