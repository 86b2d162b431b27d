"""Any values, gates, states and starts of packed sequences, in a dozen classes of shapes and
options, against the float64 recurrence."""

import dataclasses
import os
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from call_checks import UNNORMALISED, fused, tiles
from oracle import (
    array,
    check_draws,
    config_in_splits,
    cotangents_for,
    gradients_of_call,
    head_norms,
    in_float64,
    initial_state_scale,
    outputs_and_gradients,
    random_inputs,
    tolerance,
)

from mlstm_pallas import KernelConfig, reference

EXAMPLES = int(os.environ.get("MLSTM_PALLAS_EXAMPLES", "20"))  # of a class
GPU_EXAMPLES = 170


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """What is compiled once: shapes, dtype, options."""

    B: int
    NH: int
    S: int
    DHQK: int
    DHV: int
    L: int
    dtype: str = "float32"
    states: bool = True
    packed: bool = False
    config: KernelConfig | None = None
    options: dict[str, object] = dataclasses.field(default_factory=dict)


TILED = tiles(16, 16)  # several in a chunk of 32
SCAN = dict(siz_b_L=16, state_rows=16)  # two launches at 32 rows of the state
SPLITS = config_in_splits(4, scan=SCAN, siz_b_L=16)
UNSTABILISED = dict(stabilize_correctly=False, norm_val=0.5, eps=0.1)
CASES = {
    "padded": Case(3, 2, 41, 12, 20, 32),
    "packed_tiles": Case(
        1, 2, 50, 16, 16, 32, packed=True, config=TILED, states=False, options=UNSTABILISED
    ),
    "bfloat16": Case(1, 2, 64, 16, 16, 32, dtype="bfloat16"),
    "bfloat16_packed": Case(2, 1, 48, 16, 16, 32, dtype="bfloat16", packed=True, config=TILED),
    "fused": Case(1, 2, 50, 24, 16, 32, packed=True, config=fused(**SCAN)),
    "splits": Case(1, 2, 64, 16, 32, 16, packed=True, config=SPLITS),
    "sigmoid": Case(1, 2, 64, 16, 16, 32, packed=True, options=UNNORMALISED),
}


EDGES = dict(i=[-np.inf, -9e3, 9e3], f=[-np.inf, -900.0, 900.0, np.inf])


def drawn_gates(r, shape, edges):
    """Pre-activations: normal ones for all steps, others for a share of them, values at the edges
    of the range for another."""

    def normal():
        centre = r.choice([0.0, 3.0, -3.0, 30.0, -30.0, 1e3, -1e3])
        return centre + r.choice([0.0, 1.0, 10.0, 1e3]) * r.normal(size=shape)

    x = np.where(r.random(shape) < r.choice([0.0, 0.05, 0.5]), normal(), normal())
    x = np.where(r.random(shape) < r.choice([0.0, 0.1]), r.choice(edges, size=shape), x)
    # At a tie of maxima any subgradient will do.
    return x * (1 + 1e-2 * r.random(shape)) + 1e-2 * r.random(shape)


def drawn(case, seed):
    """Inputs by name and ids of packed sequences or None, from a distribution that is drawn too."""
    r, shape = np.random.default_rng((seed, 1)), (case.B, case.NH, case.S)
    sizes = {name: r.choice([1.0, 1.0, 1.0, 1e-30, 1e-3, 1e4]) for name in "qkv"}
    sizes |= dict(c_initial=r.choice([0.0, 1.0]), m_initial=r.choice([0.0, 1.0, 100.0]))
    has_m = "input_gate" not in case.options
    x = random_inputs(seed, *shape, case.DHQK, case.DHV, states=case.states, m_initial=has_m)
    x |= {name: np.float64(x[name]) * sizes[name] for name in sizes.keys() & x}
    x |= {name: drawn_gates(r, shape, edges) for name, edges in EDGES.items()}
    segment_starts = r.random((case.B, case.S)) < r.choice([0.0, 0.05, 0.3, 1.0])
    return x, np.cumsum(segment_starts, axis=1).astype("int32") if case.packed else None


