"""The table of plans, ``plans.txt``: calls, each with all that is planned for it.

A block is a call and its plan. This writes all plans anew, for a review of the difference:

    PYTHONPATH=. python tests/plans.py

It needs a jax that has the Mosaic GPU kernels. A new problem is a shape in CALLS.
"""

import dataclasses
import functools
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import command
import shapes
from oracle import shown
from stage_calls import UNKNOWN, known_gpu, make_problem, spec_of

from mlstm_pallas import KernelConfig
from mlstm_pallas import plan as plan_of
from mlstm_pallas.planning.call_spec import launch_of

TABLE = Path(__file__).with_suffix(".txt")
LEFT_OUT = "stage", "backward", "launches"


def fields(x):
    return " ".join(f"{name}={value}" for name, value in vars(x).items() if name not in LEFT_OUT)


def plan(sizes, gpu="NVIDIA H200", dtype="bfloat16", **options):
    """sizes: B, NH, S, DHQK, DHV."""
    names = zip(("B", "NH", "S", "DHQK", "DHV"), sizes, strict=True)
    return plan_of(**dict(names), gpu=gpu, dtype=dtype, **options)


def plan_lines(*args, **options):
    x = plan(*args, **options)
    passes = "forward", "backward"
    launches = (f"{passes[y.backward]} {y.stage} {fields(y)}" for y in x.launches)
    return [fields(x), *launches]


def launch_lines(name, sizes, gpu, dtype="bfloat16", backend="triton", **config):
    """Of a kernel that is in no plan, or for a GPU that is not known."""
    *q_sizes, DHV = sizes
    facts, config = (gpu and known_gpu(gpu)) or UNKNOWN, KernelConfig(**config)
    spec = spec_of(sizes, dtype, facts, backend, config=config)
    if name in ("recurrent_step", "ring_step"):  # whose heads are not padded
        p = make_problem(q_sizes, DHV, 1, pad_heads=False)
        spec = dataclasses.replace(spec, problem=p)
    x = launch_of(spec, name, spec.lowering)
    return [f"{fields(x)} grid={x.tiles and x.tiles.grid(x.problem)}"]


def printed_lines(*args, **options):
    return str(plan(*args, **options)).splitlines()


H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
A100, B200, RTX4090 = "NVIDIA A100-SXM4-80GB", "NVIDIA B200", "NVIDIA GeForce RTX 4090"
MOSAIC, FLOAT32 = dict(backend="mosaic_gpu"), dict(dtype="float32")
STORED = dict(recompute_states_in_bw=False)
PUBLISHED = "7b-8k tfla-8k b1-8k small-8k few-2k x125m-2k x760m-2k x2b7-2k vil-t small-64 small-128"
CALLS = {}  # by the first line of a block, functions that return the others


def add(what, gpu, names, **options):
    """A call of each shape; what: a function above, or the name of a kernel."""
    function = functools.partial(launch_lines, what) if isinstance(what, str) else what
    for name in names.split():
        [sizes] = shapes.parse(name).values()
        head = filter(None, (shown(what).strip('"'), gpu, name, shown(options)[5:-1]))
        CALLS[" ".join(head)] = functools.partial(function, tuple(sizes), gpu, **options)


def config(**options):
    return dict(config=KernelConfig(**options))


