"""Collectives of a compiled program: what devices send each other, and that no cache is in it."""

from __future__ import annotations

import collections
import math
import re
from typing import Any

import jax

_KINDS = (
    "all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|ragged-all-to-all"
    "|reduce-scatter"
)
_INSTRUCTION = re.compile(rf"= (\(.*?\)|\S+) ({_KINDS})(?:-start)?\(")
_SHAPE = re.compile(r"\b([a-z]+[0-9]+[a-z0-9]*|pred)\[([0-9,]*)\]")


class MovedCache(Exception):
    """A collective moves a checkpoint, a ring, a convolution history or a KV cache."""


def collectives(text: str) -> dict[str, int]:
    """Count the collectives of a compiled HLO text.

    Returns:
      {"all-reduce bf16[64,1,2560]": 5, ...}: kind and shapes of the results on one device, and how
      often the program has it. Those of a loop's body are counted once.
    """
    found = collections.Counter(
        " ".join([kind, *(f"{dtype}[{dims}]" for dtype, dims in _SHAPE.findall(result))])
        for result, kind in _INSTRUCTION.findall(text)
    )
    return dict(sorted(found.items()))


def refuse_caches(moved: dict[str, int], cache: Any, devices: int) -> None:
    """Raise `MovedCache` where a collective has the size of a cached array, or of a part of one.

    Sizes are compared, not shapes, so that a reshaped or transposed array is found, too. A part is
    what one of up to `devices` devices holds. Pointers and progress, [B], are not looked for.

    Args:
      moved: from `collectives`.
      cache: a pytree of arrays or their shapes, whole ones.
      devices: of the mesh.
    """
    sizes: dict[int, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(cache):
        if leaf.ndim < 3:
            continue
        for parts in range(1, devices + 1):
            if leaf.size % parts == 0:
                name = f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)}"
                sizes[leaf.size // parts] = f"{name} / {parts}"
    for collective in moved:
        for _, dims in _SHAPE.findall(collective):
            size = math.prod(int(n) for n in dims.split(",") if n)
            if size in sizes:
                raise MovedCache(f"{collective} has the size of the cached {sizes[size]}")
