"""Calls with sharded arguments: every device runs its shard, without communication, and the numbers
are those of one device."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from mesh_calls import on_mesh
from oracle import (
    NAMES,
    OUTPUTS,
    RESULTS,
    compare,
    in_layout,
    mesh_of,
    param,
    random_inputs,
    results_of,
    sharded,
    slow_param,
    tolerance,
)
from stage_calls import spec_of

from mlstm_pallas import (
    KernelConfig,
    mlstm_chunkwise,
    mlstm_recurrent_step,
)
from mlstm_pallas.sharding.on_shards import on_shards
from mlstm_pallas.sharding.work import Work

B, NH, S = 8, 4, 24
BOUND = 4 * tolerance("float32", S + 16)  # the same sums in another order
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
BATCH, HEADS = P("x"), P("x", "y")  # the batch is sharded, or batch and heads


INPUTS = [*random_inputs(0, B, NH, S, 16, 8).values()]


def run_on(backend="xla", **options):
    options |= dict(chunk_size=16, return_last_states=True, backend=backend)
    return functools.partial(mlstm_chunkwise, **options)


single = results_of(run_on())  # on one device


@pytest.fixture(scope="module")
def expected():
    return single(*INPUTS)


def check(run, x, expected, specs, mesh, *others, **options):
    """Values and gradients of a function are the expected ones; others: arguments of on_mesh."""
    result = on_mesh(results_of(run), x, specs, mesh, *others, **options)
    compare(RESULTS, result, expected, BOUND)


STEPS, COLUMNS = P("x", None, "y"), P("x", None, None, "y")  # or rows of states
GATHERED = {"all-gather": 6, "collective-permute": 1}


def kept(spec, backend="xla"):
    """A call whose arguments and results have the sharding."""
    steps = P(spec[0], None, *spec[1:])
    specs = [*[steps] * 5, *[spec] * 3]
    results = [steps, *[spec] * 3, *specs]
    return dict(run=run_on(backend, layout="BTNH"), layout="BTNH", specs=specs, results=results)


def layers(*x):
    """Remat inside of a scan over layers."""

    def layer(v, _):
        return v, jax.checkpoint(run_on())(*x[:2], v, *x[3:])

    return jax.tree.map(lambda y: y[0], jax.lax.scan(layer, x[2], length=1)[1])


# A mesh, kinds of its axes, arguments of on_mesh.
MESHES = [
    slow_param((8,), (AUTO,), id="stays-batch", **kept(BATCH, "interpret")),
    param((2, 2, 2), (EXPLICIT,), id="stays-three_axes", **kept(P(("x", "y"), "z"))),
    # Shardings that are undone.
    param(
        (4, 2),
        (EXPLICIT,),
        id="cannot_be_kept-disagreement",
        specs=(P(None, "x"), BATCH, P(), *[HEADS] * 5),
        exchanged=GATHERED | {"all-gather": 4, "all-to-all": 2},
    ),
    slow_param(
        (4, 2),
        (AUTO,),
        id="cannot_be_kept-other_axes",
        specs=(STEPS, *[COLUMNS] * 2, P(), *[STEPS] * 3, BATCH),
        exchanged=GATHERED,
    ),
    slow_param((4, 2), (EXPLICIT, AUTO), id="remat_in_a_scan", run=layers, specs=[BATCH]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "kinds", "options"), MESHES)
def test_numbers_on_a_mesh_are_those_of_one_device(expected, shape, kinds, options):
    options, mesh = dict(options), mesh_of(shape, *kinds)
    layout = options.pop("layout", "BNTH")
    x, expected = in_layout(layout, NAMES, INPUTS), in_layout(layout, RESULTS, expected)
    check(x=x, expected=expected, mesh=mesh, **dict(run=run_on()) | options)


@pytest.mark.slow
def test_vmap_over_an_axis_that_is_sharded_explicitly(expected):
    specs, x = [P("x", None, "y")], [y[:, None] for y in INPUTS]
    run = jax.jit(jax.vmap(results_of(run_on())))
    result = on_mesh(run, x, specs, mesh_of((4, 2), EXPLICIT), specs)
    compare(RESULTS, [y[:, 0] for y in result], expected, BOUND)


@pytest.mark.slow
def test_vmap_over_no_examples():
    none = [jnp.zeros((0, *x.shape)) for x in INPUTS]
    shapes = jax.eval_shape(jax.vmap(results_of(run_on(None))), *none)
    assert [y.shape for y in shapes[4:]] == [x.shape for x in none]
    h, _ = jax.vmap(mlstm_recurrent_step)(*(x[:, :, :, 0] for x in none[:5]))
    assert h.shape == none[2][:, :, :, 0].shape


@pytest.mark.slow
def test_one_of_several_devices_runs_the_plain_module():
    on_one = jax.device_put(INPUTS, jax.devices("cpu")[3])
    on_eight = sharded(INPUTS, mesh_of((8,)), BATCH)
    for x, partitioned in ((on_one, False), (on_eight, True)):
        text = jax.jit(run_on()).lower(*x).as_text()
        assert ("CustomSPMDPartitioning" in text) == partitioned


@pytest.fixture
def entries(tmp_path):
    """How many programs the compilation cache has; it is set up as docs/devices.md says."""
    options = dict(
        jax_compilation_cache_dir=str(tmp_path),
        jax_persistent_cache_min_compile_time_secs=0,
        jax_persistent_cache_min_entry_size_bytes=-1,
        jax_remove_custom_partitioning_ptr_from_cache_key=True,
    )
    before = {name: getattr(jax.config, name) for name in options}
    for settings in (options, before):
        for name, value in settings.items():
            jax.config.update(name, value)
        reset_cache()
        if settings is options:
            yield lambda: len([*tmp_path.glob("jit_results*-cache")])


@pytest.mark.slow
def test_operations_that_differ_are_told_apart_in_the_compilation_cache(entries):
    """Its keys are without the addresses of callbacks. A program is for one device, or for all."""
    for eps, count in ((0.5, 2), (0.25, 4), (0.5, 4)):

        @jax.jit
        def results(*x, eps=eps):
            return jax.tree.leaves(run_on(eps=eps)(*x))

        result = on_mesh(results, INPUTS, [BATCH], mesh_of((8,)))
        compare(OUTPUTS, result, results(*INPUTS), BOUND)
        assert entries() == count


def scaled(plan, x, *, L):
    return [x * L]


def halved(plan, x, *, L):
    return [x / 2]


SPEC = spec_of((B, NH, S, 16, 8), "float32", backend="xla")
WORK = functools.partial(on_shards, scaled, SPEC, L=16)
APART = {
    "options": functools.partial(WORK, L=32),
    "functions": functools.partial(on_shards, halved, SPEC, L=16),
    "mapped": jax.vmap(WORK),
}


@pytest.mark.parametrize("case", APART)
def test_what_runs_on_shards_is_told_apart(case):
    """Modules differ without the addresses of callbacks and the names of functions."""
    x = sharded(INPUTS[:1], mesh_of((8,)), BATCH)

    def module(run):
        text = re.sub(r'backend_config = "\d+"', "", jax.jit(run).lower(*x).as_text())
        return re.sub(r"@jit_\w+", "", text)

    first, second = map(module, (WORK, APART[case]))
    assert "CustomSPMDPartitioning" in first
    assert first == module(WORK)
    assert first != second


def test_every_field_of_a_spec_is_part_of_what_finds_a_program():
    """In caches of jit and of Python, by its value, and in the compilation cache, by its repr."""
    for record in (SPEC, SPEC.config, SPEC.gpu):
        fields = dataclasses.fields(record)
        assert all(x.compare and x.repr and x.hash is None for x in fields)
        assert type(record).__eq__ is not object.__eq__
    config = KernelConfig(triton_parallel_fw_H=dict(num_warps=2))
    specs = [SPEC, dataclasses.replace(SPEC, config=config), dataclasses.replace(SPEC, eps=0.5)]
    assert len({*specs}) == len({Work(scaled, x).identity().tobytes() for x in specs}) == 3


@pytest.mark.gpu_multi
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=lambda kind: kind.name)
@pytest.mark.parametrize("inside", ["jit", "shard_map"])
def test_gpus_run_their_shards(gpus, kind, inside):
    shape, spec = ((2,), BATCH) if gpus == 2 else ((2, 2), HEADS)
    arrays = random_inputs(0, 4, 4, 1024, 128, 256).values()
    mesh = mesh_of(shape, kind, platform="gpu")
    run = functools.partial(mlstm_chunkwise, return_last_states=True, backend="triton")
    expected = results_of(run)(*arrays)
    if inside == "shard_map":
        run = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
    check(run, arrays, expected, [spec], mesh, [spec])


SLOTS = np.array([3, -1, 6, 0], "int32")
TOKEN = *(np.asarray(x)[:4, :, 0] for x in INPUTS[:5]), *INPUTS[5:]
COLUMN = P(None, "y")
POOLED = [P(), *[COLUMN] * 8]


def step_of(**options):
    """A jitted step of slots or None, a token and states or pools."""
    step = functools.partial(mlstm_recurrent_step, **options)
    return jax.jit(lambda slots, *x: jax.tree.leaves(step(*x, slots=slots)))


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "kind"), [("xla", EXPLICIT), ("interpret", AUTO)])
def test_shards_of_entries_and_of_rows_of_pools_are_gathered(backend, kind):
    """In shard_map a pool is a shard's."""
    step, mesh, x = step_of(backend=backend), mesh_of((2, 2), kind), (SLOTS, *TOKEN)
    compare(OUTPUTS, step(*sharded(x, mesh, P("x"), *[HEADS] * 8)), step(*x), BOUND)
    options = dict(mesh=mesh_of((2, 2)), in_specs=HEADS, out_specs=HEADS, check_vma=False)
    local = jax.jit(jax.shard_map(lambda s, *x: step(s[:, 0], *x), **options))
    of_shard = np.array([2, -1, 1, 0], "int32")  # of four rows each
    result = local(np.repeat(of_shard[:, None], 2, axis=1), *TOKEN)
    of_all = np.where(of_shard < 0, -1, of_shard + np.array([0, 0, 4, 4], "int32"))
    compare(OUTPUTS, result, step(of_all, *TOKEN), BOUND)


@pytest.mark.slow
def test_slots_on_automatic_axes_inside_a_shard_map():
    """A shard of slots is gathered there too."""
    x, step = (SLOTS, *TOKEN[:-1], 0 * TOKEN[-1]), step_of(input_gate="sigmoid")
    mesh = mesh_of((2, 2))
    options = dict(in_specs=(*POOLED,), out_specs=COLUMN, axis_names={"y"}, check_vma=False)
    run = jax.jit(jax.shard_map(step, mesh=mesh, **options))
    compare(OUTPUTS, run(*sharded(x, mesh, P("x"), *[HEADS] * 8)), step(*x), BOUND)
