"""The flush switch: which rows fold their ring into the checkpoint before a step appends.

Three forms, chosen by `flush_when_due` from what is known while tracing:

1. A scalar pointer: `lax.cond` around the fold alone. Keep is the branch with index 0, since
   older XLA copies a checkpoint that any other branch returns unchanged.
2. Ragged pointers: a loop over the rows that are due. JAX turns a `cond` whose predicate is
   batched into a `select`, where every row pays for a fold at every step.
3. Inside `scan_steps` and `while_loop`: no predicate, since the loop knows where in the window
   each step stands.

Under `jax.vmap` the first two go through `custom_vmap`, which nests: axes that share a pointer keep
its cond, and as soon as pointers differ the loop counts through the rows of all axes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from replayssm_jax import window
from replayssm_jax.spec import ReplaySpec
from replayssm_jax.state import InputBuffer, Pointer, ReplayState, committed_records, emptied


def flush_when_due(spec: ReplaySpec, state: ReplayState, num_new: jax.Array | int) -> ReplayState:
    """Flush the rows where `num_new` more tokens would not fit in the window.

    Args:
      spec: the layer.
      state: without pending drafts.
      num_new: an int, or int32 [B]; rows with 0 stay as they are.
    """
    pointer = state.pointer
    if pointer.phase is None:
        return flush_rows(spec, state, jnp.asarray(is_due(spec, pointer, num_new)))
    if pointer.phase.flush:
        return flush_all(spec, state)
    return state


def is_due(spec: ReplaySpec, pointer: Pointer, num_new: jax.Array | int) -> Any:
    """Whether `num_new` more tokens, if any, would not fit in the window."""
    return (num_new > 0) & (pointer.length + num_new > spec.window)


def flush_rows(spec: ReplaySpec, state: ReplayState, where: jax.Array) -> ReplayState:
    """Flush the rows `where`, bool of the pointer's shape; no other is read or written."""
    pointer = state.pointer
    rows = _Rows(where, pointer.start, pointer.length, pointer.fresh)
    if not pointer.is_ragged:
        rows = jax.tree.map(lambda x: x[None], rows)
    checkpoint = _fold_where(spec)(rows, state.checkpoint, state.buffer)
    return dataclasses.replace(state, checkpoint=checkpoint, pointer=emptied(spec, pointer, where))


def flush_all(spec: ReplaySpec, state: ReplayState) -> ReplayState:
    """Flush every row, whatever it holds."""
    pointer = state.pointer
    checkpoint = _fold(
        spec, state.checkpoint, state.buffer, pointer.start, pointer.length, pointer.fresh
    )
    return dataclasses.replace(state, checkpoint=checkpoint, pointer=emptied(spec, pointer))


class _Rows(NamedTuple):
    """What decides about each row: arrays of shape [..., B], with 1 along axes that share it."""

    where: jax.Array
    start: jax.Array
    length: jax.Array
    fresh: jax.Array


@functools.lru_cache(maxsize=128)
def _fold_where(spec: ReplaySpec) -> Callable[..., jax.Array]:
    """f(rows, checkpoint [..., B, H, P, N], buffer [..., B, ...]) -> checkpoint."""

    @jax.custom_batching.custom_vmap
    def fold_where(rows: _Rows, checkpoint: jax.Array, buffer: InputBuffer) -> jax.Array:
        if rows.where.size == 1:
            return jax.lax.cond(
                rows.where.reshape(()),
                lambda checkpoint: _fold_all(spec, rows, checkpoint, buffer),
                lambda checkpoint: checkpoint,
                checkpoint,
            )
        return _fold_each(spec, rows, checkpoint, buffer)

    @fold_where.def_vmap
    def add_leading_axis(
        axis_size: int, in_batched: Any, rows: _Rows, checkpoint: jax.Array, buffer: InputBuffer
    ) -> tuple[jax.Array, bool]:
        rows_batched, checkpoint_batched, buffer_batched = in_batched
        share = not any(rows_batched)

        def lead(x: jax.Array, batched: bool, size: int = axis_size) -> jax.Array:
            return x if batched else jnp.broadcast_to(x[None], (size, *x.shape))

        rows = jax.tree.map(lambda x, b: lead(x, b, 1 if share else axis_size), rows, rows_batched)
        checkpoint = lead(checkpoint, checkpoint_batched)
        buffer = jax.tree.map(lead, buffer, buffer_batched)
        return fold_where(rows, checkpoint, buffer), True

    return fold_where


def _fold_all(
    spec: ReplaySpec, rows: _Rows, checkpoint: jax.Array, buffer: InputBuffer
) -> jax.Array:
    """Fold every row, with one pointer for all of them; leading axes stay as they are."""
    pointer = [x.reshape(()) for x in rows[1:]]
    fold = functools.partial(_fold, spec)
    for _ in range(checkpoint.ndim - 4):
        fold = jax.vmap(fold, in_axes=(0, 0, None, None, None))
    return fold(checkpoint, buffer, *pointer)


def _fold_each(
    spec: ReplaySpec, rows: _Rows, checkpoint: jax.Array, buffer: InputBuffer
) -> jax.Array:
    """Fold the rows that are due, one after the other, each in place.

    The rows of all leading axes are counted through, but the state keeps its axes: XLA would copy
    it to add or drop one of size 1.
    """
    shape = checkpoint.shape[:-3]
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, shape).reshape(-1), rows)
    order = jnp.argsort(~rows.where)

    def fold_row(i: jax.Array, checkpoint: jax.Array) -> jax.Array:
        row = order[i]
        index = jnp.unravel_index(row, shape)

        def take(x: jax.Array) -> jax.Array:
            rest = x.shape[len(shape) :]
            start = (*index, *[jnp.zeros_like(row)] * len(rest))
            return jax.lax.dynamic_slice(x, start, (*[1] * len(shape), *rest)).reshape(1, *rest)

        one = _fold(
            spec,
            take(checkpoint),
            jax.tree.map(take, buffer),
            *(jax.lax.dynamic_slice(x, (row,), (1,)) for x in rows[1:]),
        )
        start = (*index, *[jnp.zeros_like(row)] * 3)
        one = one.reshape(*[1] * len(shape), *one.shape[1:])
        return jax.lax.dynamic_update_slice(checkpoint, one, start)

    return jax.lax.fori_loop(0, jnp.sum(rows.where, dtype=jnp.int32), fold_row, checkpoint)


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
