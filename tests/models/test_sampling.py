"""Sampling: what is kept, what is drawn, and what its log-probabilities mean."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import jit

from replayssm_jax.sampling import Sampling, draw, row_keys

B, V = 3, 12
LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(B, V)) * 2, jnp.float32)


def draw_once(sampling, logits, keys, positions, seen=None):
    return draw(sampling, logits, keys=keys, positions=positions, seen=seen)


drawn = jit(draw_once)


def draw_many(n=400, logits=LOGITS, seen=None, **options):
    """Draws at n positions of every row."""
    sampling = Sampling(**options).checked(B)
    keys = row_keys(jax.random.key(0), B)
    many = jit(jax.vmap(lambda at: draw_once(sampling, logits, keys, jnp.full(B, at), seen)))
    return many(jnp.arange(n, dtype=jnp.int32))


def softmax(x):
    x = np.asarray(x, np.float64)
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def kept_by_hand(probs, top_k=None, top_p=None, min_p=None):
    kept = np.ones_like(probs, bool)
    for i, row in enumerate(probs):
        order = np.argsort(-row, kind="stable")
        if top_k is not None:
            kept[i, order[top_k:]] = False
        if top_p is not None:
            ranked = np.where(kept[i, order], row[order], 0)
            before = np.cumsum(ranked / ranked.sum()) - ranked / ranked.sum()
            kept[i, order[before >= top_p]] = False
        if min_p is not None:
            kept[i] &= row >= min_p * row.max()
    return kept


@pytest.mark.parametrize(
    "truncation",
    [
        {},
        dict(top_k=3),
        dict(top_p=0.7),
        dict(min_p=0.2),
        dict(top_k=5, top_p=0.8, min_p=0.1),
        dict(top_k=1),
        dict(top_p=1e-6),
    ],
    ids=str,
)
def test_draws_follow_the_truncated_distribution(truncation):
    temperature = 1.3
    result = draw_many(1000, temperature=temperature, **truncation)
    probs = softmax(LOGITS / temperature)
    kept = kept_by_hand(probs, **truncation)
    target = np.where(kept, probs, 0)
    target /= target.sum(-1, keepdims=True)
    for i in range(B):
        tokens = np.asarray(result.token[:, i])
        counts = np.bincount(tokens, minlength=V)
        assert not counts[~kept[i]].any()
        expected = 1000 * target[i][kept[i]]
        chi2 = ((counts[kept[i]] - expected) ** 2 / expected).sum()
        assert chi2 <= 40, chi2
        np.testing.assert_allclose(
            result.logprob[:, i], np.log(probs[i, tokens]), rtol=1e-4, atol=1e-5
        )
        np.testing.assert_allclose(
            result.sampling_logprob[:, i], np.log(target[i, tokens]), rtol=1e-4, atol=1e-5
        )


def test_greedy_and_temperature_zero():
    sampling = Sampling().checked(B)
    greedy = drawn(sampling, LOGITS, None, None)
    mixed = draw_many(20, temperature=jnp.array([0.0, 5.0, 0.0]))
    best = np.argmax(LOGITS, -1)
    np.testing.assert_array_equal(greedy.token, best)
    np.testing.assert_array_equal(mixed.token[:, 0], best[0])
    np.testing.assert_array_equal(mixed.token[:, 2], best[2])
    assert len(set(np.asarray(mixed.token[:, 1]))) > 3
    expected = np.log(softmax(LOGITS)[np.arange(B), best])
    np.testing.assert_allclose(greedy.logprob, expected, rtol=1e-5)
    np.testing.assert_allclose(mixed.logprob[0, [0, 2]], expected[[0, 2]], rtol=1e-5)
    assert not np.asarray(greedy.sampling_logprob).any()
    assert not np.asarray(mixed.sampling_logprob[:, [0, 2]]).any()


def test_repetition_penalty():
    seen = jnp.zeros((B, V), bool).at[:, ::2].set(True)
    result = draw_many(50, temperature=1.0, repetition_penalty=1.5, seen=seen)
    logits = np.asarray(LOGITS)
    penalised = np.where(seen, np.where(logits > 0, logits / 1.5, logits * 1.5), logits)
    tokens = np.asarray(result.token)
    rows = np.arange(B)[None]
    np.testing.assert_allclose(
        result.sampling_logprob, np.log(softmax(penalised))[rows, tokens], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        result.logprob, np.log(softmax(logits))[rows, tokens], rtol=1e-4, atol=1e-5
    )


def test_a_row_depends_on_its_key_and_position_alone():
    sampling = Sampling(temperature=1.0, top_p=0.9).checked(B)
    keys = jax.random.split(jax.random.key(1), B)
    positions = jnp.array([3, 9, 4], jnp.int32)
    base = drawn(sampling, LOGITS, keys, positions)
    order = jnp.array([2, 0, 1])
    moved = drawn(sampling, LOGITS[order], keys[order], positions[order])
    np.testing.assert_array_equal(moved.token, base.token[order])
    beside_nan = drawn(sampling, LOGITS.at[1:].set(jnp.nan), keys, positions)
    assert int(beside_nan.token[0]) == int(base.token[0])


def test_keys():
    single = row_keys(jax.random.key(0), B)
    assert single.shape == (B,)
    assert len(set(map(str, jax.random.key_data(single)))) == B
    legacy = row_keys(jax.random.PRNGKey(0), B)
    np.testing.assert_array_equal(jax.random.key_data(single), jax.random.key_data(legacy))
    assert row_keys(None, B) is None
    with pytest.raises(ValueError, match="key must be one key or one for each of 3 rows"):
        row_keys(jax.random.split(jax.random.key(0), 2), B)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(temperature=-1.0), "temperature must be at least 0"),
        (dict(top_k=0), "top_k must be at least 1"),
        (dict(top_p=0.0), "top_p must be in"),
        (dict(min_p=1.5), "min_p must be in"),
        (dict(repetition_penalty=0.0), "repetition_penalty must be above 0"),
        (dict(repetition_penalty=1e-50), "above 0 and finite in float32, found 1e-50"),
        (dict(repetition_penalty=1e50), r"above 0 and finite in float32, found 1e\+50"),
        (dict(top_k=[1, 2]), "top_k must be a scalar or"),
        (dict(top_k=2**40), "top_k must fit in int32, found 1099511627776"),
    ],
)
def test_impossible_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options).checked(B)


@pytest.mark.parametrize("value", ["1", True])
def test_options_are_numbers(value):
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        with pytest.raises(TypeError, match=f"{name} must be a number, found {value!r}"):
            Sampling(**{name: value}).checked(B)
    with pytest.raises(TypeError, match=r"top_k must be integer, found (bool|'1')"):
        Sampling(top_k=value).checked(B)


@pytest.mark.parametrize("options", [{}, dict(top_k=5, top_p=0.8, min_p=0.1)], ids=str)
@pytest.mark.parametrize("temperature", [1e-40, 1e-30])
def test_a_temperature_near_zero_is_greedy(temperature, options):
    result = draw_many(20, temperature=temperature, **options)
    np.testing.assert_array_equal(result.token, np.broadcast_to(np.argmax(LOGITS, -1), (20, B)))
    assert not np.asarray(result.sampling_logprob).any()
    if temperature == 1e-30:  # devices may take a smaller one for 0, which counts as 1
        assert not np.asarray(result.logprob).any()
    assert np.isfinite(result.logprob).all()


@pytest.mark.parametrize("penalty", [1e-40, 1e-30, 1e38])
def test_extreme_penalties_keep_a_distribution(penalty):
    for seen in (jnp.arange(V) % 2 == 0, jnp.ones(V, bool)):
        seen = jnp.broadcast_to(seen, (B, V))
        result = draw_many(20, temperature=0.7, repetition_penalty=penalty, seen=seen)
        assert np.isfinite(result.sampling_logprob).all()
