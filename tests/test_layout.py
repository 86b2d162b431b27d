"""layout="BTNH": the numbers of "BNTH" with transposes around it, under every transformation and on
every mesh."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import (
    NAMES,
    OUTPUTS,
    assert_close,
    cotangents_for,
    oracle,
    outputs_and_gradients,
    random_inputs,
    swapped,
    tolerance,
)

from mlstm_pallas import KernelConfig, StageConfig, mlstm_chunkwise
from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel

pytestmark = pytest.mark.usefixtures("quick_compilation")

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
COLLECTIVE = re.compile(
    r" (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\("
)


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
    "fused": ((2, 3, 64, 32, 16), {}, dict(config=FUSED)),
    "stored": ((2, 2, 64, 16, 32), {}, dict(config=MATERIALISED, recompute_states_in_bw=False)),
    "fused_stored": ((2, 2, 64, 16, 32), {}, dict(config=FUSED, recompute_states_in_bw=False)),
    "fused_splits": (
        (1, 2, 64, 16, 32),
        {},
        dict(config=KernelConfig(fused_min_heads=1, recurrent_fw_H=SPLITS)),
    ),
    "fused_launches": (
        (2, 2, 64, 32, 32),
        {},
        dict(config=KernelConfig(fused_min_heads=1, recurrent_fw_H=tiles(siz_b_loop=16))),
    ),
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
    "one_step": ((2, 3, 1, 16, 16), {}, dict(config=MATERIALISED)),
    "resets": ((1, 2, 48, 16, 16), dict(resets=True), dict(config=MATERIALISED)),
    "packed": ((2, 2, 48, 16, 16), {}, dict(config=MATERIALISED)),
    "fused_packed": ((2, 2, 48, 16, 16), {}, dict(config=FUSED)),
    "sigmoid": (
        (2, 2, 48, 16, 16),
        dict(m_initial=False),
        dict(config=MATERIALISED, input_gate="sigmoid"),
    ),
    "fused_sigmoid_unnormalised": (
        (2, 2, 48, 16, 16),
        dict(m_initial=False),
        dict(config=FUSED, input_gate="sigmoid", normalize=False),
    ),
    "no_states": ((2, 2, 48, 16, 16), dict(states=False), dict(config=MATERIALISED)),
}


# The rest are other paths through the same kernels and specs, and "padded" in 16 bits is quick.
QUICK = ("fused_splits_launches",)
CALLS = [("interpret", case) for case in CASES]
CALLS += [("xla", case) for case in ("fused_packed", "fused_sigmoid_unnormalised", "stored")]


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


def check_layouts(case, backend, dtype="float32"):
    """Interpreted, the same kernels multiply the same tiles: every bit is the same.

    XLA orders the sums outside of them by the layout.
    """
    shape, recipe, options = CASES[case]
    inputs = random_inputs(7, *shape, dtype=dtype, **recipe)
    cotangents = cotangents_for(inputs, dtype)
    options = dict(segment_ids=ids_of(case, shape[0], shape[2]), backend=backend) | options
    run = functools.partial(mlstm_chunkwise, return_last_states=True, chunk_size=16, **options)
    (expected, expected_gradients), (result, gradients) = (
        outputs_and_gradients(functools.partial(run, layout=layout), layout)(inputs, cotangents)
        for layout in ("BNTH", "BTNH")
    )
    exact = backend == "interpret" and "splits" not in case
    bound = 0.0 if exact else same_sums(dtype, shape[2] + shape[3])
    pairs = dict(zip(OUTPUTS, zip(result, expected, strict=True), strict=True))
    pairs |= {f"d{name}": (x, expected_gradients[name]) for name, x in gradients.items()}
    for name, (actual, desired) in pairs.items():
        assert actual.dtype == desired.dtype
        assert_close(actual, np.asarray(desired).astype("float32"), bound, name)


def slow(values, condition):
    return pytest.param(*values, marks=[pytest.mark.slow] * bool(condition))


@pytest.mark.parametrize(
    ("backend", "case"), [slow((backend, case), case not in QUICK) for backend, case in CALLS]
)
def test_both_layouts_give_the_same(case, backend):
    check_layouts(case, backend)


@pytest.mark.parametrize(
    ("backend", "case", "dtype"),
    [
        slow(("xla", "padded", "float16"), True),
        slow(("xla", "stored", "bfloat16"), True),
        slow(("interpret", "fused_padded", "bfloat16"), True),
        slow(("interpret", "fused_splits", "float16"), True),
    ],
)
def test_both_layouts_give_the_same_in_16_bits(case, backend, dtype):
    check_layouts(case, backend, dtype)


@pytest.mark.parametrize("case", ["materialised", "packed"])
def test_h_and_states_against_float64(case):
    """What the comparison of the layouts rests on."""
    (B, NH, S, DHQK, DHHV), recipe, options = CASES[case]
    x, ids = random_inputs(7, B, NH, S, DHQK, DHHV, **recipe), ids_of(case, B, S)
    h, states = jax.jit(
        functools.partial(
            mlstm_chunkwise, return_last_states=True, layout="BTNH", backend="xla", **options
        )
    )(*in_layout("BTNH", list(x.values())), segment_ids=ids)
    expected_h, expected_states = oracle(x, ids)
    for name, actual, desired in zip(
        OUTPUTS, (swapped(h), *states), (expected_h, *expected_states), strict=True
    ):
        assert_close(actual, desired, tolerance("float32", S + DHQK), name)


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


def gradient_of(run):
    """Of a loss that is the same number in both layouts."""

    def loss(*x):
        h, states = run(*x)
        return jnp.sum(h * jnp.cos(h)) + sum(jnp.sum(jnp.sin(y)) for y in states), (h, *states)

    return jax.jit(jax.value_and_grad(loss, tuple(range(8)), has_aux=True))


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
    for name, actual, desired in zip(
        (*OUTPUTS, *NAMES), (*outputs, *gradients), (*expected[0], *expected[1]), strict=True
    ):
        assert_close(np.asarray(actual), desired, BOUND, name)


def mesh_of(kind=AUTO, shape=(4, 2), names=("x", "y")):
    return jax.make_mesh(
        shape,
        names,
        axis_types=(kind,) * len(shape),
        devices=jax.devices("cpu")[: math.prod(shape)],
    )


def sharded(arrays, mesh, specs=SPECS):
    return [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]


def collectives(compiled):
    return set(COLLECTIVE.findall(compiled.as_text()))


@pytest.mark.parametrize(
    ("kind", "backend"),
    [(AUTO, "xla"), slow((EXPLICIT, "xla"), True), slow((AUTO, "interpret"), True)],
    ids=str,
)
def test_shards_of_batch_and_heads_stay_where_they_are(inputs, expected, kind, backend):
    mesh = mesh_of(kind)
    x = sharded(inputs, mesh)
    assert not collectives(jax.jit(run_on(backend)).lower(*x).compile())
    compiled = gradient_of(run_on(backend)).lower(*x).compile()
    assert collectives(compiled) == {"all-reduce"}  # that of the loss
    result = compiled(*x)
    check(result, expected)
    for found_array, spec in zip(
        (*result[0][1], *result[1]), (SEQUENCE, *[STATE] * 3, *SPECS), strict=True
    ):
        assert found_array.sharding.is_equivalent_to(NamedSharding(mesh, spec), found_array.ndim)


def test_a_mapped_axis_stays_sharded(inputs, expected):
    x = sharded(inputs, mesh_of(EXPLICIT))

    def outputs_and_gradients(*x):
        (_, outputs), gradients = gradient_of(run_on("xla"))(*(y[None] for y in x))
        return [y[0] for y in outputs], [y[0] for y in gradients]

    compiled = jax.jit(jax.vmap(outputs_and_gradients)).lower(*x).compile()
    assert not collectives(compiled)
    outputs, gradients = compiled(*x)
    check(((None, outputs), gradients), expected)


@pytest.mark.parametrize(
    ("backend", "config"),
    [("xla", None), slow(("interpret", MATERIALISED), True), slow(("interpret", FUSED), True)],
    ids=["xla", "materialised", "fused"],
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
        mesh=mesh_of(AUTO, (4,), ("s",)),
        in_specs=(sequence,) * 5 + (P(),) * 3,
        out_specs=(sequence, P()),
        check_vma=backend != "interpret",
    )
    x = in_layout("BTNH", arrays)
    compiled = gradient_of(run).lower(*x).compile()
    assert "all-gather" not in collectives(compiled)
    assert "all-to-all" not in collectives(compiled)
    (_, (h, *states)), gradients = compiled(*x)
    whole = functools.partial(mlstm_chunkwise, **options | dict(backend="xla"))
    (_, (expected_h, *expected_states)), expected_gradients = gradient_of(whole)(*arrays)
    result = swapped(h), *states, *in_layout("BTNH", gradients)
    for name, actual, desired in zip(
        (*OUTPUTS, *NAMES), result, (expected_h, *expected_states, *expected_gradients), strict=True
    ):
        # states at the seams are rounded as those of another association of the same products
        assert_close(np.asarray(actual), np.asarray(desired), 1e-5, name)
