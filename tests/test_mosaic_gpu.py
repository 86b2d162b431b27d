"""The Mosaic GPU kernels: interpreted on a CPU with race detection, compiled for Hopper without a GPU, and run on one."""

import dataclasses
import functools
import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Set
from pathlib import Path
from typing import Any
from unittest import mock

import compile_report
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_gates
import test_gpu
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from oracle import HELPERS, MOSAIC_CALL, assert_close, error, initial_state_scale, random_inputs, tolerance
from test_float16 import backward_bound, forward_bound
from test_gradients import BOUND

from mlstm_pallas import KernelConfig, StageConfig, gate_gradients, gates, mlstm_chunkwise, mlstm_recurrent_step, reference, use_backend
from mlstm_pallas.backend import jax_has_mosaic_gpu, requested_backend
from mlstm_pallas.call_spec import CallSpec
from mlstm_pallas.config import config_for, config_from_row, tuned_rows
from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel
from mlstm_pallas.entry import Options, spec_for
from mlstm_pallas.export import export
from mlstm_pallas.gate_gradients import TilePairs
from mlstm_pallas.gates import CARRIED, GOES_ON, PASSES, ChunkGates
from mlstm_pallas.launch import CUSTOM_CALL_TARGET
from mlstm_pallas.normaliser import Normaliser, NormaliserGradients
from mlstm_pallas.problem import MAX_TILE, InputGate, Layout, Problem, make_problem
from mlstm_pallas.shared_memory import compute_capability
from mlstm_pallas.stage import MOSAIC_GPU_HEADS, MOVES_REGISTERS, Lowering, StageCall
from mlstm_pallas.stages import STAGES, recurrent_bw_dC
from mlstm_pallas.stages.chunk_gates import chunk_gates
from mlstm_pallas.stages.parallel_bw_dP import GradientTiles, with_delta, without_tiles
from mlstm_pallas.stages.parallel_bw_dQKV import Gradients, mosaic_gpu_by_chunk
from mlstm_pallas.stages.recurrence import mosaic_gpu_rows_of
from mlstm_pallas.stages.step_gradients import step_gradients
from mlstm_pallas.stages.vector_states import vector_states
from mlstm_pallas.validation import MOSAIC_GPU_JAX
from mlstm_pallas.xlstm_jax import triton_stablef

pytestmark = pytest.mark.usefixtures("quick_compilation")

needs_jax = pytest.mark.skipif(not jax_has_mosaic_gpu(), reason="the Mosaic GPU kernels need jax >= 0.11.2 and < 0.13")
PLUGINS = [name for name in ("jax_cuda12_plugin", "jax_cuda13_plugin") if importlib.util.find_spec(name)]
needs_compiler = pytest.mark.skipif(not PLUGINS, reason="XLA's compiler for CUDA is in jax_cuda13_plugin, which is not installed")
OUTPUTS = ("h", "c", "n", "m")
SCAN = {"parallel_fw_P", "recurrent_fw_H"}
ALL = {name for name, stage in STAGES.items() if stage.mosaic_gpu}
RACE = "RACE DETECTED"  # which GPU interpret mode prints


def fused(num_splits=None, **scan):
    """The fused scan with these tiles of its Mosaic GPU kernel; chunks of 128 in the backward pass."""
    tiles = StageConfig(**dict(siz_b_LKV=64, siz_b_DHHV=128, siz_b_loop=256, num_warps=8, num_stages=2) | scan)
    return KernelConfig(chunk_size=128, fused_min_heads=1, recurrent_fw_H=StageConfig(num_splits=num_splits, mosaic_gpu=tiles))


def spec_of(inputs, config, layout="BNTH", **options) -> CallSpec:
    """The spec of mlstm_chunkwise(**inputs, ...), whose arrays are (B, NH, S, ...)."""
    sizes = dict(zip(("B", "NH", "S", "DHQK"), inputs["q"].shape, strict=True)) | {"DHV": inputs["v"].shape[-1]}
    options = Options(config=config, layout=layout, **options)
    gate, has_state = InputGate(options.input_gate), "c_initial" in inputs
    return spec_for(options, gate, options.normalize, inputs["q"].dtype, sizes, Layout(layout), has_initial_state=has_state)


def swapped(x):
    return jnp.swapaxes(x, 1, 2)


def outputs_and_gradients(run, layout="BNTH"):
    """A function of inputs and cotangents, (B, NH, S, ...) all of them: (h, c, n, m), and the gradients by name."""

    def in_layout(x):
        return {name: swapped(y) if layout == "BTNH" and name in "qkvif" else y for name, y in x.items()}

    def outputs_of(x):
        h, states = run(**in_layout(x))
        return (swapped(h) if layout == "BTNH" else h, *states)

    def both(x, cotangents):
        outputs, vjp = jax.vjp(outputs_of, x)
        return outputs, vjp(tuple(y.astype(x.dtype) for x, y in zip(outputs, cotangents, strict=True)))[0]

    return jax.jit(both)


def cotangents_for(inputs, dtype, states=True):
    """Of h, c, n and m, exact in the dtype; zeros of the states where nobody reads these."""
    (B, NH, S, DHQK), DHHV, draw = inputs["q"].shape, inputs["v"].shape[-1], np.random.default_rng(1)
    found = [
        jnp.asarray(draw.normal(size=size), dtype).astype("float32")
        for size in ((B, NH, S, DHHV), (B, NH, DHQK, DHHV), (B, NH, DHQK), (B, NH))
    ]
    return found if states else [found[0], *map(jnp.zeros_like, found[1:])]


def expected_of(inputs, cotangents, segment_ids=None, **options):
    """Outputs and gradients of the recurrence in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda y: jnp.asarray(np.asarray(y.astype("float32")), "float64"), (inputs, cotangents))
        found = outputs_and_gradients(functools.partial(reference.recurrence, segment_ids=segment_ids, **options))(*wide)
        return jax.tree.map(np.asarray, found)


def errors_of(inputs, found, expected):
    """Relative errors of outputs and of gradients, by name; that of dm_initial to the size of its terms."""
    (outputs, gradients), (wanted, wanted_gradients) = found, expected
    of_outputs = {name: error(x, y) for name, x, y in zip(OUTPUTS, outputs, wanted, strict=True)}
    of_gradients = {name: error(gradients[name], y) for name, y in wanted_gradients.items()}
    if "m_initial" in of_gradients:
        scale = np.linalg.norm(initial_state_scale(wanted_gradients["c_initial"], wanted_gradients["n_initial"], inputs))
        of_gradients["m_initial"] *= min(1.0, np.linalg.norm(wanted_gradients["m_initial"]) / scale)
    return of_outputs, of_gradients


def assert_below(errors, bound):
    assert max(errors.values()) < bound, {name: f"{e:.1e}" for name, e in errors.items()}


# ---------------------------------------------------------------- interpreted


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of mlstm_chunkwise."""

    config: KernelConfig
    shape: tuple[int, ...] = (1, 1, 256, 256, 256)  # B, NH, S, DHQK, DHHV
    recipe: dict[str, Any] = dataclasses.field(default_factory=dict)  # of random_inputs
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: str = "bfloat16"
    packed: bool = False
    stages: Set[str] = frozenset(ALL)  # that run on Mosaic GPU, at the least
    splits: int = 1


NARROW = dict(shape=(1, 2, 256, 128, 128))
CASES = {
    "states_BTNH": Case(fused(), options=dict(layout="BTNH")),
    "heads": Case(fused(), shape=(2, 2, 256, 256, 256), options=dict(layout="BTNH")),
    "no_states": Case(fused(), recipe=dict(states=False)),
    "packed": Case(fused(), packed=True),
    "sigmoid": Case(fused(), recipe=dict(m_initial=False), options=dict(input_gate="sigmoid")),
    "unnormalised": Case(fused(), recipe=dict(m_initial=False), options=dict(input_gate="sigmoid", normalize=False)),
    "stored": Case(fused(), options=dict(recompute_states_in_bw=False)),
    "float16": Case(fused(), dtype="float16"),
    "padded": Case(fused(), shape=(1, 1, 200, 250, 200)),
    "resets": Case(fused(), recipe=dict(resets=True)),
    "narrow": Case(fused(), **NARROW),
    "one_block_of_rows": Case(fused(), shape=(1, 2, 256, 64, 128)),
    "one_block_of_rows_stored": Case(fused(), shape=(1, 2, 256, 64, 128), options=dict(recompute_states_in_bw=False)),
    "three_blocks_of_rows": Case(fused(), shape=(1, 2, 256, 192, 128), stages=ALL - {"parallel_bw_dQKV"}),
    "splits": Case(fused(num_splits=2), splits=2, **NARROW),
    "splits_BTNH": Case(fused(num_splits=2), splits=2, options=dict(layout="BTNH"), **NARROW),
    "stored_in_splits": Case(fused(num_splits=2), splits=2, options=dict(recompute_states_in_bw=False), **NARROW),
    "two_launches": Case(fused(siz_b_loop=64), **NARROW),
    "two_blocks_a_warpgroup": Case(fused(siz_b_DHHV=256), shape=(1, 1, 256, 128, 256)),
}


def ids_of(case):
    """Segments that begin inside a chunk and inside a tile, one over two chunks."""
    B, _, S, *_ = case.shape
    return jnp.asarray(np.repeat([[3, 0, 7]] * B, [100, 29, S - 129], axis=1)) if case.packed else None


