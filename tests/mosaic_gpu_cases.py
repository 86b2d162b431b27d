"""Calls and recurrences that the tests of the Mosaic GPU kernels share: interpreted, compiled and
on a GPU."""

import dataclasses
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from call_checks import (
    BTNH,
    PROMISED,
    STORED,
    UNNORMALISED,
    check_call,
)
from oracle import (
    array,
    cotangents_for,
    for_device,
    tolerance,
)
from stage_calls import (
    KernelOptions,
    Launch,
    Lowering,
    ScaledRows,
    check_stage,
    gpu_of,
    largest_block,
    make_problem,
    run_stage,
    tiles_class,
)

import mlstm_pallas
from mlstm_pallas import KernelConfig
from mlstm_pallas.planning.call_spec import SMALL

FUSED_STAGES = {"parallel_fw_P", "recurrent_fw_H"}


def skip_unless_hopper():
    gpu = next(gpu_of(device) for device in jax.devices() if device.platform == "gpu")
    if not gpu.hopper:
        pytest.skip(f"the Mosaic GPU kernels are for Hopper, and this is a {gpu.name}")


# Literally: a kernel that is lost from the table of dispatch.py is missed here.
ALL = {
    *("chunk_gates", "recurrent_fw_C", "parallel_fw_H", "parallel_fw_P", "recurrent_fw_H"),
    *("parallel_bw_dP", "recurrent_bw_dC", "parallel_bw_dQKV", "chunk_gradients"),
}
RACE = "RACE DETECTED"  # which GPU interpret mode prints


def fused(num_splits=None, **tiles):
    """The fused scan with these tiles of its Mosaic GPU kernel; in the backward pass chunks of 128,
    and states in CTAs of two warpgroups."""
    return KernelConfig(
        chunk_size=128,
        fused=True,
        num_splits=num_splits,
        mosaic_gpu_recurrent_fw_H=dict(num_stages=2) | tiles,
        mosaic_gpu_recurrent_bw_dC=dict(state_columns=128),
    )


def materialised(num_splits=None, chunk_size=128):
    """Materialised states."""
    splits = dict(num_splits=num_splits) if num_splits else {}
    return KernelConfig(
        chunk_size=chunk_size,
        fused=False,
        mosaic_gpu_recurrent_fw_C=splits,
        mosaic_gpu_recurrent_bw_dC=splits,
    )


def wide(num_splits=None):
    """Materialised states, in chunks of 256."""
    return materialised(num_splits, chunk_size=256)


def stages_on_mosaic_gpu(spec):
    """The stages of a call's plan that run on Mosaic GPU, in one pass or in both."""
    launches = [*spec.plan.forward.items(), *spec.plan.backward.items()]
    return {name for name, x in launches if x.lowering.folder == "mosaic_gpu"} - {*SMALL}


def planned(B, NH, S, DHQK, DHV, **options):
    """The plan of a call, for an H200 where there is no GPU; and its stages that run on Mosaic GPU,
    in one pass or in both."""
    gpu = None if jax.default_backend() == "gpu" else "NVIDIA H200"
    result = mlstm_pallas.plan(B=B, NH=NH, S=S, DHQK=DHQK, DHV=DHV, gpu=gpu, **options)
    return result, {x.stage for x in result.launches if x.lowering.startswith("mosaic_gpu")}


def mosaic_stages(*shape, **options):
    """The stages of a call of this shape that run on Mosaic GPU."""
    return planned(*shape, backend="mosaic_gpu", **options)[1]


NARROW = dict(shape=(1, 2, 256, 128, 128))


def small_cotangents(*of):
    return [2.0**-10 * x for x in cotangents_for(*of)]


GATES, NO_CHUNKS = dict(recipe=dict(f_shift=6.0)), dict(stages=ALL - {"parallel_bw_dQKV"})


def case(config=None, **call):
    """Arguments of check_call, and the stages that run on Mosaic GPU at the least."""
    default = dict(shape=(1, 1, 256, 256, 256), dtype="bfloat16", stages=ALL)
    return SimpleNamespace(config=config or fused(), **default | call)


