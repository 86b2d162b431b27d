"""The kernel of every stage, interpreted, against the stage's plain jnp form in float64."""

import functools
import inspect

import compile_report
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import (
    array,
    assert_close,
    assert_same_bits,
    call_shapes,
    for_device,
    in_float64,
    random_inputs,
    results_of,
    slow,
    tolerance,
)

from mlstm_pallas import KernelConfig, mlstm_chunkwise, stages
from mlstm_pallas.formulas.gate_gradients import TileSums, only
from mlstm_pallas.formulas.normaliser import Normaliser, normaliser_gradients
from mlstm_pallas.planning import call_spec as planning
from mlstm_pallas.planning import dispatch
from mlstm_pallas.planning.call_spec import CallSpec
from mlstm_pallas.problem.dimensions import MAX_TILE, InputGate, Problem
from mlstm_pallas.problem.gpu import UNKNOWN
from mlstm_pallas.stages import STAGES
from mlstm_pallas.stages.stage import Lowering, ScaledRows

HEADS, DHQK, DHHV = 2, 32, 64


def launch_of(name, problem, dtype, lowering, tiles=None, **options):
    """How a function runs in this lowering; tiles: fields that differ from the plan."""
    config = KernelConfig(**{f"{lowering.folder}_{name}": tiles} if tiles else {})
    spec = CallSpec(problem, config, jnp.dtype(dtype), None, UNKNOWN, backend=lowering)
    call = spec.launch(name, lowering, **options)
    assert call.lowering is lowering, (name, call)
    return call


