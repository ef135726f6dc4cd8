"""What generate and speculative_generate share: their output, their arguments, their prefill."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from replayssm_jax.arguments import (
    as_int32,
    check_array,
    check_bool,
    check_int,
    check_protocol,
    check_type,
    concrete,
)
from replayssm_jax.layers.mixer import Decode, check_decode
from replayssm_jax.models.arguments import check_cache, check_end, check_vocabulary
from replayssm_jax.models.cache import HybridCache
from replayssm_jax.models.hybrid import HybridLM
from replayssm_jax.models.restack import unstack_models
from replayssm_jax.prompts import Prompt, bucket
from replayssm_jax.sampling import Sampling, row_keys
from replayssm_jax.spec import round_up
from replayssm_jax.stopping import StopReason, Stops

# What is asked of a model, beside its `step` or its `verify_hidden` and `commit`.
_MODEL = ("config", "init_cache", "prefill_hidden", "logits")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GenerateState:
    """Where a generation stands, to go on from: it has seen the prompt and every new token.

    Attributes:
      cache: of the model.
      logits: float32 [B, V], of the next token.
      seen: [B, V] bool, tokens so far; None unless a repetition penalty was in use.
      hidden: [B, d_model], the target's hidden state that `logits` are of; None unless a drafter
        that reads it was in use.
    """

    cache: HybridCache
    logits: jax.Array
    seen: jax.Array | None = None
    hidden: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GenerateOutput:
    """What `generate` returns.

    Attributes:
      tokens: [B, N] int32, the new tokens, a stop token or sequence included; then `pad_token`.
      lengths: [B] int32, new tokens of each row.
      stop_reason: [B] int32, a `StopReason`.
      logprobs: [B, N] float32, log_softmax(logits / temperature) of each token, untruncated and
        without penalty; a greedy row counts as temperature 1. 0 after the end.
      sampling_logprobs: [B, N] float32, of the distribution that the token was drawn from, after
        penalty and truncation; 0 for greedy rows and after the end.
      state: with `return_state`, where to go on from.
    """

    tokens: jax.Array
    lengths: jax.Array
    stop_reason: jax.Array
    logprobs: jax.Array
    sampling_logprobs: jax.Array
    state: GenerateState | None = None


class Control(NamedTuple):
    """What steers the loop and does not change in it."""

    sampling: Sampling
    stops: Stops
    keys: jax.Array | None
    limits: jax.Array
    pad_token: jax.Array


class Carry(NamedTuple):
    """What the loop of `generate` carries: the rows' states, and what they have emitted.

    `column` is the next one of `tokens` [B, capacity] in `generate`, whose rows move together.
    """

    state: GenerateState
    column: jax.Array
    done: jax.Array
    reason: jax.Array
    counts: jax.Array
    tokens: jax.Array
    logprobs: jax.Array
    sampling_logprobs: jax.Array


def check_model(model: Any, *wanted: str) -> None:
    """Raise TypeError unless `model` is a `HybridLM` or has its methods, those in `wanted` too."""
    check_protocol("model", model, "a HybridLM or a module with its methods", (*_MODEL, *wanted))


def widths(max_new_tokens: Any, capacity: int | None) -> tuple[int, int]:
    """Columns to return, and to compile for."""
    if capacity is not None:
        check_int("capacity", capacity)
    limits = concrete(as_int32("max_new_tokens", max_new_tokens))
    if limits is None:
        if capacity is None:
            raise ValueError("max_new_tokens is traced: pass capacity, a static bound of it")
        return capacity, capacity
    if limits.min(initial=0) < 0:
        raise ValueError(f"max_new_tokens must be at least 0, found {limits.tolist()}")
    width = int(limits.max(initial=0))
    if capacity is None:
        return width, bucket(width)
    return min(width, capacity), capacity


def empty_output(width: int) -> GenerateOutput:
    """Return the output of a batch without rows."""
    zeros = jnp.zeros((0, width), jnp.float32)
    rows = jnp.zeros((0,), jnp.int32)
    return GenerateOutput(zeros.astype(jnp.int32), rows, rows, zeros, zeros)


def start(
    model: HybridLM,
    prompt: Prompt,
    *,
    max_new_tokens: Any,
    key: jax.Array | None,
    sampling: Sampling,
    stops: tuple[Any, Any],
    pad_token: int,
    capacity: int,
    cache_size: int | None,
    decode: Decode,
    state: GenerateState | None,
    ragged: bool,
    unstack: bool,
    rounding_key: jax.Array | None = None,
    keeps_hidden: bool = False,
    trace: Callable[[Control, Carry], Any] | None = None,
) -> tuple[Control, Carry]:
    """Check the arguments, then prefill, to which a `state` is donated.

    `trace` is called between the two, with a carry of `jax.ShapeDtypeStruct`: what it refuses does
    not cost the state.
    """
    batch_size, width = prompt.tokens.shape
    keys = row_keys(key, batch_size)
    sampling = sampling.checked(batch_size)
    if sampling.temperature is not None and keys is None:
        known = concrete(sampling.temperature)
        if known is None or known.any():
            raise ValueError("a temperature needs a key: pass key=jax.random.key(seed)")
        sampling = dataclasses.replace(sampling, temperature=None)  # greedy, every row
    limits = as_int32("max_new_tokens", max_new_tokens)
    if limits.shape not in ((), (batch_size,)):
        raise ValueError(f"max_new_tokens must be an int or [{batch_size}], found {limits.shape}")
    limits = jnp.broadcast_to(limits, (batch_size,))
    if cache_size is not None:
        check_int("cache_size", cache_size)
    check_decode(decode)
    unstack = check_bool("unstack", unstack)
    position: Any = 0
    if state is None:
        state = _init(
            model,
            batch_size,
            cache_size or round_up(width + capacity, 64),
            decode=decode,
            ragged=ragged,
            penalised=sampling.repetition_penalty is not None,
            unstack=unstack,
            rounding_key=rounding_key,
        )
    else:
        _check_state(model, state, batch_size, unstack)
        if rounding_key is not None:
            raise ValueError("rounding_key goes with new states: the given one has its own or none")
        held = state.cache
        if cache_size is not None and held.size not in (None, cache_size):
            raise ValueError(
                f"cache_size goes with new states: the given one has {held.size} positions, "
                f"found cache_size={cache_size}"
            )
        is_recurrent = held.pointer is not None or held.decode != "replay"
        if is_recurrent and decode not in ("replay", held.decode):
            raise ValueError(
                f"decode goes with new states: the given one decodes by {held.decode!r}, "
                f"found decode={decode!r}"
            )
        if sampling.repetition_penalty is not None and state.seen is None:
            raise ValueError("a repetition penalty cannot start in the middle: state.seen is None")
        position = state.cache.progress.position
    if keeps_hidden and state.hidden is None:
        # A state of `generate` has none: the first drafts then follow from zeros.
        hidden = jnp.zeros((batch_size, model.config.d_model), model.dtype)
        state = dataclasses.replace(state, hidden=hidden)
    elif not keeps_hidden:
        state = dataclasses.replace(state, hidden=None)
    counts: Any = width if prompt.valid is None else prompt.valid.sum(axis=1, dtype=np.int32)
    check_end(position, counts, state.cache.size)
    conditions = Stops.make(batch_size, *stops)
    for name, found in (
        ("stop_tokens", conditions.tokens),
        ("stop_sequences", conditions.sequences),
    ):
        if found is not None:  # -1 pads
            check_vocabulary(found, True, model.config.vocab_size, name=name, least=-1)
    control = Control(
        sampling=sampling,
        stops=conditions,
        keys=keys,
        limits=limits,
        pad_token=check_array("pad_token", pad_token, (), jnp.integer),
    )
    args = model, prompt, state, control, capacity, unstack
    if trace is not None:
        trace(control, _prefill.eval_shape(*args))
    return control, _prefill(*args)


def check_generate_state(state: Any) -> None:
    """Raise TypeError unless `state` is a `GenerateState` with the cache of a model."""
    check_type("state", state, GenerateState)
    check_cache(state.cache, "state.cache")
    arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
    if any(not isinstance(x, jax.core.Tracer) and x.is_deleted() for x in arrays):
        raise ValueError(
            "state was donated to an earlier call: pass the state that this call returned, with "
            "return_state=True, or a copy made before it"
        )


def _check_state(model: HybridLM, state: GenerateState, batch_size: int, unstack: bool) -> None:
    """Raise unless `state` has the rows of the prompt and is one that the model could have left."""
    check_generate_state(state)
    cache = state.cache
    if state.logits.shape[0] != batch_size:
        raise ValueError(
            f"the state has {state.logits.shape[0]} rows, the prompt {batch_size}: a row with "
            "nothing to add is an empty list"
        )
    wanted = _init.eval_shape(
        model,
        batch_size,
        cache.size or 1,
        decode=cache.decode,
        ragged=cache.pointer is None or cache.pointer.is_ragged,
        penalised=state.seen is not None,
        unstack=unstack,
        rounding_key=None,  # as where the state was made: one trace serves both
    )
    if state.hidden is not None:
        hidden = jax.ShapeDtypeStruct((batch_size, model.config.d_model), model.dtype)
        wanted = dataclasses.replace(wanted, hidden=hidden)
    want, have = _fields(wanted), _fields(state)
    for name in {**want, **have}:
        if want.get(name) != have.get(name):
            raise ValueError(
                f"state{name} must be {want.get(name)}, found {have.get(name)}: a state goes on "
                "with the model that it came from, and with the same unstack"
            )


def _fields(state: GenerateState) -> dict[str, str]:
    """Shapes of a state's arrays, with the dtypes that its model fixes."""
    fields = {}
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path)
        if not name.endswith(".rounding_key"):  # which a state may have or not
            # KV caches and histories of convolutions are in any dtype.
            fields[name] = f"{x.dtype.name if '.state' in name else 'array'}{list(x.shape)}"
    return fields


