"""Draws docs/chunkwise.png: which part of the mLSTM a chunkwise scan computes in which way.

python docs/chunkwise.py
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import command
import reporting
from absl import flags
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Polygon, Rectangle

CHUNKS = 4
WITHIN, THROUGH, STATE = "#3d78b5", "#cfe2f3", "#ffd966"


def draw_matrix(axes):
    """Queries from top to bottom, keys from left to right, chunk by chunk."""
    for c in range(CHUNKS):
        top = CHUNKS - c
        axes.add_patch(Rectangle((0, top - 1), c, 1, facecolor=THROUGH, edgecolor="white", lw=2))
        corners = (c, top), (c, top - 1), (c + 1, top - 1)
        axes.add_patch(Polygon(corners, facecolor=WITHIN, edgecolor="white", lw=2))
        axes.text(c + 0.34, top - 0.69, "P", color="white", ha="center", va="center", fontsize=13)
        axes.text(-0.15, top - 0.5, f"$q$ of chunk {c}", ha="right", va="center")
        axes.text(c + 0.5, -0.2, f"$k, v$ of\nchunk {c}", ha="center", va="top")
        if c:
            axes.text(c / 2, top - 0.5, f"through\n$C_{c}$", ha="center", va="center", fontsize=11)
    axes.set(xlim=(-1.6, CHUNKS), ylim=(-0.8, CHUNKS + 0.6))
    axes.set_title("Which step reads which", fontsize=14)


def draw_scan(axes):
    """A row of chunks; a state passes from each to the next one."""
    for c in range(CHUNKS):
        x = 1.6 * c
        style = dict(boxstyle="round,pad=0,rounding_size=0.1", edgecolor="black")
        axes.add_patch(FancyBboxPatch((x, 1.4), 1.0, 1.2, facecolor=THROUGH, **style))
        corners = (x + 0.2, 2.45), (x + 0.2, 1.65), (x + 0.8, 1.65)
        axes.add_patch(Polygon(corners, facecolor=WITHIN))
        arrow = dict(arrowstyle="-|>", lw=1.5)
        axes.annotate("", (x + 0.5, 1.4), (x + 0.5, 0.8), arrowprops=arrow)
        axes.text(x + 0.5, 0.7, f"$q, k, v$\nof chunk {c}", ha="center", va="top")
        axes.annotate("", (x + 0.5, 3.2), (x + 0.5, 2.6), arrowprops=arrow)
        axes.text(x + 0.5, 3.3, f"$h$ of chunk {c}", ha="center", va="bottom")
        if c < CHUNKS - 1:
            axes.annotate("", (x + 1.6, 2.0), (x + 1.0, 2.0), arrowprops=arrow)
            axes.add_patch(
                Rectangle((x + 1.13, 2.15), 0.34, 0.4, facecolor=STATE, edgecolor="black")
            )
            axes.text(x + 1.3, 2.35, f"$C_{c + 1}$", ha="center", va="center")
    axes.set(xlim=(-0.2, 6.0), ylim=(-0.2, 4.4))
    axes.set_title("What runs one after the other: only the state", fontsize=14)


def define_flags(define: command.Define) -> None:
    define.string("output", str(Path(__file__).resolve().with_suffix(".png")), "File to write.")


def run(options: flags.FlagValues) -> None:
    with command.naming("output"):
        reporting.check_plot(options.output)
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    for axes in (left, right):
        axes.set_aspect("equal")
        axes.axis("off")
    draw_matrix(left)
    draw_scan(right)
    figure.savefig(options.output, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    command.main(define_flags, run)
