"""Time of a model's decode step on several GPUs against one, data and tensor parallel.

    python benchmarks/sharded.py --family mamba2 --layers 6 --batch 512
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python benchmarks/sharded.py --tiny

Random weights of published shapes and depth decode greedily in one compiled loop: on one device,
with the rows over all devices (2x1) and with the heads over all devices (1x2). A case is reported
only if

- no collective of the compiled loop has the size of a cached array or of a part of one;
- in float32, where sums in another order hardly matter, all logits of a model of its first blocks
  agree with one device's, and so does every token, unless two logits tie;
- in the timed dtype the highest logits agree for as long as the tokens do. From the first token
  that another rounding decides otherwise a row goes its own way: how many do is reported.

Efficiency of n devices, T the time of a step of the same scheme in the same run:

- `efficiency` of data parallel is T(one device, B / n) / T(n devices, B): with the same rows a
  device, what is left is the cost of running together. Of tensor parallel it is
  T(one device, B) / (n T(n devices, B)).
- `strong_efficiency` is the second of these for both; data parallel cannot reach 1 there, since
  every device reads all weights whatever its rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import collectives
import device_trace
import harness
import jax
import jax.numpy as jnp
import layers
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from rich.console import Console

from replayssm_jax.layers.sharding import MeshAxes
from replayssm_jax.models import (
    AttentionConfig,
    GatedDeltaNetConfig,
    HybridConfig,
    HybridLM,
    LayerConfig,
    Mamba2Config,
    partition_specs,
    shard_model,
)
from replayssm_jax.models.build import build_block

# Name, the blocks that repeat (M the mixer, A attention, - the MLP), mixers of the published model,
# attention included, and shapes.
MODELS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "mamba2": (
        "like Nemotron-3-Nano-4B",
        "M-M-M-MM-A",
        25,
        dict(
            d_model=3136,
            mlp="relu2",
            d_ff=12544,
            mamba2=Mamba2Config(**layers.LAYERS["mamba2-80"][2]),
            attention=AttentionConfig(num_heads=40, num_kv_heads=8, head_dim=128, rope_fraction=0),
        ),
    ),
    "gated_delta_net": (
        "like Qwen3.5-4B",
        "M-M-M-A-",
        32,
        dict(
            d_model=2560,
            mlp="swiglu",
            d_ff=9216,
            gated_delta_net=GatedDeltaNetConfig(**layers.LAYERS["gated_delta_net"][2]),
            attention=AttentionConfig(
                num_heads=16,
                num_kv_heads=4,
                head_dim=256,
                rope_fraction=0.25,
                qk_norm=True,
                output_gate=True,
            ),
        ),
    ),
}
TINY: dict[str, dict[str, Any]] = {
    "mamba2": dict(
        mamba2=Mamba2Config(num_heads=8, head_dim=6, state_dim=10, num_groups=4),
    ),
    "gated_delta_net": dict(
        gated_delta_net=GatedDeltaNetConfig(
            num_key_heads=4, num_value_heads=8, key_dim=10, value_dim=6
        ),
    ),
}
SCHEMES = {"replay": "replay", "conventional": "recurrent"}
ONE = "1x1"
# Relative error of logits: rounding of another order of sums, and of bf16 activations.
LIMITS = {"float32": 1e-4, "bfloat16": 5e-2}
# Distance of two logits, in standard deviations of all, that rounding of float32 may bridge.
TIE = 1e-3


def first_mixers(unit: str, count: int) -> str:
    """The pattern that repeats `unit`, up to before mixer `count` + 1."""
    mixers = [at for at, letter in enumerate(unit * (count + 1)) if letter != "-"]
    return (unit * (count + 1))[: mixers[count]]


def mixers_of(family: str, args: argparse.Namespace) -> int:
    """Mixers of the timed model: as many as asked for, or as the published model has."""
    return MODELS[family][2] if args.layers is None else args.layers


def make_config(family: str, args: argparse.Namespace, mixers: int) -> HybridConfig:
    _, unit, _, shapes = MODELS[family]
    if args.tiny:
        unit = "M-A-"
        attention = AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=6)
        shapes = shapes | dict(d_model=44, d_ff=64, attention=attention) | TINY[family]
    block = {
        "M": LayerConfig((family,)),
        "A": LayerConfig(("attention",)),
        "-": LayerConfig((), shapes["mlp"]),
    }
    return HybridConfig(
        vocab_size=args.vocab,
        layers=tuple(block[letter] for letter in first_mixers(unit, mixers)),
        replay_window=args.window,
        # Logits with a standard deviation of about 3, so that the layers decide on the tokens.
        logit_scale=3 / (0.02 * math.sqrt(shapes["d_model"])),
        **shapes,
    )


def make_model(config: HybridConfig, dtype: Any) -> HybridLM:
    """A model with random parameters, from one program for each kind of block."""
    kw: dict[str, Any] = dict(dtype=dtype, param_dtype=dtype)

    @functools.partial(jax.jit, static_argnums=0)
    def block(layer: LayerConfig, key: jax.Array) -> dict:
        return nnx.to_pure_dict(nnx.state(build_block(config, layer, **kw, rngs=nnx.Rngs(key))))

    @jax.jit
    def ends(key: jax.Array) -> dict:
        short = dataclasses.replace(config, layers=(LayerConfig((), config.mlp),))
        return nnx.to_pure_dict(nnx.state(HybridLM(short, **kw, rngs=nnx.Rngs(key))))

    graphdef, state = nnx.split(nnx.eval_shape(lambda: HybridLM(config, **kw, rngs=nnx.Rngs(0))))
    first, *keys = jax.random.split(harness.random_key(0), len(config.blocks) + 1)
    drawn = ends(first)
    drawn["blocks"] = {
        i: block(*one) for i, one in enumerate(zip(config.blocks, keys, strict=True))
    }
    nnx.replace_by_pure_dict(state, drawn)
    return nnx.merge(graphdef, state)


def on_mesh(model: HybridLM, mesh: str) -> HybridLM:
    """The model on the devices of a mesh, "2x1" for two of rows."""
    if mesh == ONE:
        return model
    shape = tuple(int(n) for n in mesh.split("x"))
    devices = jax.devices()[: math.prod(shape)]
    return shard_model(model, jax.make_mesh(shape, ("data", "model"), devices=devices))


def highest(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The highest logit of each row [B, V] and its index, the first of equals, in one reduction.

    So that a vocabulary over several devices costs what picking the token alone would.
    """

    def higher(one: Any, two: Any) -> Any:
        keep = (one[0] > two[0]) | ((one[0] == two[0]) & (one[1] < two[1]))
        return jax.tree.map(functools.partial(jnp.where, keep), one, two)

    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    least = jnp.array(-jnp.inf, logits.dtype), jnp.array(logits.shape[1], jnp.int32)
    top, token = jax.lax.reduce((logits, index), least, higher, (1,))
    return top, token


