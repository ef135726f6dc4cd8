"""Markdown tables of benchmark results, and the sections of documents that hold them.

A section of a document names what it shows and the file of benchmarks/results/ that it shows:

    <!-- benchmarks: kernels kernels-nvidia-h200.json -->
    ...
    <!-- end of benchmarks -->

`python benchmarks/plots.py` writes what is between, the tests compare it with the results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]

FAMILIES = {"mamba2": "Mamba-2", "gated_delta_net": "GDN", "kda": "KDA"}
# What a case may end with where it is not the plain one.
FORMS = ("staggered", "windowed", "own pointers")
IMAGES = Path("docs/images")
RESULTS = Path(__file__).parent / "results"

_SECTION = re.compile(
    r"(?P<begin><!-- benchmarks: (?P<kind>\S+) (?P<file>\S+) -->\n)(?P<body>.*?)"
    r"(?P<end><!-- end of benchmarks -->)",
    re.DOTALL,
)


def load(path: Path) -> Record:
    """Read what `harness.save` wrote.

    Raises:
      ValueError: it holds something else.
    """
    try:
        record = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path} must hold what a benchmark wrote, found {type(record).__name__}")
    return record


def is_fills(record: Record) -> bool:
    """Whether the record is of `kernels.py --fills`."""
    return _all_rows(record, lambda extra: "fill" in extra)


def is_kernels(record: Record) -> bool:
    """Whether the record is of whole windows of `kernels.py`, under any name."""
    return _all_rows(record, lambda extra: "conventional_us" in extra and "window" in extra)


def is_speculative(record: Record) -> bool:
    """Whether the record is of `speculative.py`, under any name."""
    return _all_rows(record, lambda extra: "baseline_tokens_per_second" in extra)


def _all_rows(record: Record, test: Callable[[Mapping[str, Any]], bool]) -> bool:
    rows = record.get("rows", [])
    return bool(rows) and all(test(row.get("extra", {})) for row in rows)


def form_of(row: Mapping[str, Any]) -> str | None:
    """How the rows of a loop stand, None where they all flush when their window is full."""
    return next((form for form in FORMS if row["case"].endswith(f", {form}")), None)


def label(row: Mapping[str, Any]) -> str:
    """Family and shapes of a row's case, with its tokens and read copy where it has some."""
    shapes = row["case"].split(", ", 1)[1]
    for form in (*FORMS, str(row["extra"].get("fill"))):
        shapes = shapes.removesuffix(f", {form}")
    name = FAMILIES[row["family"]]
    if row["tokens"] > 1:
        name += f", verify of {row['tokens']} tokens"
    if row["read_dtype"] is not None:
        name += f", {row['read_dtype']} read copy"
    return f"{name}, {shapes}"


def plain(record: Record) -> dict[str, dict[int, Mapping[str, Any]]]:
    """Rows of whole windows by label and batch, of the implementation that comes first by default.

    Rows at spread fills, with other pointers and of single steps are left out.
    """
    rows = [row for row in record["rows"] if "fill" not in row["extra"] and form_of(row) is None]
    names = {row["implementation"] for row in rows}
    wanted = next((name for name in ("mosaic_gpu", "triton") if name in names), "xla")
    grouped: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        if row["implementation"] == wanted:
            grouped.setdefault(label(row), {})[row["batch"]] = row
    return grouped


def fills(record: Record) -> dict[tuple[str, int], dict[str, Mapping[str, Any]]]:
    """Rows of single steps by (label, batch) and by fill: "fill 0" and on, and "staggered"."""
    grouped: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for row in record["rows"]:
        if "fill" in row["extra"]:
            case = grouped.setdefault((label(row), row["batch"]), {})
            case[row["extra"]["fill"]] = row
    return grouped


def window_of(case: Mapping[str, Mapping[str, Any]]) -> list[float]:
    """Microseconds of the steps of a window: at fills 1 to the window's size, which flushes."""
    size = next(iter(case.values()))["extra"]["window"]
    return [case[f"fill {fill}"]["us"] for fill in range(1, size + 1)]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose first column is words and whose others are figures."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _times(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{row['baseline_us']:.1f} → {row['us']:.1f} ({row['speedup']:.2f}x)"


