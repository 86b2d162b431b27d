"""The only place that decides what runs where: chunk sizes, schedule, splits, lowerings, tiles.

All of it follows from the problem, what the caller asks for, and the facts of the GPU, by pure
functions. A kernel's module says which tiles it has for a problem (``Tiles.plan``); launchers and
schedules read what is decided here.
"""

import dataclasses
import functools
import importlib.util
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from mlstm_pallas import dispatch
from mlstm_pallas.config import KernelConfig, tuned_config
from mlstm_pallas.gpu import HOPPER, UNKNOWN, Gpu
from mlstm_pallas.problem import (
    Problem,
    clamp_chunk_size,
    make_problem,
    next_power_of_two,
    padded_head_dim,
)
from mlstm_pallas.stage import Launch, Lowering, Tiles

# jax will remove the Triton backend of Pallas; importing it here would import Triton's folder.
HAS_TRITON = importlib.util.find_spec("jax.experimental.pallas.triton") is not None

# Splits of the fused scan cost a launch and a product over their steps, which shorter splits and
# narrower heads (DHQK * DHHV) do not repay.
MIN_SPLIT_STEPS, MIN_SPLIT_STATE = 1024, 2**15
MIN_FUSED_STATE = 2**13  # DHQK * DHHV
SCAN_SHARE = 0.6  # of the places for CTAs, which splits make the fused scan fill
SUMMARY_STEPS = 4096  # of a split of a shard's summary: enough work, and enough products


def lowerings(first: Lowering) -> tuple[Lowering, ...]:
    """The lowering, then those that a kernel falls to."""
    if first.folder != Lowering.MOSAIC_GPU.folder:
        return (first,)
    triton = Lowering.INTERPRET if first.interpret else Lowering.TRITON
    return (first, triton, Lowering.XLA) if HAS_TRITON else (first, Lowering.XLA)


def facts_for(gpu: Gpu, lowering: Lowering) -> Gpu:
    """The facts to plan with: of a Hopper GPU for its kernels where the GPU is not known."""
    return HOPPER if gpu is UNKNOWN and lowering.folder == "mosaic_gpu" else gpu


def chunk_size(DHQK: int, DHHV: int, S: int, dtype: jnp.dtype, lowering: Lowering, gpu: Gpu) -> int:
    """L, for which the products inside chunks take about half the FLOPs of those with the states.

    The states then take about as much memory as q, k and v. In float32 the products bind, of which
    short chunks have fewer. Mosaic GPU's gradients need at least 128 steps; where
    parallel_bw_dQKV falls to Triton, it gains from fewer states.
    """
    size = DHQK * DHHV // (DHQK + DHHV)
    if lowering is Lowering.XLA or (gpu is UNKNOWN and lowering.folder == "triton"):
        size = min(max(next_power_of_two(size), 64), 256)
        while -S % size > -S % 64:  # no more padding than chunks of 64 need
            size //= 2
        return size
    if dtype.itemsize > 2:
        return 64
    of_hopper = lowering.folder == "mosaic_gpu" and DHQK % 64 == DHHV % 64 == 0
    if of_hopper and DHQK > 128 and (DHQK % 256 or DHHV % 256):
        size += 1
    return min(max(next_power_of_two(size), 128 if of_hopper else 64), 256)


def problem_for(
    q_shape: tuple[int, int, int, int],
    DHHV: int,
    dtype: jnp.dtype,
    lowering: Lowering,
    gpu: Gpu,
    L: int | None = None,
    config: KernelConfig | None = None,
) -> tuple[Problem, KernelConfig]:
    """The padded problem of a call, and the caller's overrides.

    L: before that of the config and of a tuned row; None: the rule. It is clamped to S.
    """
    S, plain = q_shape[2], lowering is Lowering.XLA
    DHQK, padded = (x if plain else padded_head_dim(x) for x in (q_shape[3], DHHV))
    config = config or KernelConfig()
    row = tuned_config(gpu.name, DHQK, padded, dtype, lowering.folder)
    L = L or config.chunk_size or row.chunk_size
    L = L or chunk_size(DHQK, padded, S, dtype, lowering, gpu)
    return make_problem(q_shape, DHHV, clamp_chunk_size(L, S), pad_heads=not plain), config


@dataclasses.dataclass(frozen=True)
class Options:
    """What a caller asks for, as far as plans depend on it.

    Attributes:
      dtype: of q, k, v in the matrix products.
      lowering: of the kernels, before those that a kernel falls to.
      config: the caller's overrides.
      recompute_states_in_bw: as for ``mlstm_chunkwise``.
    """

    dtype: jnp.dtype
    lowering: Lowering
    config: KernelConfig
    recompute_states_in_bw: bool = True


