"""The replay kernels: functions of plain arrays and Refs, one launch each.

Shapes: B rows, T tokens, H heads of G key heads, value dim P, key dim N, R slots. Everything of the
ring is of the recurrence's own: see `fused_step.Ring` and `fused_step.Rows`.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.fused_step import Ring, Rows, launch
from pallas_kernels.problem import Mode, Problem
from pallas_kernels.read_copy import ReadCopy

# Which rows a step folds first: those that are due, all of them, or none.
Flush = Literal["due", "all", "none"]


def step(
    checkpoint: Any,
    ring: Ring,
    rows: Rows,
    inputs: Any,
    *,
    window: int,
    flush: Flush = "due",
    masked: bool = True,
    wgmma: bool = True,
    interpret: bool = False,
    copy: ReadCopy | None = None,
) -> jax.Array:
    """Fold rows, append T tokens, evaluate them.

    Args:
      checkpoint: Ref [B, H P, N] float32, updated in place.
      ring: Refs, updated in place.
      rows: [B] arrays.
      inputs: (q [B, T, G, N], k [B, T, G, N], v [B, T, H, P], g [B, T, H] or [B, T, H, N] float32,
        beta [B, T, H] float32), 1 <= T <= 16.
      window: most committed records of a row.
      flush: which rows fold: "due" those whose tokens would not fit in the window, "all" those that
        have tokens, "none" no row, and what does not fit becomes NaN.
      masked: whether rows may have fewer than T tokens, `rows.num_new`.
      wgmma: fold by the tensor-core products that only Hopper has.
      interpret: for the interpreter on CPU.
      copy: None, or Refs of a low-precision copy of the checkpoint: tokens are evaluated from it,
        and a fold writes both. Under the delta rule the ring then has values and betas too.

    Returns:
      [B, T, H, P] in the dtype of v; zero for tokens that are not real.

    Raises:
      ValueError: no kernel for these shapes or dtypes.
    """
    mode = Mode(
        fold=flush != "none",
        decides=flush == "due",
        masked=masked,
        wgmma=wgmma,
        interpret=interpret,
    )
    return _run(mode, checkpoint, ring, rows, inputs, window, copy)


def evaluate(
    checkpoint: Any,
    ring: Ring,
    rows: Rows,
    inputs: Any,
    *,
    window: int,
    masked: bool = True,
    interpret: bool = False,
    copy: ReadCopy | None = None,
) -> jax.Array:
    """Outputs of T tokens after the committed records; nothing is written.

    Args and returns as `step`; whether the tokens would fit in the window does not matter.
    """
    mode = Mode(fold=False, append=False, masked=masked, interpret=interpret)
    return _run(mode, checkpoint, ring, rows, inputs, window, copy)


def fold(
    checkpoint: Any,
    ring: Ring,
    rows: Rows,
    *,
    window: int,
    wgmma: bool = True,
    interpret: bool = False,
    copy: ReadCopy | None = None,
) -> None:
    """Fold the records of the rows whose `num_new` is not 0 into the checkpoint, in place.

    Args as `step`; the ring stays as it is, and the pointer is the caller's to move.
    """
    mode = Mode(decides=False, append=False, wgmma=wgmma, interpret=interpret)
    _run(mode, checkpoint, ring, rows, (), window, copy)


def _run(
    mode: Mode,
    checkpoint: Any,
    ring: Ring,
    rows: Rows,
    inputs: Any,
    window: int,
    copy: ReadCopy | None,
) -> Any:
    batch, num_rows, key_dim = checkpoint.shape
    num_heads = ring.log_decay.shape[2]
    # A flush has no tokens, and under the delta rule nothing else has the dtype of values.
    values = inputs[2] if inputs else ring.value
    problem = Problem(
        batch=batch,
        num_heads=num_heads,
        num_groups=ring.key.shape[2],
        value_dim=num_rows // num_heads,
        key_dim=key_dim,
        capacity=ring.key.shape[1],
        window=window,
        num_tokens=inputs[2].shape[1] if inputs else 0,
        delta=ring.update is not None,
        channel=ring.log_decay.ndim == 4,
        key_dtype=ring.key.dtype,
        value_dtype=jnp.dtype(jnp.float32) if values is None else values.dtype,
        read_dtype=None if copy is None else jnp.dtype(copy.values.dtype),
        cached_dtype=jnp.dtype(jnp.float32) if ring.update is None else ring.update.dtype,
        read_decay_dtype=None if ring.read_log_decay is None else ring.read_log_decay.dtype,
    )
    return launch(problem, mode, checkpoint, ring, rows, inputs, copy=copy)
