"""docs/migrating.md: its diffs keep the function of a model, each row of its tables is a call that
computes the same, its names exist.

The models are written for this file, the kernel of the other packages is the recurrence; only names
and arguments are those of the packages.
"""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import math
import re
import sys
import types
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import peers
import pytest
import xlstm_checkpoint
from oracle import NAMES, OUTPUTS, assert_close, compare, error, in_float64, random_inputs
from xlstm_model import Config

import mlstm_pallas
from mlstm_pallas import mlstm_chunkwise, mlstm_recurrent_step, reference, use_backend

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "migrating.md").read_text()
B, S, NH, E, DHQK, DHV = 2, 40, 2, 12, 4, 6
OTHER_KERNELS = "xlstm_jax.kernels.mlstm_chunkwise.triton_stablef.triton_fwbw"


# ---------------- models


def other_kernel(
    *args,
    return_last_states=False,
    sigmoid=False,
    eps=1e-6,
    chunk_size=64,  # changes nothing, like the dtype
    autocast_kernel_dtype=None,
):
    """mLSTMsig has no stabiliser: two states, in and out."""
    options = dict(input_gate="sigmoid") if sigmoid else {}
    h, states = reference.recurrence(*args, eps=eps, **options)
    return (h, states[: 3 - sigmoid]) if return_last_states else h


MODEL = """
def layer(params, x):
    q, k, v, i, f = projections(params, x)
    q, k, v, i, f = (y.swapaxes(1, 2) for y in (q, k, v, i, f))  # (B, NH, S, ...)
    h = mlstm_chunkwise_triton_stablef(
        q, k, v, i, f, chunk_size=64, autocast_kernel_dtype=q.dtype
    )
    h = h.swapaxes(1, 2)  # (B, S, NH, DHV)
    return output(params, x, h)
"""
XLSTM_JAX = f"""
from {OTHER_KERNELS} import (
    mlstm_chunkwise_triton_stablef,
)
{MODEL}"""
OF_TWO_PARTS = """
def layer(params, x):
    first, states = part(params, x[:, :23], ())
    second, _ = part(params, x[:, 23:], states)
    return jnp.concatenate([first, second], axis=1)

def part(params, x, states):
    q, k, v, i, f = projections(params, x)
"""
MLSTM_KERNELS = f"""{OF_TWO_PARTS}
    mlstm = get_mlstm_kernel("chunkwise--triton_xl_chunk")
    q, k, v, i, f = (y.swapaxes(1, 2) for y in (q, k, v, i, f))  # (B, NH, S, ...)
    h, states = mlstm(q, k, v, i, f, *states, return_last_states=True, eps=1e-6, chunk_size=128)
    h = h.swapaxes(1, 2)  # (B, S, NH, DHV)
    return output(params, x, h), states
"""
MLSTM_KERNELS_SIGING = f"""{OF_TWO_PARTS}
    mlstm = get_mlstm_kernel("chunkwise--triton_xl_chunk_siging")
    q, k, v, i, f = (y.swapaxes(1, 2) for y in (q, k, v, i, f))  # (B, NH, S, ...)
    h, (c, n) = mlstm(q, k, v, i, f, *states, return_last_states=True, chunk_size=128)
    h = h.swapaxes(1, 2)  # (B, S, NH, DHV)
    return output(params, x, h), (c, n)
"""
MODELS = XLSTM_JAX, XLSTM_JAX, MLSTM_KERNELS, MLSTM_KERNELS_SIGING
DIFFS = [*zip(MODELS, re.findall(r"```diff\n(.*?)```", PAGE, re.S), strict=True)]


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


