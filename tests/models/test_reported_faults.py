"""Faults of comparable systems, as whole models must not have them.

What is said here is bit for bit; that committed prefixes equal plain decoding within rounding is
what the schedules of test_draft_schedules.py say. docs/speculative.md lists the faults and tests.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import (
    FAMILIES,
    V,
    assert_close,
    commit,
    make_config,
    make_model,
    prefill,
    random_tokens,
    row,
    step,
    verify,
)

from replayssm_jax.models import Mamba2Config

B, SIZE, PROMPT = 3, 48, 6


def started(model, decode="replay"):
    tokens = random_tokens(B, PROMPT)
    cache = model.init_cache(B, SIZE, decode=decode)
    return prefill(model, tokens, cache, jnp.full(B, PROMPT, jnp.int32))[1]


@pytest.mark.parametrize("decode", ["replay", "snapshot"])
def test_a_fully_rejected_row_is_as_it_was(decode):
    """What counts of every row is unchanged, and what follows is that of rows never drafted for."""
    model = make_model("gated_delta_net")
    tokens, cache = random_tokens(B, 12, seed=1), started(model, decode)
    _, drafted = verify(model, tokens[:, :4], cache)
    after = commit(model, drafted, jnp.zeros(B, jnp.int32))
    chex.assert_trees_all_equal(after.progress, cache.progress)
    chex.assert_trees_all_equal(after.pointer, cache.pointer)
    if decode == "replay":
        held = [c.layers[0][0].state.checkpoint for c in (after, cache)]
        np.testing.assert_array_equal(*held)
    for t in range(2 * model.config.replay_window):
        token = tokens[:, t % 12]
        logits, cache = step(model, token, cache)
        again, after = step(model, token, after)
        np.testing.assert_array_equal(again, logits)


@pytest.mark.parametrize("kernel", [2, 4, 6], ids=["narrow", "as wide as the drafts", "wider"])
def test_the_convolution_rolls_back_with_the_state(kernel):
    """Rows accept 0 to 4 drafts: rings and what follows are those of rows that saw no others.

    Bit for bit if these were verified, too, and but for rounding if they were plain steps.
    """
    config = make_config("mamba2")
    options = dict(num_heads=4, head_dim=4, state_dim=6, num_groups=2, conv_kernel=kernel)
    model = make_model("mamba2", pattern="M", mamba2=Mamba2Config(**options))
    assert model.config.max_tokens == config.max_tokens == 4
    accepted = jnp.arange(5, dtype=jnp.int32)
    rows = jnp.broadcast_to(random_tokens(1, 16, seed=2), (5, 16))
    wrong = jnp.where(jnp.arange(4)[None] < accepted[:, None], rows[:, :4], (rows[:, :4] + 1) % V)
    cache = jax.tree.map(lambda x: x[jnp.zeros(5, jnp.int32)], started(model))
    _, drafted = verify(model, wrong, cache, jnp.full(5, 4, jnp.int32))
    _, right = verify(model, rows[:, :4], cache, accepted)
    after, same = (commit(model, c, accepted) for c in (drafted, right))
    plain = cache
    for t in range(4):
        _, plain = step(model, rows[:, t], plain, (t < accepted).astype(jnp.int32))
    position, width = np.asarray(plain.progress.position), kernel - 1
    np.testing.assert_array_equal(position, PROMPT + accepted)
    for other in (after, same):
        chex.assert_trees_all_equal(other.progress, plain.progress)
    histories = [np.asarray(c.layers[0][0].history) for c in (after, same, plain)]
    for b in range(5):
        slots = np.arange(position[b] - width, position[b]) % histories[0].shape[1]
        found, *expected = (history[b, slots] for history in histories)
        for history in expected:
            np.testing.assert_array_equal(found, history)
    for t in range(model.config.replay_window + 1):
        newest = rows[jnp.arange(5), accepted + t]
        steps = [step(model, newest, c, jnp.ones(5, jnp.int32)) for c in (after, same, plain)]
        (logits, verified, expected), (after, same, plain) = zip(*steps, strict=True)
        np.testing.assert_array_equal(logits, verified)
        assert_close(logits, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_verify_of_one_token_is_a_step_in_bf16(family):
    model = make_model(family, dtype=jnp.bfloat16)
    tokens = random_tokens(B, 20, seed=3)
    one = two = started(model)
    for t in range(2 * model.config.replay_window + 1):
        logits, one = step(model, tokens[:, t], one)
        verified, two = verify(model, tokens[:, t : t + 1], two)
        two = commit(model, two, 1)
        np.testing.assert_array_equal(verified[:, 0], logits)
    chex.assert_trees_all_equal(one, two)


def test_five_identical_passes_give_identical_bits():
    """In rows that flush and rows that do not; and an idle row stays as it is, bit for bit."""
    model = make_model("kda")
    cache = started(model)
    for lengths in ([4, 2, 0], [3, 2, 0]):  # the rings hold 7, 4 and none of 8
        _, cache = verify(model, random_tokens(B, 4), cache, jnp.array(lengths, jnp.int32))
        cache = commit(model, cache, jnp.array(lengths, jnp.int32))
    new, lengths = random_tokens(B, 4, seed=5), jnp.array([4, 4, 0], jnp.int32)
    first = verify(model, new, cache, lengths)
    np.testing.assert_array_equal(first[1].pointer.length, [0, 4, 0])
    for _ in range(4):
        chex.assert_trees_all_equal(verify(model, new, cache, lengths), first)
    chex.assert_trees_all_equal(row(first[1].layers, 2), row(cache.layers, 2))
