"""Shared by the tests: random inputs, the float64 oracle, the error norm, the tolerances, and how
tests trace, lower and start processes."""

import contextlib
import functools
import importlib.util
import math
import os
import re
import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from numpy_evaluator import in_numpy, jit

from mlstm_pallas import (
    KernelConfig,
    mlstm_chunkwise,
    mlstm_recurrent_step,
    reference,
)
from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel
from mlstm_pallas.planning.backend import jax_has_mosaic_gpu

needs_mosaic_gpu = pytest.mark.skipif(
    not jax_has_mosaic_gpu(), reason="the Mosaic GPU kernels need jax >= 0.11.2 and < 0.13"
)
needs_compiler = pytest.mark.skipif(
    not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))),
    reason="XLA's compiler for CUDA is in jax_cuda13_plugin, which is not installed",
)
MOSAIC_CALL = "mosaic_gpu_v2"  # the target of the custom call of a Mosaic GPU kernel
# Kernels that are no stages.
HELPERS = {
    "chunk_summaries",
    "stabiliser_scan",
    "m_summaries",
    "m_carry_scan",
    "step_sums",
    "vector_states",
    "step_gradients",
    "split_products",
}
# Their first parameters are q, k, v, i, f and three states.
PUBLIC = (
    mlstm_chunkwise,
    mlstm_chunkwise_sequence_parallel,
    mlstm_recurrent_step,
    reference.chunkwise,
    reference.recurrence,
)
# Of the draws that differ in each run; a failure names it. All processes of a run have the same.
SEED = int(
    os.environ.setdefault("MLSTM_PALLAS_SEED", str(np.random.SeedSequence().entropy % 10**9))
)
HEADS = [(64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512), (512, 512)]
OUTPUTS = ("h", "c", "n", "m")
NAMES = ("q", "k", "v", "i", "f", "c_initial", "n_initial", "m_initial")


def array(x, dtype):
    """A jax.Array of the dtype.

    jnp.asarray and astype round alike, but by a program that is compiled for each shape.
    """
    return jax.device_put(np.asarray(x).astype(jnp.dtype(dtype)))


def random_inputs(
    seed,
    B,
    NH,
    S,
    DHQK,
    DHV,
    *,
    dtype="float32",
    states=True,
    i_scale=1.0,
    i_shift=0.0,
    f_shift=2.0,
    f_scale=1.0,
    resets=False,
    m_initial=True,
):
    """Arguments of mlstm_chunkwise as a dict.

    q, k and n are positive, which keeps |z| away from zero: 1/|z| is heavy-tailed.
    """
    r = np.random.default_rng(seed)

    def normal(*shape):
        return r.normal(size=(B, NH, *shape))

    x = {
        "q": np.abs(normal(S, DHQK)) + 0.2,
        "k": np.abs(normal(S, DHQK)) + 0.2,
        "v": normal(S, DHV),
        "i": normal(S) * i_scale + i_shift,
        "f": normal(S) * f_scale + f_shift,
    }
    if resets:
        for name, share, value in ("f", 0.1, -np.inf), ("f", 0.1, np.inf), ("i", 0.3, -np.inf):
            x[name] = np.where(r.random((B, NH, S)) < share, value, x[name])
    if states:
        x |= dict(c_initial=normal(DHQK, DHV), n_initial=np.abs(normal(DHQK)))
        if m_initial:
            x["m_initial"] = normal()
    return {name: array(value, dtype if name in "qkv" else "float32") for name, value in x.items()}


def call_shapes(B, NH, S, DHQK, DHV, dtype="bfloat16", layout="BNTH", sharding=None):
    """q, k, v, i and f of a call, as shapes."""
    lead = (B, NH, S) if layout == "BNTH" else (B, S, NH)
    q, v = (jax.ShapeDtypeStruct((*lead, D), dtype, sharding=sharding) for D in (DHQK, DHV))
    gate = jax.ShapeDtypeStruct(lead, "float32", sharding=sharding)
    return [q, q, v, gate, gate]


