"""Largest batch of each scheme that one device holds: compiled for it, and run there.

    python benchmarks/largest_batch.py --model qwen3.5-4b --tokens 4

`memory.py` counts what the caches hold. Here whole models of published depth run a pass over T
tokens of every row, so that activations, logits and what the compiler adds are counted as well:
compiled once at a small batch for the bytes of a row, and again at the largest batch that these
let fit, whose caches are then made and which is run. Weights are zeros: only bytes count.

What fits is meant of the share of the device that JAX takes by default, three quarters. XLA plans
its temporaries for 80% of a GPU: with caches beyond that it keeps more of them than it needs to.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import memory
import models
from rich.console import Console
from rich.table import Table

from replayssm_jax.models import HybridConfig, HybridLM

# Of the memory that JAX may take; the allocator needs some room between arrays.
SHARE = 0.98
# Times that a batch is compiled, smaller each time, before it is run or does not fit.
ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Row:
    """A scheme at the largest batch.

    Attributes:
      limit: bytes that JAX may take of the device.
      weights: bytes.
      counted: bytes of one sequence's caches, from their shapes.
      measured: the same from the device's allocator, None where it does not say.
      batch: the largest, a multiple of 8.
      program_bytes: held while a pass runs at it, as compiled.
      peak: of the device's allocator so far in the process, None where it does not say.
      us: microseconds of a pass, None where it did not fit after all.
    """

    model: str
    family: str
    scheme: str
    tokens: int
    context: int
    limit: int
    weights: int
    counted: int
    measured: float | None
    batch: int
    program_bytes: int
    peak: int | None
    us: float | None


def one_pass(model: HybridLM, tokens: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
    """Verify `tokens` [B, T], commit them, and return the likeliest next tokens [B, T]."""
    if tokens.shape[1] == 1:
        logits, cache = model.step(tokens[:, 0], cache)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)[:, None], cache
    logits, cache = model.verify(tokens, cache)
    cache = model.commit(cache, tokens.shape[1])
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and a scheme, at any batch."""

    name: str
    config: HybridConfig
    scheme: str
    tokens: int
    context: int

    @property
    def model(self) -> HybridLM:
        return memory.shapes(dataclasses.replace(self.config, max_tokens=self.tokens))

    @property
    def counted(self) -> int:
        return memory.held(self.config, self.scheme, self.tokens, self.context).total

    def arguments(self, model: HybridLM, batch: int) -> tuple[jax.Array, Any]:
        decode: Any = memory.DECODE.get(self.scheme, "replay")
        tokens = jnp.zeros((batch, self.tokens), jnp.int32)
        return tokens, model.init_cache(batch, self.context, decode=decode)

    def lower(self, batch: int) -> Any:
        arguments = jax.eval_shape(lambda: self.arguments(self.model, batch))
        return jax.jit(one_pass, donate_argnums=2).lower(self.model, *arguments)

    def largest(self, limit: int, small: Any, batch: int) -> int:
        """The batch that fits by the bytes of a program that was compiled at `batch`."""
        weights = memory.nbytes(self.model)
        temporaries = small.memory_analysis().temp_size_in_bytes / batch
        return int((SHARE * limit - weights) / (self.counted + temporaries)) // 8 * 8


def cases_of(name: str, args: argparse.Namespace) -> list[Case]:
    config = dataclasses.replace(models.MODELS[name], replay_window=args.window)
    every = [("conventional", 1), ("replay", 1)]
    every += [(scheme, tokens) for tokens in args.tokens for scheme in ("snapshots", "replay")]
    return [Case(name, config, scheme, tokens, args.context) for scheme, tokens in every]


def compile_largest(
    cases: Sequence[Case], limit: int, args: argparse.Namespace
) -> tuple[dict[Case, Any], dict[Case, int]]:
    """The programs at the largest batches, and these; cases that nothing fits of are left out."""

    def compile_at(batches: dict[Case, int]) -> dict[Case, Any]:
        lowerings = {case: functools.partial(case.lower, n) for case, n in batches.items()}
        return harness.compile_all(lowerings, args.threads)

    small = compile_at(dict.fromkeys(cases, args.small))
    small = {case: one for case, one in small.items() if not is_error(one)}
    batches = {case: case.largest(limit, one, args.small) for case, one in small.items()}
    compiled: dict[Case, Any] = {}
    wanted = batches
    for _ in range(ROUNDS):
        compiled |= compile_at(wanted)
        # Temporaries need not grow with the batch alone.
        wanted = {
            case: int(n * SHARE * limit / harness.program_bytes(compiled[case])) // 8 * 8
            for case, n in wanted.items()
            if not is_error(compiled[case]) and harness.program_bytes(compiled[case]) > limit
        }
        if not wanted:
            break
        batches = batches | wanted
    fits = {case: one for case, one in compiled.items() if case not in wanted and not is_error(one)}
    return fits, batches


