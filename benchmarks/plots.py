"""Pictures and tables of benchmark results, for the README and the documentation.

    python benchmarks/plots.py                # what the documents show, and the documents
    python benchmarks/plots.py RESULTS.json   # these alone, documents left as they are

`kernels.py` gives speed-up and fraction of the read bandwidth over the batch, its `--fills` the
time of a step over a window, `speculative.py` speed-ups over the batch. Other results have tables
alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import tables

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
DOCUMENTS = {
    "README.md": "",
    "docs/kernels.md": "../",
    "docs/precision.md": "../",
    "docs/serving.md": "../",
    "docs/speculative.md": "../",
}

INK, MUTED, GRID = "#1f2933", "#66727f", "#e3e7eb"
# Distinct for colour-blind readers, too, and each with its own marker.
COLOURS = ("#3f7cd8", "#e5702d", "#35a06f", "#a0509c", "#b8860b", "#5b6770", "#c8385a", "#2a9d9d")
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "p")


@contextmanager
def style() -> Iterator[None]:
    """How all pictures look."""
    options = {
        "axes.axisbelow": True,
        "axes.edgecolor": MUTED,
        "axes.grid": True,
        "axes.labelcolor": INK,
        "axes.prop_cycle": matplotlib.cycler(color=COLOURS, marker=MARKERS),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
        "figure.facecolor": "white",
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "grid.color": GRID,
        "legend.fontsize": 9,
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "lines.markersize": 5,
        "savefig.facecolor": "white",
        "svg.fonttype": "path",
        "svg.hashsalt": "replayssm_jax",  # the same picture gives the same file
        "text.color": INK,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
    }
    with matplotlib.rc_context(options):
        yield


def _over_batch(ax: Axes, batches: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(batches, [str(batch) for batch in batches])
    ax.minorticks_off()
    ax.set_xlabel("batch")


def draw_kernels(record: tables.Record) -> Figure:
    """Speed-up over conventional decoding and fraction of the read bandwidth, over the batch."""
    grouped = tables.plain(record)
    batches = sorted({batch for case in grouped.values() for batch in case})
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    for name, case in grouped.items():
        at = sorted(case)
        left.plot(at, [case[batch]["speedup"] for batch in at], label=name)
        reads = [case[batch]["fraction_of_read_bandwidth"] for batch in at]
        if None not in reads:
            right.plot(at, reads, label=name)
    left.axhline(1, color=MUTED, linewidth=1, linestyle="--", marker="")
    left.set_ylim(bottom=0)
    left.set_title("Speed-up over the conventional step")
    right.set_ylim(0, 1)
    right.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
    right.set_title("Fraction of the measured read bandwidth")
    for ax in (left, right):
        _over_batch(ax, batches)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(f"{record['device']}, jax {record['jax']}", fontsize=10, color=MUTED)
    return figure


def draw_window(record: tables.Record) -> Figure:
    """Time of a step at each fill of the window, and of staggered rows, at the largest batch."""
    grouped = tables.fills(record)
    largest = {name: max(b for n, b in grouped if n == name) for name, _ in grouped}
    columns = min(2, len(largest))
    lines = -(-len(largest) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(5 * columns, 3.2 * lines), squeeze=False, layout="constrained"
    )
    for ax, (name, batch) in zip(axes.flat, largest.items(), strict=False):
        _draw_one_window(ax, f"{name}, batch {batch}", grouped[name, batch])
    for ax in axes.flat[len(largest) :]:
        ax.set_visible(False)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(f"{record['device']}, jax {record['jax']}", fontsize=10, color=MUTED)
    return figure


def _draw_one_window(ax: Axes, title: str, case: dict[str, Any]) -> None:
    at = sorted(int(name.split()[1]) for name in case if name.startswith("fill "))
    us = [case[f"fill {fill}"]["us"] for fill in at]
    ax.bar(at, us, color=COLOURS[0], label="all rows at this fill; the last flushes")
    spread = case["staggered"]
    ax.axhline(spread["us"], color=COLOURS[1], marker="", label="staggered rows, every step")
    ax.axhline(
        spread["baseline_us"], color=MUTED, linestyle="--", marker="", label="conventional step"
    )
    ax.set_title(title, fontsize=9)
    ax.set_xlabel("records in the window before the step")
    ax.set_ylabel("us")
    ax.set_xticks(at[::4])


def draw_speculative(record: tables.Record) -> Figure:
    """What speculation by replay gains over plain decoding and over snapshots, over the batch."""
    grouped = tables.speculative(record)
    batches = sorted({batch for _, batch in grouped})
    models = list(dict.fromkeys(name.split(", ")[0] for name, _ in grouped))
    figure, axes = plt.subplots(
        len(models), 2, figsize=(10, 3.4 * len(models)), squeeze=False, layout="constrained"
    )
    for model, (left, right) in zip(models, axes, strict=True):
        for case in dict.fromkeys(name for name, _ in grouped if name.split(", ")[0] == model):
            found = {
                batch: grouped[case, batch]["replay speculation"]
                for batch in batches
                if "replay speculation" in grouped.get((case, batch), {})
            }
            label = case.removeprefix(f"{model}, ")
            left.plot([*found], [row["speedup"] for row in found.values()], label=label)
            over = {
                batch: row["extra"]["speedup_over_snapshots"]
                for batch, row in found.items()
                if "speedup_over_snapshots" in row["extra"]
            }
            right.plot([*over], [*over.values()])
        left.set_title(f"{model}: replay over plain decoding")
        left.legend()
        right.set_title("replay over snapshots")
        for ax in (left, right):
            ax.axhline(1, color=MUTED, linewidth=1, linestyle="--", marker="")
            ax.set_ylim(bottom=0)
            _over_batch(ax, batches)
    figure.suptitle(f"{record['device']}, jax {record['jax']}", fontsize=10, color=MUTED)
    return figure


def draw(path: Path, folder: Path) -> Path | None:
    """Draw the picture of a results file to <folder>/<its stem>.svg; None where it has none."""
    record = tables.load(path)
    with style():
        if tables.is_fills(record):
            figure = draw_window(record)
        elif tables.is_kernels(record) and tables.plain(record):
            figure = draw_kernels(record)
        elif tables.is_speculative(record):
            figure = draw_speculative(record)
        else:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        out = folder / f"{path.stem}.svg"
        figure.savefig(out, metadata={"Date": None})
        plt.close(figure)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "results", type=Path, nargs="*", help="default: what the documents show, and these"
    )
    parser.add_argument("--out", type=Path, default=ROOT / tables.IMAGES, help="folder of pictures")
    args = parser.parse_args(argv)
    missing = [str(path) for path in args.results if not path.is_file()]
    if missing:
        parser.error(f"no such file: {', '.join(missing)}")
    shown = "".join((ROOT / name).read_text() for name in DOCUMENTS)
    of_documents = [tables.RESULTS / file for file in tables.pictured(shown)]
    for path in args.results or of_documents:
        try:
            out = draw(path, args.out)
        except ValueError as error:
            parser.error(str(error))
        if out is not None:
            print(out)
        elif args.results:
            print(f"{path}: has no picture")
    if not args.results:
        for name, to_root in DOCUMENTS.items():
            text = (ROOT / name).read_text()
            written = tables.fill_sections(text, tables.RESULTS, to_root)
            if written != text:
                (ROOT / name).write_text(written)
                print(ROOT / name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
