"""Plants defects in the package, one at a time, and runs the tests that have to catch them.

    python tools/plant_defects.py --mosaic_gpu_python=python3.12
    python tools/plant_defects.py --patch=FILE_OR_FOLDER --seconds=90
    python tools/plant_defects.py --anchor

A patch is what `git diff` prints; without --patch, they are those of tools/planted_defects/, which
have the names of functions instead of numbers of lines (anchors.py).
Each is applied to a copy of the project that is thrown away. Its tests run there in a process group
of their own. Prints caught, survived or hung for each, and the seconds: "no test" where none was
selected, "broken" where the tests could not be collected or the patch does not apply. The exit code
is 1 unless all are caught.

Before its diff, a patch of tools/planted_defects/ names its mechanism, the rule or promise that it
breaks. Several patches may break one, but no two that the same tests catch for the same reason.
`grep -h ^Mechanism tools/planted_defects/* | sort | uniq -c` lists them. A patch may also name its
tests, quick or slow, as pytest takes them; without them the whole quick selection runs, which has
to last at most 15 minutes. It may say that it needs interpreted Mosaic GPU kernels: it is left out
without --mosaic_gpu_python, an interpreter with jax >= 0.11.2.

    Mechanism: the slot that is released
    Tests: tests/stages/test_products.py -k waits_is_right
    Needs: mosaic_gpu

Name so few tests that they take less than a minute. A defect that does not change what the package
computes does not belong there. With --check, patches are applied and no test runs; with --anchor,
the patches are written anew, with the names and the lines that are around the changes now.
"""

import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import command
from anchors import Stale, anchored, planted, sources_of

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "results")
VERDICTS = {0: "survived", 1: "caught", 5: "no test"}  # by exit codes of pytest
# A defect that is planted leaves its patch no place, which is no catch.
OF_PATCHES = "--ignore=tests/programs/test_plant_defects.py"
QUICK, QUICK_SECONDS = ["-m", "not slow", "-n", "auto", "--dist", "worksteal"], 900.0


def headers(patch):
    before_diff = re.split(r"^(?:diff|---) ", patch.read_text(), maxsplit=1, flags=re.MULTILINE)[0]
    return dict(re.findall(r"^(\w+): (.*)$", before_diff, flags=re.MULTILINE))


def applied(patch, folder):
    """Applies a patch there; returns why it cannot, or ""."""
    try:
        texts = planted(patch.read_text(), sources_of(folder))
    except Stale as stale:
        return str(stale)
    for path, text in texts.items():
        Path(folder, path).write_text(text)
    return ""


def check(patches, anchor):
    """Prints which patches do not apply to the project, and why; returns how many. anchor: writes
    those that apply anew."""
    sources, stale = sources_of(ROOT), 0
    for patch in patches:
        try:
            text = anchored(patch.read_text(), sources)
        except Stale as error:
            stale += 1
            print(f"{patch.stem:36} broken: {error}")
        else:
            if anchor:
                patch.write_text(text)
    print(f"{len(patches) - stale} of {len(patches)} apply, {stale} do not")
    return stale


def outcome(plant, tests, seconds, python=sys.executable):
    """caught, survived or hung, and the first test that failed.

    plant: plants it in a copy of the project and returns why it cannot, or "".
    """
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT, folder, ignore=LEFT_OUT, dirs_exist_ok=True)
        if broken := plant(folder):
            return "broken", broken
        command = [python, "-m", "pytest", "-qx", "-p", "no:cacheprovider"]
        run = subprocess.Popen(
            [*command, OF_PATCHES, *tests],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": folder, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            lines = run.communicate(timeout=seconds)[0].splitlines()
        except subprocess.TimeoutExpired:
            return "hung", ""
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.communicate()
    detail = next((line for line in lines if line.startswith("FAILED tests")), lines[-1])
    return VERDICTS.get(run.returncode, "broken"), detail


def existing(text):
    path = Path(text)
    if not path.exists():
        raise ValueError(f"there is no {path}")
    return path


def interpreter(text):
    if text and not shutil.which(text):
        raise ValueError(f"there is no program {text}")
    return text


def define_flags(define):
    defects = str(ROOT / "tools" / "planted_defects")
    define.items("patch", [defects], existing, "Files, or folders of such files.")
    define.parsed("mosaic_gpu_python", interpreter, "A Python with jax >= 0.11.2.")
    define.float("seconds", 60.0, "Per defect, at the most.", lower_bound=1.0)
    define.bool("check", False, "Only apply the patches; run no test.")
    define.bool("anchor", False, "Write the patches anew, for the files as they are.")


def run(args):
    paths = args.patch
    chosen = [y for x in paths for y in (sorted(x.glob("*.patch")) if x.is_dir() else [x])]
    if args.check or args.anchor:
        return int(check(chosen, args.anchor) > 0)
    missed = 0
    for patch in chosen:
        said = headers(patch)
        python = args.mosaic_gpu_python if "Needs" in said else sys.executable
        if python is None:
            print(f"{patch.stem:36} left out", flush=True)
            continue
        tests = shlex.split(said["Tests"]) if "Tests" in said else QUICK
        most = args.seconds if "Tests" in said else max(args.seconds, QUICK_SECONDS)
        start = time.monotonic()
        plant = functools.partial(applied, patch)
        verdict, detail = outcome(plant, tests, most, python)
        missed += verdict != "caught"
        seconds = time.monotonic() - start
        print(f"{patch.stem:36} {verdict:8} {seconds:3.0f} s  {detail[:150]}", flush=True)
    print(f"{missed} of {len(chosen)} not caught")
    return int(missed > 0)


if __name__ == "__main__":
    command.main(define_flags, run)
