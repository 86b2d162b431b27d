"""Whether a config can have the shared memory it needs on a device: asked before the compiler is."""

import itertools
import re
from typing import NamedTuple

import jax.numpy as jnp

from mlstm_pallas.config import WALKS, KernelConfig, StageConfig
from mlstm_pallas.problem import Problem

# Compute capability times ten by what device_kind says, and the KiB of shared memory that one block may have there (opt-in maximum).
_CAPABILITY = (
    (r"\b(A100|A800|A30)\b", 80),
    (r"\b(A2|A10G?|A16|A40|L4|L20|L40S?)\b|^NVIDIA .*RTX (PRO )?[A3-9]", 86),  # and 89, 120, which have as much
    (r"\bG?H(100|200|800|20)\b", 90),
    (r"\bG?B(100|200|300)\b", 100),
)
_SHARED_KIB = {80: 163, 86: 99, 90: 227, 100: 227}


def _capability(device_kind: str) -> int | None:
    return next((number for pattern, number in _CAPABILITY if re.search(pattern, device_kind)), None)


def available_shared_bytes(device_kind: str) -> int | None:
    """Shared memory that one block may have; None for a device that is not known."""
    capability = _capability(device_kind)
    return None if capability is None else _SHARED_KIB[capability] * 1024


class _Products(NamedTuple):
    """Matrix products of one loop of a stage, in elements."""

    looped: bool  # for more than one step
    rows: int  # of the left operand
    left: int  # left operands, loaded in every step
    right: tuple[int, ...]  # right operands, loaded in every step
    kept: int = 0  # a left operand that stays; in float32 in registers


def _products(name: str, stage: StageConfig, p: Problem) -> list[_Products]:
    if name in ("chunk_gates", "parallel_fw_P"):  # no product in a loop, and little of the rest
        return []
    LQ, LKV, BK, BV, step = stage.siz_b_LQ, stage.siz_b_LKV, stage.siz_b_DHQK, stage.siz_b_DHHV, stage.siz_b_loop
    L, over_K, over_V = p.L, step < p.DHQK, step < p.DHHV
    if name in ("recurrent_fw_C", "recurrent_bw_dC"):
        return [_Products(L > LKV, BV, LKV * BV, (LKV * BK,))]
    if name == "parallel_bw_P":
        return [_Products(over_V, L, L * step, (L * step,)), _Products(p.DHQK > BK, L, L * BK, (L * BK,))]
    if name == "parallel_bw_dP":
        return [_Products(over_K or over_V, LQ, LQ * step, (LQ * step,))]
    if name == "parallel_bw_dQKV":
        tiles = min(step, LQ)
        keys, values = (_Products(over, LQ, LQ * step, (size * step,)) for over, size in ((over_V, BK), (over_K, BV)))
        from_tiles = (_Products(tiles < L, LQ, LQ * tiles, (tiles * size,)) for size in (BK, BV))
        return [keys, values, *from_tiles]
    if name in WALKS:
        part, columns = (BK, BV) if WALKS[name] == "DHQK" else (BV, BK)
        operands = (L * part,) * (2 * step // part)
        pipelined = p.NC > 1 and stage.num_stages > 1  # else they come through registers, bit by bit
        return [_Products(True, columns, 0, operands, L * columns)] if pipelined else []
    walks = not LQ == LKV == L  # over the tiles of a chunk
    whole = _Products(walks, LQ, 0, (LKV * p.DHQK, LKV * BV), LQ * p.DHQK if stage.keep_q else 0)
    keys = whole if stage.keep_q or p.DHQK == BK else _Products(True, LQ, LQ * BK, (LKV * BK,))
    return [_Products(p.DHQK > BK, LQ, LQ * BK, (BK * BV,)), keys]


def least_shared_bytes(name: str, stage: StageConfig, problem: Problem, dtype: jnp.dtype, *, wgmma: bool) -> int:
    """Shared memory that a program of the stage takes at the least, float32 at the default precision.

    A lower bound: nothing is refused that the compiler would take. What a pipelined loop loads for its products is held num_stages - 1
    times over (if it is enough for an asynchronous copy, 4 bytes a thread), once more where wgmma (compute capability 9.0) reads it from
    there; float32 operands of wgmma are there as three bfloat16 parts too. Operands that are computed and changes of layout are not
    counted. tests/test_shared_memory.py compares it with compiled kernels.
    """
    stage, wide = stage.fitted(problem, name), dtype.itemsize > 2
    recurrent = name in ("recurrent_fw_C", "recurrent_bw_dC")
    stage = stage.narrowed(problem) if recurrent else stage
    ahead = (stage.num_stages - 1) * dtype.itemsize
    most = 0
    for x in _products(name, stage, problem):
        held = max(x.left, *x.right)
        if x.looped and ahead:
            held = ahead * sum(y for y in (x.left, *x.right) if y * dtype.itemsize >= 128 * stage.num_warps)
            if wgmma and x.rows >= 64:
                held += 6 * max(x.right) if wide else 2 * (x.left + sum(x.right) + x.kept)
            elif recurrent and not wide:  # the left operand is turned on its way, from one copy
                held = ahead * sum(x.right) + 2 * x.left
        most = max(most, held)
    return most


def check_fits(config: KernelConfig, problem: Problem, dtype: jnp.dtype, device_kind: str, recompute_states_in_bw: bool = True) -> None:
    """Raises ValueError for a stage of a call that cannot get the shared memory it needs on this device, where the device is known.

    float32 at another precision than the default is left to the compiler.
    """
    available = available_shared_bytes(device_kind)
    if available is None or (dtype == jnp.float32 and config.precision is not None):
        return
    alone, _ = config.passes(problem)  # a forward pass keeps no states where no backward pass follows, which is not known here
    for name in dict.fromkeys(itertools.chain(alone, *config.passes(problem, recompute_states_in_bw))):
        p = config.problem_of(name, problem)
        needed = least_shared_bytes(name, config.stage(name), p, dtype, wgmma=_capability(device_kind) == 90)
        if needed > available:
            raise ValueError(
                f"config.{name} needs at least {needed} bytes of shared memory for {dtype.name} heads of {p.DHQK}/{p.DHHV} in "
                f"chunks of {p.L}, expected at most {available}, what a block may have on {device_kind}: smaller tiles or fewer "
                f"num_stages need less"
            )
