"""Plants known defects in the package, one at a time, and runs the tests that have to catch them.

    python tests/plant_defects.py --mosaic_gpu_python=python3.12 [--seconds=60] [NAME ...]

Each defect is planted in a copy of the project that is thrown away. Its quick tests run there in a
process group of their own. Prints caught, survived or hung for each, and the seconds: "no test"
where none was selected, "broken" where the tests could not be collected. The exit code is 1 unless
all are caught. Without --mosaic_gpu_python, an interpreter with jax >= 0.11.2, the defects that
need interpreted Mosaic GPU kernels are left out.

To add a defect, add an entry to planted_defects.json: ``old``, which occurs once in ``file``, is
replaced by ``new``; ``tests`` are files of this folder, of which ``select`` is pytest's -k. Select
so few tests that they take less than a minute. ``mosaic_gpu`` says that they need that interpreter.
A defect that does not change what the package computes does not belong there.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "results")
VERDICTS = {0: "survived", 1: "caught", 5: "no test"}  # by exit codes of pytest


def defects():
    return json.loads(Path(__file__).with_name("planted_defects.json").read_text())


def outcome(defect, python, seconds):
    """caught, survived or hung, and the first test that failed."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT, folder, ignore=LEFT_OUT, dirs_exist_ok=True)
        file = Path(folder, defect["file"])
        file.write_text(file.read_text().replace(defect["old"], defect["new"]))
        command = [python, "-m", "pytest", "-qx", "-m", "not slow", "-k", defect["select"]]
        command += ["-p", "no:cacheprovider", *(f"tests/{name}" for name in defect["tests"])]
        run = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": folder, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            out = run.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            return "hung", ""
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.communicate()
    lines = out.splitlines()
    detail = next((line for line in lines if line.startswith("FAILED tests")), lines[-1])
    return VERDICTS.get(run.returncode, "broken"), detail


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="defects; default: all")
    parser.add_argument("--mosaic_gpu_python", metavar="PYTHON")
    parser.add_argument("--seconds", type=float, default=60, help="of a defect, at the most")
    args = parser.parse_args()
    missed, chosen = 0, args.names or defects()
    for name in chosen:
        defect = defects()[name]
        python = args.mosaic_gpu_python if defect.get("mosaic_gpu") else sys.executable
        if python is None:
            print(f"{name:26} left out", flush=True)
            continue
        start = time.monotonic()
        verdict, detail = outcome(defect, python, args.seconds)
        missed += verdict != "caught"
        seconds = time.monotonic() - start
        print(f"{name:26} {verdict:8} {seconds:3.0f} s  {detail[:150]}", flush=True)
    print(f"{missed} of {len(chosen)} not caught")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
