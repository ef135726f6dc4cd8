"""Tokens per second of `generate`: conventional decoding against replay, with the same weights.

    python benchmarks/decode_loop.py --family mamba2 kda --d-model 512 --batch 1 8

Both schemes run the whole of `generate` on the same random weights, in turns: a short prompt, then
whole windows of greedy tokens. A case is reported only if the log-probabilities of both agree with
one `prefill` over prompt and tokens; in float32 their tokens must be the same, too.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

import replayssm_jax as rs
from replayssm_jax.models import HybridConfig, HybridLM

FAMILIES = ("mamba2", "gated_delta_net", "kda")
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
# Relative error of log-probabilities: rounding of another order of sums, and of bf16 activations.
LIMITS = {"float32": 1e-4, "bfloat16": 3e-2}


def make_model(family: str, args: argparse.Namespace) -> HybridLM:
    config = HybridConfig(
        vocab_size=args.vocab,
        d_model=args.d_model,
        pattern=args.pattern * args.repeat_pattern,
        mixer=family,
        replay_window=args.window,
        # Logits with a standard deviation of about 3, so that the layers decide on the tokens.
        logit_scale=3 / (0.02 * math.sqrt(args.d_model)),
    )
    dtype = DTYPES[args.dtype]
    key = harness.random_key(0)
    make = nnx.jit(lambda: HybridLM(config, rngs=nnx.Rngs(key), dtype=dtype, param_dtype=dtype))
    return make()


def contender(model: HybridLM, prompt: jax.Array, *, tokens: int, decode: Any) -> harness.Contender:
    def run(_: None) -> Any:
        return rs.generate(model, prompt, max_new_tokens=tokens, capacity=tokens, decode=decode)

    return harness.Contender(run, calls=tokens)


@jax.jit
def score(model: HybridLM, prompt: jax.Array, tokens: jax.Array) -> jax.Array:
    """Log-probabilities [B, N] of `tokens` after `prompt`, by one prefill."""
    every = jnp.concatenate([prompt, tokens], axis=1)
    logits, _ = model.prefill(every, model.init_cache(every.shape[0], every.shape[1]))
    logprobs = jax.nn.log_softmax(logits[:, prompt.shape[1] - 1 : -1])
    return jnp.take_along_axis(logprobs, tokens[:, :, None], axis=-1)[:, :, 0]


def check(model: HybridLM, prompt: jax.Array, outputs: dict[str, Any], dtype: str) -> float:
    """Return the relative error of the replayed log-probabilities, or raise `WrongResult`."""
    errors = {
        name: harness.check(
            name, out.logprobs, score(model, prompt, out.tokens), limit=LIMITS[dtype]
        )
        for name, out in outputs.items()
    }
    same = np.asarray(outputs["replay"].tokens == outputs["conventional"].tokens)
    if dtype == "float32" and not same.all():
        raise harness.WrongResult(f"{same.sum()} of {same.size} tokens are the same")
    return errors["replay"]


def measure(
    model: HybridLM, batch: int, args: argparse.Namespace, tick: Callable[[], None]
) -> harness.Row:
    prompt = jax.random.randint(harness.random_key(1), (batch, args.prompt), 0, args.vocab)
    schemes = {"conventional": "recurrent", "replay": "replay"}
    contenders = {
        name: contender(model, prompt, tokens=args.tokens, decode=decode)
        for name, decode in schemes.items()
    }
    error = check(model, prompt, {k: c.once() for k, c in contenders.items()}, args.dtype)
    timings = harness.time_in_turns(contenders, repeats=args.repeats, tick=tick)
    replay, conventional = timings["replay"], timings["conventional"]
    return harness.row(
        replay,
        conventional,
        case=f"{args.pattern} x {args.repeat_pattern}, d_model {args.d_model}, {args.dtype}",
        family=model.config.mixer,
        batch=batch,
        tokens=1,
        read_dtype=None,
        implementation="replay",
        fraction_of_read_bandwidth=None,
        rel_err=error,
        extra={
            "tokens_per_second": batch * 1e6 / replay.us,
            "baseline_tokens_per_second": batch * 1e6 / conventional.us,
        },
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--family", choices=FAMILIES, nargs="+", default=FAMILIES)
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--pattern", default="MMMA", help="M the mixer, A attention")
    parser.add_argument(
        "--repeat-pattern", type=int, default=1, help="how often the pattern stands"
    )
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--window", type=int, default=16, help="replay window")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=16, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens, whole windows")
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each scheme")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder of the JSON file")
    args = parser.parse_args(argv)
    for name in ("prompt", "tokens", "window", "repeat_pattern"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.repeats < 2:
        parser.error("--repeats must be at least 2, or there is no spread")
    if args.tokens % args.window:
        parser.error(f"--tokens must be whole windows of {args.window}, found {args.tokens}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    console = Console()
    rows: list[harness.Row] = []
    refused = False
    with harness.progress(console) as bar:
        task = bar.add_task("", total=2 * args.repeats * len(args.family) * len(args.batch))
        for family in args.family:
            model = make_model(family, args)
            for batch in args.batch:
                bar.update(task, description=f"{family}, batch {batch}")
                try:
                    rows.append(measure(model, batch, args, lambda: bar.advance(task)))
                except harness.WrongResult as error:
                    refused = True
                    console.print(f"[bold red]{family}, batch {batch}: not reported[/]: {error}")
    console.print(harness.table("microseconds of one decode step of all rows", rows))
    options = {key: value for key, value in vars(args).items() if key != "out"}
    console.print(f"written to {harness.save('decode_loop', rows, options, args.out)}")
    return int(refused)


if __name__ == "__main__":
    raise SystemExit(main())
