"""The algebra of one window in XLA: reads, updates of new tokens, outputs, and the fold.

With a checkpoint S_0, records j = 1..m after it and G_t = g_1 + ... + g_t,

    S_t   = S_0 diag(exp G_t) + sum_{j<=t} u_j (exp(G_t - G_j) * k_j)^T
    S_t r = S_0 (exp(G_t) * r) + sum_{j<=t} <k_j, exp(G_t - G_j) * r> u_j

so outputs need no state to be built. Exponents are sums of log-decays over segments, all of one
sign: a difference of prefix sums would lose small gates behind a large one, and exp(G_t) exp(-G_j)
overflows. Prefill, step, verify and flush are all made of the functions here.

Log-decays have a last axis D: 1 for scalar decay, N for per-channel decay.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from replayssm_jax.spec import ReplaySpec


class Records(NamedTuple):
    """J records in order of time, oldest first; a dead one is all zeros, an identity.

    Attributes:
      log_decay: [B, J, H, D], compute dtype.
      key: [B, J, G, N].
      update: [B, J, H, P], u_j, compute dtype.
    """

    log_decay: jax.Array
    key: jax.Array
    update: jax.Array


class Tokens(NamedTuple):
    """T new tokens; a token that is not real is an identity: zero g, k and beta.

    Attributes:
      q: [B, T, G, N].
      k: [B, T, G, N].
      v: [B, T, H, P].
      log_decay: [B, T, H, D], compute dtype.
      beta: [B, T, H], compute dtype.
      segment: None, or [B, T] int32, how many resets lie at or before the token.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array
    segment: jax.Array | None = None


