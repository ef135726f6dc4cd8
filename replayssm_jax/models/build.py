"""From a HybridConfig to its blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx

from replayssm_jax.layers import (
    MLP,
    Attention,
    GatedDeltaNet,
    HybridBlock,
    KimiDeltaAttention,
    Mamba2,
    MoE,
    ReplayMixer,
)
from replayssm_jax.layers.activations import default_kernel_init, scaled
from replayssm_jax.models.config import HybridConfig, LayerConfig, MixerKind, MLPKind

_LAYERS: dict[str, Any] = {
    "mamba2": Mamba2,
    "gated_delta_net": GatedDeltaNet,
    "kda": KimiDeltaAttention,
    "attention": Attention,
}


def _heads(config: HybridConfig, kind: MixerKind) -> dict[str, int]:
    """The head count that a None in the config stands for."""
    if kind == "mamba2":
        return {"num_heads": max(1, 2 * config.d_model // config.mamba2.head_dim)}
    if kind == "gated_delta_net":
        return {"num_key_heads": max(1, config.d_model // config.gated_delta_net.value_dim)}
    if kind == "kda":
        return {"num_heads": max(1, config.d_model // config.kda.value_dim)}
    return {"num_heads": max(1, config.d_model // (config.attention.head_dim or 64))}


def build_mixer(
    config: HybridConfig, kind: MixerKind, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs
) -> ReplayMixer | Attention:
    """Build one mixer of the model."""
    given = dataclasses.asdict(getattr(config, kind))
    options = _heads(config, kind) | {k: v for k, v in given.items() if v is not None}
    if kind != "attention":
        options |= {
            "replay_window": config.replay_window,
            "max_tokens": config.max_tokens,
            "state_dtype": config.state_dtype,
            "read_dtype": config.read_dtype,
        }
    return _LAYERS[kind](
        config.d_model,
        **options,
        out_kernel_init=scaled(default_kernel_init, _depth_scale(config)),
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=rngs,
    )


def build_mlp(
    config: HybridConfig, kind: MLPKind, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs
) -> MLP | MoE:
    """Build the MLP of one block."""
    kw: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    if kind == "moe":
        options = dataclasses.asdict(config.moe)
        options["d_expert"] = options["d_expert"] or config.inner_width
        init = scaled(nnx.initializers.lecun_normal(batch_axis=0), _depth_scale(config))
        return MoE(config.d_model, **options, out_kernel_init=init, **kw)
    return MLP(
        config.d_model,
        config.inner_width,
        activation="silu" if kind == "swiglu" else "relu2",
        gated=kind == "swiglu",
        out_kernel_init=scaled(default_kernel_init, _depth_scale(config)),
        **kw,
    )


def build_block(
    config: HybridConfig, layer: LayerConfig, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs
) -> HybridBlock:
    """Build one block of the model."""
    kw: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    return HybridBlock(
        config.d_model,
        mixers=[build_mixer(config, kind, **kw) for kind in layer.mixers],
        mlp=None if layer.mlp is None else build_mlp(config, layer.mlp, **kw),
        norm=layer.norm,
        residual_scale=config.residual_scale,
        norm_epsilon=config.norm_epsilon,
        param_dtype=jnp.float32,
        rngs=rngs,
    )


def _depth_scale(config: HybridConfig) -> float:
    """Factor of the output projections: the residual stream sums this many branches."""
    branches = sum(len(block.mixers) + (block.mlp is not None) for block in config.blocks)
    return float(branches**-0.5)
