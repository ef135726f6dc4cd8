"""Decode loops that know where in a window they stand, so that no step needs a predicate.

`scan_steps` and `while_loop` are called like `jax.lax.scan` (without `reverse` and `unroll`) and
`jax.lax.while_loop`. They run in windows: one step that flushes, then window - 1 steps that only
read. The phase reaches the layers through the user's own model as static data of every `Pointer` in
the carry. A flush drops pending drafts, those of idle rows too: commit before the loop.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from replayssm_jax.arguments import check_int
from replayssm_jax.state import Phase, Pointer

Carry = TypeVar("Carry")
Made = TypeVar("Made")


def scan_steps(
    f: Callable[[Carry, Any], tuple[Carry, Any]],
    init: Carry,
    xs: Any = None,
    length: int | None = None,
    *,
    window: int = 16,
) -> tuple[Carry, Any]:
    """`jax.lax.scan` over decode steps, without a flush predicate.

    `reverse`, `unroll` and the other options of `jax.lax.scan` are not taken.

    Each call of `f` must advance each ReplayState in the carry by one `step`, and `insert` only
    rows that hold no more records than the window has taken steps (rows of a flushed state do). A
    row whose committed tokens outrun its window becomes NaN for good, outputs and state, as one
    does whose old state is selected over a flush and goes on later: let it idle by `verify` with a
    length of 0. The first step of each window flushes whatever the ring holds, so any state can
    enter, and the result equals that of `jax.lax.scan` within rounding. `f` is traced twice, and
    once more when `window` does not divide the length. Outside `jax.jit` later calls with the same
    `f` trace it no more, as those of `jax.lax.scan`: what it closes over and what changes, such as
    a module that is updated in place, must come in the carry.

    Inside `f` the states of the carry know their place in the window, and states from outside do
    not: their trees differ, so `jax.tree.map` and `lax.cond` cannot mix them. To start rows `done`
    again, empty them with `reset(spec, state, done)`, or give them rows of an initial state with
    `insert(spec, state, jnp.where(done, jnp.arange(B), -1), initial)`, which writes no other row.

    Args:
      f: (carry, x) -> (carry, y), with at least one ReplayState somewhere in the carry.
      init: the first carry.
      xs: None, or a pytree of arrays with a leading axis to scan over.
      length: number of steps, an int; may be left out with `xs`.
      window: steps between two flushes, at most the window of every spec in the carry.

    Returns:
      The last carry, and the ys stacked along a leading axis.

    Raises:
      TypeError: a length or window that is no int known while tracing, xs without a leading axis,
        an `f` that returns anything but a pair, or a carry of another tree, shape or dtype.
      ValueError: no length, lengths that differ, no ReplayState in the carry, a window too large.
    """
    window = _check_window(init, window)
    num_steps = _num_steps(xs, length)
    num_windows, rest = divmod(num_steps, window)

    steps = _kept(f, window, _Steps)
    parts = []
    carry = jax.tree.map(jnp.asarray, init)  # as scan does, also where no whole window runs
    for first, count, size in ((0, num_windows, window), (num_windows * window, 1, rest)):
        if count and size:
            some = _in_windows(xs, first, count, size)
            carry, ys = jax.lax.scan(steps.window(size), carry, some, count)
            parts.append(jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), ys))
    if not parts:
        return jax.lax.scan(steps.flush, carry, xs, 0)
    return carry, jax.tree.map(lambda *ys: jnp.concatenate(ys), *parts)


def while_loop(
    cond_fun: Callable[[Carry], Any],
    body_fun: Callable[[Carry], Carry],
    init_val: Carry,
    *,
    window: int = 16,
) -> Carry:
    """`jax.lax.while_loop` over decode steps, without a flush predicate.

    `cond_fun` is evaluated once a window, so up to `window - 1` surplus steps run after it first
    turns false: the body must leave finished rows as they are. What `scan_steps` says about states
    that are stepped and inserted, and about what `f` closes over, holds for `body_fun`, too. It is
    traced twice.

    Args:
      cond_fun: carry -> bool scalar.
      body_fun: carry -> carry, with at least one ReplayState somewhere in the carry.
      init_val: the first carry.
      window: steps between two flushes, at most the window of every spec in the carry.

    Raises:
      TypeError: a window that is no int, a body that returns a carry of another tree, shape or
        dtype.
      ValueError: no ReplayState in the carry, a window too large.
    """
    window = _check_window(init_val, window)
    run_window = _kept(body_fun, window, _while_body)
    return jax.lax.while_loop(cond_fun, run_window, init_val)


def is_pointer(x: Any) -> bool:
    """Whether `x` is a Pointer, for `is_leaf`."""
    return isinstance(x, Pointer)


def set_phase(tree: Carry, phase: Phase | None) -> Carry:
    """`tree` with all its pointers at `phase`."""
    return jax.tree.map(
        lambda x: dataclasses.replace(x, phase=phase) if is_pointer(x) else x,
        tree,
        is_leaf=is_pointer,
    )


def _in_windows(xs: Any, first: int, count: int, size: int) -> Any:
    """`count` windows of `size` steps of `xs`, from step `first` on."""
    last = first + count * size
    return jax.tree.map(lambda x: x[first:last].reshape(count, size, *x.shape[1:]), xs)


# JAX keeps what it compiled of a loop by the identity of its body, as long as that lives.
_bodies: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def _kept(f: Any, window: int, make: Callable[[Callable[[], Any], int], Made]) -> Made:
    """What `make` makes of a reference to `f` and the window: one for as long as `f` lives.

    Within a trace it is made anew: there JAX compiles anyway, and `f` may close over tracers.
    """
    is_traced = isinstance(jax.lax.iota(jnp.int32, 1), jax.core.Tracer)  # transfers nothing
    if is_traced:
        return make(lambda: f, window)
    try:
        held = _bodies.setdefault(f, {})
    except TypeError:  # not hashable, or without weak references
        return make(lambda: f, window)
    owner, made = held.get((make, window), (None, None))
    # Another may be equal to it, such as the same method bound again, and live longer.
    if owner is None or owner() is not f:
        owner = weakref.ref(f)
        made = make(owner, window)
        held[make, window] = owner, made
    return made


class _Steps:
    """Bodies of scans over the steps of `f`: one that flushes, one that does not, windows."""

    def __init__(self, f: Callable[[], Any], window: int):
        self.flush = _in_phase(f, Phase(True, window))
        self.hold = _in_phase(f, Phase(False, window))
        self._windows: dict[int, Any] = {}

    def window(self, size: int) -> Callable[[Carry, Any], tuple[Carry, Any]]:
        """The body of a scan over windows of `size` steps."""
        return self._windows.setdefault(size, functools.partial(self._run, size=size))

    def _run(self, carry: Carry, xs: Any, size: int) -> tuple[Carry, Any]:
        first = jax.tree.map(lambda x: x[0], xs)
        carry, y = self.flush(carry, first)
        if size == 1:
            return carry, jax.tree.map(lambda y: jnp.expand_dims(y, 0), y)
        later = jax.tree.map(lambda x: x[1:], xs)
        carry, ys = jax.lax.scan(self.hold, carry, later, size - 1)
        return carry, jax.tree.map(
            lambda y, ys: jnp.concatenate([jnp.expand_dims(y, 0), ys]), y, ys
        )


def _while_body(f: Callable[[], Any], window: int) -> Callable[[Carry], Carry]:
    """The body of a while loop over whole windows of `f`."""

    def in_phase(flush: bool) -> Callable[[Carry, None], tuple[Carry, None]]:
        def step(carry: Carry, _: None) -> tuple[Carry, None]:
            found = f()(set_phase(carry, Phase(flush, window)))
            return _same_carry("body_fun", carry, set_phase(found, None)), None

        return step

    def run_window(carry: Carry) -> Carry:
        carry, _ = in_phase(True)(carry, None)
        if window > 1:
            carry, _ = jax.lax.scan(in_phase(False), carry, None, window - 1)
        return carry

    return run_window


def _in_phase(f: Callable[[], Any], phase: Phase) -> Callable[[Carry, Any], tuple[Carry, Any]]:
    def wrapped(carry: Carry, x: Any) -> tuple[Carry, Any]:
        found = f()(set_phase(carry, phase), x)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            parts = f" of {len(found)}" if isinstance(found, (tuple, list)) else ""
            raise TypeError(f"f must return (carry, y), found {type(found).__name__}{parts}")
        after, y = found
        return _same_carry("f", carry, set_phase(after, None)), set_phase(y, None)

    return wrapped


def _same_carry(name: str, given: Carry, found: Carry) -> Carry:
    """`found`, if it is a carry like `given`."""

    def check(what: Any, wanted: Any, place: str = "") -> None:
        if what != wanted:
            at = f" at {place}" if place else ""
            raise TypeError(f"{name} must return a carry like its own{at}: {wanted}, found {what}")

    def check_leaf(path: Any, found: Any, given: Any) -> None:
        place = jax.tree_util.keystr(path)
        check(jnp.shape(found), jnp.shape(given), place)
        if not getattr(given, "weak_type", False):  # which a scan promotes
            check(jnp.result_type(found), jnp.result_type(given), place)

    def leaves(tree: Any) -> list[str]:
        return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]

    before, after = leaves(given), leaves(found)
    for word, some, others in (("without", before, after), ("with", after, before)):
        rest = [place for place in some if place not in others]
        if rest:
            places = ", ".join(rest[:3]) + (" and more" if len(rest) > 3 else "")
            raise TypeError(f"{name} must return a carry like its own, found one {word} {places}")
    check(jax.tree.structure(found), jax.tree.structure(given))
    jax.tree_util.tree_map_with_path(check_leaf, found, given)
    return found


def _num_steps(xs: Any, length: int | None) -> int:
    sizes = []
    for x in jax.tree.leaves(xs):
        if not getattr(x, "ndim", 0):
            raise TypeError(f"xs must be arrays with a leading axis to scan over, found {x!r}")
        sizes.append(x.shape[0])
    steps = {*sizes} if length is None else {*sizes, check_int("length", length, 0)}
    if len(steps) != 1:
        raise ValueError(
            "length and the leading axes of xs must give one number of steps, found "
            f"length={length} and leading axes {sizes}"
        )
    return steps.pop()


def _check_window(carry: Any, window: int) -> int:
    window = check_int("window", window)
    pointers = [p for p in jax.tree.leaves(carry, is_leaf=is_pointer) if is_pointer(p)]
    if not pointers:
        raise ValueError("found no ReplayState in the carry; use the loops of jax.lax")
    if any(p.phase is not None for p in pointers):
        raise ValueError("a windowed loop cannot run inside the body of another")
    return window
