"""Low-precision copies of a state tile: from registers to a format.

In 8 bits every state row has a float32 scale, which takes the row's largest magnitude to the
largest number of the format. Products with a row are scaled, not its elements. A row with a value
that is not finite has the scale NaN: it reads as NaN, and no other row does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layouts import broadcast

FORMATS = tuple(
    jnp.dtype(x) for x in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)
)

_TINY, _HUGE = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))


class ReadCopy(NamedTuple):
    """A copy of the checkpoint as Refs, written where the checkpoint is.

    Attributes:
      values: [B, H P, N] in one of `FORMATS`.
      scale: [B, H, P] float32, None in 16 bits.
    """

    values: Any
    scale: Any


def is_scaled(dtype: Any) -> bool:
    """Whether a copy of this dtype has scales."""
    return jnp.dtype(dtype).itemsize == 1


def largest_magnitude(rows: jax.Array, *, interpret: bool) -> jax.Array:
    """Of each of the rows [n, N] float32; NaN where a row holds one."""
    if not interpret:
        return jnp.max(jnp.abs(rows), axis=1)
    # XLA's maximum of floats drops NaN on CPUs; bits order magnitudes as numbers do, NaN above.
    bits = jax.lax.bitcast_convert_type(rows, jnp.int32) & np.int32(0x7FFFFFFF)
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis=1), jnp.float32)


def make_scale(amax: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """The scale of rows by their largest magnitude: to divide by, and to keep (or NaN)."""
    top = _top(dtype)
    # At least the smallest normal number: a row of zeros stays one. At most what takes `top` to a
    # finite number: the quotient may have been rounded up.
    most = float(np.nextafter(np.float32(_HUGE / top), np.float32(0)))
    scale = jnp.maximum(jnp.minimum(amax / top, most), _TINY)
    return scale, jnp.where(amax <= _HUGE, scale, jnp.nan)


def encode(rows: jax.Array, scale: jax.Array | None, dtype: Any, layout: Any) -> jax.Array:
    """State rows in a format, to nearest even.

    Finite values beyond the format's range become its largest number.

    Args:
      rows: [n, N] float32.
      scale: [n] to divide by, None in 16 bits.
      dtype: one of `FORMATS`.
      layout: of the rows.

    Returns:
      [n, N] in `dtype`.
    """
    top = _top(dtype)
    if scale is None:
        within = jnp.maximum(jnp.minimum(rows, top), -top)
        return jnp.where(jnp.abs(rows) <= _HUGE, within, rows).astype(dtype)
    values = rows * broadcast(1 / scale, rows.shape, (0,), layout)
    values = jnp.maximum(jnp.minimum(values, top), -top)
    if jnp.issubdtype(dtype, jnp.integer):
        values = jnp.round(values)
    return values.astype(dtype)


def _top(dtype: Any) -> float:
    """Largest number of a format."""
    integer = jnp.issubdtype(dtype, jnp.integer)
    info: Any = jnp.iinfo(dtype) if integer else jnp.finfo(dtype)
    return float(info.max)
