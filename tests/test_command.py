"""The benchmarks as programs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PROGRAM = """
import command
from absl import flags
def define_flags(values):
    flags.DEFINE_integer("repeats", 3, "Of calls.", lower_bound=1, flag_values=values)
command.main(define_flags, lambda options: options.repeats)
"""


def run(tmp_path, *arguments):
    program = tmp_path / "stand_in.py"
    program.write_text(PROGRAM)
    command = [sys.executable, program, *arguments]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(BENCHMARKS)}, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--no_such_flag", "Unknown command line flag 'no_such_flag'"),
        ("--repeats=0", "flag --repeats=0: 0 is not a positive integer"),
        ("repeats=4", "unexpected argument repeats=4"),
    ],
    ids=["unknown_flag", "out_of_bounds", "no_flag"],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(tmp_path, argument, message):
    process = run(tmp_path, argument)
    assert (process.returncode, process.stdout, process.stderr) == (2, "", f"stand_in: {message}\n")


def test_the_exit_code_is_that_of_the_run(tmp_path):
    process = run(tmp_path, "--repeats=7")
    assert (process.returncode, process.stderr) == (7, "")
    assert "--repeats" in run(tmp_path, "--help").stdout
