"""Options of layers and models: what each may be, checked where it is given."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from replayssm_jax.arguments import (
    check_bool,
    check_choice,
    check_dt_limits,
    check_int,
    check_number,
    check_type,
)

# Numbers are finite and integers at least 1, except:
_LEAST = {"d_shared": 0, "gate_rank": 0}
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "lower_bound": (lambda x: x < 0, "negative"),
    "norm_epsilon": (lambda x: x >= 0, "at least 0"),
    "rope_base": (lambda x: x > 0, "above 0"),
    "rope_fraction": (lambda x: 0 <= x <= 1, "in [0, 1]"),
}


def check_option(name: str, value: Any, kind: Any) -> Any:
    """The option `name` as its annotation `kind` has it: an int, float or bool of Python's.

    Annotations that it does not know, such as a dtype's, pass any value.

    Raises:
      TypeError: another type.
      ValueError: a name that is none of a `Literal`, or a number out of the option's range.
    """
    kinds = get_args(kind) if NoneType in get_args(kind) else (kind,)
    if value is None and NoneType in kinds:
        return None
    (kind,) = (x for x in kinds if x is not NoneType)
    if name == "dt_limits":
        return check_dt_limits(value)
    if get_origin(kind) is Literal:
        names = get_args(kind)
        check_choice(name, value, (None, *names) if NoneType in kinds else names)
    elif kind is bool:
        return check_bool(name, value)
    elif kind is int:
        return check_int(name, value, _LEAST.get(name, 1))
    elif kind is float:
        return _in_range(name, check_number(name, value))
    elif dataclasses.is_dataclass(kind) and isinstance(kind, type):
        check_type(name, value, kind)
    return value


def _in_range(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, found {value}")
    allowed, wanted = _RANGES.get(name, (math.isfinite, "finite"))
    if not allowed(value):
        raise ValueError(f"{name} must be {wanted}, found {value}")
    return value


class Options:
    """Base of frozen dataclasses whose fields are options, checked by their annotations."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            object.__setattr__(self, name, check_option(name, getattr(self, name), kind))
