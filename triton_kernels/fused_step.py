"""The decode step as one kernel: append, decays, scores, evaluation, and the fold of rows due.

A program holds a tile of the state, some rows of one head of one batch row, in registers. All that
it does is local to these rows but for the scores of keys, which every program computes for itself:

    weights  the decay from each record to the end of the window
    reads    S r for every new q (and k, delta rule), in one pass over the tile
    scores   <k_j, r> of the window's and the new keys with the same vectors
    rows     replay of the window, the triangular solve, and the output

A row whose window is full also folds: S <- S diag(exp G) + sum_j u_j k_j^T, record by record in
float32, and the tile is written back. Whether to fold is read from the pointer in device memory.

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

from triton_kernels.calls import launch
from triton_kernels.configs import Config, channels, choose, next_power_of_2

# Records that are scored at once.
BLOCK = 16
# Records whose loads are in flight together in a fold.
UNROLL = tl.constexpr(4)


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
    """int32 [B] each: what the pointer says of a row.

    Attributes:
      start: slot of the oldest committed record, a multiple of 8.
      length: committed records.
      num_new: how many of the T tokens are real; a row with 0 is left untouched.
      fresh: not 0 where the checkpoint counts as zero, whatever it holds.
    """

    start: Any
    length: Any
    num_new: Any
    fresh: Any


@triton.jit
def _slot(first, j, R: tl.constexpr):
    """Slot of record j behind slot `first`, a multiple of 8."""
    return (first + j // 8 * 8) % R + j % 8


@triton.jit
def _load(pointers, mask, WHOLE: tl.constexpr):
    """Elements, zero where the mask is false; WHOLE says that it never is."""
    if WHOLE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _over_channels(x):
    """Sum over the key channels of a state tile: C lies in registers of a thread."""
    return tl.sum(tl.sum(x, axis=1), axis=1)


@triton.jit
def _score(keys, r):
    """<k, r> of keys [J, C, L], few enough that C lies over warps, and r [1, C, L]."""
    return tl.sum(tl.sum(keys * r, axis=2), axis=1)


@triton.jit
def _decay_within(
    ring, b, first, filled, i, later, n, in_n, head,
    H: tl.constexpr, N: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Log-decays of block i's records to the window's end, and of the block and those after it.

    `later` is the sum over the blocks after it. Sums start at the newest record.
    """
    j = i * J + tl.arange(0, J)
    after = ((j + 1) < filled) & ((j + 1) < (i + 1) * J)
    oldest = b * R + _slot(first, i * J, R)
    if CHANNEL:
        place = ((b * R + _slot(first, j + 1, R)) * H + head)[:, None, None] * N + n
        g = tl.load(ring + place, mask=after[:, None, None] & in_n, other=0.0)
        since = tl.cumsum(g, axis=0, reverse=True) + later
        g = tl.load(ring + (oldest * H + head) * N + n, mask=in_n & (i * J < filled), other=0.0)
        mine = (tl.arange(0, J) == 0)[:, None, None]
        total = tl.sum(tl.where(mine, since, 0.0), axis=0, keep_dims=True) + g
    else:
        place = (b * R + _slot(first, j + 1, R)) * H + head
        g = tl.load(ring + place, mask=after, other=0.0)
        since = tl.cumsum(g, axis=0, reverse=True) + later
        g = tl.load(ring + oldest * H + head, mask=i * J < filled, other=0.0)
        total = tl.sum(tl.where(tl.arange(0, J) == 0, since, 0.0), axis=0) + g
    return since, total


