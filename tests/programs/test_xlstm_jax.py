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
from arguments import stage_arrays
from numpy_evaluator import in_numpy
from oracle import (
    NAMES,
    array,
    assert_close,
    assert_same_bits,
    compare,
    in_float64,
    oracle,
    param,
    random_inputs,
    refused,
    tolerance,
)

from mlstm_pallas import mlstm_chunkwise, use_backend
from mlstm_pallas.xlstm_jax import max_triton_fwbw_v3noslice as v3
from mlstm_pallas.xlstm_jax import max_triton_fwbw_v5xlchunksize as v5
from mlstm_pallas.xlstm_jax import triton_stablef as stablef

B, NH, S, DHQK, DHHV = SHAPE = 1, 2, 64, 24, 40  # head dimensions that the kernels have to pad
L = 16
NC = S // L
SCALE, EPS = 0.7, 0.05
ROUNDING = tolerance("float32", S)
SYSTEMS = {"v3": v3, "v5": v5, "stablef": stablef}
ALL_SYSTEMS = pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)

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


def signature(function):
    parameters = inspect.signature(function).parameters.values()
    return [(y.name, y.kind, y.default) for y in parameters]


SIGNATURES = {
    (system, name): signature(eval(f"(lambda {arguments}: None)"))
    for system, text in DOCUMENTED.items()
    for name, arguments in re.findall(r"(\w+)\((.*?)\)", text, re.DOTALL)
}
DEFAULTS = {(name.lower(), default) for x in SIGNATURES.values() for name, _, default in x}


@ALL_SYSTEMS
def test_functions_have_docstrings_and_the_documented_signatures_or_defaults(system):
    """Functions without a document have the defaults of any document, by the name in lower case;
    eps is 0 in the backward functions of v5."""
    assert {name for x, name in SIGNATURES if x is system} <= {*system.__all__}
    for name in system.__all__:
        function = getattr(system, name)
        assert function.__doc__
        parameters = signature(function)
        assert parameters == SIGNATURES.get((system, name), parameters)
        for argument, _, default in parameters:
            assert (argument.lower(), default) in DEFAULTS or default is None, (name, argument)
            assert argument.lower() != "eps" or (default == 0) == (system is v5 and "_bw" in name)


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
def case(dtype="float32", scale=None):
    """Inputs, and in float64 everything that the stages make of them."""
    x, r = inputs_of(dtype), np.random.default_rng(1)
    dh = array(r.normal(size=x["v"].shape), dtype)
    dC_last = array(r.normal(size=x["c_initial"].shape), "float32")
    scale = scale or DHQK**-0.5
    return x, dh, dC_last, in_float64(in_numpy(documented), [*x.values()], dh, dC_last, scale, EPS)


def fused(x):
    """The states as float32, with the documented axis, which joins chunks and rows of a state."""
    return np.float32(x).reshape(*x.shape[:2], -1, *x.shape[4:])


def states_of(expected, chunks=NC + 1):
    """C, n and m at the first boundaries, as float32."""
    C, n, m = (expected[name][:, :, :chunks] for name in ("C", "n", "m_boundaries"))
    return fused(C), fused(n), np.float32(m)


def split(x):
    return np.reshape(x, (B, NH, NC, L))


def run(
    system, name, dtype="float32", scale=SCALE, inputs=None, states=None, shorter=False, **changes
):
    """What a function of a system makes of its arguments, which are found by their names, in lower
    case.

    Without inputs, and states at the boundaries, they are those of the case. shorter: without the
    last states, and without the first of their gradients.
    """
    function = getattr(system, "_" * (system is not v5) + "mlstm_chunkwise" + name)
    x, dh, dC_last, expected = case(dtype, scale)
    x = dict.fromkeys(NAMES) | (inputs or x)
    C, n, m = states or states_of(expected, NC + 1 - shorter)
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
        "vecn_out": np.float32(expected["den"]) + EPS * (system is stablef),
        "matdeltah": dh,
        "matdeltac_states": fused(expected["dC"][:, :, shorter:]),
        "matdeltac_last": dC_last,
        "qk_scale": scale,
        "eps": EPS,
        "chunk_size": L,
        "num_chunks": NC,
    }
    arguments = {name: y for names, y in values.items() for name in names.split()} | changes
    names = inspect.signature(function).parameters
    return function(**{y: arguments[y.lower()] for y in names if y.lower() in arguments})


# Functions, what they return, and changed arguments.

