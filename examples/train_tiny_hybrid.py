"""Train a tiny hybrid language model on the source of the Python standard library.

    python examples/train_tiny_hybrid.py --family mamba2 --preset gpu --max-minutes 8
    python examples/train_tiny_hybrid.py --family kda --preset cpu --resume

Writes ``<out>/<family>.safetensors`` (weights, config and training record) and
``<out>/<family>.jsonl`` (one line per log interval), and reports bits per byte of the written
weights on held-out files beside gzip and an n-gram model. The batch of a step depends on the seed
and the step number alone, so a resumed run goes on as if it had never stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from baselines import NGramModel, gzip_bits_per_byte
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from stdlib_text import (
    VOCAB_SIZE,
    Corpus,
    Document,
    as_stream,
    choose_documents,
    held_out_windows,
    load_corpus,
)
from weights_io import load_weights, save_weights

from replayssm_jax.models import (
    AttentionConfig,
    GatedDeltaNetConfig,
    HybridConfig,
    HybridLM,
    KDAConfig,
    Mamba2Config,
)

Family = Literal["mamba2", "gated_delta_net", "kda"]
FAMILIES: tuple[Family, ...] = get_args(Family)


@dataclasses.dataclass(frozen=True)
class Preset:
    """Size of a run.

    ``anneal`` is the share of the steps over which the learning rate falls to zero; ``eval_bytes``
    bounds the held-out text (0: all of it).
    """

    batch: int
    context: int
    steps: int
    learning_rate: float
    max_minutes: float
    d_model: int = 128
    pattern: str = "MMAM"
    warmup: int = 100
    anneal: float = 0.3
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    log_every: int = 10
    checkpoint_every: int = 500
    eval_bytes: int = 0
    ngram_order: int = 8


PRESETS = {
    "gpu": Preset(batch=32, context=1024, steps=6000, learning_rate=4e-3, max_minutes=9.0),
    "cpu": Preset(
        batch=8,
        context=256,
        steps=800,
        learning_rate=4e-3,
        max_minutes=10.0,
        checkpoint_every=100,
        eval_bytes=100_000,
    ),
    "test": Preset(
        batch=2,
        context=32,
        steps=8,
        learning_rate=1e-2,
        max_minutes=2.0,
        d_model=32,
        pattern="MA",
        warmup=2,
        log_every=2,
        checkpoint_every=2,
        eval_bytes=2_000,
        ngram_order=3,
    ),
}


def model_config(family: Family, preset: Preset) -> HybridConfig:
    """The tiny hybrid of a family; with ``d_model`` 128 its heads have the shape of real ones."""
    width = preset.d_model
    return HybridConfig(
        vocab_size=VOCAB_SIZE,
        d_model=width,
        pattern=preset.pattern,
        mixer=family,
        d_ff=width * 3 // 2,
        embedding_scale=width**0.5,
        mamba2=Mamba2Config(num_heads=4, head_dim=width // 2, state_dim=width),
        gated_delta_net=GatedDeltaNetConfig(
            num_key_heads=1, num_value_heads=2, key_dim=width, value_dim=width
        ),
        kda=KDAConfig(num_heads=2, key_dim=width, value_dim=width, gate_rank=width // 4),
        attention=AttentionConfig(num_heads=2, head_dim=width // 2),
    )


class TrainState(NamedTuple):
    """What a step changes: the parameters, the moments of AdamW and the number of steps done."""

    step: jax.Array
    params: Any
    moments: Any


class Schedule(NamedTuple):
    """The step where annealing starts and how many steps it takes; part of a checkpoint."""

    anneal_start: int
    anneal_steps: int

    @property
    def last_step(self) -> int:
        return self.anneal_start + self.anneal_steps


def planned_schedule(preset: Preset) -> Schedule:
    anneal_steps = max(1, round(preset.anneal * preset.steps))
    return Schedule(preset.steps - anneal_steps, anneal_steps)


def shortened_schedule(
    schedule: Schedule, *, step: int, anneal: float, seconds_per_step: float, seconds_left: float
) -> Schedule:
    """Start annealing now if the time left is just enough for its share of the steps.

    An anneal of n steps after s steps is a share n / (s + n) of the run.
    """
    if step >= schedule.anneal_start:
        return schedule
    anneal_steps = max(1, round(step * anneal / (1.0 - anneal)))
    if 1.2 * anneal_steps * seconds_per_step < seconds_left:
        return schedule
    return Schedule(step, anneal_steps)


def learning_rate(step: jax.Array, schedule: jax.Array, *, peak: float, warmup: int) -> jax.Array:
    """Linear warm-up, a plateau, and a cosine from the plateau to zero: int32 scalar -> float32."""
    anneal_start, anneal_steps = schedule[0], schedule[1]
    rise = jnp.minimum(1.0, (step + 1) / warmup)
    done = jnp.clip((step - anneal_start + 1) / anneal_steps, 0.0, 1.0)
    return peak * rise * 0.5 * (1.0 + jnp.cos(jnp.pi * done))


def make_optimizer(preset: Preset) -> optax.GradientTransformation:
    """AdamW for a learning rate that the step applies itself; only matrices are decayed."""

    def decayed(params: Any) -> Any:
        def is_matrix(path: Any, leaf: jax.Array) -> bool:
            name = jax.tree_util.keystr(path)
            return leaf.ndim == 2 and "kernel" in name and "conv" not in name

        return jax.tree_util.tree_map_with_path(is_matrix, params)

    return optax.chain(
        optax.clip_by_global_norm(preset.clip_norm),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(preset.weight_decay, mask=decayed),
    )


def sample_windows(stream: jax.Array, key: jax.Array, *, batch: int, length: int) -> jax.Array:
    """Draw windows at random places of a stream: uint8 [total] -> int32 [batch, length]."""
    starts = jax.random.randint(key, (batch, 1), 0, stream.shape[0] - length + 1)
    return stream[starts + jnp.arange(length)[None]].astype(jnp.int32)


def bits(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Negative log2 probability of each target: float32 [B,T,V], int32 [B,T] -> float32 [B,T]."""
    nats = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return nats / math.log(2)


