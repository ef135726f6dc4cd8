"""Conventional decoding with a state for each draft: the baseline of speculation."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, make_spec, random_inputs, tokens

import replayssm_jax as rs
from replayssm_jax.snapshots import Snapshots, verify_snapshots

B, T = 3, 4


@functools.partial(jax.jit, static_argnums=0)
def scan(spec, inputs):
    state = jnp.zeros(spec.state_shape(inputs.v.shape[0]))
    outputs, states = [], [state]
    for t in range(inputs.v.shape[1]):
        output, state = rs.recurrent_step(spec, state, tokens(inputs, t, t + 1))
        outputs.append(output)
        states.append(state)
    return jnp.concatenate(outputs, axis=1), jnp.stack(states, axis=1)


verify = jax.jit(verify_snapshots, static_argnums=0)


@pytest.mark.parametrize("family", ["mamba2", "gated_delta_net", "kda"])
def test_any_acceptances_equal_plain_decoding(family):
    """Rows accept their own numbers, 0 too; slots go round, and NaN drafts leave no trace."""
    spec = make_spec(family, max_tokens=T)
    inputs = random_inputs(spec, B, 16)
    expected, states = scan(spec, inputs)
    snapshots, position = Snapshots.zeros(spec, B), np.zeros(B, np.int32)
    assert snapshots.states.shape == (B, T + 1, *spec.state_shape(B)[1:])
    rng = np.random.default_rng(0)
    while position.min() < 12:
        lengths = np.minimum(rng.integers(0, T + 1, B), 16 - position).astype(np.int32)
        accepted = rng.integers(0, lengths + 1)
        at = np.minimum(position[:, None] + np.arange(T), 15)
        wrong = np.arange(T) >= accepted[:, None]

        def pick(x, at=at, wrong=wrong):
            x = np.asarray(x)[np.arange(B)[:, None], at]
            return np.where(wrong.reshape(*wrong.shape, *(1,) * (x.ndim - 2)), np.float32("nan"), x)

        output, snapshots = verify(
            spec, snapshots, jax.tree.map(pick, inputs), jnp.asarray(position), jnp.asarray(lengths)
        )
        for b in range(B):
            assert_close(output[b, : accepted[b]], expected[b, at[b, : accepted[b]]])
            assert not np.asarray(output[b, lengths[b] :]).any()
        position += accepted
        held = snapshots.at(jnp.asarray(position))
        assert_close(held, np.asarray(states)[np.arange(B), position], name="state")


def test_no_copy_of_the_snapshots_is_made():
    """A baseline that copies what it could write in place would flatter replay."""
    spec = make_spec("gated_delta_net", max_tokens=T)
    inputs, snapshots = random_inputs(spec, B, T), Snapshots.zeros(spec, B)

    def run(snapshots, position):
        def body(carry, _):
            snapshots, position = carry
            output, snapshots = verify_snapshots(spec, snapshots, inputs, position)
            return (snapshots, position + 2), output

        return jax.lax.scan(body, (snapshots, position), length=6)

    program = jax.jit(run, donate_argnums=0).lower(snapshots, jnp.zeros(B, jnp.int32)).compile()
    shape = ",".join(map(str, snapshots.states.shape))
    assert not re.findall(rf"= f32\[{shape}\]\S* copy\(", program.as_text())


def test_lists_are_positions_and_lengths():
    spec = make_spec("kda", max_tokens=2)
    inputs, snapshots = random_inputs(spec, B, 2), Snapshots.zeros(spec, B)
    state, where = jnp.ones(spec.state_shape(B)), [True, False, True]
    put = Snapshots.put(snapshots, [0, 1, 2], state, where)
    np.testing.assert_array_equal(put.at([0, 1, 2])[:, 0, 0, 0], where)
    found = verify_snapshots(spec, put, inputs, [0, 1, 2], [2, 0, 1])
    expected = verify_snapshots(spec, put, inputs, jnp.array([0, 1, 2]), jnp.array([2, 0, 1]))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_impossible_arguments_raise():
    spec = make_spec("kda", max_tokens=2)
    snapshots, inputs = Snapshots.zeros(spec, B), random_inputs(spec, B, 2)
    for position, lengths, error, match in [
        ([0.5] * B, None, TypeError, "position must be integer, found float64"),
        ([0] * 2, None, ValueError, r"position must have shape \(3,\), found \(2,\)"),
        ([0] * B, [True] * B, TypeError, "lengths must be integer, found bool"),
    ]:
        with pytest.raises(error, match=match):
            verify_snapshots(spec, snapshots, inputs, position, lengths)
    with pytest.raises(ValueError, match="T must be between 1 and max_tokens=2, found T=3"):
        verify_snapshots(
            spec, Snapshots.zeros(spec, B), random_inputs(spec, B, 3), jnp.zeros(B, jnp.int32)
        )
    other = Snapshots.zeros(make_spec("kda", max_tokens=1), B)
    with pytest.raises(ValueError, match="max_tokens=2 needs 3 states a row, found 2"):
        verify_snapshots(spec, other, random_inputs(spec, B, 2), jnp.zeros(B, jnp.int32))
