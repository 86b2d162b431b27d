"""One sequence over several devices: the numbers of one device, what is exchanged, and what is
refused."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import MOSAIC_CALL, NAMES, assert_close, error, initial_state_scale, random_inputs

from mlstm_pallas import KernelConfig, StageConfig, call_spec, distributed, mlstm_chunkwise
from mlstm_pallas.backend import jax_has_mosaic_gpu
from mlstm_pallas.devices import compute_capability
from mlstm_pallas.distributed import (
    Stabiliser,
    Summary,
    joined,
    joined_stabilisers,
    mlstm_chunkwise_sequence_parallel,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, NH, S, DHQK, DHHV = 2, 2, 160, 16, 8
# h depends on the stabilisers themselves, through this eps and this floor
OPTIONS = dict(chunk_size=16, eps=0.1, stabilize_correctly=False, norm_val=5.0)
BOUND = 1e-5  # gradients of either are held to 1e-4
SEQUENCE, WHOLE = P(None, None, "s"), P()
COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\("
)


def mesh_of(shape, names, kind=AxisType.Auto, platform="cpu"):
    return jax.make_mesh(
        shape,
        names,
        axis_types=(kind,) * len(names),
        devices=jax.devices(platform)[: math.prod(shape)],
    )


def over(mesh, *, sequence=SEQUENCE, states=WHOLE, count=8, **options):
    """The sequence-parallel function of whole arrays; ``count`` arguments."""
    last = options.setdefault("return_last_states", True)
    run = functools.partial(mlstm_chunkwise_sequence_parallel, axis_name="s", **options)
    specs = ((sequence,) * 5 + (states,) * 3)[:count]
    return jax.shard_map(
        run, mesh=mesh, in_specs=specs, out_specs=(sequence, states) if last else sequence
    )


def loss_of(h, states):
    return jnp.sum(h * jnp.cos(h)), sum(
        jnp.sum(jnp.sin(jnp.where(jnp.isfinite(y), y, 0.0))) for y in states
    )


def gradient_of(run):
    def loss(*x):
        h, states = run(*x)
        return sum(loss_of(h, states)), (h, *states)

    return jax.jit(jax.value_and_grad(loss, tuple(range(8)), has_aux=True))


def exchanged(compiled):
    """(collective, bytes that a device receives) of every collective of the compiled module."""
    result = []
    for shapes, name in COLLECTIVE.findall(compiled.as_text()):
        floats = (
            math.prod(int(n) for n in dims.split(",") if n)
            for dims in re.findall(r"f32\[([\d,]*)\]", shapes)
        )
        result.append((name, 4 * sum(floats)))
    return result


def check(result, expected, x, bound=BOUND):
    (_, outputs), gradients = result
    (_, expected_outputs), expected_gradients = jax.tree.map(np.asarray, expected)
    for name, actual, desired in zip(("h", "c", "n", "m"), outputs, expected_outputs, strict=True):
        assert_close(np.asarray(actual), desired, bound, name)
    errors = {
        name: error(np.asarray(a), b)
        for name, a, b in zip(NAMES, gradients, expected_gradients, strict=True)
    }
    # one number a head, and a difference of larger ones
    scale = np.linalg.norm(
        initial_state_scale(*expected_gradients[5:7], dict(zip(NAMES, x, strict=True)))
    )
    errors["m_initial"] *= min(1.0, np.linalg.norm(expected_gradients[7]) / scale) if scale else 1.0
    assert max(errors.values()) < bound, errors


@pytest.fixture(scope="module")
def alone():
    """Values and gradients on one device."""
    return gradient_of(
        functools.partial(mlstm_chunkwise, backend="xla", return_last_states=True, **OPTIONS)
    )


@pytest.fixture(scope="module")
def over_eight():
    """On eight devices; each shard summarised in several splits, as long ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "_STEPS_OF_A_PRODUCT", 16)
        return (
            gradient_of(over(mesh_of((8,), ("s",)), backend="xla", **OPTIONS))
            .lower(*CASES["ordinary"].values())
            .compile()
        )


