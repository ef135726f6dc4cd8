"""Draws docs/replayssm.svg, the picture of the idea.

python docs/picture.py [OUT.svg | OUT.png]
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

WIDTH, HEIGHT = 1080, 524
WINDOW, TOKENS = 8, 18
SLOT = 22
PITCH, BAR = 35, 18  # of the bars
STATE, RECORD = 54, 2.4  # heights in the bars; a record is smaller in life

INK, MUTED, LINE = "#1f2933", "#66727f", "#c5ccd4"
READ, WRITE, RING = "#3f7cd8", "#e5702d", "#35a06f"
STATE_FACE, STATE_EDGE = "#dbe6f8", "#3f7cd8"
RECORD_FACE, RECORD_EDGE = "#bfe3cf", "#2f8f62"
DEAD_FACE, DEAD_EDGE = "#f1f3f5", "#c5ccd4"


def text(ax: Axes, x: float, y: float, words: str, **style) -> None:
    ax.text(x, y, words, **{"color": INK, "fontsize": 10.5, "va": "center"} | style)


def box(ax: Axes, x: float, y: float, w: float, h: float, face: str, edge: str, **style) -> None:
    ax.add_patch(Rectangle((x, y), w, h, facecolor=face, edgecolor=edge, linewidth=1.1, **style))


def arrow(ax: Axes, start: tuple, end: tuple, color: str, **style) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 11, "linewidth": 1.6} | style
    patch = FancyArrowPatch(start, end, color=color, shrinkA=0, shrinkB=0, **style)
    ax.add_patch(patch)


def state(ax: Axes, x: float, y: float, size: float, words: str) -> None:
    """A recurrent state: a square matrix."""
    box(ax, x, y, size, size, STATE_FACE, STATE_EDGE)
    cells = 6
    for i in range(1, cells):
        at = i * size / cells
        ax.plot([x + at] * 2, [y, y + size], color="white", linewidth=1.1)
        ax.plot([x, x + size], [y + at] * 2, color="white", linewidth=1.1)
    text(ax, x + size / 2, y + size / 2, words, ha="center", fontsize=15)


def ring(ax: Axes, x: float, y: float, slots: str, height: float = 30) -> None:
    """Slots of the ring, one letter each: r(ecord), d(raft), x (dead), - (empty)."""
    styles = {
        "r": {"face": RECORD_FACE, "edge": RECORD_EDGE},
        "d": {"face": "white", "edge": RECORD_EDGE, "linestyle": (0, (2.5, 1.5))},
        "x": {"face": DEAD_FACE, "edge": DEAD_EDGE},
        "-": {"face": "white", "edge": DEAD_EDGE},
    }
    for order in "-xdr":  # strong edges over weak ones
        for i, kind in enumerate(slots):
            if kind == order:
                box(ax, x + i * SLOT, y, SLOT, height, **styles[kind])
                if kind == "x":
                    inset, left = 7, x + i * SLOT
                    for ends in ((y + inset, y + height - inset), (y + height - inset, y + inset)):
                        ax.plot([left + inset, left + SLOT - inset], ends, color="#9aa5b1", lw=1.2)


def pointer(ax: Axes, x: float, y: float, color: str = INK) -> None:
    arrow(ax, (x, y - 17), (x, y - 1), color, mutation_scale=12)


def traffic(ax: Axes, x: float, y: float, before: list[int], flushes: list[bool]) -> None:
    """Bytes each token moves: reads upward, writes downward; `before` counts the ring's records."""
    ax.plot([x - 10, x + PITCH * (len(before) - 1) + BAR + 10], [y, y], color=INK, linewidth=1)
    for i, (records, flush) in enumerate(zip(before, flushes, strict=True)):
        at = x + i * PITCH
        parts = [(1, STATE, READ), (1 + STATE, RECORD * records, RING)]
        if flush:
            parts += [(-1, -STATE, WRITE)]
        if any(before):
            parts += [(-1 - STATE * flush, -RECORD, RING)]
        for bottom, height, color in parts:
            ax.add_patch(Rectangle((at, y + bottom), BAR, height, color=color, linewidth=0))


def span(ax: Axes, left: float, right: float, y: float, words: str) -> None:
    ax.plot([left, left, right, right], [y + 5, y, y, y + 5], color=MUTED, linewidth=1)
    text(ax, (left + right) / 2, y - 13, words, ha="center", color=MUTED, fontsize=9.5)


