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
    NAMES,
    OUTPUTS,
    assert_below,
    assert_close,
    assert_same_bits,
    compare,
    cotangents_for,
    errors_of,
    expected_of,
    in_float64,
    in_layout,
    loss_of,
    lowered_for_cuda,
    oracle,
    outputs_and_gradients,
    random_inputs,
    refused,
    strict,
    token_at,
    tolerance,
)
from stage_calls import row_of, rows_of

from mlstm_pallas import KernelConfig, mlstm_recurrent_sequence, mlstm_recurrent_step


@pytest.fixture(autouse=True)
def strict_modes():
    """Everything traces under the strict promotion modes of jax."""
    with strict():
        yield


STATES = OUTPUTS[1:]


def arguments(x, t=None):
    """Those of mlstm_recurrent_step, of the token t; of mlstm_recurrent_sequence without it.

    Slices of numpy arrays are not compiled.
    """
    return [*token_at({name: np.asarray(y) for name, y in x.items()}, t).values()]


def random_token(seed, *shape, **options):
    """shape: B, NH, S = 1, DHQK, DHV."""
    return arguments(random_inputs(seed, *shape, **options), 0)


# ---------------- numbers

# B, NH, S, DHQK, DHV, options of check and of the call. One step is a token, several a sequence.
OF_SIGMOID = 'input_gate="sigmoid", recipe=dict(m_initial=False, i_scale=3.0, resets=True)'
EMPTY = 'eps=0.0, norm_val=0.0, recipe=dict(states=False, i_shift=float("-inf"))'
CALLS = f"""
2,3,1,32,64
1,2,1,40,37 columns=16  # tiles that divide neither
1,2,1,40,37 columns=16, recipe=dict(dtype="bfloat16")
1,2,1,40,37 backend="xla", recipe=dict(dtype="bfloat16")
1,2,1,40,37 columns=64  # one CTA per head
1,1,1,300,64  # five row blocks
1,1,1,1,1
2,2,1,20,17 mapped=True
0,2,1,16,8 backend="xla"
0,2,1,16,8
0,2,1,16,8 backend="triton"
0,2,1,16,8 backend=None
1,2,1,16,8 {EMPTY}
1,2,1,16,8 {EMPTY}, input_gate="sigmoid"
2,4,3,20,24 eps=0.1, norm_val=0.0
2,4,3,20,24 norm_val=40.0, stabilize_correctly=False
2,4,3,20,24 eps=0.01, norm_val=2.0, normalize=False, {OF_SIGMOID}
2,4,3,20,24 eps=0.01, norm_val=2.0, columns=16, {OF_SIGMOID}  # two CTAs
2,4,3,20,24 eps=0.01, norm_val=2.0, backend="xla", {OF_SIGMOID}
2,4,3,20,24 recipe=dict(dtype="bfloat16", states=False)  # from zeros
2,4,3,20,24 backend="xla", layout="BTNH"
2,4,3,20,24 backend="xla", wide=True
"""
JOINED = [
    f"2,3,1,48,80 joined=True, backend={backend!r}, columns={columns}, {gate}"
    for backend in ("xla", "interpret", "triton")
    for columns in ((None,) if backend == "xla" else (None, 16))
    for gate in ("", OF_SIGMOID)
]


def lines_by_backend(*lines):
    gpu = pytest.mark.gpu
    return [pytest.param(line, marks=[gpu] * ("triton" in line)) for line in lines]


def joined_arrays(q, k, v, i, f, *states):
    """The same token with q, k, v and an output gate in one array, i and f in another."""
    qkvo = jnp.concatenate([q, k, v, v], axis=-1)
    return [qkvo, None, None, jnp.stack([i, f], axis=-1), None, *states]


