"""Gates, stabilisers, sums of gate gradients: the plain form and the kernels against float64 sums
written out step by step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import (
    compare,
    quick_code,
    random_inputs,
    tolerance,
)
from stage_calls import (
    InputGate,
    Lowering,
    Problem,
    Steps,
    TileSums,
    check_drawn,
    gate_gradients,
    gates,
    launch_of,
    run_stage,
)


def assert_decays(result, expected, rounding):
    """exp(x) of an x rounded in float32, the last time at |x|: relative error (4 + |x|) 2^-23;
    below 1e-37 it may be 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        bound = expected * ((4 + np.abs(np.log(expected))) * 2.0**-23 + rounding)
    assert (np.abs(result - expected) <= np.where(expected > 1e-37, bound, 1e-37)).all()


def by_definition(i, f, m_initial, segment_starts, L, input_gate):
    """Stabilisers, decays, flags and chunk-boundary states of one head by the recurrence, in
    float64."""
    fbar, i = -np.logaddexp(0.0, -np.asarray(f, "float64")), np.asarray(i, "float64")
    i = -np.logaddexp(0.0, -i) if input_gate is InputGate.SIGMOID else i
    m, S = float(m_initial), len(i)
    m_t, w, D, flags = np.zeros(S), np.zeros(S), np.zeros((S, L)), np.zeros(S, int)
    for s in range(S):
        t = s % L
        if t == 0:
            logs, carried = np.full(L, -np.inf), m
        if segment_starts[s]:
            logs[:t], carried, m = -np.inf, -np.inf, 0.0
        # logs[r]: log weight of step r's input in the state after step t, and carried that of the
        # state before the chunk
        logs[:t] += fbar[s]
        logs[t] = i[s]
        carried += fbar[s]
        decayed = fbar[s] + m
        if input_gate is InputGate.EXP:
            m = max(decayed, i[s])
        # The former m where nothing is stored, too.
        goes_on, is_first = decayed >= i[s] and fbar[s] > -np.inf, segment_starts[s]
        nonzero = decayed > -np.inf and decayed - m > gates.LEAST_EXPONENT["float32"]
        bits = gates.M_FROM_PREVIOUS, gates.M_GRAD_FLOWS, gates.DECAY_NONZERO
        flags[s] = np.dot(bits, (goes_on, goes_on and not is_first, nonzero and not is_first))
        m_t[s] = m
        if m > -np.inf:
            w[s] = np.exp(carried - m)
            D[s, : t + 1] = np.exp(logs[: t + 1] - m)
    last = slice(L - 1, None, L)  # of each chunk
    return m_t, w, D, flags, np.append(m_initial, m_t[last]), w[last], D[last].ravel()


FORMS = (Lowering.XLA, Lowering.INTERPRET)


@functools.partial(
    jax.jit, static_argnames=("L", "form", "input_gate", "reverse", "only_boundaries")
)
def gates_of(
    i,
    f,
    m_initial,
    segment_starts=None,
    lengths=None,
    *,
    L,
    form,
    input_gate=InputGate.EXP,
    reverse=False,
    only_boundaries=False,
):
    """chunk_gates of (heads, S), in time."""
    p = Problem(1, *i.shape, 64, 64, L, 1.0, reverse)
    call = launch_of("chunk_gates", p, "bfloat16", form)
    x = call.processing_order(dict(vecI=i, vecF=f, segment_starts=segment_starts)) | dict(
        scaM_initial=m_initial
    )
    options = dict(with_flags=True) if not only_boundaries else dict(only_boundaries=True)
    result = run_stage("chunk_gates", call, input_gate=input_gate, **options, **x)
    if only_boundaries:
        return result
    steps = Steps(lengths).that_count(i.shape[1])
    return gates.only_outputs(call.processing_order(result), steps)


# Options of random_inputs.
CASES = {
    "plain": dict(),
    "resets": dict(resets=True),
    "gates_at_-30": dict(f_shift=-30.0),
    "gates_at_30": dict(f_shift=30.0, i_scale=30.0),
    "gates_at_1e3": dict(f_scale=1e3, i_scale=1e3, resets=True),
    "gates_at_1e4": dict(f_shift=-1e4, i_scale=1e4),
    # A segment that begins with nothing stored has an m near 0, far below the gates before it.
    "starts_below_large_gates": dict(resets=True, i_shift=3e3),
}


LINES = *(f"{case} exp packed" for case in CASES), "plain exp lengths", "resets sigmoid"


@pytest.mark.quick("xla-16-resets sigmoid", "interpret")
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize(("form", "L"), [*zip(FORMS, (16, 64), strict=True)])
def test_gates_are_those_of_the_recurrence(form, L, line):
    with quick_code(form is Lowering.INTERPRET):
        check_line(line.replace(" ", f"-{L}-128 ", 1), form)


