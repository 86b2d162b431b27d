"""FSDP as docs/training.md shows it, beyond what the page runs. test_hosts.py has checkpoints."""

import functools
import re
from pathlib import Path

import compile_report
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from oracle import collectives, needs_compiler

from mlstm_pallas import use_backend

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
EXAMPLES = PAGE.parents[1] / "examples"


def definitions():
    """The first block of the page, and the definitions of those on FSDP and orbax."""
    blocks = re.findall("```python\n(.*?)```", PAGE.read_text(), re.S)
    [fsdp] = [x.partition("\nshape = ")[0] for x in blocks if "def gather(" in x]
    [orbax] = [x.partition("\nloader = ")[0] for x in blocks if "class Loader" in x]
    return "\n".join((blocks[0], fsdp, orbax))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("shape", [(1, 8), (2, 4)], ids=["fsdp_only", "data_beside"])
def test_a_gpus_program_gathers_a_block_at_once(shape):
    """Once forward, once backward; another one is for the weights outside of the scan.

    Sums of gradients that are split are reduce-scatters if "fsdp" has all devices.
    """
    space = {}
    exec(compile(definitions(), str(PAGE), "exec"), space)
    space["sizes"] |= dict(vocabulary=1024, width=512)
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=compile_report.HOPPER, topology="1x1x8"
    )
    mesh = topologies.make_mesh(topo=topology, mesh_shape=shape, axis_names=("data", "fsdp"))
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * 2)
    params = space["abstract"](mesh)["params"]
    x = jax.ShapeDtypeStruct((16, 64), jnp.int32, sharding=NamedSharding(mesh, space["rows"]))
    graph = nnx.graphdef(nnx.eval_shape(space["fsdp_model"]))
    run = jax.jit(jax.value_and_grad(functools.partial(space["fsdp_loss"], graph)))
    with jax.set_mesh(mesh), use_backend("xla"):
        counts = collectives(run.lower(params, x, x).compile())
    assert counts["all-gather"] == 3
    assert counts["reduce-scatter"] == (2 if shape == (1, 8) else 0)
    assert 1 <= counts["all-reduce"] <= 2
    assert counts.keys() <= {"all-gather", "reduce-scatter", "all-reduce"}
