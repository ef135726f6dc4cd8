"""Two baselines for bits per byte on held-out text: gzip, and an n-gram model over bytes.

gzip compresses each held-out file alone, so it knows nothing but that file. The n-gram model learns
from the same training files as the neural models and predicts every byte of a held-out file from
the bytes before it in that file.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from stdlib_text import DOCUMENT_START, VOCAB_SIZE, Document, as_stream

MAX_ORDER = 8  # bytes that fit a packed 64-bit key


def gzip_bits_per_byte(documents: Sequence[Document]) -> float:
    """Size of ``gzip -9`` of each file, header and checksum included, over the files' size."""
    packed = sum(len(gzip.compress(document.text, 9, mtime=0)) for document in documents)
    return 8.0 * packed / sum(len(document.text) for document in documents)


class _Level(NamedTuple):
    """Statistics of the n-grams of one length, sorted by packed key."""

    grams: np.ndarray  # uint64 [n], the last byte lowest
    discounted: np.ndarray  # float64 [n], count less its discount
    contexts: np.ndarray  # uint64 [m]
    totals: np.ndarray  # float64 [m], sum of the counts behind a context
    backoff: np.ndarray  # float64 [m], weight of the next shorter context


def pack(stream: np.ndarray, length: int) -> np.ndarray:
    """Pack each position's last ``length`` bytes into one key: uint8 [T] -> uint64 [T].

    Bytes before the position's own document read as ``DOCUMENT_START``.
    """
    index = np.arange(len(stream))
    age = index - np.maximum.accumulate(np.where(stream == DOCUMENT_START, index, 0))
    keys = np.zeros(stream.shape, np.uint64)
    for back in range(length):
        byte = stream[np.maximum(index - back, 0)].astype(np.uint64)
        keys |= np.where(back <= age, byte, DOCUMENT_START).astype(np.uint64) << np.uint64(8 * back)
    return keys


def _discounts(counts: np.ndarray) -> np.ndarray:
    """Discounts of modified Kneser-Ney for counts of 1, 2 and 3 or more, each per n-gram."""
    once, twice, thrice, four = (int(np.sum(counts == c)) for c in (1, 2, 3, 4))
    if not (once and twice and thrice):
        return np.full(counts.shape, 0.5)
    base = once / (once + 2 * twice)
    table = np.clip(
        [1 - 2 * base * twice / once, 2 - 3 * base * thrice / twice, 3 - 4 * base * four / thrice],
        0.1,
        [0.95, 1.9, 2.9],
    )
    return table[np.minimum(counts, 3) - 1]


def _level(grams: np.ndarray, counts: np.ndarray) -> _Level:
    discounts = _discounts(counts)
    contexts, first = np.unique(grams >> np.uint64(8), return_index=True)
    totals = np.add.reduceat(counts, first).astype(np.float64)
    return _Level(
        grams=grams,
        discounted=counts - discounts,
        contexts=contexts,
        totals=totals,
        backoff=np.add.reduceat(discounts, first) / totals,
    )


def _find(keys: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Index of each wanted key in sorted ``keys``, and whether it is there."""
    index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return index, keys[index] == wanted


class NGramModel:
    """Interpolated modified Kneser-Ney model over bytes.

    With h' the context h without its oldest byte,
    P_n(c | h) = (count(hc) - discount) / count(h) + backoff(h) P_{n-1}(c | h'), down to the uniform
    distribution. Orders below the highest count the distinct bytes seen to the left of an n-gram
    instead of its occurrences (Chen and Goodman, 1999).

    Args:
      documents: training text.
      order: length of an n-gram: the predicted byte and ``order - 1`` bytes before it, 1 to 8.
    """

    def __init__(self, documents: Sequence[Document], *, order: int = MAX_ORDER):
        if not 1 <= order <= MAX_ORDER:
            raise ValueError(f"order must be 1 to {MAX_ORDER}, got {order}")
        self.order = order
        stream = as_stream(documents)
        grams, counts = np.unique(pack(stream, order)[stream != DOCUMENT_START], return_counts=True)
        levels = [_level(grams, counts)]
        for length in range(order - 1, 0, -1):
            mask = np.uint64((1 << (8 * length)) - 1)
            grams, counts = np.unique(grams & mask, return_counts=True)
            levels.append(_level(grams, counts))
        self._levels = levels[::-1]

    def probabilities(self, keys: np.ndarray) -> np.ndarray:
        """Probability of the last byte of each packed key: uint64 [T] -> float64 [T]."""
        result = np.full(keys.shape, 1.0 / VOCAB_SIZE)
        for length, level in enumerate(self._levels, start=1):
            wanted = keys & np.uint64((1 << (8 * length)) - 1)
            context, known = _find(level.contexts, wanted >> np.uint64(8))
            gram, seen = _find(level.grams, wanted)
            higher = np.where(seen, level.discounted[gram], 0.0) / level.totals[context]
            result = np.where(known, higher + level.backoff[context] * result, result)
        return result

    def bits_per_byte(self, documents: Sequence[Document]) -> float:
        """Mean negative log2 probability of the bytes of the documents."""
        stream = as_stream(documents)
        keys = pack(stream, self.order)[stream != DOCUMENT_START]
        return float(-np.mean(np.log2(self.probabilities(keys))))
