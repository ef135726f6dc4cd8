"""TokenInputs: one record (q, k, v, g, beta) for each token, and how each family makes it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from replayssm_jax.arguments import check_arrays, check_dt_limits, check_floats, check_number
from replayssm_jax.spec import ReplaySpec

_GATE_FIX = "compute gates in {want} and pass them so, e.g. {name}.astype(jnp.{want})"
_TIME_FIX = "add the time axis to every input of a single token, x[:, None]"
_WIDE_FIX = (
    "the family constructors make gates as wide as the widest of activations and A_log, so pass "
    "those in float32 (under jax_enable_x64 jnp.zeros(H) is float64), or build the spec with "
    "state_dtype=jnp.float64"
)


def _gate_dtype(*arrays: jax.Array) -> Any:
    wide = any(array.dtype == jnp.float64 for array in arrays)
    return jnp.float64 if wide else jnp.float32


def _check_raw(**arguments: tuple[Any, str]) -> None:
    """Check what a family constructor is given: arrays, each with the letters of its axes.

    The first array with an axis says how long it is. None stands for a `dt_bias` that is left out.

    Raises:
      TypeError: no array, or none of floating numbers.
      ValueError: another shape.
    """
    sizes: dict[str, int] = {}
    for name, (array, axes) in arguments.items():
        if array is None and name == "dt_bias":
            continue
        check_floats(**{name: array})
        if array.dtype == jnp.float64 and not jax.config.jax_enable_x64:
            raise TypeError(
                f"{name} must be of a dtype that JAX keeps, found float64 without jax_enable_x64: "
                f"pass {name}.astype(jnp.float32)"
            )
        wanted = ", ".join(f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in axes)
        fits = len(array.shape) == len(axes) and all(
            size == sizes.setdefault(axis, size)
            for axis, size in zip(axes, array.shape, strict=True)
        )
        if not fits:
            one = axes.startswith("BT") and len(array.shape) == len(axes) - 1
            hint = f": {_TIME_FIX}" if one else ""
            raise ValueError(f"{name} must have shape [{wanted}], found {array.shape}{hint}")


def _l2_normalise(x: jax.Array, dtype: Any) -> jax.Array:
    x = x.astype(dtype)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _add_bias(x: jax.Array, bias: jax.Array | None, dtype: Any) -> jax.Array:
    x = x.astype(dtype)
    if bias is None:
        return x
    return x + jnp.broadcast_to(bias.astype(dtype), x.shape)


def _rate(A_log: jax.Array, like: jax.Array, dtype: Any) -> jax.Array:
    """-exp(A_log) [H], broadcast against [B, T, H] or [B, T, H, N]."""
    rate = -jnp.exp(A_log.astype(dtype))
    return jnp.broadcast_to(rate if like.ndim == 3 else rate[:, None], like.shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenInputs:
    """The inputs of T tokens, as the recurrence sees them.

    The plain constructor expects `q` already scaled and `k` already normalised; the family
    constructors `mamba2`, `gated_delta_net` and `kda` do that, and the gates, from a layer's raw
    activations (after convolution and SiLU). Families without a step size, GLA and HGRN2, take the
    plain one with ones for `beta`.

    Attributes:
      q: [B, T, G, N] queries (C in Mamba-2), `spec.key_dtype`.
      k: [B, T, G, N] keys (B in Mamba-2), `spec.key_dtype`.
      v: [B, T, H, P] values (x in Mamba-2), `spec.value_dtype`.
      g: [B, T, H] or, with per-channel decay, [B, T, H, N] log-decay, at most 0, float32.
      beta: [B, T, H] step size (dt in Mamba-2), float32.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array

    @classmethod
    def mamba2(
        cls,
        x: jax.Array,
        dt: jax.Array,
        B: jax.Array,
        C: jax.Array,
        A_log: jax.Array,
        dt_bias: jax.Array | None = None,
        *,
        dt_limits: tuple[float, float] = (0.0, float("inf")),
    ) -> TokenInputs:
        """Records of Mamba-2: dt = clip(softplus(dt + dt_bias), limits), g = -exp(A_log) dt.

        Args:
          x: [B, T, H, P].
          dt: [B, T, H], raw.
          B: [B, T, G, N], the keys.
          C: [B, T, G, N], the queries.
          A_log: [H].
          dt_bias: [H] or None.
          dt_limits: lower and upper limit of dt after the softplus, 0 <= lower <= upper.

        Raises:
          TypeError: what is no array of a floating dtype, or a limit that is no number.
          ValueError: another shape, or other limits than these.
        """
        _check_raw(
            x=(x, "BTHP"),
            dt=(dt, "BTH"),
            B=(B, "BTGN"),
            C=(C, "BTGN"),
            A_log=(A_log, "H"),
            dt_bias=(dt_bias, "H"),
        )
        dt_limits = check_dt_limits(dt_limits)
        dtype = _gate_dtype(x, dt, A_log)
        step = jnp.clip(jax.nn.softplus(_add_bias(dt, dt_bias, dtype)), *dt_limits)
        return cls(q=C, k=B, v=x, g=_rate(A_log, step, dtype) * step, beta=step)

    @classmethod
    def gated_delta_net(
        cls,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        a: jax.Array,
        b: jax.Array,
        A_log: jax.Array,
        dt_bias: jax.Array | None = None,
    ) -> TokenInputs:
        """Records of Gated DeltaNet: g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b).

        `q` and `k` are L2-normalised in float32, x / sqrt(sum x^2 + 1e-6), `q` is then scaled by
        N^-1/2, and both return to their own dtype.

        Args:
          q: [B, T, G, N], raw.
          k: [B, T, G, N], raw.
          v: [B, T, H, P].
          a: [B, T, H], raw decay.
          b: [B, T, H], raw step size.
          A_log: [H].
          dt_bias: [H] or None.

        Raises:
          TypeError, ValueError: as `mamba2`.
        """
        _check_raw(
            v=(v, "BTHP"),
            q=(q, "BTGN"),
            k=(k, "BTGN"),
            a=(a, "BTH"),
            b=(b, "BTH"),
            A_log=(A_log, "H"),
            dt_bias=(dt_bias, "H"),
        )
        dtype = _gate_dtype(v, a, A_log)
        rate = jax.nn.softplus(_add_bias(a, dt_bias, dtype))
        return cls._delta(q, k, v, _rate(A_log, rate, dtype) * rate, b, dtype)

    @classmethod
    def kda(
        cls,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        a: jax.Array,
        b: jax.Array,
        A_log: jax.Array,
        dt_bias: jax.Array | None = None,
        *,
        lower_bound: float | None = None,
    ) -> TokenInputs:
        """Records of Kimi Delta Attention, with one decay for each key channel.

        g = -exp(A_log) softplus(a + dt_bias), or with a `lower_bound` (negative) the bounded gate
        g = lower_bound * sigmoid(exp(A_log) (a + dt_bias)); beta = sigmoid(b); q, k as in
        `gated_delta_net`.

        Args:
          q: [B, T, H, N], raw.
          k: [B, T, H, N], raw.
          v: [B, T, H, P].
          a: [B, T, H, N], raw decay.
          b: [B, T, H], raw step size.
          A_log: [H].
          dt_bias: [H, N] or None.
          lower_bound: None, or the least log-decay of the bounded gate.

        Raises:
          TypeError, ValueError: as `mamba2`, and for a lower_bound that is no negative number.
        """
        _check_raw(
            v=(v, "BTHP"),
            q=(q, "BTHN"),
            k=(k, "BTHN"),
            a=(a, "BTHN"),
            b=(b, "BTH"),
            A_log=(A_log, "H"),
            dt_bias=(dt_bias, "HN"),
        )
        dtype = _gate_dtype(v, a, A_log)
        raw = _add_bias(a, dt_bias, dtype)
        if lower_bound is None:
            g = _rate(A_log, raw, dtype) * jax.nn.softplus(raw)
        else:
            lower_bound = check_number("lower_bound", lower_bound)
            if not (math.isfinite(lower_bound) and lower_bound < 0):
                raise ValueError(f"lower_bound must be negative and finite, found {lower_bound}")
            g = lower_bound * jax.nn.sigmoid(-_rate(A_log, raw, dtype) * raw)
        return cls._delta(q, k, v, g, b, dtype)

    @classmethod
    def _delta(
        cls, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, b: jax.Array, dtype: Any
    ) -> TokenInputs:
        scale = q.shape[-1] ** -0.5
        return cls(
            q=(_l2_normalise(q, dtype) * scale).astype(q.dtype),
            k=_l2_normalise(k, dtype).astype(k.dtype),
            v=v,
            g=g,
            beta=jax.nn.sigmoid(b.astype(dtype)),
        )


