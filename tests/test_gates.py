"""Gates and stabilisers: the plain jnp form and the kernels against float64 sums written out step by step."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import random_inputs

from mlstm_pallas import gates
from mlstm_pallas.config import KernelConfig, StageConfig
from mlstm_pallas.gate_gradients import runs_summed
from mlstm_pallas.problem import Problem
from mlstm_pallas.stages.chunk_gates import chunk_gates


def assert_decays(found, expected, rounding=0.0):
    """exp(x) of an x rounded in float32, the last time at |x|: relative error (4 + |x|) 2^-23; below 1e-37 it may be 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        bound = expected * ((4 + np.abs(np.log(expected))) * 2.0**-23 + rounding)
    assert (np.abs(found - expected) <= np.where(expected > 1e-37, bound, 1e-37)).all()


def by_definition(i, f, m_initial, L):
    """Stabilisers, decays and border states of one head by the recurrence, in float64."""
    fbar = -np.logaddexp(0.0, -np.asarray(f, "float64"))
    i = np.asarray(i, "float64")
    m, S = float(m_initial), len(i)
    m_t, w, D, borders = np.zeros(S), np.zeros(S), np.zeros((S, L)), [m]
    gamma, abar = np.zeros(S // L), np.zeros(S)
    for c in range(S // L):
        logs, carried, start = np.full(L, -np.inf), m, m
        for t in range(L):
            s = c * L + t
            # logs[r]: log weight of step r's input in the state after step t, and carried that of the state before the chunk
            logs[:t] += fbar[s]
            logs[t] = i[s]
            carried += fbar[s]
            m = max(fbar[s] + m, i[s])
            m_t[s] = m
            if m > -np.inf:
                w[s] = np.exp(carried - m)
                D[s, : t + 1] = np.exp(logs[: t + 1] - m)
        gamma[c] = w[c * L + L - 1]
        abar[c * L : (c + 1) * L] = D[c * L + L - 1]
        borders.append(m)
        assert start == borders[c]
    return m_t, w, D, np.asarray(borders), gamma, abar


@functools.partial(jax.jit, static_argnums=(3, 4))
def by_jnp(i, f, m_initial, L, _):
    return gates.chunk_gates(i.reshape(*i.shape[:2], -1, L), f.reshape(*f.shape[:2], -1, L), m_initial)


@functools.partial(jax.jit, static_argnums=(3, 4))
def by_kernel(i, f, m_initial, L, tile):
    B, NH, S = i.shape
    config = KernelConfig(chunk_gates=StageConfig(siz_b_LQ=tile, num_warps=1, num_stages=1))
    return chunk_gates(i, f, m_initial, problem=Problem(B, NH, S, 16, 16, L, 1.0), config=config, interpret=True)


CASES = {
    "plain": {},
    "resets": {"resets": True},
    "gates_at_-30": {"f_shift": -30.0},
    "gates_at_30": {"f_shift": 30.0, "i_scale": 30.0},
    "gates_at_1e3": {"f_scale": 1e3, "i_scale": 1e3, "resets": True},
    "gates_at_1e4": {"f_shift": -1e4, "i_scale": 1e4},
}
FORMS = {"jnp": (by_jnp, None), "kernel_tile16": (by_kernel, 16), "kernel_tile64": (by_kernel, 64)}


@pytest.mark.parametrize("L", [16, 64, 128])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", FORMS)
def test_gates_are_those_of_the_recurrence(form, case, L):
    S = 128
    x = random_inputs(L, 1, 2, S, 1, 1, **CASES[case])
    make, tile = FORMS[form]
    found = make(x["i"], x["f"], x["m_initial"], L, tile)
    for head in range(2):
        m_t, w, D, borders, gamma, abar = by_definition(x["i"][0, head], x["f"][0, head], x["m_initial"][0, head], L)

        def of_head(y, head=head):
            return np.asarray(y[0, head], "float64").reshape(-1)

        # Four roundings of float32 (2**-24 each): log sigmoid, m_c at a border, their sum, the result.
        np.testing.assert_allclose(of_head(found.scaM_states), borders, rtol=2.0**-22, atol=2.0**-22)
        np.testing.assert_allclose(of_head(found.vecM), m_t, rtol=2.0**-22, atol=2.0**-22)
        # m_c is rounded to float32: decays relative to it, those to an u_t that comes from it included, carry that rounding.
        rounding = np.spacing(np.float32(np.max(np.abs(borders), where=np.isfinite(borders), initial=0)))
        assert_decays(of_head(found.vecW), w, rounding)
        assert_decays(of_head(found.scaGamma), gamma, rounding)
        assert_decays(of_head(found.vecAbar), abar, rounding)
        e_hi, e_lo, u_hi, u_lo = (of_head(y).reshape(-1, L) for y in (*found.vecE, *found.vecU))
        exponent = (e_hi[:, None, :] - u_hi[:, :, None]) + (e_lo[:, None, :] - u_lo[:, :, None])
        decays = np.exp(np.where(np.tri(L, dtype=bool), exponent, -np.inf)).reshape(S, L)
        assert_decays(decays, D, rounding)


@pytest.mark.parametrize("form", ["jnp", "kernel_tile16"])
def test_a_reset_with_nothing_stored_behind_it_empties_the_state(form):
    i = jnp.asarray([0.0, 1.0, -jnp.inf, -jnp.inf] * 8, jnp.float32).reshape(1, 1, 32)
    f = jnp.asarray([1.0, 1.0, -jnp.inf, 2.0] * 8, jnp.float32).reshape(1, 1, 32)
    make, tile = FORMS[form]
    found = make(i, f, jnp.zeros((1, 1)), 16, tile)
    empty = np.asarray(f.reshape(8, 4) == -jnp.inf) | np.asarray([False, False, False, True])
    assert np.array_equal(np.asarray(found.vecM).reshape(8, 4) == -math.inf, empty)
    assert np.array_equal(np.asarray(found.vecU[0]).reshape(8, 4) == math.inf, empty)
    assert not np.asarray(found.vecW).reshape(8, 4)[empty].any()
    assert not np.asarray(found.vecAbar).any()
    assert np.asarray(found.scaM_states)[0, 0].tolist() == [0.0, -math.inf, -math.inf]


def test_border_maxima_reads_more_chunks_than_a_block():
    """600 chunks: two blocks of the kernel, the second not full."""
    S = 600 * 16
    x = random_inputs(5, 1, 1, S, 1, 1, f_shift=0.0)
    f = x["f"].at[0, 0, 4000].set(-jnp.inf)
    plain = by_jnp(x["i"], f, x["m_initial"], 16, None)
    kernel = by_kernel(x["i"], f, x["m_initial"], 16, 16)
    # Four roundings: the kernel rounds m once a block, the scan once a level, each where it is the old state that counts.
    np.testing.assert_allclose(np.asarray(kernel.scaM_states), np.asarray(plain.scaM_states), rtol=2.0**-22, atol=2.0**-22)


def test_exact_sums_are_exact():
    x = np.random.default_rng(0).normal(size=4096).astype("float32") * 1e3
    hi, lo = gates.split_for_exact_sums(jnp.asarray(x), jnp.max(jnp.abs(x)), 4096)
    assert np.array_equal(np.asarray(hi, "float64") + np.asarray(lo, "float64"), x.astype("float64"))
    assert np.array_equal(np.asarray(jnp.cumsum(hi), "float64"), np.cumsum(np.asarray(hi, "float64")))


def test_split_survives_the_compiler():
    """(x + grid) - grid must not be simplified to x under jit."""
    x = jnp.asarray([0.1, 0.2, 0.3], jnp.float32)
    _, lo = jax.jit(lambda x: gates.split_for_exact_sums(x, jnp.max(x), 64))(x)
    assert bool((lo != 0).any())


def test_log_sigmoid_has_its_derivative_at_0_and_far_out():
    for f in (-1e4, -2.0, 0.0, 2.0, 1e4, float("inf")):
        found = jax.grad(lambda x: gates.log_sigmoid_gate(x)[0])(jnp.float32(f))
        assert float(found) == pytest.approx(float(jax.nn.sigmoid(jnp.float32(-f))), rel=1e-6), f


@pytest.mark.parametrize("n", [1, 32, 33, 1000])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.97, 1.0])
def test_sums_over_runs_of_steps(n, share):
    """Of one group, of several, and of groups of groups."""
    r = np.random.default_rng(n)
    x, goes_on = r.normal(size=(2, 3, n)), r.random((2, 3, n)) < share
    expected, behind = np.zeros_like(x), np.zeros((2, 3))
    for t in reversed(range(n)):
        behind = expected[..., t] = x[..., t] + np.where(goes_on[..., t], behind, 0.0)
    found = jax.jit(runs_summed)(x.astype("float32"), goes_on)
    # One rounding of each x, and sums of n terms.
    bound = (1 + math.sqrt(n)) * 2.0**-24 * np.linalg.norm(expected)
    assert np.linalg.norm(np.asarray(found) - expected) <= bound
