"""The decode step of one token as one kernel, see `fused_step` for what a step does.

A program has some tiles of state rows of one head, in large batches one warp and a whole head:

    window   scores of the records' keys with the token's q (and k), replay of the records, the
             decay to the window's end
    state    S q (and S k), tile after tile; the next ones are copied to shared memory meanwhile
    token    the update, the output, and the record in the ring

What is once for a head is so computed once, nothing waits for other warps, and several programs
of a multiprocessor have loads in flight whatever one of them does. Layouts are chosen by loads:
all records, or all channels of a tile that are 32 apart, lie in registers of a thread. Sums over
them need no other thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from replayssm_triton.parts import _add_tile, _fold, _load, _slot


@triton.jit
def _spread(x, C: tl.constexpr, L: tl.constexpr):
    """[C L] as [1, C, L], wherever its uses want it: layouts do not pass a gather."""
    return tl.reshape(tl.gather(x, tl.arange(0, C * L), 0), (1, C, L))


@triton.jit
def _of_rows(sums, TILES: tl.constexpr):
    """What `_add_tile` summed, as [TILES rows]."""
    ROWS: tl.constexpr = sums.shape[0]
    K: tl.constexpr = sums.shape[1]
    sums = tl.trans(sums)
    if K > TILES:
        sums = tl.sum(tl.reshape(sums, (TILES, K // TILES, ROWS)), axis=1)
    return tl.reshape(sums, (TILES * ROWS,))


@triton.jit
def _replay_window(
    decays, keys, records, betas, first, filled, gate, q, k, n, in_n, p, in_p,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """What the records add to the reads with q and k at a token with log-decay `gate`.

    J records at a time, from the newest on back. With them the log-decay over all, and the token.
    """
    later = gate
    out = tl.zeros(p.shape, tl.float32)
    read = out
    row = tl.arange(0, J)
    for i in range(0, (filled + J - 1) // J):
        j = filled - 1 - i * J - row
        live = j >= 0
        slots = _slot(first, tl.maximum(j, 0), R)
        newer = _slot(first, tl.maximum(j + 1, 0), R)
        has_newer = (j >= -1) & (row > 0)
        oldest = filled - (i + 1) * J
        at_oldest = _slot(first, tl.maximum(oldest, 0), R)
        at_record = records + slots[:, None] * (H * P) + p[None, :]
        record = tl.load(at_record, mask=live[:, None] & in_p[None, :], other=0.0)
        mask = live[:, None] & in_n[None, :]
        key = tl.load(keys + slots[:, None] * (G * N) + n[None, :], mask=mask, other=0.0)
        key = key.to(tl.float32)
        weight = tl.full((J,), 1.0, tl.float32)
        if not DELTA:
            weight = tl.load(betas + slots * H, mask=live, other=0.0)
        if CHANNEL:
            mask = has_newer[:, None] & in_n[None, :]
            g_all = tl.load(decays + newer[:, None] * (H * N) + n[None, :], mask=mask, other=0.0)
            mask = in_n & (oldest >= 0)
            g_oldest = tl.load(decays + at_oldest * (H * N) + n, mask=mask, other=0.0)
            key *= tl.exp(tl.cumsum(g_all, axis=0) + later[None, :])
        else:
            g_all = tl.load(decays + newer * H, mask=has_newer, other=0.0)
            g_oldest = tl.load(decays + at_oldest * H, mask=oldest >= 0, other=0.0)
            weight *= tl.exp(tl.cumsum(g_all, axis=0) + later)
        score_q = tl.sum(key * q[None, :], axis=1) * weight
        if DELTA:
            score_k = tl.sum(key * k[None, :], axis=1) * weight
        later += tl.sum(g_all, axis=0) + g_oldest
        record = record.to(tl.float32)
        out += tl.sum(record * score_q[:, None], axis=0)
        if DELTA:
            read += tl.sum(record * score_k[:, None], axis=0)
    return out, read, later


@triton.jit
def _one(
    b, head, group, part, start, length, fresh, q, k, v, g, beta,
    output, state, decays, keys, records, betas,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, C: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    STAGES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The step of a part of a head."""
    # From here on pointers are to this row and head, and offsets of 32 bits do.
    GATES: tl.constexpr = N if CHANNEL else 1
    state += (b * H + head) * (P * N)
    q += (b * G + group) * N
    k += (b * G + group) * N
    v += (b * H + head) * P
    g += (b * H + head) * GATES
    output += (b * H + head) * P
    decays += (b * R * H + head) * GATES
    keys += (b * R * G + group) * N
    records += (b * R * H + head) * P
    betas += b * R * H + head
    WHOLE: tl.constexpr = P % ROWS == 0 and C * L == N
    CL: tl.constexpr = C * L
    # A warp's loads of [records, channels] and [records, rows] then have all records in a thread.
    VEC: tl.constexpr = max(2, min(4, CL // (32 * WARPS)))
    VECP: tl.constexpr = max(2, min(4, ROWS * TILES // (32 * WARPS)))

    n = tl.arange(0, C)[None, :, None] * L + tl.arange(0, L)[None, None, :]
    n = tl.max_contiguous(n, [1, 1, 4 if L > 4 else L])
    in_n = n < N
    part_p = part * (TILES * ROWS)
    if TILES == 1:
        only_rows = part_p + tl.arange(0, ROWS)[:, None, None]
        only_tile = _load(state + only_rows * N + n, (only_rows < P) & in_n, WHOLE)
    first, filled = tl.load(start + b), tl.load(length + b)
    is_fresh = tl.load(fresh + b) != 0
    strength = tl.load(beta + b * H + head)
    m = tl.max_contiguous(tl.arange(0, CL), VEC)
    in_m = m < N
    key_raw = tl.load(k + m, mask=in_m, other=0.0)
    key_now = key_raw.to(tl.float32)
    query_now = tl.load(q + m, mask=in_m, other=0.0).to(tl.float32)
    if CHANNEL:
        gate = tl.load(g + m, mask=in_m, other=0.0)
    else:
        gate = tl.load(g)
    p = tl.arange(0, TILES * ROWS)
    in_p = p < P - part_p
    of_part = tl.max_contiguous(p, VECP)
    value = tl.load(v + part_p + p, mask=in_p, other=0.0)
    if TILES == 1:
        tl.debug_barrier()  # keeps these loads, which depend on nothing, before others

    due = filled + 1 > W
    # More records than the window holds would be lost without a word: NaN instead.
    outrun = tl.where(filled > W, float("nan"), 0.0)
    filled = tl.minimum(filled, W)
    out, read, later = _replay_window(
        decays, keys, records + part_p, betas, first, filled, gate, query_now, key_now, m, in_m,
        of_part, in_p, H, G, P, N, R, DELTA, CHANNEL, J,
    )  # fmt: skip
    decay = tl.exp(later)
    now = tl.sum(key_now * query_now)
    if CHANNEL:
        query_now *= decay
        key_now *= decay
        decay = 1.0
    if due:
        sums_q, sums_k = _fold(
            state, decays, keys, records, betas, first, filled, is_fresh, outrun, part,
            query_now, key_now, H, G, P, N, R, W, DELTA, CHANNEL, ROWS, TILES, True,
        )  # fmt: skip
    else:
        read_q, read_k = _spread(query_now, C, L), _spread(key_now, C, L)
        sums_q = tl.zeros((ROWS, max(8, TILES)), tl.float32)
        sums_k = sums_q
        for i in tl.range(0, TILES, num_stages=STAGES):
            if TILES == 1:
                tile = only_tile
            else:
                rows = part_p + i * ROWS + tl.arange(0, ROWS)[:, None, None]
                tile = _load(state + rows * N + n, (rows < P) & in_n, WHOLE)
            sums_q = _add_tile(sums_q, tl.sum(tile * read_q, axis=1), i, TILES)
            if DELTA:
                sums_k = _add_tile(sums_k, tl.sum(tile * read_k, axis=1), i, TILES)
    out += tl.where(is_fresh, 0.0, _of_rows(sums_q, TILES) * decay) + outrun
    if DELTA:
        read += tl.where(is_fresh, 0.0, _of_rows(sums_k, TILES) * decay) + outrun
        update = (value.to(tl.float32) - read) * strength
        new = update  # what the ring keeps
    else:
        update = value.to(tl.float32) * strength
        new = value
    out += update * now
    tl.store(output + part_p + p, out.to(output.dtype.element_ty), mask=in_p)
    slot = first + filled
    if due:
        slot = (slot + 7) // 8 * 8
    slot = slot % R
    tl.store(records + slot * (H * P) + part_p + p, new, mask=in_p)
    leads_head = part == 0
    if leads_head & (head % (H // G) == 0):
        tl.store(keys + slot * (G * N) + m, key_raw, mask=in_m)
    if leads_head:
        if CHANNEL:
            tl.store(decays + slot * (H * N) + m, gate, mask=in_m)
        else:
            tl.store(decays + slot * H, gate)
        if not DELTA:
            tl.store(betas + slot * H, strength)


@triton.jit
def _one_token(
    start, length, num_new, fresh, q, k, v, g, beta, output, state, decays, keys, records, betas,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr, MASKED: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, C: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    STAGES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = (P + ROWS * TILES - 1) // (ROWS * TILES)
    program = tl.program_id(0)
    part = program % parts
    head = program // parts % H
    b = (program // (parts * H)).to(tl.int64)
    real = 1
    if MASKED:
        real = tl.load(num_new + b)
    if real > 0:
        _one(
            b, head, head // (H // G), part, start, length, fresh, q, k, v, g, beta,
            output, state, decays, keys, records, betas,
            H, G, P, N, R, W, DELTA, CHANNEL, ROWS, TILES, C, L, J, STAGES, WARPS,
        )  # fmt: skip
    else:
        p = part * (ROWS * TILES) + tl.arange(0, ROWS * TILES)
        zeros = tl.zeros((ROWS * TILES,), output.dtype.element_ty)
        tl.store(output + (b * H + head) * P + p, zeros, mask=p < P)


@triton.jit
def replay_token_delta(
    start, length, num_new, fresh, q, k, v, g, beta,
    _state, _decays, _keys, _records,
    output, state, decays, keys, records,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr, MASKED: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, C: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    STAGES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The step under the delta rule, whose ring has no betas."""
    _one_token(
        start, length, num_new, fresh, q, k, v, g, beta,
        output, state, decays, keys, records, beta,
        H, G, P, N, R, W, DELTA, CHANNEL, MASKED, ROWS, TILES, C, L, J, STAGES, WARPS,
    )  # fmt: skip


@triton.jit
def replay_token_additive(
    start, length, num_new, fresh, q, k, v, g, beta,
    _state, _decays, _keys, _records, _betas,
    output, state, decays, keys, records, betas,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr, MASKED: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, C: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    STAGES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The step under the additive rule."""
    _one_token(
        start, length, num_new, fresh, q, k, v, g, beta,
        output, state, decays, keys, records, betas,
        H, G, P, N, R, W, DELTA, CHANNEL, MASKED, ROWS, TILES, C, L, J, STAGES, WARPS,
    )  # fmt: skip