@mock.patch.object(recurrent_bw_dC, "MOSAIC_GPU_MIN_CTAS", 1)  # at any number of heads
def check_case(name, backend):
    """Outputs and the gradients of all inputs of a case against float64."""
    case = CASES[name]
    inputs, ids = random_inputs(5, *case.shape, dtype=case.dtype, **case.recipe), ids_of(case)
    cotangents = cotangents_for(inputs, case.dtype)
    options = dict(return_last_states=True, config=case.config, backend=backend) | case.options
    spec = spec_of(inputs, **options)
    assert spec.fused_tiles == (spec.problem.DHQK in (64, 128))  # then parallel_bw_dQKV does what parallel_bw_dP does
    expected = case.stages - ({"parallel_bw_dP"} if spec.fused_tiles else set())
    assert {stage for stage, _ in spec.mosaic_gpu} & {*spec.stages} >= expected
    assert (spec.fused, spec.num_splits) == (True, case.splits)
    layout = case.options.get("layout", "BNTH")
    found = outputs_and_gradients(functools.partial(mlstm_chunkwise, segment_ids=ids, **options), layout)(inputs, cotangents)
    of_recurrence = {name: x for name, x in case.options.items() if name in ("input_gate", "normalize")}
    outputs, gradients = errors_of(inputs, found, expected_of(inputs, cotangents, ids, **of_recurrence))
    terms = case.shape[2] + case.shape[3]
    half = case.dtype == "float16"
    assert_below(outputs, forward_bound(terms) if half else tolerance(case.dtype, terms))
    assert_below(gradients, backward_bound(terms) if half else BOUND[case.dtype])


def slow(names, quick):
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in names]


@needs_jax
@pytest.mark.parametrize("name", slow(CASES, quick=("states_BTNH",)))
def test_interpreted_kernels_against_float64(name, capsys):
    check_case(name, "mosaic_gpu_interpret")
    assert RACE not in capsys.readouterr().out


@needs_jax
def test_a_race_is_found(capsys):
    """Two warpgroups write one tile."""
    from mlstm_pallas.launch_mosaic_gpu import mosaic_call, plgpu

    def kernel(x, y, tile):
        tile[...] = x[...]
        y[lax.axis_index("wg")] = tile[...]

    outputs = {"y": jax.ShapeDtypeStruct((2, 8, 128), jnp.float32)}
    launch = dict(name="races", grid={"program": 1}, warpgroups=2, outputs=outputs, scratch={"tile": plgpu.SMEM((8, 128), jnp.float32)})
    raised = ""  # jax 0.12 raises it, 0.11 prints it
    try:
        jax.block_until_ready(mosaic_call(kernel, interpret=True, **launch)(x=jnp.zeros((8, 128))))
    except jax.errors.JaxRuntimeError as error:
        raised = str(error)
    assert RACE in capsys.readouterr().out + raised


def random_gates(draw, BNH, NC, L):
    """e and u of chunks in two floats each, such that no weight exceeds 1; w and abar below 1."""
    e, u_offset = draw.normal(size=(BNH, NC, L)), draw.uniform(0.0, 2.0, size=(BNH, NC, L))
    u = np.maximum.accumulate(e, axis=-1) + u_offset
    pairs = [(x.astype("float32"), (1e-5 * draw.normal(size=x.shape)).astype("float32")) for x in (e, u)]
    w, abar = draw.uniform(size=(2, BNH, NC, L)).astype("float32")
    m = np.zeros_like(w)
    return ChunkGates(*pairs, w, m, abar, m[..., 0], np.zeros((BNH, NC + 1), "float32"))


@needs_jax
@pytest.mark.parametrize(
    ("L", "normalise", "layout"),
    [
        (256, True, "BNTH"),
        pytest.param(128, True, "BTNH", marks=pytest.mark.slow),
        pytest.param(512, False, "BTNH", marks=pytest.mark.slow),
    ],
)
def test_parallel_bw_dP_against_float64(L, normalise, layout, capsys):
    """All outputs, in chunks of several tiles and of one; more items than CTAs, and floors above and below |z|."""
    B, NH, S, DHQK, DHHV = 1, 2, 512, 128, 128
    p, draw = Problem(B, NH, S, DHQK, DHHV, L, DHQK**-0.5), np.random.default_rng(3)
    q, k, v, dh, h = (jnp.asarray(draw.normal(size=(B, NH, S, D)), "bfloat16") for D in (DHQK, DHQK, DHHV, DHHV, DHHV))
    gates = random_gates(draw, p.BNH, p.NC, L)
    z, m = draw.normal(size=(2, p.BNH, p.NC, L)).astype("float32")
    gates, normaliser = gates._replace(vecM=m), Normaliser(eps=0.1) if normalise else None
    call = StageCall(p, StageConfig(num_stages=3), None, Lowering.MOSAIC_GPU_INTERPRET)
    given = [swapped(x) if layout == "BTNH" else x[0] for x in (q, k, v, dh, h)]

    @jax.jit
    def run(q, k, v, dh, h):
        of_forward = (h, z.reshape(p.BNH, S)) if normalise else (None, None)
        return STAGES["parallel_bw_dP"].run(q, k, v, dh, gates, *of_forward, normaliser=normaliser, call=call)

    found = run(*given)
    assert RACE not in capsys.readouterr().out

    def chunks(x):
        return np.asarray(jnp.asarray(x).astype("float32"), "float64").reshape(p.BNH, p.NC, L, -1)

    q, k, v, dh, h = map(chunks, (q, k, v, dh, h))
    (e, u), w = (sum(map(np.float64, x)) for x in (gates.vecE, gates.vecU)), np.float64(gates.vecW)
    inv, bias, delta = np.ones_like(w), np.zeros_like(w), np.sum(dh * h, axis=-1)
    if normalise:
        z, floor = np.float64(z), np.exp(-np.float64(m))
        inv, bias = 1 / (np.maximum(np.abs(z), floor) + 0.1), np.where(np.abs(z) >= floor, -np.sign(z) * delta, 0.0)
    D = np.tril(np.exp(np.minimum(e[..., None, :] - u[..., None], 80.0)))
    scores, dA = np.einsum("nctk,ncsk->ncts", q, k) * p.qk_scale, np.einsum("nctv,ncsv->ncts", dh, v)
    dP = D * (dA + bias[..., None]) * inv[..., None]
    W, n = dP * scores, L // 64
    strict = np.tril(W, -1).reshape(p.BNH, p.NC, n, 64, n, 64)
    index = np.arange(n)
    later = (index[:, None] >= index)[:, None, :, None]  # tile i of queries lies no earlier than tile j of keys
    block = np.arange(L) // MAX_TILE
    lower, r = block[:, None] >= block, w * p.qk_scale * inv
    expected = {
        "matP": (D * scores * inv[..., None], np.where(lower, chunks(found.matP), 0.0)),
        "matDeltaP": (dP * p.qk_scale, np.where(lower, chunks(found.matDeltaP), 0.0)),
        "matQ_scaled": (
            q * r[..., None],
            chunks(swapped(found.matQ_scaled) if layout == "BTNH" else found.matQ_scaled),
        ),
        "per_query": (np.moveaxis(strict.sum(-1), -1, 1), np.where(later.swapaxes(0, 2), np.float64(found.pairs.per_query), 0.0)),
        "per_key": (np.moveaxis(strict.sum(-3), 2, 1), np.where(later, np.float64(found.pairs.per_key), 0.0)),
        "diagonal": (np.diagonal(W, axis1=-2, axis2=-1).reshape(p.BNH, p.NC, n, 64), np.float64(found.pairs.diagonal)),
    }
    if normalise:
        expected["vecDeltaN_added"] = np.einsum("nct,nctk->nck", r * bias, q), np.float64(found.vecDeltaN_added)
        of_normaliser = dict(vecInvDen=inv, vecDz=bias * inv, vecDzDen=bias, vecDm=-delta * 0.1 * inv)
        expected |= {name: (x.reshape(p.BNH, S), getattr(found.normaliser_gradients, name)) for name, x in of_normaliser.items()}
    else:
        assert found.normaliser_gradients == NormaliserGradients()
        assert found.vecDeltaN_added is None
    for name, (wanted, actual) in expected.items():
        rounded = "bfloat16" if name.startswith("mat") else "float32"
        assert error(actual, wanted) < tolerance(rounded, DHQK + DHHV + L), name


@needs_jax
def test_an_inf_in_h_reaches_no_tile_where_the_floor_is_larger():
    p, draw = Problem(1, 1, 128, 64, 128, 128, 0.125), np.random.default_rng(0)
    q, k, v, dh, h = (jnp.asarray(draw.normal(size=(1, 128, D)), "bfloat16") for D in (64, 64, 128, 128, 128))
    gates = random_gates(draw, 1, 1, 128)
    z = jnp.where(jnp.arange(128) % 2 == 0, 2.0, 0.5)[None]  # the floor is 1: m is 0
    call = StageCall(p, StageConfig(num_stages=2), None, Lowering.MOSAIC_GPU_INTERPRET)
    run = jax.jit(lambda h: STAGES["parallel_bw_dP"].run(q, k, v, dh, gates, h, z, normaliser=Normaliser(), call=call))
    expected, found = run(h), run(h.at[0, 33].set(jnp.inf))
    assert_same_bits(found[:2], expected[:2])
    assert_same_bits(found.pairs, expected.pairs)
    assert_same_bits(found.vecDeltaN_added, expected.vecDeltaN_added)


