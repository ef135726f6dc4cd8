"""Slots, forks, padding and compilation: what a server does with a state, and reported faults."""

import dataclasses
import functools
import logging

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from oracle import assert_close, make_spec, random_inputs, reference, tokens

import replayssm_jax as rs

# Long memory: a record that is lost or kept by mistake stays visible.
GATES = (0.0, -1e-3, -1e-2, -0.1, -0.5)
ROWS = 3
PROMPT = 7

# Most tests share one shape of each call, since compiling takes most of the time.
jit = functools.partial(
    jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0}
)
step, verify, prefill, flush, insert, take, commit, materialize = map(
    jit,
    (
        rs.step,
        lambda spec, state, inputs, lengths: rs.verify(spec, state, inputs, lengths),
        lambda spec, state, inputs, lengths: rs.prefill(spec, state, inputs, lengths),
        rs.flush,
        rs.insert,
        rs.take,
        rs.commit,
        rs.materialize,
    ),
)


# Both rules and both kinds of decay; what differs by family alone is the base suite's.
@pytest.fixture(params=["mamba2", "kda"])
def family(request):
    return request.param


def small_spec(family, **options):
    return make_spec(family, window=5, max_tokens=2, **options)


def draw(spec, num_rows, num_tokens, seed=0):
    """Inputs in NumPy, since every slice of a JAX array is compiled."""
    inputs = random_inputs(spec, num_rows, num_tokens, seed=seed, gates=GATES)
    return jax.tree.map(np.asarray, inputs)


def small_inputs(spec, num_tokens, seed=0):
    return draw(spec, ROWS, num_tokens, seed)


def plain_decoding(spec, inputs, initial=None):
    """`reference`, in one shape: rows of zeros and zeros behind the last token are identities."""
    spec = dataclasses.replace(spec, window=16, max_tokens=1)
    num_rows, num_tokens = inputs.v.shape[:2]

    def pad(x, *sizes):
        sizes = [(0, size - n) for size, n in zip(sizes, x.shape, strict=False)]
        return np.pad(x, [*sizes, *[(0, 0)] * (x.ndim - len(sizes))])

    padded = jax.tree.map(lambda x: pad(np.asarray(x), ROWS, 52), inputs)
    initial = None if initial is None else pad(np.asarray(initial), ROWS)
    outputs, state = reference(spec, padded, initial)
    return outputs[:num_rows, :num_tokens], state[:num_rows]


def pick(tree, *rows):
    """The given rows of every leaf."""
    return jax.tree.map(lambda x: np.asarray(x)[list(rows)], tree)


def decode(spec, state, inputs):
    """All tokens one by one; outputs [B, T, H, P] and the state."""
    outputs = []
    for t in range(inputs.v.shape[1]):
        output, state = step(spec, state, tokens(inputs, t, t + 1))
        outputs.append(np.asarray(output))
    return np.concatenate(outputs, axis=1), state


def busy_state(spec, seed=0):
    """Rows with checkpoints, rings and drafts, at fills of their own."""
    inputs = small_inputs(spec, PROMPT + 20, seed)
    rows = np.arange(ROWS)
    _, state = prefill(
        spec, rs.init_state(spec, ROWS, ragged=True), tokens(inputs, 0, PROMPT), PROMPT - rows
    )
    for t in range(PROMPT, PROMPT + 20, 2):
        _, state = verify(spec, state, tokens(inputs, t, t + 2), np.full(ROWS, 2))
        state = commit(spec, state, (rows + t) % 3)
    _, state = verify(spec, state, tokens(inputs, 0, 2), rows % 3)
    return state


def numbered_state(spec, num_rows, seed=0):
    """A state in which every element of a leaf has a value of its own, drafts and all."""
    state = rs.init_state(spec, num_rows, ragged=True)
    rng = np.random.default_rng(seed)
    state = jax.tree.map(
        lambda x: jnp.asarray(rng.permutation(10 * x.size)[: x.size].reshape(x.shape), x.dtype),
        state,
    )
    length = state.pointer.length % (spec.window + 1)  # no more than a window holds
    return dataclasses.replace(state, pointer=dataclasses.replace(state.pointer, length=length))


def live_ring(spec, state):
    """The ring with zeros in place of dead slots; drafts count as dead."""
    start, length = (
        np.asarray(x).reshape(-1, 1) for x in (state.pointer.start, state.pointer.length)
    )
    live = (np.arange(spec.capacity) - start) % spec.capacity < length
    return jax.tree.map(
        lambda x: np.where(live.reshape(*live.shape, *(1,) * (x.ndim - 2)), x, 0), state.buffer
    )


# Rejected drafts


def test_fully_rejected_rows_leave_no_trace(family):
    """accepted = 0 is no index: checkpoint, live ring and pointer of the row stay as they were."""
    spec = small_spec(family)
    inputs, wrong = small_inputs(spec, 20), small_inputs(spec, 40, seed=1)
    state = commit(spec, busy_state(spec), np.zeros(ROWS, int))
    assert len(set(np.asarray(state.pointer.length).tolist())) > 1, "rows at different fills"
    initial = np.asarray(materialize(spec, state))
    outputs, unmoved = [], 0
    for t in range(20):
        _, drafted = verify(spec, state, tokens(wrong, 2 * t, 2 * t + 2), np.full(ROWS, 2))
        rejected = commit(spec, drafted, np.zeros(ROWS, int))
        chex.assert_trees_all_equal(rejected, rs.commit(spec, drafted, 0))
        partly = commit(spec, drafted, np.array([0, 2, 0]))
        chex.assert_trees_all_equal(pick(partly, 0, 2), pick(rejected, 0, 2))
        assert partly.pointer.length[1] == rejected.pointer.length[1] + 2
        one = tokens(inputs, t, t + 1)
        plain, after_plain = step(spec, state, one)
        output, after = step(spec, rejected, one)
        # The other rows were flushed by their drafts, to the same recurrent state.
        same = np.flatnonzero(np.asarray(state.pointer.length) + 2 <= spec.window)
        unmoved += len(same)
        for before, now in ((state, rejected), (after_plain, after)):
            chex.assert_trees_all_equal(
                pick((before.checkpoint, before.pointer, live_ring(spec, before)), *same),
                pick((now.checkpoint, now.pointer, live_ring(spec, now)), *same),
            )
        chex.assert_trees_all_equal(pick(output, *same), pick(plain, *same))
        outputs.append(output)
        state = after
    assert unmoved > 20
    expected, expected_state = plain_decoding(spec, inputs, initial)
    assert_close(np.concatenate(outputs, axis=1), expected)
    assert_close(materialize(spec, state), expected_state, name="state")


