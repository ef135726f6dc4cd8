"""PartitionSpecs of a model's parameters and caches, and a model placed on a mesh."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from replayssm_jax.layers import Attention, HybridBlock, ReplayMixer
from replayssm_jax.layers.sharding import MeshAxes, row_spec, row_specs
from replayssm_jax.models.cache import HybridCache

T = TypeVar("T")

_COLUMN = frozenset(
    {"in_proj", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "decay_proj", "conv"}
)
_ROW = frozenset({"out_proj", "o_proj", "down_proj"})
_BY_HEAD = frozenset({"A_log", "dt_bias", "D"})


def partition_specs(model: Any, tree: Any, axes: MeshAxes) -> Any:
    """Return the PartitionSpecs of `tree`, which belongs to `model`.

    Heads and key groups, inner widths and the vocabulary go over `axes.model`, rows over
    `axes.data`. A layer whose key groups do not divide evenly is replicated over `axes.model`.

    Args:
      model: a `HybridLM`.
      tree: its parameters (`nnx.state(model)` or the model itself), or any pytree that holds
        `HybridCache`s, such as a `GenerateState`; other arrays in it count as [B, ...].
      axes: the mesh and its axes.

    Returns:
      A pytree of the structure of `tree` with a `PartitionSpec` for each array.
    """
    if isinstance(tree, nnx.State | nnx.Module):
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: _param_spec(model, _names(path), leaf.shape, axes), tree
        )

    def specs(part: Any) -> Any:
        if isinstance(part, HybridCache):
            return _cache_specs(model, part, axes)
        return row_spec("", part.ndim, axes, None)

    return jax.tree.map(specs, tree, is_leaf=lambda x: isinstance(x, HybridCache))


def place(model: Any, tree: T, axes: MeshAxes) -> T:
    """Put `tree` on the mesh as `partition_specs` says; also under `jax.jit`."""
    specs = partition_specs(model, tree, axes)
    shardings = jax.tree.map(
        lambda spec: NamedSharding(axes.mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    return jax.device_put(tree, shardings)


def shard_model(
    model: nnx.Module, mesh: Mesh, *, data: str | None = "data", model_axis: str | None = "model"
) -> Any:
    """Return the model with its parameters on `mesh`, and its caches to be made there.

    Everything else stays the same: `init_cache`, `prefill`, `step`, `verify` and `generate` run on
    the mesh and give what one device gives, within rounding.

    Args:
      model: a `HybridLM`.
      mesh: any mesh that has the two axes. The model runs on one of the same devices with Auto
        axes, `model.mesh_axes.mesh`; arrays that you place yourself must be on that one.
      data: axis for the rows of a batch, which must be a multiple of its size; None replicates.
      model_axis: axis for heads, key groups and inner widths; None replicates.

    Raises:
      ValueError: an axis that the mesh does not have.
    """
    for name in (data, model_axis):
        if name is not None and name not in mesh.axis_names:
            raise ValueError(f"the mesh has the axes {mesh.axis_names}, found {name!r}")
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    axes = MeshAxes(mesh, data, model_axis)
    graphdef, state = nnx.split(model)
    placed: Any = nnx.merge(graphdef, place(model, state, axes))
    placed.mesh_axes = axes
    for block in placed.blocks:
        for mixer in block.mixers:
            mixer.mesh_axes = axes
    return placed


def _names(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """A key path as attribute names and indices."""
    names = []
    for key in path:
        for attribute in ("key", "name", "idx"):
            if hasattr(key, attribute):
                names.append(getattr(key, attribute))
                break
    return tuple(name for name in names if name not in ("value", "raw_value"))


def _cache_specs(model: Any, cache: HybridCache, axes: MeshAxes) -> HybridCache:
    stacked = _stacked(model)

    layers = tuple(
        tuple(
            row_specs(one, axes, _heads(mixer, axes), stacked=stacked[at])
            for mixer, one in zip(model.blocks[at].mixers, held, strict=True)
        )
        for at, held in enumerate(cache.layers)
    )
    return HybridCache(
        layers=layers,
        pointer=row_specs(cache.pointer, axes, None),
        progress=row_specs(cache.progress, axes, None),
    )


def _param_spec(
    model: Any, names: tuple[Any, ...], shape: tuple[int, ...], axes: MeshAxes
) -> PartitionSpec:
    heads: str | None = axes.model
    stacked = False
    module: Any = model
    for i, name in enumerate(names):
        module = module[name] if isinstance(name, int) else getattr(module, name)
        if isinstance(module, HybridBlock):
            stacked = _stacked(model)[names[i]]
        if isinstance(module, ReplayMixer | Attention):
            heads = _heads(module, axes)
    owner, last = names[-2] if len(names) > 1 else "", names[-1]
    ndim = len(shape) - stacked
    dims: list[str | None] = [None] * ndim
    split = _split_axis(owner, last)
    if split is not None:
        dims[split] = heads
    sizes = shape[stacked:]
    even = (n % axes.size(d) == 0 for n, d in zip(sizes, dims, strict=True))
    dims = [d if fits else None for d, fits in zip(dims, even, strict=True)]
    return PartitionSpec(*([None] * stacked), *dims)


def _split_axis(owner: str, name: str) -> int | None:
    """The axis of a parameter, without its stack, that goes over the heads."""
    if name in _BY_HEAD or name == "embedding" or (owner in _COLUMN and name == "bias"):
        return 0
    if name == "down_experts" or (owner in _ROW and name == "kernel"):
        return -2
    if name in ("head", "up_experts", "gate_experts") or (owner in _COLUMN and name == "kernel"):
        return -1
    return None


def _heads(mixer: Any, axes: MeshAxes) -> str | None:
    """The axis for the heads of a mixer or an attention layer."""
    if isinstance(mixer, ReplayMixer):
        return axes.heads(mixer.spec.num_groups)
    return axes.heads(mixer.num_kv_heads)


def _stacked(model: Any) -> list[bool]:
    """Whether each of the model's blocks has stacked parameters."""
    return [count > 1 for layers, count in model.config.segments for _ in layers]
