import json

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
import speculative

from replayssm_jax.drafters import Drafts


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Compiling takes most of the time of these tests."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


TINY = ["--model", "tiny", "--batch", "2", "--tokens", "3", "--passes", "8", "--window", "4"]
TINY += ["--repeats", "2", "--dtype", "float32", "--prompt", "3"]


def test_cases_are_driven_measured_and_saved(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert speculative.main([*TINY, "--rate", "0.6", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("speculative-*.json")
    rows = json.loads(path.read_text())["rows"]
    names = ["plain replay", "snapshot speculation", "replay speculation"]
    assert [row["implementation"] for row in rows] == names
    for row in rows:
        assert (row["family"], row["batch"]) == ("mamba2", 2)
        assert row["tokens"] == (3 if "speculation" in row["implementation"] else 1)
        assert row["us"] > 0 and row["rel_err"] < 1e-4
        assert row["extra"]["tokens_per_second"] == pytest.approx(2e6 / row["us"])
    drawn = speculative.DrivenDrafter.draw(2, 8, 2, rate=0.6, vocab=64)
    # The last pass of each row emits the newest token and the one that stops it.
    emitted = 2 * 8 + int(drawn.right[:, :-1].sum()) + 2
    for row in rows[1:]:
        assert row["extra"]["tokens_per_pass"] == pytest.approx(emitted / 16)
    assert "rate 0.6" in capsys.readouterr().out


def test_a_wrong_case_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(speculative, "score", lambda *args: jnp.full(args[2].shape, -1.0))
    assert speculative.main([*TINY, "--out", str(tmp_path)]) == 1
    assert not list(tmp_path.iterdir())
    assert "not reported" in capsys.readouterr().out


@pytest.mark.slow
def test_models_side_by_side_in_processes(tmp_path, capsys):
    argv = [*TINY, "--side-by-side", "--out", str(tmp_path)]
    assert speculative.main(argv) == 0
    (path,) = tmp_path.glob("speculative-*.json")
    assert len(json.loads(path.read_text())["rows"]) == 3
    assert "tiny: 5 programs" in capsys.readouterr().out


def test_a_process_that_fails_is_said(tmp_path, monkeypatch, capsys):
    """The cases of the others are measured."""
    row = speculative.harness.Row(
        case="a", family="kda", batch=1, tokens=1, read_dtype=None, implementation="plain replay",
        us=1.0, us_spread=(1.0, 1.0), baseline_us=1.0, baseline_us_spread=(1.0, 1.0), speedup=1.0,
        fraction_of_read_bandwidth=None, rel_err=0.0,
    )  # fmt: skip

    class Connection:
        def __init__(self, *received):
            self.received = list(received)

        def recv(self):
            if not self.received:
                raise EOFError
            return self.received.pop(0)

        def send(self, _):
            pass

        def close(self):
            pass

        join = start = close

    found = speculative.harness.Found
    ends = [Connection(), Connection(found(words=["one"]), found([row]), None)]
    context = type("Context", (), {})()
    context.Pipe = lambda: (ends.pop(0), Connection())
    context.Process = lambda **_: Connection()
    monkeypatch.setattr(speculative.harness.multiprocessing, "get_context", lambda _: context)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    argv = ["--model", "kimi-linear", "tiny", "--side-by-side", "--out", str(tmp_path)]
    assert speculative.main(argv) == 1
    (path,) = tmp_path.glob("speculative-*.json")
    assert len(json.loads(path.read_text())["rows"]) == 1
    assert "kimi-linear: its process has failed" in capsys.readouterr().out


def test_cases_that_differ_in_no_shape_share_programs(monkeypatch):
    monkeypatch.setattr(speculative.harness, "compile_all", lambda lowerings, _: lowerings)
    options = ["--rate", "0.3", "0.7", "--batch", "1", "2", "--tokens", "2", "3"]
    args = speculative.parse([*TINY, *options])
    cases = [*speculative.random_cases("tiny", args)]
    assert len(cases) == 8
    # Two plain ones and a prefill a batch, and for each T one with snapshots and one by replay.
    assert len(speculative.compile_cases(cases, args)) == 2 * (3 + 2 * 2)


def test_acceptance_is_drawn_from_the_stated_distribution():
    drawn = speculative.DrivenDrafter.draw(500, 40, 3, rate=0.7, vocab=100)
    shares = np.bincount(np.ravel(drawn.right), minlength=4) / drawn.right.size
    np.testing.assert_allclose(shares, [0.3, 0.7 * 0.3, 0.49 * 0.3, 0.343], atol=0.01)
    odd = np.asarray(drawn.tokens) % 2 == 1
    np.testing.assert_array_equal(np.cumprod(odd, -1).sum(-1), drawn.right)
    assert drawn.tokens.min() >= 0 and drawn.tokens.max() < drawn.stop_token - 1 < 100


def test_forced_acceptance_takes_odd_drafts_and_scores_what_counts():
    tokens = jnp.array([[3, 5, 4], [7, 2, 9], [1, 1, 1]], jnp.int32)
    drafts = Drafts(tokens, jnp.array([3, 3, 2], jnp.int32))
    logits = jax.random.normal(jax.random.key(0), (3, 4, 32))
    accepted, drawn = speculative.forced(None, logits, drafts)
    np.testing.assert_array_equal(accepted, [2, 1, 2])
    best = np.minimum(np.argmax(logits, -1), 29)
    for row, (line, n) in enumerate(zip(tokens.tolist(), [2, 1, 2], strict=True)):
        chosen = [*line[:n], *best[row, n:]]
        np.testing.assert_array_equal(drawn.token[row], chosen)
        wanted = [jax.nn.log_softmax(logits[row, t])[token] for t, token in enumerate(chosen)]
        np.testing.assert_allclose(drawn.logprob[row], wanted, rtol=1e-6)


def test_models_are_cut_with_their_vocabulary():
    for name, config in models.MODELS.items():
        few = models.cut(config, 1)
        assert len(few.blocks) == 1 and few.blocks == config.blocks[:1]
        share = few.vocab_size / config.vocab_size * len(config.blocks)
        assert share == pytest.approx(1, rel=0.02) or name == "tiny"
        assert models.cut(config, None) is config
    assert len(models.MODELS["nemotron-3-nano-4b"].blocks) == 42
    assert len(models.MODELS["kimi-linear"].blocks) == 27


def test_impossible_options_are_refused(capsys):
    for options, message in [
        (["--tokens", "1"], "at least 2"),
        (["--tokens", "17"], "fit in the window of 16"),
        (["--passes", "20"], "whole windows of 16"),
        (["--rate", "1.5"], "in [0, 1]"),
        (["--repeats", "1"], "no spread"),
        (["--batch", "0"], "at least 1, found '0'"),
        (["--layers", "-1"], "at least 0, found -1"),
    ]:
        with pytest.raises(SystemExit):
            speculative.parse(options)
        assert message in capsys.readouterr().err