@functools.partial(
    jax.jit, static_argnames=("batch_size", "size", "decode", "ragged", "penalised", "unstack")
)
def _init(
    model: HybridLM,
    batch_size: int,
    size: int,
    *,
    decode: Decode,
    ragged: bool,
    penalised: bool,
    unstack: bool,
    rounding_key: jax.Array | None = None,
) -> GenerateState:
    """Make the state of empty rows: one program, and on a mesh every part where it belongs."""
    model = unstack_models(model) if unstack else model
    shape = batch_size, model.config.vocab_size
    return GenerateState(
        cache=model.init_cache(
            batch_size, size, decode=decode, ragged=ragged, rounding_key=rounding_key
        ),
        logits=jnp.zeros(shape, jnp.float32),
        seen=jnp.zeros(shape, bool) if penalised else None,
    )


@functools.partial(jax.jit, static_argnames=("capacity", "unstack"), donate_argnames="state")
def _prefill(
    model: HybridLM,
    prompt: Prompt,
    state: GenerateState,
    control: Control,
    capacity: int,
    unstack: bool,
) -> Carry:
    model = unstack_models(model) if unstack else model
    tokens, valid = prompt
    batch_size, width = tokens.shape
    logits, seen, hidden = state.logits, state.seen, state.hidden
    cache = state.cache
    if width:
        x, cache = model.prefill_hidden(tokens, cache, valid=valid, last_only=True)
        new = model.logits(x)
        if valid is not None:
            real = jnp.any(valid, axis=1)[:, None]
            new = jnp.where(real, new, logits)
            x = x if hidden is None else jnp.where(real, x, hidden)
        logits, hidden = new, None if hidden is None else x
        if seen is not None:
            rows = jnp.arange(batch_size)[:, None]
            at = tokens if valid is None else jnp.where(valid, tokens, seen.shape[1])
            seen = seen.at[rows, at].set(True, mode="drop")
    counts = jnp.zeros((batch_size,), jnp.int32)
    done = room(control, cache, counts, capacity) <= 0
    zeros = jnp.zeros((batch_size, capacity), jnp.float32)
    return Carry(
        state=GenerateState(cache, logits, seen, hidden),
        column=jnp.zeros((), jnp.int32),
        done=done,
        reason=jnp.where(done, jnp.int32(StopReason.LENGTH), 0),
        counts=counts,
        tokens=jnp.full((batch_size, capacity), control.pad_token, jnp.int32),
        logprobs=zeros,
        sampling_logprobs=zeros,
    )


def room(control: Control, cache: HybridCache, counts: jax.Array, capacity: int) -> jax.Array:
    """Return how many more tokens each row may emit, int32 [B]: its limit, or the cache's end."""
    left = jnp.minimum(control.limits, capacity) - counts
    if cache.size is None:
        return left
    return jnp.minimum(left, cache.size - cache.progress.position)