@pytest.mark.slow
def test_stabilisers_of_many_chunks_are_those_of_the_recurrence():
    """In three blocks of 512 chunks; the initial state is forgotten in the second one."""
    r, S, L = np.random.default_rng(0), 1040 * 16, 16
    i, f = np.float32(r.normal(size=(2, 1, S)))
    m, f = np.float32([40.0]), f + 9
    f[0, 9000] = -np.inf
    run = functools.partial(gates_of, i, f, m, L=L, form=Lowering.INTERPRET)
    with quick_code():
        result, (after, added) = run().scaM_states, run(only_boundaries=True)
    expected, fbar = [m], -np.logaddexp(0.0, -np.float64(f))
    for t in range(S):
        expected.append(np.maximum(fbar[:, t] + expected[-1], i[:, t]))
    sums = fbar.reshape(1, -1, L).sum(axis=2)
    for y, desired in (result, expected[::L]), (after, expected[L::L]), (added, sums.T):
        np.testing.assert_allclose(y.T, desired, rtol=2.0**-22, atol=2.0**-22)


def drawn(L, S, input_gate, packed, recipe):
    """i, f, m_initial and starts of two heads, or None."""
    x = random_inputs(L, 1, 2, S, 1, 1, **recipe)
    i, f, m_initial = (np.asarray(x[name])[0] for name in ("i", "f", "m_initial"))
    segment_starts = (
        (np.random.default_rng(0).random((2, S)) < 0.1).astype("int32") if packed else None
    )
    return i, f, m_initial * (input_gate is InputGate.EXP), segment_starts


def check_line(line, form):
    """A line has inputs, chunk size and steps; the gate; whether sequences are packed, reversed and
    cut to lengths."""
    x, gate, *options = line.split()
    case, L, S = x.rsplit("-", 2)
    L, S, input_gate, packed = int(L), int(S), InputGate(gate), "packed" in options
    lengths = np.array([41, S - 22], "int32") if "lengths" in options else None  # of the heads
    i, f, m_initial, segment_starts = x = drawn(L, S, input_gate, packed, CASES[case])
    options = dict(input_gate=input_gate, reverse="reverse" in options)
    result = gates_of(*x, lengths, L=L, form=form, **options)
    heads = zip(i, f, m_initial, segment_starts if packed else np.zeros((2, S)), strict=True)
    expected = (by_definition(*head, L, input_gate) for head in heads)
    m_t, w, D, flags, boundaries, gamma, abar = map(np.stack, zip(*expected, strict=True))
    if lengths is not None:
        beyond = np.arange(S) >= lengths[:, None]
        w[beyond], D[beyond] = 0, 0

    def of_heads(y):
        return np.asarray(y, "float64").reshape(2, -1)

    # m is constant with the sigmoid gate.
    read = ~0 if input_gate is InputGate.EXP else gates.DECAY_NONZERO
    assert np.array_equal(np.reshape(result.vecFlags, flags.shape) & read, flags & read)
    # Four roundings of float32 (2**-24 each): log sigmoid, m_c at a chunk boundary, their sum, the
    # result.
    for m, desired in ((result.scaM_states, boundaries), (result.vecM, m_t)):
        np.testing.assert_allclose(of_heads(m), desired, rtol=2.0**-22, atol=2.0**-22)
    # m_c is rounded to float32: decays relative to it, those to a u_t that comes from it included,
    # have that rounding.
    finite = np.where(np.isfinite(boundaries), boundaries, 0)
    rounding = np.spacing(np.float32(np.max(np.abs(finite), axis=1, keepdims=True)))
    e_hi, e_lo, u_hi, u_lo = (np.asarray(y, "float64") for y in (*result.vecE, *result.vecU))
    exponent = (e_hi[..., None, :] - u_hi[..., None]) + (e_lo[..., None, :] - u_lo[..., None])
    decays = np.exp(np.where(np.tri(L, dtype=bool), exponent, -np.inf))
    tile_sums = (result.vecW, w), (result.scaGamma, gamma), (result.vecAbar, abar), (decays, D)
    for y, desired in tile_sums:
        assert_decays(of_heads(y), of_heads(desired), rounding)


def test_exact_sums_are_exact():
    """The compiler must not simplify (x + grid) - grid to x."""
    x = np.float32(np.random.default_rng(0).normal(size=4096) * 1e3)
    split = jax.jit(lambda x: gates.split_at(x, gates.exact_sum_grid(jnp.max(jnp.abs(x)), 4096)))
    hi, lo = map(np.asarray, split(x))
    assert lo.any()
    assert np.array_equal(np.add(hi, lo, dtype="float64"), x)
    assert np.array_equal(jnp.cumsum(hi), np.cumsum(hi, dtype="float64"))


def test_the_forget_gate_keeps_its_digits():
    """exp, log1p and a sum: two roundings each but for the sum. exp of 40 in one rounding of its
    exponent is off by 40 of them."""
    bound, f = 5 * 2.0**-24, np.append(np.linspace(-40, 40, 1001), [-1e4, 1e4]).astype("float32")
    value, vjp = jax.vjp(jax.jit(lambda f: gates.log_forget_gate(f)[0]), f)
    [slope], f = vjp(jnp.ones_like(value)), np.float64(f)
    np.testing.assert_allclose(value, -np.logaddexp(0, -f), rtol=bound, atol=1e-37)
    np.testing.assert_allclose(slope, np.exp(-np.logaddexp(0, f)), rtol=10 * bound, atol=1e-37)


