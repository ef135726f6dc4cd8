"""Tiny hybrid models of every family, and compiled calls."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from random_modules import filled, jit

import replayssm_jax as rs
from replayssm_jax import generation
from replayssm_jax.models import (
    AttentionConfig,
    GatedDeltaNetConfig,
    HybridConfig,
    HybridLM,
    KDAConfig,
    Mamba2Config,
    MoEConfig,
)
from replayssm_jax.sampling import Sampling

FAMILIES = ("mamba2", "gated_delta_net", "kda")
V = 24


def make_config(family, **options):
    defaults = dict(
        vocab_size=V,
        d_model=16,
        pattern="MA",
        mixer=family,
        mlp=None,
        d_ff=16,
        mamba2=Mamba2Config(num_heads=4, head_dim=4, state_dim=6, num_groups=2),
        gated_delta_net=GatedDeltaNetConfig(
            num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=4
        ),
        kda=KDAConfig(num_heads=2, key_dim=6, value_dim=4),
        attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8),
        moe=MoEConfig(num_experts=4, top_k=2, d_expert=8, d_shared=8),
        replay_window=8,
        max_tokens=4,
    )
    return HybridConfig(**{**defaults, **options})


@functools.cache
def make_model(family, seed=0, dtype=jnp.float32, **options):
    return build(make_config(family, **options), seed, dtype)


def build(config, seed=0, dtype=jnp.float32):
    return filled(lambda: HybridLM(config, rngs=nnx.Rngs(0), dtype=dtype), seed)


@dataclasses.dataclass(frozen=True)
class Limits:
    """The config of `Own`."""

    vocab_size: int = V
    replay_window: int = 8
    max_tokens: int = 4
    d_model: int = 16


class Own(nnx.Module):
    """A model of one's own: it has what generation calls, and nothing else of a HybridLM."""

    def __init__(self, model):
        self.model, self.config, self.dtype = model, Limits(), model.dtype

    def init_cache(self, *args, **kwargs):
        return self.model.init_cache(*args, **kwargs)

    def prefill_hidden(self, *args, **kwargs):
        return self.model.prefill_hidden(*args, **kwargs)

    def logits(self, hidden):
        return self.model.logits(hidden)

    def step(self, *args, **kwargs):
        return self.model.step(*args, **kwargs)

    def verify_hidden(self, *args, **kwargs):
        return self.model.verify_hidden(*args, **kwargs)

    def commit(self, *args):
        return self.model.commit(*args)


def random_tokens(batch_size, num_tokens, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, V, size=(batch_size, num_tokens)), jnp.int32)


@jit
def forward(model, tokens, **masks):
    return model(tokens, **masks)


@functools.partial(jit, static_argnames="last_only")
def prefill(model, tokens, cache, lengths=None, valid=None, resets=None, last_only=False):
    return model.prefill(
        tokens, cache, lengths=lengths, valid=valid, resets=resets, last_only=last_only
    )


@jit
def step(model, tokens, cache, lengths=None):
    return model.step(tokens, cache, lengths=lengths)


@jit
def verify(model, tokens, cache, lengths=None):
    return model.verify(tokens, cache, lengths=lengths)


@jit
def commit(model, cache, accepted):
    return model.commit(cache, accepted)


def decode(model, tokens, cache):
    """Logits [B, T, V] of the given tokens, one after the other."""
    outputs = []
    for t in range(tokens.shape[1]):
        logits, cache = step(model, tokens[:, t], cache)
        outputs.append(np.asarray(logits))
    return np.stack(outputs, axis=1), cache


@jit
def take(model, cache, rows):
    return model.take(cache, rows)


@jit
def insert(model, cache, slots, other):
    return model.insert(cache, slots, other)


@jit
def reset(model, cache, where):
    return model.reset(cache, where)


_materialize = jit(rs.materialize, static_argnums=0)


def state_of(model, cache):
    """The recurrent state of the first layer."""
    state = dataclasses.replace(cache.layers[0][0].state, pointer=cache.pointer)
    return _materialize(model.blocks[0].mixers[0].spec, state)


def start(model, prompt, capacity, **options):
    """What the loops of `generate` and `speculative_generate` begin with: (control, carry)."""
    defaults = dict(
        max_new_tokens=capacity,
        key=None,
        sampling=Sampling(),
        stops=(None, None),
        pad_token=0,
        cache_size=None,
        decode="replay",
        state=None,
        ragged=False,
        unstack=True,
    )
    return generation.start(model, prompt, capacity=capacity, **defaults | options)


def compile_quickly(patch, wrap=lambda f: f):
    """Replace the compiled parts of generate by ones that skip XLA's optimisations.

    `wrap` sees each of the Python functions before it is jitted.
    """
    parts = {
        ("generation", "_init"): (
            ("batch_size", "size", "decode", "ragged", "penalised", "unstack"),
            (),
        ),
        ("generation", "_prefill"): (("capacity", "unstack"), "state"),
        ("generate", "_decode"): (("unstack", "ragged"), "carry"),
        ("generate", "_decode_chunk"): (("chunk", "unstack", "ragged"), "carry"),
        ("speculative", "_start_drafting"): (("capacity", "unstack"), ()),
        ("speculative", "_speculate"): ("unstack", ("rows", "drafting")),
    }
    for (module, name), (static, donated) in parts.items():
        module = importlib.import_module(f"replayssm_jax.{module}")
        f = wrap(getattr(module, name).__wrapped__)
        patch.setattr(module, name, jit(f, static_argnames=static, donate_argnames=donated))


def row(tree, i):
    return jax.tree.map(lambda x: x[i : i + 1], tree)


def assert_close(found, expected, limit=3e-5):
    expected = np.asarray(expected, np.float64)
    gap = np.linalg.norm(np.asarray(found, np.float64) - expected)
    assert gap <= limit * max(np.linalg.norm(expected), 1e-3), gap
