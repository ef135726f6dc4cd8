"""What tests of the kernels share."""

import contextlib
import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from base import CoreSuite
from oracle import assert_close, poison_dead_slots, random_inputs, reference, tokens

import replayssm_jax as rs
from replayssm_jax.precision import Scaled, decode
from replayssm_jax.snapshots import Snapshots, verify_snapshots


@contextlib.contextmanager
def cut_as_for_large_batches(configs=None):
    """Within it, kernels for a few rows are built as those for many rows are.

    Args:
      configs: the module of a package of kernels that has FILLED, the programs that fill a device;
        None for that of the Mosaic kernels.
    """
    if configs is None:
        from pallas_kernels import configs
    from replayssm_jax import kernels

    def forget():
        kernels._in_place.cache_clear()
        kernels._fold.cache_clear()
        kernels._conventional.cache_clear()
        kernels._snapshots.cache_clear()
        jax.clear_caches()

    enough, configs.FILLED = configs.FILLED, 1
    forget()
    try:
        yield
    finally:
        configs.FILLED = enough
        forget()


def check_snapshots(spec, implementation):
    """Uneven acceptances and lengths, idle rows, a ring that goes round; against the recurrence."""
    inputs = random_inputs(spec, 2, 20)
    run = jax.jit(functools.partial(verify_snapshots, spec, implementation=implementation))
    snapshots = Snapshots.zeros(spec, 2)
    outputs, at = [[], []], [0, 0]
    for lengths, accepted in ([3, 3], [3, 2]), ([3, 2], [1, 0]), ([0, 3], [0, 3]), ([3, 1], [3, 1]):
        parts = [jax.tree.map(lambda x, r=r: x[r : r + 1], inputs) for r in range(2)]
        parts = [tokens(part, first, first + 3) for part, first in zip(parts, at, strict=True)]
        part = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
        output, snapshots = run(snapshots, part, jnp.array(at, jnp.int32), jnp.array(lengths))
        for row in range(2):
            assert not output[row, lengths[row] :].any()
            outputs[row].append(output[row, : accepted[row]])
            at[row] += accepted[row]
    found = snapshots.at(jnp.array(at))
    for row in range(2):
        seen = tokens(jax.tree.map(lambda x, row=row: x[row : row + 1], inputs), 0, at[row])
        expected, expected_state = reference(spec, seen)
        assert_close(jnp.concatenate(outputs[row])[None], expected)
        assert_close(found[row : row + 1], expected_state, name="state")


def poison_copy(spec, state):
    """NaN also in the read copy of rows whose checkpoint counts as zero."""
    state = poison_dead_slots(spec, state)
    fresh = state.pointer.fresh.reshape(-1, 1, 1, 1)

    def poison(x, mask):
        return jnp.where(mask, jnp.asarray(jnp.nan, x.dtype), x)

    copy = state.read_copy
    if isinstance(copy, Scaled):
        copy = dataclasses.replace(copy, scale=poison(copy.scale, fresh[..., 0]))
    else:
        copy = poison(copy, fresh)
    return dataclasses.replace(state, read_copy=copy)


def run_with_copy(spec, implementation, inputs, initial):
    """Steps and drafts of uneven lengths over some flushes, an idle row, a row that starts anew.

    Returns:
      The outputs, a list, and the state after a flush of the first row of two.
    """
    kind = {"implementation": implementation}
    verify = jax.jit(functools.partial(rs.verify, spec, **kind))
    step = jax.jit(functools.partial(rs.step, spec, **kind))
    state = rs.init_state(spec, 2, initial, layout="vk", ragged=True)
    state = poison_copy(spec, rs.reset(spec, state, jnp.array([False, True])))
    outputs, at = [], 0
    for _ in range(spec.window + 2):
        output, state = jax.block_until_ready(step(state, tokens(inputs, at, at + 1)))
        state = poison_copy(spec, state)
        outputs.append(output)
        at += 1
    drafts = [(2, 1), (0, 2), (2, 2), (1, 0)] if spec.max_tokens > 1 else []
    for lengths in drafts:
        part = tokens(inputs, at, at + 2)
        output, state = jax.block_until_ready(verify(state, part, jnp.array(lengths)))
        state = poison_copy(spec, rs.commit(spec, state, jnp.array(lengths)))
        outputs.append(output)
        at += 2
    state = jax.block_until_ready(rs.flush(spec, state, jnp.array([True, False]), **kind))
    output, state = jax.block_until_ready(step(state, tokens(inputs, at, at + 1)))
    return [*outputs, output], state


