r"""Times an mLSTM layer like that of xLSTM-7B.

It runs with mlstm_pallas in both layouts, with other packages, and without its mLSTM.

    python benchmarks/layer_benchmark.py                     # 7b-8k on a GPU, a tiny shape without
    python benchmarks/layer_benchmark.py --impl=mlstm_pallas_BTNH,without_mlstm,products
    python benchmarks/layer_benchmark.py --from_jsonl=layer.jsonl,peers.jsonl --plot=layer.png

The layer takes and returns (B, S, E), E = NH * DHHV: projections to q, k, v, input and forget gates
15 tanh((x W + b) / 15), mLSTM, norm of each head with a scale, times the sigmoid of an output gate,
output projection. Parameters and projections are bfloat16, the input and forget gates float32.

    mlstm_pallas_BNTH        q, k, v, i, f are transposed to (B, NH, S, ...), h is transposed back
    mlstm_pallas_BTNH        the arrays are passed as the projections return them
    mlstm_pallas_mosaic_gpu  the same on backend "mosaic_gpu", whatever --backend is
    without_mlstm            h = v; all projections, the norm and the output gate remain
    products                 without norm and output gate too: the matrix products alone
    torch_without_mlstm, mlstm_kernels_*, fla_simple_gla
                             an equal layer in torch, with the functions of peers.py

Each program is checked before it is timed, against the same layer in float32 on backend "xla" in
layout BNTH: y and the gradient of x in the first batch entry, and the gradients of the parameters
for a dy that is 0 in all other entries. The layout that runs second is also compared with the
first. A wrong program is not timed. Memory is the peak beyond inputs and parameters.

Beside the products and the mLSTM a layer moves at least these bytes, T = B * S (elementwise_bytes):

    forward   norm and output gate: read h and the gate's projection,
              write the product                                                  3 T E 2
              gates: read the projection in bfloat16, write float32              2 T NH (2 + 4)
    backward  norm and output gate: read the same two and a gradient,
              write two gradients                                                5 T E 2
              gates: read a float32 gradient and the projection,
              write a bfloat16 gradient                                          2 T NH (4 + 2 + 2)

The floor assumes one kernel for norm, scale and output gate in each direction, casts fused into it,
and products that add the gradients of x in their epilogues. Exit code 1 when an output is wrong or
mlstm_pallas fails, 2 when the request makes no sense, 130 after Ctrl-C.
"""

import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import command
import jax
import jax.numpy as jnp
import peers
import reporting
import roofline
from absl import flags
from command import check_gpu, check_names, git_commit, one_line, say_no_gpu
from kernel_benchmark import (
    TOLERANCES,
    jax_versions,
    median_and_spread,
    parse_shapes,
    time_calls,
)
from reporting import DIRECTIONS
from roofline import Shape

from mlstm_pallas import mlstm_chunkwise
from mlstm_pallas.gpu import gpu_of
from mlstm_pallas.validation import BACKENDS

DTYPE = "bfloat16"
NORM_EPS, GATE_CAP = 1e-6, 15.0
LAYOUTS = {"mlstm_pallas_BNTH": "BNTH", "mlstm_pallas_BTNH": "BTNH"}
JAX_IMPLS = (*LAYOUTS, "without_mlstm", "products")
MOSAIC_GPU = "mlstm_pallas_mosaic_gpu"  # on Hopper
OURS = (*JAX_IMPLS, MOSAIC_GPU)
MLSTM_KERNELS = ("mlstm_kernels_limit_chunk", "mlstm_kernels_xl_chunk")
TORCH_IMPLS = ("torch_without_mlstm", *MLSTM_KERNELS, "fla_simple_gla")
IMPLS = (*OURS, *TORCH_IMPLS)
# The implementation whose layer in float32 has the expected outputs, where it is another one.
_LIKE_BNTH = ("mlstm_pallas_BTNH", MOSAIC_GPU, *MLSTM_KERNELS)
REFERENCES = dict.fromkeys(_LIKE_BNTH, "mlstm_pallas_BNTH")
REFERENCES |= {"torch_without_mlstm": "without_mlstm"}
# Gradients that are not compared: those that `first` invents, and the gate gradients of
# mlstm_kernels (peers.MlstmKernels.checked).
GATES = ("input_gate", "forget_gate")
INVENTED = ("query", "key", *GATES)
NOT_COMPARED = {
    "without_mlstm": INVENTED,
    "torch_without_mlstm": INVENTED,
    "products": (*INVENTED, "output_gate"),
} | dict.fromkeys(MLSTM_KERNELS, GATES)
# Rounding to bfloat16 is an error of 2**-8 / 3**0.5 relative to the power of two below, 1.7e-3 of
# the norm of an array. The layer rounds up to 11 arrays on the way to y outside of the mLSTM: q, k,
# v, the projections of three gates, y, and four between h and the last product. The errors are
# independent of each other and of the mLSTM's.
OUTPUT_TOLERANCE = (TOLERANCES[DTYPE][0] ** 2 + 11 * 1.7e-3**2) ** 0.5  # 7.5e-3
GRADIENT_TOLERANCE = TOLERANCES[DTYPE][1]


