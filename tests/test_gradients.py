"""Every gradient against float64 autodiff of the recurrence: algorithms, tiles, gates, normalisers,
losses, transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import NAMES, array, assert_close, compare, random_inputs

from mlstm_pallas import KernelConfig, StageConfig, mlstm_chunkwise, reference

pytestmark = pytest.mark.usefixtures("quick_compilation")

BOUND = {"float32": 1e-4, "bfloat16": 2e-2}  # what the README promises


def weighed(outputs, *, norm=False, on_h=True, on_states=True):
    """A loss with random cotangents on h (behind a per-head RMSNorm when norm is set) and on all
    last states."""
    h, states = outputs
    dtype, r = jnp.promote_types(h.dtype, "float32"), np.random.default_rng(99)
    weights = [jnp.asarray(r.normal(size=y.shape), dtype) for y in (h, *states)]
    h = h.astype(dtype)
    if norm:
        h = h / jnp.sqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 1e-6)
    total = jnp.sum(h * weights[0]) if on_h else jnp.zeros((), dtype)
    finite = [jnp.where(jnp.isfinite(y), y, 0.0) for y in states if on_states]
    return total + sum(jnp.sum(y * w) for y, w in zip(finite, weights[1:], strict=bool(finite)))


# Cotangents are arguments and not constants of what is compiled: it is the same for all losses,
# gates and values.
cotangents_of = jax.jit(jax.grad(weighed), static_argnames=("norm", "on_h", "on_states"))
shared = functools.cache(functools.partial)


def with_states(*x, **options):
    return mlstm_chunkwise(*x, return_last_states=True, **options)


def without_states(*x, **options):
    """The last ones are not written."""
    return mlstm_chunkwise(*x, **options), ()


@functools.partial(jax.jit, static_argnums=0)
def outputs_and_gradients(run, x, segment_ids, cotangents):
    outputs, vjp = jax.vjp(lambda *x: run(*x, segment_ids=segment_ids), *x)
    return outputs, vjp(cotangents)


def gradients(run, x, segment_ids, **loss_options):
    """run: of ``shared``."""
    shapes = jax.eval_shape(run, *x)
    outputs, _ = outputs_and_gradients(
        run, x, segment_ids, jax.tree.map(lambda y: array(np.zeros(y.shape), y.dtype), shapes)
    )
    return outputs_and_gradients(run, x, segment_ids, cotangents_of(outputs, **loss_options))[1]


_EXPECTED: dict = {}


def expected_gradients(inputs, options, **loss_options):
    """Computed once for each set of inputs and options: the algorithms share them."""
    bytes_of = b"".join(np.asarray(x).astype("float32").tobytes() for x in inputs.values())
    key = hash(bytes_of), str(options | loss_options)
    if key not in _EXPECTED:
        options = dict(options)
        ids = options.pop("segment_ids", None)
        with jax.enable_x64(True):
            wide = [array(x, "float64") for x in inputs.values()]
            run = shared(reference.recurrence, **options)
            _EXPECTED[key] = jax.tree.map(np.asarray, gradients(run, wide, ids, **loss_options))
    return _EXPECTED[key]


def check(inputs, dtype, algorithm, chunk_size, options=(), skip=(), run=with_states, **loss):
    """algorithm: of ALGORITHMS, or a config."""
    options = dict(options)
    expected = expected_gradients(inputs, options, **loss)
    ids = options.pop("segment_ids", None)
    launch = ALGORITHMS.get(algorithm) or interpreted(algorithm)
    run = shared(run, **options, chunk_size=chunk_size, **launch)
    result = gradients(run, list(inputs.values()), ids, **loss)
    for name, actual, desired in zip(inputs, result, expected, strict=True):
        assert actual.dtype == inputs[name].dtype
        assert np.isfinite(np.asarray(actual).astype("float32")).all(), name
        if name not in skip:
            assert_close(actual, desired, BOUND[dtype], f"d{name}")


def tiles(scores, gradients):
    """With so many rows in a tile of parallel_bw_dP and in one of parallel_bw_dQKV."""
    of_gradients = StageConfig(siz_b_LQ=gradients, siz_b_DHQK=16, siz_b_DHHV=16, siz_b_loop=16)
    return KernelConfig(
        parallel_bw_dP=StageConfig(siz_b_LQ=scores, siz_b_loop=16), parallel_bw_dQKV=of_gradients
    )


def splits(num_splits, **fields):
    """The fused scan, and all recurrences, in so many splits where they are whole chunks."""
    parts = StageConfig(
        siz_b_LKV=16, siz_b_DHQK=16, siz_b_DHHV=16, siz_b_loop=32, num_splits=num_splits
    )
    fields = dict(fused_min_heads=1) | fields
    return KernelConfig(recurrent_fw_H=parts, recurrent_fw_C=parts, recurrent_bw_dC=parts, **fields)


def interpreted(config):
    return {"backend": "interpret", "config": config}


ALGORITHMS = {
    "xla": {"backend": "xla"},
    "materialised": interpreted(KernelConfig(fused_min_heads=0)),
    "tiles16x32": interpreted(tiles(16, 32)),
    "tiles32x16": interpreted(tiles(32, 16)),
    "tiles128": interpreted(tiles(128, 128)),
    "fused": interpreted(KernelConfig(fused_min_heads=1)),
    "fused_two_launches": interpreted(
        KernelConfig(fused_min_heads=1, recurrent_fw_H=StageConfig(siz_b_DHQK=16, siz_b_loop=16))
    ),
    "splits": interpreted(splits(4)),
}


def slow(values, condition=True):
    return pytest.param(*values, marks=[pytest.mark.slow] * bool(condition))


# Each path through the code once in float32; the rest are other tiles of the same kernels.
QUICK = ("xla", "materialised", "fused")


@pytest.mark.parametrize(
    ("dtype", "algorithm", "chunk_size"),
    [
        *[("float32", algorithm, 64) for algorithm in QUICK],
        slow(("float32", "splits", 64)),
        slow(("float32", "fused_two_launches", 64)),
        slow(("float32", "materialised", 16)),
        # test_float16.py has quick ones of kernels.
        *[slow(("bfloat16", algorithm, 64)) for algorithm in QUICK],
    ],
)
def test_gradients(dtype, algorithm, chunk_size):
    """S is no multiple of the chunk, heads are padded; cotangents on everything."""
    check(random_inputs(1, 1, 2, 100, 24, 40, dtype=dtype), dtype, algorithm, chunk_size)


# And what has no gradient but for rounding, whose relative error says nothing.
LOSSES = {
    "norm_after_h": ({"norm": True}, ("n_initial",)),
    "states_alone": ({"on_h": False}, ("q",)),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_losses(loss):
    """By the functions that test_gradients compiles."""
    options, skip = LOSSES[loss]
    inputs = random_inputs(1, 1, 2, 100, 24, 40)
    check(inputs, "float32", "materialised", 64, skip=skip, **options)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fused", "materialised"])
def test_gradients_of_heads_that_are_no_power_of_two(algorithm):
    check(random_inputs(12, 1, 1, 40, 130, 70), "float32", algorithm, 32)


# Packed sequences that begin inside a split of 16 steps and at its first step, one over two splits.
IN_SPLITS = {
    "resets": ({"resets": True}, {}),
    "packed": ({}, {"segment_ids": np.repeat([3, 0, 7, 8], [5, 27, 10, 22])[None]}),
    "unnormalised": ({"m_initial": False}, {"input_gate": "sigmoid", "normalize": False}),
}


@pytest.mark.parametrize(
    ("case", "fused_min_heads", "num_splits"),
    [slow(("resets", 0, 2)), slow(("packed", 1, 4)), ("unnormalised", 1, 4)],
)
def test_gradients_in_splits(case, fused_min_heads, num_splits):
    recipe, options = IN_SPLITS[case]
    inputs = random_inputs(10, 1, 2, 64, 16, 32, **recipe)
    skip = ("c_initial", "n_initial") if case == "packed" else ()
    config = splits(num_splits, fused_min_heads=fused_min_heads)
    check(inputs, "float32", config, 16, options, skip)


@pytest.mark.parametrize(
    "algorithm", ["tiles32x16", *(slow([x]) for x in ("xla", "fused", "tiles16x32", "tiles128"))]
)
def test_gradients_in_a_chunk_of_several_tiles(algorithm):
    check(random_inputs(2, 1, 1, 512, 16, 16, resets=True), "float32", algorithm, 256)


# Ids of 70 steps, chunks of 32: sequences of one step, several in a chunk, one at a chunk boundary,
# one over two chunks.
PACKED = np.repeat([3, 3, 0, 7, 8, 7], [5, 4, 1, 22, 36, 2])[None]
STATES = ("c_initial", "n_initial")
GATES = {
    "ordinary": ({}, STATES),
    "resets": ({"resets": True}, ()),
    "closed_forget_gates": ({"f_shift": -30.0}, ()),
    "open_forget_gates": ({"f_shift": 10.0}, STATES),
    "wild_gates": ({"f_scale": 1e3, "i_scale": 1e3}, ("f", *STATES, "m_initial")),
}


@pytest.mark.parametrize(
    ("case", "algorithm"),
    [
        *[("open_forget_gates", "xla"), ("wild_gates", "xla")],
        *[("ordinary", "materialised"), ("resets", "materialised")],
        ("closed_forget_gates", "materialised"),
        *[slow((case, "fused")) for case in GATES],
    ],
)
def test_gradients_of_gates(case, algorithm):
    """In packed sequences."""
    recipe, skip = GATES[case]
    inputs = random_inputs(3, 1, 2, 70, 16, 16, **recipe)
    check(inputs, "float32", algorithm, 32, {"segment_ids": PACKED}, skip)


# test_properties.py draws the gates of these.
NORMALISERS = {
    "eps0": ({"eps": 0.0}, ()),
    "floor_at_most_steps": ({"norm_val": 50.0}, ("n_initial",)),
    "unstabilised_floor_at_most_steps": (
        {"stabilize_correctly": False, "norm_val": 50.0},
        ("n_initial",),
    ),
    "sigmoid": ({"input_gate": "sigmoid", "eps": 0.1}, ()),
    "sigmoid_without_normaliser": ({"input_gate": "sigmoid", "normalize": False}, ()),
}


@pytest.mark.parametrize(
    ("case", "algorithm"),
    [
        *[slow((case, "xla"), case != "unstabilised_floor_at_most_steps") for case in NORMALISERS],
        *[slow((case, "materialised"), not case.endswith("normaliser")) for case in NORMALISERS],
    ],
)
def test_gradients_of_normalisers(case, algorithm):
    options, skip = NORMALISERS[case]
    inputs = random_inputs(3, 1, 2, 70, 16, 16, m_initial="input_gate" not in options)
    check(inputs, "float32", algorithm, 32, options, skip)


@pytest.mark.parametrize(
    ("open_gates", "nearly_closed", "algorithm"),
    [(6.0, -20.0, "xla"), slow((12.0, -10.0, "materialised")), slow((9.0, -6.0, "splits"))],
)
def test_gradients_of_forget_gates_that_nearly_close_among_open_ones(
    algorithm, open_gates, nearly_closed
):
    """Next to nothing passes where most of the gradient is: what passes elsewhere must not leave
    its rounding there."""
    inputs = random_inputs(11, 1, 1, 256, 16, 16, dtype="bfloat16", f_shift=open_gates)
    inputs["f"] = jnp.where(jnp.arange(256) % 37 == 5, nearly_closed, inputs["f"])
    check(inputs, "bfloat16", algorithm, 64)


@pytest.mark.parametrize("algorithm", ["splits", slow(["materialised"])])
def test_gradients_of_h_alone_from_no_initial_states(algorithm):
    """There are no initial states, and the last ones are not returned: neither is read or
    written."""
    inputs = random_inputs(13, 1, 2, 64, 16, 16, states=False)
    check(inputs, "float32", algorithm, 16, run=without_states, on_states=False)


STORED = {
    **{name: ALGORITHMS[name] for name in ("xla", "materialised")},
    "fused": interpreted(splits(1)),
    "splits": interpreted(splits(2)),
}


@pytest.mark.parametrize(
    ("algorithm", "states"),
    [*[slow((name, True), name != "materialised") for name in STORED], slow(("splits", False))],
)
def test_stored_states_give_the_gradients_of_recomputed_ones(algorithm, states):
    """With states at both ends of the sequence or at neither.

    The shapes are those of test_gradients.
    """
    x = list(random_inputs(5, 1, 2, 100, 24, 40, resets=True, states=states).values())
    run = with_states if states else without_states
    run = functools.partial(shared, run, chunk_size=64, **STORED[algorithm])
    recomputed = gradients(run(), x, None)
    stored = gradients(run(recompute_states_in_bw=False), x, None)
    compare(NAMES[: len(x)], stored, recomputed, 1e-6)


GRADIENT = functools.partial(jax.grad, argnums=(1, 2, 3, 4, 5))


def scanned(loss):
    def sums(weights, *x):
        return jax.lax.scan(
            lambda total, y: (total + loss(*(z[None] for z in y)), None), 0.0, (weights, *x)
        )[0]

    return GRADIENT(sums)


def mapped(loss):
    gradient = jax.vmap(GRADIENT(loss))
    return lambda *x: [g[:, 0] for g in gradient(*(y[:, None] for y in x))]


def test_transformations_give_the_same_gradients():
    """vmap of grad; scan over remat."""
    x = random_inputs(8, 2, 2, 40, 16, 16, states=False)
    weights = array(np.random.default_rng(0).normal(size=x["v"].shape), "float32")

    def loss(weights, *x):
        return jnp.sum(mlstm_chunkwise(*x, chunk_size=16, backend="xla") * weights)

    functions = GRADIENT(loss), mapped(loss), scanned(jax.checkpoint(loss))
    expected, *results = (jax.jit(function)(weights, *x.values()) for function in functions)
    for result in results:
        compare(x, result, expected, 1e-5)
