"""ReplayState: checkpoint + ring of recent inputs + pointer, and what moves whole rows of it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from replayssm_jax import precision, window
from replayssm_jax.arguments import (
    as_int32,
    check_array,
    check_arrays,
    check_bool,
    check_int,
    check_not_explicit,
    check_type,
    concrete,
)
from replayssm_jax.checks import debug_check, nan_unless
from replayssm_jax.spec import SLOT_CHUNK, ReplaySpec, check_spec, round_up


class Phase(NamedTuple):
    """Where in a window a loop stands, known while it is traced; set by `replayssm_jax.loops`.

    `flush` says whether this step flushes (True) or holds (False); `window` is the loop's.
    """

    flush: bool
    window: int

    def __repr__(self) -> str:
        """As JAX prints it where a body mixes a state of the loop with one from outside."""
        return (
            "'state of a windowed loop: give it rows of another state with rs.reset or rs.insert, "
            "not with jax.tree.map or lax.cond'"
        )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("start", "length", "pending", "fresh"),
    meta_fields=("phase",),
)
@dataclasses.dataclass(frozen=True)
class Pointer:
    """Where the live records are. Leaves are scalars (rows move together) or [B] (ragged rows).

    Attributes:
      start: int32, slot of the oldest live record, a multiple of 8.
      length: int32, committed records.
      pending: int32, drafts appended behind them and not committed yet.
      fresh: bool, the checkpoint counts as zero whatever it holds, until the next flush; this is
        how a reset costs nothing.
      phase: static; None, or set by `scan_steps` and `while_loop` on the states they carry.
    """

    start: jax.Array
    length: jax.Array
    pending: jax.Array
    fresh: jax.Array
    phase: Phase | None = None

    @property
    def is_ragged(self) -> bool:
        """Whether every row has its own pointer."""
        return self.length.ndim == 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InputBuffer:
    """The ring of R = `spec.capacity` slots, in the layout of the inputs with R in place of T.

    Dead slots may hold anything.

    Attributes:
      log_decay: [B, R, H] or [B, R, H, N], compute dtype.
      key: [B, R, G, N], `spec.key_dtype`.
      value: [B, R, H, P], `spec.value_dtype`; None where the fold uses cached updates.
      beta: [B, R, H], compute dtype; None where `value` is.
      update: [B, R, H, P], `spec.cached_dtype`, u of the delta rule as steps found it; None under
        the additive rule.
      read_log_decay: [B, R, H, N], `spec.read_decay_dtype`, what steps read in place of
        `log_decay`; None where they read that.
    """

    log_decay: jax.Array
    key: jax.Array
    value: jax.Array | None
    beta: jax.Array | None
    update: jax.Array | None
    read_log_decay: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReplayState:
    """The state of one layer. The recurrent state itself is `materialize(spec, state)`.

    Attributes:
      checkpoint: [B, H, P, N], `spec.state_dtype`, in 8 bits a `Scaled`: the state before the
        oldest live record.
      buffer: the ring of recent inputs.
      pointer: which slots of it are live.
      read_copy: None, or the checkpoint in `spec.read_dtype`, in 8 bits a `Scaled`: what steps
        read, written together with the checkpoint.
      rounding_key: None, or uint32 [B, H, 2]: keys of a checkpoint that is rounded stochastically.
        Every write of a row's checkpoint uses up its keys and leaves new ones.
    """

    checkpoint: Any
    buffer: InputBuffer
    pointer: Pointer
    read_copy: Any = None
    rounding_key: Any = None


def init_state(
    spec: ReplaySpec,
    batch_size: int,
    initial: jax.Array | None = None,
    *,
    layout: Literal["vk", "kv"] | None = None,
    ragged: bool = False,
    rounding_key: jax.Array | None = None,
) -> ReplayState:
    """An empty ring over a zero or given recurrent state.

    Args:
      spec: the layer.
      batch_size: B, an int of at least 1.
      initial: None, or a recurrent state to start from, `spec.compute_dtype`: [B, H, P, N] with
        layout="vk", [B, H, N, P] with layout="kv" (flash-linear-attention, Hugging Face GDN/KDA).
        A low-precision checkpoint is rounded from it.
      layout: must be given with `initial`, since equal dims hide a wrong one.
      ragged: give every row its own pointer ([B]); needed for `lengths`, per-row `accepted`,
        `where`, `insert` and `reset`.
      rounding_key: None, where a low-precision checkpoint is rounded to nearest even, or a key from
        `jax.random.key`, or uint32 [B, H, 2]: it is rounded stochastically, so that the errors of
        many folds cancel on average. Give each layer a key of its own. Rows and heads get their
        own; a fork goes on with its parent's, so give it others where both must be independent:
        `dataclasses.replace(fork, rounding_key=jax.random.bits(key, (B, H, 2), jnp.uint32))`.

    Raises:
      TypeError, ValueError: wrong batch size, dtype, shape or layout; a list for `initial`; float64
        without `jax_enable_x64`; a rounding_key for a checkpoint that is not rounded.
    """
    batch_size = check_int("batch_size", batch_size)
    check_spec(spec)
    check_bool("ragged", ragged)
    if (initial is None) != (layout is None):
        raise ValueError(
            'give layout="vk" ([B, H, P, N]) or layout="kv" ([B, H, N, P]) together with initial, '
            f"found layout={layout!r} and initial={'None' if initial is None else 'an array'}"
        )
    if layout not in (None, "vk", "kv"):
        raise ValueError(f'layout must be "vk" or "kv", found {layout!r}')
    if isinstance(initial, precision.Scaled):
        raise TypeError(
            f"initial must be {spec.compute_dtype.name}, found Scaled {initial.dtype.name}: pass "
            f"precision.decode(initial, jnp.{spec.compute_dtype.name})"
        )
    if initial is not None:
        check_arrays(initial=initial)
        if initial.dtype != spec.compute_dtype:
            raise TypeError(
                f"initial must be {spec.compute_dtype.name}, found {initial.dtype.name}: pass "
                f"initial.astype(jnp.{spec.compute_dtype.name})"
            )
        shape = spec.state_shape(batch_size)
        expected = shape if layout == "vk" else (*shape[:2], shape[3], shape[2])
        if initial.shape != expected:
            raise ValueError(
                f'initial must have shape {expected} with layout="{layout}", found {initial.shape}'
            )
    keys = check_rounding_key(spec, batch_size, rounding_key)
    return _init_state(spec, batch_size, initial, keys, layout, ragged)


def check_rounding_key(
    spec: ReplaySpec, batch_size: int, rounding_key: jax.Array | None
) -> jax.Array | None:
    """Keys uint32 [B, H, 2] of one key, which only a low-precision state has a use for."""
    if rounding_key is None:
        return None
    if not spec.is_rounded:
        raise ValueError(
            "rounding_key needs a low-precision state_dtype, found "
            f"state_dtype={spec.state_dtype.name}, which is not rounded"
        )
    return precision.as_keys(rounding_key, (batch_size, spec.num_heads))


@functools.partial(jax.jit, static_argnames=("spec", "batch_size", "layout", "ragged"))
def _init_state(
    spec: ReplaySpec,
    batch_size: int,
    initial: jax.Array | None,
    keys: jax.Array | None,
    layout: str | None,
    ragged: bool,
) -> ReplayState:
    if initial is None:
        shape, copy = spec.state_shape(batch_size), spec.read_dtype
        stored = precision.Stored(
            precision.zeros(shape, spec.state_dtype),
            None if copy is None else precision.zeros(shape, copy),
            keys,
        )
    else:
        initial = initial if layout == "vk" else jnp.swapaxes(initial, 2, 3)
        stored = precision.store(initial, keys, spec.state_dtype, spec.read_dtype)
    buffer: dict[str, Any] = {
        name: None if shape is None else jnp.zeros(shape.shape, shape.dtype)
        for name, shape in _buffer_shapes(spec, batch_size).items()
    }
    rows = (batch_size,) if ragged else ()

    def zero() -> jax.Array:  # one array a leaf: donation refuses a buffer that occurs twice
        return jnp.zeros(rows, jnp.int32)

    pointer = Pointer(start=zero(), length=zero(), pending=zero(), fresh=jnp.zeros(rows, jnp.bool))
    return ReplayState(buffer=InputBuffer(**buffer), pointer=pointer, **stored._asdict())


def _buffer_shapes(spec: ReplaySpec, batch_size: int) -> dict[str, jax.ShapeDtypeStruct | None]:
    slots = (batch_size, spec.capacity)
    heads = (*slots, spec.num_heads)
    gate = jax.ShapeDtypeStruct(heads, spec.compute_dtype)
    channels = (*heads, spec.key_dim)
    raw = spec.keeps_raw_values
    return {
        "log_decay": gate
        if spec.decay == "scalar"
        else jax.ShapeDtypeStruct(channels, spec.compute_dtype),
        "key": jax.ShapeDtypeStruct((*slots, spec.num_groups, spec.key_dim), spec.key_dtype),
        "value": jax.ShapeDtypeStruct((*heads, spec.value_dim), spec.value_dtype) if raw else None,
        "beta": gate if raw else None,
        "update": jax.ShapeDtypeStruct((*heads, spec.value_dim), spec.cached_dtype)
        if spec.rule == "delta"
        else None,
        "read_log_decay": None
        if spec.read_decay_dtype is None
        else jax.ShapeDtypeStruct(channels, spec.read_decay_dtype),
    }


def check_state(spec: ReplaySpec, state: ReplayState, name: str = "state") -> int:
    """Check static facts of `state` against `spec`; return B.

    Raises:
      TypeError: not a ReplayState, or a leaf with another dtype.
      ValueError: a leaf with another shape, float64 without `jax_enable_x64`, or (where the value
        is known) more committed records than the window holds.
    """
    check_type(name, state, ReplayState)
    check_spec(spec)
    owner = "the state" if name == "state" else name
    check = functools.partial(_check_stored, spec, owner)
    shape = state.checkpoint.shape
    if len(shape) != 4:
        expected = ("B", *spec.state_shape(1)[1:])
        raise ValueError(
            f"checkpoint of {owner} must have shape {expected}, found {shape}: arrays always carry "
            "the batch axis, vmap adds axes in front"
        )
    batch_size = shape[0]
    rows = (batch_size,) if state.pointer.is_ragged else ()
    shape = spec.state_shape(batch_size)
    integers = jax.ShapeDtypeStruct(rows, jnp.int32)
    copy = None if spec.read_dtype is None else precision.storage(shape, spec.read_dtype)
    keys = state.rounding_key
    if keys is not None:
        keys = jax.ShapeDtypeStruct((*shape[:2], 2), jnp.uint32) if spec.is_rounded else None
    check("checkpoint", state.checkpoint, precision.storage(shape, spec.state_dtype))
    check("read_copy", state.read_copy, copy)
    check("rounding_key", state.rounding_key, keys)
    for field, want in _buffer_shapes(spec, batch_size).items():
        check(field, getattr(state.buffer, field), want)
    for field in ("start", "length", "pending"):
        check(field, getattr(state.pointer, field), integers)
    check("fresh", state.pointer.fresh, jax.ShapeDtypeStruct(rows, jnp.bool))
    length = concrete(state.pointer.length)
    if length is None:
        debug_check(
            lambda: jnp.all(state.pointer.length <= spec.window),
            "the state holds more than its window",
        )
    elif (length > spec.window).any():
        raise ValueError(
            f"{owner} must hold at most window={spec.window} committed records, found "
            f"{length.tolist()}: was it made with a larger window, or stepped more than once in "
            "the body of scan_steps or while_loop?"
        )
    return batch_size


def _check_stored(spec: ReplaySpec, owner: str, name: str, found: Any, want: Any) -> None:
    """Check presence, shapes and dtypes of one field of a state."""
    if (found is None) != (want is None):
        options = f"rule={spec.rule!r}"
        if spec.read_dtype is not None or name in ("read_copy", "rounding_key"):
            read = None if spec.read_dtype is None else spec.read_dtype.name
            options += f", read_dtype={read} and state_dtype={spec.state_dtype.name}"
        raise ValueError(
            f"{name} of {owner} must be {'absent' if want is None else 'present'} for "
            f"{options}: was the state made with another spec?"
        )
    if found is None:
        return
    if isinstance(want, precision.Scaled):
        if not isinstance(found, precision.Scaled):
            raise TypeError(
                f"{name} of {owner} must be Scaled {want.dtype.name}, found {found.dtype.name}"
            )
        _check_stored(spec, owner, f"{name}.values", found.values, want.values)
        _check_stored(spec, owner, f"{name}.scale", found.scale, want.scale)
        return
    if isinstance(found, precision.Scaled):
        raise TypeError(
            f"{name} of {owner} must be {jnp.dtype(want.dtype).name}, found Scaled "
            f"{found.dtype.name}"
        )
    if found.shape != want.shape:
        raise ValueError(f"{name} of {owner} must have shape {want.shape}, found {found.shape}")
    if found.dtype != want.dtype:
        raise TypeError(
            f"{name} of {owner} must be {jnp.dtype(want.dtype).name}, found {found.dtype.name}"
        )


def require_ragged(state: ReplayState, what: str) -> None:
    """Raise ValueError unless every row has its own pointer."""
    if not state.pointer.is_ragged:
        raise ValueError(
            f"{what} needs a pointer for every row, found a scalar pointer: make the state, or a "
            "model's cache, with ragged=True"
        )


def committed_records(
    spec: ReplaySpec, buffer: InputBuffer, start: jax.Array, length: jax.Array
) -> window.Records:
    """The committed records of each row, the first `window` slots from `start`, as steps read them.

    More records than the window holds cannot all be read: whatever is made of them is NaN, so that
    neither outputs nor a checkpoint go on without the lost ones.
    """
    ring = _in_order(spec, buffer, start, length)
    if ring.read_log_decay is not None:
        ring = dataclasses.replace(ring, log_decay=ring.read_log_decay.astype(spec.compute_dtype))
    if ring.update is not None:
        update = ring.update.astype(spec.compute_dtype)
    else:
        assert ring.value is not None and ring.beta is not None
        update = ring.beta[..., None] * ring.value.astype(spec.compute_dtype)
    return _as_records(spec, ring, update, length)


def records_to_fold(
    spec: ReplaySpec,
    checkpoint: Any,
    buffer: InputBuffer,
    start: jax.Array,
    length: jax.Array,
    fresh: jax.Array,
) -> window.Records:
    """The same records as a fold takes them: their updates never depend on a read copy."""
    if spec.rule == "additive" or spec.read_dtype is None:
        return committed_records(spec, buffer, start, length)
    ring = _in_order(spec, buffer, start, length)
    assert ring.value is not None and ring.beta is not None
    tokens = window.Tokens(
        q=ring.key,
        k=ring.key,
        v=ring.value,
        log_decay=_with_channels(spec, ring.log_decay),
        beta=ring.beta,
    )
    update = window.solve_records(spec, checkpoint, fresh, tokens)
    return _as_records(spec, ring, update, length)


def _in_order(
    spec: ReplaySpec, buffer: InputBuffer, start: jax.Array, length: jax.Array
) -> InputBuffer:
    """The first `window` slots from `start`; those past `length` are zero."""
    offsets = jnp.arange(spec.window, dtype=jnp.int32)
    live = offsets[None] < length.reshape(-1, 1)
    slots = (start.reshape(-1, 1) + offsets[None]) % spec.capacity

    def in_order(ring: jax.Array) -> jax.Array:
        if start.ndim == 0:
            records = ring.at[:, slots[0]].get(mode="promise_in_bounds")
        else:
            records = jax.vmap(lambda row, index: row.at[index].get(mode="promise_in_bounds"))(
                ring, slots
            )
        return jnp.where(live.reshape(*live.shape, *(1,) * (ring.ndim - 2)), records, 0)

    return jax.tree.map(in_order, buffer)


def _as_records(
    spec: ReplaySpec, ring: InputBuffer, update: jax.Array, length: jax.Array
) -> window.Records:
    records = window.make_records(spec, _with_channels(spec, ring.log_decay), ring.key, update)
    fits = (length <= spec.window).reshape(-1, 1, 1, 1)
    return records._replace(decay=nan_unless(fits, records.decay))


def _with_channels(spec: ReplaySpec, log_decay: jax.Array) -> jax.Array:
    return log_decay[..., None] if spec.decay == "scalar" else log_decay


def materialize(
    spec: ReplaySpec, state: ReplayState, *, layout: Literal["vk", "kv"] = "vk"
) -> jax.Array:
    """The recurrent state after the committed records, for inspection and export.

    It is in `spec.compute_dtype`, and made of the checkpoint, never of a read copy.

    Args:
      spec: the layer.
      state: pending drafts are not part of the result.
      layout: "vk" gives [B, H, P, N], "kv" gives [B, H, N, P].
    """
    check_state(spec, state)
    if layout not in ("vk", "kv"):
        raise ValueError(f'layout must be "vk" or "kv", found {layout!r}')
    return _materialize(spec, state, layout)


@functools.partial(jax.jit, static_argnames=("spec", "layout"))
def _materialize(spec: ReplaySpec, state: ReplayState, layout: str) -> jax.Array:
    pointer = state.pointer
    records = records_to_fold(
        spec, state.checkpoint, state.buffer, pointer.start, pointer.length, pointer.fresh
    )
    full = window.fold(spec, state.checkpoint, pointer.fresh, records)
    return full if layout == "vk" else jnp.swapaxes(full, 2, 3)


def emptied(spec: ReplaySpec, pointer: Pointer, where: jax.Array | bool = True) -> Pointer:
    """The pointer after a flush of the rows `where`: no live records, start moved past them."""
    start = round_up(pointer.start + pointer.length, SLOT_CHUNK) % spec.capacity
    return dataclasses.replace(
        pointer,
        start=jnp.where(where, start, pointer.start),
        length=jnp.where(where, 0, pointer.length),
        pending=jnp.where(where, 0, pointer.pending),
        fresh=jnp.where(where, False, pointer.fresh),
    )


def reset(spec: ReplaySpec, state: ReplayState, where: jax.Array) -> ReplayState:
    """Make the rows `where` empty, at the cost of moving their pointer.

    Args:
      spec: the layer.
      state: with ragged pointers.
      where: bool [B].
    """
    batch_size = check_state(spec, state)
    require_ragged(state, "reset")
    where = check_array("where", where, (batch_size,), jnp.bool)
    pointer = emptied(spec, state.pointer, where)
    pointer = dataclasses.replace(pointer, fresh=pointer.fresh | where)
    return dataclasses.replace(state, pointer=pointer)


def insert(
    spec: ReplaySpec, state: ReplayState, slots: jax.Array, other: ReplayState
) -> ReplayState:
    """Copy the rows of `other` into the slots of `state`: ring, pointer, checkpoint and its keys.

    In the body of `scan_steps` or `while_loop`, where no row flushes before the others, a row of
    `other` may hold at most as many records as the window has taken steps: flush `other` first, or
    the row outruns its window and becomes NaN.

    Args:
      spec: the layer.
      state: B slots, with ragged pointers.
      slots: int [B'], the slot of each row of `other`. Slot -1 touches none. A slot out of range
        raises where its value is known while tracing; otherwise it touches none, too.
      other: B' rows, with ragged or scalar pointers.

    Raises:
      ValueError: wrong shapes, a scalar pointer in `state`, a rounding_key in one state alone, or
        (where the values are known) slots out of [-1, B) or a slot named twice.
    """
    batch_size = check_state(spec, state)
    num_rows = check_state(spec, other, "other")
    require_ragged(state, "insert")
    slots = check_slots(slots, num_rows, batch_size)
    check_not_explicit(state=state, other=other, slots=slots)
    if (state.rounding_key is None) != (other.rounding_key is None):
        with_keys, without = (
            ("state", "other") if other.rounding_key is None else ("other", "state")
        )
        raise ValueError(
            f"insert needs a rounding_key in both states or in none, found one in {with_keys} and "
            f"none in {without}: pass it to init_state"
        )
    return _insert(spec, state, slots, other)


@functools.partial(jax.jit, static_argnames="spec")
def _insert(
    spec: ReplaySpec, state: ReplayState, slots: jax.Array, other: ReplayState
) -> ReplayState:
    batch_size, num_rows = state.checkpoint.shape[0], other.checkpoint.shape[0]
    # JAX wraps negative indices also with mode="drop", so every other slot becomes B.
    slots = jnp.where((slots >= 0) & (slots < batch_size), slots, batch_size)
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_rows,)), other.pointer)
    other = dataclasses.replace(other, pointer=dataclasses.replace(rows, phase=state.pointer.phase))
    return jax.tree.map(lambda pool, new: pool.at[slots].set(new, mode="drop"), state, other)


def check_slots(slots: Any, num_rows: int, batch_size: int) -> jax.Array:
    """`slots` of `insert` as int32 [num_rows]; -1 touches none, the others are distinct.

    Raises:
      TypeError, ValueError: another dtype or shape, or (where the values are known) slots out of
        [-1, batch_size) or a slot named twice.
    """
    slots = check_array("slots", slots, (num_rows,), jnp.integer)
    known = concrete(slots)
    if known is None:
        in_range = (slots >= -1) & (slots < batch_size)
        debug_check(lambda: jnp.all(in_range), "insert: slots out of range")
        debug_check(lambda: _are_distinct(slots), "insert: a slot is named twice")
        return slots
    if ((known < -1) | (known >= batch_size)).any():
        raise ValueError(f"slots must lie in [-1, {batch_size}), found {known.tolist()}")
    used = known[known >= 0].tolist()
    if len(set(used)) != len(used):
        raise ValueError(f"slots must be distinct, found {known.tolist()}")
    return slots


def _are_distinct(slots: jax.Array) -> jax.Array:
    """Whether no slot is named twice, but for the negative ones."""
    first = jnp.argmax(slots[:, None] == slots[None], axis=1)
    return jnp.all((slots < 0) | (first == jnp.arange(slots.shape[0])))


def take(spec: ReplaySpec, state: ReplayState, rows: jax.Array) -> ReplayState:
    """The given rows as a state of their own: a fork, a snapshot, a beam.

    Args:
      spec: the layer.
      state: any; pending drafts go along.
      rows: int [B'], repeats allowed. Row -1 gives an empty row, with the rounding keys of another
        one. A row out of range raises where its value is known while tracing; otherwise it gives an
        empty row, too.

    Raises:
      ValueError: wrong shape, or (where the values are known) rows out of [-1, B).
    """
    rows = check_rows(rows, check_state(spec, state))
    check_not_explicit(state=state, rows=rows)
    return _take(spec, state, rows)


def check_rows(rows: Any, batch_size: int) -> jax.Array:
    """`rows` of `take` as int32 [B'].

    Raises:
      TypeError, ValueError: another dtype, another shape or no row, or (where the values are
        known) rows out of [-1, batch_size).
    """
    rows = as_int32("rows", rows)
    if rows.ndim != 1 or rows.shape[0] < 1:
        raise ValueError(f"rows must have shape (B',) with B' >= 1, found {rows.shape}")
    known = concrete(rows)
    if known is None:
        in_range = (rows >= -1) & (rows < batch_size)
        debug_check(lambda: jnp.all(in_range), "take: rows out of range")
    elif ((known < -1) | (known >= batch_size)).any():
        raise ValueError(f"rows must lie in [-1, {batch_size}), found {known.tolist()}")
    return rows


@functools.partial(jax.jit, static_argnames="spec")
def _take(spec: ReplaySpec, state: ReplayState, rows: jax.Array) -> ReplayState:
    batch_size = state.checkpoint.shape[0]
    rows = jnp.where(rows >= 0, rows, batch_size)

    def gather(x: jax.Array) -> jax.Array:
        return x if x.ndim == 0 else x.at[rows].get(mode="fill", fill_value=0)

    taken = jax.tree.map(gather, state)
    if state.rounding_key is None:
        return taken
    # An empty row has those of some other row, as a fork does: zeros would make all heads alike.
    return dataclasses.replace(taken, rounding_key=state.rounding_key.at[rows].get(mode="clip"))