CASES = {
    # Chunks whose gamma is not nearly 0: 64 steps keep exp(-0.16) of the state.
    "states_BTNH": case(**GATES, **BTNH),
    "heads": case(shape=(2, 2, 256, 256, 256), **BTNH),
    "float16": case(dtype="float16"),
    "reverse_lengths_of_one_block": case(
        shape=(2, 1, 256, 64, 128), lengths=np.array([200, 0]), reverse=True
    ),
    "padded": case(shape=(1, 1, 201, 250, 200), **BTNH),
    "resets": case(recipe=dict(resets=True)),
    # A CTA makes all gradients of a chunk, to which dn comes from the next one. r dh falls below
    # the normal numbers of float16.
    "one_block_of_rows_stored_float16": case(
        shape=(1, 2, 256, 64, 128), dtype="float16", draw=small_cotangents, **GATES, **STORED
    ),
    "three_blocks_of_rows": case(shape=(1, 2, 256, 192, 128), **NO_CHUNKS),
    "splits": case(config=fused(2), **NARROW),
    "materialised": case(config=materialised(), shape=(1, 2, 256, 64, 192), **GATES),
    "two_launches": case(config=fused(state_rows=64), **NARROW),
    "reverse": case(shape=(1, 1, 201, 128, 128), reverse=True),
    "reverse_float16": case(
        shape=(1, 1, 200, 64, 128), dtype="float16", draw=small_cotangents, reverse=True
    ),
    "reverse_wide": case(config=wide(), shape=(1, 1, 300, 128, 256), reverse=True, **NO_CHUNKS),
    # Tiles that reach beyond the heads, or have three or five parts of a swizzle.
    "heads_of_96_and_192": case(config=fused(num_stages=3), shape=(1, 2, 131, 96, 192), **BTNH),
    "heads_of_160_and_320": case(shape=(1, 1, 131, 160, 320), **BTNH),
}

# With "states_BTNH", "one_block_of_rows_stored_float16" and "reverse_lengths_of_one_block" each
# pair of features comes once: schedule, in one split or in two; layout; stored states; direction;
# lengths; segments; initial states; gate, with normalisation; and heads, with the schedule and with
# the splits. Heads are of three kinds, by the kernels of their gradients: a CTA makes a chunk;
# there are more rows, or longer chunks; tiles reach beyond the heads. A GPU has CASES and these,
# the interpreter some of them.
NO_STATES, NO_M = dict(recipe=dict(states=False)), dict(recipe=dict(m_initial=False))
PAIRS = {
    "reverse_heads_of_96_in_splits_stored_lengths_packed_BTNH": case(
        config=fused(2, num_stages=3),
        shape=(1, 2, 196, 96, 192),
        lengths=np.array([131]),
        packed=True,
        reverse=True,
        **NO_STATES,
        **UNNORMALISED,
        **STORED,
        **BTNH,
    ),
    "wide_in_splits_packed": case(
        config=wide(2),
        shape=(1, 1, 300, 128, 256),
        packed=True,
        **NO_STATES,
        **UNNORMALISED,
        **NO_CHUNKS,
    ),
    "reverse_heads_of_96_materialised_float16": case(
        config=materialised(),
        shape=(1, 2, 131, 96, 96),
        dtype="float16",
        draw=small_cotangents,
        reverse=True,
        **NO_M,
        **UNNORMALISED,
    ),
    "reverse_materialised_in_splits_stored_lengths_packed_BTNH": case(
        config=materialised(2),
        shape=(1, 2, 256, 128, 128),
        lengths=np.array([200]),
        packed=True,
        reverse=True,
        **STORED,
        **BTNH,
    ),
    "padded_in_splits_and_two_launches": case(
        config=fused(2, state_rows=128), shape=(1, 1, 201, 250, 200)
    ),
    "three_blocks_of_rows_materialised_stored_lengths_packed_BTNH": case(
        config=materialised(),
        shape=(1, 2, 256, 192, 128),
        lengths=np.array([200]),
        packed=True,
        **NO_STATES,
        **STORED,
        **BTNH,
        **NO_CHUNKS,
    ),
    "reverse_lengths_packed_BTNH": case(
        shape=(2, 2, 256, 64, 128),
        lengths=np.array([130, 0]),
        packed=True,
        reverse=True,
        **NO_STATES,
        **UNNORMALISED,
        **BTNH,
    ),
    "reverse_materialised_in_splits": case(
        config=materialised(2), reverse=True, **NO_STATES, **UNNORMALISED
    ),
}


