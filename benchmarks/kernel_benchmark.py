r"""Times a stage, the forward pass, or forward and backward of mlstm_pallas, beside others.

    python benchmarks/kernel_benchmark.py         # the three 8k shapes on a GPU, a tiny one without
    python benchmarks/kernel_benchmark.py --shape=7b-8k,8x16x8192x128x128 --direction=fwd,fwbw \
        --impl=all
    python benchmarks/kernel_benchmark.py --shape=seqlen --impl=all --jsonl=seqlen.jsonl
    python benchmarks/kernel_benchmark.py --stage=recurrent_fw_C,parallel_bw_dQKV \
        --impl=triton,xla --dtype=bfloat16,float32
    python benchmarks/kernel_benchmark.py --stage=recurrent_fw_H --impl=triton,mosaic_gpu  # Hopper
    python benchmarks/kernel_benchmark.py --from_jsonl=seqlen.jsonl,more.jsonl \
        --plot=seqlen.png                                                    # measures nothing

Outputs are checked before they are timed, in float64: mlstm_pallas against the recurrence in its
parallel form, a stage against its plain form, peers against their own definition. The first, a
middle and the last head are checked, beyond 32768 steps the last alone. A wrong output is not
timed.

A time is the median over batches of calls in flight between two synchronisations. The spread is
(slowest - fastest) / median of the batches. TFLOP/s, TB/s and roofline count the FLOPs and bytes
that the result needs (roofline.py), whatever an implementation does. Memory is the peak beyond the
inputs. The first call is traced, compiled (unless JAX_COMPILATION_CACHE_DIR has it) and run once.

Exit code 1 when an output is wrong or mlstm_pallas fails, 2 when the request makes no sense, 130
after Ctrl-C.
"""

import dataclasses
import functools
import itertools
import math
import os

import calls
import command
import costs
import jax
import jax.numpy as jnp
import numpy as np
import peers
import reporting
import roofline
import runner
import shapes
from calls import STAGES, Stage, config_row, launch_of, padded
from command import RequestError
from peers import random_inputs, swap_heads
from runner import UnsupportedError, WrongOutputError

from mlstm_pallas import mlstm_chunkwise
from mlstm_pallas.formulas.gate_gradients import TileSums
from mlstm_pallas.formulas.normaliser import DEFAULT_NORMALISER, query_scale
from mlstm_pallas.launches.lowering import Lowering
from mlstm_pallas.operands.scaled_rows import ScaledRows
from mlstm_pallas.planning import call_spec as planning
from mlstm_pallas.planning import dispatch
from mlstm_pallas.planning.options import Options
from mlstm_pallas.problem.dimensions import MAX_TILE, Problem
from mlstm_pallas.problem.gpu import target_gpu
from mlstm_pallas.problem.validation import BACKENDS
from mlstm_pallas.stages.chunk_gradients import ChunkGradients
from mlstm_pallas.stages.parallel_bw_dP import ScoreGradients, ScoreTiles
from mlstm_pallas.stages.parallel_fw_P import ScoresAndKeys

# Relative norms of the error, of outputs and of gradients. bfloat16 has steps of 2**-8, and its
# gradients are made of products of rounded products; float16 has steps of an eighth of that;
# float32 has room for sums of a few thousand terms.
TOLERANCES = {
    "bfloat16": (5e-3, 2e-2),
    "float16": (5e-3 / 8, 2e-2 / 8),
    "float32": (1e-5, 1e-4),
}


# ---------------------------------------------------------------- stages and implementations


def of_stage(stage, call):
    """The stage as a function of its inputs by position."""

    def run(*args, **options):
        operands = stage.operands(**dict(zip(stage.inputs, args, strict=True)))
        return dispatch.stage(stage.name, {stage.name: call})(operands, **options)

    return run


def plain(stage, problem):
    """The plain form of a stage, in the precision of its inputs."""
    return of_stage(stage, planning.plain(problem))