@cache
def compiled_oracle(case: Case):
    """Outputs, gradients, and how large the terms of these are: gradients with the denominator held
    constant, gradients through it if nothing cancelled in delta = dh . h, and the sum over the
    sequence of dm_t if nothing did."""
    options = case.options

    @jax.jit
    def expected(ids, x, cotangents):
        run = partial(reference.recurrence, segment_ids=ids, **options)
        numerator = partial(run, normalize=False)
        outputs, gradients = outputs_and_gradients(run)(x, cotangents)
        h, num = outputs[0], numerator(**x)[0]
        size = jnp.sum(num**2, axis=-1)
        inv_den = jnp.sum(h * num, axis=-1) / jnp.where(size > 0, size, 1.0)  # num = 0 else
        delta = jnp.linalg.norm(cotangents[0], axis=-1) * jnp.linalg.norm(h, axis=-1)
        dm = delta
        if options.get("stabilize_correctly", True):
            dm = delta * options.get("eps", 1e-6) * inv_den

        def with_constant_denominator(**x):
            num, states = numerator(**x)
            return num * inv_den[..., None], states

        def through_denominator(x):
            of_z = {"v": jnp.ones_like(x["v"][..., :1])}  # z is n . q: C^T q for one column of ones
            if "n_initial" in x:
                of_z["c_initial"] = x["n_initial"][..., None]
            z, _ = numerator(**x | of_z)
            return jnp.sum(z[..., 0] * delta * inv_den)

        _, terms = outputs_and_gradients(with_constant_denominator)(x, cotangents)
        return outputs, gradients, terms, jax.grad(through_denominator)(x), jnp.sum(dm, axis=-1)

    return expected


BOUND = {"float32": 1e-3, "bfloat16": 2e-2}
# Below this numbers and products of them may be subnormal in float32, which a device may take for
# 0.
FLOOR = 1e-26


def passing(of_q, of_k, initial, last):
    """Norm over the steps r of what passes r at the most: all that is taken at r or later, or that
    was given before.

    of_q, of_k: (B, NH, S, DHQK), what q_t takes and k_s gives; initial, last: (B, NH), what the
    initial states give, the last ones take.
    """
    taken, given = np.linalg.norm(of_q, axis=-1), np.linalg.norm(of_k, axis=-1)
    later = last[..., None] + np.cumsum(taken[..., ::-1], axis=-1)[..., ::-1]
    before = np.cumsum(np.concatenate([initial[..., None], given[..., :-1]], axis=-1), axis=-1)
    return head_norms(np.minimum(later, before))


def check(case: Case, backend: str, x, ids=None, seed=1):
    """seed: of the cotangents."""
    x = {name: array(x[name], case.dtype if name in "qkv" else "float32") for name in x}
    *cotangents, of_m = cotangents_for(x, case.dtype, seed=seed)
    cotangents.append(0 * of_m)
    run = gradients_of_call(chunk_size=case.L, backend=backend, config=case.config, **case.options)
    (*outputs, m), gradients = run(x, cotangents, segment_ids=ids)
    (*expected, m_expected), expected_gradients, terms, of_dz, of_dm = in_float64(
        partial(compiled_oracle(case), ids), x, cotangents
    )

    def compare(name, actual, desired, scale, bound, rounding=0.0):
        actual = np.float64(actual)
        assert np.isfinite(desired).all(), f"{name}: the oracle is not finite"
        assert np.isfinite(actual).all(), f"{name} is not finite"
        off = head_norms(actual - desired)
        allowed = bound * (head_norms(desired) + scale) + rounding + FLOOR
        assert (off <= allowed).all(), f"{name} is off by {off}, allowed {allowed}"

    # m is float32, rounded at a few chunk boundaries, and c and n are relative to it: the state
    # itself is exp(m) c.
    m, finite = np.float64(m), np.isfinite(m_expected)
    assert np.array_equal(np.isfinite(m), finite)
    off_m = np.abs(np.subtract(m, m_expected, where=finite, out=np.zeros_like(m)))
    largest = 1e4 + np.abs(np.where(finite, m_expected, 0.0))
    assert (off_m <= 1e-5 + 4 * 2.0**-24 * largest).all(), f"m is {m}, expected {m_expected}"
    bound = BOUND[case.dtype] + off_m
    for name, actual, desired in zip("hcn", outputs, expected, strict=True):
        compare(name, actual, desired, 0.0, BOUND[case.dtype] if name == "h" else bound)
    # The gates' gradients are sums of q . dq and k . dk, the forget gates' and m_initial's of many
    # of them, which may cancel.
    wide = {name: np.float64(y) for name, y in x.items()}
    of_q, of_k = (wide[name] * terms[name] for name in "qk")
    flow, initial = head_norms(of_q) + head_norms(of_k), np.zeros(of_q.shape[:2])
    last = initial_state_scale(
        *cotangents[1:3], {"c_initial": expected[1], "n_initial": expected[2]}
    )
    of_delta = of_dm + sum(head_norms(wide[name] * of_dz[name]) for name in "qk")
    if case.states:
        initial = initial_state_scale(
            expected_gradients["c_initial"], expected_gradients["n_initial"], x
        )
        flow = flow + initial
        of_delta = of_delta + head_norms(wide["n_initial"] * of_dz["n_initial"])
    # What a step gives and takes is relative to m, which is rounded, and about as large as the
    # largest of these.
    sizes = abs(np.concatenate([wide["i"], wide.get("m_initial", m)[..., None], m[..., None]], -1))
    m_rounding = 2.0**-24 * np.max(sizes, axis=-1, where=np.isfinite(sizes), initial=0.0)
    # h, of which delta is made, is rounded to its dtype.
    unit = 0.0 if case.options == UNNORMALISED else tolerance(case.dtype, case.DHV)
    for name in x:
        sums = name in ("i", "f", "m_initial")
        scale, rounding = (flow, of_delta) if sums else map(head_norms, (terms[name], of_dz[name]))
        off = unit * rounding
        if name == "f":  # one source may pass every step, with the roundings that it has
            unit_f = tolerance(case.dtype, case.DHV) + m_rounding
            off = off + unit_f * passing(of_q, of_k, initial, last)
        compare(f"d{name}", gradients[name], expected_gradients[name], scale, bound, off)


