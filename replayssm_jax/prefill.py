"""Prefill: prompts into a state, chunk after chunk; the path that training differentiates."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from replayssm_jax import window
from replayssm_jax.decode import as_tokens, check_gates, check_lengths, read_columns
from replayssm_jax.inputs import TokenInputs, check_inputs
from replayssm_jax.spec import ReplaySpec
from replayssm_jax.state import ReplayState, check_state, committed_records, emptied

# Pairs of tokens cost N exponentials under per-channel decay, so its chunks are shorter.
_CHUNK_SIZE = {"scalar": 64, "channel": 16}


def prefill(
    spec: ReplaySpec,
    state: ReplayState,
    inputs: TokenInputs,
    lengths: jax.Array | None = None,
    *,
    valid: jax.Array | None = None,
    resets: jax.Array | None = None,
    chunk_size: int | None = None,
) -> tuple[jax.Array, ReplayState]:
    """Run T tokens through the recurrence; called again, it continues.

    Folds the committed records (pending drafts are dropped), then runs through the tokens in
    chunks, and returns an empty ring. Reverse-differentiable in inputs and state; every chunk is
    rematerialised, so a backward pass holds one state for each chunk.

    Args:
      spec: the layer.
      state: B rows.
      inputs: any T.
      lengths: None, or int [B] in [0, T], how many leading tokens of each row are real; needs
        ragged pointers.
      valid: None, or bool [B, T], any pattern of real tokens, left padding included. The others
        are identities (no decay, no update, no reset) with zero output.
      resets: None, or bool [B, T]: forget everything before this token (packed documents,
        episodes).
      chunk_size: tokens that are folded at once; the result does not depend on it beyond rounding.

    With ragged pointers a row without a real token is left untouched; with a scalar pointer all
    rows move together.

    Returns:
      The outputs [B, T, H, P] in the dtype of `v`, and the state.

    Raises:
      TypeError: a wrong dtype.
      ValueError: a wrong shape, both `lengths` and `valid`, `lengths` on a scalar pointer, and
        (where the values are known) lengths out of range or gates positive or not finite.
    """
    batch_size = check_state(spec, state)
    num_tokens = check_inputs(spec, inputs, batch_size)
    if lengths is not None and valid is not None:
        raise ValueError("give lengths or valid, found both")
    lengths = check_lengths(state, lengths, num_tokens)
    for name, mask in {"valid": valid, "resets": resets}.items():
        if mask is None:
            continue
        if mask.shape != (batch_size, num_tokens):
            raise ValueError(
                f"{name} must have shape {(batch_size, num_tokens)}, found {mask.shape}"
            )
        if mask.dtype != jnp.bool:
            raise TypeError(f"{name} must be bool, found {mask.dtype.name}")
    if chunk_size is None:
        chunk_size = _CHUNK_SIZE[spec.decay]
    elif chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, found {chunk_size}")
    check_gates(inputs.g)
    if num_tokens == 0:
        return jnp.zeros_like(inputs.v), state
    if lengths is not None:
        valid = jnp.arange(num_tokens, dtype=jnp.int32)[None] < lengths[:, None]
    return _prefill(spec, state, inputs, valid, resets, min(chunk_size, num_tokens))


@functools.partial(jax.jit, static_argnames=("spec", "chunk_size"))
def _prefill(
    spec: ReplaySpec,
    state: ReplayState,
    inputs: TokenInputs,
    valid: jax.Array | None,
    resets: jax.Array | None,
    chunk_size: int,
) -> tuple[jax.Array, ReplayState]:
    batch_size, num_tokens = inputs.v.shape[:2]
    pointer = state.pointer
    committed = committed_records(spec, state.buffer, pointer.start, pointer.length)
    before = window.fold(spec, state.checkpoint, pointer.fresh, committed)
    padding = -num_tokens % chunk_size
    real = valid
    if real is None and padding:
        real = jnp.ones((batch_size, num_tokens), jnp.bool)
    chunks = jax.tree.map(
        lambda x: _in_chunks(x, padding, chunk_size), (inputs, real, resets)
    )

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def run_chunk(
        recurrent: jax.Array, chunk: tuple[TokenInputs, jax.Array | None, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array]:
        chunk_inputs, chunk_valid, chunk_resets = chunk
        segment = None
        if chunk_resets is not None:
            if chunk_valid is not None:
                chunk_resets = chunk_resets & chunk_valid
            segment = jnp.cumsum(chunk_resets, axis=1, dtype=jnp.int32)
        tokens = as_tokens(spec, chunk_inputs, chunk_valid, segment)
        key_reads, query_reads = read_columns(spec, tokens, recurrent, None, None)
        update = window.solve_updates(spec, tokens, key_reads)
        output = window.evaluate(spec, tokens, update, query_reads)
        records = window.Records(log_decay=tokens.log_decay, key=tokens.k, update=update)
        recurrent = window.fold(spec, recurrent, None, records, segment=segment)
        return recurrent, output.astype(inputs.v.dtype)

    after, outputs = jax.lax.scan(run_chunk, before, chunks)
    outputs = jnp.moveaxis(outputs, 0, 1).reshape(batch_size, -1, *outputs.shape[3:])
    outputs = outputs[:, :num_tokens]
    if valid is None or not pointer.is_ragged:
        return outputs, dataclasses.replace(
            state, checkpoint=after, pointer=emptied(spec, pointer)
        )
    touched = jnp.any(valid, axis=1)
    checkpoint = jnp.where(touched.reshape(-1, 1, 1, 1), after, state.checkpoint)
    return outputs, dataclasses.replace(
        state, checkpoint=checkpoint, pointer=emptied(spec, pointer, touched)
    )


def _in_chunks(x: jax.Array, padding: int, chunk_size: int) -> jax.Array:
    """[B, T, ...] as [chunks, B, chunk, ...], padded with zeros at the end."""
    if padding:
        x = jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)])
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk_size, *x.shape[2:]), 1, 0)
