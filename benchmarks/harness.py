"""What the benchmarks share: interleaved timing, medians and spread, a correctness gate, JSON rows.

All programs compile side by side before the first is timed. A benchmark makes a `Contender` of its
baseline and of each implementation, checks the results of one untimed run of each, times all of
them in turns, and saves a `Row` for each.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.stages
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

RESULTS = Path(__file__).parent / "results"

K = TypeVar("K")
V = TypeVar("V")

# A program that compiles in another thread; `result()` waits for it.
Program = concurrent.futures.Future[jax.stages.Compiled]


class Compiler:
    """Compiles programs side by side, all before the first is timed: as a context it waits."""

    def __init__(self, threads: int | None = None) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(threads or os.cpu_count())

    def __call__(self, jitted: Any, *args: Any) -> Program:
        """Lower a jitted function for arguments (arrays or shapes), and begin to compile it."""
        return self.submit(jitted.lower(*args))

    def submit(self, lowered: Any, finish: Callable[[Any], Any] = lambda compiled: compiled) -> Any:
        """Begin to compile; a future of what `finish` makes of the compiled program."""
        return self._pool.submit(lambda: finish(lowered.compile()))

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


@dataclasses.dataclass(frozen=True)
class Contender:
    """Something to time.

    Attributes:
      run: takes what `prepare` returned, and may donate it; returns arrays.
      prepare: makes the arguments of one run; not timed.
      calls: operations in one run, whose time is divided by it.
    """

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None
    calls: int = 1

    def once(self) -> Any:
        """Run untimed: compiles, and gives the result to check."""
        return jax.block_until_ready(self.run(self.prepare()))

    def seconds(self) -> float:
        """Time one run, from ready arguments to ready results."""
        arguments = jax.block_until_ready(self.prepare())
        begin = time.perf_counter()
        jax.block_until_ready(self.run(arguments))
        return (time.perf_counter() - begin) / self.calls


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median, and the first and third quartile."""

    us: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summarise timings in seconds."""
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(1e6 * statistics.median(seconds), 1e6 * low, 1e6 * high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One measured case of one implementation.

    Attributes:
      case: what was run.
      family: "mamba2", "gated_delta_net" or "kda".
      batch, tokens: rows, and tokens of each row that one call handles.
      read_dtype: format of the read copy, None without one.
      implementation: what was timed against the baseline.
      us, us_spread: median microseconds of a call, and its quartiles.
      baseline_us, baseline_us_spread: the same of the baseline, timed in turns with it.
      speedup: baseline_us / us.
      fraction_of_read_bandwidth: bytes that the call has to read, over its time and the device's
        measured read bandwidth; None where it was not measured.
      rel_err: of the results, against the reference of the correctness gate.
      extra: what the benchmark adds.
    """

    case: str
    family: str
    batch: int
    tokens: int
    read_dtype: str | None
    implementation: str
    us: float
    us_spread: tuple[float, float]
    baseline_us: float
    baseline_us_spread: tuple[float, float]
    speedup: float
    fraction_of_read_bandwidth: float | None
    rel_err: float
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class WrongResult(Exception):
    """An implementation's results differ from the reference: no time of it is worth reporting."""


def relative_error(found: Any, expected: Any) -> float:
    """Norm of the difference over the norm of the reference, the worst leaf of two pytrees."""
    errors = [0.0]
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for one, two in pairs:
        one, two = np.asarray(one, np.float64), np.asarray(two, np.float64)
        if one.shape != two.shape:
            raise WrongResult(f"shape {one.shape}, expected {two.shape}")
        scale = np.linalg.norm(two)
        gap = np.linalg.norm(one - two)
        errors.append(float(gap / scale) if scale else (0.0 if gap == 0 else float("inf")))
    # max() would pass over a NaN that does not come first.
    return float(np.max(errors))


def check(name: str, found: Any, expected: Any, *, limit: float) -> float:
    """Return the relative error of a result.

    Raises:
      WrongResult: it is above `limit`, or not a number.
    """
    error = relative_error(found, expected)
    if not error <= limit:
        raise WrongResult(f"{name}: relative error {error:.2e}, allowed {limit:.0e}")
    return error


