"""Records of the kernel benchmark: read from JSONL, as a table, in Markdown, as a plot."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from roofline import Shape


@dataclasses.dataclass
class Record:
    """A measurement. What was not measured is None; status is "ok", "wrong", "failed" or "skipped", and note says why."""

    name: str
    shape: Shape
    impl: str
    stage: str
    direction: str
    dtype: str
    device: str
    versions: dict[str, str]
    commit: str | None
    config: dict[str, Any] | None = None
    recompute_states_in_bw: bool | None = None  # of mlstm_pallas, forward and backward
    variant: str | None = None  # of mlstm_pallas: input gate and normaliser
    status: str = "ok"
    note: str = ""
    ms: float | None = None
    spread: float | None = None  # (slowest - fastest) / median of the repeats
    tflops: float | None = None
    tbps: float | None = None
    roofline_pct: float | None = None
    peak_mib: float | None = None
    first_call_s: float | None = None  # tracing, compiling and one run
    error: float | None = None  # the largest of errors
    errors: dict[str, float] = dataclasses.field(default_factory=dict)  # of each output

    @property
    def what(self) -> str:
        """The stage, or the direction and its options."""
        if self.stage:
            return self.stage
        return " ".join(filter(None, (self.direction, self.option))) + (
            ", states stored" if self.recompute_states_in_bw is False else ""
        )

    @property
    def option(self) -> str:
        """The variant, where it is not the default."""
        return "" if self.variant in (None, "exp") else self.variant


def read_records(path: str) -> list[Record]:
    """The records of a JSONL file. Raises ValueError, with the line number, for a line that is no record."""
    records = []
    with open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                record = Record(**json.loads(line))
                record.shape = Shape(*record.shape)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, line {number} is no record of this benchmark: {error}"
                ) from None
            records.append(record)
    return records


NUMBERS = {
    "ms": ("ms", "{:.3f}"),
    "spread %": ("spread", "{:.1%}"),
    "TFLOP/s": ("tflops", "{:.3g}"),
    "TB/s": ("tbps", "{:.3g}"),
}
NUMBERS |= {
    "roofline %": ("roofline_pct", "{:.0f}"),
    "peak MiB": ("peak_mib", "{:.1f}"),
    "first call s": ("first_call_s", "{:.1f}"),
}
NUMBERS |= {"error": ("error", "{:.1e}")}
COLUMNS = ("shape", "impl", "what", "dtype", *NUMBERS, "note")


def cells(record: Record) -> list[str]:
    values = ((getattr(record, field), text) for field, text in NUMBERS.values())
    numbers = ["-" if value is None else text.format(value).rstrip("%") for value, text in values]
    return [record.name, record.impl, record.what, record.dtype, *numbers, record.note]


def progress(record: Record) -> str:
    *case, note = cells(record)
    numbers = (
        f"{name} {cell}" for name, cell in zip(NUMBERS, case[4:], strict=True) if cell != "-"
    )
    return f"{' '.join(case[:4])}: {', '.join(filter(None, (*numbers, note)))}"


def table(records: Sequence[Record]) -> str:
    return aligned([COLUMNS, *map(cells, records)], "<<<<" + ">" * len(NUMBERS) + "<")


def aligned(lines: Sequence[Sequence[str]], aligns: str) -> str:
    """Rows of cells as text; aligns: "<" or ">" for each column."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    pad = "{:{}{}}".format
    return "\n".join("  ".join(map(pad, line, aligns, widths)).rstrip() for line in lines)


def _labels(records: Sequence[Record]) -> Callable[[Record], str]:
    """The label of a record: its implementation, and what else differs between records."""
    several = len({record.dtype for record in records}) > 1

    def label(record: Record) -> str:
        stored = "states stored" if record.recompute_states_in_bw is False else ""
        return " ".join(
            filter(
                None,
                (record.impl, record.option, record.stage, record.dtype if several else "", stored),
            )
        )

    return label


DIRECTIONS = {"fwd": "forward", "bwd": "backward", "fwbw": "forward + backward"}


