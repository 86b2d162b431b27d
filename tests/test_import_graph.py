"""The import graph of the package: no cycle, and every arrow runs down the floors."""

import ast
import functools
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "mlstm_pallas"
# From the doors down. A module imports modules of lower floors; those of its own folder too in stages/ and xlstm_jax/.
FLOORS = (
    ("",),  # the package itself
    ("api", "recurrent", "distributed", "export", "reference", "xlstm_jax"),
    ("fwbw",),
    ("entry", "forward", "backward"),
    ("call_spec", "backend"),
    ("config", "shared_memory"),
    ("stages",),
    ("launch", "gate_gradients"),
    ("stage", "gates", "sharding", "validation"),
    ("problem", "tiles", "normaliser", "splits", "version"),
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}


@functools.cache
def modules():
    """{dotted name below the package: syntax tree}."""
    files = {".".join(file.relative_to(PACKAGE).with_suffix("").parts): file for file in sorted(PACKAGE.rglob("*.py"))}
    return {name.removesuffix("__init__").removesuffix("."): ast.parse(file.read_text()) for name, file in files.items()}


def imported(node):
    """Full names of what an import statement imports, those of attributes of modules included."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0, f"a relative import in line {node.lineno}"
    return [f"{node.module}.{alias.name}" for alias in node.names]


def imports(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def within_package(name):
    """The module of the package that an imported name is, or is an attribute of; None for other packages."""
    package, _, rest = name.partition(".")
    if package != "mlstm_pallas":
        return None
    return rest if rest in modules() else rest.rpartition(".")[0]


@functools.cache
def graph():
    """{module: the modules of the package that it imports}."""
    found = {}
    for name, tree in modules().items():
        inside = (within_package(target) for node in imports(tree) for target in imported(node))
        found[name] = {target for target in inside if target is not None}
    return found


def floor_of(name):
    return FLOOR[name.partition(".")[0]]


def arrows(condition):
    return [f"{name} -> {target}" for name, targets in graph().items() for target in sorted(targets) if condition(name, target)]


def test_every_module_has_a_floor():
    assert {name.partition(".")[0] for name in modules()} == set(FLOOR)


def test_no_cycle():
    list(TopologicalSorter(graph()).static_order())


def test_every_arrow_runs_down():
    def same_folder(name, target):
        folder = name.partition(".")[0]
        return folder in ("stages", "xlstm_jax") and folder == target.partition(".")[0]

    assert not arrows(lambda name, target: floor_of(name) >= floor_of(target) and not same_folder(name, target))


def test_no_module_imports_the_package_itself():
    assert not arrows(lambda name, target: target == "")


def test_nothing_in_the_package_imports_the_reference():
    assert not arrows(lambda name, target: target == "reference")


def test_modules_of_the_package_are_imported_at_the_top():
    for name, tree in modules().items():
        nested = [node for node in imports(tree) if node not in tree.body]
        assert not [target for node in nested for target in imported(node) if within_package(target) is not None], name


def test_launch_alone_imports_the_triton_lowering():
    found = {name for name, tree in modules().items() for node in imports(tree) if any("pallas.triton" in x for x in imported(node))}
    assert found == {"launch"}
