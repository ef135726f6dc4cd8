"""Kimi Delta Attention mixer (arXiv:2510.26692): the delta rule with one decay a key channel.

Channels are laid out by head: in_proj gives [H, q | k | v | b], the convolution takes
[H, q | k | v]. The decay and the output gate come from low-rank projections, which share one
input projection.
"""

from __future__ import annotations

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
from replayssm_jax.layers.apart import apart
from replayssm_jax.layers.arguments import check_params
from replayssm_jax.layers.causal_conv import CausalConv, uniform_taps
from replayssm_jax.layers.mixer import ReplayMixer
from replayssm_jax.layers.norm import GatedRMSNorm
from replayssm_jax.layers.options import check_option
from replayssm_jax.spec import ReplaySpec


class _Rest(NamedTuple):
    z: jax.Array
    b: jax.Array
    a: jax.Array


class KimiDeltaAttention(ReplayMixer):
    """KDA mixer: y, cache = layer(x [B, T, d_model], cache).

    Args:
      d_model: width of the hidden state.
      num_heads: H.
      key_dim: N.
      value_dim: P.
      gate_rank: rank of the decay and of the output gate, `value_dim` by default; 0 projects both
        directly.
      lower_bound: None for the plain gate, or the least log-decay of the bounded gate, e.g. -5.
      conv_kernel: taps of the short convolution.
      conv_bias, proj_bias: whether the convolution and q, k, v and output have biases.
      gate_bias: whether the output gate has a bias.
      use_dt_bias: whether the decay has a bias.
      norm_epsilon: of the gated norm, norm(o) * sigmoid(z) for each head.
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
        num_heads: int,
        key_dim: int = 128,
        value_dim: int = 128,
        gate_rank: int | None = None,
        lower_bound: float | None = None,
        conv_kernel: int = 4,
        conv_bias: bool = False,
        proj_bias: bool = False,
        gate_bias: bool = False,
        use_dt_bias: bool = True,
        norm_epsilon: float = 1e-5,
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
        self.dtype = float_dtype("dtype", dtype)
        self.lower_bound = check_option("lower_bound", lower_bound, float | None)
        self.gate_rank = value_dim if gate_rank is None else gate_rank
        self.spec = ReplaySpec.kda(
            num_heads=num_heads,
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
        channels = num_heads * (2 * key_dim + value_dim)
        gate_in = self.gate_rank or d_model
        self.in_proj = linear(
            d_model, channels + num_heads, use_bias=proj_bias, kernel_init=kernel_init
        )
        self.gate_in_proj = nnx.data(
            linear(d_model, 2 * self.gate_rank, use_bias=False, kernel_init=kernel_init)
            if self.gate_rank
            else None
        )
        self.decay_proj = linear(
            gate_in, num_heads * key_dim, use_bias=False, kernel_init=kernel_init
        )
        self.gate_proj = linear(
            gate_in, num_heads * value_dim, use_bias=gate_bias, kernel_init=kernel_init
        )
        self.conv = CausalConv(
            channels,
            conv_kernel,
            use_bias=conv_bias,
            max_tokens=max_tokens,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=conv_kernel_init,
            rngs=rngs,
        )
        self.A_log = nnx.Param(A_log_init(rngs.params(), (num_heads,), jnp.float32))
        self.dt_bias = nnx.data(
            nnx.Param(dt_bias_init(rngs.params(), (num_heads, key_dim), jnp.float32))
            if use_dt_bias
            else None
        )
        self.norm = GatedRMSNorm(
            value_dim,
            activation="sigmoid",
            epsilon=norm_epsilon,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.out_proj = linear(
            num_heads * value_dim, d_model, use_bias=proj_bias, kernel_init=out_kernel_init
        )

    def project(self, x: jax.Array) -> tuple[jax.Array, _Rest]:
        """Project `x` once for everything that the layer needs."""
        spec = self.spec
        lead = x.shape[:2]
        x, decay_in, gate_in = apart(x, 3)
        parts = self.in_proj(x).reshape(*lead, spec.num_heads, -1)
        channels, b = jnp.split(parts, [2 * spec.key_dim + spec.value_dim], axis=-1)
        if self.gate_in_proj is not None:
            decay_in, gate_in = jnp.split(self.gate_in_proj(gate_in), 2, axis=-1)
        a = self.decay_proj(decay_in).reshape(*lead, spec.num_heads, spec.key_dim)
        z = self.gate_proj(gate_in).reshape(*lead, spec.num_heads, spec.value_dim)
        return channels.reshape(*lead, -1), _Rest(z, b[..., 0], a)

    def records(self, channels: jax.Array, rest: _Rest) -> TokenInputs:
        """Split the channels and build the records."""
        spec = self.spec
        parts = channels.reshape(*channels.shape[:2], spec.num_heads, -1)
        q, k, v = jnp.split(parts, [spec.key_dim, 2 * spec.key_dim], axis=-1)
        return TokenInputs.kda(
            q,
            k,
            v,
            rest.a.astype(spec.compute_dtype),
            rest.b.astype(spec.compute_dtype),
            self.A_log[...],
            None if self.dt_bias is None else self.dt_bias[...],
            lower_bound=self.lower_bound,
        )

    def output(self, o: jax.Array, inputs: TokenInputs, rest: _Rest) -> jax.Array:
        """Norm, gate and project the outputs of the heads."""
        y = self.norm(o, rest.z)
        return self.out_proj(y.reshape(*y.shape[:2], -1).astype(self.dtype))
