"""ReplayMixer: what the mixers share: projection, convolution, replay, output.

A family says how the hidden state becomes convolution channels, how these become token records,
and how the recurrence's output becomes the layer's.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from replayssm_jax.arguments import check_array
from replayssm_jax.decode import commit, verify
from replayssm_jax.inputs import TokenInputs
from replayssm_jax.layers.cache import MixerCache, reset_pointer
from replayssm_jax.layers.cached import CachedLayer, Mode
from replayssm_jax.layers.causal_conv import CausalConv
from replayssm_jax.layers.progress import Progress, Span
from replayssm_jax.layers.sharding import run_sharded
from replayssm_jax.precision import Stored, advance, decode, encode, is_scaled, zeros
from replayssm_jax.prefill import prefill
from replayssm_jax.recurrence import recurrent_step
from replayssm_jax.snapshots import Snapshots, verify_snapshots
from replayssm_jax.spec import ReplaySpec
from replayssm_jax.state import ReplayState, check_rounding_key, init_state, materialize

Decode = Literal["replay", "recurrent", "snapshot"]


def check_decode(decode: str) -> None:
    """Raise ValueError unless it names a way to decode."""
    if decode not in get_args(Decode):
        raise ValueError(f'decode must be "replay", "recurrent" or "snapshot", found {decode!r}')


# What runs through a layer: a conventional state goes with its keys.
_State = ReplayState | Snapshots | Stored


class ReplayMixer(CachedLayer):
    """Base of the mixers; `spec`, `conv` and `in_proj` are set by the family.

    `y, cache = layer(x, cache)` advances by the T tokens of `x` [B, T, d_model]: a single token is
    decoded through the ring, more are prefilled. `verify` and `commit` are for drafts.
    """

    cache_type: ClassVar[type] = MixerCache
    spec: ReplaySpec
    conv: CausalConv
    in_proj: nnx.Linear

    @property
    def features(self) -> int:
        """d_model."""
        return self.in_proj.in_features

    def project(self, x: jax.Array) -> tuple[jax.Array, Any]:
        """Map x [B, T, d_model] to convolution channels [B, T, C] and what else `output` needs."""
        raise NotImplementedError

    def records(self, channels: jax.Array, rest: Any) -> TokenInputs:
        """Map convolved channels [B, T, C] to token records."""
        raise NotImplementedError

    def output(self, o: jax.Array, inputs: TokenInputs, rest: Any) -> jax.Array:
        """Map the recurrence's output [B, T, H, P] to y [B, T, d_model]."""
        raise NotImplementedError

    def init_cache(
        self,
        batch_size: int,
        size: int = 0,
        dtype: Any = None,
        *,
        decode: Decode = "replay",
        ragged: bool = True,
        rounding_key: jax.Array | None = None,
    ) -> MixerCache:
        """Return the cache of `batch_size` empty rows.

        Args:
          batch_size: B.
          size: ignored: the cache does not grow with the sequence.
          dtype: dtype of the convolution history, the layer's own by default. The state has the
            layer's `state_dtype` whatever this says.
          decode: "replay", or for conventional decoding of the same weights "recurrent", or
            "snapshot" where drafts must be rolled back: a state is kept for each of them.
          ragged: whether each row has its own replay pointer.
          rounding_key: None, or a key from `jax.random.key` to round a low-precision state
            stochastically; each layer needs its own.
        """
        del size
        check_decode(decode)
        spec, keys = self.spec, None
        state: Any
        if decode == "replay":
            state = init_state(spec, batch_size, ragged=ragged, rounding_key=rounding_key)
        elif decode == "recurrent":
            keys = check_rounding_key(spec, batch_size, rounding_key)
            state = zeros(spec.state_shape(batch_size), spec.state_dtype)
        else:
            if is_scaled(spec.state_dtype) or rounding_key is not None:
                raise ValueError(
                    "snapshots are plain arrays that are rounded to nearest, found "
                    f"state_dtype={spec.state_dtype.name} and rounding_key="
                    f"{'None' if rounding_key is None else 'a key'}"
                )
            state = Snapshots.zeros(spec, batch_size)
        history = self.conv.init_history(batch_size, dtype)
        return MixerCache(history, state, Progress.zeros(batch_size), keys)

    def __call__(
        self,
        x: jax.Array,
        cache: MixerCache | None = None,
        *,
        lengths: jax.Array | None = None,
        valid: jax.Array | None = None,
        resets: jax.Array | None = None,
    ) -> tuple[jax.Array, MixerCache | None]:
        """Advance by the tokens of `x` and commit them; arguments as in `CachedLayer`."""
        rows, one_mask = self.positions(x, cache).shape, lengths is None or valid is None
        if cache is not None and x.shape[1] == 1 and resets is None and one_mask:
            if valid is not None:
                valid = check_array("valid", valid, (*rows, 1), jnp.bool)
                lengths = valid[:, 0].astype(jnp.int32)
            elif lengths is not None:
                lengths = check_array("lengths", lengths, rows, jnp.integer)
            y, cache = self.verify(x, cache, lengths=lengths)
            return y, self.commit(cache, 1 if lengths is None else jnp.minimum(lengths, 1))
        return super().__call__(x, cache, lengths=lengths, valid=valid, resets=resets)

    def commit(self, cache: MixerCache, accepted: jax.Array | int) -> MixerCache:
        """Accept the first `accepted` (int32 scalar or [B]) pending drafts of each row."""
        self.check_cache(cache)
        state = cache.state
        if isinstance(state, ReplayState):
            assert cache.progress is not None
            # A windowed loop drops the drafts of idle rows from the ring: nothing may count them.
            accepted = jnp.clip(cache.progress.checked(accepted), 0, state.pointer.pending)
            state = commit(self.spec, state, accepted)
        return dataclasses.replace(super().commit(cache, accepted), state=state)

    def reset(self, cache: MixerCache, where: jax.Array) -> MixerCache:
        """Empty the rows `where` [B] bool, at the cost of moving their pointer."""
        self.check_cache(cache)
        assert cache.progress is not None
        where = cache.progress.flags(where)
        cache = super().reset(cache, where)
        if not isinstance(cache.state, ReplayState):
            return cache
        pointer = reset_pointer(self.spec, cache.state.pointer, where)
        return dataclasses.replace(cache, state=dataclasses.replace(cache.state, pointer=pointer))

    def advance(
        self, x: jax.Array, cache: MixerCache | None, span: Span, *, mode: Mode
    ) -> tuple[jax.Array, MixerCache | None]:
        """Run the layer at `span`; the returned cache's progress has not moved yet."""
        if cache is not None:
            self.check_cache(cache)
        channels, rest = self.project(x)
        history = None if cache is None else cache.history
        channels, history = self.conv.convolve(channels, history, span, drafts=mode == "verify")
        inputs = self.records(channels, rest)
        state: _State | None = None
        if cache is not None:
            held: Any = cache.state
            plain = not isinstance(held, ReplayState | Snapshots)
            state = Stored(held, None, cache.rounding_key) if plain else held
        o, state = self._recur(state, inputs, span, mode)
        y = span.masked(self.output(o, inputs, rest))
        if cache is None:
            return y, None
        assert history is not None and state is not None
        if isinstance(state, Stored):
            return y, dataclasses.replace(
                cache, history=history, state=state.checkpoint, rounding_key=state.rounding_key
            )
        return y, dataclasses.replace(cache, history=history, state=state)

    def local_spec(self) -> tuple[ReplaySpec, str | None]:
        """Return the spec of one device's part of the layer, and the mesh axis of its heads."""
        axes = self.mesh_axes
        if axes is None:
            return self.spec, None
        heads = axes.heads(self.spec.num_groups)
        parts = axes.size(heads)
        spec = dataclasses.replace(
            self.spec,
            num_heads=self.spec.num_heads // parts,
            num_groups=self.spec.num_groups // parts,
        )
        return spec, heads

    def _recur(
        self, state: _State | None, inputs: TokenInputs, span: Span, mode: Mode
    ) -> tuple[jax.Array, _State | None]:
        axes = self.mesh_axes
        if axes is None:
            return _recur(self.spec, mode, state, inputs, span)
        spec, heads = self.local_spec()
        f = functools.partial(_recur, spec, mode)
        return run_sharded(f, axes, heads, state, inputs, span)


