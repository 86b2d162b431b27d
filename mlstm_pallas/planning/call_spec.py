"""Decides what runs where: chunk sizes, schedule, splits, lowerings and tiles.

All of it follows from a ``CallSpec``, by pure functions: the problem, what the caller asks for, and
the facts of the GPU. The ``Tiles`` of a kernel plan the sizes that it reads for a problem;
launchers and schedules read what is decided here.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax.numpy as jnp
from jax import lax

from mlstm_pallas.formulas.chunk_list import num_entries
from mlstm_pallas.formulas.tiles import blocks_over
from mlstm_pallas.planning.backend import lowering_on_gpu, requested_backend
from mlstm_pallas.planning.dispatch import lowerings, stage, tiles_class
from mlstm_pallas.planning.options import Options
from mlstm_pallas.problem.dimensions import Problem, make_problem, next_power_of_two
from mlstm_pallas.problem.gpu import HOPPER, UNKNOWN, Gpu, target_gpu
from mlstm_pallas.problem.validation import check_constant, kernel_dtype
from mlstm_pallas.stages.stage import Launch, Lowering

# Splits of the fused scan cost a launch and a product over their steps, which shorter splits and
# narrower heads (a smaller DHQK * DHV) do not repay.
MIN_SPLIT_STEPS, MIN_SPLIT_STATE = 1024, 2**15
MIN_FUSED_STATE = 2**13  # DHQK * DHV
SCAN_SHARE = 0.6  # the share of the places for CTAs that the fused scan should fill
SUMMARY_STEPS = 4096  # of a split of a shard's summary: enough work per CTA, and enough CTAs


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallSpec(Options):
    """What a call is asked for, from which its plan follows.

    backend is the one that ``requested_backend`` found, or "xla" without heads.

    Attributes:
      problem: padded.
      dtype: the dtype of q, k, v in the matrix products; in a step, of the state C.
      gpu: the GPU that the kernels are planned for.
      has_initial_state: False: the states start from zeros, which have no gradients.
      pooled: whether the states of a step are in pools, (P, NH, ...), with slots (B,). Then NH is
        the only axis that is sharded.
      front: 1: the first of num_segments is of ids below 0, because the initial states of the next
        one enter behind its steps.
    """

    problem: Problem
    dtype: jnp.dtype
    gpu: Gpu
    has_initial_state: bool = True
    pooled: bool = False
    front: int = 0

    def __str__(self) -> str:
        """The fields and what follows from them, for the log."""
        return str(self.plan)

    @property
    def lowering(self) -> Lowering:
        """The lowering of the kernels, before those that a kernel falls to."""
        return lowering_on_gpu(self.backend or "triton")

    @functools.cached_property
    def plan(self) -> "Plan":
        """The plan of the call's kernels."""
        scan = self.launch("recurrent_fw_H", self.lowering)
        p, tiles, splits = self.problem, scan.tiles, 0
        if tiles is not None:
            p = p.in_chunks_of(tiles.siz_b_L)
            splits = _scan_splits(self, self.planned_for(p), tiles)
            stores = tiles.state_rows == p.DHQK and self.problem.NC % max(splits, 1) == 0
            splits *= self.recompute_states_in_bw or stores
        computes_scores = self.computes_scores(self.lowering)
        return Plan(self, splits > 0, max(splits, 1), p, scan.lowering, computes_scores)

    def planned_for(self, p: Problem) -> Problem:
        """The problem that tiles and splits follow from."""
        return dataclasses.replace(p, B=1) if self.config.batch_invariant and p.B else p

    @property
    def forward_only(self) -> "CallSpec":
        """The spec of a forward pass without a backward pass, which stores no states."""
        return dataclasses.replace(self, recompute_states_in_bw=True)

    def with_heads(self, B: int, NH: int) -> "CallSpec":
        """The spec of a shard."""
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, B=B, NH=NH))

    def launch(
        self, name: str, lowering: Lowering, problem: Problem | None = None, num_splits: int = 1
    ) -> Launch:
        """How a stage runs.

        Args:
          lowering: the first to try, or that of the kernel whose outputs the stage reads.
          problem: in the chunks of the stage; None: the call's.
          num_splits: of split_products.
        """
        p = problem = problem or self.problem
        asked = asked_of(name, self, lowering)
        if name == "split_products":
            p = problem.split(num_splits).in_splits(1)
        for possible in lowerings(lowering):
            if tiles := _tiles(name, possible, p, self, asked):
                precision = self.config.dot_precision(self.dtype, possible.interpret)
                return Launch(problem, tiles, precision, possible)
        return plain(problem)

    def stage(
        self, name: str, lowering: Lowering, problem: Problem | None = None, num_splits: int = 1
    ) -> Callable[..., Any]:
        """The function of a stage's operands and options that runs it as ``launch`` says."""
        return stage(name, self.launch(name, lowering, problem, num_splits))

    def packed(self, lowering: Lowering, S: int) -> dict[str, Launch]:
        """The launches of a forward pass with the states of packed segments, in order.

        It is the fused scan over a ``ChunkList`` of rows of S steps. Its segments run side by side,
        as heads do.
        """
        p, N = self.problem, cast(int, self.num_segments)
        segments_as_heads = dataclasses.replace(p, NH=p.NH * N)
        scan = self.launch("recurrent_fw_H", lowering, segments_as_heads)
        L = scan.tiles.siz_b_L if scan.tiles else p.L
        p = dataclasses.replace(p, S=num_entries(S, N, L) * L, L=L)
        return {
            "chunk_gates": self.launch("chunk_gates", lowering, p),
            "parallel_fw_P": self.launch("parallel_fw_P", scan.lowering, p),
            "recurrent_fw_H": dataclasses.replace(scan, problem=p),
        }

    def computes_scores(self, lowering: Lowering) -> bool:
        """Whether parallel_bw_dQKV computes P and dP, and recurrent_bw_dC before it delta.

        Otherwise parallel_bw_dP computes all three, and P and dP are in memory.
        """
        tiles = self.launch("parallel_bw_dQKV", lowering).tiles
        return getattr(tiles, "computes_scores", False)


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
    *,
    gpu: Gpu | None = None,
    has_initial_state: bool = True,
) -> CallSpec:
    """The spec of a call with B, NH, S, DHQK and DHV of these sizes.

    The options decide the chunk size, then their config, then the rule.

    Raises:
      TypeError, ValueError: for a dtype and for symbolic sizes that the backend does not support.
    """
    gpu = gpu or target_gpu()
    backend = requested_backend(options.backend, gpu)
    check_constant(sizes, backend)
    *shape, DHV = (sizes[dim] for dim in ("B", "NH", "S", "DHQK", "DHV"))
    dtype = kernel_dtype(options.autocast_kernel_dtype, q_dtype, backend)
    if 0 in shape:
        backend = "xla"  # a kernel has no empty grid
    make = functools.partial(
        make_problem, shape, DHV, pad_heads=backend != Lowering.XLA, reverse=options.reverse
    )
    spec = CallSpec(
        **vars(options) | dict(backend=backend),
        problem=make(1),
        dtype=dtype,
        gpu=gpu,
        has_initial_state=has_initial_state,
    )
    L = options.chunk_size or spec.config.chunk_size or chunk_size_for(spec)
    return dataclasses.replace(spec, problem=make(L))


