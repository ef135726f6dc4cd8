"""Read copies, low-precision checkpoints and stochastic rounding of the core."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import check_who_reads_what
from oracle import (
    assert_close,
    error,
    make_spec,
    poison_dead_slots,
    random_inputs,
    reference,
    tokens,
)

import replayssm_jax as rs
from replayssm_jax import dispatch, kernels, precision, window
from replayssm_jax.layers.cache import insert_rows

NAMES = tuple(dtype.name for dtype in precision.FORMATS)
EIGHT_BITS = tuple(dtype.name for dtype in precision.FORMATS if precision.is_scaled(dtype))
STEP = {  # half a step of each format, relative to the row's largest value where that is coarser
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "int8": 1 / 254,
}

# Compiling takes most of the time of these tests.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def states(shape=(2, 3, 5, 8), seed=0):
    """Values of many magnitudes, by row and by element, and a row of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(3 * rng.standard_normal((*shape[:-1], 1)))
    x[..., 1, :] = 0
    return jnp.asarray(x, jnp.float32)


ONES = np.ones((2, 3), np.float32)

encode = jit(precision.encode, static_argnums=1)


@jit
def decoded(stored):
    return precision.decode(stored, jnp.float32)


def keys_for(x, seed=0):
    return precision.as_keys(jax.random.key(seed), x.shape[:-2])


# Formats


@pytest.mark.parametrize("name", NAMES)
def test_a_state_survives_its_format(name):
    x = states()
    stored = encode(x, name)
    found = decoded(stored)
    amax = np.abs(np.asarray(x)).max(axis=-1, keepdims=True)
    limit = STEP[name] * (amax if precision.is_scaled(name) else np.abs(x)) * 1.001
    assert (np.abs(np.asarray(found - x)) <= limit + 2.0**-25).all()
    assert stored.dtype == jnp.dtype(name) and stored.shape == x.shape
    chex.assert_trees_all_equal(found[..., 1, :], jnp.zeros_like(x[..., 1, :]))
    assert not np.isnan(np.asarray(found)).any()
    nothing = jnp.zeros(x.shape, jnp.float32)
    chex.assert_trees_all_equal(precision.zeros(x.shape, name), encode(nothing, name))
    if precision.is_scaled(name):  # symmetric: what is largest is represented, whatever its sign
        chex.assert_trees_all_equal(decoded(encode(-x, name)), -found)
        assert_close(np.abs(np.asarray(found)).max(-1), amax[..., 0], 1e-6)
        assert stored.scale.dtype == jnp.float32 and stored.scale.shape == x.shape[:-1]


