"""Other packages' decode functions: the gate that they must pass, and what is said without them."""

import contextlib
import sys
import types

import harness
import jax
import numpy as np
import peers
import pytest

import replayssm_jax as rs

SPEC = {
    "gated_delta_net": rs.ReplaySpec.gated_delta_net(
        num_value_heads=4, num_key_heads=2, key_dim=6, value_dim=6
    ),
    "kda": rs.ReplaySpec.kda(num_heads=2, key_dim=6, value_dim=6),
}


class Tensor:
    """What `peers` uses of a tensor, in float32."""

    def __init__(self, array):
        self.array = np.asarray(array, np.float32)

    def to(self, device, dtype):
        assert device == peers.DEVICE and dtype in ("bfloat16", "float32")
        return self

    def same(self):
        return self

    float = cpu = contiguous = same

    def numpy(self):
        return self.array


@pytest.fixture
def torch(monkeypatch):
    module = types.ModuleType("torch")
    module.from_numpy = Tensor
    module.zeros = lambda shape, dtype, device: Tensor(np.zeros(shape))
    module.no_grad = contextlib.nullcontext
    module.bfloat16, module.float32 = "bfloat16", "float32"
    monkeypatch.setitem(sys.modules, "torch", module)
    monkeypatch.setattr(peers.importlib.metadata, "version", lambda name: "1.0")


def decode(q, k, v, g, beta, scale, initial_state, output_final_state, state_v_first):
    """One token with the arguments and layouts of fla-core's functions."""
    assert output_final_state
    q, k, v, g, beta = (x.array[:, 0] for x in (q, k, v, g, beta))
    groups = v.shape[1] // q.shape[1]
    q, k = (np.repeat(x, groups, axis=1) for x in (scale * q, k))
    state = initial_state.array if state_v_first else initial_state.array.swapaxes(-1, -2)
    state = state * np.exp(g)[:, :, None, None if g.ndim == 2 else slice(None)]
    update = beta[..., None] * (v - np.einsum("bhvk,bhk->bhv", state, k))
    state = state + update[..., None] * k[:, :, None, :]
    output = np.einsum("bhvk,bhk->bhv", state, q)[:, None]
    return Tensor(output), Tensor(state if state_v_first else state.swapaxes(-1, -2))


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("layer", peers.FUNCTIONS)
def test_right_functions_pass_the_gate(layer):
    for v_first in (False, True):
        assert peers.Peer(decode, v_first).check(SPEC[layer], 2) < 1e-6


@pytest.mark.usefixtures("torch")
def test_wrong_functions_do_not():
    def other_layout(**arguments):
        arguments["state_v_first"] ^= True
        output, state = decode(**arguments)
        return output, state

    def unscaled(**arguments):
        return decode(**arguments | {"scale": 1.1})

    for wrong in (other_layout, unscaled):
        with pytest.raises(harness.WrongResult, match=r"fla-core 1.0, state \[K, V\]"):
            peers.Peer(wrong, v_first=False).check(SPEC["kda"], 2)


def test_our_step_is_the_baseline():
    contender = peers.conventional(SPEC["kda"], 2, count=1)
    assert contender.calls == 16 * peers.STEPS
    output = np.asarray(contender.once(), np.float32)
    assert output.shape[:2] == (2, 1) and np.isfinite(output).all() and np.any(output)
    contender.once()  # from where the first ended: its state was donated


def test_what_is_missing_is_said(tmp_path, capsys, monkeypatch):
    if jax.default_backend() != "gpu":
        assert peers.main(["--out", str(tmp_path)]) == 2
        assert "they need a CUDA GPU, found platform 'cpu'" in capsys.readouterr().out
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setitem(sys.modules, "fla.ops.kda", None)
    with pytest.raises(peers.Missing, match="pip install fla-core einops"):
        peers.load("kda")
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_peers_are_measured(tmp_path):
    pytest.importorskip("fla.ops.kda", reason="needs fla-core", exc_type=ImportError)
    argv = ["--batch", "1", "--layers", "2", "--repeats", "2", "--out", str(tmp_path)]
    assert peers.main(argv) == 0