class Params(NamedTuple):
    """Parameters of the layer, JAX or torch arrays."""

    query: Any  # (E, NH * DHQK)
    key: Any
    value: Any  # (E, E)
    input_gate: Any  # (E, NH)
    input_bias: Any  # (NH,)
    forget_gate: Any
    forget_bias: Any
    norm_scale: Any  # (E,)
    output_gate: Any  # (E, E)
    output: Any


class Inputs(NamedTuple):
    params: Params
    x: Any  # (B, S, E)
    dy: Any


@functools.partial(jax.jit, static_argnums=0)
def random_inputs(shape: Shape) -> Inputs:
    """The forget gates span short to long memory, as at the start of a training."""
    B, NH, S, K, V = shape
    E = NH * V
    gate, square, activation = ((E, NH), (NH,)), (E, E), (B, S, E)
    projections = (E, NH * K), (E, NH * K), square
    dims = (*projections, *gate, *gate, (E,), square, square, activation, activation)
    keys = jax.random.split(jax.random.key(0), len(dims))
    *params, x, dy = (jax.random.normal(key, dim) for key, dim in zip(keys, dims, strict=True))
    p = Params(*(y * E**-0.5 for y in params))
    p = p._replace(forget_bias=jnp.linspace(3.0, 6.0, NH), norm_scale=1.0 + p.norm_scale)
    return jax.tree.map(lambda y: y.astype(DTYPE), Inputs(p, x, dy))


def product_flops(shape: Shape, direction: str) -> int:
    """FLOPs of the matrix products outside of the mLSTM: one per matrix forward, two backward."""
    E = shape.NH * shape.DHHV
    columns = 2 * shape.NH * shape.DHQK + 3 * E + 2 * shape.NH
    return 2 * shape.B * shape.S * E * columns * {"fwd": 1, "fwbw": 3}[direction]


def elementwise_bytes(shape: Shape, direction: str) -> int:
    """The least traffic beside products and mLSTM; the terms are in the docstring of the module."""
    wide, gates = 2 * shape.steps * shape.DHHV, 2 * shape.steps
    forward, backward = 3 * wide + 6 * gates, 5 * wide + 8 * gates
    return {"fwd": forward, "fwbw": forward + backward}[direction]


# ---------------------------------------------------------------- the layer in JAX


@jax.custom_vjp
def first(x: jax.Array, *others: jax.Array) -> jax.Array:
    """x. The cotangents of the others are the others, which costs nothing.

    Their projections are differentiated all the same.
    """
    return x


first.defvjp(lambda x, *others: (x, others), lambda others, dx: (dx, *others))


def mlstm(impl: str, backend: str, q, k, v, i, f) -> jax.Array:
    options = dict(layout="BTNH", backend=backend)
    if impl == "fla_simple_gla":
        # Its function has no normaliser, and here an input gate of sigmoid(100) = 1.
        i = jnp.full_like(i, 100.0)
        gate = dict(input_gate="sigmoid", normalize=False)
        return mlstm_chunkwise(q, k, v, i, f, **gate, **options)
    if impl == MOSAIC_GPU or LAYOUTS[impl] == "BTNH":
        return mlstm_chunkwise(q, k, v, i, f, **options)
    q, k, v, i, f = (jnp.swapaxes(y, 1, 2) for y in (q, k, v, i, f))
    return jnp.swapaxes(mlstm_chunkwise(q, k, v, i, f, backend=backend), 1, 2)


