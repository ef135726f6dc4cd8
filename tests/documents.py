"""The Python blocks of the project's documents: found here, run by the tests of each document."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

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


def run_blocks(blocks: Iterable[Block]) -> None:
    """Execute blocks one after the other in one module, and the `test_` functions they define."""
    module = types.ModuleType("blocks")
    names = vars(module)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        for block in blocks:
            before = dict(names)
            # Leading newlines make tracebacks point into the document.
            source = "\n" * (block.line - 1) + block.source
            exec(compile(source, block.path, "exec"), names)
            for name, value in list(names.items()):
                if name.startswith("test_") and before.get(name) is not value:
                    value()
    finally:
        del sys.modules[module.__name__]


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