def kernel_table(record: Record) -> str:
    """Microseconds of a step, conventional → replay, over the batch."""
    grouped = plain(record)
    batches = sorted({batch for case in grouped.values() for batch in case})
    head = ["conventional → replay, us", *(f"batch {b}" for b in batches), "of read bandwidth"]

    def cells(name: str, case: Mapping[int, Any]) -> list[str]:
        share = case[max(case)]["fraction_of_read_bandwidth"]
        times = [_times(case.get(batch)) for batch in batches]
        return [name, *times, "" if share is None else f"{share:.0%}"]

    return markdown(head, (cells(name, case) for name, case in grouped.items()))


def implementations_table(record: Record) -> str:
    """Microseconds of a step by each implementation, and by the fastest conventional one."""
    names = list(dict.fromkeys(row["implementation"] for row in record["rows"]))
    grouped: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for row in record["rows"]:
        grouped.setdefault((label(row), row["batch"]), {})[row["implementation"]] = row

    def cells(name: str, batch: int, case: Mapping[str, Any]) -> list[str]:
        conventional = next(iter(case.values()))["baseline_us"]
        times = [f"{case[n]['us']:.1f}" if n in case else "" for n in names]
        return [name, str(batch), f"{conventional:.1f}", *times]

    head = ["us of a step", "batch", "conventional", *names]
    return markdown(head, (cells(*key, case) for key, case in grouped.items()))


def window_table(record: Record) -> str:
    """Mean and longest step of a window, rows together and at spread fills."""
    head = ["us of a step", "batch", "conventional", "mean", "longest", "staggered rows"]

    def cells(name: str, batch: int, case: Mapping[str, Any]) -> list[str]:
        steps = window_of(case)
        spread = case["staggered"]
        us = [spread["baseline_us"], sum(steps) / len(steps), max(steps), spread["us"]]
        return [name, str(batch), *(f"{x:.1f}" for x in us)]

    return markdown(head, (cells(*key, case) for key, case in fills(record).items()))


def windows_table(record: Record) -> str:
    """Microseconds of a step, conventional → replay, over the window."""
    grouped: dict[tuple[str, int], dict[int, Mapping[str, Any]]] = {}
    for row in record["rows"]:
        window = row["extra"]["window"]
        name = label(row).removesuffix(f", window {window}")
        if form := form_of(row):
            name += f", {form}"
        grouped.setdefault((name, row["batch"]), {})[window] = row
    windows = sorted({window for case in grouped.values() for window in case})
    head = ["conventional → replay, us", "batch", *(f"window {n}" for n in windows)]
    return markdown(
        head,
        (
            [name, str(batch), *(_times(case.get(n)) for n in windows)]
            for (name, batch), case in grouped.items()
        ),
    )


def sharded_table(record: Record) -> str:
    """Microseconds of a model's step on one device and on several, with the efficiency."""
    rows: dict[tuple[str, str, int], dict[str, Mapping[str, Any]]] = {}
    meshes: list[str] = []
    for row in record["rows"]:
        scheme, mesh = row["implementation"].split(" ")
        rows.setdefault((row["case"], scheme, row["batch"]), {})[mesh] = row
        if mesh not in meshes:
            meshes.append(mesh)

    def cell(row: Mapping[str, Any] | None) -> str:
        if row is None:
            return ""
        extra, notes = row["extra"], []
        if extra.get("efficiency") is not None:
            notes.append(f"efficiency {extra['efficiency']:.2f}")
        if extra.get("collectives") and extra.get("collective_share") is not None:
            notes.append(f"collectives {extra['collective_share']:.0%}")
        return f"{row['us']:,.0f}" + (f" ({', '.join(notes)})" if notes else "")

    head = ["us of a model's step", "decoding", "batch", *meshes]
    return markdown(
        head,
        (
            [case, scheme, str(batch), *(cell(found.get(mesh)) for mesh in meshes)]
            for (case, scheme, batch), found in rows.items()
        ),
    )


