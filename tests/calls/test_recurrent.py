"""One token at a time: the step kernel and its plain form against the recurrence in float64."""

import functools
import itertools
import re

import compile_report
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from call_checks import OF_RECURRENCE, PROMISED, recurrence_of_lengths, restabilised
from oracle import (
    BACKENDS,
    NAMES,
    assert_below,
    assert_close,
    assert_same_bits,
    beyond,
    errors_of,
    expected_of,
    head_norms,
    in_float64,
    in_layout,
    joined_arrays,
    lowered_for_cuda,
    oracle,
    outputs_and_gradients,
    param,
    random_inputs,
    refused,
    strict,
    token_at,
    tolerance,
)

from mlstm_pallas import KernelConfig, mlstm_recurrent_sequence, mlstm_recurrent_step


@pytest.fixture(autouse=True)
def strict_modes():
    """Everything traces under the strict promotion modes of jax."""
    with strict():
        yield


STATES = NAMES[5:]


def random_token(seed, *shape, **options):
    """Arguments of mlstm_recurrent_step; shape: B, NH, S = 1, DHQK, DHV."""
    return [*token_at(random_inputs(seed, *shape, **options), 0).values()]


# ---------------- numbers


def run_of(
    S, backend="interpret", *, columns=None, layout="BNTH", joined=False, lengths=None, **options
):
    """A function of inputs by name, and of slots: h, (B, NH, S, DHV), and the states. One step is a
    token, several are a sequence; columns: of v in a CTA."""
    tiles = columns and KernelConfig(triton_recurrent_step=dict(siz_b_DHQK=16, siz_b_DHHV=columns))
    options |= dict(backend=backend, config=tiles)

    def run(slots=None, **x):
        x = {name: x[name] for name in NAMES if name in x}
        if S == 1:
            args = token_at(x, 0).values()
            args = joined_arrays(*args) if joined else args
            h, states = mlstm_recurrent_step(*args, slots=slots, **options)
            return h[:, :, None], *states
        ends = None if lengths is None else jnp.asarray(lengths)
        of_sequence = dict(layout=layout, sequence_lengths=ends, slots=slots)
        args = in_layout(layout, x, x.values())
        h, states = mlstm_recurrent_sequence(*args, **of_sequence, **options)
        return *in_layout(layout, "h", [h]), *states

    return run


def inputs_of(
    B, NH, S, DHQK, DHV, *, rows=None, slots="int32", dtypes=(), lengths=None, m=0.0, **recipe
):
    """Inputs by name, and the slots of this dtype, or None, of pools of so many rows.

    A third of the entries have no row. These are NaN, and so are a row without an entry and tokens
    beyond the lengths.

    Args:
      dtypes: of c, n and m.
      m: what is added to m.
      recipe: options of random_inputs.
    """
    x = random_inputs(5, max(B, rows or 0), NH, S, DHQK, DHV, **recipe)
    x = {name: np.array(y[: rows or B] if name in STATES else y[:B]) for name, y in x.items()}
    if "m_initial" in x:
        x["m_initial"] = x["m_initial"] + np.float32(m)
    for name, dtype in zip(STATES, dtypes, strict=False):
        x[name] = x[name].astype(dtype)
    gone, index = np.zeros((B, 1, S), bool), None
    if lengths is not None:
        gone = beyond(lengths, x["i"][:, :1])
    if rows:
        without, index = np.arange(B) % 3 == 1, np.random.default_rng(0).permutation(min(rows, 128))
        # The least int8 is none, and neither is the first row beyond the pools.
        index = np.where(without, np.resize([-1, rows if rows < 128 else -128], B), index[:B])
        gone |= without[:, None, None]
        for name in {*STATES} & {*x}:
            x[name][np.setdiff1d(np.arange(rows), index)[:1]] = np.nan
    for name in "qkvif":
        x[name][np.broadcast_to(gone, x["i"].shape)] = np.nan
    return x, None if index is None else jnp.asarray(index, slots)


