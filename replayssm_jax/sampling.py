"""Sampling of next tokens: greedy, temperature, top-k, top-p, min-p, repetition penalty.

Options are arrays, so that their values may change without a new trace; only which of them are
given is static. Randomness is Gumbel noise under a key of the row and the position, so a row's
sample depends on its own key, logits and position and on nothing else in the batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from replayssm_jax.arguments import as_array, as_int32, cast, concrete


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to draw a token; each value is a scalar, or [B] to differ by row.

    The order is that of Hugging Face: repetition penalty, temperature, top-k, top-p, min-p.

    Attributes:
      temperature: 0 is greedy. None is greedy for all rows, and then the rest but the repetition
        penalty has no effect.
      top_k: keep the k likeliest tokens.
      top_p: keep the likeliest tokens until their probability reaches p.
      min_p: keep tokens with at least p times the probability of the likeliest.
      repetition_penalty: divides positive logits of tokens already in the sequence (prompt
        included), and multiplies negative ones.
    """

    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    repetition_penalty: Any = None

    def checked(self, batch_size: int) -> Sampling:
        """Return the options as [B] arrays.

        Raises:
          TypeError: what is no number, a top_k that is no integer.
          ValueError: a wrong shape, or (where the values are known) a value out of range.
        """
        ranges = {
            "temperature": (lambda x: x >= 0, "at least 0"),
            "top_k": (lambda x: x >= 1, "at least 1"),
            "top_p": (lambda x: (x > 0) & (x <= 1), "in (0, 1]"),
            "min_p": (lambda x: (x >= 0) & (x <= 1), "in [0, 1]"),
            "repetition_penalty": (lambda x: (x > 0) & np.isfinite(x), "above 0 and finite"),
        }
        values: dict[str, Any] = {}
        for name, (allowed, wanted) in ranges.items():
            given = getattr(self, name)
            if given is None:
                continue
            value = (as_int32 if name == "top_k" else _as_float32)(name, given)
            if value.shape not in ((), (batch_size,)):
                raise ValueError(
                    f"{name} must be a scalar or [{batch_size}], found shape {value.shape}"
                )
            known = concrete(value)
            if known is not None and not np.all(allowed(known)):
                kind = value.dtype.name
                found = np.asarray(given).tolist()
                raise ValueError(f"{name} must be {wanted} in {kind}, found {found}")
            values[name] = jnp.broadcast_to(value, (batch_size,))
        return Sampling(**values)


def _as_float32(name: str, value: Any) -> jax.Array:
    array = as_array(name, value, "a number")
    if not any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        raise TypeError(f"{name} must be a number, found {value!r}")
    with np.errstate(over="ignore"):  # becomes infinity, for the ranges to judge
        return cast(array, np.float32)


class Draw(NamedTuple):
    """A sampled token and its log-probabilities, each [B].

    `logprob` is log_softmax(logits / temperature) of the token, untruncated and without the
    penalty; a greedy row counts as temperature 1. `sampling_logprob` is that of the distribution
    it was drawn from, after penalty and truncation; 0 for a greedy row.
    """

    token: jax.Array
    logprob: jax.Array
    sampling_logprob: jax.Array


def row_keys(key: jax.Array | None, batch_size: int) -> jax.Array | None:
    """Return a typed key for each row: `key` [B] as it is, a single key folded with the row index.

    Raises:
      TypeError: something that is no key, such as a seed.
      ValueError: neither a single key nor one for each row.
    """
    if key is None:
        return None
    if not isinstance(key, jax.Array):
        raise TypeError(f"key must be a PRNG key such as jax.random.key(0), found {key!r}")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if key.ndim == 0:
        rows = jnp.arange(batch_size, dtype=jnp.int32)
        return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, rows)
    if key.shape != (batch_size,):
        raise ValueError(
            f"key must be one key or one for each of {batch_size} rows, found {key.shape}"
        )
    return key


def draw(
    sampling: Sampling,
    logits: jax.Array,
    *,
    keys: jax.Array | None = None,
    positions: jax.Array | None = None,
    seen: jax.Array | None = None,
) -> Draw:
    """Draw a token for each row.

    Args:
      sampling: from `Sampling.checked`.
      logits: float32 [B, V].
      keys: [B] keys; needed unless `sampling.temperature` is None.
      positions: [B] int32 position of the token to draw; folded into its row's key.
      seen: [B, V] bool, tokens already in the sequence; needed for the repetition penalty.
    """
    if sampling.temperature is None:
        token = jnp.argmax(_penalised(sampling, logits, seen), axis=-1).astype(jnp.int32)
        logprob = _pick(jax.nn.log_softmax(logits), token)
        return Draw(token, logprob, jnp.zeros_like(logprob))
    assert keys is not None and positions is not None
    shaped = shape_logits(sampling, logits, seen)
    return score(sampling, logits, shaped, draw_from(shaped, keys, positions))