# Those of most functions.
BACKENDS = ("xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu))


def slow(*values):
    """A slow row of a parametrised test."""
    return pytest.param(*values, marks=pytest.mark.slow)


def shown(x):
    """A value as it is in the id of a test."""
    if isinstance(x, KernelConfig):
        fields = vars(x) | {name: dict(tiles) for name, tiles in x.tiles}
        fields = {name: y for name, y in fields.items() if name != "tiles" and y is not None}
        return f"KernelConfig({shown(fields)[5:-1]})"
    if isinstance(x, dict):
        return f"dict({', '.join(f'{name}={shown(y)}' for name, y in x.items())})"
    if isinstance(x, list | tuple):
        return ("[{}]" if isinstance(x, list) else "({})").format(", ".join(map(shown, x)))
    if isinstance(x, np.ndarray):
        return f"array{x.shape}"
    if isinstance(x, functools.partial):
        return shown(x.func)
    if callable(x):
        return x.__name__
    return f'"{x}"' if isinstance(x, str) else str(x)


def param(*columns, id=None, marks=(), **options):
    """Parameters of a test: columns, which are names or shapes, and a dict of options, all of which
    are in its id."""
    if not id:
        first = ("-".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in columns)
        id = " ".join([*first, shown(options)[5:-1]]).strip()
    return pytest.param(*columns, options, id=id, marks=marks)


slow_param = functools.partial(param, marks=pytest.mark.slow)


def run_python(*arguments, timeout=600, **settings):
    """What a process prints that has to end well, and in time. Settings: of its environment."""
    try:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"{arguments} does not end: {str(late.output)[-4000:]}")
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


shared = functools.cache(functools.partial)  # one object, so that it is compiled once


def in_float64(function, *x):
    """What a function of arrays returns in float64, as numpy arrays."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda y: array(y, "float64"), x)
        return jax.tree.map(np.asarray, function(*wide))


def oracle(inputs, segment_ids=None, **options):
    """reference.recurrence in float64: h, c, n, m as float64 numpy arrays.

    Options: those of recurrence.
    """
    run = shared(reference.recurrence, **options)
    exact = in_numpy(lambda x: run(**x, segment_ids=segment_ids))
    return jax.tree.leaves(in_float64(exact, inputs))


def error(actual, expected):
    """||actual - expected|| / ||expected||; infinite where only one of the two is finite."""
    actual = np.asarray(actual).astype("float64")
    expected = np.asarray(expected, "float64")
    assert actual.shape == expected.shape
    finite = np.isfinite(expected)
    if not np.array_equal(*(np.where(np.isfinite(x), 0, x) for x in (actual, expected))):
        return math.inf
    difference = np.linalg.norm(actual[finite] - expected[finite])
    size = np.linalg.norm(expected[finite])
    return difference / size if size else difference


def tolerance(dtype, terms):
    """Bound on the relative norm of a result whose products have operands of ``dtype`` and whose
    sums have ``terms`` terms.

    Four independent roundings to the kernel dtype lie on the way to h (an operand, a weight or the
    state, the other operand's weight, the result), each of at most u / sqrt(3) in the mean; float32
    sums of n terms add sqrt(n) roundings of float32, or of float64.
    """
    bits = dict(bfloat16=8, float16=11, float32=24, float64=53)[jnp.dtype(dtype).name]
    return math.sqrt(4 / 3) * 2.0**-bits + math.sqrt(terms) * 2.0 ** -max(bits, 24)


def changes_by_rounding(function, params):
    """By how much each array of a function's results changes, as ``error`` has it, where all
    float32 parameters are rounded once more. Two right computations may differ by a few times the
    largest of these."""
    draw = np.random.default_rng(0)

    def rounded(x):
        return x * (1 + 2.0**-23 * draw.choice([-1, 1], x.shape)).astype("float32")

    exact, changed = map(jax.tree.leaves, map(function, (params, jax.tree.map(rounded, params))))
    return [error(x, y) for x, y in zip(changed, exact, strict=True)]


def assert_close(actual, expected, bound, what=""):
    result = error(actual, expected)
    assert result <= bound, f"{what}: relative error {result:.2e} above {bound:.2e}"


def compare(names, actual, desired, bound):
    """assert_close of each pair."""
    for name, x, y in zip(names, actual, desired, strict=True):
        assert_close(x, y, bound, name)


def check_outputs(result, inputs, bound, **options):
    """Compares h, (c, n, m) of a call with the recurrence in float64."""
    compare(OUTPUTS, jax.tree.leaves(result), oracle(inputs, **options), bound)


def shapes_and_dtypes(arrays):
    return [(x.shape, x.dtype) for x in arrays]


def assert_same_bits(a, b):
    """Two trees of arrays have equal bits."""
    for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        assert np.array_equal(np.asarray(x), np.asarray(y))


def emptied(inputs):
    """The inputs with initial states in which nothing is stored."""
    empty = {name: 0 * inputs[name] for name in ("c_initial", "n_initial")}
    return inputs | empty | dict(m_initial=inputs["m_initial"] - jnp.inf)


def check_draws(check, name, count):
    """check(seed) of so many seeds, other ones for each name and in each run."""
    for seed in map(int, np.random.SeedSequence([SEED, *name.encode()]).generate_state(count)):
        try:
            check(seed)
        except AssertionError as failure:
            failure.add_note(f"the seed is {seed}; MLSTM_PALLAS_SEED={SEED} draws it again")
            raise


def token_at(inputs, t):
    """Arguments of mlstm_recurrent_step, of the token t."""
    return {name: x if "initial" in name else x[:, :, t] for name, x in inputs.items()}


def check_isolated(run, x, poisoned, unaffected):
    """What is unaffected, a function of a result, is finite and has the same bits if x is poisoned;
    returns both results."""
    results = run(x), run(poisoned)
    clean, beside = map(unaffected, results)
    assert_same_bits(beside, clean)
    assert all(np.isfinite(y).all() for y in jax.tree.leaves(clean))
    return results


def refused(kind, message, call, *args, **kwargs):
    """The call raises this kind of error with this first line."""
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    assert str(caught.value).split("\n")[0] == message


def refusal(kind, message, call):
    """Parameters of a test: what raises an error of this kind with this message."""
    return pytest.param(kind, message, call, id=message[:60])


def mesh_for(device, shape=(), names="", kind=AxisType.Auto):
    """A mesh of GPUs of this kind, which need not be there."""
    device = AbstractDevice(device, None, "tpu" if device.startswith("TPU") else "gpu")
    return AbstractMesh(shape, tuple(names), (kind,) * len(shape), abstract_device=device)


def for_device(kind):
    """Calls inside are traced and lowered for this GPU."""
    return jax.sharding.use_abstract_mesh(mesh_for(kind))


def lowered_for_cuda(function, *x, mesh=None):
    """The text of what a jitted function of x lowers to for H200s."""
    with jax.sharding.use_abstract_mesh(mesh or mesh_for("NVIDIA H200")):
        return function.trace(*x).lower(lowering_platforms=("cuda",)).as_text()


COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\("
)


def collectives(compiled):
    """{collective: how many there are in the compiled module}."""
    return Counter(name for _, name in COLLECTIVE.findall(compiled.as_text()))


def mesh_of(shape, kind=AxisType.Auto, *kinds, names="xyz", platform="cpu"):
    """Axes of the kind, or of one kind each."""
    return jax.make_mesh(
        shape,
        tuple(names[: len(shape)]),
        axis_types=(kind, *kinds) if kinds else (kind,) * len(shape),
        devices=jax.devices(platform)[: math.prod(shape)],
    )


def sharded(arrays, mesh, *specs):
    """The arrays sharded by the one spec, or by one each."""
    specs = specs if len(specs) > 1 else specs * len(arrays)
    return [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]


def loss_of(h, states):
    """A loss of h and of the states."""
    h = h if h.dtype == "float64" else h.astype("float32")
    of_states = (jnp.sum(jnp.sin(jnp.where(jnp.isfinite(y), y, 0.0))) for y in states)
    return jnp.sum(h * jnp.cos(h)) + sum(of_states)


@contextlib.contextmanager
def quick_code(quick=True):
    """What is compiled inside, if quick, is not optimised: nobody runs interpreted kernels as they
    are."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", quick or before)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@contextlib.contextmanager