SIGMOID = dict(input_gate="sigmoid", inputs=dict(m_initial=False, i_scale=3.0, resets=True))
EMPTY = dict(eps=0.0, norm_val=0.0, inputs=dict(states=False, i_shift=-np.inf))
BFLOAT16 = dict(dtype="bfloat16", dtypes=["bfloat16"] * 2)
HALF = ["float16"] * 3
ROUNDED_M = dict(i_scale=4.0, dtypes=["float32", "float32", "bfloat16"])


def on(backend, shape, slow=False, **options):
    """Parameters of a test: where it runs, B, NH, S, DHQK, DHV, and options of check."""
    triton = backend == "triton"
    marks = [pytest.mark.gpu] * triton + [pytest.mark.slow] * slow
    marks += [pytest.mark.smoke] * (triton and shape == (2, 4, 3, 128, 256))
    return param(backend, shape, marks=marks, **options)


CALLS = [
    on("interpret", (2, 3, 1, 32, 64)),
    on("interpret", (1, 2, 1, 40, 37), slow=True, columns=16),  # tiles that divide neither
    on("interpret", (1, 2, 1, 40, 37), columns=16, inputs=BFLOAT16),
    on("xla", (1, 2, 1, 40, 37), inputs=BFLOAT16),
    on("interpret", (1, 2, 1, 40, 37), slow=True, columns=64),  # one CTA per head
    on("interpret", (1, 1, 1, 300, 64), slow=True),  # five row blocks
    on("interpret", (1, 1, 1, 1, 1)),
    on("xla", (0, 2, 1, 16, 8), slow=True),
    on("interpret", (0, 2, 1, 16, 8)),
    on("triton", (0, 2, 1, 16, 8)),
    on(None, (0, 2, 1, 16, 8)),
    on("interpret", (1, 2, 1, 16, 8), slow=True, **EMPTY),
    on("interpret", (1, 2, 1, 16, 8), slow=True, **EMPTY, input_gate="sigmoid"),
    on("interpret", (2, 4, 3, 20, 24), slow=True, eps=0.1, norm_val=0.0),
    on("interpret", (2, 4, 3, 20, 24), slow=True, norm_val=40.0, stabilize_correctly=False),
    on(
        "interpret",
        (2, 4, 3, 20, 24),
        slow=True,
        eps=0.01,
        norm_val=2.0,
        normalize=False,
        **SIGMOID,
    ),
    # two CTAs
    on("interpret", (2, 4, 3, 20, 24), eps=0.01, norm_val=2.0, columns=16, **SIGMOID),
    on("xla", (2, 4, 3, 20, 24), slow=True, eps=0.01, norm_val=2.0, **SIGMOID),
    # from zeros
    on("interpret", (2, 4, 3, 20, 24), slow=True, inputs=dict(dtype="bfloat16", states=False)),
    on("xla", (2, 4, 3, 20, 24), slow=True, layout="BTNH", eps=0.1),
    on("xla", (2, 4, 3, 20, 24), wide=True),
    # nothing is stored at first
    on("xla", (2, 4, 3, 16, 8), slow=True, eps=0.1, inputs=dict(resets=True, m=-np.inf)),
    # All float16: it is rounded once, at the end.
    on("xla", (2, 4, 1, 32, 64), slow=True, inputs=dict(dtype="float16")),
    on("interpret", (2, 4, 1, 32, 64), inputs=dict(dtype="float16", dtypes=HALF)),
    # A stabiliser that is rounded costs no digits.
    on("xla", (2, 4, 6, 16, 8), slow=True, eps=0.0, inputs=ROUNDED_M),
    on("interpret", (2, 4, 6, 16, 8), slow=True, eps=0.0, inputs=ROUNDED_M),
    on("triton", (2, 4, 6, 16, 8), eps=0.0, inputs=ROUNDED_M),
    on("xla", (2, 3, 1, 48, 80), slow=True, joined=True),
    on("xla", (2, 3, 1, 48, 80), slow=True, joined=True, **SIGMOID),
    on("interpret", (2, 3, 1, 48, 80), slow=True, joined=True),
    on("interpret", (2, 3, 1, 48, 80), slow=True, joined=True, **SIGMOID),
    on("interpret", (2, 3, 1, 48, 80), joined=True, columns=16),
    on("interpret", (2, 3, 1, 48, 80), slow=True, joined=True, columns=16, **SIGMOID),
    on("triton", (2, 3, 1, 48, 80), joined=True, columns=16),
    on("triton", (2, 3, 1, 48, 80), joined=True, **SIGMOID),
    on("xla", (3, 2, 3, 16, 16), lengths=[2, 0, 9]),
    on("interpret", (3, 2, 3, 16, 16), lengths=[2, 0, 9], layout="BTNH", **SIGMOID),
    on("triton", (3, 2, 3, 16, 16), lengths=[2, 0, 9], layout="BTNH"),
    # Pools of states.
    on("xla", (5, 2, 1, 40, 37), slow=True, inputs=dict(rows=5)),
    on(
        "xla",
        (5, 2, 1, 40, 37),
        slow=True,
        inputs=BFLOAT16 | dict(rows=5, m_initial=False),
        input_gate="sigmoid",
    ),
    on("xla", (5, 2, 1, 40, 37), inputs=dict(rows=200, slots="int8"), joined=True),
    on(
        "xla",
        (5, 2, 3, 40, 37),
        slow=True,
        inputs=dict(rows=5),
        lengths=[2, 3, 0, 1, 9],
        layout="BTNH",
    ),
    on("interpret", (5, 2, 1, 40, 37), inputs=dict(rows=5)),
    on(
        "interpret",
        (5, 2, 1, 40, 37),
        inputs=dict(rows=5, m_initial=False),
        columns=16,
        input_gate="sigmoid",
    ),
    on(
        "interpret", (5, 2, 1, 40, 37), inputs=dict(rows=200, slots="int8"), joined=True, columns=16
    ),
    on(
        "interpret",
        (5, 2, 1, 40, 37),
        inputs=BFLOAT16 | dict(rows=5, dtypes=["float16", "bfloat16"]),
        columns=16,
    ),
    on(
        "interpret",
        (5, 2, 3, 40, 37),
        slow=True,
        inputs=dict(rows=5),
        lengths=[2, 3, 0, 1, 9],
        layout="BTNH",
    ),
    on("triton", (5, 2, 1, 40, 37), inputs=dict(rows=200, slots="int8"), joined=True, columns=16),
    on("triton", (5, 2, 1, 40, 37), inputs=BFLOAT16 | dict(rows=5, dtypes=["float16", "bfloat16"])),
    on("triton", (5, 2, 3, 40, 37), inputs=dict(rows=5), lengths=[2, 3, 0, 1, 9], layout="BTNH"),
    on("triton", (64, 8, 1, 256, 512), inputs=dict(rows=192)),
    on("triton", (64, 8, 1, 256, 512), inputs=BFLOAT16 | dict(rows=192)),
    on("triton", (3, 8, 1, 333, 500), inputs=dict(rows=7)),
    # Real sizes and odd ones.
    on("triton", (2, 4, 3, 128, 256), inputs=BFLOAT16),
    on("triton", (2, 4, 3, 64, 64)),
    on("triton", (2, 4, 3, 256, 512)),
    on("triton", (2, 4, 3, 96, 192), inputs=BFLOAT16),
    on("triton", (2, 4, 3, 1024, 1024)),
    on("triton", (2, 4, 3, 1, 1), inputs=BFLOAT16),
    on("triton", (2, 4, 3, 20, 37)),
    on("triton", (2, 4, 3, 333, 500), inputs=BFLOAT16),
    on("triton", (2, 4, 3, 500, 333)),
    on("triton", (2, 4, 1, 128, 256), inputs=dict(dtype="float16")),
    on("triton", (2, 4, 1, 128, 256), inputs=dict(dtype="float16", dtypes=HALF)),
]


