"""docs/migrating.md: its diffs keep the function of a model, its example runs, its names exist.

The models and the kernel of the other packages are written for this file; only names and arguments
are those of the packages.
"""

import functools
import importlib
import inspect
import math
import re
import sys
import types
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlstm_pallas
from mlstm_pallas import mlstm_chunkwise, use_backend
from mlstm_pallas.xlstm_jax import max_triton_fwbw_v3noslice as v3
from mlstm_pallas.xlstm_jax import max_triton_fwbw_v5xlchunksize as v5xl
from mlstm_pallas.xlstm_jax import triton_stablef as stablef

PAGE = (Path(__file__).parents[1] / "docs" / "migrating.md").read_text()
B, S, NH, E, DHQK, DHV = 2, 40, 2, 12, 4, 6
OTHER_KERNELS = "xlstm_jax.kernels.mlstm_chunkwise.triton_stablef.triton_fwbw"

pytestmark = pytest.mark.usefixtures("quick_compilation")


def code_blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


# ---------------- the other packages


def other_kernel(
    q,
    k,
    v,
    i,
    f,
    c_initial=None,
    n_initial=None,
    m_initial=None,
    *,
    return_last_states=False,
    eps=1e-6,
    constant_denominator,
    **others,
):
    """The recurrence of the xLSTM paper on (B, NH, S, ...).

    No gradient flows through a constant denominator.
    """
    del others  # chunk_size, autocast_kernel_dtype
    if c_initial is None:
        c_initial, n_initial, m_initial = (
            jnp.zeros((B, NH, *dims), q.dtype) for dims in ((DHQK, DHV), (DHQK,), ())
        )

    def step(states, token):
        C, n, m = states
        q, k, v, i, f = token
        log_f = jax.nn.log_sigmoid(f)
        m_next = jnp.maximum(log_f + m, i)
        decay, weight = jnp.exp(log_f + m - m_next), jnp.exp(i - m_next)
        C = decay[..., None, None] * C + weight[..., None, None] * k[..., :, None] * v[..., None, :]
        n = decay[..., None] * n + weight[..., None] * k
        denominator = jnp.maximum(jnp.abs(jnp.sum(q * n, -1)), jnp.exp(-m_next)) + eps
        if constant_denominator:
            denominator = jax.lax.stop_gradient(denominator)
        return (C, n, m_next), jnp.einsum("bhk,bhkv->bhv", q, C) / denominator[..., None]

    tokens = tuple(jnp.moveaxis(x, 2, 0) for x in (q * DHQK**-0.5, k, v, i, f))
    states, h = jax.lax.scan(step, (c_initial, n_initial, m_initial), tokens)
    h = jnp.moveaxis(h, 0, 2)
    return (h, states) if return_last_states else h


def other_sigmoid_kernel(
    q, k, v, i, f, c_initial=None, n_initial=None, *, return_last_states=False, eps=1e-6, **others
):
    """The same with the gate of mLSTMsig, without a stabiliser: two states."""
    del others  # chunk_size, constant_denominator
    if c_initial is None:
        c_initial, n_initial = (
            jnp.zeros((B, NH, *dims), q.dtype) for dims in ((DHQK, DHV), (DHQK,))
        )

    def step(states, token):
        C, n = states
        q, k, v, i, f = token
        decay, weight = jax.nn.sigmoid(f), jax.nn.sigmoid(i)
        C = decay[..., None, None] * C + weight[..., None, None] * k[..., :, None] * v[..., None, :]
        n = decay[..., None] * n + weight[..., None] * k
        denominator = jnp.maximum(jnp.abs(jnp.sum(q * n, -1)), 1.0) + eps
        return (C, n), jnp.einsum("bhk,bhkv->bhv", q, C) / denominator[..., None]

    states, h = jax.lax.scan(
        step,
        (c_initial, n_initial),
        tuple(jnp.moveaxis(x, 2, 0) for x in (q * DHQK**-0.5, k, v, i, f)),
    )
    h = jnp.moveaxis(h, 0, 2)
    return (h, states) if return_last_states else h


# ---------------- the models


def projections(params, x):
    """q, k, v (B, S, NH, D), i, f (B, S, NH) of x (B, S, E)."""
    q, k, v = (jnp.einsum("bse,ehd->bshd", x, params[name]) for name in ("query", "key", "value"))
    i, f = (x @ params[name] + params[f"{name}_bias"] for name in ("input_gate", "forget_gate"))
    return q, k, v, i, f


