"""The kernel of every stage, interpreted, against the stage's plain jnp form in float64."""

import functools
import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import array, assert_close, assert_same_bits, in_float64, random_inputs, slow, tolerance

from mlstm_pallas import KernelConfig, dispatch, planning
from mlstm_pallas.gate_gradients import TileSums
from mlstm_pallas.gpu import UNKNOWN
from mlstm_pallas.normaliser import Normaliser, normaliser_gradients
from mlstm_pallas.planning import CallSpec
from mlstm_pallas.problem import MAX_TILE, InputGate, Problem
from mlstm_pallas.stage import Lowering, ScaledRows
from mlstm_pallas.stages import STAGES

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
        input_gate=InputGate.EXP,
        **recipe,
    ):
        p = Problem(*heads, S, DHQK, DHHV, L, DHQK**-0.5)
        self.dtype, self.problem = jnp.dtype(dtype), p
        normaliser = Normaliser(eps=0.1) if normalised else None
        self.options = dict(normaliser=normaliser, input_gate=input_gate)
        r = np.random.default_rng(L)
        x = random_inputs(L, *heads, S, DHQK, DHHV, dtype=dtype, **recipe)
        x["dh"] = array(r.normal(size=x["v"].shape), dtype)
        if input_gate is InputGate.SIGMOID:
            x["m_initial"] = jnp.zeros_like(x["m_initial"])

        def in_layout(name):
            if layout == "BTNH" and name in ("q", "k", "v", "dh"):
                return jnp.swapaxes(x[name], 1, 2)
            return x[name].reshape(p.BNH, *x[name].shape[2:])

        names = ("matQ", "matK", "matV", "vecI", "vecF")
        names = (*names, "matC_initial", "vecN_initial", "scaM_initial", "matDeltaH")
        inputs = {key: in_layout(name) for key, name in zip(names, x, strict=True)}
        token = [x[name][:, :, 0].reshape(p.BNH, *x[name].shape[3:]) for name in "qkvif"]
        token += [inputs[name] for name in names[5:8]]
        inputs |= zip(STAGES["recurrent_step"].inputs, token, strict=True)

        def normal(*shape):
            return array(r.normal(size=(p.BNH, *shape)), "float32")

        inputs |= dict(matDeltaC_last=normal(DHQK, DHHV), vecDeltaN_states=normal(p.NC, DHQK))
        inputs |= dict(vecZ=0.3 * normal(S))
        self.inputs, self.result = jax.jit(self.with_outputs)(inputs), {}

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
        module = importlib.import_module(f"mlstm_pallas.stages.{name}")
        parameters = inspect.signature(getattr(module, name)).parameters
        options = {key: x for key, x in self.options.items() if key in parameters} | options
        if name == "recurrent_bw_dC":
            options["matH"] = inputs["matH"]
        call = launch_of(name, self.problem, self.dtype, lowering, tiles)
        run = functools.partial(dispatch.run, name, **options, call=call)
        return jax.jit(run)(**{key: inputs.get(key) for key in stage.inputs})

    def plain(self, name, inputs, **options):
        return self.run(name, inputs, Lowering.XLA, **options)

    def expected(self, name, options):
        """The outputs of the plain form in float64."""
        key = name, *options.items()
        if key not in self.result:
            inputs = {key: self.inputs[key] for key in (*STAGES[name].inputs, "matH")}
            run = functools.partial(self.plain, name, **options)
            self.result[key] = in_float64(run, inputs)
        return self.result[key]

    def check(
        self,
        name,
        tiles=None,
        lowering=Lowering.INTERPRET,
        tiles_inside=False,
        **options,
    ):
        """The kernel agrees with the plain form, every output in dtype and within its bound.

        Matrices are of the kernel dtype, or sums of products of what was rounded to it. Vectors
        and scalars are sums in float32 of what was not rounded.

        Args:
          tiles: fields that differ from the plan.
          tiles_inside: whether parallel_bw_dQKV gets no P and dP and returns the sums of W.

        Returns:
          The kernel's outputs.
        """
        inputs, p, expected = dict(self.inputs), self.problem, self.expected(name, options)
        plain = jax.eval_shape(lambda x: products(self.plain(name, x, **options)), inputs)
        expected = products(expected)
        if name == "parallel_bw_dP" and lowering.folder == "mosaic_gpu":
            plain, expected = (x._replace(vecDeltaN_added=None) for x in (plain, expected))
        if tiles_inside:
            inputs["scores"] = jax.tree.map(lambda _: None, inputs["scores"])
        result = returned = products(self.run(name, inputs, lowering, tiles, **options))
        own = result._replace(pairs=None) if tiles_inside else result
        dtypes = [y.dtype for y in jax.tree.leaves(own)]
        assert dtypes == [y.dtype for y in jax.tree.leaves(plain)]
        if name == "parallel_bw_dP":
            result, expected = self.written(result), self.written(expected)
        if name == "parallel_bw_dP" or tiles_inside:
            scores = self.expected("parallel_bw_dP", {})
            of_tiles = tile_pairs(self, scores, result.pairs.diagonal.shape[-1])
            expected = expected._replace(pairs=of_tiles)
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

    def written(self, outputs):
        """The outputs of parallel_bw_dP, heads first, with 0 where it writes nothing.

        That is in blocks of MAX_TILE steps above the diagonal ones.
        """
        p, block = self.problem, np.arange(self.problem.L) // MAX_TILE

        def below(x):
            x = x.reshape(p.BNH, p.NC, p.L, p.L)
            return jnp.where(block[:, None] >= block, x, 0).reshape(p.BNH, p.S, p.L)

        def heads_first(x):
            return jnp.swapaxes(x, 1, 2).reshape(p.BNH, p.S, -1) if np.ndim(x) == 4 else x

        return outputs._replace(
            matP=below(outputs.matP),
            matDeltaP=below(outputs.matDeltaP),
            queries=heads_first(outputs.queries),
            keys=None if outputs.keys is None else heads_first(outputs.keys),
        )