def check_inputs(
    spec: ReplaySpec, inputs: TokenInputs, batch_size: int, *, max_tokens: int | None = None
) -> int:
    """Check static facts of `inputs` against `spec`; return T.

    Raises:
      TypeError: a field that is no array, a wrong dtype.
      ValueError: a wrong rank or shape, or T above `max_tokens`.
    """
    if not isinstance(inputs, TokenInputs):
        raise TypeError(f"inputs must be TokenInputs, found {type(inputs).__name__}")
    check_arrays(**vars(inputs))
    if inputs.v.ndim == 3:
        raise ValueError(f"v must have shape [B, T, H, P], found {inputs.v.shape}: {_TIME_FIX}")
    if inputs.v.ndim != 4:
        raise ValueError(f"v must have shape [B, T, H, P], found {inputs.v.shape}")
    num_tokens = inputs.v.shape[1]
    lead = (batch_size, num_tokens)
    keys = (*lead, spec.num_groups, spec.key_dim)
    heads = (*lead, spec.num_heads)
    expected = {
        "v": ((*heads, spec.value_dim), spec.value_dtype),
        "q": (keys, spec.key_dtype),
        "k": (keys, spec.key_dtype),
        "g": (heads if spec.decay == "scalar" else (*heads, spec.key_dim), spec.compute_dtype),
        "beta": (heads, spec.compute_dtype),
    }
    for name, (shape, dtype) in expected.items():
        array = getattr(inputs, name)
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, found {array.shape}")
        if array.dtype != dtype:
            if name in ("g", "beta") and array.dtype == jnp.float64:
                fix = _WIDE_FIX
            elif name in ("g", "beta"):
                fix = _GATE_FIX.format(name=name, want=dtype.name)
            else:
                field = "value_dtype" if name == "v" else "key_dtype"
                fix = (
                    f"pass {name}.astype(jnp.{dtype.name}) or build the spec with "
                    f"{field}=jnp.{array.dtype.name}"
                )
            raise TypeError(f"{name} must be {dtype.name}, found {array.dtype.name}: {fix}")
    if max_tokens is not None and not 1 <= num_tokens <= max_tokens:
        fix = ": longer inputs go through prefill, more drafts need a spec with a larger max_tokens"
        if num_tokens <= spec.max_tokens:
            fix = ": several tokens go through verify, prefill or recurrent_scan"
        raise ValueError(
            f"T must be between 1 and {max_tokens}, found T={num_tokens}{fix if num_tokens else ''}"
        )
    return num_tokens
