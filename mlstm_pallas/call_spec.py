"""A call: everything static about it, decided once, its arrays, and what its backward pass reads of its forward pass."""

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
    """Which stages make P, dP and delta = dh . h in the backward pass.

    TILES_IN_MEMORY: parallel_bw_dP makes all three. TILES_ON_CHIP: parallel_bw_dQKV makes P and dP
    of each chunk where it reads them, and recurrent_bw_dC, which runs before it, makes delta.
    """

    TILES_IN_MEMORY = "P and dP in memory"
    TILES_ON_CHIP = "P and dP on the chip"


class Choice(NamedTuple):
    """The kernel of a stage in a call."""

    lowering: Lowering
    tiles: StageConfig  # not clamped
    L: int  # steps of the chunks that it was chosen for


@dataclasses.dataclass(frozen=True)
class CallSpec:
    """Everything static about a call; what is below reads it and decides nothing again.

    Attributes:
      problem: padded.
      config: complete.
      dtype: of q, k, v in the matrix products.
      normaliser: None: h is the numerator.
      backend: the caller's; None: by the platform of the lowering.
      has_initial_state: else the states start from zeros, which have no gradients.
      return_last_states: whether the last states are wanted.
      layout: of q, k, v, h and their gradients.

    These follow from the rest:
      kernels: (name, choice) of all stages, used or not. For plain jnp there is nothing to choose.
      fused: whether the forward pass is the fused scan; else it materialises the states.
      num_splits: of each sequence in the fused scan.
      backward_plan: see there.
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
        # All stages of the scan run in its chunks, and on its lowering.
        fused = {
            x: self._chosen(x, scan.lowering, self.fused_problem) for x in STAGES if STAGES[x].fused
        }
        of_call = {x: self._chosen(x, first, self.problem) for x in STAGES if not STAGES[x].fused}
        fused["recurrent_fw_H"] = scan._replace(L=self.fused_problem.L)
        fill(kernels=tuple((x, (fused | of_call)[x]) for x in STAGES))
        splits = self._fused_splits()
        used = splits > 0 and (self.recompute_states_in_bw or self._can_store_states(splits))
        fill(fused=used, num_splits=splits if used else 1)
        facts = dispatch.kernel("parallel_bw_dQKV", of_call["parallel_bw_dQKV"].lowering)
        on_chip = facts is not None and facts.makes_tiles(self.problem)
        fill(backward_plan=BackwardPlan.TILES_ON_CHIP if on_chip else BackwardPlan.TILES_IN_MEMORY)

    def _chosen(self, name: str, first: Lowering, problem: Problem) -> Choice:
        config = self.config.stage(name)
        return Choice(*dispatch.choose(name, first, config, problem, self.dtype), problem.L)

    def __str__(self) -> str:
        p = self.problem
        plans = f"fused scan in chunks of {self.fused_problem.L} and {self.num_splits} splits"
        plans = f"forward: {plans if self.fused else 'materialised states'}; backward: {self.backward_plan}"
        return (
            f"{self.layout}, B {p.B}, NH {p.NH}, S {p.S}, {self.dtype.name} heads of {p.DHQK}/{p.DHHV} "
            f"in chunks of {p.L}, backend {self.backend}; {plans}; "
            f"tiles: {', '.join(f'{name} {self.row(name)}' for name in self.stages)}"
        )

    def row(self, name: str) -> dict[str, Any]:
        """The tiles of a stage as in a row of tuning/."""
        lowering, tiles, _ = dict(self.kernels)[name]
        if lowering.room not in ("triton", "stages"):
            facts = dispatch.kernel(name, lowering)
            return {lowering.room: {x: getattr(tiles, x) for x in facts.search} if facts else {}}
        return self.config.as_row()[name]

    @property
    def stabilised(self) -> bool:
        return self.input_gate is InputGate.EXP

    @property
    def forward_only(self) -> "CallSpec":
        """The spec of a forward pass that no backward pass follows: there are no states to store."""
        return dataclasses.replace(self, recompute_states_in_bw=True)

    def with_heads(self, B: int, NH: int) -> "CallSpec":
        """The spec of a shard."""
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, B=B, NH=NH))

    @property
    def fused_problem(self) -> Problem:
        """The problem in chunks of the fused scan."""
        return self.problem.in_chunks_of(self.tiles("recurrent_fw_H").siz_b_LKV)

    def tiles(self, name: str) -> StageConfig:
        """The tiles of the kernel that runs the stage, not clamped."""
        return dict(self.kernels)[name].tiles

    def stages_in(self, room: str) -> dict[str, StageConfig]:
        """The stages that run in a room if they run, with their tiles."""
        return {name: x.tiles for name, x in self.kernels if x.lowering.room == room}

    def tiles_on_chip(self, lowering: Lowering) -> bool:
        """Whether ``backward_plan`` is TILES_ON_CHIP; plain jnp has that of memory alone."""
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
        """How a stage runs in this call; problem: in place of the call's."""
        problem = problem or self.problem
        if (
            lowering is Lowering.XLA
        ):  # the plain forms have no tiles; heads may be narrower than one
            return StageCall(problem, self.config.stage(name), lax.Precision.HIGHEST, lowering)
        choice = dict(self.kernels)[name]
        if (
            choice.L != problem.L
        ):  # chunk_gates runs in the chunks of the call and of the fused scan
            choice = self._chosen(name, lowering, problem)
        facts = dispatch.kernel(name, choice.lowering)
        if facts is None:
            return StageCall(problem, choice.tiles, lax.Precision.HIGHEST, choice.lowering)
        tiles = facts.clamp(choice.tiles, problem) if clamp else choice.tiles
        precision = self.config.dot_precision(self.dtype, interpret=choice.lowering.interpret)
        return StageCall(problem, tiles, precision, choice.lowering)

    def swap_heads(self, x: jax.Array) -> jax.Array:
        """The layout of the call to (B, NH, S, D), and back. XLA cancels the one against the other."""
        return jnp.swapaxes(x, 1, 2) if self.layout is Layout.BTNH else x

    def strided(self, x: jax.Array) -> jax.Array:
        """(B * NH, S, D) to what the kernels read: the layout of the call, with B and NH one axis where they are neighbours."""
        B, NH = self.problem.B, self.problem.NH
        return x if self.layout is Layout.BNTH else self.swap_heads(x.reshape(B, NH, *x.shape[1:]))

    def flat(self, x: jax.Array) -> jax.Array:
        """The inverse of ``strided``."""
        return (
            x
            if self.layout is Layout.BNTH
            else self.swap_heads(x).reshape(self.problem.BNH, self.problem.S, x.shape[-1])
        )

    def chunks(self, x: jax.Array) -> jax.Array:
        """(B * NH, S, ...) to (B * NH, NC, L, ...)."""
        return x.reshape(x.shape[0], self.problem.NC, self.problem.L, *x.shape[2:])

    def _can_store_states(self, splits: int) -> bool:
        """Whether splits end where chunks do, and the scan can store states."""
        choice = dict(self.kernels)["recurrent_fw_H"]
        facts = dispatch.kernel("recurrent_fw_H", choice.lowering)
        can_store = facts is not None and facts.stores_states(choice.tiles, self.problem)
        return can_store and self.problem.NC % splits == 0

    def _fused_splits(self) -> int:
        """Splits of a sequence, of whole chunks of the fused scan.

        The least power of two that makes enough heads; 0 where there are too few for the scan, or
        it is not wanted.
        """
        plain = (
            dispatch.kernel("recurrent_fw_H", dict(self.kernels)["recurrent_fw_H"].lowering) is None
        )
        if plain and self.backend != Lowering.XLA:
            return 0  # the plain form of the scan is slower than materialised states
        heads, num_splits, p = (
            self.config.fused_min_heads or 0,
            self.config.stage("recurrent_fw_H").num_splits,
            self.fused_problem,
        )
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
    """Padded and cast: q, k, v in the kernel dtype, starts (1 where a packed segment begins) int32, the rest float32."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    i: jax.Array
    f: jax.Array
    c_initial: Any  # an array; None within a pass that starts from zeros
    n_initial: jax.Array
    m_initial: jax.Array
    starts: jax.Array | None = None


class States(NamedTuple):
    """The last states, or their cotangents; of the latter c and m None: zeros."""

    c: Any  # (B, NH, DHQK, DHHV)
    n: jax.Array  # (B, NH, DHQK)
    m: Any  # (B, NH)


class StoredStates(NamedTuple):
    """At the chunk boundaries, of L steps; the true states are these times exp(m)."""

    C: Any  # (B, NH, NC, DHQK, DHHV) in the kernel dtype; None: recomputed
    n: Any  # (B, NH, NC, DHQK) float32, as what follows; None where only m is read, of a shard in sequence parallelism
    m: Any  # (B, NH, NC + 1); None: recomputed
    C_last: Any  # (B, NH, DHQK, DHHV); None where C is, or the last states are not wanted
    n_last: Any  # (B, NH, DHQK); None where n is


class Forward(NamedTuple):
    """Of a forward pass."""

    h: jax.Array  # (B, NH, S, DHHV)
    last: States | None  # None where they are not wanted
    z: jax.Array | None  # (B, NH, S); None without a normaliser
    states: StoredStates


class Cotangents(NamedTuple):
    h: jax.Array
    last: States | None  # None where the last states are not wanted


class Residuals(NamedTuple):
    """What the backward pass reads of the forward pass: h and z for the normaliser, and the states."""

    inputs: Inputs
    h: jax.Array | None  # None without a normaliser, or where the denominator is a constant
    z: jax.Array | None
    states: StoredStates