@needs_jax
def test_an_inf_in_h_reaches_no_other_delta_and_no_dn_where_the_floor_is_larger():
    """Where recurrent_bw_dC computes delta."""
    p, draw, STEP = Problem(1, 1, 128, 64, 128, 128, 0.125), np.random.default_rng(0), 33
    q, dh, h = (jnp.asarray(draw.normal(size=(1, 128, D)), "bfloat16") for D in (64, 128, 128))
    gates, normaliser = random_gates(draw, 1, 1, 128), Normaliser()
    z = jnp.where(jnp.arange(128) % 2 == 0, 2.0, 0.5)[None]  # the floor is 1: m is 0
    tiles = StageConfig(siz_b_DHQK=64, num_stages=2)
    states_call, tiles_call = (StageCall(p, x, None, Lowering.MOSAIC_GPU_INTERPRET) for x in (tiles, StageConfig(num_stages=4)))

    @jax.jit
    def run(h):
        delta = recurrent_bw_dC.recurrent_bw_dC(q, dh, gates.scaGamma, None, matH=h, call=states_call).vecDelta
        before = without_tiles(q, q, gates, z, normaliser=normaliser, needs_delta=True, scale_keys=True, scaled=False, call=tiles_call)
        return delta, with_delta(before, q, gates, z, delta, normaliser=normaliser, call=tiles_call)

    (expected_delta, expected), (delta, found) = run(h), run(h.at[0, STEP].set(jnp.inf))
    assert not np.isfinite(delta[0, STEP])
    assert_same_bits(delta.at[0, STEP].set(0.0), expected_delta.at[0, STEP].set(0.0))
    assert np.any(expected.normaliser_gradients.vecDzDen)
    assert_same_bits(found.normaliser_gradients[:3], expected.normaliser_gradients[:3])
    assert_same_bits(found.vecDeltaN_added, expected.vecDeltaN_added)


@needs_jax
@pytest.mark.parametrize(
    ("BNH", "S", "L", "share", "has_dm"),
    [
        (2, 384, 128, 1.0, True),  # blocks of 128 steps, runs over several of them
        pytest.param(1, 1536, 512, 0.99, True, marks=pytest.mark.slow),  # one chunk a block
        pytest.param(1, 1024, 1024, 0.5, True, marks=pytest.mark.slow),  # two blocks a chunk
        pytest.param(2, 256, 256, 0.9, False, marks=pytest.mark.slow),
    ],
)
def test_step_gradients_against_float64(BNH, S, L, share, has_dm, capsys):
    """What the stages leave unwritten is NaN. share: of the steps whose stabiliser is that of the step before."""
    draw, n, NC, T = np.random.default_rng(0), L // 64, S // L, 64
    later, same = np.tri(n, k=-1, dtype=bool), np.eye(n, dtype=bool)
    per_query, per_key = (
        np.where((where | same).reshape(1, n, 1, n, 1), draw.normal(size=(BNH, n, NC, n, T)), np.nan) for where in (later.T, later)
    )
    vectors = (draw.normal(size=shape) for shape in [(BNH, S)] * 4 + [(BNH, NC)])
    x = (TilePairs(per_query, per_key, draw.normal(size=(BNH, NC, n, T))), *vectors)
    x = jax.tree.map(lambda y: y.astype("float32"), x)
    carried = draw.uniform(size=(BNH, S)) < share
    goes_on, passes = carried & (draw.uniform(size=(BNH, S)) < 0.999), draw.uniform(size=(BNH, S)) < 0.95
    flags = (CARRIED * carried + GOES_ON * goes_on + PASSES * passes).astype("int32")
    call = StageCall(Problem(1, BNH, S, 64, 64, L, 1.0), StageConfig(), None, Lowering.MOSAIC_GPU_INTERPRET)

    @functools.partial(jax.jit, static_argnums=0)
    def run(form, pairs, q_inter, k_inter, f, dm, through):
        return form(f, pairs, q_inter, k_inter, through, flags, dm if has_dm else None)

    found = run(functools.partial(step_gradients, call=call), *x)
    assert RACE not in capsys.readouterr().out
    with jax.enable_x64(True):
        expected = run(gate_gradients.step_gradients, *jax.tree.map(lambda y: jnp.asarray(y, "float64"), x))
        for actual, wanted in zip(found, map(np.asarray, expected), strict=True):
            assert error(actual, wanted) < tolerance("float32", S)


@needs_jax
@pytest.mark.parametrize(
    ("shape", "L", "layout", "dtype"),
    [
        ((1, 2, 128, 256), 64, "BNTH", "bfloat16"),
        ((2, 2, 256, 192), 128, "BTNH", "float16"),
        ((1, 1, 1024, 64), 1024, "BTNH", "bfloat16"),  # in two CTAs
        ((1, 1, 512, 128), 64, "BTNH", "bfloat16"),  # two CTAs of four chunks
        ((1, 2, 192, 320), 64, "BNTH", "float16"),
    ],
)
def test_step_sums_against_float64(shape, L, layout, dtype, capsys):
    from mlstm_pallas.stages.mosaic_gpu.step_sums import step_sums

    B, NH, S, D = shape
    p, draw = make_problem(shape, D, L, pad_heads=False), np.random.default_rng(3)
    x, weights = jnp.asarray(draw.normal(size=shape), dtype), draw.normal(size=(B * NH, S)).astype("float32")
    call = StageCall(p, StageConfig(), None, Lowering.MOSAIC_GPU_INTERPRET)
    found = jax.jit(functools.partial(step_sums, call=call))(swapped(x) if layout == "BTNH" else x.reshape(B * NH, S, D), weights)
    assert RACE not in capsys.readouterr().out
    terms = np.asarray(x.astype("float32"), "float64").reshape(p.BNH, p.NC, L, D) * weights.reshape(p.BNH, p.NC, L, 1)
    assert found.dtype == jnp.float32
    # A product and a sum of L terms in float32, each rounded to 2**-24 of what it is at the most.
    assert (np.abs(np.asarray(found) - terms.sum(axis=2)) <= L * 2.0**-24 * np.abs(terms).sum(axis=2)).all()


@needs_jax
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("NC", [5, 16, 50])  # less than a group of chunks, one, and three with two chunks more
def test_vector_states(NC, backward, capsys):
    call = StageCall(make_problem((1, 2, 64 * NC, 128), 128, 64, pad_heads=False), StageConfig(), None, Lowering.MOSAIC_GPU_INTERPRET)
    test_gates.check_vector_states(functools.partial(vector_states, call=call), 2, NC, 128, backward)
    assert RACE not in capsys.readouterr().out


@needs_jax
@pytest.mark.parametrize("L", [64, 128])
@pytest.mark.parametrize("case", test_gates.CASES)
def test_gates_are_those_of_the_recurrence(case, L, capsys):
    test_gates.check_gates("mosaic_gpu", case, L)
    assert RACE not in capsys.readouterr().out


@needs_jax
@pytest.mark.parametrize(
    ("input_gate", "packed", "S", "L"),
    [
        ("exp", True, 192, 64),
        ("sigmoid", False, 192, 64),
        ("sigmoid", True, 192, 64),
        pytest.param("exp", False, 448, 64, id="two CTAs, of which the second has fewer chunks"),
        pytest.param("exp", False, 1024, 512, id="a CTA holds one chunk", marks=pytest.mark.slow),
        pytest.param("exp", True, 2048, 1024, id="a CTA holds one long chunk"),
        pytest.param("exp", True, 2048, 2048, id="five rounds", marks=pytest.mark.slow),
    ],
)
def test_gates_are_those_of_the_plain_form(input_gate, packed, S, L, capsys):
    """Resets included. The sums of what ``split_at`` leaves are rounded, in another order than in the plain form."""
    heads, gate = 2, InputGate(input_gate)
    x = random_inputs(3, 1, heads, S, 1, 1, resets=True)
    starts = jnp.asarray(np.random.default_rng(0).random((heads, S)) < 0.03, "int32") if packed else None
    on_mosaic_gpu, plain = (
        StageCall(Problem(1, heads, S, 64, 64, L, 1.0), StageConfig(), None, lowering)
        for lowering in (Lowering.MOSAIC_GPU_INTERPRET, Lowering.XLA)
    )
    m_initial = jnp.zeros(heads) if gate is InputGate.SIGMOID else x["m_initial"][0]

    def run(call, states=None):
        arguments = x["i"][0], x["f"][0], m_initial, starts
        return jax.jit(lambda *x: chunk_gates(*x, gate, states, call=call))(*arguments)

    with mock.patch.object(gates, "log_sigmoid", lambda f, _: jnp.minimum(f, 0.0)):  # the forms take different logarithms
        expected, own = run(plain), run(on_mosaic_gpu)
        found = run(on_mosaic_gpu, expected.scaM_states)
        i, f, begins = (None if y is None else y.reshape(heads, -1, L) for y in (x["i"][0], x["f"][0], starts))
        flags = gate_gradients.step_flags(found._replace(vecFlags=None), f, None if begins is None else begins > 0)
        grid = gates.exact_sum_grid(jnp.max(jnp.abs(gates.log_gates(i, f, gate)[1]), axis=-1, keepdims=True), L)
        spacing = np.spacing(np.asarray(grid)).astype("float64")
    # Two sums of L numbers below spacing / 2, each of L roundings; and of a pair, of 2 * 24 digits.
    of_sums = L * 2.0**-24 * L * spacing
    for actual, wanted in zip((found.vecE, found.vecU), (expected.vecE, expected.vecU), strict=True):
        actual, wanted = ([np.asarray(y, "float64") for y in pair] for pair in (actual, wanted))
        stored = np.isfinite(wanted[0])
        assert np.array_equal(actual[0][~stored], wanted[0][~stored])
        difference = np.where(stored, actual[0], 0.0) - np.where(stored, wanted[0], 0.0) + (actual[1] - wanted[1])
        assert (np.abs(difference) <= of_sums + 2.0**-44 * np.abs(np.where(stored, wanted[0], 0.0))).all()
    of_sums = of_sums.reshape(heads, -1)
    for name, errors in dict(vecW=of_sums[..., None], vecAbar=of_sums[..., None], scaGamma=of_sums).items():
        test_gates.assert_decays(np.asarray(getattr(found, name)), np.asarray(getattr(expected, name), "float64"), 4 * errors)
    np.testing.assert_allclose(found.vecM, expected.vecM, rtol=2.0**-22, atol=2.0**-22)
    np.testing.assert_allclose(own.scaM_states, expected.scaM_states, rtol=2.0**-22, atol=2.0**-22)
    assert own.vecFlags is None
    assert np.array_equal(found.vecFlags, flags)
    assert RACE not in capsys.readouterr().out


