import json

import jax
import numpy as np
import pytest
import train_tiny_hybrid as train
from stdlib_text import load_corpus
from weights_io import named_parameters, read_metadata


@pytest.fixture(autouse=True)
def promotion():
    """Let optax mix types as it does by default (its Adam raises a float to an int power)."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def make_run(folder, source_tree, *, family="gated_delta_net", resume=False, **kwargs):
    return train.Run(
        family=family,
        preset=train.PRESETS["test"],
        corpus=load_corpus(source_tree),
        out=folder,
        checkpoints=folder / "checkpoints",
        resume=resume,
        **kwargs,
    )


@pytest.fixture(scope="module")
def _cache():
    return {}


@pytest.fixture
def finished(tmp_path_factory, source_tree, _cache):
    """One uninterrupted run, shared by the tests of this file."""
    if "run" not in _cache:
        run = make_run(tmp_path_factory.mktemp("uninterrupted"), source_tree)
        assert run.train()
        _cache["run"] = run
    return _cache["run"]


def assert_same_state(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e))


def logged_steps(run):
    return [json.loads(line)["step"] for line in run.log_path.read_text().splitlines()]


def test_killed_run_resumes_bit_for_bit(tmp_path, source_tree, finished):
    killed = make_run(tmp_path, source_tree)
    assert not killed.train(stop_at=5)
    resumed = make_run(tmp_path, source_tree, resume=True)
    assert int(resumed.state.step) == 4
    assert resumed.train()
    assert_same_state(resumed.state, finished.state)
    assert logged_steps(resumed) == logged_steps(finished) == [2, 4, 6, 8]


def test_checkpoints_of_another_run_are_refused(source_tree, finished):
    folder = finished.log_path.parent
    with pytest.raises(FileExistsError, match="--resume"):
        make_run(folder, source_tree)
    with pytest.raises(ValueError, match=r"seed.*\(0, 1\)"):
        make_run(folder, source_tree, resume=True, seed=1)


def test_exported_weights_carry_config_and_record(finished):
    record = finished.export(finished=True)
    config, stored = read_metadata(finished.weights_path)
    assert stored == json.loads(json.dumps(record))
    assert config == finished.config
    assert record["parameters"] == sum(v.size for v in named_parameters(finished.model()).values())
    assert 0 < record["bits_per_byte"] < 9
    assert len(record["baselines"]) == 2


def test_annealing_starts_early_when_time_is_short():
    schedule = train.Schedule(anneal_start=700, anneal_steps=300)
    arguments = dict(step=70, anneal=0.3, seconds_per_step=1.0)
    assert train.shortened_schedule(schedule, seconds_left=40.0, **arguments) == schedule
    assert train.shortened_schedule(schedule, seconds_left=32.0, **arguments) == (70, 30)
    begun = dict(arguments, step=800)
    assert train.shortened_schedule(schedule, seconds_left=0.0, **begun) == schedule


def test_learning_rate_rises_holds_and_falls_to_zero():
    schedule = np.array([70, 30], np.int32)
    rates = [
        float(train.learning_rate(np.int32(step), schedule, peak=1.0, warmup=10))
        for step in range(100)
    ]
    assert rates[0] == pytest.approx(0.1)
    assert rates[10:70] == pytest.approx([1.0] * 60)
    assert rates[70:] == sorted(rates[70:], reverse=True)
    assert rates[99] == pytest.approx(0.0, abs=1e-6)