@pytest.mark.parametrize("key_dim", [10, 64, 128])
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_that_is_not_finite_stays_alone(name, stochastic, key_dim):
    """Also one that is partly NaN, among rows so long and many that compilers cut them up."""
    clean = states((2, 2, 64, key_dim))
    x = clean.at[0, 1, 2, 3].set(jnp.nan).at[1, 0, 4, 0].set(-jnp.inf)
    x = x.at[1, 1, 7, 1::2].set(-jnp.nan).at[1, 1, 7, 0].set(jnp.inf)
    keys = keys_for(x) if stochastic else None
    found = np.asarray(decoded(encode(x, name, keys)))
    same = np.asarray(decoded(encode(clean, name, keys)))
    touched = np.array(x != clean)
    if precision.is_scaled(name):
        touched |= touched.any(axis=-1, keepdims=True)
        assert np.isnan(found[touched]).all()
    else:
        np.testing.assert_array_equal(found[touched], x[touched])
    np.testing.assert_array_equal(found[~touched], same[~touched])


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_finite_values_beyond_the_range_stay_finite(name):
    x = jnp.full((1, 1, 1, 2), jnp.finfo(jnp.float32).max).at[..., 1].multiply(-1)
    for keys in (None, keys_for(x)):
        found = decoded(encode(x, name, keys))
        top = float(jnp.finfo(name).max)
        chex.assert_trees_all_equal(found, jnp.asarray([[[[top, -top]]]], jnp.float32))


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_the_largest_scales_stay_finite(name):
    """Rows up to the largest float32, and those of a float64 state beyond it."""
    top = float(jnp.finfo(jnp.float32).max)
    with jax.enable_x64(True):
        for x, dtype in ((top, jnp.float32), (1e300, jnp.float64)):
            row = jnp.array([[[[x, -x]]]], dtype)
            for keys in (None, keys_for(row)):
                found = precision.decode(precision.encode(row, name, keys), jnp.float32)
                assert_close(np.float64(found), [[[[top, -top]]]], 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_pass_a_cast_or_not_at_all(name):
    x = states((1, 1, 2, 3))

    def total(x, keys):
        return precision.decode(precision.encode(x, name, keys), jnp.float32).sum()

    gradients = [jax.grad(total)(x, keys) for keys in (None, keys_for(x))]
    passed = [0 if precision.is_scaled(name) else 1, 0]
    chex.assert_trees_all_equal(gradients, [jnp.full_like(x, n) for n in passed])


# Stochastic rounding


@pytest.mark.parametrize("name", NAMES)
def test_rounding_is_unbiased_over_a_million_elements(name):
    """Mean error below five standard errors, and rounding to nearest above for the same numbers."""
    lead, size = (8, 8), (125, 125)
    step = {"int8": 1 / 127}.get(name, 2.0 ** -(jnp.finfo(name).nmant if name != "int8" else 0))
    # A quarter of a step above a number of the format: to nearest, all of them go down.
    x = jnp.full((*lead, *size), 1 + step / 4, jnp.float32)
    top = precision.largest(name) if precision.is_scaled(name) else 1
    if name == "int8":
        x = jnp.full((*lead, *size), 64.25 / 127, jnp.float32)
    elif precision.is_scaled(name):
        x = x * (2.0 ** -np.ceil(np.log2(top)))
    x = x.at[..., 0].set(1.0)  # the scale of each row
    found = decoded(encode(x, name, keys_for(x)))
    errors = (np.asarray(found, np.float64) - np.asarray(x, np.float64))[..., 1:]
    assert errors.size > 990_000
    bound = 5 * errors.std() / np.sqrt(errors.size)
    assert 0 < abs(errors.mean()) < bound
    nearest = np.asarray(decoded(encode(x, name)) - x, np.float64)
    assert abs(nearest[..., 1:].mean()) > 100 * bound / 5


@pytest.mark.parametrize("name", NAMES)
def test_rounding_gives_one_of_the_two_neighbours(name):
    x = states((2, 3, 40, 16), seed=1)
    draws = np.stack([decoded(encode(x, name, keys_for(x, i))) for i in range(24)])
    low, high = draws.min(axis=0), draws.max(axis=0)
    assert ((draws == low) | (draws == high)).all()
    x = np.asarray(x)
    both, slack = low < high, 1e-6 * np.abs(x)
    assert both.mean() > 0.5
    assert (low <= x + slack)[both].all() and (x - slack <= high)[both].all()
    scale = np.abs(x).max(axis=-1, keepdims=True) if precision.is_scaled(name) else np.abs(x)
    assert (high - low <= 2.001 * STEP[name] * scale + 2.0**-24).all()
    assert (np.abs(low - x) <= 2.001 * STEP[name] * scale + 2.0**-24).all()


def test_keys_make_the_noise_and_nothing_else_does():
    """The same keys reproduce; rows, heads and steps differ; no program holds a key."""
    x = jnp.broadcast_to(states((1, 1, 6, 32), seed=2), (3, 4, 6, 32))
    once = jit(chex.assert_max_traces(precision.encode, n=1), static_argnums=1)
    keys = keys_for(x)
    first, again = once(x, "bfloat16", keys), once(x, "bfloat16", keys)
    chex.assert_trees_all_equal(first, again)
    assert (first != once(x, "bfloat16", keys_for(x, 1))).any()
    heads = np.asarray(first, np.float32).reshape(12, -1)
    assert len({row.tobytes() for row in heads}) == 12
    # A row rounds alike whatever batch it is in.
    chex.assert_trees_all_equal(precision.encode(x[1:2], "bfloat16", keys[1:2]), first[1:2])
    now, after = precision.advance(keys)
    found = {key.tobytes() for key in np.concatenate([keys, now, after]).reshape(-1, 2)}
    assert len(found) == 36


# Read copies


def run_schedule(spec, inputs, schedule):
    """Ragged drafts with rollback, flushes now and then: outputs [R, B, 4, H, P] and the state."""

    @jit
    def run(inputs, schedule):
        def one_round(carry, turn):
            state, position = carry
            lengths, accepted, flushed = turn
            index = position[:, None] + jnp.arange(4, dtype=jnp.int32)[None]
            draft = jax.tree.map(lambda x: jax.vmap(lambda row, i: row[i])(x, index), inputs)
            output, state = rs.verify(spec, state, draft, lengths)
            state = rs.commit(spec, state, accepted)
            state = rs.flush(spec, state, flushed)
            return (state, position + accepted), output

        state = rs.init_state(spec, inputs.v.shape[0], ragged=True)
        carry = state, jnp.zeros(inputs.v.shape[0], jnp.int32)
        (state, _), outputs = jax.lax.scan(one_round, carry, schedule)
        return outputs, state, rs.materialize(spec, state)

    return run(inputs, schedule)


@functools.cache
def drawn_schedule(batch_size=3, rounds=48):
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 5, (rounds, batch_size)).astype(np.int32)
    accepted = rng.integers(0, lengths + 1).astype(np.int32)
    return lengths, accepted, rng.random((rounds, batch_size)) < 0.1


