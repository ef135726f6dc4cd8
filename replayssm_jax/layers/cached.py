"""CachedLayer: what every layer with a cache does with the progress of its rows."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from replayssm_jax.arguments import check_type
from replayssm_jax.layers.arguments import check_features
from replayssm_jax.layers.cache import reset_rows
from replayssm_jax.layers.progress import Span
from replayssm_jax.layers.sharding import MeshAxes

Mode = Literal["prefill", "verify"]


class CachedLayer(nnx.Module):
    """Base of the layers with a cache: y, cache = layer(x [B, T, d], cache).

    A layer gives `init_cache` and `advance`, which runs tokens but does not count them. Here they
    are counted: at once in a call, and in `commit` after `verify`, so that rejected drafts are
    undone by not moving.
    """

    cache_type: ClassVar[type]
    dtype: jnp.dtype
    mesh_axes: MeshAxes | None = None

    @property
    def features(self) -> int:
        """Width d of the layer's input."""
        raise NotImplementedError

    def init_cache(self, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        """Return the cache of `batch_size` empty rows; the rest of the arguments is the layer's."""
        raise NotImplementedError

    def advance(self, x: jax.Array, cache: Any, span: Span, *, mode: Mode) -> tuple[jax.Array, Any]:
        """Run the layer at `span`; the returned cache's progress has not moved yet."""
        raise NotImplementedError

    def __call__(
        self,
        x: jax.Array,
        cache: Any = None,
        *,
        lengths: jax.Array | None = None,
        valid: jax.Array | None = None,
        resets: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Advance by the tokens of `x` and commit them.

        Args:
          x: [B, T, d], T of any size, also 0.
          cache: from `init_cache`; None runs the sequence from nothing and keeps nothing
            (training).
          lengths: [B] int32, real tokens at the front of each row.
          valid: [B, T] bool, any pattern of real tokens, instead of `lengths`.
          resets: [B, T] bool, forget everything before this token.

        Returns:
          y [B, T, d], zero where a token is not real, and the cache.

        Raises:
          TypeError: no array or one of the wrong dtype, a cache of another kind of layer.
          ValueError: both `lengths` and `valid`, an array of the wrong shape, or (where they are
            known) lengths out of [0, T].
        """
        position = self.positions(x, cache)
        progress = None if cache is None else cache.progress
        if x.shape[1] == 0:
            return jnp.zeros(x.shape, self.dtype), cache
        span = Span.make(position, x.shape[1], lengths=lengths, valid=valid, resets=resets)
        y, new = self.advance(x, cache, span, mode="prefill")
        if progress is None:
            return y, None
        return y, dataclasses.replace(new, progress=progress.prefilled(span))

    def verify(
        self, x: jax.Array, cache: Any, *, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """Run T <= max_tokens drafts [B, T, d]; they stay pending until `commit`."""
        self.check_cache(cache)
        span = Span.make(self.positions(x, cache), x.shape[1], lengths=lengths)
        y, new = self.advance(x, cache, span, mode="verify")
        return y, dataclasses.replace(new, progress=cache.progress.drafted(span))

    def commit(self, cache: Any, accepted: jax.Array | int) -> Any:
        """Accept the first `accepted` (int32 scalar or [B]) pending drafts of each row."""
        self.check_cache(cache)
        return dataclasses.replace(cache, progress=cache.progress.commit(accepted))

    def reset(self, cache: Any, where: jax.Array) -> Any:
        """Empty the rows `where` [B] bool."""
        self.check_cache(cache)
        return reset_rows(cache, cache.progress.flags(where))

    def check_cache(self, cache: Any) -> None:
        """Raise TypeError for what is no cache of this kind of layer."""
        check_type("cache", cache, self.cache_type)

    def positions(self, x: Any, cache: Any) -> jax.Array:
        """Return the position [B] of each row of `x` in `cache`, zeros without one.

        Raises:
          TypeError, ValueError: an `x` that is no floating array [B, T, d], or of other rows than
            the cache, or a cache of another kind of layer.
        """
        check_features(x, self.features)
        if x.ndim != 3:
            raise ValueError(
                f"x must have shape [B, T, {self.features}], found {x.shape}: one token is "
                "x[:, None]"
            )
        if cache is None:
            return jnp.zeros((x.shape[0],), jnp.int32)
        self.check_cache(cache)
        position: jax.Array = cache.progress.position
        if x.shape[0] != position.shape[0]:
            raise ValueError(f"x has {x.shape[0]} rows, the cache {position.shape[0]}")
        return position
