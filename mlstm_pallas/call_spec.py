"""A call: everything static about it, decided once, its arrays, and what its backward pass reads of its forward pass."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas.config import KernelConfig
from mlstm_pallas.launch import HAS_TRITON, without_mosaic_gpu
from mlstm_pallas.normaliser import Normaliser
from mlstm_pallas.problem import InputGate, Layout, Problem, next_power_of_two
from mlstm_pallas.stage import Lowering, StageCall, StageConfig, clamped, mosaic_gpu_rows, wants_mosaic_gpu
from mlstm_pallas.stages import STAGES
from mlstm_pallas.stages.parallel_bw_dQKV import mosaic_gpu_by_chunk

# Shorter splits cost more than idle SMs, and narrower heads (DHQK * DHHV) are as fast with materialised states.
MIN_SPLIT_STEPS, MIN_SPLIT_STATE = 2048, 2**17


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
      fused: whether the forward pass is the fused scan; else it materialises the states. It follows from the rest.
      num_splits: of each sequence in the fused scan. It follows from the rest.
      mosaic_gpu: (name, tiles) of the stages that run on Mosaic GPU if they are among ``stages``. It follows from the rest.
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
    fused: bool = dataclasses.field(init=False)
    num_splits: int = dataclasses.field(init=False)
    mosaic_gpu: tuple[tuple[str, StageConfig], ...] = dataclasses.field(init=False)

    def __post_init__(self):
        found = ((name, self._mosaic_gpu_tiles(name)) for name in STAGES)
        object.__setattr__(self, "mosaic_gpu", tuple((name, tiles) for name, tiles in found if tiles is not None))
        splits = self._fused_splits()
        fused = splits > 0 and (self.recompute_states_in_bw or self._can_store_states(splits))
        object.__setattr__(self, "fused", fused)
        object.__setattr__(self, "num_splits", splits if fused else 1)

    def __str__(self) -> str:
        p, row = self.problem, self.config.as_row()
        for name, tiles in self.mosaic_gpu:
            facts = STAGES[name].mosaic_gpu
            row[name] = {"mosaic_gpu": {field: getattr(tiles, field) for field in facts.search} if facts else {}}
        fused = f"fused scan in chunks of {self.fused_problem.L} and {self.num_splits} splits"
        stages = ", ".join(f"{name} {row[name]}" for name in self.stages)
        return (
            f"{self.layout}, B {p.B}, NH {p.NH}, S {p.S}, {self.dtype.name} heads of {p.DHQK}/{p.DHHV} in chunks of {p.L}, "
            f"backend {self.backend}; forward: {fused if self.fused else 'materialised states'}; tiles: {stages}"
        )

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
        """Of the kernel that runs the stage, not clamped."""
        return dict(self.mosaic_gpu).get(name) or self.config.stage(name)

    def _mosaic_gpu_tiles(self, name: str) -> StageConfig | None:
        """None where the stage does not run on Mosaic GPU."""
        facts = STAGES[name].mosaic_gpu
        if facts is None or not wants_mosaic_gpu(self.backend) or self.dtype.itemsize != 2:
            return None
        config = self.config.stage(name)
        tiles, problem, num_splits = config.mosaic_gpu or facts.heuristic(self.problem), self.problem, config.num_splits or 1
        if num_splits > 1:
            if name == "recurrent_bw_dC":  # whose kernel splits no sequence
                return None
            problem = dataclasses.replace(problem, NH=problem.NH * num_splits)
        if STAGES[name].fused:  # all of them in the chunks of the scan, and on Mosaic GPU with it
            scan = tiles if name == "recurrent_fw_H" else self._mosaic_gpu_tiles("recurrent_fw_H")
            if scan is None:
                return None
            problem = problem.in_chunks_of(scan.siz_b_LKV)
        return tiles if facts.takes(tiles, problem) else None

    @property
    def fused_tiles(self) -> bool:
        """Whether parallel_bw_dQKV computes P and dP itself; parallel_bw_dP then does not run."""
        return "parallel_bw_dQKV" in dict(self.mosaic_gpu) and mosaic_gpu_by_chunk(self.problem)

    @property
    def weights_operands(self) -> bool:
        """Whether recurrent_bw_dC weights queries and keys. Else they come scaled: from parallel_bw_dP on Triton, from XLA on Mosaic GPU.

        It weights dh in place of q: in float16 r dh would fall below the normal numbers.
        """
        on_mosaic_gpu = dict(self.mosaic_gpu).keys()
        return self.dtype != jnp.float16 and "recurrent_bw_dC" in on_mosaic_gpu and (self.fused_tiles or "parallel_bw_dP" in on_mosaic_gpu)

    @property
    def forward_stages(self) -> tuple[str, ...]:
        return ("chunk_gates", *(("parallel_fw_P", "recurrent_fw_H") if self.fused else ("recurrent_fw_C", "parallel_fw_H")))

    @property
    def backward_stages(self) -> tuple[str, ...]:
        tiles = () if self.fused_tiles else ("parallel_bw_dP",)
        return "chunk_gates", *tiles, "recurrent_bw_dC", "parallel_bw_dQKV"

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.forward_stages, *self.backward_stages)))

    def launches(self) -> list[tuple[str, StageConfig, Problem]]:
        """Name, tiles and problem of each Triton kernel of the forward and the backward pass; chunk_gates in the chunks of the call."""
        names = [name for name in self.stages if name not in dict(self.mosaic_gpu)] if HAS_TRITON else []
        return [(name, self.config.stage(name), self.fused_problem if STAGES[name].fused else self.problem) for name in names]

    def call(self, name: str, lowering: Lowering, problem: Problem | None = None, *, clamp: bool = True) -> StageCall:
        """How a stage runs in this call; problem: in place of the call's."""
        problem, tiles, facts = problem or self.problem, self.tiles(name), STAGES[name].mosaic_gpu
        if lowering.mosaic_gpu and name in dict(self.mosaic_gpu):
            # chunk_gates runs in chunks of the call and of the fused scan. It may have a kernel for the former alone.
            if name != "chunk_gates" or (facts is not None and facts.takes(tiles, problem)):
                return StageCall(problem, tiles, None, lowering)
            tiles = self.config.stage(name)
        lowering = without_mosaic_gpu(lowering)
        precision = self.config.dot_precision(self.dtype, interpret=lowering is Lowering.INTERPRET)
        precision = lax.Precision.HIGHEST if lowering is Lowering.XLA else precision
        clamp = clamp and lowering is not Lowering.XLA  # the plain forms have no tiles; their heads may be narrower than one
        return StageCall(problem, STAGES[name].clamp(tiles, problem) if clamp else tiles, precision, lowering)

    def swap_heads(self, x: jax.Array) -> jax.Array:
        """The layout of the call to (B, NH, S, D), and back. XLA cancels the one against the other."""
        return jnp.swapaxes(x, 1, 2) if self.layout is Layout.BTNH else x

    def strided(self, x: jax.Array) -> jax.Array:
        """(B * NH, S, D) to what the kernels read: the layout of the call, with B and NH one axis where they are neighbours."""
        B, NH = self.problem.B, self.problem.NH
        return x if self.layout is Layout.BNTH else self.swap_heads(x.reshape(B, NH, *x.shape[1:]))

    def flat(self, x: jax.Array) -> jax.Array:
        """The inverse of ``strided``."""
        return x if self.layout is Layout.BNTH else self.swap_heads(x).reshape(self.problem.BNH, self.problem.S, x.shape[-1])

    def chunks(self, x: jax.Array) -> jax.Array:
        """(B * NH, S, ...) to (B * NH, NC, L, ...)."""
        return x.reshape(x.shape[0], self.problem.NC, self.problem.L, *x.shape[2:])

    def _can_store_states(self, splits: int) -> bool:
        """Whether splits end where chunks do, and one launch of the scan holds all rows of the state."""
        p = self.problem
        tiles = self.tiles("recurrent_fw_H")
        mosaic_gpu = "recurrent_fw_H" in dict(self.mosaic_gpu)
        rows = mosaic_gpu_rows(p.DHQK, tiles.siz_b_loop) if mosaic_gpu else clamped(tiles.siz_b_loop, p.DHQK)
        return p.NC % splits == 0 and rows == p.DHQK

    def _fused_splits(self) -> int:
        """Splits of a sequence, of whole chunks of the fused scan; 0 where there are too few heads for it, or it is not wanted.

        The least power of two that makes enough heads.
        """
        if wants_mosaic_gpu(self.backend) and not HAS_TRITON and "recurrent_fw_H" not in dict(self.mosaic_gpu):
            return 0  # the plain form of the scan is slower than materialised states
        heads, num_splits, p = self.config.fused_min_heads or 0, self.config.stage("recurrent_fw_H").num_splits, self.fused_problem
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
