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


@pytest.mark.parametrize("family", ["gated_delta_net", "kda"])
def test_memories_that_inputs_are_made_for(family):
    """One for all, or for each channel its own, evenly in their logarithms."""
    spec = make_spec(family, num_heads=1, num_groups=1, key_dim=9)
    g = np.asarray(study.adversarial(random_inputs(spec, 1, 3), 10_000, seed=0).g)
    own = 10.0 ** np.arange(0, 4.5, 0.5) if family == "kda" else 10_000
    np.testing.assert_allclose(-1 / g, np.broadcast_to(own, g.shape), rtol=1e-6)


@pytest.mark.parametrize("family", ["gated_delta_net", "kda"])
def test_what_a_flush_folds(family):
    """Updates as they were read bring the copy's error along, from the second window on."""
    spec = make_spec(family, num_heads=1, num_groups=1, read_dtype="int8", window=16)
    inputs = random_inputs(spec, 2, 2 * study.SEGMENT, gates=(-1e-3, -1e-2))
    exact = study.reference(spec, inputs).states[-1][:, 0]
    again, cached = (study.fold_updates(inputs, 16, again=x) for x in (True, False))
    assert study.ratio(again, exact) < 1e-6
    assert study.ratio(cached, exact) > 1e-4
    library = study.run(spec, inputs, None, decode="replay").states[-1][:, 0]
    assert study.ratio(library, again) < 1e-6
    first = jax.tree.map(lambda x: x[:, :16], inputs)
    again, cached = (study.fold_updates(first, 16, again=x) for x in (True, False))
    np.testing.assert_array_equal(again, cached)


def test_bfloat16_decays_are_off_by_their_rounding():
    """-1.003 is rounded to -1, so of a state that gets nothing more, 3e-3 a token are left over."""
    spec = make_spec("kda", num_heads=1, num_groups=1)
    inputs = random_inputs(spec, 1, study.SEGMENT)
    g = jnp.full_like(inputs.g, -1.003)
    beta = jnp.zeros_like(inputs.beta).at[:, -11].set(1)
    inputs = dataclasses.replace(inputs, g=g, beta=beta)
    label = dict(family="kda", gates="trained", memory=1.0)
    found = study.study_variants(spec, inputs, study.reference(spec, inputs), [label])
    rows = {row["variant"]: row for row in found}
    assert rows["bfloat16 decays"]["state"] == pytest.approx(np.expm1(10 * 0.003), rel=1e-2)
    assert "output" not in rows["raw records"]


def test_the_page_shows_what_was_recorded():
    results = json.loads(RECORDED.read_text())
    page = (ROOT / "docs" / "precision.md").read_text()
    shown = [title for title in study.tables(results) if f"**{title}**" in page]
    assert shown == list(study.tables(results))
    assert study.with_tables(page, study.tables(results)) == page
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
    assert study.main([*options[:4], "--part", "head", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["runs"]["mamba2"]["model"]["text"] == 8  # what was not run again stays
    assert len(found["model"]) == 2 * len(some) and found["variants"] == []
    rows = found["head"]
    errors = {row["scheme"]: row["state"] for row in rows if row["gates"] == "trained"}
    assert errors["replay, int8 copy"] == errors["replay, bfloat16 copy"] < 1e-6
    assert errors["conventional int8"] > 1e-3


def test_options_are_checked():
    with pytest.raises(SystemExit):
        study.parse(["--tokens", "150"])
