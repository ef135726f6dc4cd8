"""Progress: how many tokens a row has seen. Span: where T new tokens of each row stand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from replayssm_jax.arguments import as_int32, check_array, concrete


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Progress:
    """Token counters of a cache; rollback of drafts moves them and nothing else.

    Attributes:
      position: [B] int32, tokens committed since the row was last reset.
      pending: [B] int32, drafts appended after them and not committed yet.
    """

    position: jax.Array
    pending: jax.Array

    @classmethod
    def zeros(cls, batch_size: int) -> Progress:
        """Return the progress of `batch_size` empty rows."""
        return cls(jnp.zeros((batch_size,), jnp.int32), jnp.zeros((batch_size,), jnp.int32))

    def prefilled(self, span: Span) -> Progress:
        """Return the progress after `span` was committed at once; pending drafts are dropped."""
        return Progress(span.end, self._pending(span, jnp.zeros_like(self.pending)))

    def drafted(self, span: Span) -> Progress:
        """Return the progress with `span` as drafts, in place of earlier ones."""
        return Progress(self.position, self._pending(span, span.counts))

    def _pending(self, span: Span, pending: jax.Array) -> jax.Array:
        if span.live is None:
            return pending
        return jnp.where(span.counts > 0, pending, self.pending)

    def commit(self, accepted: jax.Array | int) -> Progress:
        """Accept the first `accepted` drafts (int32 scalar or [B]), clipped to the pending ones."""
        accepted = jnp.broadcast_to(self.checked(accepted), self.pending.shape)
        accepted = jnp.clip(accepted, 0, self.pending)
        return Progress(self.position + accepted, jnp.zeros_like(self.pending))

    def checked(self, accepted: jax.Array | int) -> jax.Array:
        """Return `accepted` as an int32 scalar or [B].

        Raises:
          TypeError, ValueError: no integers, or another shape.
        """
        accepted = as_int32("accepted", accepted)
        shape = self.pending.shape[: accepted.ndim]
        return check_array("accepted", accepted, shape, jnp.integer)

    def flags(self, where: jax.Array) -> jax.Array:
        """Return `where` as bool [B].

        Raises:
          TypeError, ValueError: another dtype or shape.
        """
        return check_array("where", where, self.position.shape, jnp.bool)

    def reset(self, where: jax.Array) -> Progress:
        """Empty the rows flagged in `where` [B] bool."""
        where = self.flags(where)
        return Progress(jnp.where(where, 0, self.position), jnp.where(where, 0, self.pending))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Span:
    """T new tokens of each row: which are real, where they stand, what they may see.

    Attributes:
      position: [B] int32, tokens committed before the span.
      end: [B] int32, tokens since the last reset once the whole span is committed.
      counts: [B] int32, real tokens of the span.
      positions: [B, T] int32, position of each real token since its reset.
      lengths: [B] int32 or None, given by the caller: the first `lengths` tokens are real.
      valid: [B, T] bool or None, given by the caller: any pattern of real tokens.
      resets: [B, T] bool or None, given by the caller: forget everything before this token.
      segments: [B, T] int32 or None, resets up to and including each token.
    """

    position: jax.Array
    end: jax.Array
    counts: jax.Array
    positions: jax.Array
    lengths: jax.Array | None = None
    valid: jax.Array | None = None
    resets: jax.Array | None = None
    segments: jax.Array | None = None

    @classmethod
    def make(
        cls,
        position: jax.Array,
        num_tokens: int,
        *,
        lengths: jax.Array | None = None,
        valid: jax.Array | None = None,
        resets: jax.Array | None = None,
    ) -> Span:
        """Place `num_tokens` tokens after `position` [B].

        Raises:
          TypeError: lengths that are no integers, masks that are not bool.
          ValueError: both `lengths` and `valid`, an array of the wrong shape, or (where they are
            known) lengths out of [0, T].
        """
        batch_size = position.shape[0]
        shape = (batch_size, num_tokens)
        if lengths is not None and valid is not None:
            raise ValueError("pass lengths or valid, not both")
        steps = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32), shape)
        if lengths is not None:
            lengths = check_array("lengths", lengths, (batch_size,), jnp.integer)
            known = concrete(lengths)
            if known is None:
                lengths = jnp.clip(lengths, 0, num_tokens)
            elif ((known < 0) | (known > num_tokens)).any():
                raise ValueError(f"lengths must lie in [0, {num_tokens}], found {known.tolist()}")
        if valid is not None:
            valid = check_array("valid", valid, shape, jnp.bool)
            seen = jnp.cumsum(valid, axis=1, dtype=jnp.int32)
            ranks, counts = seen - 1, jnp.sum(valid, axis=1, dtype=jnp.int32)
        else:
            counts = jnp.full((batch_size,), num_tokens, jnp.int32) if lengths is None else lengths
            ranks = steps
        if resets is None:
            end = position + counts
            positions = position[:, None] + ranks
            return cls(position, end, counts, positions, lengths, valid)
        live = valid if valid is not None else steps < counts[:, None]
        resets = check_array("resets", resets, shape, jnp.bool) & live
        segments = jnp.cumsum(resets, axis=1, dtype=jnp.int32)
        origin = jax.lax.cummax(jnp.where(resets, ranks, -position[:, None]), axis=1)
        positions = ranks - origin
        end = counts - jnp.max(origin, axis=1, initial=jnp.iinfo(jnp.int32).min)
        end = jnp.where(counts > 0, end, position)
        return cls(position, end, counts, positions, lengths, valid, resets, segments)

    @property
    def live(self) -> jax.Array | None:
        """[B, T] bool, the real tokens, or None where all are."""
        if self.lengths is None:
            return self.valid
        steps = jnp.arange(self.positions.shape[1], dtype=jnp.int32)
        return steps[None, :] < self.lengths[:, None]

    def masked(self, y: jax.Array) -> jax.Array:
        """Return y [B, T, ...] with zeros where a token is not real."""
        live = self.live
        if live is None:
            return y
        return jnp.where(live.reshape(*live.shape, *(1,) * (y.ndim - 2)), y, jnp.zeros_like(y))
