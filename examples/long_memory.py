"""A model that has to remember for long, and what a low-precision state costs it in accuracy.

    python examples/long_memory.py                                # some minutes on two cores
    python examples/long_memory.py --family all --out results.json --docs docs

The symbols of a sequence are drawn with probabilities of its own, none far from the others. At
every token the model names the symbol that is likeliest in this sequence, and the more of them it
remembers, the more often it is right. It learns that in a minute, on sequences of 1,024 tokens, and
then reads longer ones, decoding token by token with each scheme of `precision_study`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from decode_text import FAMILIES, NAMES
from flax import nnx
from precision_study import read_text, schemes, show, with_formats, with_tables
from rich.console import Console
from rich.progress import Progress

from replayssm_jax.models import (
    GatedDeltaNetConfig,
    HybridConfig,
    HybridLM,
    KDAConfig,
    Mamba2Config,
)

SYMBOLS = 4
# Of the Dirichlet distribution of a sequence's probabilities: the larger, the closer they are.
CONCENTRATION = 10.0
MARKS = (512, 2048, 8192)
# Tokens before a mark whose answers count.
COUNTED = 64
WIDTH = 32


def make_model(family: str, seed: int = 0) -> HybridLM:
    """One block of a family, with two heads."""
    config = HybridConfig(
        vocab_size=SYMBOLS,
        d_model=WIDTH,
        pattern="M",
        mixer=family,
        d_ff=WIDTH * 3 // 2,
        embedding_scale=WIDTH**0.5,
        mamba2=Mamba2Config(num_heads=2, head_dim=WIDTH, state_dim=WIDTH),
        gated_delta_net=GatedDeltaNetConfig(
            num_key_heads=1, num_value_heads=2, key_dim=WIDTH, value_dim=WIDTH
        ),
        kda=KDAConfig(num_heads=2, key_dim=WIDTH, value_dim=WIDTH, gate_rank=WIDTH // 4),
    )
    return HybridLM(config, rngs=nnx.Rngs(seed))


def draw(key: jax.Array, batch: int, length: int) -> tuple[jax.Array, jax.Array]:
    """Sequences [B, T] of symbols, and the likeliest symbol [B] of each."""
    of_sequence, of_tokens = jax.random.split(key)
    odds = jnp.full((SYMBOLS,), CONCENTRATION)
    odds = jax.random.dirichlet(of_sequence, odds, (batch,))
    tokens = jax.random.categorical(of_tokens, jnp.log(odds)[:, None], shape=(batch, length))
    return tokens.astype(jnp.int32), jnp.argmax(odds, axis=-1)


def train(
    model: HybridLM, steps: int, batch: int, length: int, advance: Callable[[], Any]
) -> HybridLM:
    """The model after as many steps of Adam, each on sequences of its own."""
    graphdef, params = nnx.split(model)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())

    @jax.jit
    def step(params: Any, moments: Any, key: jax.Array, rate: jax.Array) -> tuple[Any, Any]:
        tokens, answer = draw(key, batch, length)

        def loss(params: Any) -> jax.Array:
            model = nnx.merge(graphdef, params)
            hidden, _ = model.prefill_hidden(tokens, model.init_cache(batch, length))
            answers = jnp.broadcast_to(answer[:, None], tokens.shape)
            losses = optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), answers)
            return losses.mean()

        updates, moments = optimizer.update(jax.grad(loss)(params), moments, params)
        return jax.tree.map(lambda x, update: x - rate * update, params, updates), moments

    moments = optimizer.init(params)
    for i in range(steps):  # the rate rises to its peak and falls again
        rate = jnp.float32(1e-2 * math.sin(math.pi * (i + 1) / (steps + 1)) ** 2)
        params, moments = step(params, moments, jax.random.key(i), rate)
        advance()
    return nnx.merge(graphdef, params)


def study(
    family: str, model: HybridLM, batch: int, marks: Sequence[int], advance: Callable[[], Any]
) -> list[dict[str, Any]]:
    """Rows: family, scheme, tokens, accuracy, and agreement with conventional float32 decoding."""
    tokens, answer = draw(jax.random.key(1_000_000), batch, max(marks) + 1)
    results = []
    plain = None
    for scheme in schemes():
        key = jax.random.key(0) if scheme.stochastic else None
        formed = with_formats(model, scheme, 1)
        _, named = read_text(formed, tokens, key, decode=scheme.decode)
        named = np.asarray(named)
        plain = named if plain is None else plain
        for mark in marks:
            last = slice(mark - COUNTED, mark)
            results.append(
                dict(
                    family=family,
                    scheme=scheme.name,
                    tokens=mark,
                    accuracy=round(float((named[last] == np.asarray(answer)).mean()), 4),
                    agreement=round(float((named[last] == plain[last]).mean()), 4),
                )
            )
        advance()
    return results


def tables(results: dict[str, Any]) -> dict[str, tuple[list[str], list[Any]]]:
    """By its title: of each family accuracy in float32, what other schemes add, and agreement."""
    rows = {(row["family"], row["scheme"], row["tokens"]): row for row in results["rows"]}
    marks = sorted({mark for *_, mark in rows})
    plain = next(schemes()).name
    header, body = ["scheme"], [[scheme.name] for scheme in schemes()]
    for family in dict.fromkeys(family for family, *_ in rows):
        header += [f"{NAMES[family]}: {marks[0]:,} tokens"]
        header += [*(f"{mark:,}" for mark in marks[1:]), "agreement"]
        for line in body:
            for mark in marks:
                row, first = (rows[family, name, mark] for name in (line[0], plain))
                if row is first:
                    line.append(f"{100 * row['accuracy']:.1f}%")
                else:
                    line.append(f"{100 * (row['accuracy'] - first['accuracy']):+.1f}")
            line.append(f"{100 * rows[family, line[0], marks[-1]]['agreement']:.1f}%")
    return {"Models that name the likeliest symbol: points of accuracy": (header, body)}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--family", choices=(*FAMILIES, "all"), default="mamba2")
    parser.add_argument("--steps", type=int, default=400, help="of training")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a training sequence")
    parser.add_argument("--batch", type=int, default=128, help="sequences that are decoded")
    parser.add_argument(
        "--marks", type=int, nargs="+", default=MARKS, help="tokens after which answers count"
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--show", type=Path, help="only show results that were written before")
    parser.add_argument("--docs", type=Path, help="also write the tables into its precision.md")
    args = parser.parse_args(argv)
    if min(args.marks) < COUNTED:
        parser.error(f"--marks must be at least {COUNTED}, found {min(args.marks)}")
    for name in ("steps", "length", "batch"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, found {getattr(args, name)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parse(argv), Console()
    if args.show is not None:
        results = json.loads(args.show.read_text())
    else:
        families = FAMILIES if args.family == "all" else (args.family,)
        options = {name: getattr(args, name) for name in ("steps", "length", "batch")}
        device = jax.devices()[0].device_kind
        results = dict(options=options, device=device, jax=jax.__version__, rows=[])
        begin = time.perf_counter()
        with Progress(console=console, transient=True) as progress:
            for family in families:
                task = progress.add_task(f"{NAMES[family]}: training", total=args.steps)
                model = train(
                    make_model(family),
                    args.steps,
                    16,
                    args.length,
                    lambda task=task: progress.advance(task),
                )
                task = progress.add_task(
                    f"{NAMES[family]}: decoding", total=sum(1 for _ in schemes())
                )
                results["rows"] += study(
                    family, model, args.batch, args.marks, lambda task=task: progress.advance(task)
                )
                if args.out is not None:
                    args.out.parent.mkdir(parents=True, exist_ok=True)
                    args.out.write_text(json.dumps(results, indent=1) + "\n")
        console.print(f"{time.perf_counter() - begin:.0f} s")
    for title, table in tables(results).items():
        show(title, table, console)
    if args.docs is not None:
        page = args.docs / "precision.md"
        page.write_text(with_tables(page.read_text(), tables(results)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
