"""Rows of the benchmarks as a line, as a table, as a plot."""

import importlib.util
import os
import re
import textwrap

DIRECTIONS = {"fwd": "forward", "bwd": "backward", "fwbw": "forward + backward"}
MARKERS = "osD^vP*X<>"
# What plots say for the names of implementations, modes and loops.
NAMES = """
mosaic_gpu: mlstm_pallas, Mosaic GPU
triton: mlstm_pallas, Triton
mlstm_pallas_mosaic_gpu: mlstm_pallas, Mosaic GPU
mlstm_pallas_BTNH: mlstm_pallas, Triton
mlstm_kernels_limit_chunk: mlstm_kernels limit_chunk
mlstm_kernels_xl_chunk: mlstm_kernels xl_chunk
mlstm_kernels_xl_chunk_siging: mlstm_kernels xl_chunk_siging (sigmoid gate)
mlstm_kernels_triton_step: mlstm_kernels step
mlstm_kernels_triton_step_in_place: mlstm_kernels step in place
jla: jax-linear-attention
fla_simple_gla: FLA simple_gla (no normaliser)
torch_sdpa_cudnn: attention, cuDNN
without_mlstm: layer without the mLSTM
torch_without_mlstm: torch layer without the mLSTM
products: matrix products alone
efficiency_pct: efficiency, %
tokens_per_s: tokens/s
graph: CUDA graph
scan: loop by scan
while: loop by while_loop
weak-batch: batch split, per device
weak-heads: heads split, per device
weak-sequence: sequence split, per device
strong-sequence: sequence split, in all
"""
WORDS = dict(line.split(": ") for line in NAMES.strip().splitlines())


def columns(lines, **functions):
    """From lines of a title, a key or the name of a function, and a format, two spaces apart.

    By title: the key or the function of a row, and the format, which is empty for text.
    """
    split = (re.split("  +", line) for line in lines.strip().splitlines())
    return {title: (functions.get(x, x), "".join(rest)) for title, x, *rest in split}


def cells(row, columns):
    def cell(key, specification):
        value = key(row) if callable(key) else row.get(key)
        if value is None:
            return "-"
        return f"{value:{specification}}".rstrip("%") if specification else str(value)

    return [cell(*column) for column in columns.values()]


def progress(row, columns):
    """The columns of text, then the others with their titles; the last column is the note."""
    *texts, note = zip(columns, columns.values(), cells(row, columns), strict=True)
    case = " ".join(cell for _, (_, number), cell in texts if not number)
    others = [
        f"{title} {cell}" for title, (_, number), cell in texts if number and cell not in ("-", "")
    ]
    return f"{case}: {', '.join(filter(None, (*others, note[-1])))}"


