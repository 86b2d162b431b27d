r"""Times the mLSTM on 1, 2, 4, ... devices of this machine, with a split batch, heads or sequence.

    python benchmarks/scaling_benchmark.py --direction=fwbw --jsonl=scaling.jsonl --plot=scaling.png
    python benchmarks/scaling_benchmark.py --mode=strong-sequence --shape=1x8x1048576x256x512
    JAX_NUM_CPU_DEVICES=8 JAX_PLATFORMS=cpu python benchmarks/scaling_benchmark.py  # tiny shapes

Weak scaling gives every device one --shape: n devices have n times the batch, the heads or the
steps. Strong scaling splits the steps of one --shape over the devices. Efficiency is tokens per
second and device, relative to the fewest devices that could run the shape. Split batches and heads
need no communication; a split sequence is mlstm_chunkwise_sequence_parallel.

Before a function is timed, it is checked on the same devices against the float64 recurrence, with
one head and few steps a device. Memory is the peak of a device beyond its inputs.

Exit code 1 when an output is wrong or a run fails for any reason but memory, 2 when the request
makes no sense, 130 after Ctrl-C.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import command
import jax
import kernel_benchmark
import numpy as np
import peers
import reporting
from absl import flags
from command import (
    RequestError,
    check_gpu,
    check_names,
    git_commit,
    one_line,
)
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from kernel_benchmark import jax_versions, median_and_spread, parse_shapes, time_calls
from peers import Inputs, random_inputs
from roofline import Shape

from mlstm_pallas import mlstm_chunkwise
from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel
from mlstm_pallas.validation import BACKENDS, KERNEL_DTYPES, check_chunk_size

AXIS = "devices"


class Mode(NamedTuple):
    """Dimension ``dim`` of the arrays is split over the devices.

    On n devices it is n times as long if it grows.
    """

    dim: int
    grows: bool

    def whole(self, shape: Shape, n: int) -> Shape:
        if not self.grows:
            return shape
        return shape._replace(**{Shape._fields[self.dim]: shape[self.dim] * n})

    def reduced(self, shape: Shape, n: int) -> Shape:
        """The shape that is checked in its place: one head and at most 256 steps per device."""
        steps = shape.S if self.grows else shape.S // n
        return self._replace(grows=True).whole(shape._replace(B=1, NH=1, S=min(steps, 256)), n)


MODES = {
    "weak-batch": Mode(0, True),
    "weak-heads": Mode(1, True),
    "weak-sequence": Mode(2, True),
    "strong-sequence": Mode(2, False),
}
LONGEST = 2**20


@dataclasses.dataclass
class Record:
    """A measurement. What was not measured is None.

    status is "ok", "wrong", "failed" or "skipped", and note says why. errors has each output at the
    reduced size.
    """

    mode: str
    shape: Shape  # of all devices together
    of: Shape  # as asked for
    devices: int
    backend: str
    direction: str
    dtype: str
    device: str
    versions: dict[str, str]
    commit: str | None
    status: str = "ok"
    note: str = ""
    ms: float | None = None
    spread: float | None = None  # (slowest - fastest) / median of the repeats
    tokens_per_second: float | None = None  # B S / time
    efficiency_pct: float | None = None
    peak_mib: float | None = None  # of a device
    error: float | None = None  # the largest of errors
    errors: dict[str, float] = dataclasses.field(default_factory=dict)


class Spread(peers.JaxImplementation):
    """mlstm_chunkwise on several devices, each with its part of one dimension of the arrays."""

    oracle = "exact"

    def __init__(
        self, backend: str, dim: int, devices: Sequence[jax.Device], chunk_size: int | None
    ):
        self.name, self.spec = backend, P(*[None] * dim, AXIS)
        self.mesh = Mesh(np.array(devices), (AXIS,))
        options: dict[str, Any] = dict(chunk_size=chunk_size, backend=backend)
        self.forward = functools.partial(mlstm_chunkwise, **options)
        if dim == 2 and len(devices) > 1:
            parallel = mlstm_chunkwise_sequence_parallel
            self.forward = functools.partial(parallel, axis_name=AXIS, **options)

    def inputs(self, shape: Shape, dtype: str) -> Inputs:
        """Computed on the devices that need them; the same for any number of devices."""
        sharding = NamedSharding(self.mesh, self.spec)
        make = jax.jit(random_inputs, static_argnums=(1, 2), out_shardings=sharding)
        return make(jax.random.key(0), shape, dtype)

    def computation(self, inputs, direction):
        function, args = peers.directed(self.forward, inputs, direction)
        specs = dict(in_specs=self.spec, out_specs=self.spec)
        return jax.shard_map(function, mesh=self.mesh, **specs), args

    def build(self, inputs, direction):
        call = super().build(inputs, direction)
        # On a CPU the collectives of two calls in flight would wait for each other's threads.
        if self.mesh.devices[0].platform == "gpu":
            return call
        return lambda: jax.block_until_ready(call())


class ReducedCase(kernel_benchmark.Case):
    """A small problem, of which all heads are checked."""

    def checked_heads(self, heads: int) -> np.ndarray:
        return np.arange(heads)


def measure(record: Record, impl: Spread, repeats: int) -> None:
    """Fills the record but for its efficiency; does not time a wrong output."""
    shape = MODES[record.mode].reduced(record.of, record.devices)
    case = ReducedCase(shape, record.dtype, gradients=record.direction == "fwbw")
    call = impl.build(impl.inputs(case.shape, record.dtype), record.direction)
    outputs = call()
    record.errors = case.errors(impl, outputs, record.direction)
    record.error = max(record.errors.values())
    if wrong := kernel_benchmark.wrong_outputs(case, record.errors):
        record.status, record.note = "wrong", f"wrong: {wrong}"
        return
    del outputs
    if record.shape != case.shape:
        call = impl.build(impl.inputs(record.shape, record.dtype), record.direction)
    record.peak_mib = impl.peak_memory_bytes(call) / 2**20
    seconds, record.spread = median_and_spread(time_calls(call, impl.synchronise, repeats))
    record.ms = 1e3 * seconds
    record.tokens_per_second = record.shape.B * record.shape.S / seconds


def rate(record: Record) -> float:
    """Steps of heads per device and millisecond."""
    return record.shape.steps / record.devices / record.ms


def measured_records(
    options: flags.FlagValues, shapes: dict[str, Sequence[Shape]], counts: Sequence[int]
) -> Iterator[Record]:
    """A record for each mode, shape and number of devices."""
    devices = jax.local_devices()
    common = dict(backend=options.backend, direction=options.direction, dtype=options.dtype)
    common |= dict(device=devices[0].device_kind, versions=jax_versions(), commit=git_commit())
    for name, of in [(mode, shape) for mode in options.mode for shape in shapes[mode]]:
        base, mode = None, MODES[name]
        for n in counts:
            record = Record(name, mode.whole(of, n), of, n, **common)
            try:
                impl = Spread(options.backend, mode.dim, devices[:n], options.chunk_size)
                measure(record, impl, options.repeats)
            except Exception as error:
                record.status = "skipped" if "RESOURCE_EXHAUSTED" in str(error) else "failed"
                record.note = f"{record.status}: {one_line(error)}"
            if record.ms is not None:
                base = base or record
                record.efficiency_pct = 100 * (rate(record) / rate(base))
            yield record


def default_shapes(gpu: bool, most: int) -> dict[str, Sequence[Shape]]:
    """By mode: 7b-8k for batch and heads, with up to 2**20 steps for the sequence; tiny on CPUs."""
    if not gpu:
        [tiny] = kernel_benchmark.SHAPES["tiny"]
        grown = tiny._replace(S=tiny.S * most)
        return {name: [tiny if mode.grows else grown] for name, mode in MODES.items()}
    [big] = kernel_benchmark.SHAPES["7b-8k"]
    parts = dict.fromkeys((LONGEST // 8, LONGEST // most))
    lengths = {"weak-sequence": parts, "strong-sequence": (LONGEST // 16, LONGEST // 4, LONGEST)}
    return {
        name: [big._replace(B=1, S=S) for S in lengths[name]] if name in lengths else [big]
        for name in MODES
    }


def parse_request(options: flags.FlagValues) -> tuple[dict[str, Sequence[Shape]], Sequence[int]]:
    """Shapes by mode, and numbers of devices, ascending."""
    present = jax.local_devices()
    gpu = present[0].platform == "gpu"
    options.backend = options.backend or ("triton" if gpu else "xla")
    check_gpu("backend", [options.backend], gpu)
    check_names("mode", options.mode, list(MODES))
    try:
        default = [2**k for k in range(len(present).bit_length())]
        counts = sorted({int(n) for n in options.devices}) or default
        check_chunk_size(options.chunk_size)
    except ValueError as error:
        raise RequestError(str(error)) from None
    shapes = default_shapes(gpu, max(counts[-1], 1))
    if options.shape:
        shapes = {mode: list(parse_shapes(options.shape).values()) for mode in MODES}
    for shape in shapes["strong-sequence"] if "strong-sequence" in options.mode else ():
        if odd := [n for n in counts if n > 0 and shape.S % n]:
            steps = f"strong-sequence: {shape.S} steps of shape {shape}"
            raise RequestError(f"{steps} are not a multiple of {odd[0]} devices")
    if not 1 <= counts[0] <= counts[-1] <= len(present):
        raise RequestError(f"there are {len(present)} devices, not {', '.join(map(str, counts))}")
    if not gpu:
        where = "measuring on the CPU, whose devices share its cores"
        print(f"no GPU here: {where}; these are not the speeds of the kernels")
    return shapes, counts


COLUMNS = {
    "mode": ("mode", ""),
    "shape": ("shape", ""),
    "devices": ("devices", "d"),
    "ms": ("ms", ".3f"),
    "spread %": ("spread", ".1%"),
    "tokens/s": ("tokens_per_second", ".4g"),
    "efficiency %": ("efficiency_pct", ".1f"),
    "peak MiB": ("peak_mib", ".1f"),
    "error": ("error", ".1e"),
    "note": ("note", ""),
}


def plot(records: Sequence[Record], path: str) -> None:
    """Time and efficiency against the number of devices, a line for each mode and shape."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, of in dict.fromkeys((record.mode, record.of) for record in records):
        same = [record for record in records if (record.mode, record.of) == (name, of)]
        measured = [record for record in same if record.ms is not None]
        devices = [record.devices for record in measured]
        label = f"{name} {of}" + (" a device" if MODES[name].grows else "")
        left.plot(devices, [record.ms for record in measured], marker="o", label=label)
        right.plot(devices, [record.efficiency_pct for record in measured], marker="o", label=label)
    right.axhline(100, linestyle=":", color="gray")
    left.set(ylabel="ms", yscale="log")
    right.set(ylabel="efficiency, %", ylim=(0, None))
    counts = sorted({record.devices for record in records})
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, map(str, counts))
        axes.set_xlabel("devices")
        axes.grid(which="both", alpha=0.3)
    legend = dict(loc="outside lower center", ncols=2, fontsize="small")
    figure.legend(*left.get_legend_handles_labels(), **legend)
    first = records[0]
    figure.suptitle(f"{first.direction} {first.dtype}, backend {first.backend}, on {first.device}")
    figure.savefig(path, dpi=120)


