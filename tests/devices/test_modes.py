"""Every public function under the debug modes of jax, jitted and not, and the state of the process.

As a script, test_modes.py MODE,..., it makes the calls under these modes together.
"""

import argparse
import asyncio
import contextlib
import functools
import os
import re
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from call_checks import UNDER_X64, calls_of, check_call
from jax.sharding import PartitionSpec as P
from mesh_calls import both_passes
from oracle import (
    assert_close,
    joined_arrays,
    mesh_of,
    random_inputs,
    run_python,
    sharded,
    slow,
    token_at,
    tolerance,
)
from test_packed_sequences import check_prompts

from mlstm_pallas import (
    KernelConfig,
    mlstm_chunkwise,
    mlstm_chunkwise_states,
    mlstm_recurrent_sequence,
    mlstm_recurrent_step,
    mlstm_ring_flush,
    mlstm_ring_states,
    mlstm_ring_step,
    reference,
    use_backend,
)
from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel
from mlstm_pallas.export import export
from mlstm_pallas.planning.backend import requested_backend
from mlstm_pallas.xlstm_jax import (
    max_triton_fwbw_v3noslice,
    max_triton_fwbw_v5xlchunksize,
    triton_stablef,
)

BOUND = 4 * tolerance("float32", 64)
STEPS = P(None, None, "s")
chunkwise = functools.partial(mlstm_chunkwise, chunk_size=16)
over_shards = functools.partial(
    mlstm_chunkwise_sequence_parallel, chunk_size=16, axis_name="s", return_last_states=True
)
on_mapped_shards = jax.vmap(over_shards, axis_name="s")


def inputs(S, **options):
    return [*random_inputs(0, 1, 1, S, 8, 8, **options).values()]


def with_gradients(run):
    """The results of run and its gradients at cotangents that are these results."""

    def both(*x):
        results, vjp = jax.vjp(run, *x)
        return results, vjp(results)

    return both


def calls():
    """(name, function, arguments), without numbers of Python that jax would transfer."""
    x, plain = inputs(20), inputs(20, states=False)  # no multiple of the chunk
    token = [y[:, :, 0] for y in x[:5]] + x[5:]
    ids, lengths = map(jax.device_put, (np.arange(20, dtype="int32")[None] // 12, np.array([17])))
    shards = [jax.device_put(np.stack(np.split(np.asarray(y), 2, axis=2))) for y in plain]
    mesh = mesh_of((2,), names="s")
    on_mesh = jax.shard_map(over_shards, mesh=mesh, in_specs=STEPS, out_specs=(STEPS, P()))
    packed = functools.partial(chunkwise, return_last_states=True)
    generated = triton_stablef._mlstm_chunkwise_fwbw_generator(None, True, chunk_size=16)
    yield "chunkwise", with_gradients(packed), x
    yield "without_states", with_gradients(chunkwise), plain
    ids = dict(segment_ids=ids, sequence_lengths=lengths)
    yield "segments", with_gradients(functools.partial(packed, num_segments=2, **ids)), plain
    yield "packed", with_gradients(functools.partial(packed, **ids)), plain
    yield "step", mlstm_recurrent_step, token
    few = [y[:, :, :3] for y in plain]
    yield "steps", mlstm_recurrent_sequence, few
    yield "lengths", functools.partial(mlstm_recurrent_sequence, sequence_lengths=lengths), plain
    yield "joined", mlstm_recurrent_step, joined_arrays(*token)
    yield "ring", mlstm_ring_step, [*few, jax.jit(ring_of)(token)]
    yield "flush", mlstm_ring_flush, [jax.jit(ring_of)(token)]
    yield "states", functools.partial(mlstm_chunkwise_states, every=16), x
    yield "bfloat16", functools.partial(packed, **ids), [y.astype("bfloat16") for y in plain]
    yield "mapped_shards", with_gradients(on_mapped_shards), shards
    yield "mesh", with_gradients(on_mesh), sharded(plain, mesh, STEPS)
    yield "reference", with_gradients(reference.chunkwise), x
    yield "recurrence", with_gradients(reference.recurrence), x
    yield "generator", with_gradients(generated), plain
    for system in (max_triton_fwbw_v3noslice, max_triton_fwbw_v5xlchunksize, triton_stablef):
        yield system.__name__, both_passes(system), inputs(64)[:5]


def ring_of(token):
    return mlstm_ring_states(*token[5:], dtype="float32")


def calls_with_slots():
    """Calls of steps with 64-bit lengths and slots."""
    x, token = inputs(3), [*token_at(random_inputs(0, 1, 1, 1, 8, 8), 0).values()]
    pools = [jnp.concatenate([y] * 3) for y in token[5:]]
    for options in dict(sequence_lengths=np.array([2])), dict(return_all_states=True):
        yield functools.partial(mlstm_recurrent_sequence, **options), x[:5]
    yield functools.partial(mlstm_recurrent_step, slots=np.array([2])), token[:5] + pools
    yield mlstm_recurrent_step, joined_arrays(*token)


@pytest.mark.slow
@pytest.mark.parametrize("slow_ones", [False, slow(True)])
def test_calls_under_x64_keep_the_dtypes_of_their_arguments(slow_ones):
    """The default backend traces the Triton kernels and plain jnp."""
    names = "chunkwise", "without_states", "packed", "mapped_shards"
    traced = [(run, x) for name, run, x in calls() if (name in names) == slow_ones]
    with jax.enable_x64(True):
        for run, x in [*traced, *calls_with_slots()]:
            passed, found = (
                {y.dtype.name for y in jax.tree.leaves(z)} for z in (x, jax.eval_shape(run, *x))
            )
            assert found <= {"float32", "int32", *passed}
        exported = export(run, *x, platform=("cpu", "cuda"), device_kind="NVIDIA H200")
        assert {y.dtype.name for y in exported.out_avals} == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize("call", [*calls_of(UNDER_X64)])
def test_interpreted_kernels_under_x64(call):
    with jax.enable_x64(True):
        check_call(**call)


@pytest.mark.slow
def test_interpreted_prompts_under_x64():
    with jax.enable_x64(True):
        check_prompts(0, 16, 32, rows=([5, 40, 1], [33]), go_on=True, backend="interpret")


# Switches of jax that change nothing: a call is traced to the same program, so that its results
# have the same bits.
SWITCHES = {
    "rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "custom_prng": lambda: jax.enable_custom_prng(True),
    "threefry": lambda: jax.threefry_partitionable(not jax.config.jax_threefry_partitionable),
    "leaks": lambda: jax.checking_leaks(),
    **{
        x: functools.partial(jax.default_matmul_precision, x)
        for x in ("bfloat16", "tensorfloat32", "float32", "BF16_BF16_F32", "F32_F32_F32")
    },
}
# Calls that are traced within a second.
SHORT = "step", "steps", "lengths", "joined", "ring", "flush", "states", "bfloat16"


def program_of(run, x, *switches):
    """The jaxpr of a call that is traced anew under the switches."""
    with contextlib.ExitStack() as stack:
        for name in switches:
            stack.enter_context(SWITCHES[name]())
        return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(run)(*x)))


