"""What `benchmarks/cuts.py` compares; times need a GPU."""

import jax
import layers
import pytest

from replayssm_jax import dispatch

if jax.__version_info__ < dispatch.OLDEST_JAX_FOR_KERNELS:
    pytest.skip("kernels need a newer jax", allow_module_level=True)

import cuts


@pytest.mark.parametrize("read_dtype", [None, "int8"])
def test_the_chosen_cut_comes_first_and_none_twice(read_dtype):
    spec = layers.make_spec("gated_delta_net", read_dtype=read_dtype)
    problem, mode = cuts.mosaic_gpu.problem_of(spec, 256, 1), cuts.Mode()
    found = cuts.candidates(problem, mode)
    assert found[0] == cuts.configs.choose(problem, mode)
    distinct = {(c.heads, c.rows, c.stages, c.copies) for c in found}
    assert len(found) == len(distinct) > 2


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(cuts.kernels, "why_not", lambda *_: "it needs an NVIDIA GPU")
    with pytest.raises(SystemExit):
        cuts.main(["--layer", "kda"])
    assert "it needs an NVIDIA GPU" in capsys.readouterr().err
