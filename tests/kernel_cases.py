"""What tests of the kernels share."""

import contextlib

import jax


@contextlib.contextmanager
def cut_as_for_large_batches():
    """Within it, kernels for a few rows are built as those for many rows are."""
    from pallas_kernels import configs
    from replayssm_jax import kernels

    def forget():
        kernels._in_place.cache_clear()
        kernels._conventional.cache_clear()
        jax.clear_caches()

    enough, configs.FILLED = configs.FILLED, 1
    forget()
    try:
        yield
    finally:
        configs.FILLED = enough
        forget()
