"""What is checked of arguments: each check names what it found and what it wanted."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def check_type(name: str, value: Any, kind: type) -> None:
    """Raise TypeError unless `value` is a `kind`."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise TypeError(f"{name} must be {article} {kind.__name__}, found {type(value).__name__}")


def check_protocol(name: str, value: Any, kind: str, wanted: tuple[str, ...]) -> None:
    """Raise TypeError unless `value` is a pytree with the attributes `wanted`."""
    if isinstance(value, type):
        raise TypeError(f"{name} must be {kind}, found the class {value.__name__}")
    found = type(value).__name__
    missing = [attribute for attribute in wanted if not hasattr(value, attribute)]
    if missing:
        raise TypeError(f"{name} must be {kind}, found {found} without {', '.join(missing)}")
    if jax.tree_util.all_leaves([value]):
        raise TypeError(
            f"{name} must be a pytree, found {found}: register its class, with "
            "jax.tree_util.register_static where it holds no arrays"
        )


def check_int(name: str, value: Any, least: int = 1) -> int:
    """`value` as an int of at least `least`.

    Raises:
      TypeError: no int, Python's or NumPy's: a bool, a float, an array, a traced value.
      ValueError: less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an int, found {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, found {value}")
    return int(value)


def check_number(name: str, value: Any) -> float:
    """`value` as a float.

    Raises:
      TypeError: no number, Python's or NumPy's: a bool, an array, a traced value.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        found = type(value).__name__ if isinstance(value, jax.core.Tracer) else repr(value)
        raise TypeError(f"{name} must be a number, found {found}")
    return float(value)


def check_bool(name: str, value: Any) -> bool:
    """`value` as a bool; raise TypeError where it is none, Python's or NumPy's."""
    if not isinstance(value, bool | np.bool):
        raise TypeError(f"{name} must be a bool, found {value!r}")
    return bool(value)


def check_choice(name: str, value: Any, allowed: tuple[str | None, ...]) -> None:
    """Raise ValueError unless `value` is one of `allowed`; None comes first where it is."""
    if not (value is None or isinstance(value, str)) or value not in allowed:
        names = tuple(x for x in allowed if x is not None)
        none = "None or " if None in allowed else ""
        raise ValueError(f"{name} must be {none}one of {names}, found {value!r}")


def check_dt_limits(limits: Any) -> tuple[float, float]:
    """Limits of the step size of Mamba-2 as floats.

    Raises:
      TypeError: limits that are no numbers.
      ValueError: anything but two of them, 0 <= lower <= upper; the upper may be infinite.
    """
    wanted = "(lower, upper), 0 <= lower <= upper with a finite lower one"
    wrong = f"dt_limits must be {wanted}, found {limits!r}"
    try:
        lower, upper = limits
    except (TypeError, ValueError):  # no sequence, another length
        raise ValueError(wrong) from None
    lower, upper = check_number("dt_limits[0]", lower), check_number("dt_limits[1]", upper)
    if not 0 <= lower <= upper or math.isinf(lower):
        raise ValueError(wrong)
    return lower, upper


def as_dtype(dtype: Any) -> np.dtype | None:
    """`dtype` as NumPy's, None for what is none."""
    try:
        return None if dtype is None else jnp.dtype(dtype)  # NumPy takes None for float64
    except TypeError:
        return None


def float_dtype(name: str, dtype: Any) -> np.dtype:
    """`dtype` as NumPy's; raise TypeError where it is no floating one."""
    found = as_dtype(dtype)
    if found is None or not jnp.issubdtype(found, jnp.floating):
        shown = repr(dtype) if found is None else found.name
        raise TypeError(f"{name} must be a floating dtype, found {shown}")
    return found


def check_arrays(**arrays: Any) -> None:
    """Raise TypeError for a list or None: they have no dtype, and it is never guessed."""
    for name, array in arrays.items():
        if not hasattr(array, "dtype"):
            found = "None" if array is None else type(array).__name__
            raise TypeError(f"{name} must be an array, found {found}")


