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

A scheme is one program: prefill and loop. All programs of the same weights are compiled before the
first of them is timed; cases that differ in no shape share them. Most of that time is Python's, so
`--side-by-side` has a process for each model, and measures when the last one has compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
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
# Of matrix products: a GPU's default rounds float32 operands to TF32.
PRECISION = {"float32": "highest", "bfloat16": None}


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
    dtype: str
    rate: float | None

    @property
    def driven(self) -> bool:
        return self.rate is not None


class Program(NamedTuple):
    """One computation, not compiled yet: a function of arrays, and the arrays it takes here.

    Attributes:
      key: programs of equal keys, for the same weights, are the same program.
      call: takes the leaves.
      leaves: model, prompt and, where it speculates, drafter.
    """

    key: Hashable
    call: Callable[[list[Any]], Any]
    leaves: list[Any]

    @classmethod
    def of(cls, key: Hashable, call: Callable[..., Any], *arguments: Any) -> Program:
        leaves, structure = jax.tree.flatten(arguments)
        return cls(key, lambda leaves: call(*jax.tree.unflatten(structure, leaves)), leaves)

    def lower(self, precision: str | None) -> Any:
        with jax.default_matmul_precision(precision):
            return jax.jit(self.call).lower(self.leaves)


def schemes(case: Case, new_tokens: int) -> dict[str, Program]:
    """The four schemes; the plain ones decode `new_tokens`, the others run as many passes."""
    batch = case.prompt.shape[0]
    # Driven rows end by their stop token, others by their limit.
    most = new_tokens * case.tokens if case.driven else new_tokens

    def plain(decode: Any, model: HybridLM, prompt: jax.Array) -> Any:
        options = {"max_new_tokens": new_tokens, "capacity": new_tokens, "decode": decode}
        return rs.generate(model, prompt, **options)

    def speculate(decode: Any, model: HybridLM, prompt: jax.Array, drafter: Drafter) -> Any:
        stop = drafter.stop_token if isinstance(drafter, DrivenDrafter) else None
        options = {"max_new_tokens": most, "capacity": most, "decode": decode}
        with forced_acceptance() if case.driven else contextlib.nullcontext():
            return rs.speculative_generate(model, prompt, drafter, stop_tokens=stop, **options)

    found = {}
    for name, decode in (("conventional", "recurrent"), ("replay", "replay")):
        call = functools.partial(plain, decode)
        found[f"plain {name}"] = Program.of((decode, batch), call, case.plain, case.prompt)
    for name in ("snapshot", "replay"):
        key = ("speculation", name, batch, case.tokens, type(case.drafter).__name__)
        arguments = case.model, case.prompt, case.drafter
        found[f"{name} speculation"] = Program.of(
            key, functools.partial(speculate, name), *arguments
        )
    return found


# What a row of replay speculation says of the other schemes.
OVER = {
    "plain replay": "speedup_over_plain_replay",
    "snapshot speculation": "speedup_over_snapshots",
}
ROWS_SCORED = 4


def score(model: HybridLM, prompt: jax.Array, tokens: jax.Array) -> jax.Array:
    """Log-probabilities [B, N] of `tokens` after `prompt`, by one prefill."""
    every = jnp.concatenate([prompt, tokens], axis=1)
    cache = model.init_cache(every.shape[0], every.shape[1])
    hidden, _ = model.prefill_hidden(every, cache)
    logprobs = jax.nn.log_softmax(model.logits(hidden[:, prompt.shape[1] - 1 : -1]))
    return jnp.take_along_axis(logprobs, tokens[:, :, None], axis=-1)[:, :, 0]


def scoring(case: Case, tokens: np.ndarray) -> Program:
    """`score` of the first rows: a prefill holds the logits of every position."""
    prompt = np.asarray(case.prompt)[:ROWS_SCORED]
    return Program.of(("score", tokens.shape), score, case.plain, prompt, tokens)


def compile_cases(cases: Sequence[Case], args: argparse.Namespace) -> dict[Hashable, Any]:
    """Every program that cases of the same weights run, compiled, by key."""
    programs: dict[Hashable, Program] = {}
    for case in cases:
        rows = min(ROWS_SCORED, case.prompt.shape[0])
        needed = [*schemes(case, args.passes).values()]
        needed.append(scoring(case, np.zeros((rows, args.passes), np.int32)))
        programs |= {program.key: program for program in needed if program.key not in programs}
    precision = PRECISION[cases[0].dtype]
    lowerings = {
        key: functools.partial(program.lower, precision) for key, program in programs.items()
    }
    return harness.compile_all(lowerings, args.threads)


