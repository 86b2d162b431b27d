"""The Mosaic GPU kernels on a Hopper GPU, each check in a process of its own."""

import functools
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_gates
from call_checks import (
    BTNH,
    STORED,
    calls_of_any_heads,
    check_call,
    check_neighbours,
    gpu_call,
)
from mosaic_gpu_cases import (
    CASES,
    FUSED_STAGES,
    PAIRS,
    RECURRENCES,
    check_case,
    mosaic_stages,
    skip_unless_hopper,
)
from oracle import (
    array,
    check_isolated,
    cotangents_for,
    gradients_of_call,
    needs_mosaic_gpu,
    random_inputs,
    run_python,
)
from test_gpu_huge import inputs_on_device
from test_stages import launch_of

from mlstm_pallas import KernelConfig
from mlstm_pallas.mosaic_gpu.common.limits import HEADS
from mlstm_pallas.problem.dimensions import make_problem
from mlstm_pallas.stages.lowering import Lowering

MODULE = Path(__file__).stem
FUSED = KernelConfig(fused=True)
OF_ANY_HEADS = dict(calls_of_any_heads("mosaic_gpu"))
LAST = {"parallel_bw_dQKV", "chunk_gradients"}
SECONDS = 300  # of a check: a kernel that waits for ever hangs its process


def in_process(check, *arguments):
    """Runs a function of this module in a process of its own."""
    code = f"import {MODULE}\n{MODULE}.{check}(*{arguments})\nprint('all ran')"
    output = run_python("-c", code, timeout=SECONDS, PYTHONPATH=os.pathsep.join(sys.path))
    assert output.rstrip().endswith("all ran")


def test_a_check_that_does_not_end_is_stopped(monkeypatch):
    monkeypatch.setitem(globals(), "SECONDS", 0.1)
    with pytest.raises(pytest.fail.Exception, match=r"extremes_on_a_gpu\(.*does not end"):
        in_process("extremes_on_a_gpu")


def cases_on_a_gpu(*names):
    for name in names:
        print(name, flush=True)  # the last one is the one that fails
        check_case(name, "mosaic_gpu")


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


def any_heads_on_a_gpu(*names):
    for name in names:
        print(name, flush=True)
        call = OF_ANY_HEADS[name]
        stages = mosaic_stages(*call["shape"], config=call["config"])
        assert "recurrent_bw_dC" in stages, stages
        assert stages & LAST, stages
        check_call(**call)


def columns_on_a_gpu(DHQK, DHV, is_fused):
    """Nothing beyond the last column of a head is read or written, by tiles that reach beyond."""
    config = KernelConfig(fused=is_fused)
    check_neighbours("mosaic_gpu", (1, 3, 196, DHQK, DHV), "BTNH", config)


def plan_on_a_gpu(*shape):
    """Outputs and all eight gradients against float64, with the fused scan and as users get it."""
    stages = mosaic_stages(*shape, config=FUSED)
    assert stages >= FUSED_STAGES, shape
    assert stages & LAST, shape
    of_scan, of_default = (BTNH, STORED) if shape[2] % 64 else (STORED, BTNH)
    several = dict(config=FUSED) | of_scan, dict(config=None) | of_default
    several = [options for options in several if mosaic_stages(*shape, **options)]
    check_call(**gpu_call("bfloat16", *shape, backend="mosaic_gpu", several=several))


def h_and_gradients(dh, segment_ids=None, config=FUSED, **x):
    """h, and the gradients of q, k, v, i and f, by name."""
    run = gradients_of_call(return_last_states=False, config=config, backend="mosaic_gpu")
    (h,), gradients = run(x, [dh], segment_ids=segment_ids)
    return gradients | dict(h=h)


def packed_resets_on_a_gpu():
    """Steps after the start of a segment have the same bits whatever is before it; so do the
    gradients of those before, of what follows."""
    S, start = 1024, 700
    x, other = (
        random_inputs(seed, 2, 4, S, 256, 512, dtype="bfloat16", states=False) for seed in (7, 8)
    )
    x["dh"], other["dh"] = (cotangents_for(x, "bfloat16", seed=seed)[0] for seed in (0, 1))
    is_second = np.arange(S) >= start
    ids = np.tile(is_second.astype("int32"), (2, 1))
    for changed, part in ((~is_second, np.s_[start:]), (is_second, np.s_[:start])):
        # The gates stay as they are: a chunk's stabilisers are of both segments and cancel but for
        # their rounding.
        poisoned = x | {
            name: jnp.where(changed[:, None], other[name], x[name])
            for name in ("q", "k", "v", "dh")
        }
        check_isolated(
            lambda x: h_and_gradients(**x, segment_ids=ids),
            *(x, poisoned),
            lambda y, part=part: [y[name][:, :, part] for name in "hqkv"],
        )


def extremes_on_a_gpu():
    """Gates anywhere in [-1e4, 1e4], and infinite ones."""
    draw = np.random.default_rng(0)
    x = random_inputs(9, 2, 4, 1000, 256, 512, dtype="bfloat16", states=False)
    for values in ([-1e4, 1e4], [-1e4, 0.0, 1e4], [-1e4, -30.0, 30.0, 1e4, -np.inf]):
        x |= {name: array(draw.choice(values, size=x[name].shape), "float32") for name in "if"}
        for y in h_and_gradients(jnp.ones_like(x["v"]), **x).values():
            assert jnp.isfinite(y).all(), values


def repeats_on_a_gpu(B, NH, S, DHQK, DHV):
    """50 calls return equal bits."""
    shape = B, NH, S, DHQK, DHV
    x, dh = inputs_on_device(shape, "bfloat16", 4.0)
    stages, states = mosaic_stages(*shape), {"recurrent_fw_C", "parallel_fw_H"}
    assert stages >= FUSED_STAGES or stages >= states
    assert stages >= {"chunk_gates", "recurrent_bw_dC"}
    assert stages >= {"chunk_gradients"} or stages >= {"parallel_bw_dP", "parallel_bw_dQKV"}
    x = dict(zip("qkvif", x, strict=True))
    run = functools.partial(h_and_gradients, dh, config=None, **x)
    first = run()
    equal = jax.jit(functools.partial(jnp.array_equal, equal_nan=True))
    for call in range(50):
        assert jax.tree.all(jax.tree.map(equal, run(), first)), call


# Of the quick selection.
SMOKE = [(cases_on_a_gpu, "splits"), (recurrences_on_a_gpu,)]
OTHERS = [name for name in CASES | PAIRS if not any(name in check for check in SMOKE)]
GPU_CHECKS = [
    *SMOKE,
    *((cases_on_a_gpu, *OTHERS[part::6]) for part in range(6)),
    (plan_on_a_gpu, 1, 2, 2040, 256, 512),
    (plan_on_a_gpu, 1, 2, 2048, 256, 256),
    (plan_on_a_gpu, 1, 2, 2048, 512, 512),
    # More chunks of 128 steps than SMs: CTAs that own a chunk take another one after it.
    (plan_on_a_gpu, 1, 20, 1024, 128, 256),
    (vector_states_on_a_gpu,),
    *((any_heads_on_a_gpu, *[*OF_ANY_HEADS][part::4]) for part in range(4)),
    (columns_on_a_gpu, 96, 96, True),
    (columns_on_a_gpu, 96, 192, False),
    (columns_on_a_gpu, 160, 320, True),
    (columns_on_a_gpu, 320, 640, False),
    (check_neighbours, "mosaic_gpu", (2, 3, 512, 256, 512)),
    (packed_resets_on_a_gpu,),
    (extremes_on_a_gpu,),
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
