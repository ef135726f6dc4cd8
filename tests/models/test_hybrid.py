"""HybridLM: every way through a sequence gives the logits of the training forward."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import checkify
from model_cases import (
    FAMILIES,
    V,
    assert_close,
    commit,
    decode,
    forward,
    insert,
    jit,
    make_config,
    make_model,
    prefill,
    random_tokens,
    reset,
    row,
    state_of,
    step,
    take,
    verify,
)
from random_modules import assert_takes_lists

import replayssm_jax as rs
from replayssm_jax.models import AttentionConfig, GatedDeltaNetConfig, HybridLM, LayerConfig

# Few shapes, so that little is compiled.
B, T, P, SIZE = 3, 40, 17, 64


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def all_real(n):
    return jnp.full((B,), n, jnp.int32)


@pytest.mark.parametrize("decoding", ["replay", "recurrent"])
def test_prefill_and_steps_equal_the_forward(family, decoding):
    model = make_model(family)
    tokens = random_tokens(B, T)
    expected = forward(model, tokens)
    assert expected.dtype == jnp.float32
    cache = model.init_cache(B, SIZE, decode=decoding)
    first, cache = prefill(model, tokens[:, :P], cache, all_real(P))
    rest, cache = decode(model, tokens[:, P:], cache)
    assert_close(np.concatenate([first, rest], axis=1), expected)
    np.testing.assert_array_equal(cache.progress.position, T)


@functools.cache
def conventional(family):
    """Logits of conventional decoding, token by token."""
    model = make_model(family)
    cache = model.init_cache(B, SIZE, decode="recurrent")
    return decode(model, random_tokens(B, T), cache)[0]


def schedule(model, tokens, expected, draw_lengths, draw_accepted, num_rounds):
    """Verify and commit by a schedule; drafts beyond the accepted ones are wrong tokens."""
    at = np.zeros(B, int)
    cache = model.init_cache(B, SIZE)
    for i in range(num_rounds):
        lengths = np.minimum(draw_lengths(i), T - at)
        accepted = np.minimum(draw_accepted(i), lengths)
        drafts = np.zeros((B, 4), np.int32)
        for b in range(B):
            drafts[b] = np.resize(np.asarray(tokens[b, at[b] : at[b] + 4]), 4) if at[b] < T else 0
            drafts[b, accepted[b] :] = (drafts[b, accepted[b] :] + 1 + i) % V
        logits, cache = verify(model, jnp.asarray(drafts), cache, jnp.asarray(lengths, jnp.int32))
        cache = commit(model, cache, jnp.asarray(accepted, jnp.int32))
        for b in range(B):
            n = accepted[b]
            assert_close(logits[b, :n], expected[b, at[b] : at[b] + n])
            best = np.argmax(expected[b, at[b] : at[b] + n], -1)
            np.testing.assert_array_equal(np.argmax(logits[b, :n], -1), best)
        at += accepted
    np.testing.assert_array_equal(cache.progress.position, at)
    return cache, at


@pytest.mark.parametrize("accepted", range(5))
def test_fully_and_partly_rejected_drafts(family, accepted):
    model = make_model(family)
    tokens = random_tokens(B, T)
    expected = conventional(family)
    schedule(model, tokens, expected, lambda _: np.full(B, 4), lambda _: np.full(B, accepted), 8)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_prompts(family, side):
    """Lengths 1, 3, 17 in one batch, continued: states and logits of the unpadded prompts."""
    model = make_model(family)
    counts = np.array([1, 3, P])
    tokens = random_tokens(B, T)
    padded = np.full((B, P), V - 1, np.int32)
    valid = np.zeros((B, P), bool)
    for b, n in enumerate(counts):
        first = P - n if side == "left" else 0
        padded[b, first : first + n] = tokens[b, :n]
        valid[b, first : first + n] = True
    masks = {"valid": jnp.asarray(valid)}
    if side == "right":
        masks = {"lengths": jnp.asarray(counts, jnp.int32)}
    logits, cache = prefill(model, jnp.asarray(padded), model.init_cache(B, SIZE), **masks)
    assert not np.asarray(logits)[~valid].any()
    expected = forward(model, tokens)
    following = jnp.stack([tokens[b, n : n + 5] for b, n in enumerate(counts)])
    more, cache = decode(model, following, cache)
    _, alone = decode(model, tokens[:, : counts[1] + 5], model.init_cache(B, SIZE))
    assert_close(state_of(model, cache)[1], state_of(model, alone)[1])
    for b, n in enumerate(counts):
        assert_close(logits[b][valid[b]], expected[b, :n])
        assert_close(more[b], expected[b, n : n + 5])


def test_padded_prompts_chunk_by_chunk(family):
    """A row that has run out of tokens waits, whatever the others do."""
    model = make_model(family)
    tokens = random_tokens(B, T)
    counts, chunk = np.array([1, 12, 2 * P]), P
    cache, logits = model.init_cache(B, SIZE), []
    for at in range(0, 2 * P, chunk):
        lengths = jnp.asarray(np.clip(counts - at, 0, chunk), jnp.int32)
        part, cache = prefill(model, tokens[:, at : at + chunk], cache, lengths)
        logits.append(part)
    logits = np.concatenate(logits, axis=1)
    expected = forward(model, tokens)
    np.testing.assert_array_equal(cache.progress.position, counts)
    following = jnp.stack([tokens[b, n : n + 5] for b, n in enumerate(counts)])
    more, _ = decode(model, following, cache)
    for b, n in enumerate(counts):
        assert_close(logits[b, :n], expected[b, :n])
        assert not logits[b, n:].any()
        assert_close(more[b], expected[b, n : n + 5])


def test_last_logits_alone():
    model = make_model("kda")
    valid = np.arange(P) >= np.array([[P - 3], [P], [0]])
    args = (model, random_tokens(B, P), model.init_cache(B, SIZE))
    every, cache = prefill(*args, valid=jnp.asarray(valid))
    last, same = prefill(*args, valid=jnp.asarray(valid), last_only=True)
    assert_close(last, every[:, -1])
    assert not np.asarray(last[1]).any()
    chex.assert_trees_all_close(cache, same, atol=1e-6)


def test_packed_documents(family):
    """Resets in training and in prefill: each document as if it were alone."""
    model = make_model(family)
    tokens = random_tokens(B, T)
    resets = np.zeros((B, T), bool)
    resets[0, [0, 7, 8, 30]] = True
    resets[1, T - 5] = True
    masks = {"resets": jnp.asarray(resets)}
    logits = forward(model, tokens, **masks)
    cached, cache = prefill(model, tokens, model.init_cache(B, SIZE), **masks)
    assert_close(cached, logits)
    alone = forward(model, tokens.at[0, :10].set(tokens[0, 30:]).at[1, :5].set(tokens[1, T - 5 :]))
    assert_close(logits[0, 30:], alone[0, :10])
    assert_close(logits[1, T - 5 :], alone[1, :5])
    np.testing.assert_array_equal(cache.progress.position, [10, 5, T])


def test_fork_at_every_fill(family):
    """Children of every ring fill go their own ways over a flush; the parent goes on as it was."""
    model = make_model(family)
    tokens, following = random_tokens(B, T), model.config.replay_window + 1
    expected = np.asarray(forward(model, tokens))
    cache = model.init_cache(B, SIZE)
    for fill in range(2 * model.config.replay_window):
        children = take(model, cache, jnp.zeros(B, jnp.int32))
        streams = np.array(tokens)
        streams[[0, 2]] = tokens[0]
        streams[1, :fill] = tokens[0, :fill]
        logits, _ = decode(model, jnp.asarray(streams[:, fill : fill + following]), children)
        wanted = np.asarray(forward(model, streams))
        assert_close(logits, wanted[:, fill : fill + following])
        assert not np.allclose(logits[0], logits[1])
        parent, cache = step(model, tokens[:, fill], cache)
        assert_close(parent, expected[:, fill])


# A read copy under one rule and the other.
SLOTS = [(family, None) for family in FAMILIES] + [("mamba2", "int8"), ("kda", "int8")]


def rows_equal(found, expected, *rows):
    """Bit for bit, what counts of the given rows of two caches of a model."""
    for b in rows:
        chex.assert_trees_all_equal(row(found, b), row(expected, b))


@pytest.mark.parametrize("family, read_dtype", SLOTS)
def test_slots_are_reused_without_a_trace(family, read_dtype):
    """Insert and reset: a slot equals a fresh one, bad slots touch no row, neighbours stay."""
    model = make_model(family, read_dtype=read_dtype)
    tokens = random_tokens(B, T)
    _, pool = decode(model, tokens[:, :13], model.init_cache(B, SIZE))
    _, guests = prefill(model, tokens[:, 20 : 20 + P], model.init_cache(B, SIZE), all_real(P))
    same = insert(model, pool, jnp.array([-1, B, B + 2]), guests)
    chex.assert_trees_all_equal(pool, same)
    filled = insert(model, pool, jnp.array([2, -1, B]), guests)
    rows_equal(filled, pool, 0, 1)
    chex.assert_trees_all_equal(row(filled, 2), row(guests, 0))
    emptied = reset(model, filled, jnp.array([False, True, False]))
    rows_equal(emptied, filled, 0, 2)
    lengths = jnp.array([0, P, 0], jnp.int32)
    prompt = tokens[:, :P]
    _, pool = prefill(model, prompt, emptied, lengths)
    _, fresh = prefill(model, prompt, model.init_cache(B, SIZE), lengths)
    rows_equal(pool, emptied, 0, 2)
    after, _ = decode(model, tokens[:, P : P + 10], pool)
    expected, _ = decode(model, tokens[:, P : P + 10], fresh)
    undisturbed, _ = decode(model, tokens[:, P : P + 10], filled)
    np.testing.assert_array_equal(after[[0, 2]], undisturbed[[0, 2]])
    assert_close(after[1], expected[1])
    assert_close(state_of(model, pool)[1], state_of(model, fresh)[1], limit=1e-6)
    empty = take(model, pool, jnp.array([1, -1, 0]))
    np.testing.assert_array_equal(empty.progress.position[:2], [P, 0])


@pytest.mark.parametrize("family, read_dtype", SLOTS[1:])
def test_preempted_rows_continue(family, read_dtype):
    """A row taken out continues bit for bit; recomputed from its tokens, within rounding."""
    model = make_model(family, read_dtype=read_dtype)
    tokens, guest = random_tokens(B, T), random_tokens(B, T, seed=9)
    _, cache = prefill(model, tokens[:, :P], model.init_cache(B, SIZE), all_real(P))
    undisturbed, _ = decode(model, tokens[:, P : P + 13], cache)
    _, cache = decode(model, tokens[:, P : P + 3], cache)
    saved = take(model, cache, jnp.array([1, -1, -1]))
    one = jnp.array([False, True, False])
    only = one.astype(jnp.int32)
    busy = reset(model, cache, one)
    _, busy = prefill(model, guest[:, :P], busy, P * only)
    for t in range(P, P + 5):
        _, busy = step(model, guest[:, t], busy, only)
    rest = tokens[:, P + 3 : P + 13]
    resumed = insert(model, busy, jnp.array([1, -1, -1]), saved)
    logits, _ = decode(model, rest, resumed)
    np.testing.assert_array_equal(logits, undisturbed[:, 3:])
    again, fresh = reset(model, busy, one), model.init_cache(B, SIZE)
    for at, n in ((0, P), (P, 3)):
        again, fresh = (
            prefill(model, tokens[:, at : at + P], c, n * only)[1] for c in (again, fresh)
        )
    logits, _ = decode(model, rest, again)
    np.testing.assert_array_equal(logits[[0, 2]], undisturbed[[0, 2], 3:])
    assert_close(logits[1], decode(model, rest, fresh)[0][1])
    # A prompt is folded at other times than steps, and each fold rounds the copy anew.
    assert_close(logits[1], undisturbed[1, 3:], limit=2e-2 if read_dtype else 3e-5)


def test_a_row_is_released_while_drafts_are_pending(family):
    """Its next tenant sees none of them, and the drafts of the other rows can still be accepted."""
    model = make_model(family)
    tokens, guest = random_tokens(B, T), random_tokens(B, T, seed=9)
    expected = np.array(forward(model, tokens))
    expected[1] = forward(model, guest)[1]
    _, cache = prefill(model, tokens[:, :P], model.init_cache(B, SIZE), all_real(P))
    _, cache = verify(model, tokens[:, P : P + 4], cache)
    cache = reset(model, cache, jnp.array([False, True, False]))
    _, cache = prefill(model, guest[:, :P], cache, jnp.array([0, P, 0], jnp.int32))
    cache = commit(model, cache, jnp.array([2, 4, 1], jnp.int32))
    at = np.array([P + 2, P, P + 1])
    np.testing.assert_array_equal(cache.progress.position, at)
    streams = np.array(tokens)
    streams[1] = guest[1]
    rows = np.arange(B)
    for _ in range(model.config.replay_window + 1):
        logits, cache = step(model, jnp.asarray(streams[rows, at]), cache)
        assert_close(logits, expected[rows, at])
        at += 1


def test_a_windowed_loop_drops_the_drafts_of_idle_rows_everywhere():
    """Rings, convolutions and KV caches still agree, even if the drafts are accepted after it."""
    model = make_model("gated_delta_net")
    tokens = random_tokens(B, T)
    expected = forward(model, tokens)

    @jit
    def run(model, tokens, cache):
        def body(cache, token):
            live = jnp.array([1, 0, 1], jnp.int32)
            logits, cache = model.verify(token[:, None], cache, lengths=live)
            return cache, logits

        return rs.scan_steps(body, cache, tokens.T, window=8)[0]

    _, cache = prefill(model, tokens[:, :P], model.init_cache(B, SIZE), all_real(P))
    _, cache = verify(model, tokens[:, P : P + 4], cache)
    cache = run(model, tokens[:, P : P + 1], cache)
    cache = commit(model, cache, jnp.array([1, 3, 1], jnp.int32))
    at = np.array([P + 1, P, P + 1])
    np.testing.assert_array_equal(cache.progress.position, at)
    logits, _ = step(model, tokens[np.arange(B), at], cache)
    assert_close(logits, expected[np.arange(B), at])


def test_bf16_model_keeps_fp32_checkpoints_and_agrees_with_conventional_decoding(family):
    """Greedy tokens under teacher forcing: replay and conventional bf16 decoding differ in no more
    than 2% of the positions, since both round the same bf16 activations around an fp32 state."""
    model = make_model(family, dtype=jnp.bfloat16)
    cache, plain = model.init_cache(B, SIZE), model.init_cache(B, SIZE, decode="recurrent")
    assert cache.layers[0][0].state.checkpoint.dtype == jnp.float32
    assert cache.layers[0][0].history.dtype == cache.layers[1][0].key.dtype == jnp.bfloat16
    differing, total = 0, 0
    for seed in range(4):
        tokens = random_tokens(B, SIZE, seed)
        logits, _ = decode(model, tokens, cache)
        expected, _ = decode(model, tokens, plain)
        differing += int(np.sum(np.argmax(logits, -1) != np.argmax(expected, -1)))
        total += tokens.size
    assert differing <= 0.02 * total, (differing, total)


@pytest.mark.parametrize("ragged", [False, True], ids=["scalar", "ragged"])
def test_windowed_loops_give_the_same_logits(ragged):
    model = make_model("gated_delta_net")
    tokens = random_tokens(B, T)
    expected = forward(model, tokens)

    @jit
    def run(model, tokens, cache):
        def body(cache, token):
            logits, cache = model.step(token, cache)
            return cache, logits

        return rs.scan_steps(body, cache, tokens.T, window=8)

    _, logits = run(model, tokens, model.init_cache(B, SIZE, ragged=ragged))
    assert_close(jnp.moveaxis(logits, 0, 1), expected)


def test_rows_that_moved_together_are_inserted_as_others():
    """A batch that was prefilled with one pointer goes on in slots that have their own."""
    model, tokens, found = make_model("gated_delta_net"), random_tokens(B, 5), []
    for ragged in (True, False):
        _, batch = prefill(model, tokens, model.init_cache(B, SIZE, ragged=ragged))
        _, batch = step(model, tokens[:, 0], batch)
        pool = model.insert(model.init_cache(B + 1, SIZE), jnp.arange(B) + 1, batch)
        found.append(step(model, random_tokens(B + 1, 1)[:, 0], pool)[0][1:])
    assert_close(*found)


def test_rows_are_inserted_in_a_windowed_loop():
    model = make_model("gated_delta_net")
    tokens = random_tokens(B, T)
    _, other = prefill(model, tokens[:, :P], model.init_cache(B, SIZE), all_real(P))

    @jit
    def run(model, tokens, cache, other):
        def body(carry, token):
            t, cache = carry
            cache = model.insert(cache, jnp.where(t == 3, jnp.arange(B), -1), other)
            logits, cache = model.step(token, cache)
            return (t + 1, cache), logits

        return rs.scan_steps(body, (jnp.int32(0), cache), tokens.T, window=8)[1]

    fed = jnp.concatenate([tokens[:, :3], tokens[:, P:]], axis=1)
    logits = run(model, fed, model.init_cache(B, SIZE), other)
    assert_close(jnp.moveaxis(logits, 0, 1)[:, 3:], forward(model, tokens)[:, P:])


def test_layers_side_by_side_moe_and_post_norm():
    layers = (
        LayerConfig(("mamba2", "attention"), "moe"),
        LayerConfig(("gated_delta_net",), None, "post"),
        LayerConfig((), "relu2"),
        LayerConfig(("kda",), "swiglu", "post"),
    )
    model = make_model(
        "kda", layers=layers, tie_embeddings=False, residual_scale=0.7, logit_scale=0.5
    )
    tokens = random_tokens(B, T)
    expected = forward(model, tokens)
    logits, _ = decode(model, tokens, model.init_cache(B, SIZE))
    assert_close(logits, expected)


def test_attention_only_model():
    model = make_model("kda", pattern="AA")
    tokens = random_tokens(B, T)
    cache = model.init_cache(B, SIZE)
    assert cache.pointer is None
    logits, cache = decode(model, tokens, cache)
    assert_close(logits, forward(model, tokens))
    cache = model.reset(cache, jnp.array([True, False, False]))
    np.testing.assert_array_equal(cache.progress.position, [0, T, T])


@pytest.mark.parametrize(
    "family, remat", [("mamba2", False), ("gated_delta_net", False), ("kda", True)]
)
def test_training_gradients(family, remat):
    model = make_model(family, remat=remat, mlp="swiglu")
    tokens = random_tokens(2, 12)

    def loss(model):
        logits = model(tokens[:, :-1])
        logprobs = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1))

    value, grads = jit(jax.value_and_grad(loss))(model)
    assert np.isfinite(value)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        norm = float(np.linalg.norm(grad))
        assert np.isfinite(norm) and norm > 0, jax.tree_util.keystr(path)


def test_initialisation_is_that_of_the_field():
    model = HybridLM(make_config("mamba2", mlp="swiglu"), rngs=nnx.Rngs(0))
    mixer = model.blocks[0].mixers[0]
    rate, dt = np.exp(mixer.A_log[...]), np.log1p(np.exp(mixer.dt_bias[...]))
    assert ((rate >= 1) & (rate <= 16)).all()
    assert ((dt >= 0.99e-3) & (dt <= 0.101)).all()
    down = model.blocks[0].mlp.down_proj.kernel[...]
    up = model.blocks[0].mlp.up_proj.kernel[...]
    # Four branches join the residual stream, so each is scaled by 4^-1/2.
    assert float(jnp.std(down) / jnp.std(up)) == pytest.approx(0.5, rel=0.25)


def test_leaves_are_batch_first_and_steps_trace_once():
    model = make_model("gated_delta_net")
    cache = model.init_cache(B, SIZE)
    assert all(leaf.shape[0] == B for leaf in jax.tree.leaves(cache))

    @chex.assert_max_traces(n=1)
    def traced(model, tokens, cache):
        return model.step(tokens, cache)

    one = jit(traced, donate_argnums=2)
    for seed in range(3):
        model = make_model("gated_delta_net", seed)
        cache = model.init_cache(B, SIZE)
        for t in range(3):
            _, cache = one(model, random_tokens(B, T)[:, t], cache)


def test_cache_lives_in_an_nnx_cache_or_in_a_pure_dict():
    """One Variable that holds a pytree; split, made pure, donated and merged at every step."""
    model = make_model("mamba2")
    tokens = random_tokens(B, T)

    class Holder(nnx.Module):
        def __init__(self, model):
            self.model = model
            self.cache = nnx.Cache(model.init_cache(B, SIZE))

        def __call__(self, tokens):
            logits, cache = self.model.step(tokens, self.cache.get_value())
            self.cache.set_value(cache)
            return logits

    graphdef, params, caches = nnx.split(Holder(model), nnx.Param, nnx.Cache)

    def one(params, pure, tokens):
        state = jax.tree.map(lambda x: x, caches)
        nnx.replace_by_pure_dict(state, pure)
        holder = nnx.merge(graphdef, params, state)
        logits = holder(tokens)
        return logits, nnx.to_pure_dict(nnx.state(holder, nnx.Cache))

    one = jit(one, donate_argnums=1)
    pure = nnx.to_pure_dict(jax.tree.map(jnp.copy, caches))
    expected = forward(model, tokens)
    for t in range(2 * model.config.replay_window):
        logits, pure = one(params, pure, tokens[:, t])
        assert_close(logits, expected[:, t])


def test_sequences_without_a_token():
    model = make_model("kda")
    none = jnp.zeros((B, 0), jnp.int32)
    assert model(none).shape == (B, 0, V)
    assert model(jnp.zeros((0, 5), jnp.int32)).shape == (0, 5, V)
    cache = model.init_cache(B, SIZE)
    logits, same = model.prefill(none, cache)
    assert logits.shape == (B, 0, V)
    chex.assert_trees_all_equal(cache, same)


def test_impossible_arguments_raise():
    model = make_model("kda")
    tokens = random_tokens(B, 5)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        model.init_cache(0, SIZE, decode="recurrent")
    for args, error, message in [
        ((B, 0), ValueError, "size must be at least 1, found 0"),
        ((B, 64.0), TypeError, "size must be an int, found 64.0"),
        ((B, SIZE, jnp.int32), TypeError, "dtype must be a floating dtype, found int32"),
        ((B, SIZE, "bf16"), TypeError, "dtype must be a floating dtype, found 'bf16'"),
        ((B, SIZE, jnp.float8_e5m2), ValueError, "16 bits or more, found float8_e5m2"),
    ]:
        with pytest.raises(error, match=message):
            model.init_cache(*args)
    for other, message in [
        (model.init_cache(1, SIZE, jnp.bfloat16), r"bfloat16 into float32 at \.layers\[0\]"),
        (model.init_cache(1, 2 * SIZE), r"shape \(1, .* into \(3, .* at \.layers\[.*same size"),
    ]:
        with pytest.raises(ValueError, match="cannot insert rows of " + message):
            model.insert(model.init_cache(B, SIZE), [0], other)
    with pytest.raises(ValueError, match="found one for all rows: make it with ragged=True"):
        model.insert(model.init_cache(B, SIZE, ragged=False), [0], model.init_cache(1, SIZE))
    with pytest.raises(ValueError, match="tokens have 3 rows, the cache 2"):
        model.step(tokens[:, 0], model.init_cache(2, SIZE))
    with pytest.raises(ValueError, match="the tokens need 5 positions, the cache holds 4"):
        model.prefill(tokens, model.init_cache(B, 4))
    with pytest.raises(TypeError, match="tokens must be integers, found float32"):
        model.prefill(jnp.ones((B, 2)), model.init_cache(B, SIZE))
    with pytest.raises(ValueError, match="cannot roll back"):
        model.verify(tokens[:, :2], model.init_cache(B, SIZE, decode="recurrent"))
    with pytest.raises(ValueError, match="T must be between 1 and max_tokens=4"):
        model.verify(tokens, model.init_cache(B, SIZE))
    with pytest.raises(ValueError, match=r"tokens must have shape \[B\]"):
        model.step(tokens, model.init_cache(B, SIZE))
    with pytest.raises(ValueError, match=r"tokens must have shape \[B, T\]"):
        model(tokens[0])
    with pytest.raises(ValueError, match="ragged"):
        model.reset(model.init_cache(B, SIZE, ragged=False), jnp.ones(B, bool))
    with pytest.raises(ValueError, match="ragged"):
        scalar = model.init_cache(B, SIZE, ragged=False)
        model.insert(scalar, jnp.array([0]), model.init_cache(1, SIZE, ragged=False))


def test_checkify_finds_what_only_a_run_knows():
    model = make_model("mamba2")
    tokens = random_tokens(B, 1)[:, 0]

    def loop(token, cache):
        def body(carry, _):
            logits, cache = model.step(*carry)
            return (jnp.argmax(logits, axis=-1).astype(token.dtype), cache), logits

        return jax.lax.scan(body, (token, cache), length=4)

    def commit_too_many(token, cache):
        _, cache = model.verify(token[:, None], cache)
        return model.commit(cache, token - token + jnp.array([1, 2, 0], token.dtype))

    with rs.debug_checks():
        for function, given, size, message in (
            (loop, tokens, 4, None),
            (loop, tokens, 3, "tokens past the 3 positions of the cache"),
            (loop, tokens.at[1].set(V), 4, f"tokens must lie in \\[0, {V}\\)"),
            (commit_too_many, tokens, 4, r"accepted must lie in \[0, pending\]"),
        ):
            checked = jax.jit(checkify.checkify(function))
            errors, _ = checked(given, model.init_cache(B, size))
            if message is None:
                errors.throw()
            else:
                with pytest.raises(checkify.JaxRuntimeError, match=message):
                    errors.throw()


def test_what_cannot_be_committed_or_drafted_raises_and_changes_nothing():
    """Where the values are known; compiled, the count is clipped."""
    model = make_model("mamba2")
    tokens = random_tokens(B, 4)
    full = model.init_cache(B, 6)
    _, full = prefill(model, tokens, full, jnp.array([4, 3, 2], jnp.int32))
    before = jax.tree.map(np.array, full)
    with pytest.raises(ValueError, match="the tokens need 7 positions, the cache holds 6"):
        model.verify(tokens[:, :3], full)
    with pytest.raises(ValueError, match="the tokens need 7 positions, the cache holds 6"):
        model.verify(tokens, full, lengths=jnp.array([0, 4, 4]))
    room = jnp.array([2, 3, 4], jnp.int32)
    with pytest.raises(ValueError, match="the tokens need 7 positions, the cache holds 6"):
        model.prefill(tokens, full, lengths=room + jnp.array([1, 0, 0]))
    _, filled = prefill(model, tokens, full, room)
    for lengths in (None, jnp.array([0, 1, 0])):
        with pytest.raises(ValueError, match="the tokens need 7 positions, the cache holds 6"):
            model.step(tokens[:, 0], filled, lengths=lengths)
    chex.assert_trees_all_equal(full, before)
    lengths = jnp.array([2, 3, 0], jnp.int32)
    _, drafted = verify(model, tokens, full, lengths)
    before = jax.tree.map(np.array, drafted)
    for accepted in ([3, 0, 0], [0, 0, 1], [-1, 0, 0]):
        message = rf"accepted={re.escape(str(accepted))} and pending=\[2, 3, 0\]"
        with pytest.raises(ValueError, match=message):
            model.commit(drafted, jnp.array(accepted))
    chex.assert_trees_all_equal(drafted, before)
    once = model.commit(drafted, lengths)
    np.testing.assert_array_equal(once.progress.position, [6, 6, 2])
    for again in (1, lengths):
        with pytest.raises(ValueError, match=r"pending=\[0, 0, 0\]"):
            model.commit(once, again)
    chex.assert_trees_all_equal(commit(model, once, lengths), once)
    more = commit(model, drafted, jnp.full(B, 9, jnp.int32))
    chex.assert_trees_all_equal(more.progress, once.progress)
    chex.assert_trees_all_equal(more.pointer, once.pointer)
    with pytest.raises(TypeError, match="accepted must be integer, found float64"):
        model.commit(drafted, 1.5)
    with pytest.raises(ValueError, match=r"accepted must have shape \(3,\), found \(1,\)"):
        model.commit(drafted, jnp.array([2]))
    with pytest.raises(ValueError, match=r"lengths must lie in \[0, 2\], found \[0, 0, 3\]"):
        model.verify(tokens[:, :2], full, lengths=jnp.array([0, 0, 3]))
    with pytest.raises(TypeError, match="lengths must be integer, found float32"):
        model.verify(tokens[:, :2], full, lengths=jnp.ones(B))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda m, c: m.reset(c, jnp.array([True])), ValueError, r"where .* \(3,\), found \(1,\)"),
        (lambda m, c: m.reset(c, True), ValueError, r"where .* \(3,\), found \(\)"),
        (lambda m, c: m.reset(c, jnp.ones(B, int)), TypeError, "where must be bool, found int"),
        (lambda m, c: m.take(c, 0), ValueError, r"rows must have shape \(B',\) .*, found \(\)"),
        (lambda m, c: m.take(c, jnp.ones((1, 2), int)), ValueError, r"rows .*, found \(1, 2\)"),
        (lambda m, c: m.take(c, jnp.ones(B, bool)), TypeError, "rows must be integer, found bool"),
        (lambda m, c: m.take(c, jnp.ones(1)), TypeError, "rows must be integer, found float32"),
        (lambda m, c: m.take(c, [0, B]), ValueError, r"rows must lie in \[-1, 3\), found \[0, 3\]"),
        (lambda m, c: m.insert(c, [0, 2, 2], c), ValueError, r"distinct, found \[0, 2, 2\]"),
        (lambda m, c: m.insert(c, jnp.ones(B), c), TypeError, "slots must be integer, found float"),
        (lambda m, c: m.insert(c, [0], c), ValueError, r"slots .* \(3,\), found \(1,\)"),
        (lambda m, c: m.insert(c, [0, 1, 3], c), ValueError, r"slots must lie in \[-1, 3\), found"),
        (lambda m, c: m.insert(c, [0], None), TypeError, "other must be a HybridCache, found None"),
        (lambda m, c: m.take(None, [0]), TypeError, "cache must be a HybridCache, found NoneType"),
        (lambda m, c: m.reset(3, [True]), TypeError, "cache must be a HybridCache, found int"),
        (lambda m, c: m.commit(None, 1), TypeError, "cache must be a HybridCache, found NoneType"),
        (lambda m, c: m.step(jnp.ones(B, int), None), TypeError, "must be a HybridCache, found No"),
        (lambda m, c: m.step([1] * B, c), TypeError, "tokens must be an array, found list"),
        (lambda m, c: m.prefill([[1]] * B, c), TypeError, "tokens must be an array, found list"),
        (lambda m, c: m(None), TypeError, "tokens must be an array, found None"),
        (lambda m, c: m.logits([[1.0]]), TypeError, "hidden must be an array, found list"),
        (lambda m, c: m.embeddings([1]), TypeError, "tokens must be an array, found list"),
        (lambda m, c: m.init_cache(B, SIZE, decode="zzz"), ValueError, "decode must .* 'zzz'"),
    ],
)
def test_wrong_rows_slots_masks_and_types_raise(call, error, message):
    model = make_model("mamba2")
    with pytest.raises(error, match=message):
        call(model, model.init_cache(B, SIZE))
    if "decode" in message:
        attention = make_model("mamba2", pattern="A")
        with pytest.raises(error, match=message):
            call(attention, None)


def test_lists_are_rows_slots_and_masks():
    model = make_model("mamba2")
    cache = model.init_cache(B, SIZE)
    progress = dataclasses.replace(cache.progress, position=jnp.arange(B))
    cache = dataclasses.replace(cache, progress=progress)
    np.testing.assert_array_equal(model.take(cache, [2, -1]).progress.position, [2, 0])
    swapped = model.insert(cache, [2, -1, 0], cache)
    np.testing.assert_array_equal(swapped.progress.position, [2, 1, 0])
    emptied = model.reset(cache, [False, True, False])
    np.testing.assert_array_equal(emptied.progress.position, [0, 0, 2])
    valid, resets = [[True] * 4, [False] * 4, [False, True] * 2], [[False] * 3 + [True]] * B
    tokens = random_tokens(B, 4)
    for call, lists in [
        (lambda model, x, _, **masks: model(x, **masks), dict(valid=valid, resets=resets)),
        (HybridLM.prefill, dict(valid=valid)),
        (HybridLM.prefill, dict(valid=valid, resets=resets)),
        (HybridLM.verify, dict(lengths=[4, 0, 1])),
        (lambda model, x, *cache, **n: model.step(x[:, 0], *cache, **n), dict(lengths=[1, 0, 1])),
    ]:
        assert_takes_lists(call, (model, tokens, cache), lists)
    found = jit(lambda *operands: HybridLM.prefill(*operands, valid=valid))(model, tokens, cache)
    assert_close(found[0], prefill(model, tokens, cache, valid=jnp.asarray(valid))[0])


def test_known_values_are_checked_in_a_trace():
    """Of the caller's, which closes over them."""
    model = make_model("mamba2")
    cache, tokens = model.init_cache(B, SIZE), np.full((B, 2), V)
    _, drafted = verify(model, random_tokens(B, 2), cache)
    outside = rf"tokens must lie in \[0, {V}\), found {V}"
    for call, message in [
        (lambda: model(tokens), outside),
        (lambda: model(tokens, valid=[[False, True]] * B), outside),
        (lambda: model.prefill(tokens, cache, lengths=[1, 0, 0]), outside),
        (lambda: model.prefill(tokens, cache, valid=[[False, True]] * B), outside),
        (lambda: model.step(tokens[:, 0], cache, lengths=[0, 0, 1]), outside),
        (lambda: model.verify(tokens, cache, lengths=[0, 0, 1]), outside),
        (lambda: model.verify(tokens, cache, lengths=[0, 0, 3]), r"lengths must lie in \[0, 2\]"),
        (
            lambda: model.prefill(np.ones((B, SIZE + 2), int), cache, lengths=[SIZE + 1, 0, 0]),
            f"the tokens need {SIZE + 1} positions, the cache holds {SIZE}",
        ),
        (lambda: model.commit(drafted, [2, 3, 0]), r"accepted=\[2, 3, 0\] and pending=\[2, 2, 2"),
        (lambda: model.take(cache, [0, B]), r"rows must lie in \[-1, 3\), found \[0, 3\]"),
        (lambda: model.insert(cache, [0, 2, 2], cache), r"distinct, found \[0, 2, 2\]"),
    ]:
        for run in (call, lambda call=call: jax.eval_shape(call)):
            with pytest.raises(ValueError, match=message):
                run()


