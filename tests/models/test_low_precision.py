"""Models whose states are in low precision, or read through low-precision copies."""

import functools
import importlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import (
    assert_close,
    commit,
    compile_quickly,
    decode,
    forward,
    jit,
    make_model,
    prefill,
    random_tokens,
    verify,
)

from replayssm_jax.drafters import NGramDrafter
from replayssm_jax.models import HybridConfig, shard_model, unstack_layers
from replayssm_jax.models.config import MIXERS

generate = importlib.import_module("replayssm_jax.generate").generate
speculative_generate = importlib.import_module("replayssm_jax.speculative").speculative_generate

B, T, SIZE = 2, 20, 32
FAMILY = "gated_delta_net"


@pytest.fixture(scope="module", autouse=True)
def quick():
    with pytest.MonkeyPatch.context() as patch:
        compile_quickly(patch)
        yield


@functools.cache
def model_with(**options):
    return make_model(FAMILY, **options)


def expected():
    return np.asarray(forward(model_with(), random_tokens(B, T)))


def run(model, **options):
    """Logits of a prefill and steps after it, and the cache."""
    tokens = random_tokens(B, T)
    logits, cache = prefill(model, tokens[:, :4], model.init_cache(B, SIZE, **options))
    rest, cache = decode(model, tokens[:, 4:], cache)
    return np.concatenate([np.asarray(logits), rest], axis=1), cache


def key_data(cache):
    """The keys of all layers, rows and heads, [n, 2]."""
    found = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(cache)
        if "rounding_key" in jax.tree_util.keystr(path)
    ]
    return np.concatenate([np.asarray(leaf).reshape(-1, 2) for leaf in found])


def test_a_config_names_its_formats():
    config = HybridConfig(vocab_size=4, d_model=4, state_dtype="float32", read_dtype=jnp.int8)
    assert config.read_dtype == "int8"
    assert HybridConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match=r"read_dtype must be one of .*found int32"):
        make_model(FAMILY, read_dtype="int32")
    assert FAMILY in MIXERS


def test_decoding_reads_the_copy():
    logits, cache = run(model_with(read_dtype="int8"))
    gap = np.linalg.norm(logits - expected()) / np.linalg.norm(expected())
    assert 1e-6 < gap < 2e-2
    assert cache.layers[0][0].state.read_copy.values.dtype == jnp.int8
    assert cache.layers[0][0].state.checkpoint.dtype == jnp.float32
    np.testing.assert_array_equal(logits[:, :4], run(model_with())[0][:, :4])


@pytest.mark.parametrize(
    "name, options", [("int8", {"decode": "recurrent"}), ("float16", {"ragged": False})]
)
def test_states_in_low_precision(name, options):
    model = model_with(state_dtype=name)
    for key in (None, jax.random.key(0)):
        logits, cache = run(model, rounding_key=key, **options)
        gap = np.linalg.norm(logits - expected()) / np.linalg.norm(expected())
        assert 1e-6 < gap < 4e-2
        state = cache.layers[0][0].state
        held = state if "decode" in options else state.checkpoint
        assert held.dtype == jnp.dtype(name)
    first = model.init_cache(B, SIZE, rounding_key=key, **options)
    assert (key_data(first) != key_data(cache)).any(axis=1).all()


@pytest.mark.parametrize("formats", [{"read_dtype": "int8"}, {"state_dtype": "int8"}])
def test_stacked_layers_are_the_same(formats):
    """Scanned layers flush together, copies and keys too, as each layer does by itself."""
    stacked = make_model(FAMILY, pattern="MM", scan_layers=True, **formats)
    key = None if "read_dtype" in formats else jax.random.key(0)
    tokens = random_tokens(B, 8)
    results = []
    for model in (stacked, unstack_layers(stacked)):
        cache = model.init_cache(B, SIZE, rounding_key=key)
        logits = [prefill(model, tokens, cache)[0][:, -1]]
        for t in range(0, 12, 4):
            new, cache = verify(model, random_tokens(B, 4, seed=t), cache)
            cache = commit(model, cache, jnp.asarray([4, 1]))
            logits.append(new[:, -1])
        results.append(np.stack(logits))
    exact = formats.get("read_dtype") is not None
    assert_close(results[0], results[1], 5e-3 if exact else 5e-2)


