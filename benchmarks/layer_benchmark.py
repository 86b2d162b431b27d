r"""Times an mLSTM layer like that of xLSTM-7B.

It runs with mlstm_pallas, with mlstm_kernels, and without its mLSTM.

    python benchmarks/layer_benchmark.py                     # 7b-8k on a GPU, a tiny shape without
    python benchmarks/layer_benchmark.py --impl=triton,without_mlstm,products --layout=BNTH,BTNH
    python benchmarks/layer_benchmark.py --from_jsonl=layer.jsonl,peers.jsonl --plot=layer.png

The layer takes and returns (B, S, E), E = NH * DHV: projections to q, k, v, input and forget gates
15 tanh((x W + b) / 15), mLSTM, RMS norm of each head with a scale, times the sigmoid of an output
gate, output projection. Parameters and projections are bfloat16, input and forget gates float32.

    triton, mosaic_gpu, ...    mlstm_pallas on this backend. It gets the arrays as the projections
                               return them; with --layout=BNTH the layer transposes q, k, v, i, f to
                               (B, NH, S, ...), and h back
    without_mlstm              h = v; all projections, the norm and the output gate remain
    products                   without norm and output gate too: the matrix products alone
    mlstm_kernels_limit_chunk  mlstm_kernels through jax-triton

Each program is checked before it is timed, against the same layer in float32 on backend "xla" in
layout BNTH: y and the gradient of x in the first batch entry, and the gradients of the parameters
for a dy that is 0 in all other entries. A wrong program is not timed. Memory is the peak beyond
inputs and parameters.

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

import functools
import itertools
from typing import Any, NamedTuple

import command
import jax
import jax.numpy as jnp
import numpy as np
import peers
import reporting
import roofline
import runner
import shapes
from kernel_benchmark import TOLERANCES
from peers import swap_heads
from reporting import DIRECTIONS

from mlstm_pallas import mlstm_chunkwise
from mlstm_pallas.problem.gpu import gpu_of
from mlstm_pallas.problem.validation import BACKENDS

DTYPE = "bfloat16"
NORM_EPS, GATE_CAP = 1e-6, 15.0
WITHOUT = "without_mlstm", "products"
PEER = "mlstm_kernels_limit_chunk"
# Gradients that are not compared: those that `first` invents, and the gate gradients of
# mlstm_kernels (peers.MlstmKernels.checked).
GATES = ("input_gate", "forget_gate")
INVENTED = ("query", "key", *GATES)
NOT_COMPARED = {
    "without_mlstm": INVENTED,
    "products": (*INVENTED, "output_gate"),
    PEER: GATES,
}
# Rounding to bfloat16 is an error of 2**-8 / 3**0.5 relative to the power of two below, 1.7e-3 of
# the norm of an array. The layer rounds up to 11 arrays on the way to y outside of the mLSTM: q, k,
# v, the projections of three gates, y, and four between h and the last product. The errors are
# independent of each other and of the mLSTM's.
OUTPUT_TOLERANCE = (TOLERANCES[DTYPE][0] ** 2 + 11 * 1.7e-3**2) ** 0.5  # 7.5e-3
GRADIENT_TOLERANCE = TOLERANCES[DTYPE][1]


class Params(NamedTuple):
    """Parameters of the layer."""

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
def random_inputs(shape):
    """The forget gates span short to long memory, as at the start of a training."""
    B, NH, S, K, V = shape
    E = NH * V
    gate, square, activation = ((E, NH), (NH,)), (E, E), (B, S, E)
    projections = (E, NH * K), (E, NH * K), square
    dims = (*projections, *gate, *gate, (E,), square, square, activation, activation)
    *params, x, dy = peers.normals(jax.random.key(0), *dims)
    p = Params(*(y * E**-0.5 for y in params))
    p = p._replace(forget_bias=jnp.linspace(3.0, 6.0, NH), norm_scale=1.0 + p.norm_scale)
    return jax.tree.map(lambda y: y.astype(DTYPE), Inputs(p, x, dy))


def product_flops(shape, direction):
    """FLOPs of the matrix products outside of the mLSTM: one per matrix forward, two backward."""
    E = shape.NH * shape.DHV
    columns = 2 * shape.NH * shape.DHQK + 3 * E + 2 * shape.NH
    return 2 * shape.B * shape.S * E * columns * {"fwd": 1, "fwbw": 3}[direction]


def elementwise_bytes(shape, direction):
    """The least traffic beside products and mLSTM; the terms are in the docstring of the module."""
    wide, gates = 2 * shape.steps * shape.DHV, 2 * shape.steps
    forward, backward = 3 * wide + 6 * gates, 5 * wide + 8 * gates
    return {"fwd": forward, "fwbw": forward + backward}[direction]


# ---------------------------------------------------------------- the layer


@jax.custom_vjp
def first(x, *others):
    """x. The cotangents of the others are the others, which costs nothing.

    Their projections are differentiated all the same.
    """
    return x


first.defvjp(lambda x, *others: (x, others), lambda others, dx: (dx, *others))


def mlstm(impl, layout, *inputs):
    """h (B, S, NH, DHV) of q, k, v, i, f, all (B, S, NH, ...)."""
    if impl == PEER:
        return peers.limit_chunk(*inputs)
    if layout == "BTNH":
        return mlstm_chunkwise(*inputs, layout=layout, backend=impl)
    return swap_heads(mlstm_chunkwise(*swap_heads(*inputs), backend=impl))[0]


def layer(impl, layout, p, x):
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
    h = first(v, *unused) if unused else mlstm(impl, layout, q, k, v, i, f)
    h = h.astype(jnp.float32)
    h *= jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + NORM_EPS)
    h = h.reshape(x.shape) * p.norm_scale.astype(jnp.float32)
    h *= jax.nn.sigmoid(o.astype(jnp.float32))
    return h.astype(x.dtype) @ p.output, unused


def outputs(impl, layout, direction, inputs):
    """(y, unused projections), or (y, gradients of the parameters, gradient of x)."""
    function = functools.partial(layer, impl, layout)
    if direction == "fwd":
        return function(inputs.params, inputs.x)
    y, vjp, _ = jax.vjp(function, inputs.params, inputs.x, has_aux=True)
    return y, *vjp(inputs.dy)


class Layer(peers.JaxImplementation):
    def __init__(self, *settings):
        self.settings = settings  # impl, layout

    def computation(self, inputs, direction):
        return functools.partial(outputs, *self.settings, direction), [inputs]


# ---------------------------------------------------------------- checking and measuring


class Case:
    """Inputs, and the expected outputs of their first batch entry."""

    def __init__(self, shape, directions):
        self.inputs = jax.block_until_ready(random_inputs(shape))
        self.masked = self.inputs._replace(dy=self.inputs.dy.at[1:].set(0))
        self.direction = max(directions, key=len)  # "fwbw" has all outputs of "fwd"
        self.expected = functools.cache(self._expected)

    def _expected(self, impl):
        p, x, dy = self.inputs
        inputs = jax.tree.map(lambda y: y.astype(jnp.float32), Inputs(p, x[:1], dy[:1]))
        function = functools.partial(outputs, impl, "BNTH", self.direction)
        with jax.default_matmul_precision("highest"):
            return named(jax.jit(function)(inputs))


def named(outputs):
    """y and the gradients by name in float32.

    y and the gradient of x have the first batch entry alone. A gate's matrix and bias are one
    array. The gradient of the input gate's bias alone has no digits to compare: a shift of all
    input gates scales C and n alike, which the norm divides out.
    """
    arrays = {"y": outputs[0][:1]}
    if backward := len(outputs) == 3:
        _, dp, dx = outputs
        arrays |= dp._asdict() | {"x": dx[:1]}
    arrays = {name: np.asarray(y, np.float32) for name, y in arrays.items()}
    for gate in GATES if backward else ():
        arrays[gate] = np.vstack([arrays[gate], arrays.pop(gate.replace("gate", "bias"))])
    return arrays


def measure(row, case, options):
    """Fills the row; does not time a wrong output."""
    impl = row["impl"]
    timed = Layer(impl, row["layout"])
    call, outputs = runner.first_call(row, timed, case.masked, row["direction"])
    if impl == PEER:
        row["versions"] |= peers.jax_versions(impl)
    arrays = named(outputs)
    del outputs
    expected = case.expected(impl if impl in WITHOUT else "xla")
    compared = arrays.keys() - NOT_COMPARED.get(impl, ())
    errors = {x: runner.relative_error(arrays[x], expected[x]) for x in arrays if x in compared}
    limits = dict.fromkeys(errors, GRADIENT_TOLERANCE) | dict(y=OUTPUT_TOLERANCE)
    runner.check(row, errors, limits)
    timed.arguments = [case.inputs]
    seconds = runner.measure(row, timed, call, options.repeats)
    row["tokens_per_s"] = row["shape"].B * row["shape"].S / seconds
    floor = row["product_floor_ms"]
    row["product_pct"] = floor and 100 * floor / row["ms"]


def measured_rows(options):
    """A row for each shape, direction and implementation."""
    device, gpu = jax.devices()[0], runner.on_gpu()
    hopper = ["mosaic_gpu"] if gpu_of(device).hopper else []
    impls = options.impl or [*(["triton", *hopper] if gpu else ["xla"]), *WITHOUT, PEER]
    runner.check_gpu(impls)
    flops_rate, bytes_rate = roofline.device_rates(device.device_kind, DTYPE)
    named_shapes = shapes.named(options.shape, "7b-8k" if gpu else "2x2x64x16x32")
    for name, shape in named_shapes.items():
        case = Case(shape, options.direction)
        for direction, impl in itertools.product(options.direction, impls):
            flops, moved = product_flops(shape, direction), elementwise_bytes(shape, direction)
            keys = dict(
                product_flops=flops,
                elementwise_bytes=moved,
                product_floor_ms=flops_rate and 1e3 * flops / flops_rate,
                elementwise_floor_ms=bytes_rate and 1e3 * moved / bytes_rate,
                direction=direction,
                dtype=DTYPE,
            )
            for layout in options.layout if impl in BACKENDS else [None]:
                row = runner.new_row(options, name, shape, impl, layout=layout, **keys)
                yield runner.attempt(row, impl != PEER, measure, case, options)


# ---------------------------------------------------------------- reporting


def label(row):
    return " ".join(filter(None, (row["impl"], row.get("layout"))))


COLUMNS = reporting.columns(
    """
