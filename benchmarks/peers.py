"""Time of other packages' single-token decode beside ours, in the same run.

    pip install fla-core einops   # into an environment with torch, triton and a CUDA GPU
    python benchmarks/peers.py --layer gated_delta_net kda --batch 1 16 64 256

flash-linear-attention (`fla-core`) decodes conventionally: every token reads and writes the state.
So the baseline of a row is our conventional step, timed in turns with it; how replay compares with
that is what `kernels.py` measures. Whole steps of several layers are replayed as one CUDA graph,
where launches cost next to nothing. A case is reported only if outputs and state agree with the
recurrence.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import kernels
import layers
import numpy as np
from rich.console import Console

import replayssm_jax as rs

# Module and function of each layer that fla-core has, by its name in `layers`.
FUNCTIONS = {
    "gated_delta_net": ("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "kda": ("fla.ops.kda", "fused_recurrent_kda"),
}
DEVICE = "cuda"
STEPS = 16
CHECKED_STEPS = 5
# Of states and of bf16 outputs against the recurrence in float32.
STATE_LIMIT, OUTPUT_LIMIT = 1e-5, 1e-2


class Missing(Exception):
    """What the peers need is not here."""


def load(layer: str) -> Callable[..., Any]:
    """The function of fla-core that decodes a layer.

    Raises:
      Missing: no CUDA GPU, or a package that cannot be imported.
    """
    if jax.default_backend() != "gpu":
        raise Missing(f"they need a CUDA GPU, found platform {jax.default_backend()!r}")
    module, name = FUNCTIONS[layer]
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise Missing(f"{error}; pip install fla-core einops, beside torch and triton") from error


@dataclasses.dataclass
class Peer:
    """A decode function of fla-core on tensors of the GPU.

    Attributes:
      function: of `FUNCTIONS`.
      v_first: whether it keeps the state as [V, K]; otherwise it is [K, V].
    """

    function: Callable[..., Any]
    v_first: bool

    @property
    def name(self) -> str:
        version = importlib.metadata.version("fla-core")
        return f"fla-core {version}, state {'[V, K]' if self.v_first else '[K, V]'}"

    def step(self, state: Any, inputs: dict[str, Any]) -> tuple[Any, Any]:
        """Output and state after a token; q is scaled and k normalised already."""
        import torch

        with torch.no_grad():
            return self.function(
                **inputs,
                scale=1.0,
                initial_state=state,
                output_final_state=True,
                state_v_first=self.v_first,
            )

    def zeros(self, spec: rs.ReplaySpec, batch: int) -> Any:
        import torch

        _, heads, value, key = spec.state_shape(batch)
        last = (value, key) if self.v_first else (key, value)
        return torch.zeros((batch, heads, *last), dtype=torch.float32, device=DEVICE)

    def check(self, spec: rs.ReplaySpec, batch: int) -> float:
        """Relative error of the state after some steps, or raise `harness.WrongResult`."""
        inputs = kernels.random_tokens(spec, batch, CHECKED_STEPS, 7)
        state, outputs = self.zeros(spec, batch), []
        for t in range(CHECKED_STEPS):
            output, state = self.step(state, to_torch(inputs, t))
            outputs.append(output.float().cpu().numpy())
        initial = jnp.zeros(spec.state_shape(batch))
        expected, wanted = jax.jit(rs.recurrent_scan, static_argnums=0)(spec, initial, inputs)
        found = state.cpu().numpy()
        if not self.v_first:
            found = np.swapaxes(found, -1, -2)
        outputs = np.concatenate(outputs, axis=1)
        harness.check(f"{self.name} outputs", outputs, expected, limit=OUTPUT_LIMIT)
        return harness.check(f"{self.name} state", found, wanted, limit=STATE_LIMIT)

    def contender(self, spec: rs.ReplaySpec, batch: int, count: int) -> harness.Contender:
        """Steps of all layers, captured as one CUDA graph: a run replays it."""
        import torch

        inputs = [to_torch(kernels.random_tokens(spec, batch, 1, seed), 0) for seed in range(count)]
        initial = [self.zeros(spec, batch) for _ in range(count)]

        def steps() -> list[Any]:
            states = initial
            for _ in range(STEPS):
                pairs = zip(states, inputs, strict=True)
                states = [self.step(state, token)[1] for state, token in pairs]
            return states

        # Compiles and tunes, on a stream of its own as capturing asks for.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            steps()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # What JAX's threads do meanwhile must not end the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = steps()

        # The graph reads and writes these tensors, so they must live as long as it does.
        held = initial, inputs, captured

        def run(_: Any) -> None:
            graph.replay()
            torch.cuda.synchronize()

        return harness.Contender(run, prepare=lambda: held, calls=STEPS * count)


def to_torch(inputs: rs.TokenInputs, t: int) -> dict[str, Any]:
    """Token `t` as tensors on the GPU, with the dtypes of the inputs."""
    import torch

    def move(x: jax.Array) -> Any:
        # NumPy has no bf16 that torch reads; float32 holds its values exactly.
        tensor = torch.from_numpy(np.array(x[:, t : t + 1], np.float32))
        return tensor.to(DEVICE, getattr(torch, x.dtype.name)).contiguous()

    return {name: move(getattr(inputs, name)) for name in ("q", "k", "v", "g", "beta")}


def conventional(spec: rs.ReplaySpec, batch: int, count: int) -> harness.Contender:
    """Our conventional step of all layers, in a loop so long that the call does not count."""
    steps = 16 * STEPS
    inputs = [kernels.random_tokens(spec, batch, 1, seed) for seed in range(count)]
    started = kernels.conventional_states(spec, batch, count)
    with harness.Compiler() as ahead:
        step = kernels.conventional_step(spec, None, 1)
        program = ahead(kernels.loop(step, steps), *started, inputs)
    return kernels.contender(program, started, inputs, steps * count)


def measure(layer: str, batch: int, args: argparse.Namespace) -> list[harness.Row]:
    """Rows of a layer: fla-core with either layout of the state, against our conventional step."""
    spec = layers.make_spec(layer)
    count = args.layers or kernels.baseline_layers(batch, 1)
    peers = [Peer(load(layer), v_first) for v_first in (False, True)]
    errors = {peer.name: peer.check(spec, min(batch, 4)) for peer in peers}
    contenders = {peer.name: peer.contender(spec, batch, count) for peer in peers}
    contenders["conventional"] = conventional(spec, batch, count)
    for one in contenders.values():
        one.once()
        one.once()
    timings = harness.time_in_turns(contenders, repeats=args.repeats)
    return [
        harness.row(
            timings[name],
            timings["conventional"],
            case=layers.describe(layer),
            family=layer,
            batch=batch,
            tokens=1,
            read_dtype=None,
            implementation=name,
            fraction_of_read_bandwidth=None,
            rel_err=errors[name],
            extra={"layers": count, "baseline": "our conventional step"},
        )
        for name in errors
    ]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layer", choices=FUNCTIONS, nargs="+", default=list(FUNCTIONS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument(
        "--layers", type=int, help="layers in the loop; default: 24, fewer where states are large"
    )
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each contender")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder of the JSON file")
    args = parser.parse_args(argv)
    if args.repeats < 2:
        parser.error("--repeats must be at least 2, or there is no spread")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    console = Console()
    rows: list[harness.Row] = []
    refused = False
    options = {key: value for key, value in vars(args).items() if key != "out"}
    for layer in args.layer:
        for batch in args.batch:
            try:
                rows += measure(layer, batch, args)
            except Missing as error:
                console.print(f"peers cannot run: {error}", soft_wrap=True)
                return 2
            except harness.WrongResult as error:
                refused = True
                console.print(f"[bold red]{layer}, batch {batch}: not reported[/]: {error}")
            path = harness.save("peers", rows, options, args.out)  # a later case may fail
    console.print(harness.table("microseconds of one step of all rows, one layer", rows))
    console.print(f"written to {path}")
    return int(refused)


if __name__ == "__main__":
    # Two frameworks share the GPU's memory; JAX reads this when it first looks for devices.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    raise SystemExit(main())
