"""Tokens per second of whole models: plain and speculative decoding, conventional and by replay.

    python benchmarks/speculative.py --model qwen3.5-4b --layers 8 --batch 1 16 256 --tokens 2 4 8
    python benchmarks/speculative.py --model trained --batch 1 4

Four schemes decode with the same weights, timed in turns: plain conventional (the baseline), plain
replay, conventional with a snapshot of the state for each draft, and replay with rollback. Both
plain ones generate as many tokens as the speculating ones have passes.

What models with random weights accept means nothing, so it is driven: each draft is accepted with
a stated probability where those before it are, drawn once for each row and pass and forced in
place of the comparison, whose work is still done. Every row runs the same number of passes, as in
a batch whose slots are refilled. Trained models draft in earnest, greedily.

A case is reported only if the log-probabilities of every scheme's tokens agree with one prefill
over them; trained models must also emit the same tokens by every scheme.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import harness
import jax
import jax.numpy as jnp
import models
import numpy as np
from rich.console import Console

import replayssm_jax as rs
from replayssm_jax import speculative
from replayssm_jax.drafters import Drafter, Drafts, MTPDrafter, NGramDrafter
from replayssm_jax.models import HybridLM
from replayssm_jax.sampling import Draw

EXAMPLES = Path(__file__).parents[1] / "examples"
TRAINED = ("mamba2", "gated_delta_net", "kda")
# Relative error of log-probabilities: rounding of another order of sums, and of bf16 activations.
LIMITS = {"float32": 1e-4, "bfloat16": 5e-2}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("tokens", "right"),
    meta_fields=("num_drafts", "stop_token"),
)
@dataclasses.dataclass(frozen=True)
class DrivenDrafter:
    """Proposes given tokens, of which a drawn number count; ends every row after its last pass.

    Attributes:
      tokens: int32 [B, passes, n], drafts. An even one is refused, an odd one accepted.
      right: int32 [B, passes], how many of the first drafts are odd, for the record.
      num_drafts: n.
      stop_token: proposed after the last pass, and accepted.
    """

    tokens: jax.Array
    right: jax.Array
    num_drafts: int
    stop_token: int

    @classmethod
    def draw(
        cls, batch: int, passes: int, num_drafts: int, *, rate: float, vocab: int, seed: int = 0
    ) -> DrivenDrafter:
        """Draw how many count: each with probability `rate` where those before it do."""
        rng = np.random.default_rng(seed)
        hits = rng.random((batch, passes, num_drafts)) < rate
        right = np.cumprod(hits, axis=-1).sum(-1)
        is_right = np.arange(num_drafts) < right[..., None]
        tokens = 2 * rng.integers(0, vocab // 2 - 1, hits.shape) + is_right
        return cls(
            jnp.asarray(tokens, jnp.int32),
            jnp.asarray(right, jnp.int32),
            num_drafts,
            stop_token=2 * (vocab // 2) - 1,
        )

    def start(self, prompt: Any, capacity: int) -> jax.Array:
        """Passes so far [B]."""
        return jnp.zeros((self.tokens.shape[0],), jnp.int32)

    def propose(self, state: jax.Array, turn: Any) -> tuple[Drafts, jax.Array]:
        at = state[:, None, None]
        drafts = jnp.take_along_axis(self.tokens, at, axis=1, mode="clip")[:, 0]
        over = state + 1 >= self.tokens.shape[1]
        drafts = drafts.at[:, 0].set(jnp.where(over, self.stop_token, drafts[:, 0]))
        return Drafts(drafts, jnp.full_like(state, self.num_drafts)), state

    def observe(self, state: jax.Array, tokens: jax.Array, kept: jax.Array) -> jax.Array:
        return state + (kept > 0).astype(jnp.int32)


def forced(sampling: Any, logits: jax.Array, drafts: Drafts, **_: Any) -> tuple[jax.Array, Draw]:
    """In place of `speculative.judge`: odd drafts are accepted, whatever the target says.

    The greedy token is still looked for, and log-probabilities are those of the tokens that count.
    """
    order = jnp.arange(drafts.tokens.shape[1], dtype=jnp.int32)[None, :]
    hits = (drafts.tokens % 2 == 1) & (order < drafts.lengths[:, None])
    accepted = jnp.sum(jnp.cumprod(hits.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Not the stop token, which only the drafter may emit.
    best = jnp.minimum(best, logits.shape[-1] - 3)
    chosen = jnp.pad(drafts.tokens, ((0, 0), (0, 1)))
    steps = jnp.arange(chosen.shape[1], dtype=jnp.int32)[None, :]
    chosen = jnp.where(steps < accepted[:, None], chosen, best)
    logprobs = jax.nn.log_softmax(logits)
    logprob = jnp.take_along_axis(logprobs, chosen[:, :, None], axis=-1)[:, :, 0]
    return accepted, Draw(chosen, logprob, jnp.zeros_like(logprob))


@contextlib.contextmanager
def forced_acceptance() -> Iterator[None]:
    """Within it the loop accepts what a `DrivenDrafter` says; programs are not shared with others.

    A drafter is part of what is compiled for, so that only loops with a `DrivenDrafter` see it.
    """
    with mock.patch.object(speculative, "judge", forced):
        yield


class Case(NamedTuple):
    """What is decoded: a model for T = 1 and one for T tokens, prompts, and who drafts."""

    name: str
    family: str
    plain: HybridLM
    model: HybridLM
    prompt: jax.Array
    drafter: Drafter
    tokens: int
    driven: bool


def runs(case: Case, new_tokens: int) -> dict[str, Callable[[], Any]]:
    """The four schemes, each a call that returns its output; `new_tokens` of the plain ones."""

    def plain(decode: Any) -> Any:
        options = {"max_new_tokens": new_tokens, "capacity": new_tokens, "decode": decode}
        return rs.generate(case.plain, case.prompt, **options)

    def speculate(decode: Any) -> Any:
        # Driven rows end by their stop token, others by their limit.
        most = new_tokens * case.tokens if case.driven else new_tokens
        stop = case.drafter.stop_token if isinstance(case.drafter, DrivenDrafter) else None
        with forced_acceptance() if case.driven else contextlib.nullcontext():
            return rs.speculative_generate(
                case.model,
                case.prompt,
                case.drafter,
                max_new_tokens=most,
                capacity=most,
                stop_tokens=stop,
                decode=decode,
            )

    return {
        "plain conventional": functools.partial(plain, "recurrent"),
        "plain replay": functools.partial(plain, "replay"),
        "snapshot speculation": functools.partial(speculate, "snapshot"),
        "replay speculation": functools.partial(speculate, "replay"),
    }


@jax.jit
def score(model: HybridLM, prompt: jax.Array, tokens: jax.Array) -> jax.Array:
    """Log-probabilities [B, N] of `tokens` after `prompt`, by one prefill."""
    every = jnp.concatenate([prompt, tokens], axis=1)
    cache = model.init_cache(every.shape[0], every.shape[1])
    hidden, _ = model.prefill_hidden(every, cache)
    logprobs = jax.nn.log_softmax(model.logits(hidden[:, prompt.shape[1] - 1 : -1]))
    return jnp.take_along_axis(logprobs, tokens[:, :, None], axis=-1)[:, :, 0]


ROWS_SCORED = 4


def check(case: Case, outputs: dict[str, Any], dtype: str) -> dict[str, float]:
    """Return the relative errors of the log-probabilities, or raise `WrongResult`.

    Of the first rows, and as many tokens as the plain schemes have: a prefill holds the logits of
    every position, and so one program serves all.
    """
    rows, columns = slice(0, ROWS_SCORED), slice(0, outputs["plain replay"].tokens.shape[1])
    errors = {}
    for name, out in outputs.items():
        tokens, lengths = out.tokens[rows, columns], np.asarray(out.lengths[rows])
        real = np.arange(tokens.shape[1]) < lengths[:, None]
        wanted = np.where(real, score(case.plain, case.prompt[rows], tokens), 0)
        found = np.where(real, out.logprobs[rows, columns], 0)
        errors[name] = harness.check(name, found, wanted, limit=LIMITS[dtype])
        if not case.driven and dtype == "float32":
            same = np.asarray(out.tokens == outputs["plain conventional"].tokens)
            if not same.all():
                raise harness.WrongResult(f"{name}: {same.sum()} of {same.size} tokens the same")
    return errors


def measure(
    case: Case, args: argparse.Namespace, dtype: str, rate: float | None, tick: Callable[[], None]
) -> list[harness.Row]:
    """Time the four schemes; microseconds are those of one token of every row."""
    batch = case.prompt.shape[0]
    schemes = runs(case, args.passes)
    outputs = {name: jax.block_until_ready(run()) for name, run in schemes.items()}
    errors = check(case, outputs, dtype)
    emitted = {name: int(np.sum(out.lengths)) for name, out in outputs.items()}
    contenders = {
        name: harness.Contender(lambda _, run=run: run(), calls=emitted[name] / batch)
        for name, run in schemes.items()
    }
    timings = harness.time_in_turns(contenders, repeats=args.repeats, tick=tick)
    baseline = timings["plain conventional"]
    rows = []
    for name in schemes:
        if name == "plain conventional":
            continue
        extra: dict[str, Any] = {
            "tokens_per_second": batch * 1e6 / timings[name].us,
            "baseline_tokens_per_second": batch * 1e6 / baseline.us,
            "rate": rate,
        }
        if name.endswith("speculation"):
            out = outputs[name]
            extra["accepted"] = float(np.sum(out.accepted) / max(int(np.sum(out.proposed)), 1))
            extra["tokens_per_pass"] = float(
                np.sum(out.lengths) / np.sum(np.asarray(out.lengths) - np.asarray(out.accepted))
            )
        if name == "replay speculation":
            extra["speedup_over_plain_replay"] = timings["plain replay"].us / timings[name].us
            extra["speedup_over_snapshots"] = timings["snapshot speculation"].us / timings[name].us
        rows.append(
            harness.row(
                timings[name],
                baseline,
                case=case.name,
                family=case.family,
                batch=batch,
                tokens=case.tokens if name.endswith("speculation") else 1,
                read_dtype=None,
                implementation=name,
                fraction_of_read_bandwidth=None,
                rel_err=errors[name],
                extra=extra,
            )
        )
    return rows


def random_cases(args: argparse.Namespace) -> Iterator[tuple[Callable[[], Case], str, float]]:
    """Cases of models with random weights, each made when it is its turn."""
    for name in args.model:
        if name == "trained":
            continue
        config = models.cut(models.MODELS[name], args.layers)
        config = dataclasses.replace(config, replay_window=args.window)
        model = models.make_model(config, models.DTYPES[args.dtype])
        vocab = config.vocab_size
        for batch in args.batch:
            prompt = jax.random.randint(jax.random.key(1), (batch, args.prompt), 0, vocab)
            for tokens in args.tokens:
                for rate in args.rate:

                    def make(
                        name: str = name,
                        model: HybridLM = model,
                        prompt: jax.Array = prompt,
                        tokens: int = tokens,
                        rate: float = rate,
                        vocab: int = vocab,
                    ) -> Case:
                        drafter = DrivenDrafter.draw(
                            prompt.shape[0], args.passes, tokens - 1, rate=rate, vocab=vocab
                        )
                        return Case(
                            f"{name}, {len(model.config.blocks)} layers, T={tokens}, "
                            f"rate {rate:g}, {args.dtype}",
                            model.config.mixer,
                            model,
                            models.with_room_for(model, tokens),
                            prompt,
                            drafter,
                            tokens,
                            driven=True,
                        )

                    yield make, args.dtype, rate


def trained_cases(args: argparse.Namespace) -> Iterator[tuple[Callable[[], Case], str, None]]:
    """The shipped models on held-out text, drafted for by n-grams and by heads where there are."""
    if "trained" not in args.model:
        return
    sys.path.append(str(EXAMPLES))
    from decode_text import WEIGHTS, held_out_prompts
    from train_mtp_heads import heads_path, load_heads
    from weights_io import load_weights

    for family in args.family:
        model = load_weights(WEIGHTS / f"{family}.safetensors")[0]
        heads = load_heads(heads_path(family)) if heads_path(family).exists() else None
        for batch in args.batch:
            texts = [prompt.text for prompt in held_out_prompts(batch, args.prompt_bytes)]
            prompt = jnp.asarray(np.stack([np.frombuffer(t, np.uint8) for t in texts]), jnp.int32)
            for tokens in args.tokens:
                wide = models.with_room_for(model, tokens)
                drafters: dict[str, Any] = {"n-grams": NGramDrafter(tokens - 1)}
                if heads is not None:
                    drafters["heads"] = MTPDrafter(heads, wide, tokens - 1)
                for name, drafter in drafters.items():
                    case = Case(
                        f"trained {family}, {name}, T={tokens}, float32",
                        family,
                        model,
                        wide,
                        prompt,
                        drafter,
                        tokens,
                        driven=False,
                    )
                    yield (lambda case=case: case), "float32", None


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [name for name in models.MODELS if name != "tiny"]
    parser.add_argument("--model", choices=[*models.MODELS, "trained"], nargs="+", default=names)
    parser.add_argument("--family", choices=TRAINED, nargs="+", default=TRAINED, help="of trained")
    parser.add_argument("--layers", type=int, default=8, help="blocks of random models, 0 for all")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2, 4, 8], help="T = 1 + drafts")
    parser.add_argument(
        "--rate", type=float, nargs="+", default=[0.7], help="acceptance of a draft, if all before"
    )
    parser.add_argument("--dtype", choices=models.DTYPES, default="bfloat16", help="random models")
    parser.add_argument("--window", type=int, default=16, help="replay window of random models")
    parser.add_argument("--passes", type=int, default=64, help="passes, or tokens of plain schemes")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of random models' prompts")
    parser.add_argument("--prompt-bytes", type=int, default=512, help="prompts of trained models")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each scheme")
    parser.add_argument("--name", default="speculative", help="first part of the file's name")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder of the JSON file")
    args = parser.parse_args(argv)
    args.layers = args.layers or None
    if args.repeats < 2:
        parser.error("--repeats must be at least 2, or there is no spread")
    if min(args.tokens) < 2:
        parser.error(f"--tokens must be at least 2, one draft, found {min(args.tokens)}")
    if max(args.tokens) > args.window:
        parser.error(f"--tokens must fit in the window of {args.window}, found {max(args.tokens)}")
    if args.passes % args.window:
        parser.error(f"--passes must be whole windows of {args.window}, found {args.passes}")
    if not all(0 <= rate <= 1 for rate in args.rate):
        parser.error(f"--rate must lie in [0, 1], found {args.rate}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parse(argv), Console()
    options = {key: value for key, value in vars(args).items() if key != "out"}
    rows: list[harness.Row] = []
    refused = False
    path = None
    with harness.progress(console) as bar:
        task = bar.add_task("", total=None)
        for cases in (random_cases(args), trained_cases(args)):
            for make, dtype, rate in cases:
                case = make()
                bar.update(task, description=f"{case.name}, batch {case.prompt.shape[0]}")
                try:
                    rows += measure(case, args, dtype, rate, lambda: bar.advance(task))
                except harness.WrongResult as error:
                    refused = True
                    console.print(f"[bold red]{case.name}: not reported[/]: {error}")
                except jax.errors.JaxRuntimeError as error:
                    if "RESOURCE_EXHAUSTED" not in str(error):
                        raise
                    console.print(f"{case.name}, batch {case.prompt.shape[0]}: does not fit")
                # Case by case, so that a run that is cut short leaves what it measured.
                path = harness.save(args.name, rows, options, args.out)
    console.print(harness.table("microseconds of one token of every row", rows))
    console.print(f"written to {path}")
    return int(refused)


if __name__ == "__main__":
    raise SystemExit(main())
