"""Decides what runs where: chunk sizes, schedule, splits, lowerings and tiles.

All of it follows from a ``CallSpec``, by pure functions: the problem, what the caller asks for, and
the facts of the GPU. The ``Tiles`` of a kernel plan the sizes that it reads for a problem;
launchers and schedules read what is decided here.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from mlstm_pallas.formulas.tiles import blocks_over
from mlstm_pallas.launches.kernel_tiles import KernelSpec
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.launches.lowering import Lowering
from mlstm_pallas.operands.chunk_list import MAX_SEGMENTS, num_entries
from mlstm_pallas.planning.backend import named_backend, requested_lowering
from mlstm_pallas.planning.dispatch import Launches, lowerings, tiles_class
from mlstm_pallas.planning.options import Options
from mlstm_pallas.problem.callers import warn_caller
from mlstm_pallas.problem.dimensions import Layout, Problem, make_problem, next_power_of_two
from mlstm_pallas.problem.gpu import HOPPER, UNKNOWN, Gpu
from mlstm_pallas.problem.validation import check_constant, kernel_dtype

# Splits of the fused scan cost a launch and a product over their steps, which shorter splits and
# narrower heads (a smaller DHQK * DHV) do not repay.
MIN_SPLIT_STEPS, MIN_SPLIT_STATE = 1024, 2**15
MIN_FUSED_STATE = 2**13  # DHQK * DHV
FUSED_SHARE = 0.6  # the share of the places for CTAs that the fused scan should fill
# Stages between the others, in the lowering of the kernel that computes or reads the scores.
SMALL = "step_sums", "vector_states", "step_gradients"
# Stages of which a plan has the first or the second ones.
ALTERNATIVES = (
    ({"recurrent_fw_C", "parallel_fw_H"}, {"parallel_fw_P", "recurrent_fw_H"}),
    ({"parallel_bw_dP", "parallel_bw_dQKV"}, {"chunk_gradients"}),
)
SUMMARY_STEPS = 4096  # of a split of a shard's summary: enough work per CTA, and enough CTAs


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallSpec(Options):
    """What a call is asked for, from which its plan follows.

    Attributes:
      lowering: of the kernels, before those that a kernel falls to; "xla": all is plain jnp.
      problem: padded.
      dtype: the dtype of q, k, v in the matrix products; in a step, of the state C.
      gpu: the GPU that the kernels are planned for.
      pooled: whether the states of a step are in pools, (P, NH, ...), with slots (B,). Then NH is
        the only axis that is sharded.
      steps: of a row, before padding.
      num_segments: segments of a row, whose states are returned; None: it is one sequence.
      stage: the stage that a call of tokens runs; None: the call is of sequences.
      chunk_and_splits: steps per chunk and splits of the fused scan, where the devices of a
        sequence exchange what depends on them, so that they are those of the whole call; None: they
        are planned.
    """

    lowering: Lowering
    problem: Problem
    dtype: jnp.dtype
    gpu: Gpu
    steps: int
    pooled: bool = False
    num_segments: int | None = None
    stage: str | None = None
    chunk_and_splits: tuple[int, int] | None = None

    @functools.cached_property
    def plan(self) -> "Plan":
        """The plan of the call, or of the shard."""
        return _plan_of(self)

    def planned_for(self, p: Problem) -> Problem:
        """The problem that tiles and splits follow from."""
        return dataclasses.replace(p, B=1) if self.config.batch_invariant and p.B else p

    def kernel_spec(self, stage: str) -> KernelSpec:
        """The kernels of a stage in the call."""
        return KernelSpec(stage, self.gpu, stores_states=not self.recompute_states_in_bw)

    @property
    def forward_only(self) -> "CallSpec":
        """The spec of a forward pass without a backward pass, which stores no states."""
        return dataclasses.replace(self, recompute_states_in_bw=True)

    def with_heads(self, B: int, NH: int) -> "CallSpec":
        """The spec of a shard."""
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, B=B, NH=NH))


def chunk_size_for(spec: CallSpec) -> int:
    """L, for which the products inside chunks take about half the FLOPs of those with the states.

    The states then take about as much memory as q, k and v. float32 is bound by products, of which
    short chunks have fewer. Mosaic GPU's gradients need at least 128 steps.
    """
    p, lowering, DHQK, DHV = spec.problem, spec.lowering, spec.problem.DHQK, spec.problem.DHV
    size = DHQK * DHV // (DHQK + DHV)
    if lowering is Lowering.XLA or (spec.gpu is UNKNOWN and lowering.folder == "triton"):
        size = min(max(next_power_of_two(size), 64), 256)
        while -p.S % size > -p.S % 64:  # no more padding than chunks of 64 need
            size //= 2
        return size
    if spec.dtype.itemsize > 2:
        return 64
    on_hopper = lowering.folder == "mosaic_gpu"
    if on_hopper and 128 < DHQK < DHV:  # measured at 160/320, 192/256 and 192/384
        size += size // 4
    return min(max(next_power_of_two(size), 128 if on_hopper else 64), 256)


def call_spec(
    options: Options,
    sizes: Mapping[str, Any],
    q_dtype: Any,
    gpu: Gpu,
) -> CallSpec:
    """The spec of a call with B, NH, S, DHQK and DHV of these sizes, traced for this GPU.

    The options decide the chunk size, then their config, then the rule.

    Raises:
      TypeError, ValueError: for a dtype and for symbolic sizes that the backend does not support.
    """
    *shape, DHV = (sizes[dim] for dim in ("B", "NH", "S", "DHQK", "DHV"))
    lowering = requested_lowering(options.backend, gpu, (shape[-1], DHV))
    check_constant(sizes, lowering)
    dtype = kernel_dtype(options.autocast_kernel_dtype, q_dtype, lowering)
    name, backend = named_backend(options.backend)
    if backend == Lowering.MOSAIC_GPU and dtype.itemsize > 2:
        warn_caller(
            f"{name} is 'mosaic_gpu' and products are in {dtype}: its kernels are for bfloat16 and "
            "float16, so others run"
        )
    if 0 in shape:
        lowering = Lowering.XLA  # a kernel has no empty grid
    make = functools.partial(
        make_problem, shape, DHV, pad_heads=lowering is not Lowering.XLA, reverse=options.reverse
    )
    spec = CallSpec(
        **vars(options),
        lowering=lowering,
        problem=make(1),
        dtype=dtype,
        gpu=gpu,
        steps=sizes["S"],
        num_segments=(N := sizes.get("N")),
    )
    if N is not None and N > MAX_SEGMENTS and spec.lowering is not Lowering.XLA:
        raise ValueError(
            f"segment_lengths has {N} documents per row, expected at most {MAX_SEGMENTS}, the "
            "limit of a kernel's grid, or backend 'xla'"
        )
    L = options.chunk_size or spec.config.chunk_size or chunk_size_for(spec)
    spec = dataclasses.replace(spec, problem=make(L))
    if spec.config.tiles and gpu is not UNKNOWN:
        _warn_of_unread_tiles(spec)
    return spec


def _warn_of_unread_tiles(spec: CallSpec) -> None:
    """Warns of tiles of a kernel in whose place others run, for which the config has none."""
    folder, plan = f"{spec.lowering.folder}_", spec.plan.in_list or spec.plan
    launched = {*spec.plan.forward, *plan.backward}
    named = {x.removeprefix(folder) for x, _ in spec.config.tiles if x.startswith(folder)}
    # Without config.fused the heads of a shard decide on the first ones.
    for pair in ALTERNATIVES[spec.config.fused is None :]:
        for stages, others in itertools.permutations(pair):
            for name in named.intersection(stages) - launched if not named & others else ():
                warn_caller(
                    f"config.{folder}{name} is not read: the call runs "
                    f"{' and '.join(sorted(others))} in its place"
                )


def plain(problem: Problem) -> Launch:
    """The launch of a plain form."""
    return Launch(problem, None, lax.Precision.HIGHEST, Lowering.XLA)


def launch_of(
    spec: CallSpec,
    name: str,
    lowering: Lowering,
    problem: Problem | None = None,
    *,
    num_splits: int = 1,
) -> Launch:
    """How a stage runs.

    Args:
      lowering: the one to try before those that a kernel falls to.
      problem: in the chunks of the stage; None: the call's.
      num_splits: of split_products.
    """
    p = problem = problem or spec.problem
    if name == "split_products":
        p = problem.split(num_splits).in_splits(1)
    for possible in lowerings(lowering):
        if tiles := _tiles(spec, name, possible, p):
            precision = spec.config.dot_precision(spec.dtype, possible.interpret)
            return Launch(problem, tiles, precision, possible)
    return plain(problem)


def _tiles(spec: CallSpec, name: str, lowering: Lowering, p: Problem) -> Any:
    """The tiles of a kernel, with the overrides of the config; None: it does not run."""
    tiles_type, field = tiles_class(name, lowering.folder), f"{lowering.folder}_{name}"
    if tiles_type is None:
        return None
    kernel = spec.kernel_spec(name)
    if spec.gpu is UNKNOWN and lowering.folder == "mosaic_gpu":
        kernel = kernel._replace(gpu=HOPPER)
    planned: Any = tiles_type.plan(spec.planned_for(p), spec.dtype, kernel)
    if planned is None:
        return None
    fields = spec.config.tiles_of(field)
    if unknown := fields.keys() - vars(planned).keys():
        raise TypeError(
            f"config.{field} has {', '.join(sorted(unknown))}, expected some of its "
            f"fields {', '.join(vars(planned)) or '(it has none)'}"
        )
    tiles = dataclasses.replace(planned, **fields).clamped(p)
    if tiles.supports(p, kernel):
        return tiles
    if not fields:
        raise ValueError(
            f"config.batch_invariant is True and B * NH is {p.BNH}, expected fewer for the kernel "
            f"{field}, or another backend"
        )
    raise ValueError(
        f"config.{field} is {fields}, expected tiles that the kernel has for heads of "
        f"{p.DHQK}/{p.DHV} in chunks of {p.L} steps, such as {planned}"
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """What runs in a call: the launches of all its stages, and what schedules branch on.

    It is complete when it is made, by ``CallSpec.plan`` alone, and every launch runs.

    Attributes:
      forward, backward: the launches of the passes, in order. Those of a step are ``forward``.
      summary: the launches for what the devices of a sequence exchange.
      fused_problem: the problem in the chunks of the fused scan.
      num_splits: splits of each sequence in the fused scan; 0: the states are materialised.
      summary_splits: splits of each shard of a sequence, where its devices exchange summaries.
      in_list: the plan of the backward pass of packed segments with states, whose rows are copied
        to the order of their ``ChunkList``.
    """

    spec: CallSpec
    # Not compared, because they follow from the spec.
    forward: Launches = dataclasses.field(compare=False)
    backward: Launches = dataclasses.field(default_factory=dict, compare=False)
    summary: Launches = dataclasses.field(default_factory=dict, compare=False)
    fused_problem: Any = None
    num_splits: int = 0
    summary_splits: int = 1
    in_list: Any = None

    @property
    def uses_fused_scan(self) -> bool:
        """True: the forward pass is the fused scan. False: it materialises the states."""
        return self.num_splits > 0

    @property
    def skips_chunks(self) -> bool:
        """Whether the fused scan skips chunks beyond a length: it has no splits and stores no C."""
        return self.num_splits == 1 and self.spec.recompute_states_in_bw

    @property
    def by_chunk(self) -> bool:
        """True: chunk_gradients. False: parallel_bw_dP and parallel_bw_dQKV, P and dP in memory."""
        return "chunk_gradients" in self.backward

    @property
    def is_plain(self) -> bool:
        """Whether all is plain jnp, as on CPUs."""
        return self.spec.lowering is Lowering.XLA

    @property
    def drops_unread(self) -> bool:
        """Whether packed segments whose outputs nobody reads have no gradients, even with inf.

        XLA finds them in dh, which takes a pass on Mosaic GPU. There only float16 has it.
        """
        return self.spec.lowering is not Lowering.MOSAIC_GPU or self.spec.dtype == jnp.float16

    @property
    def one_head_at_a_time(self) -> bool:
        """Whether XLA must not choose the order of sums by the number of heads."""
        return self.is_plain and bool(self.spec.config.batch_invariant)


def _launches(spec: CallSpec, *names: str, lowering: Lowering, **options: Any) -> Launches:
    """The launches of stages, by ``launch_of``."""
    return {name: launch_of(spec, name, lowering, **options) for name in names}


def _until_fused_scan(spec: CallSpec, fused: Launch) -> tuple[Launches, Launches]:
    """The launches up to the fused scan, in its chunks, in two parts.

    The first part is what the devices of a sequence compute for their exchange as well. What is
    small has the lowering of parallel_fw_P.
    """
    of = functools.partial(_launches, spec, problem=fused.problem)
    scores = of("parallel_fw_P", lowering=fused.lowering)
    small = functools.partial(of, lowering=scores["parallel_fw_P"].lowering)
    gates_and_sums = of("chunk_gates", lowering=spec.lowering) | small("step_sums")
    return gates_and_sums, small("vector_states") | scores


def _backward(spec: CallSpec, *, key_sums: bool = False) -> Launches:
    """The launches of the backward pass.

    What is small has the lowering of the kernel that computes the scores. On Mosaic GPU that kernel
    leaves the sums of queries to step_sums.

    key_sums: whether the pass sums keys, because no forward pass has kept n.
    """
    lowering = spec.lowering
    # Its kernel is faster than the stages that it replaces.
    by_chunk = launch_of(spec, "chunk_gradients", lowering).tiles is not None
    first = [] if by_chunk else ["parallel_bw_dP"]
    last = "chunk_gradients" if by_chunk else "parallel_bw_dQKV"
    scores = launch_of(spec, last if by_chunk else "parallel_bw_dP", lowering).lowering
    query_sums = spec.normaliser is not None and scores is Lowering.MOSAIC_GPU
    sums = ["step_sums"] if query_sums or key_sums else []
    between = *sums, "vector_states"
    names = "chunk_gates", *first, "recurrent_bw_dC", *between, last, "step_gradients"
    return {x: launch_of(spec, x, scores if x in SMALL else lowering) for x in names}


def _plan_of(spec: CallSpec) -> Plan:
    p, of = spec.problem, functools.partial(_launches, spec, lowering=spec.lowering)
    if spec.stage is not None:
        return Plan(spec, of(spec.stage))
    if spec.num_segments is not None:
        return _plan_of_segments(spec, spec.num_segments)
    fused = launch_of(spec, "recurrent_fw_H", spec.lowering)
    L, splits = spec.chunk_and_splits or (fused.tiles.siz_b_L if fused.tiles else p.L, None)
    fused_problem = p.in_chunks_of(L)
    num_splits = _num_splits(spec, fused_problem, fused.tiles) if splits is None else splits
    summary_splits = _summary_splits(p, num_splits)
    if fused.tiles is None:
        num_splits = 0

    def products(splits: int) -> Launches:
        return of("split_products", problem=fused_problem, num_splits=splits)

    first, scores = Launches(), Launches()
    if num_splits or spec.chunk_and_splits:
        in_chunks = dataclasses.replace(fused, problem=fused_problem)
        first, scores = _until_fused_scan(spec, in_chunks)
    forward = of("chunk_gates", "recurrent_fw_C", "parallel_fw_H")
    if num_splits:
        forward = scores if spec.chunk_and_splits else first | scores
        if num_splits > 1 and not (spec.chunk_and_splits and summary_splits == num_splits):
            forward |= products(num_splits)
        forward |= of("recurrent_fw_H", problem=fused_problem.split(num_splits))
    return Plan(
        spec,
        forward,
        backward=_backward(spec),
        summary=first | products(summary_splits) if spec.chunk_and_splits else {},
        fused_problem=fused_problem,
        num_splits=num_splits,
        summary_splits=summary_splits,
    )


def _plan_of_segments(spec: CallSpec, N: int) -> Plan:
    """The plan of N packed segments per row, whose states are returned.

    The forward pass is the fused scan over a list of chunks, whose segments run side by side, as
    heads do. The backward pass runs over another list.
    """
    p = spec.problem
    heads = dataclasses.replace(p, NH=p.NH * N)
    fused = launch_of(spec, "recurrent_fw_H", spec.lowering, heads)

    def in_list(L: int) -> Problem:
        return dataclasses.replace(p, S=num_entries(spec.steps, N, L) * L, L=L)

    fused = dataclasses.replace(fused, problem=in_list(fused.tiles.siz_b_L if fused.tiles else p.L))
    first, scores = _until_fused_scan(spec, fused)
    sequence = dataclasses.replace(
        spec.forward_only,
        problem=in_list(p.L),
        layout=Layout.BNTH,
        num_segments=None,
        return_last_states=False,
    )
    backward = _backward(sequence, key_sums=True)
    return Plan(
        spec,
        first | scores | dict(recurrent_fw_H=fused),
        fused_problem=fused.problem,
        in_list=Plan(sequence, {}, backward),
    )


def _num_splits(spec: CallSpec, p: Problem, tiles: Any) -> int:
    """Splits of a sequence in the fused scan; 0: the states are materialised."""
    if tiles is None:
        return 0
    splits = _fused_splits(spec, spec.planned_for(p), tiles)
    stores = tiles.state_rows == p.DHQK and spec.problem.NC % max(splits, 1) == 0
    return splits * (spec.recompute_states_in_bw or stores)


def _summary_splits(p: Problem, num_splits: int) -> int:
    """Splits of a shard's summary.

    They are those of the forward pass, if it has several and they end at chunks of the call,
    because a forward pass with another number of splits computes its products again.
    """
    if num_splits > 1 and p.NC % num_splits == 0:
        return num_splits
    enough = max(p.S // SUMMARY_STEPS, 1)
    return math.gcd(p.NC, 1 << (enough.bit_length() - 1))


def _fused_splits(spec: CallSpec, p: Problem, tiles: Any) -> int:
    """Splits of a sequence into whole chunks of the fused scan; 0: the states are materialised.

    recurrent_fw_H has a CTA for each head and block of columns. Where these are few, the sequence
    is split; one too short for splits has the fused scan only if the CTAs fill a share of the
    places. A third launch, which reads and writes h once more, is slower than states in memory.
    """
    config, whole_chunks = spec.config, p.NC & -p.NC
    if config.fused is False:
        return 0
    if config.num_splits is not None or config.fused:
        return min(config.num_splits or 1, whole_chunks)
    if p.DHQK * p.DHV < MIN_FUSED_STATE or 2 * tiles.state_rows < p.DHQK:
        return 0
    ctas = p.BNH * blocks_over(p.DHV, tiles.siz_b_DHHV)
    places = tiles.ctas_per_sm * spec.gpu.sms
    if ctas >= FUSED_SHARE * places:
        return 1
    splits = next_power_of_two(math.ceil(FUSED_SHARE * places / max(ctas, 1)))
    long = p.DHQK * p.DHV >= MIN_SPLIT_STATE and p.S // splits >= MIN_SPLIT_STEPS
    if long and splits <= whole_chunks:
        return splits
    return int(ctas >= tiles.least_share * places)
