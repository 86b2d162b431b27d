r"""Times a stage, the forward, or forward and backward of the mLSTM, beside other implementations.

    python benchmarks/kernel_benchmark.py                                               # the three 8k shapes on a GPU, a tiny one without
    python benchmarks/kernel_benchmark.py --shape=7b-8k,8x16x8192x128x128 --direction=fwbw --impl=triton,mlstm_kernels_xl_chunk
    python benchmarks/kernel_benchmark.py --shape=seqlen --jsonl=seqlen.jsonl --plot=seqlen.png
    python benchmarks/kernel_benchmark.py --stage=recurrent_fw_C,parallel_bw_dQKV --impl=triton,xla

Outputs are checked before they are timed: ours against the float64 recurrence, on the first, a middle and the last head; what is wrong is
not timed. TFLOP/s, TB/s and roofline count what has to be computed and moved (roofline.py), whatever an implementation does. Memory is
the peak beyond the inputs. Exit code 1 when an output is wrong or ours fails, 2 when the request makes no sense, 130 after Ctrl-C.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import peers
import roofline
from absl import app, flags
from peers import NORMALISER, Inputs, random_inputs
from roofline import Shape

from mlstm_pallas import gates, mlstm_chunkwise, reference
from mlstm_pallas.backend import target_device_kind
from mlstm_pallas.config import config_for
from mlstm_pallas.problem import BACKENDS, KERNEL_DTYPES, check_chunk_size, make_problem
from mlstm_pallas.stages.chunk_gates import chunk_gates
from mlstm_pallas.stages.parallel_bw_dK import parallel_bw_dK
from mlstm_pallas.stages.parallel_bw_dQ import parallel_bw_dQ
from mlstm_pallas.stages.parallel_bw_dQKV import Gradients, parallel_bw_dQKV
from mlstm_pallas.stages.parallel_bw_dV import parallel_bw_dV
from mlstm_pallas.stages.parallel_fw_H import parallel_fw_H
from mlstm_pallas.stages.recurrent_bw_dC import recurrent_bw_dC
from mlstm_pallas.stages.recurrent_fw_C import recurrent_fw_C

SHAPES = {
    "7b-8k": [Shape(8, 8, 8192, 256, 512)],
    "tfla-8k": [Shape(8, 16, 8192, 128, 256)],
    "b1-8k": [Shape(1, 8, 8192, 256, 512)],
    "small-64": [Shape(8, 16, 8192, 64, 64)],
    "small-128": [Shape(8, 16, 8192, 128, 128)],
    "seqlen": [Shape(2**17 // S, 8, S, 256, 512) for S in (2**n for n in range(9, 18))],
    "batch": [Shape(B, 8, 8192, 256, 512) for B in (1, 2, 4, 8, 16)],
    "tiny": [Shape(1, 2, 128, 32, 64)],
}
# Relative norms of the error. bfloat16 has steps of 2**-8, and its gradients are made of products of rounded products; float32 has room
# for sums of a few thousand terms.
TOLERANCES = {"bfloat16": (5e-3, 2e-2), "float32": (1e-5, 1e-4)}  # of outputs, of gradients
BATCH_SECONDS, MAX_CALLS = 0.05, 100  # calls in flight between two synchronisations

Rates = tuple[float | None, float | None]  # FLOP/s, bytes/s


class RequestError(ValueError):
    """What was asked for does not exist; the message is for the user."""


@dataclasses.dataclass
class Row:
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
    status: str = "ok"
    note: str = ""
    ms: float | None = None
    spread: float | None = None  # (slowest - fastest) / median of the repeats
    tflops: float | None = None
    tbps: float | None = None
    roofline_pct: float | None = None
    peak_mib: float | None = None
    error: float | None = None  # the largest of errors
    errors: dict[str, float] = dataclasses.field(default_factory=dict)  # of each output


# ---------------------------------------------------------------- what is measured


# Of the arrays that a stage takes, those with an axis of S steps: the plain functions have chunks instead.
STEPWISE = ("matQ", "matK", "matV", "matDeltaH", "vecI", "vecF", "rows")


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage by itself.

    Attributes:
      kernel: (*inputs, problem=, config=, interpret=) -> outputs.
      plain: the same in jnp, in the precision of the inputs and in chunks.
      inputs: names in stage_arrays.
      outputs: their names; () for a NamedTuple, which has its own, those of NamedTuples inside included.
      dtype: that decides on the tolerance; None: that of q.
    """

    kernel: Callable[..., Any]
    plain: Callable[..., Any]
    inputs: Sequence[str]
    outputs: Sequence[str] = ()
    dtype: str | None = None

    def run_plain(self, L: int, *inputs: Any) -> Any:
        chunks = functools.partial(jax.tree.map, lambda x: x.reshape(*x.shape[:2], x.shape[2] // L, L, *x.shape[3:]))
        return self.plain(*(chunks(x) if name in STEPWISE else x for name, x in zip(self.inputs, inputs, strict=True)))


def _outputs_kernel(q, *rest, **launch):
    return parallel_fw_H(q, *rest, output_dtype=q.dtype, **NORMALISER, **launch)


def _plain_outputs(q, k, v, stabilisers, C, n):
    num, z = reference.chunk_outputs(q, k, v, stabilisers, C, n, q.shape[-1] ** -0.5)
    return reference.normalise(num, z, stabilisers.vecM, **NORMALISER), z


def _plain_state_gradients(q, *rest):
    return reference.chunk_state_gradients(q, *rest, q.shape[-1] ** -0.5)


def _plain_gradients(q, *rest):
    gradients, sums = reference.chunk_gradients(q, *rest, q.shape[-1] ** -0.5)
    return Gradients(*gradients, sums)


def _dQ_kernel(q, k, v, dh, stabilisers, rows, C, n, dC, dn, **launch):
    return parallel_bw_dQ(q, k, v, dh, stabilisers, rows, C, n, **launch)[:1]


def _dK_kernel(q, k, v, dh, stabilisers, rows, C, n, dC, dn, **launch):
    return parallel_bw_dK(q, k, v, dh, stabilisers, rows, dC, dn, **launch)[:1]


def _dV_kernel(q, k, v, dh, stabilisers, rows, C, n, dC, dn, **launch):
    return (parallel_bw_dV(q, k, dh, stabilisers, rows, dC, **launch),)


QKV, STATES, LAST = ("matQ", "matK", "matV"), ("matC_states", "vecN_states"), ("matDeltaC_last", "vecDeltaN_last")
GRADIENTS = (*QKV, "matDeltaH", "gates", "rows", *STATES, "matDeltaC_states", "vecDeltaN_states")
STAGES = {
    "chunk_gates": Stage(chunk_gates, gates.chunk_gates, ("vecI", "vecF", "scaM_initial"), dtype="float32"),
    "recurrent_fw_C": Stage(
        recurrent_fw_C, reference.chunk_states, ("matK", "matV", "gates", "matC_initial", "vecN_initial"), ("C", "n", "C_last", "n_last")
    ),
    "parallel_fw_H": Stage(_outputs_kernel, _plain_outputs, (*QKV, "gates", *STATES), ("h", "z")),
    "recurrent_bw_dC": Stage(
        recurrent_bw_dC,
        _plain_state_gradients,
        ("matQ", "matDeltaH", "gates", "rows", *LAST, *STATES),
        ("dC", "dn", "dC_initial", "dn_initial", "through"),
    ),
    "parallel_bw_dQKV": Stage(parallel_bw_dQKV, _plain_gradients, GRADIENTS),
    "parallel_bw_dQ": Stage(_dQ_kernel, lambda *x: _plain_gradients(*x)[:1], GRADIENTS, ("dq",)),
    "parallel_bw_dK": Stage(_dK_kernel, lambda *x: _plain_gradients(*x)[1:2], GRADIENTS, ("dk",)),
    "parallel_bw_dV": Stage(_dV_kernel, lambda *x: _plain_gradients(*x)[2:3], GRADIENTS, ("dv",)),
}


@functools.partial(jax.jit, static_argnums=1)
def stage_arrays(x: Inputs, L: int) -> dict[str, Any]:
    """Everything that a stage may take, by its documented name, as the plain functions make it."""
    B, NH, S, K, V = x.shape
    C, n, m = (jnp.zeros((B, NH, *dims), jnp.float32) for dims in ((K, V), (K,), ()))
    found = dict(matQ=x.q, matK=x.k, matV=x.v, vecI=x.i, vecF=x.f, matDeltaH=x.dh, scaM_initial=m)
    found |= dict(matC_initial=C, vecN_initial=n, matDeltaC_last=C, vecDeltaN_last=n)

    def run(stage):
        return STAGES[stage].run_plain(L, *(found[name] for name in STAGES[stage].inputs))

    found["gates"] = run("chunk_gates")
    found["matC_states"], found["vecN_states"], _, _ = run("recurrent_fw_C")
    h, z = (y.reshape(B, NH, S, *y.shape[4:]) for y in run("parallel_fw_H"))
    found["rows"] = gates.row_gradients(jnp.sum(x.dh * h, -1), z, found["gates"].vecM.reshape(z.shape), **NORMALISER)
    found["matDeltaC_states"], found["vecDeltaN_states"], *_ = run("recurrent_bw_dC")
    return found


class Ours(peers.JaxImplementation):
    """A backend of mlstm_chunkwise, or of one of its stages."""

    oracle = "exact"

    def __init__(self, backend: str, shape: Shape, dtype: str, chunk_size: int | None, stage: str):
        self.name, self.stage = backend, stage
        self.filled = config_for(*shape[3:], shape.S, jnp.dtype(dtype), device_kind=target_device_kind(), chunk_size=chunk_size)
        self.config = dataclasses.asdict(self.filled)
        self.problem = make_problem(shape[:4], shape.DHHV, self.filled.L, pad_heads=backend != "xla")

    def phases(self, shape, itemsize, direction):
        if self.stage:
            return (roofline.STAGES[self.stage](shape, self.filled.L, itemsize),)
        return super().phases(shape, itemsize, direction)

    def computation(self, inputs, direction):
        if self.stage:
            stage, p = STAGES[self.stage], self.problem
            if inputs.shape != (p.B, p.NH, p.S, p.DHQK, p.DHHV):
                raise ValueError(f"a stage by itself is not padded: its tiles need S, DHQK, DHHV = {p.S}, {p.DHQK}, {p.DHHV}")
            launch = dict(problem=p, config=self.filled, interpret=self.name == "interpret")
            kernel = functools.partial(stage.run_plain, p.L) if self.name == "xla" else functools.partial(stage.kernel, **launch)
            found = stage_arrays(inputs, p.L)
            return kernel, [found[name] for name in stage.inputs]
        forward = functools.partial(mlstm_chunkwise, chunk_size=self.filled.L, backend=self.name, **NORMALISER)

        def forward_backward(q, k, v, i, f, dh):
            h, vjp = jax.vjp(forward, q, k, v, i, f)
            return h, *vjp(dh)

        return (lambda *args: (forward(*args),), inputs[:5]) if direction == "fwd" else (forward_backward, inputs)


# ---------------------------------------------------------------- what it is checked against


class Case:
    """Inputs of one shape and what should come out of them; made once for all implementations."""

    def __init__(self, shape: Shape, dtype: str, direction: str, stage: str):
        self.shape, self.dtype, self.direction, self.stage = shape, dtype, direction, stage
        heads = shape.B * shape.NH
        self.index = np.unique([0, heads // 2, heads - 1])
        self._expected: dict[Any, Any] = {}

    @functools.cached_property
    def inputs(self) -> Inputs:
        return random_inputs(jax.random.key(0), self.shape, self.dtype)

    def expected(self, impl: peers.Implementation) -> Any:
        """What impl should return, of the heads in index, float64."""
        key = impl.filled.L if isinstance(impl, Ours) and self.stage else impl.oracle
        if key not in self._expected:
            arrays = stage_arrays(self.inputs, key) if self.stage else self.inputs._asdict()
            names = STAGES[self.stage].inputs if self.stage else Inputs._fields[:5]
            function = functools.partial(STAGES[self.stage].run_plain, key) if self.stage else peers.ORACLES[key]

            @jax.jit
            def outputs(arrays):
                args = [arrays[name] for name in names]
                if self.direction == "fwbw":
                    h, vjp = jax.vjp(function, *args)
                    return h, *vjp(arrays["dh"])
                return function(*args) if self.stage else (function(*args),)

            arrays = jax.tree.map(lambda x: x[None], peers.take_heads(arrays, self.index))
            with jax.enable_x64(True):
                self._expected[key] = jax.tree.map(lambda x: np.asarray(x)[0], outputs(arrays))
        return self._expected[key]

    def named(self, outputs: Any) -> dict[str, np.ndarray]:
        """Outputs by name; those in two floats as their sum."""
        if not hasattr(outputs, "_asdict"):
            names = STAGES[self.stage].outputs if self.stage else ("h", "dq", "dk", "dv", "di", "df")
            return dict(zip(names, outputs, strict=False))
        found: dict[str, np.ndarray] = {}
        for name, x in outputs._asdict().items():
            found |= self.named(x) if hasattr(x, "_asdict") else {name: sum(x) if isinstance(x, tuple) else x}
        return found

    def errors(self, impl: peers.Implementation, outputs: Any) -> dict[str, float]:
        """Of each output, the norm of its error over its own."""
        found, expected = self.named(impl.heads(outputs, self.index)), self.named(self.expected(impl))
        # A plain function has chunks where a kernel has steps.
        wrong_by = {name: found[name] - x.reshape(found[name].shape) for name, x in expected.items()}
        return {name: float(np.linalg.norm(x) / max(np.linalg.norm(expected[name]), 1e-30)) for name, x in wrong_by.items()}

    def tolerance(self, name: str) -> float:
        dtype = (STAGES[self.stage].dtype if self.stage else None) or self.dtype
        return TOLERANCES[dtype]["_bw_" in self.stage if self.stage else name != "h"]


# ---------------------------------------------------------------- measuring


def time_calls(call: Callable[[], Any], synchronise: Callable[[Any], None], repeats: int) -> list[float]:
    """Seconds a call, in each of so many batches of calls with one synchronisation."""

    def batch(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            outputs = call()
        synchronise(outputs)
        return (time.perf_counter() - start) / calls

    batch(2)
    calls = min(max(round(BATCH_SECONDS / batch(1)), 1), MAX_CALLS)
    return [batch(calls) for _ in range(repeats)]


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def measure(row: Row, case: Case, impl: peers.Implementation, repeats: int, rates: Rates) -> None:
    """Fills the row; refuses to time a wrong output."""
    call = impl.build(case.inputs, case.direction)
    outputs = call()
    impl.synchronise(outputs)
    row.config, row.versions = dict(impl.config), row.versions | impl.versions()
    if not impl.finite(outputs):
        row.status, row.note = "wrong", "wrong: not finite"
        return
    if impl.oracle:
        row.errors = case.errors(impl, outputs)
        row.error = max(row.errors.values())
        limits = {name: case.tolerance(name) for name in impl.checked or row.errors if name in row.errors}
        wrong = [f"error {row.errors[name]:.1e} in {name}, at most {x:.0e}" for name, x in limits.items() if not row.errors[name] <= x]
        if wrong:
            row.status, row.note = "wrong", "wrong: " + "; ".join(wrong)
            return
    else:
        row.note = "other function"
    del outputs
    row.peak_mib = impl.peak_memory_bytes(call) / 2**20
    times = time_calls(call, impl.synchronise, repeats)
    seconds = statistics.median(times)
    phases = impl.phases(case.shape, jnp.dtype(case.dtype).itemsize, case.direction)
    row.ms, row.spread = 1e3 * seconds, (max(times) - min(times)) / seconds
    row.tflops, row.tbps = (sum(x) / seconds / 1e12 for x in zip(*phases, strict=True))
    if None not in rates:
        row.roofline_pct = 100 * roofline.floor_seconds(phases, *rates) / seconds


def git_commit() -> str | None:
    command = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def measured_rows(options: flags.FlagValues, shapes: dict[str, Shape], impls: Sequence[str], rates: Rates) -> Iterator[Row]:
    """A row for each shape, stage and implementation, as soon as it is measured."""
    common = dict(dtype=options.dtype, device=jax.devices()[0].device_kind, commit=git_commit())
    for (name, shape), stage in itertools.product(shapes.items(), options.stage or [""]):
        direction = ("bwd" if "_bw_" in stage else "fwd") if stage else options.direction
        case = Case(shape, options.dtype, direction, stage)
        for impl in impls:
            versions = dict(jax=jax.__version__, jaxlib=jaxlib.__version__)
            row, ours = Row(name, shape, impl, stage, direction, versions=versions, **common), impl in BACKENDS
            try:
                if stage and not ours:
                    raise ValueError("it has other stages than ours")
                built = Ours(impl, shape, options.dtype, options.chunk_size, stage) if ours else peers.PEERS[impl]()
                measure(row, case, built, options.repeats, rates)
            except Exception as error:
                row.status = "failed" if ours else "skipped"
                row.note = f"{row.status}: {one_line(error)}"
            yield row


def parse_shapes(texts: Sequence[str]) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for text in texts:
        if text in SHAPES:
            shapes |= {text if len(SHAPES[text]) == 1 else str(shape): shape for shape in SHAPES[text]}
        elif re.fullmatch(r"[1-9]\d*(x[1-9]\d*){4}", text):
            shapes[text] = Shape(*map(int, text.split("x")))
        else:
            raise RequestError(f"unknown shape {text!r}, known are {', '.join(SHAPES)} and BxNHxSxDHQKxDHHV")
    return shapes


def parse_request(options: flags.FlagValues) -> tuple[dict[str, Shape], Sequence[str], Rates]:
    """What the flags ask for on this machine: shapes, implementations, and the rates of the roofline."""
    device = jax.devices()[0]
    gpu = device.platform == "gpu"
    impls = options.impl or ["triton" if gpu else "xla"]
    for kind, asked, known in (("impl", impls, [*BACKENDS, *peers.PEERS]), ("stage", options.stage, STAGES)):
        if unknown := [name for name in asked if name not in known]:
            raise RequestError(f"unknown {kind} {', '.join(unknown)}, known are {', '.join(known)}")
    if "triton" in impls and not gpu:
        raise RequestError("impl triton needs a GPU, JAX has none here; xla and interpret run anywhere")
    if options.stage and options["direction"].present:
        raise RequestError("a stage has a direction of its own: give --stage or --direction, not both")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise RequestError("--plot needs matplotlib: pip install 'mlstm_pallas[benchmark]'")
    if options.plot and not os.path.isdir(os.path.dirname(os.path.abspath(options.plot))):
        raise RequestError(f"no folder for {options.plot}")
    try:
        check_chunk_size(options.chunk_size)
    except ValueError as error:
        raise RequestError(str(error)) from None
    shapes = parse_shapes(options.shape or (["7b-8k", "tfla-8k", "b1-8k"] if gpu else ["tiny"]))
    rates = roofline.device_rates(device.device_kind, options.dtype)
    given = (options.peak_tflops, options.peak_tbps)
    rates = tuple(rate if x is None else x * 1e12 for x, rate in zip(given, rates, strict=True))
    if not gpu:
        print(f"no GPU here: measuring {', '.join(impls)} on the CPU, at {', '.join(shapes)}; these are not the speeds of the kernels")
    return shapes, impls, rates


# ---------------------------------------------------------------- what is reported

NUMBERS = {"ms": ("ms", "{:.3f}"), "spread %": ("spread", "{:.1%}"), "TFLOP/s": ("tflops", "{:.3g}"), "TB/s": ("tbps", "{:.3g}")}
NUMBERS |= {"roofline %": ("roofline_pct", "{:.0f}"), "peak MiB": ("peak_mib", "{:.1f}"), "error": ("error", "{:.1e}")}
COLUMNS = ("shape", "impl", "what", *NUMBERS, "note")


def cells(row: Row) -> list[str]:
    values = ((getattr(row, field), text) for field, text in NUMBERS.values())
    numbers = ["-" if value is None else text.format(value).rstrip("%") for value, text in values]
    return [row.name, row.impl, row.stage or row.direction, *numbers, row.note]


def progress(row: Row) -> str:
    *case, note = cells(row)
    numbers = (f"{name} {cell}" for name, cell in zip(NUMBERS, case[3:], strict=True) if cell != "-")
    return f"{' '.join(case[:3])}: {', '.join(filter(None, (*numbers, note)))}"


def table(rows: Sequence[Row]) -> str:
    return aligned([COLUMNS, *map(cells, rows)], "<<<" + ">" * len(NUMBERS) + "<")


def aligned(lines: Sequence[Sequence[str]], aligns: str) -> str:
    """Lines of cells as text, each column to the side that its letter of aligns says."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    pad = "{:{}{}}".format
    return "\n".join("  ".join(map(pad, line, aligns, widths)).rstrip() for line in lines)


def plot(rows: Sequence[Row], path: str) -> None:
    """Time against the sequence length where that is what varies, else against the shapes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    shapes = list(dict.fromkeys(row.shape for row in rows))
    sweep = len(shapes) > 1 and len({shape.S for shape in shapes}) == len(shapes)
    for line in dict.fromkeys((row.impl, row.stage) for row in rows):
        measured = [row for row in rows if (row.impl, row.stage) == line and row.ms is not None]
        x = [row.shape.S if sweep else shapes.index(row.shape) for row in measured]
        axes.plot(x, [row.ms for row in measured], marker="o", label=" ".join(filter(None, line)))
    if sweep:
        axes.set_xscale("log", base=2)
        axes.set_xlabel("sequence length S")
    else:
        names = {row.shape: row.name for row in rows}
        axes.set_xticks(range(len(shapes)), [names[shape] for shape in shapes], rotation=20, ha="right")
    axes.set_yscale("log")
    axes.set_ylabel("ms")
    axes.set_title(", ".join(dict.fromkeys(f"{row.direction} {row.dtype} on {row.device}" for row in rows)))
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def define_flags(values: flags.FlagValues) -> None:
    """Not at import: whoever imports this module has flags of their own."""
    flags.DEFINE_list("shape", [], f"{', '.join(SHAPES)}, or BxNHxSxDHQKxDHHV; none: the 8k ones, without a GPU tiny.", flag_values=values)
    flags.DEFINE_list("impl", [], f"{', '.join(BACKENDS)}, {', '.join(peers.PEERS)}; none: triton, without a GPU xla.", flag_values=values)
    flags.DEFINE_list("stage", [], f"Stages by themselves, not the whole: {', '.join(STAGES)}.", flag_values=values)
    flags.DEFINE_enum("direction", "fwd", ["fwd", "fwbw"], "Forward, or forward and backward.", flag_values=values)
    flags.DEFINE_enum("dtype", "bfloat16", list(reversed(KERNEL_DTYPES)), "Of q, k, v.", flag_values=values)
    flags.DEFINE_integer("chunk_size", None, "Steps of a chunk of ours; none: the default config's.", flag_values=values)
    flags.DEFINE_integer("repeats", 10, "Batches of calls; the median counts.", lower_bound=1, flag_values=values)
    flags.DEFINE_string("jsonl", None, "File to append the rows to, as they come.", flag_values=values)
    flags.DEFINE_string("plot", None, "PNG to write at the end.", flag_values=values)
    flags.DEFINE_float("peak_tflops", None, "The device's rate of matrix products, for the roofline.", lower_bound=1e-9, flag_values=values)
    flags.DEFINE_float("peak_tbps", None, "The device's memory bandwidth, for the roofline.", lower_bound=1e-9, flag_values=values)


def run(options: flags.FlagValues) -> int:
    """Measures and prints what the flags ask for; returns the exit code."""
    rows, code = [], 0
    with contextlib.ExitStack() as stack:
        try:
            shapes, impls, rates = parse_request(options)
            jsonl = stack.enter_context(open(options.jsonl, "a")) if options.jsonl else None
        except (RequestError, OSError) as error:
            print(f"kernel_benchmark: {error}", file=sys.stderr)
            return 2
        try:
            for row in measured_rows(options, shapes, impls, rates):
                rows.append(row)
                print(progress(row), flush=True)
                if jsonl:
                    print(json.dumps(dataclasses.asdict(row), default=str), file=jsonl, flush=True)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = 130
    print(f"\n{table(rows)}")
    if options.plot and any(row.ms for row in rows):
        plot(rows, options.plot)
    elif options.plot:
        print(f"nothing was measured: {options.plot} is not written")
    return code or int(any(row.status in ("wrong", "failed") for row in rows))


if __name__ == "__main__":
    # Peers in torch need memory on the same device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    define_flags(flags.FLAGS)
    app.run(lambda _: run(flags.FLAGS))
