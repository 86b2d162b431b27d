"""The command line of benchmarks and tools: flags, and errors that are one line."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import shapes
from absl import app, flags

flags.disclaim_key_flags()  # --help lists the flags defined here under the program's name


class RequestError(ValueError):
    """The request makes no sense here; the message is for the user."""


class FunctionParser(flags.ArgumentParser):
    """One value, parsed by a function that may raise ValueError."""

    def __init__(self, parse: Callable[[str], Any]):
        super().__init__()
        self.parse = parse


def known_name(known: Collection[str], text: str) -> str:
    if text not in known:
        raise ValueError(f"unknown {text}, known are {', '.join(known)}")
    return text


SHARED: dict[str, tuple[Any, ...]] = {
    "shape": ("items", [], shapes.parse, f"{shapes.KNOWN}."),
    "direction": ("names", ["fwd"], ("fwd", "fwbw"), "forward, forward and backward."),
    "dtype": ("names", ["bfloat16"], ("bfloat16", "float16", "float32"), "the dtype of q, k, v."),
    "repeats": ("integer", 10, "Batches of calls; the median counts.", 1),
    "commit": ("string", None, "For the rows; none: the HEAD of the git working tree."),
    "from_jsonl": ("list", [], "Measure nothing; report the rows of these files."),
    "jsonl": ("string", None, "File to append each row to as it is measured."),
    "plot": ("string", None, "PNG to write at the end."),
}


class Define:
    """Defines flags: ``define.string("plot", None, help)`` is flags.DEFINE_string."""

    def __init__(self, values: flags.FlagValues):
        self._values = values

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        return functools.partial(getattr(flags, f"DEFINE_{kind}"), flag_values=self._values)

    def parsed(
        self, name: str, parse: Callable[[Any], Any], about: str, default: Any = None
    ) -> None:
        """A flag whose value a function makes of the text or the default; none: None."""
        flags.DEFINE(FunctionParser(parse), name, default, about, self._values)

    def items(self, name: str, default: Any, parse: Callable[[str], Any], about: str) -> None:
        """A comma-separated list of items, or a default list of texts."""

        def parse_all(x: str | list[str]) -> list[Any]:
            return [parse(item) for item in (x.split(",") if isinstance(x, str) else x)]

        self.parsed(name, parse_all, about, default)

    def names(self, name: str, default: Any, known: Collection[str], about: str) -> None:
        """A list of known names."""
        parse = functools.partial(known_name, tuple(known))
        self.items(name, default, parse, f"{', '.join(known)}: {about}")

    def shared(self, *names: str, **defaults: Any) -> None:
        """Flags of ``SHARED``, some with another default."""
        for name in (*names, *defaults):
            kind, default, *arguments = SHARED[name]
            getattr(self, kind)(name, defaults.get(name, default), *arguments)


def parse(argv: list[str], values: flags.FlagValues = flags.FLAGS) -> list[str]:
    """A wrong flag, or a word that is no flag, is one line on stderr and exit code 2."""
    try:
        if not (others := values(argv)[1:]):
            return argv[:1]
        message = f"unexpected argument {others[0]}"
    except flags.Error as error:
        message = " ".join(str(error).split())
    print(f"{Path(argv[0]).stem}: {message}", file=sys.stderr)
    sys.exit(2)


def main(define_flags: Callable[[Define], None], run: Callable[[flags.FlagValues], int]) -> None:
    """Runs a program on the command line; ``run`` returns the exit code."""
    define_flags(Define(flags.FLAGS))
    app.run(lambda _: run(flags.FLAGS), flags_parser=parse)


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