def define_flags(values: flags.FlagValues) -> None:
    """Not at import: modules that import this one have flags of their own."""
    define = command.Define(values)
    mode = "The dimension that is split, and whether it grows."
    shape = "BxNHxSxDHQKxDHHV or a name of kernel_benchmark.py, for all modes"
    default = "none: 7b-8k and up to 2**20 steps, without a GPU tiny."
    devices = "Numbers of devices; none: 1, 2, 4, ... up to those present."
    direction = "Forward, or forward and backward."
    dtypes = list(reversed(KERNEL_DTYPES))
    chunk_size = "Steps of a chunk; none: the default config's."
    define.list("mode", list(MODES), mode)
    define.list("shape", [], f"{shape}; {default}")
    define.list("devices", [], devices)
    define.enum("backend", None, BACKENDS, "None: triton, without a GPU xla.")
    define.enum("direction", "fwd", ["fwd", "fwbw"], direction)
    define.enum("dtype", "bfloat16", dtypes, "Of q, k, v.")
    define.integer("chunk_size", None, chunk_size)
    define.shared("repeats", "jsonl", "plot")


def run(options: flags.FlagValues) -> int:
    """Measures and prints; returns the exit code."""

    def start() -> Iterator[Record]:
        return measured_records(options, *parse_request(options))

    records, code = reporting.measure("scaling_benchmark", options, start, COLUMNS)
    reporting.plot_measured(plot, records, options.plot)
    return code


if __name__ == "__main__":
    command.main(define_flags, run)
