import json

import harness
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Contender, Timing, WrongResult


def test_turns_alternate_and_only_run_is_timed(monkeypatch):
    clock, log = [0.0], []
    monkeypatch.setattr(harness.time, "perf_counter", lambda: clock[0])

    def contender(name, cost):
        def prepare():
            clock[0] += 100
            return name

        def run(argument):
            clock[0] += cost
            log.append(argument)
            return jnp.zeros(())

        return Contender(run, prepare, calls=2)

    ticks = []
    timings = harness.time_in_turns(
        {"a": contender("a", 2.0), "b": contender("b", 4.0)},
        repeats=3,
        tick=lambda: ticks.append(1),
    )
    assert "".join(log) == "abbaab" and len(ticks) == 6
    assert timings == {"a": Timing(1e6, 1e6, 1e6), "b": Timing(2e6, 2e6, 2e6)}


def test_spread_is_that_of_the_quartiles():
    timing = Timing.of([5e-6, 1e-6, 2e-6, 3e-6, 4e-6])
    assert (timing.us, timing.low, timing.high) == pytest.approx((3, 2, 4))


def test_the_gate_lets_no_wrong_result_pass():
    expected = {"o": np.ones(4), "state": np.full(3, 2.0)}
    close = {"o": np.ones(4), "state": np.full(3, 2.0 + 2e-5)}
    assert harness.check("close", close, expected, limit=1e-4) == pytest.approx(1e-5)
    for wrong in (
        {"o": np.ones(4), "state": np.full(3, 2.1)},
        {"o": np.full(4, np.nan), "state": np.full(3, 2.0)},
        {"o": np.ones(4), "state": np.full(3, np.nan)},
        {"o": np.ones(5), "state": np.full(3, 2.0)},
    ):
        with pytest.raises(WrongResult):
            harness.check("wrong", wrong, expected, limit=1e-4)
    assert harness.relative_error(np.zeros(2), np.zeros(2)) == 0
    with pytest.raises(WrongResult):
        harness.check("wrong", np.ones(2), np.zeros(2), limit=1e-4)


def test_rows_are_saved_by_device(tmp_path):
    row = harness.row(
        Timing(2.0, 1.9, 2.2),
        Timing(3.0, 2.9, 3.3),
        case="step",
        family="kda",
        batch=4,
        tokens=1,
        read_dtype=None,
        implementation="xla",
        fraction_of_read_bandwidth=None,
        rel_err=1e-6,
    )
    path = harness.save("kernels", [row], {"window": 16}, tmp_path)
    assert path.name == f"kernels-{harness.device_name()}.json"
    record = json.loads(path.read_text())
    (saved,) = record["rows"]
    assert saved["speedup"] == 1.5 and saved["fraction_of_read_bandwidth"] is None
    assert saved["us_spread"] == [1.9, 2.2] and saved["baseline_us"] == 3.0
    assert record["options"] == {"window": 16} and record["jax"]
