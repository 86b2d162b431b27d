"""What the benchmarks share as programs: the command line, flags, requests."""

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

COMPILED = ("triton", "mosaic_gpu")  # backends


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
    "repeats": ("integer", 10, "Batches of calls; the median counts.", 1),
    "commit": ("string", None, COMMIT),
    "from_jsonl": ("list", [], "Measure nothing; report the records of these files."),
    "jsonl": ("string", None, "File to append each record to as it is measured."),
    "plot": ("string", None, "PNG to write at the end."),
}


class Define:
    """Defines flags: ``define.list("shape", [], help)`` is flags.DEFINE_list."""

    def __init__(self, values: flags.FlagValues):
        self._values = values

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        return functools.partial(getattr(flags, f"DEFINE_{kind}"), flag_values=self._values)

    def shared(self, *names: str) -> None:
        """Flags of ``SHARED_FLAGS``."""
        for name in names:
            kind, *arguments = SHARED_FLAGS[name]
            getattr(self, kind)(name, *arguments)


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


def check_gpu(kind: str, names: Sequence[str], gpu: bool, need: Sequence[str] = COMPILED) -> None:
    """Raises RequestError where there is no GPU and one of the names needs one."""
    if needed := [name for name in need if name in names and not gpu]:
        absent = "JAX has none here; xla and interpret run anywhere"
        raise RequestError(f"{kind} {needed[0]} needs a GPU, {absent}")


def parse_booleans(name: str, texts: Sequence[str]) -> list[bool]:
    check_names(name, texts, ["true", "false"])
    return [text == "true" for text in texts]


def say_no_gpu(what: str, shapes: Sequence[str]) -> None:
    where = f"measuring {what} on the CPU, at {', '.join(shapes)}"
    print(f"no GPU here: {where}; these are not the speeds of the kernels")