@pytest.mark.parametrize("family", ["mamba2", "gated_delta_net", "kda", "gla"])
def test_the_checkpoint_does_not_depend_on_the_copy(family):
    """The exact fold: bit-identical for every format, 1e-6 from a run without a copy."""
    _, accepted, _ = schedule = drawn_schedule()
    spec = make_spec(family, window=7, max_tokens=4)
    ends = accepted.sum(axis=0)
    inputs = random_inputs(spec, 3, int(ends.max()) + 4, gates=(-1e-3, -1e-2, -1e-1))
    _, plain, plain_state = run_schedule(spec, inputs, schedule)
    expected = [
        reference(spec, jax.tree.map(lambda x, b=b: x[b : b + 1, : ends[b]], inputs))
        for b in range(3)
    ]
    first = None
    for name in ("int8", "bfloat16") if family == "gla" else NAMES:
        copied = dataclasses.replace(spec, read_dtype=name)
        outputs, state, full = run_schedule(copied, inputs, schedule)
        assert error(state.checkpoint, plain.checkpoint) <= 1e-6
        assert error(full, plain_state) <= 1e-6
        first = first or (state.checkpoint, full)
        chex.assert_trees_all_equal((state.checkpoint, full), first)
        # Not to the bit: a compiler may round the copy of a fold that it kept in wider registers.
        copy = decoded(encode(state.checkpoint, name))
        assert error(decoded(state.read_copy), copy) <= STEP[name] / 10
        for b, (wanted, wanted_state) in enumerate(expected):
            kept = np.concatenate([o[b, :n] for o, n in zip(outputs, accepted[:, b], strict=True)])
            assert_close(kept[None], wanted, 2 * STEP[name], f"output of {name}")
            assert_close(full[b : b + 1], wanted_state, name="state")


COPIED = dict(read_dtype="int8", window=6, max_tokens=4)


@pytest.fixture(scope="module", params=["gated_delta_net", "gla"])
def copied(request):
    """A spec with a read copy, B = 3 ragged rows at different fills, tokens to go on with."""
    spec = make_spec(request.param, **COPIED)
    inputs = random_inputs(spec, 3, 24)
    state = rs.init_state(spec, 3, ragged=True)
    _, state = prefill(spec, state, tokens(inputs, 0, 5))
    for t, lengths in ((5, [4, 2, 0]), (9, [4, 2, 4])):
        _, state = verify(spec, state, tokens(inputs, t, t + 4), jnp.asarray(lengths))
        state = rs.commit(spec, state, jnp.asarray(lengths))
    return spec, state, inputs


@functools.partial(jit, static_argnums=0)
def verify(spec, state, inputs, lengths=None, parents=None):
    return rs.verify(spec, state, inputs, lengths, parents)


@functools.partial(jit, static_argnums=0)
def step(spec, state, inputs):
    return rs.step(spec, state, inputs)


@functools.partial(jit, static_argnums=0)
def flush(spec, state, where=None):
    return rs.flush(spec, state, where)


@functools.partial(jit, static_argnums=0)
def prefill(spec, state, inputs, lengths=None):
    return rs.prefill(spec, state, inputs, lengths)


def test_step_is_verify_and_commit_with_a_copy(copied):
    spec, state, inputs = copied
    stepped = verified = state
    for t in range(13, 21):
        one = tokens(inputs, t, t + 1)
        output, stepped = step(spec, stepped, one)
        drafted, verified = verify(spec, verified, one)
        verified = rs.commit(spec, verified, 1)
        chex.assert_trees_all_equal((output, stepped), (drafted, verified))


@pytest.mark.parametrize("family", ["gated_delta_net", "kda"])
def test_drafts_are_steps_with_a_copy(family):
    """Both round what later steps read before they read it themselves."""
    spec = make_spec(family, **COPIED)
    inputs = random_inputs(spec, 2, 11)
    _, state = prefill(spec, rs.init_state(spec, 2), tokens(inputs, 0, 5))
    _, state = step(spec, state, tokens(inputs, 5, 6))
    drafts, drafted = verify(spec, state, tokens(inputs, 6, 10))
    drafted = rs.commit(spec, drafted, 4)
    outputs = []
    for t in range(6, 10):
        output, state = step(spec, state, tokens(inputs, t, t + 1))
        outputs.append(output)
    # An update on the edge between two bf16 values may become the other one.
    assert_close(drafts, jnp.concatenate(outputs, axis=1), 1e-4)
    assert_close(drafted.buffer.update, state.buffer.update, 1e-4)
    last = tokens(inputs, 10, 11)
    assert_close(step(spec, drafted, last)[0], step(spec, state, last)[0], 1e-4)


def test_log_decays_are_rounded_and_stay_finite():
    """By the default compiler, too, which may take a cast there and back for none."""
    spec = make_spec("kda", read_dtype="int8")
    g = -np.exp(np.random.default_rng(0).uniform(-18, 11, 3000)).astype(np.float32)
    g = np.append(g, np.float32(-1e30))
    found = jax.jit(lambda g: 2 * window.read_decays(spec, g))(g)
    np.testing.assert_array_equal(found, 2 * np.maximum(g, -65504).astype(np.float16).astype("f"))
    plain = dataclasses.replace(spec, read_dtype=None)
    np.testing.assert_array_equal(window.read_decays(plain, g), g)