BUFFERS = dict.fromkeys(("matc_states", "vecn_states", "scaminter_states"))
NOT_STORED = dict.fromkeys(("matc_states", "matc_all", "scam_states", "vecm_out"))
TILES = dict.fromkeys(("siz_b_lq", "siz_b_lkv", "siz_b_dhqk", "siz_b_dhhv"), 16)
BOTH = dict(return_last_states=True, return_all_states=True)
OTHER_TILES = TILES | dict(siz_b_dhhv=32, num_warps=2, num_stages=1)
CASES = [
    *(param(x, "__recurrent_fw_C", "C n M", **BUFFERS) for x in SYSTEMS),
    param("v3", "__parallel_fw_H", "h den", shorter=True),
    param("v5", "__parallel_fw_Hintra", "h den"),
    param("v5", "__parallel_fw_Hintra", "h den", **OTHER_TILES),
    param("stablef", "__parallel_fw_H", "h den m"),
    *(
        param(x, "_fw", f"h den {m} C_last n_last m_last C n M", scale=None, **BOTH)
        for x, m in (("v3", "m_last"), ("v5", "m"), ("stablef", "m"))
    ),
    param("v3", "__recurrent_bw_dC", "dC"),
    param("v5", "__recurrent_bw_dC", "dC"),
    param("stablef", "__recurrent_bw_dC", "dC_rest dC_first"),
    param("v3", "__parallel_bw_dQKV", "dq dk dv"),
    param("stablef", "__parallel_bw_dQKV", "dq dk dv", dtype="bfloat16"),
    param("stablef", "__parallel_bw_dQKV", "dq dk dv", dtype="bfloat16", shorter=True),
    *(param("v5", f"__parallel_bw_d{x}", f"d{x.lower()}", **TILES) for x in "QKV"),
    *(param(x, "_bw", "gradients", shorter=True) for x in SYSTEMS),
    *(param(x, "_bw", "gradients", scale=None, **NOT_STORED) for x in SYSTEMS),
]


def bound(name, dtype):
    if name == "dn_initial":  # the denominator is a constant
        return 0
    gradient = name[0] == "d" and name != "den"
    return dict(float32=1e-5, bfloat16=2e-2)[dtype] if gradient else tolerance(dtype, S)


