"""The model that has to remember for long: it learns, and the page shows what was recorded."""

import json
from pathlib import Path

import jax
import long_memory
import numpy as np
import pytest
from precision_study import Scheme, with_tables

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "benchmarks" / "results" / "long_memory.json"


def test_the_answer_is_the_symbol_that_comes_most_often():
    tokens, answer = long_memory.draw(jax.random.key(0), 16, 4000)
    counts = np.stack([np.bincount(row, minlength=long_memory.SYMBOLS) for row in tokens])
    assert (counts.argmax(-1) == np.asarray(answer)).mean() > 0.9


def test_it_learns_and_replay_answers_as_conventional_decoding(monkeypatch):
    two = [Scheme("recurrent", "float32"), Scheme("replay", "float32")]
    monkeypatch.setattr(long_memory, "schemes", lambda: iter(two))
    made = long_memory.make_model("mamba2")
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        trained = long_memory.train(made, 60, 8, 128, lambda: None)
    accuracy = []
    for model in (made, trained):
        rows = long_memory.study("mamba2", model, 64, [128], lambda: None)
        plain, replayed = rows
        assert replayed["agreement"] == 1
        accuracy.append(plain["accuracy"])
    assert accuracy[1] > accuracy[0] + 0.1


def test_what_was_recorded():
    """The page has it, and says of it what holds."""
    results = json.loads(RECORDED.read_text())
    page = (ROOT / "docs" / "precision.md").read_text()
    found = long_memory.tables(results)
    assert all(f"**{title}**" in page for title in found)
    assert with_tables(page, found) == page
    last = max(row["tokens"] for row in results["rows"])
    ends = {
        (r["family"], r["scheme"]): r["accuracy"] for r in results["rows"] if r["tokens"] == last
    }
    plain = {family: ends[family, "conventional float32"] for family, _ in ends}
    copies = [plain[f] - x for (f, scheme), x in ends.items() if scheme.startswith("replay")]
    assert max(copies) < 0.01
    assert any(plain[f] - ends[f, "conventional bfloat16"] > 0.02 for f in plain)


@pytest.mark.parametrize("argv", [["--marks", "10"], ["--steps", "0"]])
def test_bad_arguments(argv, capsys):
    with pytest.raises(SystemExit):
        long_memory.parse(argv)
    assert f"found {argv[1]}" in capsys.readouterr().err
