"""One token at a time: the step kernel and its plain form against the recurrence in float64, and
beside the chunkwise form."""

import functools
import itertools
import re

import compile_report
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import (
    BACKENDS,
    OUTPUTS,
    assert_below,
    assert_close,
    compare,
    cotangents_for,
    errors_of,
    expected_of,
    in_float64,
    lowered_for_cuda,
    oracle,
    outputs_and_gradients,
    random_inputs,
    refused,
    step_names,
    strict,
    swapped,
    tolerance,
)

from mlstm_pallas import KernelConfig, mlstm_recurrent_sequence, mlstm_recurrent_step
from mlstm_pallas.stages.recurrent_step import step_gates


@pytest.fixture(autouse=True)
def strict_modes():
    """Everything traces under the strict promotion modes of jax."""
    with strict():
        yield


STATES = OUTPUTS[1:]
SMALL, ONE_CTA = (
    KernelConfig(triton_recurrent_step=dict(siz_b_DHQK=16, siz_b_DHHV=columns))
    for columns in (16, 64)
)


def a_token(whole):
    """Arguments of mlstm_recurrent_step; slices of numpy arrays are not compiled."""
    return step_names(jax.device_get(whole), 0)


def random_token(seed, B, NH, DHQK, DHHV, **options):
    return a_token(random_inputs(seed, B, NH, 1, DHQK, DHHV, **options))


# ---------------- numbers


CASES = {
    "tiles_divide": ((2, 3), (32, 64), None),
    "tiles_divide_neither": ((1, 2), (40, 37), SMALL),
    "one_cta_per_head": ((1, 2), (40, 37), ONE_CTA),
    "five_row_blocks": ((1, 1), (300, 64), None),
    "one_by_one": ((1, 1), (1, 1), None),
}