def draw() -> plt.Figure:
    figure = plt.figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=100)
    figure.patch.set_alpha(0)
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set_xlim(0, WIDTH)
    ax.set_ylim(0, HEIGHT)
    ax.axis("off")
    ax.add_patch(
        FancyBboxPatch(
            (6, 6),
            WIDTH - 12,
            HEIGHT - 12,
            boxstyle="round,pad=0,rounding_size=18",
            facecolor="white",
            edgecolor=LINE,
            linewidth=1.2,
        )
    )

    left, notes, bars = 40, 168, 417

    # Conventional decoding
    text(ax, left, 488, "Conventional decoding", weight="bold", fontsize=13)
    text(ax, bars - 10, 488, "bytes moved, token by token", color=MUTED)
    legend = ((750, READ, "state read"), (861, WRITE, "state written"), (994, RING, "ring"))
    for x, color, words in legend:
        box(ax, x, 483, 10, 10, color, color)
        text(ax, x + 17, 488, words, color=MUTED)
    state(ax, left, 358, 104, "$S_t$")
    text(ax, notes, 420, "The whole state is read")
    text(ax, notes, 400, "and written at every token.")
    traffic(ax, bars, 410, [0] * TOKENS, [True] * TOKENS)

    # ReplaySSM
    ax.plot([left, WIDTH - left], [336, 336], color=LINE, linewidth=1)
    text(ax, left, 310, "ReplaySSM", weight="bold", fontsize=13)
    state(ax, left, 180, 104, "$S_0$")
    text(ax, left + 52, 165, "checkpoint", ha="center", color=MUTED, fontsize=9.5)
    text(ax, notes, 294, "ring of recent inputs", color=MUTED, fontsize=9.5)
    ring(ax, notes, 252, "rrrrr---")
    pointer(ax, notes + 5 * SLOT, 252)
    text(ax, notes + 5 * SLOT + 10, 240, "pointer", color=MUTED, fontsize=9.5)
    text(ax, notes, 206, "Outputs are read off both.")
    text(ax, notes, 186, "A full ring is folded: a flush.")

    before = [i if i <= WINDOW else (i - 1) % WINDOW + 1 for i in range(TOKENS)]
    flushes = [i > 0 and i % WINDOW == 0 for i in range(TOKENS)]
    traffic(ax, bars, 236, before, flushes)
    first = bars + WINDOW * PITCH
    span(ax, bars, first - PITCH + BAR, 214, "output-only steps: no state is written")
    text(ax, first + BAR / 2, 165, "flush", ha="center", color=MUTED, fontsize=9.5)
    span(ax, first + PITCH, first + WINDOW * PITCH - PITCH + BAR, 214, "output-only steps")
    text(ax, first + WINDOW * PITCH + BAR / 2, 165, "flush", ha="center", color=MUTED, fontsize=9.5)

    # Rollback
    ax.plot([left, WIDTH - left], [140, 140], color=LINE, linewidth=1)
    text(ax, left, 114, "Rollback", weight="bold", fontsize=13)
    text(ax, left, 82, "The pointer says what")
    text(ax, left, 62, "counts: no snapshot,")
    text(ax, left, 42, "no copy.")
    stages = (
        (240, "rrrrddd-", 4, "three drafts are verified"),
        (528, "rrrrrxx-", 5, "one is accepted: the pointer moves"),
        (816, "rrrrrrx-", 6, "the next token takes a dead slot"),
    )
    for x, slots, at, words in stages:
        text(ax, x, 93, words, color=MUTED, fontsize=9.5)
        ring(ax, x, 49, slots)
        pointer(ax, x + at * SLOT, 49)
    for x in (240, 528):
        arrow(ax, (x + 9 * SLOT, 64), (x + 12 * SLOT, 64), MUTED)
    return figure


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("replayssm.svg")
    plt.rcParams |= {"svg.hashsalt": "replayssm", "svg.fonttype": "path", "mathtext.fontset": "cm"}
    figure = draw()
    metadata = {"Date": None, "Creator": None} if out.suffix == ".svg" else None
    figure.savefig(out, transparent=True, metadata=metadata)
    print(out)


if __name__ == "__main__":
    main()
