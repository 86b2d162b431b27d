"""Every kernel writes all of its outputs and reads nothing of its neighbours, which are NaN here,
and repeated runs have equal bits."""

import dataclasses
import importlib
import pkgutil
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from mosaic_gpu_cases import check_neighbours, quick_and_slow
from oracle import HELPERS, needs_mosaic_gpu, random_inputs

from mlstm_pallas import KernelConfig, triton
from mlstm_pallas.formulas.normaliser import DEFAULT_NORMALISER
from mlstm_pallas.fwbw import residuals_of
from mlstm_pallas.planning import dispatch
from mlstm_pallas.planning.call_spec import CallSpec
from mlstm_pallas.problem.arrays import Cotangents, Inputs
from mlstm_pallas.problem.dimensions import MAX_TILE, Problem
from mlstm_pallas.problem.gpu import UNKNOWN
from mlstm_pallas.schedules.backward import backward
from mlstm_pallas.schedules.forward import forward
from mlstm_pallas.stages import STAGES
from mlstm_pallas.stages.stage import Launch, Lowering
from mlstm_pallas.triton import launch
from mlstm_pallas.triton.add_decayed import Tiles

FLOAT32 = jnp.dtype("float32")
HEADS, DHQK, DHHV = 3, 32, 16
MIDDLE = 1  # of the heads, which lie one after the other in every array
TILE = 16
SIZES = ("siz_b_LQ", "siz_b_LKV", "siz_b_DHQK", "siz_b_DHHV", "block_k", "state_rows")
TILES = dict.fromkeys(SIZES, TILE) | dict(keep_q=False, num_splits=1)


def small(name, **changes):
    """The config of a kernel with small tiles."""
    fields = dataclasses.fields(dispatch.tiles_class(name, "triton"))
    tiles = {x.name: TILES[x.name] for x in fields if x.name in TILES}
    return {f"triton_{name}": tiles | changes}


SPLIT = small("recurrent_fw_C", num_splits=2) | small("recurrent_bw_dC", num_splits=2)
# Options of the config and of the spec, S and L.
CASES = {
    "materialised": ({}, {}, 64, 32),
    "materialised-long_chunks": ({}, {}, 256, 256),
    "materialised-splits": (SPLIT, {}, 64, 32),
    "fused": (dict(fused=True), dict(recompute_states_in_bw=True), 64, 32),
    "fused-stored": (
        dict(fused=True) | small("recurrent_fw_H", state_rows=DHQK),
        dict(recompute_states_in_bw=False),
        64,
        32,
    ),
}
LOWERINGS = (Lowering.INTERPRET, pytest.param(Lowering.TRITON, marks=pytest.mark.gpu))
QUICK = ("materialised", "fused-stored")


@pytest.fixture
def outputs(monkeypatch):
    """{kernel: its outputs} of the last trace."""
    result = {}

    def recording(kernel, *operands, name="", **options):
        outputs = launch.kernel_call(kernel, *operands, name=name, **options)
        name = name or kernel.__name__.removeprefix("_").removesuffix("_kernel")
        result[name] = jax.tree.leaves([*outputs.values()])
        return outputs

    for module in pkgutil.iter_modules(triton.__path__):
        module = importlib.import_module(f"{triton.__name__}.{module.name}")
        if hasattr(module, "kernel_call") and module is not launch:
            monkeypatch.setattr(module, "kernel_call", recording)
    return result


def passes(lowering, case):
    """Forward and backward pass of (inputs, gradient of h), and the spec."""
    config, options, S, L = CASES[case]
    tiles = {name: x for stage in STAGES for name, x in small(stage).items()}
    config = KernelConfig(**dict(chunk_size=L, fused=False) | tiles | config)
    problem = Problem(1, HEADS, S, DHQK, DHHV, L, DHQK**-0.5)
    statics = problem, config, FLOAT32, DEFAULT_NORMALISER, UNKNOWN
    spec = CallSpec(*statics, backend=lowering, **options)

    def run(inputs, dh):
        x = Inputs(**inputs)
        result = forward(spec, lowering, x)
        cotangents = Cotangents(dh, jax.tree.map(jnp.ones_like, result.last))
        backward(spec, lowering, residuals_of(spec, x, result), cotangents)

    return run, spec


def written(name, outputs, L):
    """The outputs, with 0 where a kernel documents that it writes nothing: parallel_bw_dP above the
    diagonal of a chunk."""
    if name != "parallel_bw_dP":
        return outputs
    P, dP, qbar, per_query, per_key, *others = outputs
    block, tiles = np.arange(L) // MAX_TILE, L // TILE
    below, before = block[:, None] >= block, np.tri(tiles, dtype=bool)
    P, dP = (jnp.where(below, x.reshape(HEADS, -1, L, L), 0.0) for x in (P, dP))
    per_query, per_key = (
        jnp.where(where[:, None, :, None], x.reshape(HEADS, tiles, -1, tiles, TILE), 0.0)
        for where, x in ((before.T, per_query), (before, per_key))
    )
    return P, dP, qbar, per_query, per_key, *others