def check_read_copies(make, implementation, names, gates=None):
    """Against XLA the same rounding, and one checkpoint, bit for bit, whatever the copy's format.

    Args:
      make: a spec from keyword arguments of its own.
      implementation: whose kernels.
      names: formats.
      gates: as of `random_inputs`.
    """
    checkpoints = []
    for name in names:
        spec = make(read_dtype=name)
        inputs = random_inputs(spec, 2, spec.window + 12, gates=gates)
        initial = np.random.default_rng(1).standard_normal(spec.state_shape(2))
        initial = jnp.asarray(initial, jnp.float32).at[0, 0, 0].set(0).at[0, 0, 1].mul(1e6)
        # A value on the edge of two of the copy's may be rounded to the other one.
        unit = 2e-5 if name == "float16" else 5e-4
        seen = 1e-2 if spec.value_dtype == jnp.bfloat16 else unit
        outputs, state = run_with_copy(spec, implementation, inputs, initial)
        expected, wanted = run_with_copy(spec, "xla", inputs, initial)
        for output, right in zip(outputs, expected, strict=True):
            assert_close(output, right, seen, name=f"output, {name}")
        rings = [dataclasses.replace(x.buffer, update=None) for x in (state, wanted)]
        chex.assert_trees_all_equal(*rings)  # what came in, and log-decays as steps read them
        if spec.rule == "delta":
            updates = [x.buffer.update.astype(jnp.float32) for x in (state, wanted)]
            chex.assert_trees_all_equal(*map(jnp.isnan, updates))  # dead slots
            assert_close(*map(jnp.nan_to_num, updates), seen, name=f"updates, {name}")
        # Both fold twice in float32, of 64 records with updates that follow from each other.
        assert_close(state.checkpoint[0], wanted.checkpoint[0], 2e-6, name=f"checkpoint, {name}")
        found, right = (decode(x.read_copy, jnp.float32)[0] for x in (state, wanted))
        assert_close(found, right, 4 * unit, name=f"copy, {name}")
        if isinstance(state.read_copy, Scaled):
            scales = state.read_copy.scale[0], wanted.read_copy.scale[0]
            assert_close(*scales, 2e-6, name=f"scale, {name}")  # as the rows they are of
        full = rs.materialize(spec, state), rs.materialize(spec, wanted)
        assert_close(*full, 2e-6, name=f"state, {name}")
        checkpoints.append(state.checkpoint)
    for checkpoint in checkpoints[1:]:
        np.testing.assert_array_equal(checkpoint, checkpoints[0])


