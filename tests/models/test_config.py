"""HybridConfig: patterns, lists, JSON, errors."""

import dataclasses
import functools
import json
import math

import numpy as np
import pytest
from flax import nnx
from model_cases import make_config

from replayssm_jax import layers
from replayssm_jax.models import (
    AttentionConfig,
    GatedDeltaNetConfig,
    HybridConfig,
    HybridLM,
    KDAConfig,
    LayerConfig,
    Mamba2Config,
    MoEConfig,
    MTPHeads,
)


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
        (dict(d_ff=0), "d_ff must be at least 1, found 0"),
        (dict(residual_scale=math.nan), "residual_scale must be finite, found nan"),
        (dict(embedding_scale=math.inf), "embedding_scale must be finite, found inf"),
        (dict(norm_epsilon=-1), "norm_epsilon must be at least 0, found -1"),
        (dict(max_tokens=9, replay_window=8), "max_tokens must be at most replay_window, found"),
        (dict(pattern="A", mixer="x"), "mixer must be one of .*, found 'x'"),
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
        (dict(d_ff=True), "d_ff must be an int, found True"),
        (dict(d_ff=16.0), "d_ff must be an int, found 16.0"),
        (dict(logit_scale="1"), "logit_scale must be a number, found '1'"),
        (dict(tie_embeddings="no"), "tie_embeddings must be a bool, found 'no'"),
        (dict(scan_layers=1), "scan_layers must be a bool, found 1"),
        (dict(remat="x"), "remat must be a bool, found 'x'"),
        (dict(pattern=["M", "A"]), r"pattern must be a string of letters, found \['M', 'A'\]"),
        (dict(layers=("M",)), r"layers\[0\] must be a LayerConfig, found str"),
        (dict(layers="MA"), "layers must be a tuple of LayerConfig, found 'MA'"),
        (dict(layers=LayerConfig(("kda",))), "layers must be a tuple of LayerConfig, found Layer"),
        (dict(mamba2={"head_dim": 16}), "mamba2 must be a Mamba2Config, found dict"),
        (dict(gated_delta_net=None), "gated_delta_net must be a GatedDeltaNetConfig, found None"),
        (dict(kda=Mamba2Config()), "kda must be a KDAConfig, found Mamba2Config"),
        (dict(attention={}), "attention must be an AttentionConfig, found dict"),
        (dict(moe={}), "moe must be a MoEConfig, found dict"),
    ],
)
def test_options_of_a_wrong_kind_raise(options, message):
    with pytest.raises(TypeError, match=message):
        make_config("mamba2", **options)


@pytest.mark.parametrize(
    "kind, options, message",
    [
        (AttentionConfig, dict(sliding_window=0), "sliding_window must be at least 1, found 0"),
        (AttentionConfig, dict(sliding_window=2.0), "sliding_window must be an int, found 2.0"),
        (AttentionConfig, dict(num_heads=0), "num_heads must be at least 1, found 0"),
        (AttentionConfig, dict(rope_fraction=1.5), r"rope_fraction must be in \[0, 1\], found 1.5"),
        (AttentionConfig, dict(rope_base=0), "rope_base must be above 0, found 0"),
        (AttentionConfig, dict(rope_base=math.inf), "rope_base must be finite, found inf"),
        (AttentionConfig, dict(scale=math.nan), "scale must be finite, found nan"),
        (MoEConfig, dict(scoring="x"), r"scoring must be one of \('softmax', .*, found 'x'"),
        (MoEConfig, dict(activation="x"), r"activation must be one of \('silu', .*, found 'x'"),
        (MoEConfig, dict(activation=None), "activation must be one of .*, found None"),
        (MoEConfig, dict(d_shared=-1), "d_shared must be at least 0, found -1"),
        (MoEConfig, dict(d_expert=0), "d_expert must be at least 1, found 0"),
        (GatedDeltaNetConfig, dict(value_dim=0), "value_dim must be at least 1, found 0"),
        (GatedDeltaNetConfig, dict(conv_bias=None), "conv_bias must be a bool, found None"),
        (KDAConfig, dict(gate_rank=-1), "gate_rank must be at least 0, found -1"),
        (KDAConfig, dict(lower_bound=0), "lower_bound must be negative, found 0"),
        (Mamba2Config, dict(head_dim=0), "head_dim must be at least 1, found 0"),
        (LayerConfig, dict(mixers="kda"), "mixers must be a tuple of names, found 'kda'"),
        *(
            (Mamba2Config, dict(dt_limits=limits), "dt_limits must be .*0 <= lower <= upper")
            for limits in [(-2, -1), (-1, 1), (2, 1), (0,), (0, 1, 2), None, (0, math.nan)]
        ),
        (Mamba2Config, dict(dt_limits=(math.inf, math.inf)), "with a finite lower one, found"),
        (Mamba2Config, dict(dt_limits=(0, "1")), r"dt_limits\[1\] must be a number, found '1'"),
    ],
)
def test_impossible_options_of_a_layer_raise(kind, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        kind(**options)


def test_options_become_numbers_of_python():
    """NumPy's and lists too, so that a config is hashable and goes to JSON."""
    config = make_config(
        "mamba2",
        d_model=np.int64(16),
        logit_scale=np.float32(0.5),
        remat=np.True_,
        mamba2=Mamba2Config(head_dim=np.int32(4), dt_limits=[0, 1]),
        attention=AttentionConfig(sliding_window=np.int32(1), rope_fraction=0),
        kda=KDAConfig(gate_rank=0),
    )
    again = HybridConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config and hash(again) == hash(config)
    assert config.mamba2.dt_limits == (0.0, 1.0)
    assert type(config.d_model) is int and type(config.logit_scale) is float


@pytest.mark.parametrize(
    "make, message",
    [
        (functools.partial(HybridLM, {}), "config must be a HybridConfig, found dict"),
        (functools.partial(HybridLM, make_config("kda"), rngs=0), "rngs must be a Rngs, found int"),
        (functools.partial(MTPHeads, 16, rngs=0), "rngs must be a Rngs, found int"),
        (functools.partial(MTPHeads, 16, num_heads=1.0), "num_heads must be an int, found 1.0"),
        (functools.partial(MTPHeads, 16, d_ff=0), "d_ff must be at least 1, found 0"),
        *(
            (functools.partial(make, activation="x"), "activation must be .*one of .*, found 'x'")
            for make in (
                functools.partial(layers.MLP, 16, 16),
                functools.partial(layers.MoE, 16, num_experts=4, top_k=2, d_expert=8),
                functools.partial(layers.CausalConv, 16),
                functools.partial(layers.GatedRMSNorm, 16),
            )
        ),
        (
            functools.partial(layers.MoE, 16, num_experts=4, top_k=2, d_expert=8, scoring="x"),
            "scoring must be one of",
        ),
        (functools.partial(layers.HybridBlock, 16, mixers=[], norm="x"), "norm must be one of"),
        (
            functools.partial(layers.Attention, 16, num_heads=2, sliding_window=0),
            "sliding_window must be at least 1",
        ),
        (functools.partial(layers.Attention, 16, num_heads=0), "num_heads must be at least 1"),
        (
            functools.partial(layers.Mamba2, 16, num_heads=2, dt_limits=(-2, -1)),
            "dt_limits must be",
        ),
    ],
)
def test_impossible_layers_and_models_raise(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(**{"rngs": nnx.Rngs(0)} | make.keywords)


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