@pytest.mark.parametrize("family", ["mamba2", "gated_delta_net", "kda", "gla"])
@pytest.mark.parametrize("name", [None, *NAMES])
def test_what_the_ring_has_for_steps_alone(family, name):
    """16 bits beside a copy that has no more than eight bits of a value."""
    spec = make_spec(family, read_dtype=name)
    ring = jax.eval_shape(lambda: rs.init_state(spec, 1)).buffer
    narrow = spec.rule == "delta" and name not in (None, "float16")
    update, log_decay = ring.update, ring.read_log_decay
    assert ring.log_decay.dtype == jnp.float32
    assert (update is None) == (spec.rule == "additive")
    assert update is None or update.dtype == (jnp.bfloat16 if narrow else jnp.float32)
    assert (log_decay is None) != (narrow and spec.decay == "channel")
    assert log_decay is None or log_decay.dtype == jnp.float16


@pytest.mark.parametrize("family", ["gated_delta_net", "kda"])
def test_who_reads_what_of_the_ring(family):
    check_who_reads_what(make_spec(family, read_dtype="int8", window=4, max_tokens=2), "xla")


def test_flushes_have_log_decays_as_they_came():
    spec = make_spec("kda", read_dtype="int8")
    inputs = random_inputs(spec, 1, 1)
    sizes = np.random.default_rng(0).uniform(-17, 12, inputs.g.shape)  # to either end of float16
    inputs = dataclasses.replace(inputs, g=jnp.asarray(-np.exp(sizes), jnp.float32))
    ring = step(spec, rs.init_state(spec, 1), inputs)[1].buffer
    np.testing.assert_array_equal(ring.log_decay[:, :1], inputs.g)
    rounded = np.maximum(inputs.g, -65504).astype(np.float16)
    np.testing.assert_array_equal(ring.read_log_decay[:, :1], rounded)


def test_output_only_steps_do_not_look_at_the_checkpoint(copied):
    """NaN in all of it changes nothing up to the step that flushes."""
    spec, state, inputs = copied
    state = flush(spec, state)
    nothing = jnp.full_like(state.checkpoint, jnp.nan)
    blind = dataclasses.replace(state, checkpoint=nothing)
    draft = tokens(inputs, 13, 17)
    output, state = verify(spec, state, draft)
    same, blind = verify(spec, blind, draft)
    chex.assert_trees_all_equal(output, same)
    state, blind = (rs.commit(spec, x, 4) for x in (state, blind))
    for t in range(17, 19):
        one = tokens(inputs, t, t + 1)
        output, state = step(spec, state, one)
        same, blind = step(spec, blind, one)
        chex.assert_trees_all_equal(output, same)
    assert np.isfinite(output).all()
    one = tokens(inputs, 19, 20)
    assert np.isfinite(step(spec, state, one)[0]).all()
    assert np.isnan(step(spec, blind, one)[0]).all()


def test_dead_slots_and_fresh_rows_with_a_copy(copied):
    """NaN in dead slots, and in the checkpoint and copy of an emptied row, reaches nothing."""
    spec, state, inputs = copied
    state = rs.reset(spec, state, jnp.asarray([False, True, False]))
    poisoned = poison_dead_slots(spec, state)
    scale = poisoned.read_copy.scale.at[1].set(jnp.nan)
    copy = dataclasses.replace(poisoned.read_copy, scale=scale)
    poisoned = dataclasses.replace(poisoned, read_copy=copy)
    fresh = rs.init_state(spec, 1)
    for t in range(13, 23):
        one = tokens(inputs, t, t + 1)
        output, state = step(spec, state, one)
        same, poisoned = step(spec, poisoned, one)
        chex.assert_trees_all_equal(output, same)
        new, fresh = step(spec, fresh, jax.tree.map(lambda x: x[1:2], one))
        assert_close(output[1:2], new, 1e-6)
    chex.assert_trees_all_equal(flush(spec, poisoned).read_copy, flush(spec, state).read_copy)


def test_forks_and_slots_with_a_copy(copied):
    """Children and parent go on alike; a slot out of range touches nothing, copies included."""
    spec, state, inputs = copied
    fork = rs.take(spec, state, jnp.asarray([2, 0, 2]))
    pool = rs.insert(spec, state, jnp.asarray([-1, 1, -1]), fork)
    for row in (0, 2):
        pick = functools.partial(jax.tree.map, lambda x, row=row: x[row])
        chex.assert_trees_all_equal(pick(pool), pick(state))
    index = jnp.asarray([0, 0, 2])
    for t in range(13, 22):
        one = jax.tree.map(lambda x: x[index], tokens(inputs, t, t + 1))
        output, state = step(spec, state, one)
        copy, pool = step(spec, pool, one)
        chex.assert_trees_all_equal(copy, output[index])
    chex.assert_trees_all_equal(pool.read_copy, jax.tree.map(lambda x: x[index], state.read_copy))


