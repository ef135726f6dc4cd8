"""Drafters of speculative decoding: what guesses the next tokens for the target to verify.

A drafter is a pytree (its weights are arguments of the compiled loop) with the three methods of
`Drafter`. Whatever it proposes, the output is the target's: a poor one only costs speed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from replayssm_jax.arguments import check_int, check_number, check_protocol, check_type
from replayssm_jax.models.cache import HybridCache
from replayssm_jax.models.hybrid import HybridLM
from replayssm_jax.models.mtp import MTPHeads
from replayssm_jax.prompts import Prompt
from replayssm_jax.sampling import Sampling, draw_from, shape_logits
from replayssm_jax.spec import round_up

# Folded into a row's key: the target folds positions, which are smaller.
_DRAFTING = 1 << 31


class Turn(NamedTuple):
    """Where a round of drafting starts.

    Attributes:
      token: int32 [B], the newest token, which the drafter has not observed yet.
      position: int32 [B], its position.
      live: bool [B], rows that go on; what is proposed for others is not looked at.
      sampling: how the target samples.
      keys: [B] keys of the rows, None where all are greedy.
      hidden: [B, d_model], the target's hidden state that `token` was drawn from; None unless
        the drafter has `reads_hidden`.
    """

    token: jax.Array
    position: jax.Array
    live: jax.Array
    sampling: Sampling
    keys: jax.Array | None
    hidden: jax.Array | None = None


class Drafts(NamedTuple):
    """Proposed tokens.

    Attributes:
      tokens: int32 [B, n], to follow the newest token. One outside the vocabulary ends a row's.
      lengths: int32 [B] in [0, n], how many of them each row proposes.
      logits: float32 [B, n, V], of the distribution that each draft was drawn from, independently
        of the target's randomness; None where the drafts depend on nothing random.
    """

    tokens: jax.Array
    lengths: jax.Array
    logits: jax.Array | None = None


class Drafter(Protocol):
    """What `speculative_generate` asks of a drafter; all of it runs inside one compiled loop.

    A drafter whose attribute `reads_hidden` is true finds the target's hidden state in its turns.
    One with an attribute `vocab_size`, unless it is None, needs a target with that vocabulary.
    """

    @property
    def num_drafts(self) -> int:
        """Static n, most drafts of one round."""

    def start(self, prompt: Prompt, capacity: int) -> Any:
        """Return the state of B rows that have observed `prompt`, with room for `capacity` more."""

    def propose(self, state: Any, turn: Turn) -> tuple[Drafts, Any]:
        """Draft tokens that follow `turn.token`."""

    def observe(self, state: Any, tokens: jax.Array, kept: jax.Array) -> Any:
        """Learn what came of it: the first `kept` [B] of `tokens` [B, 1 + n] count.

        `tokens` are the newest token and the drafts; 0 are kept in rows that have ended.
        """


def check_drafter(drafter: Any, vocab_size: int | None = None) -> None:
    """Raise unless `drafter` is one, for a target with this vocabulary where it names its own.

    Raises:
      TypeError: no drafter, or one that is no pytree.
      ValueError: another vocabulary.
    """
    wanted = ("num_drafts", "start", "propose", "observe")
    check_protocol("drafter", drafter, "a drafter such as NGramDrafter()", wanted)
    found = getattr(drafter, "vocab_size", None)
    if vocab_size is not None and found not in (None, vocab_size):
        raise ValueError(
            f"drafter must have the target's vocabulary, vocab_size={vocab_size}, found "
            f"vocab_size={found}"
        )


def propose(drafter: Drafter, state: Any, turn: Turn) -> tuple[Drafts, Any]:
    """What the drafter proposes; raise TypeError where that is not `Drafts` and a state."""
    found: Any = drafter.propose(state, turn)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Drafts)):
        names = ", ".join(type(x).__name__ for x in found) if type(found) is tuple else None
        raise TypeError(
            f"{type(drafter).__name__}.propose must return (Drafts, state), found "
            f"{type(found).__name__ if names is None else f'({names})'}"
        )
    return found


def reads_hidden(drafter: Drafter) -> bool:
    """Whether a drafter asks for `Turn.hidden`; one without the attribute does not."""
    return bool(getattr(drafter, "reads_hidden", False))


def _vocab_size(model: HybridLM) -> int:
    check_type("the drafter's model", model, HybridLM)
    return model.config.vocab_size


class NGramState(NamedTuple):
    """Tokens so far, [B, L] int32 from the front of each row, and how many, [B] int32."""

    tokens: jax.Array
    length: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=(), meta_fields=("num_drafts", "longest", "least")
)
@dataclasses.dataclass(frozen=True)
class NGramDrafter:
    """Prompt lookup: the tokens that followed the last occurrence of the newest n-gram.

    The longest match wins, then the newest. A match that overlaps its own continuation goes on
    with the same period. Rows without a match propose nothing.

    Attributes:
      num_drafts: most drafts of a round.
      longest: tokens of the longest n-gram that is looked for.
      least: tokens that must match for a row to propose anything.
    """

    num_drafts: int = 3
    longest: int = 3
    least: int = 1

    def __post_init__(self) -> None:
        for name in ("num_drafts", "longest", "least"):
            check_int(name, getattr(self, name))
        if self.least > self.longest:
            raise ValueError(
                f"least must be at most longest, found least={self.least} and "
                f"longest={self.longest}"
            )

    def start(self, prompt: Prompt, capacity: int) -> NGramState:
        """Return the state of rows that hold the prompt."""
        tokens, valid = prompt
        batch_size, width = tokens.shape
        length = jnp.full((batch_size,), width, jnp.int32)
        if valid is not None:
            order = jnp.argsort(~valid, axis=1, stable=True)
            tokens = jnp.take_along_axis(tokens, order, axis=1)
            length = jnp.sum(valid, axis=1, dtype=jnp.int32)
        return NGramState(jnp.pad(tokens, ((0, 0), (0, capacity + 1))), length)

    def propose(self, state: NGramState, turn: Turn) -> tuple[Drafts, NGramState]:
        """Look the newest tokens up in what came before them."""
        tokens = _write(state, turn.token[:, None], jnp.ones_like(state.length))
        newest = state.length[:, None]
        size = tokens.shape[1]
        ends = jnp.arange(size, dtype=jnp.int32)[None, :]
        matches = jnp.broadcast_to(ends < newest, tokens.shape)
        matched = jnp.zeros(tokens.shape, jnp.int32)
        for back in range(self.longest):
            wanted = jnp.take_along_axis(tokens, newest - back, axis=1, mode="clip")
            found = jnp.pad(tokens, ((0, 0), (back, 0)))[:, :size]
            matches &= (found == wanted) & (ends >= back)
            matched += matches.astype(jnp.int32)
        rank = jnp.where(matched > 0, matched * size + ends, 0)
        best = jnp.argmax(rank, axis=1).astype(jnp.int32)[:, None]
        enough = jnp.take_along_axis(matched, best, axis=1)[:, 0] >= self.least
        period = jnp.maximum(newest - best, 1)
        ahead = jnp.arange(self.num_drafts, dtype=jnp.int32)[None, :]
        drafts = jnp.take_along_axis(tokens, best + 1 + ahead % period, axis=1, mode="clip")
        return Drafts(drafts, jnp.where(enough, jnp.int32(self.num_drafts), 0)), state

    def observe(self, state: NGramState, tokens: jax.Array, kept: jax.Array) -> NGramState:
        """Append the tokens that count."""
        return NGramState(_write(state, tokens, kept), state.length + kept)


def _write(state: NGramState, new: jax.Array, count: jax.Array) -> jax.Array:
    """The tokens with the first `count` [B] of `new` [B, T] behind them."""
    steps = jnp.arange(new.shape[1], dtype=jnp.int32)[None, :]
    at = jnp.where(steps < count[:, None], state.length[:, None] + steps, state.tokens.shape[1])
    rows = jnp.arange(new.shape[0], dtype=jnp.int32)[:, None]
    return state.tokens.at[rows, at].set(new, mode="drop")


def _drafting_sampling(turn: Turn) -> Sampling:
    """How drafts are drawn: as the target's tokens, but not by what the rows have seen."""
    return dataclasses.replace(turn.sampling, repetition_penalty=None)