def closed_shards(x):
    """Device 2 stores nothing and forgets nothing, device 3 forgets all and stores nothing, device
    5 has one reset and one mask."""
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
    "closed_shards": closed_shards(random_inputs(3, B, NH, S, DHQK, DHHV, f_shift=5.0)),
    "empty_initial_state": {
        name: jnp.full_like(x, -jnp.inf)
        if name == "m_initial"
        else jnp.zeros_like(x)
        if "initial" in name
        else x
        for name, x in random_inputs(4, B, NH, S, DHQK, DHHV, f_shift=5.0).items()
    },
}


@pytest.mark.parametrize("case", CASES)
def test_eight_devices_give_the_numbers_of_one(case, alone, over_eight):
    x = CASES[case].values()
    check(over_eight(*x), alone(*x), x)


def test_batch_and_heads_may_be_split_as_well(alone):
    mesh = mesh_of((2, 2, 2), ("b", "h", "s"), AxisType.Explicit)
    specs = (P("b", "h", "s"),) * 5 + (P("b", "h"),) * 3
    x = CASES["ordinary"].values()
    split = [jax.device_put(y, NamedSharding(mesh, spec)) for y, spec in zip(x, specs, strict=True)]
    run = over(
        mesh,
        sequence=specs[0],
        states=specs[-1],
        backend="xla",
        recompute_states_in_bw=False,
        **OPTIONS,
    )
    check(gradient_of(run)(*split), alone(*x), x)


def test_kernels_on_shards_that_are_no_multiple_of_the_chunk(alone):
    """Interpreted; 40 steps a shard in chunks of 16, a head dimension that needs padding, and the
    batch left to the compiler."""
    mesh = mesh_of((2, 4), ("b", "s"))
    run = functools.partial(
        mlstm_chunkwise_sequence_parallel, axis_name="s", backend="interpret", **OPTIONS
    )
    split = jax.shard_map(
        functools.partial(run, return_last_states=True),
        mesh=mesh,
        in_specs=(SEQUENCE,) * 5 + (P(),) * 3,
        out_specs=(SEQUENCE, P()),
        axis_names={"s"},
        check_vma=False,
    )
    x = CASES["resets"].values()
    result = gradient_of(split)(*(jax.device_put(y, NamedSharding(mesh, P("b"))) for y in x))
    check(result, alone(*x), x)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["resets", "ordinary", "closed_shards"])
def test_splits_of_a_shard_take_their_products_from_its_summary(case, alone):
    """The fused scan, interpreted, on two devices: two splits each in the forward pass, whose
    products are computed once."""
    config = KernelConfig(
        fused_min_heads=1,
        recurrent_fw_H=StageConfig(siz_b_LKV=16, siz_b_DHQK=16, siz_b_DHHV=16, num_splits=2),
    )
    x = [y[:, :, 32:] if y.shape[2:3] == (S,) else y for y in CASES[case].values()]
    options = OPTIONS | {"chunk_size": 32}  # two of the fused scan's
    run = functools.partial(
        mlstm_chunkwise_sequence_parallel,
        axis_name="s",
        backend="interpret",
        config=config,
        **options,
    )
    split = jax.shard_map(
        functools.partial(run, return_last_states=True),
        mesh=mesh_of((2,), ("s",)),
        in_specs=(SEQUENCE,) * 5 + (P(),) * 3,
        out_specs=(SEQUENCE, P()),
        check_vma=False,
    )
    check(gradient_of(split)(*x), alone(*x), x)
    summands = re.compile(r"\b(key_sums|split_products)\b")
    for traced in (
        jax.make_jaxpr(split)(*x),
        gradient_of(split).trace(*x).jaxpr,
    ):  # the backward pass has no splits
        assert sorted(summands.findall(str(traced))) == ["key_sums", "split_products"]


