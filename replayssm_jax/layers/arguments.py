"""What is checked of the arguments of layers and of their calls."""

from __future__ import annotations

from typing import Any

from flax import nnx

from replayssm_jax.arguments import check_floats, check_type, float_dtype


def check_params(param_dtype: Any, rngs: Any) -> None:
    """Raise TypeError unless parameters can be made: a floating dtype, and `nnx.Rngs`."""
    float_dtype("param_dtype", param_dtype)
    check_type("rngs", rngs, nnx.Rngs)


def check_features(x: Any, features: int) -> None:
    """Check the input [..., features] of a layer.

    Raises:
      TypeError: no array, or none of a floating dtype.
      ValueError: another width.
    """
    check_floats(x=x)
    if x.shape[-1:] != (features,):
        raise ValueError(f"x must have shape [..., {features}], found {x.shape}")
