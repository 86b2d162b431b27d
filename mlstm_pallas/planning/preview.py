"""plan: what a call will run and what memory it takes, without a GPU and without arrays."""

import dataclasses
import math
from typing import Any

from mlstm_pallas.planning.call_spec import CallSpec, asked_of, call_spec
from mlstm_pallas.planning.config import KernelConfig
from mlstm_pallas.planning.costs import launch_cost
from mlstm_pallas.planning.options import Options
from mlstm_pallas.problem.annotations import BackendName, LayoutName
from mlstm_pallas.problem.gpu import UNKNOWN, Gpu, known_gpu, target_gpu
from mlstm_pallas.problem.validation import check_dtype, check_integer, check_segments_fit
from mlstm_pallas.stages.stage import Launch, Lowering

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class PlannedLaunch:
    """A launch of a kernel.

    Attributes:
      stage: the kernel's name, as in a profile.
      backward: whether it belongs to the backward pass.
      lowering: "triton", "mosaic_gpu" or "xla" (plain jnp, with no tiles and no grid).
      tiles: the sizes that the kernel reads, by name.
      grid: CTAs along each axis.
      shared_bytes: shared memory per CTA; an estimate for Triton.
      bytes: bytes of the inputs and outputs, each moved once.
      flops: FLOPs of the matrix products.
    """

    stage: str
    backward: bool
    lowering: str
    tiles: dict[str, Any]
    grid: tuple[int, ...]
    shared_bytes: int
    bytes: int
    flops: int

    @property
    def ctas(self) -> int:
        return math.prod(self.grid)


@dataclasses.dataclass(frozen=True)
class CallPlan:
    """What a call runs; ``print`` shows it as a table.

    Attributes:
      gpu: the facts of the GPU that the plan is made for.
      chunk_size: steps per chunk, L; with num_segments, steps per chunk of the fused scan.
      fused: whether the forward pass is the fused scan, which keeps the states on the chip.
      num_splits: parts of a sequence in the fused scan.
      num_segments: packed segments per row whose states the call returns; None: it returns none.
      launches: launches of the forward pass, then of the backward pass, in order. Small kernels and
        XLA's kernels are left out: sums of vectors, gradients of the gates, the products of a
        recurrence's splits, and further launches of a fused scan whose state needs several.
      output_bytes: bytes of h and of the gradients of q, k and v; with num_segments, of h and the
        states.
      temporary_bytes: bytes that the larger of the two passes takes beside inputs and outputs.
    """

    gpu: Gpu
    chunk_size: int
    fused: bool
    num_splits: int
    num_segments: int | None
    launches: tuple[PlannedLaunch, ...]
    output_bytes: int
    temporary_bytes: int

    def __str__(self) -> str:
        parts = (
            f"{self.num_segments} segments" if self.num_segments else f"{self.num_splits} splits"
        )
        schedule = f"fused scan in {parts}" if self.fused else "states in memory"
        rows = [("stage", "lowering", "CTAs", "per SM", "KiB", "MB", "GFLOP", "tiles")]
        for x in self.launches:
            tiles = ", ".join(f"{name} {value}" for name, value in x.tiles.items())
            counts = "", "", ""
            if x.grid:
                per_sm, KiB = x.ctas / self.gpu.sms, x.shared_bytes / 1024
                counts = f"{x.ctas}", f"{per_sm:.1f}", f"{KiB:.0f}"
            sizes = f"{x.bytes / 1e6:.0f}", f"{x.flops / 1e9:.0f}"
            rows.append((x.stage, x.lowering, *counts, *sizes, tiles))
        formats = [
            f"{align}{max(map(len, column))}"
            for align, column in zip("<<>>>>><", zip(*rows, strict=True), strict=True)
        ]
        lines = ["  ".join(map(format, row, formats)).rstrip() for row in rows]
        head = f"{self.gpu.name}, {self.gpu.sms} SMs: chunks of {self.chunk_size} steps, {schedule}"
        memory = (
            f"memory beside the inputs: outputs {self.output_bytes / MIB:.0f} MiB, temporary "
            f"{self.temporary_bytes / MIB:.0f} MiB"
        )
        return "\n".join([head, *lines, memory])


def plan(
    *,
    B: int,
    NH: int,
    S: int,
    DHQK: int,
    DHV: int,
    dtype: Any = "bfloat16",
    layout: LayoutName = "BNTH",
    num_segments: int | None = None,
    backend: BackendName | None = None,
    gpu: str | None = None,
    recompute_states_in_bw: bool = True,
    config: KernelConfig | None = None,
) -> CallPlan:
    """What ``mlstm_chunkwise`` and its gradient will run on a GPU, and what memory they take.

    It needs neither a GPU nor arrays, and compiles nothing.

    Args:
      B, NH, S: batch entries, heads, steps.
      DHQK, DHV: dimensions of the heads of q and k, and of v.
      dtype: the dtype of q, k and v.
      layout: the layout of q, k and v; it changes no launch.
      num_segments: as for ``mlstm_chunkwise``; the plan has the forward pass alone.
      backend: as for ``mlstm_chunkwise``; None is "triton" here.
      gpu: the GPU's device_kind in jax, such as "NVIDIA H20"; None: the GPU of this process.
      recompute_states_in_bw, config: as for ``mlstm_chunkwise``.

    Raises:
      ValueError, TypeError: for a wrong argument, for an unknown gpu, and if gpu is None and there
        is no GPU.

    Example::

      >>> from mlstm_pallas import plan
      >>> x = plan(B=8, NH=8, S=8192, DHQK=256, DHV=512, gpu="NVIDIA A100-SXM4-80GB")
      >>> x.chunk_size, x.fused
      (256, True)
    """
    sizes = dict(B=B, NH=NH, S=S, DHQK=DHQK, DHV=DHV)
    sizes = {name: check_integer(name, x, 1) for name, x in sizes.items()}
    facts = _facts(gpu)
    options = Options(
        recompute_states_in_bw=recompute_states_in_bw,
        layout=layout,
        backend=backend,
        config=config,
        num_segments=num_segments,
    )
    spec = call_spec(options, sizes, check_dtype("dtype", dtype), gpu=facts)
    if spec.num_segments is not None:
        check_segments_fit(spec.num_segments, spec.backend)
    return _call_plan(spec, sizes["S"])


