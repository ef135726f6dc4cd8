"""The precision study: its parts, and that the page shows what was recorded."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import precision_study as study
import pytest
from oracle import make_spec, random_inputs

import replayssm_jax as rs

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "benchmarks" / "results" / "precision.json"


def test_marks_end_with_the_last_token():
    assert study.marks(100) == [100]
    assert study.marks(3000) == [100, 300, 1000, 3000]
    assert study.marks(500) == [100, 300, 500]


def test_value_rows_of_a_head_can_be_run_alone():
    spec = make_spec("gated_delta_net", num_heads=4, num_groups=2, value_dim=12)
    inputs = random_inputs(spec, 2, study.SEGMENT)
    part = study.one_head(inputs, spec, 3)
    assert part.v.shape == (1, 2 * study.SEGMENT, 1, study.ROWS)
    small = dataclasses.replace(spec, num_heads=1, num_groups=1, value_dim=study.ROWS)
    first = jax.tree.map(lambda x: x[:, : study.SEGMENT], part)
    found = study.run(small, first, None, decode="recurrent")
    whole, _ = rs.recurrent_scan(spec, jnp.zeros(spec.state_shape(2), jnp.float32), inputs)
    np.testing.assert_allclose(
        found.outputs[0, :, 0], whole[0, :, 3, : study.ROWS], rtol=1e-4, atol=1e-6
    )
    replayed = study.run(small, first, None, decode="replay")
    assert study.ratio(replayed.outputs, study.reference(small, first).outputs) < 1e-6


def test_the_page_shows_what_was_recorded():
    results = json.loads(RECORDED.read_text())
    page = (ROOT / "docs" / "precision.md").read_text()
    shown = [title for title in study.tables(results) if f"**{title}**" in page]
    assert len(shown) >= 4
    assert study.with_tables(page, results) == page
    names = {scheme.name for scheme in study.schemes()}
    assert {row["scheme"] for row in results["head"] + results["model"]} == names
    assert {row["family"] for row in results["model"]} == set(study.FAMILIES)


def test_plots_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    study.plot(json.loads(RECORDED.read_text()), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "precision_memory.svg",
        "precision_tokens.svg",
    ]


@pytest.mark.slow
def test_the_study_runs(tmp_path, capsys, monkeypatch):
    """With a scheme of each kind: each compiles a loop over a model."""
    every = list(study.schemes())
    kept = {"conventional float32", "conventional int8", "conventional int8, stochastic"}
    kept |= {"replay", "replay, bfloat16 copy", "replay, int8 copy"}
    some = [scheme for scheme in every if scheme.name in kept]
    assert len(some) == len(kept) < len(every)
    monkeypatch.setattr(study, "schemes", lambda: iter(some))
    monkeypatch.setattr(study, "STRETCHES", (1, 10))
    out = tmp_path / "results.json"
    options = ["--family", "mamba2", "--tokens", "100", "--text", "8", "--batch", "1"]
    assert study.main([*options, "--out", str(out)]) == 0
    assert "Trained models" in capsys.readouterr().out
    rows = json.loads(out.read_text())["head"]
    errors = {row["scheme"]: row["state"] for row in rows if row["gates"] == "trained"}
    assert errors["replay, int8 copy"] == errors["replay, bfloat16 copy"] < 1e-6
    assert errors["conventional int8"] > 1e-3


def test_options_are_checked():
    with pytest.raises(SystemExit):
        study.parse(["--tokens", "150"])
