"""A call: its static choices, made once, its arrays, and the residuals of its forward pass."""

import dataclasses
import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas import dispatch
from mlstm_pallas.config import KernelConfig
from mlstm_pallas.normaliser import Normaliser
from mlstm_pallas.problem import InputGate, Layout, Problem, next_power_of_two
from mlstm_pallas.stage import Lowering, StageCall, StageConfig
from mlstm_pallas.stages import STAGES

# Shorter splits cost more than idle SMs, and narrower heads (DHQK * DHHV) are as fast with
# materialised states.
MIN_SPLIT_STEPS, MIN_SPLIT_STATE = 2048, 2**17


class BackwardPlan(enum.StrEnum):
    """Which stages compute P, dP and delta = dh . h in the backward pass.

    TILES_IN_MEMORY: parallel_bw_dP computes all three. TILES_ON_CHIP: parallel_bw_dQKV computes P
    and dP of each chunk where it reads them, and recurrent_bw_dC, which runs before it, delta.
    """

    TILES_IN_MEMORY = "P and dP in memory"
    TILES_ON_CHIP = "P and dP on the chip"


class Choice(NamedTuple):
    """The kernel of a stage in a call."""

    room: str
    tiles: StageConfig  # not clamped
    L: int  # steps of a chunk in the problem that it was chosen for


