"""Draws docs/schedules.png: the stages of both passes, and the arrays between them.

python docs/schedules.py
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import command
import reporting
from absl import flags
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

KERNEL, SOME = "#cfe2f3", "#fff2cc"
WIDTH, GAP = 8.6, 1.0  # of a column, and between columns
LINE, PAD = 0.34, 0.16  # heights

# A column has stages and arrays in turn. A stage: (colour, name, what it reads). Arrays: a list of
# names and shapes.
FORWARD_MATERIALISED = [
    (KERNEL, "chunk_gates, stabiliser_scan", ["vecI, vecF (B, NH, S)   scaM_initial (B, NH)"]),
    [
        "vecE, vecU, vecW, vecM, vecAbar (B, NH, NC, L)",
        "scaGamma (B, NH, NC)   scaM_states (B, NH, NC + 1)",
    ],
    (
        KERNEL,
        "recurrent_fw_C",
        [
            "matK (B, NH, S, DHQK)   matV (B, NH, S, DHV)",
            "matC_initial, vecN_initial   vecAbar, scaGamma",
        ],
    ),
    [
        "matC_states (B, NH, NC, DHQK, DHV)",
        "vecN_states (B, NH, NC, DHQK)",
        "matC_last (B, NH, DHQK, DHV)   vecN_last (B, NH, DHQK)",
    ],
    (KERNEL, "parallel_fw_H", ["matQ (B, NH, S, DHQK)   matK, matV   gates"]),
    ["matH (B, NH, S, DHV)   vecZ (B, NH, S)"],
]
FORWARD_FUSED = [
    (KERNEL, "chunk_gates, stabiliser_scan", ["vecI, vecF (B, NH, S)   scaM_initial (B, NH)"]),
    [
        "vecE, vecU, vecW, vecM, vecAbar (B, NH, NCF, LF)",
        "scaGamma (B, NH, NCF)   scaM_states (B, NH, NCF + 1)",
    ],
    (
        KERNEL,
        "step_sums, vector_states",
        ["matK (B, NH, S, DHQK)   vecN_initial   vecAbar, scaGamma"],
    ),
    ["vecN_states (B, NH, NCF, DHQK)   vecN_last (B, NH, DHQK)"],
    (KERNEL, "parallel_fw_P", ["matQ (B, NH, S, DHQK)   matK   vecN_states   gates"]),
    [
        "matP (B, NH, S, LF)   vecR, vecZ (B, NH, S)",
        "keys (B, NH, S, DHQK): kbar, or matK with vecAbar",
    ],
    (
        SOME,
        "split_products, split_states: if num_splits > 1",
        ["keys   matV (B, NH, S, DHV)   scaGamma"],
    ),
    [
        "C before each split (B, NH, num_splits, DHQK, DHV)",
        "splits are heads: (B, NH * num_splits, S / num_splits, ...)",
    ],
    (
        KERNEL,
        "recurrent_fw_H: C stays in registers",
        ["matQ, matV   matP, keys, vecR   scaGamma", "matC_initial, or C before each split"],
    ),
    [
        "matH (B, NH, S, DHV)   matC_last (B, NH, DHQK, DHV)",
        "matC_states (B, NH, NC, DHQK, DHV)",
        "    if recompute_states_in_bw=False",
    ],
]
BACKWARD = [
    (KERNEL, "chunk_gates", ["vecI, vecF   scaM_states of the forward pass"]),
    ["the gates (B, NH, NC, L)"],
    (
        SOME,
        "parallel_bw_dP",
        [
            "matQ, matK, matV   matDeltaH, matH (B, NH, S, DHV)   vecZ",
            "not run before chunk_gradients, which computes P and dP",
        ],
    ),
    [
        "matP, matDeltaP (B, NH, S, L)   sums of W: pairs",
        "queries, keys: qbar, kbar, or matQ, matK with weights",
        "vecDelta (B, NH, S)   vecDeltaN_added (B, NH, NC, DHQK)",
    ],
    (
        KERNEL,
        "recurrent_bw_dC: C and dC in one launch",
        [
            "keys, matV, matC_initial: C, unless the forward pass stored it",
            "queries, matDeltaH, matDeltaC_last: dC",
        ],
    ),
    [
        "matC_states, matDeltaC_states (B, NH, NC, DHQK, DHV)",
        "matDeltaC_initial (B, NH, DHQK, DHV)",
    ],
    (
        KERNEL,
        "parallel_bw_dQKV or chunk_gradients, with vector_states",
        [
            "matQ, matK, matV, matDeltaH   P, dP, C, dC   gates",
            "vecN_states, vecDeltaN_states (B, NH, NC, DHQK)",
        ],
    ),
    [
        "matDeltaQ, matDeltaK (B, NH, S, DHQK)   matDeltaV (B, NH, S, DHV)",
        "q_dot_dq_inter, k_dot_dk_inter (B, NH, S)   inner_C_dC (B, NH, NC)",
    ],
    (
        KERNEL,
        "step_gradients",
        ["pairs, q_dot_dq_inter, k_dot_dk_inter, inner_C_dC, vecDm   gates"],
    ),
    ["vecDeltaI, vecDeltaF (B, NH, S)   scaDeltaM (B, NH)"],
]
COLUMNS = (
    ("forward, materialised", FORWARD_MATERIALISED),
    ("forward, fused scan", FORWARD_FUSED),
    ("backward", BACKWARD),
)
LEGEND = (
    (KERNEL, "kernel, or plain jnp"),
    (SOME, "not in every call"),
)
NOTES = (
    "Inside the sharded region B and NH are one axis. NC chunks have L steps, NCF chunks of the "
    "fused scan LF. pairs: (B, NH, n, S) with tiles of T <= min(L, 128) steps, n = L / T.",
    "Kept for the backward pass: the inputs, matH, vecZ, vecN_states and scaM_states of every "
    "chunk of L steps, and matC_states if recompute_states_in_bw=False.",
)


def height(step):
    """The height of a stage or of the arrays after it."""
    if isinstance(step, list):
        return LINE * (len(step) + 0.5)
    return LINE * (1 + len(step[2])) + 2 * PAD


def draw(axes, left, title, steps):
    """One column, from y = 0 down; returns its lower end."""
    centre, y = left + WIDTH / 2, 0.0
    axes.text(centre, 0.45, title, ha="center", va="center", fontsize=15, weight="bold")
    for step in steps:
        end = y - height(step)
        if isinstance(step, list):
            last = step is steps[-1]
            x, arrow = left + 0.35, dict(arrowstyle="-|>", color="black", lw=1.3)
            axes.annotate("", (x, end), (x, y), arrowprops=arrow)
            font = dict(fontsize=11, weight="bold" if last else "normal")
            for n, line in enumerate(step):
                axes.text(left + 0.6, y - LINE * (n + 0.75), line, va="center", **font)
        else:
            colour, name, reads = step
            style = dict(boxstyle="round,pad=0,rounding_size=0.12")
            style |= dict(facecolor=colour, edgecolor="black")
            axes.add_patch(FancyBboxPatch((left, end), WIDTH, y - end, **style))
            x, first, font = left + 0.2, y - PAD - LINE / 2, dict(fontsize=11, color="#333333")
            axes.text(x, first, name, va="center", fontsize=12.5, weight="bold")
            for n, line in enumerate(reads):
                axes.text(x, first - LINE * (n + 1), line, va="center", **font)
        y = end
    return y


def define_flags(define: command.Define) -> None:
    define.string("output", str(Path(__file__).resolve().with_suffix(".png")), "File to write.")


def run(options: flags.FlagValues) -> None:
    with command.naming("output"):
        reporting.check_plot(options.output)
    lefts = [n * (WIDTH + GAP) for n in range(len(COLUMNS))]
    figure = Figure(figsize=(20, 12.2))
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.axis("off")
    low = min(draw(axes, left, *column) for left, column in zip(lefts, COLUMNS, strict=True))
    right = lefts[-1] + WIDTH
    for n, (colour, text) in enumerate(LEGEND):
        x = n * 6.2
        style = dict(boxstyle="square,pad=0", facecolor=colour, edgecolor="black")
        axes.add_patch(FancyBboxPatch((x, low - 0.75), 0.5, 0.3, **style))
        axes.text(x + 0.7, low - 0.6, text, va="center", fontsize=12)
    for n, note in enumerate(NOTES):
        axes.text(0, low - 1.15 - 0.4 * n, note, va="center", fontsize=12)
    axes.set_xlim(-0.1, right + 0.1)
    axes.set_ylim(low - 1.8, 0.8)
    figure.savefig(options.output, dpi=90, metadata={"Software": None})


if __name__ == "__main__":
    command.main(define_flags, run)