class Case:
    """The inputs of every stage, by name: those of a call, and what the plain forms of earlier
    stages return. z is drawn: floors lie above and below |z|."""

    def __init__(
        self,
        dtype,
        L,
        S=128,
        *,
        heads=(1, HEADS),
        DHQK=DHQK,
        DHHV=DHHV,
        layout="BNTH",
        normalised=True,
        **recipe,
    ):
        p = Problem(*heads, S, DHQK, DHHV, L, DHQK**-0.5)
        self.dtype, self.problem, self.chunks = jnp.dtype(dtype), p, planning.plain(p).chunks
        self.options = dict(normaliser=Normaliser(eps=0.1), input_gate=InputGate.EXP)
        if not normalised:
            self.options = dict(normaliser=None, input_gate=InputGate.SIGMOID)
        r = np.random.default_rng(L)
        x = random_inputs(L, *heads, S, DHQK, DHHV, dtype=dtype, **recipe)
        x["dh"] = array(r.normal(size=x["v"].shape), dtype)
        x["m_initial"] *= normalised

        heads_first = [y.reshape(p.BNH, *y.shape[2:]) for y in x.values()]
        names = ("matQ", "matK", "matV", "vecI", "vecF")
        names += ("matC_initial", "vecN_initial", "scaM_initial", "matDeltaH")
        inputs = dict(zip(names, heads_first, strict=True))
        if layout == "BTNH":
            for key, name in dict(matQ="q", matK="k", matV="v", matDeltaH="dh").items():
                inputs[key] = jnp.swapaxes(x[name], 1, 2)
        token = *(y[:, 0] for y in heads_first[:5]), *heads_first[5:8]
        inputs |= zip(STAGES["recurrent_step"].inputs, token, strict=True)

        def normal(*shape):
            return array(r.normal(size=(p.BNH, *shape)), "float32")

        inputs |= dict(matDeltaC_last=normal(DHQK, DHHV), vecDeltaN_states=normal(p.NC, DHQK))
        inputs["vecZ"] = 0.3 * normal(S)
        self.inputs = jax.jit(self.with_outputs)(inputs)
        self.expected = functools.cache(self.in_float64)

    def with_outputs(self, inputs):
        for name, stage in STAGES.items():
            outputs = self.plain(name, inputs)
            if name == "chunk_gates":
                inputs["vecAbar"] = outputs.per_step().vecAbar
            if name == "parallel_bw_dP":
                of_z = inputs["vecZ"], inputs["gates"].per_step().vecM
                inputs["normaliser_gradients"] = normaliser_gradients(
                    self.options["normaliser"], outputs.vecDelta, *of_z
                )
            inputs = {stage.outputs or name: outputs} | outputs._asdict() | inputs
        return inputs

    def run(self, name, inputs, lowering, tiles=None, **options):
        stage = STAGES[name]
        parameters = inspect.signature(getattr(getattr(stages, name), name)).parameters
        options = {key: x for key, x in self.options.items() if key in parameters} | options
        if name == "recurrent_bw_dC":
            options["matH"] = inputs["matH"]
        call = launch_of(name, self.problem, self.dtype, lowering, tiles)
        run = functools.partial(dispatch.run, name, **options, call=call)
        return jax.jit(run)(**{key: inputs.get(key) for key in stage.inputs})

    def plain(self, name, inputs, **options):
        return self.run(name, inputs, Lowering.XLA, **options)

    def in_float64(self, name, **options):
        """The outputs of the plain form in float64."""
        inputs = {key: self.inputs[key] for key in (*STAGES[name].inputs, "matH")}
        return in_float64(functools.partial(self.plain, name, **options), inputs)

    def check(self, name, tiles=None, lowering=Lowering.INTERPRET, tiles_inside=False, **options):
        """The kernel agrees with the plain form, every output in dtype and within its bound.

        Matrices are of the kernel dtype, or sums of products of what was rounded to it. Vectors
        and scalars are sums in float32 of what was not rounded.

        Args:
          tiles: fields that differ from the plan.
          tiles_inside: whether parallel_bw_dQKV gets no P and dP and returns the sums of W.

        Returns:
          The kernel's outputs.
        """
        inputs, p, expected = dict(self.inputs), self.problem, self.expected(name, **options)
        plain = jax.eval_shape(lambda x: self.products(self.plain(name, x, **options)), inputs)
        expected = self.products(expected)
        if name == "parallel_bw_dP" and lowering.folder == "mosaic_gpu":
            plain, expected = (x._replace(vecDeltaN_added=None) for x in (plain, expected))
        if tiles_inside:
            inputs["scores"] = jax.tree.map(lambda _: None, inputs["scores"])
        result = returned = self.products(self.run(name, inputs, lowering, tiles, **options))
        own = result._replace(pairs=None) if tiles_inside else result
        dtypes = [y.dtype for y in jax.tree.leaves(own)]
        assert dtypes == [y.dtype for y in jax.tree.leaves(plain)]
        if name == "parallel_bw_dP":
            result, expected = self.written(result), self.written(expected)
        if name == "parallel_bw_dP" or tiles_inside:
            expected = expected._replace(pairs=self.tile_pairs(result.pairs.diagonal.shape[-1]))
            result = result._replace(pairs=below_the_diagonal(result.pairs))
        for key, actual, desired in zip(result._fields, result, expected, strict=True):
            assert (actual is None) == (desired is None), key
            terms = p.DHQK * p.DHHV if key == "inner_C_dC" else p.S + p.DHQK + p.DHHV
            if key in ("vecE", "vecU"):  # unevaluated sums
                actual, desired = (np.asarray(y[0], "float64") + y[1] for y in (actual, desired))
            for one, other in zip(*map(jax.tree.leaves, (actual, desired)), strict=True):
                rounded = key.startswith("mat") or one.dtype == self.dtype
                bound = tolerance(self.dtype if rounded else "float32", terms)
                assert_close(one, other, bound, f"{name}: {key}")
        return returned

    def products(self, outputs):
        """The outputs with weighted operands as their products, in chunks."""

        def weighted(x):
            return isinstance(x, ScaledRows)

        return jax.tree.map(
            lambda x: self.chunks(x.product()) if weighted(x) else x, outputs, is_leaf=weighted
        )

    def written(self, outputs):
        """The outputs of parallel_bw_dP, with 0 where it writes nothing.

        That is in blocks of MAX_TILE steps above the diagonal ones.
        """
        block = np.arange(self.problem.L) // MAX_TILE
        P, dP = (only(self.chunks(y), block[:, None] >= block, 2, 3) for y in outputs[:2])
        return outputs._replace(matP=P, matDeltaP=dP)

    def tile_pairs(self, T):
        """The sums for tiles of T steps, from W_ts = (scale dP_ts) q_t . k_s."""
        names = ("matQ", "matK")
        q, k = (np.asarray(self.chunks(self.inputs[name])).astype("float64") for name in names)
        dP = self.chunks(self.expected("parallel_bw_dP").matDeltaP)
        W = np.tril(dP) * np.einsum("nctk,ncsk->ncts", q, k)
        tiles = *W.shape[:2], W.shape[2] // T, T
        strict = np.tril(W, -1).reshape(*tiles, *tiles[2:])
        sums = (np.einsum(axes, strict) for axes in ("ncitjs->njcit", "ncitjs->nicjs"))
        return TileSums(*sums, np.einsum("nctt->nct", W).reshape(tiles))


