"""Calls and recurrences that the tests of the Mosaic GPU kernels share: interpreted, compiled and
on a GPU."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine import SMALL, Call, Ids, Lengths
from oracle import array, for_device
from relations import repeated, value
from stage_calls import (
    KernelSpec,
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
from table import KEPT, NT, PLAIN, chunkwise

import mlstm_pallas
from mlstm_pallas import KernelConfig
from mlstm_pallas.planning.call_spec import SMALL as SMALL_STAGES
from mlstm_pallas.problem.gpu import HOPPER

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


def of_scan(num_splits=None, chunk_size=128, **tiles):
    """The config of the fused scan with these tiles of its Mosaic GPU kernel; in the backward pass
    states in CTAs of two warpgroups."""
    return dict(
        chunk_size=chunk_size,
        fused=True,
        num_splits=num_splits,
        mosaic_gpu_recurrent_fw_H=dict(num_stages=2) | tiles,
        mosaic_gpu_recurrent_bw_dC=dict(state_columns=128),
    )


def of_states(num_splits=None, chunk_size=128):
    """The config of materialised states."""
    splits = dict(num_splits=num_splits) if num_splits else {}
    return dict(
        chunk_size=chunk_size,
        fused=False,
        mosaic_gpu_recurrent_fw_C=splits,
        mosaic_gpu_recurrent_bw_dC=splits,
    )


def fused(*args, **tiles):
    return KernelConfig(**of_scan(*args, **tiles))


def materialised(*args, **options):
    return KernelConfig(**of_states(*args, **options))


def stages_on_mosaic_gpu(spec):
    """The stages of a call's plan that run on Mosaic GPU, in one pass or in both."""
    launches = [*spec.plan.forward.items(), *spec.plan.backward.items()]
    return {name for name, x in launches if x.lowering.folder == "mosaic_gpu"} - {*SMALL_STAGES}


def mosaic_stages(B, NH, S, DHQK, DHV, **options):
    """The stages of a call that run on Mosaic GPU, in one pass or in both, for an H200 where there
    is no GPU."""
    gpu = None if jax.default_backend() == "gpu" else "NVIDIA H200"
    options = dict(backend="mosaic_gpu", gpu=gpu) | options
    plan = mlstm_pallas.plan(B=B, NH=NH, S=S, DHQK=DHQK, DHV=DHV, **options)
    return {x.stage for x in plan.launches if x.lowering.startswith("mosaic_gpu")}


class Case(NamedTuple):
    """stages: those that have to run on Mosaic GPU, with the schedule of the config."""

    call: Call
    kind: str
    stages: set


def case(config, S=256, heads=(256, 256), *steps, kind="model", without=(), B=1, NH=1, **options):
    """In bfloat16. Products of the gradients are in parallel_bw_dP and parallel_bw_dQKV, or of
    chunks of 128 steps with heads of 128 or less in chunk_gradients."""
    one = config["chunk_size"] == 128 and heads[0] <= 128
    others = {"parallel_bw_dP", "parallel_bw_dQKV"} if one else {"chunk_gradients"}
    others |= {"recurrent_fw_C", "parallel_fw_H"} if config["fused"] else FUSED_STAGES
    options = dict(dtype="bfloat16", config=config) | options
    call = chunkwise(S, heads, *steps, B=B, NH=NH, last=True, **options)
    return Case(call, kind, ALL - others - {*without})


def documents(S, B=1):
    """Documents that begin inside a chunk and inside a tile, one over two."""
    return Ids(((100, 29, S - 129),) * B)


F16, BACK, TWO = dict(dtype="float16"), dict(reverse=True), dict(NH=2)
NO_STATES, NO_M = dict(states=None), dict(states=("float32",) * 2)
DQKV = ["parallel_bw_dQKV"]
CASES = {
    # Chunks whose gamma is not nearly 0.
    "states_BTNH": case(of_scan(), kind="long", **NT),
    "heads": case(of_scan(), B=2, **TWO, **NT),
    "float16": case(of_scan(), **F16),
    "reverse_lengths_of_one_block": case(of_scan(), 256, (64, 128), Lengths((200, 0)), **BACK),
    "padded": case(of_scan(), 201, (250, 200), **NT),
    "resets": case(of_scan(), kind="any size"),
    # A CTA makes all gradients of a chunk, to which dn comes from the next one. r dh falls below
    # the normal numbers of float16.
    "one_block_of_rows_stored_float16": case(
        of_scan(), 256, (64, 128), **TWO, **F16, kind=SMALL, **KEPT
    ),
    "three_blocks_of_rows": case(of_scan(), 256, (192, 128), **TWO, without=DQKV),
    "splits": case(of_scan(2), 256, (128, 128), **TWO),
    "materialised": case(of_states(), 256, (64, 192), kind="long", **TWO),
    "two_launches": case(of_scan(state_rows=64), 256, (128, 128), **TWO),
    "reverse": case(of_scan(), 201, (128, 128), **BACK),
    "reverse_float16": case(of_scan(), 200, (64, 128), **F16, kind=SMALL, **BACK),
    "reverse_wide": case(of_states(chunk_size=256), 300, (128, 256), without=DQKV, **BACK),
    # Tiles that reach beyond the heads, or have three or five parts of a swizzle.
    "heads_of_96_and_192": case(of_scan(num_stages=3), 131, (96, 192), **TWO, **NT),
    "heads_of_160_and_320": case(of_scan(), 131, (160, 320), **NT),
}