def decode(
    steps: int, keep_logits: bool, model: HybridLM, token: jax.Array, cache: Any
) -> tuple[jax.Array, Any, tuple[jax.Array, jax.Array]]:
    """Decode greedily from `token` [B]; with the tokens the highest logits, or all, time first."""

    def body(carry: Any, _: None) -> Any:
        token, cache = carry
        logits, cache = model.step(token, cache)
        top, token = highest(logits)
        return (token, cache), (token, logits if keep_logits else top)

    (token, cache), outputs = jax.lax.scan(body, (token, cache), None, length=steps)
    return token, cache, outputs


@dataclasses.dataclass(frozen=True)
class Case:
    """One program: a model on a mesh, a scheme, a batch."""

    model: HybridLM
    batch: int
    scheme: str
    steps: int
    size: int
    keep_logits: bool = False

    @property
    def axes(self) -> MeshAxes | None:
        return self.model.mesh_axes

    @property
    def devices(self) -> int:
        return 1 if self.axes is None else math.prod(self.axes.mesh.shape.values())

    def make_cache(self) -> Any:
        return self.model.init_cache(self.batch, self.size, decode=SCHEMES[self.scheme])

    def make_token(self) -> jax.Array:
        token = jnp.arange(self.batch, dtype=jnp.int32) * 7 % self.model.config.vocab_size
        if self.axes is None:
            return token
        return jax.device_put(token, NamedSharding(self.axes.mesh, PartitionSpec(self.axes.data)))

    def shapes(self) -> tuple[Any, Any]:
        """Token and cache as shapes, with their shardings on a mesh."""
        plain = nnx.merge(*nnx.split(self.model))
        plain.mesh_axes = None
        whole = dataclasses.replace(self, model=plain)
        shapes = jax.eval_shape(lambda: (whole.make_token(), whole.make_cache()))
        if self.axes is None:
            return shapes
        return jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(self.axes.mesh, spec)
            ),
            shapes,
            partition_specs(self.model, shapes, self.axes),
        )

    def lower(self) -> Any:
        """Trace the loop, with the cache donated and back where it was."""
        token, cache = self.shapes()
        run = functools.partial(decode, self.steps, self.keep_logits)
        out = None
        if self.axes is not None:
            out = (*jax.tree.map(lambda x: x.sharding, (token, cache)), None)
        jitted = jax.jit(run, donate_argnums=(1, 2), out_shardings=out)
        kw = {}
        if self.axes is not None and isinstance(self.axes.mesh, AbstractMesh):
            kw["lowering_platforms"] = ("cuda",)
        precision = "highest" if self.model.dtype == jnp.float32 else None
        with jax.default_matmul_precision(precision):
            return jitted.trace(self.model, token, cache).lower(**kw)