WIDE = {dtype: Case(1, 2, 512, 16, 16, 64, dtype) for dtype in ("float32", "bfloat16", "float16")}


def drawn_wide(case, seed):
    """Inputs with gates of models and wider ones, fast and no forgetting, n . q that cancels or
    not. In float16, where gradients would be inf, it does not."""
    r = np.random.default_rng((seed, 2))
    x = random_inputs(seed, 1, case.NH, case.S, case.DHQK, case.DHV, states=False)
    x = {name: np.float64(y) for name, y in x.items()}
    for name, centres in dict(i=[0.0], f=[0.0, 4.0, 10.0, 40.0]).items():
        x[name] = r.choice(centres) + r.choice([1.0, 5.0, 15.0]) * r.normal(size=x[name].shape)
        x[name] = 15 * np.tanh(x[name] / 15) if r.random() < 0.3 else x[name]
    if case.dtype != "float16" and r.random() < 0.7:
        x |= {name: x[name] * r.choice([-1, 1], size=x[name].shape) for name in "qk"}
    return {name: array(y, case.dtype if name in "qkv" else "float32") for name, y in x.items()}


@partial(jax.jit, static_argnames="unit")
def rounded_once_more(x, dh, unit):
    """h and the gradients, and the root mean squares of what changes in them if q, k, v and h are
    rounded to ``unit`` where they are multiplied, and the terms of C^T q and n . q to float32."""

    def num(x):
        return reference.recurrence(**x, normalize=False)[0]

    def z_of(x):
        return num(x | {"v": jnp.ones_like(x["v"][..., :1])})[..., 0]

    def m_of(x):
        """m, which scales num and z: in sums of the gates their derivatives by it cancel."""
        b = jnp.cumsum(jax.nn.log_sigmoid(x["f"]), axis=-1)
        return b + jnp.maximum(jax.lax.cummax(x["i"] - b, axis=2), 0.0)

    h, vjp = jax.vjp(lambda x: reference.recurrence(**x)[0], x)
    numerator, z, sums = num(x), z_of(x), z_of(x | {name: abs(x[name]) for name in "qk"})
    numerator_sums = num(x | {name: abs(x[name]) for name in "qkv"})
    size = jnp.sum(numerator**2, axis=-1)
    inv_den = jnp.sum(h * numerator, axis=-1) / jnp.where(size > 0, size, 1.0)
    sign = jnp.where((abs(z) + 1e-6) * inv_den < 1 - 1e-9, 0.0, jnp.sign(z))  # 0: on the floor

    def results(key, times):
        keys = iter(jax.random.split(key, 8))

        def rounded(y, unit=unit):
            return y * (1 + times * unit * jax.random.normal(next(keys), y.shape))

        operands = x | {name: rounded(x[name]) for name in "qkv"}
        of_z = x | {name: rounded(x[name], 2.0**-24) for name in "qk"}
        inverse = rounded(inv_den, 2.0**-24 * sums * inv_den)
        numerator, num_vjp = jax.vjp(num, operands)
        # Each column of C^T q rounds by itself, so h changes direction and dh . h cancels less.
        added = rounded(numerator_sums, 2.0**-24) - numerator_sums
        h = rounded((numerator + added) * inverse[..., None])
        z, z_vjp = jax.vjp(z_of, of_z)
        dz = -sign * jnp.sum(dh * h, axis=-1) * inverse
        dm = jnp.sum(dh * numerator, axis=-1) * inverse + dz * z
        each = num_vjp(dh * inverse[..., None]), z_vjp(dz), jax.vjp(m_of, x)[1](dm)
        return {"h": h} | jax.tree.map(lambda *y: sum(y), *(y for (y,) in each))

    many = jax.vmap(results)(jax.random.split(jax.random.key(0), 9), jnp.arange(9) > 0)
    rms = jax.tree.map(lambda y: jnp.sqrt(jnp.mean((y[1:] - y[0]) ** 2, axis=0)), many)
    return {"h": h} | vjp(dh)[0], rms


