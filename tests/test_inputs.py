"""Gates and normalisation of the families, against NumPy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close

import replayssm_jax as rs

B, T, H, G, P, N = 2, 3, 4, 2, 5, 6


@pytest.fixture
def draw():
    """Normal numbers, the same in each test whichever ran before it."""
    rng = np.random.default_rng(0)
    return lambda *shape, dtype=jnp.float32: jnp.asarray(2 * rng.standard_normal(shape), dtype)


def wide(x):
    return np.asarray(x, np.float64)


def softplus(x):
    return np.logaddexp(0, x)


def sigmoid(x):
    return (1 + np.tanh(x / 2)) / 2


def unit(x):
    return x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.1, 1.5)])
def test_mamba2(draw, dtype, bias, limits):
    x, dt = draw(B, T, H, P, dtype=dtype), draw(B, T, H, dtype=dtype)
    keys, queries = draw(B, T, G, N, dtype=dtype), draw(B, T, G, N, dtype=dtype)
    A_log, dt_bias = draw(H), draw(H) if bias else None
    records = rs.TokenInputs.mamba2(x, dt, keys, queries, A_log, dt_bias, dt_limits=limits)
    step = np.clip(softplus(wide(dt) + (wide(dt_bias) if bias else 0)), *limits)
    assert records.g.dtype == records.beta.dtype == jnp.float32
    assert_close(records.beta, step, 1e-6)
    assert_close(records.g, -np.exp(wide(A_log)) * step, 1e-6)
    assert records.k is keys and records.q is queries and records.v is x


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_gated_delta_net(draw, dtype, bias):
    q, k, v = draw(B, T, G, N, dtype=dtype), draw(B, T, G, N, dtype=dtype), draw(B, T, H, P)
    a, b, A_log = draw(B, T, H, dtype=dtype), draw(B, T, H, dtype=dtype), draw(H)
    dt_bias = draw(H) if bias else None
    records = rs.TokenInputs.gated_delta_net(q, k, v, a, b, A_log, dt_bias)
    rate = softplus(wide(a) + (wide(dt_bias) if bias else 0))
    rounding = 1e-6 if dtype == jnp.float32 else 4e-3
    assert records.q.dtype == records.k.dtype == dtype
    assert records.g.dtype == records.beta.dtype == jnp.float32
    assert_close(records.k, unit(wide(k)), rounding)
    assert_close(records.q, unit(wide(q)) / np.sqrt(N), rounding)
    assert_close(records.g, -np.exp(wide(A_log)) * rate, 1e-6)
    assert_close(records.beta, sigmoid(wide(b)), 1e-6)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_kda(draw, lower_bound, bias):
    q, k, v = draw(B, T, H, N), draw(B, T, H, N), draw(B, T, H, P)
    a, b, A_log = draw(B, T, H, N), draw(B, T, H), draw(H)
    dt_bias = draw(H, N) if bias else None
    records = rs.TokenInputs.kda(q, k, v, a, b, A_log, dt_bias, lower_bound=lower_bound)
    raw = wide(a) + (wide(dt_bias) if bias else 0)
    rate = np.exp(wide(A_log))[:, None]
    expected = -rate * softplus(raw) if lower_bound is None else -5 * sigmoid(rate * raw)
    assert_close(records.g, expected, 1e-6)
    assert_close(records.k, unit(wide(k)), 1e-6)
    assert records.g.shape == (B, T, H, N)


def test_one_token_needs_its_time_axis(draw):
    keys, values, gates = draw(B, H, N), draw(B, H, P), draw(B, H)
    for make in (
        lambda: rs.TokenInputs.mamba2(values, gates, keys, keys, draw(H)),
        lambda: rs.TokenInputs.gated_delta_net(keys, keys, values, gates, gates, draw(H)),
        lambda: rs.TokenInputs.kda(keys, keys, values, keys, gates, draw(H)),
    ):
        with pytest.raises(ValueError, match=r"\[B, T, H, P\], found .*: add the time axis"):
            make()
