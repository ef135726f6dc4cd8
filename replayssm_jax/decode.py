"""Decoding: verify, commit, step and flush on a ReplayState.

A step appends its tokens' inputs to the ring and evaluates their outputs from ring and checkpoint,
or the checkpoint's read copy. Both are written only where a flush is due, see `flush_switch`. Not
differentiable in the state: train through `prefill`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replayssm_jax import dispatch, window
from replayssm_jax.arguments import as_int32, check_array, check_not_explicit, concrete, known_mask
from replayssm_jax.checks import debug_check, nan_unless
from replayssm_jax.flush_switch import flush_all, flush_rows, flush_when_due, is_due, stored_of
from replayssm_jax.gradients import not_differentiable
from replayssm_jax.inputs import TokenInputs, check_inputs
from replayssm_jax.spec import ReplaySpec
from replayssm_jax.state import (
    InputBuffer,
    Pointer,
    ReplayState,
    check_state,
    committed_records,
    emptied,
    require_ragged,
)

_NO_DERIVATIVE = "verify, step and flush are not differentiable; train through prefill"


def verify(
    spec: ReplaySpec,
    state: ReplayState,
    inputs: TokenInputs,
    lengths: jax.Array | None = None,
    parents: jax.Array | None = None,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, ReplayState]:
    """Append T tokens as drafts and compute their outputs; `commit` then accepts a prefix.

    With `parents` they are the nodes of a tree, of which `commit` accepts a path.

    Rows where the tokens would not fit in the window first fold their committed records into the
    checkpoint. Pending drafts of an earlier call are dropped.

    Args:
      spec: the layer.
      state: B rows.
      inputs: 1 <= T <= `spec.max_tokens` tokens.
      lengths: None, or int [B] in [0, T], how many tokens of each row are real. A row with 0 is
        left untouched. Outputs of tokens that are not real are zero. Needs ragged pointers.
      parents: None for a chain, or int [B, T]: the index of the token that each token follows,
        smaller than its own, or -1 for the last committed token. Several may follow one: every
        token sees its own ancestors alone. Runs on "xla".
      implementation: None for the best that supports the case, or "xla", "mosaic_gpu" (Pallas
        kernels for Hopper and Blackwell GPUs) or "triton" (Triton kernels for compute capability
        8.0 and newer, through jax-triton); a named one that cannot run raises.

    Returns:
      The outputs [B, T, H, P] in the dtype of `v`, and the state with T (or `lengths`) pending
      drafts.

    Raises:
      TypeError: a wrong dtype.
      ValueError: a wrong shape, T above `max_tokens`, `lengths` on a scalar pointer, and (where the
        values are known) lengths or parents out of range, or a `g` above 0 or not finite.
    """
    batch_size = check_state(spec, state)
    num_tokens = check_inputs(spec, inputs, batch_size, max_tokens=spec.max_tokens)
    lengths = check_lengths(state, lengths, num_tokens)
    if parents is not None:
        parents = check_parents(parents, (batch_size, num_tokens))
    check_not_explicit(state=state, inputs=inputs, lengths=lengths, parents=parents)
    arrays = (state.checkpoint, inputs)
    chosen = dispatch.resolve(
        implementation, spec, num_tokens, arrays=arrays, tree=parents is not None
    )
    check_gates(inputs.g, lengths)
    _check_phase(spec, state)
    return _verify(spec, state, inputs, lengths, parents, chosen)


def step(
    spec: ReplaySpec,
    state: ReplayState,
    inputs: TokenInputs,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, ReplayState]:
    """Decode one token: `verify` with T = 1 followed by `commit(1)`, bit for bit.

    Args:
      spec: the layer.
      state: B rows.
      inputs: one token, T = 1.
      implementation: as in `verify`.

    Returns:
      The output [B, 1, H, P] in the dtype of `v`, and the new state.

    Raises:
      TypeError, ValueError: as `verify`.
    """
    batch_size = check_state(spec, state)
    check_inputs(spec, inputs, batch_size, max_tokens=1)
    check_not_explicit(state=state, inputs=inputs)
    chosen = dispatch.resolve(implementation, spec, 1, arrays=(state.checkpoint, inputs))
    check_gates(inputs.g)
    _check_phase(spec, state)
    return _step(spec, state, inputs, chosen)


def commit(
    spec: ReplaySpec,
    state: ReplayState,
    accepted: jax.Array | int,
    path: jax.Array | None = None,
) -> ReplayState:
    """Accept the first `accepted` pending drafts of each row and drop the rest.

    Only the pointer moves; with `path`, the records of the accepted nodes of a tree also move next
    to each other. Where `accepted` is traced it is clipped to [0, pending], so that a second commit
    changes nothing.

    A state does not hold the `parents` of its drafts, so a tree that is committed as something else
    does not raise: neither without `path`, which makes a chain of its first nodes, nor with nodes
    that do not follow each other. After `verify` with `parents` give a `path` from a child of the
    last committed token (-1) on, each node the parent of the next. The records are wrong otherwise.

    Args:
      spec: the layer.
      state: with pending drafts.
      accepted: an int or int32 scalar, or with ragged pointers int32 [B].
      path: None for the first drafts, or int [B, T], T <= `spec.max_tokens`: the nodes of a tree
        from its root on. The first `accepted` of them count, and the others may be anything.

    Raises:
      TypeError: `accepted` or `path` of another dtype.
      ValueError: [B] on a scalar pointer, a wrong shape, or (where the values are known) accepted
        out of [0, pending], or nodes of the path that are not pending or not in rising order.
    """
    batch_size = check_state(spec, state)
    accepted = as_int32("accepted", accepted)
    if accepted.ndim:
        require_ragged(state, "accepted of shape [B]")
        accepted = check_array("accepted", accepted, (batch_size,), jnp.integer)
    known, pending = concrete(accepted), concrete(state.pointer.pending)
    if known is not None and pending is not None and ((known < 0) | (known > pending)).any():
        raise ValueError(
            f"accepted must lie in [0, pending], found accepted={known.tolist()} and "
            f"pending={pending.tolist()}"
        )
    if path is not None:
        path = check_path(spec, state, path, accepted)
        accepted = jnp.minimum(accepted, path.shape[1])
        state = dataclasses.replace(state, buffer=_gather_path(spec, state, accepted, path))
    return dataclasses.replace(state, pointer=_commit(state.pointer, accepted))


def flush(
    spec: ReplaySpec,
    state: ReplayState,
    where: jax.Array | None = None,
    *,
    implementation: str | None = None,
) -> ReplayState:
    """Fold the committed records into the checkpoint now; pending drafts are dropped.

    Not differentiable, as `step`: `materialize` and `prefill` are.

    Args:
      spec: the layer.
      state: B rows.
      where: None for all rows, or bool [B] with ragged pointers; other rows stay as they are.
      implementation: as in `verify`.

    Raises:
      TypeError, ValueError: wrong shapes or dtypes, `where` on a scalar pointer.
    """
    batch_size = check_state(spec, state)
    chosen = dispatch.resolve(implementation, spec, 0, arrays=state.checkpoint)
    if where is not None:
        require_ragged(state, "where")
        where = check_array("where", where, (batch_size,), jnp.bool)
        check_not_explicit(state=state, where=where)
    return _flush(spec, state, where, chosen)


def check_lengths(
    state: ReplayState, lengths: jax.Array | None, num_tokens: int
) -> jax.Array | None:
    """`lengths` as int32 [B], checked against the pointer and, where known, against [0, T]."""
    if lengths is None:
        return None
    require_ragged(state, "lengths")
    lengths = check_array("lengths", lengths, state.checkpoint.shape[:1], jnp.integer)
    known = concrete(lengths)
    if known is None:
        debug_check(
            lambda: jnp.all((lengths >= 0) & (lengths <= num_tokens)), "lengths must lie in [0, T]"
        )
        return jnp.clip(lengths, 0, num_tokens)
    if ((known < 0) | (known > num_tokens)).any():
        raise ValueError(f"lengths must lie in [0, {num_tokens}], found {known.tolist()}")
    return lengths


def check_parents(parents: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """`parents` as int32 [B, T], clipped to what a tree allows and, where known, checked."""
    parents = check_array("parents", parents, shape, jnp.integer)
    known, order = concrete(parents), np.arange(shape[1], dtype=np.int32)[None]
    if known is not None and ((known < -1) | (known >= order)).any():
        raise ValueError(
            "a parent must be -1 or an index smaller than its token's own, found "
            f"parents={known.tolist()}"
        )
    if known is None:
        debug_check(
            lambda: jnp.all((parents >= -1) & (parents < order)),
            "a parent must be -1 or an index smaller than its token's own",
        )
    return jnp.clip(parents, -1, order - 1)


def check_path(
    spec: ReplaySpec, state: ReplayState, path: jax.Array, accepted: jax.Array
) -> jax.Array:
    """`path` as int32 [B, T]; where all is known, its accepted nodes are pending and rise."""
    path = as_int32("path", path)
    length = path.shape[1] if path.ndim == 2 else 0
    if not 1 <= length <= spec.max_tokens:
        raise ValueError(
            f"path must have shape [B, T] with T from 1 to max_tokens={spec.max_tokens}, found "
            f"{path.shape}"
        )
    path = check_array("path", path, (state.checkpoint.shape[0], length), jnp.integer)
    wanted = "the first `accepted` nodes of the path must be pending and in rising order"
    nodes, count, pending = (concrete(x) for x in (path, accepted, state.pointer.pending))
    if nodes is not None and count is not None and pending is not None:
        if not _leads(nodes, count, pending):
            raise ValueError(
                f"{wanted}, found path={nodes.tolist()}, accepted={count.tolist()}, "
                f"pending={pending.tolist()}"
            )
    else:
        debug_check(lambda: _leads(path, accepted, state.pointer.pending), wanted)
    return path


def _leads(path: Any, accepted: Any, pending: Any) -> Any:
    """Whether the first `accepted` nodes of each `path` [B, T] are pending and rise."""
    length = path.shape[1]
    used = np.arange(length, dtype=np.int32)[None] < accepted.reshape(-1, 1)
    wrong = (path < 0) | (path >= pending.reshape(-1, 1))
    falls = path[:, 1:] <= path[:, :-1]
    return ~((used & wrong).any() | (used[:, 1:] & falls).any() | (accepted > length).any())


def check_gates(g: jax.Array, lengths: Any = None, valid: Any = None) -> None:
    """Raise ValueError where a real token has a known g that is positive or not finite."""
    known, real = concrete(g), known_mask(lengths, valid, g.shape[1])
    if known is None or real is None:
        return
    known = known[np.broadcast_to(real, known.shape[:2])]
    if not (np.isfinite(known) & (known <= 0)).all():
        raise ValueError(
            "g must be a finite log-decay of at most 0, found values from "
            f"{np.min(known)} to {np.max(known)}; to forget everything use reset or resets"
        )


def leading(lengths: jax.Array | None, num_tokens: int) -> jax.Array | None:
    """`lengths` [B] as a mask [B, T] of the first tokens of each row."""
    if lengths is None:
        return None
    return jnp.arange(num_tokens, dtype=jnp.int32)[None] < lengths[:, None]


def as_tokens(
    spec: ReplaySpec,
    inputs: TokenInputs,
    valid: jax.Array | None = None,
    parents: jax.Array | None = None,
) -> window.Tokens:
    """Inputs in the layout of `window`; tokens that are not `valid` [B, T] become identities."""
    log_decay = inputs.g if spec.decay == "channel" else inputs.g[..., None]
    parts: dict[str, Any] = {
        "q": inputs.q,
        "k": inputs.k,
        "v": inputs.v,
        "log_decay": log_decay,
        "beta": inputs.beta,
    }
    if valid is not None:
        parts = {
            name: jnp.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - 2)), x, 0)
            for name, x in parts.items()
        }
    _check_real_gates(parts["log_decay"], None)
    return window.Tokens(**parts, ancestry=None if parents is None else _ancestry(parents))


def _ancestry(parents: jax.Array) -> jax.Array:
    """[B, T, J] bool: whether token j is t or an ancestor of it."""
    num_tokens = parents.shape[1]
    order = jnp.arange(num_tokens, dtype=jnp.int32)
    reach = (order[:, None] == order[None])[None] | (parents[:, :, None] == order[None, None])
    for _ in range((num_tokens - 1).bit_length()):  # twice as many generations each time
        steps = reach.astype(jnp.float32)
        reach = jnp.einsum("bti,bij->btj", steps, steps) > 0
    return reach


def _check_real_gates(g: jax.Array, real: jax.Array | None) -> None:
    """As `check_gates`, where values are known only at run time: off but in `debug_checks`."""

    def holds() -> jax.Array:
        good = jnp.isfinite(g) & (g <= 0)
        if real is not None:
            good = good | ~real.reshape(*real.shape, *(1,) * (g.ndim - 2))
        return jnp.all(good)

    debug_check(holds, "g must be finite and at most 0")


def _check_phase(spec: ReplaySpec, state: ReplayState) -> None:
    phase = state.pointer.phase
    if phase is not None and phase.window > spec.window:
        raise ValueError(
            f"a loop with window={phase.window} steps a state whose spec has "
            f"window={spec.window}: pass window={spec.window} to the loop"
        )


@functools.partial(jax.jit, static_argnames=("spec", "implementation"))
def _verify(
    spec: ReplaySpec,
    state: ReplayState,
    inputs: TokenInputs,
    lengths: jax.Array | None,
    parents: jax.Array | None,
    implementation: dispatch.Implementation,
) -> tuple[jax.Array, ReplayState]:
    num_tokens = inputs.v.shape[1]
    state, inputs = not_differentiable((state, inputs), _NO_DERIVATIVE)
    if implementation != "xla":
        return _verify_by_kernel(spec, state, inputs, lengths, implementation)
    before = state.pointer
    num_new: jax.Array | int = num_tokens if lengths is None else lengths
    state = dataclasses.replace(
        state, pointer=dataclasses.replace(before, pending=jnp.zeros_like(before.pending))
    )
    state = flush_when_due(spec, state, num_new)
    pointer = state.pointer
    valid = leading(lengths, num_tokens)
    tokens = as_tokens(spec, inputs, valid, parents)
    tokens = tokens._replace(log_decay=window.read_decays(spec, tokens.log_decay))
    past = committed_records(spec, state.buffer, pointer.start, pointer.length)
    pairs = window.relate(spec, tokens)
    source = state.checkpoint if state.read_copy is None else state.read_copy
    key_reads, query_reads = window.read_past(spec, source, pointer.fresh, past, tokens, pairs)
    update = window.solve_updates(spec, tokens, pairs, key_reads, cached=True)
    output = window.evaluate(spec, pairs, update, query_reads)
    if valid is not None:  # not by the zeros of their q: a state may hold NaN
        output = jnp.where(valid[:, :, None, None], output, 0)
    if pointer.phase is not None:
        # A body that steps one state twice outruns the window: loud from this token on, and what
        # reads or folds such a state later is NaN too, see `committed_records`.
        fits = pointer.length + num_new <= spec.window
        output = nan_unless(fits.reshape(-1, 1, 1, 1), output)
    # Reads before the write, or XLA keeps a copy of the ring to read from.
    output, ring = jax.lax.optimization_barrier((output, state.buffer))
    buffer = _append(spec, ring, pointer, inputs, update, valid)
    pointer = dataclasses.replace(pointer, pending=_drafts(before, num_new))
    state = dataclasses.replace(state, buffer=buffer, pointer=pointer)
    return output.astype(inputs.v.dtype), state


def _drafts(before: Pointer, num_new: jax.Array | int) -> jax.Array:
    """Pending drafts after a step; one that flushed all rows dropped those of idle ones, too."""
    flushed = before.phase is not None and before.phase.flush
    kept = jnp.zeros_like(before.pending) if flushed else before.pending
    return jnp.where(num_new > 0, jnp.asarray(num_new, jnp.int32), kept)


def _verify_by_kernel(
    spec: ReplaySpec,
    state: ReplayState,
    inputs: TokenInputs,
    lengths: jax.Array | None,
    implementation: dispatch.Implementation,
) -> tuple[jax.Array, ReplayState]:
    """The same in one kernel, which decides row by row whether to fold, if a loop did not.

    Every implementation moves the pointer in the same way: the layers of a model share it.
    """
    from replayssm_jax import kernels

    num_tokens = inputs.v.shape[1]
    num_new = num_tokens if lengths is None else lengths
    _check_real_gates(inputs.g, leading(lengths, num_tokens))
    before = state.pointer
    flush: kernels.Flush = "due"
    if before.phase is not None:
        # Only one token's kernel takes no more without a fold than with one.
        told = num_tokens == 1 and kernels.takes_flush(implementation)
        if before.phase.flush and (lengths is not None or not told):  # idle rows, too
            state = _flush(spec, state, None, implementation)
            flush = "none" if told else "due"
        elif told:
            flush = "all" if before.phase.flush else "none"
    pointer = state.pointer
    output, stored, buffer = kernels.step(
        spec,
        stored_of(state),
        state.buffer,
        pointer,
        lengths,
        inputs,
        flush=flush,
        implementation=implementation,
    )
    if flush != "none":
        pointer = emptied(spec, pointer, flush == "all" or is_due(spec, pointer, num_new))
    pointer = dataclasses.replace(pointer, pending=_drafts(before, num_new))
    return output, dataclasses.replace(state, **stored._asdict(), buffer=buffer, pointer=pointer)


@functools.partial(jax.jit, static_argnames=("spec", "implementation"))
def _step(
    spec: ReplaySpec,
    state: ReplayState,
    inputs: TokenInputs,
    implementation: dispatch.Implementation,
) -> tuple[jax.Array, ReplayState]:
    output, state = _verify(spec, state, inputs, None, None, implementation)
    pointer = _commit(state.pointer, jnp.ones((), jnp.int32))
    return output, dataclasses.replace(state, pointer=pointer)


@jax.jit
def _commit(pointer: Pointer, accepted: jax.Array) -> Pointer:
    debug_check(
        lambda: jnp.all((accepted >= 0) & (accepted <= pointer.pending)),
        "accepted must lie in [0, pending]",
    )
    length = pointer.length + jnp.clip(accepted, 0, pointer.pending)
    return dataclasses.replace(pointer, length=length, pending=jnp.zeros_like(pointer.pending))


@functools.partial(jax.jit, static_argnames="spec")
def _gather_path(
    spec: ReplaySpec, state: ReplayState, accepted: jax.Array, path: jax.Array
) -> InputBuffer:
    """The ring with the records of the accepted nodes behind the committed ones, in order."""
    pointer = state.pointer
    first = (pointer.start + pointer.length).reshape(-1, 1)
    pending = pointer.pending.reshape(-1, 1)
    steps = jnp.arange(path.shape[1], dtype=jnp.int32)[None]
    count = jnp.minimum(accepted.reshape(-1, 1), pending)
    nodes = jnp.clip(path, 0, jnp.maximum(pending - 1, 0))
    source = (first + nodes) % spec.capacity
    target = jnp.where(steps < count, (first + steps) % spec.capacity, spec.capacity)
    target = jnp.broadcast_to(target, path.shape)
    rows = jnp.arange(path.shape[0], dtype=jnp.int32)[:, None]

    def move(ring: jax.Array) -> jax.Array:
        bits = _as_bits(ring)
        moved = bits.at[rows, source].get(mode="promise_in_bounds")
        bits = bits.at[rows, target].set(moved, mode="drop", unique_indices=True)
        return jax.lax.bitcast_convert_type(bits, ring.dtype)

    return jax.tree.map(move, state.buffer)


@functools.partial(jax.jit, static_argnames=("spec", "implementation"))
def _flush(
    spec: ReplaySpec,
    state: ReplayState,
    where: jax.Array | None,
    implementation: dispatch.Implementation,
) -> ReplayState:
    state = not_differentiable(state, _NO_DERIVATIVE)
    if implementation == "xla":
        return flush_all(spec, state) if where is None else flush_rows(spec, state, where)
    from replayssm_jax import kernels

    due = jnp.ones((), jnp.bool) if where is None else where
    stored = kernels.fold(
        spec,
        stored_of(state),
        state.buffer,
        state.pointer,
        due,
        implementation=implementation,
    )
    pointer = emptied(spec, state.pointer, due)
    return dataclasses.replace(state, **stored._asdict(), pointer=pointer)


def _append(
    spec: ReplaySpec,
    buffer: InputBuffer,
    pointer: Pointer,
    inputs: TokenInputs,
    update: jax.Array,
    valid: jax.Array | None,
) -> InputBuffer:
    """Write the new records behind the committed ones; invalid ones are not written."""
    num_tokens = inputs.v.shape[1]
    first = pointer.start + pointer.length
    offsets = jnp.arange(num_tokens, dtype=jnp.int32)
    slots = (first.reshape(-1, 1) + offsets[None]) % spec.capacity
    if valid is not None:
        slots = jnp.where(valid, slots, spec.capacity)

    def write(ring: jax.Array | None, new: jax.Array) -> jax.Array | None:
        if ring is None:
            return None
        new = new.astype(ring.dtype)  # of inputs it is the same
        if num_tokens == 1 and not pointer.is_ragged:
            return jax.lax.dynamic_update_slice_in_dim(ring, new, slots[0, 0], axis=1)
        dtype = ring.dtype
        ring, new = _as_bits(ring), _as_bits(new)
        if pointer.is_ragged:
            rows = jnp.arange(ring.shape[0], dtype=jnp.int32)[:, None]
            ring = ring.at[rows, slots].set(new, mode="drop", unique_indices=True)
        else:
            ring = ring.at[:, slots[0]].set(new, mode="promise_in_bounds", unique_indices=True)
        return jax.lax.bitcast_convert_type(ring, dtype)

    log_decay = write(buffer.log_decay, inputs.g)
    key = write(buffer.key, inputs.k)
    assert log_decay is not None and key is not None
    return InputBuffer(
        log_decay=log_decay,
        key=key,
        value=write(buffer.value, inputs.v),
        beta=write(buffer.beta, inputs.beta),
        update=write(buffer.update, update),
        read_log_decay=write(buffer.read_log_decay, window.read_decays(spec, inputs.g)),
    )


def _as_bits(x: jax.Array) -> jax.Array:
    """16-bit floats as integers: XLA on CPU widens a whole float ring to scatter into it."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x
