"""Whole schedules of operations, drawn by hypothesis, against a model of every row in NumPy."""

import copy
import dataclasses
import functools
import os

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import assert_close, error, make_spec, poison_dead_slots, random_inputs, reference

import replayssm_jax as rs

NUM_ROWS = 3
NUM_SAVED = 2  # rows that `save` keeps for `insert`
PROMPT = 7  # tokens of a prefill, in chunks of 4
LOOP = 3  # tokens of a windowed loop, in windows of 2
POOL = 211  # distinct tokens
# Mostly long memory, so that an error anywhere in a row's history stays visible.
GATES = (0.0, -1e-3, -1e-2, -0.05, -0.2) * 4 + (-40.0,)

# family, window, max_tokens: rings that wrap early and late, windows of one token and of one draft.
RAGGED = [
    ("mamba2", 5, 4),
    ("gated_delta_net", 16, 3),
    ("gated_delta_net", 1, 1),
    ("kda", 2, 2),
    ("gla", 16, 2),
]
SCALAR = [("mamba2", 16, 2), ("gated_delta_net", 5, 3), ("kda", 16, 1)]
VMAPPED_ROWS = [("gated_delta_net", 5, 2, False), ("gla", 5, 1, True)]


@functools.cache
def token_pool(spec):
    """POOL tokens as float32 TokenInputs in NumPy, without batch axis, and the same in float64."""
    narrow = jax.tree.map(lambda x: np.asarray(x)[0], random_inputs(spec, 1, POOL, gates=GATES))
    return narrow, jax.tree.map(lambda x: x.astype(np.float64), narrow)


@functools.cache
def reset_rows(spec):
    """Rows that were reset, over NaN in ring and checkpoint."""
    state = rs.init_state(spec, NUM_SAVED, ragged=True)
    return poison_dead_slots(spec, rs.reset(spec, state, np.ones(NUM_SAVED, bool)))


def advance(spec, state, token):
    """The recurrence for one token of one row, float64: output [H, P] and state [H, P, N]."""
    q = np.repeat(token.q, spec.heads_per_group, axis=0)
    k = np.repeat(token.k, spec.heads_per_group, axis=0)
    state = state * np.exp(token.g.reshape(spec.num_heads, 1, -1))
    error = token.v - (np.einsum("hpn,hn->hp", state, k) if spec.rule == "delta" else 0)
    state = state + np.einsum("h,hp,hn->hpn", token.beta, error, k)
    return np.einsum("hpn,hn->hp", state, q), state