def check(case: Case, outputs: Mapping[str, Any], compiled: Mapping[Hashable, Any]) -> dict:
    """Return the relative errors of the log-probabilities, or raise `WrongResult`.

    Of the first rows, and as many tokens as the plain schemes have, so one program serves all.
    """
    rows, columns = slice(0, ROWS_SCORED), slice(0, outputs["plain conventional"].tokens.shape[1])
    errors = {}
    for name, out in outputs.items():
        every = np.asarray(out.tokens)
        tokens, lengths = every[rows, columns], np.asarray(out.lengths)[rows]
        real = np.arange(tokens.shape[1]) < lengths[:, None]
        program = scoring(case, tokens)
        wanted = np.where(real, compiled[program.key](program.leaves), 0)
        found = np.where(real, np.asarray(out.logprobs)[rows, columns], 0)
        errors[name] = harness.check(name, found, wanted, limit=LIMITS[case.dtype])
        if not case.driven and case.dtype == "float32":
            same = every == np.asarray(outputs["plain conventional"].tokens)
            if not same.all():
                raise harness.WrongResult(f"{name}: {same.sum()} of {same.size} tokens the same")
    return errors


def run_once(
    programs: Mapping[str, Program], compiled: Mapping[Hashable, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The output of each scheme, and the schemes that the device's memory is too small for."""
    outputs, too_large = {}, []
    for name, program in programs.items():
        ready = compiled[program.key]
        if isinstance(ready, jax.errors.JaxRuntimeError):
            too_large.append(name)
            continue
        try:
            outputs[name] = jax.block_until_ready(ready(program.leaves))
        except jax.errors.JaxRuntimeError as error:
            if not harness.does_not_fit(error):
                raise
            too_large.append(name)
    return outputs, too_large


def measure(
    case: Case, compiled: Mapping[Hashable, Any], args: argparse.Namespace
) -> tuple[list[harness.Row], list[str]]:
    """Time the schemes; microseconds are those of one token of every row.

    Returns:
      A row for each but the baseline, and the schemes that do not fit in memory. Without the
      baseline there are no rows.
    """
    batch = case.prompt.shape[0]
    programs = schemes(case, args.passes)
    outputs, too_large = run_once(programs, compiled)
    if "plain conventional" not in outputs:
        return [], too_large
    errors = check(case, outputs, compiled)
    emitted = {name: int(np.sum(out.lengths)) for name, out in outputs.items()}

    def contender(name: str) -> harness.Contender:
        program = programs[name]
        ready = compiled[program.key]
        return harness.Contender(lambda _: ready(program.leaves), calls=emitted[name] / batch)

    contenders = {name: contender(name) for name in outputs}
    timings = harness.time_in_turns(contenders, repeats=args.repeats)
    baseline = timings["plain conventional"]
    rows = []
    for name, out in outputs.items():
        if name == "plain conventional":
            continue
        speculates = name.endswith("speculation")
        extra: dict[str, Any] = {
            "tokens_per_second": batch * 1e6 / timings[name].us,
            "baseline_tokens_per_second": batch * 1e6 / baseline.us,
            "rate": case.rate,
            "program_bytes": harness.program_bytes(compiled[programs[name].key]),
            "does_not_fit": too_large,
        }
        if speculates:
            lengths, accepted = np.asarray(out.lengths), np.asarray(out.accepted)
            extra["accepted"] = float(accepted.sum() / max(int(np.sum(out.proposed)), 1))
            extra["tokens_per_pass"] = float(lengths.sum() / (lengths - accepted).sum())
        if name == "replay speculation":
            for other in ("plain replay", "snapshot speculation"):
                if other in timings:
                    extra[OVER[other]] = timings[other].us / timings[name].us
        rows.append(
            harness.row(
                timings[name],
                baseline,
                case=case.name,
                family=case.family,
                batch=batch,
                tokens=case.tokens if speculates else 1,
                read_dtype=None,
                implementation=name,
                fraction_of_read_bandwidth=None,
                rel_err=errors[name],
                extra=extra,
            )
        )
    return rows, too_large


def random_cases(name: str, args: argparse.Namespace) -> Iterator[Case]:
    """Cases of one model with random weights; small batches first."""
    config = models.cut(models.MODELS[name], args.layers)
    config = dataclasses.replace(config, replay_window=args.window)
    model = models.make_model(config, models.DTYPES[args.dtype])
    wide = {tokens: models.with_room_for(model, tokens) for tokens in args.tokens}
    vocab = config.vocab_size
    for batch in sorted(args.batch):
        prompt = jax.random.randint(harness.random_key(1), (batch, args.prompt), 0, vocab)
        for tokens, rate in itertools.product(args.tokens, args.rate):
            yield Case(
                f"{name}, {len(config.blocks)} layers, T={tokens}, rate {rate:g}, {args.dtype}",
                config.mixer,
                model,
                wide[tokens],
                prompt,
                DrivenDrafter.draw(batch, args.passes, tokens - 1, rate=rate, vocab=vocab),
                tokens,
                args.dtype,
                rate,
            )


def trained_cases(family: str, args: argparse.Namespace) -> Iterator[Case]:
    """A shipped model on held-out text, drafted for by n-grams and by heads where there are."""
    sys.path.append(str(EXAMPLES))
    from decode_text import WEIGHTS, held_out_prompts
    from train_mtp_heads import heads_path, load_heads
    from weights_io import load_weights

    model = load_weights(WEIGHTS / f"{family}.safetensors")[0]
    heads = load_heads(heads_path(family)) if heads_path(family).exists() else None
    wide = {tokens: models.with_room_for(model, tokens) for tokens in args.tokens}
    for batch in sorted(args.batch):
        texts = [prompt.text for prompt in held_out_prompts(batch, args.prompt_bytes)]
        prompt = jnp.asarray(np.stack([np.frombuffer(t, np.uint8) for t in texts]), jnp.int32)
        for tokens in args.tokens:
            drafters: dict[str, Any] = {"n-grams": NGramDrafter(tokens - 1)}
            if heads is not None:
                drafters["heads"] = MTPDrafter(heads, wide[tokens], tokens - 1)
            for name, drafter in drafters.items():
                yield Case(
                    f"trained {family}, {name}, T={tokens}, float32",
                    family,
                    model,
                    wide[tokens],
                    prompt,
                    drafter,
                    tokens,
                    "float32",
                    rate=None,
                )


def group_names(args: argparse.Namespace) -> list[str]:
    """Names of the groups: cases with the same weights, which are made when it is their turn."""
    trained = args.family if "trained" in args.model else ()
    names = [name for name in args.model if name != "trained"]
    return names + [f"trained {family}" for family in trained]


def steps(name: str, args: argparse.Namespace) -> Iterator[harness.Found]:
    """Compile everything of a group first, then measure case by case."""
    begin = time.perf_counter()
    trained = name.removeprefix("trained ")
    cases = [*(random_cases(name, args) if trained == name else trained_cases(trained, args))]
    compiled = compile_cases(cases, args)
    yield harness.Found(
        words=[f"{name}: {len(compiled)} programs in {time.perf_counter() - begin:.0f} s"]
    )
    begin = time.perf_counter()
    for case in cases:
        title = f"{case.name}, batch {case.prompt.shape[0]}"
        try:
            rows, too_large = measure(case, compiled, args)
        except harness.WrongResult as error:
            yield harness.Found(words=[f"{title}: not reported: {error}"], refused=True)
            continue
        words = [f"{title}, {scheme}: does not fit" for scheme in too_large]
        yield harness.Found(rows, [*words, f"{title}: after {time.perf_counter() - begin:.0f} s"])


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [name for name in models.MODELS if name != "tiny"]
    parser.add_argument("--model", choices=[*models.MODELS, "trained"], nargs="+", default=names)
    parser.add_argument("--family", choices=TRAINED, nargs="+", default=TRAINED, help="of trained")
    parser.add_argument("--layers", type=int, default=8, help="blocks of random models, 0 for all")
    parser.add_argument("--batch", type=harness.count, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument(
        "--tokens", type=harness.count, nargs="+", default=[2, 4, 8], help="T = 1 + drafts"
    )
    parser.add_argument(
        "--rate", type=float, nargs="+", default=[0.7], help="acceptance of a draft, if all before"
    )
    parser.add_argument("--dtype", choices=models.DTYPES, default="bfloat16", help="random models")
    parser.add_argument(
        "--window", type=harness.count, default=16, help="replay window of random models"
    )
    parser.add_argument(
        "--passes", type=harness.count, default=64, help="passes, or tokens of plain schemes"
    )
    parser.add_argument(
        "--prompt", type=harness.count, default=16, help="tokens of random models' prompts"
    )
    parser.add_argument(
        "--prompt-bytes", type=harness.count, default=512, help="prompts of trained models"
    )
    parser.add_argument(
        "--repeats", type=harness.count, default=5, help="timed runs of each scheme"
    )
    parser.add_argument(
        "--threads", type=harness.count, default=8, help="programs compiled side by side"
    )
    parser.add_argument(
        "--side-by-side", action="store_true", help="a process for each model, to compile sooner"
    )
    parser.add_argument("--name", default="speculative", help="first part of the file's name")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder of the JSON file")
    parser.add_argument("--add", action="store_true", help="keep the file's rows of other cases")
    args = parser.parse_args(argv)
    if args.layers < 0:
        parser.error(f"--layers must be at least 0, found {args.layers}")
    args.layers = args.layers or None
    if args.repeats < 2:
        parser.error("--repeats must be at least 2, or there is no spread")
    harness.check_tokens(parser, args.tokens, args.window)
    if args.passes % args.window:
        parser.error(f"--passes must be whole windows of {args.window}, found {args.passes}")
    if not all(0 <= rate <= 1 for rate in args.rate):
        parser.error(f"--rate must lie in [0, 1], found {args.rate}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parse(argv), Console()
    harness.use_all_memory()
    rows, refused = harness.run_groups(group_names(args), steps, args, console)
    console.print(harness.table("microseconds of one token of every row", rows))
    return int(refused)


if __name__ == "__main__":
    raise SystemExit(main())
