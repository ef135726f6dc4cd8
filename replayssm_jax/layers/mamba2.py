"""Mamba-2 mixer (arXiv:2405.21060), as Nemotron-H, Bamba, Falcon-H1 and Granite 4 use it.

Channels are laid out group by group, so that a mesh axis that divides the groups cuts the input
projection, the convolution and the ring where it cuts the heads:
in_proj gives [G, z | x | B | C | dt], the convolution takes [G, x | B | C].
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from replayssm_jax.arguments import check_dt_limits, float_dtype
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
    dt: jax.Array


class Mamba2(ReplayMixer):
    """Mamba-2 mixer: y, cache = layer(x [B, T, d_model], cache).

    Args:
      d_model: width of the hidden state.
      num_heads: H.
      head_dim: P; the inner width is H * P.
      state_dim: N.
      num_groups: G, groups of heads that share B and C.
      conv_kernel: taps of the short convolution.
      conv_bias, proj_bias: whether the convolution and the projections have biases.
      use_dt_bias, use_D: whether these parameters exist.
      dt_limits: limits of dt after the softplus, 0 <= lower <= upper. The softplus has no
        threshold: above 20, where other implementations return its argument, both are equal in
        float32.
      gated_norm: whether a gated RMS norm follows; without it the output is only gated by silu(z).
      norm_before_gate: the norm before the gate instead of after it.
      norm_groups: groups of the norm, `num_groups` by default.
      norm_epsilon: of the norm.
      replay_window, max_tokens, state_dtype, read_dtype: see `ReplaySpec`.
      dtype: of activations and of the cached records.
      param_dtype: of the projections' and the convolution's parameters; A_log, dt_bias and D stay
        float32.
      kernel_init, out_kernel_init, conv_kernel_init, A_log_init, dt_bias_init: initialisers.
      rngs: of the parameters.
    """

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int,
        head_dim: int = 64,
        state_dim: int = 128,
        num_groups: int = 1,
        conv_kernel: int = 4,
        conv_bias: bool = True,
        proj_bias: bool = False,
        use_dt_bias: bool = True,
        use_D: bool = True,
        dt_limits: tuple[float, float] = (0.0, float("inf")),
        gated_norm: bool = True,
        norm_before_gate: bool = False,
        norm_groups: int | None = None,
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
        self.dt_limits = check_dt_limits(dt_limits)
        self.spec = ReplaySpec.mamba2(
            num_heads=num_heads,
            head_dim=head_dim,
            state_dim=state_dim,
            num_groups=num_groups,
            window=replay_window,
            max_tokens=max_tokens,
            state_dtype=state_dtype,
            read_dtype=read_dtype,
            key_dtype=self.dtype,
            value_dtype=self.dtype,
        )
        linear = functools.partial(nnx.Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        heads = self.spec.heads_per_group
        inner = num_heads * head_dim
        self.in_proj = linear(
            d_model,
            num_groups * (2 * heads * head_dim + 2 * state_dim + heads),
            use_bias=proj_bias,
            kernel_init=kernel_init,
        )
        self.conv = CausalConv(
            num_groups * (heads * head_dim + 2 * state_dim),
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
            nnx.Param(dt_bias_init(rngs.params(), (num_heads,), jnp.float32))
            if use_dt_bias
            else None
        )
        self.D = nnx.data(nnx.Param(jnp.ones((num_heads,), jnp.float32)) if use_D else None)
        self.norm = nnx.data(
            GatedRMSNorm(
                inner,
                num_groups=num_groups if norm_groups is None else norm_groups,
                norm_before_gate=norm_before_gate,
                epsilon=norm_epsilon,
                param_dtype=param_dtype,
                rngs=rngs,
            )
            if gated_norm
            else None
        )
        self.out_proj = linear(
            inner,
            d_model,
            use_bias=proj_bias,
            kernel_init=out_kernel_init,
        )

    def project(self, x: jax.Array) -> tuple[jax.Array, _Rest]:
        """Project `x` once for everything that the layer needs."""
        spec = self.spec
        lead = x.shape[:2]
        width = spec.heads_per_group * spec.value_dim
        parts = self.in_proj(x).reshape(*lead, spec.num_groups, -1)
        z, channels, dt = jnp.split(parts, [width, 2 * (width + spec.key_dim)], axis=-1)
        rest = _Rest(z.reshape(*lead, -1), dt.reshape(*lead, -1))
        return channels.reshape(*lead, -1), rest

    def records(self, channels: jax.Array, rest: _Rest) -> TokenInputs:
        """Split the channels and build the records."""
        spec = self.spec
        lead = channels.shape[:2]
        width = spec.heads_per_group * spec.value_dim
        parts = channels.reshape(*lead, spec.num_groups, -1)
        x, B, C = jnp.split(parts, [width, width + spec.key_dim], axis=-1)
        return TokenInputs.mamba2(
            x.reshape(*lead, spec.num_heads, spec.value_dim),
            rest.dt.astype(spec.compute_dtype),
            B,
            C,
            self.A_log[...],
            None if self.dt_bias is None else self.dt_bias[...],
            dt_limits=self.dt_limits,
        )

    def output(self, o: jax.Array, inputs: TokenInputs, rest: _Rest) -> jax.Array:
        """Norm, gate and project the outputs of the heads."""
        y = o.astype(jnp.float32)
        if self.D is not None:
            skip = jnp.broadcast_to(self.D[...].astype(jnp.float32)[:, None], y.shape)
            y = y + skip * inputs.v.astype(jnp.float32)
        y = y.reshape(*y.shape[:2], -1)
        if self.norm is None:
            y = y * jax.nn.silu(rest.z.astype(jnp.float32))
        else:
            y = self.norm(y, rest.z)
        return self.out_proj(y.astype(self.dtype))