@pytest.mark.slow
def test_shards_of_few_heads_have_splits_of_their_own(alone, monkeypatch):
    """The batch is left to the compiler: four heads are enough for the fused scan, the two of a
    shard are not."""
    monkeypatch.setattr(call_spec, "MIN_SPLIT_STEPS", 16)
    monkeypatch.setattr(call_spec, "MIN_SPLIT_STATE", 1)
    config = KernelConfig(fused_min_heads=B * NH)
    x = [y[:, :, 32:] if y.shape[2:3] == (S,) else y for y in CASES["ordinary"].values()]
    run = functools.partial(
        mlstm_chunkwise_sequence_parallel,
        axis_name="s",
        backend="interpret",
        config=config,
        **OPTIONS,
    )
    split = jax.shard_map(
        functools.partial(run, return_last_states=True),
        mesh=mesh_of((2, 2), ("b", "s")),
        in_specs=(SEQUENCE,) * 5 + (P(),) * 3,
        out_specs=(SEQUENCE, P()),
        axis_names={"s"},
        check_vma=False,
    )
    sharded = [jax.device_put(y, NamedSharding(mesh_of((2, 2), ("b", "s")), P("b"))) for y in x]
    check(gradient_of(split)(*sharded), alone(*x), x)


def test_no_batch_at_all():
    x = [y[:0] for y in random_inputs(0, 1, NH, 64, DHQK, DHHV).values()]
    h, _ = jax.jit(over(mesh_of((2,), ("s",)), backend="xla", **OPTIONS))(*x)
    assert h.shape == (0, NH, 64, DHHV)


def test_the_exchange_is_what_the_docstring_says_and_memory_does_not_grow():
    held = {}
    for devices, rounds in ((2, 1), (8, 4)):
        x = list(random_inputs(0, B, NH, 16 * devices, DHQK, DHHV, states=False).values())
        run = over(
            mesh_of((devices,), ("s",)),
            chunk_size=16,
            backend="xla",
            return_last_states=False,
            count=5,
        )
        compiled = (
            jax.jit(lambda dh, *x, run=run: jax.vjp(run, *x)[1](dh)).lower(x[2], *x).compile()
        )
        result = exchanged(compiled)
        assert {name for name, _ in result} == {"collective-permute"}
        state, heads = DHQK * DHHV + DHQK, B * NH
        most = 2 * rounds * heads * (state + 3)
        # the last round needs no total decay: two floats less forward, two less backward
        assert 4 * (most - 4 * heads) <= sum(size for _, size in result) <= 4 * most
        held[devices] = compiled.memory_analysis().temp_size_in_bytes
    assert held[8] < 1.25 * held[2]


@pytest.mark.slow
def test_vmap_is_a_larger_batch(alone):
    x = list(CASES["ordinary"].values())
    run = over(mesh_of((2,), ("s",)), backend="xla", **OPTIONS)
    result, _ = jax.jit(jax.vmap(lambda *y: run(*(z[None] for z in y))))(*x)
    assert_close(np.asarray(result[:, 0]), np.asarray(alone(*x)[0][1][0]), BOUND)


def test_summaries_join_in_any_order_and_empty_ones_change_nothing():
    m = np.array([[1.0, -np.inf, 50.0], [0.5, 2.0, -np.inf], [-np.inf, 3.0, 1.0]])
    g = np.array([[-1.0, -2.0, -90.0], [-np.inf, -1.0, -3.0], [-0.5, -np.inf, 0.0]])
    stabilisers = [Stabiliser(*pair) for pair in zip(m, g, strict=True)]
    states = [
        Summary(x[..., None, None], x[..., None], np.abs(x))
        for x in np.random.default_rng(0).normal(size=(3, 3))
    ]
    empty = Stabiliser(np.full(3, -np.inf), np.zeros(3)), Summary(np.zeros((3, 1, 1)), 0.0, 1.0)
    for join, (a, b, c), e in zip(
        (joined_stabilisers, joined), (stabilisers, states), empty, strict=True
    ):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-6),
            join(join(a, b), c),
            join(a, join(b, c)),
        )
        jax.tree.map(np.testing.assert_array_equal, join(e, a), a)