def strict():
    """Everything inside traces under the strict promotion modes of jax, as in some models."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def config_in_splits(num_splits, fused=True, fused_tiles=None, **tiles):
    """A config with all recurrences in so many splits, if these are whole chunks.

    tiles: fields that the Triton kernels share; fused_tiles: others of the fused scan.
    """
    parts = tiles | dict(num_splits=num_splits)
    return KernelConfig(
        fused=fused,
        num_splits=num_splits,
        triton_recurrent_fw_H=tiles | (fused_tiles or {}),
        triton_recurrent_fw_C=parts,
        triton_recurrent_bw_dC=parts,
    )


def results_of(run):
    """A jitted function of up to eight arguments: h, c, n, m and the gradients of a loss that is
    not computed, because devices would exchange its sum."""

    @strict()
    def results(*x):
        def loss(*x):
            h, *states = jax.tree.leaves(run(*x))
            return loss_of(h, states), (h, *states)

        gradients, outputs = jax.grad(loss, tuple(range(len(x))), has_aux=True)(*x)
        return *outputs, *gradients

    return jax.jit(results)


RESULTS = *OUTPUTS, *NAMES


def in_layout(layout, names, arrays):
    """Arrays with these names in a layout, or back from it."""
    return tuple(
        swapped(x) if layout == "BTNH" and name in "hqkvif" else x
        for name, x in zip(names, arrays, strict=False)
    )


def joined_arrays(q, k, v, i, f, *states):
    """The same token with q, k, v and an output gate in one array, i and f in another."""
    qkvo = jnp.concatenate([q, k, v, v], axis=-1)
    return [qkvo, None, None, jnp.stack([i, f], axis=-1), None, *states]


def head_norms(x):
    """The norms of x over all axes but batch and head."""
    x = np.asarray(x, "float64")
    return np.linalg.norm(x.reshape(*x.shape[:2], -1), axis=-1)


def initial_state_scale(dc, dn, inputs):
    """The size of the terms of dm_initial = <dc, c> + dn . n that its error is relative to,
    per head (B, NH).

    The roundings of dc are independent, so their squares add in <dc, c>. Those of dn come from the
    same dz_t in every column and q is positive, so they add themselves: |dn| |n|.
    """
    of_c = head_norms(np.multiply(dc, inputs["c_initial"]))
    return of_c + head_norms(dn) * head_norms(inputs["n_initial"])


def swapped(x):
    return jnp.swapaxes(x, 1, 2)


@functools.cache
def outputs_and_gradients(run, layout="BNTH"):
    """A function of inputs and cotangents, (B, NH, S, ...) all of them: h, or (h, c, n, m), and the
    gradients by name.

    Further arguments of run, by name, are traced.
    """

    @jit
    @strict()
    def both(x, cotangents, **traced):
        def outputs_of(x):
            given = zip(x, in_layout(layout, x, x.values()), strict=True)
            return in_layout(layout, OUTPUTS, jax.tree.leaves(run(**dict(given), **traced)))

        outputs, vjp = jax.vjp(outputs_of, x)
        return outputs, vjp(
            tuple(y.astype(x.dtype) for x, y in zip(outputs, cotangents, strict=False))
        )[0]

    return both


def gradients_of_call(**options):
    """outputs_and_gradients of mlstm_chunkwise with these options, which are hashable."""
    run = shared(mlstm_chunkwise, **dict(return_last_states=True) | options)
    return outputs_and_gradients(run, options.get("layout", "BNTH"))


def cotangents_for(inputs, dtype, states=True, seed=1):
    """Cotangents of h, c, n and m, exact in the dtype; zeros for states that nobody reads."""
    (B, NH, S, DHQK), DHV = inputs["q"].shape, inputs["v"].shape[-1]
    draw = np.random.default_rng(seed)
    result = [
        array(array(draw.normal(size=size), dtype), "float32")
        for size in ((B, NH, S, DHV), (B, NH, DHQK, DHV), (B, NH, DHQK), (B, NH))
    ]
    return result if states else [result[0], *map(jnp.zeros_like, result[1:])]


def expected_of(inputs, cotangents, run=reference.recurrence, segment_ids=None, **options):
    """Outputs and gradients of the recurrence in float64."""
    run = outputs_and_gradients(shared(run, **options))
    # What NumPy does not evaluate is compiled: in ten seconds for a GPU, in two for a CPU.
    is_small = math.prod((*inputs["q"].shape, inputs["v"].shape[-1])) <= 10**8
    with jax.default_device(jax.devices("cpu")[0] if is_small else None):
        exact = in_numpy(functools.partial(run, segment_ids=segment_ids))
        return in_float64(exact, inputs, cotangents)


def beyond(lengths, x):
    """Where a step of x, (B, NH, S, ...), is beyond the length of its batch entry."""
    return np.fromfunction(lambda b, head, s, *_: s >= np.take(lengths, b), x.shape, dtype=int)


def assert_nothing_beyond(lengths, outputs, gradients):
    """h and the gradients beyond the lengths are 0, exactly."""
    x = gradients | {"h": outputs[0]}
    for name in "hqkvif":
        assert not np.any(np.asarray(x[name])[beyond(lengths, x[name])]), name


def errors_of(inputs, result, expected):
    """Relative errors of outputs and of gradients, by name; the error of dm_initial is relative to
    the size of its terms."""
    (outputs, gradients), (desired, wanted) = result, expected
    of_outputs = dict(zip(OUTPUTS, map(error, outputs, desired), strict=False))
    of_gradients = {name: error(gradients[name], y) for name, y in wanted.items()}
    if "m_initial" in wanted:
        terms = initial_state_scale(wanted["c_initial"], wanted["n_initial"], inputs)
        size, scale = map(np.linalg.norm, (wanted["m_initial"], terms))
        of_gradients["m_initial"] *= size / scale if scale > size else 1.0
    return of_outputs, of_gradients


def assert_below(errors, bound):
    is_below = all(e < bound for e in errors.values())  # not of a NaN
    assert is_below, {name: f"{e:.1e}" for name, e in errors.items()}
