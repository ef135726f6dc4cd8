"""Feed-forward layers: SwiGLU and squared ReLU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from replayssm_jax.layers.activations import ACTIVATIONS, Activation, default_kernel_init
from replayssm_jax.layers.apart import apart
from replayssm_jax.layers.arguments import check_features, check_params
from replayssm_jax.layers.options import check_option


class MLP(nnx.Module):
    """down(act(up(x))), or with a gate down(act(gate(x)) * up(x)).

    Args:
      d_model: width of the hidden state.
      d_ff: inner width.
      activation: "silu" (with `gated` this is SwiGLU), "relu2", "gelu" or "sigmoid".
      gated: whether there is a gate projection.
      use_bias: whether the projections have biases.
      dtype, param_dtype, kernel_init, out_kernel_init: as in `flax.nnx.Linear`.
      rngs: of the parameters.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation: Activation = "silu",
        gated: bool = True,
        use_bias: bool = False,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = default_kernel_init,
        out_kernel_init: Any = default_kernel_init,
        rngs: nnx.Rngs,
    ):
        check_params(param_dtype, rngs)
        linear = functools.partial(
            nnx.Linear, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.activation: Activation = check_option("activation", activation, Activation)
        self.gate_proj = nnx.data(linear(d_model, d_ff, kernel_init=kernel_init) if gated else None)
        self.up_proj = linear(d_model, d_ff, kernel_init=kernel_init)
        self.down_proj = linear(d_ff, d_model, kernel_init=out_kernel_init)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x [..., d_model] to [..., d_model]."""
        check_features(x, self.up_proj.in_features)
        act = ACTIVATIONS[self.activation]
        if self.gate_proj is None:
            return self.down_proj(act(self.up_proj(x)))
        for_gate, for_up = apart(x, 2)
        return self.down_proj(act(self.gate_proj(for_gate)) * self.up_proj(for_up))
