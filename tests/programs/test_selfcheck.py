"""python -m mlstm_pallas.selfcheck: what it calls, finds, prints and survives.

Wrong functions are planted into a right package; each has to be found by one call of the table.
"""

import functools
import re
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpy_evaluator
import pytest
from oracle import run_python

import mlstm_pallas
from mlstm_pallas import distributed, selfcheck

PACKAGE = Path(mlstm_pallas.__file__).parent


@pytest.fixture
def in_numpy(monkeypatch):
    """Nothing is compiled."""
    monkeypatch.setattr(selfcheck, "jit", functools.partial(numpy_evaluator.jit, always=True))


def errors(row, backend="xla", dtype="float32"):
    return selfcheck.check(f"{backend}/{row}/8x8/{dtype}")


def planted(monkeypatch, name, plant):
    """Plants plant(function, *arguments, **options) for a function."""
    module = distributed if "parallel" in name else mlstm_pallas
    monkeypatch.setattr(module, name, functools.partial(plant, getattr(module, name)))


def scaled(name, factor=1.1):
    """A plant that scales h or one of the states."""

    def plant(function, *x, **options):
        h, states, *rest = function(*x, **options)
        results = dict(zip("hcnm", (h, *states), strict=True))
        results[name] *= factor
        h, *states = results.values()
        return h, (*states,), *rest

    return plant


def with_gradients(function, *x, change, **options):
    results = function(*x, **options)
    return jax.tree.map(lambda y: y + change * (y - jax.lax.stop_gradient(y)), results)


def larger_gradients(function, *x, **options):
    return with_gradients(function, *x, change=2e-4, **options)


def gradients_beyond_lengths(function, q, k, v, i, f, *x, **options):
    h, *states = function(q, k, v, i, f, *x, **options)
    return h + 1e-9 * (v - jax.lax.stop_gradient(v)), *states


def no_gradient_of(place):
    def plant(function, *x, **options):
        x = [jax.lax.stop_gradient(y) if j == place else y for j, y in enumerate(x)]
        return function(*x, **options)

    return plant


def clipped_gates(function, q, k, v, i, f, *x, **options):
    """Right for the gates of a model."""
    return function(q, k, v, jnp.clip(i, -20, 20), f, *x, **options)


def states_without_gradients(function, *x, **options):
    h, states = function(*x, **options)
    return h, jax.lax.stop_gradient(states)


def other_slots(function, *x, slots, **options):
    return function(*x, slots=jnp.asarray(slots)[jnp.array([1, 0, 2])], **options)


def one_draft_more(function, *x, accepted, **options):
    return function(*x, accepted=accepted + 1, **options)


def nan_of_later_drafts(function, q, k, v, i, f, states, **options):
    h, states = function(q, k, v, i, f, states, **options)
    return h + 0 * jnp.sum(v, axis=2, keepdims=True), states


def reads_every_gate(function, q, k, v, i, f, *x, **options):
    h, *states = function(q, k, v, i, f, *x, **options)
    return h + 0 * jnp.sum(i + f), *states


def flushed_wrong(function, *x, **options):
    c, n, m = function(*x, **options)
    return c * 1.01, n, m


def one_chunk_late(function, *x, **options):
    h, last, every = function(*x, **options)
    return h, last, [jnp.roll(y, 1, axis=1) for y in every]


def wrong_where(option):
    """Larger gradients of calls with an option."""

    def plant(function, *x, **options):
        change = 1e-3 * bool(options.get(option) is not None)
        return with_gradients(function, *x, change=change, **options)

    return plant


def empty_rows_forget(function, *x, sequence_lengths, **options):
    h, (c, n, m) = function(*x, sequence_lengths=sequence_lengths, **options)
    return h, (c * (np.asarray(sequence_lengths) > 0)[:, None, None, None], n, m)