def test_rejection_by_a_scalar_pointer():
    spec = small_spec("gated_delta_net")
    inputs = small_inputs(spec, 2)
    _, state = step(spec, rs.init_state(spec, ROWS), tokens(inputs, 0, 1))
    _, drafted = rs.verify(spec, state, small_inputs(spec, 2, seed=1))
    rejected = rs.commit(spec, drafted, 0)
    chex.assert_trees_all_equal(
        (state.checkpoint, state.pointer, live_ring(spec, state)),
        (rejected.checkpoint, rejected.pointer, live_ring(spec, rejected)),
    )
    one = tokens(inputs, 1, 2)
    chex.assert_trees_all_equal(step(spec, state, one)[0], step(spec, rejected, one)[0])


# Slots


@pytest.mark.parametrize("padding", [-1, -2, -5, -(2**31), 5, 2**31 - 1])
@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["padding first", "padding last"])
@pytest.mark.parametrize("read_dtype", [None, "int8"])
def test_padding_slots_touch_no_row(family, padding, order, read_dtype):
    """Of a pool of 5 slots all but 3 stay bit-identical, in every leaf, scales too."""
    spec = small_spec(family, read_dtype=read_dtype)
    pool, other = numbered_state(spec, 5), numbered_state(spec, 2, seed=1)
    slots = np.array([padding, 3])[order]
    after = insert(spec, pool, slots, other)
    chex.assert_trees_all_equal(pick(after, 0, 1, 2, 4), pick(pool, 0, 1, 2, 4))
    chex.assert_trees_all_equal(pick(after, 3), pick(other, order.index(1)))
    if padding == -1:
        chex.assert_trees_all_equal(rs.insert(spec, pool, slots, other), after)


def test_rows_of_padding_indices_are_empty(family):
    spec = small_spec(family)
    pool = numbered_state(spec, 5)
    taken = take(spec, pool, np.array([-1, 3, 7, -4]))
    chex.assert_trees_all_equal(pick(taken, 1), pick(pool, 3))
    empty = rs.init_state(spec, 3, ragged=True)
    chex.assert_trees_all_equal(pick(taken, 0, 2, 3), pick(empty, 0, 1, 2))
    eager = rs.take(spec, pool, np.array([-1, 3, -1, -1]))
    chex.assert_trees_all_equal(eager, taken)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32])
def test_slots_of_any_integer_dtype(dtype):
    """A pool larger than the dtype of its slots can count."""
    spec = make_spec("mamba2", value_dim=1, key_dim=1, window=1)
    pool, other = numbered_state(spec, 300), numbered_state(spec, 2, seed=1)
    slots = np.array([-1 if np.issubdtype(dtype, np.signedinteger) else 17, 3], dtype)
    after = insert(spec, pool, slots, other)
    chex.assert_trees_all_equal(pick(after, 3), pick(other, 1))
    others = [i for i in range(300) if i not in slots.tolist()]
    chex.assert_trees_all_equal(pick(after, *others), pick(pool, *others))
    taken = take(spec, pool, slots)
    chex.assert_trees_all_equal(pick(taken, 1), pick(pool, 3))
    assert slots[0] == 17 or not np.asarray(taken.checkpoint[0]).any()


def test_insert_of_rows_that_moved_together():
    """Two prefills and two steps with a scalar pointer, then into slots of a ragged pool."""
    spec = small_spec("gated_delta_net")
    inputs = small_inputs(spec, 2 * PROMPT + 16)
    other, outputs = rs.init_state(spec, ROWS), []
    for t in (0, PROMPT):  # the second call continues
        output, other = rs.prefill(spec, other, tokens(inputs, t, t + PROMPT))
        outputs.append(output)
    begin = 2 * PROMPT
    output, other = decode(spec, other, tokens(inputs, begin, begin + 2))
    outputs.append(output)
    slots = np.array([2, 0, 1])
    pool = insert(spec, busy_state(spec), slots, other)
    following = jax.tree.map(lambda x: x[np.argsort(slots)], tokens(inputs, begin + 2, begin + 16))
    output, _ = decode(spec, pool, following)
    outputs.append(output[slots])
    assert_close(np.concatenate(outputs, axis=1), plain_decoding(spec, inputs)[0])


def fill_with_nan(spec, state, row):
    """An old tenant whose every input was NaN: checkpoint, ring and drafts."""
    bad = jax.tree.map(lambda x: np.full_like(x, np.nan), small_inputs(spec, PROMPT))
    lengths = (np.arange(ROWS) == row).astype(np.int32)
    _, state = prefill(spec, state, bad, PROMPT * lengths)
    for accepted in (2, 0):
        _, state = verify(spec, state, tokens(bad, 0, 2), 2 * lengths)
        state = commit(spec, state, accepted * lengths) if accepted else state
    assert np.isnan(state.checkpoint[row]).all()
    return state