@needs_jax
def test_the_stabiliser_scan_of_many_chunks():
    """In several blocks; with chunks that hold a reset, or that store nothing."""
    from mlstm_pallas.stages.mosaic_gpu.chunk_gates import stabiliser_scan

    heads, NC, draw = 2, 1100, np.random.default_rng(0)
    b, e = (draw.normal(size=(heads, NC, 1)).astype("float32") for _ in range(2))
    e[:, ::3], zeros = -np.inf, np.zeros_like(b)
    local = gates.LocalGates((b, zeros), (e, zeros), (e, zeros), np.where(draw.random(b.shape) < 0.01, np.float32(1024), 0))
    g, a, reset = (np.asarray(y) for y in gates.chunk_summaries(local))
    padding = [(0, 0), (0, -NC % 1024)]  # two blocks
    g, a = (np.pad(y, padding, constant_values=np.nan) for y in (np.where(reset, np.float32(-np.inf), g), a))
    initial = draw.normal(size=heads).astype("float32")
    call = StageCall(Problem(1, heads, 64 * NC, 64, 64, 64, 1.0), StageConfig(), None, Lowering.MOSAIC_GPU_INTERPRET)
    found = np.asarray(jax.jit(functools.partial(stabiliser_scan, call=call))(g, a, initial))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, "float64"), (local, initial))
        expected = np.asarray(gates.stabiliser_scan(*wide))
    finite = np.isfinite(expected)
    assert np.array_equal(np.isfinite(found), finite)
    # A sum of up to NC numbers in float32, in a tree.
    largest = np.abs(b[..., 0]).sum(axis=1).max() + np.abs(expected[finite]).max()
    assert np.abs(found[finite] - expected[finite]).max() <= 2 * NC.bit_length() * 2.0**-24 * largest


@needs_jax
@pytest.mark.parametrize(
    ("L", "DHQK", "DHHV", "normalise", "layout"),
    [
        (128, 128, 256, True, "BTNH"),  # a CTA makes all gradients of a chunk, as in the four that follow
        (128, 64, 128, True, "BNTH"),
        pytest.param(128, 64, 256, True, "BTNH", marks=pytest.mark.slow),
        pytest.param(128, 64, 512, False, "BTNH", marks=pytest.mark.slow),
        pytest.param(128, 128, 128, False, "BNTH", marks=pytest.mark.slow),
        pytest.param(256, 256, 512, True, "BNTH", marks=pytest.mark.slow),
        pytest.param(128, 512, 256, False, "BTNH", marks=pytest.mark.slow),
    ],
)
def test_parallel_bw_dQKV_agrees_with_the_plain_form(L, DHQK, DHHV, normalise, layout, capsys):
    """All outputs; more items, or chunks, than CTAs, which have not all as many. The kernel of whole chunks gets no tiles."""
    B, NH, S = 1, 3, 3 * L
    p, draw = Problem(B, NH, S, DHQK, DHHV, L, DHQK**-0.5), np.random.default_rng(4)

    def in_bfloat16(*shape):
        return jnp.asarray(draw.normal(size=shape), "bfloat16")

    q, k, v, dh, h = (in_bfloat16(B, NH, S, D) for D in (DHQK, DHQK, DHHV, DHHV, DHHV))
    C, dC = (in_bfloat16(p.BNH, p.NC, DHQK, DHHV) for _ in range(2))
    n, dn = draw.normal(size=(2, p.BNH, p.NC, DHQK)).astype("float32")
    gates, z = random_gates(draw, p.BNH, p.NC, L), draw.normal(size=(p.BNH, S)).astype("float32")
    normaliser = Normaliser(eps=0.1) if normalise else None
    call = StageCall(p, StageConfig(), lax.Precision.HIGHEST, Lowering.XLA)
    plain = jax.jit(functools.partial(STAGES["parallel_bw_dP"].run, normaliser=normaliser, call=call))
    *of_steps, of_h = (x[0].astype("float32") for x in (q, k, v, dh, h))
    tiles = plain(*of_steps, gates, of_h, z)
    gradients, rounded_tiles = tiles.normaliser_gradients, [x.astype("bfloat16") for x in (tiles.matP, tiles.matDeltaP)]

    def run(lowering, dtype, layout="BNTH"):
        """The stage, of operands in this dtype."""
        call = StageCall(p, StageConfig(num_stages=4), lax.Precision.HIGHEST, lowering)
        of_calls = [(swapped(x) if layout == "BTNH" else x[0]).astype(dtype) for x in (q, k, v, dh)]
        P, dP = (None, None) if lowering.mosaic_gpu and mosaic_gpu_by_chunk(p) else (x.astype(dtype) for x in rounded_tiles)
        given = GradientTiles(**dict.fromkeys(GradientTiles._fields) | dict(matP=P, matDeltaP=dP))
        states = C.astype(dtype), n, dC.astype(dtype), dn
        stage = functools.partial(STAGES["parallel_bw_dQKV"].run, call=call)
        *found, pairs = jax.jit(stage)(*of_calls, gates, gradients, given, *states)
        flat = [swapped(x).reshape(p.BNH, S, -1) if x.ndim == 4 else x for x in found]
        return {name: np.asarray(x.astype("float32"), "float64") for name, x in zip(Gradients._fields, flat, strict=False)}, pairs

    found, pairs = run(Lowering.MOSAIC_GPU_INTERPRET, "bfloat16", layout)
    assert RACE not in capsys.readouterr().out
    expected, no_pairs = run(Lowering.XLA, "float32")
    assert no_pairs is None
    assert (pairs is None) == (not mosaic_gpu_by_chunk(p))
    if pairs is not None:
        of_chunks = [np.asarray(x.astype("float32"), "float64").reshape(p.BNH, p.NC, L, -1) for x in (q[0], k[0], tiles.matDeltaP)]
        W = np.einsum("nctk,ncsk,ncts->ncts", *of_chunks, optimize=True)
        blocks, lower = np.tril(W, -1).reshape(p.BNH, p.NC, 2, 64, 2, 64), np.tri(2, dtype=bool)
        found |= {"diagonal": np.float64(pairs.diagonal)}
        found |= {"per_query": np.where(lower.T.reshape(1, 2, 1, 2, 1), np.float64(pairs.per_query), 0.0)}
        found |= {"per_key": np.where(lower.reshape(1, 2, 1, 2, 1), np.float64(pairs.per_key), 0.0)}
        expected |= {"diagonal": np.diagonal(W, axis1=-2, axis2=-1).reshape(p.BNH, p.NC, 2, 64)}
        expected |= {"per_query": np.moveaxis(blocks.sum(-1), -1, 1), "per_key": np.moveaxis(blocks.sum(-3), 2, 1)}
    for name, wanted in expected.items():
        rounded = "bfloat16" if name.startswith("mat") else "float32"
        assert error(found[name], wanted) < tolerance(rounded, DHQK * DHHV if name == "scaStates" else DHQK + DHHV + L), name


@needs_jax
@pytest.mark.slow
@mock.patch.object(recurrent_bw_dC, "MOSAIC_GPU_MIN_CTAS", 1)
def test_small_cotangents_in_float16():
    """r dh would fall below the normal numbers of float16: as exact as the plain form."""
    inputs = random_inputs(5, 1, 1, 256, 64, 128, dtype="float16", states=False)
    cotangents = [2.0**-10 * x for x in cotangents_for(inputs, "float16", states=False)]
    options = dict(return_last_states=True, config=fused())
    assert {"parallel_bw_dQKV", "recurrent_bw_dC"} <= dict(spec_of(inputs, backend="mosaic_gpu_interpret", **options).mosaic_gpu).keys()
    expected = expected_of(inputs, cotangents)
    plain, found = (
        errors_of(
            inputs, outputs_and_gradients(functools.partial(mlstm_chunkwise, backend=backend, **options))(inputs, cotangents), expected
        )[1]
        for backend in ("xla", "mosaic_gpu_interpret")
    )
    for name, e in found.items():
        assert e < 1.5 * plain[name], (name, e, plain)


def check_neighbours(backend, shape):
    """Heads next to one that is NaN have the bits that they have next to finite ones; outputs and gradients."""
    MIDDLE = 1
    inputs = random_inputs(11, *shape, dtype="bfloat16")
    cotangents = cotangents_for(inputs, "bfloat16")
    run = outputs_and_gradients(functools.partial(mlstm_chunkwise, return_last_states=True, config=fused(), backend=backend))
    others = np.arange(shape[1]) != MIDDLE
    poisoned = jax.tree.map(lambda x: x.at[:, others].set(jnp.nan), (inputs, cotangents))
    for x, y in zip(*map(jax.tree.leaves, (run(inputs, cotangents), run(*poisoned))), strict=True):
        x, y = (np.asarray(z[:, MIDDLE].astype("float32")) for z in (x, y))
        assert np.isfinite(x).all()
        assert np.array_equal(x, y)