case = functools.cache(Case)


def below_the_diagonal(pairs):
    """The sums, with 0 for queries that lie before the tile of keys, where none are written."""
    after = np.tri(pairs.diagonal.shape[2], dtype=bool)  # [i, j]
    per_query, per_key = only(pairs.per_query, after.T, 1, 3), only(pairs.per_key, after, 1, 3)
    return TileSums(per_query, per_key, pairs.diagonal)


@pytest.mark.parametrize("stage", STAGES)
def test_the_kernel_agrees_with_the_plain_form(stage):
    """The default tiles in bfloat16; most of the tiles below are tested in float32."""
    case("bfloat16", 32, 64).check(stage)


# Stage, chunk size, tiles.
TILINGS = [
    ("chunk_gates", 64, dict(siz_b_LQ=16)),
    ("recurrent_fw_C", 16, dict(siz_b_LKV=16, siz_b_DHQK=16, siz_b_DHHV=16, num_splits=1)),
    ("recurrent_fw_C", 64, dict(siz_b_LKV=32, siz_b_DHQK=64, siz_b_DHHV=64)),
    ("parallel_fw_H", 64, dict(siz_b_LQ=16, siz_b_LKV=16, siz_b_DHQK=16, siz_b_DHHV=16)),
    ("parallel_fw_H", 64, dict(siz_b_LQ=64, siz_b_LKV=16, siz_b_DHQK=32, siz_b_DHHV=16)),
    (
        "parallel_fw_H",
        64,
        dict(siz_b_LQ=16, siz_b_LKV=32, siz_b_DHQK=16, siz_b_DHHV=32, keep_q=True),
    ),
    ("parallel_fw_P", 16, dict(siz_b_DHQK=16)),
    # Two launches.
    ("recurrent_fw_H", 16, dict(siz_b_DHQK=16, siz_b_DHHV=16, state_rows=16)),
    ("recurrent_fw_H", 64, dict(siz_b_DHQK=16, siz_b_DHHV=64, state_rows=32)),
    ("parallel_bw_dP", 16, dict(siz_b_LQ=16, block_k=16)),
    ("parallel_bw_dP", 256, dict(siz_b_LQ=32, block_k=16)),
    ("recurrent_bw_dC", 64, dict(siz_b_LKV=16, siz_b_DHQK=16, siz_b_DHHV=32)),
    ("parallel_bw_dQKV", 64, dict(siz_b_LQ=64, siz_b_DHQK=16, siz_b_DHHV=64, block_k=16)),
    ("parallel_bw_dQKV", 256, dict(siz_b_LQ=32, siz_b_DHQK=32, siz_b_DHHV=16, block_k=32)),
]
# MAX_TILE steps per CTA.
LARGE_TILINGS = [
    (
        "parallel_fw_H",
        256,
        dict(siz_b_LQ=64, siz_b_LKV=16, siz_b_DHQK=32, siz_b_DHHV=16, keep_q=True),
    ),
    ("parallel_bw_dP", 256, dict(siz_b_LQ=128, block_k=32)),
    ("parallel_bw_dQKV", 256, dict(siz_b_LQ=256, siz_b_DHQK=32, siz_b_DHHV=64, block_k=32)),
]


