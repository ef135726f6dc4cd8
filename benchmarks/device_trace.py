"""Where a program's time goes on its GPUs: kernels of a profiler trace by kind.

The profiler turns CUDA graphs off, so a traced run is slower than a timed one; its shares count.
"""

from __future__ import annotations

import collections
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

# By parts of kernel names and of the HLO instruction that launched them; the first match counts.
_KINDS = (
    (
        "collective",
        r"nccl|all[-_]?reduce|all[-_]?gather|reduce[-_]?scatter|all[-_]?to[-_]?all"
        r"|collective|multimem",
    ),
    ("recurrence", r"replay|conventional|mosaic"),
    ("matmul", r"gemm|gemv|cutlass|cublas|nvjet|xmma|\bdot"),
    ("copy", r"memcpy|memset|copy"),
)


class Kernel(NamedTuple):
    """One launch: its name with what launched it, start and end in nanoseconds."""

    name: str
    start: float
    end: float


def kind(name: str) -> str:
    """Kind of a kernel: "collective", "recurrence", "matmul", "copy" or "other"."""
    for label, pattern in _KINDS:
        if re.search(pattern, name, re.IGNORECASE):
            return label
    return "other"


def covered(kernels: Iterable[Kernel]) -> float:
    """Nanoseconds in which at least one of the kernels runs."""
    total, until = 0.0, float("-inf")
    for _, start, end in sorted(kernels, key=lambda k: k.start):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def shares(devices: Sequence[Sequence[Kernel]]) -> dict[str, Any]:
    """Shares of the time from the first launch to the last end, means over the devices.

    Returns:
      "collective_share": a collective runs, waiting for the other devices included;
      "exposed_collective_share": nothing else runs meanwhile; "idle_share": no kernel runs;
      "kernel_shares": sums of the durations by kind; "longest_kernels": the names that take most,
      with their share.
    """
    rows, longest = [], collections.Counter[str]()
    for kernels in devices:
        span = max(k.end for k in kernels) - min(k.start for k in kernels)
        moving = [k for k in kernels if kind(k.name) == "collective"]
        rest = [k for k in kernels if kind(k.name) != "collective"]
        busy = covered(kernels)
        by_kind = collections.Counter[str]()
        for k in kernels:
            by_kind[kind(k.name)] += (k.end - k.start) / span
            # One name for all layers: instructions are numbered.
            name = re.sub(r"\.\d+\b", "", k.name)
            longest[name] += (k.end - k.start) / span / len(devices)
        rows.append((covered(moving), busy - covered(rest), span - busy, span, by_kind))
    count = len(rows)

    def mean(index: int) -> float:
        return sum(row[index] / row[3] for row in rows) / count

    kinds = sorted({name for row in rows for name in row[4]})
    return {
        "collective_share": mean(0),
        "exposed_collective_share": mean(1),
        "idle_share": mean(2),
        "kernel_shares": {name: sum(row[4][name] for row in rows) / count for name in kinds},
        "longest_kernels": dict(longest.most_common(8)),
    }


def kernels(profile: Any) -> list[list[Kernel]]:
    """Kernels of each GPU that a `jax.profiler.ProfileData` has; empty where it has none."""
    with warnings.catch_warnings():
        # The profiler's own types warn when they are first seen; as an error that would abort.
        warnings.simplefilter("ignore", DeprecationWarning)
        return list(_kernels(profile))


def _kernels(profile: Any) -> Iterator[list[Kernel]]:
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        # A plane may also have lines of steps and modules, which cover their kernels.
        found = [
            Kernel(_name(event), event.start_ns, event.start_ns + event.duration_ns)
            for line in plane.lines
            if "stream" in line.name.lower()
            for event in line.events
        ]
        if found:
            yield found


def trace(run: Callable[[], Any]) -> dict[str, Any] | None:
    """Run under the profiler and return the `shares`; None where no GPU was seen."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        devices = []
        for path in sorted(Path(folder).rglob("*.xplane.pb")):
            devices += kernels(jax.profiler.ProfileData.from_file(str(path)))
    return shares(devices) if devices else None


def _name(event: Any) -> str:
    launched = [str(value) for key, value in event.stats if key == "hlo_op"]
    return " ".join([event.name, *launched])
