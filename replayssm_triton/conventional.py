"""The conventional decode step: the baseline that the replay step is measured against."""

from __future__ import annotations

import jax
import triton
import triton.language as tl

from replayssm_triton.calls import launch
from replayssm_triton.configs import Config, channels, choose
from replayssm_triton.parts import _load, _over_channels, _place, _vector


@triton.jit
def conventional_step(
    q, k, v, g, beta, _state, output, state,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, DELTA: tl.constexpr,
    CHANNEL: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """S <- S diag(exp g) + u k^T, and S q."""
    b, head, group, _, p, n = _place(H, G, P, N, ROWS, C, L)
    in_n, in_p = n < N, p < P
    at_tile = state + (b * H + head) * (P * N) + (p[:, None, None] * N + n)
    mask = in_p[:, None, None] & in_n
    WHOLE: tl.constexpr = P % ROWS == 0 and C * L == N
    tile = _load(at_tile, mask, WHOLE)
    key = _vector(k + (b * G + group) * N, 0, True, N, N, C, L)
    query = _vector(q + (b * G + group) * N, 0, True, N, N, C, L)
    at = b * H + head
    value = tl.load(v + at * P + p, mask=in_p, other=0.0).to(tl.float32)
    if CHANNEL:
        gate = _vector(g + at * N, 0, True, N, N, C, L)
    else:
        gate = tl.load(g + at)
    tile = tile * tl.exp(gate)
    if DELTA:
        value = value - _over_channels(tile * key)
    tile += (value * tl.load(beta + at))[:, None, None] * key
    out = _over_channels(tile * query)
    tl.store(at_tile, tile, mask=mask)
    tl.store(output + at * P + p, out.to(output.dtype.element_ty), mask=in_p)


def step(
    state: jax.Array,
    tokens: tuple[jax.Array, ...],
    *,
    delta: bool,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Advance the recurrent state by one token.

    Args:
      state: [B, H, P, N] float32, updated in place where its buffer is donated.
      tokens: q, k [B, 1, G, N]; v [B, 1, H, P]; g [B, 1, H] or [B, 1, H, N] float32; beta
        [B, 1, H] float32.
      delta: the delta rule, else the additive one.
      config: None for the cut that `choose` finds.

    Returns:
      Outputs [B, 1, H, P] in the dtype of v, and the new state.
    """
    batch, num_heads, value_dim, key_dim = state.shape
    config = config or choose(batch * num_heads, value_dim, key_dim)
    _, k, v, g, _ = tokens
    c, lanes = channels(key_dim)
    output, state = launch(
        conventional_step,
        tokens,
        [state],
        [jax.ShapeDtypeStruct(v.shape, v.dtype)],
        programs=batch * num_heads * -(-value_dim // config.rows),
        num_warps=config.num_warps,
        H=num_heads,
        G=k.shape[2],
        P=value_dim,
        N=key_dim,
        DELTA=delta,
        CHANNEL=g.ndim == 4,
        ROWS=config.rows,
        C=c,
        L=lanes,
    )
    return output, state
