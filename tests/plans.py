"""The table of plans, ``plans.txt``: calls, each with all that is planned for it.

A block is a call and its plan. This writes all plans anew, for a review of the difference:

    PYTHONPATH=. python tests/plans.py

It needs a jax that has the Mosaic GPU kernels. A new problem is a line with its call.
"""

import dataclasses
import functools
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import command
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
    if name == "recurrent_step":  # whose heads are not padded
        p = make_problem(q_sizes, DHV, 1, pad_heads=False)
        spec = dataclasses.replace(spec, problem=p)
    x = launch_of(spec, name, spec.lowering)
    return [f"{fields(x)} grid={x.tiles and x.tiles.grid(x.problem)}"]


def printed_lines(*args, **options):
    return str(plan(*args, **options)).splitlines()


CALLS = dict(plan=plan_lines, launch=launch_lines, printed=printed_lines, KernelConfig=KernelConfig)


@functools.cache
def calls():
    """The calls of the table, and the lines of each."""
    blocks = (block.splitlines() for block in TABLE.read_text().strip().split("\n\n"))
    return {call: lines for call, *lines in blocks}


def planned(call):
    return eval(call, CALLS)


def write(_):
    blocks = ("\n".join([call, *planned(call)]) + "\n" for call in calls())
    TABLE.write_text("\n".join(blocks))


if __name__ == "__main__":
    command.main(lambda define: None, write)
