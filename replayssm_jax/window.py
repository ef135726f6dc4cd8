"""The algebra of one window in XLA: reads, updates of new tokens, outputs, and the fold.

With a checkpoint S_0, records j = 1..m after it and G_t = g_1 + ... + g_t,

    S_t   = S_0 diag(exp G_t) + sum_{j<=t} u_j (exp(G_t - G_j) * k_j)^T
    S_t r = S_0 (exp(G_t) * r) + sum_{j<=t} <k_j, exp(G_t - G_j) * r> u_j

so outputs need no state to be built. Exponents are sums of log-decays over segments, all of one
sign: a difference of prefix sums would lose small gates behind a large one, and exp(G_t) exp(-G_j)
overflows. Prefill, step, verify and flush are all made of the functions here.

Log-decays have a last axis D: 1 for scalar decay, N for per-channel decay. Sums of them are matrix
products with a constant 0/1 matrix: a few tokens at a time that is one small kernel on every
device, where a cumulative sum is many.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from replayssm_jax import precision
from replayssm_jax.spec import ReplaySpec

# Bytes of decays between pairs of records that a fold may hold at once.
_PAIR_BYTES = 1 << 26


class Tokens(NamedTuple):
    """T new tokens; a token that is not real is an identity: zero g, k and beta.

    Attributes:
      q: [B, T, G, N].
      k: [B, T, G, N].
      v: [B, T, H, P].
      log_decay: [B, T, H, D], compute dtype.
      beta: [B, T, H], compute dtype.
      segment: None, or [B, T] int32, how many resets lie at or before the token.
      ancestry: None where each token follows the one before it, or [B, T, J] bool, whether token j
        is t or an ancestor of it; j <= t.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array
    segment: jax.Array | None = None
    ancestry: jax.Array | None = None

    @property
    def before(self) -> jax.Array:
        """[T, J] or [B, T, J] bool, whether token j is t or comes before it."""
        if self.ancestry is not None:
            return self.ancestry
        order = jnp.arange(self.k.shape[1])
        return order[:, None] >= order[None]


class Pairs(NamedTuple):
    """What new tokens are to each other and to the past; nothing of it depends on the state.

    Attributes:
      decay: [B, T, H, D], exp(G_t), from the last past record to the token.
      key_scores: [B, T, J, H], <k_j, exp(G_t - G_j) * k_t>, zero unless j comes before t; None
        where no update depends on another one.
      query_scores: [B, T, J, H], <k_j, exp(G_t - G_j) * q_t>, zero unless j is t or before it.
    """

    decay: jax.Array
    key_scores: jax.Array | None
    query_scores: jax.Array


class Records(NamedTuple):
    """J records, oldest first, seen from behind the last one; a dead one is an identity.

    Attributes:
      total: [B, 1, H, D], decay of what lies before the records.
      decay: [B, J, H, D], decay of each record by those after it.
      key: [B, J, G, N].
      update: [B, J, H, P], u_j, compute dtype.
    """

    total: jax.Array
    decay: jax.Array
    key: jax.Array
    update: jax.Array


def relate(spec: ReplaySpec, tokens: Tokens) -> Pairs:
    """Decays and inner products among new tokens."""
    decay = jnp.exp(_sums(spec, tokens.before, tokens.log_decay))
    pair_decay = jnp.exp(_segment_sums(spec, tokens))
    solves = spec.rule == "delta" and tokens.k.shape[1] > 1
    return Pairs(
        decay=decay,
        key_scores=_scores(spec, tokens, tokens.k, pair_decay, strict=True) if solves else None,
        query_scores=_scores(spec, tokens, tokens.q, pair_decay, strict=False),
    )


def make_records(
    spec: ReplaySpec,
    log_decay: jax.Array,
    key: jax.Array,
    update: jax.Array,
    segment: jax.Array | None = None,
) -> Records:
    """Records from log-decays [B, J, H, D], keys and updates.

    `segment` is None, or [B, J] int32 reset counts: records before the last reset are forgotten.
    What lies before all of them is not: `fold` is told so by `empty`.
    """
    order = jnp.arange(log_decay.shape[1])
    total = jnp.exp(jnp.sum(log_decay, axis=1, keepdims=True))
    decay = jnp.exp(_sums(spec, order[:, None] < order[None], log_decay))
    if segment is not None:
        decay = jnp.where((segment == segment[:, -1:])[:, :, None, None], decay, 0)
    return Records(total=total, decay=decay, key=key, update=update)