def check_floats(**arrays: Any) -> None:
    """Raise TypeError for what is no array of a floating dtype."""
    check_arrays(**arrays)
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} must be of a floating dtype, found {array.dtype.name}")


def check_not_explicit(**trees: Any) -> None:
    """Raise ValueError for arrays that are sharded over explicit axes of a mesh."""
    for name, tree in trees.items():
        for x in jax.tree.leaves(tree):
            spec = jax.typeof(x).sharding.spec
            if any(axis is not None for axis in spec):
                raise ValueError(
                    f"{name} must not be sharded over explicit axes of a mesh, found {spec}: make "
                    "the mesh with axis_types=(jax.sharding.AxisType.Auto,) for each axis, call it "
                    "inside jax.shard_map, or place models by shard_model"
                )


def concrete(x: Any) -> Any | None:
    """The value of `x` where it is known (not traced, and all of it in this process), else None."""
    if isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True):
        return None
    return jax.device_get(x)


def known_mask(lengths: Any, valid: Any, num_tokens: int) -> Any | None:
    """Which tokens [B, T] are known to be real: True for all, None where that is not known.

    From `lengths` [B], `valid` [B, T] or neither. A mask that JAX computed of them would be traced
    under the caller's jit.
    """
    if lengths is None:
        return True if valid is None else concrete(valid)
    known = concrete(lengths)
    return None if known is None else np.arange(num_tokens) < known[:, None]


def as_int32(name: str, value: Any) -> jax.Array:
    """Integers as int32, lists too: no other number is rounded to one, and none wraps around.

    Those that are known stay so, as `as_array` says.

    Raises:
      TypeError: another dtype.
      ValueError: a number that int32 does not hold, where it is known.
    """
    array = as_array(name, value, "integer")
    check_int32(name, array)
    return cast(array, np.int32)


def as_array(name: str, value: Any, kind: str) -> Any:
    """`value` as an array: JAX's where it is one or holds traced numbers, otherwise NumPy's.

    What JAX makes of known numbers is traced under the caller's jit, and could not be checked.

    Raises:
      TypeError: what is no array of numbers.
      ValueError: integers that no dtype holds.
    """
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if hasattr(value, "dtype"):
        return jnp.asarray(value)
    try:
        array = np.asarray(value)
    except jax.errors.TracerArrayConversionError:
        return jnp.asarray(value)
    except ValueError:  # lists of different lengths
        raise TypeError(f"{name} must be {kind}, found {value!r}") from None
    if array.dtype == object and kind == "integer" and all(isinstance(x, int) for x in array.flat):
        raise ValueError(f"{name} must fit in int32, found {value!r}")
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{name} must be {kind}, found {value!r}")
    return array


def cast(array: Any, dtype: Any) -> jax.Array:
    """What `as_array` gives in another dtype, and known where it was."""
    as_it_is = array.dtype == dtype and not getattr(array, "weak_type", False)
    known = None if as_it_is else concrete(array)
    result: jax.Array = (array if known is None else known).astype(dtype)
    return result


def check_int32(name: str, array: Any) -> None:
    """Raise as `as_int32` does; an array without elements may be of any dtype."""
    if array.size and not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be integer, found {array.dtype.name}")
    if np.can_cast(array.dtype, np.int32):
        return
    known, limits = concrete(array), np.iinfo(np.int32)
    if known is not None and known.size:
        for extreme in (int(known.min()), int(known.max())):
            if not limits.min <= extreme <= limits.max:
                raise ValueError(f"{name} must fit in int32, found {extreme}")


def check_array(name: str, value: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """A mask or indices as an array, lists too, of `shape` and `dtype` (jnp.bool or jnp.integer).

    Integers become int32, see `as_int32`; what is known stays so, see `as_array`.

    Raises:
      TypeError, ValueError: another dtype or shape.
    """
    integers = dtype is jnp.integer
    array = as_int32(name, value) if integers else as_array(name, value, dtype.__name__)
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, found {array.shape}")
    if not jnp.issubdtype(array.dtype, dtype):
        raise TypeError(f"{name} must be {dtype.__name__}, found {array.dtype.name}")
    return array
