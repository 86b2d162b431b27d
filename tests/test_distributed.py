"""One sequence over several devices: the numbers of one device, what is exchanged, and what is refused."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import NAMES, assert_close, random_inputs

from mlstm_pallas import mlstm_chunkwise
from mlstm_pallas.distributed import Summary, joined, mlstm_chunkwise_sequence_parallel

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, NH, S, DHQK, DHHV = 2, 2, 160, 16, 8
BOUND = 1e-5  # gradients of either are held to 1e-4
SEQUENCE, WHOLE = P(None, None, "s"), P()
COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\(")


def mesh_of(shape, names, kind=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names), devices=jax.devices()[: math.prod(shape)])


def over(mesh, *, sequence=SEQUENCE, states=WHOLE, count=8, **options):
    """The sequence-parallel function of whole arrays; ``count`` arguments."""
    last = options.setdefault("return_last_states", True)
    run = functools.partial(mlstm_chunkwise_sequence_parallel, axis_name="s", **options)
    specs = ((sequence,) * 5 + (states,) * 3)[:count]
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(sequence, states) if last else sequence)


def gradient_of(run):
    def loss(*x):
        h, states = run(*x)
        return jnp.sum(h * jnp.cos(h)) + sum(jnp.sum(jnp.sin(jnp.where(jnp.isfinite(y), y, 0.0))) for y in states), (h, *states)

    return jax.jit(jax.value_and_grad(loss, tuple(range(8)), has_aux=True))


def exchanged(compiled):
    """(collective, bytes that a device receives) of every collective of the compiled module."""
    found = []
    for shapes, name in COLLECTIVE.findall(compiled.as_text()):
        floats = (math.prod(int(n) for n in dims.split(",") if n) for dims in re.findall(r"f32\[([\d,]*)\]", shapes))
        found.append((name, 4 * sum(floats)))
    return found


def check(found, expected, bound=BOUND):
    (_, outputs), gradients = found
    (_, expected_outputs), expected_gradients = expected
    for name, actual, wanted in zip(("h", "c", "n", "m"), outputs, expected_outputs, strict=True):
        assert_close(np.asarray(actual), np.asarray(wanted), bound, name)
    for name, actual, wanted in zip(NAMES, gradients, expected_gradients, strict=True):
        assert_close(np.asarray(actual), np.asarray(wanted), bound, "gradient of " + name)


@pytest.fixture(scope="module")
def alone():
    """Values and gradients on one device; eps is large, so that the gradient through the stabilisers counts."""
    return gradient_of(functools.partial(mlstm_chunkwise, chunk_size=16, backend="xla", return_last_states=True, eps=0.1))


@pytest.fixture(scope="module")
def over_eight():
    return gradient_of(over(mesh_of((8,), ("s",)), chunk_size=16, backend="xla", eps=0.1))


def closed_segments(x):
    """Device 2 stores nothing and forgets nothing, device 3 forgets all and stores nothing, device 5 has one reset and one mask."""
    i, f = (np.array(x[name]) for name in "if")
    n = S // 8
    i[:, :, 2 * n : 4 * n] = -np.inf
    f[:, :, 2 * n : 3 * n] = np.inf
    f[:, :, 3 * n : 4 * n] = -np.inf
    f[:, :, 5 * n + 7] = -1e9
    i[:, :, 5 * n + 3] = -1e30
    return x | {"i": jnp.asarray(i), "f": jnp.asarray(f)}


CASES = {
    "ordinary": random_inputs(0, B, NH, S, DHQK, DHHV, f_shift=5.0),
    "resets": random_inputs(1, B, NH, S, DHQK, DHHV, resets=True),
    "large_gates": random_inputs(2, B, NH, S, DHQK, DHHV, i_scale=30.0, f_scale=10.0),
    "closed_segments": closed_segments(random_inputs(3, B, NH, S, DHQK, DHHV, f_shift=5.0)),
    "empty_initial_state": {
        name: jnp.full_like(x, -jnp.inf) if name == "m_initial" else jnp.zeros_like(x) if "initial" in name else x
        for name, x in random_inputs(4, B, NH, S, DHQK, DHHV, f_shift=5.0).items()
    },
}


@pytest.mark.parametrize("case", CASES)
def test_eight_devices_give_the_numbers_of_one(case, alone, over_eight):
    x = CASES[case].values()
    check(over_eight(*x), alone(*x))


def test_batch_and_heads_may_be_split_as_well():
    mesh = mesh_of((2, 2, 2), ("b", "h", "s"), AxisType.Explicit)
    options = dict(chunk_size=16, backend="xla", stabilize_correctly=False, norm_val=5.0, recompute_states_in_bw=False)
    x = CASES["ordinary"].values()
    alone = gradient_of(functools.partial(mlstm_chunkwise, return_last_states=True, **options))(*x)
    specs = (P("b", "h", "s"),) * 5 + (P("b", "h"),) * 3
    x = [jax.device_put(y, NamedSharding(mesh, spec)) for y, spec in zip(x, specs, strict=True)]
    check(gradient_of(over(mesh, sequence=specs[0], states=specs[-1], **options))(*x), alone)


def test_kernels_on_segments_that_are_no_multiple_of_the_chunk(alone):
    """Interpreted; 40 steps a segment in chunks of 16, a head dimension that needs padding, and the batch left to the compiler."""
    mesh = mesh_of((2, 4), ("b", "s"))
    run = functools.partial(mlstm_chunkwise_sequence_parallel, axis_name="s", chunk_size=16, backend="interpret", eps=0.1)
    split = jax.shard_map(
        functools.partial(run, return_last_states=True),
        mesh=mesh,
        in_specs=(SEQUENCE,) * 5 + (P(),) * 3,
        out_specs=(SEQUENCE, P()),
        axis_names={"s"},
        check_vma=False,
    )
    x = CASES["resets"].values()
    found = gradient_of(split)(*(jax.device_put(y, NamedSharding(mesh, P("b"))) for y in x))
    check(found, alone(*x))


def test_the_exchange_is_what_the_docstring_says_and_memory_does_not_grow():
    held = {}
    for devices, rounds in ((2, 1), (8, 4)):
        x = list(random_inputs(0, B, NH, 16 * devices, DHQK, DHHV, states=False).values())
        run = over(mesh_of((devices,), ("s",)), chunk_size=16, backend="xla", return_last_states=False, count=5)
        compiled = jax.jit(lambda dh, *x, run=run: jax.vjp(run, *x)[1](dh)).lower(x[2], *x).compile()
        found = exchanged(compiled)
        assert {name for name, _ in found} == {"collective-permute"}
        state, heads = DHQK * DHHV + DHQK, B * NH
        most = rounds * heads * (state + 2) + rounds * heads * (state + 3)
        # the last round needs no total decay: one float less forward, two less backward
        assert 4 * (most - 3 * heads) <= sum(size for _, size in found) <= 4 * most
        held[devices] = compiled.memory_analysis().temp_size_in_bytes
    assert held[8] < 1.25 * held[2]


def test_vmap_is_a_larger_batch(alone):
    x = list(CASES["ordinary"].values())
    run = over(mesh_of((2,), ("s",)), chunk_size=16, backend="xla", eps=0.1)
    found, _ = jax.jit(jax.vmap(lambda *y: run(*(z[None] for z in y))))(*x)
    assert_close(np.asarray(found[:, 0]), np.asarray(alone(*x)[0][1][0]), BOUND)


def test_summaries_join_in_any_order_and_empty_ones_change_nothing():
    r = np.random.default_rng(0)

    def summary(m, g):
        return Summary(*(jnp.asarray(r.normal(size=s), "float32") for s in ((1, 4, 3, 2), (1, 4, 3))), jnp.array([m]), jnp.array([g]))

    a, b, c = (
        summary([1.0, -jnp.inf, 50.0, -3.0], [-1.0, -2.0, -90.0, 0.0]),
        summary([0.5, 2.0, -jnp.inf, -jnp.inf], [-jnp.inf, -1.0, -3.0, -jnp.inf]),
        summary([-2.0, 3.0, 1.0, -jnp.inf], [-0.5, -jnp.inf, -1.0, -jnp.inf]),
    )
    for x, y in zip(joined(joined(a, b), c), joined(a, joined(b, c)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    empty = Summary(jnp.zeros((1, 4, 3, 2)), jnp.zeros((1, 4, 3)), jnp.full((1, 4), -jnp.inf), jnp.zeros((1, 4)))
    stored = a.m > -jnp.inf
    for x, y in zip(joined(empty, a), a, strict=True):
        assert np.array_equal(np.asarray(x)[np.asarray(stored)], np.asarray(y)[np.asarray(stored)])


def test_a_gradient_lowers_for_cuda_inside_a_shard_map_that_checks():
    mesh = AbstractMesh((2, 2), ("b", "s"), (AxisType.Auto,) * 2, abstract_device=AbstractDevice("NVIDIA H200", None, "gpu"))
    made = random_inputs(0, 2, 2, 128, 16, 16, dtype="bfloat16", states=False).values()
    sharding = NamedSharding(mesh, P("b", None, "s"))
    x = [jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=sharding) for y in made]
    run = over(mesh, sequence=P("b", None, "s"), return_last_states=False, count=5)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(jax.grad(lambda *x: jnp.sum(run(*x).astype("float32")), tuple(range(5)))).trace(*x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") >= 9
    assert "collective_permute" in text
    assert "all_gather" not in text


def test_an_uneven_sequence_is_refused():
    x = [y[:, :, :20] for y in list(CASES["ordinary"].values())[:5]]
    with pytest.raises(ValueError, match=r"(?s)evenly.*(8|20).*(8|20)"):
        over(mesh_of((8,), ("s",)), return_last_states=False, count=5)(*x)


def test_an_axis_that_is_none_of_the_mesh_is_refused():
    x = list(CASES["ordinary"].values())[:5]
    with pytest.raises(ValueError, match=r"axis_name is 's', expected a mesh axis of a surrounding jax\.shard_map, and there is none"):
        mlstm_chunkwise_sequence_parallel(*x, axis_name="s")
    with pytest.raises(ValueError, match="axis_name is 's', expected one of t"):
        jax.shard_map(
            functools.partial(mlstm_chunkwise_sequence_parallel, axis_name="s"), mesh=mesh_of((2,), ("t",)), in_specs=P(), out_specs=P()
        )(*x)


def test_arguments_are_checked_as_those_of_mlstm_chunkwise():
    x = list(CASES["ordinary"].values())[:5]
    with pytest.raises(ValueError, match="chunk_size is 24"):
        over(mesh_of((2,), ("s",)), return_last_states=False, count=5, chunk_size=24)(*x)


def test_derivatives_that_do_not_exist_are_refused():
    x = list(random_inputs(0, 1, 1, 32, 8, 8, states=False).values())
    run = over(mesh_of((2,), ("s",)), return_last_states=False, count=5, chunk_size=16, backend="xla")

    def loss(q):
        return jnp.sum(run(q, *x[1:]))

    with pytest.raises(TypeError, match=r"mlstm_pallas\.reference"):
        jax.eval_shape(jax.grad(lambda q: jnp.sum(jax.grad(loss)(q) ** 2)), x[0])
    with pytest.raises(TypeError, match="forward-mode"):  # JAX says so itself, when it lowers the shard_map
        jax.jit(lambda q: jax.jvp(loss, (q,), (q,))).lower(x[0])


@pytest.mark.gpu_multi
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gpus", [2, 4])
def test_gpus_give_the_numbers_of_one(gpus, dtype):
    if jax.device_count() < gpus:
        pytest.skip(f"fewer than {gpus} GPUs")
    x = list(random_inputs(0, 2, 4, 8192, 128, 256, dtype=dtype, f_shift=5.0).values())
    split = gradient_of(over(mesh_of((gpus,), ("s",)), backend="triton"))
    compiled = split.lower(*x).compile()
    assert {name for name, _ in exchanged(compiled)} <= {"collective-permute", "all-reduce"}
    expected = gradient_of(functools.partial(mlstm_chunkwise, backend="triton", return_last_states=True))(*x)
    check(compiled(*x), expected, {"float32": 1e-4, "bfloat16": 2e-2}[dtype])
