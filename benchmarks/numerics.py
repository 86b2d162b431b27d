r"""Measures the errors of h and of all gradients against float64, by gates and dtypes.

    python benchmarks/numerics.py                 # Triton on a GPU, plain jnp without
    python benchmarks/numerics.py --impl=triton,mosaic_gpu --dtype=bfloat16,float16 \
        --cotangents=random,normalised --jsonl=numerics.jsonl
    python benchmarks/numerics.py --gates=1:10,15:4:15 --operands=positive --shape=1x8x512x64x64

Gates I:F are i = I N(0, 1) and f = F + N(0, 1). Gates I:F:C have a soft cap: x becomes
C tanh(x / C). v is N(0, 1). Operands and cotangents are

    random      q and k are N(0, 1), so that n . q cancels in some steps; dh is N(0, 1)
    positive    q and k are |N(0, 1)| + 0.2, so that n . q does not cancel
    normalised  dh is a gradient through an RMS norm of h, so that dh . h cancels in every step

Each head of a shape is a draw; --seed gives the same ones on every machine. The error of a head is
the norm of the difference over the norm of what float64 has, from the same rounded inputs. A row
has the largest error and the median of the draws, of h and of the worst gradient, and kappa, the
largest sum_s D_ts |q_t| . |k_s| scale / den_t of all steps. Exit code 1 when an error is beyond the
promises, which are of positive operands, or when mlstm_pallas fails, 2 when the request makes no
sense, 130 after Ctrl-C.
"""

import functools
import itertools
from typing import NamedTuple

import command
import jax
import jax.numpy as jnp
import numpy as np
import peers
import reporting
import runner
import shapes
from peers import Inputs

from mlstm_pallas import mlstm_chunkwise
from mlstm_pallas.problem.validation import BACKENDS
from mlstm_pallas.selfcheck import PROMISED

OUTPUTS = peers.Implementation.outputs


class Gates(NamedTuple):
    """i = i_scale N(0, 1) and f = f_mean + N(0, 1), within a soft cap unless it is 0."""

    i_scale: float
    f_mean: float
    cap: float = 0.0

    def capped(self, x):
        return self.cap * np.tanh(x / self.cap) if self.cap else x


def parse_gates(text):
    """The text, by which rows name the gates, and the gates."""
    try:
        return text, Gates(*map(float, text.split(":")))
    except (TypeError, ValueError):
        raise ValueError(f"unknown gates {text!r}, expected I:F or I:F:C, as 1:4") from None


@functools.lru_cache(1)
def normals(shape, seed):
    """Standard normal float64 arrays of the shapes of inputs."""
    r, rows = np.random.default_rng(seed), shape[:3]
    q, v = (*rows, shape.DHQK), (*rows, shape.DHV)
    return Inputs(*map(r.standard_normal, (q, q, v, rows, rows, v)))


def random_inputs(shape, dtype, gates, operands, seed):
    q, k, v, i, f, dh = normals(shape, seed)
    if operands == "positive":
        q, k = (np.abs(x) + 0.2 for x in (q, k))
    q, k, v, dh = (jnp.asarray(x, dtype) for x in (q, k, v, dh))
    i, f = (jnp.asarray(gates.capped(x), "float32") for x in (gates.i_scale * i, gates.f_mean + f))
    return Inputs(q, k, v, i, f, dh)


def in_float64(arrays):
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x).astype("float64")), arrays)


def rms_norm(h):
    return h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-6)


@jax.jit
def _gradient_of_h(inputs):
    *others, dh = inputs
    return jax.vjp(rms_norm, peers.exact(*others))[1](dh)[0]


def through_norm(inputs):
    """The inputs with dh of an h whose RMS norm has the cotangents dh, in the same dtype.

    It is rounded outside of any program: XLA for GPUs leaves out a cast where one back follows.
    """
    dh = np.asarray(_gradient_of_h(in_float64(inputs)))
    return inputs._replace(dh=jnp.asarray(dh.astype(inputs.dh.dtype)))


@jax.jit
def exact(inputs):
    """In float64: h and the gradients, and kappa of every step."""
    q, k, v, i, f, dh = inputs
    h, vjp = jax.vjp(peers.exact, q, k, v, i, f)
    ones = jnp.ones_like(v[..., :1])
    z, terms = (peers.unnormalised(*x, ones, i, f) for x in ((q, k), (abs(q), abs(k))))
    return (h, *vjp(dh)), terms / jnp.maximum(abs(z), 1.0)