@pytest.mark.parametrize(
    ("backend", "dtype", "case"),
    [
        *(("interpret", "float32", case) for case in CASES),
        ("interpret", "bfloat16", "tiles_divide_neither"),
        ("xla", "bfloat16", "tiles_divide_neither"),
    ],
)
def test_a_step_is_one_of_the_recurrence(backend, dtype, case):
    lead, heads, config = CASES[case]
    whole = random_inputs(0, *lead, 1, *heads, dtype=dtype)
    whole |= {name: whole[name].astype(dtype) for name in ("c_initial", "n_initial")}
    h, states = mlstm_recurrent_step(**a_token(whole), backend=backend, config=config)
    expected_h, *expected = oracle(whole)
    assert [y.dtype for y in (h, *states)] == [*[dtype] * 3, "float32"]
    assert_close(h, expected_h[:, :, 0], tolerance(dtype, heads[0]), "h")
    compare(STATES, states, expected, tolerance(dtype, 1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_gates_and_stabilisers(backend):
    inf = np.inf
    gates = itertools.product(
        [-inf, -1e9, -50.0, 0.0, 30.0],
        [-inf, -3e38, -40.0, 0.0, 5.0, inf],
        [-inf, -100.0, 0.0, 50.0],
    )
    i, f, m = np.array([*gates], "float32").T[:, None]
    whole = random_inputs(1, 1, i.size, 1, 16, 8)
    token = a_token(whole) | dict(i=i, f=f, m=m)
    h, (c, n, m_new) = mlstm_recurrent_step(**token, backend=backend)
    whole |= dict(i=np.where(i <= -1e6, -inf, i)[..., None], f=f[..., None], m_initial=m)
    *expected, M = oracle(whole)
    np.testing.assert_allclose(m_new, M, rtol=1e-6)
    for name, actual, desired in zip("hcn", (h[:, :, None], c, n), expected, strict=True):
        wrong_by, size = (
            np.linalg.norm(y.reshape(*m.shape, -1), axis=-1) for y in (actual - desired, desired)
        )
        # A sum of terms of 50 has roundings of 2e-6, which the exponential makes relative ones;
        # below 1e-37 float32 loses digits.
        wrong = ~(wrong_by <= 1e-5 * size + 1e-37)
        assert not wrong.any(), f"{name} at i, f, m = {i[wrong]}, {f[wrong]}, {m[wrong]}"


SIGMOID = dict(eps=0.01, norm_val=2.0, input_gate="sigmoid")
OF_SIGMOID = dict(i_scale=3.0, resets=True, m_initial=False)


@pytest.mark.parametrize(
    ("backend", "options", "recipe"),
    [
        ("interpret", dict(eps=0.1, norm_val=0.0), {}),
        ("interpret", dict(norm_val=40.0, stabilize_correctly=False), {}),
        ("interpret", SIGMOID | dict(normalize=False), OF_SIGMOID),
        ("interpret", SIGMOID | dict(config=SMALL), OF_SIGMOID),
        ("xla", SIGMOID, OF_SIGMOID),
        ("interpret", {}, dict(dtype="bfloat16", states=False)),  # from zeros
    ],
    ids=["no_floor", "unstabilised_floor", "unnormalised", "two_ctas", "sigmoid", "bfloat16"],
)
def test_a_sequence_is_the_recurrence(backend, options, recipe):
    x = random_inputs(5, 2, 4, 3, 20, 24, **recipe)
    h, states = mlstm_recurrent_sequence(**step_names(x), **options, backend=backend)
    expected_h, *expected = oracle(x, **{name: options[name] for name in {*options} - {"config"}})
    assert [y.dtype for y in (h, *states)] == [x["q"].dtype, *["float32"] * 3]
    assert_close(h, expected_h, tolerance(h.dtype, 20), "h")
    compare(STATES, states, expected, tolerance("float32", 20))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_forget_gate_keeps_its_digits(dtype):
    bound = 5 * np.finfo(dtype).eps / 2  # exp, log1p and a sum: two roundings each but for the sum

    @jax.jit
    def gates(f):
        return step_gates(jnp.full_like(f, -jnp.inf), f, jnp.zeros_like(f), lambda m: m)

    f = np.linspace(-40.0, 40.0, 1001).astype(dtype)
    with jax.enable_x64(True):
        decay, gain, m = map(np.asarray, gates(f))
        slope = np.asarray(jax.grad(lambda f: jnp.sum(gates(f)[2]))(f))
    f = f.astype("float64")
    np.testing.assert_allclose(m, -np.logaddexp(0, -f), rtol=bound)
    # exp of 40 in one rounding of its exponent is off by 40 of them
    np.testing.assert_allclose(slope, 1 / (1 + np.exp(f)), rtol=10 * bound)
    assert np.all(decay == 1)
    assert np.all(gain == 0)


@pytest.mark.parametrize("input_gate", ["exp", "sigmoid"])
def test_nothing_over_nothing_is_nothing(input_gate):
    token = random_token(3, 1, 2, 16, 8, states=False, i_shift=-np.inf)
    options = dict(eps=0.0, norm_val=0.0, input_gate=input_gate, backend="interpret")
    h, (c, n, _) = mlstm_recurrent_step(**token, **options)
    assert not any(map(np.any, (h, c, n)))  # a NaN is not 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stabiliser_in_bfloat16_costs_no_digits(backend):
    x = random_inputs(4, 2, 4, 6, 16, 8, i_scale=4.0)
    x["m_initial"] = x["m_initial"].astype("bfloat16")
    h, (c, n, m) = mlstm_recurrent_sequence(**step_names(x), eps=0.0, backend=backend)
    assert m.dtype == "bfloat16"
    expected_h, C, N, M = oracle(x, eps=0.0)
    factor = np.exp(np.asarray(m, "float64") - M)[..., None]
    assert_close(h, expected_h, 1e-6, "h")
    assert_close(np.asarray(c) * factor[..., None], C, 2e-6, "c")
    assert_close(np.asarray(n) * factor, N, 2e-6, "n")


def test_float64_through_xla():
    x = random_inputs(8, 1, 2, 3, 16, 8)
    result = in_float64(lambda x: mlstm_recurrent_sequence(**x, backend="xla"), step_names(x))
    for actual, y in zip(jax.tree.leaves(result), oracle(x), strict=True):
        assert actual.dtype == "float64"
        assert_close(actual, y, tolerance("float64", 3 * 16))


@pytest.mark.parametrize("backend", [*BACKENDS, None])
def test_no_heads(backend):
    token = random_token(9, 0, 2, 16, 8)
    h, states = mlstm_recurrent_step(**token, backend=backend)
    assert [y.shape for y in (h, *states)] == [token[name].shape for name in "vcnm"]


# ---------------- derivatives


@pytest.mark.parametrize(
    ("input_gate", "resets"), [("exp", False), ("sigmoid", False), ("exp", True)]
)
def test_gradients_through_xla(input_gate, resets):
    """With resets the first state is one in which nothing is stored."""
    inputs = random_inputs(12, 2, 4, 3, 16, 8, resets=resets, m_initial=input_gate == "exp")
    if resets:
        inputs["m_initial"] -= jnp.inf
    cotangents = cotangents_for(inputs, "float32")
    options = dict(input_gate=input_gate, eps=0.1)

    def run(**x):
        return mlstm_recurrent_sequence(**step_names(x), backend="xla", **options)

    result = outputs_and_gradients(run)(inputs, cotangents)
    for errors in errors_of(inputs, result, expected_of(inputs, cotangents, **options)):
        assert_below(errors, 1e-4)


@pytest.mark.parametrize(
    ("function", "t", "backend"),
    [
        (mlstm_recurrent_step, 0, "triton"),
        (mlstm_recurrent_sequence, None, "interpret"),
        (mlstm_recurrent_step, 0, None),
    ],
)
def test_the_kernels_refuse_derivatives(function, t, backend):
    x = step_names(random_inputs(13, 1, 1, 1, 16, 16), t)

    def h(v):
        return jnp.sum(function(**x | dict(v=v), backend=backend)[0])

    message = (
        "the kernels of mlstm_recurrent_step and mlstm_recurrent_sequence have no derivatives; "
        'backend="xla" has them'
    )
    for derivative in (jax.grad(h), lambda v: jax.jvp(h, (v,), (v,))):
        refused(TypeError, message, derivative, x["v"])


# ---------------- transformations, memory


def test_vmap():
    x = random_token(14, 2, 2, 20, 17)
    run = jax.jit(lambda x: jax.tree.leaves(mlstm_recurrent_step(**x, backend="interpret")))
    actual = jax.vmap(run)({name: y[:, None] for name, y in x.items()})
    compare(OUTPUTS, [y[:, 0] for y in actual], run(x), 1e-6)


@pytest.mark.parametrize(
    ("input_gate", "dtype", "heads", "copied"),
    [
        ("exp", "bfloat16", (20, 37), False),
        ("sigmoid", "float32", (20, 37), False),
        ("exp", "float32", (300, 500), True),
        ("sigmoid", "bfloat16", (300, 500), True),
    ],
)
def test_a_step_is_one_launch_in_place(input_gate, dtype, heads, copied):
    """Several CTAs of a head read n and m from a copy."""
    token = random_token(17, 1, 2, *heads, dtype=dtype)
    options = dict(input_gate=input_gate, backend="triton")
    text = lowered_for_cuda(jax.jit(lambda x: mlstm_recurrent_step(**x, **options)), token)
    operations = {*re.findall(r"stablehlo\.(\w+)[ (]", text)} - {"reshape"}
    copies = {"broadcast_in_dim", "concatenate", "constant", "convert"}
    assert operations <= {"custom_call"} | (copies if copied else set())
    assert ("concatenate" in operations) == copied
    [call] = [line for line in text.splitlines() if "custom_call" in line]
    aliases = re.findall(r"output_tuple_indices = \[(\d)\], operand_index = (\d)", call)
    assert aliases == [("1", "0"), ("2", "1"), ("3", "2")][: 2 + (input_gate == "exp")]


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 37])
def test_a_loop_with_one_step_per_iteration_copies_no_state(batch):
    x = [*step_names(random_inputs(0, batch, 8, 1, 256, 512), 0).values()]

    def generate(token, states):
        def body(carry):
            t, _, states = carry
            return (t + 1, *mlstm_recurrent_step(*token, *states, backend="triton"))

        first = jnp.int32(0), jnp.zeros_like(token[2]), states
        return jax.lax.while_loop(lambda x: x[0] < x[1][0, 0, 0].astype("int32"), body, first)

    text = jax.jit(generate, donate_argnums=1).lower(x[:5], tuple(x[5:])).compile().as_text()
    assert not re.findall(r"= (f32\S+) copy(?:-start)?\(", text)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "dtype"), [("H200", "bfloat16"), ("A100", "float32")])