def check_who_reads_what(spec, implementation):
    """NaN in what folds alone read of the ring changes no step, nor what steps alone read a fold.

    Args:
      spec: of the delta rule with a read copy, a window of 4 and drafts of 2.
      implementation: whose kernels.
    """
    kind = {"implementation": implementation}
    verify = jax.jit(functools.partial(rs.verify, spec, **kind))
    flush = jax.jit(functools.partial(rs.flush, spec, **kind))
    inputs = random_inputs(spec, 2, 6)
    state = rs.init_state(spec, 2, ragged=True)
    _, state = verify(state, tokens(inputs, 0, 2))
    state = rs.commit(spec, state, 2)

    def spoil(state, *names):
        ring = state.buffer
        names = [name for name in names if getattr(ring, name) is not None]
        rows = {name: jnp.full_like(getattr(ring, name), jnp.nan) for name in names}
        return dataclasses.replace(state, buffer=dataclasses.replace(ring, **rows))

    exact, cached = ["value", "beta"], ["update", "read_log_decay"]
    if state.buffer.read_log_decay is not None:
        exact.append("log_decay")
    for n in (1, 2):
        read = tokens(inputs, 2, 2 + n)
        chex.assert_trees_all_equal(verify(state, read)[0], verify(spoil(state, *exact), read)[0])
    _, state = verify(state, tokens(inputs, 2, 4))
    state = rs.commit(spec, state, 2)
    output, after = verify(state, tokens(inputs, 4, 6))
    same, other = verify(spoil(state, *cached), tokens(inputs, 4, 6))
    chex.assert_trees_all_equal((output, after.checkpoint), (same, other.checkpoint))
    chex.assert_trees_all_equal(flush(state).checkpoint, flush(spoil(state, *cached)).checkpoint)
    assert np.isfinite(output).all()


def records_follow(spec, batch_size):
    """Whether a step of one token that folds no row brings records in the place of tiles."""
    from pallas_kernels import configs
    from pallas_kernels.problem import Mode
    from replayssm_jax.mosaic_gpu import problem_of

    problem, mode = problem_of(spec, batch_size, 1), Mode(fold=False)
    return problem.records_follow(configs.choose(problem, mode), mode)


def check_windowed_loop(spec, implementation):
    """Against XLA: steps of all rows, rows that idle, and rows that outrun their window.

    Args:
      spec: with a window of at least 2.
      implementation: whose kernels.
    """
    length = 2 * spec.window + 1
    inputs = random_inputs(spec, 2, 3 * length)
    lengths = jnp.stack([jnp.ones(length, jnp.int32), jnp.arange(length) % 3 % 2], axis=1)

    @functools.partial(jax.jit, static_argnames="implementation")
    def run(state, inputs, implementation):
        def step(state, token):
            return rs.step(spec, state, token, implementation=implementation)[::-1]

        def step_some(state, turn):
            token, real = turn
            output, state = rs.verify(spec, state, token, real, implementation=implementation)
            return rs.commit(spec, state, real), output

        def step_twice(state, token):
            state, first = step(state, token)
            state, second = step(state, token)
            return state, (first, second)

        turns = jax.tree.map(
            lambda x: jnp.moveaxis(x, 1, 0).reshape(3, length, 2, 1, *x.shape[2:]), inputs
        )
        parts = [jax.tree.map(lambda x, i=i: x[i], turns) for i in range(3)]
        scan = functools.partial(rs.scan_steps, window=spec.window)
        found, every = scan(step, state, parts[0])
        found, some = scan(step_some, found, (parts[1], lengths))
        lost, twice = scan(step_twice, found, parts[2])
        return every, some, rs.materialize(spec, found), found, twice, lost.checkpoint

    state = rs.init_state(spec, 2, ragged=True)
    *outputs, full, found, twice, lost = run(state, inputs, implementation)
    *expected, expected_full, wanted, loud, gone = run(state, inputs, "xla")
    seen = 1e-5 if spec.read_dtype is None and spec.value_dtype == jnp.float32 else 1e-2
    for output, right in zip(outputs, expected, strict=True):
        assert_close(output, right, seen)
    assert_close(full, expected_full, 2e-6, name="state")
    assert_close(found.checkpoint, wanted.checkpoint, 2e-6, name="checkpoint")
    chex.assert_trees_all_equal(found.pointer, wanted.pointer)  # layers may share it
    chex.assert_trees_all_equal(*jax.tree.map(jnp.isnan, [(twice, lost), (loud, gone)]))
    assert np.isnan(loud[1][spec.window - 1]).all()