def _drafting_keys(turn: Turn) -> jax.Array | None:
    """Keys [B] that nothing else draws from."""
    if turn.keys is None:
        return None
    return jax.vmap(lambda key: jax.random.fold_in(key, jnp.uint32(_DRAFTING)))(turn.keys)


def _draw_draft(
    sampling: Sampling, logits: jax.Array, keys: jax.Array | None, positions: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """A draft int32 [B], and the logits [B, V] it was drawn from, None for greedy ones."""
    if sampling.temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), None
    assert keys is not None
    shaped = shape_logits(sampling, logits)
    return draw_from(shaped, keys, positions), shaped


class ModelDrafterState(NamedTuple):
    """The draft model's cache, and the newest token [B] where it `lags` ([B] int32, 0 or 1)."""

    cache: HybridCache
    unseen: jax.Array
    lag: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("model",), meta_fields=("num_drafts",)
)
@dataclasses.dataclass(frozen=True)
class ModelDrafter:
    """A smaller `HybridLM` with the target's vocabulary, which samples as the target does.

    It drafts by replay: each pass verifies all drafts so far and commits none of them, so its own
    convolutions, rings and KV caches roll back with the target's.

    Attributes:
      model: with `max_tokens` of at least 1 + num_drafts.
      num_drafts: drafts of a round.
    """

    model: HybridLM
    num_drafts: int = 3

    @property
    def vocab_size(self) -> int:
        """Vocabulary of the draft model."""
        return _vocab_size(self.model)

    def start(self, prompt: Prompt, capacity: int) -> ModelDrafterState:
        """Prefill the draft model."""
        tokens, valid = prompt
        batch_size, width = tokens.shape
        check_int("num_drafts", self.num_drafts)
        most = self.model.config.max_tokens
        if most <= self.num_drafts:
            raise ValueError(
                f"{self.num_drafts} drafts need max_tokens={self.num_drafts + 1} of the draft "
                f"model, found max_tokens={most}"
            )
        size = round_up(width + capacity + self.num_drafts + 1, 64)
        cache = self.model.init_cache(batch_size, size)
        _, cache = self.model.prefill(tokens, cache, valid=valid, last_only=True)
        zeros = jnp.zeros((batch_size,), jnp.int32)
        return ModelDrafterState(cache, zeros, jnp.zeros_like(zeros))

    def propose(self, state: ModelDrafterState, turn: Turn) -> tuple[Drafts, ModelDrafterState]:
        """Draft token by token; all of them stay pending in the draft model's cache."""
        batch_size = turn.token.shape[0]
        rows = jnp.arange(batch_size, dtype=jnp.int32)
        sampling = _drafting_sampling(turn)
        keys = _drafting_keys(turn)
        line = jnp.zeros((batch_size, self.num_drafts + 1), jnp.int32)
        line = line.at[:, 0].set(state.unseen).at[rows, state.lag].set(turn.token)

        def draft(carry: tuple[Any, Any], i: jax.Array) -> tuple[tuple[Any, Any], Any]:
            line, cache = carry
            last = state.lag + i
            lengths = jnp.where(turn.live, last + 1, 0)
            logits, cache = self.model.verify(line, cache, lengths=lengths)
            logits = jnp.take_along_axis(logits, last[:, None, None], axis=1)[:, 0]
            token, shaped = _draw_draft(sampling, logits, keys, turn.position + 1 + i)
            line = line.at[rows, last + 1].set(token, mode="drop")
            return (line, cache), (token, shaped)

        steps = jnp.arange(self.num_drafts, dtype=jnp.int32)
        (_, cache), (tokens, logits) = jax.lax.scan(draft, (line, state.cache), steps)
        logits = None if logits is None else jnp.moveaxis(logits, 0, 1)
        drafts = Drafts(tokens.T, jnp.full((batch_size,), self.num_drafts, jnp.int32), logits)
        return drafts, state._replace(cache=cache)

    def observe(
        self, state: ModelDrafterState, tokens: jax.Array, kept: jax.Array
    ) -> ModelDrafterState:
        """Commit what counts. The last draft was never run: where it counts, the model lags."""
        seen = jnp.where(kept > 0, state.lag + jnp.minimum(kept, self.num_drafts), 0)
        cache = self.model.commit(state.cache, seen)
        lag = (kept > self.num_drafts).astype(jnp.int32)
        return ModelDrafterState(cache, tokens[:, -1], lag)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("heads", "model"), meta_fields=("num_drafts",)
)
@dataclasses.dataclass(frozen=True)
class MTPDrafter:
    """Heads on the target's hidden state, which sample as the target does.

    Nothing has to be rolled back: each round starts from the hidden state that the target's last
    pass left. With a `state` that `generate` returned, the first round has none and starts from
    zeros.

    Attributes:
      heads: of the target's width.
      model: the target itself, for its embedding and its output head.
      num_drafts: drafts of a round.
    """

    heads: MTPHeads
    model: HybridLM
    num_drafts: int = 3
    reads_hidden: ClassVar[bool] = True

    @property
    def vocab_size(self) -> int:
        """Vocabulary of the model that the heads read."""
        return _vocab_size(self.model)

    def start(self, prompt: Prompt, capacity: int) -> tuple[()]:
        """Check the heads: there is no state."""
        del prompt, capacity
        check_type("the drafter's heads", self.heads, MTPHeads)
        check_int("num_drafts", self.num_drafts)
        if self.heads.d_model != self.model.config.d_model:
            raise ValueError(
                f"the heads need a target with d_model={self.heads.d_model}, found "
                f"d_model={self.model.config.d_model}"
            )
        return ()

    def propose(self, state: tuple[()], turn: Turn) -> tuple[Drafts, tuple[()]]:
        """Draft token by token, each from the hidden state and the token before it."""
        if turn.hidden is None:
            raise ValueError("MTPDrafter needs Turn.hidden, found None")
        sampling, keys = _drafting_sampling(turn), _drafting_keys(turn)
        hidden, token = turn.hidden, turn.token
        tokens: list[jax.Array] = []
        drawn_from: list[jax.Array] = []
        for k in range(self.num_drafts):
            hidden = self.heads(self.model, hidden, token, k)
            token, shaped = _draw_draft(
                sampling, self.model.logits(hidden), keys, turn.position + 1 + k
            )
            tokens.append(token)
            if shaped is not None:
                drawn_from.append(shaped)
        lengths = jnp.full(token.shape, self.num_drafts, jnp.int32)
        logits = jnp.stack(drawn_from, axis=1) if drawn_from else None
        return Drafts(jnp.stack(tokens, axis=1), lengths, logits), state

    def observe(self, state: tuple[()], tokens: jax.Array, kept: jax.Array) -> tuple[()]:
        """Nothing to learn: the target's hidden state knows."""
        del tokens, kept
        return state


