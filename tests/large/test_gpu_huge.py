"""Arrays beyond 2**31 elements and grids beyond 65,535: right at both ends of the arrays, against
the float64 recurrence.

Where a sequence is too long for it, the recurrence runs over the last steps only, from the state
that they start with: one weighted product of all keys and values before, in float64.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from engine import PROMISED
from oracle import NAMES, OUTPUTS, compare, cotangents_for, expected_of, in_float64, tolerance

from mlstm_pallas import KernelConfig, mlstm_chunkwise

pytestmark = pytest.mark.gpu

END = 1024  # steps that are compared


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def inputs_on_device(shape, dtype, f_shift):
    """q, k, v, i, f and the gradient of h, like those of oracle.random_inputs; one head at a time,
    as random bits take memory too."""
    B, NH, S, DHQK, DHV = shape

    def one(key):
        keys = jax.random.split(key, 6)
        q, k = (jnp.abs(jax.random.normal(x, (S, DHQK), dtype)) + 0.2 for x in keys[:2])
        v, dh = (jax.random.normal(x, (S, DHV), dtype) for x in keys[2:4])
        i, f = (jax.random.normal(x, (S,)) for x in keys[4:])
        return q, k, v, i, f + f_shift, dh

    heads = jax.lax.map(one, jax.random.split(jax.random.key(0), B * NH))
    *x, dh = (y.reshape(B, NH, *y.shape[1:]) for y in heads)
    return x, dh


@jax.jit
def state_after(k, v, i, f):
    """(c, n, m) after the last step, from (0, 0, 0); of one head, in the dtype of the arguments."""
    k, v, i, fbar = (x[0, 0] for x in (k, v, i, jax.nn.log_sigmoid(f)))
    stored = i + jnp.sum(fbar) - jnp.cumsum(fbar)
    m = jnp.maximum(jnp.sum(fbar), jnp.max(stored))
    weighted = jnp.exp(stored - m)[:, None] * k
    c = jnp.einsum("sk,sv->kv", weighted, v, precision="highest")
    return c[None, None], jnp.sum(weighted, axis=0)[None, None], m[None, None]


def check(shape, dtype, f_shift, heads, *, gradients=True, **options):
    """Outputs, last states and gradients of the given heads at the last END steps, gradients at the
    first ones too."""
    S, DHQK = shape[2], shape[3]
    x, dh = inputs_on_device(shape, dtype, f_shift)
    call = functools.partial(mlstm_chunkwise, backend="triton", return_last_states=True, **options)

    @jax.jit
    def run(x, dh):
        (h, last), vjp = jax.vjp(call, *x)
        return h, last, vjp((dh, jax.tree.map(jnp.zeros_like, last))) if gradients else ()

    h, last, result = run(x, dh)
    # What is farther away than END steps has decayed to nothing.
    end, start = slice(max(0, S - END), None), slice(END)

    def of_head(arrays, head, steps):
        return [y[head][None, None, steps] for y in arrays]

    def recurrence(head, steps, *states):
        *inputs, cotangent = of_head([*x, dh], head, steps)
        inputs = dict(zip(NAMES, (*inputs, *states), strict=False))
        zeros = cotangents_for(inputs, "float32", states=False)[1:]
        return expected_of(inputs, [cotangent, *zeros])

    for head in heads:
        before = of_head(x[1:], head, slice(end.start))
        states = in_float64(state_after, *before) if end.start else ()
        expected, of_end = recurrence(head, end, *states)
        outputs = h[head][None, None, end], *(y[head][None, None] for y in last)
        names = [f"{name} of head {head}" for name in OUTPUTS]
        compare(names, outputs, expected, tolerance(dtype, S + DHQK))
        if not gradients:
            continue
        of_start = recurrence(head, slice(2 * END))[1]
        for part, desired in (end, of_end), (start, of_start):
            names = [f"d{name} of head {head}, {part}" for name in "qkvif"]
            actual = of_head(result, head, part)
            compare(names, actual, [desired[x][:, :, :END] for x in "qkvif"], PROMISED[dtype][1])


@pytest.mark.alone
@pytest.mark.parametrize(("dtype", "NH"), [("bfloat16", 9), ("float32", 5)])
def test_values_outputs_and_states_beyond_32_bits(dtype, NH):
    """2.4e9 elements of v, h and C in bfloat16; 5.4 GB of each of v and h in float32.

    S is 1,048,576 and B is 1.
    """
    check((1, NH, 2**20, 128, 256), dtype, 2.0, [(0, 0), (0, NH - 1)])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_million_steps_that_are_not_forgotten(dtype):
    """exp(-10) of the first step is left at the last one."""
    check((1, 1, 2**20, 64, 64), dtype, 12.0, [(0, 0)], gradients=False)


def test_more_than_65535_chunks_of_one_sequence():
    check((1, 1, 2**20, 64, 64), "bfloat16", 2.0, [(0, 0)], chunk_size=16)


@pytest.mark.parametrize("fused", [False, True], ids=["materialised", "fused"])
def test_more_than_65535_heads(fused):
    """131,072 heads of three chunks: the last axis of every grid is beyond what CUDA numbers
    there."""
    heads = [(0, 0), (255, 255), (256, 0), (511, 255)]  # 65,535 and 65,536 among them
    check(
        (512, 256, 40, 16, 32),
        "bfloat16",
        2.0,
        heads,
        chunk_size=16,
        config=KernelConfig(fused=fused),
    )


def test_one_step_of_many_heads():
    check((1024, 128, 1, 64, 64), "float32", 2.0, [(0, 0), (1023, 127)], gradients=False)
