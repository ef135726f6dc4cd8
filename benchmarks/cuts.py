"""Time of a step by how it is cut into programs: what `pallas_kernels.configs.choose` goes by.

    python benchmarks/cuts.py --layer kda --batch 16 256
    python benchmarks/cuts.py --layer mamba2 gated_delta_net --read-dtype bfloat16
    python benchmarks/cuts.py --layer kda --tokens 4 8

Loops of whole windows as in `kernels.py`, timed in turns. Every cut computes the same: states that
differ from the chosen cut's by more than rounding are said.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import harness
import jax
import kernels
import layers
import numpy as np
from rich.console import Console
from rich.table import Table

import replayssm_jax as rs
from pallas_kernels import configs, fused_step
from pallas_kernels.problem import Config, Mode, Problem
from pallas_kernels.scratch import shared_bytes
from replayssm_jax import mosaic_gpu

# Of states, relative to those of the chosen cut.
LIMIT = 1e-6


def candidates(problem: Problem, mode: Mode) -> list[Config]:
    """The chosen cut first, then all others that fit, each with every number of tiles in flight."""
    chosen = configs.choose(problem, mode)
    if chosen is None:
        return []
    flying = "stages" if problem.read_dtype is None else "copies"
    found = [chosen]
    for config in configs.configs(problem):
        for tiles in range(1, getattr(config, flying) + 1):
            cut = configs.completed(problem, dataclasses.replace(config, **{flying: tiles}))
            if cut not in found and shared_bytes(problem, cut, mode) <= configs.MOST_SHARED:
                found.append(cut)
    return found


class Case:
    """Loops of a layer for each cut; compiles when made."""

    def __init__(
        self, layer: str, batch: int, args: argparse.Namespace, tokens: int, ahead: harness.Compiler
    ):
        window = args.window or kernels.default_window(layer, tokens)
        read_dtype = None if args.read_dtype == "none" else args.read_dtype
        self.title = f"{layers.describe(layer)}, batch {batch}, {tokens} tokens, copy {read_dtype}"
        self.spec = spec = layers.make_spec(
            layer, window=window, max_tokens=tokens, read_dtype=read_dtype
        )
        self.batch, self.count = batch, kernels.layers_of(batch, tokens)
        steps = kernels.loop_steps(window, tokens, tokens)
        self.calls = steps * self.count
        self.random = ahead(kernels.random_tokens, spec, batch, tokens, 0)
        one = jax.eval_shape(functools.partial(kernels.random_tokens, spec, batch, tokens), 0)
        self.mode = Mode(fold=not args.windowed)
        scan = [kernels.windowed_scan(window, tokens, tokens)] if args.windowed else []
        self.problem = mosaic_gpu.problem_of(spec, batch, tokens)
        self.programs = {}
        for cut in candidates(self.problem, self.mode):
            jax.clear_caches()  # the kernel's among them
            loop = kernels.loop(kernels.replay_step(spec, "mosaic_gpu", tokens), steps, *scan)

            def choose(problem: Problem, mode: Mode, cut: Config = cut) -> Config | None:
                return cut if mode.fold == self.mode.fold else configs.choose(problem, mode)

            with mock.patch.object(fused_step, "choose", choose):
                self.programs[cut] = ahead(loop, *jax.eval_shape(self.start), [one] * self.count)

    def start(self) -> tuple[rs.Pointer, list[rs.ReplayState]]:
        return kernels.replay_states(self.spec, self.batch, self.count)

    def table(self, repeats: int) -> Table:
        inputs = [self.random.result()(seed) for seed in range(self.count)]
        contenders, ends = {}, {}
        for cut, program in self.programs.items():
            _, (first, *_), _ = program.result()(*self.start(), inputs)
            ends[cut] = np.asarray(first.checkpoint[0], np.float64)
            started = self.start()
            contenders[cut] = kernels.contender(program, started, inputs, self.calls)
            contenders[cut].once()
        timings = harness.time_in_turns(contenders, repeats=repeats)
        shown = Table(title=self.title, title_justify="left")
        for name in ("heads", "rows", "stages", "copies", "shared bytes", "us", ""):
            shown.add_column(name, justify="right")
        chosen, *_ = timings
        for cut, timing in timings.items():
            off = np.linalg.norm(ends[cut] - ends[chosen]) / np.linalg.norm(ends[chosen])
            words = "chosen" if cut == chosen else "" if off <= LIMIT else f"state off by {off:.0e}"
            bytes_taken = shared_bytes(self.problem, cut, self.mode)
            cells = cut.heads, cut.rows, cut.stages, cut.copies, f"{bytes_taken:,}"
            shown.add_row(*map(str, cells), f"{timing.us:.1f}", words)
        return shown


def cases_of(args: argparse.Namespace, ahead: harness.Compiler) -> Iterator[Case]:
    for layer, batch, tokens in itertools.product(args.layer, args.batch, args.tokens):
        yield Case(layer, batch, args, tokens, ahead)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = list(layers.LAYERS)
    formats = [name for name in kernels.OUTPUT_LIMITS if name]
    parser.add_argument("--layer", choices=names, nargs="+", default=names[:1])
    parser.add_argument("--batch", type=harness.count, nargs="+", default=[256])
    parser.add_argument("--tokens", type=harness.count, nargs="+", default=[1])
    parser.add_argument("--window", type=harness.count, help="default: as in kernels.py")
    parser.add_argument("--read-dtype", choices=["none", *formats], default="none")
    parser.add_argument(
        "--windowed", action="store_true", help="in rs.scan_steps: cuts of the steps without a fold"
    )
    parser.add_argument("--repeats", type=harness.count, default=5, help="timed runs of each cut")
    args = parser.parse_args(argv)
    if args.repeats < 2:
        parser.error("--repeats must be at least 2, or there is no spread")
    if reason := kernels.why_not("mosaic_gpu", args.layer[0]):
        parser.error(reason)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args, console = parse(argv), Console()
    with harness.Compiler() as ahead:
        cases: list[Any] = [*cases_of(args, ahead)]
    for case in cases:
        console.print(case.table(args.repeats))


if __name__ == "__main__":
    main()