def sharded_summary(record: Record) -> str:
    """The same for the largest batch alone."""
    largest = max(row["batch"] for row in record["rows"])
    return sharded_table({"rows": [row for row in record["rows"] if row["batch"] == largest]})


def peers_table(record: Record) -> str:
    """Microseconds of other packages' conventional steps beside ours, over the batch."""
    grouped: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for row in record["rows"]:
        grouped.setdefault((label(row), row["implementation"]), {})[row["batch"]] = row
    batches = sorted({batch for case in grouped.values() for batch in case})
    head = ["ours, theirs, us", "package", *(f"batch {batch}" for batch in batches)]

    def cell(row: Mapping[str, Any] | None) -> str:
        return "" if row is None else f"{row['baseline_us']:.1f}, {row['us']:.1f}"

    return markdown(
        head,
        ([*key, *(cell(case.get(batch)) for batch in batches)] for key, case in grouped.items()),
    )


def speculative(record: Record) -> dict[tuple[str, int], dict[str, Mapping[str, Any]]]:
    """Rows of `speculative.py` by (case, batch) and by scheme."""
    grouped: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for row in record["rows"]:
        grouped.setdefault((row["case"], row["batch"]), {})[row["implementation"]] = row
    return grouped


def speculative_table(record: Record) -> str:
    """Tokens per second of each scheme, and what replay speculation gains over the others."""
    head = ["tokens per second", "batch", "plain", "plain replay", "speculation with snapshots"]
    head += ["speculation by replay", "tokens a pass", "over plain", "over snapshots"]

    def speed(case: Mapping[str, Any], name: str) -> str:
        if name in case:
            return f"{case[name]['extra']['tokens_per_second']:,.0f}"
        left_out = {name for row in case.values() for name in row["extra"]["does_not_fit"]}
        return "does not fit" if name in left_out else ""

    def cells(name: str, batch: int, case: Mapping[str, Any]) -> list[str]:
        plain = next(iter(case.values()))["extra"]["baseline_tokens_per_second"]
        line = [name, str(batch), f"{plain:,.0f}", speed(case, "plain replay")]
        line += [speed(case, "snapshot speculation"), speed(case, "replay speculation")]
        found = case.get("replay speculation")
        if found is None:
            return [*line, "", "", ""]
        over = found["extra"].get("speedup_over_snapshots")
        passes = f"{found['extra']['tokens_per_pass']:.2f}"
        over = "" if over is None else f"{over:.2f}x"
        return [*line, passes, f"{found['speedup']:.2f}x", over]

    return markdown(head, (cells(*key, case) for key, case in speculative(record).items()))


def memory_table(record: Record) -> str:
    """MB that a sequence holds by scheme, and how many fit beside the weights, from `memory.py`."""
    head = ["MB of one sequence", "T", "one state", "snapshots", "replay", "of it ring"]
    head += ["fit: snapshots", "fit: replay", ""]
    found = {(row["model"], row["scheme"], row["tokens"]): row for row in record["rows"]}
    lines = []
    for (model, scheme, tokens), replay in found.items():
        if scheme != "replay" or tokens == 1:
            continue
        snapshots = found[model, "snapshots", tokens]
        held = [
            found[model, "conventional", 1]["held"]["state"],
            snapshots["held"]["state"],
            replay["held"]["state"] + replay["held"]["ring"],
        ]
        fit = [row["largest_batch"] for row in (snapshots, replay)]
        lines.append(
            [
                f"{model} ({FAMILIES[replay['family']]})",
                str(tokens),
                *(f"{one / 1e6:.1f}" for one in held),
                f"{replay['held']['ring'] / replay['held']['state']:.0%}",
                *(f"{one:,}" for one in fit),
                f"{fit[1] / fit[0]:.2f}x",
            ]
        )
    return markdown(head, lines)