@pytest.mark.parametrize("wrong", [-1, V])
def test_tokens_outside_the_vocabulary_raise(wrong):
    """Where the values are known, and where they are real."""
    model = make_model("mamba2")
    tokens, cache = np.ones((B, T), np.int32), model.init_cache(B, SIZE)
    tokens[1, 1] = wrong
    for call in (
        model,
        functools.partial(model.prefill, cache=cache),
        lambda tokens: model.prefill(tokens, cache, lengths=jnp.full(B, 2)),
        lambda tokens: model.verify(tokens[:, :2], cache),
        lambda tokens: model.step(tokens[:, 1], cache),
    ):
        with pytest.raises(ValueError, match=rf"tokens must lie in \[0, {V}\), found {wrong}"):
            call(jnp.asarray(tokens))


def test_padding_may_hold_anything():
    """What is no token has an embedding of NaN, which must not reach those that are."""
    model = make_model("mamba2")
    tokens, valid = np.ones((B, T), np.int32), np.arange(T)[None] % 3 != np.arange(B)[:, None]
    resets = np.arange(T)[None] == np.full((B, 1), 9)
    padded = np.where(valid, tokens, V + 100)
    expected = forward(model, tokens, valid=valid, resets=resets)
    np.testing.assert_array_equal(forward(model, padded, valid=valid, resets=resets), expected)
    cache = model.init_cache(B, SIZE)
    logits, cache = prefill(model, padded, cache, valid=valid, resets=resets)
    assert_close(logits[valid], expected[valid])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(cache))