def check(
    *shape,
    backend="interpret",
    columns=None,
    layout="BNTH",
    wide=False,
    joined=False,
    mapped=False,
    recipe=(),
    **options,
):
    """A step, or a sequence of several, is the recurrence in float64, in dtypes too.

    Args:
      columns: of v in a CTA.
      wide: whether all is in float64.
      mapped: whether the batch is a mapped axis.
      recipe: options of random_inputs.
      options: others of the call.
    """
    S, DHQK = shape[2:4]
    x = random_inputs(5, *shape, **dict(recipe))
    config = columns and KernelConfig(triton_recurrent_step=dict(siz_b_DHQK=16, siz_b_DHHV=columns))
    dtype, given, terms = x["q"].dtype, dict(backend=backend, config=config) | options, 1
    of_states, stabiliser = dtype, "float32"
    if S == 1:  # a step keeps its states in their dtype
        x |= {name: x[name].astype(dtype) for name in {"c_initial", "n_initial"} & {*x}}
        run, args = functools.partial(mlstm_recurrent_step, **given), arguments(x, 0)
    else:
        run = functools.partial(mlstm_recurrent_sequence, layout=layout, **given)
        args, of_states, terms = in_layout(layout, NAMES, arguments(x)), "float32", DHQK
    if joined:
        args = joined_arrays(*args)
    if mapped:
        run, args = jax.vmap(jax.jit(run)), [y[:, None] for y in args]
    if wide:
        dtype = of_states = stabiliser = "float64"
        run = functools.partial(in_float64, run)
    h, *states = (y[:, 0] if mapped else y for y in jax.tree.leaves(run(*args)))
    assert [y.dtype for y in (h, *states)] == [dtype, of_states, of_states, stabiliser]
    h = h[:, :, None] if S == 1 else in_layout(layout, "h", [h])[0]
    expected_h, *expected = oracle(x, **options)
    assert_close(h, expected_h, tolerance(dtype, DHQK), "h")
    compare(STATES, states, expected, tolerance(of_states, terms))
    for y, zero in zip((h, *states), (expected_h, *expected), strict=True):
        assert not np.any(np.asarray(y)[zero == 0])


