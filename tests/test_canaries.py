"""Every kernel writes all of its outputs and reads nothing of its neighbours, which are NaN here; repeats are bitwise equal."""

import dataclasses
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from oracle import HELPERS, random_inputs

from mlstm_pallas import KernelConfig, StageConfig, fwbw
from mlstm_pallas.config import STAGES, config_for
from mlstm_pallas.launch import kernel_call
from mlstm_pallas.plan import Inputs, Plan, Residuals
from mlstm_pallas.problem import MAX_TILE, make_problem

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, NH, DHQK, DHHV = 1, 3, 32, 16
MIDDLE = 1  # of the heads, which lie one behind the other in every array
TILE = 16
TILES = StageConfig(TILE, TILE, TILE, TILE, TILE, keep_q=False)
MODULES = ("chunk_gates", "recurrence", "parallel_fw_H", "parallel_fw_P", "walk", "parallel_bw_P", "parallel_bw_dP", "parallel_bw_dQKV")
# Options, S and L.
PLANS = {
    "states": ({}, 64, 32),
    "states_of_long_chunks": ({}, 512, 256),
    "states_in_segments": (dict.fromkeys(("recurrent_fw_C", "recurrent_bw_dC"), dataclasses.replace(TILES, num_segments=2)), 64, 32),
    "stateless": ({"stateless_forward": True, "stateless_backward": True}, 64, 32),
}
BACKENDS = ("interpret", pytest.param("triton", marks=pytest.mark.gpu))


def outputs_of_kernels(backend, options, S, L, monkeypatch):
    """A function of the inputs and of the gradient of h: {kernel: its outputs}, (B * NH, ...) each; forward and backward. Their stages."""
    explicit = KernelConfig(chunk_size=L, **dict.fromkeys(STAGES, TILES) | options)
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

    return run, {*itertools.chain(*config.passes(problem, plan.recompute_states_in_bw))}


def written(name, outputs, L):
    """The outputs, with 0 where a kernel says that it writes nothing: parallel_bw_dP behind the diagonal of a chunk."""
    if name != "parallel_bw_dP":
        return outputs
    P, dP, qbar, from_tiles, to_tiles, *others = outputs
    block, tile = jnp.arange(L) // MAX_TILE, jnp.arange(L // TILE)

    def of_chunk(x, where):
        return jnp.where(where, x.reshape(B * NH, -1, *where.shape), 0.0).reshape(x.shape)

    def of_tiles(x, where):
        return jnp.where(where[:, None, :, None], x.reshape(B * NH, len(tile), -1, len(tile), TILE), 0.0).reshape(x.shape)

    tiles = (of_chunk(x, block[:, None] >= block) for x in (P, dP))
    return *tiles, qbar, of_tiles(from_tiles, tile[:, None] <= tile), of_tiles(to_tiles, tile[:, None] >= tile), *others


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_write_everything_and_read_nothing_of_their_neighbours(backend, plan, monkeypatch):
    options, S, L = PLANS[plan]
    inputs = random_inputs(0, B, NH, S, DHQK, DHHV)
    dh = jnp.cos(inputs["v"])
    run, stages = outputs_of_kernels(backend, options, S, L, monkeypatch)
    clean = run(inputs, dh)
    assert clean.keys() - HELPERS == stages
    assert ("segment_products" in clean) == (plan == "states_in_segments")
    others = np.arange(NH) != MIDDLE
    poisoned_inputs, poisoned_dh = jax.tree.map(lambda x: x.at[:, others].set(jnp.nan), (inputs, dh))
    poisoned, again = run(poisoned_inputs, poisoned_dh), run(inputs, dh)
    for name in clean:
        of_runs = (written(name, made[name], L) for made in (clean, poisoned, again))
        for index, (x, y, z) in enumerate(zip(*of_runs, strict=True)):
            assert x.shape[0] % (B * NH) == 0  # segments are heads
            x, y, z = (np.asarray(made).reshape(B * NH, -1) for made in (x, y, z))
            assert np.isfinite(x).all(), f"{name}: output {index} has elements that are not written"
            assert np.array_equal(x[MIDDLE], y[MIDDLE]), f"{name}: output {index} depends on other heads"
            assert np.array_equal(x, z), f"{name}: output {index} differs from run to run"


def test_what_is_not_written_is_nan_when_interpreted():
    def writes_half(x_ref, y_ref):
        y_ref[pl.ds(0, 16)] = x_ref[pl.ds(0, 16)]

    block, shape = pl.BlockSpec((32,), lambda i: (0,)), jax.ShapeDtypeStruct((32,), jnp.float32)
    how = dict(grid=(1,), in_specs=[block], out_specs=[block], out_shape=[shape], stage=StageConfig(), interpret=True)
    (y,) = kernel_call(writes_half, name="writes_half", **how)(jnp.zeros((32,)))
    assert np.array_equal(np.isnan(y), np.arange(32) >= 16)
