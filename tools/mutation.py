"""Mutation testing: plants small defects in the modules that are plain Python and counts those that
their tests catch.

    pip install mutmut
    PYTHONPATH=. python tools/mutation.py                    # all modules
    PYTHONPATH=. python tools/mutation.py planning gpu --every=5

The defects are those of mutmut. It cannot run them here: it forks a process in which tests have
run, where JAX's threads deadlock, and it leaves out properties, cached functions and constants.
Here each mutant is a fork of a process that has only imported jax, and imports the package, one
module of which is mutated.
"""

import argparse
import contextlib
import importlib
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

import libcst
import pytest
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

ROOT = Path(__file__).parents[1]
SECONDS = 120  # of a mutant, after which it counts as killed: it waits or it loops
# By module, its tests, the quickest first, and the functions that count; none: all.
MODULES = {
    "mlstm_pallas/planning.py": ("by_hand.py::test_the_values_of[planning] planning.py config.py",),
    "mlstm_pallas/config.py": ("by_hand.py::test_the_values_of[config] config.py",),
    "mlstm_pallas/gpu.py": ("by_hand.py::test_the_values_of[gpu] gpu_facts.py planning.py",),
    "mlstm_pallas/problem.py": ("by_hand.py::test_the_values_of[problem]",),
    "mlstm_pallas/chunk_list.py": ("by_hand.py::test_the_values_of[chunk_list]",),
    "mlstm_pallas/splits.py": ("by_hand.py::test_the_values_of[splits]",),
    "mlstm_pallas/normaliser.py": ("by_hand.py::test_the_values_of[normaliser]",),
    "mlstm_pallas/preview.py": (
        "planning.py "
        "errors.py::test_arguments_without_arrays_are_refused_by_name_and_accepted_at_their_bounds",
    ),
    "mlstm_pallas/distributed.py": (
        "distributed.py",
        "_stabiliser_after _decay _rescaling joined joined_gradients _state_after _log_decays "
        "_from_start _shifted _exclusive_prefix",
    ),
    "examples/xlstm_checkpoint.py": ("xlstm_7b.py",),
    "benchmarks/runner.py": ("runner.py command.py kernel_benchmark.py",),
    "benchmarks/roofline.py": ("roofline.py",),
}
# What takes longest to import, and imports nothing of the package.
PRELOADED = "jax.export", "jax.experimental.pallas.triton", "jax.experimental.pallas.mosaic_gpu"


class Mutants(libcst.CSTVisitor):
    """The nodes of a module that are mutated, each with its mutation and its line."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, functions: str):
        super().__init__()
        self.functions = functions.split()
        self.depth = 0 if functions else 1
        self.found: list[tuple[libcst.CSTNode, libcst.CSTNode, int]] = []

    def on_visit(self, node: libcst.CSTNode) -> bool:
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

    def on_leave(self, node: libcst.CSTNode) -> None:
        self.depth -= self._counts(node)

    def _counts(self, node: libcst.CSTNode) -> bool:
        return isinstance(node, libcst.FunctionDef) and node.name.value in self.functions


def run_tests(path: str, source: str, tests: str) -> None:
    """Ends the process with 0 if all tests pass where the file has this source."""
    signal.alarm(SECONDS)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    read = SourceFileLoader.get_code

    def get_code(self, name):
        mutated = Path(self.path) == ROOT / path
        return compile(source, self.path, "exec") if mutated else read(self, name)

    SourceFileLoader.get_code = get_code
    files = [f"tests/test_{name}" for name in tests.split()]
    options = "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider"
    os._exit(pytest.main([*options, *files]))


def mutants_of(path: str, every: int) -> Iterator[tuple[str, str, str]]:
    """The path, a text and the source of the unchanged file and then of its mutants."""
    _, functions = (*MODULES[path], "")[:2]
    wrapper = MetadataWrapper(libcst.parse_module((ROOT / path).read_text()))
    visitor, module = Mutants(functions), wrapper.module
    wrapper.visit(visitor)
    yield path, "", module.code
    for node, mutated, line in visitor.found[::every]:
        old, new = (" ".join(module.code_for_node(x).split()) for x in (node, mutated))
        yield path, f"{path}:{line}: {old} -> {new}", module.deep_replace(node, mutated).code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("modules", nargs="*", help="parts of their paths; none: all")
    parser.add_argument("--every", type=int, default=1, help="a sample: one mutant of so many")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args()
    os.chdir(ROOT)
    warnings.filterwarnings("ignore", message=".*fork")
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    paths = [x for x in MODULES if any(y in x for y in options.modules) or not options.modules]
    waiting = (x for path in paths for x in mutants_of(path, options.every))
    running: dict[int, tuple[str, str]] = {}
    counts, killed, start = Counter[str](), Counter[str](), time.monotonic()
    while True:
        while len(running) < options.jobs and (mutant := next(waiting, None)):
            path, text, source = mutant
            if (pid := os.fork()) == 0:
                run_tests(path, source, MODULES[path][0])
            running[pid] = path, text
        if not running:
            break
        pid, status = os.wait()
        path, text = running.pop(pid)
        if not text:
            if status:
                sys.exit(f"{path}: its tests fail without a mutant")
            continue
        counts[path] += 1
        killed[path] += status != 0
        if status == 0:
            print(text, flush=True)
    for path in paths:
        share = killed[path] / max(counts[path], 1)
        print(f"{path:32} {counts[path]:5} mutants {killed[path]:5} killed {share:6.1%}")
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
