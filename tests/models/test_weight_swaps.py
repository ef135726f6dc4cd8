"""Rollouts between optimiser steps: new weights go through the same programs, in place."""

import gc
import importlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from model_cases import compile_quickly, jit, make_model, random_tokens, start

from replayssm_jax import generation
from replayssm_jax.generate import generate

module = importlib.import_module("replayssm_jax.generate")

B, N, SIZE = 2, 8, 32


def make(family, pattern):
    """Weights that outweigh what else a decode step holds; repeated layers are stacked."""
    return make_model(
        family, pattern=pattern, mlp="swiglu", d_model=128, d_ff=256, scan_layers=True
    )


def size(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def live_bytes():
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


def test_five_optimiser_steps_with_rollouts_between(monkeypatch):
    compile_quickly(monkeypatch, chex.assert_max_traces(n=1))
    graphdef, params = nnx.split(make("gated_delta_net", "MAMA"))
    params = jax.tree.map(jnp.copy, params)  # training donates, the model is cached
    tokens = random_tokens(B, 9)
    optimiser = optax.sgd(0.1, momentum=0.9)

    def loss(params):
        logprobs = jax.nn.log_softmax(nnx.merge(graphdef, params)(tokens[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1))

    def train(params, opt_state):
        updates, opt_state = optimiser.update(jax.grad(loss)(params), opt_state)
        return optax.apply_updates(params, updates), opt_state

    train = jit(train, donate_argnums=(0, 1))
    opt_state = optimiser.init(params)
    others = live_bytes() - size((params, opt_state))
    state, held, rollouts = None, [], []
    for _ in range(5):
        params, opt_state = train(params, opt_state)
        model = nnx.merge(graphdef, params)
        out = generate(model, tokens[:, :5], max_new_tokens=N, cache_size=SIZE, return_state=True)
        rollouts.append(np.array(out.tokens))
        # A state from a rollout may be donated to the next program, under these weights or others.
        first, state = out.state, None
        out = generate(model, tokens[:, :5], max_new_tokens=N, state=first, return_state=True)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first.cache.layers))
        with pytest.raises(ValueError, match="donated to an earlier call"):
            generate(model, tokens[:, :5], max_new_tokens=N, state=first, return_state=True)
        state = out.state
        held.append(live_bytes() - others)
    assert len(set(held)) == 1, held
    assert held[0] <= 1.05 * size((params, opt_state, state)), held
    assert any(not np.array_equal(rollouts[0], other) for other in rollouts[1:])
    # Weights reach the program as arguments: the last rollout is that of a model built anew.
    fresh = nnx.merge(graphdef, jax.tree.map(jnp.copy, params))
    out = generate(fresh, tokens[:, :5], max_new_tokens=N, cache_size=SIZE, return_state=True)
    np.testing.assert_array_equal(out.tokens, rollouts[-1])


@pytest.mark.parametrize("family, pattern", [("gated_delta_net", "MA"), ("kda", "MAMA")])
def test_peak_memory_is_weights_their_unstacked_copy_and_the_cache(family, pattern, monkeypatch):
    compile_quickly(monkeypatch)
    model = make(family, pattern)
    prompt = module.as_prompt(random_tokens(B, 5))
    make_state = dict(decode="replay", ragged=True, penalised=False, unstack=True)
    state = generation._init(model, B, SIZE, **make_state)
    control, carry = start(model, prompt, N, cache_size=SIZE, ragged=True)
    copied = [blocks for blocks, count, _ in model.segments() if count > 1]
    assert bool(copied) == (pattern == "MAMA")
    # The bound that users may count on.
    bound = 1.05 * size((model, copied, carry))
    for lowered in (
        generation._prefill.lower(model, prompt, state, control, N, True),
        module._decode.lower(model, carry, control, True, True),
    ):
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= size(carry.state.cache.layers)
        peak = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes
        )
        assert peak <= bound, (peak, bound)
