"""RMS norms in float32, plain and gated."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from replayssm_jax.layers.activations import ACTIVATIONS, Activation
from replayssm_jax.layers.arguments import check_features, check_params
from replayssm_jax.layers.options import check_option


def _rms_normalise(x: jax.Array, epsilon: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)


def _scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jnp.broadcast_to(scale.astype(x.dtype), x.shape)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, in float32 and back to the input's dtype."""

    def __init__(
        self,
        features: int,
        *,
        epsilon: float = 1e-6,
        param_dtype: Any = jnp.float32,
        scale_init: Any = nnx.initializers.ones,
        rngs: nnx.Rngs,
    ):
        check_params(param_dtype, rngs)
        self.epsilon = epsilon
        self.scale = nnx.Param(scale_init(rngs.params(), (features,), param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise `x` [..., features]."""
        check_features(x, self.scale.shape[0])
        y = _rms_normalise(x.astype(jnp.float32), self.epsilon)
        return _scaled(y, self.scale[...]).astype(x.dtype)


class GatedRMSNorm(nnx.Module):
    """RMS norm with an output gate.

    With `norm_before_gate` the result is norm(x) * scale * act(z) (GDN, KDA), otherwise
    norm(x * act(z)) * scale (Mamba-2). The mean square is taken over each of `num_groups` equal
    parts of the last axis.
    """

    def __init__(
        self,
        features: int,
        *,
        num_groups: int = 1,
        norm_before_gate: bool = True,
        activation: Activation = "silu",
        epsilon: float = 1e-6,
        param_dtype: Any = jnp.float32,
        scale_init: Any = nnx.initializers.ones,
        rngs: nnx.Rngs,
    ):
        check_params(param_dtype, rngs)
        if features % num_groups:
            raise ValueError(
                f"num_groups must divide features, found num_groups={num_groups} "
                f"and features={features}"
            )
        self.num_groups = num_groups
        self.norm_before_gate = norm_before_gate
        self.activation: Activation = check_option("activation", activation, Activation)
        self.epsilon = epsilon
        self.scale = nnx.Param(scale_init(rngs.params(), (features,), param_dtype))

    def __call__(self, x: jax.Array, z: jax.Array) -> jax.Array:
        """Normalise `x` [..., features] and gate it by `z` of the same shape; float32 out."""
        check_features(x, self.scale.shape[0])
        y = x.astype(jnp.float32)
        gate = ACTIVATIONS[self.activation](z.astype(jnp.float32))
        if not self.norm_before_gate:
            y = y * gate
        parts = y.reshape(*y.shape[:-1], self.num_groups, -1)
        y = _scaled(_rms_normalise(parts, self.epsilon).reshape(y.shape), self.scale[...])
        return y * gate if self.norm_before_gate else y
