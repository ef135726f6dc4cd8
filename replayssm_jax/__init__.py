"""ReplaySSM for JAX: decode SSM and linear-attention layers by caching inputs, not states."""

from replayssm_jax.decode import commit, flush, step, verify
from replayssm_jax.inputs import TokenInputs
from replayssm_jax.loops import scan_steps, while_loop
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

__version__ = "0.1.0"

__all__ = [
    "InputBuffer",
    "Pointer",
    "ReplaySpec",
    "ReplayState",
    "TokenInputs",
    "commit",
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
