"""Training goes through prefill: its gradients against finite differences in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from oracle import FAMILIES, assert_close, make_spec, random_inputs, tokens

import replayssm_jax as rs

DOUBLE = dict(state_dtype=jnp.float64, key_dtype=jnp.float64, value_dtype=jnp.float64)


def randomly_weighted(outputs, state):
    """A scalar that depends on every output and on every element of the state."""
    rng = np.random.default_rng(7)
    weigh = lambda x: jnp.sum(x * jnp.asarray(rng.standard_normal(x.shape)))  # noqa: E731
    return weigh(outputs) + weigh(state)


# Every way with both rules and both kinds of decay, every family in two ways.
@pytest.mark.parametrize(
    "how, family",
    [
        ("whole", "mamba2"),
        ("whole", "kda"),
        ("in chunks", "gated_delta_net"),
        ("in chunks", "gla"),
        ("ragged", "mamba2"),
        ("ragged", "kda"),
        ("packed", "gated_delta_net"),
        ("packed", "gla"),
    ],
)
def test_prefill_gradients_in_float64(how, family):
    with jax.enable_x64(True):
        spec = make_spec(family, num_heads=2, num_groups=2, value_dim=3, key_dim=4, **DOUBLE)
        inputs = random_inputs(spec, 2, 11)
        initial = jnp.asarray(np.random.default_rng(1).standard_normal(spec.state_shape(2)))
        masks = np.random.default_rng(2).random((2, 2, 11))

        def loss(inputs, initial):
            state = rs.init_state(spec, 2, initial, layout="vk", ragged=how == "ragged")
            if how == "whole":
                outputs, state = rs.prefill(spec, state, inputs)
            elif how == "in chunks":
                first, state = rs.prefill(spec, state, tokens(inputs, 0, 4), chunk_size=3)
                rest, state = rs.prefill(spec, state, tokens(inputs, 4, 11), chunk_size=3)
                outputs = jnp.concatenate([first, rest], axis=1)
            elif how == "ragged":
                lengths = jnp.asarray([7, 11])
                outputs, state = rs.prefill(spec, state, inputs, lengths, chunk_size=4)
            else:
                valid, resets = jnp.asarray(masks[0] < 0.7), jnp.asarray(masks[1] < 0.3)
                outputs, state = rs.prefill(
                    spec, state, inputs, valid=valid, resets=resets, chunk_size=4
                )
            return randomly_weighted(outputs, rs.materialize(spec, state))

        # One-sided differences at a gate of zero or at the bound of g would leave the domain.
        inputs = dataclasses.replace(inputs, g=inputs.g - 0.05)
        loss = jax.jit(loss)
        check_grads(loss, (inputs, initial), order=1, modes=("rev",), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_of_the_recurrence(family):
    spec = make_spec(family)
    inputs = random_inputs(spec, 2, 70)

    def through_prefill(inputs):
        outputs, state = rs.prefill(spec, rs.init_state(spec, 2), inputs)
        return randomly_weighted(outputs, rs.materialize(spec, state))

    def through_recurrence(inputs):
        outputs, state = rs.recurrent_scan(spec, jnp.zeros(spec.state_shape(2)), inputs)
        return randomly_weighted(outputs, state)

    ours = jax.jit(jax.grad(through_prefill))(inputs)
    theirs = jax.jit(jax.grad(through_recurrence))(inputs)
    for name in ("q", "k", "v", "g", "beta"):
        assert_close(getattr(ours, name), getattr(theirs, name), 1e-5, name)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_past_that_is_not_finite_has_no_part_in_gradients(family):
    """Behind a reset they are those of a finite past: zero for what was forgotten."""
    spec = make_spec(family)
    inputs = random_inputs(spec, 2, 12)
    resets = jnp.arange(12)[None] == jnp.array([[5], [6]])
    kept = jnp.arange(12) >= 6

    def loss(inputs, initial):
        state = rs.init_state(spec, 2, initial, layout="vk")
        outputs, state = rs.prefill(spec, state, inputs, resets=resets, chunk_size=8)
        outputs = jnp.where(kept[None, :, None, None], outputs, 0)
        return randomly_weighted(outputs, rs.materialize(spec, state))

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
    initial = jnp.ones(spec.state_shape(2))
    expected = gradients(inputs, initial)
    bad = jax.tree.map(lambda x: x.at[:, 2:4].set(jnp.nan), inputs)
    found = gradients(bad, initial.at[0].set(jnp.inf))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not found[1].any() and not found[0].v[:, :5].any() and found[0].v[:, 6:].any()


def test_extreme_gates_have_finite_gradients():
    spec = make_spec("kda")
    inputs = random_inputs(spec, 1, 40, gates=(0.0, -8.0, -200.0))

    def loss(inputs):
        return jnp.sum(rs.prefill(spec, rs.init_state(spec, 1), inputs)[0] ** 2)

    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.grad(loss)(inputs)))


@pytest.mark.parametrize("decode", [rs.step, rs.verify])
def test_decode_refuses_gradients(decode):
    spec = make_spec("mamba2")
    state = rs.init_state(spec, 1)

    def loss(inputs):
        return jnp.sum(decode(spec, state, inputs)[0])

    with pytest.raises(TypeError, match="train through prefill"):
        jax.grad(loss)(random_inputs(spec, 1, 1))
