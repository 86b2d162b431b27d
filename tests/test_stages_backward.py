"""The stages of the backward pass with states in memory, interpreted, against float64; whole gradients: test_gradients.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, random_inputs, tolerance

from mlstm_pallas import KernelConfig, StageConfig, gates, reference
from mlstm_pallas.gate_gradients import NO_NORMALISER, RowGradients, TilePairs, row_gradients, tile_sums
from mlstm_pallas.problem import MAX_TILE, Problem
from mlstm_pallas.stages.parallel_bw_dP import GradientTiles, parallel_bw_dP
from mlstm_pallas.stages.parallel_bw_dQKV import parallel_bw_dQKV
from mlstm_pallas.stages.recurrence import Recurrence
from mlstm_pallas.stages.recurrent_bw_dC import recurrent_bw_C_dC, recurrent_bw_dC
from mlstm_pallas.stages.recurrent_fw_C import recurrent_fw_C

pytestmark = pytest.mark.usefixtures("quick_compilation")

NH, S, DHQK, DHHV = 2, 256, 32, 64
NORMALISER = {"eps": 1e-6, "stabilize_correctly": True, "norm_val": 1.0}


class Case:
    """Inputs of the stages for chunks of L steps, and in float64, in chunks, what they should make of them."""

    def __init__(self, dtype, L, normalised=True, resets=False):
        self.L, self.NC, self.dtype = L, S // L, jnp.dtype(dtype)
        self.problem = Problem(1, NH, S, DHQK, DHHV, L, DHQK**-0.5)
        x, r = random_inputs(L, 1, NH, S, DHQK, DHHV, dtype=dtype, resets=resets), np.random.default_rng(L)
        self.arrays = x["q"], x["k"], x["v"], jnp.asarray(r.normal(size=x["v"].shape), dtype)
        self.gates = jax.jit(gates.chunk_gates)(*(x[name].reshape(1, NH, self.NC, L) for name in "if"), x["m_initial"])
        q, k, v, dh = map(self.wide, self.arrays)
        scale = self.problem.qk_scale
        with jax.enable_x64(True):
            made = jax.tree.map(lambda y: jnp.asarray(y, "float64"), self.gates)
            in_jnp, initial = [jnp.asarray(y) for y in (q, k, v)], [jnp.asarray(x[name], "float64") for name in ("c_initial", "n_initial")]
            C, n, *_ = jax.jit(reference.chunk_states)(*in_jnp[1:], made, *initial)
            num, z = jax.jit(reference.chunk_outputs)(*in_jnp, made, C, n, scale)
            h = reference.normalise(num, z, made.vecM, **NORMALISER)
            rows = row_gradients(jnp.sum(jnp.asarray(dh) * h, axis=-1), z, made.vecM, **NORMALISER)
            C, n, D, *rows = (np.asarray(y) for y in (C, n, reference.decay_matrix(made), *rows))
        self.C, self.n = jnp.asarray(C, dtype), jnp.asarray(n, "float32")
        self.dC, self.dn = jnp.asarray(r.normal(size=C.shape), dtype), jnp.asarray(r.normal(size=n.shape), "float32")
        self.rows = RowGradients(*(jnp.asarray(y.reshape(1, NH, S), "float32") for y in rows)) if normalised else NO_NORMALISER

        w, self.abar = (np.asarray(y, "float64") for y in (self.gates.vecW, self.gates.vecAbar))
        inv_den, self.dz_den = (self.wide(y) for y in self.rows[::2]) if normalised else (np.ones_like(w), np.zeros_like(w))
        self.r = w * scale * inv_den
        self.qbar, self.kbar = q * self.r[..., None], k * self.abar[..., None]
        dA = (np.einsum("bhctv,bhcsv->bhcts", dh, v) + self.dz_den[..., None]) * inv_den[..., None]
        scores = np.einsum("bhctk,bhcsk->bhcts", q, k) * scale
        self.P, self.dP, self.W = D * scores * inv_den[..., None], D * dA * scale, D * dA * scores

    def wide(self, y):
        """(B, NH, S, ...) to chunks in float64."""
        return np.asarray(y.astype("float32"), "float64").reshape(1, NH, self.NC, self.L, *y.shape[3:])


case = functools.cache(Case)


def launch(stage, problem, **tiles):
    config = KernelConfig(**{stage.__name__: StageConfig(**tiles)})
    return functools.partial(stage, problem=problem, config=config, interpret=True)


def diagonal_blocks(L):
    """(t, s) within a block of MAX_TILE steps on the diagonal, and behind it."""
    block = np.arange(L) // MAX_TILE
    return block[:, None] == block, block[:, None] < block


SCORE_CASES = [
    *[("float32", 16, 16, True), ("float32", 64, 64, True), ("float32", 64, 16, True), ("float32", 64, 16, False)],
    *[("float32", 256, 32, True), ("float32", 256, 128, True), ("float32", 256, 256, True)],
    *[("bfloat16", 64, 32, True), ("bfloat16", 256, 128, True), ("bfloat16", 32, 32, False)],
]


@pytest.mark.parametrize(("dtype", "L", "T", "normalised"), SCORE_CASES)
def test_parallel_bw_dP(dtype, L, T, normalised):
    x = case(dtype, L, normalised, resets=L == 64)
    run = jax.jit(launch(parallel_bw_dP, x.problem, siz_b_LQ=T, siz_b_loop=16))
    scores, norms, pairs = run(*x.arrays, x.gates, x.rows)
    assert {y.dtype for y in scores} == {x.dtype}
    assert {y.dtype for y in jax.tree.leaves((norms, pairs))} == {jnp.dtype("float32")}

    bound = tolerance(dtype, DHQK + DHHV)
    same_block, _ = diagonal_blocks(L)
    lower = np.tri(L, dtype=bool)
    for name, tile, expected in (("P", scores.matP, x.P), ("dP", scores.matDeltaP, x.dP)):
        tile = x.wide(tile)
        assert_close(np.where(lower, tile, 0.0), expected, bound, name)
        assert not tile[..., same_block & ~lower].any(), name
    assert_close(x.wide(scores.matQ_scaled), x.qbar, tolerance(dtype, 1), "qbar")
    assert_close(x.wide(scores.matK_scaled), x.kbar, tolerance(dtype, 1), "kbar")
    # Sums are of what was not rounded to the kernel dtype.
    assert_close(norms.added_n, x.kbar.sum(-2), tolerance("float32", L), "added_n")
    assert (norms.added_dn is None) == (not normalised)
    if normalised:
        assert_close(norms.added_dn, (x.qbar * x.dz_den[..., None]).sum(-2), tolerance("float32", L), "added_dn")

    T = min(T, MAX_TILE)
    n = L // T
    strict = np.tril(x.W, -1).reshape(1, NH, x.NC, n, T, n, T)
    assert pairs.diagonal.shape == (1, NH, x.NC, n, T)
    bound = tolerance("float32", DHQK + DHHV + L)
    assert_close(pairs.diagonal, np.diagonal(x.W, axis1=-2, axis2=-1).reshape(pairs.diagonal.shape), bound, "diagonal")
    behind = np.tri(n, dtype=bool)  # [i, j]
    for name, sums, written, expected in (
        ("from", pairs.from_tiles, behind.T, np.moveaxis(strict.sum(-1), -1, 2)),
        ("to", pairs.to_tiles, behind, np.moveaxis(strict.sum(-3), 3, 2)),
    ):
        assert_close(np.where(written.reshape(n, 1, n, 1), sums, 0.0), expected, bound, name)


def scores_of(x):
    """The tiles in the kernel dtype, with NaN where parallel_bw_dP does not write."""
    _, behind = diagonal_blocks(x.L)
    tiles = (jnp.asarray(np.where(behind, np.nan, y).reshape(1, NH, S, x.L), x.dtype) for y in (x.P, x.dP))
    scaled = (jnp.asarray(y.reshape(1, NH, S, DHQK), x.dtype) for y in (x.qbar, x.kbar))
    return GradientTiles(*tiles, *scaled)


def arguments_of(x):
    return *x.arrays, x.gates, x.rows, scores_of(x), x.C, x.n, x.dC, x.dn


def expected_gradients(x, scores):
    """dq, dk, dv, the inner products with the states' parts, and of the states; the tiles as they were rounded."""
    q, k, v, dh = map(x.wide, x.arrays)
    C, dC = (np.asarray(y.astype("float32"), "float64") for y in (x.C, x.dC))
    n, dn = (np.asarray(y, "float64")[..., None, :] for y in (x.n, x.dn))
    P, dP = (np.nan_to_num(x.wide(y)) for y in (scores.matP, scores.matDeltaP))
    dq = x.r[..., None] * (np.einsum("bhctv,bhckv->bhctk", dh, C) + x.dz_den[..., None] * n)
    dk = x.abar[..., None] * (np.einsum("bhcsv,bhckv->bhcsk", v, dC) + dn)
    dv = x.abar[..., None] * np.einsum("bhcsk,bhckv->bhcsv", k, dC) + np.einsum("bhcts,bhctv->bhcsv", P, dh)
    dq_inside, dk_inside = np.einsum("bhcts,bhcsk->bhctk", dP, k), np.einsum("bhcts,bhctk->bhcsk", dP, q)
    return dq + dq_inside, dk + dk_inside, dv, (q * dq).sum(-1), (k * dk).sum(-1), (C * dC).sum((-2, -1))


