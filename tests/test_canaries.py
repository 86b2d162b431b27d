"""Every kernel writes what others read and reads nothing of its neighbours, which are NaN here, and
repeated runs have equal bits."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from mosaic_gpu_cases import fused
from oracle import (
    cotangents_for,
    gradients_of_call,
    needs_mosaic_gpu,
    random_inputs,
    slow,
    step_names,
)

from mlstm_pallas import KernelConfig, dispatch, mlstm_recurrent_step
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Launch, Lowering
from mlstm_pallas.stages import STAGES
from mlstm_pallas.triton import launch
from mlstm_pallas.triton.add_decayed import Tiles

HEADS, MIDDLE = 3, 1  # the heads lie one after the other in every array
SIZES = ("siz_b_LQ", "siz_b_LKV", "siz_b_DHQK", "siz_b_DHHV", "block_k", "state_rows")
TILES = dict.fromkeys(SIZES, 16) | dict(keep_q=False, num_splits=1)


def small(name, **changes):
    """The config of a kernel with small tiles."""
    fields = dataclasses.fields(dispatch.tiles_class(name, "triton"))
    tiles = {x.name: TILES[x.name] for x in fields if x.name in TILES}
    return {f"triton_{name}": tiles | changes}


def check_neighbours(run, *arguments):
    """What run returns for the middle head is finite, and has the same bits next to heads that are
    NaN; so has what it returns for all heads when it runs again."""
    others = np.arange(HEADS) != MIDDLE
    poisoned = jax.tree.map(lambda x: x.at[:, others].set(jnp.nan), arguments)
    runs = (jax.tree.leaves(run(*x)) for x in (arguments, poisoned, arguments))
    for result in zip(*runs, strict=True):
        x, y, z = (np.asarray(x.astype("float32")) for x in result)
        assert np.isfinite(x).all(), "something is read that is not written"
        assert np.array_equal(x[:, MIDDLE], y[:, MIDDLE]), "it depends on other heads"
        assert np.array_equal(x, z), "it differs from run to run"


def check_call(B, S, DHQK, DHHV, *, dtype="float32", **options):
    """Outputs and gradients of a call. Returns the kernels of Triton."""
    inputs = random_inputs(11, B, HEADS, S, DHQK, DHHV, dtype=dtype)
    run, x = gradients_of_call(**options), (inputs, cotangents_for(inputs, dtype))
    check_neighbours(run, *x)
    return {*re.findall(r"name=(\w+)", str(jax.make_jaxpr(run)(*x)))}


STORED, SPLIT = dict(recompute_states_in_bw=False), dict(num_splits=2)
# Fields of the config, options of the call, and S.
CASES = {
    "materialised": ({}, {}, 64),
    "materialised-long_chunks": (dict(chunk_size=256), {}, 256),
    "materialised-splits": (
        small("recurrent_fw_C", **SPLIT) | small("recurrent_bw_dC", **SPLIT),
        {},
        64,
    ),
    "fused": (dict(fused=True), {}, 64),
    "fused-stored": (dict(fused=True) | small("recurrent_fw_H", state_rows=32), STORED, 64),
}
QUICK = ("materialised", "fused-stored")


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        *(("interpret", case) for case in QUICK),
        *(slow("interpret", case) for case in CASES if case not in QUICK),
        *(pytest.param("triton", case, marks=pytest.mark.gpu) for case in CASES),
    ],
)
def test_kernels_read_nothing_that_is_not_theirs(backend, case):
    config, options, S = CASES[case]
    tiles = {name: x for stage in STAGES for name, x in small(stage).items()}
    config = KernelConfig(**dict(chunk_size=32, fused=False) | tiles | config)
    kernels = check_call(1, S, 32, 16, backend=backend, config=config, **options)
    assert kernels >= {"chunk_gates", "parallel_bw_dP", "recurrent_bw_dC", "parallel_bw_dQKV"}
    assert ("recurrent_fw_H" in kernels) == config.fused
    assert ("split_products" in kernels) == case.endswith("splits")


@pytest.mark.parametrize("backend", ["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def test_a_step_reads_nothing_that_is_not_its_own(backend):
    """The tiles do not divide rows and columns."""
    token = step_names(random_inputs(0, 1, HEADS, 1, 40, 24), 0)
    config = KernelConfig(**small("recurrent_step"))
    run = functools.partial(mlstm_recurrent_step, backend=backend, config=config)
    check_neighbours(jax.jit(lambda x: run(**x)), token)


def writes_half(x, y):
    y[pl.ds(0, 16)] = x[pl.ds(0, 16)]


HALF = jax.ShapeDtypeStruct((32,), jnp.float32)


def assert_half_is_nan(result):
    assert np.array_equal(np.isnan(result), np.arange(32) >= 16)


def test_what_is_not_written_is_nan_when_interpreted():
    call = Launch(Problem(1, 1, 32, 16, 16, 32, 1.0), Tiles(), None, Lowering.INTERPRET)
    operands = dict(x=(jnp.zeros(32), "0")), dict(y=(HALF, "0"))

    def kernel(x, y, *, call):
        writes_half(x, y)

    assert_half_is_nan(launch.kernel_call(kernel, *operands, grid=(1,), call=call)["y"])


# ---------------- Mosaic GPU


@needs_mosaic_gpu
@pytest.mark.slow
def test_interpreted_mosaic_gpu_kernels_read_nothing_of_their_neighbours():
    """What they do not write is NaN, which the comparisons with float64 find."""
    check_call(1, 256, 64, 128, dtype="bfloat16", backend="mosaic_gpu_interpret", config=fused())


@needs_mosaic_gpu
def test_what_is_not_written_is_nan_when_interpreted_for_mosaic_gpu():
    from mlstm_pallas.mosaic_gpu.launch import mosaic_call

    options = dict(name="writes_half", grid={"program": 1}, warpgroups=1, interpret=True)
    run = mosaic_call(writes_half, outputs={"y": HALF}, scratch={}, **options)
    assert_half_is_nan(run(x=jnp.zeros(32))["y"])
