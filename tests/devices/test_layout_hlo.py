"""layout="BTNH" moves no array of q, k, v, h or their gradients, and neither does a length that
does not fill a chunk or a head size of 16 * n: what is compiled for a GPU has no transpose, copy,
reversal, pad or slice of one; and nor does reverse=True. What is traced has no transpose either, on
one device or on shards."""

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import jax
import pytest
from compile_report import equations, on_a_hopper
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import (
    call_shapes,
    config_in_splits,
    for_device,
    mesh_for,
    needs_compiler,
    slow,
    swapped,
)

from mlstm_pallas import KernelConfig, distributed, mlstm_chunkwise

MOVES = re.compile(r"^\s*(?:ROOT )?%?\S+ = (.*?) (transpose|copy|copy-start|pad|slice|reverse)\(")
SHAPE = re.compile(r"\w+\[([\d,]+)\]")

CONFIGS = {
    "materialised": KernelConfig(fused=False),
    "fused": KernelConfig(fused=True),
    "splits": config_in_splits(2, siz_b_L=32),
    "default": None,
}


class Case(NamedTuple):
    config: str
    shape: tuple[int, ...]  # B, NH, S, DHQK, DHV
    options: Mapping[str, Any] = MappingProxyType({})


# The splits are so long that no state has as many elements as q.
CASES = {
    "materialised": Case("materialised", (2, 4, 256, 64, 128)),
    "fused": Case("fused", (2, 4, 256, 64, 128)),
    "default": Case("default", (2, 8, 1024, 256, 512)),
    "stored": Case("materialised", (2, 4, 256, 64, 128), dict(recompute_states_in_bw=False)),
    "fused_odd": Case("fused", (2, 4, 509, 64, 128)),
    "partial": Case("materialised", (2, 4, 509, 96, 192)),
    "fused_partial": Case("fused", (2, 4, 250, 96, 192)),
    "fused_partial_BNTH": Case("fused", (2, 4, 250, 80, 112), dict(layout="BNTH")),
    "fused_padded": Case("fused", (2, 4, 250, 72, 100)),
    "one_head": Case("materialised", (2, 1, 256, 64, 128)),
    "fused_reverse": Case("fused", (2, 4, 250, 64, 128), dict(reverse=True, layout="BNTH")),
    "splits_reverse": Case(
        "splits", (2, 4, 509, 64, 128), dict(reverse=True, return_last_states=True)
    ),
}


def compiled_text(case, dtype, backward, sharding=None, function=mlstm_chunkwise):
    """The compiled text of a call with arrays (B, S, NH, ...)."""
    config, shape, options = CASES[case]
    options = dict(layout="BTNH", backend="triton", config=CONFIGS[config]) | options

    def run(*x):
        return jax.tree.leaves(function(*x, **options))[0]

    def both(dh, *x):
        h, vjp = jax.vjp(run, *x)
        return h, vjp(dh)

    x = call_shapes(*shape, dtype, options["layout"], sharding)
    traced = jax.jit(both).trace(x[2], *x) if backward else jax.jit(run).trace(*x)
    return traced.lower().compile().as_text()


def moves(text, shape):
    """(instruction, shape) of all that moves as many elements as q, k, v or h have, or more, also
    inside fusions, where what is padded or cut for a sum is not in memory."""
    B, NH, S, DHQK, DHV = shape
    result, fused = [], False
    for line in text.splitlines():
        if line.endswith("{"):
            fused = line.startswith("%fused")
        if (match := MOVES.match(line)) and not (
            fused and match[2] in ("pad", "slice") and "ROOT" not in line
        ):
            sizes = [math.prod(map(int, dims.split(","))) for dims in SHAPE.findall(match[1])]
            if max(sizes, default=0) >= B * NH * S * min(DHQK, DHV):
                result.append((match[2], match[1]))
    return result


def check(text, case):
    result = moves(text, CASES[case].shape)
    assert {name for name, _ in result} <= ({"pad", "slice"} if "padded" in case else set()), result
    assert text.count("__gpu$xla.gpu.triton") >= 3  # the kernels are there


QUICK = (
    ("materialised", "float32", True),
    ("fused", "bfloat16", True),
    ("fused_odd", "bfloat16", True),
    ("fused_partial", "bfloat16", True),
    ("stored", "bfloat16", True),
    ("fused_reverse", "bfloat16", True),
)
# What has a backward pass has a forward pass too; a call without one keeps nothing for it. The
# first three run on a GPU, too.
SLOW = (
    ("default", "bfloat16", True),
    ("partial", "bfloat16", True),
    ("splits_reverse", "float16", True),
    ("fused_partial_BNTH", "bfloat16", True),
    ("one_head", "bfloat16", True),
    ("fused_padded", "float32", True),
    ("materialised", "bfloat16", False),
)


