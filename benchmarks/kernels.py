"""Time of one layer's decode step: replay against conventional decoding, in the same run.

    python benchmarks/kernels.py --layer mamba2 kda --batch 1 256
    python benchmarks/kernels.py --layer mamba2 --batch 256 --fills

A loop of several layers runs whole windows, flushes included, under one jit with donated states;
everything that a step needs is inside. The baseline is the fastest conventional step of those that
run here. A case is reported only if states and outputs agree with the recurrence.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import bandwidth
import harness
import jax
import jax.numpy as jnp
import layers
import numpy as np
from rich.console import Console

import replayssm_jax as rs
from replayssm_jax import dispatch
from replayssm_jax.snapshots import Snapshots, verify_snapshots

IMPLEMENTATIONS = ("mosaic_gpu", "triton", "xla")
OWN = "own pointers"
WINDOWED = "windowed"

# Of states against the recurrence in float32, and of bf16 outputs by format of the read copy.
STATE_LIMIT = 2e-6
OUTPUT_LIMITS = {None: 1e-2, "float16": 1e-2, "bfloat16": 1e-2, "int8": 3e-2}
OUTPUT_LIMITS |= {"float8_e4m3fn": 6e-2, "float8_e5m2": 1e-1}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def random_tokens(spec: rs.ReplaySpec, batch: int, tokens: int, seed: int) -> rs.TokenInputs:
    """Inputs as a layer makes them, on the device: unit keys, decays from 1 down to none."""
    q, k, v, g, beta = jax.random.split(harness.random_key(seed), 5)
    lead = (batch, tokens)
    keys = jax.random.normal(k, (*lead, spec.num_groups, spec.key_dim))
    keys = keys / jnp.linalg.norm(keys, axis=-1, keepdims=True)
    heads = (*lead, spec.num_heads)
    gates = heads if spec.decay == "scalar" else (*heads, spec.key_dim)
    return rs.TokenInputs(
        q=(jax.random.normal(q, keys.shape) * spec.key_dim**-0.5).astype(spec.key_dtype),
        k=keys.astype(spec.key_dtype),
        v=jax.random.normal(v, (*heads, spec.value_dim)).astype(spec.value_dtype),
        g=-jnp.exp(2 * jax.random.normal(g, gates) - 2),
        beta=jax.nn.sigmoid(jax.random.normal(beta, heads)),
    )


# A step of one layer: (shared, state, inputs) -> (output, shared, state). `shared` is what the
# layers of a model have in common: a pointer, or how many tokens are committed.
Step = Callable[[Any, Any, rs.TokenInputs], tuple[jax.Array, Any, Any]]


def replay_step(spec: rs.ReplaySpec, implementation: str, accepted: int) -> Step:
    """Verify, and accept as many tokens; layers may also have pointers of their own."""

    def step(pointer: Any, state: Any, inputs: rs.TokenInputs) -> tuple[jax.Array, Any, Any]:
        if pointer is not None:
            state = dataclasses.replace(state, pointer=pointer)
        output, state = rs.verify(spec, state, inputs, implementation=implementation)
        state = rs.commit(spec, state, accepted)
        if pointer is not None:
            pointer, state = state.pointer, dataclasses.replace(state, pointer=None)
        return output, pointer, state

    return step


def conventional_step(spec: rs.ReplaySpec, implementation: str | None, accepted: int) -> Step:
    """One token in place; where some may be rejected, a snapshot of the state for each."""

    def step(position: Any, state: Any, inputs: rs.TokenInputs) -> tuple[jax.Array, Any, Any]:
        if position is None:
            output, state = rs.recurrent_step(spec, state, inputs, implementation=implementation)
            return output, None, state
        output, state = verify_snapshots(
            spec, state, inputs, position, implementation=implementation
        )
        return output, position + accepted, state

    return step


def conventional_states(spec: rs.ReplaySpec, batch: int, count: int) -> tuple[Any, list[Any]]:
    """What `conventional_step` starts from: (shared, states)."""
    if spec.max_tokens == 1:
        return None, [jnp.zeros(spec.state_shape(batch)) for _ in range(count)]
    return jnp.zeros((batch,), jnp.int32), [Snapshots.zeros(spec, batch) for _ in range(count)]


def loop(step: Step, steps: int, scan: Callable[..., Any] = jax.lax.scan) -> Callable[..., Any]:
    """A jitted loop over steps of all layers, with donated states."""

    def run(shared: Any, states: Any, inputs: Any) -> tuple[Any, Any, Any]:
        def body(carry: tuple[Any, Any, Any], _: None) -> tuple[tuple[Any, Any, Any], None]:
            shared, states, _ = carry
            after = []
            for state, token in zip(states, inputs, strict=True):
                output, moved, state = step(shared, state, token)
                after.append(state)
            return (moved, after, output), None

        tokens = inputs[0].v
        carry = (shared, states, jnp.zeros(tokens.shape, tokens.dtype))
        return scan(body, carry, None, length=steps)[0]

    return jax.jit(run, donate_argnums=(0, 1))


def contender(run: harness.Program, started: Any, inputs: Any, calls: int) -> harness.Contender:
    """Runs go on from where the last one ended."""
    box = [started]

    def once(held: Any) -> Any:
        shared, states, output = run.result()(*held, inputs)
        box[0] = shared, states
        return output

    return harness.Contender(once, prepare=lambda: box[0], calls=calls)


class Check:
    """Whether a few windows of replay agree with the recurrence: the first and the last row."""

    def __init__(
        self,
        spec: rs.ReplaySpec,
        batch: int,
        implementation: str,
        tokens: int,
        accepted: int,
        ahead: harness.Compiler,
    ):
        self.implementation = implementation
        self.limit = OUTPUT_LIMITS[format_of(spec)]
        turns = (2 * spec.window + 3) // accepted + 1
        step = replay_step(spec, implementation, accepted)
        ends = np.array([0, batch - 1])

        def run(inputs: rs.TokenInputs) -> tuple[jax.Array, jax.Array]:
            def body(state: rs.ReplayState, turn: jax.Array) -> tuple[rs.ReplayState, jax.Array]:
                part = jax.tree.map(
                    lambda x: jax.lax.dynamic_slice_in_dim(x, turn * accepted, tokens, 1), inputs
                )
                output, _, state = step(None, state, part)
                return state, output[ends, :accepted]

            state = rs.init_state(spec, batch, ragged=True)
            state, outputs = jax.lax.scan(body, state, jnp.arange(turns))
            outputs = jnp.moveaxis(outputs, 0, 1).reshape(2, -1, spec.num_heads, spec.value_dim)
            return outputs, rs.materialize(spec, jax.tree.map(lambda x: x[ends], state))

        def reference(inputs: rs.TokenInputs) -> tuple[jax.Array, jax.Array]:
            rows = jax.tree.map(lambda x: x[ends, : turns * accepted], inputs)
            return rs.recurrent_scan(spec, jnp.zeros(spec.state_shape(2)), rows)

        length = turns * accepted + tokens
        self.random = ahead(random_tokens, spec, batch, length, 0)
        shapes = jax.eval_shape(functools.partial(random_tokens, spec, batch, length), 0)
        self.programs = [ahead(jax.jit(f), shapes) for f in (run, reference)]

    def __call__(self) -> float:
        """Relative error of the state after two windows and a bit, or raise `WrongResult`."""
        inputs = self.random.result()(7)
        (outputs, state), expected = (run.result()(inputs) for run in self.programs)
        name = self.implementation
        # Outputs are rounded to the dtype of the values, and read from a copy.
        harness.check(f"{name} outputs", outputs, expected[0], limit=self.limit)
        return harness.check(f"{name} state", state, expected[1], limit=STATE_LIMIT)


def bytes_read(spec: rs.ReplaySpec, batch: int, tokens: int) -> int:
    """Least bytes that a step reads: the state, half a window of records, the new tokens."""
    key = jnp.dtype(spec.key_dtype).itemsize
    value = jnp.dtype(spec.value_dtype).itemsize
    rows = spec.num_heads * spec.value_dim
    decay = 4 * spec.num_heads * spec.decay_dim
    read_decay = decay if spec.read_decay_dtype is None else decay // 2
    record = spec.num_groups * spec.key_dim * key + read_decay
    if spec.rule == "delta":
        record += rows * spec.cached_dtype.itemsize
    else:
        record += rows * value + 4 * spec.num_heads
    new = 2 * spec.num_groups * spec.key_dim * key + rows * value + decay + 4 * spec.num_heads
    state = rows * spec.key_dim * (spec.read_dtype or spec.state_dtype).itemsize
    return batch * (state + (spec.window - 1) * record // 2 + tokens * new)


def format_of(spec: rs.ReplaySpec) -> str | None:
    """Name of the read copy's format."""
    return spec.read_dtype and spec.read_dtype.name


