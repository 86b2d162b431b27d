"""Every public function traces and lowers under any mesh: tests/mesh_calls.py, each time in a fresh
process."""

import os
import sys
from pathlib import Path

import pytest
from oracle import run_python

SCRIPT = Path(__file__).with_name("mesh_calls.py")


def run_calls(expected, *arguments):
    settings = dict(PYTHONPATH=os.pathsep.join(sys.path), JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    assert run_python(SCRIPT, *arguments, **settings).splitlines()[-1] == f"{expected} calls"


@pytest.mark.parametrize(
    ("kind", "backend", "platform"), [("Explicit", "None", "cuda"), ("Auto", "interpret", "cpu")]
)
def test_calls_of_a_fresh_process_under_a_mesh(kind, backend, platform):
    run_calls(20, kind, backend, platform)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "backend", "platform"),
    [
        ("Explicit", "None", "export"),  # which automatic axes refuse
        ("Explicit", "interpret", "cpu"),
        ("Auto", "interpret", "cpu"),
        ("Auto", "None", "cuda"),
    ],
)
def test_all_calls_of_a_fresh_process_under_a_mesh(kind, backend, platform):
    manual_alone = kind == "Auto" and platform == "cuda"  # automatic axes lower with devices alone
    run_calls(19 if manual_alone else 34, kind, backend, platform, "all")