def test_trees_with_a_copy(copied):
    """The accepted path of a tree goes on as the same tokens in a chain do."""
    spec, state, inputs = copied
    parents = jnp.tile(jnp.asarray([-1, 0, 0, 2]), (3, 1))
    nodes = tokens(inputs, 13, 17)
    chain = jax.tree.map(lambda x: x[:, jnp.asarray([0, 2, 3])], nodes)
    state = flush(spec, state)  # the tree has a node more: flush points must agree
    output, tree = verify(spec, state, nodes, None, parents)
    tree = rs.commit(spec, tree, 3, jnp.tile(jnp.asarray([0, 2, 3]), (3, 1)))
    same = []
    for t in range(3):
        one, state = step(spec, state, tokens(chain, t, t + 1))
        same.append(one)
    assert_close(output[:, jnp.asarray([0, 2, 3])], jnp.concatenate(same, axis=1))
    for t in range(17, 24):
        expected, state = step(spec, state, tokens(inputs, t, t + 1))
        found, tree = step(spec, tree, tokens(inputs, t, t + 1))
        assert_close(found, expected)
    assert_close(tree.checkpoint, state.checkpoint)


def test_vmap_and_windowed_loops_with_a_copy():
    """Members of a vmap at pointers of their own, and a loop without a predicate."""
    spec = make_spec("gated_delta_net", **COPIED)
    inputs = random_inputs(spec, 4, 20)
    xs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0)[:, :, None], inputs)
    expected, expected_state = reference(spec, inputs)

    def body(state, one):
        output, state = rs.step(spec, state, one)
        return state, output[:, 0]

    state, outputs = jit(lambda s, xs: rs.scan_steps(body, s, xs, window=6))(
        rs.init_state(spec, 4), xs
    )
    assert_close(jnp.moveaxis(outputs, 0, 1), expected, 2e-2)
    assert_close(rs.materialize(spec, state), expected_state, name="state")

    one = rs.init_state(spec, 1)
    members = jax.tree.map(lambda x: jnp.stack([x] * 4), one)
    early = rs.Pointer(*(jnp.zeros(4, jnp.int32),) * 3, jnp.asarray([True] * 4))
    members = dataclasses.replace(members, pointer=early)  # fresh rows: the copy is not looked at
    rows = jax.tree.map(lambda x: x[:, :, None], xs)

    def member_body(states, t_and_x):
        t, x = t_and_x
        output, states = jax.vmap(functools.partial(rs.step, spec))(states, x)
        due = (jnp.arange(4) == t)[:, None]
        flushed = jax.vmap(lambda s, w: rs.flush(spec, s, w))(states, due)
        return flushed, output[:, 0, 0]

    ragged = jax.tree.map(lambda x: x[:, None], members.pointer)
    members = dataclasses.replace(members, pointer=ragged)
    members, outputs = jit(lambda s, xs: jax.lax.scan(member_body, s, xs))(
        members, (jnp.arange(20), rows)
    )
    assert_close(jnp.moveaxis(outputs, 0, 1), expected, 2e-2)
    full = jax.vmap(lambda s: rs.materialize(spec, s))(members)
    assert_close(full[:, 0], expected_state, name="state")


def test_a_fold_by_blocks_of_rows_is_the_same(monkeypatch):
    spec = make_spec("kda", **COPIED)
    inputs = random_inputs(spec, 3, 4)
    _, state = verify(spec, rs.init_state(spec, 3), inputs)
    state = rs.commit(spec, state, 4)
    whole = flush(spec, state)
    monkeypatch.setattr(window, "_PAIR_BYTES", 1)
    blocks = flush(dataclasses.replace(spec, precision="high"), state)  # another program
    assert_close(blocks.checkpoint, whole.checkpoint, 1e-6)


def test_prefill_with_a_copy_is_differentiable():
    spec = make_spec("gated_delta_net", read_dtype="int8")
    inputs = random_inputs(spec, 1, 5)

    @functools.partial(jit, static_argnums=0)
    def gradients(spec, inputs):
        def loss(inputs):
            return jnp.sum(rs.prefill(spec, rs.init_state(spec, 1), inputs)[0] ** 2)

        return jax.grad(loss)(inputs)

    plain = gradients(dataclasses.replace(spec, read_dtype=None), inputs)
    chex.assert_trees_all_close(gradients(spec, inputs), plain, rtol=1e-6)


