"""The GPU kernels behind `verify`, `step`, `flush` and `recurrent_step`: from states to arrays.

`pallas_kernels` knows arrays and Refs alone. Here a state becomes those, rows that share a pointer
get one each, and vmapped axes join the batch: the kernels predicate every row by itself, so that
nothing is lost by it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import conventional, fused_step
from pallas_kernels.configs import why_not as why_no_kernel
from pallas_kernels.fused_step import Ring, Rows
from pallas_kernels.problem import Mode, Problem
from replayssm_jax import dispatch
from replayssm_jax.inputs import TokenInputs
from replayssm_jax.spec import ReplaySpec
from replayssm_jax.state import InputBuffer, Pointer


def why_not(spec: ReplaySpec, num_tokens: int) -> str | None:
    """Why no kernel runs T tokens of a layer; None where one does."""
    if spec.state_dtype != jnp.float32:
        return f"the checkpoint must be float32, found {spec.state_dtype.name}"
    if spec.read_dtype is not None:
        return f"its kernels read no low-precision copy, found read_dtype={spec.read_dtype.name}"
    return why_no_kernel(_problem(spec, 1, num_tokens), Mode())


def _mode(interpret: bool, **kwargs: bool) -> Mode:
    wgmma = not interpret and dispatch.target_is_hopper()
    return Mode(interpret=interpret, wgmma=wgmma, **kwargs)


def _problem(spec: ReplaySpec, batch_size: int, num_tokens: int) -> Problem:
    return Problem(
        batch=batch_size,
        num_heads=spec.num_heads,
        num_groups=spec.num_groups,
        value_dim=spec.value_dim,
        key_dim=spec.key_dim,
        capacity=spec.capacity,
        window=spec.window,
        num_tokens=num_tokens,
        delta=spec.rule == "delta",
        channel=spec.decay == "channel",
        key_dtype=spec.key_dtype,
        value_dtype=spec.value_dtype,
    )


def step(
    spec: ReplaySpec,
    checkpoint: jax.Array,
    buffer: InputBuffer,
    pointer: Pointer,
    num_new: jax.Array | None,
    inputs: TokenInputs,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, InputBuffer]:
    """Fold the rows that are due, append T tokens, evaluate their outputs.

    Args:
      spec: the layer.
      checkpoint: [B, H, P, N].
      buffer: the ring.
      pointer: before the step.
      num_new: None where all T tokens of all rows are real, or int32 [B].
      inputs: T tokens.
      interpret: run in the interpreter on CPU.

    Returns:
      Outputs [B, T, H, P], the checkpoint and the ring.
    """
    batch_size, num_tokens = inputs.v.shape[:2]
    mode = _mode(interpret, masked=num_new is not None)
    rows = _rows(pointer, batch_size, num_tokens if num_new is None else num_new)
    tokens = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    output, checkpoint, ring = _in_place(spec, mode)(rows, checkpoint, _ring(buffer), tokens)
    return output, checkpoint, InputBuffer(**ring._asdict())


def fold(
    spec: ReplaySpec,
    checkpoint: jax.Array,
    buffer: InputBuffer,
    pointer: Pointer,
    where: jax.Array,
    *,
    interpret: bool,
) -> jax.Array:
    """The checkpoint with the records of the rows `where` (bool, [B] or scalar) folded."""
    mode = _mode(interpret, masked=True, append=False)
    rows = _rows(pointer, checkpoint.shape[0], where)
    _, checkpoint, _ = _in_place(spec, mode)(rows, checkpoint, _ring(buffer), ())
    return checkpoint


def recurrent_step(
    spec: ReplaySpec, state: jax.Array, inputs: TokenInputs
) -> tuple[jax.Array, jax.Array]:
    """The conventional step: outputs [B, 1, H, P] and the new state [B, H, P, N]."""
    tokens = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    return _conventional(spec)(state, tokens)


def _rows(pointer: Pointer, batch_size: int, num_new: Any) -> Rows:
    def each_row(x: Any, dtype: Any = jnp.int32) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(x, dtype), (batch_size,))

    counts = map(each_row, (pointer.start, pointer.length, num_new))
    return Rows(*counts, each_row(pointer.fresh, jnp.bool))


def _ring(buffer: InputBuffer) -> Ring:
    return Ring(buffer.log_decay, buffer.key, buffer.value, buffer.beta, buffer.update)


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


@functools.lru_cache(maxsize=128)
def _in_place(spec: ReplaySpec, mode: Mode) -> Callable[..., Any]:
    @jax.jit  # one kernel to compile, however many layers call it
    def run(rows: Rows, checkpoint: jax.Array, ring: Ring, tokens: Any) -> Any:
        shape = checkpoint.shape
        num_tokens = tokens[0].shape[1] if tokens else 0
        problem = _problem(spec, shape[0], num_tokens)
        flat = jax.new_ref(checkpoint.reshape(shape[0], -1, shape[3]))
        refs = jax.tree.map(jax.new_ref, ring)
        output = fused_step.launch(problem, mode, flat, refs, rows, tokens)
        ring = jax.tree.map(jax.freeze, refs)
        return output, jax.freeze(flat).reshape(shape), ring

    return _join_vmapped_axes(run)


@functools.lru_cache(maxsize=128)
def _conventional(spec: ReplaySpec) -> Callable[..., Any]:
    @jax.jit
    def run(state: jax.Array, tokens: Any) -> Any:
        shape = state.shape
        flat = jax.new_ref(state.reshape(shape[0], -1, shape[3]))
        output = conventional.launch(_problem(spec, shape[0], 1), flat, tokens)
        return output, jax.freeze(flat).reshape(shape)

    return _join_vmapped_axes(run)
