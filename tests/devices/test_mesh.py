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
        # Processes: what is traced is lowered too, for explicit axes (which automatic ones refuse),
        # for CPUs, where XLA traces the shards, and for manual axes, between both kinds.
        slow(18, "Explicit None export"),
        slow(10, "Auto interpret cpu lowered"),
        slow(6, "Auto None export"),
    ],
)
def test_calls_of_a_fresh_process_under_a_mesh(count, arguments):
    settings = dict(PYTHONPATH=os.pathsep.join(sys.path), JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    output = run_python(SCRIPT, *arguments.split(), **settings)
    assert output.splitlines()[-1] == f"{count} calls"
