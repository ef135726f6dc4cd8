"""Speculative decoding of real text: n-gram drafts, verified by a small trained hybrid model.

    python examples/speculative_text.py --family kda --tokens 256

For each family: load the shipped weights, decode prompts greedily token by token and speculatively,
and print how many drafts the model accepted, how many passes that saved, and whether the tokens
are the same.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from decode_text import FAMILIES, NAMES, WEIGHTS, held_out_prompts
from flax import nnx
from rich.console import Console
from rich.table import Table
from weights_io import load_weights

import replayssm_jax as rs
from replayssm_jax.drafters import NGramDrafter
from replayssm_jax.models import HybridLM


def with_room_for(model: HybridLM, num_drafts: int) -> HybridLM:
    """The same weights with rings that take the newest token and the drafts in one pass."""
    config = dataclasses.replace(model.config, max_tokens=1 + num_drafts)
    wider = nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0)))
    nnx.update(wider, nnx.state(model))
    return wider


def show(family: str, prompts: jax.Array, args: argparse.Namespace, console: Console) -> bool:
    """Decode both ways, print what came of the drafts; returns whether the tokens are the same."""
    model = with_room_for(load_weights(WEIGHTS / f"{family}.safetensors")[0], args.drafts)
    # With a state to go on from, both loops share one compiled prefill.
    options: dict[str, Any] = {"max_new_tokens": args.tokens, "return_state": True}
    plain = rs.generate(model, prompts, **options)
    out = rs.speculative_generate(model, prompts, NGramDrafter(args.drafts), **options)
    same = np.asarray(plain.tokens) == np.asarray(out.tokens)

    table = Table(title=NAMES[family], title_justify="left", title_style="bold")
    for heading in ("row", "tokens", "passes", "tokens a pass", "proposed", "accepted"):
        table.add_column(heading, justify="right")
    rows = zip(*(np.asarray(x) for x in (out.lengths, out.proposed, out.accepted)), strict=True)
    for row, (length, proposed, accepted) in enumerate(rows):
        passes = length - accepted
        share = f"{accepted} ({accepted / max(proposed, 1):.0%})"
        cells = (row, length, passes, f"{length / passes:.2f}", proposed, share)
        table.add_row(*map(str, cells))
    console.print(table)
    console.print(f"greedy tokens, speculative against plain: identical {same.sum()}/{same.size}\n")
    return bool(same.all())


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--family", choices=(*FAMILIES, "all"), default="all")
    parser.add_argument("--tokens", type=int, default=256, help="bytes to generate for each prompt")
    parser.add_argument("--batch", type=int, default=4, help="prompts decoded at once")
    parser.add_argument("--drafts", type=int, default=4, help="most drafts of one pass")
    parser.add_argument("--prompt-bytes", type=int, default=512, help="length of the prompts")
    args = parser.parse_args(argv)
    for name in ("tokens", "batch", "drafts", "prompt_bytes"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    texts = [prompt.text for prompt in held_out_prompts(args.batch, args.prompt_bytes)]
    prompts = jnp.asarray(np.stack([np.frombuffer(text, np.uint8) for text in texts]), jnp.int32)
    families = FAMILIES if args.family == "all" else (args.family,)
    identical = [show(family, prompts, args, Console()) for family in families]
    return 0 if all(identical) else 1


if __name__ == "__main__":
    raise SystemExit(main())