def facts(layer: str, spec: rs.ReplaySpec, batch: int, tokens: int, **kwargs: Any) -> dict:
    family = "mamba2" if layer.startswith("mamba2") else layer
    return dict(
        family=family,
        batch=batch,
        tokens=tokens,
        read_dtype=format_of(spec),
        **kwargs,
    )


# Layers of a loop, which share a pointer, as a model has them.
LAYERS = 24


def baseline_layers(batch: int, tokens: int) -> int:
    """Layers of the conventional loop: as many, or as have room with a state for each token."""
    return LAYERS if batch <= 64 else 12 if tokens == 1 else 8 if tokens < 8 else 4


def flush_period(window: int, tokens: int, accepted: int) -> int:
    """Steps from one flush to the next, where each brings and accepts as many tokens."""
    return (window - tokens) // accepted + 1


def loop_steps(window: int, tokens: int, accepted: int) -> int:
    """So many that the call itself does not count, and whole times from flush to flush."""
    period = flush_period(window, tokens, accepted)
    return period * max(1, min(16, 256 // period))


def windowed_scan(window: int, tokens: int, accepted: int) -> Callable[..., Any]:
    """The loop that flushes all rows at the same steps."""
    return functools.partial(rs.scan_steps, window=flush_period(window, tokens, accepted))


def program_of(form: str) -> str:
    """Whose loop a form runs: staggered rows differ in what their pointer holds alone."""
    return form if form in (OWN, WINDOWED) else "shared"


def default_window(layer: str, tokens: int) -> int:
    """The faster one of 16 and 32, on an H200 with 256 rows."""
    return 32 if tokens > 4 and layers.make_spec(layer).rule == "additive" else 16


def replay_states(
    spec: rs.ReplaySpec, batch: int, count: int
) -> tuple[rs.Pointer, list[rs.ReplayState]]:
    """Empty states of layers that share a pointer."""
    every = [rs.init_state(spec, batch, ragged=True) for _ in range(count)]
    return every[0].pointer, [dataclasses.replace(one, pointer=None) for one in every]


class Case:
    """Each replay implementation against the fastest conventional step; compiles when made."""

    def __init__(
        self,
        layer: str,
        batch: int,
        tokens: int,
        accepted: int,
        read_dtype: str | None,
        window: int | None,
        args: argparse.Namespace,
        ahead: harness.Compiler,
    ):
        self.args, self.layer, self.batch = args, layer, batch
        self.tokens, self.accepted = tokens, accepted
        self.window = window or default_window(layer, tokens)
        self.words = [] if window is None else [f"window {window}"]
        self.spec = layers.make_spec(
            layer, window=self.window, max_tokens=tokens, read_dtype=read_dtype
        )
        self.count = args.layers or LAYERS
        self.baseline_count = min(self.count, baseline_layers(batch, tokens))
        self.steps = steps = loop_steps(self.window, tokens, accepted)
        self.checks = {
            name: Check(self.spec, batch, name, tokens, accepted, ahead)
            for name in args.implementation
        }

        self.random = ahead(random_tokens, self.spec, batch, tokens, 0)
        one = jax.eval_shape(functools.partial(random_tokens, self.spec, batch, tokens), 0)

        def compiled(
            step: Step, start: Callable[[], Any], count: int, *scan: Any
        ) -> harness.Program:
            return ahead(loop(step, steps, *scan), *jax.eval_shape(start), [one] * count)

        self.programs = {}
        for name in args.implementation:
            for how in dict.fromkeys(map(program_of, args.forms)):
                start = functools.partial(self.states, OWN if how == OWN else "uniform")
                step = replay_step(self.spec, name, accepted)
                scan = [windowed_scan(self.window, tokens, accepted)] if how == WINDOWED else []
                self.programs[name, how] = compiled(step, start, self.count, *scan)
        self.baselines = {
            name: compiled(
                conventional_step(self.spec, name, accepted),
                self.baseline_states,
                self.baseline_count,
            )
            for name in args.baseline
        }

    def states(self, how: str) -> tuple[rs.Pointer | None, list[rs.ReplayState]]:
        if how == OWN:
            every = range(self.count)
            return None, [rs.init_state(self.spec, self.batch, ragged=True) for _ in every]
        pointer, states = replay_states(self.spec, self.batch, self.count)
        if how == "staggered":
            fill = jnp.arange(self.batch, dtype=jnp.int32) % (self.window + 1)
            pointer = dataclasses.replace(pointer, length=fill)
        return pointer, states

    def baseline_states(self) -> tuple[Any, list[Any]]:
        return conventional_states(self.spec, self.batch, self.baseline_count)

    def rows(self) -> Iterator[harness.Row]:
        args = self.args
        inputs = [self.random.result()(seed) for seed in range(self.count)]
        errors = {name: check() for name, check in self.checks.items()}
        contenders: dict[Any, harness.Contender] = {}
        for name in args.implementation:
            for how in args.forms:
                program = self.programs[name, program_of(how)]
                calls = self.steps * self.count
                contenders[name, how] = contender(program, self.states(how), inputs, calls)
        for name, program in self.baselines.items():
            started, some = self.baseline_states(), inputs[: self.baseline_count]
            calls = self.steps * self.baseline_count
            contenders["conventional", name] = contender(program, started, some, calls)
        for one in contenders.values():
            one.once()
        timings = harness.time_in_turns(contenders, repeats=args.repeats)
        baselines = {key: t for key, t in timings.items() if key[0] == "conventional"}
        fastest = min(baselines, key=lambda key: baselines[key].us)
        for key, timing in timings.items():
            if key in baselines:
                continue
            name, how = key
            rate = bytes_read(self.spec, self.batch, self.tokens) / timing.us * 1e6
            yield harness.row(
                timing,
                baselines[fastest],
                case=", ".join(
                    [
                        layers.describe(self.layer),
                        *self.words,
                        *([] if self.accepted == self.tokens else [f"{self.accepted} accepted"]),
                        *([] if how == "uniform" else [how]),
                    ]
                ),
                implementation=name,
                fraction_of_read_bandwidth=rate / args.bandwidth if args.bandwidth else None,
                rel_err=errors[name],
                extra={
                    "window": self.window,
                    "accepted": self.accepted,
                    "layers": self.count,
                    "baseline_layers": self.baseline_count,
                    "baseline": fastest[1],
                    "read_bandwidth": args.bandwidth,
                    "conventional_us": {name: t.us for (_, name), t in baselines.items()},
                },
                **facts(self.layer, self.spec, self.batch, self.tokens),
            )


class Fills:
    """Single steps: at each fill of the window (the last one flushes), and staggered."""

    def __init__(
        self,
        layer: str,
        batch: int,
        read_dtype: str | None,
        args: argparse.Namespace,
        ahead: harness.Compiler,
    ):
        self.args, self.layer, self.batch = args, layer, batch
        self.window = 16
        self.spec = layers.make_spec(layer, window=self.window, read_dtype=read_dtype)
        self.count = args.layers or baseline_layers(batch, 1)
        self.name = args.implementation[0]
        self.steps = (16 if batch <= 64 else 2) * self.window
        step = replay_step(self.spec, self.name, 1)

        def run(states: Any, pointer: rs.Pointer, inputs: Any) -> Any:
            def body(states: Any, _: None) -> tuple[Any, jax.Array]:
                after = []
                for state, token in zip(states, inputs, strict=True):
                    # The pointer stays where it is: every step of the loop is the same one.
                    output, _, state = step(pointer, state, token)
                    after.append(state)
                return after, output[0, 0, 0, 0]

            return jax.lax.scan(body, states, None, length=self.steps)

        self.check = Check(self.spec, batch, self.name, 1, 1, ahead)
        self.random = ahead(random_tokens, self.spec, batch, 1, 0)
        one = jax.eval_shape(functools.partial(random_tokens, self.spec, batch, 1), 0)
        inputs = [one] * self.count
        self.program = ahead(jax.jit(run, donate_argnums=0), *jax.eval_shape(self.start), inputs)
        self.baseline = ahead(
            loop(conventional_step(self.spec, self.name, 1), self.steps),
            *jax.eval_shape(self.baseline_states),
            inputs,
        )

    def start(self) -> tuple[list[rs.ReplayState], rs.Pointer]:
        pointer, states = replay_states(self.spec, self.batch, self.count)
        return states, pointer

    def baseline_states(self) -> tuple[Any, list[Any]]:
        return conventional_states(self.spec, self.batch, self.count)

    def rows(self) -> Iterator[harness.Row]:
        calls = self.steps * self.count
        inputs = [self.random.result()(seed) for seed in range(self.count)]
        error = self.check()
        box, pointer = self.start()
        held = [box]
        fills = {f"fill {j}": jnp.full((self.batch,), j, jnp.int32) for j in range(self.window + 1)}
        fills["staggered"] = jnp.arange(self.batch, dtype=jnp.int32) % self.window + 1

        def one_fill(fill: jax.Array) -> harness.Contender:
            filled = dataclasses.replace(pointer, length=fill)

            def once(states: Any) -> Any:
                held[0], outputs = self.program.result()(states, filled, inputs)
                return outputs

            return harness.Contender(once, prepare=lambda: held[0], calls=calls)

        contenders: dict[Any, harness.Contender] = {k: one_fill(v) for k, v in fills.items()}
        started = self.baseline_states()
        contenders["conventional"] = contender(self.baseline, started, inputs, calls)
        for one in contenders.values():
            one.once()
        timings = harness.time_in_turns(contenders, repeats=self.args.repeats)
        for key in fills:
            yield harness.row(
                timings[key],
                timings["conventional"],
                case=f"{layers.describe(self.layer)}, {key}",
                implementation=self.name,
                fraction_of_read_bandwidth=None,
                rel_err=error,
                extra={"window": self.window, "layers": self.count, "fill": key},
                **facts(self.layer, self.spec, self.batch, 1),
            )


def why_not(implementation: str, layer: str) -> str | None:
    """Why an implementation does not run here; None where it does."""
    try:
        dispatch.resolve(implementation, layers.make_spec(layer), 1)
    except ValueError as error:
        return str(error)
    return None


def cases_of(
    args: argparse.Namespace,
) -> Iterator[tuple[str, str, Callable[[harness.Compiler], Case | Fills]]]:
    """Group and name of each case, and what makes it."""
    for layer in args.layer:
        for batch in args.batch:
            if args.fills:
                for read_dtype in args.read_dtype:
                    copy = None if read_dtype == "none" else read_dtype
                    fills = functools.partial(Fills, layer, batch, copy, args)
                    yield layer, f"{layer}, batch {batch}, copy {read_dtype}", fills
                continue
            variants = itertools.product(
                args.tokens, args.accepted, args.read_dtype, args.window or [None]
            )
            for count, share, read_dtype, window in variants:
                if count == 1 and share == "half":
                    continue
                accepted = count if share == "all" else count // 2
                copy = None if read_dtype == "none" else read_dtype
                words = f"{accepted} of {count} tokens, copy {read_dtype}, window {window}"
                make = functools.partial(Case, layer, batch, count, accepted, copy, window, args)
                yield f"{layer}, {count} tokens", f"{layer}, batch {batch}, {words}", make


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layer", choices=layers.LAYERS, nargs="+", default=list(layers.LAYERS))
    parser.add_argument("--batch", type=harness.count, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument(
        "--tokens", type=harness.count, nargs="+", default=[1], help="tokens of a step"
    )
    parser.add_argument(
        "--accepted",
        choices=("all", "half"),
        nargs="+",
        default=["all"],
        help="of several tokens; the baseline keeps a snapshot of the state for each",
    )
    parser.add_argument(
        "--window", type=harness.count, nargs="+", help="default: 16; Mamba-2, from 5 tokens on: 32"
    )
    parser.add_argument(
        "--read-dtype",
        choices=["none", *(name for name in OUTPUT_LIMITS if name)],
        nargs="+",
        default=["none"],
        help="of a read copy; the baseline has none",
    )
    parser.add_argument(
        "--layers",
        type=harness.count,
        help="layers in the loop; default: 24, of the baseline fewer where states are large",
    )
    parser.add_argument(
        "--implementation",
        choices=IMPLEMENTATIONS,
        nargs="+",
        help="default: those that run here",
    )
    parser.add_argument(
        "--baseline", choices=IMPLEMENTATIONS, nargs="+", help="default: as --implementation"
    )
    parser.add_argument(
        "--forms",
        choices=("uniform", "staggered", WINDOWED, OWN),
        nargs="+",
        default=["uniform"],
        help="staggered: rows at spread fills; windowed: in rs.scan_steps, which knows when to "
        "flush; own pointers: one for each layer, not one for all",
    )
    parser.add_argument("--fills", action="store_true", help="time single steps of a window")
    parser.add_argument(
        "--side-by-side",
        action="store_true",
        help="a process for each layer and number of tokens, to compile sooner",
    )
    parser.add_argument(
        "--repeats", type=harness.count, default=7, help="timed runs of each contender"
    )
    parser.add_argument("--name", default="kernels", help="of the JSON file")
    parser.add_argument(
        "--add", action="store_true", help="keep the other cases that the JSON file holds"
    )
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder of the JSON file")
    args = parser.parse_args(argv)
    if args.repeats < 2:
        parser.error("--repeats must be at least 2, or there is no spread")
    if args.fills:
        fixed = ("tokens", "accepted", "window", "forms", "baseline")
        changed = [name for name in fixed if getattr(args, name) != parser.get_default(name)]
        if changed:
            names = ", ".join("--" + name.replace("_", "-") for name in changed)
            parser.error(f"--fills times one token with a window of 16, found {names}")
    for layer, count in itertools.product(args.layer, args.tokens):
        for window in args.window or [default_window(layer, count)]:
            if count > window:
                parser.error(f"--tokens must fit in the window of {window}, found {count}")
    if not list(cases_of(args)):
        parser.error("--accepted half needs --tokens of at least 2, found 1")
    args.implementation = args.implementation or [
        name for name in IMPLEMENTATIONS if why_not(name, args.layer[0]) is None
    ]
    args.baseline = args.baseline or args.implementation
    for name in {*args.implementation, *args.baseline}:
        if reason := why_not(name, args.layer[0]):
            parser.error(reason)
    return args


def steps(name: str, args: argparse.Namespace) -> Iterator[harness.Found]:
    """Compile the cases of a group first, then measure them one by one."""
    begin = time.perf_counter()
    made: dict[str, Case | Fills] = {}
    with harness.Compiler() as ahead:
        for group, case, make in cases_of(args):
            if group == name:
                made[case] = make(ahead)
    yield harness.Found(words=[f"{name}: compiled after {time.perf_counter() - begin:.0f} s"])
    for case in list(made):
        try:
            yield harness.Found(list(made.pop(case).rows()), [f"{case}: measured"])
        except harness.WrongResult as error:
            yield harness.Found(words=[f"{case}: not reported: {error}"], refused=True)


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parse(argv), Console()
    if args.side_by_side:  # before the device is first used
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    args.bandwidth = bandwidth.measure()
    args.write_bandwidth = bandwidth.measure(write=True)
    groups = list(dict.fromkeys(group for group, _, _ in cases_of(args)))
    rows, refused = harness.run_groups(groups, steps, args, console)
    console.print(harness.table("microseconds of one step of all rows, one layer", rows))
    return int(refused)


if __name__ == "__main__":
    raise SystemExit(main())
