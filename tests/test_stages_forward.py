"""Each forward stage, interpreted, against its plain jnp form in float64; and the stages together against the recurrence."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, error, oracle, random_inputs, tolerance

from mlstm_pallas import KernelConfig, StageConfig, gates, mlstm_chunkwise, reference
from mlstm_pallas.config import config_for
from mlstm_pallas.problem import Problem
from mlstm_pallas.stages.parallel_fw_H import parallel_fw_H
from mlstm_pallas.stages.parallel_fw_P import key_sums, parallel_fw_P
from mlstm_pallas.stages.recurrent_fw_C import recurrent_fw_C

pytestmark = pytest.mark.usefixtures("quick_compilation")

NORMALISER = {"eps": 1e-6, "stabilize_correctly": True, "norm_val": 1.0}


def tiles(LQ, LKV, DHQK, DHHV, keep_q=True):
    return StageConfig(siz_b_LQ=LQ, siz_b_LKV=LKV, siz_b_DHQK=DHQK, siz_b_DHHV=DHHV, keep_q=keep_q)


TILES = {
    "16x16x16x16": tiles(16, 16, 16, 16),
    "64x16x32x16": tiles(64, 16, 32, 16),
    "16x64x16x32": tiles(16, 64, 16, 32),
    "32x32x64x64_q_reread": tiles(32, 32, 64, 64, keep_q=False),
    "16x32x16x32_q_reread": tiles(16, 32, 16, 32, keep_q=False),
}


@functools.cache
def stage_case(dtype, L, DHQK=32, DHHV=64, S=128, resets=False):
    """Inputs of the stages and their float64 results in plain jnp."""
    problem = Problem(1, 2, S, DHQK, DHHV, L, DHQK**-0.5)
    x = random_inputs(L + DHQK, 1, 2, S, DHQK, DHHV, dtype=dtype, resets=resets)
    split = [x[name].reshape(1, 2, S // L, L, *x[name].shape[3:]) for name in "qkvif"]
    made = jax.jit(gates.chunk_gates)(split[3], split[4], x["m_initial"])
    with jax.enable_x64(True):
        q, k, v = (y.astype("float64") for y in split[:3])
        wide = jax.tree.map(lambda y: y.astype("float64"), made)
        states = jax.jit(reference.chunk_states)(k, v, wide, x["c_initial"].astype("float64"), x["n_initial"].astype("float64"))
        num, z = jax.jit(reference.chunk_outputs)(q, k, v, wide, *states[:2], problem.qk_scale)
        h = reference.normalise(num, z, wide.vecM, **NORMALISER)
        expected = jax.tree.map(np.asarray, (states, h.reshape(1, 2, S, DHHV), z.reshape(1, 2, S)))
    return problem, x, made, expected


TILE_CASES = [("float32", L, tiling) for L in (16, 64, 128) for tiling in TILES] + [("bfloat16", 64, tiling) for tiling in TILES]


def keys_of(x, made, scaled):
    """The arguments of recurrent_fw_C: keys that it scales, or that come scaled."""
    abar = made.vecAbar.reshape(x["i"].shape)
    if not scaled:
        return x["k"], x["v"], made.scaGamma, x["c_initial"], abar, x["n_initial"]
    return (x["k"] * abar[..., None]).astype(x["k"].dtype), x["v"], made.scaGamma, x["c_initial"]


def check_states(found, expected, dtype, scaled):
    C, C_last, *n = found
    assert C.dtype == jnp.dtype(dtype)
    assert_close(C, expected[0], tolerance(dtype, 128), "C")
    assert_close(C_last, expected[2], tolerance(dtype, 128), "C_last")
    assert len(n) == (0 if scaled else 2)
    for name, actual, wanted in zip(("n", "n_last"), n, expected[1::2], strict=False):  # of keys that are not rounded once more
        assert actual.dtype == jnp.float32
        assert_close(actual, wanted, tolerance("float32", 128), name)


@pytest.mark.parametrize(
    ("dtype", "L", "tiling", "scaled"),
    [*[(*case, False) for case in TILE_CASES], *[(*case, True) for case in TILE_CASES if case[2] in ("16x16x16x16", "16x64x16x32")]],
)
def test_recurrent_fw_C(dtype, L, tiling, scaled):
    problem, x, made, (expected, _, _) = stage_case(dtype, L)
    config = KernelConfig(recurrent_fw_C=TILES[tiling])
    launch = jax.jit(functools.partial(recurrent_fw_C, problem=problem, config=config, interpret=True))
    check_states(launch(*keys_of(x, made, scaled)), expected, dtype, scaled)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("num_segments", "dtype", "resets"), [(1, "float32", False), (2, "float32", True), (8, "float32", True), (4, "bfloat16", False)]
)
def test_recurrent_fw_C_in_segments(num_segments, dtype, resets, scaled):
    problem, x, made, (expected, _, _) = stage_case(dtype, 16, resets=resets)
    tiles = dataclasses.replace(TILES["16x16x16x16"], num_segments=num_segments)
    assert tiles.segments(problem) == num_segments
    launch = jax.jit(functools.partial(recurrent_fw_C, problem=problem, config=KernelConfig(recurrent_fw_C=tiles), interpret=True))
    check_states(launch(*keys_of(x, made, scaled)), expected, dtype, scaled)


@pytest.mark.parametrize("num_segments", [1, 4])
@pytest.mark.parametrize("scaled", [False, True])
def test_recurrent_fw_C_from_nothing_to_nothing(scaled, num_segments):
    """No initial C is one of zeros; the last C is not asked for."""
    problem, x, made, _ = stage_case("float32", 16)
    config = KernelConfig(recurrent_fw_C=dataclasses.replace(TILES["16x16x16x16"], num_segments=num_segments))
    launch = functools.partial(recurrent_fw_C, problem=problem, config=config, interpret=True)
    k, v, gamma, C, *norms = keys_of(x, made, scaled)
    expected, _, *n = jax.jit(launch)(k, v, gamma, jnp.zeros_like(C), *norms)
    found, last, *same_n = jax.jit(functools.partial(launch, last=False))(k, v, gamma, None, *norms)
    assert last is None
    for actual, wanted in zip((found, *same_n), (expected, *n), strict=True):
        assert np.array_equal(np.asarray(actual), np.asarray(wanted))


def test_a_sequence_is_split_where_there_are_few_programs():
    tiles = StageConfig(siz_b_DHQK=64, siz_b_DHHV=128)
    problem = Problem(1, 8, 8192, 256, 512, 128, 1.0)
    for heads, chunks, expected in ((64, 64, 1), (8, 64, 1), (4, 64, 4), (1, 64, 16), (1, 4, 4), (1, 2, 1), (1, 63, 1)):
        assert tiles.segments(dataclasses.replace(problem, NH=heads, S=128 * chunks)) == expected, (heads, chunks)


@pytest.mark.parametrize("save_every", [2, 3, 8])
def test_recurrent_fw_C_stores_every_nth_state(save_every):
    problem, x, made, _ = stage_case("float32", 16)
    config = KernelConfig(recurrent_fw_C=dataclasses.replace(TILES["16x16x16x16"], num_segments=1))
    launch = functools.partial(recurrent_fw_C, problem=problem, config=config, interpret=True)
    arguments = keys_of(x, made, scaled=False)
    every = jax.jit(launch)(*arguments)
    some = jax.jit(functools.partial(launch, save_every=save_every))(*arguments)
    for index, (actual, wanted) in enumerate(zip(some, every, strict=True)):
        assert np.array_equal(np.asarray(actual), np.asarray(wanted if index % 2 else wanted[:, :, ::save_every]))


@pytest.mark.parametrize(("dtype", "L", "tiling"), TILE_CASES)
def test_parallel_fw_H(dtype, L, tiling):
    problem, x, made, (states, expected_h, expected_z) = stage_case(dtype, L, resets=L == 64)
    C, n = jnp.asarray(states[0], dtype), jnp.asarray(states[1], "float32")
    config = KernelConfig(parallel_fw_H=TILES[tiling])
    launch = functools.partial(parallel_fw_H, problem=problem, config=config, output_dtype=jnp.dtype(dtype), interpret=True, **NORMALISER)
    h, z = jax.jit(launch)(x["q"], x["k"], x["v"], made, C, n)
    assert h.dtype == jnp.dtype(dtype)
    assert z.dtype == jnp.float32
    assert_close(h, expected_h, tolerance(dtype, 128 + 32), "h")
    assert_close(z, expected_z, tolerance("float32", 128 + 32), "z")


@pytest.mark.parametrize(("dtype", "L", "DHQK"), [("float32", 16, 32), ("float32", 64, 48), ("bfloat16", 32, 32)])
def test_parallel_fw_P(dtype, L, DHQK):
    problem, x, made, (states, expected_h, expected_z) = stage_case(dtype, L, DHQK, resets=L == 64)
    config = config_for(DHQK, 64, 128, jnp.dtype(dtype))
    launch = functools.partial(parallel_fw_P, problem=problem, config=config, interpret=True, **NORMALISER)
    scores, z, n = jax.jit(launch)(x["q"], x["k"], made, x["n_initial"])
    assert scores.matP.dtype == scores.matK_scaled.dtype == jnp.dtype(dtype)
    assert_close(z, expected_z, tolerance("float32", 128 + 32), "z")
    for actual, expected, name in zip(n, states[1::2], ("n", "n_last"), strict=True):
        assert_close(actual, expected, tolerance("float32", 128), name)
    arrays = {name: x[name] for name in "qkv"} | scores._asdict()
    wide = {name: np.asarray(y.astype("float32"), "float64").reshape(1, 2, 128 // L, L, -1) for name, y in arrays.items()}
    num = np.einsum("bhcld,bhcde->bhcle", wide["q"], states[0]) * wide["vecR"] + np.einsum("bhcts,bhcse->bhcte", wide["matP"], wide["v"])
    assert_close(num.reshape(expected_h.shape), expected_h, tolerance(dtype, 128 + 32), "h")
    scaled = np.asarray(made.vecAbar, "float64")[..., None] * wide["k"]
    assert_close(wide["matK_scaled"], scaled, tolerance(dtype, 1), "kbar")


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_key_sums(dtype, rounded):
    """With rounded, of the very numbers that C is made of."""
    problem, x, made, _ = stage_case(dtype, 32)
    config = KernelConfig(parallel_fw_P=tiles(16, 16, 16, 16))
    found = jax.jit(functools.partial(key_sums, problem=problem, config=config, rounded=rounded, interpret=True))(x["k"], made)
    if rounded:
        scaled = np.asarray(keys_of(x, made, scaled=True)[0].astype("float32"), "float64")
    else:
        scaled = np.asarray(x["k"].astype("float32"), "float64") * np.asarray(made.vecAbar, "float64").reshape(1, 2, 128, 1)
    assert_close(found, scaled.reshape(1, 2, 4, 32, 32).sum(-2), tolerance("float32", 32))


STATELESS_TILES = {
    "16x16x16": tiles(16, 16, 16, 16),
    "32x64x16": tiles(16, 32, 64, 16),
    "16x32x64": tiles(16, 16, 32, 64),
    "default": None,
}
STATELESS_VARIANTS = {
    "exp": {},
    "floor": {"stabilize_correctly": False, "norm_val": 3.0, "eps": 0.0},
    "sigmoid": {"input_gate": "sigmoid"},
    "unnormalised": {"input_gate": "sigmoid", "normalize": False},
}


def stateless(tiling):
    return KernelConfig(stateless_forward=True, recurrent_fw_H=STATELESS_TILES[tiling])


@pytest.mark.parametrize(
    ("dtype", "tiling", "variant"),
    [
        *[("float32", tiling, "exp") for tiling in STATELESS_TILES],
        *[("float32", "16x16x16", variant) for variant in STATELESS_VARIANTS if variant != "exp"],
        ("bfloat16", "default", "exp"),
    ],
)
def test_forward_without_states_in_memory(dtype, tiling, variant):
    """S is no multiple of a chunk, heads are padded, a chunk of the backward pass is several here."""
    options = STATELESS_VARIANTS[variant]
    inputs = random_inputs(5, 2, 2, 100, 48, 80, dtype=dtype, resets=True, m_initial="input_gate" not in options)
    ids = np.cumsum(np.random.default_rng(0).random((2, 100)) < 0.1, axis=1).astype("int32") if variant == "exp" else None
    run = functools.partial(mlstm_chunkwise, **inputs, segment_ids=ids, return_last_states=True, backend="interpret", **options)
    expected_h, expected_states = oracle(inputs, ids, **options)
    h, states = run(chunk_size=64, config=stateless(tiling))
    bound = tolerance(dtype, 100 + 48)
    for name, actual, expected in zip("hcnm", (h, *states), (expected_h, *expected_states), strict=True):
        assert_close(actual, expected, bound, name)


def test_a_walk_of_many_launches_rounds_as_one_does():
    inputs = random_inputs(14, 1, 2, 64, 128, 32, dtype="bfloat16")
    expected, _ = oracle(inputs)
    walk = StageConfig(siz_b_LKV=16, siz_b_DHQK=16, siz_b_DHHV=32, siz_b_loop=16)
    run = functools.partial(mlstm_chunkwise, **inputs, backend="interpret")
    h = run(config=KernelConfig(stateless_forward=True, recurrent_fw_H=walk))
    assert_close(h, expected, tolerance("bfloat16", 64 + 128))


@pytest.mark.parametrize("recompute_states_in_bw", [True, False])
def test_the_walk_stores_states_where_the_backward_pass_wants_them(recompute_states_in_bw):
    """And nowhere else: there may be no backward pass."""
    inputs = random_inputs(6, 1, 1, 64, 16, 16)
    config = dataclasses.replace(stateless("16x16x16"), chunk_size=32)
    run = functools.partial(mlstm_chunkwise, config=config, recompute_states_in_bw=recompute_states_in_bw, backend="interpret")
    states = "f32[1,2,16,16]"  # before each of two chunks, as the kernel stores them
    for function, stored in ((run, False), (lambda *x: jax.vjp(run, *x)[0], not recompute_states_in_bw)):
        made = str(jax.make_jaxpr(function)(*inputs.values()))
        assert "name=recurrent_fw_H" in made
        assert "name=recurrent_fw_C" not in made
        assert (states in made) == stored


HEADS = [("float32", 1, 1), ("bfloat16", 3, 17), ("float32", 24, 40), ("bfloat16", 40, 24), ("float32", 64, 16), ("bfloat16", 80, 96)]


@pytest.mark.parametrize(("dtype", "DHQK", "DHHV"), HEADS)
def test_forward_odd_heads(dtype, DHQK, DHHV):
    inputs = random_inputs(DHQK, 2, 16 if DHHV < 8 else 2, 50, DHQK, DHHV, dtype=dtype)  # roundings average out over many numbers only
    expected_h, expected_states = oracle(inputs)
    h, states = mlstm_chunkwise(**inputs, chunk_size=32, return_last_states=True, backend="interpret")
    bound = tolerance(dtype, 50 + DHQK)
    for name, actual, expected in zip(("h", "c", "n", "m"), (h, *states), (expected_h, *expected_states), strict=True):
        assert_close(actual, expected, bound, name)


GATES = {
    "plain": {},
    "no_states": {"states": False},
    "resets": {"resets": True},
    "gates_at_-30": {"f_shift": -30.0},
    "gates_at_30": {"f_shift": 30.0, "i_scale": 30.0},
    "gates_at_1e3": {"f_scale": 1e3, "i_scale": 1e3, "resets": True},
}


@pytest.mark.parametrize(("case", "S"), [(case, S) for case in GATES for S in (1, 100)] + [("plain", 16), ("plain", 130)])
def test_forward_gates_and_lengths(case, S):
    inputs = random_inputs(S, 1, 2, S, 16, 32, **GATES[case])
    expected_h, expected_states = oracle(inputs)
    h, states = mlstm_chunkwise(**inputs, chunk_size=32, return_last_states=True, backend="interpret")
    bound = tolerance("float32", S + 16)
    m = expected_states[2]
    bound += np.spacing(np.float32(np.max(np.abs(m), where=np.isfinite(m), initial=0)))  # states are relative to a float32 m
    for name, actual, expected in zip(("h", "c", "n", "m"), (h, *states), (expected_h, *expected_states), strict=True):
        assert_close(actual, expected, bound, name)


NORMALISERS = {
    "eps0": {"eps": 0.0},
    "eps_large": {"eps": 0.3},
    "norm_val_large": {"norm_val": 50.0},
    "norm_val0": {"norm_val": 0.0},
    "unstabilised": {"stabilize_correctly": False, "norm_val": 3.0},
    "unstabilised_norm0_eps0": {"stabilize_correctly": False, "norm_val": 0.0, "eps": 0.0},
}


@pytest.mark.parametrize("options", NORMALISERS)
@pytest.mark.parametrize("backend", ["interpret", pytest.param("xla", marks=pytest.mark.slow)])
def test_forward_normalisers(backend, options):
    inputs = random_inputs(7, 1, 2, 64, 16, 16, resets=True)
    expected_h, _ = oracle(inputs, **NORMALISERS[options])
    h = mlstm_chunkwise(**inputs, chunk_size=32, backend=backend, **NORMALISERS[options])
    assert_close(h, expected_h, tolerance("float32", 64 + 16))


@pytest.mark.parametrize("backend", ["interpret", "xla"])
@pytest.mark.parametrize("mask", [-1e6, -1e9, -1e30, float(np.finfo(np.float32).min)])
def test_masks_that_are_finite_are_those_at_minus_infinity(mask, backend):
    inputs = random_inputs(17, 1, 2, 64, 16, 16)
    inputs["i"] = inputs["i"].at[0, 0, 10].set(mask)
    inputs["f"] = inputs["f"].at[0, 1, 40].set(mask)
    infinite = {name: jnp.where(x <= mask, -jnp.inf, x) if name in "if" else x for name, x in inputs.items()}
    expected_h, expected_states = oracle(infinite)
    h, states = mlstm_chunkwise(**inputs, chunk_size=32, return_last_states=True, backend=backend)
    for actual, expected in zip((h, *states), (expected_h, *expected_states), strict=True):
        assert_close(actual, expected, tolerance("float32", 64 + 16))


@pytest.mark.parametrize("backend", ["interpret", "xla"])
def test_a_floor_of_zero_leaves_states_of_very_negative_m(backend):
    """exp(m) underflows there, and nothing may be scaled by it."""
    inputs = random_inputs(0, 1, 1, 40, 8, 8, states=False)
    inputs["i"] -= 300.0
    inputs["f"] = inputs["f"].at[:, :, 0].set(-jnp.inf)
    expected, _ = oracle(inputs, norm_val=0.0)
    assert float(np.linalg.norm(expected)) > 1
    found = mlstm_chunkwise(**inputs, chunk_size=32, backend=backend, norm_val=0.0)
    assert_close(found, expected, tolerance("float32", 40 + 8))


@pytest.mark.parametrize("backend", ["interpret", pytest.param("xla", marks=pytest.mark.slow)])
@pytest.mark.parametrize("at", [1, 32, 50])
def test_two_halves_are_the_whole(at, backend):
    inputs = random_inputs(at, 1, 2, 96, 16, 16)
    run = functools.partial(mlstm_chunkwise, chunk_size=32, return_last_states=True, backend=backend)
    whole_h, whole_states = run(**inputs)
    first, second = ({name: x[:, :, part] for name, x in inputs.items() if name in "qkvif"} for part in (np.s_[:at], np.s_[at:]))
    initial = {name: inputs[name] for name in ("c_initial", "n_initial", "m_initial")}
    first_h, states = run(**first, **initial)
    second_h, last = run(**second, **dict(zip(initial, states, strict=True)))
    bound = 2 * tolerance("float32", 96 + 16)
    assert_close(jnp.concatenate([first_h, second_h], axis=2), whole_h, bound)
    for actual, expected in zip(last, whole_states, strict=True):
        assert_close(actual, expected, bound)


def test_parts_start_from_minus_infinity():
    """m_initial = -inf with C = n = 0 stores nothing: equal to a first step of i = -inf that resets."""
    inputs = random_inputs(3, 1, 2, 40, 16, 16, states=False, i_scale=0.1, f_shift=5.0)
    inputs["i"] -= 20.0  # m = 0 would win the maximum
    empty = {"c_initial": jnp.zeros((1, 2, 16, 16)), "n_initial": jnp.zeros((1, 2, 16)), "m_initial": jnp.full((1, 2), -jnp.inf)}
    expected_h, expected_states = oracle({**inputs, **empty})
    h, states = mlstm_chunkwise(**inputs, **empty, chunk_size=16, return_last_states=True, backend="interpret")
    assert float(expected_states[2].max()) < -10
    for actual, expected in zip((h, *states), (expected_h, *expected_states), strict=True):
        assert_close(actual, expected, tolerance("float32", 40 + 16) + np.spacing(np.float32(20)))  # exp(-m) at a float32 m of -20


def test_wide_heads_and_chunks_of_many_tiles():
    """One interpreted case at DHQK = 512 with the default tiles."""
    inputs = random_inputs(11, 1, 1, 64, 512, 128, dtype="bfloat16")
    expected_h, _ = oracle(inputs)
    config = config_for(512, 128, 64, jnp.dtype("bfloat16"))
    assert config.stage("parallel_fw_H").keep_q is False
    h = mlstm_chunkwise(**inputs, backend="interpret", config=config)
    assert_close(h, expected_h, tolerance("bfloat16", 64 + 512))


def test_nan_stays_in_its_own_head():
    inputs = random_inputs(13, 1, 2, 48, 16, 16)
    inputs["v"] = inputs["v"].at[0, 1, 20, 3].set(jnp.nan)
    h = np.asarray(mlstm_chunkwise(**inputs, chunk_size=16, backend="interpret"))
    assert np.isfinite(h[0, 0]).all()
    assert np.isfinite(h[0, 1, :16]).all()
    assert np.isnan(h[0, 1, 20:, 3]).all()


def test_the_error_norm_sees_a_wrong_row():
    h = np.ones((4, 4))
    wrong = h.copy()
    wrong[1] = 0
    assert error(wrong, h) == pytest.approx(0.5)
    wrong[1] = np.nan
    assert error(wrong, h) == np.inf