def layer_of(source, kernel=None):
    """The layer that a source defines.

    kernel: of the other packages; None: they are missing.
    """
    package = kernel and types.SimpleNamespace(mlstm_chunkwise_triton_stablef=kernel)

    def projections(params, x):
        """q, k, v (B, S, NH, D), i, f (B, S, NH) of x (B, S, E)."""
        return [jnp.einsum("bse,eh...->bsh...", x, w) for w in params[:5]]

    def output(params, x, h):
        """(B, S, E) of h (B, S, NH, DHV), behind an output gate."""
        gate = jax.nn.sigmoid(jnp.einsum("bse,ehd->bshd", x, params[5]))
        return jnp.einsum("bshd,ehd->bse", gate * h, params[6])

    names = dict(jnp=jnp, projections=projections, output=output, mlstm_chunkwise=mlstm_chunkwise)
    names["get_mlstm_kernel"] = lambda name: partial(kernel, sigmoid=name.endswith("_siging"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, OTHER_KERNELS, package)
        exec(compile(source, "model", "exec"), names)
    return names["layer"]


def result(layer):
    """The output of a layer, float64."""
    r = np.random.default_rng(0)
    shapes = [(E, NH, DHQK)] * 2 + [(E, NH, DHV)] + [(E, NH)] * 2 + [(E, NH, DHV)] * 2
    params = [r.normal(size=shape) / math.sqrt(E) for shape in shapes]
    with use_backend("xla"):
        return in_float64(jax.jit(layer), params, r.normal(size=(B, S, E)))


def bound(dtype):
    """Rounding of about 20 sums in a row.

    One of n terms, here at most B * S, adds sqrt(n) roundings.
    """
    return 20 * math.sqrt(B * S) * float(jnp.finfo(dtype).eps) / 2


@pytest.mark.quick("layout")
@pytest.mark.parametrize(
    ("model", "diff"), DIFFS, ids=["import", "layout", "mlstm_kernels", "siging"]
)
def test_diff_keeps_the_function(model, diff):
    """Float64 tells functions apart."""
    expected = result(layer_of(model, other_kernel))
    assert error(result(layer_of(patched(model, diff))), expected) < bound("float64")


@pytest.mark.slow
def test_constant_denominator_has_the_same_gradients_behind_a_norm_only():
    """The norm has no eps, so that it undoes the denominator exactly."""
    x = random_inputs(3, B, NH, S, DHQK, DHV, states=False).values()

    def norm(h):
        return h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True))

    def gradients(function, outer):
        run = jax.grad(lambda x: jnp.sum(jnp.sin(outer(function(*x)))))
        return in_float64(jax.jit(run), [*x])

    with use_backend("xla"):
        (normed, bare), (expected, others) = (
            [gradients(function, outer) for outer in (norm, jnp.asarray)]
            for function in (mlstm_chunkwise, peers.constant_normaliser)
        )
    assert max(map(error, normed, expected)) < bound("float64")
    q, k, v, i, f = map(error, bare, others)
    assert v < bound("float64")
    assert min(q, k, i, f) > 0.1


# ---------------- the tables


def rows(package):
    """The first cell, and the arguments in the second, of each row that has any."""
    head = rf"^\| {package} \| mlstm_pallas \|\n\|---\|---\|\n"
    [table] = re.findall(rf"{head}((?:\|.*\n)*)", PAGE, re.M)
    return re.findall(r"^\| (.*?) \| `(\w+=.*)` \|$", table, re.M)


def arguments(code, theirs):
    """Ours, with the names of a package for its values."""
    return eval(f"dict({code})", dict(vars(mlstm_pallas), jnp=jnp, np=np, DHQK=DHQK) | theirs)


def theirs_of(step, q, k, v, i, f, c, n, m):
    """Our arguments, by what the packages call them."""
    values = {
        "q": q[:, :, None] if step else q,
        "k": k[:, :, None] if step else k,
        "v": v[:, :, None] if step else v,
        "matQ vecQ query queries": q,
        "matK vecK key keys": k,
        "matV vecV value values": v,
        "i scaI": i[..., None],
        "f scaF": f[..., None],
        "igate_preact": i[..., None, None] if step else i[..., None],
        "fgate_preact": f[..., None, None] if step else f[..., None],
        "vecI": i,
        "vecF": f,
        "igate": i[..., None] if step else i,
        "fgate": f[..., None] if step else f,
        "c matC_initial matC_old cstate": c,
        "n vecN_initial vecN_old nstate": n,
        "m m_initial scaM_old mstate": m[..., None],
        "scaM_initial": m,
        "c_state": c / DHQK**0.5,
        "n_state": n[..., None] / DHQK**0.5,
        "m_state": m[..., None, None],
        "qk_scale scale": DHQK**-0.5,
        "head_first output_final_state": True,
        "initial_state": (c, n, m),
        "mask": jnp.ones((B, S), bool),
        "EPS": 1e-6,
        "CHUNK_SIZE": 32,
        "autocast_kernel_dtype dtype_state": jnp.float32,
    }
    return {name: x for names, x in values.items() for name in names.split()}


@pytest.mark.parametrize(
    "package", ["another name", "xlstm-jax", "mlstm_kernels", "transformers", "xlstm"]
)
def test_each_row_is_our_call(package):
    inputs = random_inputs(3, B, NH, S, DHQK, DHV)
    for cell, code in rows(package):
        step = cell.startswith("step")
        call = mlstm_recurrent_step if step else partial(mlstm_chunkwise, return_last_states=True)
        ours = {x: y[:, :, 0] if step and x in "qkvif" else y for x, y in inputs.items()}
        changed = ours | arguments(code, theirs_of(step, *ours.values()))
        result = call(*[changed.pop(x) for x in NAMES], **changed)
        pair = map(jax.tree.leaves, (result, call(*ours.values())))
        compare([f"{x} of {cell}" for x in OUTPUTS], *pair, bound("float32"))