def check_nan_row(make, implementation, names):
    """A state row that holds one NaN reads as NaN, before folds and after them; no other row does.

    Args:
      make: a spec from keyword arguments of its own.
      implementation: whose kernels.
      names: formats.
    """
    for name in names:
        spec = make(read_dtype=name, window=1)
        inputs = random_inputs(spec, 1, 3)
        inputs = jax.tree.map(lambda x: jnp.concatenate([x, x]), inputs)
        initial = np.random.default_rng(1).standard_normal(spec.state_shape(1), np.float32)
        initial = jnp.tile(initial, (2, 1, 1, 1)).at[1, 0, 2, 3].set(jnp.nan)
        step = jax.jit(functools.partial(rs.step, spec, implementation=implementation))
        state, outputs = rs.init_state(spec, 2, initial, layout="vk", ragged=True), []
        for t in range(3):  # all but the first fold, and read what they have folded
            output, state = jax.block_until_ready(step(state, tokens(inputs, t, t + 1)))
            outputs.append(output[:, 0])
        copy = decode(state.read_copy, jnp.float32)
        full = rs.materialize(spec, state)
        for kind, found in ("output", jnp.stack(outputs, -1)), ("copy", copy), ("state", full):
            good, bad = np.asarray(found)
            broken = np.isnan(bad).any(axis=-1)
            assert broken.ravel().nonzero()[0].tolist() == [2], f"{kind}, {name}: {broken}"
            np.testing.assert_array_equal(bad[~broken], good[~broken], f"{kind}, {name}")
            if kind == "output" or (kind == "copy" and isinstance(state.read_copy, Scaled)):
                assert np.isnan(bad[broken]).all(), f"{kind}, {name}: {bad[broken]}"


