"""Calls with sharded arguments: every device runs its shard, without communication, and the numbers
are those of one device."""

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import NAMES, assert_close, random_inputs, tolerance

from mlstm_pallas import mlstm_chunkwise, mlstm_recurrent_step
from mlstm_pallas.sharding import _identity

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, NH, S, DHQK, DHHV = 8, 4, 24, 16, 8
COLLECTIVES = ("all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter")
BOUND = 4 * tolerance("float32", S + DHQK)  # the same sums in another order
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MESHES = {
    "8": ((8,), P("x")),
    "4x2": ((4, 2), P("x", "y")),
    "2x2x2": ((2, 2, 2), P(("x", "y"), "z")),
}


@pytest.fixture(scope="module")
def inputs():
    return list(random_inputs(0, B, NH, S, DHQK, DHHV).values())


def mesh_of(shape, *kinds):
    return jax.make_mesh(
        shape,
        ("x", "y", "z")[: len(shape)],
        axis_types=kinds if len(kinds) > 1 else kinds * len(shape),
        devices=jax.devices("cpu")[: math.prod(shape)],
    )


def sharded(arrays, mesh, *specs):
    """The arrays sharded by the one spec, or by one each."""
    specs = specs if len(specs) > 1 else specs * len(arrays)
    return [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]


def run_on(backend):
    return functools.partial(
        mlstm_chunkwise, chunk_size=16, return_last_states=True, backend=backend
    )


def loss_of(run):
    def loss(*x):
        h, states = run(*x)
        return jnp.sum(h * jnp.cos(h)) + sum(jnp.sum(jnp.sin(y)) for y in states), (h, *states)

    return loss


def gradient_of(run):
    return jax.value_and_grad(loss_of(run), tuple(range(8)), has_aux=True)


@pytest.fixture(scope="module")
def single():
    """Loss, (h, c, n, m) and the eight gradients on one device."""
    return jax.jit(gradient_of(run_on("xla")))


@pytest.fixture(scope="module")
def expected(inputs, single):
    return single(*inputs)


def collectives(compiled):
    return collections.Counter(
        re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", compiled.as_text())
    )


def check(result, expected):
    (_, outputs), gradients = result
    (_, expected_outputs), expected_gradients = expected
    for name, actual, desired in zip(("h", "c", "n", "m"), outputs, expected_outputs, strict=True):
        assert_close(np.asarray(actual), np.asarray(desired), BOUND, name)
    for name, actual, desired in zip(NAMES, gradients, expected_gradients, strict=True):
        assert_close(np.asarray(actual), np.asarray(desired), BOUND, "gradient of " + name)


def test_the_count_sees_collectives():
    mesh = mesh_of((8,), AUTO)
    gather = (
        jax.jit(lambda x: x + 1, out_shardings=NamedSharding(mesh, P()))
        .lower(*sharded([jnp.zeros(8)], mesh, P("x")))
        .compile()
    )
    assert collectives(gather) == {"all-gather": 1}


