"""Strict JAX settings for every test, and eight virtual devices where JAX runs on the CPU."""

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs():
    """Compiled programs are mapped into memory for good, and a process may have 65,530 maps."""
    yield
    jax.clear_caches()


def pytest_collection_modifyitems(items):
    if jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
