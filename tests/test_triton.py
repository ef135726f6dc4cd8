"""The Triton kernels without a GPU: when they are chosen, and values in Triton's interpreter."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import types

import jax
import pytest
from oracle import make_spec

from replayssm_jax import dispatch
from replayssm_triton import calls, configs

TESTS = pathlib.Path(__file__).parent

needs_jax = pytest.mark.skipif(
    jax.__version_info__ < dispatch.OLDEST_JAX_FOR_KERNELS, reason="kernels need a newer jax"
)


@pytest.fixture
def on_gpu(monkeypatch):
    """A device of some kind, as far as the choice of an implementation can see."""

    def pretend(kind, capability, found=None):
        device = types.SimpleNamespace(device_kind=kind, compute_capability=capability)
        monkeypatch.setattr(dispatch, "_target", lambda: kind)
        monkeypatch.setattr(dispatch, "_gpu_at_hand", lambda: device)
        monkeypatch.setattr(calls, "why_not", lambda: found)

    return pretend


@needs_jax
@pytest.mark.parametrize(
    "kind, capability, chosen",
    [
        ("NVIDIA A100-SXM4-80GB", "8.0", "triton"),
        ("NVIDIA L40S", "8.9", "triton"),
        ("NVIDIA H100 80GB HBM3", "9.0", "mosaic_gpu"),
        ("NVIDIA GeForce RTX 5090", "12.0", "triton"),
        ("Tesla T4", "7.5", "xla"),
    ],
)
def test_the_best_for_a_gpu(on_gpu, kind, capability, chosen):
    spec = make_spec("kda", value_dim=64, key_dim=32)
    on_gpu(kind, capability)
    assert dispatch.resolve(None, spec, 1) == chosen
    assert dispatch.resolve(None, spec, 1, tree=True) == "xla"
    on_gpu(kind, capability, "it needs jax-triton")
    assert dispatch.resolve(None, spec, 1) == (chosen if chosen == "mosaic_gpu" else "xla")


@needs_jax
def test_reasons(on_gpu):
    def refuses(match, num_tokens=1, tree=False, **shapes):
        spec = make_spec("kda", **{"max_tokens": max(num_tokens, 1), "window": 32, **shapes})
        with pytest.raises(ValueError, match=f"implementation='triton' cannot run: .*{match}"):
            dispatch.resolve("triton", spec, num_tokens, tree=tree)

    on_gpu("Tesla T4", "7.5")
    refuses("needs compute capability 8.0 or newer, found 7.5 .'Tesla T4'.")
    on_gpu("NVIDIA L40S", "8.9", "it needs triton and jax-triton, found no jax_triton")
    refuses("needs triton and jax-triton, found no jax_triton")
    on_gpu("NVIDIA L40S", "8.9")
    refuses("key_dim must be at most 256, found 257", key_dim=257)
    refuses("at most 16 tokens at once, found 17", num_tokens=17)
    refuses("chains of drafts only", tree=True)
    assert dispatch.resolve("triton", make_spec("kda"), 0) == "triton"


@pytest.mark.parametrize("missing", ["triton", "jax_triton"])
def test_a_missing_package_is_named(monkeypatch, missing):
    find = importlib.util.find_spec
    installed = {"triton": object(), "jax_triton": object(), missing: None}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: installed[n] if n in installed else find(n)
    )
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    reason = calls.why_not.__wrapped__()
    assert reason == (
        f"it needs triton and jax-triton, found no {missing}: install replayssm_jax[triton]"
    )


@pytest.mark.parametrize("key_dim", [10, 33, 64, 80, 128, 256])
@pytest.mark.parametrize("value_dim", [12, 64, 80, 96, 128])
@pytest.mark.parametrize("heads", [1, 8192])
def test_programs_cover_all_heads(heads, value_dim, key_dim):
    c, lanes = configs.channels(key_dim)
    assert key_dim <= c * lanes < 2 * key_dim
    for choose in configs.choose, configs.choose_one_token:
        rows, num_warps, tiles, _ = choose(heads, value_dim, key_dim)
        for n in (rows, num_warps, tiles, c, lanes):
            assert n & (n - 1) == 0
        assert rows >= 16, "the least that a product on tensor cores takes"
        assert rows == 16 or rows * c * lanes <= configs.REGISTERS * 32 * num_warps
        if heads > 1:
            part = rows * tiles
            assert -value_dim % part <= value_dim / 4 or part <= 16
    assert tiles == 1 or num_warps == 1, "a head is cut into parts before it has more warps"
    rows, num_warps, *_ = configs.choose(heads, value_dim, key_dim)
    assert 32 * num_warps >= c * lanes, "Triton would choose layouts by the vectors"


@pytest.mark.slow
@needs_jax
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(
    "family, window", [("mamba2", 4), ("gated_delta_net", 5), ("kda", 18), ("gla", 4)]
)
def test_values_in_the_interpreter(family, window):
    """A window of 18 takes two blocks of records."""
    env = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent))),
    }
    script = str(TESTS / "interpreted_triton.py")
    found = subprocess.run(
        [sys.executable, script, family, str(window)], env=env, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr[-3000:]
