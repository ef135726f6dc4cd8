"""Low-precision formats of a state: read copies, checkpoints, scales, stochastic rounding.

A state is stored as a plain array in float32, float64, bfloat16 or float16, and as `Scaled` in the
8-bit formats, whose range is too narrow for it: one float32 scale for each row of values.

Rounding is to nearest even, or stochastic where keys are given: up with the probability of the
part that is cut off, so that the expected value is the one that was rounded. Keys are arrays like
any other data, one for each row of the batch and each head, so that no program holds a seed, and a
head rounds alike wherever it is computed.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from replayssm_jax.arguments import as_dtype, check_floats
from replayssm_jax.checks import nan_unless

# Of read copies, and of checkpoints beside float32 and float64.
FORMATS = tuple(
    jnp.dtype(x) for x in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)
)

_TINY, _HUGE = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaled:
    """An 8-bit state: `values * scale[..., None]`.

    The scale of a row takes the row's largest magnitude to the largest number of the format. A row
    that holds a value that is not finite has the scale NaN: all of it reads as NaN, as each of its
    products would, and no other row is touched.

    Attributes:
      values: [..., P, N], int8, float8_e4m3fn or float8_e5m2.
      scale: [..., P], float32.
    """

    values: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the state."""
        return tuple(self.values.shape)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the values."""
        return jnp.dtype(self.values.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return int(self.values.nbytes + self.scale.nbytes)


class Stored(NamedTuple):
    """What a flush writes; every array is [B, H, ...].

    Attributes:
      checkpoint: [B, H, P, N], an array or `Scaled`.
      read_copy: None, or the checkpoint once more in the read format.
      rounding_key: None, or uint32 [B, H, 2].
    """

    checkpoint: Any
    read_copy: Any
    rounding_key: Any


def state_dtype_of(name: str, dtype: Any, wide: tuple[Any, ...]) -> np.dtype:
    """A dtype that a state can be stored in: one of `wide` or of the low-precision formats."""
    allowed = (*map(jnp.dtype, wide), *FORMATS)
    names = ", ".join(x.name for x in allowed)
    found = as_dtype(dtype)
    if found is None:
        raise TypeError(f"{name} must be a dtype, one of {names}, found {dtype!r}")
    if found not in allowed:
        raise ValueError(f"{name} must be one of {names}, found {found.name}")
    return found


def is_scaled(dtype: Any) -> bool:
    """Whether a state of this dtype has scales."""
    return jnp.dtype(dtype).itemsize == 1


def largest(dtype: Any) -> float:
    """Largest number that a state of this dtype is given; the smallest is its negative."""
    info: Any = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype)
    return float(info.max)


def storage(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shapes and dtypes of a stored state of `shape` [..., P, N]."""
    values = jax.ShapeDtypeStruct(shape, dtype)
    if not is_scaled(dtype):
        return values
    return Scaled(values, jax.ShapeDtypeStruct(shape[:-1], jnp.float32))


def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """A stored state of zeros, as `encode` makes it; compilers would compute that at length."""
    values = jnp.zeros(shape, dtype)
    if not is_scaled(dtype):
        return values
    return Scaled(values, jnp.full(shape[:-1], _TINY, jnp.float32))


def encode(x: jax.Array, dtype: Any, keys: jax.Array | None = None) -> Any:
    """Store a state in a format.

    Finite values beyond the format's range become its largest number; what is not finite stays so,
    see `Scaled`. To nearest in 16 bits the derivative is that of a cast, otherwise it is zero.

    Args:
      x: [..., P, N], float32 or float64.
      dtype: one of `FORMATS`, or float32 or float64, to which `x` is cast.
      keys: None to round to nearest even, or uint32 [..., 2] to round stochastically.

    Returns:
      [..., P, N] in `dtype`, or `Scaled`.

    Raises:
      TypeError: an `x` that is no floating array, a `dtype` that is none.
      ValueError: another dtype.
    """
    check_floats(x=x)
    dtype = state_dtype_of("dtype", dtype, (jnp.float32, jnp.float64))
    if dtype not in FORMATS:
        return x.astype(dtype)
    top = largest(dtype)
    if is_scaled(dtype) or keys is not None:
        x = jax.lax.stop_gradient(x)  # or what there is of one, through the scales, would flow
    if not is_scaled(dtype):
        clipped = jnp.where(jnp.isfinite(x), jnp.clip(x, -top, top), x)
        return _round(clipped, dtype, keys)
    if x.dtype != jnp.float32:
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -_HUGE, _HUGE), x).astype(jnp.float32)
    amax = _largest_magnitude(x)
    # At least the smallest normal number: rows of zeros stay zeros, nothing is divided by zero. At
    # most what takes `top` to a finite number: a quotient may have been rounded up.
    most = float(np.nextafter(np.float32(_HUGE / top), np.float32(0)))
    finite = jnp.isfinite(amax)
    scale = nan_unless(finite, jnp.clip(amax / top, _TINY, most))
    finite = finite[..., None]
    values = jnp.where(finite, jnp.clip(x / jnp.where(finite, scale[..., None], 1), -top, top), 0)
    return Scaled(_round(values, dtype, keys), scale)