@dataclasses.dataclass
class Row:
    """What one row must hold: its state after every committed token, its drafts, its pointer."""

    state: np.ndarray
    drafts: tuple = ()
    start: int = 0
    length: int = 0

    def empty_ring(self, spec):
        self.start = -(-(self.start + self.length) // 8) * 8 % spec.capacity
        self.length, self.drafts = 0, ()


class Schedule:
    """A ReplayState and its model, changed by the same operations and compared after each."""

    def __init__(self, spec, ragged):
        self.spec = spec
        self.ragged = ragged
        self.inputs, self.wide_inputs = token_pool(spec)
        self.drawn = 0
        self.state = rs.init_state(spec, NUM_ROWS, ragged=ragged)
        self.rows = [self.empty_row() for _ in range(NUM_ROWS)]
        self.saved = reset_rows(spec)
        self.saved_rows = [self.empty_row() for _ in range(NUM_SAVED)]

    def call(self, name, *arguments):
        return JITTED[name](self.spec, self.state, *arguments)

    def run(self, operations):
        for name, *arguments in operations:
            getattr(self, name)(*arguments)
            self.compare()

    def compare(self):
        """States within rounding; pointers exactly, so the time of every flush too."""
        states = self.call("materialize")
        for row, state in zip(self.rows, np.asarray(states), strict=True):
            assert_close(state, row.state, name="state")
        pointer = self.state.pointer
        expected = {
            "start": [row.start for row in self.rows],
            "length": [row.length for row in self.rows],
            "pending": [len(row.drafts) for row in self.rows],
        }
        for name, values in expected.items():
            found = np.broadcast_to(getattr(pointer, name), (NUM_ROWS,))
            np.testing.assert_array_equal(found, values, err_msg=name)

    # The model

    def empty_row(self):
        return Row(np.zeros(self.spec.state_shape(1)[1:]))

    def fresh_tokens(self, num_tokens):
        """Indices [B, T] of tokens, each used once before the pool starts again."""
        indices = (self.drawn + np.arange(NUM_ROWS * num_tokens)) % POOL
        self.drawn += indices.size
        return indices.reshape(NUM_ROWS, num_tokens)

    def gather(self, indices, real):
        """The tokens; those that are not real hold NaN in every field."""

        def pick(x):
            x = x[indices]
            return np.where(real.reshape(*real.shape, *(1,) * (x.ndim - 2)), x, np.float32(np.nan))

        return jax.tree.map(pick, self.inputs)

    def replay(self, row, indices):
        """Outputs [T, H, P] of tokens that follow the row's state, and the state after them."""
        state, outputs = row.state, [np.zeros((0, self.spec.num_heads, self.spec.value_dim))]
        for i in indices:
            token = jax.tree.map(lambda x, i=i: x[i], self.wide_inputs)
            output, state = advance(self.spec, state, token)
            outputs.append(output[None])
        return np.concatenate(outputs), state

    # Operations

    def prefill(self, lengths, resets):
        """`lengths`: for each row how many tokens are real."""
        indices = self.fresh_tokens(PROMPT)
        real = np.arange(PROMPT) < np.asarray(lengths)[:, None]
        output, self.state = self.call(
            "prefill_lengths", self.gather(indices, real), np.asarray(lengths)
        )
        self.check_prefill(output, indices, real, np.zeros_like(real))

    def prefill_pattern(self, valid, resets):
        """`valid`, `resets`: for each row the tokens that are real, or reset, as bits."""
        indices = self.fresh_tokens(PROMPT)
        real, resets = (
            (np.asarray(bits)[:, None] >> np.arange(PROMPT)) & 1 == 1 for bits in (valid, resets)
        )
        output, self.state = self.call("prefill_valid", self.gather(indices, real), real, resets)
        self.check_prefill(output, indices, real, resets)

    def check_prefill(self, output, indices, real, resets):
        expected = np.zeros(output.shape)
        for row, target, index, use, forget in zip(
            self.rows, expected, indices, real, resets, strict=True
        ):
            if use.any() or not self.ragged:
                row.empty_ring(self.spec)
            for t in np.flatnonzero(use):
                if forget[t]:
                    row.state = np.zeros_like(row.state)
                target[t : t + 1], row.state = self.replay(row, index[t : t + 1])
        self.check_output(output, expected, real)

    def check_output(self, output, expected, real):
        assert_close(output, expected)
        assert not np.asarray(output)[~real].any(), "outputs of padding must be zero"

    def verify(self, num_tokens, lengths):
        """`lengths`: None or one for each row; those out of [0, T] are clipped, being traced."""
        num_tokens = min(num_tokens, self.spec.max_tokens)
        indices = self.fresh_tokens(num_tokens)
        counts = [num_tokens] * NUM_ROWS if lengths is None else np.clip(lengths, 0, num_tokens)
        real = np.arange(num_tokens) < np.asarray(counts)[:, None]
        before = self.state.checkpoint
        inputs = self.gather(indices, real)
        if lengths is None:
            output, self.state = self.call("verify", inputs)
        else:
            output, self.state = self.call("verify_lengths", inputs, np.asarray(lengths))
        expected = np.zeros(output.shape)
        for i, (row, index, n) in enumerate(zip(self.rows, indices, counts, strict=True)):
            due = n > 0 and row.length + n > self.spec.window
            if due:
                row.empty_ring(self.spec)
            else:
                chex.assert_trees_all_equal(self.state.checkpoint[i], before[i])
            if n > 0:
                row.drafts = tuple(index[:n])
                expected[i, :n], _ = self.replay(row, row.drafts)
        self.check_output(output, expected, real)

    def commit(self, accepted):
        """`accepted`: one for each row, clipped to [0, pending], being traced."""
        self.state = self.call("commit", np.asarray(accepted))
        for row, n in zip(self.rows, np.broadcast_to(accepted, (NUM_ROWS,)), strict=True):
            kept = row.drafts[: max(n, 0)]
            row.state = self.replay(row, kept)[1]
            row.length, row.drafts = row.length + len(kept), ()

    def steps(self, count):
        for _ in range(count):
            indices = self.fresh_tokens(1)
            real = np.ones((NUM_ROWS, 1), bool)
            output, self.state = self.call("step", self.gather(indices, real))
            for row in self.rows:
                if row.length + 1 > self.spec.window:
                    row.empty_ring(self.spec)
            self.check_steps(output, indices)

    def loop(self):
        """A windowed loop: its first step of each window flushes, whatever the ring holds."""
        indices = self.fresh_tokens(LOOP)
        real = np.ones((NUM_ROWS, LOOP), bool)
        inputs = self.gather(indices, real)
        output, self.state = self.call("loop", inputs)
        for t in range(LOOP):
            if t % min(2, self.spec.window) == 0:
                for row in self.rows:
                    row.empty_ring(self.spec)
            self.check_steps(output[:, t : t + 1], indices[:, t : t + 1])

    def check_steps(self, output, indices):
        expected = np.zeros(output.shape)
        for i, row in enumerate(self.rows):
            expected[i], row.state = self.replay(row, indices[i])
            row.length, row.drafts = row.length + 1, ()
        self.check_output(output, expected, np.ones(indices.shape, bool))

    def flush(self, where):
        if self.ragged:
            self.state = self.call("flush_where", np.asarray(where))
        else:
            self.state = self.call("flush")
        for row, flushed in zip(self.rows, where, strict=True):
            if flushed or not self.ragged:
                row.empty_ring(self.spec)

    def reset(self, where):
        self.state = self.call("reset", np.asarray(where))
        for row, emptied in zip(self.rows, where, strict=True):
            if emptied:
                row.empty_ring(self.spec)
                row.state = np.zeros_like(row.state)

    def fork(self, sources):
        """Every row becomes a copy of its source; -1 gives an empty row."""
        self.state = self.call("take", np.asarray(sources))
        self.rows = [self.pick(self.rows, source) for source in sources]

    def save(self, sources):
        self.saved = self.call("take", np.asarray(sources))
        self.saved_rows = [self.pick(self.rows, source) for source in sources]

    def insert(self, slots):
        """Saved rows into slots; -1 and slots out of range touch nothing."""
        self.state = self.call("insert", np.asarray(slots), self.saved)
        for slot, row in zip(slots, self.saved_rows, strict=True):
            if 0 <= slot < NUM_ROWS:
                self.rows[slot] = copy.copy(row)

    def pick(self, rows, source):
        return self.empty_row() if source < 0 else copy.copy(rows[source])

    def poison(self):
        self.state = self.call("poison")


class VmappedSchedule(Schedule):
    """The same rows, each a batch of one under vmap; its pointer is a scalar or ragged."""

    def __init__(self, spec, ragged):
        super().__init__(spec, ragged)
        self.state = rs.init_state(spec, NUM_ROWS, ragged=True)

    def call(self, name, *arguments):
        def with_pointer(function, tree):
            if self.ragged or not isinstance(tree, rs.ReplayState):
                return jax.tree.map(function, tree)
            arrays = dataclasses.replace(tree, pointer=None)
            return dataclasses.replace(jax.tree.map(function, arrays), pointer=tree.pointer)

        def split(x):
            return np.asarray(x)[:, None]

        def join(x):
            return np.asarray(x)[:, 0]

        if not (name == "commit" and not self.ragged):
            arguments = [with_pointer(split, argument) for argument in arguments]
        result = VMAPPED[name](self.spec, with_pointer(split, self.state), *arguments)
        if isinstance(result, tuple):
            return join(result[0]), with_pointer(join, result[1])
        return with_pointer(join, result)


def run_loop(spec, state, inputs):
    def body(state, token):
        output, state = rs.step(spec, state, jax.tree.map(lambda x: x[:, None], token))
        return state, output[:, 0]

    xs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
    state, outputs = rs.scan_steps(body, state, xs, window=min(2, spec.window))
    return jnp.moveaxis(outputs, 0, 1), state


FUNCTIONS = {
    "prefill_lengths": functools.partial(rs.prefill, chunk_size=4),
    "prefill_valid": lambda spec, state, inputs, valid, resets: rs.prefill(
        spec, state, inputs, valid=valid, resets=resets, chunk_size=4
    ),
    "step": rs.step,
    "verify": rs.verify,
    "verify_lengths": lambda spec, state, inputs, lengths: rs.verify(spec, state, inputs, lengths),
    "commit": rs.commit,
    "flush": rs.flush,
    "flush_where": lambda spec, state, where: rs.flush(spec, state, where),
    "materialize": rs.materialize,
    "reset": rs.reset,
    "take": rs.take,
    "insert": rs.insert,
    "poison": poison_dead_slots,
    "loop": run_loop,
}


def vmapped(function):
    def call(spec, *arguments):
        return jax.vmap(functools.partial(function, spec))(*arguments)

    return call


# All but the spec is traced: facts in arrays cannot raise, they must be total. Compiling takes most
# of the time, so LLVM optimises nothing.
jit = functools.partial(
    jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0}
)
JITTED = {name: jit(function) for name, function in FUNCTIONS.items()}
VMAPPED = {name: jit(vmapped(function)) for name, function in FUNCTIONS.items()}


