"""Every kernel writes all that is read and reads nothing of its neighbours, which are NaN here, and
repeated runs have equal bits."""

import dataclasses
import functools
from unittest import mock

import compile_report
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from mosaic_gpu_cases import fused
from oracle import (
    HELPERS,
    assert_same_bits,
    check_isolated,
    cotangents_for,
    gradients_of_call,
    needs_mosaic_gpu,
    param,
    random_inputs,
    slow_param,
    token_at,
)
from stage_calls import STAGES as ALL_STAGES
from stage_calls import Launch, Lowering, Problem, tiles_class

from mlstm_pallas import KernelConfig, mlstm_recurrent_step
from mlstm_pallas.triton import launch

STAGES = {name: x for name, x in ALL_STAGES.items() if tiles_class(name, "triton")}
HEADS, DHQK, DHV = 3, 32, 16
SIZES = ("siz_b_LQ", "siz_b_LKV", "siz_b_L", "siz_b_DHQK", "siz_b_DHHV", "block_k", "state_rows")
WIDE = "siz_b_DHQK", "siz_b_DHHV", "block_k", "state_rows"
TILES = dict.fromkeys(SIZES, 16) | dict(keep_q=False, num_splits=1)


def check_middle_head(run, x):
    """The second of three heads, (1, 3, ...), has the same bits beside finite ones and beside NaN,
    and again; what an interpreted kernel does not write is NaN."""
    poisoned = jax.tree.map(lambda y: y.at[:, ::2].set(jnp.nan), x)
    first, _ = check_isolated(run, x, poisoned, functools.partial(jax.tree.map, lambda y: y[:, 1]))
    assert_same_bits(run(x), first)
    assert all(np.isfinite(y).all() for y in jax.tree.leaves(first))


def check_neighbours(backend, shape, layout="BNTH", config=None, dtype="bfloat16", **options):
    """check_middle_head of outputs and gradients; returns the function and its arguments.

    In the layout "BTNH" the columns of the next head follow those of a head.
    """
    inputs = random_inputs(11, *shape, dtype=dtype)
    x = inputs, cotangents_for(inputs, dtype)
    config = config or KernelConfig(fused=True)
    run = gradients_of_call(config=config, backend=backend, layout=layout, **options)
    check_middle_head(lambda x: run(*x), x)
    return run, x


def small(name, **changes):
    """The config of a kernel with small tiles."""
    fields = dataclasses.fields(tiles_class(name, "triton"))
    tiles = {x.name: TILES[x.name] for x in fields if x.name in TILES}
    return {f"triton_{name}": tiles | changes}


SPLIT = small("recurrent_fw_C", num_splits=2) | small("recurrent_bw_dC", num_splits=2)


def partial(block):
    """Blocks that reach beyond the columns of (B, S, NH, D), which the next head's follow."""
    return {
        name: tiles | dict.fromkeys({*WIDE} & {*tiles}, block)
        for stage in STAGES
        for name, tiles in small(stage).items()
    }


# S and L, options of the config, whether states are stored, and heads, in the
# layout "BTNH".
CASES = [
    param(64, 32, id="materialised-partial", changes=partial(32), heads=(48, 80)),
    slow_param(61, 32, id="fused-80-112", changes=dict(fused=True) | partial(32), heads=(80, 112)),
    slow_param(61, 32, id="materialised-96-96", changes=partial(64), stored=True, heads=(96, 96)),
    slow_param(
        61,
        32,
        id="fused-96-192-stored",
        changes=dict(fused=True) | partial(128),
        stored=True,
        heads=(96, 192),
    ),
    slow_param(256, 256, id="materialised-long_chunks"),
    slow_param(64, 32, id="materialised-splits", changes=SPLIT),
    param(
        64,
        32,
        id="fused-stored",
        changes=dict(fused=True) | small("recurrent_fw_H", state_rows=DHQK),
        stored=True,
    ),
]
# What is beyond an array there is another one's memory, however a block reaches it.
MORE_ON_A_GPU = [
    param(64, 32, id="materialised"),
    param(64, 32, id="fused-partial", changes=dict(fused=True) | partial(32), heads=(48, 80)),
    param(61, 32, id="materialised-80-112", changes=partial(64), heads=(80, 112)),
    param(61, 32, id="fused-96-96", changes=dict(fused=True) | partial(64), heads=(96, 96)),
    param(64, 32, id="fused", changes=dict(fused=True)),
]


def on(backend, cases, marks=()):
    """The parameters of cases on a backend."""
    return [
        pytest.param(backend, *x.values, id=f"{backend}-{x.id}", marks=[*x.marks, *marks])
        for x in cases
    ]