CHUNKWISE, STEP, RING = "mlstm_chunkwise", "mlstm_recurrent_step", "mlstm_ring_step"
PARALLEL = "mlstm_chunkwise_sequence_parallel"
HEADS = "64x128 256x512 128x128 96x192 16x16 37x50"
FUNCTIONS = dict.fromkeys(selfcheck.TABLE, CHUNKWISE) | dict(
    shards=PARALLEL, blocks="mlstm_chunkwise_states", steps=STEP,
    pools=STEP, drafts=RING, rings=RING,
)  # fmt: skip
# The row, the function for which what is planted, and the result that shows it.
PLANTS = [
    ("steps", STEP, scaled("h"), "h"),
    ("steps", STEP, no_gradient_of(4), "df"),
    ("steps", STEP, larger_gradients, "dv"),
    ("pools", STEP, other_slots, "c"),
    ("pools", STEP, scaled("n"), "n"),
    ("drafts", RING, one_draft_more, "c"),
    ("drafts", RING, nan_of_later_drafts, "h"),
    ("drafts", "mlstm_ring_flush", flushed_wrong, "c"),
    ("rings", RING, other_slots, "c"),
    ("lengths", CHUNKWISE, scaled("c"), "c"),
    ("lengths", CHUNKWISE, scaled("m"), "m"),
    ("lengths", CHUNKWISE, gradients_beyond_lengths, "dv"),
    ("lengths", CHUNKWISE, reads_every_gate, "h"),
    ("lengths", CHUNKWISE, no_gradient_of(7), "dm"),
    ("lengths", CHUNKWISE, states_without_gradients, "dc"),
    ("lengths", CHUNKWISE, empty_rows_forget, "c"),
    ("gates", CHUNKWISE, clipped_gates, "h"),
    ("reverse", CHUNKWISE, wrong_where("reverse"), "dq"),
    pytest.param("packed", CHUNKWISE, wrong_where("segment_ids"), "dq", marks=pytest.mark.slow),
    pytest.param(
        "documents", CHUNKWISE, wrong_where("segment_lengths"), "dq", marks=pytest.mark.slow
    ),
    ("blocks", "mlstm_chunkwise_states", one_chunk_late, "c"),
    pytest.param("shards", PARALLEL, scaled("h"), "h", marks=pytest.mark.slow),
]


@pytest.mark.quick("prefill", "pools", "drafts")
@pytest.mark.parametrize("row", selfcheck.TABLE)
def test_right_calls_are_within_the_bounds(row, in_numpy, monkeypatch):
    """On the backend that they name; shards compile."""
    backends = set()

    def recording(function, *x, **options):
        backends.add(options.get("backend"))
        return function(*x, **options)

    planted(monkeypatch, FUNCTIONS[row], recording)
    if row == "shards":
        monkeypatch.setattr(selfcheck, "jit", jax.jit)
    assert max(errors(row).values()) < 1
    assert backends == {"xla"}


def test_the_table_calls_every_public_function_at_every_head():
    public = {x for x in mlstm_pallas.__all__ if x.startswith("mlstm_")}
    assert public | {PARALLEL} == {*FUNCTIONS.values(), "mlstm_ring_states", "mlstm_ring_flush"}
    for backend in ("triton", "mosaic_gpu"):
        names = [name.split("/") for name in selfcheck.calls(backend, on_gpu=True)]
        dtypes, skipped = selfcheck.LOWERINGS[backend]
        assert {heads for _, _, heads, _ in names} == {*HEADS.split()}
        assert {dtype for *_, dtype in names} == {*dtypes.split()}
        assert {row for _, row, *_ in names} == {*selfcheck.TABLE} - {*skipped}


@pytest.mark.parametrize(
    ("row", "name", "plant", "result"), PLANTS, ids=lambda x: getattr(x, "__name__", x)
)
def test_a_wrong_function_is_found(row, name, plant, result, monkeypatch, in_numpy):
    planted(monkeypatch, name, plant)
    if row == "shards":
        monkeypatch.setattr(selfcheck, "jit", jax.jit)
    assert errors(row)[result] > 1


def test_bits_that_differ_the_second_time_are_wrong(monkeypatch, in_numpy):
    calls = iter(range(99))
    jit = selfcheck.jit

    def another_each_time(function):
        program = jit(function)
        return lambda *x: [y * (1 + 1e-6 * (next(calls) == 0)) for y in program(*x)]

    monkeypatch.setattr(selfcheck, "jit", another_each_time)
    assert errors("pools")["h"] == np.inf


@pytest.mark.parametrize("dtype", selfcheck.PROMISED)
def test_bounds_are_those_of_the_readme(dtype):
    text = (PACKAGE.parent / "README.md").read_text()
    promised = re.search(rf"^ *\| {dtype}[^|]* \| (\S+) \| (\S+) \|$", text, re.M).groups()
    assert (*map(float, promised),) == selfcheck.PROMISED[dtype]


# ---------------- processes: what one does, and what is said of its call