def layer(
    impl: str, norm: str, backend: str, p: Params, x: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """y, and the projections that y does not depend on."""

    def heads(w):
        return (x @ w).reshape(*x.shape[:2], p.input_bias.size, -1)

    def gate(w, b):
        return GATE_CAP * jnp.tanh(((x @ w).astype(jnp.float32) + b.astype(jnp.float32)) / GATE_CAP)

    q, k, v = heads(p.query), heads(p.key), heads(p.value)
    i, f = gate(p.input_gate, p.input_bias), gate(p.forget_gate, p.forget_bias)
    o = x @ p.output_gate
    if impl == "products":
        return first(v, q, k, i, f, o).reshape(x.shape) @ p.output, (q, k, i, f, o)
    unused = (q, k, i, f) if impl == "without_mlstm" else ()
    h = first(v, *unused) if unused else mlstm(impl, backend, q, k, v, i, f)
    h = h.astype(jnp.float32)
    if norm == "layer":
        h -= jnp.mean(h, -1, keepdims=True)
    h *= jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + NORM_EPS)
    h = h.reshape(x.shape) * p.norm_scale.astype(jnp.float32)
    h *= jax.nn.sigmoid(o.astype(jnp.float32))
    return h.astype(x.dtype) @ p.output, unused


def outputs_of(impl: str, norm: str, backend: str, direction: str) -> Callable[[Inputs], Any]:
    """inputs -> (y, unused projections), or (y, gradients of the parameters, gradient of x)."""
    of_params_and_x = functools.partial(layer, impl, norm, backend)

    def forward_backward(inputs):
        y, vjp, _ = jax.vjp(of_params_and_x, inputs.params, inputs.x, has_aux=True)
        return y, *vjp(inputs.dy)

    def forward(inputs):
        return of_params_and_x(inputs.params, inputs.x)

    return forward if direction == "fwd" else forward_backward


class JaxLayer:
    note = ""

    def __init__(self, impl: str, norm: str, backend: str):
        self.reference = REFERENCES.get(impl, impl)
        self.function = functools.partial(outputs_of, impl, norm, backend)

    def versions(self) -> dict[str, str]:
        return {}

    def build(self, inputs: Inputs, direction: str) -> Callable[[jax.Array], Any]:
        """A function of dy."""
        self.compiled = jax.jit(self.function(direction)).lower(inputs).compile()
        return lambda dy: self.compiled(inputs._replace(dy=dy))

    def array(self, output: Any) -> jax.Array:
        return output

    def synchronise(self, outputs: Any) -> None:
        jax.block_until_ready(outputs)

    def peak_memory_bytes(self, call: Callable[[], Any]) -> int:
        return peers.compiled_peak_bytes(self.compiled)


# ---------------------------------------------------------------- the layer in torch


class TorchWithout(peers.TorchPeer):
    """The counterpart of `first`."""

    name, oracle, modules = "torch_without_mlstm", "", ()

    def forward(self, q, k, v, i, f):
        class First(self.torch.autograd.Function):
            @staticmethod
            def forward(context, x, *others):
                context.save_for_backward(*others)
                return x.view_as(x)

            @staticmethod
            def backward(context, dx):
                return dx, *context.saved_tensors

        return First.apply(v, q, k, i, f)


class TorchLayer:
    """The arrays are those of JAX, not copies."""

    def __init__(self, impl: str, norm: str, compiled: bool):
        # Raises where the package or the GPU is missing.
        self.peer = peers.PEERS.get(impl, TorchWithout)()
        self.reference = REFERENCES.get(impl, impl)
        self.norm, self.note = norm, "other function" if impl == "fla_simple_gla" else ""
        # torch stops compiling a function after eight variants of it.
        self.peer.torch.compiler.reset()
        self.finish = self.peer.torch.compile(self.after_mlstm) if compiled else self.after_mlstm
        self.versions, self.synchronise = self.peer.versions, self.peer.synchronise
        self.peak_memory_bytes = self.peer.peak_memory_bytes

    def mlstm(self, q, k, v, i, f):
        if isinstance(self.peer, peers.MlstmKernels):
            B, S, NH, K = q.shape
            shape = Shape(B, NH, S, K, v.shape[-1])
            peers.check_state_size(shape, self.peer.config["chunk_size"])
            return self.peer.forward(*(y.transpose(1, 2) for y in (q, k, v, i, f))).transpose(1, 2)
        if isinstance(self.peer, peers.SimpleGLA):
            return self.peer.forward(q, k, v, self.peer.torch.nn.functional.logsigmoid(f))
        return self.peer.forward(q, k, v, i, f)

    def after_mlstm(self, p, x, h):
        functional = self.peer.torch.nn.functional
        norm = functional.rms_norm if self.norm == "rms" else functional.layer_norm
        h = norm(h, h.shape[-1:], eps=NORM_EPS).flatten(2)
        return (h * p.norm_scale * (x @ p.output_gate).sigmoid()) @ p.output

    def layer(self, p, x):
        def heads(w):
            return (x @ w).unflatten(-1, (p.input_bias.numel(), -1))

        def gate(w, b):
            return GATE_CAP * (((x @ w).float() + b.float()) / GATE_CAP).tanh()

        gates = gate(p.input_gate, p.input_bias), gate(p.forget_gate, p.forget_bias)
        return self.finish(p, x, self.mlstm(heads(p.query), heads(p.key), heads(p.value), *gates))

    def build(self, inputs, direction):
        torch = self.peer.torch
        torch.cuda.empty_cache()
        p, x, _ = jax.tree.map(torch.from_dlpack, inputs)

        def forward(_):
            with torch.no_grad():
                return self.layer(p, x), ()

        def forward_backward(dy):
            y = self.layer(p, x)
            options = dict(allow_unused=True, materialize_grads=True)
            *dp, dx = torch.autograd.grad(y, (*p, x), torch.from_dlpack(dy), **options)
            return y.detach(), Params(*dp), dx

        for y in (*p, x):
            y.requires_grad_(direction == "fwbw")
        return forward if direction == "fwd" else forward_backward

    def array(self, output):
        return jnp.from_dlpack(output.contiguous())


