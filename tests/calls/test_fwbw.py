"""The custom_vjp: what a pass holds for the other, and what has no derivative."""

import functools
from collections import Counter
from types import SimpleNamespace

import compile_report
import jax
import jax.numpy as jnp
import pytest
from oracle import (
    assert_close,
    assert_same_bits,
    call_shapes,
    random_inputs,
    refusal,
    refused,
)

from mlstm_pallas import (
    KernelConfig,
    mlstm_chunkwise,
    mlstm_chunkwise_states,
    mlstm_recurrent_step,
    mlstm_ring_states,
    mlstm_ring_step,
    reference,
)
from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel

S, L, DHQK, DHV = 64, 16, 16, 24
FUSED = KernelConfig(fused=True, triton_recurrent_fw_H=dict(siz_b_L=16))


@pytest.mark.parametrize("stored", [False, True], ids=["recomputed", "stored"])
@pytest.mark.parametrize("normaliser", [{}, dict(input_gate="sigmoid", normalize=False)], ids=str)
@pytest.mark.parametrize(
    "config", [KernelConfig(fused=False), FUSED], ids=["materialised", "fused"]
)
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
    assert (states in str(jax.make_jaxpr(run)(*x))) == (config is not FUSED)


COUNTED = dict(chunk_size=L, backend="interpret", return_last_states=True)
SHARDS = functools.partial(mlstm_chunkwise_sequence_parallel, axis_name="s", **COUNTED)
RESIDUAL_NAMES = {f"mlstm_{x}" for x in "hcnmz"}
NAMED = {
    "fused": functools.partial(mlstm_chunkwise, config=FUSED, **COUNTED),
    "stored": functools.partial(
        mlstm_chunkwise,
        config=KernelConfig(fused=False),
        recompute_states_in_bw=False,
        layout="BTNH",
        **COUNTED,
    ),
    "shards": jax.vmap(SHARDS, axis_name="s"),
}


def inputs_of(name):
    x = random_inputs(4, 1, 2, 2 * L, DHQK, DHV, states=False).values()
    return [jnp.stack([y] * 2) if name == "shards" else y for y in x]


def gradients(run, names=None):
    """The gradients of a loss of all results, under jax.checkpoint if there are names to save."""

    def loss(*x):
        return sum(jnp.sum(y**2) for y in jax.tree.leaves(run(*x)))

    if names is not None:
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        loss = jax.checkpoint(loss, policy=policy)
    return jax.jit(jax.grad(loss, argnums=range(5)))


def launches(run, x):
    calls = compile_report.equations(run.trace(*x).jaxpr.jaxpr, "pallas_call")
    return Counter(x.params["name"] for x in calls)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fused", "stored", "shards"])
def test_saved_residuals_keep_the_forward_kernels_from_running_again(case):
    run, x = NAMED[case], inputs_of(case)
    plain, named = gradients(run), gradients(run, RESIDUAL_NAMES)
    once = launches(plain, x)
    assert launches(named, x) == once
    assert_same_bits(named(*x), plain(*x))
    # The kernels compute every one of the names.
    for names in (RESIDUAL_NAMES - {name} for name in RESIDUAL_NAMES):
        again = launches(gradients(run, names), x)
        assert again > once, names


FIRST = (
    "mlstm_chunkwise has first derivatives in reverse mode only; for second derivatives and "
    "forward mode use mlstm_pallas.reference.chunkwise or mlstm_pallas.reference.recurrence"
)
WITHOUT_DERIVATIVES = [
    refusal(
        TypeError,
        'the kernels of mlstm_recurrent_step have no derivatives; backend="xla" has them',
        lambda x: mlstm_recurrent_step(*x.token, *x.states, backend="triton"),
    ),
    refusal(
        TypeError,
        'the kernels of mlstm_ring_step have no derivatives; backend="xla" has them',
        lambda x: mlstm_ring_step(
            *x.token, mlstm_ring_states(*x.states, dtype="float32"), backend="interpret"
        ),
    ),
    refusal(
        TypeError,
        "mlstm_chunkwise_states has no derivatives; mlstm_chunkwise has them",
        lambda x: mlstm_chunkwise_states(*x.tokens, every=16, layout="BNTH", backend="xla"),
    ),
    refusal(TypeError, FIRST, lambda x: gradients(NAMED["shards"])(*(y[None] for y in x.tokens))),
]


@pytest.mark.parametrize(("kind", "message", "call"), WITHOUT_DERIVATIVES)
def test_calls_without_derivatives_refuse_them(kind, message, call):
    q, k, v, i, f, *states = random_inputs(13, 1, 1, 1, 16, 16).values()

    def h(v):
        tokens = q, k, v, i, f
        token = [y[:, :, 0] for y in tokens]
        return jnp.sum(call(SimpleNamespace(tokens=tokens, token=token, states=states))[0])

    for derivative in jax.grad(h), lambda v: jax.jvp(h, (v,), (v,)):
        refused(kind, message, derivative, v)


@pytest.mark.slow
def test_the_reference_functions_have_second_derivatives_and_forward_mode():
    q, *rest = random_inputs(9, 1, 1, 16, 4, 4).values()

    @functools.partial(jax.jit, static_argnums=0)
    def product_with_the_hessian(run, q):
        gradient = jax.grad(lambda q: jnp.sum(run(q, *rest) ** 2))
        return jax.jvp(gradient, (q,), (q,))[1]

    functions = reference.chunkwise, lambda *x: reference.recurrence(*x)[0]
    assert_close(*(product_with_the_hessian(run, q) for run in functions), 1e-4)