def check_case(name, backend):
    """Outputs and the gradients of all inputs of a case against float64."""
    call = dict(seed=5, packed=False, backend=backend) | vars((CASES | PAIRS)[name])
    stages, config, (B, _, S, DHQK, _) = call.pop("stages"), call["config"], call["shape"]
    if call.pop("packed"):  # segments that begin inside a chunk and inside a tile, one over two
        call["segment_ids"] = np.repeat([[3, 0, 7]] * B, [100, 29, S - 129], axis=1)
    of_plan = {name: call[name] for name in ("dtype", "config", "backend", *STORED) if name in call}
    plan, on_mosaic_gpu = planned(*call["shape"], **of_plan)
    chunk_per_cta = plan.chunk_size == 128 and DHQK <= 128
    of_plan = {x.stage for x in plan.launches}
    one, two = {"chunk_gradients"}, {"parallel_bw_dP", "parallel_bw_dQKV"}
    assert of_plan & (one | two) == (one if chunk_per_cta else two)
    assert on_mosaic_gpu >= stages & of_plan
    assert (plan.fused, plan.num_splits) == (config.fused, config.num_splits or 1)
    if call["dtype"] == "bfloat16":
        call["bounds"] = tolerance("bfloat16", S + DHQK), PROMISED["bfloat16"][1]
    check_call(**call)


RECURRENCE = "recurrent_bw_dC"


@dataclasses.dataclass(frozen=True)
class Recurrences:
    """A call of recurrent_bw_dC on Mosaic GPU; the operands come scaled, or with weights.

    rows, columns: of a block of the state, which may reach beyond it; None: the most rows, 256 or
      less, in as many columns as there can be.
    """

    shape: tuple = (1, 2, 256, 128, 128)  # B, NH, S, DHQK, DHV
    L: int = 128
    rows: int | None = None
    columns: int | None = None
    num_stages: int = 3
    num_splits: int = 1
    weighted: bool = True
    layout: str = "BNTH"
    states: bool = True  # an initial state and an initial dC, and whether the last ones are wanted
    alone: bool = False  # dC without C
    delta: bool = False  # whether delta is wanted
    dtype: str = "bfloat16"

    @property
    def problem(self):
        return make_problem(self.shape[:-1], self.shape[-1], self.L, pad_heads=False)

    def launch(self, lowering):
        kind, (*_, K, V) = tiles_class(RECURRENCE, "mosaic_gpu"), self.shape
        rows, columns = self.rows or largest_block(K), self.columns or (64 if V % 128 else 128)
        tiles = kind(rows, columns, self.num_stages, self.num_splits)
        assert tiles.supports(self.problem, KernelOptions(has_h=self.delta))
        return Launch(self.problem, tiles, None, lowering)

    def shapes(self):
        """q, dh, k, v, h, r, abar, gamma, the last dC, the initial C."""
        (B, NH, S, K, V), n = self.shape, self.problem.BNH
        a, b = ((B, S, NH, D) if self.layout == "BTNH" else (n, S, D) for D in (K, V))
        if not self.weighted:  # parallel_bw_dP writes scaled operands in one layout
            a = n, S, K
        floats = (n, S), (n, S), (n, self.problem.NC), (n, K, V), (n, K, V)
        dtypes = [self.dtype] * 5 + ["float32"] * 5
        return list(map(jax.ShapeDtypeStruct, (a, b, a, b, b, *floats), dtypes))

    def operands(self, q, dh, k, v, h, r, abar, gamma, dC_last, C_initial):
        """Those of the stage, and whether states are wanted."""
        r, abar = (r, abar) if self.weighted else (None, None)
        dC_last, C_initial = (dC_last, C_initial) if self.states else (None, None)
        return dict(
            queries=ScaledRows(q, r),
            matDeltaH=dh,
            scaGamma=gamma,
            matDeltaC_last=dC_last,
            keys=None if self.alone else ScaledRows(k, abar),
            matV=v,
            matC_initial=C_initial,
            matH=h if self.delta else None,
        ), dict(return_initial=self.states, return_last=self.states)

    def traced(self):
        """The jaxpr whose kernels tools/compile_report.py compiles."""

        def run(*x):
            operands, options = self.operands(*x)
            return run_stage(RECURRENCE, self.launch(Lowering.MOSAIC_GPU), **operands, **options)

        with for_device("NVIDIA H200"):
            return jax.make_jaxpr(run)(*self.shapes()).jaxpr

    def check(self, lowering):
        """The outputs against the plain form in float64."""
        draw = np.random.default_rng(0)
        draws = [draw.normal] * 5 + [draw.uniform] * 3 + [draw.normal] * 2
        x = zip(draws, self.shapes(), strict=True)
        operands, options = self.operands(*(array(drawn(size=y.shape), y.dtype) for drawn, y in x))

        def bound(path, dtype):
            """Roundings to the kernel dtype: of the weighted operand, and of the states that are
            stored. Those of terms are independent; of delta only the sums are rounded."""
            rounded = 0 if path == ".vecDelta" else self.weighted + path.endswith("_states")
            unit = float(jnp.finfo(self.dtype).eps) / 2
            return math.sqrt(rounded / 3) * unit + math.sqrt(self.problem.S) * 2.0**-24

        check_stage(RECURRENCE, self.launch(lowering), operands, bound, **options)


