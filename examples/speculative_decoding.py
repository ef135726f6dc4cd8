"""Speculative decoding of real text by small trained hybrid models: what is drafted, what counts.

    python examples/speculative_decoding.py --family kda --drafter n-grams --tokens 256

For each family: load the shipped weights, decode prompts greedily, token by token and
speculatively, and print the first passes (accepted drafts green, refused ones red, or underlined
and struck out where there are no colours, the model's own token after them plain), how many drafts
were accepted, how many passes that saved, whether the tokens are the same, and the speed of both
on this device.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from decode_text import FAMILIES, NAMES, WEIGHTS, held_out_prompts
from flax import nnx
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from train_mtp_heads import heads_path, load_heads
from weights_io import load_weights

import replayssm_jax as rs
from replayssm_jax.drafters import AdaptiveDrafter, Drafter, MTPDrafter, NGramDrafter, Turn
from replayssm_jax.models import HybridLM
from replayssm_jax.prompts import as_prompt
from replayssm_jax.sampling import Sampling
from replayssm_jax.speculative import judge

DRAFTERS = ("n-grams", "heads")

# Style of a draft, and the combining character that marks it where there are no colours.
ACCEPTED, REFUSED = ("bold green", "\u0332"), ("strike red", "\u0336")


def with_room_for(model: HybridLM, num_drafts: int) -> HybridLM:
    """The same weights with rings that take the newest token and the drafts in one pass."""
    config = dataclasses.replace(model.config, max_tokens=1 + num_drafts)
    wider = nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0)))
    nnx.update(wider, nnx.state(model))
    return wider


def make_drafter(name: str, family: str, model: HybridLM, args: argparse.Namespace) -> Drafter:
    if name == "n-grams":
        drafter: Drafter = NGramDrafter(args.drafts)
    else:
        drafter = MTPDrafter(load_heads(heads_path(family)), model, args.drafts)
    return AdaptiveDrafter(drafter) if args.adaptive else drafter


@partial(jax.jit, static_argnames="size")
def begin(model: HybridLM, drafter: Drafter, prompts: jax.Array, *, size: int) -> Any:
    cache = model.init_cache(prompts.shape[0], size)
    hidden, cache = model.prefill_hidden(prompts, cache, last_only=True)
    token = jnp.argmax(model.logits(hidden), axis=-1).astype(jnp.int32)
    return token, hidden, cache, drafter.start(as_prompt(prompts), size)


@partial(jax.jit, donate_argnums=2)
def one_pass(model: HybridLM, drafter: Drafter, carry: Any) -> Any:
    """One greedy round of `speculative_generate`: propose, verify, judge, commit, observe.

    Returns:
      tokens [B, 1 + n], how many of the n drafts were proposed and accepted [B], the next carry.
    """
    token, hidden, cache, drafting = carry
    greedy, live = Sampling(), jnp.ones(token.shape, bool)
    turn = Turn(token, cache.progress.position, live, greedy, None, hidden)
    drafts, drafting = drafter.propose(drafting, turn)
    tokens = jnp.concatenate([token[:, None], drafts.tokens], axis=1)
    hidden, cache = model.verify_hidden(tokens, cache, lengths=1 + drafts.lengths)
    accepted, following = judge(greedy, model.logits(hidden), drafts)
    cache = model.commit(cache, 1 + accepted)
    drafting = drafter.observe(drafting, tokens, 1 + accepted)
    rows = jnp.arange(token.shape[0])
    carry = following.token[rows, accepted], hidden[rows, accepted], cache, drafting
    return tokens, drafts.lengths, accepted, carry


def show_passes(
    model: HybridLM, drafter: Drafter, prompts: jax.Array, passes: int, colours: bool
) -> Text:
    """The first passes of the first row, drafts in colour or else marked."""
    carry = begin(model, drafter, prompts[:1], size=prompts.shape[1] + passes * 16 + 16)
    shown = Text()
    for _ in range(passes):
        tokens, proposed, accepted, carry = one_pass(model, drafter, carry)
        line, good = np.asarray(tokens[0]), int(accepted[0])
        for i, token in enumerate(line[: 1 + int(proposed[0])]):
            style, mark = ("", "") if i == 0 else ACCEPTED if i <= good else REFUSED
            text = bytes([token]).decode("utf-8", "replace")
            shown.append(text if colours else text + mark, style)
    return shown


def seconds(run: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def show(
    family: str, name: str, prompts: jax.Array, args: argparse.Namespace, console: Console
) -> bool:
    """Decode both ways, print what came of the drafts; returns whether the tokens are the same."""
    plain_model = load_weights(WEIGHTS / f"{family}.safetensors")[0]
    model = with_room_for(plain_model, args.drafts)
    drafter = make_drafter(name, family, model, args)
    options: dict[str, Any] = {"max_new_tokens": args.tokens}
    plain = partial(rs.generate, plain_model, prompts, **options)
    speculative = partial(rs.speculative_generate, model, prompts, drafter, **options)
    expected, out = plain(), speculative()
    same = np.asarray(expected.tokens) == np.asarray(out.tokens)

    title = f"{NAMES[family]}, drafts by {name}"
    colours = console.color_system is not None
    passes = show_passes(model, drafter, prompts, args.show, colours)
    console.print(Panel(passes, title=f"{title}: {args.show} passes of row 0", title_align="left"))
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in ("row", "tokens", "passes", "tokens a pass", "proposed", "accepted"):
        table.add_column(heading, justify="right")
    rows = zip(*(np.asarray(x) for x in (out.lengths, out.proposed, out.accepted)), strict=True)
    for row, (length, proposed, accepted) in enumerate(rows):
        count = length - accepted
        share = f"{accepted} ({accepted / max(proposed, 1):.0%})"
        table.add_row(*map(str, (row, length, count, f"{length / count:.2f}", proposed, share)))
    console.print(table)
    speeds = [same.size / seconds(run, args.repeats) for run in (plain, speculative)]
    console.print(
        f"tokens per second: plain {speeds[0]:,.0f}, speculative {speeds[1]:,.0f}, "
        f"{speeds[1] / speeds[0]:.2f}x"
    )
    console.print(f"greedy tokens, speculative against plain: identical {same.sum()}/{same.size}\n")
    return bool(same.all())


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--family", choices=(*FAMILIES, "all"), default="all")
    parser.add_argument(
        "--drafter", choices=DRAFTERS, nargs="+", help="all there are weights for, by default"
    )
    parser.add_argument("--adaptive", action="store_true", help="draft as much as pays")
    parser.add_argument("--tokens", type=int, default=256, help="bytes to generate for each prompt")
    parser.add_argument("--batch", type=int, default=4, help="prompts decoded at once")
    parser.add_argument("--drafts", type=int, default=3, help="most drafts of one pass")
    parser.add_argument("--prompt-bytes", type=int, default=512, help="length of the prompts")
    parser.add_argument("--show", type=int, default=40, help="passes to print")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each loop")
    args = parser.parse_args(argv)
    for name in ("tokens", "batch", "drafts", "prompt_bytes", "show", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.drafts > 15:
        parser.error(f"--drafts must be at most 15, found {args.drafts}")
    args.families = FAMILIES if args.family == "all" else (args.family,)
    for family in args.families:
        if args.drafter and "heads" in args.drafter and not heads_path(family).exists():
            parser.error(f"no heads for {family}: train them with examples/train_mtp_heads.py")
    try:
        args.prompts = held_out_prompts(args.batch, args.prompt_bytes)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parse(argv), Console()
    texts = [prompt.text for prompt in args.prompts]
    prompts = jnp.asarray(np.stack([np.frombuffer(text, np.uint8) for text in texts]), jnp.int32)
    identical = []
    for family in args.families:
        for name in args.drafter or DRAFTERS:
            if name == "n-grams" or heads_path(family).exists():
                identical.append(show(family, name, prompts, args, console))
    return 0 if all(identical) else 1


if __name__ == "__main__":
    raise SystemExit(main())
