"""Specs, random inputs, error ratios, and the float64 recurrence that every test compares with."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import replayssm_jax as rs

# Dims are odd on purpose: nothing may depend on powers of two.
FAMILIES = {
    "mamba2": dict(
        num_heads=4, num_groups=2, value_dim=12, key_dim=10, rule="additive", decay="scalar"
    ),
    "gated_delta_net": dict(
        num_heads=4, num_groups=2, value_dim=12, key_dim=10, rule="delta", decay="scalar"
    ),
    "kda": dict(num_heads=3, num_groups=3, value_dim=12, key_dim=10, rule="delta", decay="channel"),
    "gla": dict(
        num_heads=4, num_groups=2, value_dim=12, key_dim=10, rule="additive", decay="channel"
    ),
}


def make_spec(family, **overrides):
    """A small float32 spec of the family; the overrides win."""
    defaults = dict(key_dtype=jnp.float32, value_dtype=jnp.float32)
    return rs.ReplaySpec(**{**FAMILIES[family], **defaults, **overrides})


def random_inputs(spec, batch_size, num_tokens, seed=0, gates=None):
    """Inputs as a layer makes them: unit keys, decays from 1 to none, beta above 1 now and then.

    `gates`: None, or log-decays to draw from.
    """
    rng = np.random.default_rng(seed)
    lead = (batch_size, num_tokens)
    k = rng.standard_normal((*lead, spec.num_groups, spec.key_dim))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    q = rng.standard_normal(k.shape) * spec.key_dim**-0.5
    v = rng.standard_normal((*lead, spec.num_heads, spec.value_dim))
    shape = (*lead, spec.num_heads) + ((spec.key_dim,) if spec.decay == "channel" else ())
    g = -np.exp(2 * rng.standard_normal(shape) - 2) if gates is None else rng.choice(gates, shape)
    beta = 1.3 / (1 + np.exp(-rng.standard_normal((*lead, spec.num_heads))))
    # Cast by NumPy and put there: jnp.asarray compiles a program for every shape.
    inputs = rs.TokenInputs(
        q=q.astype(spec.key_dtype),
        k=k.astype(spec.key_dtype),
        v=v.astype(spec.value_dtype),
        g=g.astype(spec.compute_dtype),
        beta=beta.astype(spec.compute_dtype),
    )
    return jax.tree.map(jax.device_put, inputs)


def tokens(inputs, *index):
    """inputs[:, index] on the time axis, for slice arguments.

    By NumPy unless they are traced, since JAX compiles every slice.
    """

    def cut(x):
        return (x if isinstance(x, jax.core.Tracer) else np.asarray(x))[:, slice(*index)]

    return jax.tree.map(cut, inputs)


def reference(spec, inputs, initial=None):
    """Outputs [B, T, H, P] and final state [B, H, P, N] of the recurrence in float64, as NumPy.

    Run with rows of zeros, and with zeros behind the last token, which are identities, so that one
    compiled program serves many shapes.
    """
    batch_size, num_tokens = inputs.v.shape[:2]
    rows, length = -(-batch_size // 4) * 4, -(-num_tokens // 64) * 64

    def pad(x, *sizes):
        x = np.asarray(x, np.float64)
        sizes = [(0, size - n) for size, n in zip(sizes, x.shape, strict=False)]
        return np.pad(x, [*sizes, *[(0, 0)] * (x.ndim - len(sizes))])

    wide = dict.fromkeys(("state_dtype", "key_dtype", "value_dtype"), jnp.float64)
    # What a window is has no part in the recurrence.
    wide = dataclasses.replace(spec, **wide, read_dtype=None, window=16, max_tokens=1)
    if initial is None:
        initial = np.zeros(spec.state_shape(batch_size))
    with jax.enable_x64(True):
        padded = jax.tree.map(lambda x: pad(x, rows, length), inputs)
        outputs, state = _scan(wide, pad(initial, rows), padded)
    return np.asarray(outputs)[:batch_size, :num_tokens], np.asarray(state)[:batch_size]


_scan = jax.jit(rs.recurrent_scan, static_argnums=0)


def error(found, expected):
    """Norm of the difference over the norm of the reference; NaN stays NaN and passes no bound."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30)


def assert_close(found, expected, tolerance=1e-5, name="output"):
    """Fail with the error ratio and the tensor's name."""
    ratio = error(found, expected)
    assert ratio <= tolerance, f"{name}: error ratio {ratio:.2e} above {tolerance:.0e}"


def poison_dead_slots(spec, state):
    """NaN in every slot without a committed or pending record, and in fresh checkpoints."""
    pointer = state.pointer
    offset = (jnp.arange(spec.capacity)[None] - pointer.start.reshape(-1, 1)) % spec.capacity
    dead = offset >= (pointer.length + pointer.pending).reshape(-1, 1)

    def poison(ring):
        mask = jnp.broadcast_to(dead, ring.shape[:2]).reshape(
            *ring.shape[:2], *(1,) * (ring.ndim - 2)
        )
        return jnp.where(mask, jnp.asarray(jnp.nan, ring.dtype), ring)

    fresh = jnp.broadcast_to(
        pointer.fresh.reshape(-1, 1, 1, 1), (state.checkpoint.shape[0], 1, 1, 1)
    )
    return dataclasses.replace(
        state,
        buffer=jax.tree.map(poison, state.buffer),
        checkpoint=jnp.where(fresh, jnp.nan, state.checkpoint),
    )
