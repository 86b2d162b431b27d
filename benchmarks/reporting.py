"""Records of the benchmarks: as they are measured, in JSONL, as a table, in Markdown, as a plot."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from absl import flags
from command import RequestError, check_plot
from roofline import Shape

RecordType = TypeVar("RecordType")

# Title -> attribute of a record and format specification; the specification of text is empty.
Columns = Mapping[str, tuple[str, str]]


def read_records(path: str, record_type: Callable[..., RecordType]) -> list[RecordType]:
    """The records of a JSONL file.

    Raises:
      RequestError: a line is no record of this type.
    """
    records = []
    with open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                records.append(record_type(**row | {"shape": Shape(*row["shape"])}))
            except (KeyError, TypeError, ValueError) as error:
                where = f"{path}, line {number}"
                raise RequestError(f"{where} is no record of this benchmark: {error}") from None
    return records


def cells(record: Any, columns: Columns) -> list[str]:
    def cell(value: Any, specification: str) -> str:
        if value is None:
            return "-"
        return f"{value:{specification}}".rstrip("%") if specification else str(value)

    return [cell(getattr(record, field), text) for field, text in columns.values()]


def progress(record: Any, columns: Columns) -> str:
    """The first columns of text, then the others with their titles; the last column is the note."""
    *texts, note = zip(columns, columns.values(), cells(record, columns), strict=True)
    first = next(n for n, (_, (_, specification), _) in enumerate(texts) if specification)
    case = " ".join(cell for _, _, cell in texts[:first])
    others = [f"{title} {cell}" for title, _, cell in texts[first:] if cell != "-"]
    return f"{case}: {', '.join(filter(None, (*others, note[-1])))}"


def table(records: Sequence[Any], columns: Columns) -> str:
    """A row per record; text is aligned to the left and numbers to the right."""
    lines = [list(columns), *(cells(record, columns) for record in records)]
    aligns = [">" if specification else "<" for _, specification in columns.values()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    pad = "{:{}{}}".format
    return "\n".join("  ".join(map(pad, line, aligns, widths)).rstrip() for line in lines)


def measure(
    name: str,
    options: flags.FlagValues,
    start: Callable[[], Iterator[Any]],
    columns: Columns,
    record_type: Callable[..., Any] | None = None,
) -> tuple[list[Any], int]:
    """The records of the benchmark ``name`` and its exit code.

    Each record is printed as a line, and appended to the file of --jsonl, as soon as it is
    measured; at the end there is a table. With a record_type, --from_jsonl has files of records to
    read instead.

    The exit code is 1 where a record is wrong or failed, and 130 after Ctrl-C, with the records
    before it. It is 2, with one line on stderr, where ``start`` refuses the request or a file
    cannot be opened.
    """
    stored = options.from_jsonl if record_type else []
    records: list[Any] = []
    with contextlib.ExitStack() as stack:
        try:
            check_plot(options.plot if "plot" in options else None)
            read = [record for path in stored for record in read_records(path, record_type)]
            measured = iter(read) if stored else start()
            jsonl = stack.enter_context(open(options.jsonl, "a")) if options.jsonl else None
        except (RequestError, OSError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return [], 2
        try:
            for record in measured:
                records.append(record)
                if not stored:
                    print(progress(record, columns), flush=True)
                if jsonl:
                    row = dataclasses.asdict(record)
                    print(json.dumps(row, default=str), file=jsonl, flush=True)
            code = int(any(record.status in ("wrong", "failed") for record in records))
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = 130
    if records:
        print(f"\n{table(records, columns)}")
    return records, code


def plot_measured(
    plot: Callable[[Sequence[Any], str], None], records: Sequence[Any], path: str | None
) -> None:
    """Writes the plot, where one is asked for and anything was measured."""
    if path and any(record.ms for record in records):
        plot(records, path)
    elif path and records:
        print(f"nothing was measured: {path} is not written")


# ---------------------------------------------------------------- the kernel benchmark


@dataclasses.dataclass
class Record:
    """A measurement. What was not measured is None.

    status is "ok", "wrong", "failed" or "skipped", and note says why.
    """

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
    errors: dict[str, float] = dataclasses.field(default_factory=dict)  # by output

    @property
    def what(self) -> str:
        """The stage, or the direction and its options."""
        if self.stage:
            return self.stage
        stored = ", states stored" if self.recompute_states_in_bw is False else ""
        return " ".join(filter(None, (self.direction, self.option))) + stored

    @property
    def option(self) -> str:
        """The variant, where it is not the default."""
        return "" if self.variant in (None, "exp") else self.variant


COLUMNS = {
    "shape": ("name", ""),
    "impl": ("impl", ""),
    "what": ("what", ""),
    "dtype": ("dtype", ""),
    "ms": ("ms", ".3f"),
    "spread %": ("spread", ".1%"),
    "TFLOP/s": ("tflops", ".3g"),
    "TB/s": ("tbps", ".3g"),
    "roofline %": ("roofline_pct", ".0f"),
    "peak MiB": ("peak_mib", ".1f"),
    "first call s": ("first_call_s", ".1f"),
    "error": ("error", ".1e"),
    "note": ("note", ""),
}
DIRECTIONS = {"fwd": "forward", "bwd": "backward", "fwbw": "forward + backward"}


def _labels(records: Sequence[Record]) -> Callable[[Record], str]:
    """The label of a record: its implementation, and what else differs between records."""
    several = len({record.dtype for record in records}) > 1

    def label(record: Record) -> str:
        dtype = record.dtype if several else ""
        stored = "states stored" if record.recompute_states_in_bw is False else ""
        return " ".join(filter(None, (record.impl, record.option, record.stage, dtype, stored)))

    return label


def markdown(records: Sequence[Record]) -> str:
    """A table of medians in ms, and below it the reasons for missing ones.

    One row per implementation, one column per shape and direction, and one for the peak memory of
    the last direction. With more than four shapes there is one row per shape. Where a case has
    several records the last one counts.
    """
    label = _labels(records)
    shapes = {record.shape: record.name for record in records}
    lines = list(dict.fromkeys(map(label, records)))
    directions = [d for d in DIRECTIONS if any(record.direction == d for record in records)]
    latest = {(label(record), record.shape, record.direction): record for record in records}

    def cell(line: str, shape: Shape, direction: str, field: str) -> str:
        record = latest.get((line, shape, direction))
        value = getattr(record, field) if record else None
        if record and record.status != "ok":
            return record.status
        return "" if value is None else f"{value:#.3g}" if value < 100 else f"{value:.0f}"

    per_shape = [(direction, "ms", DIRECTIONS[direction]) for direction in directions]
    if len(shapes) <= 4:
        per_shape.append((directions[-1], "peak_mib", "MiB"))
        titles = [f"{name} {title}" for name in shapes.values() for *_, title in per_shape]
        body = [
            [line, *(cell(line, shape, *what) for shape in shapes for *what, _ in per_shape)]
            for line in lines
        ]
    else:
        titles = [f"{line}, {title}" for line in lines for *_, title in per_shape]
        body = [
            [name, *(cell(line, shape, *what) for line in lines for *what, _ in per_shape)]
            for shape, name in shapes.items()
        ]
    text = [f"| {' | '.join(line)} |" for line in (["ms", *titles], ["---"] * len(body[0]), *body)]
    notes: dict[str, list[str]] = {}
    for record in latest.values():
        if record.status != "ok":
            case = f"{record.name} {record.direction}"
            notes.setdefault(f"{label(record)}: {record.note}", []).append(case)
        elif record.note == "other function":
            notes.setdefault("Other functions", []).append(label(record))
    text += [f"\n{note} ({', '.join(dict.fromkeys(cases))})" for note, cases in notes.items()]
    return "\n".join(text)


def _sweep(shapes: Sequence[Shape]) -> str:
    """The dimension that varies between the shapes: "S" (at constant tokens or not), "B", or ""."""
    for axis in ("S", "B"):
        if len(shapes) > 1 and len({getattr(shape, axis) for shape in shapes}) == len(shapes):
            return axis
    return ""


def _steps(x: float) -> str:
    return f"{x / 1024:g}k" if x >= 1024 else f"{x:g}"


def _curves(axes: Any, times: Mapping[str, Mapping[Shape, float]], sweep: str, styles: Any) -> None:
    """Time against the dimension that varies, a curve for each line of the legend."""
    for line, by_shape in times.items():
        points = sorted((getattr(shape, sweep), ms) for shape, ms in by_shape.items())
        xs, ys = zip(*points, strict=True) if points else ((), ())
        width = 2.4 if line.startswith(("triton", "mosaic_gpu", "xla")) else 1.3
        colour, marker = styles[line]
        axes.plot(xs, ys, color=colour, marker=marker, markersize=5, lw=width, label=line)
    shapes = set().union(*times.values())
    axes.set_xscale("log", base=2)
    ticks = sorted({getattr(shape, sweep) for shape in shapes})
    axes.set_xticks(ticks, map(_steps, ticks))
    tokens = {shape.B * shape.S for shape in shapes}
    constant = f", {_steps(tokens.pop())} tokens each" if len(tokens) == 1 else ""
    axes.set_xlabel(("sequence length S" if sweep == "S" else "batch B") + constant)


def _bars(
    axes: Any, times: Mapping[str, Mapping[Shape, float]], names: Mapping[Shape, str], styles: Any
) -> None:
    """A group of bars for each shape."""
    shapes, width = list(names), 0.8 / len(times)
    for n, (line, by_shape) in enumerate(times.items()):
        if not by_shape:  # bars of nothing have no colour for the legend
            continue
        offset = (n - (len(times) - 1) / 2) * width
        positions = [shapes.index(shape) + offset for shape in by_shape]
        colour, _ = styles[line]
        bars = axes.bar(positions, list(by_shape.values()), width, color=colour, label=line)
        labels = [f"{ms:.2g}" if ms < 10 else f"{ms:.0f}" for ms in by_shape.values()]
        axes.bar_label(bars, labels, fontsize=6)
    rotation = 20 if len(shapes) > 3 else 0
    axes.set_xticks(range(len(shapes)), list(names.values()), rotation=rotation)


def plot(records: Sequence[Record], path: str) -> None:
    """One panel per direction.

    It has the time against the sequence length or the batch where that varies, else bars for each
    shape.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    measured = [record for record in records if record.ms is not None]
    label = _labels(records)
    lines = list(dict.fromkeys(map(label, measured)))
    colours = colormaps["tab10"]
    styles = {line: (colours(n % 10), "osD^vP*X<>"[n % 10]) for n, line in enumerate(lines)}
    panels = [d for d in DIRECTIONS if any(record.direction == d for record in measured)]
    size = 1.5 + 5.5 * len(panels), 4.2 + 0.22 * -(-len(lines) // 3)
    figure = Figure(figsize=size, layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, direction in zip(all_axes, panels, strict=True):
        here = [record for record in measured if record.direction == direction]
        shapes = {record.shape for record in here}
        names = {record.shape: record.name for record in records if record.shape in shapes}
        times = {
            line: {record.shape: record.ms for record in here if label(record) == line}
            for line in lines
        }
        if sweep := _sweep(list(names)):
            _curves(axes, times, sweep, styles)
        else:
            _bars(axes, times, names, styles)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_axisbelow(True)
        axes.set_ylabel("ms")
        axes.set_title(DIRECTIONS[direction])
        axes.grid(which="major", alpha=0.4)
        axes.grid(which="minor", axis="y", alpha=0.15)
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, text in zip(*axes.get_legend_handles_labels(), strict=True):
            handles[text] = handle
    legend = dict(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.legend(handles.values(), handles, **legend)
    heads = dict.fromkeys(f"{record.shape.DHQK}/{record.shape.DHHV}" for record in measured)
    common = f", heads of {next(iter(heads))}" if len(heads) == 1 else ""
    devices = dict.fromkeys(f"{record.dtype} on {record.device}" for record in measured)
    figure.suptitle("; ".join(devices) + common, fontsize=10)
    figure.savefig(path, dpi=130)
