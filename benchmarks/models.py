"""Whole models with the shapes of published ones, their depth cut: what benchmarks decode with.

Weights are random. Where layers are cut the vocabulary is cut in proportion, so that the output
head keeps its share of a pass.
"""

import dataclasses
import math
from typing import Any

import harness
import jax.numpy as jnp
from flax import nnx

from replayssm_jax.models import (
    AttentionConfig,
    GatedDeltaNetConfig,
    HybridConfig,
    HybridLM,
    KDAConfig,
    LayerConfig,
    Mamba2Config,
)


def _nemotron_layers(pattern: str) -> tuple[LayerConfig, ...]:
    """Blocks of one branch each: M a mixer, * attention, - an MLP."""
    kinds = {
        "M": LayerConfig(("mamba2",)),
        "*": LayerConfig(("attention",)),
        "-": LayerConfig((), "relu2"),
    }
    return tuple(kinds[letter] for letter in pattern)


MODELS = {
    # NVIDIA-Nemotron-3-Nano-4B: 21 Mamba-2, 4 attention and 17 MLP blocks
    "nemotron-3-nano-4b": HybridConfig(
        vocab_size=131072,
        d_model=3136,
        mixer="mamba2",
        d_ff=12544,
        layers=_nemotron_layers("M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-"),
        mamba2=Mamba2Config(num_heads=96, head_dim=80, state_dim=128, num_groups=8, norm_groups=8),
        attention=AttentionConfig(num_heads=40, num_kv_heads=8, head_dim=128, rope_fraction=0.0),
        tie_embeddings=False,
    ),
    # Qwen3.5-4B: 24 GDN and 8 gated attention blocks
    "qwen3.5-4b": HybridConfig(
        vocab_size=248320,
        d_model=2560,
        pattern="MMMA" * 8,
        mixer="gated_delta_net",
        mlp="swiglu",
        d_ff=9216,
        gated_delta_net=GatedDeltaNetConfig(
            num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128
        ),
        attention=AttentionConfig(
            num_heads=16,
            num_kv_heads=4,
            head_dim=256,
            rope_fraction=0.25,
            rope_base=1e7,
            qk_norm=True,
            output_gate=True,
        ),
    ),
    # Kimi-Linear-48B-A3B: 20 KDA and 7 attention blocks. Dense MLPs as wide as its experts that
    # are active for a token, 9 of 1024; attention with a KV cache about as wide as its latent one.
    "kimi-linear": HybridConfig(
        vocab_size=163840,
        d_model=2304,
        pattern="MMMA" * 6 + "MMA",
        mixer="kda",
        mlp="swiglu",
        d_ff=9216,
        kda=KDAConfig(num_heads=32, key_dim=128, value_dim=128, gate_rank=128),
        attention=AttentionConfig(num_heads=32, num_kv_heads=2, head_dim=128, rope_fraction=0.0),
        tie_embeddings=False,
    ),
    # For tests and for a CPU: every shape small.
    "tiny": HybridConfig(
        vocab_size=64,
        d_model=32,
        pattern="MA",
        mixer="mamba2",
        mlp=None,
        mamba2=Mamba2Config(num_heads=2, head_dim=8, state_dim=8),
        attention=AttentionConfig(num_heads=2, head_dim=16),
    ),
}

FAMILIES = {name: config.mixer for name, config in MODELS.items()}


def cut(config: HybridConfig, layers: int | None) -> HybridConfig:
    """The first `layers` blocks of a model, None for all, and that share of its vocabulary."""
    if layers is None or layers >= len(config.blocks):
        return config
    vocabulary = max(64, 64 * round(config.vocab_size * layers / len(config.blocks) / 64))
    return dataclasses.replace(config, layers=config.blocks[:layers], vocab_size=vocabulary)


def make_model(config: HybridConfig, dtype: Any) -> HybridLM:
    """A model with random weights in `dtype`, made on the device."""
    # Logits with a standard deviation of about 3, so that the layers decide on the tokens.
    head = 0.02 if config.tie_embeddings else config.d_model**-0.5
    config = dataclasses.replace(config, logit_scale=3 / (head * math.sqrt(config.d_model)))
    key = harness.random_key(0)
    build = nnx.jit(lambda: HybridLM(config, rngs=nnx.Rngs(key), dtype=dtype, param_dtype=dtype))
    return build()


def with_room_for(model: HybridLM, tokens: int, window: int | None = None) -> HybridLM:
    """The same weights with rings for `tokens` tokens a pass, and another replay window."""
    window = model.config.replay_window if window is None else window
    config = dataclasses.replace(model.config, max_tokens=tokens, replay_window=window)
    dtypes: dict[str, Any] = {"dtype": model.dtype, "param_dtype": model.embed.param_dtype}
    wider = nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0), **dtypes))
    nnx.update(wider, nnx.state(model))
    return wider


DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