def make_train_step(
    graphdef: Any, rest: Any, optimizer: optax.GradientTransformation, preset: Preset, seed: int
) -> Callable[[TrainState, jax.Array, jax.Array], tuple[TrainState, dict[str, jax.Array]]]:
    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, params, rest)
        return jnp.mean(bits(model(tokens[:, :-1]), tokens[:, 1:]))

    @partial(jax.jit, donate_argnums=0)
    def train_step(
        state: TrainState, stream: jax.Array, schedule: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        tokens = sample_windows(stream, key, batch=preset.batch, length=preset.context + 1)
        loss, grads = jax.value_and_grad(loss_fn)(state.params, tokens)
        rate = learning_rate(state.step, schedule, peak=preset.learning_rate, warmup=preset.warmup)
        updates, moments = optimizer.update(grads, state.moments, state.params)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
        squares = [jnp.sum(jnp.square(grad)) for grad in jax.tree.leaves(grads)]
        norm = jnp.sqrt(sum(squares, jnp.zeros(())))
        metrics = {"bits": loss, "grad_norm": norm, "learning_rate": rate}
        return TrainState(state.step + 1, params, moments), metrics

    return train_step


@partial(jax.jit, static_argnums=0)
def _scored_bits(graphdef: Any, state: Any, tokens: jax.Array, scored: jax.Array) -> jax.Array:
    logits = nnx.merge(graphdef, state)(tokens[:, :-1].astype(jnp.int32))
    return jnp.sum(jnp.where(scored, bits(logits, tokens[:, 1:].astype(jnp.int32)), 0.0), axis=1)


def evaluate(
    model: HybridLM,
    documents: Sequence[Document],
    *,
    context: int,
    batch: int,
    on_batch: Callable[[int, int], None] = lambda done, total: None,
) -> float:
    """Bits per byte of whole documents, each byte given its last ``context // 2`` bytes or more.

    ``on_batch`` is told how many of the windows are done; it may raise to stop.
    """
    windows = held_out_windows(documents, context)
    graphdef, state = nnx.split(model)
    total = 0.0
    for first in range(0, len(windows.tokens), batch):
        tokens, scored = (array[first : first + batch] for array in windows)
        padding = ((0, batch - len(tokens)), (0, 0))
        rows = _scored_bits(graphdef, state, np.pad(tokens, padding), np.pad(scored, padding))
        total += float(np.sum(np.asarray(rows), dtype=np.float64))
        on_batch(first + len(tokens), len(windows.tokens))
    return total / int(np.sum(windows.scored))


class Run:
    """One training run: the model, its data, its checkpoints and its clock.

    Args:
      family: one of ``FAMILIES``.
      preset: size of the run.
      corpus: training and held-out text.
      out: folder of the weights and the log.
      checkpoints: folder of the orbax checkpoints; must be empty unless ``resume``.
      dtype: computation type of the dense layers in training; parameters, recurrence, loss and
        evaluation are float32.
      resume: go on from the newest checkpoint, if there is one.
      seed: of the initial parameters and of the batches.
      started: ``time.monotonic()`` from which ``preset.max_minutes`` count.
    """

    def __init__(
        self,
        *,
        family: Family,
        preset: Preset,
        corpus: Corpus,
        out: Path,
        checkpoints: Path,
        dtype: Any = jnp.float32,
        resume: bool = False,
        seed: int = 0,
        started: float | None = None,
        console: Console | None = None,
    ):
        self.family, self.preset, self.corpus, self.dtype = family, preset, corpus, dtype
        self.weights_path = out / f"{family}.safetensors"
        self.log_path = out / f"{family}.jsonl"
        self.console = console or Console()
        self.started = time.monotonic() if started is None else started
        self.deadline = self.started + 60.0 * preset.max_minutes
        self.config = model_config(family, preset)
        self.held_out: Sequence[Document] = corpus.held_out
        if preset.eval_bytes:
            self.held_out = choose_documents(corpus.held_out, preset.eval_bytes)
        self.facts = {
            "family": family,
            "seed": seed,
            "dtype": jnp.dtype(dtype).name,
            "text": corpus.name,
            "train_bytes": sum(len(document.text) for document in corpus.train),
            **dataclasses.asdict(preset),
        }

        model = HybridLM(self.config, rngs=nnx.Rngs(seed), dtype=dtype, param_dtype=jnp.float32)
        parts: Any = nnx.split(model, nnx.Param, ...)
        graphdef, params, rest = parts
        optimizer = make_optimizer(preset)
        self.state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
        self.schedule = planned_schedule(preset)
        self.train_step = make_train_step(graphdef, rest, optimizer, preset, seed)
        self.stream = jnp.asarray(as_stream(corpus.train))
        if self.stream.shape[0] <= preset.context:
            raise ValueError(
                f"training text has {self.stream.shape[0]} bytes, "
                f"expected more than the context of {preset.context}"
            )

        out.mkdir(parents=True, exist_ok=True)
        self.manager = ocp.CheckpointManager(
            checkpoints.resolve(),
            options=ocp.CheckpointManagerOptions(max_to_keep=2, create=True),
        )
        found = self.manager.latest_step()
        if found is not None and not resume:
            raise FileExistsError(
                f"{checkpoints} holds a run at step {found}: pass --resume to go on with it, "
                "or another --checkpoints folder"
            )
        if found is not None:
            self._restore(found)
        elif self.log_path.exists():
            self.log_path.unlink()

    @property
    def parameter_count(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.state.params))

    def _restore(self, step: int) -> None:
        plain = self.manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))
        differing = {
            name: (plain.run["facts"].get(name), value)
            for name, value in self.facts.items()
            if plain.run["facts"].get(name) != value and name != "max_minutes"
        }
        if differing:
            raise ValueError(
                "the checkpoint is of another run; (found, expected) by name: " + repr(differing)
            )
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, self.state)
        restored = self.manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target))
        )
        self.state = restored.state
        self.schedule = Schedule(*plain.run["schedule"])
        lines = self.log_path.read_text().splitlines() if self.log_path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        self.log_path.write_text("".join(f"{line}\n" for line in kept))

    def _save(self, step: int) -> None:
        run = {"facts": self.facts, "schedule": list(self.schedule)}
        self.manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(self.state), run=ocp.args.JsonSave(run)
            ),
        )

    def model(self) -> HybridLM:
        """Model of the current parameters, computing in float32."""
        model = HybridLM(self.config, rngs=nnx.Rngs(0), dtype=jnp.float32, param_dtype=jnp.float32)
        nnx.update(model, self.state.params)
        return model

    def _evaluation_seconds(self) -> float:
        """Compile the evaluation, time one batch, and estimate the whole."""
        seconds = 0.0
        windows = len(held_out_windows(self.held_out, self.preset.context).tokens)

        class Stop(Exception):
            pass

        def stop(done: int, total: int) -> None:
            raise Stop

        for _ in range(2):
            begin = time.monotonic()
            try:
                self.evaluate(self.model(), on_batch=stop)
            except Stop:
                seconds = time.monotonic() - begin
        return seconds * math.ceil(windows / self.preset.batch)

    def evaluate(self, model: HybridLM, **kwargs: Any) -> float:
        return evaluate(
            model, self.held_out, context=self.preset.context, batch=self.preset.batch, **kwargs
        )

    def train(self, *, stop_at: int | None = None) -> bool:
        """Train to the end of the schedule or of the time; ``stop_at`` leaves the loop early.

        Returns whether the schedule was finished.
        """
        preset = self.preset
        reserve = 10.0 + 1.5 * self._evaluation_seconds()
        step = int(self.state.step)
        pending: list[dict[str, jax.Array]] = []
        last_print = mark = time.monotonic()
        intervals = 0  # the first one compiles and says nothing about speed
        seconds_per_step = 0.0
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
        with (
            Progress(*columns, TimeElapsedColumn(), console=self.console) as progress,
            self.log_path.open("a") as log,
        ):
            bar = progress.add_task(self.family, total=self.schedule.last_step, text="compiling")
            while step < self.schedule.last_step and step != stop_at:
                schedule = jnp.asarray(self.schedule, jnp.int32)
                self.state, metrics = self.train_step(self.state, self.stream, schedule)
                step += 1
                pending.append(metrics)
                if step % preset.log_every and step < self.schedule.last_step:
                    continue

                means = {k: float(np.mean([m[k] for m in pending])) for k in metrics}
                now = time.monotonic()
                interval = (now - mark) / len(pending)
                if not math.isfinite(means["bits"]):
                    raise FloatingPointError(f"loss is not finite between logs at step {step}")
                speed = preset.batch * preset.context / interval
                text = (
                    f"step {step}/{self.schedule.last_step}  "
                    f"{means['bits']:.3f} bits/byte  {speed:,.0f} tokens/s"
                )
                line = {"step": step, **means, "tokens_per_second": speed}
                log.write(json.dumps(line) + "\n")
                log.flush()
                seconds_left = self.deadline - reserve - now
                if intervals:
                    seconds_per_step = max(interval, 0.9 * seconds_per_step)
                    self.schedule = shortened_schedule(
                        self.schedule,
                        step=step,
                        anneal=preset.anneal,
                        seconds_per_step=seconds_per_step,
                        seconds_left=seconds_left,
                    )
                progress.update(bar, completed=step, total=self.schedule.last_step, text=text)
                if not self.console.is_terminal and now - last_print > 20.0:
                    self.console.print(f"{self.family}: {text}, {seconds_left:.0f} s left")
                    last_print = now
                pending = []
                intervals += 1
                late = seconds_left <= 0
                if step % preset.checkpoint_every == 0 or step == self.schedule.last_step or late:
                    self._save(step)
                if late:
                    break
                mark = time.monotonic()
        self.manager.wait_until_finished()
        return step == self.schedule.last_step

    def export(self, *, finished: bool) -> dict[str, Any]:
        """Write the weights, evaluate what was written, and write that into the record."""
        step = int(self.state.step)
        record = {
            **self.facts,
            "step": step,
            "annealed": finished,
            "anneal_start": self.schedule.anneal_start,
            "parameters": self.parameter_count,
            "bytes_trained_on": step * self.preset.batch * self.preset.context,
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "held_out_bytes": sum(len(document.text) for document in self.held_out),
            "held_out_files": [document.name for document in self.held_out],
        }
        model = self.model()
        save_weights(self.weights_path, model, record=record)
        rounded, _ = load_weights(self.weights_path)
        with Progress(console=self.console, transient=True) as progress:
            bar = progress.add_task("evaluating")
            record["bits_per_byte"] = self.evaluate(
                rounded,
                on_batch=lambda done, total: progress.update(bar, completed=done, total=total),
            )
        record["baselines"] = self.baselines()
        save_weights(self.weights_path, model, record=record)
        return record

    def baselines(self) -> dict[str, float]:
        order = self.preset.ngram_order
        ngram = NGramModel(self.corpus.train, order=order)
        return {
            "gzip -9, each file alone": gzip_bits_per_byte(self.held_out),
            f"{order}-gram, Kneser-Ney": ngram.bits_per_byte(self.held_out),
        }


