import re

import decode_text
import numpy as np
import pytest
from decode_text import Generated, Traffic
from flax import nnx
from stdlib_text import Document
from train_tiny_hybrid import PRESETS, model_config
from weights_io import read_metadata

from replayssm_jax.models import HybridLM


def test_shipped_weights_decode_identically(capsys, monkeypatch):
    """Of one family; `make demo` runs them all, and fails where a token differs."""
    monkeypatch.setenv("COLUMNS", "100")
    arguments = ["--family", "gated_delta_net", "--tokens", "20", "--batch", "2", "--repeats", "1"]
    assert decode_text.main([*arguments, "--prompt-bytes", "40"]) == 0
    printed = capsys.readouterr().out
    assert "identical 40/40" in printed
    for row in ("state bytes moved per token", "state memory", "tokens per second, batch of 2"):
        (line,) = re.findall(rf"{row}.*", printed)
        assert len(re.findall(r"[\d,.]+", line.removeprefix(row))) == 3


@pytest.mark.parametrize("family", decode_text.FAMILIES)
def test_shipped_weights_beat_the_baselines(family):
    _, record = read_metadata(decode_text.WEIGHTS / f"{family}.safetensors")
    assert record["family"] == family
    assert record["held_out_bytes"] > 200_000
    assert record["bits_per_byte"] < min(record["baselines"].values())


@pytest.mark.parametrize("family", decode_text.FAMILIES)
def test_traffic_counts_the_arrays_of_every_ssm_layer(family):
    config = model_config(family, PRESETS["test"])
    model = nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0)))
    window, slots = config.replay_window, 24
    conventional, replay = (
        decode_text.state_traffic(model.init_cache(3, 8, decode=decode), window=window)
        for decode in ("recurrent", "replay")
    )
    # One SSM layer of d_model 32 (float32), and what one record holds beside its key and value.
    keys, values, gates = {
        "mamba2": (32, 64, 4 + 4),
        "gated_delta_net": (32, 64, 2),
        "kda": (2 * 32, 64, 2 * 32),
    }[family]
    state = 4 * values * 32
    record = 4 * (keys + values + gates)
    assert conventional == Traffic(2 * state, state)
    assert replay.held == state + slots * record
    reads = sum(range(1, window + 1)) / window
    flush = (2 * state + window * record) / window
    assert replay.moved == pytest.approx(state + record * (reads + 1) + flush)


def test_first_difference_is_reported_with_its_margin():
    tokens = np.zeros((2, 5), np.int32)
    other = tokens.copy()
    other[0, 4] = other[1, 2] = other[1, 3] = 1
    margins = np.arange(10, dtype=np.float32).reshape(2, 5)
    text = decode_text.compare_tokens(Generated(tokens, margins), Generated(other, margins)).plain
    assert "7/10 identical" in text
    assert "row 1 at token 2" in text and "7.0e+00 apart" in text
    same = decode_text.compare_tokens(Generated(tokens, margins), Generated(tokens, margins))
    assert same.plain == "identical 10/10"


def test_prompt_ends_with_the_head_of_a_function_or_in_the_middle():
    source = (
        b"import os\n\n\nclass A:\n"
        + b"    x = 1\n" * 20
        + b"    def f(self, a):\n        return a\n"
    )
    prompt = decode_text.prompt_of(Document("a.py", source), 30)
    assert len(prompt.text) == 30
    assert prompt.text.endswith(b"    def f(self, a):\n")
    plain = decode_text.prompt_of(Document("b.py", b"x = 1\n" * 30), 30)
    assert plain.text == (b"x = 1\n" * 30)[60:90]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tokens", "0"], "--tokens must be at least 1"),
        (["--window", "0"], "--window must be at least 1"),
        (["--prompt-file", "empty"], "empty is empty"),
        (["--prompt-file", "missing"], "No such file or directory: 'missing'"),
        (["--prompt-file", "."], "Is a directory: '.'"),
        (["--prompt-bytes", "100000000"], "no held-out file is longer than twice the prompt of"),
    ],
)
def test_bad_arguments_are_errors(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(SystemExit):
        decode_text.main(arguments)
    assert message in capsys.readouterr().err
