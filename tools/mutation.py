"""Mutation testing: plants small defects in the modules that are plain Python and counts those that
their tests catch.

    pip install mutmut
    PYTHONPATH=. python tools/mutation.py                    # all modules
    PYTHONPATH=. python tools/mutation.py --module=planning,gpu --every=5

The defects are those of mutmut. It cannot run them here: it forks a process in which tests have
run, where JAX's threads deadlock, and it leaves out properties, cached functions and constants.
Here each mutant is planted in a copy of the project that is thrown away, and its tests run there in
a process group of their own.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import command
import libcst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "results")
VERDICTS = {0: "survived", 1: "caught", 5: "no test"}  # by exit codes of pytest
ON_A_CPU = "not gpu and not gpu_multi"
SECONDS = 300  # of a mutant, after which it counts as killed: it waits or it loops
ROW = "table.py::test_call[{}]".format
ARGUMENTS = (
    "errors.py::test_every_argument_is_refused_by_name_and_accepted_at_its_bounds[{}]".format
)
# By module, its tests, the quickest first, and the functions that count; none: all.
MODULES = {
    "mlstm_pallas/planning/call_spec.py": (
        "planning.py " + ROW("28-chunkwise-64-16/16-Documents-float32-xla"),
    ),
    "mlstm_pallas/planning/config.py": (
        f"planning.py {ARGUMENTS('KernelConfig')} errors.py::test_bad_calls",
    ),
    "mlstm_pallas/problem/gpu.py": ("gpu_facts.py planning.py errors.py::test_bad_calls",),
    "mlstm_pallas/problem/dimensions.py": (
        f"formulas.py {ROW('0-chunkwise-1-16/16---float32-xla')} "
        + ROW("20-chunkwise-64-37/50-Ids+Lengths-float32-xla"),
    ),
    "mlstm_pallas/operands/chunk_list.py": (
        f"formulas.py {ROW('29-chunkwise-64-16/16-Documents-float16-xla')} "
        + ROW("20-chunkwise-64-37/50-Ids+Lengths-float32-xla"),
    ),
    "mlstm_pallas/formulas/splits.py": (
        "formulas.py " + ROW("13-chunkwise-64-16/16-Lengths-float32-interpret"),
    ),
    "mlstm_pallas/formulas/normaliser.py": (
        f"formulas.py {ROW('3-chunkwise-64-16/16---float32-xla')} "
        + ROW("4-chunkwise-65-37/50---float32-xla"),
    ),
    "mlstm_pallas/planning/preview.py": (f"planning.py {ARGUMENTS('plan')}",),
    "mlstm_pallas/distributed.py": (
        "distributed.py::test_shards_give_the_numbers_of_the_whole[3-open]",
        "_boundaries _from_zeros _gathered _between _of_earlier _weights _weighted _sum_over",
    ),
    "examples/xlstm_checkpoint.py": ("xlstm_checkpoints.py xlstm_7b.py",),
    "benchmarks/runner.py": ("values_of_benchmarks.py runner.py benchmarks.py",),
    "benchmarks/roofline.py": ("values_of_benchmarks.py",),
}


class Mutants(libcst.CSTVisitor):
    """The nodes of a module that are mutated, each with its mutation and its line."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, functions=""):
        super().__init__()
        self.functions = functions.split()
        self.depth = 0 if functions else 1
        self.found = []

    def on_visit(self, node):
        if isinstance(
            node, libcst.Annotation | libcst.Decorator | libcst.Import | libcst.ImportFrom
        ):
            return False
        self.depth += self._counts(node)
        if self.depth:
            line = self.get_metadata(PositionProvider, node).start.line
            for kind, operator in mutation_operators:
                if isinstance(node, kind):
                    self.found += [(node, mutated, line) for mutated in operator(node)]
        return True

    def on_leave(self, node):
        self.depth -= self._counts(node)

    def _counts(self, node):
        return isinstance(node, libcst.FunctionDef) and node.name.value in self.functions


def in_its_folder(tests):
    """The path from ROOT of a test file, or of one test, which is named without its folder."""
    file, *test = tests.split("::")
    [path] = ROOT.glob(f"tests/**/test_{file}")
    return "::".join([str(path.relative_to(ROOT)), *test])


def verdict(path, source):
    """What the tests of a file say where it has this source: caught, survived or hung, "no test"
    where none was selected, or "broken" where they could not be collected; and the first test that
    failed."""
    tests = MODULES[path][0].split()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT, folder, ignore=LEFT_OUT, dirs_exist_ok=True)
        Path(folder, path).write_text(source)
        pytest = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-m", ON_A_CPU]
        run = subprocess.Popen(
            [*pytest, *map(in_its_folder, tests)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": folder, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            lines = run.communicate(timeout=SECONDS)[0].splitlines()
        except subprocess.TimeoutExpired:
            return "hung", ""
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.communicate()
    detail = next((line for line in lines if line.startswith("FAILED tests")), lines[-1])
    return VERDICTS.get(run.returncode, "broken"), detail


def mutate(path, pool, every):
    """Prints the mutants of a file that survive; returns a line with their numbers."""
    wrapper = MetadataWrapper(libcst.parse_module((ROOT / path).read_text()))
    visitor, module = Mutants(*MODULES[path][1:]), wrapper.module
    wrapper.visit(visitor)
    chosen, survived = visitor.found[::every], 0

    def survives(mutant):
        return verdict(path, module.deep_replace(*mutant[:2]).code)[0] == "survived"

    for (*nodes, line), alive in zip(chosen, pool.map(survives, chosen), strict=True):
        if alive:
            survived += 1
            old, new = (" ".join(module.code_for_node(x).split()) for x in nodes)
            print(f"{path}:{line}: {old} -> {new}", flush=True)
    killed = len(chosen) - survived
    share = killed / max(len(chosen), 1)
    return f"{path:32} {len(chosen):5} mutants {killed:5} killed {share:6.1%}"


def define_flags(define):
    define.list("module", [], "Parts of paths; none: all modules.")
    define.integer("every", 1, "A sample: one mutant of so many.", lower_bound=1)
    define.integer("jobs", os.cpu_count(), "Processes.", lower_bound=1)


def run(options):
    if unknown := [y for y in options.module if not any(y in x for x in MODULES)]:
        raise command.RequestError(f"--module={unknown[0]}: known are {', '.join(MODULES)}")
    paths = [x for x in MODULES if any(y in x for y in options.module or [""])]
    start = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        unchanged = pool.map(lambda path: verdict(path, (ROOT / path).read_text()), paths)
        for path, (said, detail) in zip(paths, unchanged, strict=True):
            if said != "survived":
                print(f"{path}: its tests fail without a mutant: {detail}", file=sys.stderr)
                return 1
        lines = [mutate(path, pool, options.every) for path in paths]
    print(*lines, f"{time.monotonic() - start:.0f} s", sep="\n")
    return 0


if __name__ == "__main__":
    command.main(define_flags, run)
