"""HybridConfig: patterns, lists, JSON, errors."""

import dataclasses
import json

import pytest
from model_cases import make_config

from replayssm_jax.models import HybridConfig, LayerConfig, Mamba2Config


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
