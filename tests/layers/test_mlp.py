"""MLPs, the mixture of experts and the norms, against direct formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_cases import D_MODEL, assert_close, filled, hidden, jit

from replayssm_jax.layers import MLP, GatedRMSNorm, HybridBlock, MoE, RMSNorm

MOES = {
    "softmax": dict(),
    "shared": dict(d_shared=7, shared_gate=True, normalise=False),
    "sigmoid_groups": dict(
        scoring="sigmoid", selection_bias=True, num_groups=4, top_groups=2, routed_scale=2.5
    ),
    "relu2": dict(gated=False, activation="relu2", d_shared=5),
}


def make_moe(**options):
    options = {"num_experts": 8, "top_k": 2, "d_expert": 6, **options}
    return filled(lambda: MoE(D_MODEL, rngs=nnx.Rngs(0), **options))


@jit
def apply(module, *args):
    return module(*args)


def activate(name, x):
    return np.maximum(x, 0) ** 2 if name == "relu2" else x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def naive_moe(moe, x):
    """One token x [d_model] in float64."""
    x = np.asarray(x, np.float64)
    logits = x @ np.asarray(moe.router[...], np.float64)
    scores = sigmoid(logits) if moe.scoring == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
    choice = scores
    if moe.selection_bias is not None:
        choice = scores + np.asarray(moe.selection_bias[...])
    if moe.num_groups > 1:
        groups = choice.reshape(moe.num_groups, -1)
        best = np.sort(groups, axis=1)[:, -2:].sum(1).argsort()[::-1][: moe.top_groups]
        kept = np.full_like(groups, -np.inf)
        kept[best] = groups[best]
        choice = kept.reshape(-1)
    chosen = choice.argsort()[::-1][: moe.top_k]
    weights = scores[chosen] / (scores[chosen].sum() if moe.normalise else 1)
    y = np.zeros(D_MODEL)
    for i, weight in zip(chosen, weights * moe.routed_scale, strict=True):
        up = x @ np.asarray(moe.up_experts[...][i], np.float64)
        if moe.gate_experts is None:
            h = activate(moe.activation, up)
        else:
            gate = x @ np.asarray(moe.gate_experts[...][i], np.float64)
            h = activate(moe.activation, gate) * up
        y += weight * (h @ np.asarray(moe.down_experts[...][i], np.float64))
    if moe.shared is not None:
        shared = np.asarray(apply(moe.shared, jnp.asarray(x, jnp.float32)[None])[0])
        if moe.shared_gate is not None:
            shared = shared * sigmoid(x @ np.asarray(moe.shared_gate.kernel[...]))
        y += shared
    return y


@pytest.mark.parametrize("name", MOES)
def test_experts_equal_a_loop_over_tokens(name):
    moe = make_moe(**MOES[name])
    x = hidden(3)
    y = apply(moe, x)
    for i in range(x.shape[0]):
        for t in range(3):
            assert_close(y[i, t], naive_moe(moe, x[i, t]))


def test_a_token_does_not_depend_on_its_neighbours():
    moe = make_moe()
    x = hidden(3)
    np.testing.assert_array_equal(apply(moe, x)[0], apply(moe, x.at[1:].set(jnp.nan))[0])


def test_expert_gradients_are_finite():
    moe = make_moe(d_shared=4)
    grads = jit(jax.grad(lambda moe, x: jnp.sum(moe(x) ** 2)))(moe, hidden(3))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_impossible_experts_raise():
    with pytest.raises(ValueError, match="top_k must be between 1 and 8"):
        make_moe(top_k=9)
    with pytest.raises(ValueError, match="num_groups must divide"):
        make_moe(num_groups=3)
    with pytest.raises(ValueError, match="top_k must fit"):
        make_moe(num_groups=8, top_groups=1)


@pytest.mark.parametrize("gated", [True, False], ids=["swiglu", "relu2"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_mlp(gated, bias):
    name = "silu" if gated else "relu2"
    mlp = filled(
        lambda: MLP(D_MODEL, 10, gated=gated, activation=name, use_bias=bias, rngs=nnx.Rngs(0))
    )
    x = hidden(3)

    def linear(module, x):
        y = np.asarray(x, np.float64) @ np.asarray(module.kernel[...])
        return y + np.asarray(module.bias[...]) if bias else y

    up = linear(mlp.up_proj, x)
    h = activate(name, linear(mlp.gate_proj, x)) * up if gated else activate(name, up)
    assert_close(apply(mlp, x), linear(mlp.down_proj, h))


def test_norms_keep_float32_accuracy_in_bf16():
    x = hidden(3, dtype=jnp.bfloat16)
    norm = filled(lambda: RMSNorm(D_MODEL, rngs=nnx.Rngs(0)))
    gated = filled(lambda: GatedRMSNorm(D_MODEL, num_groups=3, rngs=nnx.Rngs(0)))
    wide = np.asarray(x.astype(jnp.float32), np.float64)
    expected = (
        wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(norm.scale[...])
    )
    y = apply(norm, x)
    assert y.dtype == jnp.bfloat16
    assert_close(y.astype(jnp.float32), expected, limit=4e-3)
    parts = wide.reshape(*wide.shape[:-1], 3, -1)
    parts = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + 1e-6)
    expected = parts.reshape(wide.shape) * np.asarray(gated.scale[...]) * wide * sigmoid(wide)
    assert_close(apply(gated, x, x), expected, limit=1e-5)
    with pytest.raises(ValueError, match="num_groups must divide features"):
        GatedRMSNorm(D_MODEL, num_groups=5, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_block_adds_normalised_branches(norm):
    block = filled(
        lambda: HybridBlock(
            D_MODEL,
            mixers=[],
            mlp=MLP(D_MODEL, 8, rngs=nnx.Rngs(0)),
            norm=norm,
            residual_scale=0.5,
            rngs=nnx.Rngs(0),
        )
    )
    x = hidden(3)
    y, cache = jit(lambda block, x: block(x))(block, x)
    assert cache is None
    if norm == "pre":
        branch = apply(block.mlp, apply(block.mlp_norm, x))
    else:
        branch = apply(block.mlp_norm, apply(block.mlp, x))
    assert_close(y, x + 0.5 * branch, limit=1e-6)