@pytest.mark.parametrize("tenant", ["finite", "NaN"])
@pytest.mark.parametrize("admission", ["step", "prefill", "verify", "insert"])
def test_a_reused_slot_is_a_fresh_slot(family, tenant, admission):
    """Bit for bit, whatever the old tenant left behind; the neighbours notice nothing."""
    spec = small_spec(family)
    state = busy_state(spec)
    if tenant == "NaN":
        state = fill_with_nan(spec, state, 0)
    neighbours = pick(state, 1, 2)
    fresh = rs.init_state(spec, ROWS, ragged=True)
    if admission == "insert":
        reused = insert(spec, state, np.array([0, -1, -1]), fresh)
    else:
        reused = rs.reset(spec, state, np.array([True, False, False]))
    assert not np.asarray(materialize(spec, reused)[0]).any()
    inputs = small_inputs(spec, 24, seed=2)
    first = np.array([1, 0, 0])
    begin = {"prefill": PROMPT, "verify": 2}.get(admission, 0)
    if begin:
        admit = prefill if admission == "prefill" else verify
        output, reused = admit(spec, reused, tokens(inputs, 0, begin), begin * first)
        expected, fresh = admit(spec, fresh, tokens(inputs, 0, begin), begin * first)
        chex.assert_trees_all_equal(output[0], expected[0])
    chex.assert_trees_all_equal(pick(reused, 1, 2), neighbours)
    reused, fresh = (commit(spec, state, begin * first) for state in (reused, fresh))
    outputs, reused = decode(spec, reused, tokens(inputs, begin, 24))
    expected, fresh = decode(spec, fresh, tokens(inputs, begin, 24))
    chex.assert_trees_all_equal(outputs[0], expected[0])
    chex.assert_trees_all_equal(materialize(spec, reused)[0], materialize(spec, fresh)[0])
    assert np.isfinite(outputs).all()


def test_preempted_rows_continue(family):
    """A row taken out continues bit for bit; recomputed from its tokens, within rounding."""
    spec = small_spec(family)
    inputs = small_inputs(spec, PROMPT + 12)
    _, state = prefill(
        spec,
        rs.init_state(spec, ROWS, ragged=True),
        tokens(inputs, 0, PROMPT),
        np.full(ROWS, PROMPT),
    )
    undisturbed, _ = decode(spec, state, tokens(inputs, PROMPT, PROMPT + 12))
    _, state = decode(spec, state, tokens(inputs, PROMPT, PROMPT + 3))
    saved = take(spec, state, np.array([0, -1, -1]))
    busy = rs.reset(spec, state, np.array([True, False, False]))
    _, busy = decode(spec, busy, small_inputs(spec, 9, seed=1))
    resumed = insert(spec, busy, np.array([0, -1, -1]), saved)
    rest = tokens(inputs, PROMPT + 3, PROMPT + 12)
    chex.assert_trees_all_equal(decode(spec, resumed, rest)[0][0], undisturbed[0, 3:])
    again = rs.reset(spec, busy, np.array([True, False, False]))
    _, again = prefill(spec, again, tokens(inputs, 0, PROMPT), np.array([PROMPT, 0, 0]))
    _, again = prefill(spec, again, tokens(inputs, PROMPT, 2 * PROMPT), np.array([3, 0, 0]))
    expected = plain_decoding(spec, inputs)[0][:1, PROMPT + 3 :]
    assert_close(decode(spec, again, rest)[0][:1], expected)


# Forks


@pytest.mark.parametrize("ragged", [False, True], ids=["scalar", "ragged"])
def test_forks_at_every_fill(family, ragged):
    """Both children equal plain decoding, the parent stays as it was, also where the ring wraps."""
    spec = make_spec(family)
    num_steps, following = 2 * spec.window + 1, spec.window + 1
    inputs = draw(spec, 2, num_steps + following)
    branch = draw(spec, 1, following, seed=1)
    plain, _ = plain_decoding(spec, inputs)
    state, naive = rs.init_state(spec, 2, ragged=ragged), np.zeros(spec.state_shape(2))
    fills, forked, branched = set(), [], []
    for t in range(num_steps):
        fills.add(int(np.ravel(state.pointer.length)[0]))
        assert_close(materialize(spec, state), naive, name=f"state after {t} tokens")
        before = jax.tree.map(np.array, state)
        children = take(spec, state, np.array([0, 0]))
        same = tokens(pick(inputs, 0), t, t + following)
        both = jax.tree.map(lambda a, b: np.concatenate([a, b]), same, branch)
        outputs, children = decode(spec, children, both)
        chex.assert_trees_all_equal(state, before)
        assert_close(outputs[:1], plain[:1, t : t + following], name=f"child after {t} tokens")
        forked.append(naive[0])
        branched.append((outputs[1], materialize(spec, children)[1]))
        one = tokens(inputs, t, t + 1)
        output, state = step(spec, state, one)
        assert_close(output, plain[:, t : t + 1], name=f"parent after {t} tokens")
        naive = plain_decoding(spec, one, naive)[1]
    assert fills == set(range(spec.window + 1))
    branches = jax.tree.map(lambda x: np.repeat(x, num_steps, axis=0), branch)
    expected = reference(spec, branches, np.stack(forked))
    for t, (found, want) in enumerate(zip(branched, zip(*expected, strict=True), strict=True)):
        assert_close(found[0], want[0], name=f"branch after {t} tokens")
        assert_close(found[1], want[1], name=f"state of the branch after {t} tokens")