# With "states_BTNH", "one_block_of_rows_stored_float16" and "reverse_lengths_of_one_block" each
# pair of features comes once: schedule, in one split or in two; layout; stored states; direction;
# lengths; segments; initial states; gate, with normalisation; and heads, with the schedule and with
# the splits. Heads are of three kinds, by the kernels of their gradients: a CTA makes a chunk;
# there are more rows, or longer chunks; tiles reach beyond the heads. A GPU has CASES and these,
# the interpreter some of them.
PAIRS = {
    "reverse_heads_of_96_in_splits_stored_lengths_packed_BTNH": case(
        of_scan(2, num_stages=3),
        196,
        (96, 192),
        *(documents(196), Lengths((131,))),
        **(TWO | BACK | NO_STATES | PLAIN | KEPT | NT),
    ),
    "wide_in_splits_packed": case(
        of_states(2, chunk_size=256),
        300,
        (128, 256),
        documents(300),
        without=DQKV,
        **(NO_STATES | PLAIN),
    ),
    "reverse_heads_of_96_materialised_float16": case(
        of_states(), 131, (96, 96), kind=SMALL, **(TWO | F16 | BACK | PLAIN | NO_M)
    ),
    "reverse_materialised_in_splits_stored_lengths_packed_BTNH": case(
        of_states(2),
        256,
        (128, 128),
        *(documents(256), Lengths((200,))),
        **(TWO | BACK | KEPT | NT),
    ),
    "padded_in_splits_and_two_launches": case(of_scan(2, state_rows=128), 201, (250, 200)),
    "three_blocks_of_rows_materialised_stored_lengths_packed_BTNH": case(
        of_states(),
        256,
        (192, 128),
        *(documents(256), Lengths((200,))),
        without=DQKV,
        **(TWO | NO_STATES | KEPT | NT),
    ),
    "reverse_lengths_packed_BTNH": case(
        of_scan(),
        256,
        (64, 128),
        *(documents(256, 2), Lengths((130, 0))),
        **(TWO | BACK | NO_STATES | PLAIN | NT),
    ),
    "reverse_materialised_in_splits": case(of_states(2), **(BACK | NO_STATES | PLAIN)),
}


def check_case(case, backend="mosaic_gpu"):
    """The values of a case, and on a GPU the bits of a second call."""
    call = case.call
    of_plan = {x: call.options[x] for x in KEPT if x in call.options}
    config = KernelConfig(**call.options["config"])
    stages = mosaic_stages(*call.shape, dtype=call.dtype, config=config, **of_plan)
    assert stages >= case.stages, case.stages - stages
    value(call, backend, [case.kind])
    if jax.default_backend() == "gpu":
        repeated(call, backend)


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
    cotangents: float = 1  # how large dh and the last dC are

    @property
    def problem(self):
        return make_problem(self.shape[:-1], self.shape[-1], self.L, pad_heads=False)

    def launch(self, lowering):
        kind, (*_, K, V) = tiles_class(RECURRENCE, "mosaic_gpu"), self.shape
        rows, columns = self.rows or largest_block(K), self.columns or (64 if V % 128 else 128)
        tiles = kind(rows, columns, self.num_stages, self.num_splits)
        assert tiles.supports(self.problem, KernelSpec(RECURRENCE, HOPPER, self.alone))
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
        small = functools.partial(draw.normal, 0, self.cotangents)
        draws = [draw.normal, small, *[draw.normal] * 3, *[draw.uniform] * 3, small, draw.normal]
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
    # r dh falls below the normal numbers.
    "weighted_float16": Recurrences(
        shape=(1, 2, 256, 64, 128), dtype="float16", cotangents=2.0**-15
    ),
}