@pytest.mark.parametrize(
    ("mesh", "kind", "backend"),
    [
        pytest.param("8", AUTO, "interpret", marks=pytest.mark.slow),
        ("4x2", EXPLICIT, "xla"),
        pytest.param("2x2x2", AUTO, "xla", marks=pytest.mark.slow),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_shards_of_batch_and_heads_stay_where_they_are(inputs, expected, mesh, kind, backend):
    shape, spec = MESHES[mesh]
    x = sharded(inputs, mesh_of(shape, kind), spec)
    if backend == "xla":
        assert not collectives(jax.jit(run_on(backend)).lower(*x).compile())
    both = jax.jit(gradient_of(run_on(backend))).lower(*x).compile()
    assert set(collectives(both)) == {"all-reduce"}  # that of the loss
    result = both(*x)
    check(result, expected)
    for array in (*result[0][1], *result[1]):
        assert array.sharding.is_equivalent_to(NamedSharding(x[0].sharding.mesh, spec), array.ndim)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param("other_axes", AUTO, marks=pytest.mark.slow),
        ("other_axes", EXPLICIT),
        pytest.param("disagreement", AUTO, marks=pytest.mark.slow),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_shardings_that_cannot_be_kept_are_undone_with_the_right_numbers(
    inputs, expected, case, kind
):
    specs = {
        "other_axes": [
            P("x", None, "y"),
            *[P("x", None, None, "y")] * 2,
            P(),
            *[P("x", None, "y")] * 3,
            P("x"),
        ],
        "disagreement": [P(None, "x"), P("x"), P(), *[P("x", "y")] * 5],
    }[case]
    x = sharded(inputs, mesh_of((4, 2), kind), *specs)
    compiled = jax.jit(gradient_of(run_on("xla"))).lower(*x).compile()
    assert set(collectives(compiled)) > {"all-reduce"}
    check(compiled(*x), expected)


@pytest.mark.slow
def test_mixed_axis_types_stay_sharded(inputs, expected):
    x = sharded(inputs, mesh_of((4, 2), EXPLICIT, AUTO), P("x"))
    result = jax.jit(gradient_of(run_on("xla"))).lower(*x).compile()
    assert set(collectives(result)) == {"all-reduce"}
    check(result(*x), expected)


def test_inside_the_users_shard_map(inputs, expected):
    mesh = mesh_of((4, 2), AUTO)
    x = sharded(inputs, mesh, P("x", "y"))
    run = jax.shard_map(run_on("xla"), mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y"))
    result = jax.jit(gradient_of(run)).lower(*x).compile()
    assert set(collectives(result)) == {"all-reduce"}
    check(result(*x), expected)


@pytest.mark.slow
def test_inside_a_shard_map_over_some_of_the_axes(inputs, expected):
    mesh = mesh_of((4, 2), AUTO)
    x = sharded(inputs, mesh, P("x", "y"))
    run = jax.shard_map(
        run_on("xla"), mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
    )
    result = jax.jit(gradient_of(run)).lower(*x).compile()
    assert set(collectives(result)) == {"all-reduce"}
    check(result(*x), expected)


@pytest.mark.slow
def test_an_argument_that_does_not_vary_gets_the_sum_of_its_gradients(inputs, single):
    mesh = mesh_of((4,), AUTO)
    f = inputs[4][: B // 4]

    def loss(*x):
        return jax.lax.psum(loss_of(run_on("xla"))(*x)[0], "x")

    split = jax.shard_map(
        loss, mesh=mesh, in_specs=(*[P("x")] * 4, P(), *[P("x")] * 3), out_specs=P()
    )
    result = jax.jit(jax.grad(split, argnums=4))(*inputs[:4], f, *inputs[5:])
    _, gradients = single(*inputs[:4], jnp.concatenate([f] * 4), *inputs[5:])
    assert_close(
        np.asarray(result), np.asarray(gradients[4]).reshape(4, *f.shape).sum(axis=0), BOUND
    )


@pytest.mark.parametrize(
    ("axis", "kind"),
    [pytest.param(0, AUTO, marks=pytest.mark.slow), (1, EXPLICIT)],
    ids=lambda x: getattr(x, "name", x),
)
def test_a_mapped_axis_stays_sharded(inputs, expected, axis, kind):
    x = sharded(inputs, mesh_of((4, 2), kind), P("x", "y"))

    def loss(*x):
        return loss_of(run_on("xla"))(*(jnp.expand_dims(y, axis) for y in x))[0]

    result = jax.jit(jax.vmap(jax.grad(loss, tuple(range(8))), axis, axis)).lower(*x).compile()
    assert not collectives(result)
    for name, actual, desired in zip(NAMES, result(*x), expected[1], strict=True):
        assert_close(np.asarray(actual), np.asarray(desired), BOUND, name)


def test_vmap_over_some_arguments(inputs, single):
    q, *rest = (x[:1] for x in inputs)
    scale = jnp.arange(1.0, B + 1)
    result, states = jax.jit(jax.vmap(run_on("xla"), (0, *[None] * 7)))(
        scale[:, None, None, None, None] * q, *rest
    )
    whole = [jnp.concatenate([x] * B) for x in (q, *rest)]
    (_, (h, *_)), _ = single(scale[:, None, None, None] * whole[0], *whole[1:])
    assert_close(result[:, 0], np.asarray(h), BOUND)
    assert states[0].shape == (B, 1, NH, DHQK, DHHV)


@pytest.mark.slow
def test_remat_inside_a_scan_over_layers_stays_sharded(inputs, expected):
    def layers(*x):
        def layer(v, _):
            return v, jax.checkpoint(run_on("xla"))(*x[:2], v, *x[3:])

        return jax.tree.map(lambda y: y[0], jax.lax.scan(layer, x[2], None, length=1)[1])

    x = sharded(inputs, mesh_of((4, 2), AUTO), P("x", "y"))
    result = jax.jit(gradient_of(layers)).lower(*x).compile()
    assert set(collectives(result)) == {"all-reduce"}
    check(result(*x), expected)


def test_one_of_several_devices_runs_the_plain_module(inputs):
    text = (
        jax.jit(gradient_of(run_on("xla")))
        .lower(*(jax.device_put(x, jax.devices("cpu")[3]) for x in inputs))
        .as_text()
    )
    assert "CustomSPMDPartitioning" not in text
    assert (
        "CustomSPMDPartitioning"
        in jax.jit(run_on("xla")).lower(*sharded(inputs, mesh_of((8,), AUTO), P("x"))).as_text()
    )


@pytest.mark.parametrize("inside", ["jit", "shard_map"])
def test_shards_lower_for_cuda_without_a_device(inside):
    device = AbstractDevice("NVIDIA H200", None, "gpu")
    mesh = AbstractMesh((4, 2), ("x", "y"), (EXPLICIT,) * 2, abstract_device=device)
    built = random_inputs(0, B, NH, 64, 16, 16, dtype="bfloat16", states=False)
    x = [
        jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=NamedSharding(mesh, P("x", "y")))
        for y in built.values()
    ]

    def run(*x):
        return jnp.sum(mlstm_chunkwise(*x).astype("float32"))

    def inside_shard_map(*x):  # which checks what varies over the mesh
        return jax.shard_map(
            lambda *x: jax.lax.psum(run(*x), ("x", "y")), in_specs=P("x", "y"), out_specs=P()
        )(*x)

    loss = inside_shard_map if inside == "shard_map" else run
    with jax.sharding.use_abstract_mesh(mesh):
        text = (
            jax.jit(jax.grad(loss, tuple(range(5))))
            .trace(*x)
            .lower(lowering_platforms=("cuda",))
            .as_text()
        )
    calls = [line for line in text.splitlines() if "__gpu$xla.gpu.triton" in line]
    assert len(calls) == 8  # four kernels a pass
    assert any(
        "tensor<4x64x16xbf16>" in line for line in calls
    )  # a shard of 2 batch entries and 2 heads
    assert not any("tensor<32x" in line for line in calls)


def test_operations_that_differ_are_told_apart():
    """The persistent compilation cache may be asked to ignore the address of the callback."""
    mesh = mesh_of((8,), AUTO)
    x = sharded(
        [y[:, :1] for y in random_inputs(0, 8, 1, 16, 16, 16, states=False).values()], mesh, P("x")
    )

    def module(eps):
        text = jax.jit(lambda *x: mlstm_chunkwise(*x, eps=eps)).lower(*x).as_text()
        return re.sub(r'backend_config = "\d+"', "", text)

    assert module(1e-6) == module(1e-6)
    assert module(1e-6) != module(1e-3)


def test_the_identity_of_an_operation_is_that_of_its_statics():
    def function():
        pass

    assert np.array_equal(_identity(function, ("spec", 1), 0), _identity(function, ("spec", 1), 0))
    assert not np.array_equal(
        _identity(function, ("spec", 1), 0), _identity(function, ("spec", 2), 0)
    )
    assert not np.array_equal(
        _identity(function, ("spec", 1), 0), _identity(function, ("spec", 1), 1)
    )


@pytest.mark.gpu_multi
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=lambda kind: kind.name)
@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize("inside", ["jit", "shard_map"])
def test_gpus_run_their_shards(gpus, kind, inside):
    if jax.device_count() < gpus:
        pytest.skip(f"fewer than {gpus} GPUs")
    shape, spec = ((2,), P("x")) if gpus == 2 else ((2, 2), P("x", "y"))
    arrays = list(random_inputs(0, 4, 4, 1024, 128, 256).values())
    mesh = jax.make_mesh(
        shape,
        ("x", "y")[: len(shape)],
        axis_types=(kind,) * len(shape),
        devices=jax.devices()[:gpus],
    )
    run = functools.partial(mlstm_chunkwise, return_last_states=True, backend="triton")
    on_mesh = (
        jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
        if inside == "shard_map"
        else run
    )
    x = sharded(arrays, mesh, spec)
    compiled = jax.jit(gradient_of(on_mesh)).lower(*x).compile()
    assert set(collectives(compiled)) == {"all-reduce"}
    result = compiled(*x)
    check(result, jax.jit(gradient_of(run))(*arrays))
    assert result[0][1][0].sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)


@pytest.mark.parametrize(
    "kind", [AUTO, pytest.param(EXPLICIT, marks=pytest.mark.slow)], ids=lambda x: x.name
)
def test_packed_sequences_stay_sharded(inputs, kind):
    ids = jnp.cumsum(jnp.asarray(np.random.default_rng(1).random((B, S)) < 0.2), axis=1)
    lengths = jnp.arange(B) * S // (B - 1)

    @jax.jit
    def run(ids, lengths, *x):
        call = functools.partial(run_on("xla"), *x, segment_ids=ids, sequence_lengths=lengths)
        return call(), call(num_segments=3)

    expected = run(ids, lengths, *inputs)
    mesh, spec = mesh_of((4, 2), kind), P("x", "y")
    x = sharded([ids, lengths, *inputs], mesh, *[P("x")] * 2, *[spec] * 8)
    compiled = run.lower(*x).compile()
    assert not collectives(compiled)
    over_the_sequence = sharded([ids], mesh, P(None, "x"))  # is undone first
    for actual, desired in zip(
        jax.tree.leaves(run(*over_the_sequence, *x[1:])), jax.tree.leaves(expected), strict=True
    ):
        assert_close(np.asarray(actual), np.asarray(desired), BOUND)
    for actual, desired in zip(
        jax.tree.leaves(compiled(*x)), jax.tree.leaves(expected), strict=True
    ):
        assert_close(np.asarray(actual), np.asarray(desired), BOUND)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=lambda x: x.name)
@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_a_recurrent_step_stays_sharded(inputs, backend, kind):
    token = [x[:, :, 0] for x in inputs[:5]] + inputs[5:]
    step = jax.jit(functools.partial(mlstm_recurrent_step, backend=backend))
    expected = step(*token)
    x = sharded(token, mesh_of((4, 2), kind), P("x", "y"))
    compiled = step.lower(*x).compile()
    assert not collectives(compiled)
    for actual, desired in zip(
        jax.tree.leaves(compiled(*x)), jax.tree.leaves(expected), strict=True
    ):
        assert_close(np.asarray(actual), np.asarray(desired), BOUND)
        assert actual.sharding.is_equivalent_to(
            NamedSharding(x[0].sharding.mesh, P("x", "y")), actual.ndim
        )
