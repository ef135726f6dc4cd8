"""What low precision costs in recurrent decoding, and where its error grows.

    python examples/precision_study.py                       # a few minutes on two cores
    python examples/precision_study.py --family all --part head --tokens 100000 --out results.json
    python examples/precision_study.py --family all --part model --text 2048 --out results.json
    python examples/precision_study.py --plot benchmarks/results/precision.json --docs docs

Schemes: conventional decoding, whose state is rounded at every token to float32, bfloat16, float16,
float8 or int8, to nearest or stochastically, and replay with a float32 checkpoint that is read
through a copy in each of these formats.

1. One head, long: relative error of outputs and states against a float64 recurrence. The records
   are those of a trained model on held-out text, and adversarial ones that remember for 100 to
   100,000 tokens. Value rows of a head do not interact, so eight of them are run. Beside them two
   variants that this package does not have: folding the updates that steps computed from an int8
   copy, and decays in bfloat16.
2. The trained models on held-out text: bits per byte, accuracy, and how often the likeliest next
   byte is that of conventional float32 decoding; as they are, and with decays that remember 10 and
   100 times as long.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import re
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from decode_text import FAMILIES, NAMES, WEIGHTS
from flax import nnx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from stdlib_text import as_stream, load_corpus
from weights_io import load_weights

import replayssm_jax as rs
from replayssm_jax import precision
from replayssm_jax.layers import ReplayMixer
from replayssm_jax.layers.progress import Span
from replayssm_jax.models import HybridLM

FORMATS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
STRETCHES = (1, 10, 100)
MEMORIES = (100, 1_000, 10_000, 100_000)
ROWS = 8
SEGMENT = 100
FOLDED = 2_000  # tokens of what folds updates


class Scheme(NamedTuple):
    """How a state is kept: conventional with a `state_dtype`, or replay with a `read_dtype`."""

    decode: str
    dtype: str
    stochastic: bool = False

    @property
    def name(self) -> str:
        if self.decode == "replay":
            return "replay" if self.dtype == "float32" else f"replay, {self.dtype} copy"
        return f"conventional {self.dtype}{', stochastic' if self.stochastic else ''}"

    def formats(self) -> dict[str, Any]:
        """Fields of a spec or a config."""
        if self.decode == "recurrent":
            return {"state_dtype": self.dtype, "read_dtype": None}
        read = None if self.dtype == "float32" else self.dtype
        return {"state_dtype": "float32", "read_dtype": read}


def schemes() -> Iterator[Scheme]:
    """All that are compared, conventional float32 first."""
    yield Scheme("recurrent", "float32")
    for dtype in FORMATS:
        for stochastic in (False, True):
            yield Scheme("recurrent", dtype, stochastic)
    for dtype in ("float32", *FORMATS):
        yield Scheme("replay", dtype)


def model_schemes() -> list[Scheme]:
    """Those that whole models are run with, which takes long: without the coarsest format."""
    return [scheme for scheme in schemes() if scheme.dtype != "float8_e5m2"]


# One head, long


@partial(jax.jit, static_argnames="layer")
def records_of(model: HybridLM, tokens: jax.Array, layer: int) -> rs.TokenInputs:
    """The token records that block `layer` of a model makes of tokens [B, T]."""
    span = Span.make(jnp.zeros(tokens.shape[0], jnp.int32), tokens.shape[1])
    x = model.embeddings(tokens)
    for block in model.blocks[:layer]:
        x, _ = block.advance(x, None, span, mode="prefill")
    block = model.blocks[layer]
    mixer = block.mixers[0]
    channels, rest = mixer.project(block.mixer_norm(x))
    channels, _ = mixer.conv.convolve(channels, None, span, drafts=False)
    return mixer.records(channels, rest)


def longest_memory(model: HybridLM, tokens: jax.Array) -> tuple[int, int, float]:
    """Block and head with the slowest median decay, and tokens until it has fallen to 1/e."""
    found = []
    for layer, block in enumerate(model.blocks):
        if isinstance(block.mixers[0], ReplayMixer):
            g = np.asarray(records_of(model, tokens, layer).g)
            g = g.mean(axis=-1) if g.ndim == 4 else g
            rates = -np.median(g.reshape(-1, g.shape[-1]), axis=0)
            found += [(float(1 / rate), layer, head) for head, rate in enumerate(rates)]
    memory, layer, head = max(found)
    return layer, head, memory


def one_head(inputs: rs.TokenInputs, spec: rs.ReplaySpec, head: int) -> rs.TokenInputs:
    """`ROWS` value rows of one head, the documents of a batch one after the other: B = 1."""
    group = head // spec.heads_per_group
    picked = rs.TokenInputs(
        q=inputs.q[:, :, group : group + 1],
        k=inputs.k[:, :, group : group + 1],
        v=inputs.v[:, :, head : head + 1, :ROWS],
        g=inputs.g[:, :, head : head + 1],
        beta=inputs.beta[:, :, head : head + 1],
    )
    return jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), picked)


def adversarial(trained: rs.TokenInputs, memory: float, seed: int) -> rs.TokenInputs:
    """Random unit keys and values, and a state that remembers for `memory` tokens.

    The decay is exp(-1 / memory); a decay for each channel is that of a memory of its own, from one
    token up to `memory` by equal factors. The delta rule also forgets by writing over what random
    keys have in common, about beta / N a token, so beta is small where the memory is long.
    """
    rng = np.random.default_rng(seed)
    k = rng.standard_normal(trained.k.shape).astype(np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    q = rng.standard_normal(trained.q.shape).astype(np.float32) * k.shape[-1] ** -0.5
    v = rng.standard_normal(trained.v.shape).astype(np.float32)
    strength = min(1.0, k.shape[-1] / memory)
    beta = (strength * rng.uniform(0.2, 0.9, trained.beta.shape)).astype(np.float32)
    own = np.geomspace(1, memory, trained.g.shape[-1]) if trained.g.ndim == 4 else memory
    g = np.broadcast_to(np.float32(-1 / own), trained.g.shape)
    return rs.TokenInputs(*(jnp.asarray(x) for x in (q, k, v, g, beta)))


class Trace(NamedTuple):
    """outputs [B, T, H, P], and states [S, B, H, P, N] after every `SEGMENT` tokens."""

    outputs: Any
    states: Any


@partial(jax.jit, static_argnames=("spec", "decode"))
def run(spec: rs.ReplaySpec, inputs: rs.TokenInputs, key: Any, *, decode: str) -> Trace:
    """Decode token by token; `key` None rounds to nearest."""
    batch, length = inputs.v.shape[:2]
    by_segment = jax.tree.map(
        lambda x: jnp.moveaxis(x, 1, 0).reshape(length // SEGMENT, SEGMENT, batch, *x.shape[2:]),
        inputs,
    )

    def token_step(carry: Any, token: rs.TokenInputs) -> tuple[Any, jax.Array]:
        one = jax.tree.map(lambda x: x[:, None], token)
        if decode == "replay":
            output, state = rs.step(spec, carry, one)
            return state, output[:, 0]
        state, keys = carry
        now, keys = (None, None) if keys is None else precision.advance(keys)
        output, state = rs.recurrent_step(spec, state, one, rounding_key=now)
        return (state, keys), output[:, 0]

    def segment(carry: Any, tokens: rs.TokenInputs) -> tuple[Any, Any]:
        carry, outputs = jax.lax.scan(token_step, carry, tokens)
        if decode == "replay":
            return carry, (outputs, rs.materialize(spec, carry))
        return carry, (outputs, precision.decode(carry[0], spec.compute_dtype))

    if decode == "replay":
        carry: Any = rs.init_state(spec, batch)
    else:
        keys = None if key is None else precision.as_keys(key, (batch, spec.num_heads))
        carry = (precision.zeros(spec.state_shape(batch), spec.state_dtype), keys)
    _, (outputs, states) = jax.lax.scan(segment, carry, by_segment)
    outputs = jnp.moveaxis(outputs.reshape(length, batch, *outputs.shape[3:]), 0, 1)
    return Trace(outputs, states)


def reference(spec: rs.ReplaySpec, inputs: rs.TokenInputs) -> Trace:
    """The recurrence in float64."""
    with jax.enable_x64(True):
        wide = dict.fromkeys(("state_dtype", "key_dtype", "value_dtype"), jnp.float64)
        double = dataclasses.replace(spec, **wide, read_dtype=None)
        inputs = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), inputs)
        return jax.tree.map(np.asarray, run(double, inputs, None, decode="recurrent"))


def fold_updates(inputs: rs.TokenInputs, window: int, *, again: bool) -> np.ndarray:
    """The state of one head under the delta rule, read through an int8 copy of each window.

    Steps compute u = beta (v - S k) from the copy and the window's records. A flush folds these u,
    which carry the copy's error into the recurrence, or the u that it computes `again` from the
    checkpoint and the raw records. Only the checkpoint is rounded to float32.

    Args:
      inputs: B rows, one head.
      window: tokens between flushes.
      again: which u are folded.

    Returns:
      [B, P, N].
    """
    k, v, g, beta = (
        np.asarray(x, np.float64)[:, :, 0] for x in (inputs.k, inputs.v, inputs.g, inputs.beta)
    )
    decay = np.exp(g).reshape(*g.shape[:2], 1, -1)
    state = np.zeros((v.shape[0], v.shape[2], k.shape[2]))
    for t in range(v.shape[1]):
        if t % window == 0:
            state = state.astype(np.float32).astype(np.float64)
            scale = np.abs(state).max(axis=-1, keepdims=True) / 127
            scale = np.maximum(scale, np.finfo(np.float32).tiny)
            read = np.round(state / scale) * scale
        key = k[:, t, None]

        def update(state: np.ndarray, t: int = t, key: np.ndarray = key) -> np.ndarray:
            found = (state * key).sum(axis=-1, keepdims=True)
            return beta[:, t, None, None] * (v[:, t, :, None] - found)

        state, read = state * decay[:, t], read * decay[:, t]
        cached = update(read)
        state = state + (update(state) if again else cached) * key
        read = read + cached * key
    return state


def marks(length: int) -> list[int]:
    """100, 300, 1000, 3000, ... tokens up to the length."""
    found = [n * 10**e for e in range(2, 6) for n in (1, 3) if n * 10**e <= length]
    return found if found[-1] == length else [*found, length]


def ratio(found: Any, expected: Any) -> float:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    return float(f"{error:.3g}")


def study_head(
    family: str, length: int, bar: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows: family, gates, memory, scheme, tokens, error of the last outputs and of the state.

    Returns:
      Those of the schemes, and those of the variants.
    """
    model, _ = load_weights(WEIGHTS / f"{family}.safetensors")
    text = as_stream(load_corpus().held_out)
    text = np.resize(text, (-(-length // 1000), 1000)).astype(np.int32)
    layer, head, memory = longest_memory(model, jnp.asarray(text[:4]))
    spec = model.blocks[layer].mixers[0].spec
    parts = [
        one_head(records_of(model, jnp.asarray(text[i : i + 1]), layer), spec, head)
        for i in range(len(text))
    ]
    trained = jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=1)[:, :length], *parts)
    rows = [trained, *(adversarial(trained, m, seed=i) for i, m in enumerate(MEMORIES))]
    labels = [("trained", memory), *(("adversarial", float(m)) for m in MEMORIES)]
    labels = [dict(family=family, gates=gates, memory=memory) for gates, memory in labels]
    inputs = jax.tree.map(lambda *xs: jnp.concatenate(xs), *rows)
    spec = dataclasses.replace(spec, num_heads=1, num_groups=1, value_dim=ROWS, max_tokens=1)
    expected = reference(spec, inputs)
    results = []
    for scheme in schemes():
        formed = dataclasses.replace(spec, **scheme.formats())
        key = jax.random.key(0) if scheme.stochastic else None
        found = jax.tree.map(np.asarray, run(formed, inputs, key, decode=scheme.decode))
        for row, label in enumerate(labels):
            for mark in marks(length):
                errors = errors_at(found, expected, row, mark)
                results.append(dict(**label, scheme=scheme.name, tokens=mark, **errors))
        bar()
    return results, study_variants(spec, inputs, expected, labels)


def errors_at(found: Trace, expected: Trace, row: int, mark: int) -> dict[str, float]:
    """Of the last `SEGMENT` outputs of a row up to `mark` tokens, and of the state there."""
    last, at = slice(mark - SEGMENT, mark), mark // SEGMENT - 1
    return dict(
        output=ratio(found.outputs[row, last], expected.outputs[row, last]),
        state=ratio(found.states[at, row], expected.states[at, row]),
    )


def study_variants(
    spec: rs.ReplaySpec, inputs: rs.TokenInputs, expected: Trace, labels: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """What is folded under the delta rule, and with a decay by channel also bfloat16 decays."""
    results = []
    length = inputs.v.shape[1]
    if spec.rule == "delta":
        count = min(length, FOLDED)
        first = jax.tree.map(lambda x: x[:, :count], inputs)
        wanted = expected.states[count // SEGMENT - 1][:, 0]
        for name, again in (("raw records", True), ("updates as they were read", False)):
            states = fold_updates(first, spec.window, again=again)
            for label, state, right in zip(labels, states, wanted, strict=True):
                results.append(dict(**label, variant=name, tokens=count, state=ratio(state, right)))
    if spec.decay == "channel":
        rounded = dataclasses.replace(inputs, g=inputs.g.astype(jnp.bfloat16).astype(jnp.float32))
        found = reference(spec, rounded)
        for row, label in enumerate(labels):
            errors = errors_at(found, expected, row, length)
            results.append(dict(**label, variant="bfloat16 decays", tokens=length, **errors))
    return results


# The trained models


def with_formats(model: HybridLM, scheme: Scheme, stretch: float) -> HybridLM:
    """The same weights with states as the scheme says, that remember `stretch` times as long."""
    config = dataclasses.replace(model.config, **scheme.formats())
    other = nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0)))
    nnx.update(other, nnx.state(model))
    for block in other.blocks:
        for mixer in block.mixers:
            if isinstance(mixer, ReplayMixer):
                mixer.A_log = nnx.Param(mixer.A_log[...] - np.float32(np.log(stretch)))
    return other


