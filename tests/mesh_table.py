"""The table of docs/devices.md: what runs on which kinds of mesh axes.

Each cell is a call on a mesh of four CPU devices, (x, y) = (2, 2), whose results have to be those
of the call without a mesh. This writes the page anew:

    JAX_NUM_CPU_DEVICES=4 PYTHONPATH=. python tests/mesh_table.py

A new kind of mesh is a line of AXES, a new call one of CALLS. The column TPU has what compiles for
four TPUs, for which libtpu has to be installed.
"""

import functools
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import command
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from oracle import (
    COLLECTIVE,
    assert_close,
    loss_of,
    mesh_of,
    random_inputs,
    results_of,
    sharded,
    tolerance,
)

from mlstm_pallas import (
    mlstm_chunkwise,
    mlstm_chunkwise_states,
    mlstm_recurrent_sequence,
    mlstm_recurrent_step,
    mlstm_ring_flush,
    mlstm_ring_states,
    mlstm_ring_step,
)
from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel

PAGE = Path(__file__).parents[1] / "docs" / "devices.md"
TABLE = re.compile(r"(?<=<!-- python tests/mesh_table.py -->\n)(?:\|.*\n)+")
RUNS, COMPILES, NOT_IN_JAX, TPU = "runs", "compiles", "fails in jax", "TPU"
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit

# The kinds of x and y, and the axes of each shard_map around the call, from outside.
AXES = {
    "x and y automatic": ((AUTO, AUTO), ()),
    "x and y explicit": ((EXPLICIT, EXPLICIT), ()),
    "x explicit, y automatic": ((EXPLICIT, AUTO), ()),
    "`shard_map` over x and y": ((AUTO, AUTO), ("xy",)),
    "`shard_map` over x, y automatic": ((AUTO, AUTO), ("x",)),
    "`shard_map` over x, y explicit": ((EXPLICIT, EXPLICIT), ("x",)),
    "`shard_map` over x, which is explicit outside, y automatic": ((EXPLICIT, AUTO), ("x",)),
    "`shard_map` over y inside one over x": ((AUTO, AUTO), ("x", "y")),
    "the same, explicit outside": ((EXPLICIT, EXPLICIT), ("x", "y")),
}

B, NH, S, DHQK, DHV, L, N = 2, 4, 32, 16, 8, 16, 3
BOUND = 4 * tolerance("float32", S + L)  # the same sums in another order
X = [np.asarray(x) for x in random_inputs(0, B, NH, S, DHQK, DHV).values()]
IDS = np.repeat([[0, 1, 2], [0, 0, 1]], [7, 20, 5], axis=1).astype("int32")
# The dimensions of arrays, a letter each; those of batch, heads and steps may be sharded.
STATES = ["bhkv", "bhk", "bh"]
TOKENS = ["bhsk", "bhsk", "bhsv", "bhs", "bhs"]
TOKEN = [x.replace("s", "") for x in TOKENS]
SEVERAL = [f"b-{x[1:]}" for x in STATES]  # of segments, or after several steps
ALL = TOKENS + STATES


BATCH_AND_HEADS = {"b": "x", "h": "y"}  # the mesh axis of each dimension


class Call(NamedTuple):
    function: Any  # returns arrays
    arrays: list[Any]
    dims: list[str]
    results: list[str]
    shards: dict[str, str] = BATCH_AND_HEADS
    around: Any = lambda run: run  # a transform outside of the shard_maps
    alone: Any = None  # the function without a mesh, if it is another one


def leaves(run):
    return lambda *x: tuple(jax.tree.leaves(run(*x)))


chunkwise = functools.partial(mlstm_chunkwise, chunk_size=L)
with_states = functools.partial(chunkwise, return_last_states=True)
in_shards = functools.partial(
    mlstm_chunkwise_sequence_parallel, axis_name="x", chunk_size=L, return_last_states=True
)


def of_steps(run):
    """As results_of, but for the loss, which is of h alone: all shards have the last states."""

    def loss(*x):
        h, states = run(*x)
        return loss_of(h, ()), (h, *states)

    def results(*x):
        gradients, outputs = jax.grad(loss, tuple(range(len(x))), has_aux=True)(*x)
        return *outputs, *gradients

    return results


def shared_f(q, k, v, i, f, *states):
    """One f, which does not vary over the shards of the batch, for all entries."""
    return with_states(q, k, v, i, jnp.broadcast_to(f, i.shape), *states)


def packed(ids, *x, **options):
    return results_of(functools.partial(chunkwise, segment_ids=ids, **options))(*x)


def ring(q, k, v, i, f, *states):
    """Drafts, one of which is accepted, and a token."""
    rings = mlstm_ring_states(*states, dtype=q.dtype, length=8, phase=0)
    drafts, rings = mlstm_ring_step(q, k, v, i, f, rings, layout="BNTH")
    token = [x[:, :, 0] for x in (q, k, v, i, f)]
    h, rings = mlstm_ring_step(*token, rings, accepted=jnp.ones(q.shape[:1], "int32"))
    return drafts, h, *mlstm_ring_flush(rings)


