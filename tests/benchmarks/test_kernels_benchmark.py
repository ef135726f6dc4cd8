"""The options of the kernels' benchmark, and how long its loops are."""

import itertools

import jax
import kernels
import pytest


@pytest.fixture(autouse=True)
def no_gpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.mark.parametrize(
    "options, message",
    [
        (["--batch", "0"], "must be an integer of at least 1, found '0'"),
        (["--tokens", "two"], "must be an integer of at least 1, found 'two'"),
        (["--tokens", "8", "--window", "16", "7"], "window of 7, found 8"),
        (["--tokens", "33"], "window of 32, found 33"),
        (["--accepted", "half"], "--tokens of at least 2, found 1"),
        (["--repeats", "1"], "no spread"),
        (["--fills", "--tokens", "4", "--window", "32"], "found --tokens, --window"),
        (["--implementation", "mosaic_gpu"], "implementation='mosaic_gpu' cannot run: it needs"),
    ],
)
def test_options_that_do_not_fit(options, message, capsys):
    with pytest.raises(SystemExit):
        kernels.parse(options)
    assert message in capsys.readouterr().err


def test_every_option_makes_its_cases():
    options = ["--batch", "1", "256", "--tokens", "1", "4", "--read-dtype", "none", "int8"]
    args = kernels.parse(["--layer", "kda", "--accepted", "all", "half", *options])
    assert args.implementation == args.baseline == ["xla"]
    names = [name for _, name, _ in kernels.cases_of(args)]
    assert len(set(names)) == len(names) == 2 * 2 * (1 + 2)  # of one token no half is accepted
    assert len({group for group, _, _ in kernels.cases_of(args)}) == 2


@pytest.mark.parametrize(
    "window, tokens, accepted",
    [(16, 1, 1), (16, 4, 4), (16, 4, 2), (32, 8, 4), (7, 4, 4), (20, 3, 1), (1, 1, 1)],
)
def test_flushes_are_as_far_apart_as_the_loop_believes(window, tokens, accepted):
    """A row flushes where its tokens do not fit."""
    length, due = 0, []
    for step in range(200):
        if length + tokens > window:
            due.append(step)
            length = 0
        length += accepted
    period = kernels.flush_period(window, tokens, accepted)
    assert {after - before for before, after in itertools.pairwise(due)} == {period}