def test_a_gradient_lowers_for_cuda_inside_a_shard_map_that_checks():
    mesh = AbstractMesh(
        (2, 2),
        ("b", "s"),
        (AxisType.Auto,) * 2,
        abstract_device=AbstractDevice("NVIDIA H200", None, "gpu"),
    )
    built = random_inputs(0, 2, 2, 128, 16, 16, dtype="bfloat16", states=False).values()
    sharding = NamedSharding(mesh, P("b", None, "s"))
    x = [jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=sharding) for y in built]
    run = over(mesh, sequence=P("b", None, "s"), return_last_states=False, count=5)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(
            jax.grad(lambda *x: jnp.sum(run(*x).astype("float32")), tuple(range(5)))
        ).trace(*x)
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
    message = r"axis_name is 's', expected a mesh axis of the surrounding jax\.shard_map"
    run = functools.partial(mlstm_chunkwise_sequence_parallel, axis_name="s")
    with pytest.raises(ValueError, match=message):
        run(*x)
    with pytest.raises(ValueError, match=message):
        jax.shard_map(run, mesh=mesh_of((2,), ("t",)), in_specs=P(), out_specs=P())(*x)


def test_arguments_are_checked_as_those_of_mlstm_chunkwise():
    x = list(CASES["ordinary"].values())[:5]
    with pytest.raises(ValueError, match="chunk_size is 24"):
        over(mesh_of((2,), ("s",)), return_last_states=False, count=5, chunk_size=24)(*x)


def test_derivatives_that_do_not_exist_are_refused():
    x = list(random_inputs(0, 1, 1, 32, 8, 8, states=False).values())
    run = over(
        mesh_of((2,), ("s",)), return_last_states=False, count=5, chunk_size=16, backend="xla"
    )

    def loss(q):
        return jnp.sum(run(q, *x[1:]))

    with pytest.raises(TypeError, match=r"mlstm_pallas\.reference"):
        jax.eval_shape(jax.grad(lambda q: jnp.sum(jax.grad(loss)(q) ** 2)), x[0])
    with pytest.raises(TypeError, match=r"mlstm_pallas\.reference"):
        jax.jit(lambda q: jax.jvp(loss, (q,), (q,))).lower(x[0])


def gradient_on_one_device(shards, **options):
    """As gradient_of(over(...)), the devices being a mapped axis of one."""
    run = functools.partial(
        mlstm_chunkwise_sequence_parallel, axis_name="s", return_last_states=True, **options
    )

    def device(*x):
        def loss(*x):
            h, states = run(*x)
            of_h, of_states = loss_of(h, states)
            return of_h + jnp.where(jax.lax.axis_index("s") == 0, of_states, 0.0), (h, *states)

        return jax.value_and_grad(loss, tuple(range(8)), has_aux=True)(*x)

    def split(x):
        return x.reshape(*x.shape[:2], shards, -1, *x.shape[3:])

    def joined(x):
        return jnp.reshape(x, (*x.shape[:2], -1, *x.shape[4:]))

    @jax.jit
    def whole(*x):
        mapped = jax.vmap(
            device, (2,) * 5 + (None,) * 3, ((0, (2, 0, 0, 0)), (2,) * 5 + (0,) * 3), axis_name="s"
        )
        (losses, (h, *states)), gradients = mapped(*map(split, x[:5]), *x[5:])
        of_states = (jnp.sum(g, axis=0) for g in gradients[5:])
        return (jnp.sum(losses), (joined(h), *(y[0] for y in states))), (
            *map(joined, gradients[:5]),
            *of_states,
        )

    return whole