def _recur(
    spec: ReplaySpec,
    mode: Mode,
    state: _State | None,
    inputs: TokenInputs,
    span: Span,
) -> tuple[jax.Array, _State | None]:
    """Run the records through replay, or conventional decoding where `state` is not one of it."""
    if isinstance(state, ReplayState):
        if mode == "verify":
            return verify(spec, state, inputs, lengths=span.lengths)
        ragged = state.pointer.is_ragged
        return prefill(
            spec,
            state,
            inputs,
            lengths=span.lengths if ragged else None,
            valid=span.valid if ragged else span.live,
            resets=span.resets,
        )
    if isinstance(state, Snapshots):
        if mode == "verify":
            return verify_snapshots(spec, state, inputs, span.position, span.lengths)
        last = Stored(state.at(span.position), None, None)
        o, newest = _recur(spec, mode, last, inputs, span)
        assert isinstance(newest, Stored)
        return o, state.put(span.end, newest.checkpoint)
    if state is not None and mode == "verify":
        if inputs.v.shape[1] != 1:
            raise ValueError(
                "conventional decoding cannot roll back drafts: it takes T = 1, found "
                f"T={inputs.v.shape[1]}"
            )
        now, after = _next_keys(state)
        o, new = recurrent_step(spec, state.checkpoint, inputs, rounding_key=now)
        if span.live is None:
            return o, Stored(new, None, after)
        live = span.live[:, :, None, None]
        kept = _where(span.live[:, 0], Stored(new, None, after), state)
        return jnp.where(live, o, jnp.zeros_like(o)), kept
    initial = None if state is None else decode(state.checkpoint, spec.compute_dtype)
    replay = init_state(
        spec.exact, inputs.v.shape[0], initial, layout=None if state is None else "vk"
    )
    o, replay = prefill(spec.exact, replay, inputs, valid=span.live, resets=span.resets)
    if state is None:
        return o, None
    now, after = _next_keys(state)
    new = Stored(encode(materialize(spec.exact, replay), spec.state_dtype, now), None, after)
    if span.live is None or not spec.is_rounded:
        return o, new
    return o, _where(jnp.any(span.live, axis=1), new, state)


def _next_keys(state: Stored) -> tuple[jax.Array | None, jax.Array | None]:
    keys = state.rounding_key
    return (None, None) if keys is None else advance(keys)


def _where(rows: jax.Array, new: Stored, old: Stored) -> Stored:
    """The rows [B] bool of `new`, the others of `old`."""
    return jax.tree.map(
        lambda x, y: jnp.where(rows.reshape(-1, *(1,) * (x.ndim - 1)), x, y), new, old
    )