@needs_jax
@pytest.mark.slow
def test_interpreted_kernels_read_nothing_of_other_heads():
    check_neighbours("mosaic_gpu_interpret", (1, 3, 128, 256, 256))


RECURRENCE_TILES = StageConfig(siz_b_DHQK=256, num_stages=3)


@dataclasses.dataclass(frozen=True)
class Recurrences:
    """A call of recurrent_bw_dC on Mosaic GPU; the operands come scaled, or with weights."""

    shape: tuple[int, ...] = (1, 2, 256, 128, 128)  # B, NH, S, DHQK, DHHV
    L: int = 128
    tiles: StageConfig = RECURRENCE_TILES
    weighted: bool = True
    layout: str = "BNTH"
    states: bool = True  # an initial state and an initial dC, and whether the last ones are wanted
    alone: bool = False  # dC without C
    delta: bool = False  # whether delta is wanted
    dtype: str = "bfloat16"
    device: compile_report.Device = compile_report.DEVICES["H200"]
    relocatable: bool = False

    @property
    def problem(self) -> Problem:
        return make_problem(self.shape[:-1], self.shape[-1], self.L, pad_heads=False)

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """q, dh, k, v, r, abar, gamma, the last dC, the initial C, h."""
        (B, NH, S, K, V), n = self.shape, self.problem.BNH
        of_steps = {D: ((n, S, D), (B, S, NH, D))[self.layout == "BTNH"] for D in (K, V)}
        ab = of_steps[K] if self.weighted else (n, S, K), of_steps[V]  # parallel_bw_dP writes scaled operands in one layout
        floats = [(n, S), (n, S), (n, self.problem.NC), (n, K, V), (n, K, V)]
        found = [jax.ShapeDtypeStruct(x, self.dtype) for x in (*ab, *ab)] + [jax.ShapeDtypeStruct(x, "float32") for x in floats]
        return [*found, jax.ShapeDtypeStruct(ab[1], self.dtype)]

    def function(self, lowering=Lowering.MOSAIC_GPU):
        """Of arrays of these shapes."""
        call = StageCall(self.problem, self.tiles, None, lowering)
        wanted = dict(return_initial=self.states, return_last=self.states, call=call)

        def run(q, dh, k, v, r, abar, gamma, dC_last, C_initial, h):
            more = (dict(vecR=r, vecAbar=abar) if self.weighted else {}) | (dict(matH=h) if self.delta else {})
            dC_last, C_initial = (dC_last, C_initial) if self.states else (None, None)
            of_C = () if self.alone else (k, v, C_initial)
            return recurrent_bw_dC.recurrent_bw_dC(q, dh, gamma, dC_last, *of_C, **more, **wanted)

        return run

    def check(self, lowering):
        """The outputs against float64."""
        draw, p = np.random.default_rng(0), self.problem
        x = [draw.normal(size=y.shape) for y in self.shapes()]
        x[4:7] = (draw.uniform(size=y.shape) for y in x[4:7])
        x = [jnp.asarray(y, shape.dtype) for y, shape in zip(x, self.shapes(), strict=True)]
        found = jax.jit(self.function(lowering))(*x)
        q, dh, k, v, r, abar, gamma, dC_last, C_initial, h = (np.asarray(y.astype("float32"), "float64") for y in x)

        def states(a, b, weights, X, chunks):
            a, b = (np.moveaxis(y, 2, 1).reshape(p.BNH, p.S, -1) if y.ndim == 4 else y for y in (a, b))
            a = a * weights[..., None] if self.weighted else a
            X, before = X if self.states else np.zeros_like(X), np.empty((p.BNH, p.NC, p.DHQK, p.DHHV))
            for c in chunks:
                before[:, c], steps = X, slice(c * p.L, (c + 1) * p.L)
                X = X * gamma[:, c, None, None] + np.swapaxes(a[:, steps], 1, 2) @ b[:, steps]
            return before, X

        expected = [*states(q, dh, r, dC_last, reversed(range(p.NC)))]
        expected += [None, None] if self.alone else states(k, v, abar, C_initial, range(p.NC))
        delta = np.sum(dh * h, axis=-1)
        expected.append((np.moveaxis(delta, 2, 1).reshape(p.BNH, p.S) if delta.ndim == 3 else delta) if self.delta else None)
        # Roundings to the kernel dtype: of the weighted operand, and of the states that are stored. Those of terms are independent.
        unit, sums = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[self.dtype], math.sqrt(p.S) * 2.0**-24
        for name, actual, wanted in zip(found._fields, found, expected, strict=True):
            stored = name.endswith("_states")
            assert (actual is None) == (wanted is None or not (stored or name == "vecDelta" or self.states)), name
            if actual is not None:
                rounded = 0 if name == "vecDelta" else self.weighted + stored  # of delta only the sums are
                assert_close(actual, wanted, math.sqrt(rounded / 3) * unit + sums, name)


RECURRENCES = {
    "weighted": Recurrences(),
    "weighted_BTNH": Recurrences(shape=(2, 2, 256, 128, 256), layout="BTNH"),
    "weighted_dC_alone": Recurrences(alone=True, states=False),
    "scaled": Recurrences(weighted=False),
    "scaled_dC_alone_BTNH": Recurrences(weighted=False, alone=True, layout="BTNH"),
    "float16": Recurrences(dtype="float16", states=False),
    "rows_of_64": Recurrences(shape=(1, 2, 256, 256, 128), tiles=StageConfig(siz_b_DHQK=64, num_stages=2)),
    "rows_of_128": Recurrences(shape=(1, 1, 512, 256, 128), L=256, tiles=StageConfig(siz_b_DHQK=128, num_stages=6)),
    "rows_of_192": Recurrences(shape=(1, 1, 256, 192, 128), L=64),
    "rows_of_256": Recurrences(shape=(1, 1, 512, 512, 128), L=256),
    "one_block_of_rows": Recurrences(shape=(1, 2, 64, 64, 128), L=64),
    "delta": Recurrences(shape=(1, 2, 256, 64, 128), delta=True),
    "delta_BTNH": Recurrences(shape=(2, 2, 256, 128, 256), layout="BTNH", delta=True),
    "delta_rows_of_64": Recurrences(tiles=StageConfig(siz_b_DHQK=64, num_stages=2), delta=True),
    "delta_dC_alone": Recurrences(shape=(1, 1, 512, 128, 128), alone=True, states=False, delta=True),
    "delta_scaled_float16": Recurrences(weighted=False, dtype="float16", delta=True),
}


@needs_jax
@pytest.mark.parametrize("name", slow(RECURRENCES, quick=("weighted", "delta")))
def test_interpreted_recurrences_against_float64(name, capsys):
    RECURRENCES[name].check(Lowering.MOSAIC_GPU_INTERPRET)
    assert RACE not in capsys.readouterr().out


@needs_jax
def test_recurrences_have_weights_all_or_none():
    call = StageCall(Recurrences().problem, RECURRENCE_TILES, None, Lowering.MOSAIC_GPU_INTERPRET)
    q, dh, k, v, r, _, gamma, dC_last, C_initial, _ = Recurrences().shapes()
    with pytest.raises(NotImplementedError, match="recurrent_bw_dC has r in some of its recurrences"):
        jax.eval_shape(functools.partial(recurrent_bw_dC.recurrent_bw_dC, call=call), q, dh, gamma, dC_last, k, v, C_initial, vecR=r)


# ---------------------------------------------------------------- transformations, interpreted


SMALL = dict(config=fused(), backend="mosaic_gpu_interpret")


def small_inputs(B=1):
    return list(random_inputs(6, B, 2, 128, 64, 128, dtype="bfloat16", states=False).values())


def gradients_of(run):
    return jax.grad(lambda *x: jnp.sum(jnp.sin(run(*x).astype("float32"))), tuple(range(5)))


@needs_jax
@pytest.mark.slow
def test_vmap_of_the_gradient():
    run, x = functools.partial(mlstm_chunkwise, **SMALL), small_inputs(2)
    mapped = jax.jit(jax.vmap(gradients_of(run)))(*(y[:, None] for y in x))
    for actual, wanted in zip(mapped, jax.jit(gradients_of(run))(*x), strict=True):
        assert np.array_equal(np.asarray(actual[:, 0]), np.asarray(wanted))


@needs_jax
@pytest.mark.slow
def test_sequence_parallelism_on_one_device():
    """The device's summaries are not read, and the scan starts from a state that is given."""
    x, mesh = small_inputs(), jax.make_mesh((1,), ("s",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:1])
    run = functools.partial(mlstm_chunkwise_sequence_parallel, axis_name="s", **SMALL)
    split = P(None, None, "s")
    found = jax.jit(gradients_of(jax.shard_map(run, mesh=mesh, in_specs=(split,) * 5, out_specs=split, check_vma=False)))(*x)
    expected = jax.jit(gradients_of(functools.partial(mlstm_chunkwise, **SMALL)))(*x)
    for actual, wanted in zip(found, expected, strict=True):
        assert_close(actual, np.asarray(wanted.astype("float32")), BOUND["bfloat16"])


@needs_jax
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_lowers(check_vma):
    """Outputs and what is inside the kernels say over which mesh axes they vary."""
    device = AbstractDevice("NVIDIA H200", 132, "gpu")
    mesh = AbstractMesh((2,), ("s",), axis_types=(AxisType.Auto,), abstract_device=device)
    run = functools.partial(mlstm_chunkwise_sequence_parallel, axis_name="s", config=fused(), backend="mosaic_gpu")
    split = P(None, None, "s")
    run = jax.shard_map(run, mesh=mesh, in_specs=(split,) * 5, out_specs=split, check_vma=check_vma)
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype) for x in random_inputs(0, 1, 1, 512, 256, 256, dtype="bfloat16", states=False).values()
    ]
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(gradients_of(run)).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(MOSAIC_CALL) >= len(SCAN) + 1


