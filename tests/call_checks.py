"""Calls of mlstm_chunkwise, the table of those that the tests compare with the recurrence in
float64, and the comparison."""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import (
    NAMES,
    array,
    assert_below,
    assert_nothing_beyond,
    assert_same_bits,
    beyond,
    check_isolated,
    config_in_splits,
    cotangents_for,
    errors_of,
    expected_of,
    gradients_of_call,
    random_inputs,
    tolerance,
)

from mlstm_pallas import KernelConfig, reference

# ---------------- bounds

# What the README promises of outputs and of gradients.
PROMISED = {"bfloat16": (5e-3, 2e-2), "float16": (1e-3, 4e-3), "float32": (1e-5, 1e-4)}


def backward_bound(dtype, terms):
    """Bound on the relative norm of the error of a gradient.

    Eight roundings lie on the way to it: the four of h, which dz is made of, and again four of its
    own products. As those of oracle.tolerance, each is u / sqrt(3) in the mean. A gradient of q, k
    or a gate is a difference of two terms of like size, through the numerator and through the
    denominator: the squares of their errors add. Each term is behind two float32 sums.
    """
    unit = float(jnp.finfo(dtype).eps) / 2
    return math.sqrt(2 * 8 / 3) * unit + 4 * math.sqrt(terms) * 2.0**-24


def spacing_of(*x):
    """The distance of float32 numbers at the largest finite one."""
    finite = (np.abs(y)[np.isfinite(y)] for y in map(np.asarray, x))
    return np.spacing(np.float32(max(np.max(y, initial=0) for y in finite)))


def bounds_of(inputs, outputs):
    """Bounds on outputs and on gradients: the roundings of products and sums, and of exponents.

    States are relative to a float32 m, and gradients to sums of the gates.
    """
    q, v, i, f = (inputs[name] for name in "qvif")
    terms, of_m = sum(q.shape[2:]), spacing_of(*outputs[3:])
    derived = (
        tolerance(q.dtype, terms) + of_m,
        backward_bound(q.dtype, terms + v.shape[-1]) + max(of_m, spacing_of(i, f)),
    )
    return map(min, derived, PROMISED[q.dtype.name])


def without_floor(gradients, desired, inputs):
    """Errors of gradients in float16, less what rounds to multiples of 2**-24.

    Small gradients and small dP are off by 2**-24 / sqrt(12); dq and dk have sums of dP times up
    to 128 keys and queries.
    """
    result = dict(gradients)
    for name, other in ("q", "k"), ("k", "q"):
        y, x = desired[name], inputs[other].astype("float32")
        floor = 2.0**-24 * math.sqrt((y.size + 128 * jnp.sum(x**2)) / 12) / np.linalg.norm(y)
        result[name] = max(0.0, result[name] - floor)
    return result


# ---------------- the comparison


SEGMENT = 512


def recurrence(segment_ids=None, **x):
    """reference.recurrence, whose backward pass holds the states of 512 steps only if sequences are
    long and not packed; they end with steps that keep the state."""
    S = x["q"].shape[2]
    if S <= SEGMENT or segment_ids is not None:
        return reference.recurrence(**x, segment_ids=segment_ids)

    def segments_of(name):
        """With the segments as the first axis."""
        kept = dict(i=-jnp.inf, f=jnp.inf).get(name, 0.0)
        y, after = x[name], [(0, 0)] * x[name].ndim
        after[2] = 0, -S % SEGMENT
        y = jnp.pad(y, after, constant_values=kept)
        return jnp.moveaxis(y.reshape(*y.shape[:2], -1, SEGMENT, *y.shape[3:]), 2, 0)

    @jax.checkpoint
    def step(states, segment):
        inputs = dict(zip(NAMES, (*segment, *states), strict=True))
        h, states = reference.recurrence(**x | inputs)
        return states, h

    (B, NH, _, DHQK), DHV, dtype = x["q"].shape, x["v"].shape[-1], x["q"].dtype
    zeros = (jnp.zeros(shape, dtype) for shape in ((B, NH, DHQK, DHV), (B, NH, DHQK), (B, NH)))
    states = tuple(x.get(name, y) for name, y in zip(NAMES[5:], zeros, strict=True))
    states, hs = jax.lax.scan(step, states, tuple(map(segments_of, "qkvif")))
    h = jnp.moveaxis(hs, 0, 2)
    return h.reshape(*h.shape[:2], -1, DHV)[:, :, :S], states


