"""Every public function traces and lowers under any mesh: tests/mesh_calls.py, each time in a fresh
process."""

import os
import sys
from pathlib import Path

import pytest
from oracle import run_python, slow

SCRIPT = Path(__file__).parents[1] / "mesh_calls.py"


@pytest.mark.parametrize(
    ("count", "arguments"),
    [
        (24, "Auto interpret cpu"),
        slow(34, "Explicit None export all"),  # which automatic axes refuse
        slow(34, "Explicit interpret cpu all"),
        slow(34, "Auto interpret cpu all"),
        slow(19, "Auto None export all"),  # manual axes
    ],
)
def test_calls_of_a_fresh_process_under_a_mesh(count, arguments):
    settings = dict(PYTHONPATH=os.pathsep.join(sys.path), JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    output = run_python(SCRIPT, *arguments.split(), **settings)
    assert output.splitlines()[-1] == f"{count} calls"
