"""The Python blocks of the project's documents: found here, run by the tests of each document."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]


class Block(NamedTuple):
    """One fenced block of Python: its document, line and heading, and its source."""

    path: Path
    line: int
    heading: str
    source: str

    @property
    def name(self) -> str:
        return self.heading.lower().replace(" ", "-")

    def run(self, namespace: dict[str, Any] | None = None) -> dict[str, Any]:
        """Execute the block, then the `test_` functions that it defines; return its names."""
        namespace = {"__name__": "block"} if namespace is None else namespace
        before = dict(namespace)
        # Leading newlines make tracebacks point into the document.
        exec(compile("\n" * (self.line - 1) + self.source, self.path, "exec"), namespace)
        for name, value in list(namespace.items()):
            if name.startswith("test_") and before.get(name) is not value:
                value()
        return namespace


def python_blocks(path: Path) -> list[Block]:
    text = path.read_text()
    heading = path.name
    blocks = []
    for match in re.finditer(r"^#+ ([^\n]+)$|^```python\n(.*?)^```$", text, re.M | re.S):
        if match[1]:
            heading = match[1]
        else:
            line = text.count("\n", 0, match.start(2)) + 1
            blocks.append(Block(path, line, heading, match[2]))
    return blocks
