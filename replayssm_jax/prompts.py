"""Prompts as padded arrays: lists of tokens, right or left padding, empty rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from replayssm_jax.arguments import as_int32, check_array, check_int32, concrete, known_mask
from replayssm_jax.models.arguments import check_vocabulary

SMALLEST_BUCKET = 16


class Prompt(NamedTuple):
    """Prompts of B rows: tokens [B, T] int32 and their mask [B, T] bool (None: all real)."""

    tokens: jax.Array
    valid: jax.Array | None


def bucket(n: int, smallest: int = SMALLEST_BUCKET) -> int:
    """Round `n` up to a power of two, so that few sizes are compiled."""
    return max(smallest, 1 << max(0, n - 1).bit_length())


def as_prompt(
    prompt: Any,
    *,
    lengths: Any = None,
    valid: Any = None,
    bos_token: int | None = None,
    continues: bool = False,
    vocab_size: int | None = None,
) -> Prompt:
    """Bring prompts into one form.

    Args:
      prompt: int array [B, T], or a list of B token lists, which are padded on the right to a
        power of two.
      lengths: [B], real tokens at the front of each row.
      valid: [B, T] bool, real tokens in any pattern, instead of `lengths`.
      bos_token: the token that a row without a prompt starts from.
      continues: rows may be empty, since a cache holds what came before.
      vocab_size: None, or the bound of real tokens; padding may hold anything.

    Raises:
      TypeError: tokens, lengths or a bos_token that are not integers, a mask that is not bool.
      ValueError: wrong shapes, lengths or (where they are known) tokens out of range, or an empty
        prompt without `bos_token`.
    """
    if lengths is not None and valid is not None:
        raise ValueError("pass lengths or valid, not both")
    if isinstance(prompt, list | tuple):
        if lengths is not None or valid is not None:
            raise ValueError("a list of token lists has its own lengths: pass neither mask")
        rows = [_token_list(row) for row in prompt]
        lengths = np.array([row.size for row in rows], np.int32)
        width = bucket(int(lengths.max(initial=0))) if lengths.any() else 0
        prompt = np.zeros((len(rows), width), np.int32)
        for row, filled in zip(rows, prompt, strict=True):
            filled[: row.size] = row
    tokens = as_int32("prompt", prompt)
    if tokens.ndim != 2:
        raise ValueError(f"prompt must have shape [B, T], found {tokens.shape}")
    batch_size, width = tokens.shape
    if lengths is not None:
        lengths = check_array("lengths", lengths, (batch_size,), jnp.integer)
        known = concrete(lengths)
        if known is not None and ((known < 0) | (known > width)).any():
            raise ValueError(f"lengths must lie in [0, {width}], found {known.tolist()}")
        valid = known_mask(lengths, None, width)
        if valid is None:  # traced
            valid = jnp.arange(width, dtype=jnp.int32)[None, :] < lengths[:, None]
    if valid is not None:
        valid = check_array("valid", valid, tokens.shape, jnp.bool)
    bos = None if bos_token is None else check_array("bos_token", bos_token, (), jnp.integer)
    result = Prompt(tokens, valid) if continues else _with_bos(tokens, valid, bos)
    if vocab_size is not None:
        check_vocabulary(result.tokens, known_mask(None, result.valid, width), vocab_size)
    return result


def has_no_rows(prompt: Any) -> bool:
    """Whether the batch is empty."""
    return not prompt if isinstance(prompt, list | tuple) else np.shape(prompt)[:1] == (0,)


def _token_list(row: Any) -> np.ndarray:
    tokens = np.asarray(row)
    if tokens.ndim != 1:
        raise ValueError(
            f"prompt must be a list with a list of tokens for each row, found the row {row!r}"
        )
    check_int32("prompt", tokens)
    return tokens.astype(np.int32)


def _with_bos(tokens: Any, valid: Any, bos_token: Any) -> Prompt:
    batch_size, width = tokens.shape
    if width and valid is None:
        return Prompt(tokens, None)
    if valid is None:
        valid = np.zeros(tokens.shape, bool)
    mask = concrete(valid)
    if mask is not None and mask.any(axis=1).all():
        return Prompt(tokens, valid)
    if bos_token is None:
        if mask is None and width:
            return Prompt(tokens, valid)
        raise ValueError("a row has no prompt: pass bos_token, the token to start from")
    if not width:
        zeros: Any = np.zeros((batch_size, 1), np.int32)
        return Prompt(zeros + bos_token, None)
    first = (np.arange(width) == 0)[None, :] & ~valid.any(axis=1, keepdims=True)
    xp: Any = jnp if any(isinstance(x, jax.Array) for x in (tokens, first, bos_token)) else np
    return Prompt(xp.where(first, bos_token, tokens), valid | first)
