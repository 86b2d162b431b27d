"""Arrays and grids beyond 32 bits, lowered for a GPU, not run."""

import functools
import math
import re

import compile_report
import pytest
from oracle import (
    call_shapes,
    for_device,
    param,
    results_of,
)

from mlstm_pallas import KernelConfig, mlstm_chunkwise

# What is larger than 32 bits can number, or a grid's limits; dtype, B,NH,S,DHQK,DHV, options.
HUGE = [
    param(
        "states_and_values", "bfloat16", (1, 9, 2**20, 128, 256), config=KernelConfig(fused=False)
    ),
    param(
        "states_and_values", "bfloat16", (1, 9, 2**20, 128, 256), config=KernelConfig(fused=True)
    ),
    param("tokens", "bfloat16", (2**14, 2**7, 2**10, 16, 16), config=KernelConfig(fused=False)),
    param("tokens", "bfloat16", (2**14, 2**7, 2**10, 16, 16), config=KernelConfig(fused=True)),
    param("chunks_of_one_sequence", "float32", (1, 1, 2**20, 16, 16), chunk_size=16),
]


def pointer_offsets(ir):
    """{number of the kernel's argument: widths of the integers that are added to its pointer}."""
    splats, widths = {}, {}  # line by line, as names come again in regions beside each other
    for line in ir.splitlines():
        if result := re.search(r"(%\w+) = tt\.splat %arg(\d+) : !tt\.ptr", line):
            splats[result[1]] = result[2]
        elif result := re.search(r"tt\.addptr (%\w+), .*i(\d+)>?$", line):
            number = splats.get(result[1], result[1].removeprefix("%arg"))
            if number.isdecimal():
                widths.setdefault(int(number), set()).add(int(result[2]))
    return widths


@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype", "shape", "options"), HUGE)
def test_huge_arrays_are_addressed_with_64_bits_and_grids_are_launchable(
    case, dtype, shape, options
):
    run = results_of(functools.partial(mlstm_chunkwise, backend="triton", **options))
    with for_device("NVIDIA H200"):
        traced = run.trace(*call_shapes(*shape, dtype))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    grids = re.findall(r"grid_x = (\d+) : i32, grid_y = (\d+) : i32, grid_z = (\d+) : i32", text)
    assert len(grids) >= 6
    for x, y, z in grids:
        assert int(x) < 2**31
        assert max(int(y), int(z)) < 2**16

    huge = 0
    for call in compile_report.equations(traced.jaxpr.jaxpr, "pallas_call"):
        kernel = compile_report.lower(call)
        offsets = pointer_offsets(kernel.ir)
        for number, x in enumerate([*call.invars, *call.outvars]):
            if x.aval.size * x.aval.dtype.itemsize > 2**32:
                huge += 1
                # No offset: a workspace that the body of vectors/ does not need.
                assert offsets.get(number, {64}) == {64}, (
                    f"{kernel.name}: argument {number}, {x.aval.str_short()}"
                )
            else:
                assert x.aval.size < 2**31
    assert bool(huge) == (case != "chunks_of_one_sequence")
    assert case != "tokens" or math.prod(shape[:3]) >= 2**31