# ---------------------------------------------------------------- checking and measuring


class Case:
    """Inputs, and the expected outputs of their first batch entry."""

    def __init__(self, shape: Shape, norm: str, directions: Sequence[str]):
        self.inputs = jax.block_until_ready(random_inputs(shape))
        self.masked_dy = jax.block_until_ready(self.inputs.dy.at[1:].set(0))
        self.norm = norm
        self.direction = max(directions, key=len)  # "fwbw" has all outputs of "fwd"
        self.of_first_layout: dict[str, dict[str, jax.Array]] = {}  # by direction
        self.expected = functools.cache(self._expected)

    def _expected(self, impl: str) -> dict[str, jax.Array]:
        p, x, dy = self.inputs
        inputs = jax.tree.map(lambda y: y.astype(jnp.float32), Inputs(p, x[:1], dy[:1]))
        function = outputs_of(impl, self.norm, "xla", self.direction)
        with jax.default_matmul_precision("highest"):
            return named(jax.jit(function)(inputs))


def named(outputs: Any, array: Callable[[Any], jax.Array] = lambda y: y) -> dict[str, jax.Array]:
    """y and the gradients by name in float32, of y and x those of the first batch entry.

    y and the gradient of x are those of the first batch entry. A gate's matrix and bias are one
    array. The gradient of the input gate's bias alone has no digits to compare: a shift of all
    input gates scales C and n alike, which the norm divides out.
    """
    arrays = {"y": outputs[0][:1]}
    if backward := len(outputs) == 3:
        _, dp, dx = outputs
        arrays |= dp._asdict() | {"x": dx[:1]}
    arrays = {name: array(y).astype(jnp.float32) for name, y in arrays.items()}
    for gate in GATES if backward else ():
        arrays[gate] = jnp.vstack([arrays[gate], arrays.pop(gate.replace("gate", "bias"))])
    return arrays


def relative_errors(
    outputs: dict[str, jax.Array], expected: dict[str, jax.Array], skipped: Sequence[str] = ()
) -> dict[str, float]:
    def error(x, y):
        return float(jnp.linalg.norm(x - y) / jnp.maximum(jnp.linalg.norm(y), 1e-30))

    return {name: error(x, expected[name]) for name, x in outputs.items() if name not in skipped}


def wrong_outputs(errors: dict[str, float]) -> str:
    """The outputs beyond their tolerance; "" when there are none."""

    def limit(name):
        return OUTPUT_TOLERANCE if name.startswith("y") else GRADIENT_TOLERANCE

    # A NaN is neither more nor less.
    wrong = [(name, x) for name, x in errors.items() if not x <= limit(name)]
    return ", ".join(f"{name} {x:.1e} > {limit(name):.1e}" for name, x in wrong)


@dataclasses.dataclass
class Record:
    """A measurement. What was not measured is None.

    status is "ok", "wrong", "failed" or "skipped", and note says why. errors has y and each
    gradient, and with "y, layouts" and the like the differences from the other layout.
    """

    name: str
    shape: Shape
    impl: str
    direction: str
    norm: str
    backend: str
    device: str
    versions: dict[str, str]
    commit: str | None
    product_flops: int
    elementwise_bytes: int
    product_floor_ms: float | None  # at the device's rates
    elementwise_floor_ms: float | None
    dtype: str = DTYPE
    status: str = "ok"
    note: str = ""
    ms: float | None = None
    spread: float | None = None  # (slowest - fastest) / median of the repeats
    product_pct: float | None = None  # product_floor_ms / ms
    tokens_per_s: float | None = None
    peak_mib: float | None = None
    first_call_s: float | None = None
    error: float | None = None  # the largest of errors
    errors: dict[str, float] = dataclasses.field(default_factory=dict)


