"""The kernel of every stage, interpreted, against the stage's plain jnp form in float64."""

import functools
import inspect

import compile_report
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_evaluator import in_numpy
from oracle import (
    array,
    call_shapes,
    for_device,
    in_float64,
    param,
    random_inputs,
    results_of,
    slow_param,
    swapped,
    tolerance,
)
from stage_calls import (
    MAX_TILE,
    STAGES,
    InputGate,
    Lowering,
    Normaliser,
    Problem,
    ScaledRows,
    TileSums,
    assert_dtypes,
    check_small_row,
    compare_outputs,
    launch_of,
    normaliser_gradients,
    only,
    plain,
    plain_form,
    run_stage,
    tiles_class,
)

from mlstm_pallas import KernelConfig, mlstm_chunkwise

HEADS, DHQK, DHV = 2, 32, 64


class Case:
    """The inputs of every stage, by name: those of a call, and what the plain forms of earlier
    stages return. z is drawn: floors lie above and below |z|."""

    def __init__(
        self,
        dtype,
        L,
        S=128,
        heads=(1, HEADS),
        DHQK=DHQK,
        DHV=DHV,
        layout="BNTH",
        normalised=True,
        **recipe,
    ):
        p = self.problem = Problem(*heads, S, DHQK, DHV, L, DHQK**-0.5)
        self.dtype, self.chunks = jnp.dtype(dtype), plain(p).chunks
        self.options = dict(normaliser=Normaliser(eps=0.1), input_gate=InputGate.EXP)
        if not normalised:
            self.options = dict(normaliser=None, input_gate=InputGate.SIGMOID)
        r = np.random.default_rng(L)
        x = random_inputs(L, *heads, S, DHQK, DHV, dtype=dtype, **recipe)
        x["dh"] = array(r.normal(size=x["v"].shape), dtype)
        x["m_initial"] *= normalised
        heads_first = (y.reshape(p.BNH, *y.shape[2:]) for y in x.values())
        names = ("matQ", "matK", "matV", "vecI", "vecF")
        names += ("matC_initial", "vecN_initial", "scaM_initial", "matDeltaH")
        inputs = dict(zip(names, heads_first, strict=True))
        if layout == "BTNH":
            inputs |= {f"mat{y.upper()}": swapped(x[y]) for y in "qkv"}
            inputs["matDeltaH"] = swapped(x["dh"])

        def normal(*shape):
            return array(r.normal(size=(p.BNH, *shape)), "float32")

        inputs |= dict(matDeltaC_last=normal(DHQK, DHV), vecDeltaN_states=normal(p.NC, DHQK))
        inputs["vecZ"] = 0.3 * normal(S)
        self.inputs = jax.tree.map(jnp.asarray, in_numpy(self.with_outputs)(inputs))
        self.expected = functools.cache(self.in_float64)

    def with_outputs(self, inputs):
        for name, stage in STAGES.items():
            outputs = self.run(name, inputs)
            if name == "chunk_gates":
                inputs["vecAbar"] = outputs.per_step().vecAbar
            if name == "parallel_bw_dP":
                of_z = inputs["vecZ"], inputs["gates"].per_step().vecM
                inputs["normaliser_gradients"] = normaliser_gradients(
                    self.options["normaliser"], outputs.vecDelta, *of_z
                )
            inputs = {stage.outputs or name: outputs} | outputs._asdict() | inputs
        return inputs

    def run(self, name, inputs, lowering=Lowering.XLA, tiles=None, **options):
        parameters = inspect.signature(plain_form(name)).parameters
        options = {key: x for key, x in self.options.items() if key in parameters} | options
        if name == "recurrent_bw_dC":
            options["matH"] = inputs["matH"]
        call = launch_of(name, self.problem, self.dtype, lowering, tiles)
        operands = {key: inputs.get(key) for key in STAGES[name].inputs}
        return jax.jit(functools.partial(run_stage, name, call, **options))(**operands)

    def in_float64(self, name, **options):
        """The outputs of the plain form in float64."""
        inputs = {key: self.inputs[key] for key in (*STAGES[name].inputs, "matH")}
        return in_float64(in_numpy(functools.partial(self.run, name, **options)), inputs)

    def check(self, name, tiles=None, lowering=Lowering.INTERPRET, **options):
        """The kernel agrees with the plain form, every output in dtype and within its bound.

        Matrices are of the kernel dtype, or sums of products of what was rounded to it. Vectors
        and scalars are sums in float32 of what was not rounded.

        tiles: fields that differ from the plan.
        """
        inputs, p = dict(self.inputs), self.problem
        dtypes = jax.eval_shape(lambda x: self.products(self.run(name, x, **options)), inputs)
        expected = self.products(self.expected(name, **options))
        if name == "parallel_bw_dP" and lowering.folder == "mosaic_gpu":
            dtypes, expected = (x._replace(vecDeltaN_added=None) for x in (dtypes, expected))
        inputs["scores"] = self.unwritten(inputs["scores"], np.nan)
        result = self.products(self.run(name, inputs, lowering, tiles, **options))
        assert_dtypes(result, dtypes)
        if name == "chunk_gates":
            result, expected = map(summed, (result, expected))
        if name == "parallel_bw_dP":
            scores = self.with_tile_sums(result.scores, expected.scores)
            result, expected = (
                x._replace(scores=self.unwritten(y, 0))
                for x, y in zip((result, expected), scores, strict=True)
            )
        if name == "chunk_gradients":
            result, expected = self.with_tile_sums(result, expected)

        def bound(path, dtype):
            terms = p.DHQK * p.DHV if path.endswith(".pass_through") else p.S + p.DHQK + p.DHV
            rounded = ".mat" in path or dtype == self.dtype
            return tolerance(self.dtype if rounded else "float32", terms)

        compare_outputs(name, result, expected, bound)

    def products(self, outputs):
        """The outputs with weighted operands as their products, in chunks."""

        def weighted(x):
            return isinstance(x, ScaledRows)

        return jax.tree.map(
            lambda x: self.chunks(x.product()) if weighted(x) else x, outputs, is_leaf=weighted
        )

    def with_tile_sums(self, result, expected):
        """Both, with the sums of the result's tiles, 0 where nothing is written.

        That is where queries lie before the tile of keys.
        """
        sums, p = result.tile_sums, self.problem
        n = sums.per_query.shape[1]
        later = np.arange(p.S) % p.L // (p.L // n) - np.arange(n)[:, None]
        written = (sums.per_query, later >= 0), (sums.per_key, later <= 0)
        per_query, per_key = (only(x, where, 1, 2) for x, where in written)
        return (
            result._replace(tile_sums=TileSums(per_query, per_key, sums.diagonal)),
            expected._replace(tile_sums=self.as_tile_sums(p.L // n)),
        )

    def unwritten(self, scores, value):
        """The tiles of parallel_bw_dP, with this value where it writes nothing.

        That is in blocks of MAX_TILE steps above the diagonal ones.
        """
        block = np.arange(self.problem.L) // MAX_TILE
        written = block[:, None] >= block
        P, dP = (
            np.where(written, self.chunks(y), value).astype(y.dtype).reshape(y.shape)
            for y in scores[:2]
        )
        return scores._replace(matP=P, matDeltaP=dP)

    def as_tile_sums(self, T):
        """The sums for tiles of T steps, from W_ts = (scale dP_ts) q_t . k_s."""
        q, k = (np.float64(self.chunks(self.inputs[name])) for name in ("matQ", "matK"))
        dP = self.chunks(self.expected("parallel_bw_dP").scores.matDeltaP)
        W = np.tril(dP) * np.einsum("nctk,ncsk->ncts", q, k)
        tiles = *W.shape[:2], W.shape[2] // T, T
        strict = np.tril(W, -1).reshape(*tiles, *tiles[2:])
        sums = (np.einsum(axes, strict) for axes in ("ncitjs->njcit", "ncitjs->nicjs"))
        per_query, per_key = (y.reshape(*y.shape[:2], -1) for y in sums)
        return TileSums(per_query, per_key, np.einsum("nctt->nct", W).reshape(len(W), -1))


case = functools.cache(Case)


def summed(gates):
    """With the unevaluated sums of two numbers as one number."""
    e, u = (np.float64(hi) + np.float64(lo) for hi, lo in (gates.vecE, gates.vecU))
    return gates._replace(vecE=e, vecU=u)


# As many blocks of rows as of columns would hide which is which.
F32, NARROW = dict(dtype="float32"), dict(siz_b_DHQK=16, siz_b_DHHV=16)
SMALL, WIDE = dict(siz_b_L=16) | NARROW, dict(siz_b_DHQK=64, siz_b_DHHV=32)
PARTIAL = dict(dtype="float32", layout="BTNH")
OF_CASE = {"dtype", "heads", "layout", "normalised", "resets", "f_shift"}
OF_CHECK = {"store_every", "return_keys"}


def check_row(stage, sizes, options, lowering=Lowering.INTERPRET, **of_case):
    """Case.check of a stage. sizes: L, chunks, DHQK, DHV; options: tiles, and those of both."""
    L, chunks, DHQK, DHV = sizes
    of_case |= {name: options[name] for name in OF_CASE & {*options}}
    tiles = {name: x for name, x in options.items() if name not in OF_CASE | OF_CHECK}
    options = {name: options[name] for name in OF_CHECK & {*options}}
    x = case(**dict(dtype="bfloat16") | of_case, L=L, S=chunks * L, DHQK=DHQK, DHV=DHV)
    x.check(stage, tiles, lowering, **options)


# The default tiles are tested in bfloat16, most others in float32; the table has more. Interpreted,
# what a kernel reads beyond an array is NaN.
CALLS = [
    param(
        "parallel_fw_H", (64, 2, 32, 64), **F32, siz_b_LQ=16, siz_b_LKV=32, **NARROW, keep_q=True
    ),
    param("parallel_fw_H", (64, 2, 32, 64), **F32, resets=True, normalised=False),
    param("recurrent_fw_H", (16, 4, 32, 64), **F32, store_every=2),
    param("parallel_bw_dP", (32, 2, 32, 64), return_keys=False),  # C is recomputed
    # Blocks and pieces of columns that do not divide the heads.
    param("recurrent_fw_C", (16, 4, 48, 80), **PARTIAL, **SMALL, num_splits=2),
    param("parallel_fw_H", (16, 4, 48, 80), **PARTIAL, **WIDE, keep_q=False),
    param("parallel_fw_P", (16, 4, 48, 80), **PARTIAL, siz_b_DHQK=64),
    param("recurrent_fw_H", (16, 4, 48, 80), **PARTIAL, **WIDE, state_rows=64),
    param("parallel_bw_dP", (16, 4, 48, 80), **PARTIAL, block_k=32),
    param("parallel_bw_dQKV", (16, 4, 48, 80), **PARTIAL, **WIDE, block_k=64),
    slow_param("recurrent_bw_dC", (16, 8, 32, 64), **F32, **SMALL, num_splits=8, resets=True),
    # MAX_TILE steps per CTA
    slow_param("parallel_fw_H", (256, 1, 32, 64), siz_b_LQ=64, siz_b_LKV=16, keep_q=True),
    slow_param("parallel_bw_dP", (256, 1, 32, 64), siz_b_LQ=128, block_k=32),
    slow_param("parallel_bw_dQKV", (256, 1, 32, 64), siz_b_LQ=256, block_k=32),
]


@pytest.mark.parametrize(
    ("stage", "sizes", "options"),
    [
        *(param(stage, (32, 2, 32, 64)) for stage in STAGES if tiles_class(stage, "triton")),
        *CALLS,
    ],
)
def test_the_kernel_agrees_with_the_plain_form(stage, sizes, options):
    check_row(stage, sizes, options)


# ---------------- splits of a sequence that run at the same time

# Of every split but the last, backward but the first; or of all. Then in three blocks of columns.
SIZES = (1, 2, 128, 32, 64, 16)
SPLITS = [
    *(
        param("split_products", SIZES, num_splits=4, tiles=SMALL, **options)
        for options in ({}, dict(backward=True), dict(all_splits=True))
    ),
    *(
        param("step_sums", (2, 2, 64, 48, 16, 32), tiles=dict(siz_b_DHQK=16), layout=layout)
        for layout in ("BNTH", "BTNH")
    ),
]


@pytest.mark.parametrize(("stage", "sizes", "options"), SPLITS)
def test_small_stages(stage, sizes, options):
    check_small_row(stage, sizes, options, Lowering.INTERPRET)


# ---------------- roundings


def count_roundings(equations):
    names = (x.outvars[0].aval.dtype.name for x in equations)
    return sum(name == "bfloat16" for name in names)


def roundings(backend, **config):
    """The launches of a call in bfloat16 and of its gradients, each with the dtypes of its outputs
    (h for half) and how often its kernel rounds to bfloat16; then how often XLA does.

    Equal launches are listed once.
    """
    run = functools.partial(mlstm_chunkwise, backend=backend, config=KernelConfig(**config))
    with for_device("NVIDIA H200"):
        traced = jax.make_jaxpr(results_of(run))(*call_shapes(1, 2, 512, 256, 256)).jaxpr
    find, result, inside = compile_report.equations, [], 0
    assert all(x.outvars[0].aval.dtype == jnp.float32 for x in find(traced, "dot_general"))
    launch = "pallas_call" if backend == "triton" else "mpmd_map"
    for x in find(traced, launch):
        kernel = compile_report.inner_jaxprs(x)[0]
        count = count_roundings(find(kernel, "convert_element_type"))
        inside += count
        dtypes = "".join({"bfloat16": "h"}.get(y.aval.dtype.name, "f") for y in x.outvars)
        result.append(f"{x.params['name']} {dtypes} {count}")
    between = count_roundings(find(traced, "convert_element_type")) - inside
    return ", ".join([*dict.fromkeys(result), f"XLA {between}"])


# Of the outputs of chunk_gates, step_gradients and their scans three or two are workspace.
GATES = "chunk_summaries fffff 0, stabiliser_scan fff 0, chunk_gates fffffffffff 0, "
BACKWARD = "chunk_gates ffffffffffff 0, parallel_bw_dP hhhfffhf 4, {}recurrent_bw_dC hh 2, "
BACKWARD += "parallel_bw_dQKV hfhfhf 3, m_summaries fffff 0, m_carry_scan fff 0, "
BACKWARD += "step_gradients fffff 0, XLA {}"


@pytest.mark.slow
def test_what_triton_kernels_round():
    """h once, not in each of eight launches of the scan."""
    assert roundings("triton", fused=True, triton_recurrent_fw_H=dict(state_rows=32)) == (
        GATES + "step_sums f 0, parallel_fw_P hfhf 3, "
        "recurrent_fw_H f 1, recurrent_fw_H h 2, " + BACKWARD.format("split_products hf 2, ", 1)
    )
    assert roundings("triton", fused=False) == (
        GATES + "split_products hf 2, recurrent_fw_C h 1, "
        "step_sums f 0, parallel_fw_H hf 2, " + BACKWARD.format("", 2)
    )
