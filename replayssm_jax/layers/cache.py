"""Caches of the layers, and how a model lets all of them share one pointer and one progress."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from replayssm_jax.layers.progress import Progress
from replayssm_jax.loops import is_pointer, set_phase
from replayssm_jax.precision import Scaled, as_keys
from replayssm_jax.snapshots import Snapshots
from replayssm_jax.spec import ReplaySpec
from replayssm_jax.state import Pointer, ReplayState, emptied

T = TypeVar("T")

MixerState = ReplayState | Snapshots | Scaled | jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixerCache:
    """Cache of a replay mixer.

    Attributes:
      history: [B, W, C] ring of raw convolution inputs, W = kernel_size - 1 + max_tokens.
      state: `ReplayState`, or under conventional decoding the recurrent state [B, H, P, N] itself,
        in 8 bits a `Scaled`, or `Snapshots` of it.
      progress: tokens of each row; None inside a model's cache, which holds one for all layers.
      rounding_key: None, or uint32 [B, H, 2]: keys of a recurrent state that is rounded
        stochastically; a `ReplayState` holds its own.
    """

    history: jax.Array
    state: MixerState
    progress: Progress | None
    rounding_key: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Cache of an attention layer; the token at position p of a row lives in slot p.

    Attributes:
      key: [B, S, K, D].
      value: [B, S, K, D].
      progress: tokens of each row; None inside a model's cache.
    """

    key: jax.Array
    value: jax.Array
    progress: Progress | None


def _is_cache(x: Any) -> bool:
    return isinstance(x, MixerCache | KVCache)


def _with_pointer(state: ReplayState, pointer: Any) -> ReplayState:
    return dataclasses.replace(state, pointer=pointer)


def attach(caches: T, pointer: Pointer | None, progress: Progress) -> T:
    """Give every layer cache in `caches` the shared pointer and progress."""

    def give(cache: Any) -> Any:
        if isinstance(cache, MixerCache) and isinstance(cache.state, ReplayState):
            state = _with_pointer(cache.state, pointer)
            return dataclasses.replace(cache, state=state, progress=progress)
        return dataclasses.replace(cache, progress=progress)

    return jax.tree.map(give, caches, is_leaf=_is_cache)


def detach(caches: T) -> tuple[T, Pointer | None]:
    """Take pointer and progress out of every layer cache; also return the pointer found."""
    pointers = []

    def strip(cache: Any) -> Any:
        if isinstance(cache, MixerCache) and isinstance(cache.state, ReplayState):
            pointers.append(cache.state.pointer)
            state = _with_pointer(cache.state, None)
            return dataclasses.replace(cache, state=state, progress=None)
        return dataclasses.replace(cache, progress=None)

    stripped = jax.tree.map(strip, caches, is_leaf=_is_cache)
    return stripped, pointers[0] if pointers else None


def give_rounding_keys(caches: T, key: jax.Array) -> T:
    """Have every mixer cache in `caches` round its state stochastically, with keys of its own."""
    found = 0
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.ndim == 0 or key.dtype != jnp.uint32:
            raise TypeError(
                "rounding_key must be a key such as jax.random.key(0), found "
                f"{key.dtype.name} of shape {key.shape}"
            )
        key = jax.random.wrap_key_data(key)
    if key.shape != ():
        raise ValueError(f"rounding_key must be one key, found keys of shape {key.shape}")

    def give(cache: Any) -> Any:
        nonlocal found
        if not isinstance(cache, MixerCache):
            return cache
        own, found = jax.random.fold_in(key, found), found + 1
        state: Any = cache.state
        if isinstance(state, ReplayState):
            keys = as_keys(own, state.checkpoint.shape[:-2])
            state = dataclasses.replace(state, rounding_key=keys)
            return dataclasses.replace(cache, state=state)
        return dataclasses.replace(cache, rounding_key=as_keys(own, state.shape[:-2]))

    return jax.tree.map(give, caches, is_leaf=_is_cache)


def take_rows(cache: T, rows: jax.Array) -> T:
    """Gather rows of batch-first leaves: a fork, a snapshot, a beam. Repeats are allowed.

    A scalar pointer stays as it is.
    """

    def take(x: jax.Array) -> jax.Array:
        return jnp.take(x, rows, axis=0, mode="clip") if x.ndim else x

    return jax.tree.map(take, cache)


def insert_rows(cache: T, slots: jax.Array, other: T) -> T:
    """Copy the rows of `other` into `slots` [B'] of batch-first leaves.

    Slot -1 and slots out of range touch no row. In the body of a windowed loop `other` may come
    from outside, as in `replayssm_jax.insert`.

    Raises:
      ValueError: leaves whose dtypes differ, or their shapes in more than the batch, a scalar
        pointer in `cache`, or caches with other fields, such as rounding keys in one of them alone.
    """
    pointers = [p for p in jax.tree.leaves(cache, is_leaf=is_pointer) if is_pointer(p)]
    if pointers:
        other = set_phase(other, pointers[0].phase)
    mine: Any = jax.tree.structure(cache)
    if mine != jax.tree.structure(other):
        raise ValueError(
            "cannot insert rows of a cache with other fields: both must be of one model and decode "
            "alike, with a rounding_key in both or in none"
        )

    def put(path: Any, x: jax.Array, new: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if not x.ndim:
            raise ValueError(
                "insert needs a cache whose rows have their own pointers, found one for all rows: "
                "make it with ragged=True"
            )
        if x.shape[1:] != new.shape[1:]:
            raise ValueError(
                f"cannot insert rows of shape {new.shape} into {x.shape} at {name}: caches must be "
                "of the same model and of the same size"
            )
        if x.dtype != new.dtype:
            raise ValueError(
                f"cannot insert rows of {new.dtype.name} into {x.dtype.name} at {name}: make both "
                "caches with the same dtype"
            )
        # JAX wraps negative indices also with mode="drop", so every other slot becomes B.
        at = jnp.where((slots >= 0) & (slots < x.shape[0]), slots, x.shape[0])
        return jnp.asarray(x).at[at].set(new, mode="drop")

    slots = jnp.asarray(slots).astype(jnp.int32)
    return jax.tree_util.tree_map_with_path(put, cache, other)


def reset_pointer(spec: ReplaySpec, pointer: Pointer, where: jax.Array) -> Pointer:
    """Empty the rings of the rows `where` [B]; their checkpoints count as zero from now on."""
    if not pointer.is_ragged:
        raise ValueError("reset needs a pointer for every row: make the cache with ragged=True")
    moved = emptied(spec, pointer, where)
    return dataclasses.replace(moved, fresh=moved.fresh | where)


def reset_rows(cache: T, where: jax.Array) -> T:
    """Empty the rows `where` [B] of what a layer cache holds beside its pointer.

    Rings need nothing, since their pointer and progress move. KV slots are zeroed: attention
    multiplies dead values by a zero weight, and one that is not finite would survive that.
    """

    def clear(x: jax.Array) -> jax.Array:
        return jnp.where(where.reshape(-1, *(1,) * (x.ndim - 1)), jnp.zeros_like(x), x)

    def reset(one: Any) -> Any:
        progress = None if one.progress is None else one.progress.reset(where)
        if isinstance(one, KVCache):
            return KVCache(clear(one.key), clear(one.value), progress)
        if not isinstance(one.state, ReplayState):
            one = dataclasses.replace(one, state=jax.tree.map(clear, one.state))
        return dataclasses.replace(one, progress=progress)

    return jax.tree.map(reset, cache, is_leaf=_is_cache)
