"""Grouped-query attention with a KV cache that rolls back by its length."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from replayssm_jax.arguments import float_dtype
from replayssm_jax.layers.activations import default_kernel_init
from replayssm_jax.layers.apart import apart
from replayssm_jax.layers.arguments import check_params
from replayssm_jax.layers.cache import KVCache
from replayssm_jax.layers.cached import CachedLayer, Mode
from replayssm_jax.layers.norm import RMSNorm
from replayssm_jax.layers.options import check_option
from replayssm_jax.layers.progress import Progress, Span
from replayssm_jax.layers.rotary import rotate
from replayssm_jax.layers.sharding import run_sharded


class _Heads(NamedTuple):
    q: jax.Array
    k: jax.Array
    v: jax.Array


class Attention(CachedLayer):
    """Causal grouped-query attention: y, cache = layer(x [B, T, d_model], cache).

    Tokens past the cache's last position are not stored, and later ones do not see them; more
    tokens at once than it holds are an error.

    Args:
      d_model: width of the hidden state.
      num_heads: query heads.
      num_kv_heads: key and value heads, `num_heads` by default.
      head_dim: D, d_model / num_heads by default.
      rope_fraction: part of each head that is rotated, in [0, 1]: 1 for all, 0 for no position
        embedding.
      rope_base: base of the rotation's frequencies, above 0.
      qk_norm: an RMS norm over each query and key head.
      output_gate: the heads' outputs are multiplied by a sigmoid gate of the layer's input.
      sliding_window: None, or how many positions back a token sees, itself included: at least 1.
      scale: of the logits, D^-1/2 by default.
      proj_bias: whether q, k and v have biases; out_bias: whether the output has.
      norm_epsilon: of the q/k norm.
      implementation: of `jax.nn.dot_product_attention`.
      dtype, param_dtype, kernel_init, out_kernel_init: as in `flax.nnx.Linear`.
      rngs: of the parameters.
    """

    cache_type: ClassVar[type] = KVCache

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_fraction: float = 1.0,
        rope_base: float = 10000.0,
        qk_norm: bool = False,
        output_gate: bool = False,
        sliding_window: int | None = None,
        scale: float | None = None,
        proj_bias: bool = False,
        out_bias: bool = False,
        norm_epsilon: float = 1e-6,
        implementation: Literal["xla", "cudnn"] | None = None,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = default_kernel_init,
        out_kernel_init: Any = default_kernel_init,
        rngs: nnx.Rngs,
    ):
        check_params(param_dtype, rngs)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        num_heads = check_option("num_heads", num_heads, int)
        num_kv_heads = check_option("num_kv_heads", num_kv_heads, int)
        head_dim = check_option("head_dim", head_dim, int | None)
        rope_fraction = check_option("rope_fraction", rope_fraction, float)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads, found num_kv_heads={num_kv_heads} "
                f"and num_heads={num_heads}"
            )
        if head_dim is None:
            if d_model % num_heads:
                raise ValueError(
                    f"num_heads must divide d_model, found num_heads={num_heads} "
                    f"and d_model={d_model}: or pass head_dim"
                )
            head_dim = d_model // num_heads
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.rope_dim = 2 * (int(head_dim * rope_fraction) // 2)
        self.rope_base = check_option("rope_base", rope_base, float)
        self.output_gate = output_gate
        self.sliding_window = check_option("sliding_window", sliding_window, int | None)
        self.scale = head_dim**-0.5 if scale is None else scale
        self.implementation = implementation
        self.dtype = float_dtype("dtype", dtype)

        linear = functools.partial(nnx.Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

        def norm() -> RMSNorm | None:
            if not qk_norm:
                return None
            return RMSNorm(head_dim, epsilon=norm_epsilon, param_dtype=param_dtype, rngs=rngs)

        queries = num_heads * head_dim * (2 if output_gate else 1)
        self.q_proj = linear(d_model, queries, use_bias=proj_bias, kernel_init=kernel_init)
        self.k_proj = linear(
            d_model, num_kv_heads * head_dim, use_bias=proj_bias, kernel_init=kernel_init
        )
        self.v_proj = linear(
            d_model, num_kv_heads * head_dim, use_bias=proj_bias, kernel_init=kernel_init
        )
        self.o_proj = linear(
            num_heads * head_dim, d_model, use_bias=out_bias, kernel_init=out_kernel_init
        )
        self.q_norm = nnx.data(norm())
        self.k_norm = nnx.data(norm())

    @property
    def features(self) -> int:
        """d_model."""
        return self.q_proj.in_features

    def init_cache(
        self,
        batch_size: int,
        size: int,
        dtype: Any = None,
        *,
        decode: str = "replay",
        ragged: bool = True,
    ) -> KVCache:
        """Return a cache of `size` positions for `batch_size` empty rows.

        `decode` and `ragged` are taken for the sake of the mixers' signature and change nothing.
        """
        del decode, ragged
        shape = (batch_size, size, self.num_kv_heads, self.head_dim)
        dtype = dtype or self.dtype
        return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), Progress.zeros(batch_size))

    def advance(
        self, x: jax.Array, cache: KVCache | None, span: Span, *, mode: Mode
    ) -> tuple[jax.Array, KVCache | None]:
        """Run the layer at `span`; the returned cache's progress has not moved yet."""
        del mode
        if cache is not None:
            self.check_cache(cache)
        lead = x.shape[:2]
        for_q, for_k, for_v = apart(x, 3)
        q = self.q_proj(for_q).reshape(*lead, self.num_heads, -1)
        gate = None
        if self.output_gate:
            q, gate = jnp.split(q, 2, axis=-1)
        k = self.k_proj(for_k).reshape(*lead, self.num_kv_heads, self.head_dim)
        v = self.v_proj(for_v).reshape(*lead, self.num_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = rotate(q, span.positions, dim=self.rope_dim, base=self.rope_base)
        k = rotate(k, span.positions, dim=self.rope_dim, base=self.rope_base)
        axes = self.mesh_axes
        if axes is None:
            y, cache = self._read(cache, _Heads(q, k, v), span)
        else:
            heads = axes.heads(self.num_kv_heads)
            y, cache = run_sharded(self._read, axes, heads, cache, _Heads(q, k, v), span)
        if gate is not None:
            y = y * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(y.dtype)
        return span.masked(self.o_proj(y.reshape(*lead, -1))), cache

    def check_cache(self, cache: Any) -> None:
        """Raise TypeError, or ValueError for the cache of an attention layer with other heads."""
        super().check_cache(cache)
        wanted, found = (self.num_kv_heads, self.head_dim), cache.key.shape[2:]
        if found != wanted:
            raise ValueError(
                f"the cache must have {wanted[0]} heads of {wanted[1]}, found shape "
                f"{cache.key.shape}: was it made by another layer?"
            )

    def _read(
        self, cache: KVCache | None, heads: _Heads, span: Span
    ) -> tuple[jax.Array, KVCache | None]:
        """Write k and v, and attend; on a mesh with each device's own rows and heads."""
        q, k, v = heads
        if cache is None:
            return self._attend(q, k, v, self._own_mask(span)), None
        if span.segments is None:
            size = cache.key.shape[1]
            if span.live is None and k.shape[1] > size:
                raise ValueError(f"the cache holds {size} tokens, found T={k.shape[1]}")
            cache = self._write(cache, k, v, span)
            return self._attend(q, cache.key, cache.value, self._cache_mask(span, cache)), cache
        keys = jnp.concatenate([cache.key.astype(k.dtype), k], axis=1)
        values = jnp.concatenate([cache.value.astype(v.dtype), v], axis=1)
        old = self._cache_mask(span, cache, committed_only=True)
        old &= (span.segments == 0)[:, None, :, None]
        own = self._own_mask(span)
        assert own is not None
        y = self._attend(q, keys, values, jnp.concatenate([old, own], axis=-1))
        return y, self._write(cache, k, v, span)

    def _attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None
    ) -> jax.Array:
        # It promotes bf16 to fp32 inside, which JAX's strict promotion mode would refuse.
        with jax.numpy_dtype_promotion("standard"):
            return jax.nn.dot_product_attention(
                q,
                k.astype(q.dtype),
                v.astype(q.dtype),
                mask=mask,
                scale=self.scale,
                is_causal=mask is None,
                implementation=self.implementation,
            )

    def _own_mask(self, span: Span) -> jax.Array | None:
        """[B, 1, T, T] which of the span's own tokens each of them sees; None for plain causal."""
        num_tokens = span.positions.shape[1]
        if span.live is None and span.segments is None and self.sliding_window is None:
            return None
        steps = jnp.arange(num_tokens)
        mask = jnp.broadcast_to(
            (steps[None, :] <= steps[:, None])[None], (span.positions.shape[0], *2 * (num_tokens,))
        )
        if span.live is not None:
            mask &= span.live[:, None, :]
        if span.segments is not None:
            mask &= span.segments[:, :, None] == span.segments[:, None, :]
        return self._within(mask, span.positions, span.positions)[:, None]

    def _cache_mask(self, span: Span, cache: KVCache, *, committed_only: bool = False) -> jax.Array:
        """[B, 1, T, S] which slots each token sees."""
        slots = jnp.arange(cache.key.shape[1], dtype=jnp.int32)
        slots = jnp.broadcast_to(slots[None], (span.position.shape[0], slots.shape[0]))
        if committed_only:
            mask = (slots < span.position[:, None])[:, None, :]
            mask = jnp.broadcast_to(mask, (*span.positions.shape, slots.shape[1]))
        else:
            mask = slots[:, None, :] <= span.positions[:, :, None]
        return self._within(mask, span.positions, slots)[:, None]

    def _within(self, mask: jax.Array, queries: jax.Array, keys: jax.Array) -> jax.Array:
        if self.sliding_window is None:
            return mask
        return mask & (keys[:, None, :] > queries[:, :, None] - self.sliding_window)

    def _write(self, cache: KVCache, k: jax.Array, v: jax.Array, span: Span) -> KVCache:
        size = cache.key.shape[1]
        stored = jnp.ones(span.positions.shape, bool) if span.live is None else span.live
        if span.segments is not None:
            last = jnp.max(span.segments, axis=1, initial=0)
            # Not in place: the mask may be an array of the caller's.
            stored = stored & (span.segments == last[:, None])
        slots = jnp.where(stored, span.positions, size)
        rows = jnp.arange(slots.shape[0])[:, None]

        def put(buffer: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.asarray(buffer).at[rows, slots].set(new.astype(buffer.dtype), mode="drop")

        return dataclasses.replace(cache, key=put(cache.key, k), value=put(cache.value, v))
