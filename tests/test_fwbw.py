"""The custom_vjp: what a pass holds for the other, and what has no derivative."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import error, random_inputs

from mlstm_pallas import KernelConfig, mlstm_chunkwise, reference

S, L, DHQK, DHHV = 64, 16, 16, 24
INPUTS = random_inputs(0, 1, 2, S, DHQK, DHHV)
SCAN = KernelConfig(fused=True, triton_recurrent_fw_H=dict(siz_b_LKV=16))


@pytest.mark.parametrize("stored", [False, True], ids=["recomputed", "stored"])
@pytest.mark.parametrize("normalized", [True, False], ids=["normalised", "unnormalised"])
@pytest.mark.parametrize("config", [KernelConfig(fused=False), SCAN], ids=["materialised", "fused"])
def test_the_forward_pass_holds_what_the_backward_pass_reads(config, normalized, stored):
    """Residuals beside the inputs are h and z for the normaliser, and the states of the chunks if
    they are not recomputed."""
    options = dict(chunk_size=L, backend="interpret", config=config)
    options |= dict(recompute_states_in_bw=not stored)
    options |= {} if normalized else dict(input_gate="sigmoid", normalize=False)
    x = [INPUTS[name] for name in "qkvif"]
    run = functools.partial(mlstm_chunkwise, **options)
    residuals = jax.eval_shape(lambda *x: jax.tree.leaves(jax.vjp(run, *x)[1]), *x)
    shapes = [y.shape for y in residuals]
    # v is padded to the shape of h: one more of that shape is h.
    assert shapes.count((1, 2, S, 32)) == 1 + normalized
    assert shapes.count((1, 2, S)) == 2 + normalized  # i and f, and z
    assert shapes.count((1, 2, S // L, DHQK, 32)) == stored
    # Without a backward pass the fused scan stores none.
    states = f"[2,{S // L},{DHQK},32]"
    assert (states in str(jax.make_jaxpr(run)(*x))) == (config is not SCAN)


@pytest.mark.slow
def test_the_reference_functions_have_second_derivatives_and_forward_mode():
    q, *rest = random_inputs(9, 1, 1, 16, 4, 4).values()
    functions = (
        lambda q: jnp.sum(reference.chunkwise(q, *rest, chunk_size=16) ** 2),
        lambda q: jnp.sum(reference.recurrence(q, *rest)[0] ** 2),
    )
    hessians = [jax.jit(lambda q, f=f: jax.jvp(jax.grad(f), (q,), (q,)))(q)[1] for f in functions]
    assert error(hessians[0], np.asarray(hessians[1], "float64")) < 1e-4
