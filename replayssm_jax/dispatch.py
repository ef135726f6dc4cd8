"""Which implementation runs an operation: the meaning of `implementation=`."""

from __future__ import annotations

from typing import Literal

Implementation = Literal["xla", "mosaic_gpu", "triton"]

_WHY_NOT = {
    "mosaic_gpu": "this version has no Mosaic GPU kernels yet",
    "triton": "this version has no Triton kernels yet",
}


def resolve(implementation: str | None) -> Implementation:
    """The implementation to run: the named one, or for None the best that supports the case.

    Raises:
      ValueError: an unknown name, or a named implementation that cannot run, with the reason.
    """
    if implementation is None or implementation == "xla":
        return "xla"
    if implementation in _WHY_NOT:
        raise ValueError(
            f"implementation={implementation!r} cannot run: {_WHY_NOT[implementation]}; "
            'pass "xla" or None'
        )
    known = ("xla", *_WHY_NOT)
    raise ValueError(f"implementation must be None or one of {known}, found {implementation!r}")