@functools.cache
def of_entries(slots, lengths, **options):
    """The recurrence of the entries that have rows, from the states in these and to them; one
    object for equal arguments, so that it is compiled once."""
    index = None if slots is None else np.asarray(slots, int)

    def run(*, segment_ids=None, **x):
        B, _, S = x["i"].shape
        used = rows = np.arange(B)
        count = len(x.get(STATES[0], used))
        if index is not None:
            used = np.flatnonzero((index >= 0) & (index < count))
            rows = index[used]
        each = x | {name: x[name][rows if name in STATES else used] for name in {*NAMES} & {*x}}
        h, states = recurrence_of_lengths(np.array(lengths or [S] * B, int)[used])(**each)
        zeros = (jnp.zeros((count, *y.shape[1:]), y.dtype) for y in states)
        pools = (x.get(name, y) for name, y in zip(STATES, zeros, strict=True))
        after = (y.at[rows].set(z) for y, z in zip(pools, states, strict=True))
        return jnp.zeros_like(x["v"]).at[used].set(h), *after

    return functools.partial(run, **options)


@functools.cache
def jitted(run):
    return jax.jit(lambda x: run(**x))


def check(backend, *shape, inputs=(), wide=False, lengths=None, **options):
    """A step, or a sequence of several, is the recurrence in float64, in dtypes too; in plain jnp
    so are its gradients.

    Args:
      inputs: options of inputs_of.
      wide: whether all is in float64.
      options: those of run_of.
    """
    (*_, S, DHQK, _), (x, slots) = shape, inputs_of(*shape, lengths=lengths, **dict(inputs))
    run = run_of(S, backend, lengths=lengths, **options)
    of_recurrence = {name: options[name] for name in OF_RECURRENCE & {*options}}
    index = None if slots is None else tuple(np.asarray(slots, int))
    alone = of_entries(index, lengths and tuple(lengths), **of_recurrence)
    # Nothing reads a NaN.
    clean = {name: np.where(np.isnan(y), y.dtype.type(0), y) for name, y in x.items()}
    dtypes = [x[name].dtype if name in x else "float32" for name in ("v", *STATES)]
    desired = in_float64(jitted(alone), clean)
    if wide:
        dtypes, outputs = ["float64"] * 4, in_float64(lambda x: run(**x), x)
    else:
        outputs, *again = (jax.jit(run)(slots, **x) for _ in range(1 + (backend == "triton")))
        bits = [[np.asarray(y).tobytes() for y in ys] for ys in (outputs, *again)]  # NaN too
        assert bits[0] == bits[-1]
        if backend == "xla" and {*map(str, dtypes)} == {"float32"} and x["q"].size:
            draw = np.random.default_rng(1)
            cotangents = [np.float32(draw.normal(size=y.shape)) for y in desired]
            tokens = x if slots is None else {name: clean[name] for name in "qkvif"}
            result = outputs_and_gradients(run)(x | tokens, cotangents, slots=slots)
            assert_below(errors_of(clean, result, expected_of(clean, cotangents, alone))[1], 1e-4)
    assert [y.dtype for y in outputs] == dtypes
    h, *states = (np.array(y, "float64") for y in outputs)
    if slots is not None:
        others = np.setdiff1d(np.arange(len(states[0])), slots)  # keep their bits
        for name, y in zip(STATES, states, strict=True):
            if name in x:
                np.testing.assert_array_equal(y[others], np.float64(x[name][others]))
                y[others] = clean[name][others]
    results = h, *restabilised(states, desired[3]), states[2]  # of the m that is returned
    for name, y, z, dtype in zip(("h", *STATES), results, desired, dtypes, strict=True):
        bound = tolerance(dtype, DHQK if name == "h" or S > 1 else 1)
        if backend == "triton":
            bound = max(bound, PROMISED[str(dtype)][0])
        assert_close(y, z, bound, name)
        assert not np.any(y[z == 0])


