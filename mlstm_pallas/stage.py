"""The types that describe a stage, a call of a stage, and a stage's kernels.

``stages/`` has the contracts, a file each. ``triton/`` and ``mosaic_gpu/`` have the kernels, in
files of the same names, and ``dispatch.py`` finds them.
"""

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mlstm_pallas.problem import MIN_TILE, Problem, is_power_of_two
from mlstm_pallas.tiles import Precision
from mlstm_pallas.validation import check_flag, check_instance, check_integer


class Lowering(enum.StrEnum):
    """How a stage runs: as a kernel, compiled or interpreted, or in plain jnp."""

    TRITON = "triton"
    INTERPRET = "interpret"
    MOSAIC_GPU = "mosaic_gpu"
    MOSAIC_GPU_INTERPRET = "mosaic_gpu_interpret"
    XLA = "xla"

    @property
    def interpret(self) -> bool:
        return self.endswith("interpret")

    @property
    def room(self) -> str:
        """The folder of its kernels."""
        return {"interpret": "triton", "xla": "stages"}.get(self, self.removesuffix("_interpret"))


# Triton's blocks have at most 2**20 elements, and a side has at least MIN_TILE.
MAX_TILE_SIZE = 2**20 // MIN_TILE


def clamped(tile: int, size: int) -> int:
    """The largest power of two up to the tile (itself a power of two) that divides the size."""
    return min(tile, size & -size)


@dataclasses.dataclass(frozen=True)
class StageConfig:
    """Tiles of one stage. A kernel reads the fields that its ``Kernel.search`` names.

    Attributes:
      siz_b_LQ, siz_b_LKV: queries and keys in a tile, along the sequence.
      siz_b_DHQK, siz_b_DHHV: head dimension columns of q, k and of v, h in a tile.
      siz_b_loop: columns that a backward stage sums over in an iteration, along either head
        dimension; in recurrent_fw_H the rows of the state that a launch holds.
      num_warps, num_stages: Triton's warps per CTA and depth of the software pipeline.
      keep_q: parallel_fw_H only. True keeps a tile's queries whole in shared memory during the
        loop over keys; False reads them block by block for every key tile. True takes
        siz_b_LQ * DHQK elements and needs a padded DHQK that is a power of two.
      num_splits: recurrent_fw_C, recurrent_bw_dC and recurrent_fw_H only. Parts of the sequence
        that run at the same time, a power of two. None: more than one where there are few CTAs or
        heads.
      mosaic_gpu: tiles of the stage's Mosaic GPU kernel; its num_warps are those that compute.
        None: its heuristic. Where the kernel cannot run with them the stage falls to the next
        lowering (``dispatch.py``).
    """

    siz_b_LQ: int = 64
    siz_b_LKV: int = 64
    siz_b_DHQK: int = 64
    siz_b_DHHV: int = 64
    siz_b_loop: int = 64
    num_warps: int = 4
    num_stages: int = 2
    keep_q: bool = True
    num_splits: int | None = None
    mosaic_gpu: "StageConfig | None" = None

    def __post_init__(self) -> None:
        def check(name: str, *limits: int, **kinds: bool) -> None:
            object.__setattr__(
                self, name, check_integer(name, getattr(self, name), *limits, **kinds)
            )

        for name in ("siz_b_LQ", "siz_b_LKV", "siz_b_DHQK", "siz_b_DHHV", "siz_b_loop"):
            check(name, MIN_TILE, MAX_TILE_SIZE, power_of_two=True)
        check("num_warps", 1, 16, power_of_two=True)
        check("num_stages", 1, 8)
        if self.num_splits is not None:
            check("num_splits", 1, power_of_two=True, optional=True)
        object.__setattr__(self, "keep_q", check_flag("keep_q", self.keep_q))
        check_instance("mosaic_gpu", self.mosaic_gpu, StageConfig)

    def replace(self, **changes: Any) -> "StageConfig":
        return dataclasses.replace(self, **changes)

    def of(self, room: str) -> "StageConfig | None":
        """The tiles of the kernel in a room; None: its heuristic."""
        return self.mosaic_gpu if room == "mosaic_gpu" else self

    def clamped(self, problem: Problem) -> "StageConfig":
        """The config with every tile clamped to what divides the problem's (padded) dimensions."""
        return self.replace(
            siz_b_LQ=clamped(self.siz_b_LQ, problem.L),
            siz_b_LKV=clamped(self.siz_b_LKV, problem.L),
            siz_b_DHQK=clamped(self.siz_b_DHQK, problem.DHQK),
            siz_b_DHHV=clamped(self.siz_b_DHHV, problem.DHHV),
            siz_b_loop=min(
                clamped(self.siz_b_loop, problem.DHQK), clamped(self.siz_b_loop, problem.DHHV)
            ),
            keep_q=self.keep_q and is_power_of_two(problem.DHQK),
        )


