import json

import harness
import jax
import jax.numpy as jnp
import largest_batch
import memory
import pytest

TINY = ["--model", "tiny", "--tokens", "3", "--context", "64", "--memory", "0.003"]


@pytest.fixture
def compile_quickly():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.usefixtures("compile_quickly")
def test_the_largest_batch_is_compiled_and_run(tmp_path, monkeypatch):
    """Of a device that says nothing of its memory: 3 MB are given."""
    monkeypatch.setattr(
        largest_batch, "cases_of", lambda *args, cases=largest_batch.cases_of: cases(*args)[-2:]
    )
    argv = [*TINY, "--small", "8", "--threads", "2", "--out", str(tmp_path)]
    assert largest_batch.main(argv) == 0
    (path,) = tmp_path.glob("largest-batch-*.json")
    snapshots, replay = json.loads(path.read_text())["rows"]
    assert (snapshots["scheme"], replay["scheme"]) == ("snapshots", "replay")
    for row in (snapshots, replay):
        assert row["batch"] % 8 == 0 and row["us"] > 0
        counted = row["weights"] + row["batch"] * row["counted"]
        assert counted < row["program_bytes"] <= row["limit"] == 3_000_000
        config = largest_batch.models.MODELS["tiny"]
        assert row["counted"] == memory.held(config, row["scheme"], 3, 64).total


def test_batches_whose_temporaries_outgrow_them_shrink(monkeypatch):
    """Here temporaries are the square of the batch, and the first guess takes them as linear."""
    args = largest_batch.parse([*TINY, "--small", "8"])
    case = largest_batch.cases_of("tiny", args)[0]
    limit = 2_000_000
    tried = []

    class Compiled:
        def __init__(self, batch):
            tried.append(batch)
            held = memory.nbytes(case.model) + batch * case.counted
            self.argument_size_in_bytes = self.output_size_in_bytes = held
            self.alias_size_in_bytes = held
            self.temp_size_in_bytes = 40 * batch**2

        def memory_analysis(self):
            return self

    monkeypatch.setattr(largest_batch.Case, "lower", lambda _, batch: Compiled(batch))
    monkeypatch.setattr(harness, "compile_all", lambda calls, _: {k: f() for k, f in calls.items()})
    compiled, batches = largest_batch.compile_largest([case], limit, args)
    assert tried[0] == 8 and tried[-1] == batches[case] < tried[1]
    assert harness.program_bytes(compiled[case]) <= limit
    monkeypatch.setattr(largest_batch, "ROUNDS", 1)
    assert largest_batch.compile_largest([case], limit, args)[0] == {}


def test_temporaries_leave_less_room():
    class Compiled:
        def __init__(self, temporaries):
            self.temp_size_in_bytes = temporaries

        def memory_analysis(self):
            return self

    args = largest_batch.parse(TINY)
    case = largest_batch.cases_of("tiny", args)[-1]
    weights = memory.nbytes(case.model)
    limit = int((weights + 100 * case.counted) / largest_batch.SHARE) + 1
    assert case.largest(limit, Compiled(0), 8) == 96
    assert case.largest(limit, Compiled(8 * case.counted), 8) == 48


def test_programs_are_compiled_and_what_does_not_fit_is_returned():
    class TooLarge:
        def compile(self):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    class Broken:
        def compile(self):
            raise jax.errors.JaxRuntimeError("INTERNAL: no such instruction")

    double = jax.jit(lambda x: 2 * x)
    found = harness.compile_all(
        {"double": lambda: double.lower(jnp.ones(3)), "large": TooLarge},
        2,
        lambda key, compiled: (key, compiled(jnp.ones(3)).tolist()),
    )
    assert found["double"] == ("double", [2, 2, 2])
    assert harness.does_not_fit(found["large"])
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        harness.compile_all({"broken": Broken}, 1)