def decode(stored: Any, dtype: Any) -> jax.Array:
    """The state [..., P, N] that was stored, in `dtype`."""
    if isinstance(stored, Scaled):
        values: jax.Array = stored.values.astype(dtype) * stored.scale.astype(dtype)[..., None]
        return values
    return stored.astype(dtype)


def store(x: jax.Array, keys: jax.Array | None, state_dtype: Any, read_dtype: Any | None) -> Stored:
    """Write a new checkpoint and its read copy; the keys move on.

    Args:
      x: [B, H, P, N], the new state.
      keys: None, or uint32 [B, H, 2] of a checkpoint that is rounded stochastically.
      state_dtype: of the checkpoint.
      read_dtype: of the read copy, None without one.
    """
    now, after = (None, None) if keys is None else advance(keys)
    checkpoint = encode(x, state_dtype, now)
    if read_dtype is None:
        return Stored(checkpoint, None, after)
    # Apart from the copy, or the compiler may fold in another way for each of its formats.
    checkpoint = jax.lax.optimization_barrier(checkpoint)
    copy = encode(jax.lax.stop_gradient(decode(checkpoint, x.dtype)), read_dtype)
    return Stored(checkpoint, copy, after)


def as_keys(key: Any, shape: tuple[int, ...]) -> jax.Array:
    """Keys uint32 [*shape, 2] from one PRNG key, all different; such keys come back as they are.

    Raises:
      TypeError: neither a key made by `jax.random.key` nor uint32.
      ValueError: another shape.
    """
    dtype = getattr(key, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        if key.shape != ():
            raise ValueError(f"rounding_key must be one key, found keys of shape {key.shape}")
        return jax.random.bits(key, (*shape, 2), jnp.uint32)
    if dtype != jnp.uint32:
        found = type(key).__name__ if dtype is None else dtype.name
        raise TypeError(f"rounding_key must be a key from jax.random.key(seed), found {found}")
    if key.shape != (*shape, 2):
        raise ValueError(
            f"rounding_key must be a key from jax.random.key(seed) or uint32 of shape "
            f"{(*shape, 2)}, found uint32 of shape {key.shape}"
        )
    return key


def advance(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Split each of the keys uint32 [..., 2] in two: one to round with now, one to keep."""

    def split(key: jax.Array) -> jax.Array:
        pair = jax.random.split(jax.random.wrap_key_data(key, impl="threefry2x32"))
        return jax.random.key_data(pair)

    pairs = jax.vmap(split)(keys.reshape(-1, 2))
    return pairs[:, 0].reshape(keys.shape), pairs[:, 1].reshape(keys.shape)


def _largest_magnitude(x: jax.Array) -> jax.Array:
    """Of each row of x [..., N] float32, NaN where it holds one.

    By their bits, which order magnitudes as numbers do and NaN above them: XLA's maximum of floats
    drops NaN on CPUs, where the rows are long and many enough to be cut into parts.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & np.int32(0x7FFFFFFF)
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis=-1), jnp.float32)


def _round(x: jax.Array, dtype: np.dtype, keys: jax.Array | None) -> jax.Array:
    """x [..., P, N], which lies in the range of the format, rounded to it."""
    if keys is None:
        if jnp.issubdtype(dtype, jnp.integer):
            x = jnp.round(x)
        return x.astype(dtype)
    x = x.astype(jnp.float32)
    magnitude = jnp.abs(x)
    unit, per_unit = _unit(magnitude, dtype)
    quotient = magnitude * per_unit  # exact, both factors and the product
    below = jnp.floor(quotient)
    threshold = ((quotient - below) * np.float32(2.0**32)).astype(jnp.uint32)
    rounded = below + (_random_bits(keys, x.shape) < threshold).astype(jnp.float32)
    rounded = jnp.where(jnp.isfinite(x), jnp.copysign(rounded * unit, x), x)
    return rounded.astype(dtype)


def _unit(magnitude: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
    """Distance between the numbers of the format around each magnitude, and one over it."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.float32(1), jnp.float32(1)
    info = jnp.finfo(dtype)
    # Units are normal float32: bfloat16 loses what is below 2**-126, as devices do anyway.
    lowest = max(int(info.minexp), -126 + int(info.nmant))
    exponent = (jax.lax.bitcast_convert_type(magnitude, jnp.int32) >> 23) - 127
    exponent = jnp.clip(exponent, lowest, 127) - int(info.nmant)

    def power_of_two(exponent: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)

    return power_of_two(exponent), power_of_two(-exponent)


def _random_bits(keys: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """uint32 [..., P, N], drawn with the keys uint32 [..., 2]."""

    def draw(key: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.bits(key, shape[keys.ndim - 1 :], jnp.uint32)

    bits = jax.vmap(draw)(keys.reshape(-1, 2))
    assert bits.size == math.prod(shape)
    return bits.reshape(shape)