# ---------------------------------------------------------------- where the kernels can run


HALF = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in random_inputs(0, 1, 1, 128, 256, 256, dtype="bfloat16", states=False).values()]


def under(backend, function):
    def run(*args):
        with use_backend(backend):
            return function(*args)

    return run


def a_step(q, k, v, i, f, **options):
    return mlstm_recurrent_step(q[:, :, 0], k[:, :, 0], v[:, :, 0], i[:, :, 0], f[:, :, 0], **options)


DOORS = {
    "chunkwise": lambda backend: functools.partial(mlstm_chunkwise, backend=backend),
    "use_backend": lambda backend: under(backend, mlstm_chunkwise),
    "step": lambda backend: functools.partial(a_step, backend=backend),
    "generator": lambda backend: under(backend, triton_stablef._mlstm_chunkwise_fwbw_generator("bfloat16", chunk_size=64)),
    "adapter": lambda backend: under(backend, lambda q, k, v, i, f: triton_stablef.mlstm_chunkwise_triton_stablef(q, k, v, i, f)),
}


DOORS_WITH_KERNELS = [door for door in DOORS if door != "step"]


@pytest.mark.parametrize("door", DOORS_WITH_KERNELS)
@pytest.mark.parametrize("version", [(0, 11, 1), (0, 13, 0)], ids=["older", "newer"])
@pytest.mark.parametrize(("backend", "other"), [("mosaic_gpu", "None"), ("mosaic_gpu_interpret", "'interpret'")])
def test_another_jax_is_refused(backend, other, version, door, monkeypatch):
    name = ".".join(map(str, version))
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(jax, "__version__", name)
    versions = "jax >= 0.11.2 and < 0.13" + (", which needs Python >= 3.12" if version < (0, 12) else "")
    message = f"backend is '{backend}' and jax is {name}, expected {versions}, or backend {other}"
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(DOORS[door](backend), *HALF)


@pytest.mark.parametrize("version", [(0, 11, 1), (0, 13, 0)], ids=["older", "newer"])
@pytest.mark.parametrize("backend", ["mosaic_gpu", "mosaic_gpu_interpret"])
def test_a_step_needs_no_such_jax(backend, version, monkeypatch):
    """It has no Mosaic GPU kernel."""
    monkeypatch.setattr(jax, "__version_info__", version)
    h, _ = jax.eval_shape(DOORS["step"](backend), *HALF)
    assert (h.shape, h.dtype) == ((1, 1, 256), "bfloat16")


def for_device(kind):
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(kind, None, "gpu")))