class KernelSuite(CoreSuite):
    """The base suite, and what kernels add to it: their shapes, and the tuned baseline."""

    @pytest.mark.parametrize("window, key_dtype", [(16, jnp.bfloat16), (32, jnp.float32)])
    def test_sixteen_tokens(self, family, window, key_dtype):
        """As many as kernels take, and as a block of records has; windows of one and of two."""
        options = dict(window=window, max_tokens=16, key_dtype=key_dtype)
        self.check_rows_at_different_phases(self.make_spec(family, **options))

    @pytest.mark.parametrize("batch_size", [1, 16, 99])
    def test_identical_launches(self, family, batch_size):
        self.check_identical_launches(self.make_spec(family, window=5, max_tokens=3), batch_size)

    def check_identical_launches(self, spec, batch_size):
        """Five launches give the same bits, in rows that flush beside rows that do not."""
        inputs = tokens(random_inputs(spec, batch_size, spec.window + 7), None)
        rows = np.arange(batch_size)
        position = rows % 3

        def next_tokens(n):
            index = position[:, None] + np.arange(n)
            return jax.tree.map(lambda x: x[rows[:, None], index], inputs)

        def launch(name, *args):
            first = self.jitted[name](spec, *args)
            for _ in range(4):
                chex.assert_trees_all_equal(self.jitted[name](spec, *args), first)
            return first

        state = rs.init_state(spec, batch_size, ragged=True)
        _, state = self.verify(spec, state, tokens(inputs, 0, 3), position)
        state = rs.commit(spec, state, position)
        outputs = []
        for _ in range(spec.window + 2):
            launch("verify", state, next_tokens(3))
            launch("flush", state, rows % 2 == 0)
            output, state = launch("step", state, next_tokens(1))
            outputs.append(output)
            position += 1
        assert np.asarray(state.checkpoint).any(axis=(1, 2, 3)).all(), "every row has flushed"
        expected, _ = reference(spec, inputs)
        index = rows[:, None] % 3 + np.arange(spec.window + 2)
        limit = 1e-5 if spec.read_dtype is None else 2e-2
        assert_close(np.concatenate(outputs, axis=1), expected[rows[:, None], index], limit)

    @pytest.mark.parametrize(
        "value_dim, key_dim", [(64, 128), (80, 128), (128, 64), (96, 80), (80, 96), (128, 128)]
    )
    def test_head_dims(self, value_dim, key_dim):
        """Head dims that are no powers of two, with drafts, against the recurrence."""
        spec = rs.ReplaySpec.mamba2(
            num_heads=8, head_dim=value_dim, state_dim=key_dim, num_groups=2, max_tokens=4
        )
        inputs = random_inputs(spec, 3, 44)
        outputs, _ = self.drafts(spec, rs.init_state(spec, 3, ragged=True), inputs, [4])
        expected, expected_state = reference(spec, inputs)
        assert_close(outputs, expected, 1e-2)
        state = rs.init_state(spec, 3, ragged=True)
        _, state = self.decode(spec, state, inputs)
        assert_close(rs.materialize(spec, state), expected_state, name="state")

    @pytest.mark.parametrize("batch_size", [1, 99, 2**16 // 4, 65600 // 4])
    def test_rows_times_heads_beyond_a_grid_axis(self, batch_size):
        """Batch times heads at and above 65,536, and odd batches."""
        spec = self.make_spec("kda", num_heads=4, num_groups=4)
        inputs = random_inputs(spec, 2, 18)
        repeats = -(-batch_size // 2)
        many = jax.tree.map(lambda x: jnp.tile(x, (repeats, *[1] * (x.ndim - 1))), inputs)
        many = jax.tree.map(lambda x: x[:batch_size], many)
        state = rs.init_state(spec, batch_size, ragged=True)
        outputs, _ = self.decode(spec, state, many)
        expected, _ = reference(spec, inputs)
        assert_close(outputs[:2], expected[:batch_size])
        assert_close(outputs[-1:], expected[(batch_size - 1) % 2][None])

    def test_more_than_two_to_the_31_elements(self):
        """The last rows of a state that int32 offsets do not reach, over a flush."""
        spec = self.make_spec(
            "gated_delta_net", num_heads=32, num_groups=32, value_dim=128, key_dim=128
        )
        batch_size = 4200
        assert batch_size * 32 * 128 * 128 > 2**31
        inputs = random_inputs(spec, 2, 18)

        @functools.partial(jax.jit, donate_argnums=0)
        def decode(state, t):
            token = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, t, 1, 1), inputs)
            many = jax.tree.map(
                lambda x: jnp.tile(x, (batch_size // 2, *[1] * (x.ndim - 1))), token
            )
            output, state = self.step(spec, state, many)
            return output[-2:], state

        state, outputs = rs.init_state(spec, batch_size, ragged=True), []
        for t in range(18):
            output, state = decode(state, t)
            outputs.append(output)
        expected, expected_state = reference(spec, inputs)
        assert_close(jnp.concatenate(outputs, axis=1), expected)
        last = rs.take(spec, state, jnp.arange(batch_size - 2, batch_size))
        assert_close(rs.materialize(spec, last), expected_state, name="state")

    def test_conventional_step(self, family):
        """The tuned baseline computes what the recurrence says."""
        spec = self.make_spec(family)
        inputs = random_inputs(spec, 2, 20)
        step = jax.jit(
            lambda state, x: rs.recurrent_step(spec, state, x, implementation=self.implementation)
        )
        state = jnp.zeros(spec.state_shape(2), jnp.float32)
        outputs = []
        for t in range(20):
            output, state = step(state, tokens(inputs, t, t + 1))
            outputs.append(output)
        expected, expected_state = reference(spec, inputs)
        assert_close(jnp.concatenate(outputs, axis=1), expected)
        assert_close(state, expected_state, name="state")


class OtherCut:
    """Put before a suite that has run with one cut of the work, to run it with another one.

    Left out is what does not depend on the cut, or is large itself.
    """

    test_bf16_outputs_do_not_drift = None
    test_dtypes_are_kept = None
    test_jit_equals_eager = None
    test_nested_vmap_of_scan = None
    test_prefill_into_a_ring_that_is_not_empty = None
    test_resets_forget_everything_before = None
    test_rows_times_heads_beyond_a_grid_axis = None
    test_more_than_two_to_the_31_elements = None
    test_vmap_equals_the_batched_step = None
    test_windowed_while_loop = None
