"""Steps of one token and with a ring buffer, beside the table's rows: memory, extremes, drafts,
flushes, phases, gates, checks and messages."""

import functools
import itertools
import math
import re
import warnings

import compile_report
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine import Call, Slots, arrays
from oracle import (
    BACKENDS,
    NAMES,
    assert_same_bits,
    error,
    head_norms,
    joined_arrays,
    lowered_for_cuda,
    oracle,
    random_inputs,
    refusal,
    refused,
    strict,
    token_at,
)

from mlstm_pallas import (
    mlstm_recurrent_step,
    mlstm_ring_flush,
    mlstm_ring_states,
    mlstm_ring_step,
)
from mlstm_pallas.export import export

TOKEN, INITIAL = NAMES[:5], NAMES[5:]


@pytest.fixture(autouse=True)
def strict_modes():
    """Everything traces under the strict promotion modes of jax."""
    with strict():
        yield


# ---------------- plain steps


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


def pooled_token(DHQK, DHV, rows, dtype="float32"):
    """A token of five entries by name, and slots of a pool of so many rows; 0: None."""
    slots = (3, -1, 0, 4, 1)
    of = (Slots(slots, rows),) if rows else ()
    x = arrays(Call("mlstm_recurrent_step", (5, 2, 1, DHQK, DHV), dtype, steps=of), 5)
    named = dict(zip(NAMES, "qkvifcnm", strict=True))
    token = {name: x[y][:, :, 0] if y in "qkvif" else x[y] for name, y in named.items()}
    return token, np.array(slots, "int32") if rows else None


# The rows are those of a pool; 0: none.
IN_PLACE = [
    ("exp", "bfloat16", 20, 37, 0, False),
    ("sigmoid", "float32", 20, 37, 0, True),
    ("exp", "float32", 300, 500, 0, True),
    ("sigmoid", "bfloat16", 300, 500, 0, False),
    ("exp", "float32", 40, 37, 5, True),
    ("sigmoid", "float32", 40, 37, 5, False),
]


@pytest.mark.parametrize(("input_gate", "dtype", "DHQK", "DHV", "rows", "joined"), IN_PLACE)
def test_a_step_is_one_launch_in_place(input_gate, dtype, DHQK, DHV, rows, joined):
    """It writes the states where it reads them. Several CTAs of a head read n and m from a copy;
    only n and m of slots are gathered, and nothing is sliced."""
    token, slots = pooled_token(DHQK, DHV, rows, dtype)
    step = functools.partial(mlstm_recurrent_step, input_gate=input_gate, backend="triton")
    run = jax.jit(lambda slots, *token: step(*token, slots=slots))
    token = token.values()
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
    x = [*token_at(random_inputs(0, batch, 8, 1, 256, 512), 0).values()]

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
    x = [*token_at(random_inputs(3, 2, 3, 1, 48, 80), 0).values()]
    qkvo, *others = token = joined_arrays(*x)
    of_i = [*token[:3], x[3], *token[4:]]
    for wrong in ([qkvo[..., :175], *others], [*token[:2], x[2], *token[3:]], of_i, token[:5]):
        with pytest.raises(ValueError, match="k is None, expected v and f None too, q with q, k"):
            mlstm_recurrent_step(*wrong)


