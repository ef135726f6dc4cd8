"""Meshes of eight virtual devices: what one device computes, and no state or ring is gathered."""

import dataclasses
import functools
import importlib
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from model_cases import (
    FAMILIES,
    assert_close,
    build,
    compile_quickly,
    jit,
    make_config,
    random_tokens,
    start,
)

import replayssm_jax as rs
from replayssm_jax.generate import generate
from replayssm_jax.layers.sharding import MeshAxes, row_specs
from replayssm_jax.models import (
    AttentionConfig,
    GatedDeltaNetConfig,
    KDAConfig,
    LayerConfig,
    Mamba2Config,
    partition_specs,
    shard_model,
)
from replayssm_jax.prompts import bucket

B, SIZE = 8, 32
# Rows and heads over devices for every family; rows alone and heads alone for one.
CASES = [*itertools.product(FAMILIES, [(4, 2)]), ("kda", (8, 1)), ("kda", (1, 8))]

module = importlib.import_module("replayssm_jax.generate")

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


@pytest.fixture(scope="module", autouse=True)
def quick():
    with pytest.MonkeyPatch.context() as patch:
        compile_quickly(patch)
        yield


def moved(lowered):
    """Shapes of what the compiled program moves between devices, and of what it sums over them."""
    text = lowered.compile().as_text()
    moves = "all-gather|all-to-all|collective-permute|reduce-scatter"
    shapes = re.findall(rf"= (.+?) (?:{moves})(?:-start)?\(", text)
    return shapes, re.findall(r"= (.+?) all-reduce(?:-start)?\(", text)


@functools.cache
def make_model(family, groups=8):
    config = make_config(
        family,
        layers=[LayerConfig((family,)), LayerConfig(("attention",), "swiglu")],
        mamba2=Mamba2Config(num_heads=8, head_dim=4, state_dim=7, num_groups=groups),
        gated_delta_net=GatedDeltaNetConfig(
            num_key_heads=groups, num_value_heads=8, key_dim=7, value_dim=4
        ),
        kda=KDAConfig(num_heads=8, key_dim=7, value_dim=4),
        attention=AttentionConfig(num_heads=8, num_kv_heads=groups, head_dim=2),
        replay_window=4,
    )
    return build(config)


def make_mesh(shape):
    return jax.make_mesh(shape, ("data", "model"))


# Donation too: a cache must come back where it was.
@functools.partial(jit, donate_argnums=2)
def step(model, tokens, cache):
    return model.step(tokens, cache)


@functools.partial(jit, donate_argnums=2)
def prefill(model, tokens, cache, lengths):
    return model.prefill(tokens, cache, lengths=lengths)


@functools.cache
def on_mesh(family, mesh_shape, groups=8):
    model = make_model(family, groups)
    return model if mesh_shape is None else shard_model(model, make_mesh(mesh_shape))


LENGTHS = jnp.array([6, 1, 3, 0, 6, 2, 5, 4], jnp.int32)


@functools.cache
def run(family, mesh_shape, groups=8):
    model = on_mesh(family, mesh_shape, groups)
    tokens = random_tokens(B, 6)
    logits, cache = prefill(model, tokens, model.init_cache(B, SIZE), LENGTHS)
    outputs = [np.asarray(logits)]
    for t in range(6):
        logits, cache = step(model, tokens[:, t], cache)
        outputs.append(np.asarray(logits)[:, None])
    return model, np.concatenate(outputs, axis=1), cache


@pytest.mark.parametrize("family, mesh_shape", CASES, ids=str)
def test_prefill_and_steps_equal_one_device(family, mesh_shape):
    _, expected, _ = run(family, None)
    _, outputs, cache = run(family, mesh_shape)
    assert_close(outputs, expected)
    mixer, attention = cache.layers[0][0], cache.layers[1][0]
    wanted = {
        "checkpoint": (mixer.state.checkpoint, ("data", "model")),
        "ring": (mixer.state.buffer.key, ("data", None, "model")),
        "decay": (mixer.state.buffer.log_decay, ("data", None, "model")),
        "history": (mixer.history, ("data", None, "model")),
        "kv": (attention.key, ("data", None, "model")),
        "pointer": (cache.pointer.length, ("data",)),
    }
    for name, (array, spec) in wanted.items():
        sharding = NamedSharding(make_mesh(mesh_shape), PartitionSpec(*spec))
        assert array.sharding.is_equivalent_to(sharding, array.ndim), (name, array.sharding)