def time_in_turns(
    contenders: Mapping[str, Contender], *, repeats: int, tick: Callable[[], None] = lambda: None
) -> dict[str, Timing]:
    """Time contenders one after the other, `repeats` times, in alternating order.

    So clock changes and other load on the machine fall on all of them alike.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for repeat in range(repeats):
        for name in names if repeat % 2 == 0 else reversed(names):
            seconds[name].append(contenders[name].seconds())
            tick()
    return {name: Timing.of(times) for name, times in seconds.items()}


def row(timing: Timing, baseline: Timing, **facts: Any) -> Row:
    """Make the row of one implementation."""
    return Row(
        us=timing.us,
        us_spread=(timing.low, timing.high),
        baseline_us=baseline.us,
        baseline_us_spread=(baseline.low, baseline.high),
        speedup=baseline.us / timing.us,
        **facts,
    )


def count(text: str) -> int:
    """An option that counts something: an integer of at least 1."""
    try:
        found = int(text)
    except ValueError:
        found = 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, found {text!r}")
    return found


def check_tokens(parser: argparse.ArgumentParser, tokens: Sequence[int], window: int) -> None:
    """Refuse tokens of a pass that hold no draft, or do not fit in the window."""
    if min(tokens) < 2:
        parser.error(f"--tokens must be at least 2, one draft, found {min(tokens)}")
    if max(tokens) > window:
        parser.error(f"--tokens must fit in the window of {window}, found {max(tokens)}")


def device_name() -> str:
    """Name of the device for file names; a CPU says its architecture and cores."""
    device = jax.devices()[0]
    name = device.device_kind
    if device.platform == "cpu":
        name = f"cpu {platform.machine()} {len(os.sched_getaffinity(0))} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def save(
    benchmark: str,
    rows: Sequence[Row],
    options: Mapping[str, Any],
    folder: Path = RESULTS,
    *,
    add: bool = False,
) -> Path:
    """Write the rows to <folder>/<benchmark>-<device>.json, in one move, and return the path.

    With `add`, rows of other cases that the file already holds stay in it.
    """
    device = jax.devices()[0]
    path = folder / f"{benchmark}-{device_name()}.json"
    found = [dataclasses.asdict(one) for one in rows]
    if add and path.exists():
        again = {_case(one) for one in found}
        kept = json.loads(path.read_text())["rows"]
        found = [one for one in kept if _case(one) not in again] + found
    record = {
        "benchmark": benchmark,
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "options": dict(options),
        "rows": found,
    }
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    unfinished.replace(path)
    return path


def _case(row: Mapping[str, Any]) -> tuple[Any, ...]:
    names = "case", "family", "batch", "tokens", "read_dtype", "implementation"
    return tuple(row[name] for name in names)


def progress(console: Console) -> Progress:
    """Return a bar for the runs of a benchmark."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True)


def table(title: str, rows: Sequence[Row]) -> Table:
    """Show rows, with half the distance of the quartiles as spread."""
    cases = {one.case for one in rows}
    if len(cases) == 1:
        title = f"{title}: {cases.pop()}"
    shown = Table(title=title, title_justify="left")
    for name in (*(["case"] if cases else []), "family", "implementation"):
        shown.add_column(name)
    for name in ("batch", "us", "baseline us", "speedup", "rel. error"):
        shown.add_column(name, justify="right")

    def spread(us: float, quartiles: tuple[float, float]) -> str:
        return f"{us:,.1f} ±{(quartiles[1] - quartiles[0]) / 2 / us:.0%}"

    for one in rows:
        shown.add_row(
            *([one.case] if cases else []),
            one.family,
            one.implementation,
            str(one.batch),
            spread(one.us, one.us_spread),
            spread(one.baseline_us, one.baseline_us_spread),
            f"{one.speedup:.2f}",
            f"{one.rel_err:.0e}",
        )
    return shown