def shape_logits(sampling: Sampling, logits: jax.Array, seen: jax.Array | None = None) -> jax.Array:
    """Return the logits [B, V] of the distribution that tokens are drawn from; needs a temperature.

    Penalty, temperature and truncation are applied. Those of a greedy row are 0 for its best token
    and -inf elsewhere, so that its distribution is one like any other.
    """
    logits = _penalised(sampling, logits, seen)
    best = jnp.argmax(logits, axis=-1, keepdims=True)
    is_best = jnp.arange(logits.shape[-1])[None, :] == best
    greedy = jnp.where(is_best, jnp.zeros_like(logits), -jnp.inf)
    logits = _tempered(sampling, logits)
    logits = jnp.where(_kept(sampling, logits), logits, -jnp.inf)
    return jnp.where((sampling.temperature == 0)[:, None], greedy, logits)


def draw_from(logits: jax.Array, keys: jax.Array, positions: jax.Array) -> jax.Array:
    """Draw a token int32 [B] from logits [B, V], with the randomness of `positions` [B]."""
    noise = jax.vmap(lambda key, at: _gumbel(key, at, logits.shape[-1]))(keys, positions)
    return jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)


def score(sampling: Sampling, logits: jax.Array, shaped: jax.Array, token: jax.Array) -> Draw:
    """Return `token` [B] with its log-probabilities; `shaped` is `shape_logits` of `logits`."""
    logprob = _pick(jax.nn.log_softmax(_tempered(sampling, logits)), token)
    return Draw(token, logprob, _pick(jax.nn.log_softmax(shaped), token))


def _tempered(sampling: Sampling, logits: jax.Array) -> jax.Array:
    """Logits [B, V] over the temperature, 1 for greedy rows, less the greatest one.

    Subtracted before the division, what rounding leaves of it cannot be blown up by a temperature
    near 0; and one below the normal numbers, which devices take for 0, would make 0 / 0 of it.
    """
    temperature = jnp.where(sampling.temperature == 0, 1.0, sampling.temperature)
    temperature = jnp.maximum(temperature, jnp.finfo(jnp.float32).tiny)
    return (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature[:, None]


def _gumbel(key: jax.Array, position: jax.Array, vocab_size: int) -> jax.Array:
    return jax.random.gumbel(jax.random.fold_in(key, position), (vocab_size,), jnp.float32)


def _penalised(sampling: Sampling, logits: jax.Array, seen: jax.Array | None) -> jax.Array:
    if sampling.repetition_penalty is None:
        return logits
    assert seen is not None
    penalty = sampling.repetition_penalty[:, None]
    penalised = jnp.where(logits > 0, logits / penalty, logits * penalty)
    most = jnp.finfo(logits.dtype).max  # infinite ones would have no softmax
    return jnp.where(seen, jnp.clip(penalised, -most, most), logits)


def _pick(logprobs: jax.Array, token: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logprobs, token[:, None], axis=1)[:, 0]


def _kept(sampling: Sampling, logits: jax.Array) -> jax.Array:
    """[B, V] bool, the tokens that truncation leaves; never none."""
    kept = jnp.ones(logits.shape, bool)
    if sampling.top_k is not None or sampling.top_p is not None:
        order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
        ranked = jnp.take_along_axis(logits, order, axis=-1)
        ranks = jnp.broadcast_to(jnp.arange(logits.shape[-1], dtype=jnp.int32), logits.shape)
        keep = jnp.ones(logits.shape, bool)
        if sampling.top_k is not None:
            keep = ranks < sampling.top_k[:, None]
        if sampling.top_p is not None:
            probs = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
            before = jnp.cumsum(probs, axis=-1) - probs
            keep &= (before < sampling.top_p[:, None]) | (ranks == 0)
        kept = jnp.take_along_axis(keep, jnp.argsort(order, axis=-1), axis=-1)
    if sampling.min_p is not None:
        top = jnp.max(logits, axis=-1, keepdims=True)
        kept &= logits >= top + jnp.log(sampling.min_p)[:, None]
    return kept