@pytest.mark.parametrize("family, mesh_shape", CASES, ids=str)
def test_no_state_and_no_ring_is_gathered(family, mesh_shape):
    """The only communication is the sum of each branch's partial results."""
    model, _, cache = run(family, mesh_shape)
    tokens = random_tokens(B, 6)
    # Embedding, mixer, attention, MLP; the logits stay split over the vocabulary.
    sums = 0 if mesh_shape == (8, 1) else 4
    for program in (
        step.lower(model, tokens[:, 0], cache),
        prefill.lower(model, tokens, model.init_cache(B, SIZE), LENGTHS),
    ):
        shapes, summed = moved(program)
        assert not shapes
        assert len(summed) == sums, summed


PROMPTS = [[3], [7, 1, 4], [2], [9, 9], [1], [2, 3], [5], [6, 7, 8]]
SAMPLED = dict(temperature=1.0, top_k=5)
N = 9


@functools.cache
def sampled(family, mesh_shape):
    model = on_mesh(family, mesh_shape)
    return generate(model, PROMPTS, max_new_tokens=N, key=jax.random.key(0), **SAMPLED)


@pytest.mark.parametrize("family, mesh_shape", CASES, ids=str)
def test_generate_equals_one_device(family, mesh_shape):
    """And its loop gathers no state and no ring: only logits move, to be ranked by sampling."""
    out, expected = sampled(family, mesh_shape), sampled(family, None)
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    assert_close(out.logprobs, expected.logprobs)
    model = on_mesh(family, mesh_shape)
    control, carry = start(
        model,
        module.as_prompt(PROMPTS),
        bucket(N),
        max_new_tokens=N,
        key=jax.random.key(0),
        sampling=module.Sampling(**SAMPLED),
    )
    shapes, _ = moved(module._decode.lower(model, carry, control, True, False))
    assert bool(shapes) == (mesh_shape != (8, 1))
    # Every part of a state is larger than the logits of a device's rows.
    mixer = carry.state.cache.layers[0][0]
    logits = B // mesh_shape[0] * model.config.vocab_size
    assert mixer.state.checkpoint.addressable_shards[0].data.size > logits
    for shape in shapes:
        sizes = re.findall(r"\w+\[([\d,]+)\]", shape)
        assert sum(math.prod(map(int, dims.split(","))) for dims in sizes) <= logits, shape


def test_layers_with_uneven_groups_are_replicated():
    _, expected, _ = run("mamba2", None, groups=1)
    model, outputs, cache = run("mamba2", (4, 2), groups=1)
    assert_close(outputs, expected)
    assert model.blocks[0].mixers[0].in_proj.kernel.sharding.spec == PartitionSpec(None, None)
    assert model.blocks[1].mlp.up_proj.kernel.sharding.spec == PartitionSpec(None, "model")
    assert cache.layers[0][0].state.checkpoint.sharding.spec[:1] == ("data",)


def test_conventional_decoding_on_a_mesh():
    """Its state is a bare array, and goes over the heads as a checkpoint does."""
    tokens = random_tokens(B, 3)
    outputs = {}
    for shape in (None, (4, 2)):
        model = on_mesh("gated_delta_net", shape)
        cache = model.init_cache(B, SIZE, decode="recurrent")
        for t in range(3):
            logits, cache = step(model, tokens[:, t], cache)
        outputs[shape] = logits
    assert_close(outputs[4, 2], outputs[None])
    state = cache.layers[0][0].state
    assert state.sharding.spec[:2] == ("data", "model"), state.sharding
    assert not moved(step.lower(model, tokens[:, 0], cache))[0]


def test_stacked_layers_on_a_mesh():
    """Their flush, too, stays on the device that holds the rows and heads."""
    config = make_config(
        "mamba2",
        pattern="MAMA",
        scan_layers=True,
        replay_window=4,
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=4),
    )
    model = build(config)
    sharded = shard_model(model, make_mesh((4, 2)))
    tokens = random_tokens(B, 7)
    expected = jit(lambda m, tokens: m(tokens))(model, tokens)
    cache = sharded.init_cache(B, SIZE)
    for t in range(7):
        logits, cache = step(sharded, tokens[:, t], cache)
        assert_close(logits, expected[:, t])
    assert not moved(step.lower(sharded, tokens[:, 0], cache))[0]