def plain(problem: Problem) -> Launch:
    """The launch of a plain form."""
    return Launch(problem, None, lax.Precision.HIGHEST, Lowering.XLA)


def asked_of(name: str, spec: CallSpec, first: Lowering) -> dict[str, Any]:
    """What a call asks of a kernel beside its result, as far as its tiles depend on it."""
    if name == "recurrent_fw_H":
        return dict(stores=not spec.recompute_states_in_bw)
    if name == "recurrent_fw_C":
        return dict(has_x=True)
    if name == "recurrent_bw_dC":
        has_h = spec.computes_scores(first)
        return dict(recurrences=1 + spec.recompute_states_in_bw, has_h=has_h)
    return dict(stores_X=False) if name == "split_products" else {}


def _tiles(name: str, lowering: Lowering, p: Problem, spec: CallSpec, asked: dict[str, Any]) -> Any:
    """The tiles of a kernel, with the overrides of the config; None: it does not run."""
    field, gpu = f"{lowering.folder}_{name}", spec.gpu
    if gpu is UNKNOWN and lowering.folder == "mosaic_gpu":
        gpu = HOPPER
    kernel = tiles_class(name, lowering.folder)
    planned: Any = kernel and kernel.plan(spec.planned_for(p), spec.dtype, gpu, **asked)
    if planned is None:
        return None
    if spec.config.batch_invariant and hasattr(planned, "num_ctas"):  # which share the same items
        planned = dataclasses.replace(planned, num_ctas=gpu.sms)
    if lowering.interpret and hasattr(planned, "num_ctas"):  # each of which has several items
        planned = dataclasses.replace(planned, num_ctas=min(planned.num_ctas, 2))
    fields = spec.config.tiles_of(field)
    if unknown := fields.keys() - vars(planned).keys():
        raise TypeError(
            f"config.{field} has {', '.join(sorted(unknown))}, expected some of its "
            f"fields {', '.join(vars(planned)) or '(it has none)'}"
        )
    tiles = dataclasses.replace(planned, **fields).clamped(p)
    if tiles.supports(p, **asked):
        return tiles
    raise ValueError(
        f"config.{field} is {fields}, expected tiles that the kernel has for heads of "
        f"{p.DHQK}/{p.DHV} in chunks of {p.L} steps, such as {planned}"
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """What runs in a call of kernels.

    Attributes:
      fused: True: the forward pass is the fused scan. False: it materialises the states.
      num_splits: of each sequence in the fused scan.
      scan_problem: the problem in the chunks of the fused scan, used or not.
      scan_lowering: of the fused scan.
      computes_scores: see ``CallSpec``.
    """

    spec: CallSpec
    fused: bool
    num_splits: int
    scan_problem: Problem
    scan_lowering: Lowering
    computes_scores: bool

    @property
    def summary_splits(self) -> int:
        """Splits of each shard of a sequence, where its devices exchange summaries.

        They are those of the forward pass, if it has several and they end at chunks of the call,
        because a forward pass with another number of splits computes its products again.
        """
        NC, S = self.spec.problem.NC, self.spec.problem.S
        if self.num_splits > 1 and NC % self.num_splits == 0:
            return self.num_splits
        enough = max(S // SUMMARY_STEPS, 1)
        return math.gcd(NC, 1 << (enough.bit_length() - 1))

    @property
    def forward(self) -> dict[str, Launch]:
        """The launches of the forward pass, in order, without small ones."""
        launch, first, p = self.spec.launch, self.spec.lowering, self.scan_problem
        if not self.fused:
            names = "chunk_gates", "recurrent_fw_C", "parallel_fw_H"
            return {name: launch(name, first) for name in names}
        launches = {
            "chunk_gates": launch("chunk_gates", first, p),
            "parallel_fw_P": launch("parallel_fw_P", self.scan_lowering, p),
        }
        if self.num_splits > 1:
            launches["split_products"] = launch("split_products", first, p, self.num_splits)
        scan = launch("recurrent_fw_H", first, p.split(self.num_splits))
        return launches | {"recurrent_fw_H": scan}

    @property
    def backward(self) -> dict[str, Launch]:
        """The launches of the backward pass."""
        scores = () if self.computes_scores else ("parallel_bw_dP",)
        names = "chunk_gates", *scores, "recurrent_bw_dC", "parallel_bw_dQKV"
        return {name: self.spec.launch(name, self.spec.lowering) for name in names}


def _scan_splits(spec: CallSpec, p: Problem, tiles: Any) -> int:
    """Splits of a sequence into whole chunks of the fused scan; 0: the states are materialised.

    The scan has a CTA for each head and block of columns. Where these are few it is split; a
    sequence too short for splits is scanned only if the CTAs fill a share of the places. A third
    launch, which reads and writes h once more, is slower than states in memory.
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
    if ctas >= SCAN_SHARE * places:
        return 1
    splits = next_power_of_two(math.ceil(SCAN_SHARE * places / max(ctas, 1)))
    long = p.DHQK * p.DHV >= MIN_SPLIT_STATE and p.S // splits >= MIN_SPLIT_STEPS
    if long and splits <= whole_chunks:
        return splits
    return int(ctas >= tiles.least_share * places)
