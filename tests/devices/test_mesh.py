"""Every public function traces and lowers under any mesh: tests/mesh_calls.py, each time in a fresh
process; and what runs on which kinds of axes, with which numbers: tests/mesh_table.py."""

import os
import sys
from pathlib import Path

import mesh_table
import pytest
from oracle import run_python

SCRIPT = Path(__file__).parents[1] / "mesh_calls.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "arguments"),
    [
        (24, "Auto interpret cpu"),
        # Processes: what is traced is lowered too, for explicit axes (which automatic ones refuse),
        # for CPUs, where XLA traces the shards, and for manual axes, between both kinds.
        (18, "Explicit None export"),
        (10, "Auto interpret cpu lowered"),
        (6, "Auto None export"),
    ],
)
def test_calls_of_a_fresh_process_under_a_mesh(count, arguments):
    settings = dict(PYTHONPATH=os.pathsep.join(sys.path), JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    output = run_python(SCRIPT, *arguments.split(), **settings)
    assert output.splitlines()[-1] == f"{count} calls"


CELLS = [(axes, call) for call in mesh_table.CALLS for axes in mesh_table.AXES]


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "call"), CELLS)
def test_the_table_of_kinds_of_axes_is_what_happens(axes, call):
    assert mesh_table.cells_of_page()[axes, call] == mesh_table.cell(axes, call)


def test_the_table_of_kinds_of_axes_has_every_call():
    assert [*mesh_table.cells_of_page()] == [
        (axes, call) for axes in mesh_table.AXES for call in (*mesh_table.CALLS, mesh_table.TPU)
    ]