def test_training_forward_and_gradients_on_a_mesh():
    model = make_model("mamba2")
    sharded = on_mesh("mamba2", (4, 2))
    tokens = random_tokens(B, 6)
    grad = jit(jax.value_and_grad(lambda m, t: jnp.mean(m(t) ** 2)))
    expected, expected_grads = grad(model, tokens)
    rows = NamedSharding(sharded.mesh_axes.mesh, PartitionSpec("data"))
    value, grads = grad(sharded, jax.device_put(tokens, rows))
    assert_close(value, expected)
    found = jax.tree.leaves(nnx.to_pure_dict(nnx.state(grads)))
    wanted = jax.tree.leaves(nnx.to_pure_dict(nnx.state(expected_grads)))
    for one, two in zip(found, wanted, strict=True):
        assert_close(one, two, limit=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_core_under_shard_map(family):
    """Each device runs the plain functions on its rows and heads, with a spec of its own size."""
    spec = {
        "mamba2": rs.ReplaySpec.mamba2(num_heads=8, head_dim=2, state_dim=3, num_groups=4),
        "gated_delta_net": rs.ReplaySpec.gated_delta_net(
            num_value_heads=8, num_key_heads=4, key_dim=3, value_dim=2
        ),
        "kda": rs.ReplaySpec.kda(num_heads=8, key_dim=3, value_dim=2),
    }[family]
    spec = dataclasses.replace(spec, window=4, key_dtype=jnp.float32, value_dtype=jnp.float32)
    local = dataclasses.replace(spec, num_heads=4, num_groups=spec.num_groups // 2)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    axes = MeshAxes(mesh)
    rng = np.random.default_rng(0)
    keys = (B, 6, spec.num_groups, 3)
    gate = (B, 6, 8) if spec.decay == "scalar" else (B, 6, 8, 3)
    inputs = rs.TokenInputs(
        q=jnp.asarray(rng.normal(size=keys), jnp.float32),
        k=jnp.asarray(rng.normal(size=keys) / 2, jnp.float32),
        v=jnp.asarray(rng.normal(size=(B, 6, 8, 2)), jnp.float32),
        g=jnp.asarray(-rng.uniform(size=gate), jnp.float32),
        beta=jnp.asarray(rng.uniform(size=(B, 6, 8)), jnp.float32),
    )

    def decode(spec, state, inputs):
        def body(state, token):
            o, state = rs.step(spec, state, jax.tree.map(lambda x: x[:, None], token))
            return state, o[:, 0]

        state, o = jax.lax.scan(body, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs))
        return jnp.moveaxis(o, 0, 1), state

    state = rs.init_state(spec, B, ragged=True)
    state_specs, input_specs = row_specs(state, axes, "model"), row_specs(inputs, axes, "model")
    sharded = jax.shard_map(
        functools.partial(decode, local),
        mesh=mesh,
        in_specs=(state_specs, input_specs),
        out_specs=(PartitionSpec("data", None, "model"), state_specs),
        check_vma=False,
    )
    expected, expected_state = jit(functools.partial(decode, spec))(state, inputs)
    o, after = jit(sharded)(state, inputs)
    assert_close(o, expected, limit=1e-6)
    assert_close(after.checkpoint, expected_state.checkpoint, limit=1e-6)
    np.testing.assert_array_equal(after.pointer.length, expected_state.pointer.length)


def test_specs_of_stacked_layers_and_caches():
    config = make_config(
        "mamba2", pattern="MAMA", scan_layers=True, mlp="moe", tie_embeddings=False
    )
    model = build(config)
    axes = MeshAxes(make_mesh((4, 2)))
    params = nnx.to_pure_dict(partition_specs(model, nnx.state(model), axes))
    mixer, moe = params["blocks"][0]["mixers"][0], params["blocks"][0]["mlp"]
    assert mixer["in_proj"]["kernel"] == PartitionSpec(None, None, "model")
    assert mixer["out_proj"]["kernel"] == PartitionSpec(None, "model", None)
    assert mixer["A_log"] == mixer["conv"]["bias"] == PartitionSpec(None, "model")
    assert moe["up_experts"] == PartitionSpec(None, None, None, "model")
    assert moe["down_experts"] == PartitionSpec(None, None, "model", None)
    assert moe["router"] == PartitionSpec(None, None, None)
    assert params["embed"]["embedding"] == PartitionSpec("model", None)
    assert params["head"] == PartitionSpec(None, "model")
    specs = partition_specs(model, model.init_cache(B, SIZE), axes)
    assert specs.layers[0][0].state.checkpoint == PartitionSpec("data", None, "model")
    assert specs.layers[0][0].history == PartitionSpec("data", None, None, "model")
    assert specs.progress.position == specs.pointer.start == PartitionSpec("data")


def test_impossible_meshes_raise():
    model = make_model("mamba2")
    with pytest.raises(ValueError, match="the mesh has the axes"):
        shard_model(model, make_mesh((4, 2)), data="rows")
    sharded = shard_model(model, make_mesh((4, 2)))
    with pytest.raises(ValueError, match="batch_size must be a multiple of 4, found 6"):
        sharded.init_cache(6, SIZE)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    tokens = jax.device_put(jnp.zeros((4, 3), jnp.int32), rows)
    for call in (model, lambda tokens: generate(model, tokens, max_new_tokens=2)):
        with pytest.raises(ValueError, match=r"tokens must not be .* explicit .* by shard_model"):
            call(tokens)