def compiled_for_an_h200(*args, **options):
    """The kernels have no body, whose compilation takes four fifths of the time: what XLA does
    around a kernel depends on its operands and results alone."""
    call = pl.pallas_call

    def without_a_body(kernel, **of_call):
        return call(lambda *refs: None, **of_call)

    with for_device("NVIDIA H200"), mock.patch.object(pl, "pallas_call", without_a_body):
        return compiled_text(*args, on_a_hopper(), **options)


@needs_compiler
def test_the_transposes_of_a_caller_are_seen():
    """The check finds the transposes of q, k, v and h around the other layout."""

    def transposed(*x, **options):
        return swapped(mlstm_chunkwise(*map(swapped, x), **options | {"layout": "BNTH"}))

    text = compiled_for_an_h200("materialised", "bfloat16", False, function=transposed)
    assert len(moves(text, CASES["materialised"].shape)) >= 4


@needs_compiler
@pytest.mark.parametrize(("case", "dtype", "backward"), [*QUICK, *(slow(*x) for x in SLOW)])
def test_nothing_moves_in_what_is_compiled_without_a_gpu(case, dtype, backward):
    check(compiled_for_an_h200(case, dtype, backward), case)


def mapped(call):
    """The call, of each batch entry."""
    return jax.vmap(lambda *x: call(*(y[None] for y in x))[0])


def transposed_inside(call):
    """The call with the other layout, for this one."""
    return lambda *x: swapped(call(*map(swapped, x), layout="BNTH"))


TWO_AXES = (2, 2), "xy"
MESHES = {
    "device": mesh_for("NVIDIA H200"),
    "automatic": mesh_for("NVIDIA H200", *TWO_AXES),
    "explicit": mesh_for("NVIDIA H200", *TWO_AXES, AxisType.Explicit),
}


def transposes(case, mesh, transform):
    """How many arrays as large as q of a shard the jaxpr of both passes transposes."""
    config, (B, NH, S, DHQK, DHV), options = CASES[case]
    options = dict(layout="BTNH", backend="triton", config=CONFIGS[config]) | options
    sharding = NamedSharding(mesh, P("x", None, "y")) if mesh.explicit_axes else None

    def run(*x, **others):
        return jax.tree.leaves(mlstm_chunkwise(*x, **options | others))[0]

    def both(*x):
        h, vjp = jax.vjp(transform(run), *x)
        return vjp(h)

    x = call_shapes(B, NH, S, DHQK, DHV, "bfloat16", "BTNH", sharding)
    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = jax.make_jaxpr(both)(*x)
    assert [*equations(jaxpr, "pallas_call")]
    of_shard = B * NH * S * min(DHQK, DHV) // math.prod(mesh.axis_sizes)
    return sum(y.outvars[0].aval.size >= of_shard for y in equations(jaxpr, "transpose"))


@pytest.mark.quick("device-materialised-call")
@pytest.mark.parametrize("transform", [lambda call: call, mapped], ids=["call", "vmap"])
@pytest.mark.parametrize(
    ("mesh", "case"),
    [("device", "materialised"), ("automatic", "fused_odd"), ("explicit", "fused_partial")],
)
def test_nothing_is_transposed_in_what_is_traced(mesh, case, transform):
    assert transposes(case, MESHES[mesh], transform) == 0


def test_what_is_transposed_in_a_jaxpr_is_seen():
    assert transposes("materialised", MESHES["device"], transposed_inside) >= 8


@needs_compiler
def test_dC_of_later_shards_is_added_where_the_states_are():
    """XLA writes the whole array if it knows the index at which it reads a part."""
    shapes = ((8, 64, 32, 64), "bfloat16"), ((8, 64), "float32"), ((8, 32, 64), "float32")
    sharding = on_a_hopper()
    x = [jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes]
    text = jax.jit(distributed._with_later_shards, donate_argnums=0).lower(*x).compile().as_text()
    reads = re.findall(r"= bf16\[\S+ (slice|dynamic-slice|copy)\(", text)
    assert reads == ["dynamic-slice"] * 2, text  # of the last chunks, and of the others


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype", "backward"), [*QUICK, *SLOW[:3]])
def test_nothing_moves_in_what_is_compiled_on_the_gpu(case, dtype, backward):
    """The same program, with what XLA decides by measurements on the GPU."""
    check(compiled_text(case, dtype, backward), case)
