"""The custom_vjp: what a pass holds for the other, and what has no derivative."""

import functools

import jax
import jax.numpy as jnp
import pytest
from oracle import assert_close, call_shapes, random_inputs

from mlstm_pallas import KernelConfig, mlstm_chunkwise, reference

S, L, DHQK, DHV = 64, 16, 16, 24
SCAN = KernelConfig(fused=True, triton_recurrent_fw_H=dict(siz_b_L=16))


@pytest.mark.parametrize("stored", [False, True], ids=["recomputed", "stored"])
@pytest.mark.parametrize("normaliser", [{}, dict(input_gate="sigmoid", normalize=False)], ids=str)
@pytest.mark.parametrize("config", [KernelConfig(fused=False), SCAN], ids=["materialised", "fused"])
def test_the_forward_pass_holds_what_the_backward_pass_reads(config, normaliser, stored):
    """Residuals beside the inputs are h and z for the normaliser, and the states of the chunks if
    they are not recomputed."""
    options = dict(chunk_size=L, backend="interpret", config=config, **normaliser)
    run = functools.partial(mlstm_chunkwise, recompute_states_in_bw=not stored, **options)
    x = call_shapes(1, 2, S, DHQK, DHV, "float32")
    residuals = jax.eval_shape(lambda *x: jax.tree.leaves(jax.vjp(run, *x)[1]), *x)
    shapes, normalised = [y.shape for y in residuals], not normaliser
    # v is padded to the shape of h: one more of that shape is h.
    assert shapes.count((1, 2, S, 32)) == 1 + normalised
    assert shapes.count((1, 2, S)) == 2 + normalised  # i and f, and z
    assert shapes.count((1, 2, S // L, DHQK, 32)) == stored
    # Without a backward pass the fused scan stores none.
    states = f"[2,{S // L},{DHQK},32]"
    assert (states in str(jax.make_jaxpr(run)(*x))) == (config is not SCAN)


@pytest.mark.slow
def test_the_reference_functions_have_second_derivatives_and_forward_mode():
    q, *rest = random_inputs(9, 1, 1, 16, 4, 4).values()

    @functools.partial(jax.jit, static_argnums=0)
    def product_with_the_hessian(run, q):
        gradient = jax.grad(lambda q: jnp.sum(run(q, *rest) ** 2))
        return jax.jvp(gradient, (q,), (q,))[1]

    functions = reference.chunkwise, lambda *x: reference.recurrence(*x)[0]
    assert_close(*(product_with_the_hessian(run, q) for run in functions), 1e-4)
