"""Sums of the gates' gradients against their definition in float64; whole gradients:
test_gradients.py."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlstm_pallas.gate_gradients import TilePairs, run_sums, through_tiles, tile_sums


@pytest.mark.parametrize("n", [1, 32, 33, 1000])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.97, 1.0])
def test_sums_over_runs_of_steps(n, share):
    """Runs within one group, over several, and over groups of groups."""
    r = np.random.default_rng(n)
    x, goes_on = r.normal(size=(6, n)), r.random((6, n)) < share
    expected, after = np.zeros_like(x), np.zeros(6)
    for t in reversed(range(n)):
        after = expected[:, t] = x[:, t] + np.where(goes_on[:, t], after, 0.0)
    result = jax.jit(run_sums)(x.astype("float32"), goes_on)
    # One rounding of each x, and sums of n terms.
    bound = (1 + math.sqrt(n)) * 2.0**-24 * np.linalg.norm(expected)
    assert np.linalg.norm(np.asarray(result) - expected) <= bound


@pytest.mark.parametrize("T", [16, 64])
def test_what_passes_a_step_is_the_same_for_tiles_of_any_size(T):
    """What passes from before step r to r or later: of pairs inside the chunk, and of the
    states."""
    L, n = 64, 64 // T
    r = np.random.default_rng(T)
    W = np.tril(r.normal(size=(1, 2, L, L)))
    q_inter, k_inter, through = (
        r.normal(size=(1, 2 * L)),
        r.normal(size=(1, 2 * L)),
        r.normal(size=(1, 2)),
    )
    tiles = np.tril(W, -1).reshape(1, 2, n, T, n, T)
    after = np.tri(n, dtype=bool)
    pairs = np.moveaxis(tiles.sum(-1), -1, 1), np.moveaxis(tiles.sum(-3), 2, 1)
    pairs = (
        np.where(where.reshape(n, 1, n, 1), y, np.nan)
        for y, where in zip(pairs, (after.T, after), strict=True)
    )
    diagonal = np.diagonal(W, axis1=-2, axis2=-1).reshape(1, 2, n, T)
    with jax.enable_x64(True):
        pairs = TilePairs(*map(jnp.asarray, (*pairs, diagonal)))
        inter = [jnp.asarray(y) for y in (q_inter, k_inter)]
        sums = jax.tree.map(np.asarray, tile_sums(pairs, *inter))
        through_tile = np.asarray(through_tiles(pairs, *inter, jnp.asarray(through)))
    assert through_tile.shape == (1, 2 * n)
    assert {y.shape for y in sums} == {(1, 2 * n, T)}
    passes = np.einsum("...s,st->...t", sums.vecQ, np.tri(T)) + through_tile[..., None]
    passes += np.einsum("...s,ts->...t", sums.vecK_inter, np.tri(T, k=-1))
    step = np.arange(L)
    over = np.stack(
        [(W * ((step[:, None] >= at) & (step < at))).sum((-2, -1)) for at in step], axis=-1
    )
    q_inter, k_inter = (y.reshape(1, 2, L) for y in (q_inter, k_inter))
    expected = (
        over
        + np.einsum("...t,tr->...r", q_inter, np.tri(L))
        + np.einsum("...s,rs->...r", k_inter, np.tri(L, k=-1))
    )
    atol = (
        L**2 * np.finfo("float64").eps
    )  # L^2 terms of order 1 have partial sums of order L, and roundings that add in the square
    np.testing.assert_allclose(
        passes.reshape(over.shape), expected + through[..., None], rtol=0, atol=atol
    )
    per_key = sums.vecK_inter + sums.vecK_intra
    np.testing.assert_allclose(per_key.reshape(1, 2, L), W.sum(-2) + k_inter, rtol=0, atol=atol)