def recurrence_of_lengths(lengths):
    """The recurrence whose steps beyond the lengths keep the state and have h = 0."""

    def run(*, segment_ids=None, **x):
        gone = beyond(lengths, x["i"])
        if segment_ids is not None:  # no segment starts beyond a length
            segment_starts = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
            segment_ids = jnp.cumsum(segment_starts & ~gone[:, 0], axis=1)
        x |= dict(i=jnp.where(gone, -jnp.inf, x["i"]), f=jnp.where(gone, jnp.inf, x["f"]))
        h, states = recurrence(**x, segment_ids=segment_ids)
        return jnp.where(gone[..., None], 0.0, h), states

    return run


def reversed_in_time(run, lengths):
    """The function on sequences that run from their last step to their first; all of these are
    within the lengths."""

    def flipped(x, axis):
        S = x.shape[axis]
        ends = np.full(len(x), S) if lengths is None else np.clip(lengths, 0, S)
        steps, ends = np.arange(S), ends[:, None]
        places = np.where(steps < ends, ends - 1 - steps, steps)
        return jax.vmap(partial(jnp.take, axis=axis - 1))(x, places)

    def run_flipped(*, segment_ids=None, **x):
        x |= {name: flipped(x[name], 2) for name in "qkvif"}
        ids = None if segment_ids is None else flipped(segment_ids, 1)
        h, states = run(**x, segment_ids=ids)
        return flipped(h, 2), states

    return run_flipped


def with_garbage(lengths, inputs, cotangents):
    """Inputs and cotangents with values beyond the lengths that nothing may read."""

    def changed(x, value):
        return array(np.where(beyond(lengths, x), value, x), x.dtype)

    garbage = {name: changed(inputs[name], np.nan if name in "if" else 1e10) for name in "qkvif"}
    return inputs | garbage, [changed(cotangents[0], 1e6), *cotangents[1:]]


OF_RECURRENCE = {"input_gate", "normalize", "eps", "stabilize_correctly", "norm_val"}


def check_call(
    shape,
    dtype="float32",
    *,
    seed=1,
    recipe=(),
    change=lambda x: x,
    draw=cotangents_for,
    segment_ids=None,
    lengths=None,
    run=None,
    skip=(),
    bounds=None,
    several=({},),
    repeated=False,
    **options,
):
    """Compares h, the last states and the gradients of all inputs with those of the recurrence in
    float64; returns the relative errors of outputs and of gradients, by name.

    With lengths all arrays have garbage beyond these, and results have zeros.

    Args:
      shape: B, NH, S, DHQK, DHV.
      recipe: options of random_inputs.
      change: a function of the inputs.
      draw: a function like cotangents_for.
      run: what the call is compared with; None: the recurrence.
      skip: gradients that are rounding alone, and need only be finite.
      bounds: on the errors; None: those of bounds_of.
      several: further options of the calls that are compared.
      repeated: whether a second call has to return the same bits.
      options: those of mlstm_chunkwise.
    """
    inputs = change(random_inputs(seed, *shape, dtype=dtype, **dict(recipe)))
    options = dict(return_last_states=True) | options
    cotangents = draw(inputs, dtype, options["return_last_states"])
    arrays, is_recurrence = (inputs, cotangents), run is None
    if lengths is not None:
        arrays = with_garbage(lengths, *arrays)
    if is_recurrence:
        run = recurrence if lengths is None else recurrence_of_lengths(lengths)
    if options.get("reverse"):
        run = reversed_in_time(run, lengths)
    of_recurrence = {name: options[name] for name in OF_RECURRENCE & {*options}}
    expected = expected_of(inputs, cotangents, run, segment_ids, **of_recurrence)
    for more in several:
        call = partial(
            *(gradients_of_call(**options | more), *arrays),
            segment_ids=segment_ids,
            sequence_lengths=lengths,
        )
        outputs, gradients = result = call()
        if repeated:
            assert_same_bits(call(), result)
        assert len(outputs) == (4 if options["return_last_states"] else 1)
        assert outputs[0].dtype == dtype
        for name, x in inputs.items():
            assert gradients[name].dtype == x.dtype
            assert np.isfinite(gradients[name]).all(), name
        if lengths is not None:
            assert_nothing_beyond(lengths, *result)
            initial = [*inputs.values()][5:] if is_recurrence else ()
            for first, last in zip(initial, outputs[1:], strict=False):
                assert np.array_equal(last[lengths <= 0], first[lengths <= 0])
        of_outputs, of_gradients = errors = errors_of(inputs, result, expected)
        if dtype == "float16":
            of_gradients = without_floor(of_gradients, expected[1], inputs)
        of_gradients = {name: x for name, x in of_gradients.items() if name not in skip}
        each = bounds or bounds_of(inputs, expected[0])
        for x, bound in zip((of_outputs, of_gradients), each, strict=True):
            assert_below(x, bound)
    return errors


