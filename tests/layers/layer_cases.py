"""Small layers of every family, a float64 reference of each, and compiled calls."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from random_modules import filled, jit

from replayssm_jax.layers import GatedDeltaNet, KimiDeltaAttention, Mamba2

# Few shapes, so that little is compiled: every batch has B rows, and T is one of these.
B = 4
SHORT, LONG = 4, 64

D_MODEL = 12
FAMILIES = ("mamba2", "gated_delta_net", "kda")
_LAYERS = {
    "mamba2": (Mamba2, dict(num_heads=4, head_dim=6, state_dim=5, num_groups=2)),
    "gated_delta_net": (
        GatedDeltaNet,
        dict(num_key_heads=2, num_value_heads=4, key_dim=5, value_dim=6),
    ),
    "kda": (KimiDeltaAttention, dict(num_heads=3, key_dim=5, value_dim=6, gate_rank=4)),
}


def unfilled(family, **options):
    """A layer with the parameters that its initialisers make."""
    kind, defaults = _LAYERS[family]
    options = {"replay_window": 8, "max_tokens": SHORT, "rngs": nnx.Rngs(0), **defaults, **options}
    return kind(D_MODEL, **options)


def make_layer(family, seed=0, **options):
    return filled(lambda: unfilled(family, **options), seed)


def hidden(num_tokens, seed=0, dtype=jnp.float32, batch_size=B):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(batch_size, num_tokens, D_MODEL)), dtype)


@jit
def call(layer, x, cache=None, **tokens):
    return layer(x, cache, **tokens)


@jit
def verify(layer, x, cache, lengths=None):
    return layer.verify(x, cache, lengths=lengths)


@jit
def commit(layer, cache, accepted):
    return layer.commit(cache, accepted)


def assert_close(found, expected, limit=2e-5):
    expected = np.asarray(expected, np.float64)
    gap = np.linalg.norm(np.asarray(found, np.float64) - expected)
    assert gap <= limit * max(np.linalg.norm(expected), 1e-3), gap


def decode(layer, x, cache):
    """Outputs [B, T, d_model] of one token after the other."""
    outputs = []
    for t in range(x.shape[1]):
        y, cache = call(layer, x[:, t : t + 1], cache)
        outputs.append(y)
    return np.concatenate(outputs, axis=1), cache


def row(tree, i):
    return jax.tree.map(lambda x: x[i : i + 1], tree)


def newest_inputs(layer, cache):
    """The K - 1 live inputs of each row, oldest first, [B, K - 1, C]; earlier ones are zero."""
    history = np.asarray(cache.history)
    position = np.asarray(cache.progress.position)
    reach = layer.conv.kernel_size - 1 if hasattr(layer, "conv") else layer.kernel_size - 1
    at = position[:, None] + np.arange(-reach, 0)
    rows = history[np.arange(len(position))[:, None], at % history.shape[1]]
    return np.where((at >= 0)[:, :, None], rows, 0)


def _softplus(x):
    return np.logaddexp(x, 0)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _silu(x):
    return x * _sigmoid(x)


def _linear(module, x):
    y = x @ np.asarray(module.kernel[...], np.float64)
    return y if module.bias is None else y + np.asarray(module.bias[...], np.float64)


def _conv(module, x):
    kernel = np.asarray(module.kernel[...], np.float64)
    width = kernel.shape[0]
    padded = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
    y = np.stack([(padded[t : t + width] * kernel).sum(0) for t in range(len(x))])
    return _silu(y if module.bias is None else y + np.asarray(module.bias[...], np.float64))


def _array(param):
    return None if param is None else np.asarray(param[...], np.float64)


def _norm(x, scale, epsilon, groups=1):
    parts = x.reshape(*x.shape[:-1], groups, -1)
    parts = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + epsilon)
    return parts.reshape(x.shape) * np.asarray(scale[...], np.float64)


def naive(layer, x):
    """Reference of one sequence x [T, d_model], token by token in float64; y and the state."""
    x = np.asarray(x, np.float64)
    return {
        Mamba2: _naive_mamba2,
        GatedDeltaNet: _naive_gated_delta_net,
        KimiDeltaAttention: _naive_kda,
    }[type(layer)](layer, x)


def _naive_mamba2(layer, x):
    spec = layer.spec
    P, N, H, G = spec.value_dim, spec.key_dim, spec.num_heads, spec.num_groups
    per = H // G
    parts = _linear(layer.in_proj, x).reshape(len(x), G, -1)
    z = parts[..., : per * P].reshape(len(x), -1)
    xbc = _conv(layer.conv, parts[..., per * P : 2 * per * P + 2 * N].reshape(len(x), -1))
    dt = parts[..., 2 * per * P + 2 * N :].reshape(len(x), H)
    xbc = xbc.reshape(len(x), G, -1)
    v = xbc[..., : per * P].reshape(len(x), H, P)
    B, C = xbc[..., per * P : per * P + N], xbc[..., per * P + N :]
    if layer.dt_bias is not None:
        dt = dt + _array(layer.dt_bias)
    dt = np.clip(_softplus(dt), *layer.dt_limits)
    A = -np.exp(_array(layer.A_log))
    S = np.zeros((H, P, N))
    y = np.zeros((len(x), H, P))
    for t in range(len(x)):
        for h in range(H):
            S[h] = S[h] * np.exp(dt[t, h] * A[h]) + dt[t, h] * np.outer(v[t, h], B[t, h // per])
            y[t, h] = S[h] @ C[t, h // per]
    if layer.D is not None:
        y = y + _array(layer.D)[:, None] * v
    y = y.reshape(len(x), -1)
    norm = layer.norm
    if norm is None:
        y = y * _silu(z)
    elif norm.norm_before_gate:
        y = _norm(y, norm.scale, norm.epsilon, norm.num_groups) * _silu(z)
    else:
        y = _norm(y * _silu(z), norm.scale, norm.epsilon, norm.num_groups)
    return _linear(layer.out_proj, y), S


def _delta(q, k, v, g, beta, per):
    """q, k [T, G, N]; v [T, H, P]; g [T, H, N]; beta [T, H]."""
    T, H, P = v.shape
    N = q.shape[-1]
    q = q / np.sqrt((q**2).sum(-1, keepdims=True) + 1e-6) * N**-0.5
    k = k / np.sqrt((k**2).sum(-1, keepdims=True) + 1e-6)
    S = np.zeros((H, P, N))
    y = np.zeros((T, H, P))
    for t in range(T):
        for h in range(H):
            S[h] = S[h] * np.exp(g[t, h])
            S[h] += beta[t, h] * np.outer(v[t, h] - S[h] @ k[t, h // per], k[t, h // per])
            y[t, h] = S[h] @ q[t, h // per]
    return y, S


def _naive_gated_delta_net(layer, x):
    spec = layer.spec
    P, N, H, G = spec.value_dim, spec.key_dim, spec.num_heads, spec.num_groups
    per, T = H // G, len(x)
    parts = _linear(layer.in_proj, x).reshape(T, G, -1)
    width = 2 * N + per * P
    qkv = _conv(layer.conv, parts[..., :width].reshape(T, -1)).reshape(T, G, -1)
    z = parts[..., width : width + per * P].reshape(T, H, P)
    b = parts[..., width + per * P : width + per * P + per].reshape(T, H)
    a = parts[..., width + per * P + per :].reshape(T, H)
    if layer.dt_bias is not None:
        a = a + _array(layer.dt_bias)
    g = -np.exp(_array(layer.A_log)) * _softplus(a)
    beta = _sigmoid(b) * (2 if layer.allow_neg_eigval else 1)
    v = qkv[..., 2 * N :].reshape(T, H, P)
    g = np.repeat(g[..., None], N, axis=-1)
    y, S = _delta(qkv[..., :N], qkv[..., N : 2 * N], v, g, beta, per)
    y = _norm(y, layer.norm.scale, layer.norm.epsilon) * _silu(z)
    return _linear(layer.out_proj, y.reshape(T, -1)), S


def _naive_kda(layer, x):
    spec = layer.spec
    P, N, H, T = spec.value_dim, spec.key_dim, spec.num_heads, len(x)
    parts = _linear(layer.in_proj, x).reshape(T, H, -1)
    qkv = _conv(layer.conv, parts[..., :-1].reshape(T, -1)).reshape(T, H, -1)
    beta = _sigmoid(parts[..., -1])
    low = x if layer.gate_in_proj is None else _linear(layer.gate_in_proj, x)
    decay_in = gate_in = low
    if layer.gate_in_proj is not None:
        decay_in, gate_in = np.split(low, 2, axis=-1)
    a = _linear(layer.decay_proj, decay_in).reshape(T, H, N)
    z = _linear(layer.gate_proj, gate_in).reshape(T, H, P)
    if layer.dt_bias is not None:
        a = a + _array(layer.dt_bias)
    rate = np.exp(_array(layer.A_log))[:, None]
    if layer.lower_bound is None:
        g = -rate * _softplus(a)
    else:
        g = layer.lower_bound * _sigmoid(rate * a)
    y, S = _delta(qkv[..., :N], qkv[..., N : 2 * N], qkv[..., 2 * N :], g, beta, 1)
    y = _norm(y, layer.norm.scale, layer.norm.epsilon) * _sigmoid(z)
    return _linear(layer.out_proj, y.reshape(T, -1)), S
