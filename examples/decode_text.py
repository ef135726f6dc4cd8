"""Decode real text with tiny hybrid models, conventionally and through ReplaySSM.

    python examples/decode_text.py --family kda --tokens 128

For each family: load the shipped weights, prefill prompts from source files that training never
saw, generate greedily both ways with the same weights, and compare tokens, state traffic, memory
and speed on this device.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from stdlib_text import Document, load_corpus
from weights_io import load_weights

import replayssm_jax as rs
from replayssm_jax.layers import MixerCache
from replayssm_jax.models import HybridCache, HybridLM

FAMILIES = ("mamba2", "gated_delta_net", "kda")
NAMES = {"mamba2": "Mamba-2", "gated_delta_net": "Gated DeltaNet", "kda": "Kimi Delta Attention"}
WEIGHTS = Path(__file__).parent / "weights"
Decode = Literal["recurrent", "replay"]


class Generated(NamedTuple):
    """Greedy continuation.

    tokens: int32 [B, n]; margins: float32 [B, n], the best logit less the second best.
    """

    tokens: jax.Array
    margins: jax.Array


@partial(jax.jit, static_argnames=("size", "decode"))
def prefill(
    model: HybridLM, prompts: jax.Array, *, size: int, decode: Decode
) -> tuple[jax.Array, HybridCache]:
    """Read prompts [B, T]; return the logits of the next token [B, V] and the cache."""
    cache = model.init_cache(prompts.shape[0], size, decode=decode, ragged=False)
    logits, cache = model.prefill(prompts, cache)
    return logits[:, -1], cache


@partial(jax.jit, static_argnames=("num_tokens", "decode"), donate_argnames="cache")
def generate(
    model: HybridLM, logits: jax.Array, cache: HybridCache, *, num_tokens: int, decode: Decode
) -> tuple[Generated, HybridCache]:
    """Decode greedily in one compiled loop; the two schemes differ in the cache and the scan."""

    def choose(logits: jax.Array) -> Generated:
        best, _ = jax.lax.top_k(logits, 2)
        return Generated(jnp.argmax(logits, axis=-1).astype(jnp.int32), best[:, 0] - best[:, 1])

    def step(carry: tuple[Generated, HybridCache], _: None) -> tuple[Any, Generated]:
        chosen, cache = carry
        logits, cache = model.step(chosen.tokens, cache)
        return (choose(logits), cache), chosen

    scan: Callable[..., Any] = jax.lax.scan
    if decode == "replay":
        scan = partial(rs.scan_steps, window=model.config.replay_window)
    (_, cache), chosen = scan(step, (choose(logits), cache), None, num_tokens)
    return jax.tree.map(lambda x: x.T, chosen), cache


class Traffic(NamedTuple):
    """Bytes of recurrent state of one sequence, all SSM layers together."""

    moved: float
    held: int


def state_traffic(cache: HybridCache, *, window: int) -> Traffic:
    """Count what decoding one token moves through memory, from the arrays of the cache.

    Per layer and sequence, with S the bytes of the recurrent state, r those of one record in the
    ring, R its slots and W the window:

        conventional  moved = 2 S                                       held = S
                      (the state is read and written at each token)
        replay        moved = S + r (W + 1) / 2 + r + (2 S + r W) / W   held = S + r R
                      (each token reads the checkpoint and the live records, (W + 1) / 2 of them on
                      average, and writes one; each W tokens a flush reads checkpoint and W
                      records and writes the checkpoint)

    Only live records count, as a kernel reads them; XLA on CPU reads the whole ring. Convolution
    history and KV cache are the same in both schemes and are left out.
    """
    moved, held = 0.0, 0

    def is_mixer(x: Any) -> bool:
        return isinstance(x, MixerCache)

    for layer in jax.tree.leaves(cache.layers, is_leaf=is_mixer):
        if not is_mixer(layer):
            continue
        if not isinstance(layer.state, rs.ReplayState):
            state = layer.state.nbytes // layer.state.shape[0]
            moved += 2 * state
            held += state
            continue
        batch = layer.state.checkpoint.shape[0]
        slots = layer.state.buffer.key.shape[1]
        state = layer.state.checkpoint.nbytes // batch
        ring = sum(array.nbytes for array in jax.tree.leaves(layer.state.buffer)) // batch
        record = ring / slots
        moved += state + record * (window + 1) / 2 + record + (2 * state + record * window) / window
        held += state + ring
    return Traffic(moved, held)


class Prompt(NamedTuple):
    source: str
    text: bytes


def prompt_of(document: Document, length: int) -> Prompt:
    """Take ``length`` bytes that end with the head of a function, near the middle of a file."""
    text = document.text
    middle = max(length, len(text) // 2)
    start = text.find(b"\n    def ", middle)
    end = text.find(b":\n", start) + 2
    if start < 0 or end < 2:
        end = middle
    return Prompt(document.name, text[max(0, end - length) : end])


def held_out_prompts(count: int, length: int) -> list[Prompt]:
    """Prompts of equal length from different held-out files, the largest files first."""
    documents = [document for document in load_corpus().held_out if len(document.text) > 2 * length]
    if not documents:
        raise ValueError(f"no held-out file is longer than twice the prompt of {length} bytes")
    documents.sort(key=lambda document: -len(document.text))
    return [prompt_of(documents[i % len(documents)], length) for i in range(count)]


class Result(NamedTuple):
    """What one scheme gave: tokens and margins as numpy, state traffic, and tokens per second."""

    generated: Generated
    traffic: Traffic
    tokens_per_second: float


class Schemes:
    """The two ways to decode one model, compiled and run on the same prompts."""

    def __init__(self, model: HybridLM, prompts: jax.Array, num_tokens: int):
        self.model, self.num_tokens = model, num_tokens
        size = prompts.shape[1] + num_tokens
        self.read = partial(prefill, model, prompts, size=size)
        self.generated: dict[Decode, Generated] = {}
        self.traffic: dict[Decode, Traffic] = {}
        self.seconds: dict[Decode, list[float]] = {"recurrent": [], "replay": []}

    def run(self, decode: Decode, *, timed: bool) -> None:
        logits, cache = self.read(decode=decode)
        if not timed:
            self.traffic[decode] = state_traffic(cache, window=self.model.config.replay_window)
        jax.block_until_ready((logits, cache))
        begin = time.perf_counter()
        generated, _ = generate(
            self.model, logits, cache, num_tokens=self.num_tokens, decode=decode
        )
        jax.block_until_ready(generated)
        if timed:
            self.seconds[decode].append(time.perf_counter() - begin)
        else:
            self.generated[decode] = jax.tree.map(np.asarray, generated)

    def result(self, decode: Decode) -> Result:
        generated = self.generated[decode]
        speed = generated.tokens.size / statistics.median(self.seconds[decode])
        return Result(generated, self.traffic[decode], speed)


def compare_tokens(conventional: Generated, replay: Generated) -> Text:
    """Say whether the tokens are the same at every position, and if not, where they part."""
    same = conventional.tokens == replay.tokens
    if same.all():
        return Text(f"identical {same.sum()}/{same.size}", style="green")
    row, position = min(
        (tuple(place) for place in np.argwhere(~same)), key=lambda place: (place[1], place[0])
    )
    gap = conventional.margins[row, position]
    return Text(
        f"{same.sum()}/{same.size} identical, first difference in row {row} at token {position}, "
        f"where the best two logits are {gap:.1e} apart",
        style="bold red",
    )


def show_text(prompt: Prompt, tokens: np.ndarray, *, lines: int = 6) -> Panel:
    tail = "\n".join(prompt.text.decode("utf-8", "replace").split("\n")[-lines:])
    body = bytes(tokens.astype(np.uint8)).decode("utf-8", "replace")
    return Panel(
        Text.assemble((tail, "dim"), (body, "bold")), title=prompt.source, title_align="left"
    )


def show_table(
    title: str, conventional: Result, replay: Result, *, batch: int, window: int
) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("per sequence, SSM layers")
    table.add_column("conventional", justify="right")
    table.add_column(f"replay, window {window}", justify="right")
    table.add_column("replay / conventional", justify="right")

    def row(label: str, a: float, b: float, unit: Callable[[float], str]) -> None:
        table.add_row(label, unit(a), unit(b), f"{b / a:.2f}")

    def kilobytes(count: float) -> str:
        return f"{count / 1e3:,.1f} kB"

    row("state bytes moved per token", conventional.traffic.moved, replay.traffic.moved, kilobytes)
    row("state memory", conventional.traffic.held, replay.traffic.held, kilobytes)
    row(
        f"tokens per second, batch of {batch}",
        conventional.tokens_per_second,
        replay.tokens_per_second,
        lambda speed: f"{speed:,.0f}",
    )
    return table


def trained_on(record: dict[str, Any]) -> str:
    """Bits per byte of the weights beside the baselines, from the record of the training run."""
    baselines = "; ".join(f"{name} {value:.2f}" for name, value in record["baselines"].items())
    return (
        f"{record['bits_per_byte']:.2f} bits per byte on held-out files ({baselines}); "
        f"trained for {record['step']:,} steps, {record['bytes_trained_on'] / 1e6:,.0f} MB read, "
        f"on {record['device']}"
    )


def decode_family(
    family: str,
    prompts: Sequence[Prompt],
    *,
    num_tokens: int,
    window: int | None,
    repeats: int,
    shown: Sequence[int],
    console: Console,
) -> bool:
    """Run one family and print text and table; returns whether all tokens are identical."""
    path = WEIGHTS / f"{family}.safetensors"
    if not path.exists():
        raise SystemExit(
            f"no weights at {path}: train them with\n  python examples/train_tiny_hybrid.py "
            f"--family {family} --out {path.parent}"
        )
    model, record = load_weights(path)
    if window is not None:
        config = dataclasses.replace(model.config, replay_window=window)
        other = HybridLM(config, rngs=nnx.Rngs(0))
        nnx.update(other, nnx.state(model))
        model = other
    tokens = jnp.asarray(np.stack([np.frombuffer(prompt.text, np.uint8) for prompt in prompts]))
    schemes = Schemes(model, tokens.astype(jnp.int32), num_tokens)
    order: tuple[Decode, Decode] = ("recurrent", "replay")
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(f"{NAMES[family]}: compiling", total=len(order) * (repeats + 2))
        for decode in order:
            schemes.run(decode, timed=False)
            progress.advance(bar, 2)
        progress.update(bar, description=f"{NAMES[family]}: timing")
        for repeat in range(repeats):
            for decode in order if repeat % 2 else order[::-1]:
                schemes.run(decode, timed=True)
                progress.advance(bar)

    conventional, replay = schemes.result("recurrent"), schemes.result("replay")
    agreement = compare_tokens(conventional.generated, replay.generated)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    title = f"{NAMES[family]} hybrid {model.config.pattern}, {parameters:,} parameters"
    console.print(
        Group(
            *(show_text(prompts[i], np.asarray(replay.generated.tokens[i])) for i in shown),
            show_table(
                title,
                conventional,
                replay,
                batch=len(prompts),
                window=model.config.replay_window,
            ),
            Text.assemble("greedy tokens, replay against conventional: ", agreement),
            Text(trained_on(record) + "\n", style="dim"),
        )
    )
    return bool((conventional.generated.tokens == replay.generated.tokens).all())


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--family", choices=(*FAMILIES, "all"), default="all")
    parser.add_argument("--tokens", type=int, default=256, help="bytes to generate for each prompt")
    parser.add_argument("--batch", type=int, default=4, help="prompts decoded at once")
    parser.add_argument("--show", type=int, default=1, help="prompts to print for each family")
    parser.add_argument("--window", type=int, help="replay window; default: that of the weights")
    parser.add_argument("--prompt-file", type=Path, help="continue this text instead")
    parser.add_argument("--prompt-bytes", type=int, default=512, help="longest prompt")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each scheme")
    args = parser.parse_args(argv)
    for name in ("tokens", "batch", "window", "prompt_bytes", "repeats"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    try:
        args.prompts = read_prompts(args)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return args


def read_prompts(args: argparse.Namespace) -> list[Prompt]:
    if args.prompt_file is None:
        return held_out_prompts(args.batch, args.prompt_bytes)
    text = args.prompt_file.read_bytes()[-args.prompt_bytes :]
    if not text:
        raise ValueError(f"{args.prompt_file} is empty")
    return [Prompt(str(args.prompt_file), text)] * args.batch


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    console = Console()
    device = jax.devices()[0]
    console.print(f"[bold]ReplaySSM[/bold] on {device.device_kind} ({device.platform})")
    identical = [
        decode_family(
            family,
            args.prompts,
            num_tokens=args.tokens,
            window=args.window,
            repeats=args.repeats,
            shown=[(i + k) % len(args.prompts) for k in range(min(args.show, len(args.prompts)))],
            console=console,
        )
        for i, family in enumerate(FAMILIES if args.family == "all" else (args.family,))
    ]
    return 0 if all(identical) else 1


if __name__ == "__main__":
    raise SystemExit(main())