LONG = "chunkwise", "without_states", "segments", "packed", "mapped_shards", "mesh", "generator"
LONG += "reference", "recurrence"


@pytest.mark.quick("flush", "step")
@pytest.mark.parametrize("name", [*SHORT, *map(slow, LONG)])
def test_switches_of_jax_change_no_program(name):
    """Short calls under all at once but for one precision at a time, the others one by one, because
    jax prints a jaxpr that several equations share in another way where leaks are checked.

    jax finds a leak in the jitted gradient of every shard_map that sums by axis_index.
    """
    [(run, x)] = [(run, x) for other, run, x in calls() if other == name]
    together = [y for y in SWITCHES if y not in ("bfloat16", "tensorfloat32", "float32")]
    apart = [[y] for y in SWITCHES if name != "mesh" or y != "leaks"]
    expected = program_of(run, x)
    for switches in [together, ["float32"]] if name in SHORT else apart:
        assert program_of(run, x, *switches) == expected, switches


def calls_with_constants():
    """(name, function of floats of 32 bits, those floats): NumPy arrays of 64 bits are closed over,
    integers and gates."""
    x, tokens = random_inputs(0, 2, 1, 32, 8, 8), random_inputs(0, 2, 1, 3, 8, 8)
    ids, lengths = np.repeat(np.arange(2), 16)[None].repeat(2, 0), np.array([20, 32])
    i, f = (np.asarray(x[name], "float64") for name in "if")
    floats, few = [x[name] for name in "qkv"], [*tokens.values()]
    token, pools = [y[:, :, 0] for y in few[:5]], [jnp.concatenate([y, y]) for y in few[5:]]
    rings = mlstm_ring_states(*pools, dtype="float32", phase=np.array([3, 1, 4, 2]))
    slots, accepted, gates = np.array([2, 0]), np.array([0, 2]), np.asarray(token[3], "float64")
    here = dict(segment_ids=ids, sequence_lengths=lengths)
    packed = functools.partial(chunkwise, num_segments=2, return_last_states=True, **here)
    yield "chunkwise", lambda *x: chunkwise(*x, i, f, **here), floats
    yield "step", lambda *x: mlstm_recurrent_step(*x, gates, gates, *pools, slots=slots), token[:3]
    yield (
        "ring",
        lambda *x: mlstm_ring_flush(
            mlstm_ring_step(*x, gates, gates, rings, slots=slots, accepted=accepted)[1],
            accepted=np.array([1, 0, 1, 0]),
        ),
        token[:3],
    )
    yield (
        "sequence",
        lambda *x: mlstm_recurrent_sequence(*x, sequence_lengths=np.array([1, 3])),
        few[:5],
    )
    yield "segments", lambda *x: packed(*x, i, f), floats
    yield "states", lambda *x: mlstm_chunkwise_states(*x, i, f, every=16, **here), floats
    yield "reference", lambda *x: reference.chunkwise(*x, i, f, chunk_size=16, **here), floats
    yield "recurrence", lambda *x: reference.recurrence(*x, i, f, segment_ids=ids), floats


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "first"),
    [
        *((name, False) for name in ("chunkwise", "step", "ring", "sequence")),
        *(
            slow(name, first)
            for name in ("segments", "states", "reference", "recurrence")
            for first in (False, True)
        ),
        *(slow(name, True) for name in ("chunkwise", "step", "ring", "sequence")),
    ],
)
def test_numpy_constants_of_a_live_program_before_and_after_x64(name, first):
    """jax would keep the NumPy array in the width of the first program."""
    [(run, x)] = [(run, x) for other, run, x in calls_with_constants() if other == name]
    jitted, results = jax.jit(run), []
    for x64 in (True, False, True) if first else (False, True):
        with jax.enable_x64(x64):
            results += [jax.tree.leaves(function(*x)) for function in (jitted, run)]
    for result in results[1:]:
        for y, expected in zip(result, results[0], strict=True):
            assert_close(y, expected, BOUND, name)