@pytest.mark.parametrize(("backend", "shape", "options"), CALLS)
def test_a_step_is_one_of_the_recurrence(backend, shape, options):
    check(backend, *shape, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("gate", "layout"), [("exp", "BTNH"), ("sigmoid", "BNTH")])
def test_states_after_each_token_are_those_of_single_steps(backend, gate, layout):
    x, options = random_inputs(7, 3, 2, 3, 16, 16, m_initial=gate == "exp"), dict(input_gate=gate)
    h, *every = run_of(3, backend, layout=layout, return_all_states=True, **options)(**x)
    for t in range(3):
        token = {name: y if name in STATES else y[:, :, t : t + 1] for name, y in x.items()}
        h_t, *states = run_of(1, backend, **options)(**token)
        assert_same_bits([h[:, :, t : t + 1], *(y[:, t] for y in every)], [h_t, *states])
        x |= zip(STATES, states, strict=True)


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
    q, k, v, _, _, c, n, _ = token_at(whole, 0).values()
    h, (c, n, m_new) = mlstm_recurrent_step(q, k, v, i, f, c, n, m, backend=backend)
    whole |= dict(i=np.where(i <= -1e6, -inf, i)[..., None], f=f[..., None], m_initial=m)
    *expected, M = oracle(whole)
    np.testing.assert_allclose(m_new, M, rtol=1e-6)
    for name, actual, desired in zip("hcn", (h[:, :, None], c, n), expected, strict=True):
        wrong_by, size = map(head_norms, (actual - desired, desired))
        # A sum of terms of 50 has roundings of 2e-6, which the exponential makes relative ones;
        # below 1e-37 float32 loses digits.
        wrong = ~(wrong_by <= 1e-5 * size + 1e-37)
        assert not wrong.any(), f"{name} at i, f, m = {i[wrong]}, {f[wrong]}, {m[wrong]}"