def test_compiles_without_spills(device, dtype):
    pytest.importorskip("triton")
    for row in compile_report.report(device, [(64, 64), (512, 1024)], [dtype], direction="step"):
        assert (row["note"], row["spill_store_bytes"]) == ("", 0)


def test_a_sequence_in_the_layout_of_projections():
    x = step_names(random_inputs(20, 1, 3, 2, 16, 24))
    tokens = x | {name: swapped(x[name]) for name in "qkvif"}
    run = functools.partial(mlstm_recurrent_sequence, backend="xla")
    h, states = run(**x)
    result = jax.tree.leaves(run(**tokens, layout="BTNH"))
    compare(OUTPUTS, result, (swapped(h), *states), tolerance("float32", 16))


def joined(x):
    """The same token with q, k, v and an output gate in one array, i and f in another."""
    qkvo = jnp.concatenate([x[name] for name in "qkvv"], axis=-1)
    return x | dict(q=qkvo, k=None, v=None, i=jnp.stack([x["i"], x["f"]], axis=-1), f=None)


@pytest.mark.parametrize("config", [None, SMALL], ids=["one_cta", "several_ctas"])
@pytest.mark.parametrize("input_gate", ["exp", "sigmoid"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_joined_arrays_are_their_parts(backend, input_gate, config):
    token = random_token(3, 2, 3, 48, 80, m_initial=input_gate == "exp")
    options = dict(input_gate=input_gate, backend=backend, config=config)
    step = jax.jit(functools.partial(mlstm_recurrent_step, **options))
    both = (jax.tree.leaves(step(**x)) for x in (joined(token), token))
    compare(OUTPUTS, *both, tolerance("float32", 48))


def test_joined_arrays_of_wrong_shapes():
    x = random_token(3, 2, 3, 48, 80)
    token = joined(x)
    narrow = token["q"][..., :175]  # q, k and v have 176
    for wrong in (dict(q=narrow), dict(i=x["i"]), dict(v=x["v"]), dict.fromkeys(STATES)):
        with pytest.raises(ValueError, match="k is None, expected v and f None too, q with q, k"):
            mlstm_recurrent_step(**token | wrong)