of_token = [*(x[:, :, 0] for x in X[:5]), *X[5:]]
of_drafts = [*(x[:, :, :3] for x in X[:5]), *X[5:]]
h, token_h = TOKENS[2], TOKEN[2]
CALLS = {
    "forward": Call(leaves(chunkwise), X[:5], TOKENS, [h]),
    "gradient outside": Call(
        leaves(shared_f),
        [*X[:4], X[4][:1], *X[5:]],
        [*TOKENS[:4], "-hs", *STATES],
        [h, *STATES],
        around=results_of,
    ),
    "gradient inside": Call(results_of(with_states), X, ALL, [h, *STATES, *ALL]),
    "`segment_ids`": Call(packed, [IDS, *X[:5]], ["bs", *TOKENS], [h, *TOKENS]),
    "`num_segments`": Call(
        functools.partial(packed, num_segments=N, return_last_states=True),
        [IDS, *X],
        ["bs", *ALL],
        [h, *SEVERAL, *ALL],
    ),
    "states of steps": Call(
        leaves(functools.partial(mlstm_chunkwise_states, every=L)),
        X,
        ALL,
        [h, *STATES, *SEVERAL],
    ),
    "step": Call(leaves(mlstm_recurrent_step), of_token, TOKEN + STATES, [token_h, *STATES]),
    "steps": Call(leaves(mlstm_recurrent_sequence), of_drafts, ALL, [h, *STATES]),
    "ring step": Call(ring, of_drafts, ALL, [h, token_h, *STATES]),
    "sequence parallel": Call(
        of_steps(in_shards),
        X,
        ALL,
        [h, *STATES, *ALL],
        shards={"s": "x", "h": "y"},
        alone=of_steps(with_states),
    ),
}


def summed(run):
    """The gradient of a sum, which is taken outside of the shard_maps."""
    return jax.grad(lambda x: jnp.sum(*run(x)))


def specs(call, dims, axes):
    """How the arrays are sharded over these axes of the mesh."""
    names = ([call.shards.get(x) for x in y] for y in dims)
    return tuple(P(*(x if x and x in axes else None for x in y)) for y in names)


@functools.cache
def alone(name):
    """The results without a mesh."""
    call = CALLS[name]
    return jax.jit(call.around(call.alone or call.function))(*call.arrays)


def traced(axes, call, place=sharded):
    """The arrays on the mesh, and the call traced; place: puts arrays on it."""
    (_, levels), run = AXES[axes], call.function
    for level in reversed(levels):
        ins, outs = (specs(call, dims, level) for dims in (call.dims, call.results))
        run = jax.shard_map(run, in_specs=ins, out_specs=outs, axis_names={*level})
    mesh = jax.sharding.get_mesh()
    x = place(call.arrays, mesh, *specs(call, call.dims, "xy"))
    return x, jax.jit(call.around(run)).trace(*x)


def abstract(arrays, mesh, *shardings):
    """As ``sharded``, for a mesh of devices that are not here."""
    places = [jax.sharding.NamedSharding(mesh, spec) for spec in shardings]
    return [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
        for x, place in zip(arrays, places, strict=True)
    ]


def tpu_cell(axes, *names, topology="v5e:2x2"):
    """That calls, or those of a training step and of decoding, compile for TPUs.

    No call exchanges anything, but for what jax gathers where x and y are of different kinds.
    """
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 2), ("x", "y"), axis_types=AXES[axes][0])
    for name in names or ("gradient inside", "step"):
        with jax.set_mesh(mesh):
            program = traced(axes, CALLS[name], abstract)[1].lower().compile()
        found = COLLECTIVE.findall(program.as_text())
        allowed = {EXPLICIT, AUTO} == {*AXES[axes][0]} and "x" not in AXES[axes][1]
        assert allowed or not found, (name, found)
    return COMPILES


def is_lowered(call):
    """Whether jax lowers what it has traced."""
    try:
        call.lower()
    except ValueError as error:
        if not str(error).startswith("Cannot lower jaxpr with verifier errors"):
            raise
        return False
    return True


def cell(axes, name):
    """What the table says: that the call runs, that jax fails, or which argument an error names.

    Raises if the results are not those without a mesh, or if a simpler function does not fail.
    """
    call = CALLS[name]
    with jax.set_mesh(mesh_of((2, 2), *AXES[axes][0])):
        try:
            x, run = traced(axes, call)
        except (TypeError, ValueError) as error:
            return f"`{str(error).split()[0]}`"
        if not is_lowered(run):
            # With nothing of the package: the sum of sin(q) in place of the call.
            sine = Call(leaves(jnp.sin), X[:1], TOKENS[:1], TOKENS[:1], around=summed)
            assert not is_lowered(traced(axes, sine)[1])
            return NOT_IN_JAX
        results = run.lower().compile()(*x)
    for y, expected in zip(*map(jax.tree.leaves, (results, alone(name))), strict=True):
        assert_close(y, expected, BOUND)
    return RUNS


def written(cells):
    """The table, of the cells by their rows and columns."""
    columns = *CALLS, TPU
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
    cells = {(axes, name): cell(axes, name) for axes in AXES for name in CALLS}
    cells |= {(axes, TPU): tpu_cell(axes) for axes in AXES}
    PAGE.write_text(TABLE.sub(lambda _: written(cells), PAGE.read_text()))


if __name__ == "__main__":
    command.main(lambda define: None, main)