GRADIENT_TILES = {
    "16x16x16x16": (16, 16, 16, 16),
    "32x32x16x64": (32, 32, 16, 64),
    "64x16x64x16": (64, 16, 64, 16),
    "256x32x64x32": (256, 32, 64, 32),  # of which a program takes MAX_TILE rows
}
GRADIENT_CASES = [
    *[("float32", 64, tiling, True) for tiling in GRADIENT_TILES],
    *[("float32", 256, tiling, True) for tiling in ("32x32x16x64", "256x32x64x32")],
    *[("float32", 16, "16x16x16x16", True), ("float32", 64, "32x32x16x64", False)],
    *[("bfloat16", 64, "32x32x16x64", True), ("bfloat16", 256, "256x32x64x32", True)],
]


@pytest.mark.parametrize(("dtype", "L", "tiling", "normalised"), GRADIENT_CASES)
def test_parallel_bw_dQKV(dtype, L, tiling, normalised):
    """Nothing is read behind the diagonal blocks."""
    x = case(dtype, L, normalised, resets=L == 64)
    LQ, BK, BV, step = GRADIENT_TILES[tiling]
    run = launch(parallel_bw_dQKV, x.problem, siz_b_LQ=LQ, siz_b_DHQK=BK, siz_b_DHHV=BV, siz_b_loop=step)
    arguments = arguments_of(x)
    made = jax.jit(functools.partial(run, wanted="QKVC"))(*arguments)
    assert [y.dtype for y in made] == [x.dtype] * 3 + [jnp.float32] * 3
    # Sums over a head dimension and over a chunk; those for the gates' gradients are not rounded to the kernel dtype.
    bounds = [tolerance(dtype, DHHV + L)] * 3 + [tolerance("float32", DHHV + DHQK)] * 2 + [tolerance("float32", DHHV * DHQK)]
    for name, actual, expected, bound in zip(made._fields, made, expected_gradients(x, arguments[6]), bounds, strict=True):
        assert_close(actual if name == "states" else x.wide(actual), expected, bound, name)


