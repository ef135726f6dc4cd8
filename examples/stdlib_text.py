"""The text of the examples: the source of the Python standard library as it is installed.

Nothing is downloaded. Tokens are bytes (vocabulary 256). Files are split into training and held-out
text by a hash of the module name, so a module falls on the same side on every Python version and
machine. Both sides read as one stream of documents, each opened by a NUL byte, which source text
never holds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

VOCAB_SIZE = 256
DOCUMENT_START = 0
HELD_OUT_PERCENT = 8

# Installed packages and optional parts that many distributions leave out (so that most machines see
# the same text), and generated tables that are no prose and no program.
EXCLUDED_TOP = frozenset(
    {"site-packages", "dist-packages", "test", "idlelib", "lib2to3", "distutils", "ensurepip"}
    | {"turtledemo", "pydoc_data", "encodings", "__phello__"}
)
EXCLUDED_ANYWHERE = frozenset({"test", "tests", "__pycache__"})


class Document(NamedTuple):
    """One source file: its path under the standard library and its bytes."""

    name: str
    text: bytes


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The two sides of the text, each in the order of the file names; ``name`` says what it is."""

    name: str
    train: tuple[Document, ...]
    held_out: tuple[Document, ...]

    def describe(self) -> str:
        """Say in one line what was read."""
        sides = (
            f"{len(side)} {label} files, {_megabytes(side):.2f} MB"
            for label, side in (("training", self.train), ("held-out", self.held_out))
        )
        return f"{self.name}: " + "; ".join(sides)


def _megabytes(documents: Sequence[Document]) -> float:
    return sum(len(document.text) for document in documents) / 1e6


def module_name(path: str) -> str:
    """Dotted name of a file given relative to the library: a package counts as its ``__init__``."""
    parts = list(PurePosixPath(path).with_suffix("").parts)
    if len(parts) > 1 and parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def is_held_out(path: str, percent: int = HELD_OUT_PERCENT) -> bool:
    """Whether a file is held out; depends on nothing but its module name."""
    digest = hashlib.blake2b(module_name(path).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 100 < percent


def _is_included(path: PurePosixPath) -> bool:
    return (
        path.parts[0] not in EXCLUDED_TOP
        and not path.parts[0].startswith(("config-", "_sysconfigdata", "_sysconfig_vars"))
        and EXCLUDED_ANYWHERE.isdisjoint(path.parts)
    )


def read_documents(root: Path) -> Iterator[Document]:
    """Yield the UTF-8 source files under ``root``, ordered by name; others are left out."""
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        if not _is_included(PurePosixPath(name)):
            continue
        text = path.read_bytes().replace(b"\r\n", b"\n")
        try:
            text.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text and DOCUMENT_START not in text:
            yield Document(name, text)


def load_corpus(root: str | Path | None = None) -> Corpus:
    """Read the standard library of this interpreter, or the source tree at ``root``.

    Raises:
      FileNotFoundError: one side of the split is empty, for example because the library is
        installed without its source.
    """
    folder = Path(sysconfig.get_path("stdlib") if root is None else root)
    sides: tuple[list[Document], list[Document]] = ([], [])
    for document in read_documents(folder):
        sides[is_held_out(document.name)].append(document)
    if not all(sides):
        raise FileNotFoundError(
            f"expected training and held-out source files under {folder}, "
            f"found {len(sides[0])} and {len(sides[1])}"
        )
    name = f"Python {platform.python_version()} standard library" if root is None else str(root)
    return Corpus(name=name, train=tuple(sides[0]), held_out=tuple(sides[1]))


def as_stream(documents: Sequence[Document]) -> np.ndarray:
    """Concatenate documents, each after a ``DOCUMENT_START``: uint8 [total]."""
    separator = bytes([DOCUMENT_START])
    joined = b"".join(separator + document.text for document in documents)
    return np.frombuffer(joined, dtype=np.uint8)


def choose_documents(documents: Sequence[Document], max_bytes: int) -> tuple[Document, ...]:
    """Take whole documents up to ``max_bytes`` in all, evenly from the list; at least one."""
    order = sorted(documents, key=lambda document: hashlib.blake2b(document.name.encode()).digest())
    chosen: set[str] = set()
    used = 0
    for document in order:
        if used + len(document.text) <= max_bytes:
            chosen.add(document.name)
            used += len(document.text)
    chosen = chosen or {min(documents, key=lambda document: len(document.text)).name}
    return tuple(document for document in documents if document.name in chosen)


class Windows(NamedTuple):
    """Windows over held-out text.

    tokens: uint8 [count, length + 1]; the last ``length`` are predicted from those before them.
    scored: bool [count, length]; over all windows every byte of the text is scored once.
    """

    tokens: np.ndarray
    scored: np.ndarray


def held_out_windows(documents: Sequence[Document], length: int) -> Windows:
    """Cut documents into windows that overlap by half.

    A window begins anew in each document. A byte is predicted from its whole document so far, or
    from at least ``length // 2`` bytes of it.
    """
    if length < 2:
        raise ValueError(f"length must be at least 2, got {length}")
    half = length // 2
    tokens, scored = [], []
    for document in documents:
        data = np.frombuffer(bytes([DOCUMENT_START]) + document.text, dtype=np.uint8)
        targets = len(data) - 1
        done = 0
        start = 0
        while done < targets:
            end = min(start + length, targets)
            row = np.zeros(length + 1, np.uint8)
            row[: end - start + 1] = data[start : end + 1]
            mask = np.zeros(length, bool)
            mask[done - start : end - start] = True
            tokens.append(row)
            scored.append(mask)
            done = end
            start = end - half
    return Windows(np.stack(tokens), np.stack(scored))