class Program:
    """A compiled case, whose runs go on from where the last one ended.

    `refused` says why no time of it is worth reporting, None where nothing speaks against it.
    """

    def __init__(self, case: Case, compiled: Any):
        text = compiled.as_text()
        self.case, self.compiled = case, compiled
        self.collectives = collectives.collectives(text)
        self.kernel = "mosaic_gpu" if "mosaic_gpu" in text else "xla"
        self.held: Any = None
        self.refused: str | None = None
        try:
            collectives.refuse_caches(self.collectives, case.shapes()[1], case.devices)
        except collectives.MovedCache as error:
            self.refused = str(error)

    def start(self) -> None:
        self.held = self.case.make_token(), self.case.make_cache()

    def run(self, held: Any) -> Any:
        token, cache, outputs = self.compiled(self.case.model, *held)
        self.held = token, cache
        return outputs

    def contender(self) -> harness.Contender:
        return harness.Contender(self.run, prepare=lambda: self.held, calls=self.case.steps)

    def first(self) -> tuple[np.ndarray, np.ndarray]:
        """Run from empty caches; tokens [steps, B] and logits [steps, B] or [steps, B, V]."""
        self.start()
        tokens, logits = self.run(self.held)
        return np.asarray(tokens), np.asarray(logits, np.float32)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How the outputs of a mesh agree with those of one device.

    Attributes:
      rel_err: of the logits, up to and with each row's first other token.
      rows: share of the rows whose tokens are all the same.
      tokens: share of the tokens before the first other one of their row.
      gap: None where no row differs; otherwise the greatest distance, where a row first does, of
        the two tokens' logits on one device (with the highest logits alone: of these on the mesh
        and on one device), in standard deviations of one device's logits.
    """

    rel_err: float
    rows: float
    tokens: float
    gap: float | None


def compare(name: str, found: tuple[Any, Any], expected: tuple[Any, Any], dtype: str) -> Agreement:
    """Compare the outputs (tokens, logits) of two programs over each row's common prefix.

    Raises:
      harness.WrongResult: logits differ by more than rounding, or where all logits are there
        tokens do though no two logits tie.
    """
    (tokens, logits), (wanted, reference) = found, expected
    steps, batch = wanted.shape
    differs = tokens != wanted
    first = np.where(differs.any(axis=0), differs.argmax(axis=0), steps)
    common = np.arange(steps)[:, None] <= first
    error = harness.check(name, logits[common], reference[common], limit=LIMITS[dtype])
    rows = np.flatnonzero(first < steps)
    gap = None
    if len(rows):
        at = first[rows], rows
        if logits.ndim == 3:
            apart = reference[(*at, wanted[at])] - reference[(*at, tokens[at])]
        else:
            apart = np.abs(logits[at] - reference[at])
        gap = float(np.max(apart / np.std(reference)))
        if logits.ndim == 3 and gap > TIE:
            raise harness.WrongResult(
                f"{name}: another token in {len(rows)} of {batch} rows, where two logits are "
                f"{gap:.1e} standard deviations apart"
            )
    return Agreement(error, 1 - len(rows) / batch, float(first.sum() / wanted.size), gap)


def compile_all(cases: dict[Any, Case], threads: int) -> dict[Any, Program]:
    """Lower the cases one after the other and compile them side by side."""
    return harness.compile_all(
        {key: case.lower for key, case in cases.items()},
        threads,
        lambda key, compiled: Program(cases[key], compiled),
    )


def meshes(devices: int) -> tuple[str, str]:
    """Data parallel and tensor parallel over all devices."""
    return f"{devices}x1", f"1x{devices}"


def cases_of(
    models: dict[str, HybridLM], exact: dict[str, HybridLM], args: argparse.Namespace
) -> dict[Any, Case]:
    """Every program of a family by (what, scheme, mesh, batch)."""
    # One run from the start, one to warm up, the timed ones, one under the profiler.
    size = args.steps * (args.repeats + 3)
    cases: dict[Any, Case] = {}
    for scheme in args.scheme:
        for mesh, model in exact.items():
            case = Case(model, args.check_batch, scheme, args.steps, args.steps, keep_logits=True)
            cases["check", scheme, mesh, args.check_batch] = case
        for batch in args.batch:
            for mesh, model in models.items():
                cases["timed", scheme, mesh, batch] = Case(model, batch, scheme, args.steps, size)
            half = batch // args.devices
            if args.halves and ("timed", scheme, ONE, half) not in cases:
                cases["timed", scheme, ONE, half] = Case(
                    models[ONE], half, scheme, args.steps, size
                )
    return cases


def measure(family: str, args: argparse.Namespace, console: Console) -> Iterator[harness.Row | str]:
    """Rows of a family, each scheme and mesh against one device; in words what is refused."""
    begin = time.perf_counter()
    config = make_config(family, args, mixers_of(family, args))
    one = make_model(config, jnp.dtype(args.dtype))
    exact = make_model(make_config(family, args, args.check_layers), jnp.float32)
    names = [ONE, *meshes(args.devices)]
    cases = cases_of(
        {mesh: on_mesh(one, mesh) for mesh in names},
        {mesh: on_mesh(exact, mesh) for mesh in names},
        args,
    )
    programs = compile_all(cases, args.threads)
    console.print(f"{family}: {len(cases)} programs after {time.perf_counter() - begin:.0f} s")
    for key, found in [*programs.items()]:
        if isinstance(found, jax.errors.JaxRuntimeError):
            yield f"{family}, {key} does not fit: {programs.pop(key)}"
    checks = {key: programs.pop(key) for key in [*programs] if key[0] == "check"}
    del exact, cases
    same: dict[Any, Agreement] = {}
    for scheme in args.scheme:
        expected = checks["check", scheme, ONE, args.check_batch].first()
        for mesh in names[1:]:
            name = f"{scheme} {mesh} in float32"
            found = checks["check", scheme, mesh, args.check_batch].first()
            try:
                same[scheme, mesh] = compare(name, found, expected, "float32")
            except harness.WrongResult as error:
                yield f"{family}, {error}"
    checks.clear()  # the models in float32 and their caches are as large as what is timed
    times: dict[Any, harness.Timing] = {}
    for scheme in args.scheme:
        for batch in sorted({batch for *_, batch in programs}):
            group = {}
            for mesh in names:
                program = programs.get(("timed", scheme, mesh, batch))
                if program is not None and program.refused is not None:
                    yield f"{family}, {scheme} {mesh}, batch {batch}: {program.refused}"
                elif program is not None and (mesh == ONE or (scheme, mesh) in same):
                    group[mesh] = program
            if ONE not in group:
                continue
            try:
                yield from measure_batch(family, scheme, batch, group, same, times, args)
            except jax.errors.JaxRuntimeError as error:
                if not harness.does_not_fit(error):
                    raise
                yield f"{family}, {scheme}, batch {batch}: does not fit"
            for program in group.values():
                program.held = None


def measure_batch(
    family: str,
    scheme: str,
    batch: int,
    group: dict[str, Program],
    same: dict[Any, Agreement],
    times: dict[Any, harness.Timing],
    args: argparse.Namespace,
) -> Iterator[harness.Row | str]:
    """Rows of one scheme and batch, timed in turns; `times` grows by (scheme, mesh, batch)."""
    # One device last: the cache of a mesh is made on one of its devices and then spread.
    first = {mesh: group[mesh].first() for mesh in reversed(group)}
    contenders = {mesh: program.contender() for mesh, program in group.items()}
    for one in contenders.values():
        one.once()
    timings = harness.time_in_turns(contenders, repeats=args.repeats)
    times.update({(scheme, mesh, batch): timing for mesh, timing in timings.items()})
    if batch not in args.batch:
        return
    for mesh, program in group.items():
        name = f"{family}, {scheme} {mesh}, batch {batch}"
        try:
            alike = compare(name, first[mesh], first[ONE], args.dtype)
        except harness.WrongResult as error:
            yield str(error)
            continue
        traced = None
        if args.profile and (program.collectives or batch == max(args.batch)):
            traced = device_trace.trace(lambda program=program: program.run(program.held))
        extra = program_facts(program, alike, traced)
        if mesh != ONE:
            extra |= efficiencies(times, scheme, mesh, batch, args.devices)
            extra["float32"] = dataclasses.asdict(same[scheme, mesh])
        other = times.get(("conventional", mesh, batch))
        if scheme == "replay" and other is not None:
            extra["conventional_us"] = other.us
        yield harness.row(
            timings[mesh],
            timings[ONE],
            case=f"{MODELS[family][0]}, {mixers_of(family, args)} mixers",
            family=family,
            batch=batch,
            tokens=1,
            read_dtype=None,
            implementation=f"{scheme} {mesh}",
            fraction_of_read_bandwidth=None,
            rel_err=alike.rel_err,
            extra=extra,
        )


def program_facts(program: Program, alike: Agreement, traced: Any) -> dict[str, Any]:
    """What a row says of its program beside the times."""
    return {
        "kernel": program.kernel,
        "collectives": program.collectives,
        "collectives_over_caches": 0,
        "same_rows": alike.rows,
        "same_tokens": alike.tokens,
        "first_gap": alike.gap,
        # No device waits for another where there is no collective at all.
        **(traced or ({} if program.collectives else {"collective_share": 0.0})),
    }


def efficiencies(
    times: dict[Any, harness.Timing], scheme: str, mesh: str, batch: int, devices: int
) -> dict[str, float | None]:
    """Efficiencies as the module's docstring defines them; None where the half was not timed."""
    us = times[scheme, mesh, batch].us
    strong = times[scheme, ONE, batch].us / (devices * us)
    if mesh == meshes(devices)[1]:
        return {"efficiency": strong, "strong_efficiency": strong}
    half = times.get((scheme, ONE, batch // devices))
    return {"efficiency": half and half.us / us, "strong_efficiency": strong}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--family", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument(
        "--layers", type=int, help="mixers, attention included; by default those of the real model"
    )
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--dtype", choices=LIMITS, default="bfloat16", help="of the timed model")
    parser.add_argument("--scheme", choices=SCHEMES, nargs="+", default=["conventional", "replay"])
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--window", type=int, default=16, help="replay window")
    parser.add_argument("--steps", type=int, default=48, help="of one run, whole windows")
    parser.add_argument("--check-batch", type=int, default=8, help="rows of the float32 check")
    parser.add_argument("--check-layers", type=int, default=6, help="mixers of the float32 check")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each mesh")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--threads", type=int, default=8, help="programs compiled side by side")
    parser.add_argument("--tiny", action="store_true", help="shapes for a CPU, to try the script")
    parser.add_argument(
        "--halves",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="time one device at its share of all batches, not only where it is in --batch itself",
    )
    parser.add_argument(
        "--profile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="trace a run for the share of time in collectives",
    )
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder of the JSON file")
    parser.add_argument("--add", action="store_true", help="keep the file's rows of other cases")
    args = parser.parse_args(argv)
    if args.tiny:
        args.vocab, args.batch, args.layers = 60, [4 * args.devices], min(args.layers or 4, 4)
        args.steps, args.window, args.check_layers = 8, 4, args.layers
    if args.steps % args.window:
        parser.error(f"--steps must be whole windows of {args.window}, found {args.steps}")
    if args.repeats < 2:
        parser.error("--repeats must be at least 2, or there is no spread")
    if args.devices < 2 or args.devices > jax.device_count():
        parser.error(f"--devices must be from 2 to the {jax.device_count()} here")
    for batch in (*args.batch, args.check_batch):
        if batch % args.devices:
            parser.error(f"--batch must be multiples of {args.devices} devices, found {batch}")
    return args


def describe(row: harness.Row) -> str:
    """The row in a line."""
    parts = [f"{row.family}, {row.implementation}, batch {row.batch}: {row.us:,.0f} us"]
    for name in ("efficiency", "collective_share", "idle_share", "same_tokens"):
        if row.extra.get(name) is not None:
            parts.append(f"{name.replace('_', ' ')} {row.extra[name]:.3f}")
    return ", ".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    harness.use_all_memory()
    args = parse(argv)
    console = Console()
    rows: list[harness.Row] = []
    refused = False
    options = {key: value for key, value in vars(args).items() if key not in ("out", "add")}
    path = None
    for family in args.family:
        for found in measure(family, args, console):
            if isinstance(found, str):
                refused = True
                console.print(f"[bold red]not reported[/]: {found}", soft_wrap=True)
                continue
            rows.append(found)
            console.print(describe(found), highlight=False, soft_wrap=True)
            # A later case may fail.
            path = harness.save("sharded", rows, options, args.out, add=args.add)
    if path is not None:
        console.print(f"written to {path}")
    return int(refused)


if __name__ == "__main__":
    raise SystemExit(main())
