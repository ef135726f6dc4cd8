"""No two products of a layer share an array: XLA on GPUs would join their kernels at every call."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from replayssm_jax.layers import (
    MLP,
    Attention,
    GatedDeltaNet,
    KimiDeltaAttention,
    Mamba2,
    MoE,
)

D = 24
LAYERS = {
    "mamba2": functools.partial(Mamba2, D, num_heads=4, head_dim=8, state_dim=8, num_groups=2),
    "gated_delta_net": functools.partial(
        GatedDeltaNet, D, num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8
    ),
    "kda": functools.partial(KimiDeltaAttention, D, num_heads=2, key_dim=8, value_dim=8),
    "kda without low ranks": functools.partial(
        KimiDeltaAttention, D, num_heads=2, key_dim=8, value_dim=8, gate_rank=0
    ),
    "attention": functools.partial(Attention, D, num_heads=4, num_kv_heads=2, head_dim=8),
    "mlp": functools.partial(MLP, D, 40),
    "moe": functools.partial(
        MoE, D, num_experts=4, top_k=2, d_expert=16, d_shared=40, shared_gate=True
    ),
}


def products(jaxpr):
    """The arrays of a jaxpr that are multiplied by a kernel [D, n]."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general" and equation.invars[1].aval.shape[:-1] == (D,):
            yield equation.invars[0]
        for inner in jax.tree.leaves([*equation.params.values()]):
            inner = getattr(inner, "jaxpr", inner)  # of a closed one
            if hasattr(inner, "eqns"):
                yield from products(inner)


@pytest.mark.parametrize("name", LAYERS)
def test_products_share_no_array(name):
    layer = LAYERS[name](dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    jaxpr = jax.make_jaxpr(lambda x: layer(x))(jnp.zeros((2, 1, D), jnp.bfloat16))
    found = collections.Counter(map(id, products(jaxpr.jaxpr)))
    assert found and max(found.values()) == 1