@partial(jax.jit, static_argnames="decode")
def read_text(
    model: HybridLM, text: jax.Array, key: Any, *, decode: str
) -> tuple[jax.Array, jax.Array]:
    """Decode text [B, T + 1] byte by byte; bits of each next byte and the likeliest, [T, B]."""
    cache = model.init_cache(
        text.shape[0], text.shape[1], decode=decode, ragged=False, rounding_key=key
    )

    def step(cache: Any, pair: Any) -> tuple[Any, Any]:
        token, following = pair
        logits, cache = model.step(token, cache)
        logprobs = jax.nn.log_softmax(logits)
        bits = -jnp.take_along_axis(logprobs, following[:, None], axis=1)[:, 0] / np.log(2.0)
        return cache, (bits.astype(jnp.float32), jnp.argmax(logits, axis=-1))

    return jax.lax.scan(step, cache, (text.T[:-1], text.T[1:]))[1]


def study_model(family: str, length: int, batch: int, bar: Any) -> list[dict[str, Any]]:
    """Rows: family, stretch of the memory, scheme, and how well the text is predicted.

    Agreement is with conventional float32 decoding, `tail_agreement` that of the last quarter.
    """
    model, _ = load_weights(WEIGHTS / f"{family}.safetensors")
    files = sorted((d.text for d in load_corpus().held_out), key=len)[-batch:]
    text = np.stack([np.frombuffer(f, np.uint8, count=length + 1) for f in files])
    text = jnp.asarray(text.astype(np.int32))
    truth = np.asarray(text.T[1:])
    results: list[dict[str, Any]] = []
    plain: dict[float, np.ndarray] = {}
    for scheme in model_schemes():
        key = jax.random.key(0) if scheme.stochastic else None
        for stretch in STRETCHES:
            formed = with_formats(model, scheme, stretch)
            bits, best = map(np.asarray, read_text(formed, text, key, decode=scheme.decode))
            same = best == plain.setdefault(stretch, best)
            results.append(
                dict(
                    family=family,
                    stretch=stretch,
                    scheme=scheme.name,
                    bits_per_byte=round(float(bits.mean()), 5),
                    accuracy=round(float((best == truth).mean()), 5),
                    agreement=round(float(same.mean()), 5),
                    tail_agreement=round(float(same[-(length // 4) :].mean()), 5),
                )
            )
        bar()
    return results


# Tables and plots

PARTS = ("head", "variants", "model")


def write(results: dict[str, Any], path: Path) -> None:
    """Write the results as JSON, a row a line; what the file holds of other families stays."""
    if path.exists():
        before = json.loads(path.read_text())
        runs = {**before["runs"]}
        for family, parts in results["runs"].items():
            runs[family] = {**runs.get(family, {}), **parts}
        results = dict(results, runs=runs)
        for part in PARTS:
            new = families_of(results[part])
            old = [row for row in before[part] if row["family"] not in new]
            results[part] = sorted(
                [*old, *results[part]], key=lambda row: FAMILIES.index(row["family"])
            )
    lines = []
    for name, value in results.items():
        if name in PARTS:
            rows = ",\n".join(f"  {json.dumps(row)}" for row in value)
            lines.append(f" {json.dumps(name)}: [\n{rows}\n ]")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def families_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["family"] for row in rows))


def last_mark(results: dict[str, Any], family: str) -> int:
    """Tokens after which the last errors of a family were taken."""
    return max(row["tokens"] for row in results["head"] if row["family"] == family)


def at_end(results: dict[str, Any]) -> dict[tuple[str, str, float], dict[str, dict[str, float]]]:
    """The errors after the last token: {(family, gates, memory): {scheme: row}}."""
    found: dict[Any, dict[str, Any]] = {}
    for row in results["head"]:
        if row["tokens"] == last_mark(results, row["family"]):
            case = (row["family"], row["gates"], row["memory"])
            found.setdefault(case, {})[row["scheme"]] = row
    return found


def gates_of(row: dict[str, Any]) -> str:
    return "trained gates" if row["gates"] == "trained" else f"memory {row['memory']:,.0f}"


def head_table(results: dict[str, Any], family: str, field: str) -> tuple[list[str], list[Any]]:
    """Header and rows: a scheme a line, trained gates and each memory a column."""
    cases = {case: rows for case, rows in at_end(results).items() if case[0] == family}
    header = ["scheme", *(gates_of(next(iter(rows.values()))) for rows in cases.values())]
    body = [
        [scheme.name, *(f"{rows[scheme.name][field]:.1e}" for rows in cases.values())]
        for scheme in schemes()
    ]
    return header, body


def variant_tables(results: dict[str, Any]) -> dict[str, tuple[list[str], list[Any]]]:
    """By their titles: what is folded, and decays in bfloat16; a column for each memory."""
    found: dict[str, tuple[list[str], list[Any]]] = {}
    lines: dict[tuple[str, str], list[str]] = {}
    for row in results["variants"]:
        family, last = NAMES[row["family"]], f"after {row['tokens']:,} tokens"
        if "output" in row:
            title = f"{family} with decays in bfloat16: relative error {last}"
            fields = {field: field for field in ("output", "state")}
        else:
            title = f"What a flush folds, int8 copy: relative error of the state {last}"
            fields = {f"{family}: {row['variant']}": "state"}
        header, body = found.setdefault(title, (["of" if "output" in row else "folded"], []))
        if gates_of(row) not in header:
            header.append(gates_of(row))
        for name, field in fields.items():
            if (title, name) not in lines:
                body.append(lines.setdefault((title, name), [name]))
            lines[title, name].append(f"{row[field]:.1e}")
    return found


def model_table(results: dict[str, Any], stretch: float) -> tuple[list[str], list[Any]]:
    """Header and rows, for each family: bits per byte, points of accuracy lost, agreement."""
    families = families_of([row for row in results["model"] if row["stretch"] == stretch])
    rows = {
        (row["family"], row["scheme"]): row for row in results["model"] if row["stretch"] == stretch
    }
    header = ["scheme"]
    for family in families:
        header += [f"{NAMES[family]}: bits per byte", "accuracy, points", "agreement"]
        header.append("at the end")
    body = []
    for scheme in model_schemes():
        line = [scheme.name]
        for family in families:
            row, plain = rows[family, scheme.name], rows[family, "conventional float32"]
            line += [
                f"{row['bits_per_byte']:.4f}",
                f"{100 * (row['accuracy'] - plain['accuracy']):+.2f}",
                f"{100 * row['agreement']:.2f}%",
                f"{100 * row['tail_agreement']:.2f}%",
            ]
        body.append(line)
    return header, body


def tables(results: dict[str, Any]) -> dict[str, tuple[list[str], list[Any]]]:
    """All tables by their titles."""
    found = {}
    for family in families_of(results["head"]):
        last = last_mark(results, family)
        for field in ("output", "state"):
            title = f"{NAMES[family]}: relative error of the {field} after {last:,} tokens"
            found[title] = head_table(results, family, field)
    found |= variant_tables(results)
    for stretch in sorted({row["stretch"] for row in results["model"]}):
        times = "" if stretch == 1 else f", remembering {stretch} times as long"
        found[f"Trained models on held-out text{times}"] = model_table(results, stretch)
    return found


def with_tables(page: str, found: dict[str, tuple[list[str], list[Any]]]) -> str:
    """The page with the table below each `**title**` line replaced by the one of that title."""
    for title, table in found.items():
        kind = re.sub(r" after .*", "", title)
        pattern = rf"\*\*{re.escape(kind)}( after [^\n]*)?\*\*\n(\n(\|[^\n]*\n)+)?"
        new = f"**{title}**\n\n{markdown(table)}\n"
        page, count = re.subn(pattern, lambda _, new=new: new, page)
        if count > 1:
            raise ValueError(f"the page has {count} tables titled {title!r}")
    return page


def show(title: str, table: tuple[list[str], list[Any]], console: Console) -> None:
    drawn = Table(title=title, title_justify="left", title_style="bold")
    for column, name in enumerate(table[0]):
        drawn.add_column(name, justify="right" if column else "left")
    for line in table[1]:
        drawn.add_row(*line)
    console.print(drawn)


def markdown(table: tuple[list[str], list[Any]]) -> str:
    header, body = table
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plot(results: dict[str, Any], folder: Path) -> None:
    """Write precision_tokens.svg and precision_memory.svg."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "precision"  # the same file for the same figures
    families = families_of(results["head"])
    ends = {family: last_mark(results, family) for family in families}
    colours = dict(zip(("float32", *FORMATS), ("black", "C0", "C2", "C3", "C4", "C1"), strict=True))

    def line(scheme: Scheme) -> dict[str, Any]:
        styles = {"replay": "-", "recurrent": ":" if scheme.stochastic else "--"}
        return dict(color=colours[scheme.dtype], ls=styles[scheme.decode], lw=1.3)

    def draw(name: str, x: str, fields: Sequence[str], keep: Any, xlabel: str) -> None:
        figure, axes = plt.subplots(
            len(fields), len(families), figsize=(11, 3.3 * len(fields)), sharey="row", squeeze=False
        )
        for i, field in enumerate(fields):
            for axis, family in zip(axes[i], families, strict=True):
                for scheme in schemes():
                    rows = [
                        row
                        for row in results["head"]
                        if row["family"] == family and row["scheme"] == scheme.name and keep(row)
                    ]
                    axis.loglog(
                        [row[x] for row in rows],
                        [row[field] for row in rows],
                        label=scheme.name,
                        **line(scheme),
                    )
                axis.set_title(NAMES[family], fontsize=10)
                axis.set_xlabel(xlabel)
                axis.grid(alpha=0.3)
            axes[i, 0].set_ylabel(f"relative error, {field}")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=4, fontsize=8, frameon=False)
        figure.tight_layout(rect=(0, 0.25 / len(fields), 1, 1))
        figure.savefig(folder / name, metadata={"Date": None})
        plt.close(figure)

    longest = max(row["memory"] for row in results["head"] if row["gates"] == "adversarial")
    draw(
        "precision_tokens.svg",
        "tokens",
        ("output", "state"),
        lambda row: row["gates"] == "adversarial" and row["memory"] == longest,
        "tokens",
    )
    draw(
        "precision_memory.svg",
        "memory",
        ("output",),
        lambda row: row["gates"] == "adversarial" and row["tokens"] == ends[row["family"]],
        "tokens that a state remembers",
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--family", choices=(*FAMILIES, "all"), default="gated_delta_net")
    parser.add_argument("--part", choices=("head", "model", "all"), default="all")
    parser.add_argument("--tokens", type=int, default=3000, help="of the one head")
    parser.add_argument("--text", type=int, default=512, help="bytes of each file that are read")
    parser.add_argument("--batch", type=int, default=4, help="files that the models read")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--plot", type=Path, help="only show results that were written before")
    parser.add_argument(
        "--docs", type=Path, help="also write plots there, and tables into its precision.md"
    )
    args = parser.parse_args(argv)
    if args.tokens < SEGMENT or args.tokens % SEGMENT:
        parser.error(f"--tokens must be a multiple of {SEGMENT}, found {args.tokens}")
    for name in ("text", "batch"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    console = Console()
    if args.plot is not None:
        results = json.loads(args.plot.read_text())
    else:
        families = FAMILIES if args.family == "all" else (args.family,)
        results = dict(runs={}, **{part: [] for part in PARTS})
        begin = time.perf_counter()
        with Progress(console=console, transient=True) as progress:
            head, whole = (args.part in (part, "all") for part in ("head", "model"))
            count = head * len(list(schemes())) + whole * len(model_schemes())
            task = progress.add_task("", total=count * len(families))
            advance = partial(progress.advance, task)
            made = dict(
                corpus=load_corpus().name,
                device=f"{jax.devices()[0].device_kind}, {platform.machine()}",
                jax=jax.__version__,
            )
            for family in families:
                runs = results["runs"].setdefault(family, {})
                if head:
                    progress.update(task, description=f"{NAMES[family]}: one head")
                    rows, variants = study_head(family, args.tokens, advance)
                    results["head"] += rows
                    results["variants"] += variants
                    runs["head"] = dict(tokens=args.tokens, **made)
                if whole:
                    progress.update(task, description=f"{NAMES[family]}: the model")
                    results["model"] += study_model(family, args.text, args.batch, advance)
                    runs["model"] = dict(text=args.text, batch=args.batch, **made)
                if args.out is not None:
                    write(results, args.out)
        console.print(f"{time.perf_counter() - begin:.0f} s")
    for title, table in tables(results).items():
        show(title, table, console)
    if args.docs is not None:
        plot(results, args.docs)
        page = args.docs / "precision.md"
        page.write_text(with_tables(page.read_text(), tables(results)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