def output(params, x, h):
    """(B, S, E) of h (B, S, NH, DHV), behind an output gate."""
    gate = jax.nn.sigmoid(jnp.einsum("bse,ehd->bshd", x, params["output_gate"]))
    return jnp.einsum("bshd,hde->bse", gate * h, params["output"])


XLSTM_JAX = """
from xlstm_jax.kernels.mlstm_chunkwise.triton_stablef.triton_fwbw import (
    mlstm_chunkwise_triton_stablef,
)


def layer(params, x):
    q, k, v, i, f = projections(params, x)
    q, k, v, i, f = (y.swapaxes(1, 2) for y in (q, k, v, i, f))  # (B, NH, S, ...)
    h = mlstm_chunkwise_triton_stablef(
        q, k, v, i, f, chunk_size=64, autocast_kernel_dtype=q.dtype
    )
    h = h.swapaxes(1, 2)  # (B, S, NH, DHV)
    return output(params, x, head_norm(h))
"""

OF_TWO_PARTS = """
def layer(params, x):
    first, states = part(params, x[:, :23], ())
    second, _ = part(params, x[:, 23:], states)
    return jnp.concatenate([first, second], axis=1)
"""
MLSTM_KERNELS = """
def part(params, x, states):
    q, k, v, i, f = projections(params, x)
    mlstm = get_mlstm_kernel("chunkwise--triton_xl_chunk")
    q, k, v, i, f = (y.swapaxes(1, 2) for y in (q, k, v, i, f))  # (B, NH, S, ...)
    h, states = mlstm(q, k, v, i, f, *states, return_last_states=True, eps=1e-6, chunk_size=128)
    h = h.swapaxes(1, 2)  # (B, S, NH, DHV)
    return output(params, x, head_norm(h)), states
"""
MLSTM_KERNELS_SIGING = """
def part(params, x, states):
    q, k, v, i, f = projections(params, x)
    mlstm = get_mlstm_kernel("chunkwise--triton_xl_chunk_siging")
    q, k, v, i, f = (y.swapaxes(1, 2) for y in (q, k, v, i, f))  # (B, NH, S, ...)
    h, (c, n) = mlstm(q, k, v, i, f, *states, return_last_states=True, chunk_size=128)
    h = h.swapaxes(1, 2)  # (B, S, NH, DHV)
    return output(params, x, head_norm(h)), (c, n)
"""

MODELS = {
    "xlstm_jax-import": XLSTM_JAX,
    "xlstm_jax-layout": XLSTM_JAX,
    "mlstm_kernels-layout": MLSTM_KERNELS + OF_TWO_PARTS,
    "mlstm_kernels-siging": MLSTM_KERNELS_SIGING + OF_TWO_PARTS,
}
DIFFS = dict(zip(MODELS, code_blocks("diff"), strict=True))


def patched(source, diff):
    """The source with a diff applied. The old lines of each hunk are in it once."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.M):
        old, new = (
            "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in sides)
            for sides in (" -", " +")
        )
        assert source.count(old) == 1, f"not in the model:\n{old}"
        source = source.replace(old, new)
    return source


def layer_of(source, norm_eps, **imported):
    """The layer that a source defines.

    norm_eps: of the root mean square norm of each head; None: no norm.
    """

    def head_norm(h):
        return (
            h
            if norm_eps is None
            else h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + norm_eps)
        )

    names = (
        dict(jax=jax, jnp=jnp, projections=projections, output=output, head_norm=head_norm)
        | imported
    )
    exec(compile(source, "model", "exec"), names)
    return names["layer"]


def layer_before(source, norm_eps, constant_denominator):
    kernel = functools.partial(other_kernel, constant_denominator=constant_denominator)
    package = types.ModuleType(OTHER_KERNELS)
    package.mlstm_chunkwise_triton_stablef = kernel
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, OTHER_KERNELS, package)
        return layer_of(
            source,
            norm_eps,
            get_mlstm_kernel=lambda name: (
                other_sigmoid_kernel if name.endswith("_siging") else kernel
            ),
        )


def layer_after(model, norm_eps):
    """The other packages are missing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "xlstm_jax", None)
        return layer_of(
            patched(MODELS[model], DIFFS[model]), norm_eps, mlstm_chunkwise=mlstm_chunkwise
        )


# ---------------- outputs and gradients


PARAMETERS = {
    "query": (E, NH, DHQK),
    "key": (E, NH, DHQK),
    "value": (E, NH, DHV),
    "input_gate": (E, NH),
    "forget_gate": (E, NH),
    "output_gate": (E, NH, DHV),
    "output": (NH, DHV, E),
}