def read_past(
    spec: ReplaySpec,
    checkpoint: Any,
    empty: jax.Array | None,
    past: Records | None,
    tokens: Tokens,
    pairs: Pairs,
) -> tuple[jax.Array | None, jax.Array]:
    """What checkpoint and past records contribute to reads S_t k_t and S_t q_t of new tokens.

    All columns are read in one pass over the checkpoint.

    Args:
      spec: the layer.
      checkpoint: [B, H, P, N], an array of any dtype or `precision.Scaled`.
      empty: None, or bool [B] (or scalar): rows whose checkpoint counts as zero, whatever it holds.
      past: records between the checkpoint and the new tokens, or None.
      tokens: the new tokens.
      pairs: `relate(spec, tokens)`.

    Returns:
      Key reads (None under the additive rule, which needs none) and query reads, each
      [B, T, H, P], compute dtype.
    """

    def remembered(reads: jax.Array) -> jax.Array:
        # Not by a decay of zero: a state that has overflowed would stay.
        if tokens.segment is None:
            return reads
        return jnp.where((tokens.segment == 0)[:, :, None, None], reads, 0)

    if spec.rule == "additive":
        return None, remembered(_read(spec, checkpoint, empty, past, tokens.q, pairs.decay))
    columns = jnp.concatenate([tokens.k, tokens.q], axis=1)
    decay = jnp.concatenate([pairs.decay, pairs.decay], axis=1)
    key_reads, query_reads = jnp.split(
        _read(spec, checkpoint, empty, past, columns, decay), 2, axis=1
    )
    return remembered(key_reads), remembered(query_reads)


def _read(
    spec: ReplaySpec,
    checkpoint: Any,
    empty: jax.Array | None,
    past: Records | None,
    columns: jax.Array,
    decay: jax.Array,
) -> jax.Array:
    """Columns [B, C, G, N] through past records and checkpoint, as [B, C, H, P]."""
    columns = columns.astype(spec.compute_dtype)
    if spec.decay == "channel":
        columns = _per_head(spec, columns) * decay
        out = _matvecs(spec, checkpoint, columns if past is None else columns * past.total)
    else:
        out = _matvecs(spec, checkpoint, columns)
        out = out if past is None else out * past.total
    if empty is not None:
        out = jnp.where(empty.reshape(-1, 1, 1, 1), 0, out)
    if past is not None:
        scores = _past_scores(spec, past, columns)
        out = out + _einsum(spec, "bcjh,bjhp->bchp", scores, past.update)
    return out * decay if spec.decay == "scalar" else out


def _matvecs(spec: ReplaySpec, state: Any, columns: jax.Array) -> jax.Array:
    """[B, H, P, N] times each of [B, C, H or G, N], as [B, C, H, P].

    Heads that share a column are one matrix, and the product keeps the order of the state's axes:
    other orders make XLA transpose the whole state first.
    """
    values = state.values if isinstance(state, precision.Scaled) else state
    batch, num_columns, keys = columns.shape[:3]
    rows = values.reshape(batch, keys, -1, spec.key_dim).astype(spec.compute_dtype)
    out = _einsum(spec, "bkrn,bckn->bkrc", rows, columns)
    out = jnp.moveaxis(out, 3, 1).reshape(batch, num_columns, spec.num_heads, spec.value_dim)
    if isinstance(state, precision.Scaled):  # one factor for each product, not for each element
        out = out * state.scale.astype(spec.compute_dtype)[:, None]
    return out


def _past_scores(spec: ReplaySpec, past: Records, columns: jax.Array) -> jax.Array:
    """<k_j, decay_j * r> for columns [B, C, G or H, N], as [B, C, J, H]."""
    key = past.key.astype(spec.compute_dtype)
    if spec.decay == "channel":
        return _einsum(spec, "bjhn,bchn->bcjh", _per_head(spec, key) * past.decay, columns)
    scores = _einsum(spec, "bjgn,bcgn->bcjg", key, columns)
    return jnp.repeat(scores, spec.heads_per_group, axis=3) * past.decay[:, None, :, :, 0]