# ---------------- memory


# The rows are those of a pool; 0: none.
IN_PLACE = [
    ("exp", "bfloat16", 20, 37, 0),
    ("sigmoid", "float32", 20, 37, 0),
    ("exp", "float32", 300, 500, 0),
    ("sigmoid", "bfloat16", 300, 500, 0),
    ("exp", "float32", 40, 37, 5),
    ("sigmoid", "float32", 40, 37, 5),
]


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("input_gate", "dtype", "DHQK", "DHV", "rows"), IN_PLACE)
def test_a_step_is_one_launch_in_place(input_gate, dtype, DHQK, DHV, rows, joined):
    """It writes the states where it reads them. Several CTAs of a head read n and m from a copy;
    only n and m of slots are gathered, and nothing is sliced."""
    x, slots = inputs_of(5, 2, 1, DHQK, DHV, rows=rows, dtype=dtype)
    step = functools.partial(mlstm_recurrent_step, input_gate=input_gate, backend="triton")
    run = jax.jit(lambda slots, *token: step(*token, slots=slots))
    token = token_at(x, 0).values()
    text = lowered_for_cuda(run, slots, *(joined_arrays(*token) if joined else token))
    operations = {*re.findall(r"stablehlo\.(\w+)[ (]", text)} - {"reshape"}
    copies, copied = {"broadcast_in_dim", "concatenate", "constant", "convert"}, DHQK == 300
    if not rows:
        assert operations <= {"custom_call"} | (copies if copied else set())
        assert ("concatenate" in operations) == copied
    exp = input_gate == "exp"
    gathered = re.findall(r'"stablehlo.gather".*: \((tensor<\w+>)', text)
    assert len(gathered) == (1 + exp) * bool(rows)
    assert "tensor<5x2x40x37xf32>" not in gathered
    assert "scatter" not in text
    [call] = [line for line in text.splitlines() if "custom_call" in line]
    aliases = re.findall(r"output_tuple_indices = \[(\d)\], operand_index = (\d)", call)
    assert aliases == [("0", "0"), ("1", "1"), ("2", "2")][: 2 + exp]


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 37])
def test_a_loop_with_one_step_per_iteration_copies_no_state(batch):
    x = random_token(0, batch, 8, 1, 256, 512)

    def generate(token, states):
        def body(carry):
            t, _, states = carry
            return (t + 1, *mlstm_recurrent_step(*token, *states, backend="triton"))

        first = jnp.int32(0), jnp.zeros_like(token[2]), states
        return jax.lax.while_loop(lambda x: x[0] < x[1][0, 0, 0].astype("int32"), body, first)

    text = jax.jit(generate, donate_argnums=1).lower(x[:5], tuple(x[5:])).compile().as_text()
    assert not re.findall(r"= (f32\S+) copy(?:-start)?\(", text)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["exp", "slots"])
