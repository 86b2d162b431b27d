"""layout="BTNH" moves no array of q, k, v, h or their gradients, and neither does a length that
does not fill a chunk: what is compiled for a GPU has no transpose, copy, pad or slice of one."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from compile_report import on_a_hopper
from oracle import call_shapes, config_in_splits, for_device, needs_compiler, slow

from mlstm_pallas import KernelConfig, mlstm_chunkwise

MOVES = re.compile(r"^\s*(?:ROOT )?%?\S+ = (.*?) (transpose|copy|copy-start|pad|slice)\(")
SHAPE = re.compile(r"\w+\[([\d,]+)\]")

MATERIALISED, FUSED = KernelConfig(fused=False), KernelConfig(fused=True)
IN_SPLITS = config_in_splits(2, siz_b_LKV=32)
WHOLE, PADDED = (2, 4, 256, 64, 128), (2, 4, 250, 80, 96)  # B, NH, S, DHQK, DHHV
ODD = (2, 4, 509, 64, 128)
CASES = {
    "materialised": (WHOLE, dict(config=MATERIALISED)),
    "fused": (WHOLE, dict(config=FUSED)),
    "default": ((2, 8, 1024, 256, 512), {}),
    "stored": (WHOLE, dict(config=MATERIALISED, recompute_states_in_bw=False)),
    "fused_stored": (WHOLE, dict(config=FUSED, recompute_states_in_bw=False)),
    # So long that no state has as many elements as q.
    "splits": ((2, 4, 512, 64, 128), dict(config=IN_SPLITS)),
    "last_states": (WHOLE, dict(config=MATERIALISED, return_last_states=True)),
    "sigmoid": (WHOLE, dict(config=MATERIALISED, input_gate="sigmoid", normalize=False)),
    "odd": (ODD, dict(config=MATERIALISED)),
    "fused_odd": (ODD, dict(config=FUSED)),
    "splits_odd": (ODD, dict(config=IN_SPLITS)),
    "padded": (PADDED, dict(config=MATERIALISED)),
    "fused_padded": (PADDED, dict(config=FUSED)),
    "one_head": ((2, 1, 256, 64, 128), dict(config=MATERIALISED)),
}


def compiled_text(shape, dtype, backward, sharding=None, *, transposed=False, **options):
    """The compiled text of a call with arrays (B, S, NH, ...); transposed: in the other layout,
    with transposes around it."""

    def run(*x):
        x = [jnp.swapaxes(y, 1, 2) for y in x] if transposed else x
        layout = "BNTH" if transposed else "BTNH"
        h, *_ = jax.tree.leaves(mlstm_chunkwise(*x, layout=layout, backend="triton", **options))
        return jnp.swapaxes(h, 1, 2) if transposed else h

    def both(*x):
        *x, dh = x
        h, vjp = jax.vjp(run, *x)
        return h, *vjp(dh)

    x = call_shapes(*shape, dtype, "BTNH", sharding)
    x += [x[2]] * backward
    return jax.jit(both if backward else run).lower(*x).compile().as_text()


def moves(text, shape):
    """(instruction, shape) of all that moves as many elements as q, k, v or h have, or more, also
    inside fusions, where what is padded or cut for a sum is not in memory."""
    B, NH, S, DHQK, DHHV = shape
    result, fused = [], False
    for line in text.splitlines():
        if line.endswith("{"):
            fused = line.startswith("%fused")
        if (match := MOVES.match(line)) and not (
            fused and match[2] in ("pad", "slice") and "ROOT" not in line
        ):
            sizes = [math.prod(map(int, dims.split(","))) for dims in SHAPE.findall(match[1])]
            if max(sizes, default=0) >= B * NH * S * min(DHQK, DHHV):
                result.append((match[2], match[1]))
    return result


def check(text, case):
    shape, _ = CASES[case]
    result = moves(text, shape)
    assert {name for name, _ in result} <= ({"pad", "slice"} if shape == PADDED else set()), result
    assert text.count("__gpu$xla.gpu.triton") >= 3  # the kernels are there


QUICK = (
    ("materialised", "float32", True),
    ("fused", "bfloat16", True),
    ("fused_odd", "bfloat16", True),
    ("stored", "bfloat16", True),
)
# What has a backward pass has a forward pass too; a call without one keeps nothing for it.
SLOW = (
    *((case, "bfloat16", True) for case in CASES if case not in ("fused", "fused_odd", "stored")),
    ("fused_padded", "float32", True),
    ("splits_odd", "float16", True),
    *((case, "bfloat16", False) for case in ("materialised", "fused", "default")),
)


def compiled_for_an_h200(*args, **options):
    with for_device("NVIDIA H200"):
        return compiled_text(*args, on_a_hopper(), **options)


@needs_compiler
def test_the_transposes_of_a_caller_are_seen():
    """The check finds the transposes of q, k, v and h around the other layout."""
    result = moves(
        compiled_for_an_h200(WHOLE, "bfloat16", False, transposed=True, config=MATERIALISED), WHOLE
    )
    assert len(result) >= 4


@needs_compiler
@pytest.mark.parametrize(("case", "dtype", "backward"), [*QUICK, *(slow(*x) for x in SLOW)])
def test_nothing_moves_in_what_is_compiled_without_a_gpu(case, dtype, backward):
    shape, options = CASES[case]
    check(compiled_for_an_h200(shape, dtype, backward, **options), case)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype", "backward"), [*QUICK, *SLOW[::4]])
def test_nothing_moves_in_what_is_compiled_on_the_gpu(case, dtype, backward):
    """The same program, with what XLA decides by measurements on the GPU."""
    shape, options = CASES[case]
    check(compiled_text(shape, dtype, backward, **options), case)