@pytest.mark.parametrize("key_dim", [10, 64, 128])
@pytest.mark.parametrize("name", ["bfloat16", "int8"])
def test_a_row_of_the_state_that_is_not_finite_stays_alone(name, key_dim):
    """One value row of one head has a NaN: so have its outputs, around flushes, and no others."""
    dims = dict(value_dim=64, key_dim=key_dim)
    spec = make_spec("gated_delta_net", read_dtype=name, window=3, **dims)
    inputs = random_inputs(spec, 2, 8)
    initial = jnp.zeros(spec.state_shape(2), jnp.float32).at[0, 1, 4, 2].set(jnp.nan)
    state = rs.init_state(spec, 2, initial, layout="vk")
    clean = rs.init_state(spec, 2)
    for t in range(8):
        output, state = step(spec, state, tokens(inputs, t, t + 1))
        expected, clean = step(spec, clean, tokens(inputs, t, t + 1))
        nan = np.isnan(np.asarray(output))
        assert nan[0, 0, 1, 4] and nan.sum() == 1
        np.testing.assert_array_equal(np.asarray(output)[~nan], np.asarray(expected)[~nan])
    assert np.isnan(np.asarray(rs.materialize(spec, state))).any(axis=-1).sum() == 1


# Low-precision checkpoints


def decode(spec, state, inputs):
    """All tokens one by one, and the state."""

    @jit
    def run(state, inputs):
        def body(state, one):
            output, state = rs.step(spec, state, jax.tree.map(lambda x: x[:, None], one))
            return state, output[:, 0]

        xs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
        state, outputs = jax.lax.scan(body, state, xs)
        return jnp.moveaxis(outputs, 0, 1), state

    return run(state, inputs)


@pytest.mark.parametrize("name", ["float16", "int8"])
def test_a_low_precision_checkpoint_rounds_once_a_window(name):
    """Replay rounds at each fold, conventional decoding at each token; both with and without keys.

    Under a decay of a tenth a token, what remains is a few roundings.
    """
    spec = make_spec("gated_delta_net", window=8, state_dtype=name)
    inputs = random_inputs(spec, 2, 40, gates=(-0.1, -0.2))
    _, expected = reference(spec.exact, inputs)
    for key in (None, jax.random.key(5)):
        start = rs.init_state(spec, 2, ragged=True, rounding_key=key)
        _, state = decode(spec, start, inputs)
        found = error(rs.materialize(spec, state), expected)
        assert 1e-5 < found < 4 * STEP[name], found
        assert state.checkpoint.dtype == jnp.dtype(name)
        zeros = precision.encode(jnp.zeros(spec.state_shape(2), jnp.float32), name)
        scan = jit(functools.partial(rs.recurrent_scan, spec))
        _, plain = scan(zeros, inputs, rounding_key=key)
        found = error(precision.decode(plain, jnp.float32), expected)
        assert 1e-5 < found < 8 * STEP[name], found
    moved = (np.asarray(state.rounding_key) != np.asarray(start.rounding_key)).any(axis=-1)
    assert moved.all()


def adding(spec, batch_size, num_tokens, value):
    """Inputs that add `value` to one column of the state at each token and forget nothing."""
    lead = (batch_size, num_tokens)
    column = jnp.zeros((*lead, spec.num_groups, spec.key_dim), jnp.float32).at[..., 0].set(1)
    return rs.TokenInputs(
        q=column,
        k=column,
        v=jnp.full((*lead, spec.num_heads, spec.value_dim), value, jnp.float32),
        g=jnp.zeros((*lead, spec.num_heads), jnp.float32),
        beta=jnp.ones((*lead, spec.num_heads), jnp.float32),
    )


def test_small_updates_are_lost_to_nearest_and_kept_on_average():
    """bfloat16, 1 + 0.01 a window: to nearest the state never moves, stochastically it does."""
    spec = rs.ReplaySpec.mamba2(
        num_heads=8,
        head_dim=32,
        state_dim=2,
        window=2,
        state_dtype=jnp.bfloat16,
        key_dtype=jnp.float32,
        value_dtype=jnp.float32,
    )
    inputs = adding(spec, 4, 81, 0.001)
    initial = jnp.ones(spec.state_shape(4), jnp.float32)
    run = functools.partial(decode, spec)

    def final(key):
        state = rs.init_state(spec, 4, initial, layout="vk", ragged=True, rounding_key=key)
        _, state = run(state, inputs)
        return np.asarray(rs.materialize(spec, state)[..., 0], np.float64)

    assert abs(final(None) - 1.001).max() < 1e-6  # 40 folds of 0.002, all of them lost
    found = final(jax.random.key(0))
    assert abs(found.mean() - 1.081) < 5 * found.std() / np.sqrt(found.size)
    np.testing.assert_array_equal(found, final(jax.random.key(0)))
    other = final(jax.random.key(1))
    assert (found != other).mean() > 0.5
    by_head = found.reshape(-1, spec.value_dim)
    assert len({row.tobytes() for row in by_head}) == len(by_head)
    assert abs(np.corrcoef(by_head)[~np.eye(len(by_head), dtype=bool)]).mean() < 0.25


