"""ReplaySpec: the static description of one replay layer, hashable by value."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from replayssm_jax.arguments import check_choice, check_int, float_dtype
from replayssm_jax.precision import FORMATS, state_dtype_of

Rule = Literal["additive", "delta"]
Decay = Literal["scalar", "channel"]

# A window is copied in whole chunks of this many slots, so every `start` is a multiple of it.
SLOT_CHUNK = 8


def round_up(n: Any, multiple: int) -> Any:
    """Round `n` (an int or an integer array) up to a multiple."""
    return (n + multiple - 1) // multiple * multiple


@dataclasses.dataclass(frozen=True)
class ReplaySpec:
    """Shapes, recurrence and storage of one layer; static under `jax.jit`, hashable by value.

    The recurrence, per head with state `S` [P, N], decay `a_t = exp(g_t)`, is

        u_t = beta_t * (v_t - S_{t-1} (a_t * k_t))     rule="delta"
        u_t = beta_t * v_t                             rule="additive"
        S_t = S_{t-1} diag(a_t) + u_t k_t^T
        o_t = S_t q_t

    Attributes:
      num_heads: H, heads of the state (value heads).
      num_groups: G, key heads; each serves H / G consecutive heads.
      value_dim: P, rows of the state.
      key_dim: N, columns of the state.
      rule: "additive" (Mamba-2, GLA) or "delta" (GDN, KDA).
      decay: "scalar" (one log-decay a head) or "channel" (one for each key channel).
      window: committed records that the ring may hold before a flush folds them.
      max_tokens: most tokens that one `verify` takes; at most `window`.
      state_dtype: dtype of the checkpoint: float32, (under `jax_enable_x64`) float64 for reference
        runs, or bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8, whose rounding enters the
        recurrence at each flush; see `init_state` for stochastic rounding.
      key_dtype: dtype of `q` and `k` and of the recorded keys.
      value_dtype: dtype of `v`, of the recorded values and of the outputs.
      read_dtype: None, or bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8: steps evaluate
        from a copy of the checkpoint in this format, and only flushes read the checkpoint, which
        must be float32 or float64 and does not depend on the copy. Under the delta rule steps read
        narrower records, too, but for float16: see `cached_dtype`.
      precision: matrix-product precision of the XLA path, as in `jax.lax.Precision`. "highest"
        keeps fp32 accuracy on every device; "default" is faster and looser (TF32 on NVIDIA GPUs).
    """

    num_heads: int
    num_groups: int
    value_dim: int
    key_dim: int
    _: dataclasses.KW_ONLY
    rule: Rule
    decay: Decay
    window: int = 16
    max_tokens: int = 1
    state_dtype: Any = jnp.float32
    key_dtype: Any = jnp.bfloat16
    value_dtype: Any = jnp.bfloat16
    read_dtype: Any = None
    precision: Literal["highest", "high", "default"] = "highest"

    def __post_init__(self) -> None:
        integers = ("num_heads", "num_groups", "value_dim", "key_dim", "window", "max_tokens")
        for name in integers:
            object.__setattr__(self, name, check_int(name, getattr(self, name)))
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"num_groups must divide num_heads, found num_groups={self.num_groups} "
                f"and num_heads={self.num_heads}"
            )
        if self.max_tokens > self.window:
            raise ValueError(
                f"max_tokens must be at most window, found max_tokens={self.max_tokens} "
                f"and window={self.window}"
            )
        choices = {
            "rule": ("additive", "delta"),
            "decay": ("scalar", "channel"),
            "precision": ("highest", "high", "default"),
        }
        for name, allowed in choices.items():
            check_choice(name, getattr(self, name), allowed)
        for name in ("key_dtype", "value_dtype"):
            object.__setattr__(self, name, float_dtype(name, getattr(self, name)))
        state_dtype = state_dtype_of("state_dtype", self.state_dtype, (jnp.float32, jnp.float64))
        object.__setattr__(self, "state_dtype", state_dtype)
        if self.read_dtype is not None:
            object.__setattr__(
                self, "read_dtype", state_dtype_of("read_dtype", self.read_dtype, ())
            )
            if self.is_rounded:
                raise ValueError(
                    "a read copy needs a checkpoint in float32 or float64, found "
                    f"state_dtype={self.state_dtype.name} with read_dtype={self.read_dtype.name}"
                )

    @property
    def capacity(self) -> int:
        """R, slots of the ring: the window and the drafts, each in whole chunks of 8."""
        return round_up(self.window, SLOT_CHUNK) + round_up(self.max_tokens, SLOT_CHUNK)

    @property
    def heads_per_group(self) -> int:
        """Heads that share one key head."""
        return self.num_heads // self.num_groups

    @property
    def compute_dtype(self) -> np.dtype:
        """Dtype of gates and arithmetic: float32, or float64 with a float64 state."""
        return jnp.dtype(jnp.float32) if self.is_rounded else self.state_dtype

    @property
    def cached_dtype(self) -> np.dtype:
        """Dtype of the ring's updates under the delta rule.

        bfloat16 beside a read copy that is no more accurate than that, where they are for steps
        alone and no fold takes them; else the compute dtype.
        """
        copy = self.read_dtype
        rounds = self.rule == "delta" and copy is not None and copy != jnp.float16
        return jnp.dtype(jnp.bfloat16) if rounds else self.compute_dtype

    @property
    def is_rounded(self) -> bool:
        """Whether the checkpoint is in a low-precision format."""
        return self.state_dtype in FORMATS

    @property
    def exact(self) -> ReplaySpec:
        """The same layer without low precision: its states are plain arrays in `compute_dtype`."""
        return dataclasses.replace(self, state_dtype=self.compute_dtype, read_dtype=None)

    @property
    def decay_dim(self) -> int:
        """Log-decays for each head: 1 or `key_dim`."""
        return 1 if self.decay == "scalar" else self.key_dim

    @property
    def keeps_raw_values(self) -> bool:
        """Whether the ring records v and beta: always, unless the fold can use cached updates."""
        return self.rule == "additive" or self.read_dtype is not None

    @property
    def read_decay_dtype(self) -> np.dtype | None:
        """Dtype of log-decays that are for steps alone, as such updates; None where there are none.

        With a decay for each channel they are as wide as keys. float16 is off by at most 2^-12 of
        those that matter, or 2^-25, where bfloat16 is by 2^-9.
        """
        apart = self.decay == "channel" and self.cached_dtype != self.compute_dtype
        return jnp.dtype(jnp.float16) if apart else None

    def state_shape(self, batch_size: int) -> tuple[int, int, int, int]:
        """Shape [B, H, P, N] of the recurrent state."""
        return (batch_size, self.num_heads, self.value_dim, self.key_dim)

    @classmethod
    def mamba2(
        cls, *, num_heads: int, head_dim: int, state_dim: int, num_groups: int = 1, **kwargs: Any
    ) -> ReplaySpec:
        """Mamba-2 (SSD, arXiv:2405.21060): additive rule, one decay a head, grouped B and C."""
        return cls(
            num_heads, num_groups, head_dim, state_dim, rule="additive", decay="scalar", **kwargs
        )

    @classmethod
    def gated_delta_net(
        cls,
        *,
        num_value_heads: int,
        num_key_heads: int,
        key_dim: int,
        value_dim: int,
        **kwargs: Any,
    ) -> ReplaySpec:
        """Gated DeltaNet (arXiv:2412.06464): delta rule, one decay a value head."""
        return cls(
            num_value_heads,
            num_key_heads,
            value_dim,
            key_dim,
            rule="delta",
            decay="scalar",
            **kwargs,
        )

    @classmethod
    def kda(cls, *, num_heads: int, key_dim: int, value_dim: int, **kwargs: Any) -> ReplaySpec:
        """Kimi Delta Attention (arXiv:2510.26692): delta rule, one decay for each key channel."""
        return cls(
            num_heads, num_heads, value_dim, key_dim, rule="delta", decay="channel", **kwargs
        )


def check_spec(spec: Any) -> None:
    """Check what is given for a spec.

    Raises:
      TypeError: no `ReplaySpec`.
      ValueError: a dtype is float64, and JAX would make float32 of it.
    """
    if not isinstance(spec, ReplaySpec):
        raise TypeError(f"spec must be a ReplaySpec, found {type(spec).__name__}")
    for name in ("state_dtype", "key_dtype", "value_dtype"):
        dtype = getattr(spec, name)
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise ValueError(
                f"{name}={dtype.name} needs jax_enable_x64, found it off: call "
                'jax.config.update("jax_enable_x64", True) first'
            )
