"""docs/migrating.md: its diffs keep the function, each row of its tables is a call that computes
the same, its fields exist. The kernels of other packages are stood for by the recurrence."""

import re
import sys
import textwrap
import types
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import NAMES, OUTPUTS, compare, in_float64, random_inputs, tolerance

import mlstm_pallas
from mlstm_pallas import mlstm_chunkwise, mlstm_recurrent_step, reference

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
B, S, NH, DHQK, DHV = 2, 40, 2, 4, 6
BOUND = 20 * tolerance("float32", B * S)


def kernel(*x, return_last_states=False, sigmoid=False, eps=1e-6, **_):
    """Of mlstm_kernels and xlstm_jax. With the sigmoid gate it has two states, in and out."""
    options = dict(input_gate="sigmoid") if sigmoid else {}
    h, states = reference.recurrence(*x, eps=eps, **options)
    return (h, states[: 3 - sigmoid]) if return_last_states else h


DIFFS = re.findall(r"```diff\n(.*?)```", PAGE, re.S)


@pytest.mark.slow
@pytest.mark.parametrize("diff", DIFFS, ids=["import", "layout", "mlstm_kernels", "siging"])
def test_diff_keeps_the_function(diff, monkeypatch):
    """Both sides run, one behind the other in each hunk, with arrays in the model's layout."""
    x = random_inputs(3, B, NH, S, DHQK, DHV)
    states = [x.pop(name) for name in ("c_initial", "n_initial", "m_initial")]
    package = "xlstm_jax.kernels.mlstm_chunkwise.triton_stablef.triton_fwbw"
    theirs = types.SimpleNamespace(mlstm_chunkwise_triton_stablef=kernel)
    monkeypatch.setitem(sys.modules, package, theirs)
    results = []
    for sign in "-+":
        names = {name: jnp.swapaxes(y, 1, 2) for name, y in x.items()}
        names |= dict(states=states[: 3 - ("siging" in diff)], mlstm_chunkwise=mlstm_chunkwise)
        names["get_mlstm_kernel"] = lambda name: partial(kernel, sigmoid="siging" in name)
        for hunk in diff.split("@@\n"):
            lines = [y[1:] for y in hunk.splitlines() if y[0] in (sign, " ")]
            exec(textwrap.dedent("\n".join(lines)), names)
        if "h" not in names:  # an import alone
            names["h"] = names["mlstm_chunkwise_triton_stablef"](*x.values())
        results.append([names["h"], *(names[y] for y in "cn" if y in names)])
        results[-1] += names["states"] if "c" not in names else []
    compare(range(len(results[0])), *results, BOUND)


# ---------------- the tables


def rows(package):
    """The first cell, and the arguments in the second, of each row that has any."""
    [table] = re.findall(
        rf"^\| {package} \| mlstm_pallas \|\n\|---\|---\|\n((?:\|.*\n)*)", PAGE, re.M
    )
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


PACKAGES = "another name", "xlstm-jax", "mlstm_kernels", "transformers", "xlstm"


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_each_row_is_our_call(package):
    """For xlstm so is the way back of the states."""
    inputs = random_inputs(3, B, NH, S, DHQK, DHV)
    for cell, code in rows(package):
        step = cell.startswith("step")
        call = mlstm_recurrent_step if step else partial(mlstm_chunkwise, return_last_states=True)
        ours = {x: y[:, :, 0] if step and x in "qkvif" else y for x, y in inputs.items()}
        theirs = theirs_of(step, *ours.values())
        changed = ours | arguments(code, theirs)
        result = call(*[changed.pop(x) for x in NAMES], **changed)
        pair = map(jax.tree.leaves, (result, call(*ours.values())))
        compare([f"{x} of {cell}" for x in OUTPUTS], *pair, BOUND)
    if package == "xlstm":
        [back] = re.findall(r"^\| step: what it returns \| `(.*)` \|$", PAGE, re.M)
        c, n, m = [*inputs.values()][5:]
        h, states = eval(back, dict(h=inputs["v"][:, :, 0], c=c, n=n, m=m, DHQK=DHQK))
        assert h.shape == (B, NH, 1, DHV)
        expected = (theirs_of(True, *inputs.values())[f"{x}_state"] for x in "cnm")
        compare("cnm", states, expected, 1e-6)


