"""The GPU kernels behind `verify`, `step`, `flush` and `recurrent_step`: from states to arrays.

The packages of kernels know arrays alone. Here a state becomes those, rows that share a pointer
get one each, and vmapped axes join the batch: the kernels predicate every row by itself, so that
nothing is lost by it. What differs between the packages is in `mosaic_gpu` and `triton_gpu`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from replayssm_jax.inputs import TokenInputs
from replayssm_jax.precision import Stored
from replayssm_jax.spec import ReplaySpec
from replayssm_jax.state import InputBuffer, Pointer

if TYPE_CHECKING:
    from pallas_kernels.replay import Flush

_MODULES = {
    "mosaic_gpu": "replayssm_jax.mosaic_gpu",
    "mosaic_gpu_interpret": "replayssm_jax.mosaic_gpu",
    "triton": "replayssm_jax.triton_gpu",
}


def _module(implementation: str) -> Any:
    return importlib.import_module(_MODULES[implementation])


def why_not(implementation: str, spec: ReplaySpec, num_tokens: int) -> str | None:
    """Why no kernel runs T tokens of a layer; None where one does."""
    if spec.state_dtype != jnp.float32:
        return f"the checkpoint must be float32, found {spec.state_dtype.name}"
    reason: str | None = _module(implementation).why_not(spec, num_tokens)
    return reason


def takes_flush(implementation: str) -> bool:
    """Whether a step can be told to fold all rows or none; others find out by themselves."""
    found: bool = _module(implementation).TAKES_FLUSH
    return found


def step(
    spec: ReplaySpec,
    stored: Stored,
    buffer: InputBuffer,
    pointer: Pointer,
    num_new: jax.Array | None,
    inputs: TokenInputs,
    *,
    flush: Flush = "due",
    implementation: str,
) -> tuple[jax.Array, Stored, InputBuffer]:
    """Fold rows, append T tokens, evaluate their outputs.

    Args:
      spec: the layer.
      stored: the checkpoint and its read copy.
      buffer: the ring.
      pointer: before the step.
      num_new: None where all T tokens of all rows are real, or int32 [B].
      inputs: T tokens.
      flush: which rows fold: "due" those whose tokens would not fit in the window; where
        `takes_flush`, also "all" that have tokens, or "none".
      implementation: whose kernels.

    Returns:
      Outputs [B, T, H, P], the checkpoint with its copy, and the ring.
    """
    batch_size, num_tokens = inputs.v.shape[:2]
    rows = _rows(pointer, batch_size, num_tokens if num_new is None else num_new)
    run = _in_place(spec, implementation, num_new is not None, flush)
    result: tuple[jax.Array, Stored, InputBuffer] = run(rows, stored, buffer, _tokens(inputs))
    return result


def fold(
    spec: ReplaySpec,
    stored: Stored,
    buffer: InputBuffer,
    pointer: Pointer,
    where: jax.Array,
    *,
    implementation: str,
) -> Stored:
    """The checkpoint, and its copy, with the records of the rows `where` (bool) folded."""
    rows = _rows(pointer, stored.checkpoint.shape[0], where)
    result: Stored = _fold(spec, implementation)(rows, stored, buffer)
    return result


def recurrent_step(
    spec: ReplaySpec, state: jax.Array, inputs: TokenInputs, *, implementation: str
) -> tuple[jax.Array, jax.Array]:
    """The conventional step: outputs [B, 1, H, P] and the new state [B, H, P, N]."""
    result: tuple[jax.Array, jax.Array] = _conventional(spec, implementation)(
        state, _tokens(inputs)
    )
    return result


def verify_snapshots(
    spec: ReplaySpec,
    states: jax.Array,
    position: jax.Array,
    num_new: jax.Array | None,
    inputs: TokenInputs,
    *,
    implementation: str,
) -> tuple[jax.Array, jax.Array]:
    """T conventional tokens: outputs [B, T, H, P], and the ring of states [B, S, H, P, N]."""
    batch_size, num_tokens = inputs.v.shape[:2]
    if num_new is None:
        num_new = jnp.full((batch_size,), num_tokens, jnp.int32)
    run = _snapshots(spec, implementation)
    result: tuple[jax.Array, jax.Array] = run(states, position, num_new, _tokens(inputs))
    return result


def _rows(pointer: Pointer, batch_size: int, num_new: Any) -> tuple[jax.Array, ...]:
    """The pointer of each row, [B] each: start, length and real tokens int32, fresh bool."""

    def each_row(x: Any, dtype: Any = jnp.int32) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(x, dtype), (batch_size,))

    start, length, num_new = map(each_row, (pointer.start, pointer.length, num_new))
    return start, length, num_new, each_row(pointer.fresh, jnp.bool)


def _tokens(inputs: TokenInputs) -> tuple[jax.Array, ...]:
    return inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta


def _join_vmapped_axes(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` on arrays [B, ...], with a vmapped axis in front taken as more rows."""
    joined = jax.custom_batching.custom_vmap(f)

    @joined.def_vmap
    def rule(axis_size: int, in_batched: Any, *args: Any) -> tuple[Any, Any]:
        def join(x: jax.Array, batched: bool) -> jax.Array:
            x = x if batched else jnp.broadcast_to(x[None], (axis_size, *x.shape))
            return x.reshape(axis_size * x.shape[1], *x.shape[2:])

        def split(x: jax.Array) -> jax.Array:
            return x.reshape(axis_size, x.shape[0] // axis_size, *x.shape[1:])

        out = joined(*jax.tree.map(join, args, tuple(in_batched)))
        return jax.tree.map(split, out), jax.tree.map(lambda _: True, out)

    return joined


def _compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` under jit, so that there is one kernel to compile, however many layers call it.

    Its arrays have 32 bits or fewer; of Python's integers `jax_enable_x64` would make 64. What JAX
    makes of `//` when it lowers has 64 then, of the same values.
    """

    @jax.jit
    def run(*arrays: Any) -> Any:
        with jax.enable_x64(False):
            return f(*arrays)

    return _join_vmapped_axes(run)


@functools.lru_cache(maxsize=128)
def _in_place(
    spec: ReplaySpec, implementation: str, masked: bool, flush: Flush
) -> Callable[..., Any]:
    run = functools.partial(_module(implementation).step, spec, implementation, masked)
    if takes_flush(implementation):
        run = functools.partial(run, flush)
    return _compiled(run)


@functools.lru_cache(maxsize=128)
def _fold(spec: ReplaySpec, implementation: str) -> Callable[..., Any]:
    run = functools.partial(_module(implementation).fold, spec, implementation)
    return _compiled(run)


@functools.lru_cache(maxsize=128)
def _conventional(spec: ReplaySpec, implementation: str) -> Callable[..., Any]:
    run = functools.partial(_module(implementation).recurrent_step, spec)
    return _compiled(run)


@functools.lru_cache(maxsize=128)
def _snapshots(spec: ReplaySpec, implementation: str) -> Callable[..., Any]:
    run = functools.partial(_module(implementation).verify_snapshots, spec)
    return _compiled(run)
