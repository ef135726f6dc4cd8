"""The specification: the recurrence token by token, and conventional decoding as the baseline.

Everything else in this library must equal these few lines. They run in the compute dtype, so a
float64 state (with a float64 spec) gives the oracle of the tests.

A state in a low-precision format is read, advanced in float32 and rounded again at every token;
outputs are those of the state before it is rounded. `precision.encode` makes such a state of a
float32 one, `precision.decode` turns it back.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from replayssm_jax import dispatch, precision
from replayssm_jax.arguments import check_arrays
from replayssm_jax.gradients import not_differentiable
from replayssm_jax.inputs import TokenInputs, check_inputs
from replayssm_jax.spec import ReplaySpec, check_spec
from replayssm_jax.state import ReplayState, check_rounding_key


def recurrent_step(
    spec: ReplaySpec,
    state: Any,
    inputs: TokenInputs,
    *,
    rounding_key: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Any]:
    """Advance the recurrent state by one token: the whole state is read and written.

    Args:
      spec: the layer.
      state: [B, H, P, N], `spec.state_dtype`, in 8 bits a `Scaled`.
      inputs: one token, T = 1.
      rounding_key: None, where a low-precision state is rounded to nearest even, or a key as in
        `init_state`: it is rounded stochastically. Give each step another one, such as
        `jax.random.fold_in(key, t)`.
      implementation: as in `step`: the baseline is as well tuned as what is compared with it. Only
        "xla" is differentiable.

    Returns:
      The output [B, 1, H, P] in the dtype of `v`, and the new state.

    Raises:
      TypeError, ValueError: wrong dtypes or shapes.
    """
    _check_state(spec, state)
    check_inputs(spec, inputs, state.shape[0], max_tokens=1)
    keys = check_rounding_key(spec, state.shape[0], rounding_key)
    spec = dataclasses.replace(spec, read_dtype=None)  # which a conventional step has no use for
    chosen = dispatch.resolve(implementation, spec, 1, arrays=(state, inputs))
    if chosen != "xla":
        from replayssm_jax import kernels

        state, inputs = not_differentiable(
            (state, inputs),
            'kernels have no derivative: pass implementation="xla" to recurrent_step, or train '
            "through prefill",
        )
        return kernels.recurrent_step(spec, state, inputs, implementation=chosen)
    return _one_token(spec, state, inputs, keys)


def recurrent_scan(
    spec: ReplaySpec, state: Any, inputs: TokenInputs, *, rounding_key: jax.Array | None = None
) -> tuple[jax.Array, Any]:
    """Advance the recurrent state by T tokens, one after the other.

    Args:
      spec: the layer.
      state: [B, H, P, N], `spec.state_dtype`, in 8 bits a `Scaled`.
      inputs: any T.
      rounding_key: as in `recurrent_step`; one for all tokens.

    Returns:
      The outputs [B, T, H, P] in the dtype of `v`, and the state after the last token.

    Raises:
      TypeError, ValueError: wrong dtypes or shapes.
    """
    _check_state(spec, state)
    check_inputs(spec, inputs, state.shape[0])
    return _scan(spec, state, inputs, check_rounding_key(spec, state.shape[0], rounding_key))


@functools.partial(jax.jit, static_argnames="spec")
def _one_token(
    spec: ReplaySpec, state: Any, inputs: TokenInputs, keys: jax.Array | None
) -> tuple[jax.Array, Any]:
    output, state = _step(spec, state, jax.tree.map(lambda x: x[:, 0], inputs), keys)
    return output[:, None], state


@functools.partial(jax.jit, static_argnames="spec")
def _scan(
    spec: ReplaySpec, state: Any, inputs: TokenInputs, keys: jax.Array | None
) -> tuple[jax.Array, Any]:
    def body(carry: Any, token: TokenInputs) -> tuple[Any, jax.Array]:
        state, keys = carry
        now, keys = (None, None) if keys is None else precision.advance(keys)
        output, state = _step(spec, state, token, now)
        return (state, keys), output

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
    (state, _), outputs = jax.lax.scan(body, (state, keys), tokens)
    return jnp.moveaxis(outputs, 0, 1), state


def _step(
    spec: ReplaySpec, stored: Any, token: TokenInputs, keys: jax.Array | None
) -> tuple[jax.Array, Any]:
    """One token without its time axis: q, k [B, G, N]; v [B, H, P]; g [B, H(, N)]; beta [B, H]."""
    dtype = spec.compute_dtype
    state = precision.decode(stored, dtype)
    q = jnp.repeat(token.q, spec.heads_per_group, axis=1).astype(dtype)
    k = jnp.repeat(token.k, spec.heads_per_group, axis=1).astype(dtype)
    decay = jnp.exp(token.g.astype(dtype))
    decay = decay[:, :, None, None] if spec.decay == "scalar" else decay[:, :, None, :]
    state = state * decay
    update = token.v.astype(dtype)
    if spec.rule == "delta":
        update = update - _matvec(state, k)
    update = update * token.beta[..., None].astype(dtype)
    state = state + update[..., :, None] * k[..., None, :]
    output = _matvec(state, q).astype(token.v.dtype)
    return output, precision.encode(state, spec.state_dtype, keys)


def _matvec(state: jax.Array, vector: jax.Array) -> jax.Array:
    """[B, H, P, N] times [B, H, N], as multiply and sum so that no device rounds the operands."""
    return jnp.sum(state * vector[..., None, :], axis=-1)


def _check_state(spec: ReplaySpec, state: Any) -> None:
    check_spec(spec)
    if isinstance(state, ReplayState):
        raise TypeError(
            "the recurrent state must be an array, found ReplayState: pass what "
            "rs.materialize(spec, state) gives"
        )
    check_arrays(**{"the recurrent state": state})
    if len(state.shape) != 4 or state.shape != spec.state_shape(state.shape[0]):
        expected = ("B", *spec.state_shape(1)[1:])
        raise ValueError(f"the recurrent state must have shape {expected}, found {state.shape}")

    def kind(scaled: bool) -> str:
        return "Scaled " if scaled else ""

    scaled = isinstance(state, precision.Scaled)
    if state.dtype != spec.state_dtype or scaled != precision.is_scaled(spec.state_dtype):
        raise TypeError(
            f"the recurrent state must be {kind(precision.is_scaled(spec.state_dtype))}"
            f"{spec.state_dtype.name}, found {kind(scaled)}{state.dtype.name}: make one with "
            "precision.encode(state, spec.state_dtype)"
        )
    if scaled and (state.scale.shape, state.scale.dtype) != (state.shape[:-1], jnp.float32):
        raise ValueError(
            f"the scale of the recurrent state must be float32 of shape {state.shape[:-1]}, found "
            f"{state.scale.dtype.name} of shape {state.scale.shape}"
        )
