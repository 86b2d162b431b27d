"""The table of plans, ``plans.txt``: calls, each with all that is planned for it.

A block is a call and its plan. This writes all plans anew, for a review of the difference:

    PYTHONPATH=. python tests/plans.py

It needs a jax that has the Mosaic GPU kernels. A new problem is a line of CALLS.
"""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import command
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


class Call(NamedTuple):
    """A call of one of the functions above, which are named without "_lines"."""

    function: Callable[..., list[str]]
    args: tuple[Any, ...]
    options: dict[str, Any]

    @classmethod
    def of(cls, function, *args, **options):
        return cls(function, args, options)

    def __str__(self):
        arguments = filter(None, (*map(shown, self.args), shown(self.options)[5:-1]))
        return f"{self.function.__name__.removesuffix('_lines')}({', '.join(arguments)})"

    def lines(self):
        return [str(self), *self.function(*self.args, **self.options)]


CALLS = [
    Call.of(plan_lines, (8, 8, 8192, 256, 512), "NVIDIA A100-SXM4-80GB"),
    Call.of(plan_lines, (8, 8, 8192, 256, 512), "NVIDIA A100-SXM4-80GB", "float32"),
    Call.of(plan_lines, (8, 16, 2048, 64, 64), "NVIDIA A100-SXM4-80GB"),
    Call.of(plan_lines, (8, 8, 4096, 128, 128), "NVIDIA A100-SXM4-80GB", "float16"),
    Call.of(plan_lines, (8, 8, 4096, 128, 256), "NVIDIA A100-SXM4-80GB"),
    Call.of(plan_lines, (4, 4, 1000, 64, 64), "NVIDIA A100-SXM4-80GB", "float32"),
    Call.of(plan_lines, (1, 4, 8192, 256, 512), "NVIDIA A100-SXM4-80GB"),
    Call.of(plan_lines, (8, 8, 8192, 256, 512), "NVIDIA GeForce RTX 4090"),
    Call.of(plan_lines, (8, 8, 8192, 256, 512), "NVIDIA GeForce RTX 4090", "float32"),
    Call.of(plan_lines, (8, 16, 4096, 64, 128), "NVIDIA GeForce RTX 4090"),
    Call.of(plan_lines, (8, 16, 4096, 128, 256), "NVIDIA GeForce RTX 4090"),
    Call.of(plan_lines, (2, 6, 4096, 192, 384), "NVIDIA GeForce RTX 4090"),
    Call.of(plan_lines, (1, 2, 8192, 512, 1024), "NVIDIA GeForce RTX 4090"),
    Call.of(plan_lines, (1, 1, 1, 8, 24), "NVIDIA GeForce RTX 4090", "float32"),
    Call.of(plan_lines, (8, 16, 8192, 128, 256), "NVIDIA H100 80GB HBM3"),
    Call.of(plan_lines, (8, 16, 8192, 128, 256), "NVIDIA H100 80GB HBM3", backend="mosaic_gpu"),
    Call.of(
        plan_lines,
        (8, 8, 4096, 128, 128),
        "NVIDIA H100 80GB HBM3",
        backend="mosaic_gpu",
        recompute_states_in_bw=False,
    ),
    Call.of(plan_lines, (8, 8, 4096, 512, 512), "NVIDIA H100 80GB HBM3", backend="mosaic_gpu"),
    Call.of(
        plan_lines, (8, 8, 4096, 512, 512), "NVIDIA H100 80GB HBM3", "float32", backend="mosaic_gpu"
    ),
    Call.of(plan_lines, (2, 4, 2000, 32, 64), "NVIDIA H100 80GB HBM3", backend="mosaic_gpu"),
    Call.of(plan_lines, (8, 8, 8192, 256, 512), "NVIDIA H200"),
    Call.of(plan_lines, (8, 8, 8192, 256, 512), "NVIDIA H200", backend="mosaic_gpu"),
    Call.of(
        plan_lines, (8, 8, 8192, 256, 512), "NVIDIA H200", "float32", recompute_states_in_bw=False
    ),
    Call.of(plan_lines, (1, 8, 8192, 256, 512), "NVIDIA H200", layout="BTNH"),
    Call.of(plan_lines, (1, 8, 8192, 256, 512), "NVIDIA H200", recompute_states_in_bw=False),
    Call.of(plan_lines, (1, 8, 8192, 256, 512), "NVIDIA H200", "float16", backend="mosaic_gpu"),
    Call.of(plan_lines, (1, 4, 4096, 256, 512), "NVIDIA H200"),
    Call.of(plan_lines, (1, 4, 8192, 256, 512), "NVIDIA H200"),
    Call.of(plan_lines, (1, 8, 8256, 256, 512), "NVIDIA H200"),
    Call.of(plan_lines, (1, 2, 2048, 256, 512), "NVIDIA H200", backend="mosaic_gpu"),
    Call.of(plan_lines, (1, 1, 65536, 64, 64), "NVIDIA H200"),
    Call.of(plan_lines, (1, 1, 65536, 128, 128), "NVIDIA H200", backend="mosaic_gpu"),
    Call.of(plan_lines, (2, 4, 2048, 192, 384), "NVIDIA H200", backend="mosaic_gpu"),
    Call.of(
        plan_lines,
        (4, 8, 8320, 256, 512),
        "NVIDIA H200",
        config=KernelConfig(chunk_size=128, fused=True, num_splits=4),
    ),
    Call.of(
        plan_lines,
        (4, 8, 8192, 256, 512),
        "NVIDIA H200",
        config=KernelConfig(
            fused=False,
            triton_parallel_fw_H=dict(siz_b_LQ=16, num_warps=8),
            triton_recurrent_fw_C=dict(num_splits=8),
        ),
    ),
    Call.of(plan_lines, (1, 8, 1001, 128, 256), "NVIDIA H200", num_segments=40),
    Call.of(
        plan_lines, (2, 4, 1001, 256, 512), "NVIDIA H200", num_segments=13, backend="mosaic_gpu"
    ),
    Call.of(plan_lines, (32, 4, 2048, 96, 192), "NVIDIA H200"),
    Call.of(plan_lines, (256, 4, 196, 96, 96), "NVIDIA H200"),
    Call.of(plan_lines, (8, 4, 2048, 320, 640), "NVIDIA H200"),
    Call.of(plan_lines, (1, 4, 2048, 48, 80), "NVIDIA H200"),
    Call.of(plan_lines, (1, 4, 2048, 112, 192), "NVIDIA H200", config=KernelConfig(fused=False)),
    Call.of(plan_lines, (1, 4, 2048, 72, 136), "NVIDIA H200", "float32"),
    Call.of(plan_lines, (8, 8, 8192, 256, 512), "NVIDIA B200"),
    Call.of(plan_lines, (8, 8, 8192, 256, 512), "NVIDIA B200", "float32"),
    Call.of(plan_lines, (16, 16, 1024, 64, 64), "NVIDIA B200"),
    Call.of(plan_lines, (2, 2, 512, 80, 96), "NVIDIA B200", "float16", num_segments=3),
    Call.of(plan_lines, (1, 16, 16384, 128, 128), "NVIDIA B200"),
    Call.of(plan_lines, (1, 1, 65536, 1024, 1024), "NVIDIA B200"),
    Call.of(plan_lines, (8, 8, 4096, 128, 256), "NVIDIA H200", config=KernelConfig(fused=False)),
    Call.of(
        plan_lines,
        (8, 8, 4096, 128, 256),
        "NVIDIA B200",
        "float32",
        config=KernelConfig(fused=False),
    ),
    Call.of(
        plan_lines,
        (8, 8, 4096, 256, 256),
        "NVIDIA GeForce RTX 4090",
        config=KernelConfig(fused=False),
    ),
    Call.of(
        plan_lines,
        (8, 8, 4096, 256, 256),
        "NVIDIA A100-SXM4-80GB",
        config=KernelConfig(fused=False),
    ),
    Call.of(
        plan_lines, (8, 64, 8192, 256, 32), "NVIDIA A100-SXM4-80GB", recompute_states_in_bw=False
    ),
    Call.of(
        plan_lines,
        (1, 8, 8192, 128, 512),
        "NVIDIA H200",
        recompute_states_in_bw=False,
        config=KernelConfig(chunk_size=256, fused=True, num_splits=4),
    ),
    Call.of(
        plan_lines,
        (1, 8, 8320, 128, 512),
        "NVIDIA H200",
        recompute_states_in_bw=False,
        config=KernelConfig(chunk_size=128, fused=True, num_splits=4),
    ),
    Call.of(
        plan_lines,
        (1, 8, 8192, 512, 512),
        "NVIDIA H200",
        recompute_states_in_bw=False,
        config=KernelConfig(chunk_size=256, fused=True, num_splits=4),
    ),
    Call.of(plan_lines, (1, 1, 300, 256, 512), "NVIDIA H200"),
    Call.of(launch_lines, "recurrent_step", (256, 8, 1, 256, 512), "NVIDIA H200"),
    Call.of(launch_lines, "recurrent_step", (1, 8, 1, 256, 512), "NVIDIA H200"),
    Call.of(launch_lines, "recurrent_step", (256, 8, 1, 256, 512), "NVIDIA H200", "float32"),
    Call.of(launch_lines, "recurrent_step", (64, 8, 1, 1024, 1024), "NVIDIA B200", "float32"),
    Call.of(
        launch_lines, "recurrent_step", (1, 8, 1, 256, 512), "NVIDIA A100-SXM4-80GB", "float32"
    ),
    Call.of(launch_lines, "recurrent_step", (512, 16, 1, 1024, 1024), "NVIDIA A100-SXM4-80GB"),
    Call.of(launch_lines, "recurrent_step", (512, 16, 1, 64, 72), "NVIDIA GeForce RTX 4090"),
    Call.of(
        launch_lines,
        "recurrent_step",
        (4, 4, 1, 8, 24),
        "NVIDIA GeForce RTX 4090",
        "float32",
        triton_recurrent_step=dict(siz_b_DHHV=128),
    ),
    Call.of(launch_lines, "ring_step", (64, 8, 1, 256, 512), "NVIDIA H200", "float32"),
    Call.of(launch_lines, "ring_step", (64, 8, 4, 256, 512), "NVIDIA H200", "float32"),
    Call.of(launch_lines, "ring_step", (64, 8, 4, 256, 512), "NVIDIA H200"),
    Call.of(launch_lines, "ring_step", (1, 8, 4, 256, 512), "NVIDIA H200", "float32"),
    Call.of(launch_lines, "ring_step", (4, 8, 1, 256, 512), "NVIDIA H200", "float32"),
    Call.of(launch_lines, "ring_step", (4, 8, 4, 256, 512), "NVIDIA H200", "float32"),
    Call.of(launch_lines, "ring_step", (4, 8, 4, 256, 512), "NVIDIA H200"),
    Call.of(launch_lines, "step_sums", (1, 8, 8192, 256, 512), "NVIDIA H200"),
    Call.of(launch_lines, "step_sums", (1, 8, 8192, 256, 512), "NVIDIA H200", backend="mosaic_gpu"),
    Call.of(
        launch_lines, "vector_states", (8, 8, 8192, 256, 512), "NVIDIA H200", backend="mosaic_gpu"
    ),
    Call.of(
        launch_lines, "vector_states", (1, 1, 131072, 128, 256), "NVIDIA H200", backend="mosaic_gpu"
    ),
    Call.of(
        launch_lines, "vector_states", (1, 8, 131072, 256, 256), "NVIDIA H200", backend="mosaic_gpu"
    ),
    Call.of(
        launch_lines, "vector_states", (1, 1, 8192, 128, 128), "NVIDIA H200", backend="mosaic_gpu"
    ),
    Call.of(
        launch_lines, "vector_states", (1, 1, 8192, 80, 96), "NVIDIA H200", backend="mosaic_gpu"
    ),
    Call.of(
        launch_lines, "step_gradients", (1, 8, 8192, 256, 512), "NVIDIA H200", backend="mosaic_gpu"
    ),
    Call.of(launch_lines, "chunk_gates", (1, 1, 4096, 128, 128), None, backend="xla"),
    Call.of(launch_lines, "chunk_gates", (1, 1, 1024, 256, 512), None, backend="xla"),
    Call.of(launch_lines, "chunk_gates", (1, 1, 640, 256, 512), None, backend="xla"),
    Call.of(launch_lines, "chunk_gates", (1, 1, 300, 256, 512), None, backend="xla"),
    Call.of(launch_lines, "parallel_fw_H", (1, 1, 640, 256, 512), None),
    Call.of(
        launch_lines, "parallel_fw_H", (8, 8, 8192, 100, 200), None, "float32", backend="interpret"
    ),
    Call.of(launch_lines, "parallel_bw_dP", (8, 8, 8192, 256, 512), None, backend="mosaic_gpu"),
    Call.of(
        launch_lines,
        "parallel_fw_H",
        (1, 8, 128, 16, 32),
        "NVIDIA H200",
        "float32",
        "mosaic_gpu",
        triton_parallel_fw_H=dict(siz_b_LQ=128, siz_b_DHHV=256),
    ),
    Call.of(printed_lines, (1, 8, 8192, 256, 512), "NVIDIA H200"),
    Call.of(printed_lines, (8, 16, 2048, 64, 128), "NVIDIA H200", backend="mosaic_gpu"),
    Call.of(printed_lines, (4, 4, 1000, 64, 64), "NVIDIA A100-SXM4-80GB", "float32"),
    Call.of(printed_lines, (2, 4, 1001, 256, 512), "NVIDIA B200", num_segments=13),
    Call.of(plan_lines, (1, 16, 8192, 256, 512), "NVIDIA A100-SXM4-80GB"),
    Call.of(plan_lines, (1, 17, 8192, 256, 512), "NVIDIA A100-SXM4-80GB"),
    Call.of(plan_lines, (8, 32, 4096, 64, 128), "NVIDIA GeForce RTX 4090"),
    Call.of(launch_lines, "recurrent_step", (100, 1, 1, 256, 512), "NVIDIA H200", "float32"),
    Call.of(
        launch_lines,
        "recurrent_fw_C",
        (1, 64, 8192, 256, 512),
        "NVIDIA H200",
        backend="mosaic_gpu",
        chunk_size=256,
    ),
    Call.of(
        launch_lines,
        "recurrent_bw_dC",
        (1, 64, 8192, 256, 512),
        "NVIDIA H200",
        backend="mosaic_gpu",
        chunk_size=256,
    ),
    Call.of(
        launch_lines,
        "recurrent_fw_C",
        (1, 16, 8192, 256, 512),
        "NVIDIA H200",
        backend="mosaic_gpu",
        chunk_size=256,
    ),
    Call.of(
        launch_lines,
        "recurrent_bw_dC",
        (1, 16, 8192, 256, 512),
        "NVIDIA H200",
        backend="mosaic_gpu",
        chunk_size=256,
    ),
    Call.of(
        launch_lines,
        "recurrent_fw_C",
        (1, 3, 8192, 256, 512),
        "NVIDIA H200",
        backend="mosaic_gpu",
        chunk_size=256,
    ),
    Call.of(
        launch_lines,
        "recurrent_bw_dC",
        (1, 3, 8192, 256, 512),
        "NVIDIA H200",
        backend="mosaic_gpu",
        chunk_size=256,
    ),
    Call.of(
        launch_lines,
        "recurrent_fw_C",
        (1, 512, 8192, 192, 128),
        "NVIDIA H200",
        backend="mosaic_gpu",
        chunk_size=256,
    ),
    Call.of(
        launch_lines,
        "recurrent_bw_dC",
        (1, 512, 8192, 192, 128),
        "NVIDIA H200",
        backend="mosaic_gpu",
        chunk_size=256,
    ),
    Call.of(
        launch_lines,
        "recurrent_bw_dC",
        (1, 2, 8192, 64, 64),
        "NVIDIA H200",
        backend="mosaic_gpu",
        chunk_size=1024,
    ),
    Call.of(
        launch_lines,
        "recurrent_bw_dC",
        (1, 2, 5120, 64, 64),
        "NVIDIA H200",
        backend="mosaic_gpu",
        chunk_size=1024,
    ),
    Call.of(
        launch_lines,
        "recurrent_bw_dC",
        (1, 2, 12288, 64, 64),
        "NVIDIA H200",
        backend="mosaic_gpu",
        chunk_size=1024,
    ),
    Call.of(
        launch_lines, "recurrent_fw_C", (1, 512, 8192, 256, 512), "NVIDIA H200", chunk_size=128
    ),
    Call.of(launch_lines, "recurrent_fw_C", (1, 64, 8192, 256, 512), "NVIDIA H200", chunk_size=128),
    Call.of(launch_lines, "recurrent_fw_C", (1, 16, 8192, 256, 512), "NVIDIA H200", chunk_size=128),
    Call.of(launch_lines, "recurrent_fw_C", (1, 8, 8192, 256, 512), "NVIDIA H200", chunk_size=128),
    Call.of(launch_lines, "recurrent_fw_C", (1, 4, 8192, 256, 512), "NVIDIA H200", chunk_size=128),
    Call.of(launch_lines, "recurrent_fw_C", (1, 1, 8192, 256, 512), "NVIDIA H200", chunk_size=128),
    Call.of(
        plan_lines, (8, 8, 8192, 256, 512), "NVIDIA H200", backend="mosaic_gpu", num_segments=2000
    ),
    Call.of(plan_lines, (32, 4, 2048, 96, 192), "NVIDIA H200", backend="mosaic_gpu"),
    Call.of(
        plan_lines,
        (32, 4, 2048, 96, 192),
        "NVIDIA H100 80GB HBM3",
        backend="mosaic_gpu",
        config=KernelConfig(fused=False),
    ),
    Call.of(plan_lines, (16, 4, 2048, 192, 384), "NVIDIA H200", backend="mosaic_gpu"),
    Call.of(
        plan_lines,
        (16, 4, 2048, 192, 384),
        "NVIDIA H100 80GB HBM3",
        backend="mosaic_gpu",
        config=KernelConfig(fused=False),
    ),
    Call.of(plan_lines, (8, 4, 2048, 320, 640), "NVIDIA H200", backend="mosaic_gpu"),
    Call.of(
        plan_lines,
        (8, 4, 2048, 320, 640),
        "NVIDIA H100 80GB HBM3",
        backend="mosaic_gpu",
        config=KernelConfig(fused=False),
    ),
    Call.of(plan_lines, (256, 4, 196, 96, 96), "NVIDIA H200", backend="mosaic_gpu"),
    Call.of(
        plan_lines,
        (256, 4, 196, 96, 128),
        "NVIDIA H100 80GB HBM3",
        backend="mosaic_gpu",
        config=KernelConfig(fused=False),
    ),
    Call.of(plan_lines, (32, 4, 2048, 128, 192), "NVIDIA H200", backend="mosaic_gpu"),
    Call.of(
        plan_lines,
        (32, 4, 2048, 128, 192),
        "NVIDIA H100 80GB HBM3",
        backend="mosaic_gpu",
        config=KernelConfig(fused=False),
    ),
    Call.of(plan_lines, (32, 4, 2048, 160, 320), "NVIDIA H200", backend="mosaic_gpu"),
    Call.of(
        plan_lines,
        (32, 4, 2048, 160, 320),
        "NVIDIA H100 80GB HBM3",
        backend="mosaic_gpu",
        config=KernelConfig(fused=False),
    ),
    Call.of(plan_lines, (1, 1, 1, 256, 512), "NVIDIA H200", config=KernelConfig(chunk_size=1024)),
    Call.of(plan_lines, (1, 1, 100, 256, 512), "NVIDIA H200", config=KernelConfig(chunk_size=1024)),
]


def table():
    """The blocks of lines in the file."""
    return [block.splitlines() for block in TABLE.read_text().strip().split("\n\n")]


def write(_):
    TABLE.write_text("\n".join("\n".join(call.lines()) + "\n" for call in CALLS))


if __name__ == "__main__":
    command.main(lambda define: None, write)