def check_wide(case, backend, seed):
    """Odd seeds: dh is that of a norm of h, in which dh . h cancels."""
    x, unit = drawn_wide(case, seed), float(jnp.finfo(case.dtype).eps) / 2
    dh = cotangents_for(x, case.dtype, states=False, seed=seed)[0]
    run = gradients_of_call(chunk_size=case.L, backend=backend, return_last_states=False)
    (h,), gradients = run(x, [dh])
    if seed % 2:
        h = np.float64(h)
        size = np.linalg.norm(h, axis=-1, keepdims=True) + 1e-6
        dh = (dh - np.sum(dh * h, axis=-1, keepdims=True) * h / size**2) / (1 + size)
        dh = array(array(dh, case.dtype), "float32")
        (h,), gradients = run(x, [dh])
    expected, rms = in_float64(partial(rounded_once_more, unit=unit), x, dh)
    for name, actual in ({"h": h} | gradients).items():
        off = head_norms(np.float64(actual) - expected[name])
        factor = 3 if name in "hv" else 8 if name in "qk" else 32  # as documented
        allowed = factor * (head_norms(rms[name]) + unit * head_norms(expected[name])) + FLOOR
        assert (off <= allowed).all(), f"{name} is off by {off}, allowed {allowed}"


@pytest.mark.slow
def test_rounding_of_a_large_m_passes_many_steps():
    """Found by these tests."""
    case, seed = CASES["fused"], 1526256759
    check(case, "interpret", *drawn(case, seed), seed)


@pytest.mark.slow
def test_a_large_old_state_before_tiny_keys():
    """Found by these tests."""
    x = random_inputs(140, 3, 2, 41, 12, 20, i_scale=1e-2, f_scale=1e-2, f_shift=0.0)
    sizes = dict(q=1e4, k=1e-30, m_initial=100.0)
    check(CASES["padded"], "xla", x | {name: x[name] * size for name, size in sizes.items()})


# The interpreter has packed sequences of bfloat16 in the same tiles.
ON_A_CPU = dict.fromkeys(CASES.keys() - {"bfloat16"}, "interpret") | {"padded": "xla"}


def check_drawn(name, backend, count):
    case = CASES[name]
    check_draws(lambda seed: check(case, backend, *drawn(case, seed), seed), name, count)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), [*sorted(ON_A_CPU.items()), ("packed_tiles", "xla")])
def test_any_values(name, backend):
    check_drawn(name, backend, EXAMPLES if backend == "xla" else EXAMPLES // 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "backend", "seed"),
    [
        ("bfloat16", "xla", 2),  # rounded P in n . q would take 12 times what is allowed
        ("float32", "xla", 115),  # C^T q cancels within one step, and dh . h in its row
        ("float16", "xla", 2),
        ("bfloat16", "interpret", 2),
    ],
)
def test_errors_are_those_of_one_more_rounding_whatever_cancels(dtype, backend, seed):
    """As docs/background.md promises."""
    check_wide(WIDE[dtype], backend, seed)
    check_draws(partial(check_wide, WIDE[dtype], backend), dtype, EXAMPLES // 4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_any_values_on_a_gpu(name):
    check_drawn(name, "triton", GPU_EXAMPLES)