@triton.jit
def _window(
    decays, keys, betas, b, first, filled, i, later, n, in_n, head, group,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, R: tl.constexpr, DELTA: tl.constexpr,
    CHANNEL: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Keys [J, C, L] of block i (with their decay by channel), weights [J], and log-decays."""
    since, total = _decay_within(
        decays, b, first, filled, i, later, n, in_n, head, H, N, R, CHANNEL, J
    )
    j = i * J + tl.arange(0, J)
    live = j < filled
    slots = b * R + _slot(first, j, R)
    place = (slots * G + group)[:, None, None] * N + n
    key = tl.load(keys + place, mask=live[:, None, None] & in_n, other=0.0).to(tl.float32)
    if CHANNEL:
        key = key * tl.exp(since)
        weight = tl.where(live, 1.0, 0.0)
    else:
        weight = tl.where(live, tl.exp(since), 0.0)
    if not DELTA:
        weight = weight * tl.load(betas + slots * H + head, mask=live, other=0.0)
    return key, weight, total


@triton.jit
def _replay(
    r, key, weight, records, b, first, filled, i, p, in_p, head,
    H: tl.constexpr, P: tl.constexpr, R: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Sum over the records of block i of their score with r times the weighted record, [rows]."""
    j = i * J + tl.arange(0, J)
    place = ((b * R + _slot(first, j, R)) * H + head)[:, None] * P + p[None, :]
    mask = (j < filled)[:, None] & in_p[None, :]
    record = tl.load(records + place, mask=mask, other=0.0).to(tl.float32)
    return tl.sum(record * (_score(key, r) * weight)[:, None], axis=0)


@triton.jit
def _fold(
    tile, decays, keys, records, betas, b, first, filled, n, in_n, p, in_p, head, group,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr,
):  # fmt: skip
    """The tile with the records of the window folded, a few at a time from the oldest on."""
    filled = tl.minimum(filled, W)
    for turn in range(0, (filled + UNROLL - 1) // UNROLL):
        if CHANNEL:
            since = tl.zeros_like(n).to(tl.float32)
        else:
            since = 0.0
        added = tl.zeros_like(tile)
        for back in tl.static_range(UNROLL):
            j = turn * UNROLL + UNROLL - 1 - back
            live = j < filled
            slot = b * R + _slot(first, j, R)
            key = tl.load(keys + (slot * G + group) * N + n, mask=in_n & live, other=0.0)
            record = tl.load(
                records + (slot * H + head) * P + p[:, None, None],
                mask=in_p[:, None, None] & live,
                other=0.0,
            ).to(tl.float32)
            if not DELTA:
                record = record * tl.load(betas + slot * H + head, mask=live, other=0.0)
            if CHANNEL:
                added += record * (key.to(tl.float32) * tl.exp(since))
                g = tl.load(decays + (slot * H + head) * N + n, mask=in_n & live, other=0.0)
            else:
                added += record * tl.exp(since) * key.to(tl.float32)
                g = tl.load(decays + slot * H + head, mask=live, other=0.0)
            since += g
        tile = tile * tl.exp(since) + added
    return tile


@triton.jit
def _append(
    b, head, group, part, p, in_p, n, in_n, slot, kept, new_keys, updates, v, g, beta,
    decays, keys, records, betas,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    R: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr, TP: tl.constexpr,
):  # fmt: skip
    """Record the tokens `kept` from `slot` on: what several programs share, one of them does."""
    token = tl.arange(0, TP)
    slots = b * R + (slot + token) % R
    source, target = (b * T + token) * H + head, slots * H + head
    here = kept[:, None] & in_p[None, :]
    if DELTA:
        record = updates
    else:
        record = tl.load(v + source[:, None] * P + p[None, :], mask=here, other=0.0)
    tl.store(records + target[:, None] * P + p[None, :], record, mask=here)
    first_part = kept & (part == 0)
    if CHANNEL:
        mask = first_part[:, None, None] & in_n
        gates = tl.load(g + source[:, None, None] * N + n, mask=mask, other=0.0)
        tl.store(decays + target[:, None, None] * N + n, gates, mask=mask)
    else:
        gates = tl.load(g + source, mask=first_part, other=0.0)
        tl.store(decays + target, gates, mask=first_part)
    if not DELTA:
        tl.store(
            betas + target, tl.load(beta + source, mask=first_part, other=0.0), mask=first_part
        )
    leads_group = first_part & (head % (H // G) == 0)
    place = (slots * G + group)[:, None, None] * N + n
    tl.store(keys + place, new_keys, mask=leads_group[:, None, None] & in_n)


@triton.jit
def _place(
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
    C: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Where this program is: batch row, head, group, part of the head; its rows and channels."""
    parts: tl.constexpr = (P + ROWS - 1) // ROWS
    program = tl.program_id(0)
    part = program % parts
    head = program // parts % H
    b = (program // (parts * H)).to(tl.int64)
    p = part * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, C)[None, :, None] * L + tl.arange(0, L)[None, None, :]
    return b, head, head // (H // G), part, p, n


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
    in_n, in_p = n < N, p < P
    token = tl.arange(0, TP)
    is_token = token < T
    # Loads that depend on nothing come first, the widest ahead.
    at_tile = state + ((b * H + head) * P + p)[:, None, None] * N + n
    mask = in_p[:, None, None] & in_n
    WHOLE: tl.constexpr = P % ROWS == 0 and C * L == N
    if not CHANNEL:
        tile = _load(at_tile, mask, WHOLE)
    first, filled = tl.load(start + b), tl.load(length + b)
    is_fresh = tl.load(fresh + b) != 0
    at_keys = ((b * T + token) * G + group)[:, None, None] * N + n
    new_keys = tl.load(k + at_keys, mask=is_token[:, None, None] & in_n, other=0.0)
    new_key = new_keys.to(tl.float32)
    if T == 1:
        query = tl.load(q + (b * G + group) * N + n, mask=in_n, other=0.0).to(tl.float32)
    due = filled + real > W
    # More records than the window holds would be lost without a word: NaN instead.
    outrun = tl.where(filled > W, float("nan"), 0.0)

    if CHANNEL:
        total = tl.zeros((1, C, L), tl.float32)
        since = tl.zeros((1, C, L), tl.float32)
        apart = tl.zeros((TP, C, L), tl.float32)
    else:
        total = 0.0
        since = 0.0
        apart = tl.zeros((TP,), tl.float32)
    BLOCKS: tl.constexpr = (W + J - 1) // J
    live_blocks = tl.minimum((filled + J - 1) // J, BLOCKS)
    if BLOCKS == 1:
        key, weight, total = _window(
            decays, keys, betas, b, first, filled, 0, total, n, in_n, head, group,
            H, G, N, R, DELTA, CHANNEL, J,
        )  # fmt: skip
    if CHANNEL:
        tile = _load(at_tile, mask, WHOLE)
    if BLOCKS > 1:
        for turn in range(0, live_blocks):
            i = live_blocks - 1 - turn
            _, total = _decay_within(
                decays, b, first, filled, i, total, n, in_n, head, H, N, R, CHANNEL, J
            )
    updates = tl.zeros((TP, ROWS), tl.float32)
    for t in range(0, T):
        # since: log-decay from the window's end to token t; apart: from each new token to it.
        if CHANNEL:
            gate = tl.load(g + ((b * T + t) * H + head) * N + n, mask=in_n, other=0.0)
            earlier = (token < t)[:, None, None]
        else:
            gate = tl.load(g + (b * T + t) * H + head)
            earlier = token < t
        since += gate
        apart = tl.where(earlier, apart + gate, 0.0)
        value = tl.load(v + ((b * T + t) * H + head) * P + p, mask=in_p, other=0.0)
        value = value.to(tl.float32)
        if CHANNEL:
            decayed = new_key * tl.exp(apart)
            scale = tl.exp(since)
        else:
            decayed = new_key
            scale = 1.0
        for c in tl.static_range(0 if DELTA else 1, 2):  # the token's k, then its q
            if T == 1:
                if c == 0:
                    r = new_key
                else:
                    r = query
            else:
                at_token = ((b * T + t) * G + group) * N + n
                if c == 0:
                    r = tl.load(k + at_token, mask=in_n, other=0.0).to(tl.float32)
                else:
                    r = tl.load(q + at_token, mask=in_n, other=0.0).to(tl.float32)
            seen = r * scale  # from the window's end
            if CHANNEL:
                read = _over_channels(tile * (seen * tl.exp(total)))
            else:
                read = _over_channels(tile * seen) * tl.exp(total)
            read = tl.where(is_fresh, 0.0, read) + outrun
            if BLOCKS == 1:
                read += _replay(
                    seen, key, weight, records, b, first, filled, 0, p, in_p, head, H, P, R, J
                )
            else:
                later = total * 0.0
                for turn in range(0, live_blocks):
                    i = live_blocks - 1 - turn
                    key, weight, later = _window(
                        decays, keys, betas, b, first, filled, i, later, n, in_n, head, group,
                        H, G, N, R, DELTA, CHANNEL, J,
                    )  # fmt: skip
                    read += _replay(
                        seen, key, weight, records, b, first, filled, i, p, in_p, head, H, P, R, J
                    )
            score = _score(decayed, r)
            if not CHANNEL:
                read = read * tl.exp(since)
                score = score * tl.exp(apart)
            if c == 0:
                score = tl.where(token < t, score, 0.0)
                value = value - read - tl.sum(updates * score[:, None], axis=0)
            else:
                value = value * tl.load(beta + (b * T + t) * H + head)
                updates = tl.where((token == t)[:, None], value[None, :], updates)
                score = tl.where(token <= t, score, 0.0)
                out = read + tl.sum(updates * score[:, None], axis=0)
        if MASKED:
            out = tl.where(t < real, out, 0.0)
        at_output = output + ((b * T + t) * H + head) * P + p
        tl.store(at_output, out.to(output.dtype.element_ty), mask=in_p)

    if due:
        folded = _fold(
            tl.where(is_fresh, 0.0, tile) + outrun, decays, keys, records, betas, b, first, filled,
            n, in_n, p, in_p, head, group, H, G, P, N, R, W, DELTA, CHANNEL,
        )  # fmt: skip
        tl.store(at_tile, folded, mask=mask)

    slot = first + filled
    if due:
        slot = (slot + 7) // 8 * 8
    kept = is_token
    if MASKED:
        kept = token < real
    _append(
        b, head, group, part, p, in_p, n, in_n, slot, kept, new_keys, updates, v, g, beta,
        decays, keys, records, betas, T, H, G, P, N, R, DELTA, CHANNEL, TP,
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
    b, head, group, _, p, n = _place(H, G, P, N, ROWS, C, L)
    if tl.load(where + b) != 0:
        in_n, in_p = n < N, p < P
        at_tile = state + ((b * H + head) * P + p)[:, None, None] * N + n
        mask = in_p[:, None, None] & in_n
        tile = tl.load(at_tile, mask=mask, other=0.0)
        first, filled = tl.load(start + b), tl.load(length + b)
        tile = tl.where(tl.load(fresh + b) != 0, 0.0, tile)
        tile += tl.where(filled > W, float("nan"), 0.0)
        tile = _fold(
            tile, decays, keys, records, betas, b, first, filled, n, in_n, p, in_p,
            head, group, H, G, P, N, R, W, DELTA, CHANNEL,
        )  # fmt: skip
        tl.store(at_tile, tile, mask=mask)


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


def _cut(checkpoint: jax.Array, config: Config | None) -> tuple[Config, int]:
    """The cut, and its number of programs."""
    batch, num_heads, value_dim, key_dim = checkpoint.shape
    config = config or choose(batch * num_heads, value_dim, key_dim)
    return config, batch * num_heads * -(-value_dim // config.rows)


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
    config, programs = _cut(checkpoint, config)
    value = tokens[2]
    num_tokens = value.shape[1]
    delta = ring.update is not None
    in_place = [checkpoint, ring.log_decay, ring.key, ring.update if delta else ring.value]
    found = launch(
        replay_step_delta if delta else replay_step_additive,
        (*rows, *tokens),
        in_place if delta else [*in_place, ring.beta],
        [jax.ShapeDtypeStruct(value.shape, value.dtype)],
        programs=programs,
        num_warps=config.num_warps,
        T=num_tokens,
        MASKED=masked,
        TP=next_power_of_2(num_tokens),
        J=BLOCK,
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
    config, programs = _cut(checkpoint, config)
    record = ring.value if ring.update is None else ring.update
    betas = ring.log_decay if ring.beta is None else ring.beta
    (checkpoint,) = launch(
        replay_fold,
        (*rows, ring.log_decay, ring.key, record, betas),
        [checkpoint],
        [],
        programs=programs,
        num_warps=config.num_warps,
        **_constants(checkpoint, ring, window, config),
    )
    return checkpoint
