"""Checks of values that are known only at run time, for `checkify`: off by default.

`checkify.debug_check` marks everything that contains it with an effect, off or not, and a jitted
function with an effect is called through a slow path: measured, 10 ms instead of 0.4 ms a call with
200 arrays. So the checks are there only where they are asked for.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.experimental import checkify

_checking = contextvars.ContextVar("checking", default=False)


@contextlib.contextmanager
def debug_checks() -> Iterator[None]:
    """Within it, traced functions hold checks of their values, for `checkify.checkify` to find.

        with rs.debug_checks():
            errors, out = jax.jit(checkify.checkify(f))(state, inputs)
        errors.throw()

    Gates that are positive or not finite, lengths, slots, rows and accepted counts out of range,
    records beyond the window; of models also tokens outside the vocabulary or past the end of the
    cache. Without `checkify.checkify` nothing is reported. JAX's caches are cleared on entry and
    exit: what was compiled before has no checks, and what is compiled here has them.
    """
    token = _checking.set(True)
    jax.clear_caches()
    try:
        yield
    finally:
        _checking.reset(token)
        jax.clear_caches()


def debug_check(holds: Callable[[], jax.Array], message: str) -> None:
    """Check that `holds()`, a bool scalar, is true, within `debug_checks`."""
    if _checking.get():
        checkify.debug_check(holds(), message)


def nan_unless(holds: jax.Array, x: jax.Array) -> jax.Array:
    """`x` where `holds`, which broadcasts against it, and NaN elsewhere.

    No operation gives NaN where all holds: `jax.debug_nans` and `checkify.nan_checks` would find
    one that is only selected from.
    """
    return x + jnp.zeros((), x.dtype) / holds.astype(x.dtype)
