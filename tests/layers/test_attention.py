"""Attention: against a float64 reference, with every option and schedule."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_cases import (
    D_MODEL,
    SHORT,
    B,
    assert_close,
    call,
    commit,
    decode,
    filled,
    hidden,
    jit,
    row,
    verify,
)

from replayssm_jax.layers import Attention

T = 20
OPTIONS = {
    "default": {},
    "partial_rope": dict(rope_fraction=0.5, qk_norm=True, proj_bias=True),
    "no_rope": dict(rope_fraction=0.0, num_kv_heads=1, scale=0.3, out_bias=True),
    "gated_window": dict(output_gate=True, sliding_window=5),
}


def make_attention(**options):
    options = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, **options}
    return filled(lambda: Attention(D_MODEL, rngs=nnx.Rngs(0), **options))


def naive(layer, x):
    """Outputs of one sequence x [T, d_model] in float64."""
    x = np.asarray(x, np.float64)
    D = layer.head_dim

    def linear(module, x):
        y = x @ np.asarray(module.kernel[...], np.float64)
        return y if module.bias is None else y + np.asarray(module.bias[...], np.float64)

    def norm(module, x):
        if module is None:
            return x
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + module.epsilon)
        return x * np.asarray(module.scale[...], np.float64)

    def rope(x):
        half = layer.rope_dim // 2
        if not half:
            return x
        angle = np.arange(len(x))[:, None] * layer.rope_base ** (-np.arange(half) / half)
        turn = np.exp(1j * angle)[:, None, :]
        turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * turn
        return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)

    q = linear(layer.q_proj, x).reshape(len(x), layer.num_heads, -1)
    gate = q[..., D:]
    k = linear(layer.k_proj, x).reshape(len(x), layer.num_kv_heads, D)
    v = linear(layer.v_proj, x).reshape(len(x), layer.num_kv_heads, D)
    q, k = rope(norm(layer.q_norm, q[..., :D])), rope(norm(layer.k_norm, k))
    y = np.zeros((len(x), layer.num_heads, D))
    for h in range(layer.num_heads):
        g = h // (layer.num_heads // layer.num_kv_heads)
        for t in range(len(x)):
            first = 0 if layer.sliding_window is None else max(0, t + 1 - layer.sliding_window)
            logits = k[first : t + 1, g] @ q[t, h] * layer.scale
            weights = np.exp(logits - logits.max())
            y[t, h] = weights / weights.sum() @ v[first : t + 1, g]
    if layer.output_gate:
        y = y / (1 + np.exp(-gate))
    return linear(layer.o_proj, y.reshape(len(x), -1))


@pytest.fixture(params=OPTIONS)
def layer(request):
    return make_attention(**OPTIONS[request.param])


def test_forward_prefill_and_decoding_equal_the_reference(layer):
    x = hidden(T)
    y, none = call(layer, x)
    assert none is None
    expected = naive(layer, x[0])
    assert_close(y[0], expected)
    first, cache = call(layer, x[:, :SHORT], layer.init_cache(B, T))
    rest, _ = decode(layer, x[:, SHORT:], cache)
    assert_close(np.concatenate([first, rest], axis=1)[0], expected)


def test_rows_on_their_own_schedules(layer):
    x = hidden(T)
    expected, _ = call(layer, x)
    cache, at = layer.init_cache(B, T), np.zeros(B, int)
    rng = np.random.default_rng(0)
    for _ in range(7):
        lengths = np.minimum(rng.choice([0, 1, 2, 4], size=B), T - at)
        accepted = rng.integers(0, lengths + 1)
        drafts = np.zeros((B, SHORT, D_MODEL), np.float32)
        for i in range(B):
            drafts[i, : accepted[i]] = x[i, at[i] : at[i] + accepted[i]]
        y, cache = verify(layer, jnp.asarray(drafts), cache, jnp.asarray(lengths, jnp.int32))
        cache = commit(layer, cache, jnp.asarray(accepted, jnp.int32))
        for i in range(B):
            assert_close(y[i, : accepted[i]], expected[i, at[i] : at[i] + accepted[i]])
        at += accepted
    np.testing.assert_array_equal(cache.progress.position, at)


def test_padding_and_resets(layer):
    """Any pattern of real tokens and resets, continued: each segment is as if it were alone."""
    x = hidden(T)
    rng = np.random.default_rng(3)
    valid, resets = rng.random((B, T)) < 0.7, rng.random((B, T)) < 0.15
    resets[1] = False
    tokens = {"valid": jnp.asarray(valid), "resets": jnp.asarray(resets)}
    _, cache = call(layer, x[:, :SHORT], layer.init_cache(B, 2 * T))
    y, cache = call(layer, x, cache, **tokens)
    alone, _ = call(layer, x, **tokens)
    more, _ = call(layer, x[:, :SHORT], cache)
    for i in range(B):
        seen, own = list(x[i, :SHORT]), []
        for t in np.flatnonzero(valid[i]):
            if resets[i, t]:
                seen, own = [], []
            seen, own = [*seen, x[i, t]], [*own, x[i, t]]
            assert_close(y[i, t], naive(layer, np.stack(seen))[-1])
            assert_close(alone[i, t], naive(layer, np.stack(own))[-1])
        expected = naive(layer, np.stack(seen + list(x[i, :SHORT])))
        assert_close(more[i], expected[-SHORT:])
        assert not np.asarray(y[i])[~valid[i]].any()


def test_a_reused_row_forgets_its_tenant_even_if_that_was_nan():
    layer = make_attention()
    x = hidden(SHORT)
    _, cache = call(layer, x.at[1:].set(jnp.nan), layer.init_cache(B, T))
    cache = jit(lambda layer, *args: layer.reset(*args))(layer, cache, jnp.arange(B) > 0)
    y, cache = call(layer, x, cache, lengths=jnp.array([0, 4, 4, 1], jnp.int32))
    fresh, fresh_cache = call(
        layer, x, layer.init_cache(B, T), lengths=jnp.array([0, 4, 4, 1], jnp.int32)
    )
    chex.assert_trees_all_equal(y[1:], fresh[1:])
    for i in range(1, B):
        chex.assert_trees_all_equal(row(cache, i), row(fresh_cache, i))


def test_tokens_past_the_end_of_the_cache_are_not_stored():
    layer = make_attention()
    x = hidden(T)
    _, cache = call(layer, x, layer.init_cache(B, T))
    _, after = call(layer, x[:, :SHORT], cache)
    chex.assert_trees_all_equal((cache.key, cache.value), (after.key, after.value))


def test_cache_dtype_is_the_callers():
    layer = make_attention(dtype=jnp.bfloat16)
    cache = layer.init_cache(B, T, jnp.float32)
    y, cache = call(layer, hidden(SHORT, dtype=jnp.bfloat16), cache)
    assert y.dtype == jnp.bfloat16
    assert cache.key.dtype == cache.value.dtype == jnp.float32


def test_impossible_arguments_raise():
    with pytest.raises(ValueError, match="num_kv_heads must divide num_heads"):
        make_attention(num_heads=4, num_kv_heads=3)
    with pytest.raises(ValueError, match="num_heads must divide d_model"):
        make_attention(num_heads=5, num_kv_heads=5, head_dim=None)