def _tiles(
    name: str, lowering: Lowering, p: Problem, options: Options, gpu: Gpu, asked: dict[str, Any]
) -> Tiles | None:
    """The tiles of a kernel, with what the config overrides; None: it does not run."""
    folder = lowering.folder
    if (tiles_class := dispatch.tiles_class(name, folder)) is None:
        return None
    planned = tiles_class.plan(p, options.dtype, facts_for(gpu, lowering), **asked)
    if planned is None:
        return None
    fields = row_of(p, options, gpu, folder).tiles_of(folder, name)
    row = {x: fields[x] for x in fields.keys() & vars(planned).keys()}
    if lowering.interpret and (ctas := getattr(planned, "num_ctas", 0)):
        row["num_ctas"] = min(ctas, 2)  # each of which has several items
    if row:  # it was tuned for other steps, which may take other tiles
        tiles = dataclasses.replace(planned, **row).clamped(p)
        planned = tiles if tiles.supports(p, **asked) else planned
    fields = options.config.tiles_of(folder, name)
    if not fields:
        return planned
    if unknown := fields.keys() - vars(planned).keys():
        raise TypeError(
            f"config.{folder}_{name} has {', '.join(sorted(unknown))}, expected some of its "
            f"fields {', '.join(vars(planned)) or '(it has none)'}"
        )
    tiles = dataclasses.replace(planned, **fields).clamped(p)
    if not tiles.supports(p, **asked):
        raise ValueError(
            f"config.{folder}_{name} is {fields}, expected tiles that the kernel has for heads of "
            f"{p.DHQK}/{p.DHHV} in chunks of {p.L} steps, such as {planned}"
        )
    return tiles


def row_of(p: Problem, options: Options, gpu: Gpu, folder: str) -> KernelConfig:
    """The row of tuning/ for a problem's heads."""
    return tuned_config(gpu.name, p.DHQK, p.DHHV, options.dtype, folder)