def check_vector_states(call, backward):
    check_drawn("vector_states", call, tolerance("float32", call.problem.NC), backward=backward)


def gradients_by_definition(BNH, S, L, T, share, has_dm=True):
    """Operands of step_gradients, and its results in float64, from W_ts of all pairs of steps.

    What the stages leave unwritten is NaN.

    share: of the steps whose stabiliser is that of the step before.
    """
    r, NC, n = np.random.default_rng(0), S // L, L // T
    W = np.tril(r.normal(size=(BNH, NC, L, L)))
    strict, tile = np.tril(W, -1), np.arange(S) % L // T
    tiles, written = strict.reshape(BNH, NC, n, T, n, T), tile - np.arange(n)[:, None]
    per_query, per_key = (
        np.where(where, np.moveaxis(sums, axis, 1).reshape(BNH, n, S), np.nan)
        for where, sums, axis in (
            (written >= 0, tiles.sum(axis=5), 4),
            (written <= 0, tiles.sum(axis=3), 2),
        )
    )
    diagonal = np.diagonal(W, axis1=2, axis2=3).reshape(BNH, S)
    f, q, k, dm = r.normal(size=(4, BNH, S))
    through = r.normal(size=(BNH, NC))
    from_previous, goes_on, decays = (r.random((BNH, S)) < p for p in (share, 0.999, 0.95))
    from_previous[0, 2 * L : 2 * L + 1] = False  # behind whole chunks, if there are so many
    bits = gates.M_FROM_PREVIOUS, gates.M_GRAD_FLOWS, gates.DECAY_NONZERO
    flags = np.tensordot(bits, (from_previous, goes_on & from_previous, decays), 1)
    x = dict(
        vecF=f,
        tile_sums=TileSums(per_query, per_key, diagonal),
        q_dot_dq_inter=q,
        k_dot_dk_inter=k,
        pass_through=through,
        dm=dm if has_dm else None,
    )
    x = jax.tree.map(np.float32, x) | dict(flags=np.int32(flags))

    q, k, df = q.reshape(BNH, NC, L), k.reshape(BNH, NC, L), np.zeros((BNH, NC, L))
    for t in range(L):
        across = strict[:, :, t:, :t].sum(axis=(2, 3))
        df[:, :, t] = across + q[:, :, t:].sum(-1) + k[:, :, :t].sum(-1) + through
    di, df = (k + W.sum(axis=2)).reshape(BNH, S), np.where(decays, df.reshape(BNH, S), 0)
    later = np.zeros(BNH)
    for t in reversed(range(S if has_dm else 0)):
        total = dm[:, t] + later
        di[:, t] += np.where(from_previous[:, t], 0, total)
        df[:, t] += np.where(from_previous[:, t], total, 0)
        later = np.where(goes_on[:, t] & from_previous[:, t], total, 0)
    return x, (di, df / (1 + np.exp(f)), later)


def check_step_gradients(form, sizes, reverse=False, **options):
    """step_gradients against its definition; sizes: B * NH, S, L, T and the share."""
    BNH, S, L, *_ = sizes
    x, expected = gradients_by_definition(*sizes, **options)
    call = launch_of(
        "step_gradients", Problem(1, BNH, S, 64, 64, L, 1.0, reverse), "bfloat16", form
    )
    x = call.processing_order(x)
    *steps, dm_initial = jax.jit(lambda x: run_stage("step_gradients", call, **x))(x)
    compare(
        ("di", "df", "dm_initial"),
        (*call.processing_order(steps), dm_initial),
        expected,
        tolerance("float32", S),
    )


@pytest.mark.quick("sizes0", "sizes1")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("sizes", "reverse"),
    [
        ((6, 16, 16, 16, 0.5), False),  # one chunk of one tile
        ((6, 128, 128, 16, 1.0), True),  # of several
        ((2, 1024, 64, 32, 0.97), True),  # runs over several chunks
        ((2, 640, 128, 64, 0.0), False),  # no run
        ((1, 512, 256, 16, 1.0), False),  # of more tiles than loops are unrolled for
        ((2, 16640, 16, 16, 0.9999), True),  # runs over three blocks of 512 chunks
    ],
)
def test_gradients_of_gates_are_those_by_definition(form, sizes, reverse):
    check_step_gradients(form, sizes, reverse)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_gates_with_a_constant_m(form):
    check_step_gradients(form, (2, 256, 128, 64, 0.5), has_dm=False)


def test_inner_products_of_float16_are_of_float32():
    x = np.full((2, 3), 300, "float16")
    assert np.array_equal(gate_gradients.inner(x, x), np.full(2, 3 * 300.0**2))