@pytest.mark.parametrize("wanted", ["Q", "K", "V", "QK", "KV", "VQ", "C", "QC"])
def test_of_the_gradients_only_those_that_are_wanted_are_made(wanted):
    x = case("float32", 64)
    run = launch(parallel_bw_dQKV, x.problem, siz_b_LQ=32, siz_b_DHQK=16, siz_b_DHHV=32, siz_b_loop=16)
    arguments = arguments_of(x)
    every, some = (jax.jit(functools.partial(run, wanted=of))(*arguments) for of in ("QKVC", wanted))
    of = {"matDeltaQ": "Q", "matDeltaK": "K", "matDeltaV": "V", "from_state": "Q", "to_state": "K", "states": "C"}
    for name, actual, expected in zip(some._fields, some, every, strict=True):
        assert (actual is not None) == (of[name] in wanted), name
        assert actual is None or np.array_equal(np.asarray(actual), np.asarray(expected)), name


def expected_state_gradients(x, dC_last):
    """After each chunk, and of the initial C; of qbar as it is."""
    gamma, dh, dC = (np.asarray(y, "float64") for y in (x.gates.scaGamma, x.wide(x.arrays[3]), dC_last))
    after = []
    for c in reversed(range(x.NC)):
        after.append(dC)
        dC = gamma[:, :, c, None, None] * dC + np.einsum("bhtk,bhtv->bhkv", x.qbar[:, :, c], dh[:, :, c])
    return np.stack(after[::-1], axis=2), dC


