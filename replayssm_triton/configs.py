"""How a problem is cut into programs."""

from __future__ import annotations

from typing import NamedTuple

# Elements of a state tile that a thread holds.
REGISTERS = 64
# Consecutive key channels that threads of a warp read: 128 bytes.
LANES = 32
# Programs below which a device is not filled: two for each of about 132 multiprocessors.
FILLED = 256


class Config(NamedTuple):
    """A program has `tiles` of `rows` state rows each, of one head of one batch row.

    Attributes:
      rows: of a tile.
      num_warps: of a program.
      tiles: more than one in a step of one token only.
      stages: tiles in flight, and the one that is read.
    """

    rows: int
    num_warps: int
    tiles: int = 1
    stages: int = 3


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def channels(key_dim: int) -> tuple[int, int]:
    """Key channels of a tile as two powers of two (C, L), the inner one lies over threads."""
    lanes = min(LANES, next_power_of_2(key_dim))
    return next_power_of_2(-(-key_dim // lanes)), lanes


def choose(heads: int, value_dim: int, key_dim: int) -> Config:
    """The cut for `heads` heads of all batch rows: fixed by shapes, never by timing.

    Tiles are as large as registers allow, unless more of them waste less or fill the device. A
    program has a thread for each key channel or more, see `fused_step._vector`.
    """
    c, lanes = channels(key_dim)
    num_warps = max(4, c * lanes // 32)
    padded = max(16, next_power_of_2(value_dim))
    rows = max(16, min(REGISTERS * 32 * num_warps // (c * lanes), padded))
    while rows > 16:
        waste = -value_dim % rows / value_dim
        if waste <= 0.25 and heads * -(-value_dim // rows) >= FILLED:
            break
        rows //= 2
    return Config(rows, num_warps)


def choose_one_token(heads: int, value_dim: int, key_dim: int) -> Config:
    """As `choose`, for a step of one token.

    A program is one warp, which waits for no other, and reads a head tile after tile while the next
    ones are on their way. Heads that do not fill the device are cut into parts, and then have
    more warps.
    """
    c, lanes = channels(key_dim)
    padded = max(16, next_power_of_2(value_dim))
    rows = max(16, min(REGISTERS * 32 // (c * lanes), padded))
    tiles = padded // rows
    num_warps = 1

    def warps() -> int:
        return heads * -(-value_dim // (rows * tiles)) * num_warps

    while tiles > 1 and (-value_dim % (rows * tiles) > value_dim / 4 or warps() < 4 * FILLED):
        tiles //= 2
    while rows > 16 and -value_dim % rows > value_dim / 4:
        rows //= 2
    while num_warps < 4 and warps() < 4 * FILLED:
        num_warps *= 2
    return Config(rows, num_warps, tiles)


def why_not(key_dim: int, num_tokens: int) -> str | None:
    """Why there is no kernel for a problem; None where there is one."""
    if key_dim > 256:
        return f"key_dim must be at most 256, found {key_dim}"
    if num_tokens > 16:
        return f"at most 16 tokens at once, found {num_tokens}"
    return None