@functools.partial(jax.jit, static_argnums=0)
def results(backend, inputs):
    forward = functools.partial(mlstm_chunkwise, backend=backend)
    function, arguments = peers.directed(forward, inputs, "fwbw")
    return function(*arguments)


@jax.jit
def errors_by_head(outputs, expected):
    """(B, NH) of each output; infinite where it is not finite."""

    def norm(x):
        return jnp.sqrt(jnp.sum(x * x, axis=range(2, x.ndim)))

    def error(x, y):
        off = norm(x.astype(y.dtype) - y) / norm(y)
        return jnp.where(jnp.isfinite(off), off, jnp.inf)

    return tuple(map(error, outputs, expected))


def bounds(shape, dtype, gates, operands):
    """By output, the largest error that the README or docs/numerics.md promises, if they do."""
    bounded = (gates.i_scale <= 1 and 0 <= gates.f_mean <= 40) or 0 < gates.cap <= 15
    if not bounded or shape.S > 1024 or operands != "positive":
        return {}
    of_h, of_gradients = PROMISED[dtype]
    return dict.fromkeys(OUTPUTS, of_gradients) | dict(h=of_h)


def measure(row, gates):
    shape, dtype, cotangents = row["shape"], row["dtype"], row["cotangents"]
    inputs = random_inputs(shape, dtype, gates, row["operands"], row["seed"])
    with jax.enable_x64(True):
        if cotangents == "normalised":
            inputs = through_norm(inputs)
        expected, kappa = exact(in_float64(inputs))
        row["kappa"] = float(np.max(np.asarray(kappa)))
    outputs = results(row["impl"], inputs)
    with jax.enable_x64(True):
        errors = jax.tree.map(np.asarray, errors_by_head(outputs, expected))
    errors = dict(zip(OUTPUTS, errors, strict=True))
    for name, of_draws in (("error", np.max), ("median", np.median)):
        each = {output: float(of_draws(x)) for output, x in errors.items()}
        row |= {f"{name}s": each, f"h_{name}": each["h"]}
        row[f"d_{name}"] = max(x for output, x in each.items() if output != "h")
    runner.check(row, row["errors"], bounds(shape, dtype, gates, row["operands"]))


def measured_rows(options):
    """A row for each shape, implementation, dtype, cotangents, operands and gates."""
    backends = options.impl or ["triton" if runner.on_gpu() else "xla"]
    runner.check_gpu(backends)
    named = shapes.named(options.shape, "1x64x1024x32x64" if runner.on_gpu() else "1x8x256x32x64")
    choices = options.cotangents, options.operands, options.gates
    for (name, shape), impl, dtype, cotangents, operands, (text, gates) in itertools.product(
        named.items(), backends, options.dtype, *choices
    ):
        keys = dict(direction="fwbw", dtype=dtype, gates=text, operands=operands)
        keys |= dict(cotangents=cotangents, seed=options.seed, stage="")
        row = runner.new_row(options, name, shape, impl, **keys)
        yield runner.attempt(row, True, measure, gates)


COLUMNS = reporting.columns(
    """
shape       name
impl        impl
dtype       dtype
gates       gates
operands    operands
cotangents  cotangents
kappa       kappa       .1e
h           h_error     .1e
median      h_median    .1e
gradients   d_error     .1e
of median   d_median    .1e
note        note
"""
)
DTYPES = ["bfloat16", "float16", "float32"]
GATES = "1:0,1:4,1:10,1:40,15:0:15,15:4:15,15:40:15,5:4,5:10,5:40,15:4,15:10,15:40"


def define_flags(define):
    define.names("impl", [], BACKENDS, "none: triton, without a GPU xla.")
    define.items("gates", GATES, parse_gates, "see above.")
    define.names("operands", ["random", "positive"], ("random", "positive"), "see above.")
    define.names("cotangents", ["random"], ("random", "normalised"), "see above.")
    define.integer("seed", 0, "Of the draws.", 0, 2**32 - 1)
    define.shared("shape", "commit", "from_jsonl", "jsonl", dtype=DTYPES)


run = functools.partial(runner.run, measured_rows, COLUMNS)


if __name__ == "__main__":
    command.main(define_flags, run)
