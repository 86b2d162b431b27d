"""What the benchmarks are as programs: their flags, their rows as they come, their exit codes."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from absl import app, flags


def main(define_flags: Callable[[flags.FlagValues], None], run: Callable[[flags.FlagValues], int]) -> None:
    """Runs a benchmark on the command line; a wrong flag, or a word that is none, is one line and exit code 2."""

    def parse(argv: list[str]) -> list[str]:
        try:
            if not (others := flags.FLAGS(argv)[1:]):
                return argv[:1]
            said = f"unexpected argument {others[0]}"
        except flags.Error as error:
            said = " ".join(str(error).split())
        print(f"{Path(argv[0]).stem}: {said}", file=sys.stderr)
        sys.exit(2)

    define_flags(flags.FLAGS)
    app.run(lambda _: run(flags.FLAGS), flags_parser=parse)


def collect(measured: Iterator[Any], line: Callable[[Any], str] | None, jsonl: TextIO | None) -> tuple[list[Any], int]:
    """The rows, each printed as a line and stored as soon as it is measured, and the exit code: 1 where one is wrong or failed, 130
    after Ctrl-C, with the rows before it.
    """
    rows = []
    try:
        for row in measured:
            rows.append(row)
            if line:
                print(line(row), flush=True)
            if jsonl:
                print(json.dumps(dataclasses.asdict(row), default=str), file=jsonl, flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return rows, 130
    return rows, int(any(row.status in ("wrong", "failed") for row in rows))
