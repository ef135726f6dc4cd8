"""CausalConv: short depthwise causal convolution over a ring of raw inputs.

The token at position p of a row lives in slot p mod W, W = kernel_size - 1 + max_tokens, so a
rejected draft is undone by not moving the position: nothing is copied.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from replayssm_jax.arguments import float_dtype
from replayssm_jax.layers.activations import ACTIVATIONS, Activation
from replayssm_jax.layers.arguments import check_params
from replayssm_jax.layers.cached import CachedLayer, Mode
from replayssm_jax.layers.options import check_option
from replayssm_jax.layers.progress import Progress, Span


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConvCache:
    """Cache of a `CausalConv` used alone: history [B, W, C] and the progress of its rows."""

    history: jax.Array
    progress: Progress


def uniform_taps(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Initialise taps [K, C] uniformly within K ** -0.5: fan-in of a depthwise convolution."""
    bound = shape[0] ** -0.5
    return jax.random.uniform(key, shape, jnp.float32, minval=-bound, maxval=bound).astype(dtype)


def _compact(x: jax.Array, valid: jax.Array) -> jax.Array:
    """Move the valid tokens of x [B, T, C] to the front, in order."""
    order = jnp.argsort(~valid, axis=1, stable=True)
    return jnp.take_along_axis(x, order[:, :, None], axis=1)