@functools.cache
def launch(
    name: str, problem: Problem, options: Options, gpu: Gpu, first: Lowering, num_splits: int = 1
) -> Launch:
    """How a function of ``dispatch.py`` runs.

    Args:
      problem: in the chunks of the function.
      first: the lowering to try first, or that of the kernel whose outputs it reads.
      num_splits: of split_products.
    """
    p, asked = problem, asked_of(name, problem, options, gpu, first)
    if name == "split_products":
        p = dataclasses.replace(problem.split(num_splits), L=problem.S // num_splits)
    for lowering in lowerings(first):
        tiles = _tiles(name, lowering, p, options, gpu, asked)
        if tiles is not None:
            precision = options.config.dot_precision(options.dtype, lowering.interpret)
            return Launch(problem, tiles, precision, lowering)
    return plain(problem)


def asked_of(
    name: str, problem: Problem, options: Options, gpu: Gpu, first: Lowering
) -> dict[str, Any]:
    """What a call asks of a kernel beside its result, on which its tiles depend."""
    if name == "recurrent_fw_C":
        return dict(has_x=True)
    if name == "recurrent_bw_dC":
        recomputed = recomputes_scores(problem, options, gpu, first)
        return dict(recurrences=1 + options.recompute_states_in_bw, has_h=recomputed)
    if name == "split_products":
        return dict(stores_X=False)
    return {}


def plain(problem: Problem) -> Launch:
    """The launch of a plain form."""
    return Launch(problem, None, lax.Precision.HIGHEST, Lowering.XLA)


def recomputes_scores(problem: Problem, options: Options, gpu: Gpu, first: Lowering) -> bool:
    """Whether parallel_bw_dQKV computes P and dP, and recurrent_bw_dC before it delta.

    Otherwise parallel_bw_dP computes all three, and P and dP are in memory.
    """
    tiles = launch("parallel_bw_dQKV", problem, options, gpu, first).tiles
    return getattr(tiles, "recomputes_scores", False)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What runs in a call of kernels.

    Attributes:
      fused: True: the forward pass is the fused scan. False: it materialises the states.
      num_splits: of each sequence in the fused scan.
      scan_problem: the problem in the chunks of the fused scan, used or not.
      scan_lowering: of the fused scan.
      summary_splits: of each shard of a sequence, where its devices exchange summaries.
      recomputes_scores: as the function.
    """

    problem: Problem
    options: Options
    gpu: Gpu
    fused: bool
    num_splits: int
    scan_problem: Problem
    scan_lowering: Lowering
    recomputes_scores: bool

    @property
    def summary_splits(self) -> int:
        """Those of the forward pass, where it has several and they end at chunks of the call.

        A forward pass with another number of splits computes its products again.
        """
        NC, S = self.problem.NC, self.problem.S
        if self.num_splits > 1 and NC % self.num_splits == 0:
            return self.num_splits
        enough = max(S // SUMMARY_STEPS, 1)
        return math.gcd(NC, 1 << (enough.bit_length() - 1))

    @property
    def forward(self) -> dict[str, Launch]:
        """The launches of the forward pass, in order, without small ones."""
        p, splits = self.scan_problem, self.num_splits
        if not self.fused:
            names = "chunk_gates", "recurrent_fw_C", "parallel_fw_H"
            return {name: self._launch(name, self.problem) for name in names}
        launches = {
            "chunk_gates": self._launch("chunk_gates", p),
            "parallel_fw_P": self._launch("parallel_fw_P", p, self.scan_lowering),
        }
        if splits > 1:
            launches["split_products"] = self._launch("split_products", p, num_splits=splits)
        return launches | {"recurrent_fw_H": self._launch("recurrent_fw_H", p.split(splits))}

    @property
    def backward(self) -> dict[str, Launch]:
        """Those of the backward pass."""
        scores = () if self.recomputes_scores else ("parallel_bw_dP",)
        names = "chunk_gates", *scores, "recurrent_bw_dC", "parallel_bw_dQKV"
        return {name: self._launch(name, self.problem) for name in names}

    def _launch(
        self, name: str, p: Problem, first: Lowering | None = None, num_splits: int = 1
    ) -> Launch:
        first = first or self.options.lowering
        return launch(name, p, self.options, self.gpu, first, num_splits)

    def forward_arrays(self) -> dict[str, int]:
        """Bytes of the arrays between the launches of the forward pass."""
        p, itemsize = self.problem, self.options.dtype.itemsize
        steps, scan = p.BNH * p.S, self.scan_problem
        arrays = {"gates": 4 * 7 * steps}
        if self.fused:
            keys = self.scan_lowering.folder == Lowering.TRITON.folder
            arrays |= {"P": steps * scan.L * itemsize, "kbar": keys * steps * p.DHQK * itemsize}
            arrays["n"] = 4 * p.BNH * scan.NC * p.DHQK
        if not (self.fused and self.options.recompute_states_in_bw):
            arrays |= {"C": p.BNH * p.NC * p.DHQK * p.DHHV * itemsize}
            arrays.setdefault("n", 4 * p.BNH * p.NC * p.DHQK)
        return arrays

    def backward_arrays(self) -> dict[str, int]:
        """Those of the backward pass; qbar and kbar have the memory of dq and dk."""
        p, itemsize = self.problem, self.options.dtype.itemsize
        steps, states = p.BNH * p.S, p.BNH * p.NC * p.DHQK
        scores = 0 if self.recomputes_scores else steps * p.L * itemsize
        return {
            "gates": 4 * 8 * steps,
            "gradients of gates": 4 * 8 * steps,
            **dict.fromkeys(("P", "dP"), scores),
            **dict.fromkeys(("C", "dC"), states * p.DHHV * itemsize),
            **dict.fromkeys(("n", "dn"), 4 * states),
        }


@functools.cache
def plan(problem: Problem, options: Options, gpu: Gpu) -> Plan:
    """The plan of a call."""
    scan = launch("recurrent_fw_H", problem, options, gpu, options.lowering)
    p = problem if scan.tiles is None else problem.in_chunks_of(scan.tiles.siz_b_LKV)
    splits = 0 if scan.tiles is None else _scan_splits(problem, p, scan.tiles, options, gpu)
    stores = scan.tiles is not None and scan.tiles.state_rows == p.DHQK
    fused = splits > 0 and (options.recompute_states_in_bw or (stores and problem.NC % splits == 0))
    recomputed = recomputes_scores(problem, options, gpu, options.lowering)
    return Plan(problem, options, gpu, fused, splits if fused else 1, p, scan.lowering, recomputed)


def _scan_splits(
    problem: Problem, scan_problem: Problem, tiles: Any, options: Options, gpu: Gpu
) -> int:
    """Splits of a sequence into whole chunks of the fused scan; 0: the states are materialised.

    The scan has a CTA for each head and block of columns. Where these are few it is split, and
    where it may not be, it needs a share of the places. A third launch, which reads and writes h
    once more, is slower than states in memory.
    """
    p, row = scan_problem, row_of(scan_problem, options, gpu, options.lowering.folder)
    config = options.config.or_else(row)
    whole_chunks = p.NC & -p.NC
    if config.fused is False:
        return 0
    if config.num_splits is not None or config.fused:
        return min(config.num_splits or 1, whole_chunks)
    if p.DHQK * p.DHHV < MIN_FUSED_STATE or 2 * tiles.state_rows < p.DHQK:
        return 0
    ctas, places = p.BNH * (p.DHHV // tiles.siz_b_DHHV), tiles.ctas_per_sm * gpu.sms
    if ctas >= SCAN_SHARE * places:
        return 1
    splits = next_power_of_two(math.ceil(SCAN_SHARE * places / max(ctas, 1)))
    long = p.DHQK * p.DHHV >= MIN_SPLIT_STATE and p.S // splits >= MIN_SPLIT_STEPS
    if long and splits <= whole_chunks:
        return splits
    return int(ctas >= tiles.least_share * places)
