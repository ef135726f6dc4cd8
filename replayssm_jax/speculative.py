"""speculative_generate: a drafter guesses, the model verifies, in one compiled loop."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from replayssm_jax.arguments import check_array
from replayssm_jax.drafters import Drafter, Drafts, Turn, check_drafter, propose, reads_hidden
from replayssm_jax.generation import (
    Carry,
    Control,
    GenerateOutput,
    GenerateState,
    check_generate_state,
    check_model,
    empty_output,
    room,
    start,
    widths,
)
from replayssm_jax.models.arguments import check_rolls_back
from replayssm_jax.models.hybrid import HybridLM
from replayssm_jax.models.restack import unstack_models
from replayssm_jax.prompts import Prompt, as_prompt, has_no_rows
from replayssm_jax.sampling import Draw, Sampling, draw, draw_from, score, shape_logits
from replayssm_jax.stopping import StopReason

# Folded into a row's key, beside the tag of drafters: positions are smaller.
_JUDGING = (1 << 31) + 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeOutput(GenerateOutput):
    """What `speculative_generate` returns: the output of `generate`, and how the drafts fared.

    Each round of a row emits one token and the drafts that are accepted after it: it took
    `lengths - accepted` rounds.

    Attributes:
      proposed: int32 [B], drafts that were verified.
      accepted: int32 [B], drafts among the row's tokens.
    """

    proposed: jax.Array
    accepted: jax.Array


class _Loop(NamedTuple):
    """The carry: `drawn` is the next token of each row, drawn but neither emitted nor run yet."""

    rows: Carry
    drawn: Draw
    drafting: Any
    proposed: jax.Array
    accepted: jax.Array


def speculative_generate(
    model: HybridLM,
    prompt: Any,
    drafter: Drafter,
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
    decode: Literal["replay", "snapshot"] = "replay",
    state: GenerateState | None = None,
    return_state: bool = False,
    unstack: bool = True,
    rounding_key: jax.Array | None = None,
) -> SpeculativeOutput:
    """Continue prompts as `generate` does, several tokens for each pass of the model.

    In each round of the loop the drafter proposes tokens, the model verifies them together with
    the newest token in one pass, and what is rejected is rolled back by moving pointers. Rows have
    their own numbers of drafts, acceptances, limits and stops.

    Greedy rows give the tokens of `generate`. So do sampled rows with a drafter whose drafts depend
    on nothing random: a draft is accepted where it is the token that `generate` draws there. Other
    drafters' tokens have the distribution of `generate`'s: a draft x is accepted with probability
    min(1, p(x) / q(x)), and otherwise replaced by a sample from the positive part of p - q. (All
    within the rounding of a verified pass, which sums in another order than a step.)

    Args:
      model: a `HybridLM` with `max_tokens` of at least 1 + drafts.
      prompt: int [B, T], or a list of B token lists of any lengths.
      drafter: such as `NGramDrafter()`, `ModelDrafter(model)` or `MTPDrafter(heads, model)`.
      max_new_tokens: an int, or int [B] for a limit of each row.
      lengths: [B], real tokens at the front of each row.
      valid: [B, T] bool, real tokens in any pattern.
      key: a PRNG key, or [B] keys; needed for a temperature above 0.
      temperature: scalar or [B]; 0 is greedy, and without it every row is.
      top_k: scalar or [B], as in `generate`.
      top_p: scalar or [B], as in `generate`.
      min_p: scalar or [B], as in `generate`.
      repetition_penalty: scalar or [B], as in `generate`.
      stop_tokens: an int, [S] or [B, S] ids of the vocabulary that end a row.
      stop_sequences: token sequences that end a row, also in the middle of accepted drafts.
      pad_token: fills `tokens` after a row's end.
      bos_token: the token that a row with an empty prompt starts from.
      capacity: static number of new tokens that the loop has room for.
      cache_size: positions of the target's KV caches.
      decode: "replay", or "snapshot" for conventional decoding with a state for each draft, which
        replay is compared with. A `state` stays what it is.
      state: from an earlier call, of `generate` too, with `return_state`; donated. The drafter
        sees `prompt` alone, not what came before it.
      return_state: return the state.
      unstack: whether models with `scan_layers` are unstacked before the loop, the drafter's too.
      rounding_key: None, or a key from `jax.random.key` to round states of a low-precision
        `state_dtype` stochastically.

    Returns:
      A `SpeculativeOutput`. An empty batch gives empty arrays.

    Raises:
      TypeError, ValueError: as `generate`; no drafter; more drafts than the model's `max_tokens`
        allow; a state whose rows move together or cannot roll back; drafts of wrong shapes or
        dtypes; a drafter's model with another vocabulary.
    """
    check_model(model, "verify_hidden", "commit")
    most = model.config.max_tokens
    check_drafter(drafter, model.config.vocab_size)
    if drafter.num_drafts >= most:
        raise ValueError(
            f"{drafter.num_drafts} drafts need a model with max_tokens={drafter.num_drafts + 1}, "
            f"found max_tokens={most}"
        )
    width, capacity = widths(max_new_tokens, capacity)
    if has_no_rows(prompt):
        empty = empty_output(width)
        return SpeculativeOutput(
            **vars(empty), proposed=empty.lengths, accepted=jnp.zeros_like(empty.lengths)
        )
    if state is not None:
        check_generate_state(state)
        check_rolls_back(state.cache)
        if state.cache.pointer is not None and not state.cache.pointer.is_ragged:
            raise ValueError(
                "state must have a pointer for every row: make its cache with ragged=True"
            )
    prompt = as_prompt(
        prompt,
        lengths=lengths,
        valid=valid,
        bos_token=bos_token,
        continues=state is not None,
        vocab_size=model.config.vocab_size,
    )
    # Before a state is donated: what the drafter refuses must not cost it. So the loop is traced
    # first, too, and the call below finds that trace.
    drafting = _start_drafting(drafter, prompt, capacity, unstack)

    def trace(control: Control, rows: Carry) -> None:
        _speculate.eval_shape(model, drafter, rows, drafting, control, unstack)

    control, rows = start(
        model,
        prompt,
        max_new_tokens=max_new_tokens,
        key=key,
        sampling=Sampling(temperature, top_k, top_p, min_p, repetition_penalty),
        stops=(stop_tokens, stop_sequences),
        pad_token=pad_token,
        capacity=capacity,
        cache_size=cache_size,
        decode=decode,
        state=state,
        ragged=True,
        unstack=unstack,
        rounding_key=rounding_key,
        keeps_hidden=reads_hidden(drafter),
        trace=trace,
    )
    loop = _speculate(model, drafter, rows, drafting, control, unstack)
    rows = loop.rows
    return SpeculativeOutput(
        tokens=rows.tokens[:, :width],
        lengths=rows.counts,
        stop_reason=rows.reason,
        logprobs=rows.logprobs[:, :width],
        sampling_logprobs=rows.sampling_logprobs[:, :width],
        state=rows.state if return_state else None,
        proposed=loop.proposed,
        accepted=loop.accepted,
    )


@functools.partial(jax.jit, static_argnames=("capacity", "unstack"))
def _start_drafting(drafter: Drafter, prompt: Prompt, capacity: int, unstack: bool) -> Any:
    return (unstack_models(drafter) if unstack else drafter).start(prompt, capacity)


@functools.partial(jax.jit, static_argnames="unstack", donate_argnames=("rows", "drafting"))
def _speculate(
    model: HybridLM,
    drafter: Drafter,
    rows: Carry,
    drafting: Any,
    control: Control,
    unstack: bool,
) -> _Loop:
    if unstack:
        model, drafter = unstack_models((model, drafter))
    state = rows.state
    drawn = draw(
        control.sampling,
        state.logits,
        keys=control.keys,
        positions=state.cache.progress.position,
        seen=state.seen,
    )
    zeros = jnp.zeros_like(rows.counts)
    return jax.lax.while_loop(
        lambda loop: ~jnp.all(loop.rows.done),
        functools.partial(_round, model, drafter, control),
        _Loop(rows, drawn, drafting, zeros, jnp.zeros_like(zeros)),
    )


def _round(model: HybridLM, drafter: Drafter, control: Control, loop: _Loop) -> _Loop:
    """Emit the token that was drawn and the drafts that are accepted; draw the next one."""
    rows, drawn, num_drafts = loop.rows, loop.drawn, drafter.num_drafts
    state, live, capacity = rows.state, ~rows.done, rows.tokens.shape[1]
    position = state.cache.progress.position
    left = room(control, state.cache, rows.counts, capacity)
    turn = Turn(drawn.token, position, live, control.sampling, control.keys, state.hidden)
    drafts, drafting = propose(drafter, loop.drafting, turn)
    drafts = _checked(drafts, num_drafts, model.config.vocab_size, drawn.token)
    # What is no token would put NaN into KV caches, where a mask does not stop it.
    real = (drafts.tokens >= 0) & (drafts.tokens < model.config.vocab_size)
    proposed = jnp.minimum(drafts.lengths, _leading(real))
    proposed = jnp.clip(proposed, 0, jnp.minimum(num_drafts, left - 1))
    proposed = jnp.where(live, proposed, 0)
    steps = jnp.arange(1 + num_drafts, dtype=jnp.int32)[None, :]
    tokens = jnp.concatenate([drawn.token[:, None], drafts.tokens], axis=1)
    tokens = jnp.where(steps <= proposed[:, None], tokens, 0)
    seen = None if state.seen is None else _seen_after(state.seen, tokens)

    lengths = jnp.where(live, 1 + proposed, 0)
    hidden, cache = model.verify_hidden(tokens, state.cache, lengths=lengths)
    logits = model.logits(hidden)
    accepted, following = judge(
        control.sampling,
        logits,
        drafts._replace(lengths=proposed),
        keys=control.keys,
        positions=position[:, None] + 1 + steps,
        seen=seen,
    )

    # Stops are tested on the tokens in place; those behind the first stop are taken back.
    columns = rows.counts[:, None] + steps
    emitted = live[:, None] & (steps <= accepted[:, None])
    buffer = _put(rows.tokens, columns, tokens, emitted)
    reasons = jax.vmap(control.stops.reason, in_axes=(None, 1), out_axes=1)(buffer, columns)
    at_limit = (reasons == 0) & (steps + 1 >= left[:, None])
    reasons = jnp.where(at_limit, jnp.int32(StopReason.LENGTH), reasons)
    reasons = jnp.where(emitted, reasons, 0)
    ended = jnp.any(reasons > 0, axis=1)
    end = jnp.argmax(reasons > 0, axis=1).astype(jnp.int32)
    kept = jnp.where(live, 1 + jnp.where(ended, end, accepted), 0)
    emitted &= steps < kept[:, None]

    cache = model.commit(cache, kept)
    last = jnp.maximum(kept - 1, 0)
    logits = jnp.where(live[:, None], _at(logits, last), state.logits)
    if state.hidden is None:
        newest = None
    else:
        newest = jnp.where(live[:, None], _at(hidden, last), state.hidden)
    if state.seen is not None and seen is not None:
        seen = jnp.where(live[:, None], _at(seen, last), state.seen)

    def record(buffer: jax.Array, first: jax.Array, rest: jax.Array) -> jax.Array:
        return _put(buffer, columns, jnp.concatenate([first[:, None], rest[:, :-1]], 1), emitted)

    rows = Carry(
        state=GenerateState(cache, logits, seen, newest),
        column=rows.column,
        done=rows.done | ended,
        reason=jnp.where(ended, _at(reasons, end), rows.reason),
        counts=rows.counts + kept,
        tokens=_put(rows.tokens, columns, tokens, emitted),
        logprobs=record(rows.logprobs, drawn.logprob, following.logprob),
        sampling_logprobs=record(
            rows.sampling_logprobs, drawn.sampling_logprob, following.sampling_logprob
        ),
    )
    return _Loop(
        rows,
        jax.tree.map(lambda x: _at(x, accepted), following),
        drafter.observe(drafting, tokens, kept),
        loop.proposed + proposed,
        loop.accepted + jnp.maximum(kept - 1, 0),
    )


def _checked(drafts: Drafts, num_drafts: int, vocab_size: int, token: jax.Array) -> Drafts:
    """The drafts in their dtypes, with clear errors for what a drafter may get wrong."""
    shape = (token.shape[0], num_drafts)
    tokens = check_array("Drafts.tokens", drafts.tokens, shape, jnp.integer)
    lengths = check_array("Drafts.lengths", drafts.lengths, shape[:1], jnp.integer)
    logits = drafts.logits
    if logits is not None:
        try:
            logits = check_array("Drafts.logits", logits, (*shape, vocab_size), jnp.floating)
        except ValueError as error:
            raise ValueError(f"{error}: does the drafter have the target's vocabulary?") from None
        logits = logits.astype(jnp.float32)
    return Drafts(tokens, lengths, logits)


def judge(
    sampling: Sampling,
    logits: jax.Array,
    drafts: Drafts,
    *,
    keys: jax.Array | None = None,
    positions: jax.Array | None = None,
    seen: jax.Array | None = None,
) -> tuple[jax.Array, Draw]:
    """Decide how many drafts count, and draw the token after them.

    Args:
      sampling: from `Sampling.checked`.
      logits: float32 [B, 1 + n, V], the target's after the newest token and after each draft.
      drafts: n of them.
      keys: [B] keys; needed unless `sampling.temperature` is None.
      positions: int32 [B, 1 + n], where the tokens that `logits` are of will stand.
      seen: [B, 1 + n, V] bool, as in `draw`, at each of them.

    Returns:
      accepted, int32 [B]; and for each of `logits` the token that follows, with its
      log-probabilities, each [B, 1 + n]: a draft where it is accepted, behind the last of these
      the token that was drawn, and behind that anything.
    """
    order = jnp.arange(drafts.tokens.shape[1], dtype=jnp.int32)[None, :]
    in_lengths = order < drafts.lengths[:, None]
    over_tokens = functools.partial(jax.vmap, in_axes=1, out_axes=1)
    if sampling.temperature is None or drafts.logits is None:
        # What the target draws equals a fixed draft with probability p(draft), and what it draws
        # otherwise has the distribution p without it: the rule for q = 1 at the draft.
        drawn = over_tokens(
            lambda logits, at, seen: draw(sampling, logits, keys=keys, positions=at, seen=seen)
        )(logits, positions, seen)
        return _leading(in_lengths & (drafts.tokens == drawn.token[:, :-1])), drawn
    assert keys is not None and positions is not None
    shaped = over_tokens(lambda logits, seen: shape_logits(sampling, logits, seen))(logits, seen)
    p, q = jax.nn.softmax(shaped), jax.nn.softmax(drafts.logits)
    ratio = _of(p[:, :-1], drafts.tokens) / _of(q, drafts.tokens)
    accepted = _leading(in_lengths & (_uniform(keys, positions[:, :-1]) < ratio))
    # No draft was refused where all were accepted: nothing is subtracted there.
    refused = jnp.pad(jnp.where(in_lengths[:, :, None], q, 0.0), ((0, 0), (0, 1), (0, 0)))
    rest = _remainder(_at(p, accepted), _at(refused, accepted))
    token = draw_from(jnp.log(rest), keys, _at(positions, accepted))
    steps = jnp.arange(positions.shape[1], dtype=jnp.int32)[None, :]
    chosen = jnp.pad(drafts.tokens, ((0, 0), (0, 1)))
    chosen = jnp.where(steps < accepted[:, None], chosen, token[:, None])
    return accepted, over_tokens(functools.partial(score, sampling))(logits, shaped, chosen)


def _leading(right: jax.Array) -> jax.Array:
    """[B] int32, how many of `right` [B, n] are true before the first that is not."""
    return jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _remainder(p: jax.Array, q: jax.Array) -> jax.Array:
    """[B, V], proportional to what of p is not covered by q."""
    rest = jnp.maximum(p - q, 0.0)
    # Rounding alone refuses a draft where p = q, and nothing is left then.
    return jnp.where(jnp.any(rest > 0, axis=1, keepdims=True), rest, p)


def _uniform(keys: jax.Array, positions: jax.Array) -> jax.Array:
    """[B, n] in [0, 1), from the keys [B] and positions [B, n]."""

    def one(key: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(key, jnp.uint32(_JUDGING))
        return jax.random.uniform(jax.random.fold_in(key, position), (), jnp.float32)

    return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(keys, positions)


def _of(probabilities: jax.Array, tokens: jax.Array) -> jax.Array:
    """[B, n] those of `tokens` [B, n] in [B, n, V]."""
    return jnp.take_along_axis(probabilities, tokens[:, :, None], axis=2)[:, :, 0]


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    """[B, ...] of x [B, T, ...] at `index` [B]."""
    return jnp.take_along_axis(x, index.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)[:, 0]


def _put(buffer: jax.Array, columns: jax.Array, new: jax.Array, where: jax.Array) -> jax.Array:
    """Write new [B, T] at `columns` [B, T] of the buffer, `where` [B, T] says so."""
    at = jnp.where(where, columns, buffer.shape[1])
    rows = jnp.arange(buffer.shape[0], dtype=jnp.int32)[:, None]
    return buffer.at[rows, at].set(new, mode="drop")


def _seen_after(seen: jax.Array, tokens: jax.Array) -> jax.Array:
    """[B, T, V] bool: what a row has seen, [B, V], after each of `tokens` [B, T]."""
    new = jax.nn.one_hot(tokens, seen.shape[1], dtype=jnp.int32)
    return seen[:, None] | (jnp.cumsum(new, axis=1) > 0)
