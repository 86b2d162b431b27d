"""Decides what runs where: chunk sizes, schedule, splits, lowerings and tiles.

All of it follows from a ``CallSpec``, by pure functions: the problem, what the caller asks for, and
the facts of the GPU. The ``Tiles`` of a kernel plan the sizes that it reads for a problem;
launchers and schedules read what is decided here.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, cast

import jax.numpy as jnp
from jax import lax

from mlstm_pallas.formulas.chunk_list import num_entries
from mlstm_pallas.formulas.tiles import blocks_over
from mlstm_pallas.planning.backend import lowering_on_gpu, requested_backend
from mlstm_pallas.planning.dispatch import Launches, lowerings, tiles_class
from mlstm_pallas.planning.options import Options
from mlstm_pallas.problem.dimensions import Problem, make_problem, next_power_of_two
from mlstm_pallas.problem.gpu import HOPPER, UNKNOWN, Gpu, target_gpu
from mlstm_pallas.problem.validation import check_constant, kernel_dtype
from mlstm_pallas.stages.stage import KernelOptions, Launch, Lowering

# Splits of the fused scan cost a launch and a product over their steps, which shorter splits and
# narrower heads (a smaller DHQK * DHV) do not repay.
MIN_SPLIT_STEPS, MIN_SPLIT_STATE = 1024, 2**15
MIN_FUSED_STATE = 2**13  # DHQK * DHV
SCAN_SHARE = 0.6  # the share of the places for CTAs that the fused scan should fill
# Stages between the others, in the lowering of the kernel that computes or reads the scores.
SMALL = "step_sums", "vector_states", "step_gradients"
SUMMARY_STEPS = 4096  # of a split of a shard's summary: enough work per CTA, and enough CTAs


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallSpec(Options):
    """What a call is asked for, from which its plan follows.

    backend is the one that ``requested_backend`` found, or "xla" without heads.

    Attributes:
      problem: padded.
      dtype: the dtype of q, k, v in the matrix products; in a step, of the state C.
      gpu: the GPU that the kernels are planned for.
      pooled: whether the states of a step are in pools, (P, NH, ...), with slots (B,). Then NH is
        the only axis that is sharded.
      front: 1: the first of num_segments is of ids below 0, because the initial states of the next
        one enter behind its steps.
    """

    problem: Problem
    dtype: jnp.dtype
    gpu: Gpu
    pooled: bool = False
    front: int = 0

    @property
    def lowering(self) -> Lowering:
        """The lowering of the kernels, before those that a kernel falls to."""
        return lowering_on_gpu(self.backend or "triton")

    @functools.cached_property
    def plan(self) -> "Plan":
        """The plan of the call's kernels."""
        return Plan(self, self.lowering)

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
    )
    L = options.chunk_size or spec.config.chunk_size or chunk_size_for(spec)
    return dataclasses.replace(spec, problem=make(L))