def is_error(found: Any) -> bool:
    return isinstance(found, jax.errors.JaxRuntimeError)


def memory_limit(args: argparse.Namespace) -> int:
    stats = jax.devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit", args.memory * 1e9))


def in_use() -> int | None:
    return (jax.devices()[0].memory_stats() or {}).get("bytes_in_use")


def measure(case: Case, batch: int, compiled: Any, limit: int) -> Row:
    """Make the caches and run two passes; the second is timed."""
    structure = jax.tree.structure(case.model)
    leaves = jax.tree.leaves(case.model)
    make = jax.jit(lambda: [jnp.zeros(x.shape, x.dtype) for x in leaves])
    us = measured = None
    try:
        model = jax.tree.unflatten(structure, jax.block_until_ready(make()))
        before = in_use()
        held = jax.block_until_ready(case.arguments(model, batch))
        after = in_use()
        measured = None if before is None or after is None else (after - before) / batch
        held = jax.block_until_ready(compiled(model, *held))
        begin = time.perf_counter()
        held = jax.block_until_ready(compiled(model, *held))
        us = 1e6 * (time.perf_counter() - begin)
    except jax.errors.JaxRuntimeError as error:
        if not harness.does_not_fit(error):
            raise
    return Row(
        case.name,
        case.config.mixer,
        case.scheme,
        case.tokens,
        case.context,
        limit,
        memory.nbytes(case.model),
        case.counted,
        measured,
        batch,
        harness.program_bytes(compiled),
        (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        us,
    )


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="largest batch of each scheme", title_justify="left")
    for name in ("model", "scheme"):
        shown.add_column(name)
    for name in ("T", "MB counted", "MB measured", "batch", "GB as compiled", "us of a pass"):
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(
            row.model,
            row.scheme,
            str(row.tokens),
            f"{row.counted / 1e6:,.1f}",
            "" if row.measured is None else f"{row.measured / 1e6:,.1f}",
            f"{row.batch:,}",
            f"{row.program_bytes / 1e9:.1f}",
            "does not fit" if row.us is None else f"{row.us:,.0f}",
        )
    return shown


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [name for name in models.MODELS if name != "tiny"]
    parser.add_argument("--model", choices=models.MODELS, nargs="+", default=names)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4], help="T = 1 + drafts")
    parser.add_argument("--context", type=int, default=1024, help="positions of the KV caches")
    parser.add_argument("--window", type=int, default=16, help="replay window")
    parser.add_argument("--small", type=int, default=64, help="batch that is compiled first")
    parser.add_argument("--memory", type=float, default=105.0, help="GB, if the device says none")
    parser.add_argument("--threads", type=int, default=8, help="programs compiled side by side")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder of the JSON file")
    args = parser.parse_args(argv)
    harness.check_tokens(parser, args.tokens, args.window)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parse(argv), Console()
    limit, device = memory_limit(args), jax.devices()[0]
    path = args.out / f"largest-batch-{harness.device_name()}.json"
    rows: list[Row] = []
    begin = time.perf_counter()
    for name in args.model:
        cases = cases_of(name, args)
        compiled, batches = compile_largest(cases, limit, args)
        console.print(f"{name}: compiled after {time.perf_counter() - begin:.0f} s")
        for case in cases:
            one = compiled.pop(case, None)
            if one is None:
                console.print(f"{name}, {case.scheme}, T={case.tokens}: does not fit")
                continue
            rows.append(measure(case, batches[case], one, limit))
            gc.collect()  # modules hold their parameters in cycles
            record = {
                "benchmark": "largest-batch",
                "device": device.device_kind,
                "jax": jax.__version__,
                "options": {k: v for k, v in vars(args).items() if k != "out"},
                "rows": [dataclasses.asdict(row) for row in rows],
            }
            args.out.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    console.print(table(rows))
    console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
