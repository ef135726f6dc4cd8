"""What is checked of the arguments of a model's calls."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replayssm_jax.arguments import check_arrays, check_type, concrete, known_mask
from replayssm_jax.checks import debug_check
from replayssm_jax.layers.progress import Span
from replayssm_jax.models.cache import HybridCache


def check_cache(cache: Any, name: str = "cache") -> int:
    """Return B of a cache; raise TypeError for what is none."""
    check_type(name, cache, HybridCache)
    return cache.progress.position.shape[0]


def check_rolls_back(cache: HybridCache) -> None:
    """Raise ValueError where a layer of the cache holds a recurrent state alone."""
    if not cache.rolls_back:
        raise ValueError(
            "conventional decoding cannot roll back drafts: make the cache with "
            'decode="replay" or "snapshot"'
        )


def check_tokens(tokens: Any, *, ndim: int = 2) -> None:
    """Raise TypeError or ValueError unless `tokens` is an integer array [B, T], or [B]."""
    check_arrays(tokens=tokens)
    if tokens.ndim != ndim:
        wanted, why = ("[B]", ": one token a row") if ndim == 1 else ("[B, T]", "")
        raise ValueError(f"tokens must have shape {wanted}, found {tokens.shape}{why}")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"tokens must be integers, found {tokens.dtype.name}")


def check_fits(tokens: jax.Array, cache: Any) -> None:
    """Raise TypeError or ValueError unless `cache` is one of as many rows as `tokens` has."""
    rows = check_cache(cache)
    if tokens.shape[0] != rows:
        raise ValueError(f"tokens have {tokens.shape[0]} rows, the cache {rows}")


def check_values(tokens: jax.Array, span: Span, vocab_size: int, size: int | None = None) -> None:
    """Raise ValueError where real tokens are known to be out of the vocabulary or of the cache."""
    real = known_mask(span.lengths, span.valid, tokens.shape[1])
    check_vocabulary(tokens, real, vocab_size)
    position = span.position if span.resets is None else span.end - span.counts
    if real is not None:
        check_end(position, np.broadcast_to(real, tokens.shape).sum(axis=1), size)

    def in_vocabulary() -> jax.Array:
        good = (tokens >= 0) & (tokens < vocab_size)
        return jnp.all(good if span.live is None else good | ~span.live)

    debug_check(in_vocabulary, f"tokens must lie in [0, {vocab_size})")
    if size is not None:
        debug_check(
            lambda: jnp.all((span.counts == 0) | (position + span.counts <= size)),
            f"tokens past the {size} positions of the cache",
        )


def check_vocabulary(
    tokens: Any, real: Any, vocab_size: int, *, name: str = "tokens", least: int = 0
) -> None:
    """Raise ValueError where `tokens` are known to be out of range; `real` is a `known_mask`."""
    known = concrete(tokens)
    if known is None or real is None:
        return
    wrong = real & ((known < least) | (known >= vocab_size))
    if wrong.any():
        raise ValueError(f"{name} must lie in [{least}, {vocab_size}), found {known[wrong][0]}")


def check_end(position: Any, counts: Any, size: int | None) -> None:
    """Raise ValueError where rows with `counts` new tokens are known to end past `size`."""
    if size is None:
        return
    known, new = concrete(position), concrete(counts)
    if known is None or new is None:
        return
    longest = np.where(new > 0, known + new, 0).max(initial=0)
    if longest > size:
        raise ValueError(f"the tokens need {longest} positions, the cache holds {size}")


def check_accepted(cache: HybridCache, accepted: jax.Array | int) -> jax.Array:
    """Return `accepted` as an int32 scalar or [B]; raise where it cannot be committed."""
    accepted, pending = cache.progress.checked(accepted), cache.progress.pending
    if accepted.ndim and cache.pointer is not None and not cache.pointer.is_ragged:
        raise ValueError(
            "accepted of shape [B] needs a pointer for every row, found a scalar pointer: make "
            "the cache with ragged=True"
        )
    known, most = concrete(accepted), concrete(pending)
    if known is not None and most is not None and ((known < 0) | (known > most)).any():
        raise ValueError(
            f"accepted must lie in [0, pending], found accepted={known.tolist()} and "
            f"pending={most.tolist()}"
        )
    debug_check(
        lambda: jnp.all((accepted >= 0) & (accepted <= pending)),
        "accepted must lie in [0, pending]",
    )
    return accepted
