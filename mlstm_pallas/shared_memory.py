"""Whether a config can have the shared memory it needs on a device: asked before the compiler is."""

import re
from collections.abc import Iterable

import jax.numpy as jnp

from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Stage, StageConfig
from mlstm_pallas.stages import STAGES

# Compute capability times ten by what device_kind says, and the KiB of shared memory that one block may have there (opt-in maximum).
_CAPABILITY = (
    (r"\b(A100|A800|A30)\b", 80),
    (r"\b(A2|A10G?|A16|A40|L4|L20|L40S?)\b|^NVIDIA .*RTX (PRO )?[A3-9]", 86),  # and 89, 120, which have as much
    (r"\bG?H(100|200|800|20)\b", 90),
    (r"\bG?B(100|200|300)\b", 100),
)
_SHARED_KIB = {80: 163, 86: 99, 90: 227, 100: 227}


def compute_capability(device_kind: str) -> int | None:
    """Times ten; None for a device that is not known."""
    return next((number for pattern, number in _CAPABILITY if re.search(pattern, device_kind)), None)


def available_shared_bytes(device_kind: str) -> int | None:
    """Shared memory that one block may have; None for a device that is not known."""
    capability = compute_capability(device_kind)
    return None if capability is None else _SHARED_KIB[capability] * 1024


def least_shared_bytes(stage: Stage, tiles: StageConfig, problem: Problem, dtype: jnp.dtype, *, wgmma: bool) -> int:
    """Shared memory that a CTA of the stage takes at the least, float32 at the default precision.

    A lower bound: nothing is refused that the compiler would take. What a pipelined loop loads for its products is held num_stages - 1
    times over (if it is enough for an asynchronous copy, 4 bytes a thread), once more where wgmma (compute capability 9.0) reads it from
    there; float32 operands of wgmma are there as three bfloat16 parts too. Operands that are computed and changes of layout are not
    counted. tests/test_shared_memory.py compares it with compiled kernels.
    """
    tiles, wide = stage.clamp(tiles, problem), dtype.itemsize > 2
    ahead = (tiles.num_stages - 1) * dtype.itemsize
    most = 0
    for x in stage.loops(tiles, problem):
        held = max(x.left, *x.right)
        if x.pipelined and ahead:
            held = ahead * sum(y for y in (x.left, *x.right) if y * dtype.itemsize >= 128 * tiles.num_warps)
            if wgmma and x.rows >= 64:
                held += 6 * max(x.right) if wide else 2 * (x.left + sum(x.right) + x.kept)
            elif stage.transposes_left and not wide:
                held = ahead * sum(x.right) + 2 * x.left
        most = max(most, held)
    return most


def check_fits(calls: Iterable[tuple[str, StageConfig, Problem]], dtype: jnp.dtype, device_kind: str) -> None:
    """Raises ValueError for a stage that cannot get the shared memory it needs on this device, where the device is known.

    calls: (name, tiles, problem) of each stage.
    """
    available = available_shared_bytes(device_kind)
    if available is None:
        return
    for name, tiles, p in calls:
        needed = least_shared_bytes(STAGES[name], tiles, p, dtype, wgmma=compute_capability(device_kind) == 90)
        if needed > available:
            raise ValueError(
                f"config.{name} needs at least {needed} bytes of shared memory for {dtype.name} heads of {p.DHQK}/{p.DHHV} in "
                f"chunks of {p.L}, expected at most {available}, what a block may have on {device_kind}: smaller tiles or fewer "
                f"num_stages need less"
            )