def test_arrays_over_explicit_axes_of_a_mesh_are_refused_by_name():
    """JAX would raise deep inside, of a sort or a gather; inside `shard_map` they are plain."""
    spec = make_spec("kda", window=4)
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
    rows = jax.sharding.PartitionSpec("rows")
    given = rs.init_state(spec, 2, ragged=True), random_inputs(spec, 2, 1)
    sharding = jax.sharding.NamedSharding(mesh, rows)
    state, one = jax.device_put(given, sharding)
    every = np.arange(2, dtype=np.int32)
    whole, spread = given[0], jax.device_put(every, sharding)
    for call in (
        lambda: rs.verify(spec, whole, given[1], lengths=spread),
        lambda: rs.prefill(spec, whole, given[1], lengths=spread),
        lambda: rs.prefill(spec, whole, given[1], valid=spread[:, None] > 0),
        lambda: rs.flush(spec, whole, spread > 0),
        lambda: rs.take(spec, whole, spread),
        lambda: rs.insert(spec, whole, spread, whole),
        lambda: rs.step(spec, state, one),
        lambda: rs.verify(spec, given[0], one),
        lambda: rs.prefill(spec, state, one),
        lambda: rs.flush(spec, state, every > 0),
        lambda: rs.take(spec, state, every),
        lambda: rs.insert(spec, given[0], every, state),
    ):
        with pytest.raises(ValueError, match=r"explicit axes of a mesh, found .*'rows'.*Auto"):
            jax.eval_shape(call)
    step = functools.partial(rs.step, spec)
    sharded = jax.shard_map(step, mesh=mesh, in_specs=(rows, rows), out_specs=rows)
    jax.eval_shape(sharded, state, one)


@pytest.mark.parametrize("ragged", [False, True], ids=["scalar", "ragged"])
def test_a_donated_fork_leaves_its_parent(ragged):
    """Neither a fork nor an imported state shares memory with where it came from."""
    spec = make_spec("mamba2", window=5)
    one = draw(spec, 2, 1)
    donating = jax.jit(rs.step, static_argnums=0, donate_argnums=1)
    initial = jnp.ones(spec.state_shape(2))
    parent = rs.init_state(spec, 2, initial, layout="vk", ragged=ragged)
    donating(spec, rs.take(spec, parent, jnp.arange(2)), one)
    expected = donating(spec, parent, one)[0]
    again = rs.init_state(spec, 2, initial, layout="vk", ragged=ragged)
    chex.assert_trees_all_equal(donating(spec, again, one)[0], expected)


def test_forks_take_their_drafts_along(family):
    """Each child accepts its own number of the parent's drafts."""
    spec = small_spec(family)
    inputs = small_inputs(spec, PROMPT + 2)
    init = rs.init_state(spec, ROWS, ragged=True)
    _, state = prefill(spec, init, tokens(inputs, 0, PROMPT), np.full(ROWS, PROMPT))
    _, state = verify(spec, state, tokens(inputs, PROMPT, PROMPT + 2), np.full(ROWS, 2))
    children = commit(spec, take(spec, state, np.array([1, 1, 1])), np.arange(3))
    states = materialize(spec, children)
    for accepted in range(3):
        _, expected = plain_decoding(spec, tokens(pick(inputs, 1), 0, PROMPT + accepted))
        assert_close(states[accepted : accepted + 1], expected, name=f"{accepted} accepted")


def test_ragged_states_go_through_tree_map(family):
    """Every leaf has the batch in front: people repeat and gather caches with `tree.map`."""
    spec = small_spec(family)
    pool = numbered_state(spec, 3)
    assert all(x.shape[0] == 3 for x in jax.tree.leaves(pool))
    repeated = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), pool)
    chex.assert_trees_all_equal(repeated, take(spec, pool, np.array([0, 0, 1, 1, 2, 2])))
    beams = np.array([2, 0, 2])
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[beams], pool), take(spec, pool, beams))


def test_a_group_from_one_prompt(family):
    """A prompt and a partly filled window, repeated, equal as many prompts of their own."""
    spec = small_spec(family)
    inputs = small_inputs(spec, PROMPT + 14)
    group = jax.tree.map(lambda x: x[np.array([1, 1, 1])], inputs)

    def rollout(inputs):
        state = rs.init_state(spec, ROWS, ragged=True)
        _, state = prefill(spec, state, tokens(inputs, 0, PROMPT), np.full(ROWS, PROMPT))
        return decode(spec, state, tokens(inputs, PROMPT, PROMPT + 3))[1]

    repeated = jax.tree.map(lambda x: jnp.repeat(x[1:2], ROWS, axis=0), rollout(inputs))
    rest = tokens(group, PROMPT + 3, PROMPT + 14)
    outputs, _ = decode(spec, repeated, rest)
    chex.assert_trees_all_equal(outputs, decode(spec, rollout(group), rest)[0])
    assert_close(outputs, plain_decoding(spec, group)[0][:, PROMPT + 3 :])


def test_rows_do_not_see_each_other(family):
    """A row beside rows of NaN, at another place and another phase, is bit for bit the same."""
    spec = small_spec(family)
    inputs = small_inputs(spec, 21)
    bad = jax.tree.map(lambda x: np.full_like(x, np.nan), inputs)

    def run(row, neighbours, lengths):
        state = rs.init_state(spec, ROWS, ragged=True)
        _, state = prefill(spec, state, tokens(neighbours, 0, PROMPT), np.array(lengths))
        mixed = jax.tree.map(
            lambda x, y: np.where(
                (np.arange(ROWS) == row).reshape(-1, *(1,) * (x.ndim - 1)), x[1:2], y
            ),
            inputs,
            neighbours,
        )
        outputs, state = decode(spec, state, mixed)
        return outputs, materialize(spec, state)

    plain = run(1, inputs, [0, 0, 0])
    beside_nan = run(2, bad, [4, 1, 0])
    chex.assert_trees_all_equal(pick(plain, 1), pick(beside_nan, 2))
    assert np.isnan(pick(beside_nan, 0, 1)[0]).all()
    assert_close(pick(plain[0], 1), plain_decoding(spec, pick(inputs, 1))[0])


