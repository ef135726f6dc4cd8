"""HybridConfig: patterns, lists, JSON, errors."""

import dataclasses
import functools
import json

import pytest
from flax import nnx
from model_cases import make_config

from replayssm_jax import layers
from replayssm_jax.models import HybridConfig, HybridLM, LayerConfig, Mamba2Config


def test_pattern_and_list_describe_the_same_model():
    by_pattern = make_config("kda", mlp="swiglu", pattern="MA-")
    by_list = make_config(
        "kda",
        layers=[
            LayerConfig(("kda",), "swiglu"),
            LayerConfig(("attention",), "swiglu"),
            LayerConfig((), "swiglu"),
        ],
    )
    assert by_pattern.blocks == by_list.blocks


def test_survives_json():
    configs = [
        make_config("mamba2"),
        make_config("mamba2", mamba2=Mamba2Config(dt_limits=(0.0, 0.5))),
        make_config("kda", layers=[LayerConfig(("kda", "attention"), "moe", "post")]),
    ]
    for config in configs:
        again = HybridConfig.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False)))
        assert again == config
        assert hash(again) == hash(config)


def test_repeated_unit_leaves_the_fewest_blocks_to_trace():
    def shape(pattern):
        config = make_config("mamba2", mlp="swiglu", pattern=pattern, scan_layers=True)
        runs = config.segments
        assert sum((blocks * count for blocks, count in runs), ()) == config.blocks
        return [(len(blocks), count) for blocks, count in runs]

    assert shape("MMMA" * 12) == [(4, 12)]
    assert shape("M" * 7) == [(1, 7)]
    assert shape("MA") == [(2, 1)]
    assert shape("-" + "MA" * 3 + "MM") == [(1, 1), (2, 3), (2, 1)]
    assert [n for _, n in make_config("mamba2", pattern="MMMM").segments] == [1]


def test_default_widths():
    config = make_config("mamba2", mlp="swiglu", d_model=96, d_ff=None)
    assert config.inner_width == 256
    assert dataclasses.replace(config, mlp="relu2").inner_width == 384


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(pattern="MX"), "pattern may hold"),
        (dict(pattern=""), "at least one layer"),
        (dict(vocab_size=0), "vocab_size must be at least 1"),
        (dict(mixer="mamba1"), "mixer must be one of"),
        (dict(mlp="gelu"), "mlp must be None or one of"),
        (dict(mlp=None, pattern="M-"), "needs a mixer or an MLP"),
        (dict(layers=[]), "at least one layer"),
    ],
)
def test_impossible_models_raise(options, message):
    with pytest.raises(ValueError, match=message):
        make_config("mamba2", **options)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(read_dtype="fp8"), "read_dtype must be a dtype, one of bfloat16, .*, found 'fp8'"),
        (dict(state_dtype="fp8"), "state_dtype must be a dtype, one of float32, .*, found 'fp8'"),
        (dict(state_dtype=None), "state_dtype must be a dtype, one of float32, .*, found None"),
        (dict(d_model="wide"), "d_model must be an int, found 'wide'"),
        (dict(max_tokens=2.0), "max_tokens must be an int, found 2.0"),
    ],
)
def test_options_of_a_wrong_kind_raise(options, message):
    with pytest.raises(TypeError, match=message):
        make_config("mamba2", **options)


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(HybridLM, make_config("mamba2")),
        functools.partial(layers.Mamba2, 16, num_heads=2, head_dim=8, state_dim=8),
        functools.partial(layers.GatedDeltaNet, 16, num_key_heads=2, key_dim=8, value_dim=8),
        functools.partial(layers.KimiDeltaAttention, 16, num_heads=2, key_dim=8, value_dim=8),
        functools.partial(layers.Attention, 16, num_heads=2),
        functools.partial(layers.CausalConv, 16),
        functools.partial(layers.MoE, 16, num_experts=4, top_k=2, d_expert=8),
    ],
    ids=lambda make: make.func.__name__,
)
def test_dtypes_that_there_are_not_raise(make):
    with pytest.raises(TypeError, match="dtype must be a floating dtype, found 'fp8'"):
        make(rngs=nnx.Rngs(0), dtype="fp8")