def compile_all(
    lowerings: Mapping[K, Callable[[], Any]],
    threads: int,
    finish: Callable[[K, Any], V] = lambda _, compiled: compiled,
) -> dict[K, V | jax.errors.JaxRuntimeError]:
    """Lower programs one after the other, which is Python's, and compile them side by side.

    So that nothing is traced or compiled any more once the first of them is timed.

    Args:
      lowerings: calls that return a `jax.stages.Lowered`.
      threads: programs that are compiled side by side.
      finish: takes a key and the compiled program, in the same thread; returns what is kept of it.

    Returns:
      For each key what `finish` returned, or the error where there is no memory to compile it.
    """

    def found(job: concurrent.futures.Future[V]) -> V | jax.errors.JaxRuntimeError:
        try:
            return job.result()
        except jax.errors.JaxRuntimeError as error:
            if not does_not_fit(error):
                raise
            return error

    with Compiler(threads) as ahead:
        jobs = {
            key: ahead.submit(lower(), functools.partial(finish, key))
            for key, lower in lowerings.items()
        }
    return {key: found(job) for key, job in jobs.items()}


def does_not_fit(error: jax.errors.JaxRuntimeError) -> bool:
    """Whether the device's memory was too small."""
    return "RESOURCE_EXHAUSTED" in str(error)


def random_key(seed: Any) -> jax.Array:
    """A key of the Philox generator.

    Of JAX's default one, fused into normal draws, a GPU's compiler makes minutes of work.
    """
    return jax.random.key(seed, impl="rbg")


def use_all_memory() -> None:
    """Let JAX take nearly all of a GPU's memory, unless the environment says how much.

    To be called before the first device is used. What is left is for other libraries.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")


def program_bytes(compiled: Any) -> int:
    """Bytes of a compiled program's arguments, results and temporaries."""
    stats = compiled.memory_analysis()
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return int(held + stats.temp_size_in_bytes)


@dataclasses.dataclass(frozen=True)
class Found:
    """What one step of a group of cases has to say.

    Attributes:
      rows: measured.
      words: lines to print.
      refused: whether a case is not reported.
    """

    rows: Sequence[Row] = ()
    words: Sequence[str] = ()
    refused: bool = False


# Steps of a group, by its name and the options: the first compiles, each other measures.
Steps = Callable[[str, Any], Iterator[Found]]


def run_groups(
    names: Sequence[str], steps: Steps, args: Any, console: Console
) -> tuple[list[Row], bool]:
    """Run groups of cases, print what they say, and save their rows step by step.

    Args:
      names: of the groups.
      steps: a function of a module.
      args: options of the benchmark. With `side_by_side` each group has a process: all compile at
        once, and measure one after the other when the last one has compiled. `name`, `out` and
        `add` are as `save` takes them.
      console: to print to.

    Returns:
      The rows, and whether a case was refused or a process failed.
    """
    options = {key: value for key, value in vars(args).items() if key not in ("out", "add")}
    rows: list[Row] = []
    refused = False
    with progress(console) as bar:
        task = bar.add_task(f"compile {', '.join(names)}", total=None)
        for found in (_side_by_side if args.side_by_side else _one_by_one)(names, steps, args):
            rows += found.rows
            refused |= found.refused
            for line in found.words:
                console.print(line, highlight=False, soft_wrap=True)
                bar.update(task, description=line, advance=1)
            if rows:  # a run that is cut short leaves what it measured
                path = save(args.name, rows, options, args.out, add=args.add)
    if rows:
        console.print(f"written to {path}")
    return rows, refused


def _one_by_one(names: Sequence[str], steps: Steps, args: Any) -> Iterator[Found]:
    for name in names:
        yield from steps(name, args)


def _side_by_side(names: Sequence[str], steps: Steps, args: Any) -> Iterator[Found]:
    # Each takes what it needs, and gives it back when it ends.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    context = multiprocessing.get_context("spawn")
    workers = []
    for name in names:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, steps, name, args), daemon=True)
        process.start()
        theirs.close()
        workers.append((name, ours, process))
    failed = []
    for name, ours, _ in workers:
        try:
            yield ours.recv()
        except EOFError:
            failed.append(name)
    for name, ours, process in workers:
        try:
            if name not in failed:
                ours.send("measure")
                while (found := ours.recv()) is not None:
                    yield found
        except (EOFError, BrokenPipeError):
            failed.append(name)
        process.join()
    for name in failed:
        yield Found(words=[f"{name}: its process has failed"], refused=True)


def _serve(connection: Any, steps: Steps, name: str, args: Any) -> None:
    """Send the steps of a group, all but the first of them when it is asked for."""
    work = steps(name, args)
    connection.send(next(work))
    connection.recv()
    for found in work:
        connection.send(found)
    connection.send(None)