# Prompts

LENGTHS = np.array([1, 3, 17, 64])


@jit
def prefill_valid(spec, state, inputs, valid):
    return rs.prefill(spec, state, inputs, valid=valid)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_prompts(family, side):
    """Prompts of 1, 3, 17 and 64 tokens in one batch equal each prompt alone; then continued."""
    spec = make_spec(family)
    rows, longest = np.arange(len(LENGTHS)), LENGTHS.max()
    inputs = draw(spec, len(LENGTHS), 2 * longest + 10)
    state = rs.init_state(spec, len(LENGTHS), ragged=True)
    used, outputs = np.zeros_like(LENGTHS), [[] for _ in LENGTHS]

    def run(function, state, real, *arguments):
        """The next tokens of each row, in the places that are real; NaN in the others."""
        index = used[:, None] + np.cumsum(real, axis=1) - 1

        def place(x):
            mask = real.reshape(*real.shape, *(1,) * (x.ndim - 2))
            return np.where(mask, x[rows[:, None], np.where(real, index, 0)], np.float32(np.nan))

        output, state = function(spec, state, jax.tree.map(place, inputs), *arguments)
        assert not np.asarray(output)[~real].any(), "outputs of padding must be zero"
        for row, use in enumerate(real):
            outputs[row].append(np.asarray(output)[row, use])
        return state, used + real.sum(axis=1)

    for lengths in (LENGTHS, LENGTHS[::-1]):  # the second call continues
        if side == "right":
            real = np.arange(longest) < lengths[:, None]
            state, used = run(prefill, state, real, lengths)
        else:
            real = np.arange(longest) >= longest - lengths[:, None]
            state, used = run(prefill_valid, state, real, real)
        for _ in range(3):
            state, used = run(step, state, np.ones((len(LENGTHS), 1), bool))
    # Identities after a row's own tokens, so that one run of the oracle serves all lengths.
    after = np.arange(inputs.v.shape[1]) >= used[:, None]
    gates = {
        name: np.where(after.reshape(*after.shape, *(1,) * (x.ndim - 2)), np.float32(0), x)
        for name, x in {"g": inputs.g, "beta": inputs.beta}.items()
    }
    expected, expected_states = reference(spec, dataclasses.replace(inputs, **gates))
    states = materialize(spec, state)
    for row, length in enumerate(used):
        found = np.concatenate(outputs[row])
        assert_close(found, expected[row, :length], name=f"outputs of row {row}")
        assert_close(states[row], expected_states[row], name=f"state of row {row}")


def test_padding_and_packing_equal_the_unpadded_run(family):
    """Two documents of 10 tokens: padded on either side, and packed behind one another."""
    spec = small_spec(family)
    documents = draw(spec, 2, 10)
    expected, expected_state = plain_decoding(spec, documents)

    def rows(x):
        first, second = x
        pad = np.zeros_like(first)
        pairs = [(first, pad), (pad, first), (second, pad), (pad, second), (first, second)]
        return np.stack([np.concatenate(pair) for pair in pairs])

    first_half = np.arange(20)[None] < 10
    is_first = np.array([[True], [False], [True], [False], [True]])
    valid = (first_half == is_first) | (np.arange(5) == 4)[:, None]
    resets = (np.arange(20)[None] == 10) & (np.arange(5) == 4)[:, None]
    outputs, state = rs.prefill(
        spec,
        rs.init_state(spec, 5, ragged=True),
        jax.tree.map(rows, documents),
        valid=valid,
        resets=resets,
    )
    halves = np.asarray(outputs).reshape(5, 2, 10, *outputs.shape[2:])
    for row, half, document in ((0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1), (4, 0, 0), (4, 1, 1)):
        assert_close(halves[row, half], expected[document], name=f"row {row}")
    for row, document in enumerate((0, 0, 1, 1, 1)):
        found = materialize(spec, state)[row]
        assert_close(found, expected_state[document], name=f"state of row {row}")


@jit
def prefill_packed(spec, state, inputs, resets):
    return rs.prefill(spec, state, inputs, resets=resets, chunk_size=8)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("what", ["state", "k", "v", "g", "beta"])
def test_resets_forget_what_is_not_finite(family, what, value):
    """From the reset on, outputs and state are those of a finite past, bit for bit."""
    spec = small_spec(family)
    inputs = small_inputs(spec, 20)
    state = busy_state(spec)
    resets = np.zeros((ROWS, 20), bool)
    resets[0, [0, 13]] = resets[1, 5] = resets[2, [0, 5, 17]] = True
    places = {0: 12, 1: 2, 2: 6}  # of the bad tokens: before, within and behind their chunk's reset
    if what == "state":
        checkpoint = state.checkpoint.at[:, 0, 0, 0].set(value)
        bad = dataclasses.replace(state, checkpoint=checkpoint), inputs
        lost = (np.arange(20) < 5) & (np.arange(ROWS) == 1)[:, None]
    else:
        leaf = np.array(getattr(inputs, what))
        for row, place in places.items():
            leaf[row, place].flat[-1] = value
        bad = state, dataclasses.replace(inputs, **{what: leaf})
        segment = np.cumsum(resets, axis=1)
        lost = np.zeros((ROWS, 20), bool)
        for row, place in places.items():
            lost[row, place:] = segment[row, place:] == segment[row, place]
    expected, after = prefill_packed(spec, state, inputs, resets)
    found, recovered = prefill_packed(spec, *bad, resets)
    np.testing.assert_array_equal(np.asarray(found)[~lost], np.asarray(expected)[~lost])
    assert np.isnan(np.asarray(found)[lost]).all()
    chex.assert_trees_all_equal(recovered.checkpoint, after.checkpoint)