@pytest.mark.slow
def test_a_mapped_axis_does_for_a_mesh_axis(alone):
    x = CASES["resets"].values()
    check(gradient_on_one_device(5, backend="xla", **OPTIONS)(*x), alone(*x), x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shards_on_one_gpu_give_the_numbers_of_the_whole(dtype):
    x = list(random_inputs(0, 1, 2, 32768, 128, 256, dtype=dtype, f_shift=5.0).values())
    expected = gradient_of(
        functools.partial(mlstm_chunkwise, backend="triton", return_last_states=True)
    )(*x)
    check(
        gradient_on_one_device(4, backend="triton")(*x),
        expected,
        x,
        {"float32": 1e-4, "bfloat16": 2e-2}[dtype],
    )


@pytest.mark.gpu_multi
@pytest.mark.parametrize(
    ("backend", "dtype", "shape"),
    [
        ("triton", "float32", (2, 4, 8192, 128, 256)),
        ("triton", "bfloat16", (2, 4, 8192, 128, 256)),
        ("mosaic_gpu", "bfloat16", (1, 8, 8192, 256, 512)),
    ],
)
@pytest.mark.parametrize("gpus", [2, 4])
def test_gpus_give_the_numbers_of_one(gpus, backend, dtype, shape):
    if jax.device_count() < gpus:
        pytest.skip(f"fewer than {gpus} GPUs")
    if backend == "mosaic_gpu" and (
        not jax_has_mosaic_gpu() or compute_capability(jax.devices()[0].device_kind) != 90
    ):
        pytest.skip("the Mosaic GPU kernels are for Hopper and jax >= 0.11.2 and < 0.13")
    x = list(random_inputs(0, *shape, dtype=dtype, f_shift=5.0).values())
    split = gradient_of(over(mesh_of((gpus,), ("s",), platform="gpu"), backend=backend))
    compiled = split.lower(*x).compile()
    assert {name for name, _ in exchanged(compiled)} <= {"collective-permute", "all-reduce"}
    assert (compiled.as_text().count(f'"{MOSAIC_CALL}"') >= 8) == (
        backend == "mosaic_gpu"
    )  # all stages of both passes
    expected = gradient_of(
        functools.partial(mlstm_chunkwise, backend="triton", return_last_states=True)
    )(*x)
    check(compiled(*x), expected, x, {"float32": 1e-4, "bfloat16": 2e-2}[dtype])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="exp"),
        pytest.param({"input_gate": "sigmoid"}, id="sigmoid", marks=pytest.mark.slow),
        pytest.param(
            {"input_gate": "sigmoid", "normalize": False},
            id="sigmoid_unnormalised",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_packed_sequences_and_the_sigmoid_gate_over_four_devices(options):
    """Packed sequences that begin inside a shard, at its first step, and one over three devices."""
    ids = jnp.asarray(
        np.stack([np.repeat([4, 2, 2, 5, 1], [10, 30, 8, 70, 42]), np.repeat([0, 9], [40, 120])]),
        jnp.int32,
    )
    x = list(CASES["ordinary"].values())[: 7 if options else 8]
    options = dict(chunk_size=16, backend="xla", eps=0.1, return_last_states=True, **options)

    def whole(*x):
        return mlstm_chunkwise(*x, segment_ids=ids, **options)

    def split(*x):
        def shard(ids, *x):
            return mlstm_chunkwise_sequence_parallel(*x, segment_ids=ids, axis_name="s", **options)

        mesh, specs = (
            mesh_of((4,), ("s",)),
            (P(None, "s"), *(SEQUENCE,) * 5, *(WHOLE,) * (len(x) - 5)),
        )
        return jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=(SEQUENCE, WHOLE))(ids, *x)

    def loss(run):
        return jax.jit(jax.value_and_grad(lambda *x: sum(loss_of(*run(*x))), tuple(range(len(x)))))

    (value, gradients), (expected, expected_gradients) = loss(split)(*x), loss(whole)(*x)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    for name, actual, desired in zip(NAMES, gradients, expected_gradients, strict=False):
        if name != "m_initial":  # one number a head, zero but for rounding
            assert_close(np.asarray(actual), np.asarray(desired), BOUND, name)
