"""Layers of published models by name: the cases that benchmarks and kernel tests share."""

import replayssm_jax as rs

LAYERS = {
    # Nemotron-H 8B and 56B
    "mamba2": (
        "128 heads x 64 x 128, 8 groups",
        rs.ReplaySpec.mamba2,
        dict(num_heads=128, head_dim=64, state_dim=128, num_groups=8),
    ),
    # Nemotron-3-Nano-4B
    "mamba2-80": (
        "96 heads x 80 x 128, 8 groups",
        rs.ReplaySpec.mamba2,
        dict(num_heads=96, head_dim=80, state_dim=128, num_groups=8),
    ),
    # Qwen3-Next and Qwen3.5
    "gated_delta_net": (
        "32 value and 16 key heads, 128 x 128",
        rs.ReplaySpec.gated_delta_net,
        dict(num_value_heads=32, num_key_heads=16, key_dim=128, value_dim=128),
    ),
    # Kimi Linear
    "kda": (
        "32 heads, 128 x 128",
        rs.ReplaySpec.kda,
        dict(num_heads=32, key_dim=128, value_dim=128),
    ),
}


def make_spec(layer: str, **overrides) -> rs.ReplaySpec:
    """The ReplaySpec of a layer, with other windows, dtypes and so on."""
    _, constructor, shapes = LAYERS[layer]
    return constructor(**shapes, **overrides)


def describe(layer: str) -> str:
    """Shapes of a layer in words."""
    return f"{layer}, {LAYERS[layer][0]}"