@pytest.mark.parametrize(
    ("num_segments", "dtype", "L", "rows"),
    [(1, "float32", 16, 16), (2, "float32", 64, 16), (16, "float32", 16, 16), (1, "bfloat16", 64, 64), (4, "bfloat16", 16, 16)],
)
def test_recurrent_bw_dC(num_segments, dtype, L, rows):
    x = case(dtype, L, resets=L == 64)
    tiles = dict(siz_b_LKV=rows, siz_b_DHQK=16, siz_b_DHHV=32, num_segments=num_segments)
    assert StageConfig(**tiles).segments(x.problem) == num_segments
    run = jax.jit(launch(recurrent_bw_dC, x.problem, **tiles))
    dC_last = jnp.asarray(np.random.default_rng(0).normal(size=(1, NH, DHQK, DHHV)), "float32")
    dC, dC_initial = run(scores_of(x).matQ_scaled, x.arrays[3], x.gates.scaGamma, dC_last)
    assert (dC.dtype, dC_initial.dtype) == (x.dtype, jnp.float32)
    expected, expected_initial = expected_state_gradients(x, dC_last)
    assert_close(dC, expected, tolerance(dtype, S), "dC")
    assert_close(dC_initial, expected_initial, tolerance(dtype, S), "dC_initial")


@pytest.mark.parametrize("num_segments", [1, 4])
def test_recurrent_bw_dC_from_nothing_to_nothing(num_segments):
    """No gradient of the last C is one of zeros; that of the initial one is not asked for."""
    x = case("float32", 64)
    run = launch(recurrent_bw_dC, x.problem, siz_b_DHQK=16, siz_b_DHHV=32, num_segments=num_segments)
    arguments = scores_of(x).matQ_scaled, x.arrays[3], x.gates.scaGamma
    expected, _ = jax.jit(run)(*arguments, jnp.zeros((1, NH, DHQK, DHHV)))
    found, initial = jax.jit(functools.partial(run, last=False))(*arguments, None)
    assert initial is None
    assert np.array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("num_segments", [1, 4])
@pytest.mark.parametrize("last", [False, True])
def test_recurrent_bw_C_dC_is_both_recurrences(num_segments, last):
    """Blocks of one recurrence are not those of the other, nor what they start from."""
    x = case("float32", 64)
    tiles = dict(siz_b_DHQK=16, siz_b_DHHV=32, num_segments=num_segments)
    config = KernelConfig(recurrent_fw_C=StageConfig(**tiles), recurrent_bw_dC=StageConfig(**tiles))
    options = dict(problem=x.problem, config=config, interpret=True)
    q, k, v, dh = scores_of(x).matQ_scaled, scores_of(x).matK_scaled, *x.arrays[2:]
    C = jnp.asarray(np.random.default_rng(0).normal(size=(1, NH, DHQK, DHHV)), "float32")
    of_C = Recurrence(k, v, x.gates.scaGamma, C, last=last)
    of_dC = Recurrence(q, dh, x.gates.scaGamma, None, last=not last, backward=True)
    found = recurrent_bw_C_dC(of_C, of_dC, **options)
    expected = (
        *recurrent_fw_C(k, v, of_C.gamma, C, last=last, **options),
        *recurrent_bw_dC(q, dh, of_dC.gamma, None, last=not last, **options),
    )
    for actual, alone in zip(found, expected, strict=True):
        assert (actual is None) == (alone is None)
        assert actual is None or np.array_equal(np.asarray(actual), np.asarray(alone))


