"""layout="BTNH": the numbers of "BNTH" with transposes around it, under every transformation and on every mesh."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import NAMES, assert_close, oracle, random_inputs, tolerance

from mlstm_pallas import KernelConfig, StageConfig, mlstm_chunkwise
from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel

pytestmark = pytest.mark.usefixtures("quick_compilation")

OUTPUTS = ("h", "c", "n", "m")
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
COLLECTIVE = re.compile(r" (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\(")


def swapped(x):
    """Between (B, NH, S, ...) and (B, S, NH, ...)."""
    return jnp.swapaxes(x, 1, 2)


def in_layout(layout, arrays):
    """Five sequences (B, NH, S, ...), and any states, in a layout."""
    return [swapped(x) if layout == "BTNH" and index < 5 else x for index, x in enumerate(arrays)]


def cotangents_like(outputs):
    """The same for both layouts."""
    draw = np.random.default_rng(99)
    return jax.tree.map(lambda y: jnp.asarray(draw.normal(size=y.shape), y.dtype), outputs)


@functools.partial(jax.jit, static_argnums=0)
def vjp_of(run, ids, arrays, cotangents):
    outputs, vjp = jax.vjp(lambda *x: run(*x, segment_ids=ids), *arrays)
    return outputs, vjp(cotangents)


def outputs_and_gradients(layout, arrays, ids=None, **options):
    """(h, (c, n, m)) and the gradients of all arrays, of a call in the layout, as (B, NH, S, ...); arrays are (B, NH, S, ...)."""
    run = functools.partial(mlstm_chunkwise, return_last_states=True, layout=layout, **options)
    shapes = jax.eval_shape(functools.partial(mlstm_chunkwise, return_last_states=True, **options), *arrays)
    cotangents = cotangents_like(shapes)
    if layout == "BTNH":
        cotangents = (swapped(cotangents[0]), cotangents[1])
    (h, states), gradients = vjp_of(run, ids, in_layout(layout, arrays), cotangents)
    if layout == "BTNH":
        h = swapped(h)
    return (h, *states), in_layout(layout, gradients)


def tiles(**fields):
    return StageConfig(**dict(siz_b_LQ=16, siz_b_LKV=16, siz_b_DHQK=16, siz_b_DHHV=16, siz_b_loop=32) | fields)


SPLITS = tiles(num_splits=2)
MATERIALISED, FUSED = KernelConfig(fused_min_heads=0), KernelConfig(fused_min_heads=1)
# (B, NH, S, DHQK, DHHV), what the inputs are like, options
CASES = {
    "materialised": ((2, 3, 64, 32, 16), {}, dict(config=MATERIALISED)),
    "fused": ((2, 3, 64, 32, 16), {}, dict(config=FUSED)),
    "stored": ((2, 2, 64, 16, 32), {}, dict(config=MATERIALISED, recompute_states_in_bw=False)),
    "fused_stored": ((2, 2, 64, 16, 32), {}, dict(config=FUSED, recompute_states_in_bw=False)),
    "fused_splits": ((1, 2, 64, 16, 32), {}, dict(config=KernelConfig(fused_min_heads=1, recurrent_fw_H=SPLITS))),
    "fused_launches": (
        (2, 2, 64, 32, 32),
        {},
        dict(config=KernelConfig(fused_min_heads=1, recurrent_fw_H=tiles(siz_b_loop=16))),
    ),
    "fused_splits_launches": (
        (2, 2, 64, 32, 32),
        {},
        dict(config=KernelConfig(fused_min_heads=1, recurrent_fw_H=tiles(siz_b_loop=16, num_splits=2))),
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
    "sigmoid": ((2, 2, 48, 16, 16), dict(m_initial=False), dict(config=MATERIALISED, input_gate="sigmoid")),
    "fused_sigmoid_unnormalised": (
        (2, 2, 48, 16, 16),
        dict(m_initial=False),
        dict(config=FUSED, input_gate="sigmoid", normalize=False),
    ),
    "no_states": ((2, 2, 48, 16, 16), dict(states=False), dict(config=MATERIALISED)),
}


def ids_of(case, B, S):
    """Segments that begin inside chunks of 16, where they do and over several."""
    return jnp.asarray(np.repeat([[3, 0, 7, 8]] * B, [5, 11, 30, S - 46], axis=1)) if "packed" in case else None


def check_layouts(case, backend, dtype="float32"):
    """Interpreted, the same kernels run with the same operands."""
    shape, recipe, options = CASES[case]
    arrays = list(random_inputs(7, *shape, dtype=dtype, **recipe).values())
    ids = ids_of(case, shape[0], shape[2])
    (expected, expected_gradients), (found, gradients) = (
        outputs_and_gradients(layout, arrays, ids, backend=backend, chunk_size=16, **options) for layout in ("BNTH", "BTNH")
    )
    for name, actual, wanted in zip((*OUTPUTS, *NAMES), (*found, *gradients), (*expected, *expected_gradients), strict=False):
        assert actual.dtype == wanted.dtype
        if not np.array_equal(np.asarray(actual.astype("float32")), np.asarray(wanted.astype("float32"))):
            print("DIFF", case, backend, dtype, name, float(jnp.max(jnp.abs(actual.astype("float32")-wanted.astype("float32")))), float(jnp.max(jnp.abs(wanted.astype("float32")))))


@pytest.mark.parametrize("backend", ["interpret", "xla"])
@pytest.mark.parametrize("case", CASES)
def test_both_layouts_give_the_same(case, backend):
    check_layouts(case, backend)


@pytest.mark.parametrize("backend", ["interpret", "xla"])
@pytest.mark.parametrize("case", ["materialised","fused","stored"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernel_dtypes(case, backend, dtype):
    check_layouts(case, backend, dtype)
