"""The three mixers: against a float64 reference, and against themselves in every schedule."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_cases import (
    FAMILIES,
    LONG,
    SHORT,
    B,
    assert_close,
    call,
    commit,
    decode,
    hidden,
    jit,
    make_layer,
    naive,
    newest_inputs,
    row,
    unfilled,
    verify,
)
from random_modules import assert_takes_lists

import replayssm_jax as rs

OPTIONS = {
    "mamba2": {
        "default": {},
        "bare": dict(use_dt_bias=False, use_D=False, conv_bias=False, gated_norm=False),
        "full": dict(proj_bias=True, norm_before_gate=True, norm_groups=1, conv_kernel=2),
        "limits": dict(dt_limits=(0.05, 0.3), num_groups=1, norm_groups=4),
        "no_conv": dict(conv_kernel=1),
    },
    "gated_delta_net": {
        "default": {},
        "bare": dict(use_dt_bias=False, num_value_heads=2),
        "full": dict(conv_bias=True, proj_bias=True, allow_neg_eigval=True, conv_kernel=6),
    },
    "kda": {
        "default": {},
        "bare": dict(use_dt_bias=False, gate_rank=0),
        "full": dict(
            conv_bias=True, proj_bias=True, gate_bias=True, lower_bound=-5.0, gate_rank=None
        ),
    },
}
CASES = [(family, name) for family in FAMILIES for name in OPTIONS[family]]


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def state_of(layer, cache):
    return jit(rs.materialize, static_argnums=0)(layer.spec, cache.state)


@pytest.mark.parametrize("family, name", CASES)
def test_prefill_and_decoding_equal_the_reference(family, name):
    layer = make_layer(family, **OPTIONS[family][name])
    x = hidden(24)
    expected, expected_state = naive(layer, x[0])
    first, cache = call(layer, x[:, :SHORT], layer.init_cache(B))
    rest, cache = decode(layer, x[:, SHORT:], cache)
    assert_close(np.concatenate([first, rest], axis=1)[0], expected)
    assert_close(state_of(layer, cache)[0], expected_state)


def test_training_forward_equals_the_reference(family):
    layer = make_layer(family)
    x = hidden(LONG)
    y, cache = call(layer, x)
    assert cache is None
    assert_close(y[0], naive(layer, x[0])[0])


def test_conventional_decoding_of_the_same_weights(family):
    layer = make_layer(family)
    x = hidden(16)
    first, cache = call(layer, x[:, :SHORT], layer.init_cache(B, decode="recurrent"))
    rest, cache = decode(layer, x[:, SHORT:], cache)
    assert_close(np.concatenate([first, rest], axis=1)[0], naive(layer, x[0])[0])
    assert cache.state.shape == layer.spec.state_shape(B)
    with pytest.raises(ValueError, match="cannot roll back"):
        layer.verify(x[:, :2], cache)


def test_verify_of_one_token_is_a_step_bit_for_bit(family):
    """Also in bf16: decoding and verification share one path and fp32 gates."""
    layer = make_layer(family, dtype=jnp.bfloat16)
    x = hidden(10, dtype=jnp.bfloat16)
    one = two = layer.init_cache(B)
    for t in range(10):
        y, one = call(layer, x[:, t : t + 1], one)
        z, two = verify(layer, x[:, t : t + 1], two)
        two = commit(layer, two, 1)
        chex.assert_trees_all_equal(y, z)
    chex.assert_trees_all_equal(one, two)


def test_gates_are_float32_whatever_the_activations(family):
    layer = make_layer(family, dtype=jnp.bfloat16)

    @jit
    def records(layer, x):
        channels, rest = layer.project(x)
        return layer.records(layer.conv(channels)[0], rest)

    inputs = records(layer, hidden(2, dtype=jnp.bfloat16))
    assert inputs.g.dtype == inputs.beta.dtype == jnp.float32
    assert inputs.k.dtype == inputs.v.dtype == jnp.bfloat16
    rounded = np.asarray(inputs.g.astype(jnp.bfloat16).astype(jnp.float32))
    assert not np.array_equal(inputs.g, rounded)


def test_bf16_layer_keeps_a_float32_checkpoint_and_does_not_drift(family):
    """The state equals conventional decoding of the same bf16 records, however long it runs."""
    layer = make_layer(family, dtype=jnp.bfloat16)
    assert layer.init_cache(B, 8, jnp.bfloat16).state.checkpoint.dtype == jnp.float32

    @jit
    def run(layer, x, cache):
        def body(cache, token):
            y, cache = layer(token[:, None], cache)
            return cache, y[:, 0]

        return jax.lax.scan(body, cache, jnp.moveaxis(x, 1, 0))

    cache, plain = layer.init_cache(B), layer.init_cache(B, decode="recurrent")
    for seed in range(4):
        x = hidden(LONG, seed, dtype=jnp.bfloat16)
        cache, y = run(layer, x, cache)
        plain, z = run(layer, x, plain)
        assert y.dtype == jnp.bfloat16
        assert_close(state_of(layer, cache), plain.state, limit=3e-6)
        assert_close(y, z, limit=2e-2)


@pytest.mark.parametrize("accepted", range(SHORT + 1))
def test_rejected_drafts_leave_no_trace(family, accepted):
    """Verify 4, accept n, one more step: as if the rest had never been there."""
    layer = make_layer(family)
    x = hidden(12)
    _, cache = call(layer, x[:, :SHORT], layer.init_cache(B))
    plain, plain_cache = decode(layer, x[:, SHORT : SHORT + accepted + 1], cache)
    drafts = x[:, SHORT : 2 * SHORT].at[:, accepted:].set(7.0)
    y, cache = verify(layer, drafts, cache)
    cache = commit(layer, cache, accepted)
    last, cache = call(layer, x[:, SHORT + accepted : SHORT + accepted + 1], cache)
    assert_close(np.concatenate([y[:, :accepted], last], axis=1), plain)
    chex.assert_trees_all_equal(cache.progress, plain_cache.progress)
    assert_close(newest_inputs(layer, cache), newest_inputs(layer, plain_cache), limit=1e-6)
    assert_close(state_of(layer, cache), state_of(layer, plain_cache), limit=1e-5)


def test_schedules_with_and_without_drafts_differ_by_row(family):
    layer = make_layer(family)
    x = hidden(LONG)
    expected, _ = call(layer, x)
    cache = layer.init_cache(B)
    at = np.zeros(B, int)
    rng = np.random.default_rng(0)
    for _ in range(14):
        lengths = rng.choice([0, 1, 2, 4], size=B)
        accepted = rng.integers(0, lengths + 1)
        drafts = np.full((B, SHORT, x.shape[-1]), np.nan, np.float32)
        for i in range(B):
            drafts[i, : accepted[i]] = x[i, at[i] : at[i] + accepted[i]]
            drafts[i, accepted[i] : lengths[i]] = 7.0
        y, cache = verify(layer, jnp.asarray(drafts), cache, jnp.asarray(lengths, jnp.int32))
        cache = commit(layer, cache, jnp.asarray(accepted, jnp.int32))
        for i in range(B):
            assert_close(y[i, : accepted[i]], expected[i, at[i] : at[i] + accepted[i]])
            assert not np.asarray(y[i, lengths[i] :]).any()
        at += accepted
    np.testing.assert_array_equal(cache.progress.position, at)


@pytest.mark.parametrize("side", ["right", "left", "holes"])
def test_padded_prefill_equals_unpadded(family, side):
    layer = make_layer(family)
    counts = np.array([1, 3, 17, LONG])
    x = hidden(LONG)
    steps = np.arange(LONG)
    if side == "holes":
        order = np.random.default_rng(1).permuted(np.tile(steps, (B, 1)), axis=1)
        valid = order < counts[:, None]
    else:
        first = (LONG - counts if side == "left" else 0 * counts)[:, None]
        valid = (steps >= first) & (steps < first + counts[:, None])
    if side == "right":
        tokens = {"lengths": jnp.asarray(counts, jnp.int32)}
    else:
        tokens = {"valid": jnp.asarray(valid)}
    padded = jnp.where(valid[:, :, None], x, jnp.nan)
    y, cache = call(layer, padded, layer.init_cache(B), **tokens)
    assert not np.asarray(y)[~valid].any()
    more, _ = call(layer, x[:, :SHORT], cache)
    for i in range(B):
        real = np.concatenate([x[i][valid[i]], x[i, :SHORT]])
        expected, _ = naive(layer, real)
        assert_close(y[i][valid[i]], expected[:-SHORT])
        assert_close(more[i], expected[-SHORT:])


def test_an_idle_row_of_a_padded_prefill_stays_as_it_is(family):
    layer = make_layer(family)
    x = hidden(LONG)
    _, cache = call(layer, x[:, :SHORT], layer.init_cache(B))
    _, after = call(layer, x, cache, lengths=jnp.array([0, 5, 0, LONG], jnp.int32))
    for i in (0, 2):
        chex.assert_trees_all_equal(row(cache, i), row(after, i))


def test_prefill_continues_over_any_split(family):
    layer = make_layer(family)
    x = hidden(2 * LONG)
    expected, _ = naive(layer, x[0])
    for parts in ([1, 1, LONG, SHORT], [SHORT, 1, SHORT, LONG, 1], [LONG, 1, SHORT]):
        cache, outputs, at = layer.init_cache(B), [], 0
        for part in parts:
            y, cache = call(layer, x[:, at : at + part], cache)
            outputs.append(y)
            at += part
        assert_close(np.concatenate(outputs, axis=1)[0], expected[:at])


def test_resets_forget_everything_before(family):
    layer = make_layer(family)
    x = hidden(LONG)
    resets = np.zeros((B, LONG), bool)
    resets[0, [4, 5, 33]] = True
    resets[1, LONG - 1] = True
    resets[2, 0] = True
    _, cache = call(layer, x[:, :SHORT], layer.init_cache(B))
    y, cache = call(layer, x, cache, resets=jnp.asarray(resets))
    more, _ = call(layer, x[:, :SHORT], cache)
    for i in range(B):
        starts = [0, *np.flatnonzero(resets[i]), LONG]
        for first, last in itertools.pairwise(starts):
            if first == last:
                continue
            part = x[i, first:last]
            if not resets[i, first]:
                part = np.concatenate([x[i, :SHORT], part])
            expected, _ = naive(layer, np.concatenate([part, x[i, :SHORT]]))
            assert_close(y[i, first:last], expected[first - last - SHORT : -SHORT])
        assert_close(more[i], expected[-SHORT:])


def test_a_reused_row_forgets_its_tenant(family):
    layer = make_layer(family)
    x = hidden(LONG)
    huge = jnp.full_like(x, 1e30).at[0].set(x[0])
    _, cache = call(layer, huge, layer.init_cache(B))
    _, cache = verify(layer, x[:, :SHORT], cache)
    cache = jit(lambda layer, *args: layer.reset(*args))(layer, cache, jnp.arange(B) > 0)
    lengths = jnp.array([0, LONG, LONG, 3], jnp.int32)
    y, cache = call(layer, x, cache, lengths=lengths)
    fresh, fresh_cache = call(layer, x, layer.init_cache(B), lengths=lengths)
    chex.assert_trees_all_equal(y[1:], fresh[1:])
    found, expected = newest_inputs(layer, cache), newest_inputs(layer, fresh_cache)
    np.testing.assert_array_equal(found[1:], expected[1:])
    chex.assert_trees_all_equal(cache.state.checkpoint[1:], fresh_cache.state.checkpoint[1:])


def test_fork_at_every_fill(family):
    """Rows of a cache are gathered by hand; children go their own ways, the parent is unchanged."""
    layer = make_layer(family)
    window = layer.spec.window
    x = hidden(window + 1)
    cache = layer.init_cache(B)
    for fill in range(window):
        children = jax.tree.map(lambda leaf: leaf[jnp.zeros(B, jnp.int32)], cache)
        following = jnp.stack([x[0, fill], -x[0, fill], *x[2:, fill]])[:, None]
        y, children = call(layer, following, children)
        for i in range(2):
            seen = np.concatenate([x[0, :fill], following[i]])
            expected, state = naive(layer, seen)
            assert_close(y[i, 0], expected[-1])
            assert_close(state_of(layer, children)[i], state)
        z, cache = call(layer, x[:, fill : fill + 1], cache)
        assert_close(z[0], y[0], limit=1e-6)


def test_a_call_without_a_token_changes_nothing(family):
    layer = make_layer(family, dtype=jnp.bfloat16)
    cache = layer.init_cache(B)
    y, same = layer(hidden(0, dtype=jnp.bfloat16), cache)
    assert y.shape == (B, 0, hidden(1).shape[-1]) and y.dtype == jnp.bfloat16
    chex.assert_trees_all_equal(cache, same)
    assert layer(hidden(0))[0].shape == y.shape


def test_gradients_are_finite_and_reach_every_parameter(family):
    layer = make_layer(family)
    grads = jit(jax.grad(lambda layer, x: jnp.sum(layer(x)[0] ** 2)))(layer, hidden(SHORT))
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        norm = float(np.linalg.norm(grad))
        assert np.isfinite(norm) and norm > 0, jax.tree_util.keystr(path)


def test_every_initialiser_is_the_callers(family):
    given = {
        name: nnx.initializers.constant(value)
        for name, value in (
            ("kernel_init", 0.25),
            ("out_kernel_init", 0.5),
            ("conv_kernel_init", 0.75),
            ("A_log_init", 1.25),
            ("dt_bias_init", 1.5),
        )
    }
    layer = unfilled(family, **given)
    found = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    for name, value in (("in_proj", 0.25), ("out_proj", 0.5), ("conv", 0.75)):
        assert (found[name]["kernel"] == value).all(), name
    assert (found["A_log"] == 1.25).all() and (found["dt_bias"] == 1.5).all()


def test_caches_are_batch_first(family):
    layer = make_layer(family)
    for decoding in ("replay", "recurrent"):
        cache = layer.init_cache(5, 100, decode=decoding)
        assert all(leaf.shape[0] == 5 for leaf in jax.tree.leaves(cache))


def test_vmap_over_members_equals_a_loop():
    """Members of an ensemble, each with its own cache of B rows; prefill, drafts, commit."""
    layer = make_layer("gated_delta_net")
    x = jnp.stack([hidden(3 * SHORT, seed) for seed in range(2)])
    caches = [layer.init_cache(B) for _ in range(2)]
    many = jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches)
    accepted = jnp.array([3, 0], jnp.int32)

    def run(layer, x, cache, accepted):
        y, cache = layer(x[:, :SHORT], cache)
        z, cache = layer.verify(x[:, SHORT : 2 * SHORT], cache)
        cache = layer.commit(cache, accepted)
        w, cache = layer.verify(x[:, 2 * SHORT :], cache)
        return jnp.concatenate([y, z, w], axis=1), cache

    found, many = jit(jax.vmap(run, in_axes=(None, 0, 0, 0)))(layer, x, many, accepted)
    alone = jit(run)
    for i, cache in enumerate(caches):
        expected, cache = alone(layer, x[i], cache, accepted[i])
        assert_close(found[i], expected, limit=1e-6)
        member = jax.tree.map(
            functools.partial(jax.lax.index_in_dim, index=i, keepdims=False), many
        )
        chex.assert_trees_all_close(member, cache, atol=1e-5)


def test_new_weights_and_caches_trace_once():
    @jit
    @chex.assert_max_traces(n=1)
    def step(layer, x, cache):
        return layer(x, cache)

    for seed in range(3):
        layer = make_layer("gated_delta_net", seed)
        cache = layer.init_cache(B)
        for t in range(3):
            _, cache = step(layer, hidden(SHORT)[:, t : t + 1], cache)


def test_cache_lives_in_an_nnx_cache_and_is_donated():
    layer = make_layer("mamba2")
    x = hidden(SHORT)

    class Holder(nnx.Module):
        def __init__(self, layer):
            self.layer = layer
            self.cache = nnx.Cache(layer.init_cache(B))

        def __call__(self, x):
            y, cache = self.layer(x, self.cache.get_value())
            self.cache.set_value(cache)
            return y

    graphdef, params, caches = nnx.split(Holder(layer), nnx.Param, nnx.Cache)

    def step(params, caches, x):
        model = nnx.merge(graphdef, params, caches)
        y = model(x)
        return y, nnx.state(model, nnx.Cache)

    step = jit(step, donate_argnums=1)
    expected, _ = naive(layer, x[0])
    for t in range(SHORT):
        y, caches = step(params, caches, x[:, t : t + 1])
        assert_close(y[0, 0], expected[t])


@pytest.mark.parametrize("num_tokens", [1, SHORT])
def test_lists_are_lengths_and_masks(num_tokens):
    layer = make_layer("mamba2")
    x, cache = hidden(num_tokens), layer.init_cache(B)
    mask = [[False] * num_tokens, *[[True] * num_tokens] * (B - 1)]
    for run, lists in [
        (type(layer).__call__, dict(lengths=[1, 0, num_tokens, 1])),
        (type(layer).__call__, dict(valid=mask)),
        (type(layer).__call__, dict(valid=mask, resets=mask)),
        (type(layer).verify, dict(lengths=[1, 0, num_tokens, 1])),
    ]:
        assert_takes_lists(run, (layer, x, cache), lists)
    found, _ = jit(lambda layer, x, cache: layer(x, cache, valid=mask))(layer, x, cache)
    assert_close(found, call(layer, x, cache, valid=jnp.asarray(mask))[0])


def test_impossible_arguments_raise():
    layer = make_layer("kda")
    x = hidden(5)
    cache = layer.init_cache(B)
    with pytest.raises(ValueError, match="T must be at most max_tokens=4, found T=5"):
        layer.verify(x, cache)
    with pytest.raises(
        ValueError, match=r"x must have shape \[B, T, 12\].*one token is x\[:, None\]"
    ):
        layer(x[:, 0], cache)
    with pytest.raises(ValueError, match="x has 2 rows, the cache 4"):
        layer.verify(x[:2, :1], cache)
    for n in (1, 5):
        masks = {"lengths": jnp.ones(B, jnp.int32), "valid": jnp.ones((B, n), bool)}
        with pytest.raises(ValueError, match="not both"):
            layer(x[:, :n], cache, **masks)
    for n in (1, 5):
        with pytest.raises(ValueError, match="valid must have shape"):
            layer(x[:, :n], cache, valid=jnp.ones((B, SHORT), bool))
        with pytest.raises(TypeError, match="valid must be bool, found float32"):
            layer(x[:, :n], cache, valid=jnp.ones((B, n)))
        with pytest.raises(ValueError, match=rf"lengths must lie in \[0, {n}\], found \[6"):
            jax.eval_shape(lambda n=n: layer(x[:, :n], cache, lengths=[6, 0, 0, 0]))
        for run in (layer, layer.verify):
            with pytest.raises(TypeError, match="x must be an array, found list"):
                run(x[:, :n].tolist(), cache)
    with pytest.raises(ValueError, match="decode must be"):
        layer.init_cache(B, decode="plain")
    with pytest.raises(ValueError, match="ragged"):
        layer.reset(layer.init_cache(B, ragged=False), jnp.ones(B, bool))
    with pytest.raises(ValueError, match=r"where must have shape \(4,\), found \(1,\)"):
        layer.reset(cache, jnp.array([True]))
    with pytest.raises(TypeError, match="where must be bool, found int32"):
        layer.conv.reset(layer.conv.init_cache(B), jnp.ones(B, jnp.int32))
