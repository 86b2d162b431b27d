"""plan: what a call will run, without a GPU and without arrays."""

import dataclasses
import math
from typing import Any

from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.operands.chunk_list import num_parts
from mlstm_pallas.planning.call_spec import SMALL, CallSpec, call_spec
from mlstm_pallas.planning.config import KernelConfig
from mlstm_pallas.planning.options import Options
from mlstm_pallas.problem.annotations import BackendName, LayoutName
from mlstm_pallas.problem.gpu import UNKNOWN, Gpu, is_one_of_family, known_gpu, target_gpu
from mlstm_pallas.problem.validation import check_dtype, check_integer


@dataclasses.dataclass(frozen=True)
class PlannedLaunch:
    """A launch of a kernel.

    Attributes:
      stage: the kernel's name, as in a profile.
      backward: whether it belongs to the backward pass.
      lowering: "triton", "mosaic_gpu", "interpret" (the Triton kernel, interpreted) or "xla" (plain
        jnp, with no tiles and no grid).
      tiles: the sizes that the kernel reads, by name.
      grid: the CTAs, along one or several axes.
      shared_bytes: shared memory per CTA; an estimate for Triton.
    """

    stage: str
    backward: bool
    lowering: str
    tiles: dict[str, Any]
    grid: tuple[int, ...]
    shared_bytes: int

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
      backward_bytes: bytes that the backward pass takes beside its inputs and outputs, for states,
        tiles and gates; with num_segments 0, since the plan has no backward pass.
    """

    gpu: Gpu
    chunk_size: int
    fused: bool
    num_splits: int
    num_segments: int | None
    launches: tuple[PlannedLaunch, ...]
    backward_bytes: int

    def __str__(self) -> str:
        parts = f" in {self.num_splits} splits" if self.num_splits > 1 else ""
        if self.num_segments:
            parts = f" in {self.num_segments} segments"
        schedule = f"fused scan{parts}" if self.fused else "states in memory"
        rows = [("stage", "lowering", "CTAs", "per SM", "KiB", "tiles")]
        for x in self.launches:
            tiles = ", ".join(f"{name} {value}" for name, value in x.tiles.items())
            counts = "", "", ""
            if x.grid:
                per_sm, KiB = x.ctas / self.gpu.sms, x.shared_bytes / 1024
                counts = f"{x.ctas}", f"{per_sm:.1f}", f"{KiB:.0f}"
            rows.append((x.stage, x.lowering, *counts, tiles))
        formats = [
            f"{align}{max(map(len, column))}"
            for align, column in zip("<<>>><", zip(*rows, strict=True), strict=True)
        ]
        lines = ["  ".join(map(format, row, formats)).rstrip() for row in rows]
        about = "about " * (known_gpu(self.gpu.name) == self.gpu and is_one_of_family(self.gpu))
        gpu = f"{self.gpu.name}, {about}{self.gpu.sms} SMs"
        head = f"{gpu}: chunks of {self.chunk_size} steps, {schedule}"
        if MiB := self.backward_bytes / 2**20:
            lines.append(f"the backward pass takes {MiB:.0f} MiB beside its inputs and outputs")
        return "\n".join([head, *lines])


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
    gpu: str | Gpu | None = None,
    recompute_states_in_bw: bool = True,
    config: KernelConfig | None = None,
) -> CallPlan:
    """What ``mlstm_chunkwise`` and its gradient run on one GPU, with the arguments below.

    It needs neither a GPU nor arrays, and compiles nothing. Steps, ``mlstm_chunkwise_states`` and
    shards have no plan here, and the other options of a call are the defaults.

    Args:
      B, NH, S: batch entries, heads, steps.
      DHQK, DHV: dimensions of the heads of q and k, and of v.
      dtype: the dtype of q, k and v.
      layout: the layout of q, k and v; it changes no launch.
      num_segments: N of segment_lengths; the plan has the forward pass alone.
      backend: as for ``mlstm_chunkwise``; None is "triton" here, and "xla", plain jnp, for a GPU
        on which no kernel runs.
      gpu: the GPU's device_kind in jax, such as "NVIDIA H20", or the facts of any GPU, a ``Gpu``;
        None: the GPU of this process. The name of a GeForce, a workstation GPU or a slice has the
        SMs of one model of its family, printed as "about": pass a ``Gpu`` to plan for others.
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
    if num_segments is not None:
        sizes["N"] = check_integer("num_segments", num_segments, 1)
    facts = gpu if isinstance(gpu, Gpu) else known_gpu(gpu)
    if gpu is None and target_gpu() is not UNKNOWN:
        facts = target_gpu()
    if facts is None:
        raise ValueError(
            f"gpu is {gpu!r}, expected the device_kind of a known GPU, such as 'NVIDIA H200', "
            "'NVIDIA A100-SXM4-80GB' or 'NVIDIA L40S', the facts of another one as a "
            "mlstm_pallas.Gpu, or None where this process has a GPU"
        )
    options = Options(
        recompute_states_in_bw=recompute_states_in_bw,
        layout=layout,
        backend=backend,
        config=config,
    )
    spec = call_spec(options, sizes, check_dtype("dtype", dtype), facts)
    return _call_plan(spec)


def _call_plan(spec: CallSpec) -> CallPlan:
    p, plan, num_segments = spec.problem, spec.plan, spec.num_segments
    forward, backward = plan.forward, plan.backward
    if num_segments is not None:
        p = plan.fused_problem
    launches = (
        _planned(spec, name, x, backward=schedule is backward)
        for schedule in (forward, backward)
        for name, x in schedule.items()
        if name not in SMALL
    )
    return CallPlan(
        spec.gpu,
        chunk_size=p.L,
        fused="recurrent_fw_H" in forward,
        num_splits=plan.num_splits or 1,
        num_segments=num_segments,
        launches=tuple(launches),
        backward_bytes=_backward_bytes(spec) if backward else 0,
    )


def _backward_bytes(spec: CallSpec) -> int:
    """Gates; P, C and n, with as many gradients. qbar and kbar have the memory of dq and dk."""
    p, itemsize = spec.problem, spec.dtype.itemsize
    n = 4 * p.BNH * p.NC * p.DHQK
    C = n // 4 * p.DHV * itemsize
    P = 0 if spec.plan.by_chunk else p.BNH * p.S * p.L * itemsize
    return 4 * 16 * p.BNH * p.S + 2 * (P + C + n)


def _planned(spec: CallSpec, name: str, x: Launch, *, backward: bool) -> PlannedLaunch:
    p, tiles = x.problem, x.tiles
    if name == "split_products":  # of all splits but the last
        splits = spec.plan.num_splits
        p = dataclasses.replace(p.split(splits), NH=p.NH * (splits - 1))
    fields, grid, shared = dict[str, Any](), tuple[int, ...](), 0
    if tiles is not None:
        fields, kernel = dict(vars(tiles)), spec.kernel_spec(name)
        p = p.split(fields.get("num_splits", 1))
        grid = tiles.grid(dataclasses.replace(p, NH=p.NH * kernel.recurrences))
        shared = tiles.shared_bytes(p, spec.dtype, kernel)
        if spec.num_segments is not None and name == "recurrent_fw_H":
            grid = grid[0], num_parts(spec.num_segments), grid[1]
    return PlannedLaunch(name, backward, x.lowering, fields, grid, shared)
