"""What every benchmark does: it measures rows, refuses wrong outputs, prints, stores, reports.

A row is a JSON object, a line of a file in ``results/``. Every row has

    name, shape   as in shapes.py
    impl, direction, dtype
    device, versions, commit, xla_flags (the variable XLA_FLAGS)
    status        "ok", "wrong", "failed" or "skipped"; note says why

and those that were measured have

    errors, error   relative error of each output, and the largest one
    ms, spread      median of the batches, (slowest - fastest) / median
    first_call_s    tracing, compiling and one call
    peak_mib        peak memory beyond the inputs

Each benchmark adds keys of its own. A missing key or null was not measured.
"""

import contextlib
import json
import os
import statistics
import sys
import time

import command
import jax
import jaxlib
import numpy as np
import reporting
from command import RequestError, naming, one_line
from shapes import Shape

NEED_GPU = ("triton", "mosaic_gpu")
BATCH_SECONDS, MAX_CALLS = 0.05, 100  # calls in flight between two synchronisations
REQUIRED = {"shape", "direction", "dtype", "device", "status", "note"}


class WrongOutputError(RuntimeError):
    """An output is wrong; the message says which and by how much."""


class UnsupportedError(ValueError):
    """An implementation does not do what is asked for; its row is skipped."""


def on_gpu():
    return jax.devices()[0].platform == "gpu"


def check_gpu(names, flag="impl"):
    """Raises RequestError without a GPU if one of the names needs one; says what runs instead.

    flag: that has the names.
    """
    if on_gpu():
        return
    if needed := [name for name in NEED_GPU if name in names]:
        absent = "JAX has none here; xla and interpret run anywhere"
        raise RequestError(f"--{flag}={needed[0]} needs a GPU, {absent}")
    where = f"measuring {', '.join(names)} on the CPU"
    print(f"no GPU here: {where}; these are not the speeds of the kernels")


def new_row(options, name, shape, impl, **more):
    return dict(
        name=name,
        shape=shape,
        impl=impl,
        **more,
        device=jax.devices()[0].device_kind,
        versions=dict(jax=jax.__version__, jaxlib=jaxlib.__version__),
        commit=options.commit or command.git_commit(),
        xla_flags=os.environ.get("XLA_FLAGS", ""),
        status="ok",
        note="",
    )


def attempt(row, ours, measure, *arguments):
    """The row, which measure(row, *arguments) fills; an exception becomes its status and note.

    ours: whether an exception is a failure of mlstm_pallas; otherwise the row is skipped.
    """
    try:
        measure(row, *arguments)
    except WrongOutputError as error:
        row |= dict(status="wrong", note=f"wrong: {error}")
    except Exception as error:
        status = "failed" if ours and not isinstance(error, UnsupportedError) else "skipped"
        row |= dict(status=status, note=f"{status}: {one_line(error)}")
    return row


def first_call(row, impl, *arguments):
    """What impl.build(*arguments) returns, and the outputs of its first call."""
    start = time.perf_counter()
    call = impl.build(*arguments)
    outputs = call()
    impl.synchronise(outputs)
    row["first_call_s"] = time.perf_counter() - start
    row["versions"] |= impl.versions()
    return call, outputs


def relative_error(x, expected):
    """The norm of the error over the norm of what is expected."""
    return float(np.linalg.norm(x - expected) / max(np.linalg.norm(expected), 1e-30))


def check(row, errors, limits):
    """Stores the errors; raises WrongOutputError if one is beyond its limit."""
    # A NaN is neither more nor less, and max of Python may lose it.
    row |= dict(errors=dict(errors), error=float(np.max([*errors.values()])))
    wrong = [x for x in limits if x in errors and not errors[x] <= limits[x]]
    texts = (f"error {errors[x]:.1e} in {x}, at most {limits[x]:.0e}" for x in wrong)
    if wrong:
        raise WrongOutputError("; ".join(texts))


def time_in_turns(calls, synchronise, repeats):
    """Seconds per call of each function in its batches, which take turns with the others'.

    A batch has one synchronisation.
    """

    def batch(call, count):
        start = time.perf_counter()
        for _ in range(count):
            outputs = call()
        synchronise(outputs)
        return (time.perf_counter() - start) / count

    counts = []
    for call in calls:
        batch(call, 2)
        counts.append(min(max(round(BATCH_SECONDS / batch(call, 1)), 1), MAX_CALLS))
    rounds = [list(map(batch, calls, counts)) for _ in range(repeats)]
    return [list(times) for times in zip(*rounds, strict=True)]


def time_calls(call, synchronise, repeats):
    """Seconds per call in each batch of calls."""
    return time_in_turns([call], synchronise, repeats)[0]


def store_times(row, times):
    """The median, in seconds."""
    median = statistics.median(times)
    row |= dict(ms=1e3 * median, spread=(max(times) - min(times)) / median)
    return median


def measure(row, impl, call, repeats):
    """Stores the peak memory and the times of a call; returns the median, in seconds."""
    row["peak_mib"] = impl.peak_memory_bytes(call) / 2**20
    return store_times(row, time_calls(call, impl.synchronise, repeats))


def read_rows(path):
    """The rows of a file; raises ValueError at a line that is no row."""
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                row["shape"] = Shape(*row["shape"])
                if missing := REQUIRED - row.keys():
                    raise ValueError(f"it has no {', '.join(sorted(missing))}")
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number} is no row: {error}") from None
            yield row


def ends_a_line(path):
    """Whether a file is empty or ends with a whole line; a full disk leaves a part of one."""
    if not os.path.isfile(path):
        return True
    with open(path, "rb") as file:
        return file.read()[-1:] in (b"", b"\n")


def run(measured, columns, options, report=lambda rows: None, plot=None):
    """Measures, or reads --from_jsonl, and reports; returns the exit code.

    Each row is printed, and appended to the file of --jsonl, as soon as it is measured. At the end
    there are a table, what ``report`` prints, and the plot.

    The exit code is 1 if a row is wrong or failed, and 130 after Ctrl-C, with the rows before it.

    Raises:
      RequestError: the request makes no sense, or a file cannot be opened.
    """
    rows = []
    stored, path = options.from_jsonl, options.plot if plot else None
    code = 0
    with naming("plot"):
        reporting.check_plot(path)
    with naming("from_jsonl"):
        if options.jsonl and any(
            os.path.realpath(options.jsonl) == os.path.realpath(x) for x in stored
        ):
            raise ValueError(f"{options.jsonl} is --jsonl too, which is written")
        read = [row for file in stored for row in read_rows(file)]
    with contextlib.ExitStack() as files:
        with naming("jsonl"):
            jsonl = files.enter_context(open(options.jsonl or os.devnull, "a", encoding="utf-8"))
            if not ends_a_line(jsonl.name):
                print(file=jsonl)
        try:
            for row in read if stored else measured(options):
                rows.append(row)
                if not stored:
                    print(reporting.progress(row, columns), flush=True)
                print(json.dumps(row, default=str), file=jsonl, flush=True)
                code |= row["status"] in ("wrong", "failed")
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = 130
    if rows:
        print(f"\n{reporting.table(rows, columns)}")
        report(rows)
    if path and any(row.get("ms") for row in rows):
        plot(rows, path)
    elif path and rows:
        print(f"nothing was measured: {path} is not written")
    return code
