"""The flush switch: which rows fold their ring into the checkpoint before a step appends.

Three forms, chosen by `flush_when_due` from what is known while tracing:

1. A scalar pointer: `lax.cond` around the fold alone. Keep is the branch with index 0, since
   older XLA copies a checkpoint that any other branch returns unchanged.
2. Ragged pointers: a loop over the rows that are due. JAX turns a `cond` whose predicate is
   batched into a `select`, where every row pays for a fold at every step.
3. Inside `scan_steps` and `while_loop`: no predicate, since the loop knows where in the window
   each step stands.

`jax.vmap` over the first two goes through `custom_vmap`: the new axis joins the batch, a shared
scalar pointer keeps the cond, and pointers that differ take the loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from replayssm_jax import window
from replayssm_jax.spec import ReplaySpec
from replayssm_jax.state import InputBuffer, ReplayState, committed_records, emptied


def flush_when_due(spec: ReplaySpec, state: ReplayState, num_new: jax.Array | int) -> ReplayState:
    """Flush the rows where `num_new` more tokens would not fit in the window.

    Args:
      spec: the layer.
      state: without pending drafts.
      num_new: an int, or int32 [B]; rows with 0 stay as they are.
    """
    pointer = state.pointer
    if pointer.phase is None:
        due = (num_new > 0) & (pointer.length + num_new > spec.window)
        return flush_rows(spec, state, jnp.asarray(due))
    if pointer.phase.flush:
        return flush_all(spec, state)
    return state


def flush_rows(spec: ReplaySpec, state: ReplayState, where: jax.Array) -> ReplayState:
    """Flush the rows `where`, bool of the pointer's shape; the others are neither read nor written."""
    pointer = state.pointer
    checkpoint = _fold_where(spec)(
        where, state.checkpoint, state.buffer, pointer.start, pointer.length, pointer.fresh
    )
    return dataclasses.replace(
        state, checkpoint=checkpoint, pointer=emptied(spec, pointer, where)
    )


def flush_all(spec: ReplaySpec, state: ReplayState) -> ReplayState:
    """Flush every row, whatever it holds."""
    pointer = state.pointer
    checkpoint = _fold(
        spec, state.checkpoint, state.buffer, pointer.start, pointer.length, pointer.fresh
    )
    return dataclasses.replace(state, checkpoint=checkpoint, pointer=emptied(spec, pointer))


def _fold(
    spec: ReplaySpec,
    checkpoint: jax.Array,
    buffer: InputBuffer,
    start: jax.Array,
    length: jax.Array,
    fresh: jax.Array,
) -> jax.Array:
    records = committed_records(spec, buffer, start, length)
    return window.fold_in_place(spec, checkpoint, fresh, records)


@functools.lru_cache(maxsize=128)
def _fold_where(spec: ReplaySpec) -> Callable[..., jax.Array]:
    """f(where, checkpoint, buffer, start, length, fresh) -> checkpoint, with a rule for vmap."""

    @jax.custom_batching.custom_vmap
    def fold_where(where: jax.Array, checkpoint: jax.Array, *ring: Any) -> jax.Array:
        if where.ndim == 0:
            return jax.lax.cond(
                where,
                lambda checkpoint: _fold(spec, checkpoint, *ring),
                lambda checkpoint: checkpoint,
                checkpoint,
            )
        return _fold_each(spec, where, checkpoint, *ring)

    @fold_where.def_vmap
    def fold_where_batched(
        axis_size: int, in_batched: Any, where: jax.Array, checkpoint: jax.Array, *ring: Any
    ) -> tuple[jax.Array, bool]:
        batch_size = checkpoint.shape[1 if in_batched[1] else 0]
        pointers = (where, *ring[1:])
        pointers_batched = (in_batched[0], *in_batched[3:])

        def into_batch(x: jax.Array, batched: bool) -> jax.Array:
            x = x if batched else jnp.broadcast_to(x[None], (axis_size, *x.shape))
            return x.reshape(axis_size * batch_size, *x.shape[2:])

        def pointer_into_batch(x: jax.Array, batched: bool) -> jax.Array:
            if x.ndim == int(batched):  # a scalar of the batch, or of each of its members
                x = jnp.broadcast_to(x[..., None], (*x.shape, batch_size))
            return into_batch(x, batched)

        if where.ndim or any(pointers_batched):
            pointers = tuple(map(pointer_into_batch, pointers, pointers_batched))
        checkpoint = into_batch(checkpoint, in_batched[1])
        buffer = jax.tree.map(into_batch, ring[0], in_batched[2])
        checkpoint = fold_where(pointers[0], checkpoint, buffer, *pointers[1:])
        return checkpoint.reshape(axis_size, batch_size, *checkpoint.shape[1:]), True

    return fold_where


def _fold_each(
    spec: ReplaySpec, where: jax.Array, checkpoint: jax.Array, *ring: Any
) -> jax.Array:
    """Fold the rows `where` [B], one after the other, each in place."""
    rows = jnp.argsort(~where)

    def fold_row(i: jax.Array, checkpoint: jax.Array) -> jax.Array:
        row = rows[i]
        one = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), (checkpoint, *ring)
        )
        return jax.lax.dynamic_update_slice_in_dim(checkpoint, _fold(spec, *one), row, 0)

    return jax.lax.fori_loop(0, jnp.sum(where, dtype=jnp.int32), fold_row, checkpoint)
