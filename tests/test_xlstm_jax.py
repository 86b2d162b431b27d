"""The adapters for the documented systems of xlstm_jax: their signatures, and their values against
float64 forms made here, step by step.

Their gradients hold the denominator constant, as documented: they are derivatives of a form in
which it is.
"""

import inspect
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arguments import OPTIONS, check_arguments, shapes_of
from oracle import (
    NAMES,
    array,
    assert_close,
    compare,
    in_float64,
    oracle,
    random_inputs,
    refused,
    shapes_and_dtypes,
    slow,
    tolerance,
)

from mlstm_pallas import mlstm_chunkwise, use_backend
from mlstm_pallas.xlstm_jax import max_triton_fwbw_v3noslice as v3
from mlstm_pallas.xlstm_jax import max_triton_fwbw_v5xlchunksize as v5
from mlstm_pallas.xlstm_jax import triton_stablef as stablef

B, NH, S, DHQK, DHHV = SHAPE = 1, 2, 64, 24, 40  # head dimensions that the kernels have to pad
L = 16
NC = S // L
BOUND = {"float32": 1e-5, "bfloat16": 2e-2}
ROUNDING = tolerance("float32", S)
SYSTEMS = [v3, v5, stablef]
ALL_SYSTEMS = pytest.mark.parametrize("system", SYSTEMS, ids=["v3", "v5", "stablef"])

# As in the documents.
DOCUMENTED = {
    v3: """
        _mlstm_chunkwise__recurrent_fw_C(
            matK, matV, vecB, vecI, matC_states=None, vecN_states=None, scaMinter_states=None,
            matC_initial=None, vecN_initial=None, scaMinter_initial=None, qk_scale=None,
            CHUNK_SIZE=64, NUM_CHUNKS=1
        )
        _mlstm_chunkwise__parallel_fw_H(
            matQ, matK, matV, matC_states, vecN_states, scaMinter_states, vecI, vecB,
            qk_scale=None, CHUNK_SIZE=64, NUM_CHUNKS=1, EPS=1e-06
        )
        _mlstm_chunkwise_fw(
            matQ, matK, matV, vecI, vecF, matC_initial=None, vecN_initial=None,
            scaM_initial=None, qk_scale=None, return_last_states=False, return_all_states=False,
            CHUNK_SIZE=64, EPS=1e-06
        )
    """,
    v5: """
        mlstm_chunkwise__parallel_fw_Hintra(
            matQ, matK, matV, vecI, vecF, matC_all, vecN_all, scaM_all, qk_scale=None,
            chunk_size=64, siz_b_LQ=32, siz_b_LKV=32, siz_b_DHQK=None, siz_b_DHHV=None,
            num_warps=None, num_stages=None, eps=1e-06, output_dtype=jnp.float32
        )
        mlstm_chunkwise__parallel_bw_dV(
            matQ, matK, matV, vecI, vecA, vecB, matC_all, vecN_all, scaM_all, vecN_out,
            vecM_out, matDeltaH, matDeltaC_states, qk_scale=None, chunk_size=64, siz_b_LQ=32,
            siz_b_LKV=32, siz_b_DHQK=None, siz_b_DHHV=None, num_warps=None, num_stages=None,
            eps=0.0, output_dtype=jnp.float32
        )
    """,
    stablef: """
        _mlstm_chunkwise__recurrent_bw_dC(
            matQ, vecF, scaM_inter, vecM, vecN_out, matDeltaH, matDeltaC_last=None,
            qk_scale=None, chunk_size=64, num_chunks=1, store_initial_state=False
        )
        _mlstm_chunkwise__parallel_bw_dQKV(
            matQ, matK, matV, vecI, vecF, vecM_combine, scaM_inter, matC_states, matDeltaH,
            vecN_out, matDeltaC_states, qk_scale=None, chunk_size=64, num_chunks=1
        )
        _mlstm_chunkwise_bw(
            matQ, matK, matV, vecI, vecF, matC_initial=None, vecN_initial=None,
            scaM_initial=None, qk_scale=None, matC_states=None, scaM_states=None, vecN_out=None,
            vecM_out=None, matDeltaH=None, matDeltaC_last=None, chunk_size=64
        )
        _mlstm_chunkwise_fwbw_generator(
            autocast_kernel_dtype=jnp.bfloat16, return_last_states=False,
            recompute_states_in_bw=True, chunk_size=64, eps=1e-06, stabilize_correctly=True,
            norm_val=1.0
        )
        _get_chunkwise_fwbw_kernel(
            autocast_kernel_dtype, **kwargs
        )
        mlstm_chunkwise_triton_stablef(
            q, k, v, i, f, c_initial=None, n_initial=None, m_initial=None,
            return_last_states=False, eps=1e-06, chunk_size=64,
            autocast_kernel_dtype=jnp.float32, stabilize_correctly=True, norm_val=1.0
        )
    """,
}
SIGNATURES = {
    (system, name): arguments
    for system, text in DOCUMENTED.items()
    for name, arguments in re.findall(r"(\w+)\((.*?)\)", text, re.DOTALL)
}