def _facts(gpu: str | None) -> Gpu:
    if gpu is None:
        facts = target_gpu()
        if facts is UNKNOWN:
            raise ValueError("gpu is None and there is no GPU, expected a name like 'NVIDIA H200'")
        return facts
    known = known_gpu(gpu) if isinstance(gpu, str) else None
    if known is None:
        raise ValueError(
            f"gpu is {gpu!r}, expected the device_kind of a known GPU, such as 'NVIDIA H200', "
            "'NVIDIA A100-SXM4-80GB' or 'NVIDIA L40S'"
        )
    return known


def _call_plan(spec: CallSpec, S: int) -> CallPlan:
    p, plan, itemsize, num_segments = (
        spec.problem,
        spec.plan,
        spec.dtype.itemsize,
        spec.num_segments,
    )
    if num_segments is None:
        forward, backward, num_splits = plan.forward, plan.backward, plan.num_splits
        # h and dv, dq and dk
        output_bytes = 2 * p.BNH * p.S * (p.DHQK + p.DHV) * itemsize
        temporary_bytes = _temporary_bytes(spec)
    else:
        forward, backward, num_splits = spec.packed(spec.lowering, S), {}, 1
        scan = forward["recurrent_fw_H"]
        p = scan.problem
        states = 4 * p.BNH * num_segments * (p.DHQK * p.DHV + p.DHQK + 1)
        output_bytes = p.BNH * S * p.DHV * itemsize + states
        temporary_bytes = _scan_bytes(scan, itemsize)
    launches = (
        _planned(spec, name, x, backward=schedule is backward)
        for schedule in (forward, backward)
        for name, x in schedule.items()
    )
    return CallPlan(
        spec.gpu,
        chunk_size=p.L,
        fused="recurrent_fw_H" in forward,
        num_splits=num_splits,
        num_segments=num_segments,
        launches=tuple(launches),
        output_bytes=output_bytes,
        temporary_bytes=temporary_bytes,
    )


def _scan_bytes(scan: Launch, itemsize: int) -> int:
    """The memory of the gates and of the operands of the fused scan: P, keys and n."""
    p, triton = scan.problem, scan.lowering.folder == Lowering.TRITON.folder
    operands = p.BNH * p.S * (p.L + p.DHQK * triton) * itemsize
    return 4 * 7 * p.BNH * p.S + operands + 4 * p.BNH * p.NC * p.DHQK


def _temporary_bytes(spec: CallSpec) -> int:
    """The most memory that the arrays between the launches of a pass take.

    In the backward pass qbar and kbar have the memory of dq and dk. The forward pass is the larger
    one where values are much narrower than keys.
    """
    p, plan = spec.problem, spec.plan
    steps, itemsize = p.BNH * p.S, spec.dtype.itemsize
    n = 4 * p.BNH * p.NC * p.DHQK
    C = n // 4 * p.DHV * itemsize
    scores = 0 if plan.computes_scores else steps * p.L * itemsize
    # Gates, their gradients; P, C and n, with as many gradients.
    backward = 4 * 16 * steps + 2 * (scores + C + n)
    if not plan.fused:  # C, n and fewer gates
        return backward
    forward = _scan_bytes(plan.forward["recurrent_fw_H"], itemsize)
    return max(forward + (0 if spec.recompute_states_in_bw else C), backward)


def _planned(spec: CallSpec, name: str, x: Launch, *, backward: bool) -> PlannedLaunch:
    p, tiles = x.problem, x.tiles
    if name == "split_products":  # of all splits but the last
        splits = spec.plan.num_splits
        p = dataclasses.replace(p.split(splits), NH=p.NH * (splits - 1))
    flops, moved = launch_cost(name, dataclasses.replace(x, problem=p), spec.dtype.itemsize)
    fields, grid, shared = dict[str, Any](), tuple[int, ...](), 0
    if tiles is not None:
        fields, asked = dict(vars(tiles)), asked_of(name, spec, spec.lowering)
        p = p.split(fields.get("num_splits", 1))
        grid, shared = (
            tiles.grid(p, **asked),
            tiles.shared_bytes(p, spec.dtype, gpu=spec.gpu, **asked),
        )
        if spec.num_segments is not None and name == "recurrent_fw_H":
            grid = grid[0], spec.num_segments + 2, grid[1]  # the rest and the tail are parts too
    return PlannedLaunch(name, backward, x.lowering, fields, grid, shared, moved, flops)