case = functools.cache(Case)


def products(outputs):
    """The outputs with weighted operands as their products."""

    def weighted(x):
        return isinstance(x, ScaledRows)

    return jax.tree.map(lambda x: x.product() if weighted(x) else x, outputs, is_leaf=weighted)


def below_the_diagonal(pairs):
    """The sums, with 0 for queries that lie before the tile of keys, where none are written."""
    n = pairs.diagonal.shape[2]
    after = jnp.tri(n, dtype=bool)  # [i, j]
    sums = ((after.T, pairs.per_query), (after, pairs.per_key))
    sums = (jnp.where(where.reshape(n, 1, n, 1), y, 0.0) for where, y in sums)
    return TileSums(*sums, pairs.diagonal)


def tile_pairs(x, outputs, T):
    """The sums for tiles of T steps, from W_ts = (scale dP_ts) q_t . k_s."""
    p, n, tiles = x.problem, x.problem.L // T, (x.problem.BNH, x.problem.NC)
    chunks = planning.plain(p).chunks
    q, k = (
        np.asarray(chunks(x.inputs[name]).astype("float32"), "float64") for name in ("matQ", "matK")
    )
    W = np.tril(outputs.matDeltaP.reshape(*tiles, p.L, p.L)) * np.einsum("nctk,ncsk->ncts", q, k)
    strict = np.tril(W, -1).reshape(*tiles, n, T, n, T)
    diagonal = np.diagonal(W, axis1=-2, axis2=-1).reshape(*tiles, n, T)
    return TileSums(np.moveaxis(strict.sum(-1), -1, 1), np.moveaxis(strict.sum(-3), 2, 1), diagonal)


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
    case(dtype, L, max(64, L if L >= 128 else 2 * L)).check(stage, tiles)


def test_tiles_of_every_product_stage_are_tested():
    """recurrent_step has tests of its own."""
    stages = {stage for stage, *_ in TILINGS}
    assert stages == {name for name, stage in STAGES.items() if not stage.decode}


@pytest.mark.parametrize("stage", ["recurrent_fw_C", "recurrent_bw_dC"])
@pytest.mark.parametrize(
    ("dtype", "num_splits", "resets"), [("float32", 8, True), ("bfloat16", 2, False)]
)
def test_recurrences_in_splits(stage, dtype, num_splits, resets):
    x = case(dtype, 16, 128, resets=resets, f_shift=6.0)
    tiles = dict(siz_b_LKV=16, siz_b_DHQK=16, siz_b_DHHV=32, num_splits=num_splits)
    x.check(stage, tiles)


def test_parallel_fw_H_without_a_normaliser():
    options = dict(resets=True, input_gate=InputGate.SIGMOID, normalised=False)
    case("float32", 64, 128, **options).check("parallel_fw_H")


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
