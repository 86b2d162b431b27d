"""Every gradient against float64 autodiff of the recurrence: algorithms, tiles, gates, normalisers,
losses, transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import NAMES, array, assert_close, random_inputs

from mlstm_pallas import KernelConfig, StageConfig, mlstm_chunkwise, reference

pytestmark = pytest.mark.usefixtures("quick_compilation")

BOUND = {"float32": 1e-4, "bfloat16": 2e-2}  # what the README promises


def weighed(outputs, *, norm=False, on_h=True, on_states=True):
    """A loss with random cotangents on h (behind a per-head RMSNorm when norm is set) and on all
    last states."""
    h, states = outputs
    dtype, r = states[-1].dtype, np.random.default_rng(99)
    weights = [jnp.asarray(r.normal(size=y.shape), dtype) for y in (h, *states)]
    h = h.astype(dtype)
    if norm:
        h = h / jnp.sqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 1e-6)
    total = jnp.sum(h * weights[0]) if on_h else jnp.zeros((), dtype)
    if on_states:
        total += sum(
            jnp.sum(jnp.where(jnp.isfinite(y), y, 0.0) * w)
            for y, w in zip(states, weights[1:], strict=True)
        )
    return total


# Cotangents are arguments and not constants of what is compiled: it is the same for all losses,
# gates and values.
cotangents_of = jax.jit(jax.grad(weighed), static_argnames=("norm", "on_h", "on_states"))
shared = functools.cache(functools.partial)


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


def expected_gradients(inputs, options=None, **loss_options):
    """Computed once for each set of inputs and options: the algorithms share them."""
    bytes_of = b"".join(np.asarray(x).astype("float32").tobytes() for x in inputs.values())
    key = (hash(bytes_of), str(sorted({**(options or {}), **loss_options}.items())))
    if key not in _EXPECTED:
        _EXPECTED[key] = _expected_gradients(inputs, dict(options or {}), **loss_options)
    return _EXPECTED[key]


def _expected_gradients(inputs, options, **loss_options):
    ids = options.pop("segment_ids", None)
    with jax.enable_x64(True):
        wide = [array(x, "float64") for x in inputs.values()]
        return jax.tree.map(
            np.asarray,
            gradients(shared(reference.recurrence, **options), wide, ids, **loss_options),
        )


def found_gradients(inputs, options=None, *, run_options, **loss_options):
    options = dict(options or {})
    ids = options.pop("segment_ids", None)
    run = shared(mlstm_chunkwise, return_last_states=True, **options, **run_options)
    return gradients(run, list(inputs.values()), ids, **loss_options)


def check(inputs, dtype, options=None, *, run_options, skip=(), **loss_options):
    expected = expected_gradients(inputs, options, **loss_options)
    result = found_gradients(inputs, options, run_options=run_options, **loss_options)
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
    inputs = random_inputs(1, 1, 2, 100, 24, 40, dtype=dtype)
    check(inputs, dtype, run_options={"chunk_size": chunk_size, **ALGORITHMS[algorithm]})


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fused", "materialised"])
def test_gradients_of_heads_that_are_no_power_of_two(algorithm):
    inputs = random_inputs(12, 1, 1, 40, 130, 70)
    check(inputs, "float32", run_options={"chunk_size": 32, **ALGORITHMS[algorithm]})


# Packed sequences that begin inside a split of 16 steps and at its first step, one over two splits.
IN_SPLITS = {
    "resets": ({"resets": True}, {}),
    "packed": ({}, {"segment_ids": np.repeat([3, 0, 7, 8], [5, 27, 10, 22])[None]}),
    "sigmoid": ({"m_initial": False}, {"input_gate": "sigmoid"}),
    "unnormalised": ({"m_initial": False}, {"input_gate": "sigmoid", "normalize": False}),
}


@pytest.mark.parametrize(
    ("case", "algorithm", "num_splits"),
    [
        slow(("resets", "materialised", 2)),
        *[slow((case, "fused", 4), case != "unnormalised") for case in IN_SPLITS],
        slow(("packed", "fused", 2)),
    ],
)
def test_gradients_in_splits(case, algorithm, num_splits):
    recipe, options = IN_SPLITS[case]
    inputs = random_inputs(10, 1, 2, 64, 16, 32, **recipe)
    skip = ("c_initial", "n_initial") if case == "packed" else ()
    config = splits(num_splits, fused_min_heads=int(algorithm == "fused"))
    check(
        inputs, "float32", options, skip=skip, run_options={"chunk_size": 16, **interpreted(config)}
    )


@pytest.mark.parametrize(
    ("algorithm", "chunk_size"),
    [
        slow(("xla", 16)),
        ("xla", 256),
        slow(("materialised", 64)),
        slow(("fused", 16)),
        slow(("fused", 256)),
    ],
)
def test_gradients_at_chunk_sizes(algorithm, chunk_size):
    inputs = random_inputs(2, 1, 1, 256, 16, 16)
    check(inputs, "float32", run_options={"chunk_size": chunk_size, **ALGORITHMS[algorithm]})


@pytest.mark.parametrize(
    ("algorithm", "resets"),
    [("tiles32x16", True), slow(("tiles16x32", False)), slow(("tiles128", True))],
)
def test_gradients_in_a_chunk_of_several_tiles(resets, algorithm):
    inputs = random_inputs(2, 1, 1, 512, 16, 16, resets=resets)
    check(inputs, "float32", run_options={"chunk_size": 256, **ALGORITHMS[algorithm]})


# Ids of 70 steps, chunks of 32: sequences of one step, several in a chunk, one at a chunk boundary,
# one over two chunks.
PACKED = np.repeat([3, 3, 0, 7, 8, 7], [5, 4, 1, 22, 36, 2])[None]
SIGMOID = {"m_initial": False}
# Where a gradient is zero but for rounding, its relative error says nothing: it is only asked to be
# finite.
CASES = {
    "no_states": ({"states": False}, {}, ()),
    "resets": ({"resets": True}, {}, ()),
    "closed_forget_gates": ({"f_shift": -30.0}, {}, ()),
    "open_forget_gates": ({"f_shift": 10.0}, {}, ()),
    "wild_gates": (
        {"f_scale": 1e3, "i_scale": 1e3},
        {},
        ("f", "c_initial", "n_initial", "m_initial"),
    ),
    "eps0": ({}, {"eps": 0.0}, ()),
    "eps_large": ({}, {"eps": 0.3}, ()),
    "floor_at_most_steps": ({}, {"norm_val": 50.0}, ("n_initial",)),
    "floor_at_no_step": ({}, {"norm_val": 0.0}, ()),
    "unstabilised": ({}, {"stabilize_correctly": False, "norm_val": 2.0, "eps": 0.1}, ()),
    "unstabilised_floor_at_most_steps": (
        {},
        {"stabilize_correctly": False, "norm_val": 50.0},
        ("n_initial",),
    ),
    "packed": ({}, {"segment_ids": PACKED}, ("c_initial", "n_initial")),
    "packed_resets": ({"resets": True}, {"segment_ids": PACKED}, ()),
    "packed_open_forget_gates": (
        {"states": False, "f_shift": 10.0, "i_scale": 0.1, "i_shift": -10.0},
        {"segment_ids": PACKED, "eps": 0.3},
        (),
    ),
    "sigmoid": (SIGMOID, {"input_gate": "sigmoid", "eps": 0.1}, ()),
    "sigmoid_resets": (SIGMOID | {"resets": True}, {"input_gate": "sigmoid"}, ()),
    "sigmoid_floor_at_most_steps": (
        SIGMOID,
        {"input_gate": "sigmoid", "norm_val": 50.0},
        ("n_initial",),
    ),
    "sigmoid_without_normaliser": (SIGMOID, {"input_gate": "sigmoid", "normalize": False}, ()),
    "sigmoid_packed": (SIGMOID, {"input_gate": "sigmoid", "segment_ids": PACKED}, ()),
}
SOME = ("resets", "closed_forget_gates", "packed", "sigmoid_without_normaliser")
# Two of the others at once, which test_properties.py draws as well: resets are among its gates.
BOTH = ("packed_resets", "sigmoid_resets", "sigmoid_packed")
# Another value of what a quick case has.
OTHER_VALUES = ("eps_large", "floor_at_no_step", "unstabilised")


@pytest.mark.parametrize(
    ("case", "algorithm"),
    [slow((case, "xla"), case in (*BOTH, *OTHER_VALUES, *SOME, "no_states")) for case in CASES]
    + [slow((case, "materialised"), case not in SOME) for case in CASES]
    + [slow((case, algorithm)) for case in SOME for algorithm in ("fused",)],
)
def test_gradients_of_gates_and_normalisers(case, algorithm):
    recipe, options, skip = CASES[case]
    inputs = random_inputs(3, 1, 2, 70, 16, 16, **recipe)
    check(
        inputs,
        "float32",
        options,
        skip=skip,
        run_options={"chunk_size": 32, **ALGORITHMS[algorithm]},
    )


@pytest.mark.parametrize(
    ("open_gates", "nearly_closed", "algorithm"),
    [
        slow((3.0, -2.0, "materialised")),
        (6.0, -20.0, "materialised"),
        slow((9.0, -6.0, "splits")),
        slow((12.0, -10.0, "materialised")),
    ],
)
def test_gradients_of_forget_gates_that_nearly_close_among_open_ones(
    algorithm, open_gates, nearly_closed
):
    """Next to nothing passes where most of the gradient is: what passes elsewhere must not leave
    its rounding there."""
    inputs = random_inputs(11, 1, 1, 256, 16, 16, dtype="bfloat16", f_shift=open_gates)
    inputs["f"] = jnp.where(jnp.arange(256) % 37 == 5, nearly_closed, inputs["f"])
    check(inputs, "bfloat16", run_options={"chunk_size": 64, **ALGORITHMS[algorithm]})


LOSSES = {
    "norm_after_h": ({"norm": True}, ("n_initial",)),
    "norm_after_h_alone": ({"norm": True, "on_states": False}, ("n_initial",)),
    "h_alone": ({"on_states": False}, ()),
    "states_alone": ({"on_h": False}, ("q",)),
}


@pytest.mark.parametrize("algorithm", ["materialised", slow(["fused"])])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_losses(loss, algorithm):
    options, skip = LOSSES[loss]
    inputs = random_inputs(4, 1, 2, 70, 16, 16)
    check(
        inputs,
        "float32",
        {"eps": 0.05},
        skip=skip,
        run_options={"chunk_size": 32, **ALGORITHMS[algorithm]},
        **options,
    )


@pytest.mark.parametrize(
    ("algorithm", "states"),
    [
        ("splits", "recomputed"),
        slow(("materialised", "recomputed")),
        slow(("fused", "stored")),
    ],
)
def test_gradients_of_h_alone_from_no_initial_states(algorithm, states):
    """There are no initial states, and the last ones are not returned: neither is read or
    written."""
    inputs = random_inputs(13, 1, 2, 64, 16, 16, states=False)
    run = shared(
        mlstm_chunkwise,
        chunk_size=16,
        recompute_states_in_bw=states == "recomputed",
        **ALGORITHMS[algorithm],
    )
    weights = np.random.default_rng(0).normal(size=inputs["v"].shape)

    def loss(run, *x):
        h = run(*x)
        return jnp.sum(h * weights.astype(h.dtype))

    result = jax.jit(jax.grad(functools.partial(loss, run), tuple(range(5))))(*inputs.values())
    with jax.enable_x64(True):
        wide = [array(x, "float64") for x in inputs.values()]
        expected = jax.jit(
            jax.grad(
                functools.partial(loss, lambda *x: reference.recurrence(*x)[0]), tuple(range(5))
            )
        )(*wide)
        expected = jax.tree.map(np.asarray, expected)
    for name, actual, desired in zip(inputs, result, expected, strict=True):
        assert_close(actual, desired, BOUND["float32"], f"d{name}")


STORED = {
    **{name: ALGORITHMS[name] for name in ("xla", "materialised")},
    "fused": interpreted(splits(1)),
    "splits": interpreted(splits(2)),
}
STORED_QUICK = (("materialised", "both_ends"),)


@pytest.mark.parametrize(
    ("algorithm", "ends"),
    [
        slow((algorithm, ends), (algorithm, ends) not in STORED_QUICK)
        for algorithm in STORED
        for ends in ("both_ends", "neither_end")
    ],
)
def test_stored_states_give_the_gradients_of_recomputed_ones(algorithm, ends):
    """With states at both ends of the sequence or at neither.

    With backend None the kernels and the plain form store alike.
    """
    both = ends == "both_ends"
    inputs = random_inputs(5, 1, 2, 64, 16, 16, resets=True, states=both)
    weights = np.random.default_rng(0).normal(size=inputs["v"].shape).astype("float32")

    def gradient_of(recompute, **options):
        def loss(*x):
            outputs = mlstm_chunkwise(
                *x,
                chunk_size=32,
                recompute_states_in_bw=recompute,
                return_last_states=both,
                **options,
            )
            return weighed(outputs) if both else jnp.sum(outputs * weights)

        return jax.jit(jax.grad(loss, tuple(range(len(inputs)))))

    recomputed, stored = (
        gradient_of(recompute, **STORED[algorithm])(*inputs.values()) for recompute in (True, False)
    )
    for name, a, b in zip(inputs, stored, recomputed, strict=True):
        assert_close(a, np.asarray(b, "float64"), 1e-6, name)
    if not both:
        jax.eval_shape(
            gradient_of(False, **STORED[algorithm] | {"backend": None}), *inputs.values()
        )


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["materialised", "fused"])
def test_a_sequence_in_two_calls_has_the_gradients_of_one(algorithm):
    inputs = random_inputs(6, 1, 2, 80, 16, 16)
    run_options = {"chunk_size": 16, **ALGORITHMS[algorithm]}

    def chained(q, k, v, i, f, *states, **options):
        first = [x[:, :, :37] for x in (q, k, v, i, f)]
        second = [x[:, :, 37:] for x in (q, k, v, i, f)]
        h1, states = mlstm_chunkwise(*first, *states, return_last_states=True, **run_options)
        h2, states = mlstm_chunkwise(*second, *states, return_last_states=True, **run_options)
        return jnp.concatenate([h1, h2], axis=2), states

    x = list(inputs.values())
    result = jax.jit(jax.grad(lambda *x: weighed(chained(*x)), tuple(range(8))))(*x)
    for name, actual, desired in zip(NAMES, result, expected_gradients(inputs), strict=True):
        assert_close(actual, desired, BOUND["float32"], name)


def test_directional_finite_differences_agree_in_float64():
    inputs = random_inputs(7, 1, 1, 48, 8, 8)
    with jax.enable_x64(True):
        r = np.random.default_rng(0)
        x = [array(y, "float64") for y in inputs.values()]
        direction = [array(r.normal(size=y.shape), "float64") for y in x]
        run = functools.partial(
            mlstm_chunkwise, chunk_size=16, backend="xla", return_last_states=True
        )
        loss = jax.jit(lambda *x: weighed(run(*x)))
        gradients = jax.grad(loss, tuple(range(8)))(*x)
        slope = sum(jnp.sum(g * d) for g, d in zip(gradients, direction, strict=True))
        step = 1e-5
        above, below = (
            loss(*(y + s * d for y, d in zip(x, direction, strict=True))) for s in (step, -step)
        )
        # the difference quotient is off by step^2 times a third derivative, and by rounding over
        # step
        assert float((above - below) / (2 * step)) == pytest.approx(float(slope), rel=1e-7)


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


TRANSFORMATIONS = {
    "vmap_of_grad": lambda loss: jax.jit(mapped(loss)),
    "remat": lambda loss: jax.jit(GRADIENT(jax.checkpoint(loss))),
    "scan": lambda loss: jax.jit(scanned(loss)),
}


@functools.cache
def loss_and_gradients(algorithm):
    """A loss of weights and inputs, these, and its gradients under jit alone."""
    x = random_inputs(8, 2, 2, 40, 16, 16, states=False)
    weights = array(np.random.default_rng(0).normal(size=x["v"].shape), "float32")

    def loss(weights, *x):
        return jnp.sum(mlstm_chunkwise(*x, chunk_size=16, **ALGORITHMS[algorithm]) * weights)

    return loss, x, weights, jax.tree.map(np.asarray, jax.jit(GRADIENT(loss))(weights, *x.values()))


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("algorithm", ["xla"])
def test_transformations_give_the_same_gradients(algorithm, transformation):
    loss, x, weights, expected = loss_and_gradients(algorithm)
    result = TRANSFORMATIONS[transformation](loss)(weights, *x.values())
    for name, actual, desired in zip(x, result, expected, strict=True):
        assert_close(actual, desired, 1e-5, name)
