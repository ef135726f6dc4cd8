"""How a problem is cut into programs, and which problems have a kernel."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels.problem import BLOCK, TILE, Config, Mode, Problem
from pallas_kernels.read_copy import FORMATS
from pallas_kernels.scratch import shared_bytes

# Programs below which a device is not filled: two for each of about 132 multiprocessors.
FILLED = 256
# Shared memory with which two programs fit on a multiprocessor of Hopper or Blackwell, and one.
_HALF, _WHOLE = 113 * 1024, 226 * 1024
# State rows of a program from which wider ones do not gain, by the bytes of what steps read.
_WIDE = {4: 256, 2: 256, 1: 512}
# Tiles of a read copy in flight, by the bytes of its elements: two programs fill a multiprocessor.
_COPIES = {2: 4, 1: 8}


def configs(problem: Problem) -> list[Config]:
    """All ways to cut a problem, widest programs first, with the stages to have where they fit."""
    p = problem
    found = []
    for heads in range(p.heads_per_group, 0, -1):
        if p.heads_per_group % heads or (heads > 1 and p.channel) or heads > 16:
            continue
        splits = [p.value_dim]
        if heads == 1:
            splits += [n for n in (128, 64) if n < p.value_dim and p.value_dim % n == 0]
        for rows in splits:
            if heads * rows % TILE == 0 and heads * rows <= 512:
                # With one tile in flight three programs fit on a multiprocessor: channel decay,
                # which works longer on each, gains from that (177 us against 185, KDA on an H200).
                tiles = heads * rows // TILE
                stages, copies = 1 if p.channel else min(2, tiles), 0
                if p.read_dtype is not None:
                    # Most steps have tiles of the copy in flight, in the place of the state's.
                    stages, copies = 1, min(_COPIES[p.read_bytes], tiles)
                found.append(Config(heads, rows, stages, copies))
    return found


def choose(problem: Problem, mode: Mode) -> Config | None:
    """The cut to use: fixed by the shapes alone, so that a result never depends on timing."""

    def fitting(limit: int) -> list[Config]:
        cuts = []
        for config in configs(problem):
            flying = "stages" if problem.read_dtype is None else "copies"
            for tiles in range(getattr(config, flying), 0, -1):
                cut = dataclasses.replace(config, **{flying: tiles})
                if shared_bytes(problem, cut, mode) <= limit:
                    cuts.append(cut)
                    break
        return cuts

    pairs = fitting(_HALF) or fitting(_WHOLE)[-1:]
    if not pairs:
        return None

    def programs(config: Config) -> int:
        return problem.batch * problem.num_heads * problem.value_dim // config.num_rows

    wide = [c for c in pairs if c.num_rows <= _WIDE[problem.read_bytes]] or pairs
    for config in wide:
        if programs(config) >= FILLED:
            return config
    return wide[-1]


def why_not(problem: Problem, mode: Mode) -> str | None:
    """Why there is no kernel for a problem; None where there is one."""
    p = problem
    floats = (jnp.bfloat16, jnp.float16, jnp.float32)
    if p.key_dtype not in floats or p.value_dtype not in floats:
        return f"inputs must be bf16, fp16 or fp32, found {p.key_dtype} and {p.value_dtype}"
    if p.read_dtype is not None and p.read_dtype not in FORMATS:
        names = ", ".join(x.name for x in FORMATS)
        return f"a read copy must be in one of {names}, found {p.read_dtype}"
    if p.key_dim not in range(32, 257, 16):
        return f"key_dim must be a multiple of 16 from 32 to 256, found {p.key_dim}"
    if p.value_dim % 16 or p.value_dim > 256:
        return f"value_dim must be a multiple of 16 up to 256, found {p.value_dim}"
    if p.num_tokens > BLOCK:
        return f"at most {BLOCK} tokens at once, found {p.num_tokens}"
    if p.window > 64:
        return f"window must be at most 64, found {p.window}"
    if not configs(p):
        return (
            f"heads of a group must fill tiles of {TILE} state rows, found "
            f"{p.heads_per_group} heads of {p.value_dim}"
            + (", one at a time with per-channel decay" if p.channel else "")
        )
    if choose(p, mode) is None:
        least = min(shared_bytes(p, c, mode) for c in configs(p))
        return f"shared memory of a program would be {least} bytes, above {_WHOLE}"
    return None
