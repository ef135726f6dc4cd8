"""Gated DeltaNet mixer (arXiv:2412.06464), as Qwen3-Next, Qwen3.5 and OLMo hybrid use it.

Channels are laid out by key head, with the value heads that it serves:
in_proj gives [G, q | k | v | z | b | a], the convolution takes [G, q | k | v].
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from replayssm_jax.arguments import float_dtype
from replayssm_jax.inputs import TokenInputs
from replayssm_jax.layers.activations import (
    default_A_log_init,
    default_dt_bias_init,
    default_kernel_init,
)
from replayssm_jax.layers.arguments import check_params
from replayssm_jax.layers.causal_conv import CausalConv, uniform_taps
from replayssm_jax.layers.mixer import ReplayMixer
from replayssm_jax.layers.norm import GatedRMSNorm
from replayssm_jax.spec import ReplaySpec


class _Rest(NamedTuple):
    z: jax.Array
    b: jax.Array
    a: jax.Array


class GatedDeltaNet(ReplayMixer):
    """Gated DeltaNet mixer: y, cache = layer(x [B, T, d_model], cache).

    Args:
      d_model: width of the hidden state.
      num_key_heads: G.
      num_value_heads: H, a multiple of G.
      key_dim: N of each key head.
      value_dim: P of each value head.
      conv_kernel: taps of the short convolution.
      conv_bias, proj_bias: whether the convolution and the projections have biases.
      use_dt_bias: whether the decay has a bias.
      allow_neg_eigval: beta in (0, 2) instead of (0, 1), so that eigenvalues may be negative.
      norm_epsilon: of the gated norm, norm(o) * silu(z) for each value head.
      replay_window, max_tokens, state_dtype, read_dtype: see `ReplaySpec`.
      dtype: of activations and of the cached records.
      param_dtype: of the projections' and the convolution's parameters; A_log and dt_bias stay
        float32.
      kernel_init, out_kernel_init, conv_kernel_init, A_log_init, dt_bias_init: initialisers.
      rngs: of the parameters.
    """

    def __init__(
        self,
        d_model: int,
        *,
        num_key_heads: int,
        num_value_heads: int | None = None,
        key_dim: int = 128,
        value_dim: int = 128,
        conv_kernel: int = 4,
        conv_bias: bool = False,
        proj_bias: bool = False,
        use_dt_bias: bool = True,
        allow_neg_eigval: bool = False,
        norm_epsilon: float = 1e-6,
        replay_window: int = 16,
        max_tokens: int = 1,
        state_dtype: Any = jnp.float32,
        read_dtype: Any = None,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = default_kernel_init,
        out_kernel_init: Any = default_kernel_init,
        conv_kernel_init: Any = uniform_taps,
        A_log_init: Any = default_A_log_init,
        dt_bias_init: Any = default_dt_bias_init,
        rngs: nnx.Rngs,
    ):
        check_params(param_dtype, rngs)
        num_value_heads = num_key_heads if num_value_heads is None else num_value_heads
        self.dtype = float_dtype("dtype", dtype)
        self.allow_neg_eigval = allow_neg_eigval
        self.spec = ReplaySpec.gated_delta_net(
            num_value_heads=num_value_heads,
            num_key_heads=num_key_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            window=replay_window,
            max_tokens=max_tokens,
            state_dtype=state_dtype,
            read_dtype=read_dtype,
            key_dtype=self.dtype,
            value_dtype=self.dtype,
        )
        linear = functools.partial(nnx.Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        heads = self.spec.heads_per_group
        self.in_proj = linear(
            d_model,
            num_key_heads * (2 * key_dim + 2 * heads * value_dim + 2 * heads),
            use_bias=proj_bias,
            kernel_init=kernel_init,
        )
        self.conv = CausalConv(
            num_key_heads * (2 * key_dim + heads * value_dim),
            conv_kernel,
            use_bias=conv_bias,
            max_tokens=max_tokens,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=conv_kernel_init,
            rngs=rngs,
        )
        self.A_log = nnx.Param(A_log_init(rngs.params(), (num_value_heads,), jnp.float32))
        self.dt_bias = nnx.data(
            nnx.Param(dt_bias_init(rngs.params(), (num_value_heads,), jnp.float32))
            if use_dt_bias
            else None
        )
        self.norm = GatedRMSNorm(
            value_dim, epsilon=norm_epsilon, param_dtype=param_dtype, rngs=rngs
        )
        self.out_proj = linear(
            num_value_heads * value_dim,
            d_model,
            use_bias=proj_bias,
            kernel_init=out_kernel_init,
        )

    def project(self, x: jax.Array) -> tuple[jax.Array, _Rest]:
        """Project `x` once for everything that the layer needs."""
        spec = self.spec
        lead = x.shape[:2]
        heads = spec.heads_per_group
        width = heads * spec.value_dim
        convolved = 2 * spec.key_dim + width
        parts = self.in_proj(x).reshape(*lead, spec.num_groups, -1)
        channels, z, b, a = jnp.split(
            parts, [convolved, convolved + width, convolved + width + heads], axis=-1
        )
        z = z.reshape(*lead, spec.num_heads, spec.value_dim)
        rest = _Rest(z, b.reshape(*lead, -1), a.reshape(*lead, -1))
        return channels.reshape(*lead, -1), rest

    def records(self, channels: jax.Array, rest: _Rest) -> TokenInputs:
        """Split the channels and build the records."""
        spec = self.spec
        lead = channels.shape[:2]
        parts = channels.reshape(*lead, spec.num_groups, -1)
        q, k, v = jnp.split(parts, [spec.key_dim, 2 * spec.key_dim], axis=-1)
        inputs = TokenInputs.gated_delta_net(
            q,
            k,
            v.reshape(*lead, spec.num_heads, spec.value_dim),
            rest.a.astype(spec.compute_dtype),
            rest.b.astype(spec.compute_dtype),
            self.A_log[...],
            None if self.dt_bias is None else self.dt_bias[...],
        )
        if self.allow_neg_eigval:
            inputs = dataclasses.replace(inputs, beta=2 * inputs.beta)
        return inputs

    def output(self, o: jax.Array, inputs: TokenInputs, rest: _Rest) -> jax.Array:
        """Norm, gate and project the outputs of the heads."""
        y = self.norm(o, rest.z)
        return self.out_proj(y.reshape(*y.shape[:2], -1).astype(self.dtype))