def test_every_layer_row_and_head_has_its_own_keys():
    stacked = make_model(FAMILY, pattern="MAMAM", scan_layers=True, state_dtype="float16")
    for model in (stacked, unstack_layers(stacked)):
        for options in ({}, {"decode": "recurrent"}):
            cache = model.init_cache(B, SIZE, rounding_key=jax.random.key(3), **options)
            found = {key.tobytes() for key in key_data(cache)}
            assert len(found) == 3 * B * 4
    with pytest.raises(ValueError, match="needs a replay layer with a low-precision state_dtype"):
        model_with().init_cache(B, SIZE, rounding_key=jax.random.key(0))
    model = model_with(state_dtype="bfloat16")
    with pytest.raises(TypeError, match=r"a key such as jax.random.key\(0\), found int32 of shape"):
        model.init_cache(B, SIZE, rounding_key=3)
    with pytest.raises(ValueError, match=r"one key, found keys of shape \(2,\)"):
        model.init_cache(B, SIZE, rounding_key=jax.random.split(jax.random.key(0)))
    caches = [
        model.init_cache(B, SIZE, rounding_key=key)
        for key in (jax.random.PRNGKey(5), jax.random.key(5))
    ]
    np.testing.assert_array_equal(*map(key_data, caches))


def test_generate_and_speculate():
    """Greedy tokens of a float16 copy are those of float32, also speculated."""
    prompt = random_tokens(B, 5)
    plain = generate(model_with(), prompt, max_new_tokens=12)
    model = model_with(read_dtype="float16")
    np.testing.assert_array_equal(generate(model, prompt, max_new_tokens=12).tokens, plain.tokens)
    drafted = speculative_generate(model, prompt, NGramDrafter(num_drafts=3), max_new_tokens=12)
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)


def test_generate_rounds_with_the_given_key():
    model = model_with(state_dtype="float8_e5m2")
    prompt = random_tokens(B, 5)

    def logprobs(seed):
        key = None if seed is None else jax.random.key(seed)
        out = generate(model, prompt, max_new_tokens=12, rounding_key=key, return_state=True)
        return np.asarray(out.logprobs), out.state

    (first, state), (again, _), (other, _) = logprobs(0), logprobs(0), logprobs(1)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any() and (first != logprobs(None)[0]).any()
    with pytest.raises(ValueError, match="rounding_key goes with new states"):
        generate(model, prompt, max_new_tokens=4, state=state, rounding_key=jax.random.key(0))


@pytest.mark.parametrize("speculative", [False, True])
def test_new_keys_run_the_same_programs(speculative, monkeypatch):
    chex.clear_trace_counter()  # counts go by name, over tests
    compile_quickly(monkeypatch, chex.assert_max_traces(n=1))
    model = model_with(state_dtype="float8_e5m2")
    options = dict(max_new_tokens=8)
    logprobs = []
    for seed in range(3):
        options["rounding_key"] = jax.random.key(seed)
        if speculative:
            drafter = NGramDrafter(num_drafts=3)
            out = speculative_generate(model, random_tokens(B, 5), drafter, **options)
        else:
            out = generate(model, random_tokens(B, 5), **options)
        logprobs.append(np.asarray(out.logprobs))
    assert (logprobs[0] != logprobs[1]).any() and (logprobs[1] != logprobs[2]).any()


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize(
    "formats, options",
    [
        ({"read_dtype": "int8"}, {}),
        ({"state_dtype": "int8"}, {"decode": "recurrent"}),
    ],
)
def test_on_a_mesh(formats, options):
    """Copies, scales and keys lie with their heads, and a head rounds there as on one device."""
    model = model_with(**formats)
    key = None if "read_dtype" in formats else jax.random.key(0)
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    placed = shard_model(model, mesh)
    cache = placed.init_cache(B, SIZE, rounding_key=key, **options)
    held = cache.layers[0][0]
    state = held.state if options else held.state.read_copy
    assert state.values.sharding.shard_shape(state.values.shape)[:2] == (1, 2)
    assert state.scale.sharding.shard_shape(state.scale.shape)[:2] == (1, 2)
    tokens = random_tokens(B, 3)
    step = jit(lambda model, token, cache: model.step(token, cache))
    one = model.init_cache(B, SIZE, rounding_key=key, **options)
    for t in range(3):
        logits, cache = step(placed, tokens[:, t], cache)
        wanted, one = step(model, tokens[:, t], one)
        assert_close(logits, wanted, 1e-4)
    if key is not None:
        np.testing.assert_array_equal(key_data(cache), key_data(one))
