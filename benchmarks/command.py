"""What the benchmarks share as programs: flags, requests, records as they come, exit codes."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from absl import app, flags


class RequestError(ValueError):
    """The request makes no sense here; the message is for the user."""


def main(
    define_flags: Callable[[flags.FlagValues], None], run: Callable[[flags.FlagValues], int]
) -> None:
    """Runs a benchmark on the command line.

    A wrong flag, or a word that is no flag, is one line on stderr and exit code 2.
    """

    def parse(argv: list[str]) -> list[str]:
        try:
            if not (others := flags.FLAGS(argv)[1:]):
                return argv[:1]
            message = f"unexpected argument {others[0]}"
        except flags.Error as error:
            message = " ".join(str(error).split())
        print(f"{Path(argv[0]).stem}: {message}", file=sys.stderr)
        sys.exit(2)

    define_flags(flags.FLAGS)
    app.run(lambda _: run(flags.FLAGS), flags_parser=parse)


COMMIT = "For the records; none: that of the git working tree, if it is one."
SHARED_FLAGS = {
    "repeats": (flags.DEFINE_integer, 10, "Batches of calls; the median counts."),
    "commit": (flags.DEFINE_string, None, COMMIT),
    "from_jsonl": (flags.DEFINE_list, [], "Measure nothing; report the records of these files."),
    "jsonl": (flags.DEFINE_string, None, "File to append each record to as it is measured."),
    "plot": (flags.DEFINE_string, None, "PNG to write at the end."),
}


def define_shared_flags(values: flags.FlagValues, *names: str) -> None:
    """Defines flags of ``SHARED_FLAGS``."""
    for name in names:
        define, default, text = SHARED_FLAGS[name]
        bounds = dict(lower_bound=1) if define is flags.DEFINE_integer else {}
        define(name, default, text, flag_values=values, **bounds)


def one_line(error: BaseException) -> str:
    text, _, _ = f"{type(error).__name__}: {error}".partition("Repro command")
    return " ".join(text.split())[:300]


def git_commit() -> str | None:
    git = ["git", "-C", os.path.dirname(os.path.abspath(__file__))]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(describe, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


# ---------------------------------------------------------------- requests


def check_names(kind: str, names: Sequence[str], known: Sequence[str]) -> None:
    if unknown := [name for name in names if name not in known]:
        raise RequestError(f"unknown {kind} {', '.join(unknown)}, known are {', '.join(known)}")


def check_plot(path: str | None) -> None:
    if path and importlib.util.find_spec("matplotlib") is None:
        raise RequestError("--plot needs matplotlib: pip install 'mlstm_pallas[benchmark]'")
    if path and not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise RequestError(f"no folder for {path}")


def needs_gpu(what: str) -> RequestError:
    return RequestError(f"{what} needs a GPU, JAX has none here; xla and interpret run anywhere")


def say_no_gpu(what: str, shapes: Sequence[str]) -> None:
    where = f"measuring {what} on the CPU, at {', '.join(shapes)}"
    print(f"no GPU here: {where}; these are not the speeds of the kernels")


# ---------------------------------------------------------------- records


def collect(
    measured: Iterator[Any], line: Callable[[Any], str] | None, jsonl: TextIO | None
) -> tuple[list[Any], int]:
    """The records, each printed as a line and stored as soon as it is measured, and the exit code.

    The exit code is 1 where a record is wrong or failed, and 130 after Ctrl-C, with the records
    before it.
    """
    records = []
    try:
        for record in measured:
            records.append(record)
            if line:
                print(line(record), flush=True)
            if jsonl:
                print(json.dumps(dataclasses.asdict(record), default=str), file=jsonl, flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return records, 130
    return records, int(any(record.status in ("wrong", "failed") for record in records))


def measure(
    name: str,
    start: Callable[[], Iterator[Any]],
    line: Callable[[Any], str] | None,
    jsonl: str | None,
) -> tuple[list[Any], int]:
    """The records of the benchmark ``name`` and its exit code, as ``collect`` has them.

    Exit code 2, with one line on stderr, where ``start`` refuses the request or there is no way to
    write the file ``jsonl``.
    """
    with contextlib.ExitStack() as stack:
        try:
            measured = start()
            file = stack.enter_context(open(jsonl, "a")) if jsonl else None
        except (RequestError, OSError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return [], 2
        return collect(measured, line, file)


def plot_measured(
    plot: Callable[[Sequence[Any], str], None], records: Sequence[Any], path: str | None
) -> None:
    """Writes the plot, where one is asked for and anything was measured."""
    if path and any(record.ms for record in records):
        plot(records, path)
    elif path:
        print(f"nothing was measured: {path} is not written")
