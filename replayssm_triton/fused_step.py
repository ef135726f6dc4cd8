"""The decode step as one kernel: append, decays, scores, evaluation, and the fold of rows due.

Here are steps of several tokens, and the fold alone; a step of one is in `one_token`. A program
holds a tile of the state, some rows of one head of one batch row, in registers. All that it does is
local to these rows but for the scores of keys, which every program computes for itself:

    weights  the decay from each record to the end of the window
    reads    S r for every new q (and k, delta rule), in one pass over the tile
    scores   <k_j, r> of the window's and the new keys with the same vectors
    rows     replay of the window, the triangular solve, and the output

A row whose window is full also folds: S <- S diag(exp G) + sum_j u_j k_j^T, to float32 accuracy,
and the tile is written back. Whether to fold is read from the pointer in device memory.

Decays are kept as exponentials of sums of log-decays over segments that meet at the end of the
window (all at most 1), so products of them neither overflow nor lose small gates behind large ones.

The key channels of a tile have two axes, [rows, C, L]: a warp then reads whole lines, and a sum
over channels is mostly one over registers of a thread.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import triton
import triton.language as tl

from replayssm_triton.calls import launch
from replayssm_triton.configs import Config, channels, choose, choose_one_token, next_power_of_2
from replayssm_triton.one_token import replay_token_additive, replay_token_delta
from replayssm_triton.parts import _fold, _load, _over_channels, _place, _slot, _vector

# Records that are scored at once.
BLOCK = 16


class Ring(NamedTuple):
    """Arrays of the ring; None where the recurrence has no use for it.

    Attributes:
      log_decay: [B, R, H] or [B, R, H, N] float32.
      key: [B, R, G, N].
      value: [B, R, H, P], additive rule.
      beta: [B, R, H] float32, additive rule.
      update: [B, R, H, P] float32, delta rule.
    """

    log_decay: Any
    key: Any
    value: Any
    beta: Any
    update: Any


class Rows(NamedTuple):
    """[B] each: what the pointer says of a row; int32, but for `fresh`.

    Attributes:
      start: slot of the oldest committed record, a multiple of 8.
      length: committed records.
      num_new: how many of the T tokens are real; a row with 0 is left untouched.
      fresh: bool, whether the checkpoint counts as zero, whatever it holds.
    """

    start: Any
    length: Any
    num_new: Any
    fresh: Any


@triton.jit
def _block_decay(
    decays, first, filled, i, n, in_n,
    H: tl.constexpr, R: tl.constexpr, N: tl.constexpr, CHANNEL: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Sum of the log-decays of block i, which counts from the newest records back."""
    j = filled - 1 - i * J - tl.arange(0, J)
    slots = _slot(first, tl.maximum(j, 0), R)
    if CHANNEL:
        place = slots[:, None, None] * (H * N) + n
        g = tl.load(decays + place, mask=(j >= 0)[:, None, None] & in_n, other=0.0)
        return tl.sum(g, axis=0, keep_dims=True)
    else:
        return tl.sum(tl.load(decays + slots * H, mask=j >= 0, other=0.0), axis=0)