@pytest.mark.parametrize("backward", [False, True])
def test_states_that_are_vectors(backward):
    r = np.random.default_rng(0)
    added, gamma, x = (y.astype("float32") for y in (r.normal(size=(2, 3, 5, 8)), r.random((2, 3, 5)), r.normal(size=(2, 3, 8))))
    found, last = jax.jit(functools.partial(gates.vector_states, backward=backward))(added, gamma, x)
    added, gamma, x = (y.astype("float64") for y in (added, gamma, x))
    entered = {}
    for c in reversed(range(5)) if backward else range(5):
        entered[c] = x
        x = gamma[:, :, c, None] * x + added[:, :, c]
    assert_close(found, np.stack([entered[c] for c in range(5)], axis=2), tolerance("float32", 5))
    assert_close(last, x, tolerance("float32", 5))


@pytest.mark.parametrize("T", [16, 64])
def test_what_passes_every_step_is_the_same_for_tiles_of_any_size(T):
    """The sums of the gates' gradients: what passes from before step r to r or later, of pairs in the chunk and of the states."""
    L, n = 64, 64 // T
    r = np.random.default_rng(T)
    W = np.tril(r.normal(size=(1, 1, 2, L, L)))
    from_state, to_state, through = r.normal(size=(1, 1, 2 * L)), r.normal(size=(1, 1, 2 * L)), r.normal(size=(1, 1, 2))
    tiles = np.tril(W, -1).reshape(1, 1, 2, n, T, n, T)
    behind = np.tri(n, dtype=bool)
    made = np.moveaxis(tiles.sum(-1), -1, 2), np.moveaxis(tiles.sum(-3), 3, 2)
    made = (np.where(where.reshape(n, 1, n, 1), y, np.nan) for y, where in zip(made, (behind.T, behind), strict=True))
    diagonal = np.diagonal(W, axis1=-2, axis2=-1).reshape(1, 1, 2, n, T)
    with jax.enable_x64(True):
        pairs = TilePairs(*map(jnp.asarray, (*made, diagonal)))
        sums, through_tiles = jax.tree.map(np.asarray, tile_sums(pairs, *map(jnp.asarray, (from_state, to_state, through))))
    assert through_tiles.shape == (1, 1, 2 * n)
    assert {y.shape for y in sums} == {(1, 1, 2 * n, T)}
    inside = np.tri(T)
    passes = sums.vecPairs + np.einsum("...s,st->...t", sums.vecQ_inter, inside) + through_tiles[..., None]
    passes += np.einsum("...s,ts->...t", sums.vecK_inter, np.tri(T, k=-1))
    step = np.arange(L)
    over = np.stack([(W * ((step[:, None] >= at) & (step < at))).sum((-2, -1)) for at in step], axis=-1)
    chunks = (y.reshape(1, 1, 2, L) for y in (from_state, to_state))
    expected = over + np.einsum("...t,tr->...r", next(chunks), np.tri(L)) + np.einsum("...s,rs->...r", next(chunks), np.tri(L, k=-1))
    atol = L**2 * np.finfo("float64").eps  # L^2 terms of order 1 have partial sums of order L, and roundings that add in the square
    np.testing.assert_allclose(passes.reshape(over.shape), expected + through[..., None], rtol=0, atol=atol)
    per_key = sums.vecK_inter + sums.vecK_intra
    np.testing.assert_allclose(per_key.reshape(1, 1, 2, L), W.sum(-2) + to_state.reshape(1, 1, 2, L), rtol=0, atol=atol)
