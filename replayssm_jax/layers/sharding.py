"""How layers run on a mesh: rows over one axis, heads and key groups over the other.

Projections are left to the compiler; the recurrence and the attention, which hold the caches, run
under `shard_map`, so that no state, ring or KV cache ever leaves its device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

# Where each cached or recorded array has its heads; the batch always comes first.
_HEADS_SECOND = frozenset({"checkpoint", "read_copy", "state", "values", "scale", "rounding_key"})
_HEADS_THIRD = frozenset(
    {
        *("log_decay", "read_log_decay", "key", "value", "beta", "update"),
        *("states", "history", "q", "k", "v", "g"),
    }
)


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """A mesh, and the names of its axes for the batch and for the heads (None: replicated)."""

    mesh: Mesh
    data: str | None = "data"
    model: str | None = "model"

    def size(self, axis: str | None) -> int:
        """Devices along `axis`."""
        return 1 if axis is None else int(self.mesh.shape[axis])

    def heads(self, groups: int) -> str | None:
        """Return the axis for the heads of a layer with `groups` key heads, None if uneven."""
        return self.model if groups % self.size(self.model) == 0 else None


def row_spec(name: str, ndim: int, axes: MeshAxes, heads: str | None) -> PartitionSpec:
    """PartitionSpec of a cached or recorded array [B, ...], by its field name."""
    if ndim == 0:
        return PartitionSpec()
    if name in _HEADS_SECOND and ndim > 1:
        return PartitionSpec(axes.data, heads)
    if name in _HEADS_THIRD and ndim > 2:
        return PartitionSpec(axes.data, None, heads)
    return PartitionSpec(axes.data)


def row_specs(tree: Any, axes: MeshAxes, heads: str | None, *, stacked: bool = False) -> Any:
    """PartitionSpecs of a pytree of cached or recorded arrays.

    With `stacked`, arrays of more than one axis have the layers as their second.
    """

    def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        name = field_name(path)
        if not stacked or leaf.ndim < 2:
            return row_spec(name, leaf.ndim, axes, heads)
        rows, *rest = row_spec(name, leaf.ndim - 1, axes, heads)
        return PartitionSpec(rows, None, *rest)

    return jax.tree_util.tree_map_with_path(spec, tree)


def field_name(path: tuple[Any, ...]) -> str:
    """Name of the innermost field of a key path."""
    for key in reversed(path):
        for attribute in ("name", "key"):
            name = getattr(key, attribute, None)
            if isinstance(name, str):
                return name
    return ""


def run_sharded(
    f: Callable[..., tuple[Any, Any]], axes: MeshAxes, heads: str | None, *args: Any
) -> tuple[Any, Any]:
    """Run f(*args) -> (output [B, T, heads, ...], cache like args[0]) on each device's part."""
    # The state of conventional decoding is a bare array, which has no field name of its own.
    cache, *rest = args
    in_specs = (
        row_specs({"state": cache}, axes, heads)["state"],
        *(row_specs(arg, axes, heads) for arg in rest),
    )
    out_specs = (PartitionSpec(axes.data, None, heads), in_specs[0])
    mapped = jax.shard_map(
        f, mesh=axes.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return mapped(*args)