def table(rows, columns):
    """A line per row; text is aligned to the left and numbers to the right."""
    lines = [list(columns), *(cells(row, columns) for row in rows)]
    aligns = [">" if specification else "<" for _, specification in columns.values()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    pad = "{:{}{}}".format
    return "\n".join("  ".join(map(pad, line, aligns, widths)).rstrip() for line in lines)


def check_plot(path):
    """Raises ValueError if a plot cannot be written there."""
    if path and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("matplotlib is missing: pip install 'mlstm_pallas[benchmark]'")
    if path and not path.endswith((".png", ".pdf", ".svg")):
        raise ValueError(f"{path} does not end with .png, .pdf or .svg")
    if path and not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise ValueError(f"no folder for {path}")


def _thousands(x):
    return f"{x / 1024:g}k" if isinstance(x, int) and x >= 1024 else f"{x}"


def in_words(label):
    return re.sub(r"[\w-]+", lambda name: WORDS.get(name[0], name[0]), label)


def names(lines):
    """What is drawn at each line, without the words of all of them, and these."""
    words = [line.split() for line in lines]
    shared = [x for x in words[0] if len(lines) > 1 and all(x in others for others in words)]
    own = (" ".join(x for x in line if x not in shared) for line in words)
    return dict(zip(lines, map(in_words, own), strict=True)), in_words(" ".join(shared))


# Inches and points, so that the words of a plot 390 pixels wide have about the size of text.
WIDTH, PANEL_HEIGHT, FONT_SIZE = 5.2, 3.4, 10.5
LINE_HEIGHT = 1.15 * FONT_SIZE / 72 / (PANEL_HEIGHT - 0.7)  # as a part of the height of the axes
NAME_WIDTH, TITLE_WIDTH = 16, 36  # characters


def apart(places, sizes):
    """Ascending places, moved until intervals of these sizes around them do not overlap."""
    places, pairs = list(places), range(len(places) - 1)
    for _ in range(100):
        for n in pairs:
            excess = (sizes[n] + sizes[n + 1]) / 2 - (places[n + 1] - places[n])
            if excess > 0:
                places[n] -= excess / 2
                places[n + 1] += excess / 2
    return places


def write_names(axes, ends):
    """The name of each line to the right of the axes, at its end as far as there is room.

    ends: by the name, the last point (x, y) and the color of the line.
    """
    to_axes = axes.transScale + axes.transLimits
    ends = sorted(ends.items(), key=lambda item: item[1][0][1])
    texts = [textwrap.fill(name, NAME_WIDTH, break_long_words=False) for name, _ in ends]
    sizes = [LINE_HEIGHT * (1.4 + text.count("\n")) for text in texts]
    places = apart([to_axes.transform(point)[1] for _, (point, _) in ends], sizes)
    for text, place, (_, (_, color)) in zip(texts, places, ends, strict=True):
        style = dict(color=color, va="center", linespacing=1.0, fontsize=FONT_SIZE - 0.5)
        axes.text(1.03, place, text, transform=axes.transAxes, **style)


def plot(
    rows,
    path,
    line,
    x,
    panel=lambda row: DIRECTIONS[row["direction"]],
    keys=("ms",),
    xlabel="",
    beside=False,
):
    """Panels of keys of the rows against x: curves if x is a number, otherwise points.

    beside: the panels are beside each other instead of below.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogLocator

    rows = [row for row in rows if row.get("ms") is not None]
    lines, xs = (list(dict.fromkeys(map(f, rows))) for f in (line, x))
    if curves := isinstance(xs[0], int):
        xs.sort()
    line_names, shared = names(lines)
    panels = [(title, key) for key in keys for title in dict.fromkeys(map(panel, rows))]
    settings = dict.fromkeys(f"{row['dtype']} on {row['device']}" for row in rows)
    with rc_context({"font.size": FONT_SIZE}):
        down, across = (1, len(panels)) if beside else (len(panels), 1)
        size = WIDTH * across, 0.4 + PANEL_HEIGHT * down
        figure = Figure(figsize=size, layout="constrained")
        all_axes = figure.subplots(down, across, squeeze=False).flat
        for axes, (title, key) in zip(all_axes, panels, strict=True):
            ends = {}
            for n, label in enumerate(lines):
                curve = (row for row in rows if (line(row), panel(row)) == (label, title))
                points = ((x(row) if curves else xs.index(x(row)), row[key]) for row in curve)
                points = dict(sorted(dict(points).items()))
                style = dict(color=f"C{n}", marker=MARKERS[n % len(MARKERS)], markersize=5)
                axes.plot([*points], [*points.values()], linestyle="-" if curves else "", **style)
                if points:
                    ends[line_names[label]] = [*points.items()][-1], f"C{n}"
            if curves:
                axes.set_xscale("log", base=2)
            axes.set_xticks(xs if curves else range(len(xs)), map(_thousands, xs))
            if key == "ms":
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_minor_formatter("")
            else:
                axes.set_ylim(0, None)
                axes.yaxis.set_major_formatter(EngFormatter(sep=""))
            title = textwrap.fill(title, TITLE_WIDTH)
            axes.set(title=title, xlabel=xlabel, ylabel=in_words(key))
            axes.grid(which="both", alpha=0.3)
            write_names(axes, ends)
        title = "; ".join(filter(None, (*settings, shared)))
        figure.suptitle(textwrap.fill(title, TITLE_WIDTH * across), fontsize=FONT_SIZE)
        figure.savefig(path, dpi=200)
