"""Prefill: prompts into a state, chunk after chunk; the path that training differentiates."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from replayssm_jax import precision, window
from replayssm_jax.arguments import check_array, check_int, check_not_explicit
from replayssm_jax.checks import nan_unless
from replayssm_jax.decode import as_tokens, check_gates, check_lengths, leading
from replayssm_jax.flush_switch import stored_of
from replayssm_jax.inputs import TokenInputs, check_inputs
from replayssm_jax.spec import ReplaySpec
from replayssm_jax.state import ReplayState, check_state, emptied, records_to_fold

# Pairs of tokens cost N exponentials under per-channel decay, so its chunks are shorter.
_CHUNK_SIZE = {"scalar": 64, "channel": 16}

# Bytes of decays between pairs of tokens that may be alive at once.
_BLOCK_BYTES = 1 << 28


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
    chunks, and returns an empty ring. All of it is in `spec.compute_dtype`: a low-precision
    checkpoint or read copy is written once, at the end. Reverse-differentiable in inputs and a
    checkpoint that is not rounded; blocks of chunks are rematerialised, so a backward pass holds
    one state for each of them.

    Args:
      spec: the layer.
      state: B rows.
      inputs: any T.
      lengths: None, or int [B] in [0, T], how many leading tokens of each row are real; needs
        ragged pointers.
      valid: None, or bool [B, T], any pattern of real tokens, left padding included. The others
        are identities (no decay, no update, no reset) with zero output.
      resets: None, or bool [B, T]: forget everything before this token (packed documents,
        episodes), also what is not finite. Up to its next reset, a token that is not finite makes
        all heads of its row NaN.
      chunk_size: None or an int, tokens that are folded at once; the result does not depend on it
        beyond rounding.

    With ragged pointers a row without a real token is left untouched, drafts included; with a
    scalar pointer all rows fold and drop their drafts, also where T = 0.

    Returns:
      The outputs [B, T, H, P] in the dtype of `v`, and the state.

    Raises:
      TypeError: a wrong dtype, a chunk_size that is no int.
      ValueError: a wrong shape, both `lengths` and `valid`, `lengths` on a scalar pointer, and
        (where the values are known) lengths out of range, or a `g` above 0 or not finite.
    """
    batch_size = check_state(spec, state)
    num_tokens = check_inputs(spec, inputs, batch_size)
    if lengths is not None and valid is not None:
        raise ValueError("give lengths or valid, found both")
    lengths = check_lengths(state, lengths, num_tokens)
    shape = (batch_size, num_tokens)
    if valid is not None:
        valid = check_array("valid", valid, shape, jnp.bool)
    if resets is not None:
        resets = check_array("resets", resets, shape, jnp.bool)
    check_not_explicit(state=state, inputs=inputs, lengths=lengths, valid=valid, resets=resets)
    if chunk_size is None:
        chunk_size = _CHUNK_SIZE[spec.decay]
    chunk_size = check_int("chunk_size", chunk_size)
    check_gates(inputs.g, lengths, valid)
    if lengths is not None:
        valid = leading(lengths, num_tokens)
    return _prefill(spec, state, inputs, valid, resets, min(chunk_size, max(num_tokens, 1)))


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
    committed = records_to_fold(
        spec, state.checkpoint, state.buffer, pointer.start, pointer.length, pointer.fresh
    )
    before = window.fold(spec, state.checkpoint, pointer.fresh, committed)
    if num_tokens == 0:
        folded = state if pointer.is_ragged else _restarted(spec, state, before)
        return jnp.zeros_like(inputs.v), folded
    num_chunks, block_size = _blocks(spec, batch_size, num_tokens, chunk_size)
    padding = num_chunks * chunk_size - num_tokens
    tokens = as_tokens(spec, inputs, valid)
    lost = None
    if resets is not None:
        resets = resets if valid is None else resets & valid
        before, tokens, lost = _set_apart(before, tokens, resets)
    # Zeros pad every field: a padded token is an identity.
    blocks, resets = jax.tree.map(
        lambda x: _in_chunks(x, padding, chunk_size, block_size), (tokens, resets)
    )
    if resets is not None:
        blocks = blocks._replace(segment=jnp.cumsum(resets, axis=3, dtype=jnp.int32))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def run_block(recurrent: jax.Array, block: window.Tokens) -> tuple[jax.Array, jax.Array]:
        return jax.lax.scan(
            functools.partial(_run_chunk, spec), recurrent, jax.vmap(_stateless(spec))(block)
        )

    after, outputs = jax.lax.scan(run_block, before, blocks)
    outputs = outputs.reshape(num_chunks, batch_size, chunk_size, *outputs.shape[4:])
    outputs = jnp.moveaxis(outputs, 0, 1).reshape(batch_size, -1, *outputs.shape[3:])
    outputs = outputs[:, :num_tokens].astype(inputs.v.dtype)
    if lost is not None:
        outputs = nan_unless(~lost[:, :, None, None], outputs)
        after = nan_unless(~lost[:, -1].reshape(-1, 1, 1, 1), after)
    if valid is not None:  # not by the zeros of their q: a state may hold NaN
        outputs = jnp.where(valid[:, :, None, None], outputs, 0)
    touched = None
    if valid is not None and pointer.is_ragged:
        touched = jnp.any(valid, axis=1)
    return outputs, _restarted(spec, state, after, touched)


