"""The Mosaic GPU kernel of every stage, interpreted with race detection, against float64."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_gates
from jax.experimental import pallas as pl
from mosaic_gpu_cases import RACE, RECURRENCES, quick_and_slow
from oracle import assert_close, assert_same_bits, in_float64, needs_mosaic_gpu, slow, tolerance
from test_stages import case, launch_of

from mlstm_pallas.formulas import gate_gradients, gates
from mlstm_pallas.formulas.gate_gradients import TileSums
from mlstm_pallas.formulas.gates import DECAY_NONZERO, M_FROM_PREVIOUS, M_GRAD_FLOWS
from mlstm_pallas.formulas.normaliser import Normaliser
from mlstm_pallas.planning import call_spec as planning
from mlstm_pallas.planning import dispatch
from mlstm_pallas.problem.dimensions import InputGate, Problem, make_problem
from mlstm_pallas.stages import STAGES
from mlstm_pallas.stages.stage import Lowering, ScaledRows

pytestmark = [pytest.mark.usefixtures("no_race"), needs_mosaic_gpu]
ON = dict(lowering=Lowering.MOSAIC_GPU_INTERPRET)


def call_of(name, problem, **tiles):
    return launch_of(name, problem, "bfloat16", tiles=tiles, **ON)


@pytest.fixture
def no_race(capsys):
    yield
    assert RACE not in capsys.readouterr().out


def fw_H(LQ, DHHV, num_stages):
    return "parallel_fw_H", dict(siz_b_LQ=LQ, siz_b_DHHV=DHHV, num_stages=num_stages)


def fw_C(rows, columns, num_splits=1):
    sizes = dict(state_rows=rows, state_columns=columns, num_splits=num_splits)
    return "recurrent_fw_C", dict(num_stages=2, **sizes)


DP, DQKV = ("parallel_bw_dP", dict(num_stages=3)), ("parallel_bw_dQKV", dict(num_stages=4))


@pytest.mark.parametrize(
    ("stage", "L", "chunks", "DHQK", "DHHV", "call"),
    [
        # Chunks of several tiles and of one; more items than CTAs.
        (DP, 256, 2, 128, 128, "BNTH"),
        slow(DP, 128, 4, 128, 128, "BTNH"),
        slow(DP, 512, 1, 128, 128, "BTNH_unnormalised"),
        # Two warpgroups, which have not as many keys, and two column blocks.
        (fw_H(128, 128, 2), 256, 2, 128, 256, "BTNH"),
        # Two steps through one slot, and two parts of h through the memory of one part of q.
        (fw_H(64, 128, 1), 64, 2, 64, 128, "BNTH"),
        (("parallel_fw_P", {}), 64, 2, 384, 64, "BNTH"),  # q and k in two copies
        slow(fw_H(64, 256, 1), 128, 2, 320, 256, "BNTH_unnormalised"),
        (fw_C(64, 64, num_splits=4), 64, 4, 64, 64, "BTNH"),
        # n in two column blocks, of which one stores it: once, or each warpgroup the half.
        (fw_C(64, 128), 128, 2, 64, 256, "BNTH"),
        slow(fw_C(128, 128), 128, 2, 128, 256, "BNTH"),
        # A CTA makes all gradients of a chunk, in the first four, and gets no tiles. More items,
        # or chunks, than CTAs, which have not all as many.
        (DQKV, 128, 1, 128, 128, "BTNH"),
        (DQKV, 128, 2, 64, 256, "BNTH"),
        slow(DQKV, 128, 3, 128, 256, "BTNH"),
        slow(DQKV, 128, 3, 64, 512, "BNTH_unnormalised"),
        slow(DQKV, 256, 3, 256, 512, "BNTH"),
        slow(DQKV, 128, 3, 512, 256, "BNTH_unnormalised"),
    ],
    ids=str,
)
def test_the_kernel_agrees_with_the_plain_form(stage, L, chunks, DHQK, DHHV, call):
    layout, *unnormalised = call.split("_")
    heads = (1, 3) if stage is DQKV else (1, 2)
    options = dict(heads=heads, f_shift=6.0, normalised=not unnormalised, layout=layout)
    x = case("bfloat16", L, chunks * L, DHQK=DHQK, DHHV=DHHV, **options)
    x.check(*stage, tiles_inside=stage is DQKV and DHQK in (64, 128), **ON)


def with_floors_of_one():
    """The inputs of a chunk of a head whose floor is larger than |z| in odd steps, h[33] = inf too.

    Returns its problem, the inputs with an m of 0, and the two h.
    """
    chunk = case("bfloat16", 128, heads=(1, 1), DHQK=64, DHHV=128)
    gates, h = chunk.inputs["gates"], chunk.inputs["matH"]
    gates = gates._replace(vecM=jnp.zeros_like(gates.vecM))
    z = jnp.where(jnp.arange(128) % 2 == 0, 2.0, 0.5)[None]
    hs = h, h.at[0, 33].set(jnp.inf)
    return chunk.problem, chunk.inputs | dict(gates=gates, vecZ=z), hs


def test_an_inf_in_h_reaches_no_tile_where_the_floor_is_larger():
    problem, x, hs = with_floors_of_one()
    call = call_of("parallel_bw_dP", problem, num_stages=2)
    operands = {name: x[name] for name in STAGES["parallel_bw_dP"].inputs}
    stage = functools.partial(dispatch.run, "parallel_bw_dP", normaliser=Normaliser(), call=call)
    expected, result = map(jax.jit(lambda h: stage(**operands | dict(matH=h))), hs)
    for name in ("matP", "matDeltaP", "pairs"):
        assert_same_bits(getattr(result, name), getattr(expected, name))


def test_an_inf_in_h_reaches_no_other_delta_and_no_dn_where_the_floor_is_larger():
    """recurrent_bw_dC computes delta, and step_sums what dn is made of."""
    problem, x, hs = with_floors_of_one()
    calls = call_of("recurrent_bw_dC", problem, num_stages=2), call_of("step_sums", problem)

    @jax.jit
    def run(h):
        g, q = x["gates"].per_step(), x["matQ"]
        operands = dict.fromkeys(STAGES["recurrent_bw_dC"].inputs)
        operands |= dict(queries=ScaledRows(q, g.vecW), matDeltaH=x["matDeltaH"], matH=h)
        operands["scaGamma"] = x["gates"].scaGamma
        delta = dispatch.run("recurrent_bw_dC", **operands, call=calls[0]).vecDelta
        gradients = Normaliser().gradients(delta, x["vecZ"], g.vecM)
        weights = g.vecW * gradients.vecDzDen
        return delta, gradients, dispatch.run("step_sums", rows=q, weights=weights, call=calls[1])

    (expected_delta, *expected), (delta, *result) = map(run, hs)
    assert not np.isfinite(delta[0, 33])
    assert_same_bits(delta.at[0, 33].set(0.0), expected_delta.at[0, 33].set(0.0))
    assert np.any(expected[0].vecDzDen)
    assert_same_bits(result[0][:3], expected[0][:3])
    assert_same_bits(result[1], expected[1])


@pytest.mark.parametrize(
    ("BNH", "S", "L", "share", "has_dm"),
    [
        (2, 384, 128, 1.0, True),  # blocks of 128 steps, runs over several of them
        (1, 1536, 512, 0.99, True),  # one chunk per block, each of which joins the later ones
        (2, 640, 128, 1.0, True),  # XLA joins more than four blocks
        slow(1, 1024, 1024, 0.5, False),  # two blocks per chunk
    ],
)
def test_step_gradients_against_float64(BNH, S, L, share, has_dm):
    """What the stages leave unwritten is NaN.

    share: of the steps whose stabiliser is that of the step before.
    """
    draw, n, NC, T = np.random.default_rng(0), L // 64, S // L, 64
    written = np.tri(n, dtype=bool)
    per_query, per_key = (
        np.where(where[:, None, :, None], draw.normal(size=(BNH, n, NC, n, T)), np.nan)
        for where in (written.T, written)
    )
    names = ("vecF", "q_dot_dq_inter", "k_dot_dk_inter", "dm")
    x = {name: draw.normal(size=(BNH, S)) for name in names}
    x["dm"] = x["dm"] if has_dm else None
    x["pairs"] = TileSums(per_query, per_key, draw.normal(size=(BNH, NC, n, T)))
    x["through"] = draw.normal(size=(BNH, NC))
    x = jax.tree.map(np.float32, x)
    carried, goes_on, passes = (draw.random((BNH, S)) < p for p in (share, 0.999, 0.95))
    carried[0, 2 * L : 2 * L + 1] = False  # behind a whole block, if there is one
    flags = M_FROM_PREVIOUS * carried + M_GRAD_FLOWS * (goes_on & carried) + DECAY_NONZERO * passes
    flags = np.int32(flags)
    call = call_of("step_gradients", Problem(1, BNH, S, 64, 64, L, 1.0))
    kernel, plain = (
        jax.jit(functools.partial(dispatch.run, "step_gradients", call=each))
        for each in (call, planning.plain(call.problem))
    )
    result = kernel(flags=flags, **x)
    expected = in_float64(lambda x: plain(flags=flags, **x), x)
    for actual, desired in zip(result, expected, strict=True):
        assert_close(actual, desired, tolerance("float32", S))


@pytest.mark.parametrize(
    ("shape", "L", "layout", "dtype"),
    [
        ((2, 2, 512, 64), 64, "BTNH", "float16"),  # in two CTAs of four sums each
        ((1, 1, 1024, 64), 1024, "BTNH", "bfloat16"),  # in two CTAs
        ((1, 2, 192, 320), 64, "BNTH", "bfloat16"),
    ],
)
def test_step_sums_against_float64(shape, L, layout, dtype):
    p = make_problem(shape, shape[-1], L, pad_heads=False)
    test_gates.check_step_sums(shape, layout, dtype, call_of("step_sums", p))


def test_a_tile_beyond_the_whole_groups_of_an_array_is_copied_group_by_group():
    from mlstm_pallas.mosaic_gpu.inline_mlir import groups_alone

    for S in (192, 200, 201, 255):
        for first in range(0, S, 64):
            whole = first + 64 <= S // 8 * 8
            assert groups_alone(first, S, 64) == (0 if whole else 8), (S, first)
        assert groups_alone(3, S, 64) == 8  # it begins inside a group


@pytest.mark.parametrize(("B", "NH", "num_splits"), [(2, 3, 1), (2, 1, 2)])
def test_tiles_that_are_copied_by_groups_are_where_they_should_be(B, NH, num_splits):
    """The array, index by index, of a tile that is selected in two steps."""
    from mlstm_pallas.mosaic_gpu.copies import head_of

    S, D, rows, columns = 102, 64, 16, 32
    p = Problem(B, NH * num_splits, S // num_splits, D, D, S // num_splits, 1.0)
    x = np.arange(B * NH * S * D).reshape(B * NH, num_splits, p.S, D)
    for array in (x.reshape(-1, S, D), np.swapaxes(x.reshape(B, NH, S, D), 1, 2)):
        for n in range(p.BNH):
            steps = head_of(array, n, p)
            assert steps.shape == (p.S, D)
            steps = steps.at[pl.ds(8, 2 * rows)].at[pl.ds(rows, rows), pl.ds(columns, columns)]
            at = *steps.before, slice(steps.start, steps.start + rows), *steps.behind
            tile = array[*at, steps.column : steps.column + columns]
            head = x.reshape(-1, p.S, D)[n]
            assert np.array_equal(tile, head[8 + rows : 8 + 2 * rows, columns : 2 * columns])
            assert (steps.S, steps.shape) == (S, (rows, columns))


@pytest.mark.parametrize("backward", [False, True])
def test_scans_over_the_steps_of_chunks(backward):
    """Of 2 to 512 rows of 4 steps: the number of marks so far, and the last
    mark, which does not commute."""
    from mlstm_pallas.mosaic_gpu import chunk_scans
    from mlstm_pallas.mosaic_gpu.launch import float32, mosaic_call

    rows, sizes = 512, [2**j for j in range(1, 10)]

    def join(left, x):
        return left[0] + x[0], jnp.where(x[0] > 0, x[1], left[1])

    def kernel(x, y, buffer):
        tiles = [chunk_scans.load_rows(x.at[j]) for j in range(2)]
        for j, size in enumerate(sizes):
            scan = functools.partial(chunk_scans.running, backward=backward)
            for k, result in enumerate(scan(join, tiles, (0.0, 0.0), size, buffer)):
                chunk_scans.store_rows(y.at[j, k], result)

    scratch = dict(buffer=chunk_scans.scan_buffer(2, rows, rows))
    outputs = dict(y=float32(len(sizes), 2, rows, chunk_scans.STEPS))
    call = mosaic_call(
        kernel, name="scans", grid={"cta": 1}, outputs=outputs, scratch=scratch, interpret=True
    )
    marks = np.random.default_rng(0).random(rows * chunk_scans.STEPS) < 0.3
    x = np.float32([marks, marks * np.arange(marks.size)])
    result = jax.jit(lambda x: call(x=x)["y"])(x.reshape(2, rows, -1))
    order = np.s_[:, ::-1] if backward else np.s_[:]
    for size, (count, last) in zip(sizes, np.asarray(result), strict=True):
        marked, numbers = (y.reshape(-1, 4 * size)[order] for y in x)
        assert np.array_equal(count.reshape(marked.shape)[order], np.cumsum(marked, axis=1))
        at = np.maximum.accumulate(np.where(marked > 0, np.arange(4 * size), -1), axis=1)
        expected = np.where(at < 0, 0, np.take_along_axis(numbers, np.maximum(at, 0), axis=1))
        assert np.array_equal(last.reshape(marked.shape)[order], expected)


# Less than a group of chunks, one, and four splits of two with five chunks more.
@pytest.mark.parametrize(("NC", "backward"), [(5, False), (16, True), (148, False), (148, True)])
def test_vector_states(NC, backward):
    problem = make_problem((1, 2, 64 * NC, 128), 128, 64, pad_heads=False)
    call = call_of("vector_states", problem, num_splits=4 if NC == 148 else 1)
    test_gates.check_vector_states(call, backward)


EXP, SIGMOID = InputGate


@pytest.mark.parametrize(
    ("case", "L", "S", "input_gate", "packed"),
    [
        *((case, 64, 192, EXP, True) for case in test_gates.CASES),
        ("resets", 64, 192, SIGMOID, False),
        ("resets", 64, 448, EXP, False),  # two CTAs, of which the second has fewer chunks
        ("plain", 128, 1024, EXP, True),  # two CTAs, which join the chunks of their head
        slow("plain", 512, 1024, EXP, False),  # one chunk per CTA
        ("plain", 1024, 2048, EXP, True),  # one long chunk per CTA
        slow("plain", 2048, 2048, EXP, False),  # five rounds
    ],
)
def test_gates_are_those_of_the_recurrence(case, L, S, input_gate, packed):
    lengths = np.array([41, 170], "int32") if (case, S) == ("plain", 192) else None
    form = Lowering.MOSAIC_GPU_INTERPRET
    test_gates.check_gates(form, case, L, S, input_gate, packed, lengths)


@pytest.mark.parametrize(("L", "S"), [(64, 448), slow(1024, 2048)])
def test_flags_are_those_of_the_plain_form(L, S):
    """Where the stabilisers at the chunk boundaries are given.

    The forms take different logarithms.
    """
    i, f, m, starts = test_gates.drawn(L, S, EXP, True, dict(resets=True))
    x = dict(vecI=i, vecF=f, scaM_initial=m, starts=starts)
    p = Problem(1, 2, S, 64, 64, L, 1.0)

    def run(call, **m_states):
        stage = functools.partial(dispatch.run, "chunk_gates", with_flags=True, call=call)
        return jax.jit(stage)(**x, **m_states)

    with mock.patch.object(gates, "log_sigmoid", lambda f, _: jnp.minimum(f, 0.0)):
        plain = run(planning.plain(p))
        result = run(call_of("chunk_gates", p), scaM_states=plain.scaM_states)
        flags = gate_gradients.step_flags(result._replace(vecFlags=None), f, starts)
    assert np.array_equal(result.vecFlags.reshape(flags.shape), flags)


def test_the_stabiliser_scan_of_many_chunks():
    """In several blocks; with chunks that hold a reset (g is -inf), or that store nothing."""
    from mlstm_pallas.mosaic_gpu.chunk_gates import stabiliser_scan

    heads, NC, draw = 2, 1100, np.random.default_rng(0)
    g, a = np.float32(draw.normal(size=(2, heads, NC)))
    a[:, ::3], g[:, ::89] = -np.inf, -np.inf
    m = initial = np.float32(draw.normal(size=heads))
    padded = (np.pad(y, [(0, 0), (0, -NC % 1024)], constant_values=np.nan) for y in (g, a))
    call = call_of("chunk_gates", Problem(1, heads, 64 * NC, 64, 64, 64, 1.0))
    result = np.asarray(jax.jit(functools.partial(stabiliser_scan, call=call))(*padded, initial))
    # Sums of up to 89 numbers in float32, in a tree over all.
    bound = 2 * NC.bit_length() * 2.0**-24 * 89 * np.abs(g[np.isfinite(g)]).max()
    for c in range(NC):
        m = np.maximum(np.float64(g[:, c]) + m, a[:, c])
        np.testing.assert_allclose(result[:, c], m, rtol=0, atol=bound)


@pytest.mark.parametrize("name", quick_and_slow(RECURRENCES, quick=("weighted", "delta", "splits")))
def test_interpreted_recurrences_against_float64(name):
    RECURRENCES[name].check(Lowering.MOSAIC_GPU_INTERPRET)