def check_middle_head(run, x):
    """The second of three heads, (1, 3, ...), has the same bits beside finite ones and beside NaN,
    and again; what an interpreted kernel does not write is NaN."""
    poisoned = jax.tree.map(lambda y: y.at[:, ::2].set(jnp.nan), x)
    first, _ = check_isolated(run, x, poisoned, partial(jax.tree.map, lambda y: y[:, 1]))
    assert_same_bits(run(x), first)
    assert all(np.isfinite(y).all() for y in jax.tree.leaves(first))


def check_neighbours(backend, shape, layout="BNTH", config=None, dtype="bfloat16", **options):
    """check_middle_head of outputs and gradients; returns the function and its arguments.

    In the layout "BTNH" the columns of the next head follow those of a head.
    """
    inputs = random_inputs(11, *shape, dtype=dtype)
    x = inputs, cotangents_for(inputs, dtype)
    config = config or KernelConfig(fused=True)
    run = gradients_of_call(config=config, backend=backend, layout=layout, **options)
    check_middle_head(lambda x: run(*x), x)
    return run, x


# ---------------- the calls


def fused(**tiles):
    return KernelConfig(fused=True, triton_recurrent_fw_H=tiles)


MATERIALISED, BTNH = KernelConfig(fused=False), dict(layout="BTNH")
STORED = dict(recompute_states_in_bw=False)
UNNORMALISED = dict(input_gate="sigmoid", normalize=False)


def masked(mask, x):
    """Steps count where the mask, (S,), is True, by the recipe of docs/serving.md."""
    qkv = {name: jnp.where(mask[:, None], x[name], 0) for name in "qkv"}
    return x | qkv | dict(i=jnp.where(mask, x["i"], -np.inf), f=jnp.where(mask, x["f"], np.inf))


# ---------------- on a GPU

TWO_LOWERINGS = dict(several=[dict(backend=backend) for backend in ("triton", "mosaic_gpu")])
# Multiples of 64, of 32, of 16, of 8 and of none, from 8 to 1,024, and the lowerings that run them,
# which are both for the smallest multiples of 16. The self-check draws any for either.
ANY_HEADS = {
    (8, 8): ["triton"],
    (16, 16): ["triton", "mosaic_gpu"],
    (20, 37): ["mosaic_gpu"],
    (24, 48): ["triton"],
    (32, 32): ["triton", "mosaic_gpu"],
    (40, 100): ["triton"],
    (48, 96): ["triton"],
    (64, 32): ["triton"],
    (64, 96): ["mosaic_gpu"],
    (64, 192): ["triton"],
    (80, 160): ["triton"],
    (96, 96): ["mosaic_gpu"],
    (96, 192): ["mosaic_gpu"],
    (100, 200): ["mosaic_gpu"],
    (112, 224): ["triton"],
    (128, 192): ["mosaic_gpu"],
    (160, 320): ["triton"],
    (192, 192): ["triton"],
    (192, 384): ["mosaic_gpu"],
    (256, 640): ["mosaic_gpu"],
    (320, 640): ["mosaic_gpu"],
    (384, 768): ["mosaic_gpu"],
    (448, 448): ["triton"],
    (1024, 1024): ["mosaic_gpu"],
}


