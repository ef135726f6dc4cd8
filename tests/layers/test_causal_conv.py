"""CausalConv: history, rollback, padding and resets against a direct sum."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_cases import filled, jit, newest_inputs

from replayssm_jax.layers import CausalConv

C = 3


def make_conv(kernel_size, **options):
    options = {"max_tokens": 4, "activation": None, **options}
    return filled(lambda: CausalConv(C, kernel_size, rngs=nnx.Rngs(0), **options))


def direct(conv, x):
    """Outputs of one sequence x [T, C]."""
    kernel = np.asarray(conv.kernel[...], np.float64)
    width = len(kernel)
    padded = np.concatenate([np.zeros((width - 1, C)), np.asarray(x, np.float64)])
    y = np.stack([(padded[t : t + width] * kernel).sum(0) for t in range(len(x))])
    return y if conv.bias is None else y + np.asarray(conv.bias[...], np.float64)


def inputs(batch_size, num_tokens, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(batch_size, num_tokens, C)), jnp.float32)


@jit
def call(conv, x, cache=None, **tokens):
    return conv(x, cache, **tokens)


@jit
def verify(conv, x, cache, lengths=None):
    return conv.verify(x, cache, lengths=lengths)


@jit
def commit(conv, cache, accepted):
    return conv.commit(cache, accepted)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_outputs(bias, activation):
    conv = make_conv(4, use_bias=bias, activation=activation)
    x = inputs(2, 9)
    y, _ = call(conv, x)
    for i in range(2):
        expected = direct(conv, x[i])
        if activation == "silu":
            expected = expected / (1 + np.exp(-expected))
        np.testing.assert_allclose(y[i], expected, atol=1e-6)


@pytest.mark.parametrize("accepted", range(5))
@pytest.mark.parametrize("kernel_size", [1, 2, 4, 9])
def test_rollback_equals_plain_decoding_bit_for_bit(kernel_size, accepted):
    """Verify 4, accept n, one more step; the kernel is narrower and wider than the draft."""
    conv = make_conv(kernel_size)
    x = inputs(2, 16)
    start = conv.init_cache(2)
    for t in range(6):
        _, start = verify(conv, x[:, t : t + 1], start)
        start = commit(conv, start, 1)
    plain, outputs = start, []
    for t in range(6, 7 + accepted):
        y, plain = verify(conv, x[:, t : t + 1], plain)
        plain = commit(conv, plain, 1)
        outputs.append(y)
    expected = np.concatenate(outputs, axis=1)
    drafts = x[:, 6:10].at[:, accepted:].set(jnp.nan)
    y, cache = verify(conv, drafts, start)
    cache = commit(conv, cache, accepted)
    last, cache = verify(conv, x[:, 6 + accepted : 7 + accepted], cache)
    cache = commit(conv, cache, 1)
    found = np.concatenate([y[:, :accepted], last], axis=1)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(newest_inputs(conv, cache), newest_inputs(conv, plain))
    chex.assert_trees_all_equal(cache.progress, plain.progress)


def test_rows_on_their_own_schedules():
    conv = make_conv(4)
    x = inputs(3, 40)
    expected = np.stack([direct(conv, x[i]) for i in range(3)])
    cache, at = conv.init_cache(3), np.zeros(3, int)
    rng = np.random.default_rng(1)
    for _ in range(12):
        lengths = rng.choice([0, 1, 2, 4], size=3)
        accepted = rng.integers(0, lengths + 1)
        drafts = np.full((3, 4, C), np.nan, np.float32)
        for i in range(3):
            drafts[i, : lengths[i]] = 9.0
            drafts[i, : accepted[i]] = x[i, at[i] : at[i] + accepted[i]]
        y, cache = verify(conv, jnp.asarray(drafts), cache, jnp.asarray(lengths, jnp.int32))
        cache = commit(conv, cache, jnp.asarray(accepted, jnp.int32))
        for i in range(3):
            found = y[i, : accepted[i]]
            np.testing.assert_allclose(found, expected[i, at[i] : at[i] + accepted[i]], atol=1e-6)
        at += accepted
    np.testing.assert_array_equal(cache.progress.position, at)


@pytest.mark.parametrize("with_valid", [False, True])
def test_any_pattern_of_resets_and_padding(with_valid):
    conv = make_conv(4)
    x = inputs(4, 20)
    rng = np.random.default_rng(2)
    resets = rng.random((4, 20)) < 0.2
    valid = rng.random((4, 20)) < (0.6 if with_valid else 2)
    valid[2] &= not with_valid
    _, cache = call(conv, x[:, :5], conv.init_cache(4))
    tokens = {"resets": jnp.asarray(resets)} | ({"valid": jnp.asarray(valid)} if with_valid else {})
    y, cache = call(conv, jnp.where(valid[:, :, None], x, jnp.nan), cache, **tokens)
    more, _ = call(conv, x[:, :5], cache)
    for i in range(4):
        seen = list(x[i, :5])
        for t in range(20):
            if not valid[i, t]:
                assert not np.asarray(y[i, t]).any()
                continue
            seen = ([] if resets[i, t] else seen) + [x[i, t]]
            np.testing.assert_allclose(y[i, t], direct(conv, np.stack(seen))[-1], atol=1e-6)
        assert int(cache.progress.position[i]) == len(seen)
        np.testing.assert_allclose(
            more[i], direct(conv, np.stack(seen + list(x[i, :5])))[-5:], atol=1e-6
        )


def test_history_of_another_dtype_than_the_layer():
    conv = make_conv(4, dtype=jnp.bfloat16)
    cache = conv.init_cache(2, dtype=jnp.float32)
    y, cache = call(conv, inputs(2, 5), cache)
    assert y.dtype == jnp.bfloat16
    assert cache.history.dtype == jnp.float32


def test_a_reset_row_has_no_history():
    conv = make_conv(4)
    _, cache = call(conv, inputs(2, 9).at[1].set(jnp.nan), conv.init_cache(2))
    cache = conv.reset(cache, jnp.array([False, True]))
    y, cache = verify(conv, inputs(2, 2, seed=1), cache)
    np.testing.assert_allclose(y[1], direct(conv, inputs(2, 2, seed=1)[1]), atol=1e-6)
    last = jnp.zeros((2, 5), bool).at[:, 4].set(True)
    _, cache = call(conv, inputs(2, 5, seed=2), cache, resets=last)
    y, _ = verify(conv, inputs(2, 2, seed=3), cache)
    for i in range(2):
        seen = np.concatenate([inputs(2, 5, seed=2)[i, 4:], inputs(2, 2, seed=3)[i]])
        np.testing.assert_allclose(y[i], direct(conv, seen)[1:], atol=1e-6)


def test_commit_is_clipped_and_idempotent():
    conv = make_conv(4)
    _, cache = verify(conv, inputs(2, 2), conv.init_cache(2))
    cache = commit(conv, cache, jnp.array([5, -1], jnp.int32))
    chex.assert_trees_all_equal(cache, commit(conv, cache, 2))
    np.testing.assert_array_equal(cache.progress.position, [2, 0])


def test_impossible_arguments_raise():
    with pytest.raises(ValueError, match="kernel_size and max_tokens"):
        make_conv(0)
    conv = make_conv(4)
    with pytest.raises(ValueError, match=r"x must have shape \[..., 3\], found \(2, 5, 4\)"):
        conv(jnp.zeros((2, 5, 4)))
    with pytest.raises(ValueError, match="T must be at most max_tokens=4"):
        conv.verify(inputs(2, 5), conv.init_cache(2))
    with pytest.raises(TypeError, match="accepted must be integer, found float64"):
        conv.commit(conv.init_cache(2), 0.5)


def test_gradient_flows_through_resets_and_padding():
    conv = make_conv(3)
    valid = jnp.arange(6)[None, :] >= jnp.array([[2], [0]])
    resets = jnp.zeros((2, 6), bool).at[1, 3].set(True)
    grad = jax.grad(lambda x: jnp.sum(conv(x, valid=valid, resets=resets)[0] ** 2))(inputs(2, 6))
    assert np.isfinite(grad).all()
    assert not np.asarray(grad[0, :2]).any()
