r"""Times the mLSTM on 1, 2, 4, ... devices of this machine, with a split batch, heads or sequence.

    python benchmarks/scaling_benchmark.py --direction=fwbw --jsonl=scaling.jsonl --plot=scaling.png
    python benchmarks/scaling_benchmark.py --mode=strong-sequence --shape=1x8x1048576x256x512
    JAX_NUM_CPU_DEVICES=8 JAX_PLATFORMS=cpu python benchmarks/scaling_benchmark.py  # tiny shapes

Weak scaling gives every device one --shape: n devices have n times the batch, the heads or the
steps. Strong scaling splits the steps of one --shape over the devices. Split batches and heads need
no communication; a split sequence is mlstm_chunkwise_sequence_parallel. With forget gates of mean
4 the state before a chunk is forgotten within a few chunks, with a mean of 10 hardly ever.

The numbers of devices take turns: each of --repeats rounds times one batch of calls for each.
Efficiency is tokens per second and device, relative to the fewest devices that could run the shape
in the same round; a row has the median of the rounds, and their range.

Before a function is timed, it is checked on the same devices against the float64 recurrence, with
one head and few steps per device. Memory is the peak of a device beyond its inputs.

Exit code 1 when an output is wrong or a run fails for any reason but memory, 2 when the request
makes no sense, 130 after Ctrl-C.
"""

import functools
import itertools
import statistics
from typing import NamedTuple

import command
import jax
import numpy as np
import peers
import reporting
import runner
import shapes
from command import RequestError
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from kernel_benchmark import Case
from peers import Inputs, random_inputs, swap_heads
from runner import UnsupportedError
from shapes import Shape

from mlstm_pallas import mlstm_chunkwise
from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel
from mlstm_pallas.problem.validation import BACKENDS

AXIS = "devices"


class Mode(NamedTuple):
    """Dimension ``dim`` of arrays (B, NH, S, ...) is split over the devices.

    On n devices it is n times as long if it grows. ``shape`` is the default on GPUs.
    """

    dim: int
    grows: bool
    shape: str

    def whole(self, shape, n):
        if not self.grows:
            return shape
        return shape._replace(**{Shape._fields[self.dim]: shape[self.dim] * n})

    def reduced(self, shape, n):
        """The shape that is checked in its place: one head and at most 256 steps per device."""
        steps = shape.S if self.grows else shape.S // n
        return self._replace(grows=True).whole(shape._replace(B=1, NH=1, S=min(steps, 256)), n)


MODES = {
    "weak-batch": Mode(0, True, "7b-8k"),
    "weak-heads": Mode(1, True, "7b-8k"),
    "weak-sequence": Mode(2, True, "1x8x131072x256x512"),
    "strong-sequence": Mode(2, False, "long"),
}


class Spread(peers.JaxImplementation):
    """mlstm_chunkwise on several devices, each with its part of one dimension of the arrays."""

    oracle = staticmethod(peers.exact)

    def __init__(self, backend, dim, devices, layout, mean_f):
        self.name, self.steps_first, self.mean_f = backend, layout == "BTNH", mean_f
        self.spec = P(*[None] * layout.index("BNT"[dim]), AXIS)
        self.mesh = Mesh(np.array(devices), (AXIS,))
        options = dict(backend=backend, layout=layout)
        self.forward = functools.partial(mlstm_chunkwise, **options)
        if dim == 2 and len(devices) > 1:
            parallel = mlstm_chunkwise_sequence_parallel
            self.forward = functools.partial(parallel, axis_name=AXIS, **options)

    def inputs(self, shape, dtype):
        """Computed on the devices that need them; the same for any number of devices."""

        def make():
            inputs = random_inputs(jax.random.key(0), shape, dtype, self.mean_f)
            return Inputs(*swap_heads(*inputs)) if self.steps_first else inputs

        return jax.jit(make, out_shardings=NamedSharding(self.mesh, self.spec))()

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


def prepare(row, of, calls):
    """Adds the call to time, by its number of devices, if the outputs of a small one are right."""
    n, mode, direction = row["devices"], MODES[row["mode"]], row["direction"]
    options = dict(gradients=direction == "fwbw", mean_f=row["mean_f"])
    case = Case(mode.reduced(of, n), row["dtype"], **options)
    case.checked_heads = np.arange  # all of a small problem
    devices = jax.local_devices()[:n]
    impl = Spread(row["impl"], mode.dim, devices, row["layout"], row["mean_f"])
    try:
        reduced = impl.inputs(case.shape, case.dtype)
        call, outputs = runner.first_call(row, impl, reduced, direction)
        errors = case.errors(impl, outputs, direction)
        runner.check(row, errors, case.limits(impl, errors))
        del outputs
        if row["shape"] != case.shape:
            call = impl.build(impl.inputs(row["shape"], case.dtype), direction)
            impl.synchronise(call())
        row["peak_mib"] = impl.peak_memory_bytes(call) / 2**20
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise UnsupportedError(str(error)) from None
        raise
    calls[n] = call