def report(records: Sequence[dict[str, Any]]) -> Table:
    """Table of bits per byte on the held-out text, models and baselines."""
    held_out = records[0]["held_out_bytes"]
    title = f"held-out text: {len(records[0]['held_out_files'])} files, {held_out:,} bytes"
    table = Table("model", "bits per byte", "parameters", "steps", "text read", title=title)
    for name, value in records[0]["baselines"].items():
        table.add_row(name, f"{value:.3f}", "", "", "")
    for record in records:
        table.add_row(
            record["family"],
            f"[bold]{record['bits_per_byte']:.3f}[/bold]",
            f"{record['parameters']:,}",
            f"{record['step']:,}" + ("" if record["annealed"] else " (stopped)"),
            f"{record['bytes_trained_on'] / 1e6:,.1f} MB",
        )
    return table


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    first, *rest = (__doc__ or "").split("\n")
    parser = argparse.ArgumentParser(
        description=first,
        epilog="\n".join(rest),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--family", choices=(*FAMILIES, "all"), default="all")
    parser.add_argument(
        "--preset", choices=tuple(PRESETS), help="default: gpu where there is one, else cpu"
    )
    parser.add_argument("--steps", type=int, help="default: by the preset")
    parser.add_argument(
        "--max-minutes",
        type=float,
        help="wall clock of each family, all included; annealing starts early to keep to it",
    )
    parser.add_argument("--learning-rate", type=float, help="default: by the preset")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dense layers in training; default: bfloat16 on a GPU, else float32",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="weights and logs")
    parser.add_argument("--checkpoints", type=Path, help="default: <out>/checkpoints")
    parser.add_argument("--source", type=Path, help="train on another tree of .py files")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    started = time.monotonic()
    args = parse(argv)
    logging.getLogger("absl").setLevel(logging.WARNING)
    console = Console()
    on_gpu = jax.default_backend() == "gpu"
    preset = PRESETS[args.preset or ("gpu" if on_gpu else "cpu")]
    chosen = {
        name: value
        for name in ("steps", "max_minutes", "learning_rate")
        if (value := getattr(args, name)) is not None
    }
    preset = dataclasses.replace(preset, **chosen)
    corpus = load_corpus(args.source)
    console.print(corpus.describe())

    records = []
    for family in FAMILIES if args.family == "all" else (args.family,):
        run = Run(
            family=family,
            preset=preset,
            corpus=corpus,
            out=args.out,
            checkpoints=(args.checkpoints or args.out / "checkpoints") / family,
            dtype=jnp.dtype(args.dtype or ("bfloat16" if on_gpu else "float32")),
            resume=args.resume,
            seed=args.seed,
            started=started,
            console=console,
        )
        console.print(
            f"{family}: {run.parameter_count:,} parameters, {preset.steps} steps of "
            f"{preset.batch} x {preset.context} bytes, {preset.max_minutes:g} minutes at most, "
            f"on {jax.devices()[0].device_kind}"
        )
        finished = run.train()
        records.append(run.export(finished=finished))
        console.print(f"wrote {run.weights_path}")
        started = time.monotonic()
    console.print(report(records))
    return records


if __name__ == "__main__":
    main()