def operation(name, *arguments):
    return st.tuples(st.just(name), *arguments)


def per_row(values, count=NUM_ROWS):
    return st.tuples(*[values] * count)


def schedules(spec, ragged, under_vmap):
    """Lists of operations, drafts and their acceptance the most frequent."""
    num_tokens = st.integers(1, spec.max_tokens)
    bits = per_row(st.integers(0, 2**PROMPT - 1))
    few_bits = per_row(st.sampled_from([0, 0, 0, 1, 2, 16, 64, 65, 127]))
    flags = per_row(st.booleans())
    counts = st.integers(-1, spec.max_tokens + 1)
    shared = [
        operation("steps", st.integers(1, spec.window + 1)),
        operation("prefill_pattern", bits, few_bits),
        operation("flush", flags),
        operation("loop"),
        operation("poison"),
    ]
    verify = operation("verify", num_tokens, st.none())
    if not ragged:
        # Under vmap rows need not move together.
        draft = [verify, operation("commit", per_row(counts) if under_vmap else counts)]
        return st.lists(st.one_of(*draft, *draft, *shared), min_size=10, max_size=30)
    # None compiles for every T: leave it to the longest draft.
    verify = st.one_of(
        operation("verify", num_tokens, per_row(counts)),
        operation("verify", st.just(spec.max_tokens), st.none()),
    )
    draft = [verify, operation("commit", per_row(counts))]
    sources = st.integers(-1, NUM_ROWS - 1)
    slots = st.lists(
        st.sampled_from([-NUM_ROWS, -1, *range(NUM_ROWS + 1), 2**31 - 1]),
        min_size=NUM_SAVED,
        max_size=NUM_SAVED,
        unique=True,
    )
    serving = [
        operation("prefill", per_row(st.integers(0, PROMPT)), st.none()),
        operation("reset", flags),
    ]
    between_rows = [
        operation("fork", per_row(sources)),
        operation("save", per_row(sources, NUM_SAVED)),
        operation("insert", slots),
    ]
    if not under_vmap:
        serving += between_rows
    return st.lists(st.one_of(*draft, *draft, *draft, *shared, *serving), min_size=12, max_size=36)