@pytest.mark.parametrize("line", lines_by_backend(*rows_of(CALLS), *JOINED))
def test_a_step_is_one_of_the_recurrence(line):
    shape, options = row_of(line, 1)
    check(*map(int, shape.split(",")), **options)


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
    q, k, v, _, _, c, n, _ = arguments(whole, 0)
    h, (c, n, m_new) = mlstm_recurrent_step(q, k, v, i, f, c, n, m, backend=backend)
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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_forget_gate_keeps_its_digits(dtype):
    """m' is log sigmoid(f) where m is 0 and nothing is stored."""
    bound = 5 * np.finfo(dtype).eps / 2  # exp, log1p and a sum: two roundings each but for the sum
    f = np.linspace(-40.0, 40.0, 1001).astype(dtype)[None]

    @jax.jit
    def states(f):
        x, inf = jnp.ones_like(f)[..., None], jnp.full_like(f, -jnp.inf)
        c, m = x[..., None], jnp.zeros_like(f)
        return mlstm_recurrent_step(x, x, x, inf, f, c, x, m, backend="xla")[1]

    with jax.enable_x64(True):
        c, n, m = map(np.asarray, states(f))
        slope = np.asarray(jax.grad(lambda f: jnp.sum(states(f)[2]))(f))
    f = f.astype("float64")
    np.testing.assert_allclose(m, -np.logaddexp(0, -f), rtol=bound)
    # exp of 40 in one rounding of its exponent is off by 40 of them
    np.testing.assert_allclose(slope, 1 / (1 + np.exp(f)), rtol=10 * bound)
    assert np.all(c == 1)
    assert np.all(n == 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stabiliser_in_bfloat16_costs_no_digits(backend):
    x = random_inputs(4, 2, 4, 6, 16, 8, i_scale=4.0)
    x["m_initial"] = x["m_initial"].astype("bfloat16")
    h, (c, n, m) = mlstm_recurrent_sequence(*arguments(x), eps=0.0, backend=backend)
    assert m.dtype == "bfloat16"
    expected_h, C, N, M = oracle(x, eps=0.0)
    factor = np.exp(np.asarray(m, "float64") - M)[..., None]
    assert_close(h, expected_h, 1e-6, "h")
    assert_close(np.asarray(c) * factor[..., None], C, 2e-6, "c")
    assert_close(np.asarray(n) * factor, N, 2e-6, "n")


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
        return mlstm_recurrent_sequence(*map(x.get, NAMES), backend="xla", **options)

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
    q, k, v, *others = arguments(random_inputs(13, 1, 1, 1, 16, 16), t)

    def h(v):
        return jnp.sum(function(q, k, v, *others, backend=backend)[0])

    message = (
        "the kernels of mlstm_recurrent_step and mlstm_recurrent_sequence have no derivatives; "
        'backend="xla" has them'
    )
    for derivative in (jax.grad(h), lambda v: jax.jvp(h, (v,), (v,))):
        refused(TypeError, message, derivative, v)


# ---------------- memory


def assert_in_place(text, input_gate):
    """One launch writes the states where it reads them."""
    [call] = [line for line in text.splitlines() if "custom_call" in line]
    aliases = re.findall(r"output_tuple_indices = \[(\d)\], operand_index = (\d)", call)
    assert aliases == [("1", "0"), ("2", "1"), ("3", "2")][: 2 + (input_gate == "exp")]


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
    token = random_token(17, 1, 2, 1, *heads, dtype=dtype)
    options = dict(input_gate=input_gate, backend="triton")
    text = lowered_for_cuda(jax.jit(functools.partial(mlstm_recurrent_step, **options)), *token)
    operations = {*re.findall(r"stablehlo\.(\w+)[ (]", text)} - {"reshape"}
    copies = {"broadcast_in_dim", "concatenate", "constant", "convert"}
    assert operations <= {"custom_call"} | (copies if copied else set())
    assert ("concatenate" in operations) == copied
    assert_in_place(text, input_gate)


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


def test_joined_arrays_of_wrong_shapes():
    x = random_token(3, 2, 3, 1, 48, 80)
    qkvo, *others = token = joined_arrays(*x)
    narrow = qkvo[..., :175]  # q, k and v have 176
    of_i = [*token[:3], x[3], *token[4:]]
    for wrong in ([narrow, *others], [*token[:2], x[2], *token[3:]], of_i, token[:5]):
        with pytest.raises(ValueError, match="k is None, expected v and f None too, q with q, k"):
            mlstm_recurrent_step(*wrong)


@pytest.mark.parametrize("layout", ["BNTH", "BTNH"])
@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_states_after_each_token_and_up_to_lengths(backend, gate, layout):
    """They have the bits of single steps; beyond a length h is 0 and the states stay."""
    S, lengths = 3, np.array([2, 0, 9])
    x = random_inputs(7, 3, 2, S, 16, 16)
    if gate == "sigmoid":
        x["m_initial"] *= 0
    options = dict(input_gate=gate, backend=backend)
    run = functools.partial(mlstm_recurrent_sequence, layout=layout, **options)
    args = in_layout(layout, NAMES, arguments(x))
    states = before = arguments(x)[5:]
    singles = [states]
    for t in range(S):
        _, states = mlstm_recurrent_step(*arguments(x, t)[:5], *states, **options)
        singles.append(states)
    whole, every = run(*args, return_all_states=True)
    for y, *at in zip(every, *singles[1:], strict=True):
        assert np.array_equal(y, np.stack(at, axis=1))
    within = np.arange(S) < lengths[:, None]
    within = within[:, None] if layout == "BNTH" else within[:, :, None]
    garbage = itertools.cycle((np.nan, np.inf, 1e38))
    tokens = [
        np.where(within[..., None] if y.ndim == 4 else within, y, next(garbage)) for y in args[:5]
    ]
    options = dict(sequence_lengths=jnp.asarray(lengths))  # 9 is clipped
    some, last = run(*tokens, *before, **options)
    assert np.array_equal(some, np.where(within[..., None], whole, 0))
    for y, *at in zip(last, *singles, strict=True):
        assert np.array_equal(y, np.stack(at)[np.minimum(lengths, S), np.arange(3)])
    slots, pools = np.array([4, 0, 2]), [np.zeros((5, *y.shape[1:]), y.dtype) for y in before]
    for pool, y in zip(pools, before, strict=True):
        pool[slots] = y
    _, after = run(*tokens, *pools, slots=slots, **options)
    for pool, y in zip(after, last, strict=True):
        assert np.array_equal(pool[slots], y)
        assert not np.any(pool[np.array([1, 3])])


def test_no_gradient_comes_from_beyond_a_length():
    x = random_inputs(8, 2, 1, 3, 8, 8)
    poisoned = x | {name: x[name].at[0, :, 1:].set(jnp.nan) for name in "qkvif"}

    @jax.jit
    @jax.grad
    def gradients(x):
        lengths = dict(sequence_lengths=np.array([1, 3]), backend="xla")
        return loss_of(*mlstm_recurrent_sequence(*map(x.get, NAMES), **lengths))

    assert_same_bits(*map(gradients, (poisoned, x)))


# ---------------- states in pools

# Rows 2 and 4 are nobody's; entries 1 and 3 have no row.
SLOTS = np.array([3, -1, 0, 5, 1], "int32")
USED, WITHOUT, UNUSED = [0, 2, 4], [1, 3], [2, 4]
POOLED = """
xla
xla input_gate="sigmoid", dtype="bfloat16"
xla joined=True, slots="int8", rows=200
xla lengths=[2, 3, 0, 1, 9], S=3, layout="BTNH"
interpret
interpret input_gate="sigmoid", columns=16
interpret joined=True, columns=16, slots="int8", rows=200
interpret dtype="bfloat16", states="float16", columns=16
interpret lengths=[2, 3, 0, 1, 9], S=3, layout="BTNH"
triton columns=16, joined=True, slots="int8", rows=200
triton dtype="bfloat16", states="float16"
triton lengths=[2, 3, 0, 1, 9], S=3, layout="BTNH"
"""


def pooled_call(
    backend="xla",
    *,
    dtype="float32",
    states=None,
    slots="int32",
    rows=5,
    columns=None,
    joined=False,
    S=1,
    layout="BNTH",
    lengths=None,
    **options,
):
    """The arrays of SLOTS' entries, pools of these rows, and a step or a sequence of several.

    Entries without a row are NaN, and so is a row without an entry.
    """
    x = random_inputs(21, len(SLOTS), 2, S, 40, 37, dtype=dtype)
    *token, c, n, m = map(np.array, arguments(x, 0 if S == 1 else None))
    for y in token:
        y[WITHOUT] = np.nan
    c, n, m = (np.resize(y, (rows, *y.shape[1:])) for y in (c, n, m))
    for y in c, n, m:
        y[UNUSED[0]] = np.nan
    if options.get("input_gate"):
        m[:] = 0
    tiles = columns and KernelConfig(triton_recurrent_step=dict(siz_b_DHQK=16, siz_b_DHHV=columns))
    options |= dict(backend=backend, config=tiles)
    token = in_layout(layout, NAMES, token)
    if joined:
        token = joined_arrays(*token)[:5]
    pools = c.astype(states or dtype), n.astype(dtype), m

    def run(token, pools, entries=slice(None), **slots):
        if S == 1:
            return mlstm_recurrent_step(*token, *pools, **slots, **options)
        of_entries = lengths if lengths is None else jnp.asarray(np.array(lengths)[entries])
        options_of = dict(layout=layout, sequence_lengths=of_entries, **slots, **options)
        return mlstm_recurrent_sequence(*token, *pools, **options_of)

    beyond = rows if rows < 128 else -128  # the least int8
    return run, (token, pools), np.where(SLOTS == 5, beyond, SLOTS).astype(slots)


@pytest.mark.parametrize("line", lines_by_backend(*rows_of(POOLED)))
def test_slots_are_what_gathers_and_scatters_around_a_step_do(line):
    """An entry without a row has h = 0, whatever its inputs, and other rows keep their bits."""
    backend, options = row_of(line, 1)
    run, (token, pools), slots = pooled_call(backend, **options)
    h, after = jax.jit(lambda *x: run(*x[:2], slots=x[2]))(token, pools, slots)

    @jax.jit
    def expected(token, pools):
        rows = SLOTS[USED]
        h, new = run(token, [y[rows] for y in pools], USED)
        return h, [jnp.asarray(y).at[rows].set(z) for y, z in zip(pools, new, strict=True)]

    some = jax.tree.map(lambda y: y[np.array(USED)], token)
    desired, rows = expected(some, pools)
    assert [y.dtype for y in after] == [y.dtype for y in pools]
    assert not np.any(np.asarray(h)[WITHOUT])
    pairs = [(np.asarray(h)[USED], desired), *zip(after, rows, strict=True)]
    pairs = [[np.asarray(y).astype("float64") for y in pair] for pair in pairs]
    for y, z in pairs if backend == "interpret" else ():  # the same kernel
        np.testing.assert_array_equal(y, z)
    for y, z in pairs[1:]:
        np.testing.assert_array_equal(y[UNUSED], z[UNUSED])
    for y, z in pairs:
        assert_close(*map(np.nan_to_num, (y, z)), tolerance(h.dtype, 40))


def test_gradients_through_slots():
    """Those of a gather, a step and a scatter; no NaN comes from a row without an entry."""
    run, (token, pools), slots = pooled_call()
    token, slots = jax.tree.map(np.nan_to_num, token), jnp.asarray(slots)

    def in_pools(token, pools):
        return loss_of(*run(token, pools, slots=slots))

    def by_hand(token, pools):
        rows = SLOTS[USED]
        h, new = run(jax.tree.map(lambda y: y[np.array(USED)], token), [y[rows] for y in pools])
        return loss_of(h, [y.at[rows].set(z) for y, z in zip(pools, new, strict=True)])

    both = [
        jax.grad(f, (0, 1))(token, jax.tree.map(jnp.asarray, pools)) for f in (in_pools, by_hand)
    ]
    for y, z in zip(*map(jax.tree.leaves, both), strict=True):
        assert_close(y, z, tolerance("float32", 40))


@pytest.mark.parametrize("backend", ["xla", None])
def test_donated_pools_are_updated_in_place(backend):
    run, (token, pools), slots = pooled_call(backend)
    pools = [jnp.repeat(y, 100, axis=0) for y in pools]
    before = [y.unsafe_buffer_pointer() for y in pools]
    step = jax.jit(lambda pools, *x: run(x[0], pools, slots=x[1])[1], donate_argnums=0)
    compiled = step.lower(pools, token, slots).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pools[0].nbytes / 10
    assert [y.unsafe_buffer_pointer() for y in compiled(pools, token, slots)] == before


@pytest.mark.parametrize("input_gate", ["exp", "sigmoid"])
def test_a_step_with_slots_is_one_launch_in_the_pools(input_gate):
    """Only n and m of the entries are gathered; the plan is that of the batch."""
    run, args, slots = pooled_call("triton", input_gate=input_gate)
    text = lowered_for_cuda(jax.jit(lambda *x: run(*x[:2], slots=x[2])), *args, slots)
    assert "scatter" not in text
    gathered = re.findall(r'"stablehlo.gather".*: \((tensor<\w+>)', text)
    assert len(gathered) == 2 - (input_gate == "sigmoid")
    assert "tensor<5x2x40x37xf32>" not in gathered
    assert_in_place(text, input_gate)


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_vmap_over_pools_and_slots(backend):
    """A mapped element has pools of its own, also where the pools are not mapped."""
    run, (token, pools), slots = pooled_call(backend)
    each = [(token, slots), jax.tree.map(lambda y: y[::-1].copy(), (token, slots))]
    expected = [jax.jit(lambda *x: run(x[0], pools, slots=x[1]))(*x) for x in each]
    both = jax.tree.map(lambda *y: np.stack(y), *each)
    result = jax.jit(jax.vmap(lambda *x: run(x[0], pools, slots=x[1])))(*both)
    desired = jax.tree.map(lambda *y: np.stack(y), *expected)
    for y, z in zip(*map(jax.tree.leaves, (result, desired)), strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-6)