def measure(record: Record, case: Case, built: JaxLayer | TorchLayer, repeats: int) -> None:
    """Fills the record; does not time a wrong output."""
    record.versions |= built.versions()
    start = time.perf_counter()
    run = built.build(case.inputs, record.direction)
    outputs = run(case.masked_dy)
    built.synchronise(outputs)
    record.first_call_s = time.perf_counter() - start
    arrays = named(outputs, built.array)
    del outputs
    skipped = NOT_COMPARED.get(record.impl, ())
    record.errors = relative_errors(arrays, case.expected(built.reference), skipped)
    if record.impl in LAYOUTS:
        of_first_layout = case.of_first_layout.setdefault(record.direction, arrays)
        if of_first_layout is not arrays:
            differences = relative_errors(arrays, of_first_layout)
            record.errors |= {f"{name}, layouts": x for name, x in differences.items()}
    record.error = max(record.errors.values())
    if wrong := wrong_outputs(record.errors):
        record.status, record.note = "wrong", f"wrong: {wrong}"
        return
    del arrays
    record.note = built.note
    record.peak_mib = built.peak_memory_bytes(lambda: run(case.inputs.dy)) / 2**20
    times = time_calls(lambda: run(case.inputs.dy), built.synchronise, repeats)
    seconds, record.spread = median_and_spread(times)
    record.ms = 1e3 * seconds
    record.tokens_per_s = record.shape.B * record.shape.S / seconds
    record.product_pct = record.product_floor_ms and 100 * record.product_floor_ms / record.ms


def measured_records(
    options: flags.FlagValues, shapes: dict[str, Shape], impls: Sequence[str], backend: str
) -> Iterator[Record]:
    """A record for each shape, direction and implementation."""
    device, commit = jax.devices()[0].device_kind, options.commit or git_commit()
    rates = roofline.device_rates(device, DTYPE)
    for name, shape in shapes.items():
        case = Case(shape, options.norm, options.direction)
        for direction, impl in itertools.product(options.direction, impls):
            ours = impl in OURS
            need = product_flops(shape, direction), elementwise_bytes(shape, direction)
            floors = (rate and 1e3 * x / rate for x, rate in zip(need, rates, strict=True))
            backend_of = "mosaic_gpu" if impl == MOSAIC_GPU else backend if ours else "torch"
            common = options.norm, backend_of, device, jax_versions(), commit
            record = Record(name, shape, impl, direction, *common, *need, *floors)
            try:
                if ours:
                    built: JaxLayer | TorchLayer = JaxLayer(impl, options.norm, backend_of)
                else:
                    built = TorchLayer(impl, options.norm, options.torch_compile)
                measure(record, case, built, options.repeats)
            except Exception as error:
                record.status = "failed" if ours else "skipped"
                record.note = f"{record.status}: {one_line(error)}"
            yield record


# ---------------------------------------------------------------- reporting


COLUMNS = {
    "shape": ("name", ""),
    "norm": ("norm", ""),
    "direction": ("direction", ""),
    "impl": ("impl", ""),
    "ms": ("ms", ".3f"),
    "spread %": ("spread", ".1%"),
    "products %": ("product_pct", ".0f"),
    "tokens/s": ("tokens_per_s", ".3g"),
    "peak MiB": ("peak_mib", ".1f"),
    "first call s": ("first_call_s", ".1f"),
    "error": ("error", ".1e"),
    "note": ("note", ""),
}


def panels(records: Sequence[Record]) -> dict[str, dict[str, Record]]:
    """The records of each shape, norm and direction by implementation.

    Where a case has several records the last one counts.
    """
    by_case: dict[str, dict[str, Record]] = {}
    for record in records:
        case = f"{record.name}, {record.norm} norm, {DIRECTIONS[record.direction]}"
        by_case.setdefault(case, {})[record.impl] = record
    return by_case