def test_resets_forget_a_state_that_has_overflowed(family):
    """Keys that are not normalised make the delta rule diverge, from finite inputs."""
    spec = small_spec(family)
    inputs = small_inputs(spec, 32)
    before = np.arange(32)[None, :, None, None] < 18
    huge = {"k": np.where(before, 1e5, 1) * inputs.k, "v": np.where(before, 1e34, 1) * inputs.v}
    wild = dataclasses.replace(inputs, **jax.tree.map(np.float32, huge))
    resets = np.broadcast_to(np.arange(32) == 18, (ROWS, 32))
    outputs, state = prefill_packed(spec, rs.init_state(spec, ROWS), wild, resets)
    assert not np.isfinite(outputs[:, 17]).any()
    expected, expected_state = plain_decoding(spec, tokens(wild, 18, 32))
    assert_close(outputs[:, 18:], expected)
    assert_close(materialize(spec, state), expected_state, name="state")


def test_a_loss_without_resets_stays_lost(family):
    spec = small_spec(family)
    inputs = jax.tree.map(np.array, small_inputs(spec, 20))
    inputs.v[1, 9] = np.nan
    state = rs.init_state(spec, ROWS, ragged=True)
    outputs, state = prefill_packed(spec, state, inputs, np.zeros((ROWS, 20), bool))
    assert np.isfinite(outputs[1, :9]).all() and np.isnan(outputs[1, 9:]).all()
    assert np.isnan(state.checkpoint[1]).all()
    assert all(np.isfinite(x).all() for x in pick((outputs, state.checkpoint), 0, 2))


def test_a_second_prefill_continues(family):
    spec = small_spec(family)
    inputs = small_inputs(spec, 2 * PROMPT)
    state, outputs = rs.init_state(spec, ROWS, ragged=True), []
    for t in (0, PROMPT):
        chunk = tokens(inputs, t, t + PROMPT)
        output, state = prefill(spec, state, chunk, np.full(ROWS, PROMPT))
        outputs.append(output)
    expected, expected_state = plain_decoding(spec, inputs)
    assert_close(np.concatenate(outputs, axis=1), expected)
    assert_close(materialize(spec, state), expected_state, name="state")


# Windows that are outrun

WINDOW = 5


def windowed_loop(body, length):
    """The compiled loop over `length` steps: spec, state, tokens of all steps and constants."""

    @jit
    def run(spec, state, inputs, *constants):
        def one_step(state, x):
            t, token = x
            token = jax.tree.map(lambda x: x[:, None], token)
            return body(spec, state, t, token, *constants)

        xs = jnp.arange(length), jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
        return rs.scan_steps(one_step, state, xs, window=WINDOW)

    return run


def step_twice(spec, state, t, token):
    _, state = rs.step(spec, state, token)
    output, state = rs.step(spec, state, token)
    return state, output


@pytest.mark.parametrize("ragged", [False, True], ids=["scalar", "ragged"])
def test_a_state_that_outran_its_window_stays_loud(family, ragged):
    """Records are lost, so nothing that is made of the state later may be finite."""
    spec = small_spec(family)
    state = rs.init_state(spec, ROWS, ragged=ragged)
    if ragged:  # a fresh checkpoint counts as zero, whatever it is multiplied with
        state = rs.reset(spec, state, np.full(ROWS, True))
    outrun, outputs = windowed_loop(step_twice, WINDOW)(spec, state, small_inputs(spec, WINDOW))
    assert np.isfinite(outputs[:3]).all() and np.isnan(outputs[3:]).all()
    one = small_inputs(spec, 1)
    for after in (
        flush(spec, outrun).checkpoint,
        materialize(spec, outrun),
        jit(lambda spec, state: rs.prefill(spec, state, one))(spec, outrun)[1].checkpoint,
        step(spec, outrun, one)[0],
        windowed_loop(step_twice, 1)(spec, outrun, one)[0].checkpoint,
    ):
        assert np.isnan(after).all()
    with pytest.raises(ValueError, match=r"at most window=5 .*found .*9.*more than once"):
        rs.flush(spec, outrun)


def test_rows_inserted_in_a_windowed_loop(family):
    """A flushed row fits at any place of the window; a fuller one is NaN, and only that."""
    spec = small_spec(family)
    inputs, more = small_inputs(spec, 4), small_inputs(spec, 10, seed=1)
    initial = rs.init_state(spec, ROWS, ragged=True)
    _, other = decode(spec, initial, inputs)

    def body(spec, state, t, token, other):
        slots = jnp.where(t == 1, jnp.array([-1, 1, -1]), -1)
        output, state = rs.step(spec, rs.insert(spec, state, slots, other), token)
        return state, output[:, 0]

    run = windowed_loop(body, 10)
    flushed, _ = run(spec, initial, more, flush(spec, other))
    alone = jax.tree.map(lambda x, y: np.concatenate([x[1:2], y[1:2, 1:]], axis=1), inputs, more)
    expected = plain_decoding(spec, alone)[1]
    assert_close(materialize(spec, flushed)[1:2], expected, name="the inserted row")
    fuller, outputs = run(spec, initial, more, other)
    assert np.isnan(outputs[-1, 1]).all() and np.isnan(fuller.checkpoint[1]).all()
    chex.assert_trees_all_equal(pick(fuller, 0, 2), pick(flushed, 0, 2))


