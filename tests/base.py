"""The suite that every implementation must pass, for every family; subclasses name the backend."""

import dataclasses
import functools
import itertools
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import (
    FAMILIES,
    assert_close,
    error,
    make_spec,
    poison_dead_slots,
    random_inputs,
    reference,
    tokens,
)

import replayssm_jax as rs

GATES = (0.0, -1e-4, -1.0, -8.0, -40.0, -200.0)
UNEVEN = {"window": 13, "max_tokens": 5}  # of several tests, so that they share what is compiled


@functools.cache
def _jitted(suite):
    operations = {"step": suite.step, "verify": suite.verify, "flush": suite.flush}
    operations = {name: functools.partial(f, suite()) for name, f in operations.items()}
    return {name: jax.jit(f, static_argnums=0) for name, f in operations.items()}


@functools.cache
def _decode_loop(suite, scan):
    @functools.partial(jax.jit, static_argnums=0)
    def run(spec, state, inputs):
        def body(state, token):
            one = jax.tree.map(lambda x: x[:, None], token)
            output, state = suite().step(spec, state, one)
            return state, output[:, 0]

        xs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
        state, outputs = scan(body, state, xs)
        return jnp.moveaxis(outputs, 0, 1), state

    return run


class CoreSuite:
    """Subclass it with `implementation` set and a `Test` name."""

    implementation: str | None = None
    dims: ClassVar = {}  # by family, where an implementation needs other shapes

    def make_spec(self, family, **overrides):
        return make_spec(family, **{**self.dims.get(family, {}), **overrides})

    @pytest.fixture(params=FAMILIES)
    def family(self, request):
        return request.param

    @pytest.fixture(params=[False, True], ids=["scalar", "ragged"])
    def ragged(self, request):
        return request.param

    def step(self, spec, state, inputs):
        return rs.step(spec, state, inputs, implementation=self.implementation)

    def verify(self, spec, state, inputs, lengths=None):
        return rs.verify(spec, state, inputs, lengths, implementation=self.implementation)

    def flush(self, spec, state, where=None):
        return rs.flush(spec, state, where, implementation=self.implementation)

    @property
    def jitted(self):
        """The operations as one would compile them: spec static."""
        return _jitted(type(self))

    def decode(self, spec, state, inputs, scan=jax.lax.scan):
        """All tokens one by one in one compiled loop; outputs [B, T, H, P] and the state."""
        return _decode_loop(type(self), scan)(spec, state, inputs)

    # Numerics

    def test_steps_over_64_windows(self, family, ragged):
        spec = self.make_spec(family)
        inputs = random_inputs(spec, 2, 64 * spec.window)
        outputs, state = self.decode(spec, rs.init_state(spec, 2, ragged=ragged), inputs)
        expected, expected_state = reference(spec, inputs)
        assert_close(outputs, expected)
        assert_close(rs.materialize(spec, state), expected_state, name="state")

    def test_state_error_stays_near_that_of_the_plain_recurrence(self, family):
        """Drift over flush cycles: bf16 records, fp32 state, 64 windows, long memory."""
        spec = self.make_spec(family, key_dtype=jnp.bfloat16, value_dtype=jnp.bfloat16)
        inputs = random_inputs(spec, 2, 64 * spec.window, gates=(-1e-4, -1e-3, -1e-2))
        _, state = self.decode(spec, rs.init_state(spec, 2), inputs)
        plain = jnp.zeros(spec.state_shape(2), jnp.float32)
        _, plain = jax.jit(rs.recurrent_scan, static_argnums=0)(spec, plain, inputs)
        _, expected = reference(spec, inputs)
        ours, theirs = error(rs.materialize(spec, state), expected), error(plain, expected)
        assert ours <= 2 * theirs, (ours, theirs)

    @pytest.mark.parametrize("window", [16, 64])
    def test_gates_of_all_sizes_in_one_window(self, family, window):
        spec = self.make_spec(family, window=window, max_tokens=8)
        inputs = random_inputs(spec, 2, 4 * window, gates=GATES)
        expected, expected_state = reference(spec, inputs)
        outputs, state = self.decode(spec, rs.init_state(spec, 2), inputs)
        assert_close(outputs, expected)
        assert_close(rs.materialize(spec, state), expected_state, name="state")
        outputs, state = rs.prefill(spec, rs.init_state(spec, 2), inputs)
        assert_close(outputs, expected, name="prefill")
        assert_close(rs.materialize(spec, state), expected_state, name="prefilled state")
        outputs, state = self.drafts(spec, rs.init_state(spec, 2), inputs, [8])
        assert_close(outputs, expected, name="verify")

    @pytest.mark.parametrize("family", ["kda", "gla"])
    def test_channel_spans_of_600_in_one_window(self, family):
        """Channels that forget nothing beside channels that lose 600 powers of two."""
        spec = self.make_spec(family)
        inputs = random_inputs(spec, 2, 3 * spec.window)
        span = jnp.linspace(0, -600 * np.log(2) / spec.window, spec.key_dim)
        inputs = dataclasses.replace(inputs, g=jnp.broadcast_to(span, inputs.g.shape))
        expected, expected_state = reference(spec, inputs)
        for run in (self.decode, rs.prefill):
            args = (spec, rs.init_state(spec, 2), inputs)
            outputs, state = run(*args)
            assert_close(outputs, expected)
            assert_close(rs.materialize(spec, state), expected_state, name="state")

    def test_bf16_outputs_do_not_drift(self, family):
        """The rounding of 4096 steps does not accumulate: the last windows are as the first."""
        spec = self.make_spec(family, key_dtype=jnp.bfloat16, value_dtype=jnp.bfloat16)
        inputs = random_inputs(spec, 1, 4096, gates=(-1e-3, -1e-1))
        outputs, _ = self.decode(spec, rs.init_state(spec, 1), inputs)
        expected, _ = reference(spec, inputs)
        first = error(outputs[:, 128:640], expected[:, 128:640])
        last = error(outputs[:, -512:], expected[:, -512:])
        assert last <= 1.2 * first <= 1e-2, (first, last)

    # One recurrence, many ways to run it

    def drafts(self, spec, state, inputs, sizes):
        """Verify all tokens in drafts of the given sizes, over and over, each accepted."""
        outputs, position, turn = [], 0, 0
        while position < inputs.v.shape[1]:
            size = min(sizes[turn % len(sizes)], inputs.v.shape[1] - position)
            draft = tokens(inputs, position, position + size)
            output, state = self.jitted["verify"](spec, state, draft)
            state = rs.commit(spec, state, size)
            outputs.append(output)
            position, turn = position + size, turn + 1
        return np.concatenate(outputs, axis=1), state

    def test_drafts_of_any_size(self, family, ragged):
        spec = self.make_spec(family, **UNEVEN)
        inputs = random_inputs(spec, 2, 60)
        expected, expected_state = reference(spec, inputs)
        state = rs.init_state(spec, 2, ragged=ragged)
        outputs, state = self.drafts(spec, state, inputs, [5, 1, 3])
        assert_close(outputs, expected)
        assert_close(rs.materialize(spec, state), expected_state, name="state")

    def test_step_is_verify_and_commit_bit_for_bit(self, family, ragged):
        spec = self.make_spec(
            family, max_tokens=4, window=5, key_dtype=jnp.bfloat16, value_dtype=jnp.bfloat16
        )
        inputs = random_inputs(spec, 2, 13)
        stepped = verified = rs.init_state(spec, 2, ragged=ragged)
        for t in range(13):
            one = tokens(inputs, t, t + 1)
            output, stepped = self.jitted["step"](spec, stepped, one)
            drafted, verified = self.jitted["verify"](spec, verified, one)
            verified = rs.commit(spec, verified, 1)
            chex.assert_trees_all_equal((output, stepped), (drafted, verified))

    def test_any_flush_schedule(self, family):
        spec = self.make_spec(family)
        inputs = random_inputs(spec, 3, 40)
        state = rs.init_state(spec, 3, ragged=True)
        rng = np.random.default_rng(0)
        outputs = []
        for t in range(40):
            output, state = self.jitted["step"](spec, state, tokens(inputs, t, t + 1))
            outputs.append(output)
            state = self.jitted["flush"](spec, state, jnp.asarray(rng.random(3) < 0.2))
        expected, expected_state = reference(spec, inputs)
        assert_close(np.concatenate(outputs, axis=1), expected)
        assert_close(rs.materialize(spec, state), expected_state, name="state")
        assert_close(self.flush(spec, state).checkpoint, expected_state, name="checkpoint")

    @pytest.mark.parametrize("ragged, chunk_size", [(False, 1), (True, 7), (False, 64)])
    def test_prefill_into_a_ring_that_is_not_empty(self, family, ragged, chunk_size):
        spec = self.make_spec(family)
        inputs = random_inputs(spec, 2, 90)
        state = rs.init_state(spec, 2, ragged=ragged)
        outputs = []
        for begin, end in ((0, 5), (22, 27), (85, 90)):
            for t in range(begin, end):
                output, state = self.jitted["step"](spec, state, tokens(inputs, t, t + 1))
                outputs.append(output)
            stop = {5: 22, 27: 85}.get(end)
            if stop:
                chunk = tokens(inputs, end, stop)
                output, state = rs.prefill(spec, state, chunk, chunk_size=chunk_size)
                outputs.append(output)
        expected, expected_state = reference(spec, inputs)
        assert_close(np.concatenate(outputs, axis=1), expected)
        assert_close(rs.materialize(spec, state), expected_state, name="state")

    def test_resets_forget_everything_before(self, family):
        spec = self.make_spec(family)
        inputs = random_inputs(spec, 2, 50)
        state = rs.init_state(spec, 2)
        _, state = self.jitted["step"](spec, state, tokens(inputs, 0, 1))
        resets = np.zeros((2, 50), bool)
        resets[0, [0, 17, 18, 40]] = resets[1, 33] = True
        outputs, state = rs.prefill(spec, state, inputs, resets=jnp.asarray(resets), chunk_size=16)
        before = tokens(inputs, 0, 1)
        for row, cuts in ((0, [0, 17, 18, 40, 50]), (1, [0, 33, 50])):
            pick = functools.partial(jax.tree.map, lambda x, row=row: x[row : row + 1])
            for begin, end in itertools.pairwise(cuts):
                initial = reference(spec, pick(before))[1] if row == 1 and begin == 0 else None
                expected, expected_state = reference(
                    spec, tokens(pick(inputs), begin, end), initial
                )
                assert_close(outputs[row : row + 1, begin:end], expected)
            assert_close(rs.materialize(spec, state)[row : row + 1], expected_state, name="state")

    @pytest.mark.parametrize("accepted", range(5))
    def test_rollback(self, family, accepted):
        """Drafts that are not accepted leave no trace, also across a flush and a wrapped ring."""
        spec = self.make_spec(family, window=7, max_tokens=4)
        inputs = random_inputs(spec, 2, 12 * max(accepted, 1))
        wrong = random_inputs(spec, 2, 12 * 4, seed=1)
        state = rs.init_state(spec, 2)
        outputs = []
        for turn in range(12):
            begin = turn * max(accepted, 1)
            good = tokens(inputs, begin, begin + accepted)
            bad = tokens(wrong, 4 * turn + accepted, 4 * turn + 4)
            draft = jax.tree.map(lambda a, b: np.concatenate([a, b], axis=1), good, bad)
            output, state = self.jitted["verify"](spec, state, draft)
            state = rs.commit(spec, state, accepted)
            outputs.append(np.asarray(output)[:, :accepted])
            if accepted == 0:
                output, state = self.jitted["step"](spec, state, tokens(inputs, begin, begin + 1))
                outputs.append(output)
        expected, expected_state = reference(spec, inputs)
        assert_close(np.concatenate(outputs, axis=1), expected)
        assert_close(rs.materialize(spec, state), expected_state, name="state")

    def test_dead_slots_may_hold_nan(self, family, ragged):
        spec = self.make_spec(family, **UNEVEN)
        inputs = random_inputs(spec, 2, 48)
        state = rs.init_state(spec, 2, ragged=ragged)
        outputs = []
        for t in range(0, 48, 3):
            state = poison_dead_slots(spec, state)
            output, state = self.jitted["verify"](spec, state, tokens(inputs, t, t + 3))
            state = rs.commit(spec, poison_dead_slots(spec, state), 3)
            outputs.append(output)
        expected, expected_state = reference(spec, inputs)
        assert_close(np.concatenate(outputs, axis=1), expected)
        state = poison_dead_slots(spec, state)
        assert_close(rs.materialize(spec, state), expected_state, name="state")
        assert_close(self.flush(spec, state).checkpoint, expected_state, name="checkpoint")

    def test_rows_at_different_phases(self, family):
        self.check_rows_at_different_phases(self.make_spec(family, window=9, max_tokens=4))

    def check_rows_at_different_phases(self, spec):
        """Rows with their own lengths and acceptances, 0 included, equal each row's own history."""
        most, end, rows = spec.max_tokens, 14 * spec.max_tokens, np.arange(3)[:, None]
        inputs = tokens(random_inputs(spec, 3, end + most), 0, end + most)
        expected, _ = reference(spec, inputs)
        state = rs.init_state(spec, 3, ragged=True)
        rng = np.random.default_rng(3)
        position = np.zeros(3, int)
        outputs, wanted = [], []
        for _ in range(24):
            lengths = np.where(rng.random(3) < 0.5, most, rng.integers(0, most + 1, 3))
            accepted = rng.integers(0, lengths + 1)
            index = position[:, None] + np.arange(most)
            draft = jax.tree.map(lambda x, index=index: x[rows, index], inputs)
            output, state = self.jitted["verify"](spec, state, draft, jnp.asarray(lengths))
            output, real = np.asarray(output), np.arange(most) < lengths[:, None]
            assert not output[~real].any()
            outputs.append(output[real])
            wanted.append(expected[rows, index][real])
            state = rs.commit(spec, state, jnp.asarray(accepted))
            position += accepted
            if (position > end).any():
                break
        assert_close(np.concatenate(outputs), np.concatenate(wanted))
        states = rs.materialize(spec, state)
        for row, stop in enumerate(position):
            own = jax.tree.map(lambda x, row=row: x[row : row + 1], tokens(inputs, 0, int(stop)))
            assert_close(states[row : row + 1], reference(spec, own)[1], name="state")

    def test_no_token_no_output_whatever_the_state_holds(self, family):
        """Zero past a row's length, also where its state is not finite: zero times NaN is NaN."""
        spec = self.make_spec(family, window=9, max_tokens=4)
        initial = np.zeros(spec.state_shape(3), np.float32)
        initial[:, 0, 1], initial[:, 0, 2, 0] = np.nan, np.inf
        state = rs.init_state(spec, 3, initial, layout="vk", ragged=True)
        draft, lengths = random_inputs(spec, 3, 4), np.array([0, 1, 4])
        real = np.arange(4) < lengths[:, None]
        for run in self.jitted["verify"], jax.jit(rs.prefill, static_argnums=0):
            output, _ = run(spec, state, draft, lengths)
            bad = np.zeros(output.shape, bool)
            bad[:, :, 0, 1:3] = real[:, :, None]
            np.testing.assert_array_equal(~np.isfinite(output), bad)
            assert not np.asarray(output)[~real].any()

    # Storage

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
    def test_dtypes_are_kept(self, family, dtype):
        """Outputs and ring keep the activation dtype, the checkpoint stays fp32."""
        spec = self.make_spec(family, key_dtype=dtype, value_dtype=dtype, max_tokens=2)
        inputs = random_inputs(spec, 2, 34)
        state = rs.init_state(spec, 2)
        before = jax.tree.map(lambda x: (x.shape, x.dtype), state)
        expected, _ = reference(spec, inputs)
        outputs, after = self.decode(spec, state, inputs)
        drafted, _ = self.verify(spec, state, tokens(inputs, 0, 2))
        prefilled, _ = rs.prefill(spec, state, inputs)
        assert outputs.dtype == drafted.dtype == prefilled.dtype == dtype
        assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == before
        assert after.checkpoint.dtype == jnp.float32
        rounding = float(jnp.finfo(dtype).eps)
        assert_close(outputs, expected, max(rounding, 1e-5))
        assert_close(prefilled, expected, max(rounding, 1e-5))

    def test_flush_keeps_live_slots_and_repeats_bit_for_bit(self, family, ragged):
        """No flush or append touches a live slot, wrapped rings included; runs are identical."""
        spec = self.make_spec(family, **UNEVEN)
        inputs = random_inputs(spec, 2, 60)
        state = rs.init_state(spec, 2, ragged=ragged)
        for t in range(0, 60, 3):
            draft = tokens(inputs, t, t + 3)
            runs = [self.jitted["verify"](spec, state, draft) for _ in range(5)]
            for run in runs[1:]:
                chex.assert_trees_all_equal(run, runs[0])
            live = (
                jnp.arange(spec.capacity)[None] - state.pointer.start.reshape(-1, 1)
            ) % spec.capacity
            live = live < state.pointer.length.reshape(-1, 1)
            for before, after in zip(
                jax.tree.leaves(state.buffer), jax.tree.leaves(runs[0][1].buffer), strict=True
            ):
                mask = live.reshape(*live.shape, *(1,) * (before.ndim - 2))
                chex.assert_trees_all_equal(jnp.where(mask, before, 0), jnp.where(mask, after, 0))
            state = rs.commit(spec, runs[0][1], 3)

    def test_donated_buffers_equal_fresh_ones(self, family):
        spec = self.make_spec(family)
        inputs = random_inputs(spec, 2, 2 * spec.window + 3)
        step = jax.jit(lambda state, one: self.step(spec, state, one), donate_argnums=0)
        fresh, donated = rs.init_state(spec, 2), rs.init_state(spec, 2)
        for t in range(inputs.v.shape[1]):
            one = tokens(inputs, t, t + 1)
            expected, fresh = self.jitted["step"](spec, fresh, one)
            output, donated = step(donated, one)
            chex.assert_trees_all_equal((output, donated), (expected, fresh))

    # Transformations

    @pytest.mark.parametrize("shared", [True, False], ids=["shared pointer", "own pointers"])
    def test_vmap_equals_the_batched_step(self, family, ragged, shared):
        spec = self.make_spec(family)
        inputs = random_inputs(spec, 6, 2 * spec.window + 2)
        axes = rs.ReplayState(0, 0, None if shared else 0, 0, 0)
        state = rs.init_state(spec, 2, ragged=ragged)
        states = jax.tree.map(lambda x: jnp.stack([x] * 3), state)
        if shared:
            states = dataclasses.replace(states, pointer=state.pointer)
        step = jax.jit(
            jax.vmap(functools.partial(self.step, spec), in_axes=(axes, 0), out_axes=(0, axes))
        )
        expected, _ = reference(spec, inputs)
        outputs = []
        for t in range(inputs.v.shape[1]):
            one = jax.tree.map(lambda x: x.reshape(3, 2, *x.shape[1:]), tokens(inputs, t, t + 1))
            output, states = step(states, one)
            outputs.append(output.reshape(6, *output.shape[2:]))
        assert_close(np.concatenate(outputs, axis=1), expected)

    def test_nested_vmap_of_scan(self, family):
        """Rows of a nested vmap at phases of their own."""
        spec = self.make_spec(family, window=6)
        inputs = random_inputs(spec, 6, 21)
        skip = jnp.arange(6).reshape(3, 2)

        def run(inputs, skip):
            state = rs.init_state(spec, 1)
            first = jax.tree.map(lambda x: x[None], inputs)

            def body(state, t):
                one = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, t, 1, 1), first)
                output, state = self.step(spec, state, one)
                early = self.flush(spec, state)
                state = jax.tree.map(lambda a, b: jnp.where(t == skip, a, b), early, state)
                return state, output[0, 0]

            return jax.lax.scan(body, state, jnp.arange(21))[1]

        nested = jax.tree.map(lambda x: x.reshape(3, 2, *x.shape[1:]), inputs)
        outputs = jax.jit(jax.vmap(jax.vmap(run)))(nested, skip)
        expected, _ = reference(spec, inputs)
        assert_close(outputs.reshape(expected.shape), expected)

    def test_jit_equals_eager(self, family, ragged):
        spec = self.make_spec(family, **UNEVEN)
        inputs = random_inputs(spec, 2, 3)
        state = rs.init_state(spec, 2, ragged=ragged)
        chex.assert_trees_all_close(
            self.jitted["verify"](spec, state, inputs), self.verify(spec, state, inputs), rtol=1e-6
        )

    # Loops without a flush predicate

    @pytest.mark.parametrize(
        "ragged, length",
        [(False, 3), (True, 16), (False, 41), (True, 41)],
        ids=["scalar-3", "ragged-16", "scalar-41", "ragged-41"],
    )
    def test_windowed_scan_equals_scan(self, family, ragged, length):
        spec = self.make_spec(family)
        inputs = random_inputs(spec, 2, 5 + length)
        _, state = self.decode(spec, rs.init_state(spec, 2, ragged=ragged), tokens(inputs, 0, 5))
        rest = tokens(inputs, 5, 5 + length)
        outputs, after = self.decode(spec, state, rest, scan=rs.scan_steps)
        expected, expected_state = reference(spec, inputs)
        assert_close(outputs, expected[:, 5:])
        assert_close(rs.materialize(spec, after), expected_state, name="state")
        assert jax.tree.structure(after) == jax.tree.structure(state)

    def test_windowed_while_loop(self, family):
        spec = self.make_spec(family)
        inputs = random_inputs(spec, 2, 48)

        @jax.jit
        def run(inputs):
            def body(carry):
                t, state, outputs = carry
                one = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, t, 1, 1), inputs)
                output, state = self.step(spec, state, one)
                return t + 1, state, jax.lax.dynamic_update_slice_in_dim(outputs, output, t, 1)

            init = (0, rs.init_state(spec, 2, ragged=True), jnp.zeros_like(inputs.v))
            return rs.while_loop(lambda carry: carry[0] < 37, body, init)

        steps, state, outputs = run(inputs)
        expected, expected_state = reference(spec, inputs)
        assert steps == 48  # the window in which the condition turned false runs to its end
        assert_close(outputs, expected)
        assert_close(rs.materialize(spec, state), expected_state, name="state")

    def test_a_body_that_steps_twice_is_loud(self, family):
        spec = self.make_spec(family)
        inputs = tokens(random_inputs(spec, 1, 1), 0, 1)

        def body(state, _):
            _, state = self.step(spec, state, inputs)
            output, state = self.step(spec, state, inputs)
            return state, output

        _, outputs = rs.scan_steps(body, rs.init_state(spec, 1), None, 16)
        assert np.isfinite(outputs[:8]).all()
        assert np.isnan(outputs[8:]).all()