@pytest.mark.parametrize(
    ("dtype", "stage", "L", "tiles"),
    [
        *(("float32", *tiling) for tiling in TILINGS),
        *(slow("bfloat16", *tiling) for tiling in LARGE_TILINGS),
    ],
    ids=str,
)
def test_the_result_does_not_depend_on_the_tiles(dtype, stage, L, tiles):
    case(dtype, L, max(L, 128)).check(stage, tiles)


def test_tiles_of_every_product_stage_are_tested():
    """recurrent_step has tests of its own."""
    tested = {stage for stage, *_ in TILINGS}
    assert tested == {name for name, stage in STAGES.items() if not stage.decode}


@pytest.mark.parametrize("stage", ["recurrent_fw_C", "recurrent_bw_dC"])
@pytest.mark.parametrize(
    ("dtype", "L", "num_splits", "resets"),
    [("float32", 16, 8, True), ("bfloat16", 128, 2, False)],
)
def test_recurrences_in_splits(stage, dtype, L, num_splits, resets):
    x = case(dtype, L, num_splits * L, resets=resets, f_shift=6.0)
    tiles = dict(siz_b_LKV=16, siz_b_DHQK=16, siz_b_DHHV=32, num_splits=num_splits)
    x.check(stage, tiles)


def test_parallel_fw_H_without_a_normaliser():
    case("float32", 64, resets=True, normalised=False).check("parallel_fw_H")


def test_recurrent_fw_H_stores_states():
    case("float32", 16, 64).check("recurrent_fw_H", store_every=2)


def test_recurrent_fw_H_stores_no_states_of_several_launches():
    with pytest.raises(ValueError, match="stores states of up to 16 rows, expected 32"):
        case("float32", 16, 64).check("recurrent_fw_H", dict(state_rows=16), store_every=1)


def test_parallel_bw_dP_returns_keys_where_C_is_recomputed():
    result = case("bfloat16", 32, 64).check("parallel_bw_dP", return_keys=False)
    assert result.keys is None


def test_parallel_bw_dQKV_reads_nothing_above_the_diagonal_blocks():
    x = case("float32", 256, 256)
    block = np.arange(256) // MAX_TILE
    tiles = x.inputs["scores"]
    P, dP = (
        jnp.where(block[:, None] < block, jnp.nan, y.reshape(HEADS, 256, 256))
        for y in (tiles.matP, tiles.matDeltaP)
    )
    poisoned = x.inputs | dict(scores=tiles._replace(matP=P, matDeltaP=dP))
    config = dict(siz_b_LQ=32, siz_b_DHQK=32, siz_b_DHHV=64, block_k=32)
    result, expected = (
        x.run("parallel_bw_dQKV", inputs, Lowering.INTERPRET, config)
        for inputs in (poisoned, x.inputs)
    )
    assert_same_bits(result, expected)


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


BACKWARD = "parallel_bw_dP hhhfffhf 4, {}recurrent_bw_dC hh 2, parallel_bw_dQKV hfhfhf 3, "


def test_what_triton_kernels_round():
    """h once, not in each of eight launches of the scan."""
    gates, split_products = "chunk_gates fffffff 0, stabiliser_scan f 0, ", "split_products hf 2, "
    sums, scan = "key_sums f 0, ", "parallel_fw_P hfhf 3, recurrent_fw_H f 1, recurrent_fw_H h 2, "
    states, H = "recurrent_fw_C h 1, ", "parallel_fw_H hf 2, "
    tiles = dict(state_rows=32)
    assert roundings("triton", fused=True, triton_recurrent_fw_H=tiles) == (
        gates + sums + scan + BACKWARD.format(split_products) + "XLA 1"
    )
    assert roundings("triton", fused=False) == (
        gates + split_products + states + sums + H + BACKWARD.format("") + "XLA 2"
    )