def _restarted(
    spec: ReplaySpec, state: ReplayState, recurrent: jax.Array, where: jax.Array | None = None
) -> ReplayState:
    """The rows `where` (None: all) with `recurrent` [B, H, P, N] as checkpoint, and empty rings."""
    stored = precision.store(recurrent, state.rounding_key, spec.state_dtype, spec.read_dtype)
    if where is None:
        pointer = emptied(spec, state.pointer)
        return dataclasses.replace(state, **stored._asdict(), pointer=pointer)

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(where.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    stored = jax.tree.map(choose, stored, stored_of(state))
    pointer = emptied(spec, state.pointer, where)
    return dataclasses.replace(state, **stored._asdict(), pointer=pointer)


def _set_apart(
    before: jax.Array, tokens: window.Tokens, resets: jax.Array
) -> tuple[jax.Array, window.Tokens, jax.Array]:
    """Take what is not finite out of state and tokens, and say what it reaches: bool [B, T].

    What a reset forgets has weight zero in sums over tokens and columns, forward and backward, and
    zero times NaN is NaN.
    """
    num_tokens = resets.shape[1]
    finite = jnp.ones_like(resets)
    for x in (tokens.k, tokens.v, tokens.log_decay, tokens.beta):  # q reaches its own token alone
        finite &= jnp.isfinite(x).reshape(*resets.shape, -1).all(axis=2)
    tokens = jax.tree.map(
        lambda x: jnp.where(finite.reshape(*finite.shape, *(1,) * (x.ndim - 2)), x, 0), tokens
    )
    whole = jnp.isfinite(before).all(axis=(1, 2, 3))
    before = jnp.where(whole.reshape(-1, 1, 1, 1), before, 0)
    place = jnp.arange(1, num_tokens + 1, dtype=jnp.int32)
    last_bad = jax.lax.cummax(jnp.where(finite, -1, place), axis=1)
    last_bad = jnp.maximum(last_bad, jnp.where(whole, -1, 0)[:, None])
    last_reset = jax.lax.cummax(jnp.where(resets, place, 0), axis=1)
    return before, tokens, last_bad >= last_reset


def _stateless(
    spec: ReplaySpec,
) -> Callable[[window.Tokens], tuple[window.Tokens, window.Pairs, window.Records]]:
    """All of a chunk that does not depend on the state, so that chunks share its kernels."""

    def prepare(tokens: window.Tokens) -> tuple[window.Tokens, window.Pairs, window.Records]:
        records = window.make_records(
            spec, tokens.log_decay, tokens.k, jnp.zeros((), spec.compute_dtype), tokens.segment
        )
        return tokens, window.relate(spec, tokens), records

    return prepare


def _run_chunk(
    spec: ReplaySpec,
    recurrent: jax.Array,
    chunk: tuple[window.Tokens, window.Pairs, window.Records],
) -> tuple[jax.Array, jax.Array]:
    tokens, pairs, records = chunk
    key_reads, query_reads = window.read_past(spec, recurrent, None, None, tokens, pairs)
    update = window.solve_updates(spec, tokens, pairs, key_reads)
    output = window.evaluate(spec, pairs, update, query_reads)
    forgotten = None if tokens.segment is None else tokens.segment[:, -1] > 0
    recurrent = window.fold(spec, recurrent, forgotten, records._replace(update=update))
    return recurrent, output.astype(tokens.v.dtype)


def _blocks(spec: ReplaySpec, batch_size: int, num_tokens: int, chunk_size: int) -> tuple[int, int]:
    """Number of chunks, rounded up to whole blocks, and chunks in a block that fit in memory."""
    num_chunks = -(-num_tokens // chunk_size)
    pairs = batch_size * chunk_size**2 * spec.num_heads * spec.decay_dim
    fitting = max(1, _BLOCK_BYTES // (pairs * spec.compute_dtype.itemsize))
    num_blocks = -(-num_chunks // fitting)
    block_size = -(-num_chunks // num_blocks)
    return num_blocks * block_size, block_size


def _in_chunks(x: jax.Array, padding: int, chunk_size: int, block_size: int) -> jax.Array:
    """[B, T, ...] as [blocks, chunks, B, chunk, ...], padded with zeros at the end."""
    if padding:
        x = jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)])
    x = jnp.moveaxis(x.reshape(x.shape[0], -1, chunk_size, *x.shape[2:]), 1, 0)
    return x.reshape(-1, block_size, *x.shape[1:])
