"""The Mosaic GPU kernel of every stage, interpreted with race detection, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_gates
from mosaic_gpu_cases import RACE, RECURRENCES
from oracle import (
    assert_close,
    check_isolated,
    needs_mosaic_gpu,
    param,
    tolerance,
)
from stage_calls import (
    ChunkList,
    Entries,
    Lowering,
    Normaliser,
    Problem,
    check_small_row,
    launch_of,
    only,
    run_stage,
)
from test_stages import case, check_row

from mlstm_pallas.vectors.chunk_gates import stabilisers

pytestmark = [pytest.mark.usefixtures("no_race", "interpreted"), needs_mosaic_gpu]
ON = dict(lowering=Lowering.MOSAIC_GPU)


def call_of(name, problem, **tiles):
    return launch_of(name, problem, "bfloat16", tiles=tiles, **ON)


@pytest.fixture
def no_race(capsys):
    yield
    assert RACE not in capsys.readouterr().out


# Rows of check_row. A GPU has heads of 64 and 192, 192 and 384, 320 and 640 and of 448 too
# (test_gpu.py).
BTNH, STAGES_OF_2 = dict(layout="BTNH"), dict(num_stages=2)
CALLS = [
    # Chunks of several tiles, more items than CTAs.
    param("parallel_bw_dP", (256, 2, 128, 128), num_stages=3),
    # Two warpgroups, which have not as many keys, and two column blocks.
    param("parallel_fw_H", (256, 2, 128, 256), **BTNH, **STAGES_OF_2, siz_b_LQ=128, siz_b_DHHV=128),
    # Two steps through one slot, and two parts of h through the memory of one part of q.
    param("parallel_fw_H", (64, 2, 64, 128), siz_b_LQ=64, siz_b_DHHV=128, num_stages=1),
    param("parallel_fw_H", (128, 2, 320, 256), normalised=False, siz_b_LQ=64, num_stages=1),
    param("parallel_fw_P", (64, 2, 384, 64)),
    param(
        *("recurrent_fw_C", (64, 4, 64, 64)),
        **BTNH,
        **STAGES_OF_2,
        state_rows=64,
        state_columns=64,
        num_splits=4,
    ),
    # n in two column blocks, of which one stores it: once, or each warpgroup the half.
    param(*("recurrent_fw_C", (128, 2, 64, 256)), **STAGES_OF_2, state_rows=64, state_columns=128),
    param(
        *("recurrent_fw_C", (128, 2, 128, 256)), **STAGES_OF_2, state_rows=128, state_columns=128
    ),
    # Half of each tile of q and k is beyond the head; more items, or chunks, than CTAs.
    param("chunk_gradients", (128, 2, 32, 64), num_stages=4),
    # With 64 rows of C and dC the two warpgroups take turns to sum them, over several tiles.
    param("chunk_gradients", (128, 2, 64, 256), num_stages=4),
    param("chunk_gradients", (128, 3, 128, 256), **BTNH, num_stages=4),
    # Heads of 96: three parts of a swizzle, and tiles of 64, of 128 or of 128 rows that reach
    # beyond; or tiles of 96.
    param("parallel_fw_H", (64, 2, 96, 96), **BTNH),
    param("parallel_fw_P", (64, 2, 96, 96), **BTNH),
    param("parallel_bw_dP", (128, 1, 96, 96), **BTNH, num_stages=3),
    param("chunk_gradients", (128, 1, 96, 96), **BTNH, heads=(1, 1), num_stages=4),
    param("recurrent_fw_C", (64, 2, 96, 96), **BTNH, state_rows=32, state_columns=128),
    param("recurrent_fw_H", (64, 2, 96, 96), **BTNH),
    # Three warpgroups.
    param("recurrent_fw_H", (64, 2, 96, 192), **BTNH),
    param(
        *("recurrent_fw_C", (64, 2, 128, 192)),
        **BTNH,
        state_rows=64,
        state_columns=192,
        num_stages=3,
    ),
    # Items of three parts of 64 columns, so that the next item stores to the tile that was last.
    param("parallel_bw_dQKV", (128, 2, 192, 192), **BTNH, normalised=False),
    # Items reach beyond the only block of columns of all outputs, or of one.
    param("parallel_bw_dQKV", (128, 1, 64, 64), heads=(1, 1)),
    param("parallel_bw_dQKV", (128, 1, 160, 16), **BTNH),
    # Parts of 32 columns: nine of the keys, an odd number of tiles of 64, items of five.
    param("parallel_fw_H", (64, 1, 288, 96), **BTNH),
    param("parallel_bw_dP", (128, 2, 160, 96), **BTNH, normalised=False, num_stages=4),
    param("recurrent_fw_H", (64, 2, 160, 96), **BTNH, state_rows=160),
]
HEADS_OF_96 = "parallel_fw_H", "parallel_fw_P", "recurrent_fw_C", "recurrent_fw_H"


# Interpreted, each kernel runs in one quick test.
@pytest.mark.quick(*(f"{stage} 64-2-96-96" for stage in HEADS_OF_96))
@pytest.mark.parametrize(("stage", "sizes", "options"), CALLS)
def test_the_kernel_agrees_with_the_plain_form(stage, sizes, options):
    heads = 1, 3 if stage in ("parallel_bw_dQKV", "chunk_gradients") else 2
    check_row(stage, sizes, options, **ON, heads=heads, f_shift=6.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "heads", "tiles"),
    [
        ("parallel_bw_dQKV", (192, 64), dict(num_ctas=4)),
        ("chunk_gradients", (80, 112), {}),
    ],
)
def test_gradients_of_active_chunks(stage, heads, tiles):
    """All CTAs share the items of the active chunk, even if they are few; in the other chunk every
    column is cleared, and undefined operands reach nothing."""
    x, is_active = case("bfloat16", 128, 256, (1, 1), *heads), np.array([[True, False]])
    active = ChunkList(None, Entries(None, jnp.int32(128 * is_active)), None).with_active_first()
    inputs = dict(x.inputs)
    for name in ("matC_states", "matDeltaC_states"):
        inputs[name] = inputs[name].at[:, 1].set(jnp.nan)
    result = x.run(stage, inputs, tiles=tiles, active=active, **ON)
    expected = x.expected(stage)
    if stage == "chunk_gradients":
        result, expected = result.gradients, expected.gradients
    for name in ("matDeltaQ", "matDeltaK", "matDeltaV"):
        desired = only(getattr(expected, name).reshape(1, 2, 128, -1), is_active, 0, 1)
        actual = getattr(result, name).reshape(desired.shape)
        assert_close(actual, desired, tolerance("bfloat16", 128 + sum(heads)), name)


def with_floors_of_one():
    """A chunk of a head whose floor is larger than |z| in odd steps, h[33] = inf too.

    Returns a function that runs a stage of the case with an h, its inputs, and the two h.
    """
    chunk = case("bfloat16", 128, heads=(1, 1), DHQK=64, DHV=128)
    gates, h = chunk.inputs["gates"], chunk.inputs["matH"]
    z = jnp.where(jnp.arange(128) % 2 == 0, 2.0, 0.5)[None]
    x = chunk.inputs | dict(gates=gates._replace(vecM=jnp.zeros_like(gates.vecM)), vecZ=z)

    def run(name, h, **options):
        return chunk.run(name, x | dict(matH=h), tiles=dict(num_stages=2), **options, **ON)

    return run, x, (h, h.at[0, 33].set(jnp.inf))


@pytest.mark.slow
def test_an_inf_in_h_reaches_no_tile_where_the_floor_is_larger():
    run, _, hs = with_floors_of_one()
    stage = functools.partial(run, "parallel_bw_dP", normaliser=Normaliser())
    check_isolated(stage, *hs, lambda y: y.scores)


@pytest.mark.slow
def test_an_inf_in_h_reaches_no_other_delta_and_no_dn_where_the_floor_is_larger():
    """recurrent_bw_dC computes delta, and step_sums what dn is made of."""
    stage, x, hs = with_floors_of_one()
    g, sums = x["gates"].per_step(), call_of("step_sums", Problem(1, 1, 128, 64, 128, 128, 1.0))

    def run(h):
        delta = stage("recurrent_bw_dC", h).vecDelta
        gradients = Normaliser().gradients(delta, x["vecZ"], g.vecM)
        rows = dict(rows=x["matQ"], weights=g.vecW * gradients.vecDzDen)
        return delta, gradients[:3], jax.jit(lambda: run_stage("step_sums", sums, **rows))()

    def unaffected(result):
        return result[0].at[0, 33].set(0.0), *result[1:]

    (_, gradients, _), (delta, *_) = check_isolated(run, *hs, unaffected)
    assert not np.isfinite(delta[0, 33])
    assert np.any(gradients[2])


@pytest.mark.quick("sizes0")
@pytest.mark.parametrize(
    ("sizes", "reverse"),
    [
        ((2, 384, 128, 64, 1.0), False),  # CTAs of several heads, the last one with fewer steps
        ((1, 1536, 512, 64, 0.99), True),  # one chunk per CTA, each of which joins the others
        ((1, 1536, 256, 64, 1.0), False),  # runs over chunks that a CTA joins
        ((1, 2560, 128, 64, 1.0), True),  # over more chunks
        ((1, 512, 256, 64, 0.5), False),  # two chunks per CTA; m is constant
        ((1, 512, 128, 64, 0.99), True),  # four chunks per CTA
    ],
)
def test_step_gradients_by_definition(sizes, reverse):
    has_dm = sizes[-1] != 0.5
    test_gates.check_step_gradients(Lowering.MOSAIC_GPU, sizes, reverse, has_dm=has_dm)


SMALL = [
    # in two CTAs of four sums each
    param("step_sums", (2, 2, 512, 64, 64, 64), layout="BTNH", dtype="float16"),
    # in two CTAs
    param("step_sums", (1, 1, 1024, 64, 64, 512), layout="BTNH"),
    param("step_sums", (1, 2, 192, 320, 320, 64)),
    param("step_sums", (2, 2, 128, 96, 96, 128), layout="BTNH"),
    # One group of chunks, four splits of two with five chunks more, and less than a group.
    param("vector_states", (1, 2, 1024, 128, 128, 64), tiles=dict(num_splits=1), backward=True),
    param("vector_states", (1, 2, 9472, 128, 128, 64), tiles=dict(num_splits=4), backward=False),
    param("vector_states", (1, 2, 9472, 128, 128, 64), tiles=dict(num_splits=4), backward=True),
    param("vector_states", (1, 2, 320, 96, 96, 64), tiles=dict(num_splits=1), backward=True),
]


@pytest.mark.quick("step_sums 2-2-128-96", "vector_states 1-2-320-96")
@pytest.mark.parametrize(("stage", "sizes", "options"), SMALL)
def test_small_stages(stage, sizes, options):
    check_small_row(stage, sizes, options, **ON)


# Lines of test_gates.check_line.
GATES = [
    "plain-64-192 exp packed lengths",
    "resets-64-192 sigmoid",
    # two CTAs, of which the second has fewer chunks
    "resets-64-448 exp packed reverse",
    # two CTAs, which join the chunks of their head
    "plain-128-1024 exp packed reverse",
    # one chunk per CTA
    "plain-512-1024 exp",
    # a scan over the chunks
    "resets-64-1536 exp reverse",
    "plain-512-1024 exp reverse",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [*(f"{case}-64-192 exp packed" for case in ("resets", "gates_at_1e4")), *GATES],
)
def test_gates_are_those_of_the_recurrence(line):
    test_gates.check_line(line, Lowering.MOSAIC_GPU)


@pytest.mark.slow
def test_the_stabiliser_scan_of_many_chunks():
    """In several blocks; with chunks that hold a reset (g is -inf), or that store nothing."""
    from mlstm_pallas.mosaic_gpu.vectors import scan_chunks

    heads, NC, draw = 2, 1100, np.random.default_rng(0)
    g, a = np.float32(draw.normal(size=(2, heads, NC)))
    a[:, ::3], g[:, ::89] = -np.inf, -np.inf
    m = initial = np.float32(draw.normal(size=heads))
    padded = [np.pad(y, [(0, 0), (0, -NC % 1024)], constant_values=np.nan) for y in (g, a)]
    call = call_of("chunk_gates", Problem(1, heads, 64 * NC, 64, 64, 64, 1.0))
    run = functools.partial(scan_chunks, stabilisers, name="scan", call=call, after=True)
    result = np.asarray(jax.jit(run)(padded, initial))
    # Sums of up to 89 numbers in float32, in a tree over all.
    bound = 2 * NC.bit_length() * 2.0**-24 * 89 * np.abs(g[np.isfinite(g)]).max()
    for c in range(NC):
        m = np.maximum(np.float64(g[:, c]) + m, a[:, c])
        np.testing.assert_allclose(result[:, c], m, rtol=0, atol=bound)


@pytest.mark.quick("one_block_of_rows")
@pytest.mark.parametrize("name", RECURRENCES)
def test_interpreted_recurrences_against_float64(name):
    RECURRENCES[name].check(Lowering.MOSAIC_GPU)


@pytest.mark.parametrize("S", [192, 200, 201, 255])
def test_a_tile_beyond_the_whole_groups_of_an_array_is_copied_group_by_group(S):
    from mlstm_pallas.mosaic_gpu.common.inline_mlir import groups_alone

    for first in 0, 64, 128, 192, 3:  # the last begins inside a group
        at_once = first % 8 == 0 and first + 64 <= S // 8 * 8
        assert groups_alone(first, S, 64) == (0 if at_once else 8), first
