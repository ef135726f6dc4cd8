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

    Every column of one call is read in one pass over the checkpoint.

    Args:
      spec: the layer.
      checkpoint: [B, H, P, N].
      empty: None, or bool [B] (or scalar): rows whose checkpoint counts as zero, whatever it holds.
      past: records between the checkpoint and the new tokens, or None.
      tokens: the new tokens; they give the decay from the past to each column.
      columns: [C, B, T, G, N], C vectors r for each token.

    Returns:
      [C, B, T, H, P], compute dtype.
    """
    num_columns, batch, num_tokens = columns.shape[:3]
    groups, rep = spec.num_groups, spec.heads_per_group
    decay = _grouped(spec, jnp.exp(_prefix_sums(tokens.log_decay)))
    if tokens.segment is not None:
        alive = (tokens.segment == 0)[:, :, None, None, None]
        decay = jnp.where(alive, decay, 0)
    columns = columns.astype(spec.compute_dtype)[:, :, :, :, None]
    if spec.decay == "channel":
        columns = columns * decay[None]
    total = None if past is None else _grouped(spec, jnp.exp(_total(past.log_decay)))
    states = checkpoint.reshape(batch, groups, rep, spec.value_dim, spec.key_dim)
    if spec.decay == "channel":
        scaled = columns if total is None else columns * total[None]
        out = _einsum(spec, "bgrpn,cbtgrn->cbtgrp", states, scaled)
    else:
        out = _einsum(spec, "bgrpn,cbtgn->cbtgrp", states, columns[:, :, :, :, 0])
        out = out if total is None else out * total[None]
    if empty is not None:
        out = jnp.where(empty.reshape(1, -1, 1, 1, 1, 1), 0, out)
    if past is not None:
        scores = _past_scores(spec, past, columns)
        update = past.update.reshape(*past.update.shape[:2], groups, rep, spec.value_dim)
        out = out + _einsum(spec, "cbtjgr,bjgrp->cbtgrp", scores, update)
    if spec.decay == "scalar":
        out = out * decay[None]
    return out.reshape(num_columns, batch, num_tokens, spec.num_heads, spec.value_dim)


def _past_scores(spec: ReplaySpec, past: Records, columns: jax.Array) -> jax.Array:
    """<k_j, exp(sum of decays after j) * r> for columns [C, B, T, G, 1 or rep, N]."""
    suffix = _grouped(spec, jnp.exp(_suffix_sums(past.log_decay)))
    key = past.key.astype(spec.compute_dtype)
    if spec.decay == "channel":
        return _einsum(spec, "bjgrn,cbtgrn->cbtjgr", key[:, :, :, None] * suffix, columns)
    scores = _einsum(spec, "bjgn,cbtgn->cbtjg", key, columns[:, :, :, :, 0])
    return scores[..., None] * suffix[None, :, None, :, :, :, 0]


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
    records: Records,
    *,
    segment: jax.Array | None = None,
) -> jax.Array:
    """The state [B, H, P, N] after the records, by one matrix product: the form for prefill.

    Args:
      spec: the layer.
      checkpoint: [B, H, P, N].
      records: J records.
      segment: None, or [B, J] int32 reset counts; records before the last reset are forgotten.
    """
    total, key = _fold_operands(spec, records, segment)
    return checkpoint * total + _einsum(spec, "bjhp,bjhn->bhpn", records.update, key)


def fold_elementwise(
    spec: ReplaySpec, checkpoint: jax.Array, empty: jax.Array | None, records: Records
) -> jax.Array:
    """The same state as `fold`, as one elementwise expression.

    XLA writes this form over a donated checkpoint; a matrix product would hold another state of
    temporary memory. `empty` as in `read_past`.
    """
    if empty is not None:
        checkpoint = jnp.where(empty.reshape(-1, 1, 1, 1), 0, checkpoint)
    total, key = _fold_operands(spec, records, None)
    state = checkpoint * total
    for j in range(records.update.shape[1]):
        state = state + records.update[:, j, :, :, None] * key[:, j, :, None, :]
    return state


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
    key = jnp.repeat(records.key, spec.heads_per_group, axis=2).astype(spec.compute_dtype)
    return total, key * suffix


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
    decay = _grouped(spec, jnp.exp(_segment_sums(tokens.log_decay)))
    if spec.decay == "channel":
        scores = _einsum(
            spec, "bjgn,btjgrn,btgn->btjgr", key, decay, vectors
        )
    else:
        scores = _einsum(spec, "bjgn,btgn->btjg", key, vectors)[..., None] * decay[..., 0]
    scores = jnp.where(mask[..., None, None], scores, 0)
    return scores.reshape(batch, num_tokens, num_tokens, spec.num_heads)


def _grouped(spec: ReplaySpec, x: jax.Array) -> jax.Array:
    """[..., H, D] as [..., G, H / G, D]."""
    return x.reshape(*x.shape[:-2], spec.num_groups, spec.heads_per_group, x.shape[-1])


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
