"""What every layer refuses, in the same words."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from layer_cases import D_MODEL, FAMILIES, B, hidden, make_layer, unfilled

import replayssm_jax as rs
from replayssm_jax.layers import MLP, Attention, CausalConv, GatedRMSNorm, HybridBlock, MoE, RMSNorm


def rngs():
    return {"rngs": nnx.Rngs(0)}


def make_block(**options):
    options = rngs() | options
    return HybridBlock(D_MODEL, mixers=[unfilled("kda"), unfilled("mamba2")], **options)


CACHED = {
    **{family: lambda family=family, **kw: unfilled(family, **kw) for family in FAMILIES},
    "attention": lambda **kw: Attention(D_MODEL, num_heads=3, **rngs() | kw),
    "convolution": lambda **kw: CausalConv(D_MODEL, **rngs() | kw),
}
LAYERS = {
    **CACHED,
    "mlp": lambda **kw: MLP(D_MODEL, 8, **rngs() | kw),
    "experts": lambda **kw: MoE(D_MODEL, num_experts=4, top_k=2, d_expert=6, **rngs() | kw),
    "norm": lambda **kw: RMSNorm(D_MODEL, **rngs() | kw),
    "gated norm": lambda **kw: GatedRMSNorm(D_MODEL, **rngs() | kw),
    "block": make_block,
}


def run(layer, x):
    return layer(x, x) if isinstance(layer, GatedRMSNorm) else layer(x)


@pytest.mark.parametrize("name", LAYERS)
def test_inputs_of_another_width_or_dtype(name):
    layer = jax.eval_shape(LAYERS[name])
    narrow, integers = hidden(1)[..., 1:], hidden(1).astype(jnp.int32)
    for x, error, match in (
        (narrow, ValueError, rf"x must have shape \[\.\.\., {D_MODEL}\], found \({B}, 1, 11\)"),
        (integers, TypeError, "x must be of a floating dtype, found int32"),
        (hidden(1).tolist(), TypeError, "x must be an array, found list"),
    ):
        with pytest.raises(error, match=match):
            jax.eval_shape(lambda layer, x=x: run(layer, x), layer)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "options, match",
    [
        ({"rngs": 0}, "rngs must be a Rngs, found int"),
        ({"param_dtype": "int8"}, "param_dtype must be a floating dtype, found int8"),
    ],
    ids=["rngs", "param_dtype"],
)
def test_what_parameters_cannot_be_made_of(name, options, match):
    with pytest.raises(TypeError, match=match):
        jax.eval_shape(lambda: LAYERS[name](**options))


@pytest.mark.parametrize("name", CACHED)
def test_a_cache_of_another_kind_of_layer(name):
    layer, x = CACHED[name](), hidden(1)
    other = "attention" if name != "attention" else "kda"
    foreign = CACHED[other]().init_cache(B, 4)
    state = rs.init_state(make_layer("kda").spec, B)
    kind = layer.cache_type.__name__
    for cache in (foreign, state):
        for call in (
            lambda cache: layer(x, cache),
            lambda cache: layer.verify(x, cache),
            lambda cache: layer.commit(cache, 1),
            lambda cache: layer.reset(cache, jnp.ones(B, bool)),
        ):
            found = type(cache).__name__
            with pytest.raises(TypeError, match=f"cache must be a {kind}, found {found}$"):
                call(cache)


def test_a_block_takes_one_cache_for_each_mixer():
    block, x = make_block(), hidden(1)
    cache = block.init_cache(B, 4)
    for wrong, found in ((cache[:1], "1"), (cache[0], "MixerCache")):
        for call in (
            lambda cache: block(x, cache),
            lambda cache: block.verify(x, cache),
            lambda cache: block.commit(cache, 1),
            lambda cache: block.reset(cache, jnp.ones(B, bool)),
        ):
            with pytest.raises(ValueError, match=f"a tuple of 2 caches, .*, found {found}$"):
                call(wrong)
