"""Run by `test_triton.py` with TRITON_INTERPRET=1, which must be set before Triton is imported."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import triton.runtime.interpreter as interpreter
from oracle import assert_close, make_spec, poison_dead_slots, random_inputs, reference, tokens

import replayssm_jax as rs
from replayssm_triton import configs

ON_KERNELS = {"implementation": "triton"}
SHAPES = {
    "mamba2": dict(num_heads=2, num_groups=1, value_dim=20, key_dim=10),
    "gated_delta_net": dict(num_heads=2, num_groups=1, value_dim=16, key_dim=33),
    "kda": dict(num_heads=1, num_groups=1, value_dim=12, key_dim=33),
    "gla": dict(num_heads=2, num_groups=1, value_dim=12, key_dim=16),
}


def let_numpy_convert_scalars():
    """Triton 3.6 calls int() on arrays of one element, which NumPy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend


def steps_drafts_and_flushes(family, window):
    """Drafts of uneven lengths, rollback, flush, reset rows, vmap; NaN in dead slots."""
    spec = make_spec(family, window=window, max_tokens=2, **SHAPES[family])
    inputs = random_inputs(spec, 2, 8)
    step = jax.jit(functools.partial(rs.step, spec, **ON_KERNELS))
    verify = jax.jit(functools.partial(rs.verify, spec, **ON_KERNELS))
    outputs = []
    initial = jnp.full(spec.state_shape(2), jnp.nan)
    state = rs.init_state(spec, 2, initial, layout="vk", ragged=True)
    state = rs.reset(spec, state, jnp.array([True, True]))
    for t in range(0, 4, 2):
        state = poison_dead_slots(spec, state)
        output, state = verify(state, tokens(inputs, t, t + 2))
        outputs.append(output)
        state = rs.commit(spec, state, 2)
    _, state = verify(state, tokens(inputs, 0, 2))
    state = poison_dead_slots(spec, rs.commit(spec, state, 0))
    output, state = verify(state, tokens(inputs, 4, 6), jnp.array([2, 1]))
    assert not output[1, 1].any()
    state = rs.commit(spec, state, jnp.array([2, 1]))
    rest, state = verify(state, tokens(inputs, 5, 7), jnp.array([0, 1]))
    state = rs.commit(spec, state, jnp.array([0, 1]))
    outputs.append(output.at[1, 1].set(rest[1, 0]))
    state = rs.flush(spec, poison_dead_slots(spec, state), jnp.array([True, False]), **ON_KERNELS)
    state = poison_dead_slots(spec, state)
    single = jax.jit(jax.vmap(functools.partial(rs.step, spec, **ON_KERNELS)))
    each = functools.partial(jax.tree.map, lambda x: x[:, None])
    output, state = single(each(state), each(tokens(inputs, 6, 7)))
    outputs.append(output[:, 0])
    state = jax.tree.map(lambda x: x[:, 0], state)
    output, state = step(state, tokens(inputs, 7, 8))
    outputs.append(output)
    expected, expected_state = reference(spec, inputs)
    assert_close(jnp.concatenate(outputs, axis=1), expected, 1e-6)
    assert_close(rs.materialize(spec, state), expected_state, 1e-6, name="state")
    pointer = dataclasses.replace(state.pointer, length=jnp.array([window + 1, window]))
    lost, _ = step(dataclasses.replace(state, pointer=pointer), tokens(inputs, 0, 1))
    assert np.isnan(lost[0]).all(), "more records than the window holds must be loud"


def windowed_loop(family, window):
    """Layers that share a pointer may run by XLA: both move it in the same way."""
    spec = make_spec(family, window=window, **SHAPES[family])
    inputs = random_inputs(spec, 2, window + 2)
    state = rs.init_state(spec, 2, ragged=True)
    _, state = rs.step(spec, state, tokens(inputs, 0, 1), implementation="xla")
    rest = jax.tree.map(lambda x: jnp.moveaxis(x[:, 1:, None], 1, 0), inputs)

    def decode(implementation):
        def body(state, token):
            output, state = rs.step(spec, state, token, implementation=implementation)
            return state, output

        return rs.scan_steps(body, state, rest, window=window)

    (found, outputs), (wanted, expected) = decode("triton"), decode("xla")
    assert_close(outputs, expected, 1e-6)
    assert_close(found.checkpoint, wanted.checkpoint, 1e-6, name="checkpoint")
    assert found.pointer.start.tolist() == wanted.pointer.start.tolist()
    assert found.pointer.length.tolist() == wanted.pointer.length.tolist()


def several_tiles_for_a_program(family, window):
    """As large batches have: a head in two tiles of 16 rows, the second with 12 of them."""
    configs.FILLED, configs.REGISTERS = 0, 1
    assert configs.choose_one_token(2, 28, SHAPES[family]["key_dim"])[:3] == (16, 1, 2)
    spec = make_spec(family, window=window, **{**SHAPES[family], "value_dim": 28})
    inputs = random_inputs(spec, 2, window + 2)
    step = jax.jit(functools.partial(rs.step, spec, **ON_KERNELS))
    initial = np.random.default_rng(0).standard_normal(spec.state_shape(2))
    state = rs.init_state(spec, 2, jnp.asarray(initial, jnp.float32), layout="vk")
    outputs = []
    for t in range(window + 2):
        output, state = step(poison_dead_slots(spec, state), tokens(inputs, t, t + 1))
        outputs.append(output)
    expected, expected_state = reference(spec, inputs, initial)
    assert_close(jnp.concatenate(outputs, axis=1), expected, 1e-6)
    assert_close(rs.materialize(spec, state), expected_state, 1e-6, name="state")


def conventional_step(family):
    spec = make_spec(family, **SHAPES[family])
    inputs = random_inputs(spec, 2, 1)
    initial = np.random.default_rng(0).standard_normal(spec.state_shape(2))
    state = jnp.asarray(initial, jnp.float32)
    output, state = rs.recurrent_step(spec, state, inputs, **ON_KERNELS)
    expected, expected_state = reference(spec, inputs, initial)
    assert_close(output, expected, 1e-6)
    assert_close(state, expected_state, 1e-6, name="state")


if __name__ == "__main__":
    let_numpy_convert_scalars()
    family, window = sys.argv[1], int(sys.argv[2])
    steps_drafts_and_flushes(family, window)
    conventional_step(family)
    windowed_loop(family, window)
    several_tiles_for_a_program(family, window)
