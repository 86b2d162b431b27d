"""The table of docs/devices.md: what runs on which kinds of mesh axes.

Each cell is a call on a mesh of four CPU devices, (x, y) = (2, 2), as ``relations_devices`` has it.
This writes the page anew:

    JAX_NUM_CPU_DEVICES=4 PYTHONPATH=. python tests/mesh_table.py

A new kind of mesh is a line of its AXES, a new call one of its CALLS. The column TPU has what
compiles for four TPUs, for which libtpu has to be installed.
"""

import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import command
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from oracle import collectives, mesh_of
from relations_devices import AXES, CALLS, abstract, exchanges, on_axes, on_mesh, sine

PAGE = Path(__file__).parents[1] / "docs" / "devices.md"
TABLE = re.compile(r"(?<=<!-- python tests/mesh_table.py -->\n)(?:\|.*\n)+")
RUNS, COMPILES, NOT_IN_JAX, TPU = "runs", "compiles", "fails in jax", "TPU"
COLUMNS = [*CALLS][: [*CALLS].index("sequence parallel") + 1]


def tpu_cell(axes, *names, topology="v5e:2x2"):
    """That calls, or those of a training step and of decoding, compile for TPUs, and that no call
    exchanges anything."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 2), ("x", "y"), axis_types=AXES[axes][0])
    for name in names or ("gradient inside", "step"):
        with jax.set_mesh(mesh):
            run, x, _ = on_axes(name, axes, place=abstract)
            compiled = run.trace(x).lower().compile()
            assert not collectives(compiled) or exchanges(name, axes), name
    return COMPILES


def fails_in_jax(axes):
    """Whether jax does not lower the derivative of a sum of sines, with nothing of the package."""
    run, x = sine(axes)
    try:
        jax.jit(jax.grad(lambda x: jnp.sum(run(x)))).lower(x)
    except ValueError as error:
        return str(error).startswith("Cannot lower jaxpr with verifier errors")
    return False


def cell(axes, name):
    """What the table says: that the call runs, that jax fails, or which argument an error names.

    Raises if the results are wrong, or if a simpler function does not fail.
    """
    try:
        on_mesh(name, axes)
    except (TypeError, ValueError) as error:
        first, *_ = str(error).split()
        if first != "Cannot":  # lower
            return f"`{first}`"
        with jax.set_mesh(mesh_of((2, 2), *AXES[axes][0])):
            assert fails_in_jax(axes)
        return NOT_IN_JAX
    return RUNS


def written(cells):
    """The table, of the cells by their rows and columns."""
    columns = *COLUMNS, TPU
    lines = [["", *columns], ["---"] * (1 + len(columns))]
    lines += [[axes, *(cells[axes, name] for name in columns)] for axes in AXES]
    return "".join("|" + "".join(f" {x} |" if x else " |" for x in y) + "\n" for y in lines)


def cells_of_page():
    """What the page says, by rows and columns."""
    head, _, *lines = (
        [x.strip() for x in line.split("|")[1:-1]]
        for line in TABLE.findall(PAGE.read_text())[0].splitlines()
    )
    return {(axes, name): x for axes, *y in lines for name, x in zip(head[1:], y, strict=True)}


def main(_):
    cells = {(axes, name): cell(axes, name) for axes in AXES for name in COLUMNS}
    cells |= {(axes, TPU): tpu_cell(axes) for axes in AXES}
    PAGE.write_text(TABLE.sub(lambda _: written(cells), PAGE.read_text()))


if __name__ == "__main__":
    command.main(lambda define: None, main)