def test_states_for_xlstm_are_ours_on_the_way_back():
    [back] = re.findall(r"^\| step: what it returns \| `(.*)` \|$", PAGE, re.M)
    c, n, m = (
        x for name, x in random_inputs(3, B, NH, S, DHQK, DHV).items() if name not in "qkvif"
    )
    h, states = eval(back, dict(h=jnp.zeros((B, NH, DHV)), c=c, n=n, m=m, DHQK=DHQK))
    assert [x.shape for x in (h, *states)] == [
        (B, NH, 1, DHV),
        (B, NH, DHQK, DHV),
        (B, NH, DHQK, 1),
        (B, NH, 1, 1),
    ]
    theirs, ours = dict(zip(("c_state", "n_state", "m_state"), states, strict=True)), {}
    for cell, code in rows("xlstm"):
        if re.match("`._state`", cell):
            ours |= arguments(code, theirs)
    for x, y in zip(ours.values(), (c, n, m), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scale", ["qk_scale", "scale"])
def test_the_default_scale_leaves_every_bit_of_q(scale, dtype):
    """A factor of q that is not 1 rounds it; the default is 1, in any dtype."""
    table = "FLA" if scale == "scale" else "mlstm_kernels"
    [code] = [code for cell, code in rows(table) if cell == f"`{scale}`"]
    for width in (3, 64, 96, 128):
        q = jax.random.normal(jax.random.key(width), (40, width)).astype(dtype)
        names = {"q": q, scale: width**-0.5, "DHQK": width}
        scaled = arguments(code, names)["q"]
        assert (scaled.dtype, scaled.tolist()) == (q.dtype, q.tolist())


def decay_rows():
    """The rows of FLA with a forget gate, by their first cell."""
    return {cell: code for cell, code in rows("FLA") if code.startswith("f=")}


@pytest.mark.slow
def test_the_rows_of_fla_are_its_function():
    """With two sequences, of which the second goes on from the state after the first."""
    x = random_inputs(3, 1, NH, S, DHQK, DHV, states=False).values()
    q, k, v, _, f = (np.swapaxes(y, 1, 2) for y in x)
    g = jax.nn.log_sigmoid(f)
    weights = jnp.exp(jnp.cumsum(g[:, 14::-1], axis=1)[:, ::-1] - g[:, :15])  # of 15 steps
    state = jnp.einsum("bth,bthk,bthv->bhkv", weights, k[:, :15], v[:, :15])
    arrays, states = dict(q=q, k=k, v=v), jnp.stack([0 * state, state], axis=1)
    theirs = arrays | dict(g=g, scale=2 * DHQK**-0.5, cu_seqlens=[0, 15, S], initial_state=states)
    theirs |= dict(head_first=False, output_final_state=True)
    of_g, of_gamma, of_neither = decay_rows().values()
    for _, code in rows("FLA"):
        if code not in (of_gamma, of_neither):
            arrays |= arguments(code, theirs)
    h, (c, *_) = mlstm_chunkwise(**arrays)
    expected = 2 * in_float64(jax.jit(peers.no_input_gate), *x)
    assert_close(np.swapaxes(h, 1, 2), expected, bound("float32"))
    assert c.shape == states.shape
    decays = dict(q=q, g_gamma=g[0, 0], g=jnp.broadcast_to(g[:, :1], g.shape))
    np.testing.assert_array_equal(*(arguments(x, decays)["f"] for x in (of_g, of_gamma)))
    no_decay = [arguments(x, decays | dict(g=0 * g))["f"] for x in (of_g, of_neither)]
    np.testing.assert_allclose(*map(jax.nn.log_sigmoid, no_decay), atol=1e-15)


def simple_gla(q, k, v, g):
    """FLA's function, (B, T, H, D), step by step."""

    def step(state, x):
        q, k, v, g = x
        state = state * jnp.exp(g)[..., None, None] + k[..., :, None] * v[..., None, :]
        return state, jnp.einsum("bhk,bhkv->bhv", q * q.shape[-1] ** -0.5, state)

    steps = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g))
    state = jnp.zeros((*q.shape[:1], *q.shape[2:], v.shape[-1]), q.dtype)
    return jnp.moveaxis(jax.lax.scan(step, state, steps)[1], 0, 1)


# The edges of the decays that FLA takes: none, less than a rounding, subnormal, a reset.
DECAYS = {
    "none_at_some_steps": lambda g: g.at[:, ::3].set(0.0),
    "none": jnp.zeros_like,
    "tiny": lambda g: 1e-9 * g,
    "least_normal": lambda g: jnp.full_like(g, -1.2e-38),
    "subnormal": lambda g: jnp.full_like(g, -1e-40),
    "very_negative": lambda g: 300 * g,
    "reset_at_a_step": lambda g: g.at[:, 17].set(-1e4),
    "infinite_at_a_step": lambda g: g.at[:, 17].set(-jnp.inf),
}


