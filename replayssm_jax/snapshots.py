"""Snapshots: conventional decoding that can reject drafts, since it keeps a state for each.

What other systems do to speculate on a recurrent layer, and what replay is compared with: every
token writes a whole state, a rollback selects one of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from replayssm_jax import dispatch
from replayssm_jax.arguments import check_array
from replayssm_jax.gradients import not_differentiable
from replayssm_jax.inputs import TokenInputs, check_inputs
from replayssm_jax.recurrence import recurrent_step
from replayssm_jax.spec import ReplaySpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Snapshots:
    """Ring of recurrent states; the state after n tokens of a row lies in slot n mod S.

    Attributes:
      states: [B, S, H, P, N], S = `spec.max_tokens` + 1: the committed state and one for each
        draft.
    """

    states: jax.Array

    @classmethod
    def zeros(cls, spec: ReplaySpec, batch_size: int) -> Snapshots:
        """Return the snapshots of `batch_size` rows that have seen nothing."""
        rows, *state = spec.state_shape(batch_size)
        return cls(jnp.zeros((rows, spec.max_tokens + 1, *state), spec.state_dtype))

    def at(self, position: jax.Array) -> jax.Array:
        """Return the states [B, H, P, N] after `position` int32 [B] tokens."""
        position = self._rows("position", position, jnp.integer)
        slots = (position % self.states.shape[1]).reshape(-1, 1, 1, 1, 1)
        return jnp.take_along_axis(self.states, slots, axis=1)[:, 0]

    def put(self, position: jax.Array, state: jax.Array, where: Any = True) -> Snapshots:
        """Keep `state` [B, H, P, N] as that after `position` [B] tokens, `where` (bool [B])."""
        size, position = self.states.shape[1], self._rows("position", position, jnp.integer)
        where = True if where is True else self._rows("where", where, jnp.bool)
        slots = jnp.where(where, position % size, size)
        rows = jnp.arange(position.shape[0], dtype=jnp.int32)
        return Snapshots(jnp.asarray(self.states).at[rows, slots].set(state, mode="drop"))

    def _rows(self, name: str, value: Any, dtype: Any) -> jax.Array:
        return check_array(name, value, self.states.shape[:1], dtype)


def verify_snapshots(
    spec: ReplaySpec,
    snapshots: Snapshots,
    inputs: TokenInputs,
    position: jax.Array,
    lengths: jax.Array | None = None,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, Snapshots]:
    """Run T drafts one after the other, and keep the state behind each.

    Moving `position` commits them, leaving it where it is rejects them.

    Args:
      spec: the layer.
      snapshots: of B rows.
      inputs: 1 <= T <= `spec.max_tokens` tokens.
      position: int32 [B], tokens that are committed.
      lengths: None, or int32 [B], real tokens at the front of each row.
      implementation: None for the best that supports the case, "xla" or "mosaic_gpu". Only "xla"
        is differentiable.

    Returns:
      The outputs [B, T, H, P] in the dtype of `v`, zero where a token is not real, and the
      snapshots.

    Raises:
      TypeError, ValueError: wrong dtypes or shapes, T above `max_tokens`, snapshots made with
        another, an implementation that cannot run.
    """
    num_tokens, slots = inputs.v.shape[1], snapshots.states.shape[1]
    if slots != spec.max_tokens + 1:
        raise ValueError(
            f"max_tokens={spec.max_tokens} needs {spec.max_tokens + 1} states a row, found {slots}"
        )
    if not 1 <= num_tokens <= spec.max_tokens:
        raise ValueError(
            f"T must be between 1 and max_tokens={spec.max_tokens}, found T={num_tokens}"
        )
    check_inputs(spec, inputs, snapshots.states.shape[0], max_tokens=spec.max_tokens)
    position = snapshots._rows("position", position, jnp.integer)
    if lengths is not None:
        lengths = snapshots._rows("lengths", lengths, jnp.integer)
    spec = dataclasses.replace(spec, read_dtype=None)  # which snapshots have no use for
    arrays = (snapshots, inputs)
    chosen = dispatch.resolve(implementation, spec, num_tokens, arrays=arrays)
    if chosen == "triton" and implementation is not None:
        raise ValueError(
            'implementation="triton" cannot run: it has no kernel for snapshots; pass "xla" or None'
        )
    if chosen not in ("xla", "triton"):
        from replayssm_jax import kernels

        snapshots, inputs = not_differentiable(
            arrays, 'kernels have no derivative: pass implementation="xla" to verify_snapshots'
        )
        output, states = kernels.verify_snapshots(
            spec, snapshots.states, position, lengths, inputs, implementation=chosen
        )
        return output, Snapshots(states)
    state, outputs = snapshots.at(position), []
    for t in range(num_tokens):
        token = jax.tree.map(lambda x, t=t: x[:, t : t + 1], inputs)
        output, state = recurrent_step(spec, state, token, implementation="xla")
        real: Any = True
        if lengths is not None:
            real = t < lengths
            output = jnp.where(real.reshape(-1, 1, 1, 1), output, jnp.zeros_like(output))
        outputs.append(output)
        snapshots = snapshots.put(position + t + 1, state, real)
    return jnp.concatenate(outputs, axis=1), snapshots
