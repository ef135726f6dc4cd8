"""Train drafting heads for a shipped model, and measure what of their drafts it accepts.

    python examples/train_mtp_heads.py --family kda --steps 1000

The target stays as it is: the heads learn its own next-token distributions on the training text
(`distillation_loss`). Weights go to examples/weights/<family>-mtp.safetensors.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from decode_text import FAMILIES, WEIGHTS
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors import safe_open
from safetensors.flax import save_file
from stdlib_text import as_stream, load_corpus
from train_tiny_hybrid import sample_windows
from weights_io import load_weights, named_parameters

from replayssm_jax.models import HybridLM, MTPHeads, distillation_loss


def heads_path(family: str, folder: Path = WEIGHTS) -> Path:
    return folder / f"{family}-mtp.safetensors"


def save_heads(path: Path, heads: MTPHeads, *, d_ff: int, record: dict[str, Any]) -> None:
    """Write the heads in bfloat16, with what is needed to build them in the metadata."""
    tensors = {name: x.astype(jnp.bfloat16) for name, x in named_parameters(heads).items()}
    shape = {"d_model": heads.d_model, "num_heads": len(heads.heads), "d_ff": d_ff}
    metadata = {"heads": json.dumps(shape), "record": json.dumps(record)}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata=metadata)


def load_heads(path: Path) -> MTPHeads:
    """Build the heads of a file in float32."""
    with safe_open(path, framework="flax") as file:
        shape = json.loads(file.metadata()["heads"])
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    graphdef, state = nnx.split(nnx.eval_shape(lambda: MTPHeads(**shape, rngs=nnx.Rngs(0))))
    flat = {
        path: leaf.replace(values[".".join(map(str, path))].astype(jnp.float32))
        for path, leaf in nnx.to_flat_state(state)
    }
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def train(
    model: HybridLM, heads: MTPHeads, stream: jax.Array, args: argparse.Namespace
) -> tuple[MTPHeads, list[float]]:
    """Train on windows of the stream; returns the heads and the loss of every step, in nats."""
    graphdef, params = nnx.split(heads)
    rate = optax.warmup_cosine_decay_schedule(0.0, args.rate, args.steps // 20 + 1, args.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b2=0.95))

    @jax.jit
    def step(params: Any, moments: Any, i: jax.Array, model: HybridLM) -> Any:
        key = jax.random.fold_in(jax.random.key(args.seed), i)
        tokens = sample_windows(stream, key, batch=args.batch, length=args.context)

        def loss(params: Any) -> jax.Array:
            heads = nnx.merge(graphdef, params)
            return distillation_loss(heads, model, tokens, num_drafts=args.drafts)

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(grads, moments)
        return optax.apply_updates(params, updates), moments, value

    moments = optimizer.init(params)
    losses = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), transient=True) as bar:
        task = bar.add_task("training", total=args.steps)
        for i in range(args.steps):
            params, moments, value = step(params, moments, jnp.int32(i), model)
            losses.append(float(value))
            bar.update(task, advance=1, description=f"loss {losses[-1]:.3f} nats")
    return nnx.merge(graphdef, params), losses


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--family", choices=FAMILIES, nargs="+", default=FAMILIES)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=16, help="windows of a step")
    parser.add_argument("--context", type=int, default=256, help="bytes of a window")
    parser.add_argument("--drafts", type=int, default=3, help="guesses that the heads learn")
    parser.add_argument("--heads", type=int, default=1, help="heads with their own parameters")
    parser.add_argument("--d-ff", type=int, default=128, help="inner width of a head")
    parser.add_argument("--rate", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=WEIGHTS, help="folder of the weights")
    args = parser.parse_args(argv)
    for name in ("steps", "batch", "drafts", "heads", "d_ff"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.context < args.drafts + 2:
        parser.error(f"--context must be at least --drafts + 2, found {args.context}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parse(argv), Console()
    stream = jnp.asarray(as_stream(load_corpus().train))
    for family in args.family:
        model, _ = load_weights(WEIGHTS / f"{family}.safetensors")
        heads = MTPHeads(
            model.config.d_model, num_heads=args.heads, d_ff=args.d_ff, rngs=nnx.Rngs(args.seed)
        )
        heads, losses = train(model, heads, stream, args)
        tail = losses[-max(1, len(losses) // 10) :]
        record = {"steps": args.steps, "drafts": args.drafts, "loss": sum(tail) / len(tail)}
        path = heads_path(family, args.out)
        save_heads(path, heads, d_ff=args.d_ff, record=record)
        size = path.stat().st_size / 1000
        console.print(
            f"{family}: {losses[0]:.3f} -> {record['loss']:.3f} nats, {path} ({size:.0f} kB)"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
