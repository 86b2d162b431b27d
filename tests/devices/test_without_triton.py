"""What runs with a jax that has no Triton backend of Pallas."""

import sys

import pytest
from mosaic_gpu_cases import RACE, skip_unless_hopper
from oracle import needs_mosaic_gpu, run_python, slow

SCRIPT = """
import sys
sys.modules["jax.experimental.pallas.triton"] = None  # importing it raises ImportError
sys.path[:0] = {folders}
import functools, re
import jax, jax.numpy as jnp, numpy as np
import mlstm_pallas
from mlstm_pallas import reference

shapes = *((1, 2, 48, D) for D in (16, 16, 32)), *[(1, 2, 48)] * 2
q, k, v, i, f = (np.random.default_rng(0).normal(size=shape).astype("float32") for shape in shapes)

def gradients(function):
    of_all = jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x))), argnums=(0, 1, 2, 3, 4))
    return jax.jit(of_all)(q, k, v, i, f)

{body}
"""
PLAIN = """
from mosaic_gpu_interpreter import interpreted_mosaic_gpu

expected = gradients(reference.chunkwise)
for backend in {backends}:
    run = functools.partial(mlstm_pallas.mlstm_chunkwise, backend=backend)
    if backend == "mosaic_gpu":
        with interpreted_mosaic_gpu():
            found = gradients(run)
    else:
        found = gradients(run)
    for x, y in zip(found, expected, strict=True):
        assert np.linalg.norm(x - y) <= 1e-5 * np.linalg.norm(y)
message = (
    r"is a Triton kernel, and jax [0-9.]+ has no Triton backend of Pallas: expected a jax that "
    r"has one"
)
for backend in ("triton", "interpret"):
    call = functools.partial(mlstm_pallas.mlstm_chunkwise, backend=backend)
    try:
        jax.make_jaxpr(call)(q, k, v, i, f)
    except Exception as error:
        assert re.search(message, str(error)), error
    else:
        raise AssertionError("it was traced")
"""
STEP = """
from mosaic_gpu_interpreter import interpreted_mosaic_gpu

token = q[:, :, 0], k[:, :, 0], v[:, :, 0], i[:, :, 0], f[:, :, 0]
expected = mlstm_pallas.mlstm_recurrent_step(*token, backend="xla")
with interpreted_mosaic_gpu():
    found = mlstm_pallas.mlstm_recurrent_step(*token, backend="mosaic_gpu")
for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    assert np.linalg.norm(x - y) <= 1e-6 * np.linalg.norm(y)
"""
# Calls in bfloat16 against float64.
CASES = """
jax.config.update("jax_disable_most_optimizations", {interpreted})
import contextlib
from mosaic_gpu_interpreter import interpreted_mosaic_gpu
from mosaic_gpu_cases import FUSED_STAGES, case, check_case, of_scan, of_states

assert not mlstm_pallas.planning.dispatch.HAS_TRITON
CASES = dict(
    fused=case(of_scan()),
    # parallel_bw_dP and parallel_bw_dQKV have no kernel for chunks of 64.
    plain_stages=case(
        of_scan(chunk_size=64),
        128,
        (64, 128),
        NH=2,
        without=["parallel_bw_dP", "parallel_bw_dQKV"],
        layout="BTNH",
    ),
    few_heads=case(of_states(2), 256, (64, 128)),
    splits=case(of_scan(2), 256, (128, 128)),
)
for name in {names}:
    with interpreted_mosaic_gpu() if {interpreted} else contextlib.nullcontext():
        check_case(CASES[name])
"""


def run(body, timeout=300):
    script = SCRIPT.replace("{folders}", str(sys.path)).replace("{body}", body)
    return run_python("-c", script, timeout=timeout)


def run_cases(*names, interpreted):
    return run(CASES.format(interpreted=interpreted, names=names), timeout=600)


@pytest.mark.parametrize(
    "backends",
    [
        slow((None, "xla")),
        pytest.param(("mosaic_gpu",), marks=[needs_mosaic_gpu, pytest.mark.slow]),
    ],
    ids=str,
)
def test_the_plain_form_runs_and_a_triton_kernel_says_what_is_missing(backends):
    """float32 runs in plain form on backend "mosaic_gpu", which has no kernels for it."""
    run(PLAIN.replace("{backends}", str(backends)))


DEFAULT = """
from jax.sharding import AbstractDevice, AbstractMesh
from mlstm_pallas.planning.backend import requested_lowering
from mlstm_pallas.problem.gpu import target_gpu

config = mlstm_pallas.KernelConfig(fused=True)
call = jax.jit(lambda *x: mlstm_pallas.mlstm_chunkwise(*x, config=config))
half = [jax.ShapeDtypeStruct((1, 2, 256, D), "bfloat16") for D in (64, 64, 128)]
narrow = [jax.ShapeDtypeStruct((1, 2, 256, 16), "bfloat16")] * 3
gates = [jax.ShapeDtypeStruct((1, 2, 256), "float32")] * 2
for kind, lowering in {"NVIDIA H200": "mosaic_gpu", "NVIDIA A100-SXM4-80GB": "xla"}.items():
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(kind, None, "gpu"))
    with jax.sharding.use_abstract_mesh(mesh):
        assert requested_lowering(None, target_gpu(), (64, 128)) == lowering, kind
        for x in half, narrow:
            text = call.trace(*x, *gates).lower(lowering_platforms=("cuda",)).as_text()
            assert ("mosaic_gpu" in text) == (lowering == "mosaic_gpu"), kind
        wide = [jax.ShapeDtypeStruct(x.shape, "float32") for x in half]
        lowered = call.trace(*wide, *gates).lower(lowering_platforms=("cuda",))
        assert "mosaic_gpu" not in lowered.as_text()
"""


@pytest.mark.slow
@needs_mosaic_gpu
def test_a_step_runs_in_plain_form_and_the_default_is_mosaic_gpu_on_hopper_in_16_bits():
    run(STEP + DEFAULT)


@pytest.mark.slow
@needs_mosaic_gpu
def test_mosaic_gpu_kernels_run_interpreted():
    """The Mosaic GPU kernels run, and the other stages in plain form."""
    assert RACE not in run_cases("plain_stages", interpreted=True)


@needs_mosaic_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("names", [("fused", "plain_stages"), ("few_heads", "splits")])
def test_mosaic_gpu_kernels_run_on_a_gpu(names):
    skip_unless_hopper()
    run_cases(*names, interpreted=False)