@pytest.mark.parametrize("door", DOORS_WITH_KERNELS)
@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA B200", "NVIDIA GeForce RTX 4090"])
def test_another_gpu_is_refused(kind, door, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", MOSAIC_GPU_JAX[0])
    with pytest.raises(ValueError, match=r"^backend is") as caught, for_device(kind):
        jax.eval_shape(DOORS[door]("mosaic_gpu"), *HALF)
    expected = "a Hopper GPU (H100, H200, H800, H20, GH200) or backend 'triton'"
    assert str(caught.value) == f"backend is 'mosaic_gpu' and the GPU is a {kind}, expected {expected}"


@pytest.mark.parametrize(
    "kind", ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H800", "NVIDIA H20", "NVIDIA GH200 480GB", "of the future"]
)
def test_hopper_and_what_is_not_known_are_taken(kind, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", MOSAIC_GPU_JAX[0])
    with for_device(kind):
        assert requested_backend("mosaic_gpu") == "mosaic_gpu"


def test_float32_runs_on_triton(monkeypatch):
    """Which needs no newer jax but for the name of the backend."""
    monkeypatch.setattr(jax, "__version_info__", MOSAIC_GPU_JAX[0])
    inputs = {name: jax.ShapeDtypeStruct(x.shape, "float32") for name, x in zip("qkvif", HALF, strict=True)}
    for name in ("triton", "mosaic_gpu"):
        assert spec_of(inputs, fused(), backend=name).mosaic_gpu == ()
        assert jax.eval_shape(functools.partial(mlstm_chunkwise, config=fused(), backend=name), **inputs).shape == inputs["v"].shape


@needs_jax
@pytest.mark.parametrize("door", DOORS)
def test_a_cpu_is_refused_when_lowered(door):
    with pytest.raises(ValueError, match=r"^backend is 'mosaic_gpu', whose kernels are for GPUs, and the computation is lowered"):
        jax.jit(DOORS[door]("mosaic_gpu")).trace(*HALF).lower(lowering_platforms=("cpu",))


@needs_jax
def test_a_step_runs_its_triton_kernel():
    x = small_inputs()
    found, expected = (a_step(*x, backend=backend) for backend in ("mosaic_gpu_interpret", "interpret"))
    for actual, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(np.asarray(actual), np.asarray(wanted))
    with for_device("NVIDIA H200"):
        text = jax.jit(functools.partial(a_step, backend="mosaic_gpu")).trace(*HALF).lower(lowering_platforms=("cuda",)).as_text()
    assert (MOSAIC_CALL in text, CUSTOM_CALL_TARGET in text) == (False, True)


@needs_jax
def test_an_export_for_cuda_is_made_and_read_without_a_gpu():
    pytest.importorskip("flatbuffers")
    run = functools.partial(mlstm_chunkwise, backend="mosaic_gpu", config=fused())
    exported = export(run, *HALF, platform="cuda", device_kind="NVIDIA H200")
    text = exported.mlir_module()
    assert (MOSAIC_CALL in text, CUSTOM_CALL_TARGET in text) == (True, False)
    loaded = jax.export.deserialize(exported.serialize(vjp_order=1))
    assert MOSAIC_CALL in loaded.vjp().mlir_module()
    assert len(loaded.vjp().out_avals) == 5


# ---------------------------------------------------------------- compiled, without a GPU


H200 = compile_report.DEVICES["H200"]
ROWS = [(row["DHQK"], row["DHHV"]) for row in tuned_rows(H200.kind) if row["dtype"] == "bfloat16"]


def max_spill_bytes(stage, spec):
    """None are in a loop over steps, but for addresses of barriers where a CTA makes all gradients of a chunk.

    There, what is the same for all chunks does not fit beside the accumulators, and comes from local memory once a chunk.
    """
    return 112 if stage == "parallel_bw_dQKV" and mosaic_gpu_by_chunk(spec.problem) else 64


# As the installed jax compiles, and as nvJitLink does, which jax takes from 0.12 on where it finds the library: see compile_report.
NVJITLINK = pytest.mark.skipif(MOVES_REGISTERS, reason="jax < 0.12 compiles with ptxas")
COMPILERS = ["installed", pytest.param("nvjitlink", marks=NVJITLINK)]


def check_messages(kernel, usage):
    """No product waits for the one before (C7512), and no setmaxnreg is ignored (C7504).

    C7519 says that ptxas put a fence before a product.
    """
    assert set(usage.messages) <= {"C7519"}, (kernel.name, usage.messages)
    assert not usage.wgmma_serialized, kernel.name


@needs_jax
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(
    ("heads", "variant"),
    [
        *(pytest.param(heads, variant, id=f"{heads[0]}_{heads[1]}-{variant}") for heads in ROWS for variant in ("exp", "BTNH")),
        *(pytest.param((64, 128), variant, id=f"64_128-{variant}") for variant in ("packed", "sigmoid", "unnormalised")),
    ],
)
def test_the_kernels_compile_at_the_tuned_tiles(heads, variant, compiler):
    config = KernelConfig(fused_min_heads=1)
    call = compile_report.Call(H200, *heads, "bfloat16", config=config, direction="fwbw", variant=variant, backend="mosaic_gpu")
    call = dataclasses.replace(call, relocatable=compiler == "nvjitlink")
    spec = call.spec()
    expected = {name for name, _ in spec.mosaic_gpu} & {*spec.stages}
    if not expected:
        pytest.skip("no stage has a Mosaic GPU kernel for these heads")
    kernels = compile_report.mosaic_gpu_kernels(call)
    assert {kernel.name for kernel, _ in kernels} - HELPERS == expected
    for kernel, usage in kernels:
        assert kernel.cause == ""
        check_messages(kernel, usage)
        assert max(usage.spill_store_bytes, usage.spill_load_bytes) <= max_spill_bytes(kernel.name, spec), (kernel.name, usage)
        assert usage.shared_bytes <= H200.shared_bytes
        assert (usage.wgmma > 0) == (kernel.name not in {"chunk_gates", *HELPERS})


COMPILED_RECURRENCES = {
    "7b": Recurrences(shape=(8, 8, 8192, 256, 512), L=256, tiles=StageConfig(siz_b_DHQK=256, num_stages=4), layout="BTNH"),
    "7b_states": Recurrences(shape=(8, 8, 8192, 256, 512), L=256, tiles=StageConfig(siz_b_DHQK=256, num_stages=4), alone=True),
    "b1": Recurrences(shape=(1, 8, 8192, 256, 512), L=256, tiles=StageConfig(siz_b_DHQK=128, num_stages=6)),
    "tfla": Recurrences(shape=(8, 16, 8192, 128, 256), tiles=StageConfig(siz_b_DHQK=256, num_stages=4), delta=True),
    "tfla_stored_BTNH": Recurrences(
        shape=(8, 16, 8192, 128, 256), tiles=StageConfig(siz_b_DHQK=256, num_stages=4), delta=True, alone=True, layout="BTNH"
    ),
    "64_128": Recurrences(shape=(8, 32, 8192, 64, 128), tiles=StageConfig(siz_b_DHQK=64, num_stages=6), delta=True),
    "few_heads": Recurrences(shape=(1, 16, 8192, 128, 256), tiles=StageConfig(siz_b_DHQK=64, num_stages=4), delta=True),
}


@needs_jax
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name", COMPILED_RECURRENCES)
def test_weighted_recurrences_compile(name, compiler):
    """Weighted operands come from registers, of which there are enough, and products need not wait for each other."""
    call = dataclasses.replace(COMPILED_RECURRENCES[name], relocatable=compiler == "nvjitlink")
    assert STAGES["recurrent_bw_dC"].mosaic_gpu.takes(call.tiles, call.problem)
    [(kernel, usage)] = compile_report.mosaic_gpu_kernels(call)
    assert kernel.cause == ""
    check_messages(kernel, usage)
    assert (usage.spill_store_bytes, usage.spill_load_bytes) == (0, 0)
    assert usage.shared_bytes <= H200.shared_bytes
    assert usage.wgmma > 0


@needs_jax
@needs_compiler
@pytest.mark.slow
def test_the_compile_report_has_both_kinds_of_kernels():
    config = KernelConfig(fused_min_heads=1)
    rows = list(compile_report.report("H200", [(128, 256)], ["bfloat16"], config=config, backend="mosaic_gpu", stages=["recurrent_fw_H"]))
    [row] = rows
    assert row.cause == ""
    assert row.config.keys() == {"siz_b_LKV", "siz_b_DHHV", "siz_b_loop", "num_warps", "num_stages"}
    assert row.chunk_size == row.config["siz_b_LKV"]
    assert row.num_warps == row.config["num_warps"] + 4  # and the warps that copy
    [cause] = {row.cause for row in compile_report.report("A100", [(128, 256)], ["bfloat16"], backend="mosaic_gpu")}
    assert "expected a Hopper GPU" in cause


# ---------------------------------------------------------------- on a GPU


SECONDS = 300  # of a check: a kernel that waits for ever hangs its process


@needs_jax
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("heads", [(64, 128), (128, 128), (256, 256)])
def test_gradients_trace_in_every_mode(heads, x64):
    K, V = heads
    shapes = [(1, 2, 256, D) for D in (K, K, V)] + [(1, 2, 256)] * 2
    dtypes = ["bfloat16"] * 3 + ["float32"] * 2
    run = functools.partial(mlstm_chunkwise, backend="mosaic_gpu_interpret", config=fused(), recompute_states_in_bw=True)
    with (
        jax.enable_x64(x64),
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        mock.patch.object(recurrent_bw_dC, "MOSAIC_GPU_MIN_CTAS", 1),
    ):
        x = [jax.ShapeDtypeStruct(*y) for y in zip(shapes, dtypes, strict=True)]
        found = jax.eval_shape(lambda *x: jax.vjp(run, *x)[1](jnp.ones(shapes[2], jnp.bfloat16)), *x)
    assert [(y.shape, str(y.dtype)) for y in found] == list(zip(shapes, dtypes, strict=True))


def stages_on_mosaic_gpu(B, NH, S, DHQK, DHHV, **stages):
    config = config_for(DHQK, DHHV, S, jnp.dtype("bfloat16"), device_kind="NVIDIA H200", explicit=KernelConfig(fused_min_heads=1, **stages))
    problem = make_problem((B, NH, S, DHQK), DHHV, config.L, pad_heads=True)
    return set(dict(CallSpec(problem, config, jnp.dtype("bfloat16"), Normaliser(), backend="mosaic_gpu").mosaic_gpu))


def tiles(**fields):
    return StageConfig(mosaic_gpu=StageConfig(**fields))


WIDE_SCAN = dict(siz_b_LKV=64, siz_b_DHHV=256, siz_b_loop=256, num_stages=1)


@pytest.mark.parametrize(
    ("stage", "config"),
    [
        ("parallel_bw_dQKV", tiles(num_stages=2)),  # an item waits for three steps at once
        ("recurrent_bw_dC", tiles(num_stages=1)),  # a stage is free when the next one's product runs
        ("recurrent_bw_dC", StageConfig(num_splits=2)),
        ("recurrent_fw_H", tiles(**WIDE_SCAN, num_warps=16)),  # too few registers
        ("recurrent_fw_H", tiles(**WIDE_SCAN, num_warps=4)),
    ],
    ids=["two_stages_of_dQKV", "one_stage_of_dC", "splits_of_dC", "four_warpgroups", "one_warpgroup"],
)
def test_tiles_that_a_kernel_cannot_have_run_on_triton(stage, config):
    shape = 8, 8, 8192, 256, 512
    assert stages_on_mosaic_gpu(*shape) == ALL
    assert stage not in stages_on_mosaic_gpu(*shape, **{stage: config})


@pytest.mark.parametrize(
    ("heads", "tile", "rows"), [(64, 256, (256, 256)), (16, 256, (128, 256)), (8, 128, (64, 128)), (4, 64, (64, 64)), (3, 64, (64, 64))]
)
def test_few_heads_have_blocks_of_few_rows(heads, tile, rows):
    """Of one recurrence, and of two in a launch. Rows are no choice where no more divide the head."""
    facts, p = STAGES["recurrent_bw_dC"].mosaic_gpu, make_problem((1, heads, 8192, 256), 512, 256, pad_heads=True)
    assert facts.heuristic(p) == StageConfig(siz_b_DHQK=tile, num_stages=4)
    assert facts.takes(facts.heuristic(p), p)
    assert tuple(mosaic_gpu_rows_of(facts.heuristic(p), p, n) for n in (1, 2)) == rows
    narrow = make_problem((1, 512, 8192, 192), 128, 128, pad_heads=True)
    assert mosaic_gpu_rows_of(StageConfig(siz_b_DHQK=256), narrow, 2) == 192
    assert mosaic_gpu_rows_of(StageConfig(siz_b_DHQK=128), narrow, 2) == 64


def test_tiles_of_h_count_where_delta_is_computed():
    facts, tiles = STAGES["recurrent_bw_dC"].mosaic_gpu, [StageConfig(siz_b_DHQK=128, num_stages=n) for n in (4, 5, 6)]
    with_h, without = (make_problem((8, 16, 8192, 128), 256, L, pad_heads=True) for L in (128, 256))
    assert [facts.takes(x, with_h) for x in tiles] == [True, False, False]
    assert [facts.takes(x, without) for x in tiles] == [True, True, True]
    for heads in (16, 128, 512):
        for DHQK in (64, 128):
            p = make_problem((1, heads, 8192, DHQK), 2 * DHQK, 128, pad_heads=True)
            assert facts.takes(facts.heuristic(p), p) or recurrent_bw_dC.mosaic_gpu_ctas(64, p) * 2 < recurrent_bw_dC.MOSAIC_GPU_MIN_CTAS


def test_recurrences_of_few_heads_run_on_triton():
    """Two heads of 256/512 are 64 CTAs."""
    assert "recurrent_bw_dC" in stages_on_mosaic_gpu(1, 3, 8192, 256, 512)
    assert "recurrent_bw_dC" not in stages_on_mosaic_gpu(1, 2, 8192, 256, 512)
    wide = dict(recurrent_bw_dC=tiles(siz_b_DHQK=256, num_stages=4))
    assert "recurrent_bw_dC" not in stages_on_mosaic_gpu(1, 8, 8192, 256, 512, **wide)


def test_heads_beyond_the_grid_run_on_triton():
    heads, always = (64, 128), {"chunk_gates"}
    assert stages_on_mosaic_gpu(1, 32_767, 64, *heads) == always | SCAN | {"recurrent_bw_dC"}
    assert stages_on_mosaic_gpu(1, 32_768, 64, *heads) == always | SCAN
    assert stages_on_mosaic_gpu(1, 65_536, 64, *heads) == always
    assert stages_on_mosaic_gpu(1, 32_767, 8192, *heads, recurrent_fw_H=StageConfig(num_splits=4)) == always | {"recurrent_bw_dC"}


def test_three_stages_are_too_few_where_a_cta_makes_a_chunk():
    """A step holds v, dC, C and dh at once."""
    shape = 8, 16, 8192, 128, 256
    assert "parallel_bw_dQKV" in stages_on_mosaic_gpu(*shape, parallel_bw_dQKV=tiles(num_stages=4))
    assert "parallel_bw_dQKV" not in stages_on_mosaic_gpu(*shape, parallel_bw_dQKV=tiles(num_stages=3))


@pytest.mark.parametrize("stage", sorted(ALL))
def test_a_row_of_a_config_keeps_the_tiles(stage):
    config = KernelConfig(chunk_size=64, **{stage: tiles(num_stages=3)})
    found = config_from_row(config.as_row()).stage(stage).mosaic_gpu
    assert found == StageConfig(**{field: getattr(config.stage(stage).mosaic_gpu, field) for field in STAGES[stage].mosaic_gpu.search})


# Stages that run on Mosaic GPU with two heads and the fused scan, at the least, by DHQK and DHHV.
OF_HEADS = dict.fromkeys([(256, 512), (256, 256), (128, 256), (128, 128), (64, 128), (512, 512)], SCAN | {"parallel_bw_dQKV"})


def in_process(check, *arguments):
    """Runs a function of this module in a process of its own."""
    tests = Path(__file__).parent
    path = os.pathsep.join(map(str, [tests, tests.parent, tests.parent / "benchmarks", os.environ.get("PYTHONPATH", "")]))
    env = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-c", f"import test_mosaic_gpu\ntest_mosaic_gpu.{check}(*{arguments})\nprint('all ran')"]
    child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        output, _ = child.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, _ = child.communicate()
        pytest.fail(f"{check}{arguments} does not end: {output[-4000:]}")
    assert child.returncode == 0, output[-4000:]
    assert output.rstrip().endswith("all ran")


def test_a_check_that_does_not_end_is_stopped(monkeypatch):
    monkeypatch.setitem(globals(), "SECONDS", 0.1)
    with pytest.raises(pytest.fail.Exception, match=r"layouts_on_a_gpu\(\) does not end"):
        in_process("layouts_on_a_gpu")


def case_on_a_gpu(name):
    check_case(name, "mosaic_gpu")


def mosaic_stages(B, NH, S, DHQK, DHHV, config=None, **options):
    """Of a call in bfloat16: the stages that run on Mosaic GPU."""
    shapes = jax.eval_shape(lambda: random_inputs(0, B, NH, 1, DHQK, DHHV, dtype="bfloat16"))
    inputs = shapes | {name: jax.ShapeDtypeStruct((B, NH, S, *shapes[name].shape[3:]), shapes[name].dtype) for name in "qkvif"}
    spec = spec_of(inputs, config, backend="mosaic_gpu", **options)
    return {name for name, _ in spec.mosaic_gpu} & {*spec.stages}


def recurrences_on_a_gpu():
    for recurrences in RECURRENCES.values():
        recurrences.check(Lowering.MOSAIC_GPU)


def vector_states_of_many_heads_on_a_gpu():
    """More than the second and the third axis of a grid of CUDA have CTAs."""
    heads, NC = MOSAIC_GPU_HEADS + 2, 3
    call = StageCall(make_problem((1, heads, 64 * NC, 128), 128, 64, pad_heads=False), StageConfig(), None, Lowering.MOSAIC_GPU)
    test_gates.check_vector_states(functools.partial(vector_states, call=call), heads, NC, 128, False)


def tuned_config_on_a_gpu(S, *heads):
    """Outputs and all eight gradients against float64, with the bounds and the shapes of test_gpu.py; equal bits when computed again."""
    scan, shape = KernelConfig(fused_min_heads=1), (1, 2, S, *heads)
    assert mosaic_stages(*shape, scan) >= OF_HEADS[heads], shape
    for options in (dict(config=scan), dict(config=scan, recompute_states_in_bw=False), dict(config=None)):
        if not mosaic_stages(*shape, **options):
            continue
        outputs, gradients = test_gpu.errors_of("bfloat16", *shape, backend="mosaic_gpu", **options)
        assert_below(outputs, test_gpu.FORWARD["bfloat16"])
        assert_below(gradients, test_gpu.BACKWARD["bfloat16"])


def many_chunks_on_a_gpu(DHQK, DHHV):
    """More chunks of 128 steps than SMs: CTAs that own a chunk take another one after it."""
    shape, config = (1, 20, 1024, DHQK, DHHV), KernelConfig(fused_min_heads=1)
    assert mosaic_stages(*shape, config) >= SCAN | {"parallel_bw_dQKV"}
    outputs, gradients = test_gpu.errors_of("bfloat16", *shape, backend="mosaic_gpu", config=config)
    assert_below(outputs, test_gpu.FORWARD["bfloat16"])
    assert_below(gradients, test_gpu.BACKWARD["bfloat16"])


def neighbours_on_a_gpu():
    check_neighbours("mosaic_gpu", (2, 3, 512, 256, 512))


def long_sequences_on_a_gpu():
    for DHQK, DHHV in ((128, 256), (256, 512)):
        test_gpu.check_forward("bfloat16", 1, 4, 8192, DHQK, DHHV, backend="mosaic_gpu", config=KernelConfig(fused_min_heads=1))


def outputs_and_gradients_on_a_gpu(**options):
    """A jitted function of the five sequences and the cotangent of h."""

    def both(dh, *x):
        h, vjp = jax.vjp(functools.partial(mlstm_chunkwise, backend="mosaic_gpu", **options), *x)
        return h, *vjp(dh)

    return jax.jit(both)


def assert_same_bits(a, b):
    for x, y in zip(a, b, strict=True):
        assert np.array_equal(np.asarray(x.astype("float32")), np.asarray(y.astype("float32")))


def packed_resets_on_a_gpu():
    """Steps after the start of a segment have the same bits whatever is before it; so do the gradients of those before, of what follows."""
    S, start = 1024, 700
    x = list(random_inputs(7, 2, 4, S, 256, 512, dtype="bfloat16", states=False).values())
    other = list(random_inputs(8, 2, 4, S, 256, 512, dtype="bfloat16", states=False).values())
    draw = np.random.default_rng(0)
    dh, other_dh = (jnp.asarray(draw.normal(size=x[2].shape), "bfloat16") for _ in range(2))
    ids = jnp.broadcast_to((jnp.arange(S) >= start).astype("int32"), (2, S))
    run = outputs_and_gradients_on_a_gpu(config=KernelConfig(fused_min_heads=1), segment_ids=ids)

    def joined(before, after):
        return jnp.concatenate([before[:, :, :start], after[:, :, start:]], axis=2)

    base = run(dh, *x)
    # The gates stay as they are: a chunk's stabilisers are of both segments and cancel but for their rounding.
    changed = [joined(a, b) for a, b in zip(other[:3], x[:3], strict=True)] + x[3:]
    assert_same_bits([y[:, :, start:] for y in base[:4]], [y[:, :, start:] for y in run(joined(other_dh, dh), *changed)[:4]])
    changed = [joined(a, b) for a, b in zip(x[:3], other[:3], strict=True)] + x[3:]
    assert_same_bits([y[:, :, :start] for y in base[:4]], [y[:, :, :start] for y in run(joined(dh, other_dh), *changed)[:4]])


def extremes_on_a_gpu():
    """Gates anywhere in [-1e4, 1e4], and infinite ones."""
    run, draw = outputs_and_gradients_on_a_gpu(config=KernelConfig(fused_min_heads=1)), np.random.default_rng(0)
    q, k, v, i, _ = random_inputs(9, 2, 4, 1000, 256, 512, dtype="bfloat16", states=False).values()
    for values in ([-1e4, 1e4], [-1e4, 0.0, 1e4], [-1e4, -30.0, 30.0, 1e4, -np.inf]):
        gates = [jnp.asarray(draw.choice(values, size=i.shape), "float32") for _ in range(2)]
        for x in run(jnp.ones_like(v), q, k, v, *gates):
            assert bool(jnp.isfinite(x.astype("float32")).all()), values


def repeats_on_a_gpu(B, NH, S, DHQK, DHHV):
    """50 calls."""
    keys, rows = jax.random.split(jax.random.key(0), 6), (B, NH, S)
    q, k = (jax.random.normal(key, (*rows, DHQK), "bfloat16") for key in keys[:2])
    v, dh = (jax.random.normal(key, (*rows, DHHV), "bfloat16") for key in keys[2:4])
    i, f = jax.random.normal(keys[4], rows), jax.random.normal(keys[5], rows) + 4.0
    assert mosaic_stages(*rows, DHQK, DHHV) == ALL - ({"parallel_bw_dP"} if DHQK in (64, 128) else set())
    run = outputs_and_gradients_on_a_gpu()
    first = run(dh, q, k, v, i, f)
    same = jax.jit(lambda a, b: jnp.stack([jnp.array_equal(x, y, equal_nan=True) for x, y in zip(a, b, strict=True)]))
    for call in range(50):
        assert same(run(dh, q, k, v, i, f), first).all(), call


def layouts_on_a_gpu():
    """The kernels multiply the same tiles; XLA orders the sums outside of them by the layout."""
    x = list(random_inputs(10, 2, 4, 1024, 256, 512, dtype="bfloat16", states=False).values())
    dh = jnp.asarray(np.random.default_rng(0).normal(size=x[2].shape), "bfloat16")
    config = KernelConfig(fused_min_heads=1)
    expected = outputs_and_gradients_on_a_gpu(config=config)(dh, *x)
    found = outputs_and_gradients_on_a_gpu(config=config, layout="BTNH")(swapped(dh), *map(swapped, x))
    for actual, wanted in zip(map(swapped, found), expected, strict=True):
        assert_close(actual, wanted.astype("float32"), 2.0**-8 + 4 * tolerance("float32", 1024 + 256))


GPU_CHECKS = [
    *((case_on_a_gpu, name) for name in CASES),
    *((tuned_config_on_a_gpu, S, *heads) for heads in OF_HEADS for S in (500, 2048)),
    (recurrences_on_a_gpu,),
    (vector_states_of_many_heads_on_a_gpu,),
    *((many_chunks_on_a_gpu, *heads) for heads in ((64, 128), (128, 128), (128, 256))),
    (neighbours_on_a_gpu,),
    (long_sequences_on_a_gpu,),
    (packed_resets_on_a_gpu,),
    (extremes_on_a_gpu,),
    *((repeats_on_a_gpu, *shape) for shape in ((8, 8, 8192, 256, 512), (8, 16, 8192, 128, 256), (8, 32, 8192, 64, 128))),
    (layouts_on_a_gpu,),
]


@needs_jax
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("check", "arguments"),
    [pytest.param(check.__name__, arguments, id="-".join(map(str, (check.__name__, *arguments)))) for check, *arguments in GPU_CHECKS],
)
def test_on_a_gpu(check, arguments):
    kind = next(device.device_kind for device in jax.devices() if device.platform == "gpu")
    if compute_capability(kind) != 90:
        pytest.skip(f"the Mosaic GPU kernels are for Hopper, and this is a {kind}")
    in_process(check, *arguments)
