r"""Times a step of the recurrent mLSTM, as a generation loop sees it, beside other implementations.

    python benchmarks/step_benchmark.py                # b1 and 256mib on a GPU, a tiny one without
    python benchmarks/step_benchmark.py --shape=b1,128x8x256x512 \
        --impl=triton,xla,mlstm_kernels_triton_step --jsonl=step.jsonl

mlstm_pallas runs in one jitted loop of --steps steps that updates its states in place, a peer in
torch as a CUDA graph of as many launches. The outputs after a few steps are checked against the
float64 recurrence, on the first, a middle and the last head. A wrong output is not timed.

Bytes are those of the states, read once and written once, 2 B NH (DHQK DHHV + DHQK + 1) itemsize,
whatever an implementation moves. The rate of a copy of the device's memory, bytes read and written,
is measured in the same run. Exit code 1 when an output is wrong or mlstm_pallas fails, 2 when the
request makes no sense, 130 after Ctrl-C.
"""

import dataclasses
import functools
import importlib
import os
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import command
import jax
import jax.numpy as jnp
import numpy as np
import reporting
from absl import flags
from command import RequestError, check_gpu, check_names, git_commit, one_line, say_no_gpu
from compile_report import NOT_OF_STEPS, VARIANTS
from jax import lax
from kernel_benchmark import jax_versions, median_and_spread, time_calls
from peers import take_heads, torch_tensor

from mlstm_pallas import mlstm_recurrent_step, reference
from mlstm_pallas.config import KernelConfig
from mlstm_pallas.gpu import target_gpu
from mlstm_pallas.planning import Options, launch
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Lowering
from mlstm_pallas.validation import KERNEL_DTYPES

BACKENDS = ("triton", "interpret", "xla")  # a step has no Mosaic GPU kernel


class Shape(NamedTuple):
    """Dimensions of one step."""

    B: int
    NH: int
    DHQK: int
    DHHV: int

    def state_bytes(self, itemsize: int) -> int:
        return self.B * self.NH * (self.DHQK * self.DHHV + self.DHQK + 1) * itemsize

    def __str__(self) -> str:
        return "x".join(map(str, self))


SHAPES = {
    "b1": Shape(1, 8, 256, 512),
    "256mib": Shape(64, 8, 256, 512),  # in float32, as the next two
    "256mib-tfla": Shape(128, 16, 128, 256),
    "1gib": Shape(256, 8, 256, 512),
    "tiny": Shape(1, 2, 32, 64),
}
CHECKED_STEPS = 4
# Relative norms of the error of h, by the coarser of the dtypes: sums of a few hundred float32
# products, or values rounded to 16 bits in each of a few steps.
TOLERANCES = {"float32": 1e-5, "float16": 1e-2 / 8, "bfloat16": 1e-2}
COPIED_BYTES = {"gpu": 2**29, "cpu": 2**24}


class Token(NamedTuple):
    q: jax.Array  # (B, NH, DHQK)
    k: jax.Array
    v: jax.Array  # (B, NH, DHHV)
    i: jax.Array  # (B, NH)
    f: jax.Array


States = tuple[jax.Array, jax.Array, jax.Array]  # c, n, m


@dataclasses.dataclass
class Record:
    """A measurement. What was not measured is None.

    status is "ok", "wrong", "failed" or "skipped", and note says why.
    """

    name: str
    shape: Shape
    impl: str
    dtype: str
    state_dtype: str
    steps: int
    unroll: int
    device: str
    versions: dict[str, str]
    commit: str | None
    copy_gbps: float
    variant: str = "exp"
    config: dict[str, Any] | None = None
    status: str = "ok"
    note: str = ""
    us: float | None = None  # a step
    spread: float | None = None  # (slowest - fastest) / median of the repeats
    gbps: float | None = None
    copy_pct: float | None = None
    error: float | None = None

    @property
    def state_mib(self) -> str:
        return f"{self.shape.state_bytes(jnp.dtype(self.state_dtype).itemsize) / 2**20:.4g}"


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def random_inputs(shape: Shape, dtype: str, state_dtype: str) -> tuple[Token, States]:
    """q, k and n have a positive mean: near q.n = 0, h would have no digits to compare.

    m is 0, as any gate has it.
    """
    B, NH, K, V = shape
    dims = ((K,), (K,), (V,), (), (), (K, V), (K,), ())
    keys = jax.random.split(jax.random.key(0), len(dims))
    q, k, v, i, f, c, n, _ = (
        jax.random.normal(key, (B, NH, *dim)) for key, dim in zip(keys, dims, strict=True)
    )
    token = Token((q + 0.5).astype(dtype), (k + 0.5).astype(dtype), v.astype(dtype), i, f + 4.0)
    return token, (c.astype(state_dtype), (n + 0.5).astype(state_dtype), jnp.zeros((B, NH)))