def plain(problem: Problem) -> Launch:
    """The launch of a plain form."""
    return Launch(problem, None, lax.Precision.HIGHEST, Lowering.XLA)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What runs in a call: how schedules find their stages.

    Attributes:
      lowering: of the kernels, before those that a kernel falls to; "xla": all is plain jnp.
    """

    spec: CallSpec
    lowering: Lowering

    def launch(
        self,
        name: str,
        problem: Problem | None = None,
        *,
        first: Lowering | None = None,
        num_splits: int = 1,
    ) -> Launch:
        """How a stage runs.

        Args:
          problem: in the chunks of the stage; None: the call's.
          first: the lowering to try first, of the kernel whose outputs the stage reads; None: the
            plan's.
          num_splits: of split_products.
        """
        spec = self.spec
        p = problem = problem or spec.problem
        if name == "split_products":
            p = problem.split(num_splits).in_splits(1)
        for possible in lowerings(first or self.lowering):
            if tiles := self._tiles(name, possible, p):
                precision = spec.config.dot_precision(spec.dtype, possible.interpret)
                return Launch(problem, tiles, precision, possible)
        return plain(problem)

    def _tiles(self, name: str, lowering: Lowering, p: Problem) -> Any:
        """The tiles of a kernel, with the overrides of the config; None: it does not run."""
        spec, options, field = self.spec, self.options(name), f"{lowering.folder}_{name}"
        if spec.gpu is UNKNOWN and lowering.folder == "mosaic_gpu":
            options = dataclasses.replace(options, gpu=HOPPER)
        kernel = tiles_class(name, lowering.folder)
        planned: Any = kernel and kernel.plan(spec.planned_for(p), spec.dtype, options)
        if planned is None:
            return None
        if lowering.interpret and hasattr(planned, "num_ctas"):
            # So that a CTA has several items.
            planned = dataclasses.replace(planned, num_ctas=min(planned.num_ctas, 2))
        fields = spec.config.tiles_of(field)
        if unknown := fields.keys() - vars(planned).keys():
            raise TypeError(
                f"config.{field} has {', '.join(sorted(unknown))}, expected some of its "
                f"fields {', '.join(vars(planned)) or '(it has none)'}"
            )
        tiles = dataclasses.replace(planned, **fields).clamped(p)
        if tiles.supports(p, options):
            return tiles
        raise ValueError(
            f"config.{field} is {fields}, expected tiles that the kernel has for heads of "
            f"{p.DHQK}/{p.DHV} in chunks of {p.L} steps, such as {planned}"
        )

    def options(self, name: str) -> KernelOptions:
        """The options of a kernel as far as the call decides them."""
        of_kernel = functools.partial(KernelOptions, self.spec.gpu)
        if name == "recurrent_fw_H":
            return of_kernel(stores_states=not self.spec.recompute_states_in_bw)
        if name == "recurrent_fw_C":
            return of_kernel(has_vector=True)
        if name == "recurrent_bw_dC":
            recurrences = 1 + self.spec.recompute_states_in_bw
            return of_kernel(recurrences=recurrences, has_h=self.computes_scores)
        return of_kernel(has_h=name == "parallel_bw_dP", stores_states=name != "split_products")

    @functools.cached_property
    def scan(self) -> Launch:
        """The fused scan without splits, whose tiles have its chunks, used or not."""
        return self.launch("recurrent_fw_H")

    @property
    def scan_problem(self) -> Problem:
        """The problem in the chunks of the fused scan."""
        p, tiles = self.spec.problem, self.scan.tiles
        return p if tiles is None else p.in_chunks_of(tiles.siz_b_L)

    @functools.cached_property
    def num_splits(self) -> int:
        """Splits of each sequence in the fused scan; 0: the states are materialised."""
        spec, tiles, p = self.spec, self.scan.tiles, self.scan_problem
        if tiles is None:
            return 0
        splits = _scan_splits(spec, spec.planned_for(p), tiles)
        stores = tiles.state_rows == p.DHQK and spec.problem.NC % max(splits, 1) == 0
        return splits * (spec.recompute_states_in_bw or stores)

    @property
    def uses_fused_scan(self) -> bool:
        """True: the forward pass is the fused scan. False: it materialises the states."""
        return self.num_splits > 0

    @functools.cached_property
    def computes_scores(self) -> bool:
        """Whether parallel_bw_dQKV computes P and dP, and recurrent_bw_dC before it delta.

        Otherwise parallel_bw_dP computes all three, and P and dP are in memory.
        """
        return getattr(self.launch("parallel_bw_dQKV").tiles, "computes_scores", False)

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

    def launches(self, *names: str, **options: Any) -> Launches:
        """The launches of stages; options: the other arguments of ``launch``."""
        return {name: self.launch(name, **options) for name in names}

    def _until_scan(self, p: Problem, first: Lowering) -> Launches:
        """The launches up to the fused scan, in its chunks; first: the scan's lowering."""
        scores = self.launch("parallel_fw_P", p, first=first)
        small = self.launches(*SMALL, problem=p, first=scores.lowering)
        return self.launches("chunk_gates", problem=p) | dict(parallel_fw_P=scores) | small

    @functools.cached_property
    def forward(self) -> Launches:
        """The launches of the forward pass, in order but for the small ones."""
        if not self.uses_fused_scan:
            return self.launches("chunk_gates", "recurrent_fw_C", "parallel_fw_H")
        p, num_splits = self.scan_problem, self.num_splits
        launches = self._until_scan(p, self.scan.lowering)
        if num_splits > 1:
            launches |= self.launches("split_products", problem=p, num_splits=num_splits)
        return launches | self.launches("recurrent_fw_H", problem=p.split(num_splits))

    def packed(self, S: int) -> Launches:
        """The launches of a forward pass with the states of packed segments.

        It is the fused scan over a ``ChunkList`` of rows of S steps. Its segments run side by side,
        as heads do.
        """
        p, N = self.spec.problem, cast(int, self.spec.num_segments)
        scan = self.launch("recurrent_fw_H", dataclasses.replace(p, NH=p.NH * N))
        L = scan.tiles.siz_b_L if scan.tiles else p.L
        p = dataclasses.replace(p, S=num_entries(S, N, L) * L, L=L)
        scan = dataclasses.replace(scan, problem=p)
        return self._until_scan(p, scan.lowering) | dict(recurrent_fw_H=scan)

    @functools.cached_property
    def backward(self) -> Launches:
        """The launches of the backward pass."""
        scores = () if self.computes_scores else ("parallel_bw_dP",)
        names = *scores, "recurrent_bw_dC", "parallel_bw_dQKV"
        launches = self.launches("chunk_gates", *names)
        first = launches["parallel_bw_dQKV" if self.computes_scores else "parallel_bw_dP"].lowering
        return launches | self.launches(*SMALL, first=first)

    def summary(self, L: int, num_splits: int) -> Launches:
        """The launches for what the devices of a sequence exchange.

        L, num_splits: of the call, as shards may plan for fewer heads.
        """
        p = self.spec.problem.in_chunks_of(L)
        splits = self.launches("split_products", problem=p, num_splits=num_splits)
        return self._until_scan(p, self.scan.lowering) | splits


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