RIGHT, WRONG = "print('noise', '0.25 h', sep='\\n')", "print('3.0 dv')"
WORKERS = [
    (RIGHT, 0, "right xla/pools/24x40/float32: 0.25 of its bound, h, "),
    (WRONG, 1, "WRONG xla/pools/24x40/float32: 3.00 of its bound, dv, "),
    ("import time; time.sleep(60)", 1, "WRONG xla/pools/24x40/float32: no result in 1 s, "),
    ("import os; os.abort()", 1, "WRONG xla/pools/24x40/float32: exit code -6 "),
    ("raise RuntimeError('no GPU')", 1, "exit code 1 RuntimeError: no GPU, "),
    (
        "raise ValueError('q has')",
        1,
        "WRONG xla/pools/24x40/float32: exit code 1 ValueError: q has",
    ),
    (
        "raise ValueError('config.x is')",
        0,
        "not checked xla/pools/24x40/float32: ValueError: config.",
    ),
]


@pytest.mark.parametrize(("worker", "code", "line"), WORKERS)
def test_exit_codes(worker, code, line, monkeypatch, capsys):
    """A worker that ends well prints its worst error last; the others are said, with a line that
    repeats them."""
    monkeypatch.setattr(selfcheck, "WORKER", worker)
    monkeypatch.setattr(selfcheck, "SECONDS", 1 if "sleep" in worker else 180)
    monkeypatch.setattr(sys, "argv", ["", "--backend=xla", "--only=pools"])
    assert selfcheck.main() == code
    out = capsys.readouterr().out
    assert line in out
    assert ("python -m mlstm_pallas.selfcheck --only=xla/pools/24x40/float32\n" in out) == code
    *_, unchecked, versions = out.splitlines()
    assert unchecked.startswith("not checked: mosaic_gpu needs a Hopper GPU")
    assert ("pools" in unchecked) == ("config." in worker)
    assert f"files {selfcheck.package_hash()}, jax {jax.__version__}, " in versions


def test_an_error_of_nan_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(selfcheck, "WORKER", "print('nan h')")
    monkeypatch.setattr(sys, "argv", ["", "--backend=xla", "--only=pools"])
    assert selfcheck.main() == 1


def test_a_value_of_nan_is_wrong(monkeypatch, in_numpy):
    exact = selfcheck.exact
    monkeypatch.setattr(selfcheck, "exact", lambda *x, **y: [np.nan * z for z in exact(*x, **y)])
    assert set(errors("pools").values()) == {np.inf}


@pytest.mark.parametrize("flag", ["--backend=tpu", "--only=nothing"])
def test_settings_that_check_nothing(flag, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", flag])
    with pytest.raises(SystemExit, match="2"):
        selfcheck.main()
    assert f"error: argument {flag.partition('=')[0]}: " in capsys.readouterr().err


SIGNALS = signal.SIGINT, signal.SIGTERM


@pytest.mark.parametrize("number", SIGNALS)
def test_it_stops_and_says_what_it_found(number, monkeypatch, capsys):
    """The first call is right; the others hang until the signal, which comes with its line."""
    hangs = "import sys, time; time.sleep(60 * ('pools' not in sys.argv[1])); "
    monkeypatch.setattr(selfcheck, "WORKER", hangs + RIGHT)
    monkeypatch.setattr(selfcheck, "calls", lambda *_: ["xla/pools/x", "xla/steps/x", "xla/ring/x"])
    monkeypatch.setattr(sys, "argv", ["", "--backend=xla"])
    handlers, start = {x: signal.getsignal(x) for x in SIGNALS}, time.monotonic()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    monkeypatch.setattr(selfcheck, "print", stopping(number), raising=False)
    try:
        assert selfcheck.main() == 2
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    out = capsys.readouterr().out
    assert "\nstopped\n1 of 3 calls, 0 wrong, worst 0.25 of its bound: h of xla/pools/x\n" in out
    assert "2 calls that had not ended" in out
    assert time.monotonic() - start < 30
    assert all(process.poll() is not None for process in selfcheck.RUNNING)


def stopping(number):
    """print, which sends a signal with the line of a call that is right."""

    def said(*x, **options):
        print(*x, **options)
        if "right" in x[0]:
            signal.raise_signal(number)

    return said


@pytest.mark.slow  # processes that compile
@pytest.mark.timeout(1200)
def test_the_program():
    out = run_python("-m", "mlstm_pallas.selfcheck", timeout=1100, PYTHONPATH=str(PACKAGE.parent))
    names = [x for backend in ("xla", "interpret") for x in selfcheck.calls(backend, on_gpu=False)]
    lines = re.findall(r"^\[\d+/\d+\] right (\S+): 0\.\d\d of its bound, \w+, \d+ s$", out, re.M)
    assert sorted(lines) == sorted(names)
    assert f"{len(names)} of {len(names)} calls, 0 wrong, worst 0." in out
