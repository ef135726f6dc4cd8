"""What speed depends on, read off the compiled programs: no copies of the state, one trace."""

import dataclasses
import gc
import math
import re
import weakref

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from oracle import make_spec, random_inputs, tokens

import replayssm_jax as rs

# States large beside their rings and beside everything else in a step.
SHAPES = {
    "mamba2": dict(num_heads=4, num_groups=1, value_dim=256, key_dim=512),
    "gated_delta_net": dict(num_heads=4, num_groups=2, value_dim=512, key_dim=512),
    "kda": dict(num_heads=4, num_groups=4, value_dim=512, key_dim=256),
}
BATCH = 8


@pytest.fixture(params=SHAPES)
def spec(request):
    activations = dict(key_dtype=jnp.bfloat16, value_dtype=jnp.bfloat16)
    return make_spec(request.param, **SHAPES[request.param], **activations)


def compiled_loop(spec, ragged, scan):
    """The program of 32 donated steps, and the state that it takes."""
    state = rs.init_state(spec, BATCH, ragged=ragged)

    def body(state, one):
        output, state = rs.step(spec, state, one)
        return state, output

    xs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0)[:, :, None], random_inputs(spec, BATCH, 32))
    loop = jax.jit(lambda state, xs: scan(body, state, xs), donate_argnums=0)
    return loop.lower(state, xs).compile(), state


def state_sized(program, state, operation):
    """Lines of the program with `operation` on an array as large as the checkpoint."""
    found = []
    for line in program.as_text().splitlines():
        match = re.search(rf"= \w+\[([\d,]*)\]\S* {operation}\(", line)
        if match and match.group(1):
            size = 1
            for dim in match.group(1).split(","):
                size *= int(dim)
            if size >= math.prod(state.checkpoint.shape):
                found.append(line.strip())
    return found


@pytest.mark.parametrize("ragged", [False, True], ids=["scalar", "ragged"])
@pytest.mark.parametrize("scan", [jax.lax.scan, rs.scan_steps], ids=["scan", "scan_steps"])
def test_a_donated_loop_copies_no_state(spec, ragged, scan):
    program, state = compiled_loop(spec, ragged, scan)
    assert state_sized(program, state, "copy") == []
    assert state_sized(program, state, "transpose") == []
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes < state.checkpoint.nbytes
    assert memory.alias_size_in_bytes >= state.checkpoint.nbytes


older_xla_copies_bf16 = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="on CPU it computes updates of bf16 arrays in float32 and copies them back",
)


@pytest.mark.parametrize(
    "formats",
    [
        {"read_dtype": "int8"},
        pytest.param({"state_dtype": "bfloat16"}, marks=older_xla_copies_bf16),
    ],
)
def test_a_donated_loop_with_low_precision_copies_no_state(formats):
    """Neither the checkpoint nor its read copy, both updated in place."""
    spec = make_spec("gated_delta_net", **SHAPES["gated_delta_net"], **formats)
    program, state = compiled_loop(spec, False, rs.scan_steps)
    assert state_sized(program, state, "copy") == []
    assert state_sized(program, state, "transpose") == []
    held = state.checkpoint.nbytes + (0 if state.read_copy is None else state.read_copy.nbytes)
    assert program.memory_analysis().alias_size_in_bytes >= held


def test_each_loop_has_its_form_of_the_flush_switch(spec):
    def conditionals(ragged, scan):
        return compiled_loop(spec, ragged, scan)[0].as_text().count(" conditional(")

    assert conditionals(ragged=False, scan=jax.lax.scan) == 1
    assert conditionals(ragged=True, scan=jax.lax.scan) == 0
    assert conditionals(ragged=False, scan=rs.scan_steps) == 0
    assert conditionals(ragged=True, scan=rs.scan_steps) == 0