def test_rows_that_start_again_in_a_windowed_loop(family):
    """From nothing, and from a given initial state; neighbours notice nothing."""
    spec = small_spec(family)
    inputs = small_inputs(spec, 14)
    state = rs.init_state(spec, ROWS, ragged=True)
    initial = rs.init_state(spec, ROWS, jnp.ones(spec.state_shape(ROWS)), layout="vk", ragged=True)

    def body(spec, state, t, token, initial):
        state = rs.reset(spec, state, (t == 3) & (jnp.arange(ROWS) == 0))
        done = (t == 7) & (jnp.arange(ROWS) == 1)
        state = rs.insert(spec, state, jnp.where(done, jnp.arange(ROWS), -1), initial)
        output, state = rs.step(spec, state, token)
        return state, output[:, 0]

    state, outputs = windowed_loop(body, 14)(spec, state, inputs, initial)
    outputs, states = np.moveaxis(np.asarray(outputs), 0, 1), materialize(spec, state)
    for row, begin, start in ((0, 3, None), (1, 7, np.ones(spec.state_shape(1))), (2, 0, None)):
        expected = plain_decoding(spec, tokens(pick(inputs, row), begin, 14), start)
        assert_close(outputs[row : row + 1, begin:], expected[0], name=f"row {row}")
        assert_close(states[row : row + 1], expected[1], name=f"state of row {row}")


@pytest.mark.parametrize("how", ["where", "cond"])
def test_mixing_states_in_a_windowed_loop_names_the_remedy(how):
    spec = small_spec("mamba2")
    initial = rs.init_state(spec, ROWS, ragged=True)

    def body(spec, state, t, token):
        if how == "where":
            state = jax.tree.map(lambda a, b: jnp.where(t == 3, a, b), initial, state)
        else:
            state = jax.lax.cond(t == 3, lambda: initial, lambda: state)
        return state, t

    with pytest.raises((TypeError, ValueError), match=r"rs\.reset or rs\.insert"):
        windowed_loop(body, 6)(spec, initial, small_inputs(spec, 6))


def test_a_state_of_a_larger_window_is_refused(family):
    """Windows that share a capacity share all shapes; records beyond the smaller would be lost."""
    large, small = make_spec(family, window=8), make_spec(family, window=3)
    inputs = small_inputs(large, 6)
    assert large.capacity == small.capacity
    _, state = decode(large, rs.init_state(large, ROWS, ragged=True), inputs)
    with pytest.raises(ValueError, match=r"at most window=3 .*found \[6, 6, 6\]: .*larger window"):
        rs.materialize(small, state)
    assert np.isnan(materialize(small, state)).all(), "traced, it is loud"
    _, few = decode(large, rs.init_state(large, ROWS, ragged=True), tokens(inputs, 0, 3))
    expected = plain_decoding(large, tokens(inputs, 0, 3))[1]
    assert_close(rs.materialize(small, few), expected, name="state")


@pytest.mark.parametrize("length", [0, 3, WINDOW, 2 * WINDOW + 1])
def test_python_scalars_in_a_windowed_loop(length):
    """In the carry and among the outputs, as in lax.scan."""
    spec = make_spec("mamba2", window=WINDOW)
    one = draw(spec, 1, 1)

    def body(carry, _):
        count, state = carry
        _, state = rs.step(spec, state, one)
        return (count.astype(jnp.int32) + 1, state), (1.5, count, jax.random.key(3))

    init = (0, rs.init_state(spec, 1))
    (count, state), found = rs.scan_steps(body, init, length=length, window=WINDOW)
    (_, expected_state), expected = jax.lax.scan(body, init, length=length)
    chex.assert_trees_all_equal(found, expected)
    assert count == length
    assert_close(materialize(spec, state), materialize(spec, expected_state), name="state")


# States from elsewhere


@pytest.mark.parametrize("dims", [{}, {"value_dim": 8, "key_dim": 8}], ids=["P != N", "P = N"])
def test_states_go_out_and_come_back_in_both_layouts(dims):
    spec = make_spec("gated_delta_net", window=5, **dims)
    inputs = small_inputs(spec, 12)
    _, state = decode(spec, rs.init_state(spec, ROWS), tokens(inputs, 0, 8))
    expected, _ = plain_decoding(spec, inputs)
    naive = np.asarray(plain_decoding(spec, tokens(inputs, 0, 8))[1])
    for layout, want in (("vk", naive), ("kv", np.swapaxes(naive, 2, 3))):
        exported = rs.materialize(spec, state, layout=layout)
        assert_close(exported, want, name=layout)
        imported = rs.init_state(spec, ROWS, exported, layout=layout)
        chex.assert_trees_all_equal(rs.materialize(spec, imported, layout=layout), exported)
        outputs, _ = decode(spec, imported, tokens(inputs, 8, 12))
        assert_close(outputs, expected[:, 8:], name=layout)


# Compilation


def once(function):
    """The function as compiled with a static spec; a second trace fails."""
    return jit(chex.assert_max_traces(function, n=1))


@pytest.mark.parametrize("ragged", [False, True], ids=["scalar", "ragged"])
def test_one_trace_serves_all_pointers(ragged):
    """Nothing that changes while serving is a constant of the compiled step."""
    chex.clear_trace_counter()
    spec = small_spec("gated_delta_net")
    inputs = small_inputs(spec, 40)
    expected, _ = plain_decoding(spec, inputs)
    step, commit = once(rs.step), once(rs.commit)
    flush = once(lambda spec, state: rs.flush(spec, state))
    verify = once(lambda spec, state, inputs: rs.verify(spec, state, inputs))
    state, position, pointers = rs.init_state(spec, ROWS, ragged=ragged), 0, set()
    for turn in range(24):
        output, state = step(spec, state, tokens(inputs, position, position + 1))
        assert_close(output, expected[:, position : position + 1])
        position += 1
        output, state = verify(spec, state, tokens(inputs, position, position + 2))
        assert_close(output, expected[:, position : position + 2])
        accepted = turn % 3 if position < 35 else 0
        state = commit(spec, state, accepted)
        position += accepted
        if turn % 7 == 0:
            state = flush(spec, state)
        pointers.add(
            tuple(int(np.ravel(x)[0]) for x in (state.pointer.start, state.pointer.length))
        )
        if position > 37:
            break
    assert len(pointers) > 6


