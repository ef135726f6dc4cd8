"""HybridLM: a language model of SSM and attention blocks that decodes by replay."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from replayssm_jax.arguments import (
    check_arrays,
    check_int,
    check_not_explicit,
    check_type,
    float_dtype,
)
from replayssm_jax.layers import HybridBlock, RMSNorm
from replayssm_jax.layers.activations import default_kernel_init
from replayssm_jax.layers.arguments import check_params
from replayssm_jax.layers.cache import (
    attach,
    detach,
    give_rounding_keys,
    insert_rows,
    reset_pointer,
    reset_rows,
    take_rows,
)
from replayssm_jax.layers.cached import Mode
from replayssm_jax.layers.mixer import Decode, ReplayMixer, check_decode
from replayssm_jax.layers.progress import Progress, Span
from replayssm_jax.layers.sharding import MeshAxes
from replayssm_jax.models.arguments import (
    check_accepted,
    check_cache,
    check_fits,
    check_rolls_back,
    check_tokens,
    check_values,
)
from replayssm_jax.models.build import build_block
from replayssm_jax.models.cache import HybridCache
from replayssm_jax.models.config import HybridConfig
from replayssm_jax.models.partition import place
from replayssm_jax.models.stacking import scan_cached, scan_train, stack_cache, stack_modules
from replayssm_jax.state import Pointer, check_rows, check_slots


class HybridLM(nnx.Module):
    """Hybrid language model.

    `model(tokens)` is the training forward. For decoding, `init_cache`, then `prefill`, `step`, and
    for drafts `verify` and `commit`; each returns the new cache and leaves the module as it is, so
    the cache may be donated and the module split, merged and passed through `jax.jit` freely.

    Args:
      config: the model.
      dtype: of activations and of what the caches record; recurrent states have the config's
        `state_dtype` anyway.
      param_dtype: of the projections' parameters.
      rngs: of the parameters.
    """

    mesh_axes: MeshAxes | None = None

    def __init__(
        self,
        config: HybridConfig,
        *,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_type("config", config, HybridConfig)
        check_params(param_dtype, rngs)
        self.config = config
        self.dtype = float_dtype("dtype", dtype)
        self.embed = nnx.Embed(
            config.vocab_size,
            config.d_model,
            dtype=dtype,
            param_dtype=param_dtype,
            embedding_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        kw: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.blocks: nnx.List[HybridBlock] = nnx.List([])
        for layers, count in config.segments:
            copies = [[build_block(config, x, **kw) for x in layers] for _ in range(count)]
            for same in zip(*copies, strict=True):
                self.blocks.append(same[0] if count == 1 else stack_modules(same))
        self.norm = RMSNorm(config.d_model, epsilon=config.norm_epsilon, rngs=rngs)
        self.head = nnx.data(
            None
            if config.tie_embeddings
            else nnx.Param(
                default_kernel_init(rngs.params(), (config.d_model, config.vocab_size), param_dtype)
            )
        )

    def __call__(
        self,
        tokens: jax.Array,
        *,
        valid: jax.Array | None = None,
        resets: jax.Array | None = None,
    ) -> jax.Array:
        """Return the logits of whole sequences, differentiably.

        Args:
          tokens: int32 [B, T].
          valid: [B, T] bool, any pattern of real tokens.
          resets: [B, T] bool, forget everything before this token (packed documents).

        Returns:
          float32 [B, T, vocab].

        Raises:
          TypeError, ValueError: wrong shapes or dtypes, and (where the values are known) real
            tokens outside the vocabulary. Compiled, the logits of a row with one are anything.
        """
        return self.logits(self.hidden(tokens, valid=valid, resets=resets))

    def hidden(
        self,
        tokens: jax.Array,
        *,
        valid: jax.Array | None = None,
        resets: jax.Array | None = None,
    ) -> jax.Array:
        """Return the hidden states [B, T, d_model] of whole sequences; arguments as in a call.

        They are the residual stream behind the last block: what `logits` maps to logits.
        """
        check_tokens(tokens)
        if tokens.size == 0:
            return jnp.zeros((*tokens.shape, self.config.d_model), self.dtype)
        position = jnp.zeros((tokens.shape[0],), jnp.int32)
        span = Span.make(position, tokens.shape[1], valid=valid, resets=resets)
        check_values(tokens, span, self.config.vocab_size)
        x = self.embeddings(_real(tokens, span))
        for blocks, count, _ in self.segments():
            if count > 1:
                x = scan_train(blocks, x, span, remat=self.config.remat)
                continue
            for block in blocks:
                x = self._train_block(block, x, span)
        return x

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Map hidden states [..., d_model] to logits float32 [..., vocab]: last norm and head."""
        check_arrays(hidden=hidden)
        x = self.norm(hidden)
        if self.head is None:
            kernel = self.embed.embedding[...].astype(x.dtype).T
        else:
            kernel = self.head[...].astype(x.dtype)
        logits = jnp.matmul(x, kernel, preferred_element_type=jnp.float32)
        return logits * jnp.float32(self.config.logit_scale)

    def init_cache(
        self,
        batch_size: int,
        size: int,
        dtype: Any = None,
        *,
        decode: Decode = "replay",
        ragged: bool = True,
        rounding_key: jax.Array | None = None,
    ) -> HybridCache:
        """Return the cache of `batch_size` empty rows.

        Args:
          batch_size: B.
          size: positions that the KV caches can hold, at least 1; attention does not see tokens
            past them.
          dtype: of KV caches and convolution histories, of 16 bits or more; the model's by default.
          decode: "replay", or for conventional decoding of the same weights "recurrent", or
            "snapshot" where drafts must be rolled back.
          ragged: whether each row has its own replay pointer; with False all rows move together,
            which `lengths` of `verify` and per-row `accepted` of `commit` do not allow.
          rounding_key: None, where states of a low-precision `state_dtype` are rounded to nearest
            even, or a key from `jax.random.key`: they are rounded stochastically, each layer, row
            and head with keys of its own.

        Raises:
          TypeError, ValueError: no positive integers, no floating dtype or one of 8 bits, a
            rounding_key that is not one key, or for states that are not rounded.
        """
        check_decode(decode)
        batch_size, size = check_int("batch_size", batch_size), check_int("size", size)
        if dtype is not None:
            dtype = float_dtype("dtype", dtype)
            if dtype.itemsize < 2:
                raise ValueError(f"dtype must have 16 bits or more, found {dtype.name}")
        layers: list[Any] = []
        pointer = None
        for blocks, count, _ in self.segments():
            for block in blocks:
                held, own = detach(
                    block.init_cache(batch_size, size, dtype, decode=decode, ragged=ragged)
                )
                layers.append(held if count == 1 else stack_cache(held, count))
                pointer = pointer if own is None else own
        if rounding_key is not None:
            if decode == "snapshot" or not self._rounds_states():
                raise ValueError(
                    "rounding_key needs a replay layer with a low-precision state_dtype, and no "
                    f"snapshots, found state_dtype={self.config.state_dtype!r}, decode={decode!r}"
                )
            layers = give_rounding_keys(layers, jnp.asarray(rounding_key))
        cache = HybridCache(tuple(layers), pointer, Progress.zeros(batch_size))
        if self.mesh_axes is None:
            return cache
        rows = self.mesh_axes.size(self.mesh_axes.data)
        if batch_size % rows:
            raise ValueError(f"batch_size must be a multiple of {rows}, found {batch_size}")
        return place(self, cache, self.mesh_axes)

    def prefill(
        self,
        tokens: jax.Array,
        cache: HybridCache,
        *,
        lengths: jax.Array | None = None,
        valid: jax.Array | None = None,
        resets: jax.Array | None = None,
        last_only: bool = False,
    ) -> tuple[jax.Array, HybridCache]:
        """Run T tokens of any number and commit them; called again, it continues.

        Args:
          tokens: int32 [B, T].
          cache: from `init_cache`.
          lengths: [B] int32, real tokens at the front of each row (padded on the right).
          valid: [B, T] bool, any pattern of real tokens (padded on the left), instead of `lengths`.
          resets: [B, T] bool, forget everything before this token.
          last_only: compute the logits of each row's last real token alone.

        Returns:
          Logits float32 [B, T, vocab], or with `last_only` [B, vocab], zero where a token is not
          real or a row has none, and the cache.

        Raises:
          TypeError, ValueError: wrong shapes or dtypes, and (where the values are known) real
            tokens outside the vocabulary or past the end of the KV caches. Compiled, such tokens
            make their row's logits anything, and those past the end are not stored.
        """
        x, cache = self.prefill_hidden(
            tokens, cache, lengths=lengths, valid=valid, resets=resets, last_only=last_only
        )
        return self.logits(x), cache

    def prefill_hidden(
        self,
        tokens: jax.Array,
        cache: HybridCache,
        *,
        lengths: jax.Array | None = None,
        valid: jax.Array | None = None,
        resets: jax.Array | None = None,
        last_only: bool = False,
    ) -> tuple[jax.Array, HybridCache]:
        """As `prefill`, with hidden states [B, T, d_model] or [B, d_model] in place of logits."""
        check_tokens(tokens)
        check_fits(tokens, cache)
        position = cache.progress.position
        num_tokens = tokens.shape[1]
        if num_tokens == 0:
            shape = tokens.shape[:1] if last_only else tokens.shape
            return jnp.zeros((*shape, self.config.d_model), self.dtype), cache
        span = Span.make(position, num_tokens, lengths=lengths, valid=valid, resets=resets)
        check_values(tokens, span, self.config.vocab_size, cache.size)
        tokens, live = _real(tokens, span), span.live
        back = None
        if span.valid is not None and resets is None:
            # Moving the real tokens to the front once spares every convolution its own gather.
            order = jnp.argsort(~span.valid, axis=1, stable=True)
            tokens = jnp.take_along_axis(tokens, order, axis=1)
            back = jnp.argsort(order, axis=1)
            span = Span.make(position, num_tokens, lengths=span.counts)
        x, layers, pointer = self._run(tokens, cache, span, "prefill")
        cache = HybridCache(layers, pointer, cache.progress.prefilled(span))
        if last_only:
            steps = jnp.arange(num_tokens, dtype=jnp.int32)[None, :]
            at = span.counts - 1 if span.live is None else _last(span.live, steps)
            x = jnp.take_along_axis(x, jnp.maximum(at, 0)[:, None, None], axis=1)
            live = None if live is None else (span.counts > 0)[:, None]
        elif back is not None:
            x = jnp.take_along_axis(x, back[:, :, None], axis=1)
        if live is not None:
            x = jnp.where(live[:, :, None], x, jnp.zeros_like(x))
        return x[:, 0] if last_only else x, cache

    def step(
        self, tokens: jax.Array, cache: HybridCache, *, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, HybridCache]:
        """Decode one token a row: `verify` of one draft, committed.

        Args:
          tokens: int32 [B].
          cache: from `init_cache`.
          lengths: [B] int32, 1 for the rows that take the token, 0 for those that stay where they
            are. Drafts that are still pending, in any row, are dropped.

        Returns:
          Logits float32 [B, vocab] and the cache.

        Raises:
          TypeError, ValueError: as in `verify`, for one token.
        """
        check_tokens(tokens, ndim=1)
        check_fits(tokens, cache)
        x, cache = self._verify(tokens[:, None], cache, lengths)
        accepted = 1 if lengths is None else jnp.clip(jnp.asarray(lengths, jnp.int32), 0, 1)
        return self.logits(x)[:, 0], self.commit(cache, accepted)

    def verify(
        self, tokens: jax.Array, cache: HybridCache, *, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, HybridCache]:
        """Run T <= max_tokens drafts; they stay pending until `commit` accepts a prefix.

        Args:
          tokens: int32 [B, T].
          cache: from `init_cache`, with decode="replay" or "snapshot".
          lengths: [B] int32, how many drafts of each row are real; 0 leaves the row as it is.

        Returns:
          Logits float32 [B, T, vocab] and the cache.

        Raises:
          TypeError, ValueError: wrong shapes or dtypes, T above `max_tokens`, a cache that cannot
            roll back, and (where the values are known) real tokens outside the vocabulary or past
            the end of the KV caches. Compiled, such tokens make their row's logits anything, and
            those past the end are not stored: end rows of a loop at `cache.size`.
        """
        x, cache = self.verify_hidden(tokens, cache, lengths=lengths)
        return self.logits(x), cache

    def verify_hidden(
        self, tokens: jax.Array, cache: HybridCache, *, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, HybridCache]:
        """As `verify`, with hidden states [B, T, d_model] in place of logits."""
        check_tokens(tokens)
        check_fits(tokens, cache)
        check_rolls_back(cache)
        if not 1 <= tokens.shape[1] <= self.config.max_tokens:
            raise ValueError(
                f"T must be between 1 and max_tokens={self.config.max_tokens}, found "
                f"T={tokens.shape[1]}"
            )
        return self._verify(tokens, cache, lengths)

    def commit(self, cache: HybridCache, accepted: jax.Array | int) -> HybridCache:
        """Accept the first `accepted` (int32 scalar or [B]) pending drafts of each row.

        Here, and nowhere else, replay rings, convolution rings and KV caches move together.

        Raises:
          TypeError: counts that are no integers.
          ValueError: a wrong shape, [B] where all rows move together, and (where the values are
            known) more than are pending, as in a second commit; otherwise the count is clipped,
            and a second commit changes nothing.
        """
        check_cache(cache)
        accepted = check_accepted(cache, accepted)
        pointer = cache.pointer
        if pointer is not None:
            # A windowed loop drops the drafts of idle rows from the rings: nothing may count them.
            accepted = jnp.clip(accepted, 0, pointer.pending)
            pending = jnp.zeros_like(pointer.pending)
            pointer = dataclasses.replace(
                pointer, length=pointer.length + accepted, pending=pending
            )
        progress = cache.progress.commit(accepted)
        return dataclasses.replace(cache, pointer=pointer, progress=progress)

    def take(self, cache: HybridCache, rows: jax.Array) -> HybridCache:
        """Return the given rows, int [B'], as a cache of their own; repeats are forks.

        Row -1 gives an empty row where the cache is ragged, and so does a row out of range whose
        value is traced.

        Raises:
          TypeError, ValueError: no integers, another shape, or (where the values are known) rows
            out of [-1, B).
        """
        rows = check_rows(rows, check_cache(cache))
        taken = take_rows(cache, rows)
        if cache.pointer is not None and not cache.pointer.is_ragged:
            return taken
        empty = (rows < 0) | (rows >= cache.progress.position.shape[0])
        return self.reset(taken, empty)

    def insert(self, cache: HybridCache, slots: jax.Array, other: HybridCache) -> HybridCache:
        """Copy the rows of `other` into `slots`, int [B'], of `cache`, whatever these held.

        Slot -1 touches no row, nor does a slot out of range whose value is traced. `cache` must be
        ragged, both of one size and dtype.

        Raises:
          TypeError, ValueError: no integers, not a slot for each row of `other`, caches that differ
            in more than their rows, or (where the values are known) slots out of [-1, B) or a slot
            named twice.
        """
        slots = check_slots(slots, check_cache(other, "other"), check_cache(cache))
        return insert_rows(cache, slots, other)

    def reset(self, cache: HybridCache, where: jax.Array) -> HybridCache:
        """Empty the rows `where` [B] bool; needs a ragged cache.

        Raises:
          TypeError, ValueError: another dtype or shape, or rows that move together.
        """
        check_cache(cache)
        self._check_layers(cache)
        where = cache.progress.flags(where)
        pointer = cache.pointer
        if pointer is not None:
            spec = next(mixer.spec for mixer in self._replay_mixers())
            pointer = reset_pointer(spec, pointer, where)
        return HybridCache(reset_rows(cache.layers, where), pointer, cache.progress.reset(where))

    def _replay_mixers(self) -> Iterator[ReplayMixer]:
        mixers = (mixer for block in self.blocks for mixer in block.mixers)
        return (mixer for mixer in mixers if isinstance(mixer, ReplayMixer))

    def _rounds_states(self) -> bool:
        return any(mixer.spec.is_rounded for mixer in self._replay_mixers())

    def _check_layers(self, cache: HybridCache) -> None:
        expected = sum(len(blocks) for blocks, *_ in self.segments())
        if len(cache.layers) != expected:
            raise ValueError(
                f"the cache must have {expected} layers, found {len(cache.layers)}: was it made by "
                "another model?"
            )
        if cache.pointer is not None and not any(self._replay_mixers()):
            raise ValueError(
                "the cache has replay layers, this model has none: was it made by another model?"
            )

    def _verify(
        self, tokens: jax.Array, cache: HybridCache, lengths: jax.Array | None
    ) -> tuple[jax.Array, HybridCache]:
        span = Span.make(cache.progress.position, tokens.shape[1], lengths=lengths)
        check_values(tokens, span, self.config.vocab_size, cache.size)
        x, layers, pointer = self._run(tokens, cache, span, "verify")
        return span.masked(x), HybridCache(layers, pointer, cache.progress.drafted(span))

    def _run(
        self, tokens: jax.Array, cache: HybridCache, span: Span, mode: Mode
    ) -> tuple[jax.Array, tuple[Any, ...], Pointer | None]:
        self._check_layers(cache)
        x = self.embeddings(tokens)
        layers: list[Any] = []
        pointer = cache.pointer
        for blocks, count, at in self.segments():
            held = cache.layers[at : at + len(blocks)]
            if count > 1:
                x, new, moved = scan_cached(
                    blocks, x, held, cache.pointer, cache.progress, span, mode=mode
                )
                layers.extend(new)
                pointer = moved if moved is not None else pointer
                continue
            for block, one in zip(blocks, held, strict=True):
                one = attach(one, cache.pointer, cache.progress)
                x, one = block.advance(x, one, span, mode=mode)
                stripped, moved = detach(one)
                # Every layer moves the shared pointer in the same way: any of the results will do.
                pointer = moved if moved is not None else pointer
                layers.append(stripped)
        return x, tuple(layers), pointer

    def segments(self) -> list[tuple[list[HybridBlock], int, int]]:
        """Return the runs of blocks, how often each repeats, and where it starts in `blocks`."""
        segments, at = [], 0
        for layers, count in self.config.segments:
            segments.append((list(self.blocks[at : at + len(layers)]), count, at))
            at += len(layers)
        return segments

    def embeddings(self, tokens: jax.Array) -> jax.Array:
        """Look up tokens int32 [...], as the first block takes them: [..., d_model]."""
        check_arrays(tokens=tokens)
        if self.mesh_axes is None:  # see `shard_model`
            check_not_explicit(tokens=tokens, embedding=self.embed.embedding[...])
        # Rows in the parameters' dtype: their gradient sums thousands of tokens, in bf16 it would
        # saturate (and contend, a bf16 addition is no atomic on GPUs).
        x = jnp.take(self.embed.embedding[...], tokens, axis=0).astype(self.dtype)
        return x * jnp.asarray(self.config.embedding_scale, x.dtype)

    def _train_block(self, block: HybridBlock, x: jax.Array, span: Span) -> jax.Array:
        if not self.config.remat:
            return block.advance(x, None, span, mode="prefill")[0]
        graphdef, params = nnx.split(block)

        @jax.checkpoint
        def run(params: Any, x: jax.Array) -> jax.Array:
            return nnx.merge(graphdef, params).advance(x, None, span, mode="prefill")[0]

        return run(params, x)


def _real(tokens: jax.Array, span: Span) -> jax.Array:
    """The tokens with 0 for padding: what is no token would be NaN, and survive a zero weight."""
    live = span.live
    return tokens if live is None else jnp.where(live, tokens, jnp.zeros_like(tokens))


def _last(live: jax.Array, steps: jax.Array) -> jax.Array:
    """[B] index of the last real token, -1 without any."""
    return jnp.max(jnp.where(live, steps, -1), axis=1)