def test_conventional_decoding_rounds_alike():
    """The baseline: the same for the same key, another for each step, row and head."""
    spec = rs.ReplaySpec.mamba2(
        num_heads=4,
        head_dim=64,
        state_dim=2,
        state_dtype=jnp.bfloat16,
        key_dtype=jnp.float32,
        value_dtype=jnp.float32,
    )
    inputs = adding(spec, 2, 40, 0.001)
    start = jnp.ones(spec.state_shape(2), jnp.bfloat16)
    scan = jit(functools.partial(rs.recurrent_scan, spec))
    _, nearest = scan(start, inputs)
    chex.assert_trees_all_equal(nearest, start)
    _, state = scan(start, inputs, rounding_key=jax.random.key(0))
    chex.assert_trees_all_equal(state, scan(start, inputs, rounding_key=jax.random.key(0))[1])
    found = np.asarray(state[..., 0], np.float64)
    assert abs(found.mean() - 1.04) < 5 * found.std() / np.sqrt(found.size)
    one_by_one = start
    keys = [jax.random.fold_in(jax.random.key(1), t) for t in range(2)]
    after = []
    for key in keys:
        _, one_by_one = rs.recurrent_step(spec, start, tokens(inputs, 0, 1), rounding_key=key)
        after.append(np.asarray(one_by_one, np.float32))
    assert (after[0] != after[1]).any()


def test_only_a_fold_uses_keys_up():
    spec = make_spec("gated_delta_net", window=4, state_dtype="int8")
    inputs = random_inputs(spec, 2, 4)
    state = rs.init_state(spec, 2, ragged=True, rounding_key=jax.random.key(0))
    _, held = step(spec, state, tokens(inputs, 0, 1))
    chex.assert_trees_all_equal(held.rounding_key, state.rounding_key)
    flushed = flush(spec, held, jnp.asarray([True, False]))
    moved = (flushed.rounding_key != held.rounding_key).any(axis=(1, 2))
    assert moved.tolist() == [True, False]
    chex.assert_trees_all_equal(flushed.checkpoint.values[1], held.checkpoint.values[1])
    _, prefilled = prefill(spec, held, inputs, jnp.asarray([0, 3]))
    moved = (prefilled.rounding_key != held.rounding_key).any(axis=(1, 2))
    assert moved.tolist() == [False, True]


def test_empty_rows_have_keys_of_their_own_for_every_head():
    spec = make_spec("kda", state_dtype="float16")
    state = rs.init_state(spec, 2, ragged=True, rounding_key=jax.random.key(0))
    taken = rs.take(spec, state, jnp.array([-1, 0]))
    chex.assert_trees_all_equal(taken.rounding_key[1], state.rounding_key[0])
    assert len(np.unique(np.asarray(taken.rounding_key[0]), axis=0)) == spec.num_heads


# Errors


@pytest.mark.parametrize(
    "fields, exception, match",
    [
        ({"read_dtype": "float32"}, ValueError, "read_dtype must be one of bfloat16.*float32"),
        ({"read_dtype": "int4"}, ValueError, "read_dtype must be one of .*int8, found int4"),
        ({"read_dtype": "fp8"}, TypeError, "read_dtype must be a dtype, one of .*'fp8'"),
        (
            {"read_dtype": "int8", "state_dtype": "bfloat16"},
            ValueError,
            "needs a checkpoint in float32 or float64, found state_dtype=bfloat16",
        ),
        (
            {"state_dtype": "float8_e4m3b11fnuz"},
            ValueError,
            "state_dtype must be one of float32, float64, bfloat16.*found float8_e4m3b11fnuz",
        ),
    ],
)
def test_formats_are_refused_by_name(fields, exception, match):
    with pytest.raises(exception, match=match):
        make_spec("mamba2", **fields)


@pytest.mark.parametrize(
    "x, dtype, error, match",
    [
        (ONES, "fp8", TypeError, "dtype must be a dtype, one of float32, .*, found 'fp8'"),
        (ONES, None, TypeError, "dtype must be a dtype, .*, found None"),
        (ONES, "int16", ValueError, "dtype must be one of float32, .*, found int16"),
        (ONES.astype(np.int32), "int8", TypeError, "x must be of a floating dtype, found int32"),
        ([[1.0]], "int8", TypeError, "x must be an array, found list"),
    ],
)
def test_what_cannot_be_encoded(x, dtype, error, match):
    with pytest.raises(error, match=match):
        precision.encode(x, dtype)


def test_the_best_implementation_falls_back():
    spec = make_spec("kda", read_dtype="int8")
    state, inputs = rs.init_state(spec, 1), random_inputs(spec, 1, 1)
    output, _ = rs.step(spec, state, inputs)
    chex.assert_trees_all_equal(output, rs.step(spec, state, inputs, implementation="xla")[0])
    with pytest.raises(ValueError, match="'mosaic_gpu' cannot run"):
        rs.step(spec, state, inputs, implementation="mosaic_gpu")