@dataclasses.dataclass(frozen=True)
class StageCall:
    """How one call of a stage runs.

    Attributes:
      problem: in the chunks of the stage.
      tiles: clamped to the problem.
      precision: of float32 products in the kernels; plain jnp multiplies in full float32.
      lowering: the kernel or plain jnp.
    """

    problem: Problem
    tiles: StageConfig
    precision: Precision
    lowering: Lowering

    @property
    def interpret(self) -> bool:
        return self.lowering.interpret

    def chunks(self, x: jax.Array) -> jax.Array:
        """(B * NH, S, ...), or (B, S, NH, D), to (B * NH, NC, L, ...); zeros in steps beyond x."""
        p, splits = self.problem, self._splits(x)
        x = with_steps(x, p.S * splits)
        if x.ndim < 4:
            return x.reshape(x.shape[0] * splits, p.NC, p.L, *x.shape[2:])
        return jnp.swapaxes(x, 1, 2).reshape(p.BNH, p.NC, p.L, x.shape[-1])

    def steps(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """The inverse: (B * NH, NC, L, D) to the layout and the steps of ``like``."""
        B, S = like.shape[:2]
        whole = self.problem.S * self._splits(like)
        if like.ndim < 4:
            return with_steps(x.reshape(B, whole, x.shape[-1]), S)
        x = x.reshape(B, like.shape[2], whole, x.shape[-1])
        return with_steps(jnp.swapaxes(x, 1, 2), S)

    def _splits(self, x: jax.Array) -> int:
        """Heads of the problem, of which splits count as some, for each of x."""
        heads = x.shape[0] * (x.shape[2] if x.ndim == 4 else 1)
        return self.problem.BNH // heads if heads else 1


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The facts of a kernel: ``KERNEL`` in its module.

    Attributes:
      search: the fields of StageConfig that it reads, with the values that the tuner tries.
      heuristic: (problem, dtype) -> tiles. Triton's fit 99 KiB of shared memory, the least of the
        supported devices, at any head size.
      clamp: (tiles, problem) -> the tiles that run.
      takes: (tiles, problem, dtype) -> whether it can run; else the stage falls to the next
        lowering.
      pays: (tiles, problem) -> whether it is faster than the kernel of the next lowering.
      makes_tiles: problem -> whether it computes P and dP itself; parallel_bw_dQKV only.
      stores_states: (tiles, problem) -> whether it can store states; recurrent_fw_H only.
    """

    search: Mapping[str, Sequence[Any]]
    heuristic: Callable[[Problem, jnp.dtype], StageConfig]
    clamp: Callable[[StageConfig, Problem], StageConfig] = StageConfig.clamped
    takes: Callable[[StageConfig, Problem, jnp.dtype], bool] = lambda tiles, p, dtype: True
    pays: Callable[[StageConfig, Problem], bool] = lambda tiles, p: True
    makes_tiles: Callable[[Problem], bool] = lambda p: False
    stores_states: Callable[[StageConfig, Problem], bool] = lambda tiles, p: False


@dataclasses.dataclass(frozen=True)
class Stage:
    """The name and inputs of a stage.

    Attributes:
      name: of the file, the function, the kernels, the field of KernelConfig, the benchmark's
        flag, the test id and the profile.
      inputs: by documented name: an input of the call, a field of an earlier stage's outputs, or
        the name of an earlier stage for all of its outputs.
      fused: whether it runs in the chunks of the fused scan, not in those of the call.
      decode: whether it is a stage of generation, not of mlstm_chunkwise.
    """

    name: str
    inputs: Sequence[str]
    fused: bool = False
    decode: bool = False

    @property
    def backward(self) -> bool:
        return "_bw_" in self.name


TILE_SIZES = (16, 32, 64, 128, 256)
LAUNCH_SEARCH: dict[str, Sequence[Any]] = {"num_warps": (4, 8), "num_stages": (1, 2, 3, 4)}


def search_of(*names: str, **values: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """The usual values of the named sizes, num_warps and num_stages, overridden by ``values``."""
    return dict.fromkeys(names, TILE_SIZES) | LAUNCH_SEARCH | values


# q, k, v, h and their gradients are (B * NH, S, D) in memory or, with the layout "BTNH",
# (B, S, NH, D); the number of axes tells which. Gates, tiles and states have one layout.
#
# q, k, v, h and their gradients may have the caller's steps, fewer than Problem.S, and so may the
# weighted operands made of them; all code takes what is beyond for zeros. All else has Problem.S
# steps, whole chunks. The gates beyond the caller's store nothing and decay nothing.


def with_steps(x: jax.Array, S: int) -> jax.Array:
    """x with S steps along axis 1: with zeros behind, or cut."""
    if x.shape[1] > S:
        return x[:, :S]
    behind = S - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, behind), *[(0, 0)] * (x.ndim - 2)]) if behind else x


def sequence_shape(like: jax.Array, columns: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array in the layout of ``like``."""
    return jax.ShapeDtypeStruct((*like.shape[:-1], columns), dtype)


def steps_like(vec: jax.Array, x: jax.Array) -> jax.Array:
    """A number a step, (B * NH, S), to multiply x with: (B * NH, S, 1) or (B, S, NH, 1)."""
    vec = with_steps(vec, x.shape[1])
    if x.ndim == 3:
        return vec[..., None]
    B, S, NH, _ = x.shape
    return jnp.swapaxes(vec.reshape(B, NH, S), 1, 2)[..., None]


def steps_of(vec: jax.Array, S: int) -> jax.Array:
    """The inverse: (B, S', NH) or (B * NH, S') to (B * NH, S), with zeros behind."""
    if vec.ndim == 3:
        vec = jnp.swapaxes(vec, 1, 2).reshape(-1, vec.shape[1])
    return with_steps(vec, S)


class Weighted(NamedTuple):
    """An operand whose steps are weighted in a product, by the kernel or before it."""

    array: jax.Array  # (B * NH, S, D) or (B, S, NH, D)
    weights: jax.Array | None  # (B * NH, S) float32; None: the array is weighted

    def product(self) -> jax.Array:
        """The weighted array, in its dtype."""
        if self.weights is None:
            return self.array
        weights = steps_like(self.weights, self.array)
        return (self.array.astype(weights.dtype) * weights).astype(self.array.dtype)

    def times(self, factors: jax.Array) -> jax.Array:
        """The weights of ``array`` that multiply the weighted one with the factors (B * NH, S)."""
        return factors if self.weights is None else factors * self.weights