MODES = (
    "jax_disable_jit",
    "jax_debug_nans,jax_debug_infs,jax_transfer_guard",
    "jax_enable_x64,jax_check_tracer_leaks,jax_explain_cache_misses,jax_log_compiles",
)
# One call per path through the code, for modes in which nothing that is traced or compiled is used
# again.
FEW = "segments", "step", "lengths", "ring", "mapped_shards", "generator"


@pytest.mark.slow  # processes in modes that have to be set before the first call
@pytest.mark.parametrize(("modes", "count"), [*zip(MODES, (6, 18, 6), strict=True)])
def test_calls_of_a_fresh_process_in_modes(modes, count):
    settings = dict(PYTHONPATH=os.pathsep.join(sys.path), JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    output = run_python(__file__, modes, **settings)
    assert output.splitlines()[-1] == f"{count} calls"


def configured(*x):
    """A call whose static arguments are equal each time, but no objects of the call before."""
    config = KernelConfig(fused=False)
    return mlstm_chunkwise(*x, eps=1e-3, autocast_kernel_dtype="float32", config=config)


EAGER = dict(mapped_shards=on_mapped_shards, configured=configured, recurrence=reference.recurrence)


@pytest.mark.quick("configured", "lengths", "recurrence", "steps", "joined")
@pytest.mark.parametrize("name", [*EAGER, "steps", "lengths", "joined"])
def test_a_second_call_without_jit_compiles_and_transfers_nothing(caplog, name):
    [(run, x)] = [(run, x) for other, run, x in calls() if other == name] or [(None, inputs(16))]
    run = EAGER.get(name, run)
    run(*x)
    with jax.log_compiles(True), jax.transfer_guard("disallow"):
        run(*x)
    assert "Finished XLA compilation" not in caplog.text


def test_a_use_backend_is_entered_twice_and_by_two_threads():
    xla, interpret, seen = use_backend("xla"), use_backend("interpret"), []
    entered, left = threading.Event(), threading.Event()

    def other():
        with xla, interpret:
            entered.set()
            left.wait(20)
            seen.append(requested_backend())
        seen.append(requested_backend())

    thread = threading.Thread(target=other)
    with interpret:
        thread.start()
        entered.wait(20)
        with xla:
            with interpret:
                assert requested_backend() == "interpret"
            assert requested_backend() == "xla"
        assert requested_backend() == "interpret"
    left.set()
    thread.join(20)
    assert seen == ["interpret", None]
    assert requested_backend() is None


def test_a_use_backend_holds_in_its_asyncio_task():
    seen, both = [], asyncio.Barrier(2)

    async def task(*contexts):
        with contextlib.ExitStack() as entered:
            for context in contexts:
                entered.enter_context(context)
            await both.wait()
            seen.append(requested_backend())
            await both.wait()

    async def tasks():
        await asyncio.gather(task(use_backend("xla")), task())

    asyncio.run(tasks())
    assert sorted(seen, key=str) == [None, "xla"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modes", choices=MODES)
    modes = parser.parse_args().modes.split(",")
    jax.config.update("jax_num_cpu_devices", 2)
    prepared = [*calls()]
    if "jax_debug_infs" in modes:  # empty places of a ring have infinite gates
        prepared = [x for x in prepared if x[0] not in ("ring", "flush")]
    else:
        prepared = [x for x in prepared if x[0] in FEW]
    for mode in modes:
        jax.config.update(mode, "disallow" if mode == "jax_transfer_guard" else True)
    for name, run, x in prepared:
        print(name, flush=True)
        # jax finds a leak in the jitted gradient of every shard_map that sums by axis_index.
        leaks = "jax_check_tracer_leaks" in modes and name != "mesh"
        with jax.check_tracer_leaks(leaks), jax.disable_jit(False):
            results = jax.tree.leaves(jax.jit(run)(*x))
        for y, expected in zip(jax.tree.leaves(run(*x)), results, strict=True):
            with jax.transfer_guard("allow"), jax.disable_jit(False):
                assert_close(y, expected, BOUND, name)
    print(f"{len(prepared)} calls")