def test_a_step_that_holds_neither_copies_nor_writes_the_state(spec):
    """The output-only step of a windowed loop returns the very checkpoint that it was given."""
    from replayssm_jax.loops import set_phase
    from replayssm_jax.state import Phase

    state = set_phase(rs.init_state(spec, BATCH), Phase(False, 16))
    step = jax.jit(lambda state, one: rs.step(spec, state, one), donate_argnums=0)
    program = step.lower(state, random_inputs(spec, BATCH, 1)).compile()
    for operation in ("copy", "transpose", "select", "add", "multiply", "dynamic-update-slice"):
        assert state_sized(program, state, operation) == []
    jaxpr = jax.make_jaxpr(lambda state, one: rs.step(spec, state, one)[1].checkpoint)(
        state, random_inputs(spec, BATCH, 1)
    )
    assert "cond[" not in str(jaxpr) and "while[" not in str(jaxpr)


def test_the_branch_that_keeps_does_nothing(spec):
    """In the program of a donated step the flush sits in one branch, the other is a parameter."""
    state = rs.init_state(spec, BATCH)
    step = jax.jit(lambda state, one: rs.step(spec, state, one), donate_argnums=0)
    text = step.lower(state, random_inputs(spec, BATCH, 1)).compile().as_text()
    (branches,) = re.findall(r"branch_computations=\{([^}]*)\}", text) or re.findall(
        r"(true_computation=\S+ false_computation=\S+)", text
    )
    names = re.findall(r"%?([\w.-]+)", branches.replace("true_computation=", ""))
    bodies = []
    for name in names:
        match = re.search(rf"^%?{re.escape(name)} .*?\{{\n(.*?)^\}}", text, re.S | re.M)
        if match:
            bodies.append(re.findall(r"= \S+ ([\w-]+)\(", match.group(1)))
    assert len(bodies) == 2
    trivial = {"parameter", "tuple", "get-tuple-element", "bitcast"}
    assert sorted(set(body) <= trivial for body in bodies) == [False, True]


@pytest.mark.parametrize("batched_pointer", [False, True])
def test_vmap_keeps_the_cond_or_loops_over_due_rows(spec, batched_pointer):
    """A shared pointer keeps its cond; rows with their own never select between whole states."""
    inner = rs.init_state(spec, 1)
    states = jax.tree.map(lambda x: jnp.stack([x] * BATCH), inner)
    axes = rs.ReplayState(0, 0, 0 if batched_pointer else None, 0, 0)
    if not batched_pointer:
        states = rs.ReplayState(states.checkpoint, states.buffer, inner.pointer)
    one = jax.tree.map(lambda x: x[:, None], random_inputs(spec, BATCH, 1))
    step = jax.jit(
        jax.vmap(lambda state, one: rs.step(spec, state, one), (axes, 0), (0, axes)),
        donate_argnums=0,
    )
    program = step.lower(states, one).compile()
    assert program.as_text().count(" conditional(") == (0 if batched_pointer else 1)
    for operation in ("copy", "select", "transpose"):
        assert state_sized(program, states, operation) == []
    assert program.memory_analysis().temp_size_in_bytes < states.checkpoint.nbytes


def test_one_trace_serves_every_pointer_and_every_row():
    """Slots, pointers and acceptances are data: nothing of them is baked into a program."""
    spec = make_spec("gated_delta_net", window=6, max_tokens=2)
    inputs = random_inputs(spec, 3, 40)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def cycle(state, draft, lengths, accepted, where, rows):
        _, state = rs.verify(spec, state, draft, lengths)
        state = rs.flush(spec, rs.commit(spec, state, accepted), where)
        return rs.insert(spec, state, rows, rs.take(spec, state, rows[::-1]))

    state = rs.init_state(spec, 3, ragged=True)
    for t in range(0, 20, 2):
        lengths = jnp.asarray([t % 3, 2, 1])
        rows = jnp.asarray([t % 3, -1, (t + 1) % 3])
        draft = tokens(inputs, t, t + 2)
        state = cycle(state, draft, lengths, lengths // 2, jnp.asarray([t == 4, False, True]), rows)


def test_states_are_made_by_one_program():
    spec = make_spec("kda")
    made = jax.jit(chex.assert_max_traces(n=1)(lambda: rs.init_state(spec, 2, ragged=True)))
    made()
    made()
    assert hash(make_spec("kda")) == hash(spec) and make_spec("kda") == spec


def test_layers_under_a_linen_scan():
    """Flax lets no effect into a scanned layer; the core has none."""
    spec = make_spec("mamba2")

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, state):
            gain = self.param("gain", nn.initializers.ones, ())
            output, state = rs.step(spec, state, scaled(gain * x))
            return jnp.mean(output), state

    inputs = random_inputs(spec, 2, 1)

    def scaled(x):
        return dataclasses.replace(inputs, v=(inputs.v * x).astype(inputs.v.dtype))

    layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()
    one = rs.init_state(spec, 2, ragged=True)
    states = jax.tree.map(lambda x: jnp.stack([x] * 3), one)
    params = layers.init(jax.random.key(0), jnp.ones(()), states)
    output, found = jax.jit(layers.apply)(params, jnp.ones(()), states)
    x = jnp.ones(())
    for _ in range(3):
        x = jnp.mean(rs.step(spec, one, scaled(x))[0])
    chex.assert_trees_all_close(output, x, rtol=1e-5)
    assert found.pointer.length.tolist() == [[1, 1]] * 3