def test_rows_that_move_together_are_not_committed_apart():
    model = make_model("mamba2")
    _, drafted = verify(model, random_tokens(B, 4), model.init_cache(B, SIZE, ragged=False))
    for call in (model.commit, functools.partial(commit, model)):
        with pytest.raises(ValueError, match="a pointer for every row, found a scalar pointer"):
            call(drafted, jnp.array([1, 2, 3]))
    np.testing.assert_array_equal(commit(model, drafted, 2).progress.position, [2] * B)


def test_a_cache_of_another_max_tokens_raises():
    wide, narrow = make_model("mamba2"), make_model("mamba2", max_tokens=1)
    with pytest.raises(ValueError, match="= 7 inputs, found 4: was the cache made with another"):
        wide.verify(random_tokens(B, 2), narrow.init_cache(B, SIZE))


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(pattern="MAM"), ValueError, "the cache must have 3 layers, found 2"),
        (dict(pattern="AM"), TypeError, "cache must be a KVCache, found MixerCache"),
        (dict(pattern="MM"), TypeError, "cache must be a MixerCache, found KVCache"),
        (
            dict(
                gated_delta_net=GatedDeltaNetConfig(
                    num_key_heads=1, num_value_heads=4, key_dim=6, value_dim=4
                )
            ),
            ValueError,
            "the history must have 28 channels, found 40",
        ),
        (
            dict(attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8)),
            ValueError,
            "the cache must have 2 heads of 8, found shape",
        ),
    ],
)
def test_a_cache_of_another_model_raises_by_name(options, error, message):
    cache = HybridLM(make_config("gated_delta_net"), rngs=nnx.Rngs(0)).init_cache(B, SIZE)
    other = HybridLM(make_config("gated_delta_net", **options), rngs=nnx.Rngs(0))
    with pytest.raises(error, match=message):
        other.step(jnp.zeros(B, jnp.int32), cache)


