"""MTPHeads: drafting heads that read the target's hidden state (multi-token prediction)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from replayssm_jax.arguments import check_arrays, check_int, check_type
from replayssm_jax.layers import MLP, RMSNorm
from replayssm_jax.layers.activations import default_kernel_init
from replayssm_jax.layers.arguments import check_params
from replayssm_jax.models.arguments import check_tokens
from replayssm_jax.models.hybrid import HybridLM


class MTPHead(nnx.Module):
    """x = W [norm(h), norm(e)], then x + mlp(norm(x)): a hidden state one token further on.

    The modules of DeepSeek-V3 (arXiv:2412.19437, section 2.2) with an MLP in place of the
    transformer block, so that a draft needs no cache.

    Args:
      d_model: width of the target's hidden state.
      d_ff: inner width of the MLP.
      norm_epsilon: of the norms.
      dtype, param_dtype: as in `flax.nnx.Linear`.
      rngs: of the parameters.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        norm_epsilon: float = 1e-6,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        def rms_norm() -> RMSNorm:
            return RMSNorm(d_model, epsilon=norm_epsilon, rngs=rngs)

        self.hidden_norm, self.token_norm, self.mlp_norm = rms_norm(), rms_norm(), rms_norm()
        self.in_proj = nnx.Linear(
            2 * d_model,
            d_model,
            use_bias=False,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=default_kernel_init,
            rngs=rngs,
        )
        self.mlp = MLP(
            d_model,
            d_ff,
            activation="relu2",
            gated=False,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )

    def __call__(self, hidden: jax.Array, embedding: jax.Array) -> jax.Array:
        """Map the hidden state behind a token and the embedding of the next one, [..., d_model].

        Returns:
          A stand-in for the target's hidden state behind that next token.
        """
        parts = [self.hidden_norm(hidden), self.token_norm(embedding)]
        x = self.in_proj(jnp.concatenate(parts, axis=-1))
        return x + self.mlp(self.mlp_norm(x))


class MTPHeads(nnx.Module):
    """Heads that guess further tokens from the target's hidden state.

    They share the embedding and the output head of the target, a `HybridLM` that is passed to
    each call and not held. Guess k is made by head k, and from the last head on by that one.

    Args:
      d_model: width of the target's hidden state.
      num_heads: heads with parameters of their own.
      d_ff: inner width of their MLPs, `d_model` by default.
      dtype, param_dtype: as in `flax.nnx.Linear`.
      rngs: of the parameters.
    """

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int = 1,
        d_ff: int | None = None,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_int("num_heads", num_heads)
        d_ff = check_int("d_ff", d_model if d_ff is None else d_ff)
        check_params(param_dtype, rngs)
        self.d_model = check_int("d_model", d_model)
        self.heads: nnx.List[MTPHead] = nnx.List(
            [
                MTPHead(d_model, d_ff, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
                for _ in range(num_heads)
            ]
        )

    def __call__(
        self, model: HybridLM, hidden: jax.Array, tokens: jax.Array, depth: int = 0
    ) -> jax.Array:
        """Move hidden states on by one token each.

        Args:
          model: the target.
          hidden: [..., d_model], of the target or, from depth 1 on, of the guess before.
          tokens: int32 [...], the token that follows each of them.
          depth: static k, guesses made before this one.

        Returns:
          [..., d_model], which `model.logits` maps to the logits of the token after `tokens`.

        Raises:
          ValueError: a target of another width.
        """
        check_arrays(hidden=hidden, tokens=tokens)
        if hidden.shape[-1] != self.d_model or model.config.d_model != self.d_model:
            raise ValueError(
                f"the heads need a target with d_model={self.d_model}, found a model with "
                f"d_model={model.config.d_model} and hidden states of {hidden.shape[-1]}"
            )
        head = self.heads[min(depth, len(self.heads) - 1)]
        return head(hidden, model.embeddings(tokens)).astype(hidden.dtype)


def distillation_loss(
    heads: MTPHeads, model: HybridLM, tokens: jax.Array, *, num_drafts: int = 3
) -> jax.Array:
    """Cross-entropy of the guesses against the target's own distributions, mean over guesses.

    What a draft is accepted by is the target, so that is what the heads learn. No gradient reaches
    the target.

    Args:
      heads: to be trained.
      model: the target.
      tokens: int32 [B, T] of text, T > num_drafts + 1.
      num_drafts: guesses behind each position, each from the one before and the true tokens.

    Returns:
      float32 scalar, in nats.

    Raises:
      TypeError, ValueError: `num_drafts` below 1, text that is too short, heads of another width.
    """
    check_type("heads", heads, MTPHeads)
    check_type("model", model, HybridLM)
    check_int("num_drafts", num_drafts)
    check_tokens(tokens)
    width = tokens.shape[1]
    if width < num_drafts + 2:
        raise ValueError(f"{num_drafts} drafts need T >= {num_drafts + 2}, found T={width}")
    graphdef, params = nnx.split(model)
    frozen = nnx.merge(graphdef, jax.lax.stop_gradient(params))
    target = frozen.hidden(tokens)
    wanted = jax.nn.softmax(frozen.logits(target))
    span = width - num_drafts
    hidden, total = target[:, :span], jnp.zeros((), jnp.float32)
    for k in range(num_drafts):
        hidden = heads(frozen, hidden, tokens[:, k + 1 : k + 1 + span], k)
        logprobs = jax.nn.log_softmax(frozen.logits(hidden))
        total -= jnp.mean(jnp.sum(wanted[:, k + 1 : k + 1 + span] * logprobs, axis=-1))
    return total / num_drafts