RECURRENCES = {
    "weighted": Recurrences(),
    "scaled_dC_alone_BTNH": Recurrences(weighted=False, alone=True, layout="BTNH"),
    "rows_of_128": Recurrences(shape=(1, 1, 512, 256, 128), L=256, rows=128, num_stages=6),
    "rows_of_192": Recurrences(shape=(1, 1, 256, 192, 128), L=64),
    "rows_of_256": Recurrences(shape=(1, 1, 512, 512, 128), L=256),
    "one_block_of_rows": Recurrences(shape=(1, 2, 64, 64, 128), L=64),
    "delta": Recurrences(shape=(1, 2, 256, 64, 128), delta=True),
    "delta_BTNH": Recurrences(shape=(2, 2, 256, 128, 256), layout="BTNH", delta=True),
    "delta_rows_of_64": Recurrences(rows=64, num_stages=2, delta=True),
    "delta_dC_alone": Recurrences(
        shape=(1, 1, 512, 128, 128), alone=True, states=False, delta=True
    ),
    "splits": Recurrences(
        shape=(1, 2, 512, 64, 64), L=64, num_stages=2, num_splits=4, layout="BTNH", delta=True
    ),
    "columns_of_64": Recurrences(shape=(1, 2, 128, 64, 192), L=64, states=False),
    # Three warpgroups; blocks beyond the columns, or beyond the rows.
    "columns_of_192": Recurrences(shape=(1, 2, 128, 96, 192), rows=96, columns=192, layout="BTNH"),
    "delta_beyond_the_columns": Recurrences(
        shape=(1, 2, 256, 96, 96), rows=96, columns=128, layout="BTNH", delta=True
    ),
    "beyond_the_rows": Recurrences(
        shape=(1, 2, 256, 160, 96), rows=96, columns=64, num_splits=2, delta=True
    ),
    "beyond_the_only_columns": Recurrences(shape=(1, 2, 256, 64, 64), rows=64, columns=128),
    "delta_scaled_float16": Recurrences(weighted=False, dtype="float16", delta=True),
}
