"""ReplaySSM for JAX: decode SSM and linear-attention layers by caching inputs, not states."""

import importlib
from typing import TYPE_CHECKING, Any

from replayssm_jax.checks import debug_checks
from replayssm_jax.decode import commit, flush, step, verify
from replayssm_jax.inputs import TokenInputs
from replayssm_jax.loops import scan_steps, while_loop
from replayssm_jax.precision import Scaled
from replayssm_jax.prefill import prefill
from replayssm_jax.recurrence import recurrent_scan, recurrent_step
from replayssm_jax.spec import ReplaySpec
from replayssm_jax.state import (
    InputBuffer,
    Pointer,
    ReplayState,
    init_state,
    insert,
    materialize,
    reset,
    take,
)

if TYPE_CHECKING:
    from replayssm_jax import layers as layers
    from replayssm_jax import models as models
    from replayssm_jax.generate import generate as generate
    from replayssm_jax.generate import stream as stream
    from replayssm_jax.speculative import speculative_generate as speculative_generate

__version__ = "0.1.0"

__all__ = [
    "InputBuffer",
    "Pointer",
    "ReplaySpec",
    "ReplayState",
    "Scaled",
    "TokenInputs",
    "commit",
    "debug_checks",
    "flush",
    "init_state",
    "insert",
    "materialize",
    "prefill",
    "recurrent_scan",
    "recurrent_step",
    "reset",
    "scan_steps",
    "step",
    "take",
    "verify",
    "while_loop",
]

_NEED_FLAX = ("generate", "layers", "models", "speculative_generate", "stream")

_FUNCTIONS = {"speculative_generate": "speculative", "stream": "generate"}  # name: its module


def __dir__() -> list[str]:
    return sorted({*globals(), *_NEED_FLAX})


if not TYPE_CHECKING:  # a type checker would take any name from it

    def __getattr__(name: str) -> Any:
        """Import what needs Flax when it is first asked for; the core does without."""
        if name in _FUNCTIONS:
            return getattr(importlib.import_module(f"replayssm_jax.{_FUNCTIONS[name]}"), name)
        if name in _NEED_FLAX:
            return importlib.import_module(f"replayssm_jax.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
