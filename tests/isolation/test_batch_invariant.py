"""KernelConfig(batch_invariant=True): plans and bits do not depend on the batch."""

import contextlib
import dataclasses
import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_report import on_a_hopper
from mosaic_gpu_interpreter import interpreted_mosaic_gpu
from oracle import (
    NAMES,
    for_device,
    needs_compiler,
    needs_mosaic_gpu,
    quick_code,
    random_inputs,
    slow,
    swapped,
)
from stage_calls import Problem, spec_of

from mlstm_pallas import (
    KernelConfig,
    mlstm_chunkwise,
    mlstm_chunkwise_states,
    mlstm_recurrent_sequence,
    mlstm_recurrent_step,
    mlstm_ring_flush,
    mlstm_ring_states,
    mlstm_ring_step,
    selfcheck,
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


# ---------------- bits

LENGTH, SEGMENTS = 8, 3


class Call(NamedTuple):
    """What a function is called with, beside arrays."""

    NH: int
    S: int
    DHQK: int
    DHV: int
    dtype: str = "float32"
    gate: str = "exp"
    layout: str = "BNTH"
    backend: str = "xla"
    config: KernelConfig = CONFIG

    @property
    def of_rings(self):
        return dict(backend=self.backend, config=self.config)

    @property
    def of_steps(self):
        return self.of_rings | dict(input_gate=self.gate)

    @property
    def of_sequences(self):
        return self.of_steps | dict(layout=self.layout)


def drawn(call, seed, B):
    """The arrays that the functions choose from, by name; q, k, v, i and f are in the layout."""
    x = random_inputs(seed, B, *call[:4], dtype=call.dtype, resets=seed > 0)
    x = {name: np.array(y) for name, y in x.items()}
    if call.gate == "sigmoid":
        x["m_initial"] = 0 * x["m_initial"]
    if call.layout == "BTNH":
        x |= {name: np.array(swapped(x[name])) for name in "qkvif"}
    draw = np.random.default_rng(seed)
    return x | dict(
        lengths=draw.integers(1, call.S, size=B, dtype="int32"),
        ids=np.sort(draw.integers(SEGMENTS, size=(B, call.S), dtype="int32")),
        phase=draw.integers(LENGTH, size=B, dtype="int32"),
        accepted=draw.integers(1, 3, size=B, dtype="int32"),
        slots=draw.permutation(B).astype("int32"),
    )


# A function of the arrays that is compiled once per call and batch.
compiled = functools.partial(jax.jit, static_argnums=0)


def steps_of(call, x, start, stop):
    axis = 1 if call.layout == "BTNH" else 2
    return [jax.lax.slice_in_dim(x[name], start, stop, axis=axis) for name in NAMES[:5]]


def token_of(call, x, t):
    return [y.squeeze(1 if call.layout == "BTNH" else 2) for y in steps_of(call, x, t, t + 1)]


def states_of(x):
    return [x[name] for name in NAMES[5:]]


@compiled
def prompts(call, x):
    arrays = (x[name] for name in NAMES[:5])
    return mlstm_chunkwise(*arrays, return_last_states=True, **call.of_sequences)


@compiled
def padded_prompts(call, x):
    arrays, options = (x[name] for name in NAMES), dict(sequence_lengths=x["lengths"])
    return mlstm_chunkwise(*arrays, return_last_states=True, **options, **call.of_sequences)


@compiled
def packed_prompts(call, x):
    arrays, options = (x[name] for name in NAMES), dict(segment_ids=x["ids"])
    options |= dict(num_segments=SEGMENTS, return_last_states=True)
    return mlstm_chunkwise(*arrays, **options, **call.of_sequences)


@compiled
def gradients(call, x):
    def loss(arrays):
        h = mlstm_chunkwise(**arrays, **call.of_sequences)
        return jnp.sum(jnp.sin(h.astype("float32")))

    names = NAMES if call.gate == "exp" else NAMES[:7]
    return jax.grad(loss)({name: x[name] for name in names})


@compiled
def states_after_chunks(call, x):
    arrays = (x[name] for name in NAMES)
    return mlstm_chunkwise_states(*arrays, every=16, **call.of_sequences)


@compiled
def step(call, x):
    return mlstm_recurrent_step(*token_of(call, x, 0), *states_of(x), **call.of_steps)


@compiled
def step_in_pools(call, x):
    """An entry reads the row of its slot."""
    slots = x["slots"]
    pools = [jnp.zeros_like(y).at[slots].set(y) for y in states_of(x)]
    h, pools = mlstm_recurrent_step(*token_of(call, x, 0), *pools, slots=slots, **call.of_steps)
    return h, [y[slots] for y in pools]


@compiled
def several_steps(call, x):
    arrays = *steps_of(call, x, 0, 3), *states_of(x)
    return mlstm_recurrent_sequence(*arrays, **call.of_sequences)


def rings_of(call, x):
    c, n, m = states_of(x)
    options = dict(dtype=call.dtype, length=LENGTH, phase=x["phase"], input_gate=call.gate)
    return mlstm_ring_states(c, n, m if call.gate == "exp" else None, **options)


@functools.partial(jax.jit, static_argnums=(0, 1))
def advanced(call, T, x, t, rings):
    """A ring step of T tokens from t on."""
    x = {name: jnp.roll(x[name], -t, 1 if call.layout == "BTNH" else 2) for name in NAMES[:5]}
    if T == 1:
        return mlstm_ring_step(*token_of(call, x, 0), rings, **call.of_rings)
    options = dict(layout=call.layout, accepted=jnp.minimum(rings.pending[:, 0], 2))
    return mlstm_ring_step(*steps_of(call, x, 0, T), rings, **options, **call.of_rings)


def ring_steps(T, call, x):
    """Until every head has flushed."""
    rings, results = rings_of(call, x), []
    for n in range(LENGTH):
        h, rings = advanced(call, T, x, n * T, rings)
        results.append(h)
    return results, rings


ring_step, ring_of_drafts = (functools.partial(ring_steps, T) for T in (1, 3))
ring_step.__name__, ring_of_drafts.__name__ = "ring_step", "ring_of_drafts"


def ring_flush(call, x):
    """Of rings from 3 to 10 tokens, 3 of them pending, whose C has the dtype of k."""
    rings = rings_of(call, x)
    c, n, _ = states_of(x)
    rows = np.arange(2 * LENGTH)
    keys, gates = np.sin(rows)[:, None] * n[:, :, None], np.cos(rows) * n[:, :, :1]
    rings = rings._replace(
        k=jnp.asarray(keys, call.dtype),
        v=jnp.asarray(np.cos(rows)[:, None] * c[:, :, :1], call.dtype),
        i=jnp.asarray(gates),
        f=jnp.asarray(2 + gates),
        c=rings.c.astype(call.dtype),
        pending=jnp.full_like(rings.fill, 3),
    )
    return mlstm_ring_flush(rings, accepted=x["accepted"], config=call.config)


@compiled
def chained_prompts(call, x):
    """Two prompts in one program, of which the second begins with the states of the first."""
    options = call.of_sequences | dict(state_dtype="bfloat16", return_last_states=True)
    arrays, states = [x[name] for name in NAMES[:5]], ()
    for _ in range(2):
        h, states = mlstm_chunkwise(*arrays, *states, **options)
    return h, states


CHUNKWISE = prompts, padded_prompts, packed_prompts, states_after_chunks
STEPS = step, step_in_pools, several_steps, ring_step, ring_of_drafts
KERNELS = *CHUNKWISE, *STEPS
# Not promised: sums beside the kernels make the gradients, which plain jnp computes by head.
FUNCTIONS = *KERNELS, gradients, ring_flush, chained_prompts


def differences(function, call, batches):
    """Where an entry stands, and which result has other bits there than in a batch of one."""
    entry, found = drawn(call, 0, 1), []

    def at(place, B):
        x = drawn(call, 1 + B + place, B)
        for name in x.keys() - {"slots"}:
            x[name][place] = entry[name][0]
        return [np.asarray(y)[place] for y in jax.tree.leaves(function(call, x))]

    alone = at(0, 1)
    for B in batches:
        for place in sorted({0, B // 2, B - 1}):
            pairs = zip(at(place, B), alone, strict=True)
            wrong = [n for n, (y, z) in enumerate(pairs) if y.tobytes() != z.tobytes()]
            found += [(B, place, n) for n in wrong]
    return found


CALLS = (
    Call(2, 20, 40, 24),  # without batch_invariant all results but those of steps differ
    Call(1, 20, 8, 16, "bfloat16", "sigmoid", "BTNH"),
    Call(2, 40, 8, 8, "float16", layout="BTNH"),
)
# Some functions of the first call are in the quick selection. The other calls, in 16 bits and in a
# batch of 64, take turns: each has functions of sequences, of steps and of rings.
QUICK = prompts, step
ON_A_CPU = [
    pytest.param(
        function,
        call,
        id=f"{function.__name__}-{call.dtype}-{call.gate}",
        marks=[pytest.mark.slow] * (function not in QUICK or call is not CALLS[0]),
    )
    for n, function in enumerate(FUNCTIONS)
    for call in (CALLS[0], CALLS[1 + n % 2])
]


@pytest.mark.parametrize(("function", "call"), ON_A_CPU)
def test_bits_do_not_depend_on_the_batch(function, call):
    """At the first, a middle and the last place among other entries, which have other lengths,
    segments, phases, gates and resets."""
    assert not differences(function, call, (7,) if call is CALLS[0] else (64,))


OF_MOSAIC_GPU = Call(1, 128, 64, 128, "bfloat16", backend="mosaic_gpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "call"),
    [
        pytest.param(
            function, CALLS[0]._replace(backend="interpret"), id=f"triton-{function.__name__}"
        )
        for function in KERNELS
    ]
    + [
        pytest.param(
            function,
            OF_MOSAIC_GPU,
            id=f"mosaic_gpu-{function.__name__}",
            marks=needs_mosaic_gpu,
        )
        for function in CHUNKWISE
        if function is not prompts  # padded ones run the same kernels
    ],
)
def test_bits_of_interpreted_kernels(function, call):
    """On Mosaic GPU an entry has others before or behind it; on a GPU it has both."""
    on_mosaic_gpu = call is OF_MOSAIC_GPU
    with quick_code(), interpreted_mosaic_gpu() if on_mosaic_gpu else contextlib.nullcontext():
        assert not differences(function, call, (2,) if on_mosaic_gpu else (3,))


GPU_CALLS = (
    Call(8, 640, 64, 128, "bfloat16", layout="BTNH"),
    Call(2, 300, 128, 256, "bfloat16", "sigmoid"),
    Call(4, 330, 64, 64, "float32"),
    Call(1, 257, 96, 192, "float16"),
)


# Each function has half of the calls, each call half of the functions.
ON_A_GPU = [
    pytest.param(
        function,
        call._replace(backend=backend),
        id=f"{backend}-{function.__name__}-{call.dtype}-{call.gate}",
    )
    for backend in ("triton", "mosaic_gpu")
    for place, function in enumerate((*KERNELS, ring_flush))
    for number, call in enumerate(GPU_CALLS)
    if (place + number + number // 2) % 2 == 0
    # Mosaic GPU has kernels for whole sequences in 16 bits.
    if backend == "triton" or (function in CHUNKWISE and call.dtype != "float32")
]
OF_ONE_HEAD = GPU_CALLS[3]
ON_A_GPU += [
    pytest.param(function, OF_ONE_HEAD._replace(backend=backend), id=f"{backend}-{name}-one_head")
    for function, backend, name in (
        (ring_flush, "xla", "ring_flush"),
        (chained_prompts, "triton", "chained_prompts"),
        (chained_prompts, "mosaic_gpu", "chained_prompts"),
    )
]


@pytest.mark.gpu
@pytest.mark.parametrize(("function", "call"), ON_A_GPU)
def test_bits_on_a_gpu(function, call):
    """In an odd batch that has more heads than there are SMs."""
    assert not differences(function, call, (63 if call.NH > 2 else 135,))


@pytest.mark.parametrize(
    ("backend", "dtype", "seed"),
    [
        slow("interpret", "float16", 2),
        pytest.param("triton", "float16", 23559883, marks=pytest.mark.gpu),
    ],
)
def test_one_head_alone_has_the_bits_of_a_batch(backend, dtype, seed):
    """With seeds of which a launch of one CTA, whose indices are constants, has other bits. The
    rows of this head are at no multiple of 16 bytes."""
    options = {
        "layout": "BNTH",
        "T": 1,
        "length": 16,
        "rollback": False,
        "phase": 0,
        "joined": False,
    }
    errors = selfcheck.check(
        function="mlstm_ring_step",
        backend=backend,
        seed=seed,
        B=3,
        NH=1,
        S=48,
        DHQK=250,
        DHV=24,
        initial=True,
        dtype=dtype,
        states=["bfloat16", "float32", "float32"],
        slots=False,
        options=options | {"config": {"batch_invariant": True}},
    )
    assert errors["bits in a batch"] == (0, 1)


@compiled
def flushed_rings(call, x):
    return mlstm_ring_flush(x["rings"], config=call.config)


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
        call, sharding = Call(1, 128, 96, 192, dtype, backend=backend), on_a_hopper()
        x = drawn(call, 0, B)
        if function is flushed_rings:
            x["c_initial"] = x["c_initial"].astype(dtype)
            x = dict(rings=rings_of(call, x))
        x = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=sharding), x)
        with for_device("NVIDIA H200"):
            lowered = function.lower(call, x)
            text = lowered.compile().as_text()
        # Mosaic GPU has C^T.
        return len(re.findall(r"\[(?:\d+,)*(?:96,192|192,96)\]\S* convert\(", text))

    of_one_head = casts_of_c(1)
    assert of_one_head > 1
    assert [casts_of_c(B) for B in (2, 3)] == [of_one_head] * 2
