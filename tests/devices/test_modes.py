"""Every public function under the switches of jax, jitted or not, and the state of the process."""

import asyncio
import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_evaluator import kernels_in_numpy
from oracle import assert_close, joined_arrays, random_inputs, slow, tolerance
from relations_devices import in_mode, same_program

from mlstm_pallas import (
    KernelConfig,
    mlstm_chunkwise,
    mlstm_recurrent_step,
    mlstm_ring_flush,
    mlstm_ring_states,
    mlstm_ring_step,
    reference,
    use_backend,
)
from mlstm_pallas.planning.backend import named_backend

QUICK = "step", "joined", "bfloat16"  # traced within a second
REST = ("`segment_lengths`", "states of steps", "ring step", "slots", "reference")
REST += ("max_triton_fwbw_v5xlchunksize",)
# Each mode with calls that differ in what it changes. Empty places of a ring have infinite gates.
IN_MODES = {
    "no jit": ("slots", "generator"),
    "NaNs": (
        *("slots", "joined", "states of steps", "reverse", "triton_stablef"),
        *("reference", "recurrence"),
    ),
    "x64": ("shards",),
    "x64, guarded": ("slots", "ring step", "`segment_lengths`", "recurrence"),
    "leaks": ("step", "ring step", "states of steps", "generator"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *map(slow, REST)])
def test_switches_of_jax_change_no_program(name):
    same_program(name)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "name"), [(x, y) for x, names in IN_MODES.items() for y in names])
def test_calls_in_modes(mode, name):
    in_mode(name, None, mode)


@pytest.mark.slow
def test_interpreted_kernels_under_x64():
    with kernels_in_numpy():
        in_mode("reverse", "interpret", "x64")


# ---------------- NumPy arrays of 64 bits that are closed over


def calls_with_constants():
    """Functions of floats of 32 bits, and those floats; integers and gates are constants."""
    x, few = ([*random_inputs(0, 2, 1, S, 8, 8).values()] for S in (32, 3))
    ids, lengths = np.repeat(np.arange(2), 16)[None].repeat(2, 0), np.array([20, 32])
    i, f = (np.asarray(y, "float64") for y in x[3:5])
    token, pools = [y[:, :, 0] for y in few[:5]], [jnp.concatenate([y, y]) for y in few[5:]]
    rings = mlstm_ring_states(*pools, dtype="float32", phase=np.array([3, 1, 4, 2]))
    slots, accepted, gates = np.array([2, 0]), np.array([0, 2]), np.asarray(token[3], "float64")
    options = dict(return_last_states=True, chunk_size=16)
    documents = functools.partial(mlstm_chunkwise, segment_lengths=np.full((2, 2), 16), **options)
    options |= dict(segment_ids=ids, sequence_lengths=lengths)
    packed = functools.partial(mlstm_chunkwise, **options)

    def ring(*x):
        _, y = mlstm_ring_step(*x, gates, gates, rings, slots=slots, accepted=accepted)
        return mlstm_ring_flush(y, accepted=np.array([1, 0, 1, 0]))

    return {
        "chunkwise": (lambda *x: packed(*x, i, f), x[:3]),
        "documents": (lambda *x: documents(*x, i, f), x[:3]),
        "step": (lambda *x: mlstm_recurrent_step(*x, gates, gates, *pools, slots=slots), token[:3]),
        "ring": (ring, token[:3]),
        "reference": (lambda *x: reference.chunkwise(*x, i, f, **options), x[:3]),
        "recurrence": (lambda *x: reference.recurrence(*x, i, f, segment_ids=ids), x[:3]),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["step", *map(slow, ("ring", "chunkwise", "reference", "recurrence"))]
)
def test_numpy_constants_of_a_live_program_before_and_after_x64(name):
    """jax would keep the NumPy array in the width of the first program."""
    run, x = calls_with_constants()[name]
    jitted, results = jax.jit(run), []
    for x64 in (True, False, True):
        with jax.enable_x64(x64):
            results += [jax.tree.leaves(function(*x)) for function in (jitted, run)]
    for result in results[1:]:
        for y, expected in zip(result, results[0], strict=True):
            assert_close(y, expected, 4 * tolerance("float32", 64), name)


# ---------------- calls that are not jitted


def configured(*x):
    """Static arguments that are equal each time, but no objects of the call before."""
    config = KernelConfig(fused=False)
    return mlstm_chunkwise(*x, eps=1e-3, autocast_kernel_dtype="float32", config=config)


def calls_without_jit():
    x, lengths = [*random_inputs(0, 1, 1, 16, 8, 8).values()], jax.device_put(np.array([13]))
    joined = joined_arrays(*(y[:, :, 0] for y in x[:5]), *x[5:])
    yield "configured", configured, x
    yield "recurrence", reference.recurrence, x
    yield "lengths", functools.partial(mlstm_chunkwise, sequence_lengths=lengths), x
    yield "joined", mlstm_recurrent_step, joined


@pytest.mark.slow
@pytest.mark.parametrize("name", ["configured", "recurrence", "lengths", "joined"])
def test_a_second_call_without_jit_compiles_and_transfers_nothing(caplog, name):
    [(run, x)] = [y for other, *y in calls_without_jit() if other == name]
    run(*x)
    with jax.log_compiles(True), jax.transfer_guard("disallow"):
        run(*x)
    assert "Finished XLA compilation" not in caplog.text


def test_a_use_backend_is_entered_twice():
    xla, interpret = use_backend("xla"), use_backend("interpret")
    with interpret:
        with xla:
            with interpret:
                assert named_backend()[1] == "interpret"
            assert named_backend()[1] == "xla"
        assert named_backend()[1] == "interpret"
    assert named_backend()[1] is None


def test_a_use_backend_holds_in_its_asyncio_task():
    seen, both = [], asyncio.Barrier(2)

    async def task(*contexts):
        with contextlib.ExitStack() as entered:
            for context in contexts:
                entered.enter_context(context)
            await both.wait()
            seen.append(named_backend()[1])
            await both.wait()

    async def tasks():
        await asyncio.gather(task(use_backend("xla")), task())

    asyncio.run(tasks())
    assert sorted(seen, key=str) == [None, "xla"]
