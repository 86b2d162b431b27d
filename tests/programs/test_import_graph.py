"""The import graph of the package: no cycle, every module imports lower layers only, and what does
not run is not imported."""

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
    ("schedules", "sharding"),
    ("planning",),
    ("triton", "mosaic_gpu"),
    ("stages",),
    ("vectors",),
    ("launches",),
    ("operands",),
    ("formulas",),
    ("problem",),
)
LAYER = {name: layer for layer, names in enumerate(LAYERS) for name in names}
# Modules that import others by computed names, and where those are.
LAZY = {
    "planning.dispatch": ("stages", "triton", "mosaic_gpu"),
}


def folder(name):
    return name.partition(".")[0]


def imports(node):
    """The full names that are imported, with attributes of modules, except for type checkers."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    if not isinstance(node, ast.If) or ast.unparse(node.test) != "TYPE_CHECKING":
        for child in ast.iter_child_nodes(node):
            yield from imports(child)


@functools.cache
def modules():
    """{dotted name below the package: the full names that it imports, and whether it computes
    names}."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        name = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        text = file.read_text()
        name = name.removesuffix("__init__").removesuffix(".")
        found[name] = {*imports(ast.parse(text))}, "import_module(" in text
    return found


def test_every_import_runs_down_without_a_cycle():
    """No import but a program's leads to the package itself, and none from one public module or
    lowering to another. Dispatch alone imports kernels."""
    assert {name for name, (_, computes) in modules().items() if computes} == {*LAZY}
    graph = {}
    for name, (names, _) in modules().items():
        inside = [x.partition(".")[2] for x in names if folder(x) == PACKAGE.name]
        graph[name] = {x if x in modules() else x.rpartition(".")[0] for x in inside}
        graph[name] |= {x for x in modules() if x != name and folder(x) in LAZY.get(name, ())}
        for x in graph[name]:
            if folder(name) != folder(x):
                assert LAYER[folder(name)] < LAYER[folder(x)], (name, x)
                kernel = folder(x) in LAYERS[8]
                assert not kernel or name == "planning.dispatch", (name, x)
    [*TopologicalSorter(graph).static_order()]


def importers(module):
    return {name for name, (names, _) in modules().items() if any(module in x for x in names)}


def test_the_launch_modules_alone_import_pallas():
    for launch in ("triton.launch", "mosaic_gpu.common.launch"):
        assert importers(f"jax.experimental.pallas.{folder(launch)}") == {launch}
    assert {*map(folder, importers("experimental.mosaic"))} <= {"mosaic_gpu"}


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
    pallas = "jax.experimental.pallas"
    for names in (imported, plain):
        assert not [x for x in names if x.startswith(("mlstm_pallas.triton", f"{pallas}.triton"))]
    assert "mlstm_pallas.triton.recurrent_fw_H" in planned
    mosaic_gpu = "mlstm_pallas.mosaic_gpu", f"{pallas}.mosaic_gpu"
    assert not [x for x in planned if x.startswith(mosaic_gpu)]