class CausalConv(CachedLayer):
    """y_t = act(bias + sum_d kernel[K - 1 - d] * x_{t - d}), each channel by itself.

    Tokens that are not real do not enter the history, wherever they stand, and give zero.
    """

    cache_type: ClassVar[type] = ConvCache

    def __init__(
        self,
        channels: int,
        kernel_size: int = 4,
        *,
        use_bias: bool = True,
        activation: Activation | None = "silu",
        max_tokens: int = 1,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = uniform_taps,
        bias_init: Any = nnx.initializers.zeros,
        rngs: nnx.Rngs,
    ):
        check_params(param_dtype, rngs)
        if kernel_size < 1 or max_tokens < 1:
            raise ValueError(
                "kernel_size and max_tokens must be at least 1, found "
                f"kernel_size={kernel_size} and max_tokens={max_tokens}"
            )
        self.channels = channels
        self.kernel_size = kernel_size
        self.max_tokens = max_tokens
        self.activation = check_option("activation", activation, Activation | None)
        self.dtype = float_dtype("dtype", dtype)
        self.kernel = nnx.Param(kernel_init(rngs.params(), (kernel_size, channels), param_dtype))
        bias = bias_init(rngs.params(), (channels,), param_dtype) if use_bias else None
        self.bias = nnx.data(None) if bias is None else nnx.Param(bias)

    @property
    def features(self) -> int:
        """C, channels."""
        return self.channels

    @property
    def capacity(self) -> int:
        """W, slots of the ring."""
        return self.kernel_size - 1 + self.max_tokens

    def init_history(self, batch_size: int, dtype: Any = None) -> jax.Array:
        """Return an empty ring [B, W, C]."""
        return jnp.zeros((batch_size, self.capacity, self.channels), dtype or self.dtype)

    def init_cache(self, batch_size: int, size: int = 0, dtype: Any = None) -> ConvCache:
        """Return the cache of `batch_size` empty rows; `size` is ignored, a ring has its own."""
        del size
        return ConvCache(self.init_history(batch_size, dtype), Progress.zeros(batch_size))

    def reset(self, cache: ConvCache, where: jax.Array) -> ConvCache:
        """Empty the rows `where` [B] bool, at the cost of moving their position."""
        self.check_cache(cache)
        return dataclasses.replace(cache, progress=cache.progress.reset(where))

    def advance(
        self, x: jax.Array, cache: ConvCache | None, span: Span, *, mode: Mode
    ) -> tuple[jax.Array, ConvCache | None]:
        """Convolve `x` [B, T, C] at `span`; y in the layer's dtype, and the cache not yet moved."""
        history = None if cache is None else cache.history
        y, history = self.convolve(x, history, span, drafts=mode == "verify")
        if cache is None or history is None:
            return y, None
        return y, dataclasses.replace(cache, history=history)

    def convolve(
        self, x: jax.Array, history: jax.Array | None, span: Span, *, drafts: bool = False
    ) -> tuple[jax.Array, jax.Array | None]:
        """Convolve `x` [B, T, C] at `span`; return y and the ring with the new inputs written."""
        if drafts and x.shape[1] > self.max_tokens:
            raise ValueError(
                f"T must be at most max_tokens={self.max_tokens}, found T={x.shape[1]}"
            )
        if history is not None and history.shape[1] != self.capacity:
            raise ValueError(
                f"the history must hold kernel_size - 1 + max_tokens = {self.capacity} inputs, "
                f"found {history.shape[1]}: was the cache made with another conv_kernel or "
                "max_tokens?"
            )
        if history is not None and history.shape[2] != self.channels:
            raise ValueError(
                f"the history must have {self.channels} channels, found {history.shape[2]}: was "
                "the cache made by another layer?"
            )
        x = x.astype(self.dtype)
        if span.valid is None:
            y, history = self._convolve_front(x, history, span, span.segments)
        else:
            segments = span.segments
            if segments is not None:
                segments = _compact(segments[:, :, None], span.valid)[:, :, 0]
            y, history = self._convolve_front(_compact(x, span.valid), history, span, segments)
            ranks = jnp.maximum(jnp.cumsum(span.valid, axis=1, dtype=jnp.int32) - 1, 0)
            y = jnp.take_along_axis(y, ranks[:, :, None], axis=1)
        return span.masked(y), history

    def _convolve_front(
        self, x: jax.Array, history: jax.Array | None, span: Span, segments: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        batch_size, num_tokens, _ = x.shape
        reach = self.kernel_size - 1
        if history is None:
            before = jnp.zeros((batch_size, reach, self.channels), self.dtype)
        else:
            before = self._newest(history, span.position)
        taken = jnp.concatenate([before, x], axis=1).astype(jnp.float32)
        if segments is not None:
            segments = jnp.pad(segments, ((0, 0), (reach, 0)))
        kernel = self.kernel[...].astype(jnp.float32)
        shape = (batch_size, num_tokens, self.channels)
        if self.bias is None:
            y = jnp.zeros(shape, jnp.float32)
        else:
            y = jnp.broadcast_to(self.bias[...].astype(jnp.float32), shape)
        for tap in range(self.kernel_size):
            source = jax.lax.slice_in_dim(taken, tap, tap + num_tokens, axis=1)
            if segments is not None:
                same = segments[:, tap : tap + num_tokens] == segments[:, reach:]
                source = jnp.where(same[:, :, None], source, 0.0)
            y = y + jnp.broadcast_to(kernel[tap], shape) * source
        if self.activation is not None:
            y = ACTIVATIONS[self.activation](y)
        if history is not None:
            history = self._write(history, x, span)
        return y.astype(self.dtype), history

    def _newest(self, history: jax.Array, position: jax.Array) -> jax.Array:
        """The K - 1 committed inputs before `position`, oldest first; zero where there is none."""
        reach = self.kernel_size - 1
        at = position[:, None] + jnp.arange(-reach, 0, dtype=jnp.int32)[None, :]
        rows = jnp.take_along_axis(history, (at % self.capacity)[:, :, None], axis=1)
        return jnp.where((at >= 0)[:, :, None], rows.astype(self.dtype), 0)

    def _write(self, history: jax.Array, x: jax.Array, span: Span) -> jax.Array:
        """Give each slot the newest input that belongs there, or leave it."""
        if x.shape[1] == 0:
            return history
        slots = jnp.arange(self.capacity, dtype=jnp.int32)[None, :]
        newest = span.end[:, None] - 1
        at = newest - (newest - slots) % self.capacity
        first = (span.end - span.counts)[:, None]
        index = jnp.clip(at - first, 0, x.shape[1] - 1)
        rows = jnp.take_along_axis(x, index[:, :, None], axis=1).astype(history.dtype)
        return jnp.where((at >= first)[:, :, None], rows, history)