@functools.cache
def arguments():
    """Parameters, x and the cotangent of the output, float32."""
    r = np.random.default_rng(0)
    params = {name: r.normal(size=shape) / math.sqrt(E) for name, shape in PARAMETERS.items()}
    params |= dict(input_gate_bias=r.normal(size=NH), forget_gate_bias=np.linspace(1.0, 4.0, NH))
    return jax.tree.map(np.float32, (params, r.normal(size=(B, S, E)), r.normal(size=(B, S, E))))


def results(layer, dtype):
    """The output of a layer and its gradients, by name.

    The gradient of a gate's bias is a row of that of its matrix. On its own it nearly vanishes
    behind a norm, which undoes a common factor of all input gates, and has no digits to compare.
    """

    @jax.jit
    def run(params, x, cotangent):
        y, vjp = jax.vjp(layer, params, x)
        return y, vjp(cotangent)

    with jax.enable_x64(dtype == "float64"), use_backend("xla" if dtype == "float64" else None):
        y, (result, dx) = jax.tree.map(
            np.asarray, run(*jax.tree.map(lambda x: jax.device_put(x.astype(dtype)), arguments()))
        )
    for name in ("input_gate", "forget_gate"):
        result[name] = np.concatenate([result[name], result.pop(f"{name}_bias")[None]])
    assert {x.dtype.name for x in (y, dx, *result.values())} == {dtype}
    return {"output of the layer": y, "x": dx} | result


@functools.cache
def exact(source, norm_eps, constant_denominator):
    """Of the model before a diff, in float64."""
    return results(layer_before(source, norm_eps, constant_denominator), "float64")


def errors(result, expected):
    """Relative errors by name."""
    return {
        name: np.linalg.norm(result[name] - x) / np.linalg.norm(x) for name, x in expected.items()
    }


def bound(dtype):
    """Rounding of about 20 sums in a row.

    One of n terms, here at most B * S, adds sqrt(n) roundings.
    """
    return 20 * math.sqrt(B * S) * float(jnp.finfo(dtype).eps) / 2


# Float64 tells functions apart.
SLOW = [(model, "float32") for model in MODELS]


@pytest.mark.parametrize(
    ("model", "dtype", "norm_eps"),
    [
        pytest.param(
            model,
            dtype,
            eps,
            id=f"{model}-{dtype}-{norm}",
            marks=[pytest.mark.slow] * ((model, dtype) in SLOW),
        )
        for model in MODELS
        for dtype, eps, norm in (("float32", 1e-6, "norm"), ("float64", None, "no_norm"))
    ],
)
def test_diff_keeps_the_function(model, dtype, norm_eps):
    result = errors(
        results(layer_after(model, norm_eps), dtype),
        exact(MODELS[model], norm_eps, constant_denominator=False),
    )
    assert all(x < bound(dtype) for x in result.values()), result


def test_constant_denominator_has_the_same_gradients_behind_a_norm_only():
    """The norm has no eps, so that it undoes the denominator exactly."""
    model = "xlstm_jax-layout"
    normed, bare = (
        errors(results(layer_after(model, eps), "float64"), exact(XLSTM_JAX, eps, True))
        for eps in (0.0, None)
    )
    assert all(x < bound("float64") for x in normed.values()), normed
    assert bare["output of the layer"] < bound("float64")
    assert all(bare[name] > 0.1 for name in ("query", "key", "input_gate", "forget_gate")), bare


# ---------------- the rest of the page


def test_the_example_runs():
    [example] = code_blocks("python")
    names: dict = {}
    exec(compile(example, "docs/migrating.md", "exec"), names)
    result, expected = names["h"], mlstm_chunkwise(*names["tokens"], layout="BTNH")[:, -1]
    assert result.shape == expected.shape
    assert np.linalg.norm(result - expected) < bound("float32") * np.linalg.norm(expected)


def test_states_of_another_stabiliser_are_the_same():
    """The true state is exp(m) * (c, n)."""
    r = np.random.default_rng(1)
    with jax.enable_x64(True):
        shapes = (
            [(B, NH, S, DHQK)] * 2
            + [(B, NH, S, DHV)]
            + [(B, NH, S)] * 2
            + [(B, NH, DHQK, DHV), (B, NH, DHQK), (B, NH)]
        )
        *tokens, c, n, m = (jnp.asarray(r.normal(size=shape)) for shape in shapes)
        run = functools.partial(mlstm_chunkwise, *tokens, eps=0.0, backend="xla")
        result, expected = run(c * math.exp(-2), n * math.exp(-2), m + 2), run(c, n, m)
    assert np.linalg.norm(result - expected) < bound("float64") * np.linalg.norm(expected)