def run_schedules(family, window, max_tokens, *, ragged, max_examples, under_vmap=False):
    spec = make_spec(family, window=window, max_tokens=max_tokens)

    @settings(
        deadline=None,
        derandomize=bool(os.environ.get("CI")),
        max_examples=max_examples,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(schedules(spec, ragged, under_vmap))
    def run(operations):
        schedule = VmappedSchedule if under_vmap else Schedule
        schedule(spec, ragged).run(operations)

    run()


@pytest.mark.parametrize("family, window, max_tokens", RAGGED)
def test_schedules_of_ragged_rows(family, window, max_tokens):
    run_schedules(family, window, max_tokens, ragged=True, max_examples=40)


@pytest.mark.parametrize("family, window, max_tokens", SCALAR)
def test_schedules_of_rows_that_move_together(family, window, max_tokens):
    run_schedules(family, window, max_tokens, ragged=False, max_examples=25)


@pytest.mark.parametrize("family, window, max_tokens, ragged", VMAPPED_ROWS)
def test_schedules_of_rows_under_vmap(family, window, max_tokens, ragged):
    run_schedules(family, window, max_tokens, ragged=ragged, max_examples=20, under_vmap=True)


@pytest.mark.parametrize("family", ["mamba2", "gated_delta_net", "kda", "gla"])
def test_the_model_is_the_recurrence(family):
    """The NumPy recurrence and `recurrent_scan` in float64, written apart, agree."""
    spec = make_spec(family)
    schedule = Schedule(spec, ragged=False)
    outputs, state = schedule.replay(schedule.empty_row(), range(POOL))
    inputs = jax.tree.map(lambda x: x[None], schedule.inputs)
    expected, expected_state = reference(spec, inputs)
    assert error(outputs[None], expected) <= 1e-13
    assert error(state[None], expected_state) <= 1e-13
