"""Every kernel writes all of its outputs and reads nothing of its neighbours, which are NaN here; repeats are bitwise equal."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from oracle import random_inputs

from mlstm_pallas import KernelConfig, StageConfig, fwbw
from mlstm_pallas.config import STAGES, config_for
from mlstm_pallas.launch import kernel_call
from mlstm_pallas.plan import Inputs, Plan, Residuals
from mlstm_pallas.problem import make_problem

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, NH, S, DHQK, DHHV, L = 1, 3, 64, 32, 16, 32
MIDDLE = 1  # of the heads, which lie one behind the other in every array
TILES = StageConfig(16, 16, 16, 16, 16, keep_q=False)
MODULES = ("chunk_gates", "recurrence", "parallel_fw_H", "parallel_fw_P", "walk", "parallel_bw_P")
MODULES += ("parallel_bw_dQKV", "parallel_bw_dQ", "parallel_bw_dK", "parallel_bw_dV")
# How many kernels run, forward and backward.
PLANS = {
    "fused": ({}, 6),
    "split": ({"split_backward": True}, 8),
    "stateless": ({"stateless_forward": True, "stateless_backward": True}, 8),
}
BACKENDS = ("interpret", pytest.param("triton", marks=pytest.mark.gpu))


def outputs_of_kernels(backend, options, monkeypatch):
    """A function of the inputs and of the gradient of h: {kernel: its outputs}, (B * NH, ...) each; forward and backward."""
    tiles = {stage: TILES for stage in STAGES if stage != "parallel_bw_dQKV"}
    explicit = KernelConfig(chunk_size=L, **options, parallel_bw_dQKV=StageConfig(siz_b_DHQK=16, siz_b_DHHV=16, siz_b_loop=16), **tiles)
    config = config_for(DHQK, DHHV, S, jnp.dtype("float32"), explicit=explicit)
    problem = make_problem((B, NH, S, DHQK), DHHV, L, pad_heads=True)
    plan = Plan(problem, config, 1e-6, True, 1.0, "stateless_forward" in options, backend)
    made = {}

    def recording(kernel, *, name, **how):
        def call(*args):
            made[name] = kernel_call(kernel, name=name, **how)(*args)
            return made[name]

        return call

    for module in MODULES:
        monkeypatch.setattr(importlib.import_module(f"mlstm_pallas.stages.{module}"), "kernel_call", recording)

    @jax.jit
    def run(inputs, dh):
        made.clear()
        x = Inputs(**inputs)
        interpret = backend == "interpret"
        (h, last), z, states = fwbw._forward_triton(plan, interpret, x)
        fwbw._backward_triton(plan, interpret, Residuals(x, h, z, states), (dh, jax.tree.map(jnp.ones_like, last)))
        return dict(made)

    return run


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_write_everything_and_read_nothing_of_their_neighbours(backend, plan, monkeypatch):
    inputs = random_inputs(0, B, NH, S, DHQK, DHHV)
    dh = jnp.cos(inputs["v"])
    options, kernels = PLANS[plan]
    run = outputs_of_kernels(backend, options, monkeypatch)
    clean = run(inputs, dh)
    assert len(clean) == kernels
    others = np.arange(NH) != MIDDLE
    poisoned_inputs, poisoned_dh = jax.tree.map(lambda x: x.at[:, others].set(jnp.nan), (inputs, dh))
    poisoned, again = run(poisoned_inputs, poisoned_dh), run(inputs, dh)
    for name, outputs in clean.items():
        for index, (x, y, z) in enumerate(zip(outputs, poisoned[name], again[name], strict=True)):
            assert x.shape[0] == B * NH
            assert jnp.isfinite(x).all(), f"{name}: output {index} has elements that are not written"
            assert np.array_equal(np.asarray(x[MIDDLE]), np.asarray(y[MIDDLE])), f"{name}: output {index} depends on other heads"
            assert np.array_equal(np.asarray(x), np.asarray(z)), f"{name}: output {index} differs from run to run"


def test_what_is_not_written_is_nan_when_interpreted():
    def writes_half(x_ref, y_ref):
        y_ref[pl.ds(0, 16)] = x_ref[pl.ds(0, 16)]

    block, shape = pl.BlockSpec((32,), lambda i: (0,)), jax.ShapeDtypeStruct((32,), jnp.float32)
    how = dict(grid=(1,), in_specs=[block], out_specs=[block], out_shape=[shape], stage=StageConfig(), interpret=True)
    (y,) = kernel_call(writes_half, name="writes_half", **how)(jnp.zeros((32,)))
    assert np.array_equal(np.isnan(y), np.arange(32) >= 16)
