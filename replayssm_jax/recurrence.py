"""The specification: the recurrence token by token, and conventional decoding as the baseline.

Everything else in this library must equal these few lines. They run in the dtype of the state, so
a float64 state (with a float64 spec) gives the oracle of the tests.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from replayssm_jax import dispatch
from replayssm_jax.inputs import TokenInputs, check_inputs
from replayssm_jax.spec import ReplaySpec


def recurrent_step(
    spec: ReplaySpec,
    state: jax.Array,
    inputs: TokenInputs,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Advance the recurrent state by one token: the whole state is read and written.

    Args:
      spec: the layer.
      state: [B, H, P, N], `spec.state_dtype`.
      inputs: one token, T = 1.
      implementation: as in `step`: the baseline is as well tuned as what is compared with it.

    Returns:
      The output [B, 1, H, P] in the dtype of `v`, and the new state.

    Raises:
      TypeError, ValueError: wrong dtypes or shapes.
    """
    _check_state(spec, state)
    check_inputs(spec, inputs, state.shape[0], max_tokens=1)
    chosen = dispatch.resolve(implementation, spec, 1)
    if chosen != "xla":
        from replayssm_jax import kernels

        return kernels.recurrent_step(spec, state, inputs, implementation=chosen)
    output, state = _step(spec, state, jax.tree.map(lambda x: x[:, 0], inputs))
    return output[:, None], state


def recurrent_scan(
    spec: ReplaySpec, state: jax.Array, inputs: TokenInputs
) -> tuple[jax.Array, jax.Array]:
    """Advance the recurrent state by T tokens, one after the other.

    Args:
      spec: the layer.
      state: [B, H, P, N], `spec.state_dtype`.
      inputs: any T.

    Returns:
      The outputs [B, T, H, P] in the dtype of `v`, and the state after the last token.

    Raises:
      TypeError, ValueError: wrong dtypes or shapes.
    """
    _check_state(spec, state)
    check_inputs(spec, inputs, state.shape[0])

    def body(state: jax.Array, token: TokenInputs) -> tuple[jax.Array, jax.Array]:
        output, state = _step(spec, state, token)
        return state, output

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
    state, outputs = jax.lax.scan(body, state, tokens)
    return jnp.moveaxis(outputs, 0, 1), state


def _step(spec: ReplaySpec, state: jax.Array, token: TokenInputs) -> tuple[jax.Array, jax.Array]:
    """One token without its time axis: q, k [B, G, N]; v [B, H, P]; g [B, H(, N)]; beta [B, H]."""
    dtype = state.dtype
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
    return _matvec(state, q).astype(token.v.dtype), state


def _matvec(state: jax.Array, vector: jax.Array) -> jax.Array:
    """[B, H, P, N] times [B, H, N], as multiply and sum so that no device rounds the operands."""
    return jnp.sum(state * vector[..., None, :], axis=-1)


def _check_state(spec: ReplaySpec, state: jax.Array) -> None:
    spec.check_x64()
    if state.ndim != 4 or state.shape != spec.state_shape(state.shape[0]):
        expected = ("B", *spec.state_shape(1)[1:])
        raise ValueError(f"the recurrent state must have shape {expected}, found {state.shape}")
    if state.dtype != spec.state_dtype:
        raise TypeError(
            f"the recurrent state must be {spec.state_dtype.name}, found {state.dtype.name}"
        )
