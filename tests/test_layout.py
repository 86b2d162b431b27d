"""layout="BTNH": the numbers of "BNTH" with transposes around it, under every transformation and on
every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import (
    NAMES,
    OUTPUTS,
    collectives,
    compare,
    cotangents_for,
    gradient_of,
    mesh_of,
    oracle,
    outputs_and_gradients,
    random_inputs,
    sharded,
    swapped,
    tolerance,
)

from mlstm_pallas import KernelConfig, StageConfig, mlstm_chunkwise
from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel

pytestmark = pytest.mark.usefixtures("quick_compilation")

EXPLICIT = AxisType.Explicit


def in_layout(layout, arrays):
    """Five sequences (B, NH, S, ...), and any states, in a layout."""
    return [swapped(x) if layout == "BTNH" and index < 5 else x for index, x in enumerate(arrays)]


def tiles(**fields):
    return StageConfig(
        **dict(siz_b_LQ=16, siz_b_LKV=16, siz_b_DHQK=16, siz_b_DHHV=16, siz_b_loop=32) | fields
    )


SPLITS = tiles(num_splits=2)
MATERIALISED, FUSED = KernelConfig(fused_min_heads=0), KernelConfig(fused_min_heads=1)
# (B, NH, S, DHQK, DHHV), what the inputs are like, options
CASES = {
    "materialised": ((2, 3, 64, 32, 16), {}, dict(config=MATERIALISED)),
    "stored": ((2, 2, 64, 16, 32), {}, dict(config=MATERIALISED, recompute_states_in_bw=False)),
    "fused_splits_launches": (
        (2, 3, 64, 32, 32),
        {},
        dict(
            config=KernelConfig(
                fused_min_heads=1, recurrent_fw_H=tiles(siz_b_loop=16, num_splits=2)
            )
        ),
    ),
    "recurrence_splits": (
        (1, 2, 64, 16, 32),
        {},
        dict(config=KernelConfig(fused_min_heads=0, recurrent_fw_C=SPLITS, recurrent_bw_dC=SPLITS)),
    ),
    "padded": ((2, 3, 41, 20, 9), {}, dict(config=MATERIALISED)),
    "fused_padded": ((2, 3, 41, 20, 9), {}, dict(config=FUSED)),
    "fused_packed": ((2, 2, 48, 16, 16), {}, dict(config=FUSED)),
    "sigmoid_unnormalised": (
        (2, 2, 48, 16, 16),
        dict(m_initial=False),
        dict(config=FUSED, input_gate="sigmoid", normalize=False),
    ),
    "no_states": ((2, 2, 48, 16, 16), dict(states=False), dict(config=MATERIALISED)),
}


# The rest are other paths through the same kernels and specs, and "padded" in 16 bits is quick.
QUICK = ("fused_splits_launches",)
CALLS = [("interpret", case, "float32") for case in CASES]
CALLS += [
    *[
        ("xla", "fused_packed", "float32"),
        ("xla", "padded", "float16"),
        ("xla", "stored", "bfloat16"),
    ],
    ("interpret", "fused_padded", "bfloat16"),
]


def ids_of(case, B, S):
    """Segments that begin inside chunks of 16, one over two chunks."""
    return (
        jnp.asarray(np.repeat([[3, 0, 7, 8]] * B, [5, 11, 30, S - 46], axis=1))
        if "packed" in case
        else None
    )


def same_sums(dtype, terms):
    """Bound on the relative norm of a difference between two orders of float32 sums, behind which
    results round to the dtype."""
    unit = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    return unit + 4 * tolerance("float32", terms)


def slow(values, condition):
    return pytest.param(*values, marks=[pytest.mark.slow] * bool(condition))


@pytest.mark.parametrize(
    ("backend", "case", "dtype"), [slow(call, call[1] not in QUICK) for call in CALLS]
)
def test_both_layouts_give_the_same(case, backend, dtype):
    """Interpreted, the same kernels multiply the same tiles: every bit is the same.

    XLA orders the sums outside of them by the layout.
    """
    shape, recipe, options = CASES[case]
    inputs = random_inputs(7, *shape, dtype=dtype, **recipe)
    cotangents = cotangents_for(inputs, dtype)
    options = dict(segment_ids=ids_of(case, shape[0], shape[2]), backend=backend) | options
    run = functools.partial(mlstm_chunkwise, return_last_states=True, chunk_size=16, **options)
    expected, result = (
        outputs_and_gradients(functools.partial(run, layout=layout), layout)(inputs, cotangents)
        for layout in ("BNTH", "BTNH")
    )
    exact = backend == "interpret" and "splits" not in case
    bound = 0.0 if exact else same_sums(dtype, shape[2] + shape[3])
    result, expected = map(jax.tree.leaves, (result, expected))
    assert [x.dtype for x in result] == [x.dtype for x in expected]
    compare(range(len(result)), result, (x.astype("float32") for x in expected), bound)


def test_h_and_states_against_float64():
    """What the comparison of the layouts rests on."""
    (B, NH, S, DHQK, DHHV), _, options = CASES["fused_packed"]
    x, ids = random_inputs(7, B, NH, S, DHQK, DHHV), ids_of("packed", B, S)
    options = dict(return_last_states=True, layout="BTNH", backend="xla", segment_ids=ids)
    run = jax.jit(functools.partial(mlstm_chunkwise, **options))
    h, states = run(*in_layout("BTNH", list(x.values())))
    expected_h, expected = oracle(x, ids)
    bound = tolerance("float32", S + DHQK)
    compare(OUTPUTS, (swapped(h), *states), (expected_h, *expected), bound)


# ---------------- meshes and transformations

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
    [("xla", None), slow(("interpret", MATERIALISED), True)],
    ids=["xla", "materialised"],
)
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