@pytest.mark.parametrize(("device", "dtype"), [("H200", "bfloat16"), ("A100", "float32")])
def test_compiles_without_spills(device, dtype, variant):
    pytest.importorskip("triton")
    options = dict(direction="step", variant=variant)
    for row in compile_report.report(device, [(64, 64), (512, 1024)], [dtype], **options):
        assert (row["note"], row["spill_store_bytes"]) == ("", 0)


def test_a_sequence_is_deprecated():
    x = random_inputs(0, 1, 1, 2, 16, 16)
    message = (
        "mlstm_recurrent_sequence is deprecated: use mlstm_ring_step for drafts, mlstm_chunkwise "
        "for short prompts, or jax.lax.scan over mlstm_recurrent_step"
    )
    with pytest.warns(DeprecationWarning, match=f"^{message}$") as caught:
        mlstm_recurrent_sequence(**x, layout="BNTH")
    assert [y.filename for y in caught] == [__file__]


def test_joined_arrays_of_wrong_shapes():
    x = random_token(3, 2, 3, 1, 48, 80)
    qkvo, *others = token = joined_arrays(*x)
    narrow = qkvo[..., :175]  # q, k and v have 176
    of_i = [*token[:3], x[3], *token[4:]]
    for wrong in ([narrow, *others], [*token[:2], x[2], *token[3:]], of_i, token[:5]):
        with pytest.raises(ValueError, match="k is None, expected v and f None too, q with q, k"):
            mlstm_recurrent_step(*wrong)
    sequence = functools.partial(mlstm_recurrent_sequence, layout="BNTH")
    refused(TypeError, "k has type NoneType, expected an array", sequence, *token)


def entries_and_pools(rows):
    """Inputs of entries, slots, and pools by name; without rows the entries have the states."""
    x, slots = inputs_of(5, 2, 1, 40, 37, rows=rows)
    return x, slots, {name: x.pop(name) for name in STATES if rows}


@pytest.mark.parametrize("backend", ["xla", None])
def test_donated_pools_are_updated_in_place(backend):
    x, slots, pools = entries_and_pools(500)
    pools = {name: jnp.array(y) for name, y in pools.items()}
    before = [pools[name].unsafe_buffer_pointer() for name in STATES]
    run = run_of(1, backend)
    step = jax.jit(lambda pools, slots, x: run(slots, **x, **pools)[1:], donate_argnums=0)
    compiled = step.lower(pools, slots, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pools[STATES[0]].nbytes / 10
    assert [y.unsafe_buffer_pointer() for y in compiled(pools, slots, x)] == before


@pytest.mark.parametrize("rows", [None, 5])
@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_vmap_over_states_or_slots(backend, rows):
    """A mapped element has pools of its own, also where the pools are not mapped."""
    x, slots, pools = entries_and_pools(rows)

    @jax.jit
    def run(x, slots):
        return run_of(1, backend)(slots, **x, **pools)

    each = [(x, slots), jax.tree.map(lambda y: y[::-1].copy(), (x, slots))]
    desired = jax.tree.map(lambda *y: np.stack(y), *(run(*y) for y in each))
    result = jax.jit(jax.vmap(run))(*jax.tree.map(lambda *y: np.stack(y), *each))
    for y, z in zip(result, desired, strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-6)
