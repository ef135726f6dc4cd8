"""What the kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


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
    """Sum over the key channels of [rows, C, L]: C lies in registers of a thread."""
    return tl.sum(tl.sum(x, axis=1), axis=1)


@triton.jit
def _vector(
    pointer, i, live, N: tl.constexpr, STRIDE: tl.constexpr, C: tl.constexpr, L: tl.constexpr
):
    """N channels from i * STRIDE on, as float32 [1, C, L]; zero where not `live`.

    They come in pairs, as words: of a load with fewer elements than there are threads Triton makes
    one in every layout that its uses have. Of another it would make one, and move state tiles
    through shared memory into the layout of that.
    """
    if N % 2 == 0 and L > 1:
        dtype: tl.constexpr = pointer.dtype.element_ty
        n = tl.arange(0, C)[None, :, None] * (L // 2) + tl.arange(0, L // 2)[None, None, :]
        mask = (n < N // 2) & live
        if dtype.primitive_bitwidth == 16:
            words = pointer.to(tl.pointer_type(tl.uint32), bitcast=True)
            word = tl.load(words + i * (STRIDE // 2) + n, mask=mask, other=0)
            low = word.to(tl.uint16).to(dtype, bitcast=True)
            high = (word >> 16).to(tl.uint16).to(dtype, bitcast=True)
        else:
            words = pointer.to(tl.pointer_type(tl.uint64), bitcast=True)
            word = tl.load(words + i * (STRIDE // 2) + n, mask=mask, other=0)
            low = word.to(tl.uint32).to(dtype, bitcast=True)
            high = (word >> 32).to(tl.uint32).to(dtype, bitcast=True)
        return tl.interleave(low.to(tl.float32), high.to(tl.float32))
    else:
        n = tl.arange(0, C)[None, :, None] * L + tl.arange(0, L)[None, None, :]
        return tl.load(pointer + i * STRIDE + n, mask=(n < N) & live, other=0.0).to(tl.float32)


@triton.jit
def _add_tile(sums, x, i, TILES: tl.constexpr):
    """Add the sums over the columns of x [rows, L] to column i K / TILES of `sums` [rows, K].

    Threads that share a row have columns of their own: one of them keeps the sum.
    """
    K: tl.constexpr = sums.shape[1]
    if x.shape[1] % 4 == 0:
        x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 4, 4)), axis=2)
    x = tl.sum(x, axis=1, keep_dims=True)
    return sums + tl.where(tl.arange(0, K)[None, :] == i * (K // TILES), x, 0.0)


@triton.jit
def _fold(
    state, decays, keys, records, betas, first, filled, is_fresh, outrun, part, read_q, read_k,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Fold the records of the window into the state rows of a part of a head, TILES of ROWS.

    With READ the old state is multiplied on the way with `read_q` and, delta rule, `read_k`, of as
    many channels as a power of two has that is not below N. Returned are the products as `_of_rows`
    wants them.

    Records times keys are products on tensor cores, of float32 values in two terms each ("tf32x3"),
    a block of records after the other. Tiles have few columns: no more registers than a step has.
    """
    J: tl.constexpr = 16
    K: tl.constexpr = max(8, TILES)
    sums_q = tl.zeros((ROWS, K), tl.float32)
    sums_k = sums_q
    COLUMNS: tl.constexpr = 32 if N > 16 else 16
    WHOLE: tl.constexpr = P % (ROWS * TILES) == 0 and N % COLUMNS == 0
    row = tl.arange(0, J)
    filled = tl.minimum(filled, W)
    blocks = tl.maximum((filled + J - 1) // J, 1)
    for back in range(0, blocks):
        j = filled - 1 - (blocks - 1 - back) * J - row
        live = j >= 0
        slots = _slot(first, tl.maximum(j, 0), R)
        newer = _slot(first, tl.maximum(j + 1, 0), R)
        has_newer = (j >= -1) & (row > 0)
        oldest = filled - (blocks - back) * J
        at_oldest = _slot(first, tl.maximum(oldest, 0), R)
        weight = tl.full((J,), 1.0, tl.float32)
        if not DELTA:
            weight = tl.load(betas + slots * H, mask=live, other=0.0)
        if not CHANNEL:
            g = tl.load(decays + newer * H, mask=has_newer, other=0.0)
            g_oldest = tl.load(decays + at_oldest * H, mask=oldest >= 0, other=0.0)
            weight *= tl.exp(tl.cumsum(g, axis=0))
            decay = tl.exp(tl.sum(g, axis=0) + g_oldest)
        if back > 0:
            tl.debug_barrier()  # other threads may have written what is read now
        for c in range(0, (N + COLUMNS - 1) // COLUMNS):
            n = c * COLUMNS + tl.arange(0, COLUMNS)
            in_n = n < N
            at_key = keys + slots[:, None] * (G * N) + n[None, :]
            key = tl.load(at_key, mask=live[:, None] & in_n[None, :], other=0.0)
            key = key.to(tl.float32)
            if CHANNEL:
                at_decay = decays + newer[:, None] * (H * N) + n[None, :]
                g = tl.load(at_decay, mask=has_newer[:, None] & in_n[None, :], other=0.0)
                at_first = decays + at_oldest * (H * N) + n
                g_oldest = tl.load(at_first, mask=in_n & (oldest >= 0), other=0.0)
                key *= tl.exp(tl.cumsum(g, axis=0))
                decay = tl.exp(tl.sum(g, axis=0) + g_oldest)[None, :]
            if READ:
                inside = tl.minimum(n, read_q.shape[0] - 1)  # beyond, tiles are zero
                query = tl.gather(read_q, inside, 0)[None, :]
                if DELTA:
                    query_k = tl.gather(read_k, inside, 0)[None, :]
            for i in tl.range(0, TILES, num_stages=3):
                p = (part * TILES + i) * ROWS + tl.arange(0, ROWS)
                in_p = p < P
                at_record = records + slots[None, :] * (H * P) + p[:, None]
                record = tl.load(at_record, mask=live[None, :] & in_p[:, None], other=0.0)
                record = record.to(tl.float32) * weight[None, :]
                at = state + p[:, None] * N + n[None, :]
                mask = in_p[:, None] & in_n[None, :]
                tile = _load(at, mask, WHOLE)
                tile = tl.where(is_fresh & (back == 0), 0.0, tile) + outrun
                if READ and back == 0:
                    sums_q = _add_tile(sums_q, tile * query, i, TILES)
                    if DELTA:
                        sums_k = _add_tile(sums_k, tile * query_k, i, TILES)
                added = tl.dot(record, key, input_precision="tf32x3")
                tl.store(at, tile * decay + added, mask=mask)
    return sums_q, sums_k


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
    # Four channels a thread whatever their dtype: keys then lie as the state does.
    n = tl.max_contiguous(n, [1, 1, 4 if L > 4 else L])
    return b, head, head // (H // G), part, p, n
