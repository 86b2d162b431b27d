"""The Mosaic GPU kernels on a Hopper GPU, each check in a process of its own."""

import functools
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import table_gpu
import test_gates
from mosaic_gpu_cases import (
    CASES,
    FUSED_STAGES,
    PAIRS,
    RECURRENCES,
    check_case,
    mosaic_stages,
    skip_unless_hopper,
)
from oracle import needs_mosaic_gpu, run_python
from relations import by_nan, repeated, value
from test_gpu_huge import inputs_on_device
from test_stages import launch_of

from mlstm_pallas import KernelConfig, mlstm_chunkwise
from mlstm_pallas.launches.lowering import Lowering
from mlstm_pallas.mosaic_gpu.common.limits import HEADS
from mlstm_pallas.problem.dimensions import make_problem

MODULE = Path(__file__).stem
TABLES = {
    "plans": table_gpu.PLANS,
    "any_heads": tuple(table_gpu.of_any_heads("mosaic_gpu")),
}
LAST = {"parallel_bw_dQKV", "chunk_gradients"}
SECONDS = 300  # of a check: a kernel that waits for ever hangs its process


def in_process(check, *arguments):
    """Runs a function of this module in a process of its own."""
    code = f"import {MODULE}\n{MODULE}.{check}(*{arguments})\nprint('all ran')"
    output = run_python("-c", code, timeout=SECONDS, PYTHONPATH=os.pathsep.join(sys.path))
    assert output.rstrip().endswith("all ran")


def test_a_check_that_does_not_end_is_stopped(monkeypatch):
    monkeypatch.setitem(globals(), "SECONDS", 0.1)
    with pytest.raises(pytest.fail.Exception, match=r"recurrences_on_a_gpu\(.*does not end"):
        in_process("recurrences_on_a_gpu")


def cases_on_a_gpu(*names):
    for name in names:
        print(name, flush=True)  # the last one is the one that fails
        check_case((CASES | PAIRS)[name])


def recurrences_on_a_gpu():
    for recurrences in RECURRENCES.values():
        recurrences.check(Lowering.MOSAIC_GPU)


def vector_states_on_a_gpu():
    """With splits, and with more heads than the second and third axis of a CUDA grid have CTAs."""
    for heads, NC, backward in ((HEADS + 2, 3, False), (4, 1024, False), (4, 1024, True)):
        problem = make_problem((1, heads, 64 * NC, 128), 128, 64, pad_heads=False)
        call = launch_of("vector_states", problem, "bfloat16", Lowering.MOSAIC_GPU)
        assert (call.tiles.num_splits > 1) == (NC == 1024)
        test_gates.check_vector_states(call, backward)


def calls_on_a_gpu(name, first, step):
    """What table_gpu.py has for calls of a table; all run their backward pass on Mosaic GPU."""
    for call in TABLES[name][first::step]:
        print(call, flush=True)
        config = KernelConfig(**call.options.get("config", {}))
        stages = mosaic_stages(*call.shape, config=config)
        assert stages & LAST, stages
        assert "recurrent_bw_dC" in stages, stages
        assert stages >= FUSED_STAGES or not config.fused or name != "plans", stages
        value(call, "mosaic_gpu", ["model"])
        repeated(call, "mosaic_gpu")
        if name == "any_heads":
            by_nan(call, "mosaic_gpu")


def repeats_on_a_gpu(B, NH, S, DHQK, DHV):
    """50 calls return equal bits."""
    shape = B, NH, S, DHQK, DHV
    x, dh = inputs_on_device(shape, "bfloat16", 4.0)
    stages, states = mosaic_stages(*shape), {"recurrent_fw_C", "parallel_fw_H"}
    assert stages >= FUSED_STAGES or stages >= states
    assert stages >= {"chunk_gates", "recurrent_bw_dC"}
    assert stages >= {"chunk_gradients"} or stages >= {"parallel_bw_dP", "parallel_bw_dQKV"}

    @jax.jit
    def run(dh, *x):
        h, pull = jax.vjp(lambda *x: mlstm_chunkwise(*x, backend="mosaic_gpu"), *x)
        return h, *pull(dh.astype(h.dtype))

    first = run(dh, *x)
    equal = jax.jit(functools.partial(jnp.array_equal, equal_nan=True))
    for call in range(50):
        assert all(map(equal, run(dh, *x), first)), call


# Of the quick selection.
SMOKE = [(cases_on_a_gpu, "splits"), (recurrences_on_a_gpu,)]
OTHERS = [name for name in CASES | PAIRS if not any(name in check for check in SMOKE)]
GPU_CHECKS = [
    *SMOKE,
    *((cases_on_a_gpu, *OTHERS[part::6]) for part in range(6)),
    *((calls_on_a_gpu, "plans", part, 4) for part in range(4)),
    *((calls_on_a_gpu, "any_heads", part, 4) for part in range(4)),
    (vector_states_on_a_gpu,),
    (repeats_on_a_gpu, 8, 8, 8192, 256, 512),
    (repeats_on_a_gpu, 8, 32, 8192, 64, 128),
    (repeats_on_a_gpu, 1, 4, 2048, 256, 512),
]


@needs_mosaic_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("check", "arguments"),
    [
        pytest.param(
            check.__name__,
            arguments,
            id="-".join(map(str, (check.__name__, *arguments))),
            marks=[pytest.mark.smoke] * ((check, *arguments) in SMOKE),
        )
        for check, *arguments in GPU_CHECKS
    ],
)
def test_on_a_gpu(check, arguments):
    skip_unless_hopper()
    in_process(check, *arguments)
