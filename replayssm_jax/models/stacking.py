"""Repeated blocks with stacked parameters, run by one `lax.scan`.

Parameters carry the repeats as their first axis, caches as their second: the batch stays first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from replayssm_jax.flush_switch import flush_all, flush_rows, stored_of
from replayssm_jax.layers import HybridBlock, MixerCache, ReplayMixer
from replayssm_jax.layers.cache import attach, detach
from replayssm_jax.layers.cached import Mode
from replayssm_jax.layers.progress import Progress, Span
from replayssm_jax.layers.sharding import row_specs
from replayssm_jax.precision import Stored
from replayssm_jax.spec import ReplaySpec
from replayssm_jax.state import Phase, Pointer, ReplayState

M = TypeVar("M", bound=nnx.Module)


def stack_modules(modules: Sequence[M]) -> M:
    """Return one module whose parameters are those of equal modules, stacked along axis 0."""
    graphdef, _ = nnx.split(modules[0])
    states = [nnx.split(module)[1] for module in modules]
    return nnx.merge(graphdef, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))


def unstack_module(module: M, count: int) -> list[M]:
    """Return the `count` modules whose parameters `module` holds stacked along axis 0."""
    graphdef, state = nnx.split(module)

    def nth(i: int) -> M:
        return nnx.merge(graphdef, jax.tree.map(lambda x: x[i], state))

    return [nth(i) for i in range(count)]


def stack_cache(cache: Any, count: int) -> Any:
    """Repeat every leaf [B, ...] of an empty cache as [B, count, ...]."""
    return jax.tree.map(
        lambda x: jnp.broadcast_to(x[:, None], (x.shape[0], count, *x.shape[1:])), cache
    )


def scan_train(
    blocks: Sequence[HybridBlock], x: jax.Array, span: Span, *, remat: bool
) -> jax.Array:
    """Run stacked blocks without a cache."""
    graphdefs, params = _split(blocks)

    def body(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
        for graphdef, held in zip(graphdefs, params, strict=True):
            x, _ = nnx.merge(graphdef, held).advance(x, None, span, mode="prefill")
        return x, None

    if remat:
        body = jax.checkpoint(body, prevent_cse=False)
    return jax.lax.scan(body, x, params)[0]


def scan_cached(
    blocks: Sequence[HybridBlock],
    x: jax.Array,
    caches: tuple[Any, ...],
    pointer: Pointer | None,
    progress: Progress,
    span: Span,
    *,
    mode: Mode,
) -> tuple[jax.Array, tuple[Any, ...], Pointer | None]:
    """Run stacked blocks on their caches [B, L, ...]; return x, the caches and the moved pointer.

    Decoding flushes all layers first, in one call, so that the scan itself only reads checkpoints.
    """
    graphdefs, params = _split(blocks)
    before = pointer
    if mode == "verify" and pointer is not None:
        caches, before = _flush_stacked(blocks, caches, pointer, span)
    count = jax.tree.leaves(params)[0].shape[0]

    def body(carry: Any, step: Any) -> tuple[Any, None]:
        x, stacked, _ = carry
        params, i = step
        held = jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, i, axis=1, keepdims=False), stacked
        )
        new = []
        for graphdef, param, one in zip(graphdefs, params, held, strict=True):
            block = nnx.merge(graphdef, param)
            x, moved = block.advance(x, attach(one, before, progress), span, mode=mode)
            new.append(moved)
        stripped, after = detach(tuple(new))
        if mode == "verify":
            stripped = _keep_checkpoints(stripped, held)

        def put(leaf: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
            return leaf if new is old else jax.lax.dynamic_update_index_in_dim(leaf, new, i, axis=1)

        return (x, jax.tree.map(put, stacked, stripped, held), after), None

    steps = (params, jnp.arange(count))
    (x, caches, after), _ = jax.lax.scan(body, (x, caches, before), steps)
    if after is not None and pointer is not None:
        after = dataclasses.replace(after, phase=pointer.phase)
    return x, caches, after


def _split(blocks: Sequence[HybridBlock]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    graphdefs, params = zip(*(nnx.split(block) for block in blocks), strict=True)
    return graphdefs, params


def _is_mixer_cache(x: Any) -> bool:
    return isinstance(x, MixerCache)


def _keep_checkpoints(new: Any, old: Any) -> Any:
    """Put the checkpoints of `old` into `new`: a step that cannot flush leaves them alone."""

    def keep(new: Any, old: Any) -> Any:
        if not isinstance(new, MixerCache) or not isinstance(new.state, ReplayState):
            return new
        state = dataclasses.replace(new.state, **stored_of(old.state)._asdict())
        return dataclasses.replace(new, state=state)

    return jax.tree.map(keep, new, old, is_leaf=_is_mixer_cache)


def _flush_stacked(
    blocks: Sequence[HybridBlock], caches: tuple[Any, ...], pointer: Pointer, span: Span
) -> tuple[tuple[Any, ...], Pointer]:
    """Flush what is due in every layer; then no layer may flush."""
    moved = pointer

    def flushed(mixer: ReplayMixer, cache: MixerCache) -> MixerCache:
        nonlocal moved
        if not isinstance(cache.state, ReplayState):
            return cache
        state, counts = dataclasses.replace(cache.state, pointer=pointer), span.counts
        axes, num_tokens = mixer.mesh_axes, span.positions.shape[1]
        if axes is None:
            stored, after = _flush_due(mixer.spec, num_tokens, state, counts)
        else:
            spec, heads = mixer.local_spec()
            specs = row_specs(state, axes, heads, stacked=True)
            stored, after = jax.shard_map(
                functools.partial(_flush_due, spec, num_tokens),
                mesh=axes.mesh,
                in_specs=(specs, PartitionSpec(axes.data)),
                out_specs=(stored_of(specs), specs.pointer),
                check_vma=False,
            )(state, counts)
        moved = dataclasses.replace(after, phase=Phase(False, mixer.spec.window))
        return dataclasses.replace(
            cache, state=dataclasses.replace(cache.state, **stored._asdict())
        )

    new_caches = tuple(
        tuple(
            flushed(mixer, cache) if isinstance(mixer, ReplayMixer) else cache
            for mixer, cache in zip(block.mixers, held, strict=True)
        )
        for block, held in zip(blocks, caches, strict=True)
    )
    return new_caches, moved


def _flush_due(
    spec: ReplaySpec, num_tokens: int, state: ReplayState, counts: jax.Array
) -> tuple[Stored, Pointer]:
    """Flush leaves [B, L, ...] under one pointer, rows and layers as one batch."""
    pointer = state.pointer
    rows, count = state.checkpoint.shape[:2]

    def merge(x: jax.Array) -> jax.Array:
        return x.reshape(rows * count, *x.shape[2:])

    every = jax.tree.map(lambda x: jnp.repeat(x, count) if x.ndim else x, pointer)
    merged = dataclasses.replace(
        state,
        buffer=jax.tree.map(merge, state.buffer),
        pointer=every,
        **jax.tree.map(merge, stored_of(state))._asdict(),
    )
    if pointer.phase is None:
        # A ragged row without a new token stays as it is; on a scalar pointer all rows have T.
        new: Any = jnp.repeat(counts, count) if pointer.is_ragged else num_tokens
        due = (jnp.asarray(new) > 0) & (every.length + new > spec.window)
        merged = flush_rows(spec, merged, due)
    elif pointer.phase.flush:
        merged = flush_all(spec, merged)
    after = jax.tree.map(lambda x: x[::count] if x.ndim else x, merged.pointer)
    stored = jax.tree.map(
        lambda new, old: new.reshape(old.shape), stored_of(merged), stored_of(state)
    )
    return stored, after