def formats_table(record: Record) -> str:
    """What a layer holds and moves with states and copies in other formats, from `memory.py`."""
    grouped: dict[str, dict[str, str]] = {}
    for row in record["formats"]:
        name = f"{FAMILIES[row['family']]}, {row['case'].split(', ', 1)[1]}"
        grouped.setdefault(name, {})[row["formats"]] = f"{row['held']:.2f}, {row['moved']:.2f}"
    head = ["layer: held, moved", *next(iter(grouped.values()))]
    return markdown(head, ([name, *cells.values()] for name, cells in grouped.items()))


def largest_batch_table(record: Record) -> str:
    """The largest batch of each scheme that ran on the device, from `largest_batch.py`."""
    head = ["largest batch that ran", "T", "scheme", "MB of one sequence", "on the device"]
    head += ["batch", "over snapshots", "GB in all", "us of a pass"]
    ran = [row for row in record["rows"] if row["us"] is not None]
    snapshots = {
        (row["model"], row["tokens"]): row["batch"] for row in ran if row["scheme"] == "snapshots"
    }

    def cells(row: Mapping[str, Any]) -> list[str]:
        other = snapshots.get((row["model"], row["tokens"]))
        measured = row["measured"]
        return [
            f"{row['model']} ({FAMILIES[row['family']]})",
            str(row["tokens"]),
            row["scheme"],
            f"{row['counted'] / 1e6:.1f}",
            "" if measured is None else f"{measured / 1e6:.1f}",
            f"{row['batch']:,}",
            "" if other is None or row["scheme"] == "snapshots" else f"{row['batch'] / other:.2f}x",
            f"{row['program_bytes'] / 1e9:.0f}",
            f"{row['us']:,.0f}",
        ]

    return markdown(head, map(cells, ran))


TABLES: dict[str, Callable[[Record], str]] = {
    "kernels": kernel_table,
    "implementations": implementations_table,
    "window": window_table,
    "windows": windows_table,
    "sharded": sharded_table,
    "sharded-summary": sharded_summary,
    "peers": peers_table,
    "speculative": speculative_table,
    "memory": memory_table,
    "formats": formats_table,
    "largest-batch": largest_batch_table,
}
# What the pictures of a results file show, for those who cannot see them.
PICTURES = {
    "speculative-picture": "Over the batch: tokens per second of speculation by replay, in times "
    "of plain conventional decoding and of speculation with snapshots",
    "kernels-picture": "Over the batch: speed-up of a replay step over the conventional one, and "
    "the fraction of the read bandwidth that it reaches",
    "window-picture": "Time of a step at each fill of the window: rows that flush together, "
    "staggered rows, and conventional decoding",
}


def pictured(text: str) -> list[str]:
    """Results files whose pictures a document shows, those that there are."""
    found = {match["file"] for match in _SECTION.finditer(text) if match["kind"] in PICTURES}
    return sorted(file for file in found if (RESULTS / file).exists())


def fill_sections(text: str, results: Path, to_root: str = "") -> str:
    """Return the text of a document with its sections written anew from the results there are.

    Args:
      text: of the document.
      results: folder of the results; a section whose file is not there stays as it is.
      to_root: relative path from the document to the root of the repository, "" or "../".

    Raises:
      ValueError: a section of a kind that does not exist.
    """

    def written(match: re.Match[str]) -> str:
        kind, file = match["kind"], match["file"]
        if kind not in TABLES and kind not in PICTURES:
            known = sorted([*TABLES, *PICTURES])
            raise ValueError(f"a section must show one of {known}, found {kind!r}")
        if not (results / file).exists():
            return match[0]
        if kind in PICTURES:
            image = (IMAGES / file).with_suffix(".svg").as_posix()
            image = image.removeprefix("docs/") if to_root else image
            body = f"![{PICTURES[kind]}]({image})"
        else:
            body = TABLES[kind](load(results / file))
        return f"{match['begin']}\n{body}\n\n{match['end']}"

    return _SECTION.sub(written, text)
