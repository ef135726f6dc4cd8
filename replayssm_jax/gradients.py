"""Operations that have no derivative, and say so."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import jax

T = TypeVar("T")


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def not_differentiable(x: T, message: str) -> T:
    """The pytree `x` as it is; to differentiate what depends on it raises TypeError(message)."""
    del message
    return x


@not_differentiable.defjvp
def _refuse(message: str, primals: Any, tangents: Any) -> Any:
    raise TypeError(message)
