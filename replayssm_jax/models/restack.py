"""The same model with its repeated blocks stacked and scanned, or each by itself."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
from flax import nnx

from replayssm_jax.layers import HybridBlock
from replayssm_jax.models.config import HybridConfig
from replayssm_jax.models.hybrid import HybridLM
from replayssm_jax.models.stacking import stack_modules, unstack_module

T = TypeVar("T")


def stack_layers(model: HybridLM) -> HybridLM:
    """Return the model with the parameters of its repeated blocks stacked and scanned."""
    return _restacked(model, dataclasses.replace(model.config, scan_layers=True))


def unstack_layers(model: HybridLM) -> HybridLM:
    """Return the model with separate parameters for each block.

    A loop over decode steps runs faster so, since it does not slice stacked weights at every step;
    it takes longer to compile, and the slices are copies.
    """
    return _restacked(model, dataclasses.replace(model.config, scan_layers=False))


def unstack_models(tree: T) -> T:
    """Return `tree` with each `HybridLM` in it unstacked."""
    return jax.tree.map(
        lambda x: unstack_layers(x) if isinstance(x, HybridLM) else x,
        tree,
        is_leaf=lambda x: isinstance(x, HybridLM),
    )


def _restacked(model: HybridLM, config: HybridConfig) -> HybridLM:
    if config == model.config:
        return model
    single: list[HybridBlock] = []
    for blocks, count, _ in model.segments():
        copies = [unstack_module(b, count) if count > 1 else [b] for b in blocks]
        single.extend(block for same in zip(*copies, strict=True) for block in same)
    new = nnx.merge(*nnx.split(model))
    new.config = config
    blocks, at = [], 0
    for layers, count in config.segments:
        run = single[at : at + len(layers) * count]
        for i in range(len(layers)):
            same = run[i :: len(layers)]
            blocks.append(same[0] if count == 1 else stack_modules(same))
        at += len(layers) * count
    new.blocks = nnx.List(blocks)
    return new