@pytest.mark.parametrize("loop", ["scan_steps", "while_loop"])
def test_loops_outside_jit_trace_a_body_once_and_let_go_of_it(loop):
    """As those of `jax.lax`, which keep what they compiled for as long as the body lives."""
    spec = make_spec("mamba2", window=4)
    state, one = rs.init_state(spec, 2), random_inputs(spec, 2, 1)
    traces = []

    class Held:
        """What a body closes over, such as a model."""

    def make(held):
        def advance(state):
            traces.append(held)
            return rs.step(spec, state, one)[1]

        if loop == "scan_steps":
            return lambda state, _: (advance(state), None)
        return lambda carry: (carry[0] + 1, advance(carry[1]))

    def run(body):
        if loop == "scan_steps":
            return rs.scan_steps(body, state, None, 7, window=4)[0]
        return rs.while_loop(few, body, (jnp.int32(0), state), window=4)[1]

    few = lambda carry: carry[0] < 8  # noqa: E731
    # One that flushes, one that does not, and one that flushes in part of a window.
    expected = 3 if loop == "scan_steps" else 2
    held = Held()
    body, gone = make(held), weakref.ref(held)
    first = run(body)
    assert len(traces) == expected
    chex.assert_trees_all_equal(run(body), first)
    assert len(traces) == expected
    chex.assert_trees_all_equal(run(make(held)), first)
    assert len(traces) == 2 * expected
    traces.clear()
    del held, body
    gc.collect()
    assert gone() is None


def test_loops_outside_jit_tell_equal_bodies_apart():
    """A method is another object each time it is bound, and equal ones may close over others."""
    spec = make_spec("mamba2", window=4)
    state, one = rs.init_state(spec, 2), random_inputs(spec, 2, 1)

    @dataclasses.dataclass(frozen=True)
    class Model:
        name: str
        weight: float = dataclasses.field(compare=False)
        fails: list = dataclasses.field(default_factory=list, compare=False)

        def __call__(self, state, _):
            if self.fails:
                self.fails.clear()
                raise RuntimeError
            gc.collect()  # a body from before may go while this one is traced
            return rs.step(spec, state, one)[1], jnp.float32(self.weight)

        def body(self, state, x):
            return self(state, x)

    for weight in (1.0, 2.0):
        _, found = rs.scan_steps(Model("same", weight), state, None, 8, window=4)
        assert (found == weight).all()

    model = Model("retried", 3.0, [True])

    def fail():
        error = [None]
        try:
            rs.scan_steps(model.body, state, None, 8, window=4)
        except RuntimeError as found:
            error[0] = found  # a cycle that holds the method

    gc.disable()
    try:
        fail()
        assert not model.fails
        _, found = rs.scan_steps(model.body, state, None, 8, window=4)
    finally:
        gc.enable()
    assert (found == 3).all()


def test_loops_inside_jit_see_what_changed():
    spec = make_spec("mamba2", window=4)
    state, one = rs.init_state(spec, 2), random_inputs(spec, 2, 1)
    weight = [1.0]

    def body(state, _):
        return rs.step(spec, state, one)[1], jnp.float32(weight[0])

    for expected in (1.0, 2.0):
        weight[0] = expected
        run = jax.jit(lambda: rs.scan_steps(body, state, None, 8, window=4)[1])
        assert (run() == expected).all()