def store_times(rows, times):
    """Stores times and efficiencies, relative to the first row; times: seconds by row and round."""
    rates = []  # steps of heads per device and second
    for row, seconds in zip(rows, times, strict=True):
        shape = row["shape"]
        row["tokens_per_second"] = shape.B * shape.S / runner.store_times(row, seconds)
        rates.append([shape.steps / row["devices"] / x for x in seconds])
        efficiencies = [100 * (x / base) for x, base in zip(rates[-1], rates[0], strict=True)]
        row["efficiency_pct"] = statistics.median(efficiencies)
        row["efficiency_range"] = [min(efficiencies), max(efficiencies)]


def measured_rows(options):
    """A row for each mode, shape, direction, layout, dtype, mean of f and number of devices."""
    present, gpu = len(jax.local_devices()), runner.on_gpu()
    backend = options.backend or ("triton" if gpu else "xla")
    runner.check_gpu([backend], "backend")
    counts = sorted(set(options.devices)) or [2**k for k in range(present.bit_length())]
    if not 1 <= counts[0] <= counts[-1] <= present:
        raise RequestError(f"--devices: there are {present}, not {', '.join(map(str, counts))}")
    cases = [
        (name, of)
        for name in options.mode
        for of in shapes.named(options.shape, MODES[name].shape if gpu else "tiny").values()
    ]
    for name, of in cases:
        if not MODES[name].grows and (odd := [n for n in counts if of.S % n]):
            steps = f"--shape: in {name} {of.S} steps of shape {of}"
            raise RequestError(f"{steps} are not a multiple of {odd[0]} devices")
    product = itertools.product(
        cases, options.direction, options.layout, options.dtype, options.mean_f
    )
    for (name, of), direction, layout, dtype, mean_f in product:
        rows, calls = {}, {}
        for n in counts:
            shape = MODES[name].whole(of, n)
            keys = dict(mode=name, of=of, devices=n, direction=direction)
            keys |= dict(layout=layout, dtype=dtype, mean_f=mean_f)
            rows[n] = runner.new_row(options, str(shape), shape, backend, **keys)
            runner.attempt(rows[n], True, prepare, of, calls)
        if calls:
            turns = list(calls.values()), jax.block_until_ready, options.repeats
            store_times([rows[n] for n in calls], runner.time_in_turns(*turns))
        yield from rows.values()


COLUMNS = reporting.columns(
    """
mode          mode
shape         shape
direction     direction
layout        layout
mean f        mean_f             g
devices       devices            d
ms            ms                 .3f
spread %      spread             .1%
tokens/s      tokens_per_second  .4g
efficiency %  efficiency_pct     .1f
peak MiB      peak_mib           .1f
error         error              .1e
note          note
""",
)


def plot(rows, path):
    """Time and efficiency against the number of devices, by backend, mode and shape."""

    def label(row):
        shape = str(Shape(*row["of"]))
        gates = f"f near {row['mean_f']:g}" if "mean_f" in row else None
        return " ".join(filter(None, (row["impl"], row["mode"], shape, row.get("layout"), gates)))

    keys = "ms", "efficiency_pct"
    reporting.plot(rows, path, label, lambda row: row["devices"], keys=keys, xlabel="devices")


def define_flags(define):
    define.names("mode", list(MODES), MODES, "the dimension that is split, and whether it grows.")
    define.items("devices", [], int, "Numbers of devices; none: 1, 2, 4, ... up to those present.")
    define.names("layout", ["BNTH"], ("BNTH", "BTNH"), "layout of the arrays.")
    define.items("mean_f", ["4", "10"], float, "Means of the forget gates' pre-activations.")
    define.enum("backend", None, BACKENDS, "None: triton, without a GPU xla.")
    define.shared("shape", "direction", "dtype", "repeats", "commit", "from_jsonl", "jsonl", "plot")


run = functools.partial(runner.run, measured_rows, COLUMNS, plot=plot)


if __name__ == "__main__":
    command.main(define_flags, run)