@dataclasses.dataclass(frozen=True)
class CallSpec:
    """The static choices of a call, which the code below reads.

    The launchers of recurrences still fit blocks and splits to the number of CTAs.

    Attributes:
      problem: padded.
      config: complete.
      dtype: of q, k, v in the matrix products.
      normaliser: None: h is the numerator.
      backend: the caller's; None: by the platform of the lowering.
      has_initial_state: False: the states start from zeros, which have no gradients.
      return_last_states: whether the call returns the last states.
      layout: of q, k, v, h and their gradients.

    These follow from the rest:
      kernels: (name, choice) of all stages, used or not. Plain jnp has nothing to choose.
      fused: True: the forward pass is the fused scan. False: it materialises the states.
      num_splits: of each sequence in the fused scan.
      backward_plan: which stages compute P, dP and delta.
    """

    problem: Problem
    config: KernelConfig
    dtype: jnp.dtype
    normaliser: Normaliser | None
    recompute_states_in_bw: bool = True
    backend: str | None = None
    input_gate: InputGate = InputGate.EXP
    has_initial_state: bool = True
    return_last_states: bool = True
    layout: Layout = Layout.BNTH
    kernels: tuple[tuple[str, Choice], ...] = dataclasses.field(init=False)
    fused: bool = dataclasses.field(init=False)
    num_splits: int = dataclasses.field(init=False)
    backward_plan: BackwardPlan = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        def fill(**fields: Any) -> None:
            for name, value in fields.items():
                object.__setattr__(self, name, value)

        first = Lowering(self.backend or Lowering.TRITON)
        scan = self._chosen("recurrent_fw_H", first, self.problem)
        fill(kernels=(("recurrent_fw_H", scan),))
        # All stages of the fused scan run in its chunks and on its lowering.
        p = self.fused_problem
        of_scan = dispatch.lowering_in(scan.room, first)
        kernels = {
            name: self._chosen(name, *((of_scan, p) if stage.fused else (first, self.problem)))
            for name, stage in STAGES.items()
            if not stage.decode
        }
        kernels["recurrent_fw_H"] = scan._replace(L=p.L)
        fill(kernels=tuple(kernels.items()))
        splits = self._fused_splits()
        used = splits > 0 and (self.recompute_states_in_bw or self._can_store_states(splits))
        fill(fused=used, num_splits=splits if used else 1)
        facts = dispatch.kernel("parallel_bw_dQKV", kernels["parallel_bw_dQKV"].room)
        on_chip = facts is not None and facts.makes_tiles(self.problem)
        fill(backward_plan=BackwardPlan.TILES_ON_CHIP if on_chip else BackwardPlan.TILES_IN_MEMORY)

    def _chosen(self, name: str, first: Lowering, problem: Problem) -> Choice:
        config = self.config.stage(name)
        return Choice(*dispatch.choose(name, first, config, problem, self.dtype), problem.L)

    def __str__(self) -> str:
        p = self.problem
        forward = f"fused scan in chunks of {self.fused_problem.L} and {self.num_splits} splits"
        return (
            f"{self.layout}, B {p.B}, NH {p.NH}, S {p.S}, {self.dtype.name} heads of "
            f"{p.DHQK}/{p.DHHV} in chunks of {p.L}, backend {self.backend}; "
            f"forward: {forward if self.fused else 'materialised states'}; "
            f"backward: {self.backward_plan}; "
            f"tiles: {', '.join(f'{name} {self.row(name)}' for name in self.stages)}"
        )

    def row(self, name: str) -> dict[str, Any]:
        """The tiles of a stage as in a row of tuning/."""
        room, tiles, _ = dict(self.kernels)[name]
        facts = dispatch.kernel(name, room)
        if facts is not None and facts is not dispatch.configured(name):
            return {room: {x: getattr(tiles, x) for x in facts.search}}
        row: dict[str, Any] = self.config.as_row()[name]
        return row

    @property
    def stabilised(self) -> bool:
        return self.input_gate is InputGate.EXP

    @property
    def forward_only(self) -> "CallSpec":
        """The spec of a forward pass without a backward pass, which stores no states."""
        return dataclasses.replace(self, recompute_states_in_bw=True)

    def with_heads(self, B: int, NH: int) -> "CallSpec":
        """The spec of a shard."""
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, B=B, NH=NH))

    @property
    def fused_problem(self) -> Problem:
        """The problem in chunks of the fused scan."""
        return self.problem.in_chunks_of(self.tiles("recurrent_fw_H").siz_b_LKV)

    def tiles(self, name: str) -> StageConfig:
        """The tiles of the stage's kernel, not clamped."""
        return dict(self.kernels)[name].tiles

    def stages_in(self, room: str) -> dict[str, StageConfig]:
        """The stages, used or not, whose kernels are in a room, with their tiles."""
        return {name: x.tiles for name, x in self.kernels if x.room == room}

    def tiles_on_chip(self, lowering: Lowering) -> bool:
        """Whether ``backward_plan`` is TILES_ON_CHIP; in plain jnp the tiles are in memory."""
        return lowering is not Lowering.XLA and self.backward_plan is BackwardPlan.TILES_ON_CHIP

    @property
    def forward_stages(self) -> tuple[str, ...]:
        stages = (
            ("parallel_fw_P", "recurrent_fw_H")
            if self.fused
            else ("recurrent_fw_C", "parallel_fw_H")
        )
        return "chunk_gates", *stages

    @property
    def backward_stages(self) -> tuple[str, ...]:
        tiles = () if self.backward_plan is BackwardPlan.TILES_ON_CHIP else ("parallel_bw_dP",)
        return "chunk_gates", *tiles, "recurrent_bw_dC", "parallel_bw_dQKV"

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.forward_stages, *self.backward_stages)))

    def call(
        self, name: str, lowering: Lowering, problem: Problem | None = None, *, clamp: bool = True
    ) -> StageCall:
        """How a stage runs in this call; problem: replaces the call's."""
        problem = problem or self.problem
        # Plain jnp has no tiles; its heads may be narrower than one.
        if lowering is Lowering.XLA:
            return StageCall(problem, self.config.stage(name), lax.Precision.HIGHEST, lowering)
        choice = dict(self.kernels)[name]
        # chunk_gates runs in the chunks of the call and in those of the fused scan.
        if choice.L != problem.L:
            choice = self._chosen(name, lowering, problem)
        facts = dispatch.kernel(name, choice.room)
        lowering = dispatch.lowering_in(choice.room, lowering)
        if facts is None:
            return StageCall(problem, choice.tiles, lax.Precision.HIGHEST, lowering)
        tiles = facts.clamp(choice.tiles, problem) if clamp else choice.tiles
        precision = self.config.dot_precision(self.dtype, interpret=lowering.interpret)
        return StageCall(problem, tiles, precision, lowering)

    def chunks(self, x: jax.Array) -> jax.Array:
        """(B * NH, S, ...) to (B * NH, NC, L, ...)."""
        return x.reshape(x.shape[0], self.problem.NC, self.problem.L, *x.shape[2:])

    def _can_store_states(self, splits: int) -> bool:
        """Whether splits end at chunk boundaries and the fused scan can store states."""
        choice = dict(self.kernels)["recurrent_fw_H"]
        facts = dispatch.kernel("recurrent_fw_H", choice.room)
        can_store = facts is not None and facts.stores_states(choice.tiles, self.problem)
        return can_store and self.problem.NC % splits == 0

    def _fused_splits(self) -> int:
        """Splits of a sequence into whole chunks of the fused scan; 0: the scan is not used.

        It is the least power of two that makes fused_min_heads heads; 0 where none does.
        """
        scan = dict(self.kernels)["recurrent_fw_H"].room
        if dispatch.kernel("recurrent_fw_H", scan) is None and self.backend != Lowering.XLA:
            return 0  # the scan in plain jnp is slower than materialised states
        heads, p = self.config.fused_min_heads or 0, self.fused_problem
        num_splits = self.config.stage("recurrent_fw_H").num_splits
        whole_chunks = p.NC & -p.NC
        if num_splits is not None:
            splits = min(num_splits, whole_chunks)
        else:
            splits = next_power_of_two(-(-heads // max(p.BNH, 1)))
            small = p.DHQK * p.DHHV < MIN_SPLIT_STATE or p.S // splits < MIN_SPLIT_STEPS
            if small or splits > whole_chunks:
                splits = 1
        return splits if 0 < heads <= p.BNH * splits else 0


class Inputs(NamedTuple):
    """Padded and cast: q, k, v in the kernel dtype, gates and states float32.

    Gates and starts have whole chunks of steps; q, k and v have the caller's steps and layout.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    i: jax.Array
    f: jax.Array
    c_initial: Any  # an array; None inside a pass that starts from zeros
    n_initial: jax.Array
    m_initial: jax.Array
    starts: jax.Array | None = None  # int32, 1 where a packed segment begins
    lengths: jax.Array | None = None  # (B, NH) int32, h is 0 from this step on; None: nowhere
    # (B, NH, N) int32, of ``gates.segment_ends``; None where no states of segments are asked for
    segment_ends: Any = None


class LastStates(NamedTuple):
    """The last states, or their cotangents, whose c and m may be None: zeros."""

    c: Any  # (B, NH, DHQK, DHHV)
    n: jax.Array  # (B, NH, DHQK)
    m: Any  # (B, NH)


class StoredStates(NamedTuple):
    """The states at the boundaries of the call's chunks; the true ones are these times exp(m).

    C is in the kernel dtype, the rest float32.
    """

    C: Any  # (B, NH, NC, DHQK, DHHV); None: recomputed
    n: Any  # (B, NH, NC, DHQK)
    m: Any  # (B, NH, NC + 1); None: recomputed
    C_last: Any  # (B, NH, DHQK, DHHV); None where C is None or the last states are not returned
    n_last: Any  # (B, NH, DHQK)


class Forward(NamedTuple):
    """The outputs of a forward pass."""

    h: jax.Array  # (B, NH, S, DHHV) or (B, S, NH, DHHV)
    last: LastStates | None  # None where they are not returned
    z: jax.Array | None  # (B, NH, S); None without a normaliser
    states: StoredStates


class Cotangents(NamedTuple):
    h: jax.Array
    last: Any  # LastStates; None where the last states are not returned


class Residuals(NamedTuple):
    """The parts of the forward pass that the backward pass reads; h and z are the normaliser's."""

    inputs: Inputs
    h: jax.Array | None  # None without a normaliser, or where the denominator is a constant
    z: jax.Array | None
    states: StoredStates
