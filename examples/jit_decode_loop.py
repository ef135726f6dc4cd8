"""Jit a decode loop of a Flax NNX hybrid model, conventionally and through ReplaySSM.

    python examples/jit_decode_loop.py --mixer kda --tokens 256

The weights are random, so the text means nothing: the point is the shape of the code. Parameters
are an argument of the jitted loop, not a constant in it; the cache is an explicit pytree, donated,
so that the loop updates it in place; the loop is `jax.lax.scan` or `replayssm_jax.scan_steps` with
the same body. Both decode the same weights, and the tokens must be the same.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import replayssm_jax as rs
from replayssm_jax.models import GatedDeltaNetConfig, HybridConfig, HybridLM, KDAConfig

MIXERS = ("mamba2", "gated_delta_net", "kda")
SCHEMES = ("conventional", "replay")


def build(mixer: str, pattern: str, d_model: int) -> HybridLM:
    """A hybrid model with random weights: M in the pattern is the mixer, A attention."""
    head_dim = min(64, d_model)
    config = HybridConfig(
        vocab_size=256,
        d_model=d_model,
        pattern=pattern,
        mixer=mixer,
        gated_delta_net=GatedDeltaNetConfig(key_dim=head_dim, value_dim=head_dim),
        kda=KDAConfig(key_dim=head_dim, value_dim=head_dim),
    )
    return HybridLM(config, rngs=nnx.Rngs(0))


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def prefill(
    graphdef: Any, params: Any, prompt: jax.Array, size: int, scheme: str
) -> tuple[jax.Array, Any]:
    """Read prompts [B, T]; return the first token [B] and the cache."""
    model = nnx.merge(graphdef, params)
    decode = "replay" if scheme == "replay" else "recurrent"
    cache = model.init_cache(prompt.shape[0], size, decode=decode, ragged=False)
    logits, cache = model.prefill(prompt, cache, last_only=True)
    return jnp.argmax(logits, axis=-1), cache


@functools.partial(jax.jit, static_argnums=(0, 4, 5), donate_argnums=3)
def decode(
    graphdef: Any, params: Any, token: jax.Array, cache: Any, num_tokens: int, scheme: str
) -> tuple[jax.Array, Any]:
    """Decode greedily from token [B]; return the tokens [B, n] and the cache.

    The cache that goes in is donated: use the one that comes out.
    """
    model = nnx.merge(graphdef, params)

    def body(carry: tuple[jax.Array, Any], _: None) -> tuple[tuple[jax.Array, Any], jax.Array]:
        token, cache = carry
        logits, cache = model.step(token, cache)
        return (jnp.argmax(logits, axis=-1), cache), token

    scan: Any = jax.lax.scan
    if scheme == "replay":  # no predicate in the loop: it knows which step of a window flushes
        scan = functools.partial(rs.scan_steps, window=model.config.replay_window)
    (_, cache), tokens = scan(body, (token, cache), None, num_tokens)
    return tokens.T, cache


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mixer", choices=MIXERS, default="gated_delta_net")
    parser.add_argument("--pattern", default="MMMA", help="one letter a block")
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each loop")
    args = parser.parse_args(argv)
    if min(args.d_model, args.batch, args.tokens, args.repeats) < 1:
        parser.error("--d-model, --batch, --tokens and --repeats must be at least 1")

    graphdef, params = nnx.split(build(args.mixer, args.pattern, args.d_model))
    prompt = jnp.array([list(b"def decode(state, tok")] * args.batch)
    prompt = prompt.at[:, 0].set(jnp.arange(args.batch) % 256)
    size = prompt.shape[1] + args.tokens

    tokens: dict[str, jax.Array] = {}
    seconds: dict[str, list[float]] = {scheme: [] for scheme in SCHEMES}
    for repeat in range(args.repeats + 1):  # the first run of each compiles
        for scheme in SCHEMES:
            first, cache = prefill(graphdef, params, prompt, size, scheme)
            given = [(x, x.nbytes) for x in jax.block_until_ready(jax.tree.leaves(cache))]
            begin = time.perf_counter()
            out, cache = decode(graphdef, params, first, cache, args.tokens, scheme)
            jax.block_until_ready((out, cache))
            if repeat:
                seconds[scheme].append(time.perf_counter() - begin)
                continue
            tokens[scheme] = out
            donated = sum(size for x, size in given if x.is_deleted())
            held = sum(size for _, size in given)
            print(f"{scheme}: cache of {held / 1e6:.2f} MB, {donated / held:.0%} of it donated")

    same = int(jnp.sum(tokens["conventional"] == tokens["replay"]))
    total = args.batch * args.tokens
    print(f"tokens identical: {same} of {total}")
    if same < total:
        print("replay sums in another order, so where two logits all but tie the tokens may part")
    for scheme in SCHEMES:
        median = statistics.median(seconds[scheme])
        print(f"{scheme}: {median / args.tokens * 1e6:.0f} us per step of {args.batch} tokens")
    device = jax.devices()[0]
    print(f"on {device.device_kind}, median of {args.repeats} runs")
    if device.platform == "cpu":
        print("A small model on a CPU is bound by overhead, not by the traffic of its states, so")
        print("these times say little about an accelerator at serving batch sizes.")
    return 0 if same == total else 1


if __name__ == "__main__":
    raise SystemExit(main())
