"""Stop conditions of generation, tested on the device."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replayssm_jax.arguments import as_int32


class StopReason(enum.IntEnum):
    """Why a row ended."""

    LENGTH = 1
    """It reached its limit of new tokens, or the end of the KV cache."""
    TOKEN = 2
    """It drew one of the stop tokens."""
    SEQUENCE = 3
    """Its last tokens equal one of the stop sequences."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stops:
    """Stop conditions as arrays.

    Attributes:
      tokens: [B, S] int32, padded with -1, or None.
      sequences: [Q, L] int32, right-aligned and padded with -1, or None.
    """

    tokens: jax.Array | None = None
    sequences: jax.Array | None = None

    @classmethod
    def make(
        cls,
        batch_size: int,
        tokens: Any = None,
        sequences: Sequence[Sequence[int]] | jax.Array | None = None,
    ) -> Stops:
        """Build the conditions.

        Args:
          batch_size: B.
          tokens: None, an int, [S] for all rows or [B, S] for each; -1 stops nothing. Also B lists
            of different lengths.
          sequences: None, token sequences, or an array [Q, L] right-aligned and padded with -1. A
            row of padding is no sequence and stops nothing, and so is an empty list.

        Raises:
          TypeError: tokens that are no integers, sequences that are no list.
          ValueError: wrong shapes.
        """
        if isinstance(tokens, list | tuple) and tokens and np.ndim(tokens[0]):
            tokens = _padded(tokens, "stop_tokens")
        if tokens is not None:
            tokens = jnp.atleast_1d(as_int32("stop_tokens", tokens))
            if tokens.ndim > 2 or (tokens.ndim == 2 and tokens.shape[0] != batch_size):
                raise ValueError(
                    f"stop_tokens must be [S] or [{batch_size}, S], found {tokens.shape}"
                )
            if tokens.ndim == 1:
                tokens = jnp.broadcast_to(tokens[None, :], (batch_size, tokens.shape[0]))
        if sequences is not None and not isinstance(sequences, jax.Array):
            is_array = isinstance(sequences, np.ndarray) and sequences.ndim
            if not is_array and (isinstance(sequences, str) or not isinstance(sequences, Sequence)):
                raise TypeError(
                    f"stop_sequences must be a list of token sequences, found {sequences!r}"
                )
            sequences = _padded(sequences, "stop_sequences") if len(sequences) else None
        if sequences is not None:
            sequences = as_int32("stop_sequences", sequences)
            if sequences.ndim != 2:
                raise ValueError(f"stop_sequences must be [Q, L], found {sequences.shape}")
        return cls(tokens, sequences)

    def reason(self, tokens: jax.Array, index: jax.Array) -> jax.Array:
        """Return the `StopReason` that the token at `index` gives each row, 0 for none.

        Args:
          tokens: [B, capacity] int32, the new tokens so far.
          index: int32, column of the newest; a scalar, or [B] to differ by row.
        """
        batch_size = tokens.shape[0]
        index = jnp.broadcast_to(index, (batch_size,))[:, None]
        reason = jnp.zeros((batch_size,), jnp.int32)
        if self.sequences is not None:
            width = self.sequences.shape[1]
            columns = index - width + 1 + jnp.arange(width, dtype=jnp.int32)[None, :]
            recent = jnp.take_along_axis(tokens, jnp.maximum(columns, 0), axis=1, mode="clip")
            recent = jnp.where(columns >= 0, recent, -2)
            wanted = self.sequences[None, :, :]
            equal = (recent[:, None, :] == wanted) | (wanted == -1)
            found = jnp.any(jnp.all(equal, axis=2) & jnp.any(wanted != -1, axis=2), axis=1)
            reason = jnp.where(found, jnp.int32(StopReason.SEQUENCE), reason)
        if self.tokens is not None:
            newest = jnp.take_along_axis(tokens, index, axis=1, mode="clip")
            found = jnp.any(newest == self.tokens, axis=1)
            reason = jnp.where(found, jnp.int32(StopReason.TOKEN), reason)
        return reason


def _padded(rows: Sequence[Any], name: str) -> jax.Array:
    """[n, L] int32, lists of tokens right-aligned and padded with -1."""
    if any(np.ndim(row) != 1 for row in rows):
        raise ValueError(f"{name} must hold lists of tokens, found {rows!r}")
    width = max(len(row) for row in rows)
    padded = [[-1] * (width - len(row)) + [*row] for row in rows]
    return as_int32(name, np.array(padded))