shape         name
direction     direction
impl          label
ms            ms            .3f
spread %      spread        .1%
products %    product_pct   .0f
tokens/s      tokens_per_s  .3g
peak MiB      peak_mib      .1f
first call s  first_call_s  .1f
error         error         .1e
note          note
""",
    label=label,
)


def panel(row):
    return f"{row['name']}, {DIRECTIONS[row['direction']]}"


def remainders(rows):
    """Prints what the layer spends beside products and mLSTM: the floor, and what was measured."""
    panels = {}
    for row in rows:
        panels.setdefault(panel(row), {})[row["impl"]] = row
    for title, by_impl in panels.items():
        row = next(iter(by_impl.values()))
        floor, rest = row["product_floor_ms"], row["elementwise_floor_ms"]
        without, products = (by_impl.get(x, {}).get("ms") for x in ("without_mlstm", "products"))
        less = [None if None in (without, x) else without - x for x in (products, floor)]
        ms = ["-" if x is None else f"{x:.3f} ms" for x in (floor, rest, *less)]
        print(
            f"\n{title}: products {row['product_flops']:.3e} FLOP, floor {ms[0]}; the rest "
            f"{row['elementwise_bytes']:.3e} bytes, floor {ms[1]}; without_mlstm less products "
            f"{ms[2]}, less the floor of products {ms[3]}"
        )


def plot(rows, path):
    reporting.plot(rows, path, label, lambda row: row["name"], panel)


# ---------------------------------------------------------------- the command


def define_flags(define):
    define.names("impl", [], (*BACKENDS, *WITHOUT, PEER), "none: all that the device runs.")
    define.names("layout", ["BTNH"], ("BNTH", "BTNH"), "layout of the arrays of mlstm_pallas.")
    define.shared("shape", "repeats", "commit", "from_jsonl", "jsonl", "plot", direction="fwd,fwbw")


report = dict(report=remainders, plot=plot)
run = functools.partial(runner.run, measured_rows, COLUMNS, **report)


if __name__ == "__main__":
    command.main(define_flags, run)