class AdaptiveState(NamedTuple):
    """The drafter's own state, how many drafts were accepted and tested lately, float32 [B], and
    how many are proposed now, int32 [B].
    """

    inner: Any
    accepted: jax.Array
    tested: jax.Array
    proposed: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("drafter",),
    meta_fields=("cost", "memory", "prior"),
)
@dataclasses.dataclass(frozen=True)
class AdaptiveDrafter:
    """Another drafter, of whose drafts each row proposes as many as its acceptance makes pay.

    From the drafts of a row that were accepted and refused lately follows its probability a that
    a draft is accepted where those before it are. A round with n drafts emits 1 + a + ... + a^n
    tokens in expectation (arXiv:2211.17192, equation 1) and costs 1 + n cost: each row takes the n
    with the best ratio. Rows that propose nothing fall back to the prior, so they try again.

    It depends on what came of earlier rounds alone, so tokens keep the target's distribution. The
    width of a pass is static: what shorter drafts save is ring space, hence flushes, and the work
    of kernels that skip what is not real.

    Attributes:
      drafter: what proposes.
      cost: time that one more draft adds, in times of a pass without any; drafting included.
      memory: weight of what came before a round, in [0, 1).
      prior: acceptance that a row starts from, worth one tested draft.
    """

    drafter: Drafter
    cost: float = 0.1
    memory: float = 0.9
    prior: float = 0.7

    def __post_init__(self) -> None:
        ranges = {
            "cost": (lambda x: x > 0, "above 0"),
            "memory": (lambda x: 0 <= x < 1, "in [0, 1)"),
            "prior": (lambda x: 0 < x < 1, "in (0, 1)"),
        }
        for name, (allowed, wanted) in ranges.items():
            if not allowed(check_number(name, getattr(self, name))):
                raise ValueError(f"{name} must be {wanted}, found {getattr(self, name)}")

    @property
    def num_drafts(self) -> int:
        """Most drafts of one round, the other drafter's."""
        check_drafter(self.drafter)
        return self.drafter.num_drafts

    @property
    def reads_hidden(self) -> bool:
        """Whether the other drafter does."""
        return reads_hidden(self.drafter)

    @property
    def vocab_size(self) -> int | None:
        """The other drafter's vocabulary, where it names one."""
        return getattr(self.drafter, "vocab_size", None)

    def start(self, prompt: Prompt, capacity: int) -> AdaptiveState:
        """Start the other drafter; nothing is known of its drafts."""
        zeros = jnp.zeros((prompt.tokens.shape[0],), jnp.float32)
        inner = self.drafter.start(prompt, capacity)
        return AdaptiveState(inner, zeros, jnp.zeros_like(zeros), zeros.astype(jnp.int32))

    def propose(self, state: AdaptiveState, turn: Turn) -> tuple[Drafts, AdaptiveState]:
        """Propose the first of the other drafter's drafts."""
        drafts, inner = propose(self.drafter, state.inner, turn)
        lengths = jnp.clip(drafts.lengths, 0, self.best_length(state))
        return drafts._replace(lengths=lengths), state._replace(inner=inner, proposed=lengths)

    def best_length(self, state: AdaptiveState) -> jax.Array:
        """Return int32 [B] in [0, num_drafts], the drafts that pay best."""
        rate = (state.accepted + self.prior) / (state.tested + 1)
        drafts = jnp.arange(self.num_drafts + 1, dtype=jnp.float32)[None, :]
        emitted = jnp.cumsum(rate[:, None] ** drafts, axis=1)
        return jnp.argmax(emitted / (1 + self.cost * drafts), axis=1).astype(jnp.int32)

    def observe(self, state: AdaptiveState, tokens: jax.Array, kept: jax.Array) -> AdaptiveState:
        """Count what was accepted, and the one that was refused."""
        accepted = jnp.maximum(kept - 1, 0)
        tested = jnp.minimum(accepted + 1, state.proposed)
        on, keep = kept > 0, jnp.float32(self.memory)

        def count(old: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.where(on, keep * old + new.astype(jnp.float32), old)

        return AdaptiveState(
            self.drafter.observe(state.inner, tokens, kept),
            count(state.accepted, accepted),
            count(state.tested, tested),
            state.proposed,
        )