class MlstmPallas:
    """A backend of mlstm_recurrent_step."""

    def __init__(self, backend: str, shape: Shape, state_dtype: str, unroll: int, variant: str):
        self.step = functools.partial(mlstm_recurrent_step, backend=backend, **VARIANTS[variant])
        self.unroll = unroll
        (B, NH, *heads), dtype, gpu = shape, jnp.dtype(state_dtype), target_gpu()
        lowering, problem = Lowering(backend), Problem(B, NH, 1, *heads, 1, 1.0)
        options = Options(dtype, lowering, KernelConfig())
        tiles = launch("recurrent_step", problem, options, gpu, lowering).tiles
        self.config = {} if tiles is None else dict(vars(tiles))

    def versions(self) -> dict[str, str]:
        return {}

    def build(self, token: Token, states: States, steps: int) -> Callable[[], jax.Array]:
        """A call runs the steps from the states of the call before and returns the last h."""

        @functools.partial(jax.jit, donate_argnums=1)
        def run(token, states):
            def body(_, carry):
                return self.step(*token, *carry[1])

            first, unroll = (jnp.zeros_like(token.v), states), min(self.unroll, steps)
            return lax.fori_loop(0, steps, body, first, unroll=unroll)

        current = jax.tree.map(jnp.copy, states)

        def call():
            nonlocal current
            h, current = run(token, current)
            return h

        return call

    def synchronise(self, h):
        jax.block_until_ready(h)

    def heads(self, h, index):
        return take_heads(h, index)


class MlstmKernelsStep:
    """mlstm_kernels (NX-AI), its Triton step kernel.

    It does not update in place: the steps go to and fro between two sets of states.
    """

    config = None

    def __init__(self, shape: Shape, state_dtype: str):
        self.torch = importlib.import_module("torch")
        self.module = importlib.import_module("mlstm_kernels.torch.recurrent")
        if not self.torch.cuda.is_available():
            raise RuntimeError("torch finds no GPU")

    def versions(self):
        return {name: metadata.version(name) for name in ("torch", "triton", "mlstm_kernels")}

    def build(self, token, states, steps):
        torch = self.torch

        def tensor(x):
            return torch_tensor(torch, x if x.ndim > 2 else x[..., None], x.dtype)

        token, first = tuple(map(tensor, token)), tuple(map(tensor, states))
        sets = tuple(tuple(map(torch.empty_like, first)) for _ in range(2))

        def run(count):
            for x, y in zip(sets[0], first, strict=True):
                x.copy_(y)
            for t in range(count):
                old, into = sets[t % 2], sets[(t + 1) % 2]
                new = dict(zip(("matC_new", "vecN_new", "scaM_new"), into, strict=True))
                options = dict(eps=1e-6, dtype_state=first[0].dtype, **new)
                h, _ = self.module.mlstm_recurrent_step__triton(*token, *old, **options)
            return h

        run(1)  # compiles: a graph can only record
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            h = run(steps)

        def call():
            graph.replay()
            return h

        return call

    def synchronise(self, h):
        self.torch.cuda.synchronize()

    def heads(self, h, index):
        return h.reshape(-1, h.shape[-1])[index.tolist()].double().cpu().numpy()


PEERS = {"mlstm_kernels_triton_step": MlstmKernelsStep}


def expected_h(token: Token, states: States, index: np.ndarray, variant: str) -> np.ndarray:
    """h of the heads in index after CHECKED_STEPS steps with the same token, float64."""
    token, states = take_heads((token, states), index)

    @jax.jit
    def last_h(token, states):
        x = (jnp.repeat(x[None, :, None], CHECKED_STEPS, axis=2) for x in token)
        states = (x[None] for x in states)
        h, _ = reference.recurrence(*x, *states, **VARIANTS[variant])
        return h[0, :, -1]

    with jax.enable_x64(True):
        return np.asarray(last_h(token, states))


def copy_rate(repeats: int) -> float:
    """Bytes/s that a copy on the device reads and writes."""
    size = COPIED_BYTES.get(jax.default_backend(), COPIED_BYTES["gpu"])
    x = jnp.ones(size, jnp.int8)
    times = time_calls(lambda: jnp.copy(x), jax.block_until_ready, repeats)
    return 2 * size / statistics.median(times)


