import json

import jax
import jax.numpy as jnp
import memory
import models
import pytest
from flax import nnx

import replayssm_jax as rs
from replayssm_jax.models import HybridLM

STATE = {  # bytes of the recurrent states of one sequence: layers x heads x P x N x 4
    "nemotron-3-nano-4b": 21 * 96 * 80 * 128 * 4,
    "qwen3.5-4b": 24 * 32 * 128 * 128 * 4,
    "kimi-linear": 20 * 32 * 128 * 128 * 4,
}


@pytest.mark.parametrize("name", STATE)
def test_bytes_of_each_scheme(name):
    config = models.MODELS[name]
    plain = memory.held(config, "conventional", 1, 128)
    assert (plain.state, plain.ring) == (STATE[name], 0)
    snapshots = memory.held(config, "snapshots", 4, 128)
    assert (snapshots.state, snapshots.ring) == (5 * STATE[name], 0)
    replay = memory.held(config, "replay", 4, 128)
    assert replay.state == STATE[name]
    assert 0 < replay.ring < replay.state
    assert plain.conv < snapshots.conv == replay.conv
    assert plain.kv == snapshots.kv == replay.kv
    assert memory.held(config, "replay", 4, 256).kv == 2 * replay.kv


def test_what_narrow_decays_save():
    """24 slots of 32 heads x 128 channels lose 2 bytes each, in 20 layers."""
    config = models.MODELS["kimi-linear"]
    wide, narrow = (memory.held(config, s, 8, 128) for s in ("replay", "narrow ring"))
    assert wide.ring - narrow.ring == 20 * 24 * 32 * 128 * 2
    assert wide.total - narrow.total == wide.ring - narrow.ring


def test_the_bytes_are_those_of_a_cache_that_is_made():
    config = models.MODELS["tiny"]
    model = HybridLM(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    cache = model.init_cache(2, 16)
    held = memory.held(config, "replay", 1, 16)
    arrays = sum(x.nbytes for x in jax.tree.leaves(cache.layers))
    assert arrays == 2 * held.total


def test_what_a_layer_holds_and_moves():
    """By hand: 2 heads of 64 x 32, so a float32 state is 16384 bytes, a window of 8, 16 slots."""
    dims = dict(num_heads=2, window=8)
    spec = rs.ReplaySpec.mamba2(head_dim=64, state_dim=32, **dims)
    record = 8 + 64 + 256 + 8  # decays, bf16 keys of one group and values, betas
    moved = 9 / 8 * 16384 + record * (8 * 9 / 2 / 8 + 1)
    assert memory.held_and_moved(spec) == pytest.approx((1 + 16 * record / 16384, moved / 16384))
    # Under the delta rule steps read cached updates, flushes raw values and betas; with a decay for
    # each channel steps read log-decays in fp16, too.
    spec = rs.ReplaySpec.kda(value_dim=64, key_dim=32, read_dtype="int8", **dims)
    copy, keys, raw, cached = 4096 + 4 * 128, 128, 256 + 256 + 8, 128 + 256
    held = 16384 + copy + 16 * (keys + raw + cached)
    moved = (7 * copy + 2 * 16384 + copy) / 8 + keys + raw + cached
    moved += ((keys + cached) * 28 + (keys + raw) * 8) / 8
    assert memory.held_and_moved(spec) == pytest.approx((held / 16384, moved / 16384))


OPTIONS = ["--model", "tiny", "--tokens", "4", "--context", "64", "--memory", "0.01"]


def test_the_plot_shows_every_scheme(tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.svg"
    assert memory.main([*OPTIONS, "--out", str(tmp_path), "--plot", str(plot)]) == 0
    drawn = plot.read_text()
    for word in ("tiny", "conventional", "snapshots", "replay", "T=4", "sequences in 0.01 GB"):
        assert word in drawn


def test_the_table_and_the_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    assert memory.main([*OPTIONS, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "memory.json").read_text())["rows"]
    assert [(row["scheme"], row["tokens"]) for row in rows] == [
        ("conventional", 1),
        ("replay", 1),
        ("snapshots", 4),
        ("replay", 4),
    ]
    for row in rows:
        free = 10_000_000 - row["weights"]
        assert row["largest_batch"] == free // row["total"]
        assert row["total"] == sum(row["held"].values())
    times = rows[3]["largest_batch"] / rows[2]["largest_batch"]
    assert f"{times:.2f}" in capsys.readouterr().out
