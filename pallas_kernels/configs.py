"""How a problem is cut into programs, and which problems have a kernel."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels.problem import BLOCK, TILE, Config, Mode, Problem, programs_per_row
from pallas_kernels.read_copy import FORMATS
from pallas_kernels.scratch import shared_bytes

# Programs below which a device is not filled: two for each of about 132 multiprocessors.
FILLED = 256
# Shared memory of a multiprocessor of Hopper or Blackwell, and what of it a program takes unasked.
_SHARED, _TAKEN = 228 * 1024, 1024
# Most that one may have.
MOST_SHARED = _SHARED - _TAKEN
# State rows of a program from which wider ones do not gain, by the bytes of what steps read.
_WIDE = {4: 256, 2: 256, 1: 512}
# Most tiles of a read copy in flight, by the bytes of its elements.
_COPIES = {2: 4, 1: 8}


def configs(problem: Problem) -> list[Config]:
    """All ways to cut a problem, widest programs first, with the most stages that may pay."""
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
                tiles = heads * rows // TILE
                if p.read_dtype is None:
                    found.append(Config(heads, rows, min(2, tiles)))
                else:  # most steps have tiles of the copy in flight, in the place of the state's
                    found.append(Config(heads, rows, 1, min(_COPIES[p.read_bytes], tiles)))
    return found


def choose(problem: Problem, mode: Mode) -> Config | None:
    """The cut to use: fixed by the shapes alone, so that a result never depends on timing."""
    config = _choose(problem, mode)
    return None if config is None else completed(problem, config)


def completed(problem: Problem, config: Config) -> Config:
    """The cut with what follows from it and the problem.

    Raises:
      ValueError: more than one state tile in flight beside a copy, whose new tile takes its place.
    """
    if problem.read_dtype is not None and config.stages > 1:
        raise ValueError(f"stages must be 1 beside a read copy, found {config.stages}")
    # Parts of a tile fit in the registers of more programs; where few run, they only take longer.
    n = problem.key_dim
    filled = problem.batch * programs_per_row(problem, config) >= FILLED
    parts = [64, 32] if n % 32 == 0 else [48]  # a swizzled tile is cut where its swizzle ends
    parts = [width for width in parts if n % width == 0 and (n > 128 or (filled and width == 64))]
    return dataclasses.replace(config, channels=[*parts, n][0])


def _choose(problem: Problem, mode: Mode) -> Config | None:
    def fits(config: Config) -> int:
        """Programs on a multiprocessor, by their shared memory."""
        return _SHARED // (_shared_bytes(problem, config, mode) + _TAKEN)

    def programs(config: Config) -> int:
        return problem.batch * programs_per_row(problem, config)

    # Programs that registers allow: more only beside a read copy, unless a solve is one branch.
    solves = problem.solves_again and mode.fold and mode.decides
    most = 3 if problem.read_dtype is None or solves else 4

    # All programs at once are better than some in a second turn, and two tiles in flight better
    # than one then (16 rows on an H200: Mamba-2 21.6 us against 24.1, with eight tokens 36.6
    # against 42.2; Gated DeltaNet with four 18.1 against 19.0), but not 512 state rows in a program
    # with a few tokens (30.7 against 30.2).
    few = 1 < problem.num_tokens < 8
    if problem.num_tokens and problem.read_dtype is None:
        for stages in (2, 1) if problem.num_tokens > 1 else (2,):
            for config in configs(problem):
                cut = dataclasses.replace(config, stages=min(stages, config.stages))
                places = FILLED * min(most, fits(cut)) // 2
                at_once = fits(cut) > 1 and FILLED <= programs(cut) <= places
                if at_once and not (few and cut.num_rows > _WIDE[4]):
                    return cut

    def best(config: Config) -> tuple[int, Config]:
        """The programs that run at once on a multiprocessor, and stages that still let them.

        Three with one tile in flight do better than two with two (KDA 177 us against 185, Gated
        DeltaNet with four tokens 199 against 233, on an H200), or as well.
        """
        flying = "stages" if problem.read_dtype is None else "copies"
        tiles = range(1, getattr(config, flying) + 1)
        cuts = [dataclasses.replace(config, **{flying: n}) for n in tiles]
        found = [min(most, fits(cut)) for cut in cuts]
        return max(found), cuts[len(found) - 1 - found[::-1].index(max(found))]

    found = [best(config) for config in configs(problem)]
    pairs = [one for one in found if one[0] > 1] or [one for one in found if one[0]][-1:]
    if not pairs:
        return None
    wide = [one for one in pairs if one[1].num_rows <= _WIDE[problem.read_bytes]] or pairs

    def at_once(one: tuple[int, Config]) -> int:
        """State rows on a multiprocessor; what they share is made once for 128 of them at best."""
        return one[0] * min(one[1].num_rows, 128)

    ranked = [one for one in wide if at_once(one) == max(map(at_once, wide))]
    for _, config in (*ranked, *wide):
        if programs(config) >= FILLED:
            return config
    return wide[-1][1]


def _shared_bytes(problem: Problem, config: Config, mode: Mode) -> int:
    return shared_bytes(problem, completed(problem, config), mode)


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
        cuts = [dataclasses.replace(c, stages=1, copies=min(1, c.copies)) for c in configs(p)]
        least = min(_shared_bytes(p, cut, mode) for cut in cuts)
        return (
            f"a program would need {least} bytes of shared memory for window={p.window}, "
            f"{p.num_tokens} tokens, key_dim={p.key_dim}, value_dim={p.value_dim} and "
            f"read_dtype={p.read_dtype}, found {MOST_SHARED}"
        )
    return None