def test_a_model_of_attention_alone_refuses_replay_layers():
    cache = HybridLM(make_config("gated_delta_net"), rngs=nnx.Rngs(0)).init_cache(B, SIZE)
    other = HybridLM(make_config("gated_delta_net", pattern="AA"), rngs=nnx.Rngs(0))
    for call in (
        lambda: other.step(jnp.zeros(B, jnp.int32), cache),
        lambda: other.reset(cache, jnp.ones(B, bool)),
        lambda: other.take(cache, jnp.arange(B)),
    ):
        with pytest.raises(ValueError, match="the cache has replay layers, this model has none"):
            call()


@pytest.mark.parametrize("how", ["replay", "snapshot"])
def test_numpy_leaves_of_a_restored_cache(how):
    """Checkpoints are often read back as NumPy arrays."""
    model = HybridLM(make_config("gated_delta_net", max_tokens=3), rngs=nnx.Rngs(0))
    tokens = random_tokens(B, 3)
    on_host = functools.partial(jax.tree.map, np.asarray)

    def run(read_back):
        logits, cache = model.prefill(tokens, read_back(model.init_cache(B, SIZE, decode=how)))
        other, cache = model.step(tokens[:, 0], read_back(cache))
        more, cache = model.verify(tokens, read_back(cache))
        cache = model.commit(read_back(cache), 2)
        cache = model.insert(read_back(cache), jnp.arange(B), read_back(cache))
        return logits, other, more, model.take(read_back(cache), jnp.arange(B))

    chex.assert_trees_all_equal(run(on_host), run(lambda cache: cache))
