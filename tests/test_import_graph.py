"""The import graph of the package: no cycle, and every arrow runs down the floors."""

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "mlstm_pallas"
# From the doors down. A module imports modules of lower floors; those of its own folder too in
# stages/ and xlstm_jax/.
FLOORS = (
    ("",),  # the package itself
    ("api", "recurrent", "distributed", "export", "reference", "xlstm_jax"),
    ("fwbw",),
    ("entry", "forward", "backward"),
    ("call_spec", "backend"),
    ("config", "shared_memory"),
    ("stages",),
    ("launch", "launch_mosaic_gpu", "gate_gradients"),
    ("stage", "gates", "sharding", "validation"),
    ("problem", "tiles", "normaliser", "splits", "version", "in_flight", "annotations"),
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}


@functools.cache
def modules():
    """{dotted name below the package: syntax tree}."""
    files = {
        ".".join(file.relative_to(PACKAGE).with_suffix("").parts): file
        for file in sorted(PACKAGE.rglob("*.py"))
    }
    return {
        name.removesuffix("__init__").removesuffix("."): ast.parse(file.read_text())
        for name, file in files.items()
    }


def imported(node):
    """Full names of what an import statement imports, those of attributes of modules included."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0, f"a relative import in line {node.lineno}"
    return [f"{node.module}.{alias.name}" for alias in node.names]


def imports(tree):
    """All but those for type checkers."""
    checked = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    unread = {child for node in checked for child in ast.walk(node)}
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and node not in unread
    ]


def within_package(name):
    """The module of the package that an imported name is, or is an attribute of; None for other
    packages."""
    package, _, rest = name.partition(".")
    if package != "mlstm_pallas":
        return None
    return rest if rest in modules() else rest.rpartition(".")[0]


@functools.cache
def graph():
    """{module: the modules of the package that it imports}."""
    result = {}
    for name, tree in modules().items():
        inside = (within_package(target) for node in imports(tree) for target in imported(node))
        result[name] = {target for target in inside if target is not None}
    return result


def is_mosaic_gpu(name):
    return name.startswith("stages.mosaic_gpu.")


def mosaic_gpu_kernel(name):
    """The module of the Mosaic GPU kernel of a stage, if it has one; None for what is no stage."""
    return name.replace("stages.", "stages.mosaic_gpu.") if name.startswith("stages.") else None


def floor_of(name):
    return FLOOR[name.partition(".")[0]]


def arrows(condition):
    return [
        f"{name} -> {target}"
        for name, targets in graph().items()
        for target in sorted(targets)
        if condition(name, target)
    ]


def test_every_module_has_a_floor():
    assert {name.partition(".")[0] for name in modules()} == set(FLOOR)


def test_no_cycle():
    """Of imports at the top: the Mosaic GPU kernel of a stage is imported when it is launched."""
    at_the_top = {
        name: {target for target in targets if target != mosaic_gpu_kernel(name)}
        for name, targets in graph().items()
    }
    list(TopologicalSorter(at_the_top).static_order())


def test_every_arrow_runs_down():
    def same_folder(name, target):
        folder = name.partition(".")[0]
        return folder in ("stages", "xlstm_jax") and folder == target.partition(".")[0]

    assert not arrows(
        lambda name, target: floor_of(name) >= floor_of(target) and not same_folder(name, target)
    )


def test_no_module_imports_the_package_itself():
    assert not arrows(lambda name, target: target == "")


def test_nothing_in_the_package_imports_the_reference():
    assert not arrows(lambda name, target: target == "reference")


def test_modules_of_the_package_are_imported_at_the_top():
    """But for Mosaic GPU kernels, which the stages import when they are launched: older versions of
    jax have no such kernels."""
    for name, tree in modules().items():
        nested = [node for node in imports(tree) if node not in tree.body]
        inside = {within_package(target) for node in nested for target in imported(node)} - {None}
        assert not inside or (name.startswith("stages.") and all(map(is_mosaic_gpu, inside))), name


def test_stages_alone_import_mosaic_gpu_kernels():
    """And that of a stage, its launcher alone."""
    kernels = {name for name in modules() if is_mosaic_gpu(name)}
    of_stages = {
        (name, mosaic_gpu_kernel(name)) for name in graph() if mosaic_gpu_kernel(name) in kernels
    }
    result = {
        (name, target)
        for name, targets in graph().items()
        if not is_mosaic_gpu(name)
        for target in targets & kernels
    }
    assert of_stages
    assert all(name.startswith("stages.") for name, _ in result)
    assert {
        (name, target) for name, target in result if target in dict(map(reversed, of_stages))
    } == of_stages


def importers(module):
    return {
        name
        for name, tree in modules().items()
        for node in imports(tree)
        if any(module in x for x in imported(node))
    }


def test_launch_alone_imports_the_triton_lowering():
    assert importers("pallas.triton") == {"launch"}


def test_launch_mosaic_gpu_alone_imports_the_mosaic_gpu_lowering():
    assert importers("pallas.mosaic_gpu") == {"launch_mosaic_gpu"}


def test_the_kernels_alone_import_launch_mosaic_gpu():
    assert all(
        is_mosaic_gpu(name) for name, targets in graph().items() if "launch_mosaic_gpu" in targets
    )


def test_the_package_is_imported_without_the_mosaic_gpu_lowering():
    """All doors and all stages of it."""
    modules = (
        "mlstm_pallas, mlstm_pallas.distributed, mlstm_pallas.export, mlstm_pallas.reference, "
        "mlstm_pallas.xlstm_jax"
    )
    program = f"import sys, {modules}\nprint(*sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=PACKAGE.parent,
    ).stdout.split()
    assert "mlstm_pallas.stages.recurrent_fw_H" in out
    lowering = {"jax.experimental.pallas.mosaic_gpu", "mlstm_pallas.mosaic_gpu.launch"}
    assert not [
        name for name in out if name in lowering or name.startswith("mlstm_pallas.mosaic_gpu.")
    ]
