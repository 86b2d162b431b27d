"""Calls with sharded arguments: every device runs its shard, without communication, and the numbers
are those of one device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import (
    NAMES,
    OUTPUTS,
    RESULTS,
    assert_close,
    call_shapes,
    collectives,
    compare,
    in_layout,
    loss_of,
    lowered_for_cuda,
    mesh_for,
    mesh_of,
    random_inputs,
    results_of,
    sharded,
    slow,
    tolerance,
)

from mlstm_pallas import mlstm_chunkwise, mlstm_recurrent_step
from mlstm_pallas.sharding import Operation

B, NH, S, DHQK, DHHV = 8, 4, 24, 16, 8
BOUND = 4 * tolerance("float32", S + DHQK)  # the same sums in another order
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


INPUTS = list(random_inputs(0, B, NH, S, DHQK, DHHV).values())


def run_on(backend, layout="BNTH"):
    return functools.partial(
        mlstm_chunkwise, chunk_size=16, return_last_states=True, layout=layout, backend=backend
    )


single = results_of(run_on("xla"))  # on one device


@pytest.fixture(scope="module")
def expected():
    return single(*INPUTS)


def in_shards(run, x, *specs):
    """What a jitted function returns, whose devices exchange nothing.

    specs: of the first results.
    """
    compiled = run.lower(*x).compile()
    assert not collectives(compiled)
    result = compiled(*x)
    for y, spec in zip(result, specs, strict=False):
        assert y.sharding.is_equivalent_to(NamedSharding(x[0].sharding.mesh, spec), y.ndim)
    return result


def check_in_shards(run, x, expected, *specs):
    compare(RESULTS, in_shards(results_of(run), x, *specs), expected, BOUND)


@pytest.mark.parametrize(
    ("shape", "spec", "kind", "backend", "layout"),
    [
        slow((8,), P("x"), AUTO, "interpret", "BTNH"),
        ((2, 2, 2), P(("x", "y"), "z"), EXPLICIT, "xla", "BNTH"),
        ((4, 2), P("x", "y"), EXPLICIT, "xla", "BTNH"),
    ],
    ids=str,
)
def test_shards_of_batch_and_heads_stay_where_they_are(
    expected, shape, spec, kind, backend, layout
):
    mesh, sequence = mesh_of(shape, kind), spec
    if layout == "BTNH":
        sequence = P(spec[0], None, *spec[1:])
    specs = [sequence, *[spec] * 3, *[sequence] * 5, *[spec] * 3]  # of the results
    x = sharded(in_layout(layout, NAMES, INPUTS), mesh, *specs[4:])
    check_in_shards(run_on(backend, layout), x, in_layout(layout, RESULTS, expected), *specs)


SPECS = {
    "other_axes": [
        P("x", None, "y"),
        *[P("x", None, None, "y")] * 2,
        P(),
        *[P("x", None, "y")] * 3,
        P("x"),
    ],
    "disagreement": [P(None, "x"), P("x"), P(), *[P("x", "y")] * 5],
}


@pytest.mark.parametrize(
    ("case", "kind"),
    [("disagreement", EXPLICIT), slow("other_axes", AUTO)],
)
def test_shardings_that_cannot_be_kept_are_undone_with_the_right_numbers(expected, case, kind):
    x = sharded(INPUTS, mesh_of((4, 2), kind), *SPECS[case])
    compiled = results_of(run_on("xla")).lower(*x).compile()
    assert collectives(compiled)
    compare(RESULTS, compiled(*x), expected, BOUND)


@pytest.mark.parametrize("axes", ["xy", slow("x")])
def test_inside_a_shard_map_over_all_or_some_axes(expected, axes):
    mesh, spec = mesh_of((4, 2)), P(*axes)
    run = jax.shard_map(run_on("xla"), mesh=mesh, in_specs=spec, out_specs=spec, axis_names={*axes})
    check_in_shards(run, sharded(INPUTS, mesh, P("x", "y")), expected)


@pytest.mark.slow
def test_an_argument_that_does_not_vary_gets_the_sum_of_its_gradients():
    mesh = mesh_of((4,))
    f = INPUTS[4][: B // 4]

    def loss(*x):
        return jax.lax.psum(loss_of(*run_on("xla")(*x)), "x")

    split = jax.shard_map(
        loss, mesh=mesh, in_specs=(*[P("x")] * 4, P(), *[P("x")] * 3), out_specs=P()
    )
    result = jax.jit(jax.grad(split, argnums=4))(*INPUTS[:4], f, *INPUTS[5:])
    df = single(*INPUTS[:4], jnp.concatenate([f] * 4), *INPUTS[5:])[RESULTS.index("f")]
    assert_close(result, np.asarray(df).reshape(4, *f.shape).sum(axis=0), BOUND)


@pytest.mark.slow
def test_a_mapped_axis_stays_sharded(expected):
    x = sharded(INPUTS, mesh_of((4, 2), EXPLICIT), P("x", "y"))

    def loss(*x):
        return loss_of(*run_on("xla")(*(jnp.expand_dims(y, 1) for y in x)))

    result = in_shards(jax.jit(jax.vmap(jax.grad(loss, tuple(range(8))), 1, 1)), x)
    compare(NAMES, result, expected[4:], BOUND)


def test_vmap_over_some_arguments():
    q, *rest = (np.asarray(x)[:1] for x in INPUTS)
    scaled = np.arange(1.0, B + 1, dtype="float32")[:, None, None, None] * q
    result, states = jax.jit(jax.vmap(run_on("xla"), (0, *[None] * 7)))(scaled[:, None], *rest)
    h, *_ = single(scaled, *(np.concatenate([x] * B) for x in rest))
    assert_close(result[:, 0], h, BOUND)
    assert states[0].shape == (B, 1, NH, DHQK, DHHV)


@pytest.mark.parametrize("backend", [None, "interpret"])
def test_vmap_over_no_examples(backend):
    none = [jnp.zeros((0, *x.shape)) for x in INPUTS]
    shapes = jax.eval_shape(jax.vmap(results_of(run_on(backend))), *none)
    assert [y.shape for y in shapes[4:]] == [x.shape for x in none]
    token = [x[..., 0, :] if x.ndim == 5 else x[..., 0] for x in none[:5]]
    step = jax.vmap(functools.partial(mlstm_recurrent_step, backend=backend))
    h, states = step(*token)
    assert [y.shape for y in (h, *states)] == [x.shape for x in (token[2], *none[5:])]


@pytest.mark.slow
def test_remat_inside_a_scan_over_layers_stays_sharded(expected):
    """On a mesh of mixed axis types."""

    def layers(*x):
        def layer(v, _):
            return v, jax.checkpoint(run_on("xla"))(*x[:2], v, *x[3:])

        return jax.tree.map(lambda y: y[0], jax.lax.scan(layer, x[2], None, length=1)[1])

    check_in_shards(layers, sharded(INPUTS, mesh_of((4, 2), EXPLICIT, AUTO), P("x")), expected)


def test_one_of_several_devices_runs_the_plain_module():
    on_one = [jax.device_put(x, jax.devices("cpu")[3]) for x in INPUTS]
    on_eight = sharded(INPUTS, mesh_of((8,)), P("x"))
    one, eight = (jax.jit(run_on("xla")).lower(*x).as_text() for x in (on_one, on_eight))
    assert "CustomSPMDPartitioning" not in one
    assert "CustomSPMDPartitioning" in eight


def test_shards_lower_for_cuda_without_a_device():
    mesh = mesh_for("NVIDIA H200", (4, 2), "xy", EXPLICIT)
    x = call_shapes(B, NH, 64, 16, 16, sharding=NamedSharding(mesh, P("x", "y")))
    text = lowered_for_cuda(results_of(mlstm_chunkwise), *x, mesh=mesh)
    calls = [line for line in text.splitlines() if "__gpu$xla.gpu.triton" in line]
    assert len(calls) == 8  # four kernels a pass
    # a shard of 2 batch entries and 2 heads
    assert any("tensor<4x64x16xbf16>" in line for line in calls)
    assert not any("tensor<32x" in line for line in calls)


def test_operations_that_differ_are_told_apart():
    """The persistent compilation cache may be asked to ignore the address of the callback."""
    mesh = mesh_of((8,))
    x = sharded(random_inputs(0, 8, 1, 16, 16, 16, states=False).values(), mesh, P("x"))

    def module(eps):
        text = jax.jit(functools.partial(mlstm_chunkwise, eps=eps)).lower(*x).as_text()
        return re.sub(r'backend_config = "\d+"', "", text)

    assert module(1e-6) == module(1e-6)
    assert module(1e-6) != module(1e-3)


def test_nothing_leaks_from_a_trace():
    """The check of jax 0.12 fails for custom_partitioning with static_argnums."""
    not_traced_before = functools.partial(run_on("xla"), eps=0.125)
    with jax.checking_leaks():
        jax.make_jaxpr(not_traced_before)(*INPUTS)


def test_operations_under_different_vmaps_are_told_apart():
    one, other = (Operation(run_on, "spec", mapped=mapped).identity() for mapped in (0, 1))
    assert not np.array_equal(one, other)


@pytest.mark.gpu_multi
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=lambda kind: kind.name)
@pytest.mark.parametrize("inside", ["jit", "shard_map"])
def test_gpus_run_their_shards(gpus, kind, inside):
    shape, spec = ((2,), P("x")) if gpus == 2 else ((2, 2), P("x", "y"))
    arrays = list(random_inputs(0, 4, 4, 1024, 128, 256).values())
    mesh = mesh_of(shape, kind, platform="gpu")
    run = functools.partial(mlstm_chunkwise, return_last_states=True, backend="triton")
    on_mesh = (
        jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
        if inside == "shard_map"
        else run
    )
    x = sharded(arrays, mesh, spec)
    check_in_shards(on_mesh, x, results_of(run)(*arrays), spec)


@pytest.mark.slow
def test_packed_sequences_stay_sharded():
    ids = np.cumsum(np.random.default_rng(1).random((B, S)) < 0.2, axis=1)
    lengths = np.arange(B) * S // (B - 1)

    @functools.partial(jax.jit, static_argnames="num_segments")
    def run(ids, lengths, *x, num_segments=3):
        options = dict(segment_ids=ids, sequence_lengths=lengths, num_segments=num_segments)
        return jax.tree.leaves(run_on("xla")(*x, **options))

    expected = run(ids, lengths, *INPUTS)
    mesh, spec = mesh_of((4, 2)), P("x", "y")
    x = sharded([ids, lengths, *INPUTS], mesh, *[P("x")] * 2, *[spec] * 8)
    over_the_sequence = sharded([ids], mesh, P(None, "x"))  # is undone first
    compare(OUTPUTS, in_shards(run, x), expected, BOUND)
    h, *_ = run(*over_the_sequence, *x[1:], num_segments=None)
    assert_close(h, expected[0], BOUND)


@pytest.mark.parametrize(("backend", "kind"), [("xla", EXPLICIT), ("interpret", AUTO)])
def test_a_recurrent_step_stays_sharded(backend, kind):
    token = [x[:, :, 0] for x in INPUTS[:5]] + INPUTS[5:]
    step = jax.jit(lambda *x: jax.tree.leaves(mlstm_recurrent_step(*x, backend=backend)))
    mesh, spec = mesh_of((4, 2), kind), P("x", "y")
    x = sharded(token, mesh, spec)
    compare(OUTPUTS, in_shards(step, x, *[spec] * 4), step(*token), BOUND)
