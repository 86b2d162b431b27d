"""Calls of several tiles, chunks and splits, of values of any size and of ones that cancel, as the
self-check draws and bounds them; and the errors that docs/numerics.md promises.

These are of wider gates where n . q cancels. Their bound has a rounding of each column of C^T q,
which the self-check's, of one more column of q and k, cannot have.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import (
    array,
    check_draws,
    cotangents_for,
    gradients_of_call,
    head_norms,
    in_float64,
    random_inputs,
)

from mlstm_pallas import reference, selfcheck

EXAMPLES = int(os.environ.get("MLSTM_PALLAS_EXAMPLES", "20"))  # of a class
GPU_EXAMPLES = 60


def case(sizes, chunk_size, dtype="float32", segments=True, initial=True, config=(), **options):
    """A program of the self-check; sizes: B, NH, S, DHQK, DHV."""
    call = dict(zip(("B", "NH", "S", "DHQK", "DHV"), sizes, strict=True), dtype=dtype)
    options |= dict(chunk_size=chunk_size, config=dict(config), return_last_states=True)
    options |= dict(recompute_states_in_bw=True)
    return call | dict(
        function="mlstm_chunkwise", initial=initial, segments=segments, options=options
    )


TILED = dict(
    triton_parallel_bw_dP=dict(siz_b_LQ=16, block_k=16),
    triton_parallel_bw_dQKV=dict(siz_b_LQ=16, siz_b_DHQK=16, siz_b_DHHV=16, block_k=16),
)
FUSED_TILES = dict(siz_b_L=16, state_rows=16)  # two launches at 32 rows of the state
IN_SPLITS = dict(siz_b_L=16, num_splits=4)
SPLITS = dict(
    fused=True,
    num_splits=4,
    triton_recurrent_fw_H=FUSED_TILES,
    triton_recurrent_fw_C=IN_SPLITS,
    triton_recurrent_bw_dC=IN_SPLITS,
)
UNSTABILISED = dict(stabilize_correctly=False, norm_val=0.5, eps=0.1)
CASES = {
    "padded": case((3, 2, 41, 12, 20), 32, segments=False),
    "packed_tiles": case((1, 2, 50, 16, 16), 32, initial=False, config=TILED, **UNSTABILISED),
    "bfloat16": case((1, 2, 64, 16, 16), 32, "bfloat16", segments=False),
    "bfloat16_packed": case((2, 1, 48, 16, 16), 32, "bfloat16", config=TILED),
    "fused": case(
        (1, 2, 50, 24, 16), 32, config=dict(fused=True, triton_recurrent_fw_H=FUSED_TILES)
    ),
    "splits": case((1, 2, 64, 16, 32), 16, config=SPLITS),
    "sigmoid": case((1, 2, 64, 16, 16), 32, input_gate="sigmoid", normalize=False),
    "long": case((1, 2, 512, 16, 16), 64, "float16", segments=False),
}


def check_drawn(name, backend, count):
    lost = heads = 0

    def check(seed):
        nonlocal lost, heads
        # Odd seeds have data beyond those of a model.
        errors = selfcheck.check(seed | 1, backend=backend, **CASES[name])
        assert selfcheck.worst_of(errors)[0] <= 1, errors
        lost, heads = lost + errors[selfcheck.LOST][0], heads + errors[selfcheck.LOST][1]

    check_draws(check, name, count)
    assert lost <= selfcheck.MOST_LOST * heads


# The interpreter has packed sequences of bfloat16 in the same tiles.
ON_A_CPU = dict.fromkeys(CASES.keys() - {"bfloat16"}, "interpret") | {"padded": "xla"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), [*sorted(ON_A_CPU.items()), ("packed_tiles", "xla")])
def test_any_values(name, backend):
    check_drawn(name, backend, EXAMPLES if backend == "xla" else EXAMPLES // 2)


@pytest.mark.parametrize(
    "seed",
    [
        323734781,  # eps is relative to m, which is rounded
        1608686209,  # so are h and dq where eps is most of the denominator
        1364525425,  # what is left of the sums of later steps is in df
        121496033,  # m is a small difference of large gates
    ],
)
@pytest.mark.slow
def test_draws_that_rounding_had_put_out_of_bounds(seed):
    errors = selfcheck.check(seed, backend="xla", **CASES["padded"])
    assert selfcheck.worst_of(errors)[0] <= 1, errors


@pytest.mark.slow
def test_a_large_old_state_before_tiny_keys(monkeypatch):
    """Found by these tests."""
    drawn_arrays = selfcheck.drawn_arrays

    def drawn(r, p, kind):
        q, k, v, i, f, c, n, m = drawn_arrays(r, p, None)
        return [q * 1e4, k * 1e-30, v, 0.01 * i, 0.01 * f, c, n, 100 * m]

    monkeypatch.setattr(selfcheck, "drawn_arrays", drawn)
    for seed in range(1, 4 * selfcheck.DRAWS, selfcheck.DRAWS):
        errors = selfcheck.check(seed, backend="xla", **CASES["padded"])
        assert selfcheck.worst_of(errors)[0] <= 1, errors
        assert errors[selfcheck.LOST][0] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_any_values_on_a_gpu(name):
    check_drawn(name, "triton", GPU_EXAMPLES)


SIZES, L = (1, 2, 512, 16, 16), 64  # B, NH, S, DHQK, DHV
# Below this numbers and products of them may be subnormal in float32, which a device may take for
# 0.
FLOOR = 1e-26


def drawn_wide(dtype, seed):
    """Inputs with gates of models and wider ones, fast and no forgetting, n . q that cancels or
    not. In float16, where gradients would be inf, it does not."""
    r = np.random.default_rng((seed, 2))
    x = random_inputs(seed, *SIZES, states=False)
    x = {name: np.float64(y) for name, y in x.items()}
    for name, centres in dict(i=[0.0], f=[0.0, 4.0, 10.0, 40.0]).items():
        x[name] = r.choice(centres) + r.choice([1.0, 5.0, 15.0]) * r.normal(size=x[name].shape)
        x[name] = 15 * np.tanh(x[name] / 15) if r.random() < 0.3 else x[name]
    if dtype != "float16" and r.random() < 0.7:
        x |= {name: x[name] * r.choice([-1, 1], size=x[name].shape) for name in "qk"}
    return {name: array(y, dtype if name in "qkv" else "float32") for name, y in x.items()}


@functools.partial(jax.jit, static_argnames="unit")
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


def check_wide(dtype, backend, seed):
    """Odd seeds: dh is that of a norm of h, in which dh . h cancels."""
    x, unit = drawn_wide(dtype, seed), float(jnp.finfo(dtype).eps) / 2
    dh = cotangents_for(x, dtype, states=False, seed=seed)[0]
    run = gradients_of_call(chunk_size=L, backend=backend, return_last_states=False)
    (h,), gradients = run(x, [dh])
    if seed % 2:
        h = np.float64(h)
        size = np.linalg.norm(h, axis=-1, keepdims=True) + 1e-6
        dh = (dh - np.sum(dh * h, axis=-1, keepdims=True) * h / size**2) / (1 + size)
        dh = array(array(dh, dtype), "float32")
        (h,), gradients = run(x, [dh])
    expected, rms = in_float64(functools.partial(rounded_once_more, unit=unit), x, dh)
    for name, actual in ({"h": h} | gradients).items():
        off = head_norms(np.float64(actual) - expected[name])
        factor = 3 if name in "hv" else 8 if name in "qk" else 32  # as documented
        allowed = factor * (head_norms(rms[name]) + unit * head_norms(expected[name])) + FLOOR
        assert (off <= allowed).all(), f"{name} is off by {off}, allowed {allowed}"


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
    """As docs/numerics.md promises."""
    check_wide(dtype, backend, seed)
    check_draws(functools.partial(check_wide, dtype, backend), dtype, EXAMPLES // 4)