def measure(record: Record, impl: Any, repeats: int) -> None:
    """Fills the record; does not time a wrong output."""
    shape = record.shape
    token, states = random_inputs(shape, record.dtype, record.state_dtype)
    record.config, record.versions = impl.config, record.versions | impl.versions()
    heads = shape.B * shape.NH
    index = np.unique([0, heads // 2, heads - 1])
    expected = expected_h(token, states, index, record.variant)
    h = impl.build(token, states, CHECKED_STEPS)()
    impl.synchronise(h)
    record.error = float(np.linalg.norm(impl.heads(h, index) - expected) / np.linalg.norm(expected))
    limit = max(TOLERANCES[dtype] for dtype in (record.dtype, record.state_dtype))
    if not record.error <= limit:
        wrong = f"wrong: error {record.error:.1e} in h, at most {limit:.0e}"
        record.status, record.note = "wrong", wrong
        return
    times = time_calls(impl.build(token, states, record.steps), impl.synchronise, repeats)
    seconds, record.spread = median_and_spread(times)
    seconds /= record.steps
    record.us = 1e6 * seconds
    record.gbps = 2 * shape.state_bytes(jnp.dtype(record.state_dtype).itemsize) / seconds / 1e9
    record.copy_pct = 100 * record.gbps / record.copy_gbps


def measured_records(
    options: flags.FlagValues, shapes: dict[str, Shape], impls: Sequence[str], steps: int
) -> Iterator[Record]:
    """A record for each shape and implementation."""
    names = "dtype", "state_dtype", "unroll", "variant"
    common = {name: options[name].value for name in names} | dict(steps=steps)
    common |= dict(device=jax.devices()[0].device_kind, commit=git_commit())
    copy_gbps = copy_rate(options.repeats) / 1e9
    print(f"\ncopy: {copy_gbps:.4g} GB/s")
    for name, shape in shapes.items():
        for impl in impls:
            record = Record(
                name, shape, impl, copy_gbps=copy_gbps, versions=jax_versions(), **common
            )
            ours = impl in BACKENDS
            try:
                if ours:
                    loop = options.unroll, options.variant
                    built: Any = MlstmPallas(impl, shape, options.state_dtype, *loop)
                elif options.variant != "exp":
                    raise ValueError(f"it has no variant {options.variant}")
                else:
                    built = PEERS[impl](shape, options.state_dtype)
                measure(record, built, options.repeats)
            except Exception as error:
                record.status = "failed" if ours else "skipped"
                record.note = f"{record.status}: {one_line(error)}"
            yield record


def parse_request(options: flags.FlagValues) -> tuple[dict[str, Shape], Sequence[str], int]:
    """Shapes, implementations, steps of a loop."""
    gpu = jax.devices()[0].platform == "gpu"
    impls = options.impl or (["triton", *PEERS] if gpu else ["xla"])
    check_names("impl", impls, (*BACKENDS, *PEERS))
    check_gpu("impl", impls, gpu)
    shapes = {}
    for text in options.shape or (["b1", "256mib"] if gpu else ["tiny"]):
        if text not in SHAPES and not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){3}", text):
            known = f"known are {', '.join(SHAPES)} and BxNHxDHQKxDHHV"
            raise RequestError(f"unknown shape {text!r}, {known}")
        shapes[text] = SHAPES[text] if text in SHAPES else Shape(*map(int, text.split("x")))
    if not gpu:
        say_no_gpu(", ".join(impls), list(shapes))
    return shapes, impls, options.steps or (1000 if gpu else 10)


COLUMNS = {
    "shape": ("name", ""),
    "state MiB": ("state_mib", ""),
    "impl": ("impl", ""),
    "us/step": ("us", ".2f"),
    "spread %": ("spread", ".1%"),
    "GB/s": ("gbps", ".4g"),
    "copy %": ("copy_pct", ".0f"),
    "error": ("error", ".1e"),
    "note": ("note", ""),
}


def define_flags(values: flags.FlagValues) -> None:
    """Not at import: modules that import this one have flags of their own."""
    define = command.Define(values)
    shape = f"{', '.join(SHAPES)}, or BxNHxDHQKxDHHV; none: b1, 256mib, without a GPU tiny."
    impls = f"{', '.join((*BACKENDS, *PEERS))}; none: triton and peers, without a GPU xla."
    dtypes = list(KERNEL_DTYPES)
    loop = "Of mlstm_pallas, steps in an iteration of the loop."
    unroll = f"{loop} n and m go to new memory: one step per iteration costs a copy of each."
    variants = [name for name in VARIANTS if name not in NOT_OF_STEPS]
    variant = "Input gate and normaliser of mlstm_pallas."
    define.list("shape", [], shape)
    define.list("impl", [], impls)
    define.enum("dtype", "bfloat16", dtypes[::-1], "Of q, k, v and h.")
    define.enum("state_dtype", "float32", dtypes, "Of C and n; m is float32.")
    define.integer("steps", None, "Of a loop; none: 1000, without a GPU 10.", lower_bound=1)
    define.integer("unroll", 2, unroll, lower_bound=1)
    define.enum("variant", "exp", variants, variant)
    define.shared("repeats", "jsonl")


def run(options: flags.FlagValues) -> int:
    """Measures and prints; returns the exit code."""

    def start() -> Iterator[Record]:
        return measured_records(options, *parse_request(options))

    _, code = reporting.measure("step_benchmark", options, start, COLUMNS)
    return code


if __name__ == "__main__":
    # A peer in torch needs memory on the same device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    command.main(define_flags, run)