@pytest.mark.parametrize(
    ("module", "name"),
    SIGNATURES,
    ids=lambda x: getattr(x, "__name__", x).split(".")[-1],
)
def test_signature_is_the_documented_one(module, name):
    signature, documented = (
        [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
        for function in (getattr(module, name), eval(f"(lambda {SIGNATURES[module, name]}: None)"))
    )
    assert signature == documented


@ALL_SYSTEMS
def test_every_listed_function_has_a_docstring_and_the_defaults_of_the_documents(system):
    """Of any document, by the name in lower case; eps is 0 in the backward functions of v5."""
    documented = {
        (y.name.lower(), y.default)
        for module, name in SIGNATURES
        for y in inspect.signature(getattr(module, name)).parameters.values()
    }
    for name in system.__all__:
        assert getattr(system, name).__doc__
        for y in inspect.signature(getattr(system, name)).parameters.values():
            assert (y.name.lower(), y.default) in documented or y.default is None, (name, y)
            assert y.name.lower() != "eps" or (y.default == 0) == (system is v5 and "_bw" in name)


# The float64 forms.


def inputs_of(dtype="float32", **options):
    """q is small, so that both branches of the denominator are taken and the scale of q counts."""
    x = random_inputs(11, *SHAPE, dtype=dtype, **options)
    return x | {"q": (x["q"] * 0.2).astype(dtype)}


HEADS = partial(jax.vmap, in_axes=(0, 0, 0, None, None))


@jax.jit
@HEADS
@HEADS
def documented(x, dh, dC_last, scale, eps):
    """Everything that the stages make of the inputs of a head, in float64; gradients are of
    <dh, h> + <dC_last, C_last> where the denominator and the stabilisers are constants."""

    def step(carry, x):
        C, m = carry
        q, k, v, i, f, added = x
        log_decay = jax.nn.log_sigmoid(f) + m
        m = jax.lax.stop_gradient(jnp.maximum(log_decay, i))
        C = jnp.exp(log_decay - m) * (C + added) + jnp.exp(i - m) * jnp.outer(k, v)
        num = scale * q @ C
        den = jnp.maximum(jnp.abs(num[-1]), jnp.exp(-m))
        h = num[:-1] / (jax.lax.stop_gradient(den) + eps)
        return (C, m), (h, den, m, C)

    def run(q, k, v, i, f, C, n, m, added):
        """added (S, DHQK, DHHV + 1): to C and n, its last column, before each step."""
        C, v = jnp.column_stack([C, n]), jnp.column_stack([v, jnp.ones(S)])
        (last, _), (h, den, rows, C_rows) = jax.lax.scan(step, (C, m), (q, k, v, i, f, added))
        C, m = jnp.append(C[None], C_rows[L - 1 :: L], axis=0), jnp.append(m, rows[L - 1 :: L])
        values = dict(h=h, den=den, m=rows, m_boundaries=m, C=C[..., :-1], n=C[..., -1])
        return (h, last[:, :-1]), values

    _, vjp, values = jax.vjp(run, *x, jnp.zeros((S, DHQK, DHHV + 1)), has_aux=True)
    *gradients, dC = vjp((dh, dC_last))
    dC = jnp.append(dC[::L, :, :-1], dC_last[None], axis=0)
    return values | {f"d{name}": y for name, y in zip(NAMES, gradients, strict=True)} | dict(dC=dC)


@cache
def case(dtype="float32", scale=None, eps=1e-6):
    """Inputs, and in float64 everything that the stages make of them."""
    x, r = inputs_of(dtype), np.random.default_rng(1)
    dh = array(r.normal(size=x["v"].shape), dtype)
    dC_last = array(r.normal(size=x["c_initial"].shape), "float32")
    scale = scale or DHQK**-0.5
    return x, dh, dC_last, in_float64(documented, [*x.values()], dh, dC_last, scale, eps)


def fused(x):
    """The states as float32, with the documented axis, which joins chunks and rows of a state."""
    return np.float32(x).reshape(*x.shape[:2], -1, *x.shape[4:])


def states_of(expected, chunks=NC + 1):
    """C, n and m at the first boundaries, as float32."""
    C, n, m = (expected[name][:, :, :chunks] for name in ("C", "n", "m_boundaries"))
    return fused(C), fused(n), np.float32(m)


def assert_states(states, expected):
    compare("Cnm", states, states_of(expected), ROUNDING)


def assert_rows(expected, H, den, m=None):
    """The outputs of a step; m where there is one."""
    assert_close(H, expected["h"], ROUNDING, "H")
    assert_close(den, expected["den"], 2e-6, "N")  # stablef hands out eps = 1e-6 as well
    if m is not None:
        assert_close(m, expected["m"], ROUNDING, "m")


def split(x):
    return np.reshape(x, (B, NH, NC, L))


@pytest.fixture(params=[None, slow("interpret")], ids=str)
def backend(request):
    with use_backend(request.param):
        yield


SCALE = 0.7  # the whole passes have the documented one as well

# The stages, forward.


def call_of(
    system, name, dtype="float32", scale=SCALE, eps=1e-6, inputs=None, states=None, **changes
):
    """A function of a system and its arguments, which are found by their names, in lower case.

    Without inputs, and states at the boundaries, they are those of the case.
    """
    function = getattr(system, "_" * (system is not v5) + "mlstm_chunkwise" + name)
    x, dh, dC_last, expected = case(dtype, scale, eps)
    x = dict.fromkeys(NAMES) | (inputs or x)
    C, n, m = states or states_of(expected)
    i_split, f_split = split(x["i"]), np.float32(split(-np.logaddexp(0, -np.float64(x["f"]))))
    b = np.cumsum(f_split, axis=-1)
    with np.errstate(invalid="ignore"):  # at resets
        a = b[..., -1:] - b + i_split
    # A whole pass has pre-activations.
    i, f = (i_split, f_split) if name.startswith("__") else (x["i"], x["f"])
    values = {
        "matq": x["q"],
        "matk": x["k"],
        "matv": x["v"],
        "veci": i,
        "vecf": x["f"] if system is v5 else f,
        "veca": a,
        "vecb": b,
        "matc_initial": x["c_initial"],
        "vecn_initial": x["n_initial"],
        "scam_initial scaminter_initial": x["m_initial"],
        "matc_states matc_all": C,
        "vecn_states vecn_all": n,
        "scam_inter scaminter_states scam_all scam_states": m,
        "vecm vecm_out vecm_combine": np.float32(expected["m"]),
        "vecn_out": np.float32(expected["den"]) + eps * (system is stablef),
        "matdeltah": dh,
        "matdeltac_states": fused(expected["dC"]),
        "matdeltac_last": dC_last,
        "qk_scale": scale,
        "eps": eps,
        "chunk_size": L,
        "num_chunks": NC,
    }
    arguments = {name: y for names, y in values.items() for name in names.split()} | changes
    names = inspect.signature(function).parameters
    return function, {y: arguments[y.lower()] for y in names if y.lower() in arguments}


def run(*case, **changes):
    """What a function of a system makes of its arguments."""
    function, arguments = call_of(*case, **changes)
    return function(**arguments)


BUFFERS = "matc_states", "vecn_states", "scaminter_states"


@ALL_SYSTEMS
def test_recurrent_fw_C(system, backend):
    assert_states(run(system, "__recurrent_fw_C", **dict.fromkeys(BUFFERS)), case()[-1])


def test_buffers_of_recurrent_fw_C_set_the_dtypes():
    dtypes = "bfloat16", "float32", "bfloat16"
    shapes = (x.shape for x in states_of(case()[-1]))
    buffers = list(map(jnp.zeros, shapes, dtypes))
    built = run(v3, "__recurrent_fw_C", **dict(zip(BUFFERS, buffers, strict=True)))
    assert shapes_and_dtypes(built) == shapes_and_dtypes(buffers)
    built = run(v3, "__recurrent_fw_C", "bfloat16", **dict.fromkeys(BUFFERS))
    assert [y.dtype for y in built] == ["bfloat16", "float32", "float32"]


@ALL_SYSTEMS
def test_parallel_fw_H(system, backend):
    expected = case(scale=SCALE)[-1]
    shorter = dict(zip(BUFFERS, states_of(expected, NC), strict=True)) if system is v3 else {}
    rows = run(system, f"__parallel_fw_H{'intra' * (system is v5)}", **shorter)
    assert rows[0].dtype == "float32"
    assert_rows(expected, *rows)


def test_tiles_and_output_dtype_of_Hintra():
    tiles = dict(siz_b_lq=16, siz_b_lkv=16, siz_b_dhqk=16, siz_b_dhhv=32, num_warps=2, num_stages=1)
    Hintra = partial(run, v5, "__parallel_fw_Hintra", "bfloat16")
    with use_backend("interpret"):
        H, _ = Hintra(**tiles)
        half, _ = jax.eval_shape(partial(Hintra, output_dtype=jnp.bfloat16))
    assert (H.dtype, half.dtype) == ("float32", "bfloat16")
    # q is scaled for the padded head dimension: one rounding more
    assert_close(H, case("bfloat16", SCALE)[-1]["h"], 1.5 * tolerance("bfloat16", S), "H")


BOTH = dict(return_last_states=True, return_all_states=True)


@ALL_SYSTEMS
def test_forward(system, backend):
    x, _, _, expected = case()
    H, den, m, last, every = run(system, "_fw", scale=None, **BOTH)
    h, *last_expected = oracle(x)
    rows = expected | dict(h=h)
    if system is v3:
        rows["m"] = expected["m_boundaries"][..., -1]
    assert_rows(rows, H, den, m)
    compare("Cnm", last, last_expected, ROUNDING)
    assert_states(every, expected)


@ALL_SYSTEMS
def test_forward_returns_what_is_asked_for(system):
    x = inputs_of(states=False)
    forward = partial(run, system, "_fw", scale=None, inputs=x)
    H, *others = forward()
    assert len(others) == 2
    assert_close(H, oracle(x)[0], ROUNDING, "H without initial states")
    [last], [every] = (jax.eval_shape(partial(forward, **{flag: True}))[3:] for flag in BOTH)
    assert (len(last), every[0].shape[2]) == (3, (NC + 1) * DHQK)


def test_resets_where_the_forget_gate_itself_comes_in():
    """As a pre-activation in v5, as its logarithm in stablef."""
    x = random_inputs(14, *SHAPE, resets=True)
    h, *last_expected = oracle(x)
    forward = partial(run, scale=None, inputs=x)
    H, den, rows, last, every = forward(v5, "_fw", **BOTH)
    again = forward(v5, "__parallel_fw_Hintra", states=every)
    stable, stable_den, _ = forward(stablef, "__parallel_fw_H", states=every)
    compare("HHHCnm", (H, again[0], stable, *last), (h, h, h, *last_expected), ROUNDING)
    # Infinite where nothing is stored; elsewhere z is a sum of positive terms. Four standard
    # deviations of each of two sums.
    np.testing.assert_allclose(again[1], den, rtol=8 * ROUNDING)
    np.testing.assert_allclose(stable_den, den + 1e-6, rtol=8 * ROUNDING)
    states = forward(stablef, "__recurrent_fw_C")
    compare("Cnm", states, every, ROUNDING)
    backward = dict(vecm=rows, vecn_out=den, matdeltah=x["v"], matdeltac_last=None, eps=0.0)
    (dC, _), expected = (
        forward(system, "__recurrent_bw_dC", states=every, **backward) for system in (stablef, v5)
    )
    assert_close(dC, np.float64(expected[:, :, DHQK:]), ROUNDING, "dC")


# The stages, backward.


@ALL_SYSTEMS
def test_recurrent_bw_dC(system, backend):
    dC = run(system, "__recurrent_bw_dC", eps=0.05)
    if system is stablef:
        dC, first = dC
        assert (dC.shape, first.shape) == ((B, NH, NC * DHQK, DHHV), (B, NH, DHQK, DHHV))
        dC = np.concatenate([first, dC], axis=2)
    expected = case(scale=SCALE, eps=0.05)[-1]
    assert_close(dC, fused(expected["dC"]), BOUND["float32"], "dC")


def check_inputs(built, names, expected, bound):
    compare(names, built, (expected[f"d{name}"] for name in names), bound)


@pytest.mark.parametrize(("system", "dtype"), [(v3, "float32"), (stablef, "bfloat16")])
def test_parallel_bw_dQKV(system, dtype, backend):
    expected = case(dtype, SCALE)[-1]
    dQKV = partial(run, system, "__parallel_bw_dQKV", dtype)
    built = dQKV()
    assert {y.dtype.name for y in built} == {dtype}
    check_inputs(built, "qkv", expected, BOUND[dtype])
    if system is stablef:
        C, dC = states_of(expected, NC)[0], fused(expected["dC"][:, :, 1:])
        compare("qkv", dQKV(matc_states=C, matdeltac_states=dC), built, tolerance(dtype, S))


@pytest.mark.parametrize("name", "QKV")
def test_parallel_bw_of_one_input(name, backend):
    gradient = partial(run, v5, f"__parallel_bw_d{name}")
    tiles = dict.fromkeys(("siz_b_lq", "siz_b_lkv", "siz_b_dhqk", "siz_b_dhhv"), 16)
    built = gradient(**tiles, output_dtype=jnp.float32)
    check_inputs([built], [name.lower()], case(scale=SCALE)[-1], BOUND["float32"])
    half = partial(gradient, output_dtype=jnp.bfloat16)
    assert jax.eval_shape(half).dtype == "bfloat16"


def test_the_lowering_platform_decides_on_the_kernels():
    case("bfloat16", SCALE, 1e-6)  # made here, not while the function is traced
    for backend, there in ((None, True), ("xla", False)):
        with use_backend(backend):
            text = str(jax.make_jaxpr(lambda: run(v5, "__parallel_bw_dV", "bfloat16"))())
        for part in ("by_platform", "name=parallel_bw_dQKV"):
            assert (part in text) == there


@pytest.mark.parametrize("scale", [SCALE, None], ids=["states", "no_states"])
@ALL_SYSTEMS
def test_backward(system, scale, backend):
    expected = case(scale=scale, eps=0.05)[-1]
    C, _, m = states_of(expected, NC)
    arrays = dict(matc_states=C, matc_all=C, scam_states=m, vecm_out=np.float32(expected["m"]))
    states = arrays if scale else dict.fromkeys(arrays)
    built = run(system, "_bw", scale=scale, eps=0.05, **states)
    check_inputs(built, NAMES, expected, BOUND["float32"])
    assert not built[6].any()  # of n


def test_backward_without_initial_states_has_gradients_of_five_inputs_in_their_dtypes():
    case("bfloat16", SCALE, 1e-6)  # made here, not while the function is traced
    x = inputs_of("bfloat16", states=False)
    absent = dict.fromkeys(("matc_states", "scam_states", "vecm_out", "matdeltac_last"))
    built = jax.eval_shape(lambda: run(v3, "_bw", "bfloat16", inputs=x, **absent))
    assert shapes_and_dtypes(built) == shapes_and_dtypes(x.values())


def test_stages_take_float64_on_the_plain_path():
    x, _, _, expected = case()
    with use_backend("xla"):
        built, *_ = in_float64(lambda x: run(stablef, "_fw", scale=None, inputs=x), x)
    assert np.linalg.norm(built - expected["h"]) < 1e-12 * np.linalg.norm(expected["h"])


# The entries.

entry = stablef.mlstm_chunkwise_triton_stablef


@pytest.mark.parametrize(
    ("system", "name"),
    [
        (v3, "mlstm_chunkwise_max_triton"),
        (v5, "mlstm_chunkwise_max_triton"),
        (v5, "mlstm_chunkwise__xl_chunk"),
    ],
)
def test_the_systems_share_an_entry_under_names_of_their_own(system, name):
    other = getattr(system, name)
    assert (other.__code__.co_code, other.__doc__) == (entry.__code__.co_code, entry.__doc__)
    assert (other.__name__, other.__qualname__, other.__module__) == (name, name, system.__name__)
    message = f"{name}() got an unexpected keyword argument 'reduce_slicing'"
    refused(TypeError, message, other, *inputs_of().values(), reduce_slicing=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_entry(dtype):
    """Every option reaches mlstm_chunkwise, through the generator."""
    x = random_inputs(12, B, NH, 40, 16, 16)
    options = dict(chunk_size=16, eps=0.02, norm_val=50.0, stabilize_correctly=False)
    options["autocast_kernel_dtype"] = dtype
    result, expected = (
        str(jax.make_jaxpr(partial(call, return_last_states=True, **options))(*x.values()))
        for call in (entry, mlstm_chunkwise)
    )
    assert result == expected
    h = jax.eval_shape(partial(entry, **options), *x.values())
    generated = stablef._mlstm_chunkwise_fwbw_generator(dtype, chunk_size=16)
    assert jax.eval_shape(generated, *x.values()) == (h, None, None, None)


def test_generator_gives_the_same_function_for_the_same_arguments():
    """All systems share it."""
    make, get = stablef._mlstm_chunkwise_fwbw_generator, stablef._get_chunkwise_fwbw_kernel
    same = [make(jnp.bfloat16), make("bfloat16", False, True, 64), get("bfloat16", chunk_size=64)]
    same += [x._mlstm_chunkwise_fwbw_generator() for x in SYSTEMS]
    same += [x._get_chunkwise_fwbw_kernel("bfloat16") for x in SYSTEMS]
    assert {*same} == {make()}
    assert len({make(), make(jnp.float32), make(None), make(chunk_size=32)}) == 4


# Errors.


STAGES = [
    (system, name.partition("chunkwise")[2])
    for system in SYSTEMS
    for name in system.__all__
    if re.search("_[fb]w(_|$)", name)
]


@pytest.mark.parametrize(("system", "name"), STAGES)
def test_every_argument_is_refused_by_name_and_accepted_at_its_bounds(system, name):
    function, arguments = call_of(system, name)
    names = inspect.signature(function).parameters
    good = {y: OPTIONS[y.lower()][1][0] for y in names if y.lower() in OPTIONS}
    good |= jax.eval_shape(lambda: {y: x for y, x in arguments.items() if y not in good})
    check_arguments(lambda **x: shapes_of(function, x), good)


# Changed arguments of stablef's __parallel_bw_dQKV, or of another function of stablef.
WRONG = {
    "matC_states has shape (1, 2, 7, 40), expected (B, NH, NC * DHQK, DHHV) = (1, 2, 96, 40) or "
    "(B, NH, (NC + 1) * DHQK, DHHV) = (1, 2, 120, 40)": dict(
        matc_states=jnp.zeros((B, NH, 7, DHHV))
    ),
    "matQ has shape (1, 2, 64, 24), expected S = 64 to be 1 chunks of 16 steps": dict(num_chunks=1),
    "vecN_out is None, expected an array of shape (B, NH, S)": dict(name="_bw", vecn_out=None),
    "initial states come all three or not at all: got matC_initial without vecN_initial, "
    "scaM_initial": dict(name="_fw", vecn_initial=None, scam_initial=None),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arrays_are_named(message):
    refused(ValueError, message, run, stablef, **dict(name="__parallel_bw_dQKV") | WRONG[message])


# The arrays of v5's stages in two chunks of 64 steps, with heads of 64.
WIDE = {
    (128, 64): "matQ matK matV matDeltaH",
    (192, 64): "matC_all matDeltaC_states",
    (2, 64): "vecI vecA vecB",
    (128,): "vecF vecN_out vecM_out",
    (192,): "vecN_all",
    (3,): "scaM_all",
}
NOT_READ = dict(dQ="siz_b_LKV", dK="siz_b_LQ", dV="siz_b_LQ")


@pytest.mark.parametrize("name", [name for name in v5.__all__ if re.search("__[pr]", name)])
def test_every_documented_tile_changes_the_launch(name):
    function = getattr(v5, name)
    arrays = {y: jnp.zeros((1, 1, *shape)) for shape, names in WIDE.items() for y in names.split()}
    names = inspect.signature(function).parameters
    arrays = {y: arrays[y] for y in names if y in arrays}
    tiles = [y for y in names if y.startswith(("siz_b", "num_"))]

    def text(**tile):
        with use_backend("interpret"):
            return str(jax.make_jaxpr(lambda: function(**arrays, **tile))())

    read = [y for y in tiles if y != NOT_READ.get(name[-2:])]
    texts = [text(), *(text(**{y: 16 if y.startswith("siz") else 8}) for y in read)]
    assert len({*texts}) == len(texts)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        text(siz_b_L=16)


@ALL_SYSTEMS
def test_derivatives_of_the_passes_are_refused(system):
    q = case("float32", SCALE, 1e-6)[0]["q"]  # as run asks for it
    gradient = jax.grad(lambda q: jnp.sum(run(system, "_fw", matq=q)[0]))
    message = (
        "the documented stages and passes have no derivatives; use those of "
        "mlstm_pallas.mlstm_chunkwise or of _mlstm_chunkwise_fwbw_generator"
    )
    refused(TypeError, message, jax.eval_shape, gradient, q)
