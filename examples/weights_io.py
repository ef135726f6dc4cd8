"""Weights of a HybridLM as one safetensors file, with the model's config in its metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from safetensors import safe_open
from safetensors.flax import save_file

from replayssm_jax.models import HybridConfig, HybridLM


class WeightsError(ValueError):
    """A file does not fit the model it is loaded into."""


def named_parameters(model: nnx.Module) -> dict[str, Any]:
    """Parameters by dotted path, such as ``blocks.0.mixer.A_log``, in sorted order."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in sorted(flat, key=_path)}


def _path(item: tuple[tuple[Any, ...], Any]) -> tuple[str, ...]:
    return tuple(map(str, item[0]))


def save_weights(
    path: str | Path, model: HybridLM, *, dtype: Any = jnp.bfloat16, record: Mapping[str, Any]
) -> None:
    """Write the parameters of ``model``: matrices rounded to ``dtype``, vectors as they are.

    Args:
      path: the file to write; replaced in one move.
      model: its ``config`` goes into the metadata beside the weights.
      dtype: storage type of every parameter with two axes or more.
      record: JSON-able facts about the weights (how they were made, what they reach).
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.astype(dtype) if value.ndim > 1 else value
        for name, value in named_parameters(model).items()
    }
    metadata = {"config": json.dumps(model.config.to_dict()), "record": json.dumps(dict(record))}
    unfinished = path.with_suffix(".part")
    save_file(tensors, unfinished, metadata=metadata)
    unfinished.replace(path)


def read_metadata(path: str | Path) -> tuple[HybridConfig, dict[str, Any]]:
    """Read the config and the record of a weights file."""
    with safe_open(path, framework="flax") as file:
        metadata = file.metadata() or {}
    missing = {"config", "record"} - set(metadata)
    if missing:
        raise WeightsError(f"{path}: no {' and no '.join(sorted(missing))} in the metadata")
    return HybridConfig.from_dict(json.loads(metadata["config"])), json.loads(metadata["record"])


def load_weights(
    path: str | Path, *, dtype: Any = jnp.float32, param_dtype: Any = jnp.float32
) -> tuple[HybridLM, dict[str, Any]]:
    """Build the model that a file describes and fill every parameter from it.

    Args:
      path: a file written by `save_weights`.
      dtype: computation type of the model.
      param_dtype: type the stored weights are converted to.

    Returns:
      The model and the record.

    Raises:
      WeightsError: lists every parameter that the file lacks, every tensor that the model does not
        know, and every shape that differs.
    """
    config, record = read_metadata(path)
    with safe_open(path, framework="flax") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    model = nnx.eval_shape(
        lambda: HybridLM(config, rngs=nnx.Rngs(0), dtype=dtype, param_dtype=param_dtype)
    )
    fill_parameters(model, tensors, source=str(path))
    return model, record


def fill_parameters(model: nnx.Module, tensors: Mapping[str, jax.Array], *, source: str) -> None:
    """Replace the parameters of ``model`` by tensors of the same names, in the model's types."""
    expected = named_parameters(model)
    faults = [f"missing: {name} {expected[name].shape}" for name in expected if name not in tensors]
    faults += [
        f"unexpected: {name} {tensors[name].shape}" for name in tensors if name not in expected
    ]
    faults += [
        f"shape: {name} is {tensors[name].shape} in the file, {value.shape} in the model"
        for name, value in expected.items()
        if name in tensors and tensors[name].shape != value.shape
    ]
    if faults:
        raise WeightsError("\n  ".join([f"{source} does not fit the model:", *faults]))
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        leaf.set_value(tensors[".".join(map(str, path))].astype(leaf.get_value().dtype))