def markdown(records: Sequence[Record]) -> str:
    """A table of medians in ms, and below it the reasons for missing ones. Of several records of one case the last one counts.

    One row per implementation, one column per shape and direction, and one for the peak memory of the last direction; with more than
    four shapes one row per shape.
    """
    label = _labels(records)
    shapes = {record.shape: record.name for record in records}
    lines = list(dict.fromkeys(map(label, records)))
    directions = [d for d in DIRECTIONS if any(record.direction == d for record in records)]
    found = {(label(record), record.shape, record.direction): record for record in records}

    def cell(line: str, shape: Shape, direction: str, field: str) -> str:
        record = found.get((line, shape, direction))
        value = getattr(record, field) if record else None
        if record and record.status != "ok":
            return record.status
        return "" if value is None else f"{value:#.3g}" if value < 100 else f"{value:.0f}"

    per_shape = [(direction, "ms", DIRECTIONS[direction]) for direction in directions] + [
        (directions[-1], "peak_mib", "MiB")
    ]
    if len(shapes) <= 4:
        head = ["ms", *(f"{name} {title}" for name in shapes.values() for *_, title in per_shape)]
        body = [
            [line, *(cell(line, shape, *what) for shape in shapes for *what, _ in per_shape)]
            for line in lines
        ]
    else:
        head = ["ms", *(f"{line}, {title}" for line in lines for *_, title in per_shape[:-1])]
        body = [
            [name, *(cell(line, shape, *what) for line in lines for *what, _ in per_shape[:-1])]
            for shape, name in shapes.items()
        ]
    text = [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body)]
    notes: dict[str, list[str]] = {}
    for record in found.values():
        if record.status != "ok":
            notes.setdefault(f"{label(record)}: {record.note}", []).append(
                f"{record.name} {record.direction}"
            )
        elif record.note == "other function":
            notes.setdefault("Other functions", []).append(label(record))
    return "\n".join(
        [*text, *(f"\n{note} ({', '.join(dict.fromkeys(cases))})" for note, cases in notes.items())]
    )


def _sweep(shapes: Sequence[Shape]) -> str:
    """The dimension that varies between the shapes: "S" (at constant tokens or not), "B", or none."""
    for axis in ("S", "B"):
        if len(shapes) > 1 and len({getattr(shape, axis) for shape in shapes}) == len(shapes):
            return axis
    return ""


def _steps(x: float) -> str:
    return f"{x / 1024:g}k" if x >= 1024 else f"{x:g}"


def plot(records: Sequence[Record], path: str) -> None:
    """One panel per direction: time against the sequence length or the batch where that varies, else bars for each shape."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    measured = [record for record in records if record.ms is not None]
    label = _labels(records)
    lines = list(dict.fromkeys(map(label, measured)))
    styles = {
        line: (colormaps["tab10"](n % 10), "osD^vP*X<>"[n % 10]) for n, line in enumerate(lines)
    }
    panels = [d for d in DIRECTIONS if any(record.direction == d for record in measured)]
    figure = Figure(
        figsize=(1.5 + 5.5 * len(panels), 4.2 + 0.22 * -(-len(lines) // 3)), layout="constrained"
    )
    for axes, direction in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        here = [record for record in measured if record.direction == direction]
        shapes = sorted(
            dict.fromkeys(record.shape for record in here),
            key=[record.shape for record in records].index,
        )
        sweep = _sweep(shapes)
        for n, line in enumerate(lines):
            colour, marker = styles[line]
            times = {record.shape: record.ms for record in here if label(record) == line}
            if sweep:
                points = sorted((getattr(shape, sweep), ms) for shape, ms in times.items())
                bold = 2.4 if line.startswith(("triton", "mosaic_gpu", "xla")) else 1.3
                axes.plot(
                    *zip(*points, strict=True) if points else ([], []),
                    color=colour,
                    marker=marker,
                    markersize=5,
                    lw=bold,
                    label=line,
                )
            else:
                width = 0.8 / len(lines)
                positions = [
                    shapes.index(shape) + (n - (len(lines) - 1) / 2) * width for shape in times
                ]
                bars = axes.bar(positions, list(times.values()), width, color=colour, label=line)
                axes.bar_label(
                    bars,
                    [f"{ms:.2g}" if ms < 10 else f"{ms:.0f}" for ms in times.values()],
                    fontsize=6,
                )
        if sweep:
            axes.set_xscale("log", base=2)
            ticks = sorted({getattr(shape, sweep) for shape in shapes})
            axes.set_xticks(ticks, map(_steps, ticks))
            tokens = {shape.B * shape.S for shape in shapes}
            constant = f", {_steps(tokens.pop())} tokens each" if len(tokens) == 1 else ""
            axes.set_xlabel(("sequence length S" if sweep == "S" else "batch B") + constant)
        else:
            names = {record.shape: record.name for record in here}
            axes.set_xticks(
                range(len(shapes)),
                [names[shape] for shape in shapes],
                rotation=20 if len(shapes) > 3 else 0,
            )
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_axisbelow(True)
        axes.set_ylabel("ms")
        axes.set_title(DIRECTIONS[direction])
        axes.grid(which="major", alpha=0.4)
        axes.grid(which="minor", axis="y", alpha=0.15)
    handles = {
        text: handle
        for axes in figure.axes
        for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False
    )
    heads = dict.fromkeys(f"{record.shape.DHQK}/{record.shape.DHHV}" for record in measured)
    common = f", heads of {next(iter(heads))}" if len(heads) == 1 else ""
    figure.suptitle(
        "; ".join(dict.fromkeys(f"{record.dtype} on {record.device}" for record in measured))
        + common,
        fontsize=10,
    )
    figure.savefig(path, dpi=130)