ON_A_CPU = on("interpret", [CASES[0], CASES[-1]])  # the table has NaN beside other tiles
ON_A_GPU = on("triton", CASES + MORE_ON_A_GPU, [pytest.mark.gpu])
BACKENDS = ("interpret", pytest.param("triton", marks=pytest.mark.gpu))


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "S", "L", "options"), ON_A_CPU + ON_A_GPU)
def test_kernels_write_everything_and_read_nothing_of_their_neighbours(backend, S, L, options):
    heads, changes = options.get("heads"), options.get("changes", {})
    tiles = {name: x for stage in STAGES for name, x in small(stage).items()}
    config = KernelConfig(**dict(chunk_size=L, fused=False) | tiles | changes)
    shape, layout = (1, HEADS, S, *(heads or (DHQK, DHV))), "BTNH" if heads else "BNTH"
    options = dict(dtype="float32", recompute_states_in_bw="stored" not in options)
    run, x = check_neighbours(backend, shape, layout, config, **options)
    calls = compile_report.equations(jax.make_jaxpr(run)(*x).jaxpr, "pallas_call")
    kernels = {call.params["name"] for call in calls}
    expected = (
        name
        for name, stage in STAGES.items()
        if stage.backward or name == "chunk_gates" or stage.fused == config.fused
    )
    assert kernels - HELPERS == {*expected}
    assert ("split_products" in kernels) == (changes is SPLIT)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "fused"),
    [
        ((20, 37), True),
        ((80, 112), False),
        ((96, 96), True),
        ((96, 192), False),
        ((320, 640), True),
        ((320, 640), False),
    ],
    ids=str,
)
def test_planned_tiles_read_nothing_of_their_neighbours(heads, fused):
    """And write nothing there; test_mosaic_gpu_on_a_gpu.py has those of Mosaic GPU."""
    check_neighbours("triton", (1, 3, 196, *heads), "BTNH", KernelConfig(fused=fused))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_writes_everything_and_reads_nothing_of_its_neighbours(backend):
    """The tiles do not divide rows and columns."""
    options = dict(backend=backend, config=KernelConfig(**small("recurrent_step")))
    token = token_at(random_inputs(0, 1, HEADS, 1, 40, 24), 0)
    check_middle_head(lambda x: mlstm_recurrent_step(*x, **options), [*token.values()])


def writes_half(x, y, call=None):
    y[pl.ds(0, 16)] = x[pl.ds(0, 16)]


HALF = jax.ShapeDtypeStruct((32,), jnp.float32)


def assert_half_is_nan(result):
    assert np.array_equal(np.isnan(result), np.arange(32) >= 16)


def call_of(lowering, S):
    """With tiles of any kernel."""
    tiles = tiles_class("chunk_gates", "triton")()
    return Launch(Problem(1, 1, S, 16, 16, S, 1.0), tiles, None, lowering)


def test_what_is_not_written_is_nan_when_interpreted():
    operands, call = (
        (dict(x=(jnp.zeros(32), "0")), dict(y=(HALF, "0"))),
        call_of(Lowering.INTERPRET, 32),
    )
    assert_half_is_nan(launch.kernel_call(writes_half, *operands, grid=(1,), call=call)["y"])


def copies_some(x, y, call=None):
    """Rows 24 to 27 of 0 to 27, and what is read of rows 24 to 39; the arrays have 24 columns."""
    rows, end = pl.ds(24, 16), np.int32(28)
    read = launch.up_to(end, x)[rows, :]
    launch.up_to(end, y)[rows, :] = read
    y[pl.ds(0, 16), :] = read


@pytest.mark.parametrize("lowering", [Lowering.INTERPRET, Lowering.TRITON])
def test_rows_and_columns_beyond_an_end_are_neither_read_nor_written(lowering):
    """Compiled kernels have masked stores, which are interpreted here."""
    x, call = jnp.ones((1, 48, 24)), call_of(lowering, 48)
    operands = dict(x=(x, "bsK")), dict(y=(jax.typeof(x), "bsK"))
    pallas_call = pl.pallas_call

    def interpreted(*args, **options):
        return pallas_call(*args, **options | dict(interpret=True))

    with mock.patch.object(pl, "pallas_call", interpreted):
        options = dict(sizes=dict(K=32), grid=(1,), call=call)
        y = launch.kernel_call(copies_some, *operands, **options)["y"][0]
    expected = np.full((48, 24), np.nan)
    expected[:16] = np.arange(16)[:, None] < 4
    expected[24:28] = 1
    np.testing.assert_array_equal(y, expected)


# ---------------- Mosaic GPU


@needs_mosaic_gpu
@pytest.mark.usefixtures("interpreted")
@pytest.mark.slow
def test_interpreted_mosaic_gpu_kernels_read_nothing_of_their_neighbours():
    """What they do not write is NaN, which the comparisons with float64 find. A GPU has other
    heads, and materialised states."""
    check_neighbours("mosaic_gpu", (1, 3, 131, 96, 192), "BTNH", fused(num_stages=3))


@needs_mosaic_gpu
@pytest.mark.usefixtures("interpreted")
def test_what_is_not_written_is_nan_when_interpreted_for_mosaic_gpu():
    from mlstm_pallas.mosaic_gpu.common.launch import mosaic_call

    options = dict(name="writes_half", grid={"program": 1}, warpgroups=1)
    run = mosaic_call(writes_half, outputs={"y": HALF}, scratch={}, **options)
    assert_half_is_nan(run(x=jnp.zeros(32))["y"])