@triton.jit
def _window(
    decays, keys, records, betas, first, filled, i, later, n, in_n, p, in_p,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, J: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Block i, which counts from the newest records back: keys, weighted records, and decay.

    `later` is the log-decay over the blocks of newer records. Keys are [J, C, L], with channel
    decay as the window's end sees them; otherwise records [J, rows] are weighted so. The decay is
    the log-decay over this block and those of newer records.
    """
    row = tl.arange(0, J)
    j = filled - 1 - i * J - row
    live = j >= 0
    slots = _slot(first, tl.maximum(j, 0), R)
    newer = _slot(first, tl.maximum(j + 1, 0), R)
    has_newer = (j >= -1) & (row > 0)
    oldest = filled - (i + 1) * J
    if CHANNEL:
        place = newer[:, None, None] * (H * N) + n
        g = tl.load(decays + place, mask=has_newer[:, None, None] & in_n, other=0.0)
        g_oldest = _vector(
            decays, _slot(first, tl.maximum(oldest, 0), R), oldest >= 0, N, H * N, C, L
        )
    else:
        g = tl.load(decays + newer * H, mask=has_newer, other=0.0)
        at_oldest = _slot(first, tl.maximum(oldest, 0), R) * H
        g_oldest = tl.load(decays + at_oldest, mask=oldest >= 0, other=0.0)
    place = slots[:, None, None] * (G * N) + n
    key = tl.load(keys + place, mask=live[:, None, None] & in_n, other=0.0).to(tl.float32)
    if not DELTA:
        weight = tl.load(betas + slots * H, mask=live, other=0.0)
    # The last load here decides how sums over records are laid out.
    place = slots[:, None] * (H * P) + p[None, :]
    mask = live[:, None] & in_p[None, :]
    record = tl.load(records + place, mask=mask, other=0.0).to(tl.float32)
    since = tl.cumsum(g, axis=0) + later
    if CHANNEL:
        total = tl.sum(g, axis=0, keep_dims=True) + (later + g_oldest)
        key = key * tl.exp(since)
        if not DELTA:
            record = record * weight[:, None]
    else:
        total = tl.sum(g, axis=0) + (later + g_oldest)
        decay = tl.exp(since)
        if not DELTA:
            decay = decay * weight
        record = record * decay[:, None]
    return key, record, total


@triton.jit
def _replay(r, key, record):
    """Sum over records of the score of their key with r times the record, [rows]."""
    return tl.sum(record * _over_channels(key * r)[:, None], axis=0)


@triton.jit
def _append(
    slot, kept, leads_head, leads_group, updates, k, v, g, beta, decays, keys, records, betas,
    n, in_n, p, in_p,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, TP: tl.constexpr,
):  # fmt: skip
    """Record the tokens `kept` from `slot` on: what several programs share, one of them does."""
    token = tl.arange(0, TP)
    slots = (slot + token) % R
    of_rows = kept[:, None] & in_p[None, :]
    of_head = kept & leads_head
    of_key = (kept & leads_group)[:, None, None] & in_n
    # Loads before the first store, to wait for them once.
    key = tl.load(k + token[:, None, None] * (G * N) + n, mask=of_key, other=0.0)
    if DELTA:
        record = updates
    else:
        record = tl.load(v + token[:, None] * (H * P) + p[None, :], mask=of_rows, other=0.0)
        betas_new = tl.load(beta + token * H, mask=of_head, other=0.0)
    if CHANNEL:
        of_gate = of_head[:, None, None] & in_n
        gate = tl.load(g + token[:, None, None] * (H * N) + n, mask=of_gate, other=0.0)
        tl.store(decays + slots[:, None, None] * (H * N) + n, gate, mask=of_gate)
    else:
        gate = tl.load(g + token * H, mask=of_head, other=0.0)
        tl.store(decays + slots * H, gate, mask=of_head)
    tl.store(records + slots[:, None] * (H * P) + p[None, :], record, mask=of_rows)
    if not DELTA:
        tl.store(betas + slots * H, betas_new, mask=of_head)
    tl.store(keys + slots[:, None, None] * (G * N) + n, key, mask=of_key)


@triton.jit
def _step_row(
    b, head, group, part, p, n, real,
    start, length, fresh, q, k, v, g, beta, output, state, decays, keys, records, betas,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr,
    MASKED: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    TP: tl.constexpr,
):  # fmt: skip
    """The step of a program's rows, `real` of whose T tokens are real."""
    # From here on pointers are to this row and head, and offsets of 32 bits do.
    GATES: tl.constexpr = N if CHANNEL else 1
    state += (b * H + head) * (P * N)
    q += (b * T * G + group) * N
    k += (b * T * G + group) * N
    v += (b * T * H + head) * P
    g += (b * T * H + head) * GATES
    beta += b * T * H + head
    output += (b * T * H + head) * P
    decays += (b * R * H + head) * GATES
    keys += (b * R * G + group) * N
    records += (b * R * H + head) * P
    betas += b * R * H + head
    in_n, in_p = n < N, p < P
    token = tl.arange(0, TP)

    # What depends on nothing comes first, and the barrier keeps it there.
    at_tile = state + p[:, None, None] * N + n
    mask = in_p[:, None, None] & in_n
    WHOLE: tl.constexpr = P % ROWS == 0 and C * L == N
    tile = _load(at_tile, mask, WHOLE)
    first, filled = tl.load(start + b), tl.load(length + b)
    is_fresh = tl.load(fresh + b) != 0
    place = token[:, None, None] * (G * N) + n
    new_key = tl.load(k + place, mask=(token < T)[:, None, None] & in_n, other=0.0)
    new_key = new_key.to(tl.float32)
    tl.debug_barrier()

    due = filled + real > W
    # More records than the window holds would be lost without a word: NaN instead.
    outrun = tl.where(filled > W, float("nan"), 0.0)
    if CHANNEL:
        total = tl.zeros((1, C, L), tl.float32)
        apart = tl.zeros((TP, C, L), tl.float32)
    else:
        total = 0.0
        apart = tl.zeros((TP,), tl.float32)
    since = total
    BLOCKS: tl.constexpr = (W + J - 1) // J
    live_blocks = tl.minimum((filled + J - 1) // J, BLOCKS)
    if BLOCKS == 1:
        key, record, total = _window(
            decays, keys, records, betas, first, filled, 0, total, n, in_n, p, in_p,
            H, G, P, N, R, DELTA, CHANNEL, J, C, L,
        )  # fmt: skip
    else:
        for i in range(0, live_blocks):
            total += _block_decay(decays, first, filled, i, n, in_n, H, R, N, CHANNEL, J)
    updates = tl.zeros((TP, ROWS), tl.float32)
    for t in range(0, T):
        value = tl.load(v + t * (H * P) + p, mask=in_p, other=0.0).to(tl.float32)
        strength = tl.load(beta + t * H)
        if CHANNEL:
            gate = _vector(g, t, True, N, H * N, C, L)
        else:
            gate = tl.load(g + t * H)
        # since: log-decay from the window's end to token t; apart: from each new token to it.
        since += gate
        scale = tl.exp(since)
        decayed = new_key
        if CHANNEL:
            apart = tl.where((token < t)[:, None, None], apart + gate, 0.0)
            decayed = new_key * tl.exp(apart)
        else:
            apart = tl.where(token < t, apart + gate, 0.0)
        for c in tl.static_range(0 if DELTA else 1, 2):  # the token's k, then its q
            if c == 0:
                r = _vector(k, t, True, N, G * N, C, L)
            else:
                r = _vector(q, t, True, N, G * N, C, L)
            if CHANNEL:
                seen = r * scale  # from the window's end
                read = _over_channels(tile * (seen * tl.exp(total)))
            else:
                seen = r
                read = _over_channels(tile * seen) * tl.exp(total)
            read = tl.where(is_fresh, 0.0, read) + outrun
            if BLOCKS == 1:
                read += _replay(seen, key, record)
            else:
                later = total * 0.0
                for i in range(0, live_blocks):
                    key, record, later = _window(
                        decays, keys, records, betas, first, filled, i, later, n, in_n, p, in_p,
                        H, G, P, N, R, DELTA, CHANNEL, J, C, L,
                    )  # fmt: skip
                    read += _replay(seen, key, record)
            if not CHANNEL:
                read = read * scale
            score = _over_channels(decayed * r)
            if not CHANNEL:
                score = score * tl.exp(apart)
            if c == 0:
                score = tl.where(token < t, score, 0.0)
                value = value - read - tl.sum(updates * score[:, None], axis=0)
            else:
                score = tl.where(token <= t, score, 0.0)
                value = value * strength
                updates = tl.where((token == t)[:, None], value[None, :], updates)
                out = read + tl.sum(updates * score[:, None], axis=0)
        if MASKED:
            out = tl.where(t < real, out, 0.0)
        tl.store(output + t * (H * P) + p, out.to(output.dtype.element_ty), mask=in_p)

    slot = first + filled
    if due:
        slot = (slot + 7) // 8 * 8
    kept = token < real
    leads_head = part == 0
    _append(
        slot, kept, leads_head, leads_head & (head % (H // G) == 0), updates, k, v, g, beta,
        decays, keys, records, betas, n, in_n, p, in_p, H, G, P, N, R, DELTA, CHANNEL, TP,
    )  # fmt: skip
    if due:
        _fold(
            state, decays, keys, records, betas, first, filled, is_fresh, outrun, part, None, None,
            H, G, P, N, R, W, DELTA, CHANNEL, ROWS, 1, False,
        )  # fmt: skip


@triton.jit
def _step(
    start, length, num_new, fresh, q, k, v, g, beta, output, state, decays, keys, records, betas,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr,
    MASKED: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    TP: tl.constexpr,
):  # fmt: skip
    b, head, group, part, p, n = _place(H, G, P, N, ROWS, C, L)
    real = T
    if MASKED:
        real = tl.load(num_new + b)
    if real > 0:
        _step_row(
            b, head, group, part, p, n, real,
            start, length, fresh, q, k, v, g, beta, output, state, decays, keys, records, betas,
            T, H, G, P, N, R, W, DELTA, CHANNEL, MASKED, ROWS, C, L, J, TP,
        )  # fmt: skip
    else:
        token = tl.arange(0, TP)[:, None]
        at = ((b * T + token) * H + head) * P + p[None, :]
        zeros = tl.zeros((TP, ROWS), output.dtype.element_ty)
        tl.store(output + at, zeros, mask=(token < T) & (p < P)[None, :])


@triton.jit
def replay_step_delta(
    start, length, num_new, fresh, q, k, v, g, beta,
    _state, _decays, _keys, _records,
    output, state, decays, keys, records,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr,
    MASKED: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    TP: tl.constexpr,
):  # fmt: skip
    """The step under the delta rule, whose ring has no betas."""
    _step(
        start, length, num_new, fresh, q, k, v, g, beta,
        output, state, decays, keys, records, beta,
        T, H, G, P, N, R, W, DELTA, CHANNEL, MASKED, ROWS, C, L, J, TP,
    )  # fmt: skip


@triton.jit
def replay_step_additive(
    start, length, num_new, fresh, q, k, v, g, beta,
    _state, _decays, _keys, _records, _betas,
    output, state, decays, keys, records, betas,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr,
    MASKED: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    TP: tl.constexpr,
):  # fmt: skip
    """The step under the additive rule."""
    _step(
        start, length, num_new, fresh, q, k, v, g, beta,
        output, state, decays, keys, records, betas,
        T, H, G, P, N, R, W, DELTA, CHANNEL, MASKED, ROWS, C, L, J, TP,
    )  # fmt: skip


@triton.jit
def replay_fold(
    start, length, where, fresh, decays, keys, records, betas, _state, state,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr, ROWS: tl.constexpr,
    C: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Fold the rows `where`; under the delta rule `betas` is not read."""
    b, head, group, part, _, _ = _place(H, G, P, N, ROWS, C, L)
    if tl.load(where + b) != 0:
        GATES: tl.constexpr = N if CHANNEL else 1
        filled = tl.load(length + b)
        _fold(
            state + (b * H + head) * (P * N),
            decays + (b * R * H + head) * GATES,
            keys + (b * R * G + group) * N,
            records + (b * R * H + head) * P,
            betas + (b * R * H + head),
            tl.load(start + b), filled, tl.load(fresh + b) != 0,
            tl.where(filled > W, float("nan"), 0.0), part, None, None,
            H, G, P, N, R, W, DELTA, CHANNEL, ROWS, 1, False,
        )  # fmt: skip


def _constants(checkpoint: jax.Array, ring: Ring, window: int, config: Config) -> dict[str, int]:
    _, num_heads, value_dim, key_dim = checkpoint.shape
    c, lanes = channels(key_dim)
    return dict(
        H=num_heads,
        G=ring.key.shape[2],
        P=value_dim,
        N=key_dim,
        R=ring.key.shape[1],
        W=window,
        DELTA=ring.update is not None,
        CHANNEL=ring.log_decay.ndim == 4,
        ROWS=config.rows,
        C=c,
        L=lanes,
    )


def _programs(checkpoint: jax.Array, config: Config) -> int:
    batch, num_heads, value_dim, _ = checkpoint.shape
    return batch * num_heads * -(-value_dim // (config.rows * config.tiles))


def step(
    checkpoint: jax.Array,
    ring: Ring,
    rows: Rows,
    tokens: tuple[jax.Array, ...],
    *,
    window: int,
    masked: bool,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array, Ring]:
    """Fold the rows that are due, append T tokens, evaluate their outputs.

    What recurrence it is the ring says: an `update` means the delta rule, a `log_decay` of four
    axes one decay for each key channel.

    Args:
      checkpoint: [B, H, P, N] float32, updated in place where its buffer is donated.
      ring: R slots; updated in place as well.
      rows: pointers.
      tokens: q, k [B, T, G, N]; v [B, T, H, P]; g [B, T, H] or [B, T, H, N] float32; beta
        [B, T, H] float32.
      window: most committed records that a row may hold.
      masked: whether rows may have fewer than T real tokens.
      config: None for the cut that `choose` finds.

    Returns:
      Outputs [B, T, H, P] in the dtype of v, the checkpoint and the ring.
    """
    batch, num_heads, value_dim, key_dim = checkpoint.shape
    value = tokens[2]
    num_tokens = value.shape[1]
    delta = ring.update is not None
    pick = choose_one_token if num_tokens == 1 else choose
    config = config or pick(batch * num_heads, value_dim, key_dim)
    if num_tokens == 1:
        kernel = replay_token_delta if delta else replay_token_additive
        how = dict(TILES=config.tiles, STAGES=config.stages, WARPS=config.num_warps, J=8)
    else:
        kernel = replay_step_delta if delta else replay_step_additive
        how = dict(T=num_tokens, TP=next_power_of_2(num_tokens), J=BLOCK)
    in_place = [checkpoint, ring.log_decay, ring.key, ring.update if delta else ring.value]
    found = launch(
        kernel,
        (*rows, *tokens),
        in_place if delta else [*in_place, ring.beta],
        [jax.ShapeDtypeStruct(value.shape, value.dtype)],
        programs=_programs(checkpoint, config),
        num_warps=config.num_warps,
        MASKED=masked,
        **how,
        **_constants(checkpoint, ring, window, config),
    )
    output, checkpoint, log_decay, key, record, *beta = found
    if delta:
        return output, checkpoint, Ring(log_decay, key, None, None, record)
    return output, checkpoint, Ring(log_decay, key, record, beta[0], None)


def fold(
    checkpoint: jax.Array,
    ring: Ring,
    rows: Rows,
    *,
    window: int,
    config: Config | None = None,
) -> jax.Array:
    """The checkpoint with the records of the rows folded whose `num_new` is not 0.

    Args:
      checkpoint: [B, H, P, N] float32, updated in place where its buffer is donated.
      ring: R slots.
      rows: pointers.
      window: most committed records that a row may hold.
      config: None for the cut that `choose` finds.
    """
    batch, num_heads, value_dim, key_dim = checkpoint.shape
    config = config or choose(batch * num_heads, value_dim, key_dim)
    record = ring.value if ring.update is None else ring.update
    betas = ring.log_decay if ring.beta is None else ring.beta
    (checkpoint,) = launch(
        replay_fold,
        (*rows, ring.log_decay, ring.key, record, betas),
        [checkpoint],
        [],
        programs=_programs(checkpoint, config),
        num_warps=config.num_warps,
        **_constants(checkpoint, ring, window, config),
    )
    return checkpoint