# Kernels run for whole passes, and for tiles that are not the default.
ON_KERNELS = ("v3", "_fw"), ("stablef", "_bw"), ("v5", "__parallel_fw_Hintra")
ROWS = [
    *(pytest.param(*x.values, None, id=f"{x.id}-None") for x in CASES),
    *(
        pytest.param(*x.values, "interpret", id=f"{x.id}-interpret", marks=pytest.mark.slow)
        for x in CASES
        if x.values[:2] in ON_KERNELS
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("system", "name", "results", "changes", "backend"), ROWS)
def test_values(system, name, results, changes, backend):
    dtype = changes.get("dtype", "float32")
    expected = case(dtype, changes.get("scale", SCALE))[-1]
    C, n, m = states_of(expected)
    dC = expected["dC"]
    expected = expected | dict(C=C, n=n, M=m, dC=fused(dC), dC_first=dC[:, :, 0])
    expected |= dict(C_last=C[:, :, -DHQK:], n_last=n[:, :, -DHQK:], m_last=m[..., -1])
    expected |= dict(dC_rest=fused(dC[:, :, 1:]), den=expected["den"] + EPS * (system == "stablef"))
    results = results.split() if results != "gradients" else [f"d{x}" for x in NAMES]
    with use_backend(backend):
        built = jax.tree.leaves(run(SYSTEMS[system], name, **changes))
    for x, y in zip(results, built, strict=True):
        assert_close(y, expected[x], bound(x, dtype), x)


WITHOUT_STATES = dict.fromkeys(("matc_initial", "vecn_initial", "scam_initial", "matdeltac_last"))
OUTPUT = dict(output_dtype="bfloat16")
# Of calls with q, k, v and dh in bfloat16.
DTYPES = [
    ("v3", "__recurrent_fw_C", "bfloat16 float32 float32", BUFFERS),
    ("v3", "__parallel_fw_H", "bfloat16 float32", {}),
    ("v5", "__parallel_fw_Hintra", "float32 float32", {}),
    ("v5", "__parallel_fw_Hintra", "bfloat16 float32", OUTPUT),
    ("v3", "__parallel_bw_dQKV", "bfloat16 bfloat16 bfloat16", {}),
    ("v5", "__parallel_bw_dQ", "float32", {}),
    *(("v5", f"__parallel_bw_d{x}", "bfloat16", OUTPUT) for x in "KV"),
    ("v3", "_bw", "bfloat16 bfloat16 bfloat16 float32 float32", NOT_STORED | WITHOUT_STATES),
]


@pytest.mark.slow
def test_dtypes_of_results():
    """States have those of their buffers, if there are any."""
    states = states_of(case("bfloat16", SCALE)[-1])  # made here, not while a function is traced
    dtypes = "float32", "float32", "bfloat16"
    buffers = [np.zeros(x.shape, dtype) for x, dtype in zip(states, dtypes, strict=True)]
    buffers = dict(zip(BUFFERS, buffers, strict=True))
    for row in (*DTYPES, ("v3", "__recurrent_fw_C", " ".join(dtypes), buffers)):
        system, name, dtypes, changes = row
        built = jax.eval_shape(partial(run, SYSTEMS[system], name, "bfloat16", **changes))
        assert [y.dtype.name for y in jax.tree.leaves(built)] == dtypes.split(), (system, name)


@pytest.mark.slow
@ALL_SYSTEMS
def test_forward_without_initial_states_returns_what_is_asked_for(system):
    x = inputs_of(states=False)
    forward = partial(run, system, "_fw", scale=None, inputs=x)
    H, *others = forward()
    assert len(others) == 2
    assert_close(H, oracle(x, eps=EPS)[0], ROUNDING)
    [last], [every] = (jax.eval_shape(partial(forward, **{flag: True}))[3:] for flag in BOTH)
    assert (len(last), every[0].shape[2]) == (3, (NC + 1) * DHQK)


@pytest.mark.slow
def test_resets_where_the_forget_gate_itself_comes_in():
    """As a pre-activation in v5, as its logarithm in stablef."""
    x = random_inputs(14, *SHAPE, resets=True)
    h, *last_expected = oracle(x, eps=EPS)
    forward = partial(run, scale=None, inputs=x)
    H, den, rows, last, every = forward(v5, "_fw", **BOTH)
    compare("HCnm", (H, *last), (h, *last_expected), ROUNDING)
    compare("Cnm", forward(stablef, "__recurrent_fw_C"), every, ROUNDING)
    backward = dict(states=every, vecm=rows, matdeltah=x["v"], matdeltac_last=None)
    expected = forward(v5, "__recurrent_bw_dC", vecn_out=den, **backward)
    dC, _ = forward(stablef, "__recurrent_bw_dC", vecn_out=den + EPS, **backward)
    assert_close(dC, np.float64(expected[:, :, DHQK:]), ROUNDING, "dC")


@pytest.mark.slow
def test_stages_take_float64_on_the_plain_path():
    x, *_, expected = case(scale=None)
    with use_backend("xla"):
        built, *_ = in_float64(lambda x: run(stablef, "_fw", scale=None, inputs=x), x)
    assert_close(built, expected["h"], 1e-12)


# The entries.

entry, generate = stablef.mlstm_chunkwise_triton_stablef, stablef._mlstm_chunkwise_fwbw_generator
ENTRIES = v3.mlstm_chunkwise_max_triton, v5.mlstm_chunkwise_max_triton, v5.mlstm_chunkwise__xl_chunk


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_entries(dtype):
    """Every option reaches mlstm_chunkwise, also through the generator."""
    x = random_inputs(12, B, NH, 40, 16, 16).values()
    options = dict(chunk_size=16, eps=0.02, norm_val=50.0, stabilize_correctly=False)
    options |= dict(autocast_kernel_dtype=dtype, return_last_states=True)
    calls = mlstm_chunkwise, entry, *ENTRIES
    calls = [*(partial(call, **options) for call in calls), generate(**options)]
    first, *others = jax.jit(lambda *x: [jax.tree.leaves(call(*x)) for call in calls])(*x)
    for other in others:
        assert_same_bits(first, other)
    assert jax.eval_shape(generate(dtype), *x) == (jax.eval_shape(entry, *x), None, None, None)
    for other in ENTRIES:
        assert signature(other) == signature(entry)
        with pytest.raises(TypeError, match=rf"^{other.__name__}\(\) got an unexpected"):
            other(*x, reduce_slicing=True)


NOT_READ = dict(dQ="siz_b_LKV", dK="siz_b_LQ", dV="siz_b_LQ")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in v5.__all__ if re.search("__[pr]", name)])
def test_every_documented_tile_changes_the_launch(name):
    function = getattr(v5, name)
    arrays = stage_arrays(function, 2, 64, 64, 64)

    def text(**tile):
        with use_backend("interpret"):
            return str(jax.make_jaxpr(lambda x: function(**x, **tile))(arrays))

    tiles = [y for y in inspect.signature(function).parameters if y.startswith(("siz_b", "num_"))]
    read = [y for y in tiles if y != NOT_READ.get(name[-2:])]
    texts = [text(), *(text(**{y: 16 if y.startswith("siz") else 8}) for y in read)]
    assert len({*texts}) == len(texts)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        text(siz_b_L=16)


@pytest.mark.slow
@ALL_SYSTEMS
def test_derivatives_of_the_passes_are_refused(system):
    q = case("float32", None)[0]["q"]  # outside of the trace, which would leak into the cache
    gradient = jax.grad(lambda q: jnp.sum(run(system, "_fw", scale=None, matq=q)[0]))
    message = (
        "the documented stages and passes have no derivatives; use those of "
        "mlstm_pallas.mlstm_chunkwise or of _mlstm_chunkwise_fwbw_generator"
    )
    refused(TypeError, message, jax.eval_shape, gradient, q)