def test_one_trace_serves_all_slots():
    chex.clear_trace_counter()
    spec = small_spec("gated_delta_net")
    inputs = small_inputs(spec, 14)
    insert, take, reset, commit = map(once, (rs.insert, rs.take, rs.reset, rs.commit))
    verify = once(lambda spec, state, inputs, lengths: rs.verify(spec, state, inputs, lengths))
    flush = once(lambda spec, state, where: rs.flush(spec, state, where))
    prefill = once(lambda spec, state, inputs, lengths: rs.prefill(spec, state, inputs, lengths))
    state, rows = rs.init_state(spec, ROWS, ragged=True), np.arange(ROWS)
    for t in range(6):
        one = rows == t % 3
        _, state = prefill(spec, state, tokens(inputs, 0, PROMPT), (rows + t) % 4)
        _, state = verify(spec, state, tokens(inputs, 2 * t, 2 * t + 2), (rows * t) % 3)
        state = commit(spec, state, rows % 2)
        state = flush(spec, reset(spec, state, one), ~one)
        saved = take(spec, state, np.array([t % 3]))
        state = insert(spec, state, np.array([t % 4 - 1]), saved)


def test_windowed_loops_return_what_they_took():
    """A loop's result goes back into the same compiled loop and into the compiled step."""
    chex.clear_trace_counter()
    spec = make_spec("mamba2", window=5)
    inputs = draw(spec, 1, 24)
    expected, _ = plain_decoding(spec, inputs)

    def run(spec, state, inputs):
        def body(state, token):
            output, state = rs.step(spec, state, jax.tree.map(lambda x: x[:, None], token))
            return state, output[:, 0]

        xs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
        state, outputs = rs.scan_steps(body, state, xs, window=5)
        return jnp.moveaxis(outputs, 0, 1), state

    run, step = once(run), once(rs.step)
    state = rs.init_state(spec, 1, ragged=True)
    for t in range(0, 24, 8):
        output, state = run(spec, state, tokens(inputs, t, t + 7))
        assert_close(output, expected[:, t : t + 7])
        output, state = step(spec, state, tokens(inputs, t + 7, t + 8))
        assert_close(output, expected[:, t + 7 : t + 8])


def test_equal_specs_share_what_is_compiled():
    """A spec is hashable by value, however its dtypes and numbers are spelled."""
    chex.clear_trace_counter()
    narrow = dict(key_dtype=jnp.bfloat16, value_dtype="bfloat16")
    specs = [
        make_spec("kda", **narrow, state_dtype=jnp.float32),
        make_spec(
            "kda", key_dtype="bfloat16", value_dtype=jnp.dtype("bfloat16"), window=np.int64(16)
        ),
        rs.ReplaySpec.kda(num_heads=3, key_dim=10, value_dim=12, state_dtype="float32"),
    ]
    assert len(set(specs)) == 1
    assert dataclasses.replace(specs[0], window=8) not in specs
    step = once(rs.step)
    for spec in specs:
        step(spec, rs.init_state(spec, 1), draw(spec, 1, 1))


def test_nothing_compiles_twice(caplog):
    """Called eagerly, every operation compiles on its first call only, `init_state` too."""

    def serve():
        # Dims of no other test, so that the first call finds nothing compiled.
        spec = make_spec("mamba2", key_dim=7, max_tokens=2)
        inputs = draw(spec, 2, 8)
        state = rs.init_state(spec, 2, ragged=True)
        _, state = rs.prefill(spec, state, tokens(inputs, 0, 4))
        _, state = rs.step(spec, state, tokens(inputs, 4, 5))
        _, state = rs.verify(spec, state, tokens(inputs, 5, 7))
        state = rs.flush(spec, rs.commit(spec, state, 1))
        state = rs.reset(spec, state, np.array([True, False]))
        state = rs.insert(spec, state, np.array([1]), rs.take(spec, state, np.array([0])))
        rs.materialize(spec, state)

    def compilations():
        return [r.getMessage() for r in caplog.records if "ompiling" in r.getMessage()]

    with jax.log_compiles(), caplog.at_level(logging.DEBUG):
        serve()
        assert any("_init_state" in message for message in compilations())
        caplog.clear()
        serve()
        assert not compilations()


@pytest.mark.slow
@pytest.mark.parametrize("family, read_dtype", [("mamba2", None), ("kda", "int8")])
def test_tools_that_look_for_nan_find_none_in_healthy_calls(family, read_dtype):
    """Operation by operation, as `jax.debug_nans` runs what gave one and `checkify` all."""
    spec = make_spec(family, window=2, read_dtype=read_dtype)
    state, one = rs.init_state(spec, 2, ragged=True), random_inputs(spec, 2, 1)
    many, resets = random_inputs(spec, 2, 3), np.arange(6).reshape(2, 3) == 1

    def run():
        _, after = rs.prefill(spec, state, many, resets=resets)
        after, outputs = rs.scan_steps(
            lambda state, _: rs.step(spec, state, one)[::-1], after, None, 3, window=2
        )
        return outputs, rs.flush(spec, after)

    errors, expected = checkify.checkify(jax.jit(run), errors=checkify.float_checks)()
    errors.throw()
    with jax.debug_nans(True), jax.disable_jit():
        chex.assert_trees_all_close(run()[0], expected[0], rtol=1e-4, atol=1e-5)