@pytest.mark.parametrize("backend", ["xla", None])
def test_donated_pools_are_updated_in_place(backend):
    x, slots = pooled_token(40, 37, 500)
    pools = {name: jnp.array(x.pop(name)) for name in INITIAL}
    before = [pools[name].unsafe_buffer_pointer() for name in INITIAL]

    def step(pools, x):
        return mlstm_recurrent_step(**x, **pools, slots=slots, backend=backend)[1]

    compiled = jax.jit(step, donate_argnums=0).lower(pools, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pools[INITIAL[0]].nbytes / 10
    assert [y.unsafe_buffer_pointer() for y in compiled(pools, x)] == before


# ---------------- rings


def tokens_of(x, start=0, end=None):
    return [x[name][:, :, start:end] for name in TOKEN]


@functools.cache
def step_on(backend):
    """A jitted call of several tokens, shared by the tests."""
    return jax.jit(functools.partial(mlstm_ring_step, backend=backend))


def ring_of(x, *, state_dtype=None, **options):
    c, n, *m = (x[name] for name in INITIAL if name in x)
    options = dict(dtype=x["q"].dtype, length=8) | options
    return mlstm_ring_states(c.astype(state_dtype or c.dtype), n, *(m or [None]), **options)


@pytest.mark.slow
@pytest.mark.parametrize(("B", "NH", "L"), [(1, 8, 16), (3, 1, 8)])
def test_flushes_are_spread_over_steps(B, NH, L):
    x = random_inputs(5, B, NH, 2 * L, 4, 4)
    states, run, flushes = ring_of(x, length=L), step_on("xla"), []
    for t in range(2 * L):
        before = states.start
        _, states = run(*tokens_of(x, t, t + 1), states)
        flushes.append(int(np.sum(states.start != before)))
    assert max(flushes) <= -(-B * NH // L)
    assert sum(flushes[L:]) == B * NH


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_more_accepted_tokens_than_are_pending_are_these(backend):
    """In a step and in a flush; before the first call none is pending."""
    x, run, most = random_inputs(10, 2, 2, 4, 8, 8), step_on(backend), np.int8([127, 3])
    states = ring_of(x)
    for start, pending in (0, 0), (2, 2):
        tokens, as_many = tokens_of(x, start, start + 2), np.full(2, pending, "int8")
        result, expected = (run(*tokens, states, accepted=y) for y in (most, as_many))
        assert_same_bits(result, expected)
        states = result[1]
    assert_same_bits(*(mlstm_ring_flush(states, accepted=y) for y in (most, as_many)))


def test_a_step_updates_the_states_in_place():
    """It is two launches, and nothing is sliced."""
    x = random_inputs(11, 2, 2, 1, 32, 48, dtype="bfloat16")
    run = functools.partial(mlstm_ring_step, backend="triton")
    tokens = joined_arrays(*(x[name][:, :, 0] for name in TOKEN))
    text = lowered_for_cuda(jax.jit(run), *tokens, ring_of(x))
    calls = [line for line in text.splitlines() if "custom_call @__gpu" in line]
    assert len(calls) == 2
    assert sum(line.count("operand_index") for line in calls) == 10
    assert not {"concatenate", "slice"} & {*re.findall(r"stablehlo\.(\w+)", text)}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [0, 5], ids=["states", "slots"])
@pytest.mark.parametrize("step", [mlstm_recurrent_step, mlstm_ring_step])
def test_vmap_joins_its_axis_to_the_batch_unless_there_are_slots(step, rows):
    """One launch of all mapped elements, or a loop over them, as the docstring says."""

    def run(x, slots):
        *tokens, c, n, m = (x[name] for name in NAMES)
        ring = step is mlstm_ring_step
        states = [mlstm_ring_states(c, n, m, dtype="float32")] if ring else [c, n, m]
        return step(*tokens, *states, slots=slots, backend="interpret")

    def launched(run, *operands):
        """How many instances of a kernel each launch has, and the loops, also in kernels."""
        jaxpr = jax.make_jaxpr(run)(*operands).jaxpr
        launches = compile_report.equations(jaxpr, "pallas_call")
        loops = [y for x in ("scan", "while") for y in compile_report.equations(jaxpr, x)]
        return [math.prod(x.params["grid_mapping"].grid) for x in launches], len(loops)

    x = pooled_token(40, 37, rows)
    both = [x, jax.tree.map(lambda y: y[::-1].copy(), x)]
    mapped, operands = jax.vmap(run), jax.tree.map(lambda *y: np.stack(y), *both)
    alone, loops = launched(run, *x)
    expected = (alone, loops + 1) if rows else ([2 * n for n in alone], loops)
    assert launched(mapped, *operands) == expected
    desired = jax.tree.map(lambda *y: np.stack(y), *(jax.jit(run)(*y) for y in both))
    for y, z in zip(*map(jax.tree.leaves, (jax.jit(mapped)(*operands), desired)), strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("forget", [6.0, 10.0])
def test_16_bits_round_less_often(forget):
    """h of the last tokens has a smaller error than that of steps that round C at every token."""
    x = random_inputs(13, 1, 2, 1024, 32, 16, f_shift=forget)
    x |= {name: 0 * x[name] for name in INITIAL}
    ring, expected = ring_of(x, state_dtype="bfloat16", length=16), oracle(x)[0]
    steps = [jnp.moveaxis(y, 2, 0) for y in tokens_of(x)]

    def of_ring(states, token):
        return mlstm_ring_step(*token, states, backend="xla")[::-1]

    def of_steps(states, token):
        return mlstm_recurrent_step(*token, *states, backend="xla")[::-1]

    def error_of(step, states):
        h = jax.jit(lambda states: jax.lax.scan(step, states, steps)[1])(states)
        return error(jnp.moveaxis(h, 0, 2)[:, :, -64:], expected[:, :, -64:])

    plain = ring.c, ring.n, ring.m
    assert error_of(of_ring, ring) < 0.7 * error_of(of_steps, plain)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_fresh_rows_in_a_used_pool_are_those_of_a_fresh_pool(backend):
    """Whatever was there before, and at any number of pending tokens."""
    B, step = 12, step_on(backend)

    def tokens(seed, T):
        return tokens_of(random_inputs(seed, B, 2, T, 8, 8))

    used = ring_of(random_inputs(7, B, 2, 1, 8, 8))
    for n in range(3):
        _, used = step(*tokens(n, 4), used, accepted=np.arange(B) % 5)
    used = jax.tree.map(lambda y: y if y.dtype == "int32" else y * jnp.nan, used)
    rows = np.arange(0, B, 2)
    fresh = ring_of(random_inputs(8, B, 2, 1, 8, 8), phase=np.arange(B))
    pools = jax.tree.map(lambda pool, y: pool.at[rows].set(y[rows]), used, fresh)
    accepted = np.full(B, 4)  # none of them is pending in a new row
    for n, T in enumerate((2, 4, 4, 1, 4)):
        x = tokens(20 + n, T)
        h, pools = step(*x, pools, accepted=accepted)
        expected, fresh = step(*x, fresh, accepted=accepted)
        assert np.isfinite(h[rows]).all()
        assert_same_bits(h[rows], expected[rows])
    assert_same_bits(*(jax.tree.map(lambda y: y[rows], x) for x in (pools, fresh)))


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "length"), [(1, 8), (3, 64), (67, 16)])
def test_heads_and_entries_begin_at_their_phases(heads, length):
    phases = {
        "left out": (None, range(4)),
        "int8": (np.array([0, 3, 127, 64], "int8"), [0, 3, 127, 64]),
        "uint32": (np.array([2**32 - 1, 2**31, 0, 5], "uint32"), [2**32 - 1, 2**31, 0, 5]),
        "int32 on a device": (jnp.array([2**31 - 1, 4, 4, 100]), [2**31 - 1, 4, 4, 100]),
    }
    c, n = jnp.zeros((4, heads, 1, 1)), jnp.zeros((4, heads, 1))
    for name, (phase, numbers) in phases.items():
        states = mlstm_ring_states(c, n, None, dtype="float32", length=length, phase=phase)
        expected = [[(h * length // heads + b) % length for h in range(heads)] for b in numbers]
        assert states.fill.dtype == "int32"
        assert np.array_equal(states.fill, expected), name
        assert not np.any(states.start)
        assert not np.any(states.pending)


@pytest.mark.slow
def test_as_many_tokens_as_heads_get_a_warning():
    """In both layouts such arrays have one shape. Where the shapes tell, none is given."""

    def call(heads, T, **options):
        lead = (2, T, heads) if options.get("layout") == "BTNH" else (2, heads, T)
        x, gate, gates = jnp.zeros((*lead, 8)), jnp.zeros(lead), jnp.zeros((2, heads))
        states = jnp.zeros((2, heads, 8, 8)), jnp.zeros((2, heads, 8)), gates
        rings = mlstm_ring_states(*states, dtype="float32")
        run = functools.partial(mlstm_ring_step, backend="xla", **options)
        jax.eval_shape(lambda *x: run(*x), x, x, x, gate, gate, rings)

    with pytest.warns(
        UserWarning, match='layout="BNTH", the default, reads q as .* S = NH'
    ) as said:
        call(8, 8)
    assert {x.filename for x in said} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for layout in "BNTH", "BTNH":
            call(8, 8, layout=layout)
        for heads, T in (8, 7), (2, 8), (8, 1), (1, 1), (1, 4):
            call(heads, T)


C, N, M = jnp.zeros((2, 2, 16, 8)), jnp.zeros((2, 2, 16)), jnp.zeros((2, 2))
OF_NEW = dict(c=C, n=N, m=M, dtype="float32", length=8)
new = functools.partial(mlstm_ring_states, **OF_NEW)
TOKENS = tokens_of(random_inputs(16, 2, 2, 2, 16, 8))


def rings_of_rows(count):
    """States made by hand, whose rings have so many rows."""
    states = new()
    rows = (jnp.zeros((2, 2, count, *y.shape[3:]), y.dtype) for y in states[3:7])
    return type(states)(*states[:3], *rows, *states[7:])


def new_error(kind, message, **options):
    return refusal(kind, message, lambda: mlstm_ring_states(**OF_NEW | options))


def step_error(kind, message, states=None, **options):
    def call():
        return mlstm_ring_step(*TOKENS, states() if states else new(), **options)

    return refusal(kind, message, call)


ROWS = "expected a power of two from 16 to 128"
# test_errors.py has wrong arrays of each argument.
REFUSED = [
    *(
        new_error(
            ValueError,
            f"phase is {x}, expected an integer from 0 to 2147483647 or an array (B,)",
            phase=x,
        )
        for x in (0.5, np.nan, True, 2**40, -1)
    ),
    new_error(ValueError, "phase has shape (3,), expected (B,) = (2,)", phase=np.zeros(3, int)),
    new_error(
        TypeError, "phase has dtype float32, expected an integer dtype", phase=np.zeros(2, "f4")
    ),
    new_error(ValueError, "length is 12, expected a power of two from 8 to 64", length=12),
    new_error(TypeError, "c has type NoneType, expected an array", c=None),
    new_error(
        ValueError,
        "m has values other than 0 with input_gate 'sigmoid', expected None or zeros",
        m=M + 1,
        input_gate="sigmoid",
    ),
    step_error(
        TypeError,
        "k has dtype float32, expected bfloat16, that of the ring",
        lambda: new(dtype="bfloat16"),
    ),
    step_error(ValueError, f"states.i.shape[2] is 24, {ROWS}", lambda: rings_of_rows(24)),
    refusal(
        ValueError, f"states.i.shape[2] is 8, {ROWS}", lambda: mlstm_ring_flush(rings_of_rows(8))
    ),
    step_error(
        ValueError,
        "slots[1] is 1, expected -1 for none, or a row below P = 2 that no entry before it has",
        slots=np.array([1, 1]),
    ),
    refusal(
        TypeError,
        "c_initial has type RingStates, expected an array",
        lambda: mlstm_recurrent_step(*(x[:, :, 0] for x in TOKENS), new()),
    ),
    refusal(
        ValueError,
        "q has 5 tokens, expected at most 4, half the ring's length 8",
        lambda: mlstm_ring_step(*tokens_of(random_inputs(16, 2, 2, 5, 16, 8)), new()),
    ),
    refusal(
        ValueError,
        "k is None, expected v and f None too, q with q, k and v on its last axis, (..., "
        "2 * DHQK + DHV or more), i (..., 2) and the states; the shapes of q, i and c are "
        "(2, 2, 2, 16), (2, 2, 2) and (2, 2, 16, 8)",
        lambda: mlstm_ring_step(TOKENS[0], None, None, TOKENS[3], None, new()),
    ),
]


@pytest.mark.parametrize(("kind", "message", "call"), REFUSED)
def test_arguments_are_refused_by_name(kind, message, call):
    refused(kind, message, call)


SLOTS = np.array([1, 0])


def pooled(slots, states, *token):
    return mlstm_ring_step(*token, states, slots=slots, backend="xla")


@pytest.mark.slow
def test_a_step_is_exported_with_its_states():
    """RingStates are serialised by their name."""
    operands = SLOTS, new(), *TOKENS
    data = jax.export.export(jax.jit(pooled))(*operands).serialize()
    h, states = jax.export.deserialize(data).call(*operands)
    expected, after = jax.jit(pooled)(*operands)
    assert type(states) is type(after)
    assert_same_bits((h, states), (expected, after))
    sigmoid = new(input_gate="sigmoid")
    data = export(pooled, SLOTS, sigmoid, *TOKENS, platform="cpu").serialize()
    assert jax.export.deserialize(data).call(SLOTS, sigmoid, *TOKENS)[1].m is None


@pytest.mark.slow
@pytest.mark.parametrize("value", ["0", "", None, "1", "yes"])
def test_checks_are_on_if_the_variable_is_1(monkeypatch, value):
    """With 0 they are off, as without the variable: nothing calls the host, and exports work."""
    monkeypatch.setenv("MLSTM_PALLAS_CHECKS", value or "")
    if value is None:
        monkeypatch.delenv("MLSTM_PALLAS_CHECKS")
    operands = SLOTS, new(), *TOKENS
    run = jax.jit(lambda *x: pooled(*x))
    if value == "yes":
        refused(ValueError, "MLSTM_PALLAS_CHECKS is 'yes', expected 0 or 1", run.lower, *operands)
        return
    assert ("callback" in run.lower(*operands).as_text()) == (value == "1")
    if value == "1":
        message = "MLSTM_PALLAS_CHECKS is 1, expected 0: its checks cannot be exported"
        refused(ValueError, message, export, run, *operands, platform="cpu")
    else:
        export(run, *operands, platform="cpu")
