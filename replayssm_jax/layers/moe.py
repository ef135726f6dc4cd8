"""Mixture of experts: top-k routing through `jax.lax.ragged_dot`, and a shared expert."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from replayssm_jax.arguments import float_dtype
from replayssm_jax.layers.activations import ACTIVATIONS, Activation, default_kernel_init
from replayssm_jax.layers.arguments import check_features, check_params
from replayssm_jax.layers.mlp import MLP
from replayssm_jax.layers.options import check_option

Scoring = Literal["softmax", "sigmoid"]

_per_expert = nnx.initializers.lecun_normal(batch_axis=0)


class MoE(nnx.Module):
    """Sum of the `top_k` best experts of each token, weighted by their scores.

    Tokens are sorted by expert and each projection of all experts is one `ragged_dot`, so no token
    is ever dropped and a token's result does not depend on the others.

    Args:
      d_model: width of the hidden state.
      num_experts: E.
      top_k: experts of each token.
      d_expert: inner width of an expert.
      d_shared: inner width of the shared expert, which sees every token; 0 for none.
      shared_gate: whether the shared expert is multiplied by a sigmoid gate of the token.
      scoring: "softmax" or "sigmoid" of the router's logits, in float32.
      normalise: whether the chosen scores are divided by their sum.
      routed_scale: multiplies the routed sum.
      selection_bias: whether a bias for each expert is added to the scores for the choice alone.
      num_groups, top_groups: experts are chosen from the `top_groups` of `num_groups` groups with
        the highest sum of their two best scores.
      activation, gated: as in `MLP`.
      dtype, param_dtype, kernel_init, out_kernel_init: as in `flax.nnx.Linear`; the initialisers
        are called with the shape [E, in, out].
      rngs: of the parameters.
    """

    def __init__(
        self,
        d_model: int,
        *,
        num_experts: int,
        top_k: int,
        d_expert: int,
        d_shared: int = 0,
        shared_gate: bool = False,
        scoring: Scoring = "softmax",
        normalise: bool = True,
        routed_scale: float = 1.0,
        selection_bias: bool = False,
        num_groups: int = 1,
        top_groups: int = 1,
        activation: Activation = "silu",
        gated: bool = True,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = _per_expert,
        out_kernel_init: Any = _per_expert,
        rngs: nnx.Rngs,
    ):
        check_params(param_dtype, rngs)
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k must be between 1 and {num_experts}, found {top_k}")
        if num_experts % num_groups or not 1 <= top_groups <= num_groups:
            raise ValueError(
                "num_groups must divide num_experts and hold top_groups, found "
                f"num_groups={num_groups}, num_experts={num_experts}, top_groups={top_groups}"
            )
        if top_k > top_groups * (num_experts // num_groups):
            raise ValueError(f"top_k must fit in {top_groups} groups, found top_k={top_k}")
        self.num_experts = num_experts
        self.top_k = top_k
        self.scoring: Scoring = check_option("scoring", scoring, Scoring)
        self.normalise = normalise
        self.routed_scale = routed_scale
        self.num_groups = num_groups
        self.top_groups = top_groups
        self.activation: Activation = check_option("activation", activation, Activation)
        self.dtype = float_dtype("dtype", dtype)

        def experts(d_in: int, d_out: int, init: Any) -> nnx.Param:
            return nnx.Param(init(rngs.params(), (num_experts, d_in, d_out), param_dtype))

        self.router = nnx.Param(
            default_kernel_init(rngs.params(), (d_model, num_experts), jnp.float32)
        )
        self.selection_bias = nnx.data(
            nnx.Param(jnp.zeros((num_experts,), jnp.float32)) if selection_bias else None
        )
        self.gate_experts = nnx.data(experts(d_model, d_expert, kernel_init) if gated else None)
        self.up_experts = experts(d_model, d_expert, kernel_init)
        self.down_experts = experts(d_expert, d_model, out_kernel_init)
        self.shared = nnx.data(
            MLP(
                d_model,
                d_shared,
                activation=activation,
                gated=gated,
                dtype=dtype,
                param_dtype=param_dtype,
                rngs=rngs,
            )
            if d_shared
            else None
        )
        self.shared_gate = nnx.data(
            nnx.Linear(d_model, 1, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
            if d_shared and shared_gate
            else None
        )

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Choose experts for x [N, d_model]: weights float32 and indices int32, both [N, top_k]."""
        logits = jnp.matmul(x.astype(jnp.float32), self.router[...].astype(jnp.float32))
        if self.scoring == "softmax":
            scores = jax.nn.softmax(logits, axis=-1)
        else:
            scores = jax.nn.sigmoid(logits)
        choice = scores
        if self.selection_bias is not None:
            choice = choice + self.selection_bias[...].astype(jnp.float32)[None, :]
        if self.num_groups > 1:
            choice = self._in_best_groups(choice)
        _, experts = jax.lax.top_k(choice, self.top_k)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if self.normalise:
            total = jnp.sum(weights, axis=-1, keepdims=True)
            weights = weights / (total + 1e-20)
        return weights * self.routed_scale, experts

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map x [..., d_model] to [..., d_model]."""
        check_features(x, self.router.shape[0])
        tokens = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        weights, experts = self.route(tokens)
        flat = experts.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        sizes = jnp.bincount(flat, length=self.num_experts).astype(jnp.int32)
        routed = self._experts(tokens[order // self.top_k], sizes)
        back = jnp.argsort(order)
        routed = routed[back].reshape(-1, self.top_k, x.shape[-1]).astype(jnp.float32)
        y = jnp.sum(routed * weights[:, :, None], axis=1).astype(self.dtype)
        if self.shared is not None:
            shared = self.shared(tokens)
            if self.shared_gate is not None:
                gate = jax.nn.sigmoid(self.shared_gate(tokens).astype(jnp.float32))
                shared = shared * gate.astype(shared.dtype)
            y = y + shared
        return y.reshape(x.shape)

    def _experts(self, tokens: jax.Array, sizes: jax.Array) -> jax.Array:
        def dot(x: jax.Array, kernels: nnx.Param) -> jax.Array:
            return jax.lax.ragged_dot(x, kernels[...].astype(self.dtype), sizes)

        act = ACTIVATIONS[self.activation]
        up = dot(tokens, self.up_experts)
        if self.gate_experts is None:
            return dot(act(up), self.down_experts)
        return dot(act(dot(tokens, self.gate_experts)) * up, self.down_experts)

    def _in_best_groups(self, choice: jax.Array) -> jax.Array:
        grouped = choice.reshape(choice.shape[0], self.num_groups, -1)
        best = jnp.sum(jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0], axis=-1)
        _, groups = jax.lax.top_k(best, self.top_groups)
        ids = jnp.arange(self.num_groups, dtype=groups.dtype)
        chosen = jnp.any(groups[:, :, None] == ids[None, None, :], axis=1)
        return jnp.where(chosen[:, :, None], grouped, -jnp.inf).reshape(choice.shape)
