"""generate and stream: batch decoding in one compiled loop."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replayssm_jax.arguments import check_bool, check_int
from replayssm_jax.generation import (
    Carry,
    Control,
    GenerateOutput,
    GenerateState,
    check_model,
    empty_output,
    room,
    start,
    widths,
)
from replayssm_jax.layers.mixer import Decode
from replayssm_jax.loops import scan_steps, while_loop
from replayssm_jax.models.hybrid import HybridLM
from replayssm_jax.models.restack import unstack_models
from replayssm_jax.prompts import as_prompt, has_no_rows
from replayssm_jax.sampling import Sampling, draw
from replayssm_jax.stopping import StopReason


def generate(
    model: HybridLM,
    prompt: Any,
    *,
    max_new_tokens: Any,
    lengths: Any = None,
    valid: Any = None,
    key: jax.Array | None = None,
    temperature: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    repetition_penalty: Any = None,
    stop_tokens: Any = None,
    stop_sequences: Any = None,
    pad_token: int = 0,
    bos_token: int | None = None,
    capacity: int | None = None,
    cache_size: int | None = None,
    decode: Decode = "replay",
    state: GenerateState | None = None,
    return_state: bool = False,
    unstack: bool = True,
    rounding_key: jax.Array | None = None,
) -> GenerateOutput:
    """Continue prompts, all rows in one compiled loop.

    The loop is compiled once for each batch size, prompt width and (rounded) capacity, and then
    serves other weights of the same structure, limits, keys, sampling values and stop tokens.
    Randomness is folded from a row's key and the position of the token, so with one key for each
    row its tokens depend neither on its neighbours nor on its place in the batch.

    Args:
      model: a `HybridLM`.
      prompt: int [B, T], or a list of B token lists of any lengths.
      max_new_tokens: an int, or int [B] for a limit of each row.
      lengths: [B], real tokens at the front of each row (padded on the right).
      valid: [B, T] bool, real tokens in any pattern (padded on the left), instead of `lengths`.
      key: a PRNG key, or [B] keys; needed for a temperature above 0.
      temperature: scalar or [B]; 0 is greedy, and without it every row is.
      top_k: scalar or [B], keep the k likeliest tokens.
      top_p: scalar or [B], keep the likeliest tokens until their probability reaches p.
      min_p: scalar or [B], keep tokens with at least p times the probability of the likeliest.
      repetition_penalty: scalar or [B], makes tokens that the sequence already holds less likely.
      stop_tokens: an int, [S] or [B, S] ids of the vocabulary that end a row; -1 stops nothing.
      stop_sequences: token sequences that end a row once its last new tokens equal one of them;
        an empty one stops nothing.
      pad_token: fills `tokens` after a row's end.
      bos_token: the token that a row with an empty prompt starts from.
      capacity: static number of new tokens that the loop has room for, `max_new_tokens` rounded
        up by default. Limits above it are cut to it.
      cache_size: positions of the KV caches, by default enough for prompt and new tokens; that of
        the `state`, where one is given. Rows end with `StopReason.LENGTH` when it is full.
      decode: "replay", or "recurrent" for conventional decoding of the same weights ("snapshot"
        also decodes so, and its state can go on in `speculative_generate`).
      state: from an earlier call with `return_state`; `prompt` then continues its rows and may be
        empty. Its buffers are donated: do not use it again.
      return_state: return the state. Rows that have ended then stay exactly where they are.
      unstack: whether a model with `scan_layers` is unstacked before the loop. Otherwise the loop
        slices the stacked weights at every step: slower, but it compiles in a time that does not
        grow with depth and holds no second copy of the weights. Must be the same for a `state`.
      rounding_key: None, or a key from `jax.random.key` to round states of a low-precision
        `state_dtype` stochastically.

    Returns:
      A `GenerateOutput`. An empty batch gives empty arrays.

    Raises:
      TypeError, ValueError: no model, wrong shapes or dtypes, tokens or sampling options out of
        range, a temperature without a key, an empty prompt without `bos_token`, a prompt that is
        longer than the cache, a state of another model. The state is then as it was.
    """
    check_model(model, "step")
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    width, capacity = widths(max_new_tokens, capacity)
    if has_no_rows(prompt):
        return empty_output(width)
    ragged = check_bool("return_state", return_state) or state is not None
    control, carry = start(
        model,
        as_prompt(
            prompt,
            lengths=lengths,
            valid=valid,
            bos_token=bos_token,
            continues=state is not None,
            vocab_size=model.config.vocab_size,
        ),
        max_new_tokens=max_new_tokens,
        key=key,
        sampling=sampling,
        stops=(stop_tokens, stop_sequences),
        pad_token=pad_token,
        capacity=capacity,
        cache_size=cache_size,
        decode=decode,
        state=state,
        ragged=ragged,
        unstack=unstack,
        rounding_key=rounding_key,
    )
    carry = _decode(model, carry, control, unstack, ragged)
    return GenerateOutput(
        tokens=carry.tokens[:, :width],
        lengths=carry.counts,
        stop_reason=carry.reason,
        logprobs=carry.logprobs[:, :width],
        sampling_logprobs=carry.sampling_logprobs[:, :width],
        state=carry.state if return_state else None,
    )


def stream(
    model: HybridLM, prompt: Any, *, max_new_tokens: Any, chunk: int = 1, **options: Any
) -> Iterator[np.ndarray]:
    """Yield the new tokens [B] int32 of every row as they are decoded, `pad_token` after its end.

    Ends when every row has. The tokens are those of `generate` with the same arguments.

    Args:
      model: a `HybridLM`.
      prompt: as in `generate`.
      max_new_tokens: as in `generate`.
      chunk: tokens that are decoded for each call of the device. Tokens arrive sooner with 1, and
        faster with the model's replay window.
      **options: the rest of `generate`'s arguments, without `return_state`.

    Raises:
      TypeError, ValueError: as `generate`, once the first tokens are asked for; a `chunk` that is
        no integer of at least 1, an unknown argument.
    """
    check_model(model, "step")
    chunk = check_int("chunk", chunk)
    unknown = sorted(options.keys() - _OPTIONS.keys())
    if unknown:
        raise TypeError(f"stream got unknown arguments {unknown}")
    if has_no_rows(prompt):
        return
    given = {**_OPTIONS, **options}
    _, capacity = widths(max_new_tokens, given.pop("capacity"))
    state, unstack = given["state"], given["unstack"]
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    masks = {name: given.pop(name) for name in ("lengths", "valid", "bos_token")}
    control, carry = start(
        model,
        as_prompt(prompt, continues=state is not None, vocab_size=model.config.vocab_size, **masks),
        max_new_tokens=max_new_tokens,
        sampling=Sampling(**{name: given.pop(name) for name in names}),
        stops=(given.pop("stop_tokens"), given.pop("stop_sequences")),
        capacity=capacity,
        ragged=state is not None,
        **given,
    )
    lengths = np.zeros_like(np.asarray(carry.counts))
    done = np.asarray(carry.done)
    sent = 0
    while not done.all():
        carry = _decode_chunk(model, carry, control, chunk, unstack, state is not None)
        done, lengths = np.asarray(carry.done), np.asarray(carry.counts)
        tokens = np.asarray(carry.tokens)
        for column in range(sent, int(lengths.max())):
            yield tokens[:, column]
        sent = int(lengths.max())


# The rest of generate's arguments and their defaults, of which a stream returns no state.
_OPTIONS: dict[str, Any] = {
    name: p.default
    for name, p in inspect.signature(generate).parameters.items()
    if p.default is not p.empty and name != "return_state"
}


def _body(model: HybridLM, control: Control, ragged: bool, carry: Carry) -> Carry:
    """One token of every row; `ragged` says whether rows that have ended must stay as they are."""
    state, column = carry.state, carry.column
    cache, live = state.cache, ~carry.done
    drawn = draw(
        control.sampling,
        state.logits,
        keys=control.keys,
        positions=cache.progress.position,
        seen=state.seen,
    )
    token = jnp.where(live, drawn.token, control.pad_token)

    def put(buffer: jax.Array, values: jax.Array) -> jax.Array:
        values = jnp.where(live, values, jnp.zeros_like(values))
        return buffer.at[:, column].set(values, mode="drop")

    tokens = carry.tokens.at[:, column].set(token, mode="drop")
    counts = carry.counts + live.astype(jnp.int32)
    last = room(control, cache, carry.counts, tokens.shape[1]) <= 1
    reason = control.stops.reason(tokens, column)
    reason = jnp.where((reason == 0) & last, jnp.int32(StopReason.LENGTH), reason)
    # Else all rows move on, and what an ended one computes is not looked at: conventional decoding
    # would copy every state to keep those of ended rows.
    ragged = ragged if cache.pointer is None else cache.pointer.is_ragged
    lengths = live.astype(jnp.int32) if ragged else None
    # Of ended rows any token of the vocabulary: `pad_token` need not be one.
    logits, cache = model.step(jnp.where(live, drawn.token, 0), cache, lengths=lengths)
    seen = state.seen
    if seen is not None:
        rows = jnp.arange(token.shape[0])
        seen = seen.at[rows, jnp.where(live, token, seen.shape[1])].set(True, mode="drop")
    return Carry(
        state=GenerateState(cache, jnp.where(live[:, None], logits, state.logits), seen),
        column=column + 1,
        done=carry.done | (reason > 0),
        reason=jnp.where(live, reason, carry.reason),
        counts=counts,
        tokens=tokens,
        logprobs=put(carry.logprobs, drawn.logprob),
        sampling_logprobs=put(carry.sampling_logprobs, drawn.sampling_logprob),
    )


@functools.partial(jax.jit, static_argnames=("unstack", "ragged"), donate_argnames="carry")
def _decode(model: HybridLM, carry: Carry, control: Control, unstack: bool, ragged: bool) -> Carry:
    model = unstack_models(model) if unstack else model
    body = functools.partial(_body, model, control, ragged)

    def unfinished(carry: Carry) -> jax.Array:
        return ~jnp.all(carry.done)

    if carry.state.cache.pointer is None:
        return jax.lax.while_loop(unfinished, body, carry)
    return while_loop(unfinished, body, carry, window=model.config.replay_window)


@functools.partial(jax.jit, static_argnames=("chunk", "unstack", "ragged"), donate_argnames="carry")
def _decode_chunk(
    model: HybridLM, carry: Carry, control: Control, chunk: int, unstack: bool, ragged: bool
) -> Carry:
    model = unstack_models(model) if unstack else model

    def body(carry: Carry, _: None) -> tuple[Carry, None]:
        return _body(model, control, ragged, carry), None

    window = model.config.replay_window
    if carry.state.cache.pointer is None or chunk % window:
        return jax.lax.scan(body, carry, None, chunk)[0]
    return scan_steps(body, carry, None, chunk, window=window)[0]


class _Callable(types.ModuleType):
    """A module that is called like its function.

    Importing it makes it the package's `generate`, so `rs.generate(...)` must work on it.
    """

    __call__ = staticmethod(generate)
    __signature__ = inspect.signature(generate)


sys.modules[__name__].__class__ = _Callable
__doc__ = inspect.getdoc(generate) or ""  # for help(rs.generate)