@functools.partial(jax.jit, static_argnums=(1, 2))
def stage_arrays(x, L, fused):
    """The inputs of the stages in chunks of L steps, by their names in ``Stage.inputs``.

    fused: the stages of the fused scan, or all others. The plain forms of the stages run in
    order. The outputs of a stage are then known by ``Stage.outputs``, and its fields by theirs.
    """
    B, NH, S, K, V = x.shape
    problem = Problem(B, NH, S, K, V, L, K**-0.5)
    q, k, v, i, f, dh = (y.reshape(B * NH, *y.shape[2:]) for y in x)
    C, n, m = (jnp.zeros((B * NH, *dims), jnp.float32) for dims in ((K, V), (K,), ()))
    known = dict(matQ=q, matK=k, matV=v, vecI=i, vecF=f, matDeltaH=dh)
    known |= dict(matC_initial=C, vecN_initial=n, scaM_initial=m, matDeltaC_last=C)
    required = {name for stage in STAGES.values() if stage.fused == fused for name in stage.inputs}
    step_sums, vector_states = (
        plain(Stage(name), problem) for name in ("step_sums", "vector_states")
    )
    for name, stage in STAGES.items():  # a stage reads what those before it return
        if required <= known.keys() or (stage.fused and not fused):
            continue
        outputs = plain(stage, problem)(*(known[x] for x in stage.inputs))
        fields = {field: y for field, y in outputs._asdict().items() if y is not None}
        known = {stage.outputs or name: outputs} | fields | known
        match name:  # what no stage returns
            case "chunk_gates":
                abar, gamma = outputs.per_step().vecAbar, outputs.scaGamma
                added = step_sums(k, abar)
                known |= dict(vecAbar=abar, vecN_states=vector_states(added, gamma, n)[0])
            case "parallel_bw_dP":
                delta, terms, gamma = outputs.vecDelta, outputs.vecDeltaN_added, known["scaGamma"]
                of_z = known["vecZ"], known["gates"].per_step().vecM
                known["normaliser_gradients"] = DEFAULT_NORMALISER.gradients(delta, *of_z)
                known["vecDeltaN_states"], _ = vector_states(terms, gamma, n, backward=True)
    return {name: known[name] for name in required}


def written(outputs, L):
    """The outputs of a stage in chunks of L steps, in a form whose shapes do not depend on tiles.

    Those of parallel_bw_dP come without what it leaves unwritten. Sums by tile are sums over
    chunks. Weighted operands are their products.
    """
    if isinstance(outputs, ChunkGradients):
        return outputs._replace(tile_sums=over_chunks(outputs.tile_sums, L))
    if isinstance(outputs, ScoresAndKeys):
        return outputs._replace(keys=outputs.keys.product())
    return _written(outputs, L) if isinstance(outputs, ScoreGradients) else outputs


def over_chunks(sums, L):
    """The sums of W over the chunk of L steps, of the tiles that are written."""
    per_query, per_key, diagonal = sums
    n, S = per_query.shape[1:]
    tile, other = jnp.arange(S) % L // (L // n), jnp.arange(n)[:, None]

    def total(x, where):
        return jnp.sum(jnp.where(where, x, 0.0), axis=1)

    return TileSums(total(per_query, other <= tile), total(per_key, other >= tile), diagonal)


@functools.partial(jax.jit, static_argnums=1)
def _written(outputs, L):
    scores, block = outputs.scores, jnp.arange(L) // MAX_TILE

    def lower(x):
        return jnp.where(block[:, None] >= block, x.reshape(len(x), -1, L, L), 0.0)

    scores = ScoreTiles(
        lower(scores.matP), lower(scores.matDeltaP), over_chunks(scores.tile_sums, L)
    )
    products = dict(queries=outputs.queries.product(), keys=outputs.keys.product())
    return outputs._replace(scores=scores, **products)


# Arrays (B, S, NH, ...): passed as they are, or transposed by the caller.
STEPS_FIRST = ("BTNH", "transposed")
VARIANTS = calls.VARIANTS | {"transposed": {}}
ORACLES = {
    "packed": peers.packed,
    "sigmoid": peers.sigmoid_normalised,
    "unnormalised": peers.sigmoid_input_gate,
}