def read_decays(spec: ReplaySpec, log_decay: jax.Array) -> jax.Array:
    """Log-decays as steps read them, in their own dtype: rounded to `spec.read_decay_dtype`."""
    dtype = spec.read_decay_dtype
    if dtype is None:
        return log_decay
    info = jnp.finfo(dtype)
    unit, normal = float(info.smallest_subnormal), float(info.smallest_normal)
    clipped = jnp.maximum(log_decay, float(info.min))
    return jnp.where(clipped > -normal, jnp.round(clipped / unit) * unit, _rounded(clipped, dtype))


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """x with the digits of a 16-bit dtype: XLA may leave out a cast there and back."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=jnp.finfo(dtype).nmant)


def solve_updates(
    spec: ReplaySpec,
    tokens: Tokens,
    pairs: Pairs,
    key_reads: jax.Array | None,
    *,
    cached: bool = False,
) -> jax.Array:
    """u of the new tokens: beta v, or under the delta rule the solution of the triangular system

        u_i = beta_i (v_i - base_i - sum_{j<i} <k_j, exp(G_i - G_j) * k_i> u_j)

    by forward substitution: other inverses lose everything on keys that are not normalised.

    Args:
      spec: the layer.
      tokens: the new tokens.
      pairs: `relate(spec, tokens)`.
      key_reads: [B, T, H, P], base, from `read_past`; None under the additive rule.
      cached: round each to `spec.cached_dtype` before another one reads it, as steps do.

    Returns:
      [B, T, H, P], compute dtype.
    """
    beta = tokens.beta[..., None]
    value = tokens.v.astype(spec.compute_dtype)
    if key_reads is None:
        return beta * value
    rhs = beta * (value - key_reads)
    if tokens.segment is not None:
        # The outputs show that a state has overflowed. Here zeros of the system would not stop it
        # at a reset.
        rhs = jnp.where(jnp.isfinite(key_reads), rhs, 0)
    rounds = cached and spec.cached_dtype != spec.compute_dtype
    if pairs.key_scores is None:
        return _rounded(rhs, spec.cached_dtype) if rounds else rhs
    system = pairs.key_scores * tokens.beta[:, :, None]
    if rounds:

        def solve_one(i: jax.Array, found: jax.Array) -> jax.Array:
            row, rest = (jax.lax.dynamic_index_in_dim(x, i, 1, False) for x in (system, rhs))
            update = rest - _einsum(spec, "bjh,bjhp->bhp", row, found)
            update = _rounded(update, spec.cached_dtype)
            return jax.lax.dynamic_update_index_in_dim(found, update, i, 1)

        solved: jax.Array = jax.lax.fori_loop(0, rhs.shape[1], solve_one, jnp.zeros_like(rhs))
        return solved
    system = jnp.moveaxis(system, 3, 1)
    solution = jax.lax.linalg.triangular_solve(
        system, jnp.moveaxis(rhs, 2, 1), left_side=True, lower=True, unit_diagonal=True
    )
    return jnp.moveaxis(solution, 1, 2)


def evaluate(
    spec: ReplaySpec, pairs: Pairs, update: jax.Array, query_reads: jax.Array
) -> jax.Array:
    """Outputs S_t q_t of the new tokens; no state is built.

    Args:
      spec: the layer.
      pairs: `relate(spec, tokens)`.
      update: [B, T, H, P], u of the new tokens.
      query_reads: [B, T, H, P], from `read_past`.

    Returns:
      [B, T, H, P], compute dtype.
    """
    return query_reads + _einsum(spec, "btjh,bjhp->bthp", pairs.query_scores, update)


def fold(spec: ReplaySpec, checkpoint: Any, empty: jax.Array | None, records: Records) -> jax.Array:
    """The state [B, H, P, N] after the records, by one matrix product: the form for prefill.

    `checkpoint` and `empty` as in `read_past`; the state is in the compute dtype.
    """
    total, key = _fold_operands(spec, records)
    new = _einsum(spec, "bjhp,bjhn->bhpn", records.update, key)
    return _mask_empty(precision.decode(checkpoint, spec.compute_dtype), empty) * total + new


def solve_records(
    spec: ReplaySpec, checkpoint: Any, empty: jax.Array | None, tokens: Tokens
) -> jax.Array:
    """u [B, J, H, P] of records, solved again from the checkpoint for a fold.

    Updates that were computed from a read copy carry its rounding, and a fold of them would feed
    that back into the recurrence.

    Args:
      spec: the layer.
      checkpoint: [B, H, P, N], what the records follow.
      empty: as in `read_past`.
      tokens: the records, oldest first; dead ones are identities. Their queries are not looked at.
    """

    def solve(checkpoint: Any, empty: jax.Array | None, tokens: Tokens) -> jax.Array:
        pairs = relate(spec, tokens)
        reads = _read(spec, checkpoint, empty, None, tokens.k, pairs.decay)
        return solve_updates(spec, tokens, pairs, reads)

    batch, size = tokens.k.shape[:2]
    fitting = max(1, _PAIR_BYTES // (size**2 * spec.num_heads * spec.decay_dim * 4))
    if fitting >= batch:
        return solve(checkpoint, empty, tokens)
    if empty is not None:
        empty = jnp.broadcast_to(empty, (batch,))

    def solve_row(row: Any) -> jax.Array:
        return solve(*jax.tree.map(lambda x: x[None], row))[0]

    update: jax.Array = jax.lax.map(solve_row, (checkpoint, empty, tokens), batch_size=fitting)
    return update


def fold_in_place(
    spec: ReplaySpec, stored: precision.Stored, empty: jax.Array | None, records: Records
) -> precision.Stored:
    """The same state as `fold`, elementwise and a block of heads at a time, over what is stored.

    A matrix product would hold another state of temporary memory, and so would one elementwise
    expression once XLA splits it; the loop keeps the temporaries to a block.
    """
    total, key = _fold_operands(spec, records)
    width = spec.num_heads // _num_blocks(spec.num_heads)

    def fold_block(i: jax.Array, stored: precision.Stored) -> precision.Stored:
        def block(x: jax.Array, axis: int = 1) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, i * width, width, axis)

        old = jax.tree.map(block, stored)
        state = precision.decode(old.checkpoint, spec.compute_dtype)
        new = _mask_empty(state, empty) * block(total)
        update, keys = block(records.update, 2), block(key, 2)
        for j in range(update.shape[1]):
            new = new + update[:, j, :, :, None] * keys[:, j, :, None, :]
        written = precision.store(new, old.rounding_key, spec.state_dtype, spec.read_dtype)
        return jax.tree.map(
            lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, i * width, 1), stored, written
        )

    return jax.lax.fori_loop(0, spec.num_heads // width, fold_block, stored)


def _num_blocks(num_heads: int) -> int:
    """The least divisor of `num_heads` that is at least 8, or all of them."""
    return next((n for n in range(8, num_heads) if num_heads % n == 0), num_heads)


def _mask_empty(checkpoint: jax.Array, empty: jax.Array | None) -> jax.Array:
    return checkpoint if empty is None else jnp.where(empty.reshape(-1, 1, 1, 1), 0, checkpoint)


def _fold_operands(spec: ReplaySpec, records: Records) -> tuple[jax.Array, jax.Array]:
    """Decay of the checkpoint [B, H, 1, D], and keys decayed to the end [B, J, H, N]."""
    key = _per_head(spec, records.key.astype(spec.compute_dtype)) * records.decay
    return jnp.moveaxis(records.total, 1, 2), key


def _scores(
    spec: ReplaySpec, tokens: Tokens, vectors: jax.Array, pair_decay: jax.Array, *, strict: bool
) -> jax.Array:
    """<k_j, exp(G_t - G_j) * r_t>, zero unless j is before t or (not strict) t, as [B, T, J, H]."""
    mask = _strictly(tokens.before) if strict else tokens.before
    mask = mask[None] if mask.ndim == 2 else mask
    if tokens.segment is not None:
        mask = mask & (tokens.segment[:, :, None] == tokens.segment[:, None, :])
    key = tokens.k.astype(spec.compute_dtype)
    vectors = vectors.astype(spec.compute_dtype)
    if spec.decay == "channel":
        vectors = _per_head(spec, vectors)[:, :, None] * pair_decay
        scores = _einsum(spec, "bjhn,btjhn->btjh", _per_head(spec, key), vectors)
    else:
        scores = _einsum(spec, "bjgn,btgn->btjg", key, vectors)
        scores = jnp.repeat(scores, spec.heads_per_group, axis=3) * pair_decay[..., 0]
    return jnp.where(mask[..., None], scores, 0)


def _per_head(spec: ReplaySpec, x: jax.Array) -> jax.Array:
    """[B, J, G, N] repeated to [B, J, H, N]."""
    return jnp.repeat(x, spec.heads_per_group, axis=2)


def _strictly(before: jax.Array) -> jax.Array:
    """`Tokens.before` without the token itself."""
    order = jnp.arange(before.shape[-1])
    itself = order[:, None] == order[None]
    return before & ~(itself if before.ndim == 2 else itself[None])


def _sums(spec: ReplaySpec, mask: jax.Array, g: jax.Array) -> jax.Array:
    """[B, T, H, D]: for each t the sum of g over the j with mask [T, J] or [B, T, J]."""
    subscripts = "tj,bjhd->bthd" if mask.ndim == 2 else "btj,bjhd->bthd"
    return _einsum_exact(subscripts, mask.astype(spec.compute_dtype), g)


def _segment_sums(spec: ReplaySpec, tokens: Tokens) -> jax.Array:
    """[B, T, J, H, D]: the sum of g over the tokens i with j < i <= t; 0 where j is not before t.

    On a tree, i is on the way from j to t.
    """
    upto, after = tokens.before, jnp.swapaxes(_strictly(tokens.before), -1, -2)
    within = (upto[..., :, None, :] & after[..., None, :, :]).astype(spec.compute_dtype)
    subscripts = "tji,bihd->btjhd" if within.ndim == 3 else "btji,bihd->btjhd"
    return _einsum_exact(subscripts, within, tokens.log_decay)


def _einsum_exact(subscripts: str, *operands: jax.Array) -> jax.Array:
    """For sums of log-decays, whose absolute error is the relative error of a decay."""
    return jnp.einsum(subscripts, *operands, precision="highest")


def _einsum(spec: ReplaySpec, subscripts: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *operands, precision=spec.precision)
