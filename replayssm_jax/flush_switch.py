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
from replayssm_jax.precision import Stored
from replayssm_jax.spec import ReplaySpec
from replayssm_jax.state import InputBuffer, Pointer, ReplayState, emptied, records_to_fold


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
    stored = _fold_where(spec)(rows, stored_of(state), state.buffer)
    pointer = emptied(spec, pointer, where)
    return dataclasses.replace(state, **stored._asdict(), pointer=pointer)


def flush_all(spec: ReplaySpec, state: ReplayState) -> ReplayState:
    """Flush every row, whatever it holds."""
    pointer = state.pointer
    stored = _fold(
        spec, stored_of(state), state.buffer, pointer.start, pointer.length, pointer.fresh
    )
    return dataclasses.replace(state, **stored._asdict(), pointer=emptied(spec, pointer))


def stored_of(state: ReplayState) -> Stored:
    """What a flush of the state writes."""
    return Stored(state.checkpoint, state.read_copy, state.rounding_key)


class _Rows(NamedTuple):
    """What decides about each row: arrays of shape [..., B], with 1 along axes that share it."""

    where: jax.Array
    start: jax.Array
    length: jax.Array
    fresh: jax.Array


@functools.lru_cache(maxsize=128)
def _fold_where(spec: ReplaySpec) -> Callable[..., Stored]:
    """f(rows, stored [..., B, H, ...], buffer [..., B, ...]) -> stored."""

    @jax.custom_batching.custom_vmap
    def fold_where(rows: _Rows, stored: Stored, buffer: InputBuffer) -> Stored:
        if rows.where.size == 1:
            return jax.lax.cond(
                rows.where.reshape(()),
                lambda stored: _fold_all(spec, rows, stored, buffer),
                lambda stored: stored,
                stored,
            )
        return _fold_each(spec, rows, stored, buffer)

    @fold_where.def_vmap
    def add_leading_axis(
        axis_size: int, in_batched: Any, rows: _Rows, stored: Stored, buffer: InputBuffer
    ) -> tuple[Stored, Any]:
        rows_batched, stored_batched, buffer_batched = in_batched
        share = not any(rows_batched)

        def lead(x: jax.Array, batched: bool, size: int = axis_size) -> jax.Array:
            return x if batched else jnp.broadcast_to(x[None], (size, *x.shape))

        rows = jax.tree.map(lambda x, b: lead(x, b, 1 if share else axis_size), rows, rows_batched)
        stored = jax.tree.map(lead, stored, stored_batched)
        buffer = jax.tree.map(lead, buffer, buffer_batched)
        stored = fold_where(rows, stored, buffer)
        return stored, jax.tree.map(lambda _: True, stored)

    return fold_where


def _fold_all(spec: ReplaySpec, rows: _Rows, stored: Stored, buffer: InputBuffer) -> Stored:
    """Fold every row, with one pointer for all of them; leading axes stay as they are."""
    pointer = [x.reshape(()) for x in rows[1:]]
    fold = functools.partial(_fold, spec)
    for _ in range(len(stored.checkpoint.shape) - 4):
        fold = jax.vmap(fold, in_axes=(0, 0, None, None, None))
    return fold(stored, buffer, *pointer)


def _fold_each(spec: ReplaySpec, rows: _Rows, stored: Stored, buffer: InputBuffer) -> Stored:
    """Fold the rows that are due, one after the other, each in place.

    The rows of all leading axes are counted through, but the state keeps its axes: XLA would copy
    it to add or drop one of size 1.
    """
    shape = stored.checkpoint.shape[:-3]
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, shape).reshape(-1), rows)
    order = jnp.argsort(~rows.where)

    def fold_row(i: jax.Array, stored: Stored) -> Stored:
        row = order[i]
        index = jnp.unravel_index(row, shape)

        def take(x: jax.Array) -> jax.Array:
            rest = x.shape[len(shape) :]
            start = (*index, *[jnp.zeros_like(row)] * len(rest))
            return jax.lax.dynamic_slice(x, start, (*[1] * len(shape), *rest)).reshape(1, *rest)

        one = _fold(
            spec,
            jax.tree.map(take, stored),
            jax.tree.map(take, buffer),
            *(jax.lax.dynamic_slice(x, (row,), (1,)) for x in rows[1:]),
        )

        def put(x: jax.Array, new: jax.Array) -> jax.Array:
            start = (*index, *[jnp.zeros_like(row)] * (new.ndim - 1))
            new = new.reshape(*[1] * len(shape), *new.shape[1:])
            return jax.lax.dynamic_update_slice(x, new, start)

        return jax.tree.map(put, stored, one)

    return jax.lax.fori_loop(0, jnp.sum(rows.where, dtype=jnp.int32), fold_row, stored)


def _fold(
    spec: ReplaySpec,
    stored: Stored,
    buffer: InputBuffer,
    start: jax.Array,
    length: jax.Array,
    fresh: jax.Array,
) -> Stored:
    records = records_to_fold(spec, stored.checkpoint, buffer, start, length, fresh)
    return window.fold_in_place(spec, stored, fresh, records)