@pytest.mark.skipif(
    jax.__version_info__ < dispatch.OLDEST_JAX_FOR_KERNELS, reason="kernels need a newer jax"
)
def test_kernels_refuse_formats_by_name():
    dims = dict(num_heads=2, num_groups=2, value_dim=64, key_dim=32)
    spec = make_spec("kda", state_dtype="float16", **dims)
    state, inputs = rs.init_state(spec, 1), random_inputs(spec, 1, 1)
    match = "checkpoint must be float32, found float16"
    with dispatch.interpreted_kernels(), pytest.raises(ValueError, match=match):
        rs.step(spec, state, inputs, implementation="mosaic_gpu")
    spec = make_spec("kda", read_dtype="int8", **dims)
    assert kernels.why_not("mosaic_gpu", spec, 1) is None
    reason = kernels.why_not("triton", spec, 1)
    assert reason == "its kernels read no low-precision copy, found read_dtype=int8"


def test_states_of_another_format_are_refused():
    spec = make_spec("kda")
    copied = dataclasses.replace(spec, read_dtype="int8")
    rounded = dataclasses.replace(spec, state_dtype="int8")
    with pytest.raises(ValueError, match=r"read_copy of the state must be absent .*another spec"):
        rs.flush(spec, rs.init_state(copied, 1))
    with pytest.raises(ValueError, match=r"read_copy of the state must be present .*int8"):
        rs.flush(copied, rs.init_state(spec, 1))
    with pytest.raises(TypeError, match=r"read_copy.values .* must be int8, found float8_e5m2"):
        rs.flush(copied, rs.init_state(dataclasses.replace(spec, read_dtype="float8_e5m2"), 1))
    with pytest.raises(TypeError, match="checkpoint of the state must be Scaled int8, found flo"):
        rs.flush(rounded, rs.init_state(spec, 1))
    with pytest.raises(TypeError, match="must be float32, found Scaled int8"):
        rs.flush(spec, rs.init_state(rounded, 1))
    inputs = random_inputs(spec, 1, 1)
    zeros = jnp.zeros(spec.state_shape(1), jnp.float32)
    with pytest.raises(TypeError, match="must be Scaled int8, found float32: make one with"):
        rs.recurrent_step(rounded, zeros, inputs)
    scaled = rs.init_state(rounded, 1).checkpoint
    with pytest.raises(TypeError, match=r"found Scaled int8: pass precision.decode\(initial"):
        rs.init_state(rounded, 1, scaled, layout="vk")
    one_scale = dataclasses.replace(scaled, scale=scaled.scale[..., :1])
    with pytest.raises(ValueError, match=r"must be float32 of shape .* found float32 of shape"):
        rs.recurrent_step(rounded, one_scale, inputs)


def test_rounding_keys_are_checked():
    spec = make_spec("kda", state_dtype="float16")
    with pytest.raises(ValueError, match=r"needs a low-precision state_dtype, found .*float32"):
        rs.init_state(make_spec("kda"), 1, rounding_key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"from jax.random.key\(seed\), found int"):
        rs.init_state(spec, 1, rounding_key=0)
    with pytest.raises(ValueError, match=r"uint32 of shape \(1, 3, 2\), found uint32 of shape"):
        rs.init_state(spec, 1, rounding_key=jax.random.PRNGKey(0))
    with pytest.raises(ValueError, match=r"must be one key, found keys of shape \(2,\)"):
        rs.init_state(spec, 1, rounding_key=jax.random.split(jax.random.key(0)))
    keyed = rs.init_state(spec, 2, ragged=True, rounding_key=jax.random.key(0))
    bare = rs.init_state(spec, 2, ragged=True)
    for one, other, match in ((keyed, bare, "one in state"), (bare, keyed, "one in other")):
        with pytest.raises(ValueError, match=f"in both states or in none, found {match}"):
            rs.insert(spec, one, jnp.array([0, 1]), other)
        with pytest.raises(ValueError, match="a rounding_key in both or in none"):
            insert_rows(one, jnp.array([0, 1]), other)
    state = rs.init_state(make_spec("kda"), 1)
    with pytest.raises(ValueError, match="rounding_key of the state must be absent"):
        rs.flush(
            make_spec("kda"),
            dataclasses.replace(state, rounding_key=jnp.zeros((1, 3, 2), jnp.uint32)),
        )


def test_a_float64_checkpoint_with_a_copy():
    """Reference runs may have copies as well; what is folded stays float64."""
    with jax.enable_x64(True):
        wide = dict.fromkeys(("state_dtype", "key_dtype", "value_dtype"), jnp.float64)
        spec = make_spec("gated_delta_net", window=2, read_dtype="int8", **wide)
        inputs = random_inputs(spec, 1, 5)
        outputs, state = decode(spec, rs.init_state(spec, 1), inputs)
        expected, expected_state = reference(spec, inputs)
        assert outputs.dtype == state.checkpoint.dtype == jnp.float64
        assert state.read_copy.scale.dtype == jnp.float32
        assert 1e-5 < error(outputs, expected) < 2e-2
        assert_close(rs.materialize(spec, state), expected_state, 1e-12, "state")
