r"""Times a stage, the forward pass, or forward and backward of mlstm_pallas, beside others.

    python benchmarks/kernel_benchmark.py         # the three 8k shapes on a GPU, a tiny one without
    python benchmarks/kernel_benchmark.py --shape=7b-8k,8x16x8192x128x128 --direction=fwd,fwbw \
        --impl=all --markdown
    python benchmarks/kernel_benchmark.py --shape=seqlen --impl=all --jsonl=seqlen.jsonl
    python benchmarks/kernel_benchmark.py --stage=recurrent_fw_C,parallel_bw_dQKV \
        --impl=triton,xla --dtype=bfloat16,float32
    python benchmarks/kernel_benchmark.py --stage=recurrent_fw_H --impl=triton,mosaic_gpu  # Hopper
    python benchmarks/kernel_benchmark.py --from_jsonl=seqlen.jsonl,more.jsonl --markdown \
        --plot=seqlen.png                                                    # measures nothing

Outputs are checked before they are timed, in float64: mlstm_pallas against the recurrence in its
parallel form, a stage against its plain form, peers against their own definition. The first, a
middle and the last head are checked, beyond 32768 steps the last alone. A wrong output is not
timed.

A time is the median over batches of calls in flight between two synchronisations. The spread is
(slowest - fastest) / median of the batches. TFLOP/s, TB/s and roofline count the FLOPs and bytes
that the result needs (roofline.py), whatever an implementation does. Memory is the peak beyond the
inputs. The first call is traced, compiled (unless --compilation_cache_dir has it) and run once.

Exit code 1 when an output is wrong or mlstm_pallas fails, 2 when the request makes no sense, 130
after Ctrl-C.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import calls
import command
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import peers
import reporting
import roofline
from absl import flags
from calls import call_spec, config_row, launch_of, parse_config
from command import (
    RequestError,
    check_gpu,
    check_names,
    git_commit,
    one_line,
    parse_booleans,
    say_no_gpu,
)
from jax.experimental.compilation_cache import compilation_cache
from peers import Inputs, random_inputs
from reporting import COLUMNS, Record, markdown, plot, plot_measured
from roofline import Shape, backward_stages

from mlstm_pallas import costs, dispatch, mlstm_chunkwise, planning, stages
from mlstm_pallas.config import KernelConfig
from mlstm_pallas.gate_gradients import TilePairs
from mlstm_pallas.gates import vector_states
from mlstm_pallas.gpu import target_gpu
from mlstm_pallas.normaliser import query_scale
from mlstm_pallas.problem import MAX_TILE, Problem
from mlstm_pallas.stage import Lowering, Stage, Weighted
from mlstm_pallas.stages.parallel_bw_dP import GradientTiles
from mlstm_pallas.stages.parallel_bw_dQKV import Gradients
from mlstm_pallas.stages.parallel_fw_P import Scores
from mlstm_pallas.validation import BACKENDS, KERNEL_DTYPES, check_chunk_size

HEADS = [(64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512), (512, 512)]
SHAPES = {
    "7b-8k": [Shape(8, 8, 8192, 256, 512)],
    "tfla-8k": [Shape(8, 16, 8192, 128, 256)],
    "b1-8k": [Shape(1, 8, 8192, 256, 512)],
    "small-64": [Shape(8, 16, 8192, 64, 64)],
    "small-128": [Shape(8, 16, 8192, 128, 128)],
    "seqlen": [Shape(2**17 // S, 8, S, 256, 512) for S in (2**n for n in range(9, 18))],
    "batch": [Shape(B, 8, 8192, 256, 512) for B in (1, 2, 4, 8, 16)],
    "heads": [Shape(8, 4096 // max(V, 256), 8192, K, V) for K, V in HEADS],
    "tiny": [Shape(1, 2, 128, 32, 64)],
}
# Relative norms of the error, of outputs and of gradients. bfloat16 has steps of 2**-8, and its
# gradients are made of products of rounded products; float16 has steps of an eighth of that;
# float32 has room for sums of a few thousand terms.
TOLERANCES = {
    "bfloat16": (5e-3, 2e-2),
    "float16": (5e-3 / 8, 2e-2 / 8),
    "float32": (1e-5, 1e-4),
}
BATCH_SECONDS, MAX_CALLS = 0.05, 100  # calls in flight between two synchronisations

Rates = tuple[float | None, float | None]  # FLOP/s, bytes/s


# ---------------------------------------------------------------- stages and implementations


# step_benchmark.py times those of generation.
STAGES = {name: stage for name, stage in stages.STAGES.items() if not stage.decode}


def plain(stage: Stage, problem: Problem) -> Callable[..., Any]:
    """The plain form of a stage, in the precision of its inputs."""
    return functools.partial(dispatch.run, stage.name, call=planning.plain(problem))


@functools.partial(jax.jit, static_argnums=(1, 2))
def stage_arrays(x: Inputs, L: int, fused: bool) -> dict[str, Any]:
    """The inputs of the stages in chunks of L steps, by their names in ``Stage.inputs``.

    fused: the stages of the fused scan, or all others. The plain form of a stage runs when its
    inputs are known. Its outputs are then known by the stage's name, and its fields by theirs.
    """
    B, NH, S, K, V = x.shape
    problem = Problem(B, NH, S, K, V, L, K**-0.5)
    q, k, v, i, f, dh = (y.reshape(B * NH, *y.shape[2:]) for y in x)
    C, n, m = (jnp.zeros((B * NH, *dims), jnp.float32) for dims in ((K, V), (K,), ()))
    known: dict[str, Any] = dict(matQ=q, matK=k, matV=v, vecI=i, vecF=f, matDeltaH=dh)
    known |= dict(matC_initial=C, vecN_initial=n, scaM_initial=m, matDeltaC_last=C)
    required = {name for stage in STAGES.values() if stage.fused == fused for name in stage.inputs}
    waiting = [name for name, stage in STAGES.items() if fused or not stage.fused]
    while unknown := required - known.keys():
        name = next((name for name in waiting if known.keys() >= set(STAGES[name].inputs)), None)
        if name is None:
            raise ValueError(f"no stage returns {', '.join(sorted(unknown))}")
        waiting.remove(name)
        outputs = plain(STAGES[name], problem)(*(known[x] for x in STAGES[name].inputs))
        fields = {field: y for field, y in outputs._asdict().items() if y is not None}
        known = {name: outputs} | fields | known
        match name:  # what no stage returns
            case "chunk_gates":
                abar, gamma = outputs.per_step().vecAbar, outputs.scaGamma
                added = dispatch.run("step_sums", k, abar, call=planning.plain(problem))
                known |= dict(vecAbar=abar, vecN_states=vector_states(added, gamma, n)[0])
            case "parallel_bw_dP":
                terms, gamma = outputs.vecDeltaN_added, known["scaGamma"]
                known["vecDeltaN_states"], _ = vector_states(terms, gamma, n, backward=True)
    return {name: known[name] for name in required}


def written(outputs: Any) -> Any:
    """The outputs of a stage in a form whose shapes do not depend on the tiles.

    Those of parallel_bw_dP come without what it leaves unwritten, and with sums over chunks in
    place of sums by tile. Those of parallel_bw_dQKV come without sums of W, which only one of its
    kernels makes. Weighted operands are their products.
    """
    if isinstance(outputs, Gradients):
        return outputs._replace(pairs=None)
    if isinstance(outputs, Scores):
        return outputs._replace(keys=outputs.keys.product())
    return _written(outputs) if isinstance(outputs, GradientTiles) else outputs


@jax.jit
def _written(outputs: GradientTiles) -> GradientTiles:
    BNH, NC, n, T = outputs.pairs.diagonal.shape
    block, tile = jnp.arange(n * T) // MAX_TILE, jnp.arange(n)

    def lower(x):
        return jnp.where(block[:, None] >= block, x.reshape(BNH, NC, n * T, n * T), 0.0)

    def total(x, where):
        return jnp.sum(jnp.where(where.reshape(n, 1, n, 1), x, 0.0), axis=1).reshape(BNH, -1)

    per_query, per_key, diagonal = outputs.pairs
    upper, lower_tiles = tile[:, None] <= tile, tile[:, None] >= tile
    sums = total(per_query, upper), total(per_key, lower_tiles), diagonal.reshape(BNH, -1)
    matrices = dict(matP=lower(outputs.matP), matDeltaP=lower(outputs.matDeltaP))
    products = dict(queries=outputs.queries.product(), keys=outputs.keys.product())
    return outputs._replace(pairs=TilePairs(*sums), **matrices, **products)


# Arrays (B, S, NH, ...): passed as they are, or transposed by the caller.
STEPS_FIRST = ("BTNH", "transposed")
VARIANTS = calls.VARIANTS | {"transposed": {}}
# By variant.
ORACLE_OF = dict.fromkeys(("exp", *STEPS_FIRST), "exact") | {
    "packed": "packed",
    "sigmoid": "sigmoid_normalised",
    "unnormalised": "sigmoid_input_gate",
}


def swap_heads(*arrays: jax.Array) -> list[jax.Array]:
    """(B, NH, S, ...) to (B, S, NH, ...), and back."""
    return [jnp.swapaxes(x, 1, 2) for x in arrays]


class NoSuchKernel(ValueError):
    """The backend has no kernel for a stage."""


class MlstmPallas(peers.JaxImplementation):
    """mlstm_chunkwise on a backend."""

    def __init__(
        self,
        backend: str,
        shape: Shape,
        dtype: str,
        chunk_size: int | None = None,
        config: KernelConfig | None = None,
        recompute_states_in_bw: bool = True,
        variant: str = "exp",
    ):
        self.name, self.variant, self.oracle = backend, variant, ORACLE_OF[variant]
        self.recompute_states_in_bw = recompute_states_in_bw
        spec = call_spec(backend, shape, dtype, target_gpu(), chunk_size, config)
        self.spec = dataclasses.replace(spec, recompute_states_in_bw=recompute_states_in_bw)
        self.config = config_row(self.spec)

    def computation(self, inputs, direction):
        chunks = dict(chunk_size=self.spec.problem.L, config=self.spec.config)
        options = dict(backend=self.name, **chunks, **VARIANTS[self.variant])
        options |= dict(recompute_states_in_bw=self.recompute_states_in_bw)
        if self.variant == "packed":
            B, _, S, *_ = inputs.shape
            if S % peers.PACKED:
                raise ValueError(f"packed: {peers.PACKED} sequences do not fill {S} steps")
            options["segment_ids"] = jnp.broadcast_to(jnp.arange(S) // (S // peers.PACKED), (B, S))
        forward = functools.partial(mlstm_chunkwise, **options)
        if self.variant in STEPS_FIRST:
            inputs = type(inputs)(*swap_heads(*inputs))
        if self.variant == "transposed":

            def forward(*args, heads_first=forward):
                return swap_heads(heads_first(*swap_heads(*args)))[0]

        return peers.directed(forward, inputs, direction)

    def heads(self, outputs, index):
        outputs = swap_heads(*outputs) if self.variant in STEPS_FIRST else outputs
        return super().heads(outputs, index)


class MlstmPallasStage(MlstmPallas):
    """A stage by itself, on inputs of ``stage_arrays``, against its plain form."""

    head_axes = 1

    def __init__(self, stage: str, backend: str, shape: Shape, dtype: str, *args: Any):
        super().__init__(backend, shape, dtype, *args)
        self.stage = STAGES[stage]
        p = self.spec.problem
        if shape != (p.B, p.NH, p.S, p.DHQK, p.DHHV):
            sizes = f"S, DHQK, DHHV = {p.S}, {p.DHQK}, {p.DHHV}"
            raise ValueError(f"a stage by itself is not padded: its tiles need {sizes}")
        self.call = launch_of(self.spec, stage)
        self.config |= config_row(self.spec, [stage])
        scores = backward_stages(self.spec.plan.recomputes_scores)[1]
        # Whether recurrent_bw_dC has queries and keys with their weights.
        calls = (launch_of(self.spec, name) for name in (scores, "recurrent_bw_dC"))
        self.weighted = all(call.lowering.folder == "mosaic_gpu" for call in calls)
        if Lowering(backend).folder == "mosaic_gpu" != self.call.lowering.folder:
            raise NoSuchKernel(f"{stage} has no Mosaic GPU kernel for this shape and dtype")

    def phases(self, shape, itemsize, direction):
        return (costs.of_stage(self.stage.name, self.call, itemsize, weighted=self.weighted),)

    def computation(self, inputs, direction):
        arrays, name = dict(inputs), self.stage.name
        if self.call.lowering.folder == "mosaic_gpu" and name == "recurrent_fw_H":
            keys = Weighted(inputs["matK"], inputs["chunk_gates"].per_step().vecAbar)
            arrays["parallel_fw_P"] = inputs["parallel_fw_P"]._replace(keys=keys)
        if self.weighted and name == "recurrent_bw_dC":
            g, inverse = inputs["chunk_gates"].per_step(), inputs["normaliser_gradients"].vecInvDen
            r = query_scale(g.vecW, self.call.problem.qk_scale, inverse)
            arrays |= dict(queries=Weighted(inputs["matQ"], r))
            arrays |= dict(keys=Weighted(inputs["matK"], g.vecAbar))

        def stage(*args):
            return dispatch.run(self.stage.name, *args, call=self.call)

        return stage, [arrays[name] for name in self.stage.inputs]

    def oracle_arguments(self, inputs):
        return [inputs[name] for name in self.stage.inputs], None

    def reference(self, *args):
        heads = jax.tree.leaves(args)[0].shape[0]
        problem = dataclasses.replace(self.call.problem, B=1, NH=heads)
        return written(plain(self.stage, problem)(*args))

    def finite(self, outputs):
        return super().finite(written(outputs))

    def heads(self, outputs, index):
        return super().heads(written(outputs), index)

    def named(self, outputs):
        """By field; the fields of NamedTuples inside count, pairs of floats as their sum."""
        fields: dict[str, Any] = {}
        for name, x in outputs._asdict().items():
            if hasattr(x, "_asdict"):
                fields |= self.named(x)
            elif x is not None:
                fields[name] = sum(x) if isinstance(x, tuple) else x
        return fields


def implementation(stage: str, *args: Any) -> MlstmPallas:
    """mlstm_pallas, or a stage of it."""
    return MlstmPallasStage(stage, *args) if stage else MlstmPallas(*args)


# ---------------------------------------------------------------- expected outputs


class Case:
    """Inputs and expected outputs of one shape and dtype, for all implementations.

    Args:
      stage: or "", whole calls.
      gradients: whether those of whole calls are expected.
    """

    def __init__(self, shape: Shape, dtype: str, stage: str = "", *, gradients: bool = False):
        self.shape, self.dtype, self.stage, self.gradients = shape, dtype, stage, gradients
        self._arrays: dict[tuple[int, bool], dict[str, Any]] = {}
        self._expected: dict[Any, tuple[np.ndarray, Any]] = {}

    @functools.cached_property
    def inputs(self) -> Inputs:
        return jax.block_until_ready(random_inputs(jax.random.key(0), self.shape, self.dtype))

    def arrays(self, L: int) -> dict[str, Any]:
        """The inputs of the stage in chunks of L steps; those of the last L are kept."""
        key = L, STAGES[self.stage].fused
        if key not in self._arrays:
            self._arrays.clear()
            self._arrays[key] = jax.block_until_ready(stage_arrays(self.inputs, *key))
        return self._arrays[key]

    def inputs_of(self, impl: peers.Implementation) -> Any:
        """The inputs of impl.build."""
        stage = isinstance(impl, MlstmPallasStage)
        return self.arrays(impl.call.problem.L) if stage else self.inputs

    def expected(self, impl: peers.Implementation) -> tuple[np.ndarray, Any]:
        """Indices of the checked heads, and the expected outputs of these, float64."""
        stage = isinstance(impl, MlstmPallasStage)
        key = (self.stage, impl.call.problem.L) if stage else impl.oracle
        if key not in self._expected:
            args, cotangent = impl.oracle_arguments(self.inputs_of(impl))
            index = self.checked_heads(math.prod(jax.tree.leaves(args)[0].shape[: impl.head_axes]))

            @jax.jit
            def outputs(args, cotangent):
                if self.gradients:
                    h, vjp = jax.vjp(impl.reference, *args)
                    return h, *vjp(cotangent)
                return impl.reference(*args) if self.stage else (impl.reference(*args),)

            args, cotangent = peers.take_heads((args, cotangent), index, axes=impl.head_axes)
            with jax.enable_x64(True):
                self._expected[key] = index, jax.tree.map(np.asarray, outputs(args, cotangent))
        return self._expected[key]

    def checked_heads(self, heads: int) -> np.ndarray:
        return np.unique([0, heads // 2, heads - 1])[0 if self.shape.S <= 2**15 else -1 :]

    def errors(
        self, impl: peers.Implementation, outputs: Any, direction: str = ""
    ) -> dict[str, float]:
        """By output, the norm of its error over its norm."""
        index, expected = self.expected(impl)
        named, expected = impl.named(impl.heads(outputs, index)), impl.named(expected)
        if direction == "fwd" and not self.stage:
            expected = dict(list(expected.items())[:1])

        def error(x, y):
            return float(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30))

        return {name: error(named[name], y) for name, y in expected.items()}

    def tolerance(self, name: str) -> float:
        if not self.stage:
            return TOLERANCES[self.dtype][name.startswith("d")]
        # What has no matrices is float32, whatever the dtype.
        matrices = any(name.startswith("mat") for name in STAGES[self.stage].inputs)
        return TOLERANCES[self.dtype if matrices else "float32"][STAGES[self.stage].backward]


# ---------------------------------------------------------------- measuring


def time_calls(
    call: Callable[[], Any], synchronise: Callable[[Any], None], repeats: int
) -> list[float]:
    """Seconds per call in each batch of calls with one synchronisation."""

    def batch(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            outputs = call()
        synchronise(outputs)
        return (time.perf_counter() - start) / calls

    batch(2)
    calls = min(max(round(BATCH_SECONDS / batch(1)), 1), MAX_CALLS)
    return [batch(calls) for _ in range(repeats)]


def median_and_spread(times: Sequence[float]) -> tuple[float, float]:
    """The median, and (slowest - fastest) / median."""
    median = statistics.median(times)
    return median, (max(times) - min(times)) / median


def jax_versions() -> dict[str, str]:
    return dict(jax=jax.__version__, jaxlib=jaxlib.__version__)


def wrong_outputs(case: Case, errors: Mapping[str, float], checked: Sequence[str] = ()) -> str:
    """The outputs beyond their tolerance; "" when there are none."""
    limits = {name: case.tolerance(name) for name in checked or errors if name in errors}
    # A NaN is neither more nor less.
    wrong = [(errors[name], name, x) for name, x in limits.items() if not errors[name] <= x]
    return "; ".join(f"error {error:.1e} in {name}, at most {x:.0e}" for error, name, x in wrong)


def measure(
    record: Record, case: Case, impl: peers.Implementation, repeats: int, rates: Rates
) -> None:
    """Fills the record; does not time a wrong output."""
    inputs = case.inputs_of(impl)
    start = time.perf_counter()
    call = impl.build(inputs, record.direction)
    outputs = call()
    impl.synchronise(outputs)
    record.first_call_s = time.perf_counter() - start
    record.config, record.versions = dict(impl.config), record.versions | impl.versions()
    if not impl.finite(outputs):
        record.status, record.note = "wrong", "wrong: not finite"
        return
    record.errors = case.errors(impl, outputs, record.direction)
    record.error = max(record.errors.values())
    if wrong := wrong_outputs(case, record.errors, impl.checked):
        record.status, record.note = "wrong", f"wrong: {wrong}"
        return
    record.note = "" if impl.oracle in peers.MLSTM else "other function"
    del outputs
    record.peak_mib = impl.peak_memory_bytes(call) / 2**20
    seconds, record.spread = median_and_spread(time_calls(call, impl.synchronise, repeats))
    phases = impl.phases(case.shape, jnp.dtype(case.dtype).itemsize, record.direction)
    record.ms = 1e3 * seconds
    record.tflops, record.tbps = (sum(x) / seconds / 1e12 for x in zip(*phases, strict=True))
    if None not in rates:
        record.roofline_pct = 100 * roofline.floor_seconds(phases, *rates) / seconds


class Request(NamedTuple):
    """The flags, read for this machine."""

    shapes: dict[str, Shape]
    impls: Sequence[str]
    directions: Sequence[str]
    dtypes: Sequence[str]
    stages: Sequence[str]
    recompute: Sequence[bool]
    variants: Sequence[str]
    config: KernelConfig | None
    rates: dict[str, Rates]


def measured_records(options: flags.FlagValues, request: Request) -> Iterator[Record]:
    """A record for each shape, dtype, stage or direction, and implementation."""
    common = dict(device=jax.devices()[0].device_kind, commit=options.commit or git_commit())
    cases = itertools.product(request.shapes.items(), request.dtypes, request.stages or [""])
    for (name, shape), dtype, stage in cases:
        directions = [("bwd" if STAGES[stage].backward else "fwd")] if stage else request.directions
        case = Case(shape, dtype, stage, gradients="fwbw" in directions)
        for direction, impl in itertools.product(directions, request.impls):
            ours = impl in BACKENDS
            variants = request.variants if ours and not stage else [None]
            recomputes = request.recompute if ours and direction == "fwbw" else [None]
            for variant, recompute in itertools.product(variants, recomputes):
                what = name, shape, impl, stage, direction, dtype
                ways = dict(recompute_states_in_bw=recompute, variant=variant)
                record = Record(*what, versions=jax_versions(), **ways, **common)
                try:
                    if ours:
                        config = options.chunk_size, request.config
                        way = recompute is not False, variant or "exp"
                        built: peers.Implementation = implementation(
                            stage, impl, shape, dtype, *config, *way
                        )
                    elif stage:
                        raise ValueError("stages are those of mlstm_pallas alone")
                    else:
                        built = peers.PEERS[impl]()
                    measure(record, case, built, options.repeats, request.rates[dtype])
                except Exception as error:
                    failed = ours and not isinstance(error, NoSuchKernel)
                    record.status = "failed" if failed else "skipped"
                    record.note = f"{record.status}: {one_line(error)}"
                yield record


def parse_shapes(texts: Sequence[str]) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for text in texts:
        if text in SHAPES:
            several = len(SHAPES[text]) > 1
            shapes |= {str(shape) if several else text: shape for shape in SHAPES[text]}
        elif re.fullmatch(r"[1-9]\d*(x[1-9]\d*){4}", text):
            shapes[text] = Shape(*map(int, text.split("x")))
        else:
            known = f"known are {', '.join(SHAPES)} and BxNHxSxDHQKxDHHV"
            raise RequestError(f"unknown shape {text!r}, {known}")
    return shapes


def parse_request(options: flags.FlagValues) -> Request:
    device = jax.devices()[0]
    gpu = device.platform == "gpu"
    default = "triton" if gpu else "xla"
    impls = [default, *peers.PEERS] if options.impl == ["all"] else options.impl or [default]
    check_names("impl", impls, [*BACKENDS, *peers.PEERS])
    check_names("stage", options.stage, list(STAGES))
    check_names("variant", options.variant, list(VARIANTS))
    check_names("direction", options.direction, ["fwd", "fwbw"])
    check_names("dtype", options.dtype, KERNEL_DTYPES)
    recompute = parse_booleans("recompute_states_in_bw", options.recompute_states_in_bw)
    check_gpu("impl", impls, gpu)
    if options.stage and options["direction"].present:
        raise RequestError("a stage has one direction: give --stage or --direction, not both")
    try:
        check_chunk_size(options.chunk_size)
    except ValueError as error:
        raise RequestError(str(error)) from None
    config = parse_config(options.config) if options.config else None
    shapes = parse_shapes(options.shape or (["7b-8k", "tfla-8k", "b1-8k"] if gpu else ["tiny"]))
    requested, rates = (options.peak_tflops, options.peak_tbps), {}
    for dtype in options.dtype:
        measured = roofline.device_rates(device.device_kind, dtype)
        pairs = zip(requested, measured, strict=True)
        flops, bandwidth = (rate if x is None else x * 1e12 for x, rate in pairs)
        rates[dtype] = flops, bandwidth
    if not gpu:
        say_no_gpu(", ".join(impls), list(shapes))
    what = options.direction, options.dtype, options.stage
    return Request(shapes, impls, *what, recompute, options.variant, config, rates)


@contextlib.contextmanager
def persistent_cache(folder: str | None) -> Iterator[None]:
    """A context in which compiled programs are kept in the folder and loaded from there.

    Without a folder nothing changes.
    """
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = [getattr(jax.config, name) for name in names]

    def use(values):
        for name, value in zip(names, values, strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # it remembers the folder of its first use

    if folder:
        use((folder, 0.0, -1))
    try:
        yield
    finally:
        if folder:
            use(before)


# ---------------------------------------------------------------- the command


def define_flags(values: flags.FlagValues) -> None:
    """Not at import: modules that import this one have flags of their own."""
    define = command.Define(values)
    shape = f"{', '.join(SHAPES)}, or BxNHxSxDHQKxDHHV; none: the 8k ones, without a GPU tiny."
    impls = f"{', '.join(BACKENDS)}, {', '.join(peers.PEERS)}"
    default = "all: mlstm_pallas and every peer; none: triton, without a GPU xla."
    stage = f"Stages by themselves: {', '.join(STAGES)}."
    direction = "fwd: forward; fwbw: forward and backward."
    dtype = f"Of q, k, v: {', '.join(KERNEL_DTYPES)}."
    chunk_size = "Of mlstm_pallas; none: the plan's."
    row = "keywords of KernelConfig as JSON, '{\"fused\": true}', or a file with them."
    recompute = "Of mlstm_pallas, forward and backward: true, false."
    packed = f"packed: exp with {peers.PACKED} packed sequences; BTNH: exp with (B, S, NH, D)."
    cache = "Folder in which compiled programs are kept between processes."
    medians = "Print a table of the medians in Markdown at the end."
    tflops = "The device's rate of matrix products, for the roofline."
    tbps = "The device's memory bandwidth, for the roofline."
    define.list("shape", [], shape)
    define.list("impl", [], f"{impls}; {default}")
    define.list("stage", [], stage)
    define.list("direction", ["fwd"], direction)
    define.list("dtype", ["bfloat16"], dtype)
    define.integer("chunk_size", None, chunk_size)
    define.string("config", None, f"Of mlstm_pallas: {row}")
    define.list("recompute_states_in_bw", ["true"], recompute)
    variants = f"Of mlstm_pallas: {', '.join(VARIANTS)}; {packed}"
    define.list("variant", ["exp"], variants)
    define.string("compilation_cache_dir", None, cache)
    define.bool("markdown", False, medians)
    define.float("peak_tflops", None, tflops, lower_bound=1e-9)
    define.float("peak_tbps", None, tbps, lower_bound=1e-9)
    define.shared("repeats", "commit", "from_jsonl", "jsonl", "plot")


def run(options: flags.FlagValues) -> int:
    """Measures and prints; returns the exit code."""

    def start() -> Iterator[Record]:
        return measured_records(options, parse_request(options))

    with persistent_cache(options.compilation_cache_dir):
        records, code = reporting.measure("kernel_benchmark", options, start, COLUMNS, Record)
    if options.markdown and records:
        print(f"\n{markdown(records)}")
    plot_measured(plot, records, options.plot)
    return code


if __name__ == "__main__":
    # Peers in torch need memory on the same device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    command.main(define_flags, run)
