"""Stacked and scanned layers: the same model, compiled in a time that does not grow with depth."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import (
    assert_close,
    commit,
    decode,
    forward,
    jit,
    make_model,
    prefill,
    random_tokens,
    verify,
)

import replayssm_jax as rs
from replayssm_jax.models import stack_layers, unstack_layers

B, T, SIZE = 3, 24, 32


@pytest.fixture(scope="module")
def stacked():
    return make_model("gated_delta_net", pattern="MAMAM", scan_layers=True, replay_window=4)


@pytest.fixture(scope="module")
def expected(stacked):
    return np.asarray(forward(unstack_layers(stacked), random_tokens(B, T)))


def test_stacking_and_unstacking_move_parameters_only(stacked):
    again = stack_layers(unstack_layers(stacked))
    assert again.config == stacked.config
    assert jax.tree.structure(again) == jax.tree.structure(stacked)
    for one, two in zip(jax.tree.leaves(again), jax.tree.leaves(stacked), strict=True):
        np.testing.assert_array_equal(one, two)
    assert [count for _, count in stacked.config.segments] == [2, 1]


def test_training_forward_and_gradients(stacked, expected):
    assert_close(forward(stacked, random_tokens(B, T)), expected)
    model = make_model("mamba2", pattern="MM", scan_layers=True, remat=True)
    grads = jit(jax.grad(lambda m, tokens: jnp.mean(m(tokens) ** 2)))(model, random_tokens(B, 8))
    flat = jit(jax.grad(lambda m, tokens: jnp.mean(m(tokens) ** 2)))(
        unstack_layers(model), random_tokens(B, 8)
    )
    found = grads.blocks[0].mixers[0].in_proj.kernel[...]
    assert_close(found[0], flat.blocks[0].mixers[0].in_proj.kernel[...])
    assert_close(found[1], flat.blocks[1].mixers[0].in_proj.kernel[...])


@pytest.mark.parametrize("decoding", ["ragged", "scalar", "recurrent"])
def test_decoding(stacked, expected, decoding):
    options = {"ragged": decoding != "scalar"}
    if decoding == "recurrent":
        options = {"decode": "recurrent"}
    tokens = random_tokens(B, T)
    cache = stacked.init_cache(B, SIZE, **options)
    if decoding != "scalar":
        assert all(leaf.shape[0] == B for leaf in jax.tree.leaves(cache))
    first, cache = prefill(stacked, tokens[:, :5], cache)
    rest, cache = decode(stacked, tokens[:, 5:], cache)
    assert_close(np.concatenate([first, rest], axis=1), expected)


def test_rows_on_their_own_schedules(stacked, expected):
    tokens = random_tokens(B, T)
    cache, at = stacked.init_cache(B, SIZE), np.zeros(B, int)
    rng = np.random.default_rng(0)
    for _ in range(8):
        lengths = np.minimum(rng.choice([0, 1, 3, 4], size=B), T - at)
        accepted = rng.integers(0, lengths + 1)
        drafts = np.zeros((B, 4), np.int32)
        for b in range(B):
            drafts[b, : accepted[b]] = tokens[b, at[b] : at[b] + accepted[b]]
        logits, cache = verify(stacked, jnp.asarray(drafts), cache, jnp.asarray(lengths))
        cache = commit(stacked, cache, jnp.asarray(accepted, jnp.int32))
        for b in range(B):
            assert_close(logits[b, : accepted[b]], expected[b, at[b] : at[b] + accepted[b]])
        at += accepted


def test_idle_rows_keep_their_drafts():
    """Where no block stands by itself behind the scan."""
    model = make_model("gated_delta_net", pattern="MAMA", scan_layers=True, replay_window=4)
    tokens = random_tokens(B, 8)
    expected = np.asarray(forward(unstack_layers(model), tokens))
    _, cache = prefill(model, tokens[:, :5], model.init_cache(B, SIZE))
    for lengths in ([2, 2, 1], [0, 1, 0]):
        _, cache = verify(model, tokens[:, 5:7], cache, jnp.array(lengths))
    at = jnp.array([2, 1, 1], jnp.int32)
    cache = commit(model, cache, at)
    logits, _ = verify(model, tokens[jnp.arange(B), 5 + at][:, None], cache)
    assert_close(logits[:, 0], expected[np.arange(B), 5 + at])


def test_windowed_loop(stacked, expected):
    @jit
    def run(model, tokens, cache):
        def body(cache, token):
            logits, cache = model.step(token, cache)
            return cache, logits

        return rs.scan_steps(body, cache, tokens.T, window=4)

    _, logits = run(stacked, random_tokens(B, T), stacked.init_cache(B, SIZE, ragged=False))
    assert_close(jnp.moveaxis(logits, 0, 1), expected)


def test_a_step_writes_no_checkpoint_in_the_scan(stacked):
    """What is due is flushed before it, for all layers at once."""
    cache = stacked.init_cache(B, SIZE, ragged=False)
    step = jax.jit(lambda m, t, c: m.step(t, c), donate_argnums=2)
    text = step.lower(stacked, random_tokens(B, 1)[:, 0], cache).compile().as_text()
    shape = ",".join(map(str, cache.layers[0][0].state.checkpoint.shape))
    assert f"f32[{shape}]" in text
    assert not re.findall(rf"= f32\[{shape}\]\S* (?:dynamic-update-slice|copy)\(", text)


def lowered(depth):
    model = make_model("gated_delta_net", pattern="MA" * (depth // 2), scan_layers=True)
    cache = model.init_cache(B, SIZE)
    tokens = random_tokens(B, 1)[:, 0]
    return jax.jit(lambda m, t, c: m.step(t, c), donate_argnums=2).lower(model, tokens, cache)


def test_program_size_does_not_grow_with_depth():
    sizes = [len(lowered(depth).as_text()) for depth in (8, 48)]
    assert sizes[1] <= 1.05 * sizes[0], sizes