def remainder(title: str, here: dict[str, Record]) -> str:
    """What the layer spends beside products and mLSTM: the floor, and what was measured."""
    record = next(iter(here.values()))

    def ms(x: float | None) -> str:
        return "-" if x is None else f"{x:.3f} ms"

    def less(x: float | None) -> str:
        return ms(None if None in (without, x) else without - x)

    names = "without_mlstm", "products"
    without, products = (here[name].ms if name in here else None for name in names)
    floor = record.product_floor_ms
    rest = f"{record.elementwise_bytes:.3e} bytes, floor {ms(record.elementwise_floor_ms)}"
    return (
        f"{title}: products {record.product_flops:.3e} FLOP, floor {ms(floor)}; the rest {rest}; "
        f"without_mlstm less products {less(products)}, less the floor of products {less(floor)}"
    )


def plot(records: Sequence[Record], path: str) -> None:
    """Bars of each implementation: the layer without its mLSTM, and what the mLSTM adds."""
    from matplotlib.figure import Figure

    measured = panels([record for record in records if record.ms is not None])
    size = 2.0 + 4.5 * len(measured), 1.8 + 0.35 * max(map(len, measured.values()))
    figure = Figure(figsize=size, layout="constrained")
    all_axes = figure.subplots(1, len(measured), squeeze=False)[0]
    for axes, (title, here) in zip(all_axes, measured.items(), strict=True):
        for impl, record in here.items():
            without = here.get("without_mlstm" if impl in OURS else "torch_without_mlstm", record)
            base = min(without.ms, record.ms)
            axes.barh(impl, base, color="tab:grey")
            bars = axes.barh(impl, record.ms - base, left=base, color="tab:blue")
            axes.bar_label(bars, [f"{record.ms:.3g}"], padding=2, fontsize=8)
        if record.product_floor_ms is not None:
            axes.axvline(record.product_floor_ms, color="black", linestyle="--", linewidth=1)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel("ms")
        axes.set_title(title, fontsize=10)
    devices = ", ".join(dict.fromkeys(record.device for record in records))
    legend = "blue: mLSTM; dashed: floor of the products"
    figure.suptitle(f"{DTYPE} on {devices}; {legend}", fontsize=10)
    figure.savefig(path, dpi=130)


# ---------------------------------------------------------------- the command


def parse_request(options: flags.FlagValues) -> tuple[dict[str, Shape], Sequence[str], str]:
    """Shapes, implementations, and the backend of mlstm_pallas."""
    device = jax.devices()[0]
    gpu = device.platform == "gpu"
    hopper = gpu_of(device).hopper
    impls = options.impl or [name for name in IMPLS if hopper or name != MOSAIC_GPU]
    backend = options.backend or ("triton" if gpu else "xla")
    check_names("impl", impls, IMPLS)
    check_names("direction", options.direction, ["fwd", "fwbw"])
    check_gpu("impl", impls, gpu, [MOSAIC_GPU])
    check_gpu("backend", [backend], gpu)
    shapes = parse_shapes(options.shape or (["7b-8k"] if gpu else ["2x2x64x16x32"]))
    if not gpu:
        say_no_gpu(f"backend {backend}", list(shapes))
    return shapes, impls, backend


def define_flags(values: flags.FlagValues) -> None:
    """Not at import: modules that import this one have flags of their own."""
    define = command.Define(values)
    default = "none: 7b-8k, without a GPU 2x2x64x16x32."
    shape = f"As in kernel_benchmark.py, E = NH * DHHV; {default}"
    direction = "fwd: forward; fwbw: with the gradients of all parameters and x."
    backend = "Of mlstm_pallas; none: triton, without a GPU xla."
    define.list("shape", [], shape)
    define.list("impl", [], f"{', '.join(IMPLS)}; none: all that the device runs.")
    define.list("direction", ["fwd", "fwbw"], direction)
    define.enum("norm", "rms", ["rms", "layer"], "Norm of each head.")
    define.enum("backend", None, list(BACKENDS), backend)
    define.bool("torch_compile", True, "Compile what follows the mLSTM in torch.")
    define.shared("repeats", "commit", "from_jsonl", "jsonl", "plot")


def run(options: flags.FlagValues) -> int:
    """Measures and prints; returns the exit code."""

    def start() -> Iterator[Record]:
        return measured_records(options, *parse_request(options))

    records, code = reporting.measure("layer_benchmark", options, start, COLUMNS, Record)
    for title, here in panels(records).items():
        print(f"\n{remainder(title, here)}")
    reporting.plot_measured(plot, records, options.plot)
    return code


if __name__ == "__main__":
    # Peers in torch need memory on the same device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    command.main(define_flags, run)