THEIRS = {
    *(
        "get_mlstm_kernel",
        "max_triton_fwbw_v3",
        "v3noslice",
        "mLSTMBackend",
        "xLSTMBackend",
        "parallel_stabilized_simple",
    ),
    *(
        "reduce_slicing",
        "store_final_state",
        "save_states_every_nth_chunk",
        "chunk_size_inter",
        "chunk_size_intra",
    ),
    *("vecN_all", "scaM_all", "vecM_out", "matC_all", "vecM_combine", "scaMinter_initial"),
}


def test_names_exist():
    """But for tables, which have names of the other packages."""
    text = "\n".join(line for line in PAGE.splitlines() if not line.startswith("|"))
    names = set(re.findall(r"`([a-zA-Z]\w+)[`=]", text)) - THEIRS
    ours = {
        name
        for system in (v3, v5xl, stablef)
        for function in system.__all__
        for name in parameters(system, function)
    }
    assert names <= {
        *dir(mlstm_pallas),
        "mlstm_chunkwise_triton_stablef",
        *v5xl.__all__,
        *inspect.signature(mlstm_chunkwise).parameters,
        *ours,
    }
    for module in re.findall(r"`(mlstm_pallas\.[\w.]+)`", PAGE):
        assert hasattr(importlib.import_module(module), "mlstm_chunkwise_max_triton")
    assert hasattr(v5xl, "mlstm_chunkwise__xl_chunk")


def parameters(system, name):
    return list(inspect.signature(getattr(system, name)).parameters)


@pytest.mark.parametrize("initial", [False, True], ids=["zeros", "states"])
def test_it_is_the_function_of_transformers(initial):
    """Outputs, states and gradients of its backend in float32, with what the table says of the
    arguments."""
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that transformers looks for
        modeling = pytest.importorskip("transformers.models.xlstm.modeling_xlstm")
        config = modeling.xLSTMConfig(
            hidden_size=NH * DHV, num_heads=NH, chunk_size=16, mode="train", return_last_states=True
        )
    config.autocast_kernel_dtype = "float32"
    backend = modeling.xLSTMBackend(config)
    S, r = 48, np.random.default_rng(2)
    shapes = [(B, NH, S, DHQK)] * 2 + [(B, NH, S, DHV)] + [(B, NH, S)] * 2
    shapes += [(B, NH, DHQK, DHV), (B, NH, DHQK), (B, NH)] * initial
    x = [np.float32(r.normal(size=shape)) for shape in shapes]
    cotangents = [
        np.float32(r.normal(size=shape))
        for shape in ((B, NH, S, DHV), (B, NH, DHQK, DHV), (B, NH, DHQK))
    ]

    theirs = [
        torch.tensor(y[..., None] if y.shape == (B, NH) else y, requires_grad=True) for y in x
    ]
    h, (c, n, m) = backend(*theirs)
    loss = sum((y * torch.tensor(dy)).sum() for y, dy in zip((h, c, n), cotangents, strict=True))
    loss.backward()
    expected = [
        y.detach().numpy()
        for y in (
            h,
            c,
            n,
            m[..., 0],
            *(y.grad.reshape(z.shape) for y, z in zip(theirs, x, strict=True)),
        )
    ]

    def run(*x):
        h, states = mlstm_chunkwise(*x, return_last_states=True, eps=config.eps)
        return h, *states

    result, vjp = jax.vjp(jax.jit(run), *x)
    result = [np.asarray(y) for y in (*result, *vjp((*cotangents, jnp.zeros((B, NH)))))]
    names = ["h", "c", "n", "m", *("d" + name for name in (*"qkvif", "c", "n", "m"))]
    errors = {
        name: np.linalg.norm(y - z) / np.linalg.norm(z)
        for name, y, z in zip(names, result, expected, strict=False)
    }
    assert len(errors) == 4 + len(x)
    assert all(error < bound("float32") for error in errors.values()), errors
    for module in re.findall(r"`(mlstm_pallas\.[\w.]+)`", PAGE):
        assert hasattr(importlib.import_module(module), "mlstm_chunkwise_max_triton")
    assert hasattr(v5xl, "mlstm_chunkwise__xl_chunk")
