"""The import graph of the package: no cycle, and every module imports lower layers only."""

import ast
import functools
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from oracle import run_python

PACKAGE = Path(__file__).parents[2] / "mlstm_pallas"
# From a program of the public API down. A module imports modules of lower layers, and of its own
# folder.
LAYERS = (
    ("selfcheck",),
    ("",),  # the package itself
    ("recurrent", "ring", "distributed", "export", "reference", "xlstm_jax"),
    ("api",),  # whose arguments others have
    ("fwbw",),
    ("prepare",),
    ("schedules",),
    ("planning",),
    ("triton", "mosaic_gpu"),
    ("stages",),
    ("vectors",),
    ("formulas",),
    ("problem",),
)
LAYER = {name: layer for layer, names in enumerate(LAYERS) for name in names}
LOWERINGS = "triton", "mosaic_gpu"
PALLAS = "jax.experimental.pallas"
# Modules that import others by computed names, and where those are.
LAZY = {
    "planning.dispatch": ("stages", *LOWERINGS),
    "stages": ("stages", "vectors"),
}


def folder(name):
    return name.partition(".")[0]


@functools.cache
def modules():
    """{dotted name below the package: syntax tree}."""
    trees = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        name = name.removesuffix("__init__").removesuffix(".")
        trees[name] = ast.parse(file.read_text())
    return trees


def imports(node):
    """The full names that are imported, with attributes of modules, except for type checkers."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"a relative import in line {node.lineno}"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    if not isinstance(node, ast.If) or ast.unparse(node.test) != "TYPE_CHECKING":
        for child in ast.iter_child_nodes(node):
            yield from imports(child)


@functools.cache
def graph():
    """{module: the modules of the package that it imports, lazily or not}."""
    targets = {}
    for name, tree in modules().items():
        inside = [x.partition(".")[2] for x in imports(tree) if folder(x) == PACKAGE.name]
        direct = {x if x in modules() else x.rpartition(".")[0] for x in inside}
        lazy = {x for x in modules() if x != name and folder(x) in LAZY.get(name, ())}
        targets[name] = direct | lazy
    return targets


def arrows(condition):
    return [
        f"{a} -> {b}" for a, targets in graph().items() for b in sorted(targets) if condition(a, b)
    ]


def test_lazy_imports_are_known():
    calls = {name for name, tree in modules().items() if "import_module(" in ast.unparse(tree)}
    assert calls == set(LAZY)


def test_no_cycle():
    list(TopologicalSorter(graph()).static_order())


def test_every_arrow_runs_down():
    """No import but a program's leads to the package itself, and none from one public module or
    lowering to another.

    Every module has a layer.
    """

    def upward(name, target):
        return LAYER[folder(name)] >= LAYER[folder(target)] and folder(name) != folder(target)

    assert not arrows(upward)


def test_dispatch_alone_imports_kernels():
    def kernel(name, target):
        return (
            folder(target) in LOWERINGS
            and name != "planning.dispatch"
            and folder(name) != folder(target)
        )

    assert not arrows(kernel)


def importers(module):
    return {name for name, tree in modules().items() if any(module in x for x in imports(tree))}


@pytest.mark.parametrize("launch", ["triton.launch", "mosaic_gpu.common.launch"])
def test_the_launch_module_alone_imports_pallas(launch):
    assert importers(f"jax.experimental.pallas.{launch.split('.')[0]}") == {launch}


def test_mosaic_gpu_alone_imports_the_mosaic_dialect():
    assert {folder(name) for name in importers("experimental.mosaic")} <= {"mosaic_gpu"}


# Prints the modules after the import of the public modules, after a gradient and a step in plain
# jnp, and after both with Triton's kernels and a plan for them.
SCRIPT = """
import sys, {public}
import jax, jax.numpy as jnp
from mlstm_pallas import mlstm_chunkwise, mlstm_recurrent_step, plan, use_backend

print(*sys.modules)
x, gate = jnp.zeros((1, 2, 32, 64)), jnp.zeros((1, 2, 32))
token = x[:, :, 0], x[:, :, 0], x[:, :, 0], gate[..., 0], gate[..., 0]
for backend in ("xla", "triton"):
    with use_backend(backend):
        jax.make_jaxpr(jax.grad(lambda x: mlstm_chunkwise(x, x, x, gate, gate).sum()))(x)
        jax.make_jaxpr(mlstm_recurrent_step)(*token)
    if backend == "xla":
        print(*sys.modules)
assert not plan(B=1, NH=2, S=256, DHQK=64, DHV=64, gpu="NVIDIA H200").fused
print(*sys.modules)
"""


@pytest.mark.slow
def test_what_does_not_run_is_not_imported():
    """All stages are there, but no kernel where there is none in a call."""
    public = ", ".join(f"mlstm_pallas.{name}" for name in LAYERS[2])
    out = run_python("-c", SCRIPT.format(public=public), PYTHONPATH=str(PACKAGE.parent))
    imported, plain, planned = map(str.split, out.splitlines()[-3:])
    assert "mlstm_pallas.stages.recurrent_fw_H" in imported
    for modules in (imported, plain):
        assert not [x for x in modules if x.startswith(("mlstm_pallas.triton", f"{PALLAS}.triton"))]
    assert "mlstm_pallas.triton.recurrent_fw_H" in planned
    mosaic_gpu = "mlstm_pallas.mosaic_gpu", f"{PALLAS}.mosaic_gpu"
    assert not [x for x in planned if x.startswith(mosaic_gpu)]