def check(run, outputs, arguments, L=None):
    """Runs on the arguments, then with NaN in all heads but the middle one, then on the arguments
    again. Returns the kernels."""

    @jax.jit
    def recorded(*arguments):
        outputs.clear()
        run(*arguments)
        return dict(outputs)

    others = np.arange(HEADS) != MIDDLE
    poisoned = jax.tree.map(lambda x: x.at[others].set(jnp.nan), arguments)
    runs = [recorded(*x) for x in (arguments, poisoned, arguments)]
    for name in runs[0]:
        of_runs = (written(name, x[name], L) for x in runs)
        for index, result in enumerate(zip(*of_runs, strict=True)):
            assert result[0].shape[0] % HEADS == 0  # splits are heads
            x, y, z = (np.asarray(x).reshape(HEADS, -1) for x in result)
            what = f"output {index} of {name}"
            assert np.isfinite(x).all(), f"{what} has elements that are not written"
            assert np.array_equal(x[MIDDLE], y[MIDDLE]), f"{what} depends on other heads"
            assert np.array_equal(x, z), f"{what} differs from run to run"
    return {*runs[0]}


@pytest.mark.parametrize("case", quick_and_slow(CASES, QUICK))
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_kernels_write_everything_and_read_nothing_of_their_neighbours(lowering, case, outputs):
    run, spec = passes(lowering, case)
    x = random_inputs(0, 1, HEADS, spec.problem.S, DHQK, DHHV)
    inputs = {name: y[0] for name, y in x.items()}
    kernels = check(run, outputs, (inputs, jnp.cos(inputs["v"])), spec.problem.L)
    assert spec.plan.fused == case.startswith("fused")
    assert kernels - HELPERS == {*spec.plan.forward, *spec.plan.backward}
    assert ("split_products" in kernels) == case.endswith("splits")


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_step_writes_everything_and_reads_nothing_of_its_neighbours(lowering, outputs):
    """The tiles do not divide rows and columns."""
    inputs = random_inputs(0, 1, HEADS, 1, 40, 24)
    token = [x[0] if name.endswith("initial") else x[0, :, 0] for name, x in inputs.items()]
    problem = Problem(1, HEADS, 1, 40, 24, 1, 40**-0.5)
    config = KernelConfig(**small("recurrent_step"))
    spec = CallSpec(problem, config, FLOAT32, None, UNKNOWN, backend=lowering)
    call = spec.launch("recurrent_step", lowering)

    def run(*token):
        operands = zip(STAGES["recurrent_step"].inputs, token, strict=True)
        return dispatch.run("recurrent_step", call=call, **dict(operands))

    assert check(run, outputs, tuple(token)) == {"recurrent_step"}


def writes_half(x, y, call=None):
    y[pl.ds(0, 16)] = x[pl.ds(0, 16)]


HALF = jax.ShapeDtypeStruct((32,), jnp.float32)


def assert_half_is_nan(result):
    assert np.array_equal(np.isnan(result), np.arange(32) >= 16)


def test_what_is_not_written_is_nan_when_interpreted():
    call = Launch(Problem(1, 1, 32, 16, 16, 32, 1.0), Tiles(), None, Lowering.INTERPRET)
    operands = dict(x=(jnp.zeros(32), "0")), dict(y=(HALF, "0"))
    assert_half_is_nan(launch.kernel_call(writes_half, *operands, grid=(1,), call=call)["y"])


def copies_some(x, y, call=None):
    """Rows 24 to 27 of 0 to 27, and what is read of rows 24 to 39."""
    rows, end = pl.ds(24, 16), np.int32(28)
    read = launch.up_to(end, x, call)[rows, :]
    launch.up_to(end, y, call)[rows, :] = read
    y[pl.ds(0, 16), :] = read


@pytest.mark.parametrize("lowering", [Lowering.INTERPRET, Lowering.TRITON])
def test_rows_beyond_an_end_are_neither_read_nor_written(lowering):
    """Compiled kernels have masked stores, which are interpreted here."""
    call = Launch(Problem(1, 1, 48, 16, 16, 48, 1.0), Tiles(), None, lowering)
    shape = jax.ShapeDtypeStruct((1, 48, 16), jnp.float32)
    operands = dict(x=(jnp.ones(shape.shape), "bs0")), dict(y=(shape, "bs0"))
    pallas_call = pl.pallas_call

    def interpreted(*args, **options):
        return pallas_call(*args, **options | dict(interpret=True))

    with mock.patch.object(pl, "pallas_call", interpreted):
        y = launch.kernel_call(copies_some, *operands, grid=(1,), axes="b", call=call)["y"][0, :, 0]
    expected = np.full(48, np.nan)
    expected[:16] = np.arange(16) < 4
    expected[24:28] = 1
    np.testing.assert_array_equal(y, expected)


# ---------------- Mosaic GPU


@needs_mosaic_gpu
@pytest.mark.slow
def test_interpreted_mosaic_gpu_kernels_read_nothing_of_their_neighbours():
    """What they do not write is NaN, which the comparisons with float64 find."""
    check_neighbours("mosaic_gpu_interpret", (1, 3, 256, 64, 128))


@needs_mosaic_gpu
def test_what_is_not_written_is_nan_when_interpreted_for_mosaic_gpu():
    from mlstm_pallas.mosaic_gpu.launch import mosaic_call

    options = dict(name="writes_half", grid={"program": 1}, warpgroups=1, interpret=True)
    run = mosaic_call(writes_half, outputs={"y": HALF}, scratch={}, **options)
    assert_half_is_nan(run(x=jnp.zeros(32))["y"])
