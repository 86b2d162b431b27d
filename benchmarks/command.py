"""What all benchmarks share as programs: flags, records as they come, exit codes."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from absl import app, flags


def main(
    define_flags: Callable[[flags.FlagValues], None], run: Callable[[flags.FlagValues], int]
) -> None:
    """Runs a benchmark on the command line; a wrong flag, or a word that is none, is one line and exit code 2."""

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


def collect(
    measured: Iterator[Any], line: Callable[[Any], str] | None, jsonl: TextIO | None
) -> tuple[list[Any], int]:
    """The records, each printed as a line and stored as soon as it is measured, and the exit code.

    The exit code is 1 where a record is wrong or failed, and 130 after Ctrl-C, with the records before it.
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


def plot_measured(
    plot: Callable[[Sequence[Any], str], None], records: Sequence[Any], path: str | None
) -> None:
    """Writes the plot, where one is asked for and anything was measured."""
    if path and any(record.ms for record in records):
        plot(records, path)
    elif path:
        print(f"nothing was measured: {path} is not written")