add(plan_lines, H200, PUBLISHED)
add(plan_lines, H200, PUBLISHED, **MOSAIC)
add(plan_lines, A100, "7b-8k tfla-8k small-8k small-64 1x16x8192x256x512 8x8x4096x128x256")
add(plan_lines, A100, "7b-8k", **FLOAT32)
add(plan_lines, A100, "8x64x8192x256x32", **STORED)
add(plan_lines, H200, "1x1x65536x64x64 1x4x2048x48x80 1x1x300x256x512")
add(plan_lines, H200, "1x1x1x256x512", **config(chunk_size=1024))
add(plan_lines, H200, "4x8x8320x256x512", **config(chunk_size=128, fused=True, num_splits=4))
splits = dict(fused=True, num_splits=4)
long = "1x8x8192x128x512 1x8x8192x512x512"
add(plan_lines, H200, "1x8x8320x128x512", **STORED, **config(chunk_size=128, **splits))
add(plan_lines, H200, long, **STORED, **config(chunk_size=256, **splits))
tiles = dict(triton_parallel_fw_H=dict(siz_b_LQ=16, num_warps=8))
tiles |= dict(triton_recurrent_fw_C=dict(num_splits=8))
add(plan_lines, H200, "4x8x8192x256x512", **config(fused=False, **tiles))
shapes_of_mosaic = "1x2x2048x256x512 1x1x65536x128x128 2x4x2048x192x384 32x4x2048x160x320"
add(plan_lines, H200, shapes_of_mosaic, **MOSAIC)
add(plan_lines, H100, "8x8x4096x512x512 2x4x2000x32x64", **MOSAIC)
add(plan_lines, H100, "8x8x4096x512x512", **MOSAIC, **FLOAT32)
add(plan_lines, H100, "8x8x4096x128x128", **MOSAIC, **STORED)
add(plan_lines, H200, "7b-8k", **MOSAIC, num_segments=2000)
add(plan_lines, H200, "1x8x1001x128x256", num_segments=40)
add(printed_lines, H200, "b1-8k")
add(printed_lines, A100, "4x4x1000x64x64", **FLOAT32)
# Less shared memory, more SMs.
add(plan_lines, RTX4090, "1x2x8192x512x1024")
add(plan_lines, RTX4090, "1x1x1x8x24", **FLOAT32)
add(plan_lines, B200, "1x16x16384x128x128")
add(plan_lines, B200, "2x2x512x80x96", dtype="float16", num_segments=3)
add(printed_lines, B200, "2x4x1001x256x512", num_segments=13)
# Kernels that no plan shows.
add("recurrent_step", H200, "1gib")
add("recurrent_step", H200, "1gib", **FLOAT32)
add("recurrent_step", A100, "512x16x1x1024x1024")
add("recurrent_step", RTX4090, "512x16x1x64x72")
step = dict(triton_recurrent_step=dict(siz_b_DHHV=128))
add("recurrent_step", RTX4090, "4x4x1x8x24", **FLOAT32, **step)
add("ring_step", H200, "256mib 64x8x4x256x512 1x8x4x256x512", **FLOAT32)
add("step_sums", H200, "b1-8k", **MOSAIC)
add("vector_states", H200, "1x1x131072x128x256 1x1x8192x80x96", **MOSAIC)
add("recurrent_fw_C", H200, "1x64x8192x256x512 1x16x8192x256x512", **MOSAIC, chunk_size=256)
add("recurrent_bw_dC", H200, "1x64x8192x256x512 1x3x8192x256x512", **MOSAIC, chunk_size=256)
add("recurrent_fw_C", H200, "1x512x8192x256x512 1x16x8192x256x512", chunk_size=128)
# GPUs that are not known.
add("chunk_gates", None, "1x1x4096x128x128 1x1x1024x256x512", backend="xla")
add("parallel_fw_H", None, "1x1x640x256x512")
add("parallel_fw_H", None, "8x8x8192x100x200", **FLOAT32, backend="interpret")
add("parallel_bw_dP", None, "7b-8k", **MOSAIC)
too_large = dict(triton_parallel_fw_H=dict(siz_b_LQ=128, siz_b_DHHV=256))
add("parallel_fw_H", H200, "1x8x128x16x32", **FLOAT32, **MOSAIC, **too_large)


def table():
    """The blocks of lines in the file."""
    return [block.splitlines() for block in TABLE.read_text().strip().split("\n\n")]


def write(_):
    blocks = ("\n".join([head, *lines()]) for head, lines in CALLS.items())
    TABLE.write_text("\n\n".join(blocks) + "\n")


if __name__ == "__main__":
    command.main(lambda define: None, write)
