"""python -m mlstm_pallas.selfcheck: what it calls, draws, finds, prints and survives.

Wrong functions are planted into a right package; each has to be found.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import math
import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import run_python, slow

import mlstm_pallas
from mlstm_pallas import distributed, selfcheck

PACKAGE = Path(mlstm_pallas.__file__).parent
SEED = 4 * 12
ANY_SIZE, CANCELS = (SEED + selfcheck.KINDS_OF_DATA.index(x) for x in ("any size", "cancels"))
SMALL = dict(backend="xla", B=2, NH=1, DHQK=8, DHV=8, dtype="float32", initial=True)
TOKENS = SMALL | dict(states=["float32"] * 3, slots=False)
LAST = dict(return_last_states=True, recompute_states_in_bw=True)
INVARIANT = dict(config=dict(batch_invariant=True))
DRAFTS = dict(T=3, length=8, phase=0, rollback=True, joined=False)
PROGRAMS = dict(
    mlstm_chunkwise=SMALL | dict(S=20, lengths=True, options=LAST),
    mlstm_chunkwise_states=SMALL | dict(S=40, segments=True, options=dict(every=16)),
    mlstm_chunkwise_sequence_parallel=SMALL | dict(S=32, options=LAST | dict(shards=2)),
    mlstm_recurrent_step=TOKENS | dict(S=3, slots=True, options=dict(joined=False)),
    mlstm_recurrent_sequence=TOKENS | dict(S=3, lengths=True, options=dict(layout="BTNH")),
    mlstm_ring_step=TOKENS | dict(S=24, slots=True, options=DRAFTS),
)


@pytest.fixture(autouse=True)
def recurrences(monkeypatch):
    """The recurrence of a program, for which nothing is planted, is compiled once; otherwise each
    program frees what was compiled before it."""
    compiled = selfcheck.compiled

    def sharing(program):
        p, actual, exact = compiled(program)
        return p, actual, EXACT.setdefault(program, exact)

    sharing.cache_clear = compiled.cache_clear
    monkeypatch.setattr(selfcheck, "compiled", sharing)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)


EXACT = {}  # recurrences by program


def program(name, **changes):
    call = PROGRAMS[name] | dict(function=name)
    return call | changes | dict(options=call["options"] | changes.get("options", {}))


def ratios(name, seed=SEED, **changes):
    """The errors of a call by name, in units of their bounds."""
    errors = selfcheck.check(seed, **program(name, **changes))
    return {name: error / bound for name, (error, bound) in errors.items()}


MORE = [
    ("mlstm_chunkwise", dict(options=dict(reverse=True), segments=True)),
    ("mlstm_chunkwise", dict(options=dict(num_segments=3, layout="BTNH"), segments=True)),
    ("mlstm_chunkwise", dict(options=dict(input_gate="sigmoid", normalize=False))),
    ("mlstm_chunkwise", dict(options=dict(eps=0.1))),
    ("mlstm_recurrent_sequence", dict(options=dict(return_all_states=True))),
    ("mlstm_recurrent_step", dict(options=dict(joined=True, input_gate="sigmoid") | INVARIANT)),
    ("mlstm_ring_step", dict(dtype="bfloat16", states=["bfloat16"] * 3)),
    ("mlstm_ring_step", dict(options=dict(T=1, rollback=False, input_gate="sigmoid"))),
    ("mlstm_ring_step", dict(options=dict(layout="BTNH", joined=True) | INVARIANT)),
]


@pytest.mark.quick("mlstm_ring_step", "mlstm_recurrent")
@pytest.mark.parametrize(
    ("name", "changes"), [*((x, {}) for x in PROGRAMS), *(slow(*x) for x in MORE)]
)
def test_right_calls_are_within_the_bounds(name, changes):
    """Where n . q and dh . h cancel, where values have any size, and where not."""
    for seed in (CANCELS, ANY_SIZE, SEED):
        errors = selfcheck.check(seed, **program(name, **changes))
        assert all(error <= bound for error, bound in errors.values()), errors
        assert {*"hcnm"} <= {*errors}


def replaced(monkeypatch, name, change, module=mlstm_pallas):
    """Plants change(function, *arguments, **options) for a function."""
    monkeypatch.setattr(module, name, functools.partial(change, getattr(module, name)))


def changed(**changes):
    """A plant that changes what a function returns: h and c, n, m, by name."""

    def plant(function, *x, **options):
        h, states, *rest = function(*x, **options)
        if rest:  # states after every N steps
            return (
                h,
                states,
                [changes.get(y, lambda z: z)(z) for y, z in zip("cnm", *rest, strict=True)],
            )
        states = types.SimpleNamespace(**dict(zip("cnm", states, strict=False)), all=states)
        results = {y: change(getattr(states, y)) for y, change in changes.items() if y != "h"}
        if hasattr(states.all, "_replace"):
            states = states.all._replace(**results)
        else:
            states = tuple(results.get(y, z) for y, z in zip("cnm", states.all, strict=True))
        return changes.get("h", lambda z: z)(h), states

    return plant


def times(factor):
    return lambda y: y * jnp.asarray(factor, y.dtype)


def other_gradients(function, q, k, v, i, f, *x, **options):
    """Gradients beyond the lengths are not 0."""
    h, states = function(q, k, v, i, f, *x, **options)
    return h + 1e-9 * (v - jax.lax.stop_gradient(v)), states


def no_gradient_of_f(function, q, k, v, i, f, *x, **options):
    return function(q, k, v, i, jax.lax.stop_gradient(f), *x, **options)


def clipped_gates(function, q, k, v, i, f, *x, **options):
    """Right for the gates of a model."""
    return function(q, k, v, jnp.clip(i, -20, 20), f, *x, **options)


def states_without_gradients(function, *x, **options):
    h, states = function(*x, **options)
    return h, jax.lax.stop_gradient(states)


def other_slots(function, *x, slots, **options):
    return function(*x, slots=slots[::-1], **options)


def bits_of_a_batch(**changes):
    """Other results of several entries, each by about one bit."""

    def plant(function, *x, **options):
        return (changed(**changes) if len(x[0]) > 1 else changed())(function, *x, **options)

    return plant


ONE_BIT = [bits_of_a_batch(**{name: lambda y: y * (1 + 2e-7)}) for name in "hcnm"]


def one_draft_more(function, *x, accepted, **options):
    return function(*x, accepted=accepted + 1, **options)


def nan_of_later_drafts(function, q, k, v, i, f, states, **options):
    h, states = function(q, k, v, i, f, states, **options)
    return h + 0 * jnp.sum(v, axis=2, keepdims=True), states


def reads_every_gate(function, q, k, v, i, f, *x, **options):
    """A NaN of a gate beyond a length is in the results."""
    h, states = function(q, k, v, i, f, *x, **options)
    return h + 0 * jnp.sum(i + f), states


def flushed_wrong(function, *x, **options):
    c, n, m = function(*x, **options)
    return c * 1.01, n, m


def one_chunk_late(function, *x, **options):
    h, last, every = function(*x, **options)
    return h, last, [jnp.roll(y, 1, axis=1) for y in every]


# The function that is called, what is planted for which, and the result that shows it.
PLANTS = [
    ("mlstm_chunkwise", None, other_gradients, "dv"),
    ("mlstm_chunkwise", None, no_gradient_of_f, "df"),
    ("mlstm_chunkwise", None, states_without_gradients, "dv"),
    ("mlstm_chunkwise", None, clipped_gates, "h"),
    ("mlstm_chunkwise", None, changed(m=lambda y: y + 1e-2), "m"),
    ("mlstm_chunkwise_states", None, one_chunk_late, "c"),
    ("mlstm_chunkwise_states", None, changed(c=times(1.001)), "c"),
    ("mlstm_chunkwise_sequence_parallel", None, changed(h=times(1.001)), "h"),
    ("mlstm_recurrent_step", None, other_slots, "h"),
    *(("mlstm_recurrent_step", None, plant, "bits in a batch") for plant in ONE_BIT),
    ("mlstm_recurrent_sequence", None, changed(n=times(1.001)), "n"),
    ("mlstm_recurrent_sequence", None, reads_every_gate, "h"),
    ("mlstm_ring_step", None, changed(h=times(1.01)), "h"),
    ("mlstm_ring_step", None, one_draft_more, "h"),
    ("mlstm_ring_step", None, nan_of_later_drafts, "h"),
    ("mlstm_ring_step", "mlstm_ring_flush", flushed_wrong, "c"),
]


@pytest.mark.quick(
    "mlstm_chunkwise_states-None-plant", "mlstm_recurrent_sequence", "mlstm_ring_step-None-plant"
)
@pytest.mark.parametrize(("name", "function", "plant", "result"), PLANTS)
def test_a_wrong_function_is_found(name, function, plant, result, monkeypatch):
    module = distributed if "parallel" in name else mlstm_pallas
    replaced(monkeypatch, function or name, plant, module)
    selfcheck.compiled.cache_clear()
    found = [
        ratios(name, seed, **(dict(options=INVARIANT) if plant in ONE_BIT else {}))
        for seed in range(SEED, SEED + (7 if plant in (clipped_gates, nan_of_later_drafts) else 3))
    ]
    # What is not 0 beyond a length is wrong whatever its size.
    assert max(x[result] for x in found) > (1e300 if plant is other_gradients else 1)


@pytest.mark.slow
def test_a_wrong_forward_pass_without_derivatives_is_found(monkeypatch):
    """It is another program than that of a call with derivatives."""
    options = [selfcheck.draw(0, number, ["xla"])["options"] for number in range(100)]
    assert sum({*LAST} <= {*x} for x in options) > 5
    assert sum({*x} & {*LAST} == {"return_last_states"} for x in options) > 5
    call = program("mlstm_chunkwise")
    del call["options"]["recompute_states_in_bw"]
    selfcheck.compiled.cache_clear()
    errors = selfcheck.check(SEED, **call)
    assert [*errors] == [*"hcnm", selfcheck.LOST]
    assert all(error <= bound for error, bound in errors.values())
    replaced(monkeypatch, "mlstm_chunkwise", changed(h=times(1.001)))
    selfcheck.compiled.cache_clear()
    error, bound = selfcheck.check(SEED, **call)["h"]
    assert error > bound


@pytest.mark.slow
def test_every_function_is_called_with_the_backend(monkeypatch):
    """A turn of the rotation calls every public function that computes, on its lowering."""
    called = {}

    def recording(name):
        def plant(function, *x, **options):
            called.setdefault(name, set()).add(options.get("backend"))
            return function(*x, **options)

        return plant

    names = {x for x in mlstm_pallas.__all__ if x.startswith("mlstm_")}
    for name in names:
        replaced(monkeypatch, name, recording(name))
    parallel = {x for x in vars(distributed) if x.startswith("mlstm_") and x != "mlstm_chunkwise"}
    for name in parallel:
        replaced(monkeypatch, name, recording(name), distributed)
    turn = [selfcheck.draw(0, number, ["interpret"]) for number in range(len(PROGRAMS))]
    assert {x["function"] for x in turn} == {*PROGRAMS}
    for call in turn:  # those of small sizes are traced, not compiled
        p, actual, _ = selfcheck.compiled(json.dumps(call))
        data, (_, counted, _) = selfcheck.drawn_steps(np.random.default_rng(0), p)
        x = selfcheck.drawn_arrays(np.random.default_rng(0), p, None)
        sizes = [p.S, p.DHV], [N := counted.shape[1], p.DHQK, p.DHV], [N, p.DHQK], [N]
        dy = [jax.ShapeDtypeStruct((p.B, p.NH, *size), "float32") for size in sizes]
        jax.eval_shape(actual, x, data, dy)
    without = {name: {None} for name in ("mlstm_ring_states", "mlstm_ring_flush")}
    assert called == {name: {"interpret"} for name in names | parallel} | without


@pytest.mark.parametrize(
    ("wrong", "error"), [(1.0, 0), (np.nan, np.inf), (np.inf, np.inf), (-np.inf, np.inf)]
)
def test_a_nan_or_infinity_is_wrong_where_nothing_else_is_left(wrong, error):
    """The first of two heads changes by itself in a rounding, so 1 is as good as 2 there. So it is
    where a rounding changes a third of h."""
    fields = dict(B=1, NH=2, outputs=1, derivatives=False, tokens=False, dtype="float32")
    p = types.SimpleNamespace(**fields, dtypes=["float32"] * 4)
    desired, rounded = np.full((1, 2, 1, 2), 2.0), np.full((1, 2, 1, 2), 2.0)
    rounded[0, 0], actual = 4.0, desired.copy()
    actual[0, 0, 0, 0] = wrong
    x, within = [np.zeros(1)] * 5, np.ones((1, 1, 1), bool)

    def errors():
        return selfcheck.compared(p, x, within, [], [actual.copy()], [desired], [[rounded]])

    found = errors()
    assert (found["h"][0], found[selfcheck.LOST]) == (error, (1, 2))
    rounded[0, 1] = 4.0  # nothing is left of the other head either
    found = errors()
    assert (found["h"][0], found[selfcheck.LOST]) == (error, (2, 2))
    for changed, lost in (0.32, 1), (0.34, 2):
        rounded[0, 1] = 2.0 * (1 + changed)
        assert errors()[selfcheck.LOST] == (lost, 2)
    rounded[0, 1], actual[0] = 2.0, desired[0] + 1e-3
    off, bound = errors()["h"]
    assert off == pytest.approx(5e-4)
    assert off > bound


@pytest.mark.parametrize("name", "cnm")
def test_the_states_of_a_head_of_which_nothing_is_left_are_compared(name):
    """A rounding changes h of the first of two heads by itself, and no state."""
    fields = dict(B=1, NH=2, outputs=4, derivatives=False, tokens=False, dtype="float32")
    p = types.SimpleNamespace(**fields, dtypes=["float32"] * 4)
    desired = [np.full((1, 2, 1, *size), 2.0) for size in ((2,), (2, 2), (2,), ())]
    rounded = [y.copy() for y in desired]
    rounded[0][0, 0] = 4.0
    x, within = [np.zeros(1)] * 5, np.ones((1, 1, 1), bool)

    for factor, right in (1.0, True), (1.001, False):
        actual = [y.copy() for y in desired]
        actual["hcnm".index(name)][0, 0] *= factor
        errors = selfcheck.compared(p, x, within, [], actual, desired, [rounded])
        assert errors[selfcheck.LOST] == (1, 2)
        assert (errors[name][0] <= errors[name][1]) == right, errors


@pytest.mark.parametrize("dtype", selfcheck.PROMISED)
def test_bounds_are_those_of_the_readme(dtype):
    """An error of 0.9 bounds is right, one of two bounds is wrong."""
    text = (PACKAGE.parent / "README.md").read_text()
    promised = re.search(rf"^ *\| {dtype}[^|]* \| (\S+) \| (\S+) \|$", text, re.M).groups()
    fields = dict(B=1, NH=1, outputs=4, derivatives=True, tokens=False, dtype=dtype)
    p = types.SimpleNamespace(**fields, dtypes=[dtype] * 4)
    names, steps = [*"hcnm", *selfcheck.GRADIENTS], (1, 1, 3)
    shapes = [(*steps, 2), (1, 1, 1, 2, 2), (1, 1, 1, 2), (1, 1, 1), *[(*steps, 2)] * 3]
    desired = [np.ones(shape) for shape in (*shapes, steps, steps, (1, 1, 2, 2), (1, 1, 2), (1, 1))]
    x, within = [np.zeros(1)] * 8, np.ones((1, 1, 3), bool)
    for name, (factor, right) in itertools.product(names, [(0.9, True), (2.0, False)]):
        error = factor * float(promised[name in selfcheck.GRADIENTS])
        actual = [y * (1 + error * (z == name)) for y, z in zip(desired, names, strict=True)]
        result, bound = selfcheck.compared(p, x, within, [], actual, desired, [])[name]
        assert (result <= bound) == right, (name, result, bound)


def test_the_steps_of_draws():
    """Lengths from none to all, ids of segments that nobody has, slots that are not used, drafts of
    which none or all count."""
    r = np.random.default_rng(0)
    call = dict(B=2, S=24, lengths=True, segments=True, slots=True)
    options = dict(T=3, rollback=True, num_segments=3)
    p, draws = types.SimpleNamespace(**call, options=options), []
    for _ in range(50):
        data, (_, _, kept) = selfcheck.drawn_steps(r, p)
        keywords = data["keywords"]
        draws.append((keywords["sequence_lengths"], data["used"], data["accepted"], kept))
        assert (np.diff(keywords["segment_ids"]) >= 0).all()
    lengths, *others = ({*np.ravel([x[j] for x in draws]).tolist()} for j in range(4))
    assert lengths == {0, 8, 23, 24}
    assert others == [{False, True}, {0, 1, 2, 3}, {False, True}]


def test_an_error_without_a_bound_is_the_worst():
    errors = {"h": (0.0, math.nan), "c": (2.0, 1.0), selfcheck.LOST: (9, 9)}
    assert selfcheck.worst_of(errors) == (math.inf, "h")
    assert selfcheck.worst_of({"h": (0.0, 1.0), "c": (2.0, 1.0)}) == (2.0, "c")


@pytest.mark.parametrize("backend", ["xla", "mosaic_gpu"])
def test_a_run_draws_every_value_of_every_table(backend):
    """A run of 200 programs of a lowering; steps are cut to a size that float64 can have."""
    calls = [selfcheck.draw(0, number, [backend]) for number in range(200)]

    def missing(table, calls):
        return [
            (key, x)
            for key, row in table.items()
            for x in row
            if not any(y.get(key, object()) == x or (key == "S" and y["S"] <= x) for y in calls)
        ]

    assert not missing(selfcheck.SHAPES, calls)
    assert {*selfcheck.LONG["S"]} & {x["S"] for x in calls} >= {40, 640, 1024}
    for name, (_, table, rows) in selfcheck.FUNCTIONS.items():
        mine = [x for x in calls if x["function"] == name]
        assert not missing(table, mine), name
        for key in {"lengths", "segments", "slots"} & {*table}:
            assert {x[key] for x in mine} == {False, True}, (name, key)
        options = [x["options"].items() for x in mine]
        for x in itertools.chain(selfcheck.GATES, *rows):
            wanted = x.items() if x.get("config") != {} else {}.items()
            assert any(wanted <= y for y in options), (name, x)


@pytest.mark.parametrize(
    ("dtype", "state", "large"),
    [("float32", "float32", True), ("bfloat16", "bfloat16", False), ("float16", "float32", True)],
)
def test_values_of_any_size(dtype, state, large):
    """Gates have their edges; 16 bits hold no large m, and float16 no large q, k and v."""
    call = TOKENS | dict(S=50, dtype=dtype, states=[state] * 3, tokens=True, options={})
    p, r = types.SimpleNamespace(**call), np.random.default_rng(5)
    draws = [selfcheck.drawn_arrays(r, p, "any size") for _ in range(100)]
    q, k, v, i, f, *_, m = (np.abs([np.float64(x[j]) for x in draws]) for j in range(8))
    raw = [[np.float64(x[j]) for x in draws] for j in (3, 4)]
    assert np.isneginf(raw[0]).any()
    assert np.isneginf(raw[1]).any()
    assert np.isposinf(raw[1]).any()
    largest = np.max(i, where=np.isfinite(i), initial=0)
    assert largest > 9e3 if large else largest < 10
    assert np.max(f, where=np.isfinite(f), initial=0) > 900
    assert (m.max() > 90) == large
    for y in (q, k, v):
        assert (y.max() > 9e3) == (y.max() > 10) == (dtype != "float16")


def test_draws_do_not_depend_on_the_run():
    backends = ["mosaic_gpu", "triton", "mosaic_gpu", "triton", "xla"]
    calls = [selfcheck.draw(5, number, backends) for number in range(200)]
    assert calls == json.loads(json.dumps(calls))
    for backend in {*backends}:
        names = [call["function"] for call in calls if call["backend"] == backend]
        assert {*names[: len(PROGRAMS)]} == {*PROGRAMS}
    edges = [x for x in calls if "mosaic_gpu_recurrent_fw_C" in x["options"].get("config", {})]
    assert len(edges) == 2
    assert {x["seed"] % selfcheck.DRAWS for x in calls} == {0}
    assert [*map(selfcheck.draw, [5], [7], [backends])] == [calls[7]]


def test_a_line_repeats_a_call(capsys):
    call = program("mlstm_recurrent_step") | dict(seed=SEED)
    exec(selfcheck.LINE.format(", ".join(f"{name}={x!r}" for name, x in call.items())))
    assert capsys.readouterr().out == f"{selfcheck.check(**call)}\n"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("config.x does not fit"), {}),
        (ValueError("q has"), {"ValueError: q has": (math.inf, 1)}),
        (RuntimeError("config. failed"), {"RuntimeError: config. failed": (math.inf, 1)}),
    ],
)
def test_only_a_config_that_does_not_fit_is_not_supported(error, expected, monkeypatch):
    def check(**call):
        raise error

    monkeypatch.setattr(selfcheck, "check", check)
    assert selfcheck.answer(dict(backend="xla")) == expected


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        ("import time; time.sleep(60)", "no result in 1 s"),
        ("import os; os.abort()", "exit code -6 "),
        ("raise RuntimeError('no GPU')", "exit code 1 RuntimeError: no GPU"),
        ("print(input()); print(0)", None),
    ],
)
def test_a_process_that_ends_or_hangs(worker, message, monkeypatch):
    monkeypatch.setattr(selfcheck, "WORKER", worker)
    monkeypatch.setattr(selfcheck, "SECONDS", 1)
    process, log = selfcheck.start()
    with contextlib.suppress(BrokenPipeError), process, log:
        found = selfcheck.ask(process, log, {"h": [1, 2]})
    assert found == ({message: (math.inf, 1)} if message else {"h": [1, 2]})


RIGHT, WRONG = {"h": (0.25, 1.0), "dv": (0.01, 0.02)}, {"h": (0.25, 1.0), "dv": (1.0, 0.02)}


def lost(heads):
    return RIGHT | {selfcheck.LOST: (heads, heads)}


ENOUGH = [RIGHT | {selfcheck.LOST: (0, 5)}] * 98 + [lost(5)] * 2


def run_program(monkeypatch, capsys, answers, *flags):
    """The exit code and the output of a run of one process with these answers.

    An answer that is an exception is raised; at KeyboardInterrupt Ctrl-C is pressed.
    """
    left = iter(answers)
    count = [len(answers)]

    def ask(process, log, call):
        count[0] -= 1
        result = next(left)
        if isinstance(result, BaseException):
            raise result
        return result

    class Thread:
        def __init__(self, target, daemon):
            self.start, self.join = target, lambda: None

    monkeypatch.setattr(selfcheck.threading, "Thread", Thread)
    patched = dict(ask=ask, start=lambda: (None, None), end=lambda process: 0)
    for name, value in patched.items():
        monkeypatch.setattr(selfcheck, name, value)
    monkeypatch.setattr(selfcheck.Run, "passed", lambda self: 0 if count[0] else 1)
    monkeypatch.setattr(sys, "argv", ["", "--processes=1", *(flags or ["--backend=xla"])])
    return selfcheck.main(), capsys.readouterr().out


def test_the_program_ends_with_a_table(monkeypatch, capsys):
    code, out = run_program(monkeypatch, capsys, [*ENOUGH, {}])
    assert code == 0
    assert out.endswith("| xla | 100 | 0 | 1 | 10 | 0.50 | dv | right |\n")
    digest = hashlib.sha256()
    for name in sorted(str(x.relative_to(PACKAGE)) for x in PACKAGE.rglob("*.py")):
        digest.update(name.encode() + b"\0" + (PACKAGE / name).read_bytes() + b"\0")
    assert f"files {digest.hexdigest()[:12]}, seed 0" in out


# The answers, the exit code and how the row of the table ends.
ENDS = [
    ([*ENOUGH, WRONG], 1, "| 101 | 1 | 0 | 10 | 50.00 | dv | wrong |"),
    ([*ENOUGH, RuntimeError("pipe")], 1, "| inf | RuntimeError('pipe') | wrong |"),
    ([WRONG, RIGHT, KeyboardInterrupt()], 1, "| xla | 2 | 1 | 0 | 0 | 50.00 | dv | wrong |"),
    ([], 2, "| not checked: under 12 calls, no " + ", no ".join(selfcheck.FUNCTIONS) + " |"),
    ([RIGHT] * 20, 2, "| 20 | 0 | 0 | 0 | 0.50 | dv | not checked: no mlstm_recurrent_step |"),
    ([RIGHT, {}, {}, {}] * 6, 2, "| 6 | 0 | 18 | 0 | 0.50 | dv | not checked: under 12 calls |"),
    ([*ENOUGH, lost(45)], 2, "| 55 | 0.50 | dv | not checked: too many heads lost |"),
    ([*ENOUGH, lost(44)], 0, "| 54 | 0.50 | dv | right |"),
]


@pytest.mark.parametrize(("answers", "code", "row"), ENDS)
def test_exit_codes(answers, code, row, monkeypatch, capsys):
    found, out = run_program(monkeypatch, capsys, answers)
    assert out.splitlines()[-1].endswith(row)
    assert found == code
    if WRONG in answers:
        assert "print(check(B=" in out
        assert "\n# dv: error 1.0e+00, bound 2.0e-02\n" in out


def test_a_call_that_ctrl_c_ends_does_not_count(monkeypatch):
    run = selfcheck.Run(types.SimpleNamespace(minutes=1), ["xla"])
    run.interrupted = True
    monkeypatch.setattr(
        selfcheck, "ask", lambda process, log, call: {"exit code -9": (math.inf, 1)}
    )
    assert run.check((None, None), {}) == (None, None)
    assert not run.calls


def test_a_wrong_lowering_beside_one_that_is_not_checked(monkeypatch, capsys):
    monkeypatch.setattr(selfcheck, "HAS_TRITON", True)
    monkeypatch.setattr(selfcheck, "jax_has_mosaic_gpu", lambda: False)
    code, out = run_program(monkeypatch, capsys, [WRONG] * 4, "--seed=1")
    assert code == 1
    assert "| wrong |" in out
    assert "| not checked: under 12 calls, " in out


def test_a_lowering_without_calls_is_not_checked(monkeypatch, capsys):
    monkeypatch.setattr(selfcheck, "HAS_TRITON", True)
    monkeypatch.setattr(selfcheck, "jax_has_mosaic_gpu", lambda: False)
    code, out = run_program(monkeypatch, capsys, ENOUGH[:4], "--seed=1")
    assert code == 2
    assert "| interpret | 0 | 0 | 0 | 0 | 0.00 | - | not checked: under 12 calls, no mlstm_" in out


@pytest.mark.parametrize(
    "flag",
    [*(f"--minutes={x}" for x in ("0", "-1", "nan", "inf")), "--processes=0", "--backend=tpu"],
)
def test_settings_that_check_nothing(flag, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", flag])
    with pytest.raises(SystemExit, match="2"):
        selfcheck.main()
    assert f"error: argument {flag.partition('=')[0]}: " in capsys.readouterr().err


# The program with a clock that each call moves on by five seconds: in two minutes two processes
# make four draws of each function's call, however busy the machine is.
PROGRAM = """
import io, runpy, sys, time

class Clock(io.TextIOBase):
    seconds = 0

    def write(self, text):
        self.seconds += 5 * text.endswith(" calls")

sys.stderr = clock = Clock()
time.monotonic = lambda: clock.seconds
runpy.run_module("mlstm_pallas.selfcheck", run_name="__main__")
"""


@pytest.mark.slow  # processes
def test_the_program():
    flags = "--minutes=2", "--backend=xla", "--processes=2"
    out = run_python("-c", PROGRAM, *flags, PYTHONPATH=str(PACKAGE.parent))
    calls = re.search(r"\| xla \| (\d+) \| 0 \| 0 \| 0 \| 0\.\d+ \| \w+ \| right \|\n", out)
    assert calls
    assert int(calls[1]) >= 4 * len(PROGRAMS)