def read_past(
    spec: ReplaySpec,
    checkpoint: jax.Array,
    empty: jax.Array | None,
    past: Records | None,
    tokens: Tokens,
    columns: jax.Array,
) -> jax.Array:
    """What checkpoint and past records contribute to reads S_t r of the new tokens.

    All columns of one call are read in one pass over the checkpoint.

    Args:
      spec: the layer.
      checkpoint: [B, H, P, N].
      empty: None, or bool [B] (or scalar): rows whose checkpoint counts as zero, whatever it holds.
      past: records between the checkpoint and the new tokens, or None.
      tokens: the new tokens; they give the decay from the past to each column.
      columns: [B, C T, G, N], C vectors r for each token, the tokens innermost.

    Returns:
      [B, C T, H, P], compute dtype.
    """
    batch, num_columns = columns.shape[:2]
    decay = jnp.exp(_prefix_sums(tokens.log_decay))
    if tokens.segment is not None:
        decay = jnp.where((tokens.segment == 0)[:, :, None, None], decay, 0)
    decay = jnp.tile(decay, (1, num_columns // decay.shape[1], 1, 1))
    columns = columns.astype(spec.compute_dtype)
    total = None if past is None else jnp.exp(_total(past.log_decay))
    if spec.decay == "channel":
        columns = _per_head(spec, columns) * decay
        out = _matvecs(spec, checkpoint, columns if total is None else columns * total)
    else:
        out = _matvecs(spec, checkpoint, columns)
        out = out if total is None else out * total
    if empty is not None:
        out = jnp.where(empty.reshape(-1, 1, 1, 1), 0, out)
    if past is not None:
        scores = _past_scores(spec, past, columns)
        out = out + _einsum(spec, "bcjh,bjhp->bchp", scores, past.update)
    return out * decay if spec.decay == "scalar" else out


def _matvecs(spec: ReplaySpec, state: jax.Array, columns: jax.Array) -> jax.Array:
    """[B, H, P, N] times each of [B, C, H or G, N], as [B, C, H, P].

    Heads that share a column are one matrix, and the product keeps the order of the state's axes:
    other orders make XLA transpose the whole state first.
    """
    batch, num_columns, keys = columns.shape[:3]
    rows = state.reshape(batch, keys, -1, spec.key_dim)
    out = _einsum(spec, "bkrn,bckn->bkrc", rows, columns)
    return jnp.moveaxis(out, 3, 1).reshape(batch, num_columns, spec.num_heads, spec.value_dim)


def _past_scores(spec: ReplaySpec, past: Records, columns: jax.Array) -> jax.Array:
    """<k_j, exp(sum of decays after j) * r> for columns [B, C, G or H, N], as [B, C, J, H]."""
    suffix = jnp.exp(_suffix_sums(past.log_decay))
    key = past.key.astype(spec.compute_dtype)
    if spec.decay == "channel":
        return _einsum(spec, "bjhn,bchn->bcjh", _per_head(spec, key) * suffix, columns)
    scores = _einsum(spec, "bjgn,bcgn->bcjg", key, columns)
    return jnp.repeat(scores, spec.heads_per_group, axis=3) * suffix[:, None, :, :, 0]


def solve_updates(
    spec: ReplaySpec, tokens: Tokens, key_reads: jax.Array | None
) -> jax.Array:
    """u of the new tokens: beta v, or under the delta rule the solution of the triangular system

        u_i = beta_i (v_i - base_i - sum_{j<i} <k_j, exp(G_i - G_j) * k_i> u_j)

    by forward substitution: other inverses lose everything on keys that are not normalised.

    Args:
      spec: the layer.
      tokens: the new tokens.
      key_reads: [B, T, H, P], base: `read_past` of the keys; None under the additive rule.

    Returns:
      [B, T, H, P], compute dtype.
    """
    beta = tokens.beta[..., None]
    value = tokens.v.astype(spec.compute_dtype)
    if key_reads is None:
        return beta * value
    rhs = beta * (value - key_reads)
    num_tokens = rhs.shape[1]
    if num_tokens == 1:
        return rhs
    scores = _pair_scores(spec, tokens, tokens.k, strict=True)
    system = jnp.moveaxis(scores * tokens.beta[:, :, None], 3, 1)
    solution = jax.lax.linalg.triangular_solve(
        system, jnp.moveaxis(rhs, 2, 1), left_side=True, lower=True, unit_diagonal=True
    )
    return jnp.moveaxis(solution, 1, 2)


def evaluate(
    spec: ReplaySpec, tokens: Tokens, update: jax.Array, query_reads: jax.Array
) -> jax.Array:
    """Outputs S_t q_t of the new tokens; no state is built.

    Args:
      spec: the layer.
      tokens: the new tokens.
      update: [B, T, H, P], their u.
      query_reads: [B, T, H, P], `read_past` of the queries.

    Returns:
      [B, T, H, P], compute dtype.
    """
    scores = _pair_scores(spec, tokens, tokens.q, strict=False)
    return query_reads + _einsum(spec, "btjh,bjhp->bthp", scores, update)


def fold(
    spec: ReplaySpec,
    checkpoint: jax.Array,
    empty: jax.Array | None,
    records: Records,
    *,
    segment: jax.Array | None = None,
) -> jax.Array:
    """The state [B, H, P, N] after the records, by one matrix product: the form for prefill.

    Args:
      spec: the layer.
      checkpoint: [B, H, P, N].
      empty: as in `read_past`.
      records: J records.
      segment: None, or [B, J] int32 reset counts; records before the last reset are forgotten.
    """
    total, key = _fold_operands(spec, records, segment)
    new = _einsum(spec, "bjhp,bjhn->bhpn", records.update, key)
    return _mask_empty(checkpoint, empty) * total + new


def fold_in_place(
    spec: ReplaySpec, checkpoint: jax.Array, empty: jax.Array | None, records: Records
) -> jax.Array:
    """The same state as `fold`, elementwise and a block of heads at a time, over the checkpoint.

    A matrix product would hold another state of temporary memory, and so would one elementwise
    expression once XLA splits it; the loop keeps the temporaries to a block.
    """
    total, key = _fold_operands(spec, records, None)
    width = spec.num_heads // _num_blocks(spec.num_heads)

    def fold_block(i: jax.Array, state: jax.Array) -> jax.Array:
        def block(x: jax.Array, axis: int) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, i * width, width, axis)

        new = _mask_empty(block(state, 1), empty) * block(total, 1)
        update, keys = block(records.update, 2), block(key, 2)
        for j in range(update.shape[1]):
            new = new + update[:, j, :, :, None] * keys[:, j, :, None, :]
        return jax.lax.dynamic_update_slice_in_dim(state, new, i * width, 1)

    return jax.lax.fori_loop(0, spec.num_heads // width, fold_block, checkpoint)


def _num_blocks(num_heads: int) -> int:
    """The least divisor of `num_heads` that is at least 8, or all of them."""
    return next((n for n in range(8, num_heads) if num_heads % n == 0), num_heads)


def _mask_empty(checkpoint: jax.Array, empty: jax.Array | None) -> jax.Array:
    return checkpoint if empty is None else jnp.where(empty.reshape(-1, 1, 1, 1), 0, checkpoint)


def _fold_operands(
    spec: ReplaySpec, records: Records, segment: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Decay of the checkpoint [B, H, 1, D], and keys decayed to the end [B, J, H, N]."""
    total = jnp.exp(_total(records.log_decay))[:, 0, :, None]
    suffix = jnp.exp(_suffix_sums(records.log_decay))
    if segment is not None:
        last = segment[:, -1:]
        total = jnp.where((last == 0)[:, :, None, None], total, 0)
        suffix = jnp.where((segment == last)[:, :, None, None], suffix, 0)
    return total, _per_head(spec, records.key.astype(spec.compute_dtype)) * suffix


def _pair_scores(
    spec: ReplaySpec, tokens: Tokens, vectors: jax.Array, *, strict: bool
) -> jax.Array:
    """<k_j, exp(G_t - G_j) * r_t> over pairs of new tokens, zero unless j <= t (j < t if strict).

    Returns [B, T, J, H].
    """
    batch, num_tokens = vectors.shape[:2]
    key = tokens.k.astype(spec.compute_dtype)
    vectors = vectors.astype(spec.compute_dtype)
    order = jnp.arange(num_tokens)
    mask = order[:, None] > order[None] if strict else order[:, None] >= order[None]
    mask = jnp.broadcast_to(mask[None], (batch, num_tokens, num_tokens))
    if tokens.segment is not None:
        mask = mask & (tokens.segment[:, :, None] == tokens.segment[:, None, :])
    decay = jnp.exp(_segment_sums(tokens.log_decay))
    if spec.decay == "channel":
        vectors = _per_head(spec, vectors)[:, :, None] * decay
        scores = _einsum(spec, "bjhn,btjhn->btjh", _per_head(spec, key), vectors)
    else:
        scores = _einsum(spec, "bjgn,btgn->btjg", key, vectors)
        scores = jnp.repeat(scores, spec.heads_per_group, axis=3) * decay[..., 0]
    return jnp.where(mask[..., None], scores, 0)


def _per_head(spec: ReplaySpec, x: jax.Array) -> jax.Array:
    """[B, J, G, N] repeated to [B, J, H, N]."""
    return jnp.repeat(x, spec.heads_per_group, axis=2)


def _prefix_sums(g: jax.Array) -> jax.Array:
    """Sum of g over all tokens up to and including each, along axis 1."""
    return g if g.shape[1] == 1 else jax.lax.cumsum(g, axis=1)


def _suffix_sums(g: jax.Array) -> jax.Array:
    """Sum of g over the records after each, along axis 1."""
    later = jax.lax.cumsum(g, axis=1, reverse=True)[:, 1:]
    return jnp.concatenate([later, jnp.zeros_like(g[:, :1])], axis=1)


def _total(g: jax.Array) -> jax.Array:
    """Sum of g over all records, [B, 1, H, D]."""
    return jnp.sum(g, axis=1, keepdims=True)


def _segment_sums(g: jax.Array) -> jax.Array:
    """[B, T, J, H, D]: sum of g over the tokens after j up to t; 0 where j >= t."""
    num_tokens = g.shape[1]
    order = jnp.arange(num_tokens)
    after = (order[:, None] > order[None])[None, :, :, None, None]
    terms = jnp.where(after, g[:, :, None], 0)
    return jax.lax.cumsum(terms, axis=1)


def _einsum(spec: ReplaySpec, subscripts: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *operands, precision=spec.precision)
