"""layout="BTNH" on meshes: the numbers of "BNTH" with transposes around it.

On one device: test_gradients.py.
"""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import (
    NAMES,
    OUTPUTS,
    collectives,
    compare,
    gradient_of,
    mesh_of,
    random_inputs,
    sharded,
    swapped,
    tolerance,
)

from mlstm_pallas import KernelConfig, mlstm_chunkwise
from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel

pytestmark = pytest.mark.usefixtures("quick_compilation")

EXPLICIT = AxisType.Explicit


def in_layout(layout, arrays):
    """Five sequences (B, NH, S, ...), and any states, in a layout."""
    return [swapped(x) if layout == "BTNH" and index < 5 else x for index, x in enumerate(arrays)]


def slow(values, condition):
    return pytest.param(*values, marks=[pytest.mark.slow] * bool(condition))


B, NH, S, DHQK, DHHV = 4, 2, 24, 16, 8
BOUND = 4 * tolerance("float32", S + DHQK)  # the same sums in another order
SEQUENCE, STATE = P("x", None, "y"), P("x", "y")
SPECS = (SEQUENCE,) * 5 + (STATE,) * 3


def run_on(backend, layout="BTNH", **options):
    return functools.partial(
        mlstm_chunkwise,
        chunk_size=16,
        return_last_states=True,
        layout=layout,
        backend=backend,
        **options,
    )


@pytest.fixture(scope="module")
def heads_first():
    return list(random_inputs(0, B, NH, S, DHQK, DHHV).values())


@pytest.fixture(scope="module")
def inputs(heads_first):
    return in_layout("BTNH", heads_first)


@pytest.fixture(scope="module")
def expected(heads_first):
    """Of the other layout, on one device, in this layout."""
    (_, (h, *states)), gradients = gradient_of(run_on("xla", "BNTH"))(*heads_first)
    return jax.tree.map(np.asarray, ((swapped(h), *states), in_layout("BTNH", gradients)))


def check(result, expected):
    (_, outputs), gradients = result
    compare((*OUTPUTS, *NAMES), (*outputs, *gradients), (*expected[0], *expected[1]), BOUND)


@pytest.mark.parametrize(
    ("kind", "backend"), [(EXPLICIT, "xla"), slow((AxisType.Auto, "interpret"), True)]
)
def test_shards_of_batch_and_heads_stay_where_they_are(inputs, expected, kind, backend):
    mesh = mesh_of((4, 2), kind)
    x = sharded(inputs, mesh, *SPECS)
    compiled = gradient_of(run_on(backend)).lower(*x).compile()
    assert set(collectives(compiled)) == {"all-reduce"}  # that of the loss
    result = compiled(*x)
    check(result, expected)
    specs = (SEQUENCE, *[STATE] * 3, *SPECS)
    for y, spec in zip((*result[0][1], *result[1]), specs, strict=True):
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), y.ndim)


@pytest.mark.parametrize(
    ("backend", "config"),
    [("xla", None), ("interpret", KernelConfig(fused_min_heads=0))],
    ids=["xla", "materialised"],
)
@pytest.mark.slow
def test_one_sequence_over_several_devices(backend, config):
    """Shards of S, which is axis 1, with a state handed from device to device and nothing
    gathered."""
    arrays = list(random_inputs(3, 2, 2, 128, 16, 8, f_shift=5.0).values())
    options = dict(chunk_size=16, return_last_states=True, backend=backend, config=config)
    sequence = P(None, "s")
    run = jax.shard_map(
        functools.partial(
            mlstm_chunkwise_sequence_parallel, axis_name="s", layout="BTNH", **options
        ),
        mesh=mesh_of((4,), names="s"),
        in_specs=(sequence,) * 5 + (P(),) * 3,
        out_specs=(sequence, P()),
        check_vma=backend != "interpret",
    )
    x = in_layout("BTNH", arrays)
    compiled = gradient_of(run).lower(*x).compile()
    assert not {"all-gather", "all-to-all"} & {*collectives(compiled)}
    (_, (h, *states)), gradients = compiled(*x)
    whole = functools.partial(mlstm_chunkwise, **options | dict(backend="xla"))
    (_, (expected_h, *expected_states)), expected_gradients = gradient_of(whole)(*arrays)
    result = swapped(h), *states, *in_layout("BTNH", gradients)
    expected = expected_h, *expected_states, *expected_gradients
    # states at the seams are rounded as those of another association of the same products
    compare((*OUTPUTS, *NAMES), result, expected, 1e-5)
