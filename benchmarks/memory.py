"""Bytes that a sequence holds while it is decoded, by scheme, and how many sequences fit.

    python benchmarks/memory.py
    python benchmarks/memory.py --tokens 8 --context 32768 --memory 80 --plot memory.svg

Nothing is allocated: shapes and dtypes are those of the caches that the models make (whole models
with the shapes of published ones). Counted for each sequence, all layers together:

    conventional   one recurrent state; drafts cannot be rolled back
    snapshots      the committed state and one for each of T tokens (vLLM keeps T in all, SGLang
                   T + 1)
    replay         one checkpoint and the ring, for T tokens a pass
    narrow ring    the same with per-channel log-decays in bfloat16: what KDA's ring could cost.
                   It is not implemented, and its decays would round at 2^-9.

and with all of them the convolution rings and the KV caches at the given context.

The file also has what one layer holds and moves with states and read copies in other formats.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import layers
import models
from flax import nnx
from rich.console import Console
from rich.table import Table

import replayssm_jax as rs
from replayssm_jax.layers import KVCache, MixerCache
from replayssm_jax.models import HybridConfig, HybridLM

# Of states and read copies, in 16 and in 8 bits.
FORMATS: dict[str, dict[str, Any]] = {
    "no copy": {},
    "16-bit copy": {"read_dtype": "bfloat16"},
    "8-bit copy": {"read_dtype": "int8"},
    "16-bit checkpoint": {"state_dtype": "bfloat16"},
    "8-bit checkpoint": {"state_dtype": "int8"},
}
SCHEMES = ("conventional", "snapshots", "replay", "narrow ring")
DECODE = {"conventional": "recurrent", "snapshots": "snapshot"}


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes of one sequence, all layers together.

    Attributes:
      state: recurrent states: the one, snapshots of it, or the checkpoint.
      ring: of recorded inputs.
      conv: convolution rings.
      kv: KV caches.
    """

    state: int
    ring: int
    conv: int
    kv: int

    @property
    def total(self) -> int:
        return self.state + self.ring + self.conv + self.kv


@dataclasses.dataclass(frozen=True)
class Row:
    """What one scheme holds, and the largest batch beside the weights."""

    model: str
    family: str
    scheme: str
    tokens: int
    context: int
    held: Held
    weights: int
    largest_batch: int


def nbytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@functools.cache
def shapes(config: HybridConfig) -> HybridLM:
    """The model in bfloat16, with shapes in place of arrays."""
    bf16: dict[str, Any] = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    return nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0), **bf16))


def held(config: HybridConfig, scheme: str, tokens: int, context: int) -> Held:
    """Bytes of one sequence, from the shapes of the model's own cache."""
    most = 1 if scheme == "conventional" else tokens
    model = shapes(dataclasses.replace(config, max_tokens=most))
    decode: Any = DECODE.get(scheme, "replay")
    cache = jax.eval_shape(lambda: model.init_cache(1, context, decode=decode))
    state = ring = conv = kv = 0
    for layer in jax.tree.leaves(cache.layers, is_leaf=lambda x: isinstance(x, MixerCache)):
        if not isinstance(layer, MixerCache):
            continue
        conv += nbytes(layer.history)
        if not isinstance(layer.state, rs.ReplayState):
            state += nbytes(layer.state)
            continue
        state += nbytes(layer.state.checkpoint)
        buffer = layer.state.buffer
        if scheme == "narrow ring" and config.mixer == "kda":
            narrow = jax.ShapeDtypeStruct(buffer.log_decay.shape, jnp.bfloat16)
            buffer = dataclasses.replace(buffer, log_decay=narrow)
        ring += nbytes(buffer)
    for layer in jax.tree.leaves(cache.layers, is_leaf=lambda x: isinstance(x, KVCache)):
        if isinstance(layer, KVCache):
            kv += nbytes((layer.key, layer.value))
    return Held(state, ring, conv, kv)


def held_and_moved(spec: rs.ReplaySpec) -> tuple[float, float]:
    """Of one row of a layer, in float32 states: bytes held, and bytes a token moves on average.

    A window has a step at each fill from 1 to its size. All of them read the state, through its
    copy where there is one, and the live records, and write a record. The last one flushes: it
    reads the checkpoint and writes the new one and its copy, which it reads in the same pass.
    """
    state = jax.eval_shape(lambda: rs.init_state(spec, 1))
    ring = state.buffer
    record = {
        field.name: nbytes(getattr(ring, field.name)) / spec.capacity
        for field in dataclasses.fields(ring)
    }
    checkpoint, copy = nbytes(state.checkpoint), nbytes(state.read_copy)
    # Beside a copy, what only folds read, and what only steps do.
    exact, cached = {"value", "beta"}, {"update", "read_log_decay"}
    if ring.read_log_decay is not None:
        exact.add("log_decay")
    apart = ring.update is not None and ring.value is not None
    read = sum(size for name, size in record.items() if not apart or name not in exact)
    folded = sum(size for name, size in record.items() if not apart or name not in cached)
    window = spec.window
    moved = (window - 1) * (copy or checkpoint) + 2 * checkpoint + copy
    moved += read * window * (window - 1) // 2 + folded * window
    unit = 4 * spec.num_heads * spec.value_dim * spec.key_dim
    held = checkpoint + copy + nbytes(ring)
    return held / unit, (moved / window + sum(record.values())) / unit