def gpu_call(dtype, *shape, **call):
    """A call that is repeated, within the bounds that are promised."""
    bounds = dict(bounds=PROMISED[dtype], repeated=True)
    return dict(shape=shape, dtype=dtype, backend="triton") | bounds | call


def gpu_row(name, dtype, *shape, **options):
    """A parameter of a test, gpu_call."""
    # One of these is in the quick selection, in both dtypes.
    smoke = [pytest.mark.smoke] * (shape[2:] == (500, 128, 256))
    call = gpu_call(dtype, *shape, **options)
    id = "-".join(map(str, (name, dtype, *shape)))
    return pytest.param(call, id=id, marks=[pytest.mark.gpu, *smoke])


def calls_of_any_heads(backend):
    """Names and arguments of check_call: in bfloat16, of odd and of even lengths, in both layouts,
    with the fused scan and with materialised states."""
    lengths, layouts = (131, 256, 196, 391), ("BTNH", "BNTH", "BTNH")
    schedules = (True, False, True, False, True)
    others = map(itertools.cycle, (lengths, layouts, schedules))
    for (heads, backends), S, layout, is_fused in zip(ANY_HEADS.items(), *others, strict=False):
        call = dict(layout=layout, config=KernelConfig(fused=is_fused), bounds=None)
        if backend in backends:
            name = "-".join(map(str, heads))
            yield name, gpu_call("bfloat16", 1, 2, S, *heads, backend=backend, **call)


MATERIALISED64, MATERIALISED256 = (KernelConfig(chunk_size=x, fused=False) for x in (64, 256))
FOUR_SPLITS = config_in_splits(4, siz_b_L=32)
ODD = dict(config=fused()) | TWO_LOWERINGS
OF_1000 = dict(lengths=np.array([0, 1, 384, 700, 1000])) | TWO_LOWERINGS
OF_1001 = dict(lengths=np.array([0, 1, 384, 700, 1001])) | TWO_LOWERINGS


def stored_by_fused_scan(num_splits, num_stages):
    """The states that the fused scan stored."""
    tiles = dict(siz_b_L=32, state_rows=256, num_stages=num_stages)
    config = KernelConfig(fused=True, num_splits=num_splits, triton_recurrent_fw_H=tiles)
    return dict(config=config) | STORED


