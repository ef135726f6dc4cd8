import json

import decode_loop
import jax.numpy as jnp
import pytest

TINY = ["--d-model", "64", "--pattern", "MA", "--tokens", "8", "--window", "4", "--repeats", "2"]
TINY += ["--family", "mamba2", "--batch", "2", "--prompt", "3", "--vocab", "32"]


def test_a_case_is_measured_and_saved(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert decode_loop.main([*TINY, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("decode_loop-*.json")
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["family"], row["batch"], row["implementation"]) == ("mamba2", 2, "replay")
    assert row["us"] > 0 and row["speedup"] == pytest.approx(row["baseline_us"] / row["us"])
    assert row["extra"]["tokens_per_second"] == pytest.approx(2e6 / row["us"])
    assert row["rel_err"] < 1e-4
    assert "MA x 1, d_model 64" in capsys.readouterr().out


def test_a_wrong_case_is_refused(tmp_path, capsys, monkeypatch):
    score = decode_loop.score
    monkeypatch.setattr(decode_loop, "score", lambda *args: 1.01 * score(*args))
    assert decode_loop.main([*TINY, "--out", str(tmp_path)]) == 1
    (path,) = tmp_path.glob("decode_loop-*.json")
    assert json.loads(path.read_text())["rows"] == []
    assert "not reported" in capsys.readouterr().out


def test_other_tokens_are_refused_in_float32():
    class Output:
        def __init__(self, tokens):
            self.tokens, self.logprobs = jnp.asarray(tokens), jnp.zeros((1, 2))

    outputs = {"conventional": Output([[1, 2]]), "replay": Output([[1, 3]])}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_loop, "score", lambda *args: jnp.zeros((1, 2)))
        assert decode_loop.check(None, None, outputs, "bfloat16") == 0
        with pytest.raises(decode_loop.harness.WrongResult, match="1 of 2 tokens"):
            decode_loop.check(None, None, outputs, "float32")


def test_windows_must_be_whole(capsys):
    with pytest.raises(SystemExit):
        decode_loop.parse(["--tokens", "20", "--window", "16"])
    assert "whole windows of 16" in capsys.readouterr().err