def format_rows(window: int) -> list[dict[str, Any]]:
    """`held_and_moved` of the layers of published models in each of `FORMATS`."""
    rows = []
    for layer in ("mamba2", "gated_delta_net", "kda"):
        for name, formats in FORMATS.items():
            held, moved = held_and_moved(layers.make_spec(layer, window=window, **formats))
            facts = dict(case=layers.describe(layer), family=layer, formats=name)
            rows.append(facts | dict(held=round(held, 4), moved=round(moved, 4)))
    return rows


def rows_of(name: str, args: argparse.Namespace) -> list[Row]:
    """The schemes of one model; conventional decoding without drafts first."""
    config = dataclasses.replace(models.MODELS[name], replay_window=args.window)
    weights = nbytes(nnx.state(shapes(config)))
    rows = []
    for tokens in (1, *args.tokens):
        for scheme in SCHEMES:
            if scheme == ("snapshots" if tokens == 1 else "conventional"):
                continue
            if scheme == "narrow ring" and config.mixer != "kda":
                continue
            bytes_held = held(config, scheme, tokens, args.context)
            largest = max(0, int(args.memory * 1e9) - weights) // bytes_held.total
            rows.append(
                Row(
                    name,
                    config.mixer,
                    scheme,
                    tokens,
                    args.context,
                    bytes_held,
                    weights,
                    int(largest),
                )
            )
    return rows


def against_snapshots(row: Row, rows: Sequence[Row]) -> float | None:
    """Sequences that fit, in times of those with snapshots for as many tokens."""
    for other in rows:
        same = (other.model, other.tokens) == (row.model, row.tokens)
        if same and other.scheme == "snapshots" and other.largest_batch:
            return row.largest_batch / other.largest_batch
    return None


def table(rows: Sequence[Row], args: argparse.Namespace) -> Table:
    shown = Table(
        title=f"MB of one sequence, context {args.context}; batch that fits in {args.memory:g} GB",
        title_justify="left",
    )
    for name in ("model", "scheme"):
        shown.add_column(name)
    for name in ("T", "states", "ring", "conv", "KV", "total", "batch", "x snapshots"):
        shown.add_column(name, justify="right")
    for row in rows:
        parts = row.held.state, row.held.ring, row.held.conv, row.held.kv, row.held.total
        times = against_snapshots(row, rows)
        shown.add_row(
            row.model,
            row.scheme,
            str(row.tokens),
            *(f"{part / 1e6:,.1f}" for part in parts),
            f"{row.largest_batch:,}",
            "" if times is None else f"{times:.2f}",
        )
    return shown


def plot(rows: Sequence[Row], path: Path, args: argparse.Namespace) -> None:
    """Two rows of bars for each model: bytes of a sequence, and the batch that fits."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Text as text, and the same bytes whenever the same is drawn.
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "memory", "font.family": "sans-serif"}
    names = list(dict.fromkeys(row.model for row in rows))
    figure, axes = plt.subplots(2, len(names), figsize=(4 * len(names), 6), squeeze=False)
    parts = {"state": "#4c78a8", "ring": "#f58518", "conv": "#bab0ac", "kv": "#72b7b2"}
    for column, name in enumerate(names):
        mine = [row for row in rows if row.model == name]
        labels = [f"{row.scheme}\nT={row.tokens}" for row in mine]
        bottom = [0.0] * len(mine)
        for part, colour in parts.items():
            heights = [getattr(row.held, part) / 1e6 for row in mine]
            axes[0][column].bar(labels, heights, bottom=bottom, color=colour, label=part)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        axes[0][column].set_title(name)
        axes[1][column].bar(labels, [row.largest_batch for row in mine], color="#54a24b")
        for ax in axes[:, column]:
            ax.tick_params(axis="x", rotation=90, labelsize=7)
    axes[0][0].set_ylabel(f"MB of one sequence, context {args.context}")
    axes[1][0].set_ylabel(f"sequences in {args.memory:g} GB")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [name for name in models.MODELS if name != "tiny"]
    parser.add_argument("--model", choices=models.MODELS, nargs="+", default=names)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2, 4, 8], help="T = 1 + drafts")
    parser.add_argument("--context", type=int, default=4096, help="positions of the KV caches")
    parser.add_argument("--window", type=int, default=16, help="replay window")
    parser.add_argument("--memory", type=float, default=141.0, help="GB of the device (H200: 141)")
    parser.add_argument("--plot", type=Path, help="file of the plot")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder of the JSON file")
    args = parser.parse_args(argv)
    harness.check_tokens(parser, args.tokens, args.window)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parse(argv), Console()
    rows = [row for name in args.model for row in rows_of(name, args)]
    console.print(table(rows, args))
    options = {k: v for k, v in vars(args).items() if k not in ("out", "plot")}
    record = {
        "benchmark": "memory",
        "options": options,
        "rows": [dataclasses.asdict(row) | {"total": row.held.total} for row in rows],
        "formats": format_rows(args.window),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "memory.json"
    path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    console.print(f"written to {path}")
    if args.plot:
        plot(rows, args.plot, args)
        console.print(f"plotted in {args.plot}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
