"""What a kernel is built for: shapes, the recurrence, and how the work is cut into programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

# State rows of one bulk copy and one tensor-core product.
TILE = 64
# Records of one turn of a loop over them.
CHUNK = 4
# Records of one tensor-core product.
BLOCK = 16


def round_up(n: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-n // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class Problem:
    """Static facts of a fused step.

    Attributes:
      batch: B, rows.
      num_heads: H.
      num_groups: G, key heads; each serves H / G consecutive heads.
      value_dim: P.
      key_dim: N.
      capacity: R, slots of the ring, a multiple of 8.
      window: most committed records a row may hold.
      num_tokens: T, new tokens of a row; 0 for a flush.
      delta: the delta rule, else the additive one.
      channel: one log-decay for each key channel, else one for each head.
      key_dtype: of q, k and the key ring.
      value_dtype: of v, the value ring and the output.
      read_dtype: None where steps read the checkpoint, or the dtype of its low-precision copy.
      cached_dtype: of the ring's updates, float32, or bf16 beside a copy.
      read_decay_dtype: of log-decays for steps alone, fp16 beside a copy, or None.
    """

    batch: int
    num_heads: int
    num_groups: int
    value_dim: int
    key_dim: int
    capacity: int
    window: int
    num_tokens: int
    delta: bool
    channel: bool
    key_dtype: Any
    value_dtype: Any
    read_dtype: Any = None
    cached_dtype: Any = jnp.float32
    read_decay_dtype: Any = None

    @property
    def heads_per_group(self) -> int:
        """Heads that share one key head."""
        return self.num_heads // self.num_groups

    @property
    def chunk(self) -> int:
        """Ring slots of one bulk copy; divides 8, of which every window start is a multiple."""
        return 8 if self.num_tokens >= 8 else CHUNK

    @property
    def num_chunks(self) -> int:
        """Bulk copies that bring a whole window."""
        return round_up(self.window, self.chunk) // self.chunk

    @property
    def padded_window(self) -> int:
        """Records of a window in whole tensor-core blocks."""
        return round_up(self.window, BLOCK)

    @property
    def token_rows(self) -> int:
        """New tokens, one for each of four warps at a time."""
        return round_up(self.num_tokens, 4) if self.num_tokens > 1 else 1

    @property
    def padded_tokens(self) -> int:
        """New tokens in whole blocks."""
        return round_up(max(self.num_tokens, 1), BLOCK)

    @property
    def num_columns(self) -> int:
        """Vectors that are multiplied into the state: every q, and under the delta rule every k."""
        return self.num_tokens * (2 if self.delta else 1)

    @property
    def padded_columns(self) -> int:
        """Columns in whole tensor-core products."""
        return round_up(self.num_columns, 8)

    @property
    def packs_terms(self) -> bool:
        """Whether one product has all terms of the columns beside each other: one token, a copy."""
        return self.num_tokens == 1 and self.read_dtype is not None

    @property
    def distinct_columns(self) -> int:
        """Columns of that product: those of one term are repeated, so that every lane has them."""
        return self.num_columns if self.key_terms == 1 else self.padded_columns

    @property
    def brings_records_late(self) -> bool:
        """Whether records come into the place of keys that were scored, or right into registers."""
        return self.num_tokens > 1 and self.channel and self.read_dtype is None

    def window_copies(self, config: Config, mode: Mode) -> int:
        """Bulk copies of a chunk of the window that come together: all but records apart."""
        apart = self.solves_again or self.brings_records_late
        return 1 + self.channel + (not (apart or self.records_follow(config, mode)))

    def records_follow(self, config: Config, mode: Mode) -> bool:
        """Whether records come where a read copy's last tiles were, as soon as those are read.

        A fold has other arrays in the place of its records. Under the delta rule it gains nothing.
        Where all tiles are in flight at once, as with few rows, records would come late, and tile
        after tile with one.
        """
        if mode.fold or self.delta or not self.packs_terms:
            return False
        if not 1 < config.copies < config.num_tiles or config.num_tiles % config.copies:
            return False  # else places become free from the first on
        tile, record = TILE * self.key_dim * self.read_bytes, self.record_bytes(config)
        # Records lie side by side, and no chunk of them over two places.
        return tile % (record * self.chunk) == 0 and self.window * record <= config.copies * tile

    def record_bytes(self, config: Config) -> int:
        """Of a record of all state rows of a program."""
        return config.num_rows * jnp.dtype(self.record_dtype).itemsize

    def records_after(self, config: Config, i: Any) -> Iterator[tuple[Any, Any]]:
        """Where `records_follow`: the chunks whose place is free once tile i was read.

        Each as its first record, and whether there is one.
        """
        in_tile = TILE * self.key_dim * self.read_bytes // self.record_bytes(config)
        freed = i - (config.num_tiles - config.copies)
        for n in range(0, min(in_tile, self.window), self.chunk):
            first = freed * in_tile + n
            yield first, (freed >= 0) & (first < self.window)

    @property
    def has_float_operand(self) -> bool:
        """Whether the columns of tensor-core products are float32, to be taken apart later."""
        return self.num_tokens > 1 and self.read_dtype is None and self.key_terms > 1

    @property
    def has_token_operand(self) -> bool:
        """Whether the columns of tensor-core products are the new q and k as they are."""
        return self.key_terms == 1 and (self.num_tokens > 1 or self.packs_terms)

    @property
    def tokens_in_operand(self) -> tuple[int, int] | None:
        """Where q is among the columns in shared memory, and how far behind it k; None if apart."""
        if self.has_token_operand:
            return 0, self.num_tokens
        # One token's terms leave room for them.
        beside = self.packs_terms and self.key_dtype == jnp.bfloat16
        return (self.padded_columns - 2, 1) if beside else None

    @property
    def score_columns(self) -> int:
        """Columns of the scores as they are stored: by channel all tokens' of a kind at once."""
        if self.num_tokens < 2 and not self.has_token_operand:
            return max(self.num_columns, 1)
        return self.token_rows * (2 if self.delta else 1) if self.channel else self.padded_columns

    @property
    def score_warps(self) -> tuple[int, int] | None:
        """By channel: warps over 16 records and eight columns each, if four have equal shares."""
        if not self.channel or self.num_tokens % 4 or self.num_columns % 8 or self.key_dim % 32:
            return None
        count, columns = self.padded_window // BLOCK, self.num_columns // 8
        shares = [(n, 4 // n) for n in (4, 2, 1) if count % n == 0 and columns % (4 // n) == 0]
        return shares[0] if shares and self.num_tokens else None

    @property
    def key_terms(self) -> int:
        """bf16 terms that hold keys, or columns, at fp32 accuracy."""
        return 3 if self.channel or self.key_dtype != jnp.bfloat16 else 1

    @property
    def record_dtype(self) -> Any:
        """Of the ring that a fold weighs: updates (delta rule) or values."""
        return self.cached_dtype if self.delta else self.value_dtype

    def decays_keys_in_place(self, mode: Mode) -> bool:
        """Whether decayed keys take the place of the keys as well: where no fold takes those."""
        return self.read_decay_dtype is not None and not mode.fold

    @property
    def keeps_raw_values(self) -> bool:
        """Whether the ring has values and betas."""
        return not self.delta or self.solves_again

    @property
    def solves_again(self) -> bool:
        """Whether a fold solves for the updates: the ring's carry the rounding of a read copy."""
        return self.delta and self.read_dtype is not None

    @property
    def read_bytes(self) -> int:
        """Of an element of what steps read."""
        return 4 if self.read_dtype is None else jnp.dtype(self.read_dtype).itemsize

    @property
    def read_terms(self) -> int:
        """bf16 terms that hold what a read copy has, exactly."""
        return 2 if self.read_dtype == jnp.float16 else 1


@dataclasses.dataclass(frozen=True)
class Config:
    """How a problem is cut into programs of one warpgroup each.

    Attributes:
      heads: heads of one program, all of one group.
      rows: state rows of each of these heads; fewer than P only where `heads` is 1.
      stages: state tiles in flight.
      copies: tiles of the read copy in flight.
      channels: key channels that a fold has in registers at once.
    """

    heads: int
    rows: int
    stages: int
    copies: int = 0
    channels: int = 64

    @property
    def num_rows(self) -> int:
        """State rows of a program."""
        return self.heads * self.rows

    @property
    def num_tiles(self) -> int:
        """State tiles of a program."""
        return self.num_rows // TILE


@dataclasses.dataclass(frozen=True)
class Mode:
    """Which parts of the step a kernel has.

    Attributes:
      fold: rows fold; without, tokens that are appended beyond the window become NaN.
      decides: only rows fold whose tokens would not fit in the window; without, all of them.
      append: the new tokens are recorded.
      masked: rows may have fewer than T new tokens; without tokens, rows may stay as they are.
      wgmma: fold with the warpgroup-level tensor-core products that only Hopper has.
      interpret: build what the interpreter on CPU can run.
    """

    fold: bool = True
    decides: bool = True
    append: bool = True
    masked: bool = True
    wgmma: bool = True
    interpret: bool = False

    @property
    def folds_all(self) -> bool:
        """Whether every row folds."""
        return self.fold and not self.decides


def blocks(length: int) -> range:
    """Starts of the 16-record blocks of a padded length."""
    return range(0, length, BLOCK)


def programs_per_row(problem: Problem, config: Config) -> int:
    """Programs that share a batch row."""
    return problem.num_heads * problem.value_dim // config.num_rows
