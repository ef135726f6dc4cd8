"""Strict JAX settings for every test, eight virtual devices where JAX runs on the CPU, and what
`--two-families` and `--each-value` leave out.
"""

import gc
import os

import jax
import pytest

# Traces make many objects that live on; looking for garbage among them took 8% of the time.
gc.set_threshold(20_000, 20, 20)

# Processes side by side share a GPU; JAX looks when it first uses one.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs():
    """Compiled programs are mapped into memory for good, and a process may have 65,530 maps."""
    yield
    jax.clear_caches()
    gc.collect()


def pytest_addoption(parser):
    parser.addoption(
        "--two-families",
        action="store_true",
        help="outside the base suite, run what is tested for several families for mamba2 and kda",
    )
    parser.addoption(
        "--each-value",
        action="store_true",
        help="run every value of every parameter of a test, but not every combination of them",
    )


# One additive rule with a scalar decay, one delta rule with a decay for each channel.
TWO_FAMILIES = {"mamba2", "kda"}
OTHER_FAMILIES = {"gated_delta_net", "gla"}


def families_of(item):
    callspec = getattr(item, "callspec", None)
    found = callspec.params.values() if callspec else ()
    return {x for x in found if isinstance(x, str)} & (TWO_FAMILIES | OTHER_FAMILIES)


def leave_out_families(config, items):
    """Of a test that has cases of the two families, deselect those of the others."""

    def function(item):
        return item.path, item.cls, item.originalname

    thinned = {function(x) for x in items if families_of(x) & TWO_FAMILIES}
    left_out = [
        x
        for x in items
        if families_of(x) & OTHER_FAMILIES
        and function(x) in thinned
        and not x.path.name.startswith("test_core")
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [x for x in items if x not in set(left_out)]


def leave_out_combinations(config, items):
    """Of the cases of a test, keep the fewest that have every value of every parameter.

    One after the other, each time the first of those that add the most values.
    """
    cases, left_out = {}, set()
    for item in items:
        if hasattr(item, "callspec"):
            cases.setdefault((item.path, item.cls, item.originalname), []).append(item)
    for rest in cases.values():
        # By identity, since values may be arrays.
        values = {x: {(k, id(v)) for k, v in x.callspec.params.items()} for x in rest}
        missing = set().union(*values.values())
        while missing:
            best = max(rest, key=lambda x: len(values[x] & missing))
            missing -= values[best]
            rest = [x for x in rest if x is not best]
        left_out.update(rest)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [x for x in items if x not in left_out]


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    if config.getoption("two_families"):
        leave_out_families(config, items)
    if config.getoption("each_value"):
        leave_out_combinations(config, items)
    if jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