@pytest.mark.quick("reset_at_a_step", "infinite_at")
@pytest.mark.parametrize("cotangent", [1.0, 1e-12], ids=["plain", "small_cotangents"])
@pytest.mark.parametrize("decay", DECAYS)
def test_the_gate_of_fla_has_the_gradient_of_its_decay(decay, cotangent):
    x = random_inputs(4, 1, NH, S, DHQK, DHV, states=False)
    q, k, v = (jnp.swapaxes(x[name], 1, 2) for name in "qkv")
    dh = cotangent * jax.random.normal(jax.random.key(1), v.shape)
    g = DECAYS[decay](-jax.random.uniform(jax.random.key(0), q.shape[:3]))
    code, gate = decay_rows()["`g`, logarithms"], rows("FLA")[1][1]

    def ours(g):
        theirs = dict(q=q, g=g)
        options = arguments(code, theirs) | arguments(gate, theirs)
        return mlstm_chunkwise(q, k, v, **options, layout="BTNH", backend="xla")

    def both(function, g, dh):
        h, pullback = jax.vjp(function, g)
        return h, pullback(dh)[0]

    def theirs(q, k, v, g, dh):
        return both(partial(simple_gla, q, k, v), g, dh)

    pairs = zip(both(ours, g, dh), in_float64(jax.jit(theirs), q, k, v, g, dh), strict=True)
    for result, expected in pairs:
        assert_close(result, expected, bound("float32"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_gate_of_fla_is_as_exact_as_a_decay_of_16_bits(dtype):
    g = -jnp.asarray([0.0, 1e-4, 1e-3, 0.01, 0.1, 1.0, 30.0], dtype)
    f = arguments(decay_rows()["`g`, logarithms"], dict(g=g))["f"]
    assert f.dtype == "float32"
    np.testing.assert_allclose(jax.nn.log_sigmoid(f), g.astype("float32"), rtol=1e-5, atol=1e-15)


def table_of(head):
    """The cells of each row below a head."""
    [table] = re.findall(rf"^\| {head} \|\n\|---\|---\|\n((?:\|.*\n)*)", PAGE, re.M)
    return [line.strip("|\n ").split(" | ") for line in table.splitlines()]


FIELDS = {
    name: ast.literal_eval(default)
    for field, _ in table_of(r"Field \| Here")
    for name, default in re.findall(r"`(\w+)=(.*?)`", field)
}


def source_of(package, file, name):
    """A class or function of a package, which may be installed; to import it may need torch."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text())
    [node] = [x for x in tree.body if getattr(x, "name", None) == name]
    return node


def test_fields_of_the_models_are_in_the_example():
    """And what stands for the others is an argument."""
    example = {x.name: x.default for x in dataclasses.fields(Config)}
    functions = mlstm_chunkwise, mlstm_recurrent_step
    arguments = set().union(*(inspect.signature(x).parameters for x in functions))
    for field, ours in table_of(r"Field \| Here"):
        for name in re.findall(r"`(\w+)=", field) if "`Config`" in ours else ():
            assert FIELDS[name] in (example[name], None), name
        known = {*arguments, *example, *dir(mlstm_pallas), "Config"}
        assert {*re.findall(r"`(\w+)[`=]", ours)} <= known, ours


def test_fields_of_the_models_are_known_to_the_reader():
    """The functions of mlstm_kernels have two more, for the sigmoid input gate."""
    known = xlstm_checkpoint.MODEL_FIELDS | xlstm_checkpoint.OTHER_FIELDS
    assert FIELDS.keys() - known == {"normalize_siging", "stable_fgate"}


@pytest.mark.parametrize(
    ("package", "file", "name", "changed"),
    [
        ("mlstm_kernels", "torch/backend_module.py", "mLSTMBackendConfig", {}),
        (
            "transformers",
            "models/xlstm/configuration_xlstm.py",
            "xLSTMConfig",
            dict(mode="inference"),
        ),
    ],
    ids=["mlstm_kernels", "transformers"],
)
def test_each_field_has_a_row(package, file, name, changed):
    body = source_of(package, file, name).body
    fields = [x for x in body if isinstance(x, ast.AnnAssign)]
    defaults = {x.target.id: ast.literal_eval(x.value) for x in fields}
    defaults.pop("model_type", None)
    assert defaults
    assert defaults.items() <= (FIELDS | changed).items()


def test_each_argument_of_fla_has_a_row():
    arguments = source_of("fla", "ops/simple_gla/chunk.py", "chunk_simple_gla").args.args
    named = re.findall(r"\w+", " ".join(field for field, _ in table_of("FLA \\| mlstm_pallas")))
    assert {x.arg for x in arguments} <= {*named, *"qkv"}
