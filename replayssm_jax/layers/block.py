"""HybridBlock: normalised mixers and a normalised MLP, each added to the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from replayssm_jax.layers.arguments import check_features, check_params
from replayssm_jax.layers.cached import CachedLayer, Mode
from replayssm_jax.layers.norm import RMSNorm
from replayssm_jax.layers.options import check_option
from replayssm_jax.layers.progress import Span


class HybridBlock(nnx.Module):
    """x + mixers(norm(x)), then x + mlp(norm(x)); with norm="post", x + norm(mixers(x)) and so on.

    Args:
      d_model: width of the residual stream.
      mixers: layers that share the block's input; their outputs are summed. May be empty.
      mlp: a module from [..., d_model] to [..., d_model], or None.
      norm: "pre" or "post".
      residual_scale: multiplies each branch as it joins the residual stream.
      norm_epsilon: of the norms.
      param_dtype: of the norms' scales.
      rngs: of the parameters.
    """

    def __init__(
        self,
        d_model: int,
        *,
        mixers: Sequence[CachedLayer],
        mlp: Callable[[jax.Array], jax.Array] | None = None,
        norm: Literal["pre", "post"] = "pre",
        residual_scale: float = 1.0,
        norm_epsilon: float = 1e-6,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_params(param_dtype, rngs)

        def rms_norm() -> RMSNorm:
            return RMSNorm(d_model, epsilon=norm_epsilon, param_dtype=param_dtype, rngs=rngs)

        self.d_model = d_model
        self.residual_scale = residual_scale
        self.post_norm = check_option("norm", norm, Literal["pre", "post"]) == "post"
        self.mixers = nnx.List(list(mixers))
        self.mlp = nnx.data(mlp)
        self.mixer_norm = nnx.data(rms_norm() if mixers else None)
        self.mlp_norm = nnx.data(rms_norm() if mlp is not None else None)

    def init_cache(
        self, batch_size: int, size: int, dtype: Any = None, **options: Any
    ) -> tuple[Any, ...]:
        """Return one cache for each mixer; arguments as in the mixers."""
        return tuple(mixer.init_cache(batch_size, size, dtype, **options) for mixer in self.mixers)

    def __call__(
        self, x: jax.Array, cache: tuple[Any, ...] | None = None, **tokens: Any
    ) -> tuple[jax.Array, tuple[Any, ...] | None]:
        """Advance by the tokens of `x` [B, T, d_model]; arguments as in the mixers."""
        return self._run(x, cache, lambda mixer, h, c: mixer(h, c, **tokens))

    def verify(
        self, x: jax.Array, cache: tuple[Any, ...], *, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Run drafts `x` [B, T, d_model]; they stay pending until `commit`."""
        y, new = self._run(x, cache, lambda mixer, h, c: mixer.verify(h, c, lengths=lengths))
        assert new is not None
        return y, new

    def commit(self, cache: tuple[Any, ...], accepted: jax.Array | int) -> tuple[Any, ...]:
        """Accept the first `accepted` (int32 scalar or [B]) pending drafts of each row."""
        self._check_cache(cache)
        return tuple(mixer.commit(c, accepted) for mixer, c in zip(self.mixers, cache, strict=True))

    def reset(self, cache: tuple[Any, ...], where: jax.Array) -> tuple[Any, ...]:
        """Empty the rows `where` [B] bool."""
        self._check_cache(cache)
        return tuple(mixer.reset(c, where) for mixer, c in zip(self.mixers, cache, strict=True))

    def advance(
        self, x: jax.Array, cache: tuple[Any, ...] | None, span: Span, *, mode: Mode
    ) -> tuple[jax.Array, tuple[Any, ...] | None]:
        """Run the block at `span`; the returned caches' progress has not moved yet."""
        return self._run(x, cache, lambda mixer, h, c: mixer.advance(h, c, span, mode=mode))

    def _run(
        self, x: jax.Array, cache: tuple[Any, ...] | None, run: Callable[..., Any]
    ) -> tuple[jax.Array, tuple[Any, ...] | None]:
        check_features(x, self.d_model)
        if cache is not None:
            self._check_cache(cache)
        new = []
        if self.mixer_norm is not None:
            h = x if self.post_norm else self.mixer_norm(x)
            total = jnp.zeros_like(x)
            for i, mixer in enumerate(self.mixers):
                y, mixer_cache = run(mixer, h, None if cache is None else cache[i])
                total = total + y
                new.append(mixer_cache)
            x = self._join(x, total, self.mixer_norm)
        if self.mlp is not None and self.mlp_norm is not None:
            x = self._join(x, self.mlp(x if self.post_norm else self.mlp_norm(x)), self.mlp_norm)
        return x, None if cache is None else tuple(new)

    def _check_cache(self, cache: Any) -> None:
        several = isinstance(cache, list | tuple)
        if not several or len(cache) != len(self.mixers):
            found = len(cache) if several else type(cache).__name__
            raise ValueError(
                f"cache must be a tuple of {len(self.mixers)} caches, one a mixer, found {found}"
            )

    def _join(self, x: jax.Array, branch: jax.Array, norm: RMSNorm) -> jax.Array:
        if self.post_norm:
            branch = norm(branch)
        return x + jnp.asarray(self.residual_scale, x.dtype) * branch