# Of the two dtypes those that the rows at real sizes do not have.
OF_HEADS = {
    "bfloat16": [(64, 128), (128, 256), (256, 256), (512, 512), (192, 320), (1024, 1024)],
    "float32": [(128, 128), (128, 256), (512, 512), (80, 96), (96, 192), (1024, 1024)],
}
# At real sizes, with the configs that users get: names, dtypes, shapes, options of gpu_call.
ON_A_GPU = [
    gpu_row("default", "bfloat16", 1, 2, 2048, 64, 64),
    gpu_row("default", "bfloat16", 1, 2, 2048, 256, 512),
    gpu_row("default", "float32", 1, 2, 2048, 64, 64),
    gpu_row("default", "float32", 1, 2, 2048, 256, 512),
    gpu_row("materialised64", "bfloat16", 1, 2, 2048, 256, 512, config=MATERIALISED64),
    gpu_row("materialised64", "float32", 1, 2, 2048, 128, 256, config=MATERIALISED64),
    gpu_row("materialised256", "bfloat16", 1, 2, 2048, 128, 256, config=MATERIALISED256),
    gpu_row("materialised256", "float32", 1, 2, 2048, 64, 64, config=MATERIALISED256),
    gpu_row("fused", "bfloat16", 1, 2, 2048, 256, 512, config=fused()),
    gpu_row("fused", "bfloat16", 1, 2, 2048, 64, 64, config=fused()),
    gpu_row("fused", "float32", 1, 2, 2048, 128, 256, config=fused()),
    gpu_row("splits", "bfloat16", 1, 2, 2048, 128, 256, config=FOUR_SPLITS),
    gpu_row("splits", "float32", 1, 2, 2048, 256, 512, config=FOUR_SPLITS),
    gpu_row("stored_in_1_splits", "bfloat16", 1, 2, 2048, 64, 64, **stored_by_fused_scan(1, 3)),
    gpu_row("stored_in_4_splits", "bfloat16", 1, 2, 2048, 256, 512, **stored_by_fused_scan(4, 3)),
    gpu_row("stored_in_1_splits", "float32", 1, 2, 2048, 128, 256, **stored_by_fused_scan(1, 2)),
    gpu_row("stored_in_4_splits", "float32", 1, 2, 2048, 128, 256, **stored_by_fused_scan(4, 2)),
    gpu_row("chunks_of_16", "bfloat16", 1, 2, 2048, 128, 256, chunk_size=16),
    gpu_row("chunks_of_1024", "float32", 1, 2, 2048, 128, 256, chunk_size=1024),
    gpu_row("chunks_of_2048", "bfloat16", 1, 2, 2048, 128, 256, chunk_size=2048),
    # A store beyond an array would be in the next head.
    gpu_row("odd_lengths-BNTH", "bfloat16", 4, 12, 1, 64, 128, **ODD),
    gpu_row("odd_lengths-BNTH", "bfloat16", 4, 12, 129, 64, 128, **ODD),
    gpu_row("odd_lengths-BNTH", "bfloat16", 1, 24, 1001, 256, 256, **ODD),
    gpu_row("odd_lengths-BTNH", "bfloat16", 1, 8, 4095, 64, 128, **BTNH, **ODD),
    # One long reversed cumulative sum would lose all digits of the gradient of f here.
    gpu_row("long", "bfloat16", 1, 1, 32768, 64, 64, recipe=dict(f_shift=4.0)),
    # The backward pass skips whole chunks.
    gpu_row("lengths", "bfloat16", 5, 2, 1001, 128, 256, **OF_1001),
    gpu_row("lengths", "bfloat16", 5, 2, 1000, 256, 512, **OF_1000),
]
BACK_ON_A_GPU = dict(reverse=True) | TWO_LOWERINGS
FUSED_BACK = dict(config=fused()) | STORED | BACK_ON_A_GPU
REVERSE_ON_A_GPU = [
    gpu_row("reverse_fused", "bfloat16", 1, 8, 2048, 128, 256, **FUSED_BACK),
    gpu_row("reverse", "bfloat16", 1, 8, 1001, 256, 512, **BTNH, **BACK_ON_A_GPU),
    gpu_row("reverse_fused", "bfloat16", 1, 8, 1500, 96, 192, **BTNH, **FUSED_BACK),
    gpu_row("reverse_splits", "bfloat16", 1, 2, 4096, 256, 512, config=fused(), **BACK_ON_A_GPU),
    gpu_row("reverse_lengths", "bfloat16", 5, 2, 1000, 128, 256, reverse=True, **OF_1000),
    gpu_row("reverse", "float32", 1, 2, 1000, 128, 256, reverse=True),
]
HALF_ON_A_GPU = dict(bounds=None, seed=3)
FLOAT16_ON_A_GPU = [
    gpu_row("BNTH", "float16", 1, 2, 250, 64, 64, **HALF_ON_A_GPU),
    gpu_row("BNTH", "float16", 1, 2, 250, 128, 256, **HALF_ON_A_GPU),
    gpu_row("BNTH", "float16", 1, 2, 250, 256, 512, **HALF_ON_A_GPU),
    gpu_row("BNTH", "float16", 1, 2, 250, 64, 64, config=fused(), **HALF_ON_A_GPU),
    gpu_row("BTNH", "float16", 1, 2, 250, 128, 256, **BTNH, config=MATERIALISED, **HALF_ON_A_GPU),
    gpu_row("BTNH", "float16", 1, 2, 250, 256, 512, **BTNH, config=fused(), **HALF_ON_A_GPU),
]


def gpu_calls():
    """Those of test_gpu.py."""
    for dtype, sizes in OF_HEADS.items():
        yield from (gpu_row("heads", dtype, 1, 2, 500, *heads) for heads in sizes)
    yield from ON_A_GPU + REVERSE_ON_A_GPU + FLOAT16_ON_A_GPU
    for heads, call in calls_of_any_heads("triton"):
        yield pytest.param(call, id=f"any_heads-{heads}", marks=pytest.mark.gpu)