class MlstmPallas(peers.JaxImplementation):
    """mlstm_chunkwise on a backend."""

    def __init__(
        self, backend, shape, dtype, chunk_size=None, config=None, variant="exp", gpu=None
    ):
        self.name, self.variant, self.oracle = backend, variant, ORACLES.get(variant, peers.exact)
        options = Options(
            return_last_states=True,
            chunk_size=chunk_size,
            recompute_states_in_bw=variant != "states_kept",
            backend=backend,
            config=config,
        )
        self.spec = planning.call_spec(
            options, shape._asdict(), jnp.dtype(dtype), gpu or target_gpu()
        )
        self.steps_first = variant in STEPS_FIRST
        self.config = config_row(self.spec)

    def computation(self, inputs, direction):
        options = dict(backend=self.name, config=self.spec.config, **VARIANTS[self.variant])
        options["chunk_size"] = self.spec.problem.L
        if self.variant == "packed":
            B, _, S, *_ = inputs.shape
            if S % peers.PACKED:
                raise ValueError(f"packed: {peers.PACKED} sequences do not fill {S} steps")
            options["segment_ids"] = jnp.broadcast_to(jnp.arange(S) // (S // peers.PACKED), (B, S))
        forward = functools.partial(mlstm_chunkwise, **options)
        if self.steps_first:
            inputs = type(inputs)(*swap_heads(*inputs))
        if self.variant == "transposed":

            def forward(*args, heads_first=forward):
                return swap_heads(heads_first(*swap_heads(*args)))[0]

        return peers.directed(forward, inputs, direction)


class MlstmPallasStage(MlstmPallas):
    """A stage by itself, on inputs of ``stage_arrays``, against its plain form."""

    head_axes = 1

    def __init__(self, stage, backend, shape, dtype, *args):
        super().__init__(backend, shape, dtype, *args)
        self.stage = STAGES[stage]
        if sizes := padded(self.spec, shape):
            raise ValueError(f"a stage by itself is not padded: its tiles need {sizes}")
        self.call = launch_of(self.spec, stage)
        self.config |= config_row(self.spec, [stage])
        # Whether recurrent_bw_dC has queries and keys with their weights.
        backward, before = self.spec.plan.backward, ("parallel_bw_dP", "recurrent_bw_dC")
        calls = (backward[name] for name in before if name in backward)
        self.weighted = all(call.lowering.folder == "mosaic_gpu" for call in calls)
        if Lowering(backend).folder != self.call.lowering.folder:
            raise UnsupportedError(f"{stage} has no {backend} kernel for this shape and dtype")

    def phases(self, shape, itemsize, direction):
        cost = costs.launch_cost(self.stage.name, self.call, itemsize)
        if self.weighted and self.stage.name == "recurrent_bw_dC":  # reads r and abar
            cost = cost._replace(bytes=cost.bytes + 8 * shape.steps)
        return (cost,)

    def computation(self, inputs, direction):
        arrays, name = dict(inputs), self.stage.name
        if self.call.lowering.folder == "mosaic_gpu" and name == "recurrent_fw_H":
            keys = ScaledRows(inputs["matK"], inputs["gates"].per_step().vecAbar)
            arrays["scores_and_keys"] = inputs["scores_and_keys"]._replace(keys=keys)
        if self.weighted and name == "recurrent_bw_dC":
            g, inverse = inputs["gates"].per_step(), inputs["normaliser_gradients"].vecInvDen
            r = query_scale(g.vecW, self.call.problem.qk_scale, inverse)
            arrays["queries"] = ScaledRows(inputs["matQ"], r)
            arrays["keys"] = ScaledRows(inputs["matK"], g.vecAbar)
        return of_stage(self.stage, self.call), [arrays[name] for name in self.stage.inputs]

    def oracle_arguments(self, inputs):
        return [inputs[name] for name in self.stage.inputs], None

    def reference(self, *args):
        heads = jax.tree.leaves(args)[0].shape[0]
        problem = dataclasses.replace(self.call.problem, B=1, NH=heads)
        return written(plain(self.stage, problem)(*args), problem.L)

    def finite(self, outputs):
        return super().finite(written(outputs, self.call.problem.L))

    def heads(self, outputs, index):
        return super().heads(written(outputs, self.call.problem.L), index)

    def named(self, outputs):
        """By field; the fields of NamedTuples inside count, pairs of floats as their sum."""
        fields = {}
        for name, x in outputs._asdict().items():
            if hasattr(x, "_asdict"):
                fields |= self.named(x)
            elif x is not None:
                fields[name] = sum(x) if isinstance(x, tuple) else x
        return fields


# ---------------------------------------------------------------- expected outputs


class Case:
    """Inputs and expected outputs of one shape and dtype, for all implementations and stages.

    Args:
      gradients: whether the gradients of whole calls are checked too.
      mean_f: of the forget gates' pre-activations.
    """

    def __init__(self, shape, dtype, *, gradients=False, mean_f=4.0):
        self.shape, self.dtype, self.gradients, self.mean_f = shape, dtype, gradients, mean_f
        self._expected = {}
        self.arrays = functools.lru_cache(maxsize=1)(self._arrays)

    @functools.cached_property
    def inputs(self):
        inputs = random_inputs(jax.random.key(0), self.shape, self.dtype, self.mean_f)
        return jax.block_until_ready(inputs)

    def _arrays(self, L, fused):
        return jax.block_until_ready(stage_arrays(self.inputs, L, fused))

    def inputs_of(self, impl):
        """The inputs of impl.build; those of stages in chunks of L steps, for the last L."""
        return self.arrays(impl.call.problem.L, impl.stage.fused) if impl.stage else self.inputs

    def expected(self, impl):
        """Indices of the checked heads, and the expected outputs of these, float64."""
        key = (impl.stage.name, impl.call.problem.L) if impl.stage else impl.oracle
        if key not in self._expected:
            args, cotangent = impl.oracle_arguments(self.inputs_of(impl))
            index = self.checked_heads(math.prod(jax.tree.leaves(args)[0].shape[: impl.head_axes]))

            @jax.jit
            def outputs(args, cotangent):
                if impl.stage:
                    return impl.reference(*args)
                direction = "fwbw" if self.gradients else "fwd"
                function, args = peers.directed(impl.reference, [*args, cotangent], direction)
                return function(*args)

            args, cotangent = peers.take_heads((args, cotangent), index, axes=impl.head_axes)
            with jax.enable_x64(True):
                self._expected[key] = index, jax.tree.map(np.asarray, outputs(args, cotangent))
        return self._expected[key]

    def checked_heads(self, heads):
        return np.unique([0, heads // 2, heads - 1])[0 if self.shape.S <= 2**15 else -1 :]

    def errors(self, impl, outputs, direction=""):
        """By output, the norm of its error over its norm."""
        index, expected = self.expected(impl)
        named, expected = impl.named(impl.heads(outputs, index)), impl.named(expected)
        if direction == "fwd" and not impl.stage:
            expected = dict(list(expected.items())[:1])
        return {name: runner.relative_error(named[name], y) for name, y in expected.items()}

    def limits(self, impl, names):
        """The largest errors that outputs may have."""
        if not impl.stage:
            return {name: TOLERANCES[self.dtype][name.startswith("d")] for name in names}
        # What has no matrices is float32, whatever the dtype.
        matrices = any(name.startswith("mat") for name in impl.stage.inputs)
        limits = TOLERANCES[self.dtype if matrices else "float32"]
        return dict.fromkeys(names, limits[impl.stage.backward])


# ---------------------------------------------------------------- measuring


def measure(row, case, options):
    """Fills the row; does not time a wrong output."""
    name, direction, stage = row["impl"], row["direction"], row["stage"]
    if name in BACKENDS:
        settings = name, case.shape, case.dtype, options.chunk_size, options.config
        impl = (
            MlstmPallasStage(stage, *settings) if stage else MlstmPallas(*settings, row["variant"])
        )
    elif stage:
        raise UnsupportedError("only mlstm_pallas has stages")
    else:
        impl = peers.PEERS[name]()
    call, outputs = runner.first_call(row, impl, case.inputs_of(impl), direction)
    row["config"] = dict(impl.config)
    if not impl.finite(outputs):
        raise WrongOutputError("not finite")
    errors = case.errors(impl, outputs, direction)
    runner.check(row, errors, case.limits(impl, impl.checked or errors))
    row["note"] = "" if impl.oracle in peers.MLSTM else "other function"
    del outputs
    seconds = runner.measure(row, impl, call, options.repeats)
    phases = impl.phases(case.shape, jnp.dtype(case.dtype).itemsize, direction)
    row["tflops"], row["tbps"] = (sum(x) / seconds / 1e12 for x in zip(*phases, strict=True))
    flops, bandwidth = roofline.device_rates(row["device"], case.dtype)
    if flops and bandwidth:
        floor = roofline.floor_seconds(phases, flops, bandwidth)
        row["roofline_pct"] = 100 * floor / seconds


def measured_rows(options):
    """A row for each shape, dtype, stage or direction, and implementation."""
    gpu = runner.on_gpu()
    default = "triton" if gpu else "xla"
    groups = dict(all=[default, *peers.PEERS], peers=[*peers.PEERS])
    impls = [impl for name in options.impl or [default] for impl in groups.get(name, [name])]
    impls = [*dict.fromkeys(impls)]  # one by its name and in a group has one row
    runner.check_gpu(impls)
    if options.stage and options["direction"].present:
        raise RequestError("--stage has one direction: give it or --direction, not both")
    named = shapes.named(options.shape, *(("7b-8k", "tfla-8k", "b1-8k") if gpu else ("tiny",)))
    for (name, shape), dtype, stage in itertools.product(
        named.items(), options.dtype, options.stage or [""]
    ):
        directions = [("bwd" if STAGES[stage].backward else "fwd")] if stage else options.direction
        case = Case(shape, dtype, gradients="fwbw" in directions)
        for direction, impl in itertools.product(directions, impls):
            ours = impl in BACKENDS
            for variant in options.variant if ours and not stage else [None]:
                keys = dict(direction=direction, dtype=dtype, stage=stage, variant=variant)
                row = runner.new_row(options, name, shape, impl, **keys)
                yield runner.attempt(row, ours, measure, case, options)


# ---------------------------------------------------------------- reporting


def label(row, *parts):
    """The parts of the row, and its variant."""
    return " ".join(filter(None, (*(row[x] for x in parts), row["variant"]))).removesuffix(" exp")


def tokens_per_s(row):
    return row.get("ms") and row["shape"].B * row["shape"].S / row["ms"] * 1e3


def plot(rows, path):
    """Tokens per second against the sequence length or the batch where that varies, else the time
    of each shape."""
    different = {row["shape"] for row in rows}
    axes = {"S": "sequence length S", "B": "batch B"} if len(different) > 1 else {}
    vary = [x for x in axes if len({getattr(y, x) for y in different}) == len(different)]

    def x(row):
        return getattr(row["shape"], vary[0]) if vary else row["name"]

    options = dict(beside=True)
    if vary:
        options |= dict(keys=["tokens_per_s"], xlabel=axes[vary[0]])
        rows = [row | dict(tokens_per_s=tokens_per_s(row)) for row in rows]
    parts = "impl", "stage", *["dtype"] * (len({row["dtype"] for row in rows}) > 1)
    reporting.plot(rows, path, lambda row: label(row, *parts), x, **options)


COLUMNS = reporting.columns(
    """
shape         name
impl          impl
what          what
dtype         dtype
ms            ms            .3f
spread %      spread        .1%
TFLOP/s       tflops        .3g
TB/s          tbps          .3g
roofline %    roofline_pct  .0f
peak MiB      peak_mib      .1f
first call s  first_call_s  .1f
error         error         .1e
note          note
""",
    what=lambda row: row["stage"] or label(row, "direction"),
)


# ---------------------------------------------------------------- the command


def define_flags(define):
    known = *BACKENDS, *peers.PEERS, "peers", "all"
    default = "triton (xla without a GPU) and all peers; none: triton or xla"
    packed = f"packed: exp with {peers.PACKED} packed sequences; BTNH: exp with (B, S, NH, D)."
    define.names("impl", [], known, f"the last one is {default}.")
    define.names("stage", [], STAGES, "stages by themselves.")
    define.names("variant", ["exp"], VARIANTS, f"what mlstm_pallas computes; {packed}")
    define.shared("shape", "direction", "dtype", "repeats", "commit", "from_jsonl", "jsonl", "plot")
    calls.define_chunks(define)


run = functools.partial(runner.run, measured_rows, COLUMNS, plot=plot)


if __name__ == "__main__":
    # Peers in torch need memory on the same device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    command.main(define_flags, run)
