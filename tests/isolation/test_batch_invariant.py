"""KernelConfig(batch_invariant=True): plans and roundings do not depend on the batch. The table has
bits."""

import dataclasses
import functools
import math
import re

import jax
import pytest
from compile_report import on_a_hopper
from oracle import NAMES, for_device, lowered_for_cuda, needs_compiler, random_inputs, slow
from stage_calls import Problem, spec_of

from mlstm_pallas import (
    KernelConfig,
    mlstm_chunkwise,
    mlstm_recurrent_step,
    mlstm_ring_flush,
    mlstm_ring_states,
)
from mlstm_pallas.planning.call_spec import launch_of
from mlstm_pallas.problem.gpu import known_gpu

CONFIG = KernelConfig(batch_invariant=True)


def spec_for(B, S, backend, config):
    gpu = known_gpu("NVIDIA H200")
    return spec_of((B, 8, S, 256, 512), "bfloat16", gpu, backend, config=config)


def tiles_in(calls):
    """CTAs of persistent kernels share the items; their number is in no sum."""
    return {name: vars(x.tiles) | dict(num_ctas=0) for name, x in calls.items() if x.tiles}


def chunkwise_plan(B, S, backend, config):
    plan = spec_for(B, S, backend, config).plan
    return plan.num_splits, tiles_in(plan.forward | plan.backward)


def test_more_heads_than_a_grid_has_places_are_refused():
    """In another lowering an entry would have other bits."""
    message = "config.batch_invariant is True and B * NH is 40000, expected fewer for the kernel "
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}mosaic_gpu_recurrent_fw_C, or "):
        chunkwise_plan(5000, 1024, "mosaic_gpu", CONFIG)


def step_plan(B, T, backend, config):
    """Of steps of T tokens, which have no chunks."""
    p = Problem(B, 8, T, 256, 512, T, 1 / 16)
    spec, names = spec_for(B, T, backend, config), ("recurrent_step", "ring_step")
    spec = dataclasses.replace(spec, problem=p)
    return tiles_in({name: launch_of(spec, name, spec.lowering) for name in names})


@pytest.mark.parametrize("backend", ["triton", "mosaic_gpu"])
@pytest.mark.parametrize(
    ("plan", "S"), [(chunkwise_plan, 256), (chunkwise_plan, 8192), (step_plan, 1), (step_plan, 4)]
)
def test_plans_are_those_of_a_batch_of_one(plan, S, backend):
    plans = [plan(B, S, backend, CONFIG) for B in (1, 3, 64)]
    assert plans[0] == plans[1] == plans[2]
    assert plan(64, S, backend, None) != plans[2]
    assert plan(1, S, backend, None) == plans[0]


def test_one_head_alone_runs_as_two():
    """Pallas makes constants of the indices of a grid of one, and Triton may lay out tiles
    otherwise than beside other heads."""
    x = [*random_inputs(0, 1, 1, 1, 16, 16).values()]
    step = jax.jit(functools.partial(mlstm_recurrent_step, backend="triton", config=CONFIG))
    text = lowered_for_cuda(step, *(y[:, :, 0] for y in x[:5]), *x[5:8])
    assert math.prod(map(int, re.findall(r"grid_\w = (\d+)", text))) == 2


# ---------------- roundings


@functools.partial(jax.jit, static_argnums=0)
def flushed_rings(backend, x):
    return mlstm_ring_flush(x["rings"], config=CONFIG)


@functools.partial(jax.jit, static_argnums=0)
def chained_prompts(backend, x):
    """Two prompts in one program, of which the second begins with the states of the first."""
    options = dict(backend=backend, config=CONFIG, state_dtype="bfloat16", return_last_states=True)
    states = ()
    for _ in range(2):
        h, states = mlstm_chunkwise(*(x[name] for name in NAMES[:5]), *states, **options)
    return h, states


@needs_compiler
@pytest.mark.parametrize(
    ("function", "backend", "dtype"),
    [
        (flushed_rings, "xla", "bfloat16"),
        (flushed_rings, "xla", "float16"),
        (chained_prompts, "xla", "bfloat16"),
        slow(chained_prompts, "triton", "bfloat16"),
        slow(chained_prompts, "mosaic_gpu", "bfloat16"),
    ],
)
def test_c_of_one_head_is_rounded_as_in_a_batch_where_compiled_for_a_gpu(function, backend, dtype):
    """The casts of c from and to 16 bits, of which XLA may drop neighbours, are as many for one
    head as for several."""

    def casts_of_c(B):
        sharding, x = on_a_hopper(), random_inputs(0, B, 1, 128, 96, 192, dtype=dtype)
        if function is flushed_rings:
            c, n, m = (x[name] for name in NAMES[5:])
            x = dict(rings=mlstm_ring_states(c.astype(dtype), n, m, dtype=dtype, length=8))
        x = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=sharding), x)
        with for_device("NVIDIA H200"):
            text = function.lower(backend, x).compile().as_text()
        # Mosaic GPU has C^T.
        return len(re.findall(r"\[(?:\d+,)*(?:96,192|192,96)\]\S* convert\(", text))

    of_one_head = casts_of_c(1)
    assert of_one_head > 1
    assert [casts_of_c(B) for B in (2, 3)] == [of_one_head] * 2