def by_rows_of_fla(q, k, v, g):
    """Our call, with a gate for each step."""
    table, options = dict(rows("FLA")), dict(layout="BTNH")
    for cell in ("no input gate, no normaliser", "`g`, logarithms"):
        options |= arguments(table[cell], dict(q=q, g=g))
    return mlstm_chunkwise(q, k, v, **options)


@jax.jit
def simple_gla(q, k, v, g):
    """FLA's function, (B, T, H, D), step by step: h and the last state."""

    def step(state, x):
        q, k, v, g = x
        state = state * jnp.exp(g)[..., None, None] + k[..., :, None] * v[..., None, :]
        return state, jnp.einsum("bhk,bhkv->bhv", q * q.shape[-1] ** -0.5, state)

    steps = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, g)]
    state = jnp.zeros((*q.shape[:1], *q.shape[2:], v.shape[-1]), q.dtype)
    state, h = jax.lax.scan(step, state, steps)
    return jnp.moveaxis(h, 0, 1), state


def gla_inputs():
    """q, k, v and g of one sequence."""
    x = random_inputs(4, 1, NH, S, DHQK, DHV, states=False)
    g = -jax.random.uniform(jax.random.key(0), (1, S, NH))
    return *(jnp.swapaxes(x[name], 1, 2) for name in "qkv"), g


@pytest.mark.slow
def test_the_rows_of_fla_are_its_function():
    """With two sequences, of which the second goes on from the state after the first."""
    q, k, v, g = x = gla_inputs()
    h, last = in_float64(simple_gla, *x)
    _, state = in_float64(simple_gla, *(y[:, :15] for y in x))
    states = jnp.stack([0 * state, state], axis=1).astype("float32")
    arrays = dict(q=q, k=k, v=v)
    ends = jnp.array([0, 15, S])
    theirs = arrays | dict(g=g, scale=2 * DHQK**-0.5, cu_seqlens=ends, initial_state=states)
    theirs |= dict(head_first=False, output_final_state=True)
    codes = [code for _, code in rows("FLA")]
    of_g, of_gamma, of_neither = (code for code in codes if code.startswith("f="))
    [of_ids] = (code for code in codes if code.startswith("segment_ids="))
    for code in codes:
        if code not in (of_gamma, of_neither, of_ids):
            arrays |= arguments(code, theirs)
    result, (c, *_) = mlstm_chunkwise(**arrays)
    compare("hc", (result, c), (2 * h, np.stack([state, last], axis=1)), BOUND)
    ids = arguments(of_ids, theirs)["segment_ids"]
    np.testing.assert_array_equal(ids, 1 + (np.arange(S) >= 15)[None])
    decays = dict(q=q, g_gamma=g[0, 0], g=jnp.broadcast_to(g[:, :1], g.shape))
    np.testing.assert_array_equal(*(arguments(x, decays)["f"] for x in (of_g, of_gamma)))
    no_decay = [arguments(x, decays | dict(g=0 * g))["f"] for x in (of_g, of_neither)]
    np.testing.assert_allclose(*map(jax.nn.log_sigmoid, no_decay), atol=1e-15)


# The edges of the decays that FLA takes: none, less than a rounding, subnormal, a reset.
DECAYS = {
    "none_at_some_steps": lambda g: g.at[:, ::3].set(0.0),
    "tiny": lambda g: 1e-9 * g,
    "subnormal": lambda g: jnp.full_like(g, -1e-40),
    "very_negative": lambda g: 300 * g,
    "infinite_at_a_step": lambda g: g.at[:, 17].set(-jnp.inf),
}


@pytest.mark.slow
@pytest.mark.parametrize("decay", DECAYS)
def test_the_gate_of_fla_has_the_gradient_of_its_decay(decay):
    """Also with small cotangents."""
    q, k, v, g = gla_inputs()
    g, dh = DECAYS[decay](g), jax.random.normal(jax.random.key(1), v.shape)

    def results(function, q, k, v, g, dh):
        h, pullback = jax.vjp(partial(function, q, k, v), g)
        return h, *pullback(dh), *pullback(1e-12 * dh)

    theirs = partial(results, lambda *x: simple_gla(*x)[0])
    expected = in_float64(jax.jit(theirs), q, k, v, g, dh)
    compare(("h", "dg", "small dg"), results(by_rows_of_fla, q, k, v, g, dh), expected, BOUND)
