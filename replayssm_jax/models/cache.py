"""HybridCache: one pytree for the whole model, with one pointer and one progress for all layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from replayssm_jax.layers.cache import KVCache, MixerCache
from replayssm_jax.layers.mixer import Decode
from replayssm_jax.layers.progress import Progress
from replayssm_jax.snapshots import Snapshots
from replayssm_jax.state import Pointer, ReplayState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HybridCache:
    """Cache of a `HybridLM`; by default every leaf has the batch as its first axis.

    Attributes:
      layers: for each block a tuple with one cache for each of its mixers (`MixerCache` or
        `KVCache`), without pointer and progress.
      pointer: of all replay rings; None without replay layers or under conventional decoding.
      progress: tokens of each row; convolution rings and KV caches stand where it says.
    """

    layers: tuple[Any, ...]
    pointer: Pointer | None
    progress: Progress

    @property
    def size(self) -> int | None:
        """Positions that the KV caches can hold; None without attention layers."""
        caches = jax.tree.leaves(self.layers, is_leaf=lambda x: isinstance(x, KVCache))
        return min((c.key.shape[-3] for c in caches if isinstance(c, KVCache)), default=None)

    @property
    def decode(self) -> Decode:
        """How it decodes, as in `HybridLM.init_cache`; "replay" where no layer is recurrent."""
        caches = jax.tree.leaves(self.layers, is_leaf=lambda x: isinstance(x, MixerCache))
        states = [c.state for c in caches if isinstance(c, MixerCache)]
        if all(isinstance(state, ReplayState) for state in states):
            return "replay"
        return "snapshot" if isinstance(states[0], Snapshots) else "recurrent"

    @property
    def rolls_back(self) -> bool:
        """Whether drafts can be rejected: not where a layer holds a recurrent state alone."""
        return self.decode != "recurrent"
