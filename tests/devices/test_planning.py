"""call_spec.py: what runs where, in which chunks, splits and tiles, for a problem and a GPU."""

import itertools
import re
import warnings
from functools import partial

import costs
import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import HELPERS, call_shapes, for_device, mesh_for, results_of
from plans import plan
from stage_calls import spec_of
from test_gpu_facts import NAMED

import mlstm_pallas
from mlstm_pallas import KernelConfig, mlstm_chunkwise
from mlstm_pallas.planning import backend
from mlstm_pallas.planning.backend import requested_lowering
from mlstm_pallas.problem.gpu import known_gpu

HIGH, X3 = jax.lax.Precision.HIGH, jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3
WIDE = 256, 512  # heads wide enough for sequences to be split


@pytest.fixture
def any_jax(monkeypatch):
    """Plans of Mosaic GPU kernels, by a jax that need not have them."""
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))


@pytest.mark.filterwarnings("ignore:backend is 'mosaic_gpu' and products are in float32")
def test_the_table_of_plans(any_jax):
    """``plans.py`` says how to write the table anew."""
    for (call, lines), block in zip(plans.CALLS.items(), plans.table(), strict=True):
        assert [call, *lines()] == block


SMALL = HELPERS - {"split_products"}


def grids_in(jaxpr):
    """The kernels in a jaxpr with their grids, but for small ones, which no plan shows."""
    found = re.findall(r"grid=\(([\d, ]+)\)[\s\S]*?name=(\w+)", str(jaxpr))
    return {(x, tuple(map(int, grid.split(", ")))) for grid, x in found if x not in SMALL}


def grids_of(call):
    """Those of the forward pass in a plan."""
    return {(x.stage, x.grid) for x in call.launches if not x.backward}


CONFIGS = {
    "materialised": KernelConfig(fused=False),
    "fused": KernelConfig(fused=True),
    "splits": KernelConfig(fused=True, num_splits=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "stored"])
def test_the_grids_of_a_plan_are_those_that_run(recompute, config):
    """Each launch of the plan is one of the traced ones, with its grid, and no stage is left."""
    sizes, config = (1, 2, 64, 16, 32), CONFIGS[config]
    options = dict(recompute_states_in_bw=recompute, backend="triton")
    call = plan(sizes, dtype="float32", config=KernelConfig(chunk_size=32) | config, **options)
    run = partial(mlstm_chunkwise, chunk_size=32, config=config, **options)
    x = call_shapes(*sizes, "float32")
    with for_device("NVIDIA H200"):
        forward, both = (grids_in(jax.make_jaxpr(y)(*x)) for y in (run, results_of(run)))
    assert forward == grids_of(call)
    assert both == {(y.stage, y.grid) for y in call.launches}


def test_a_plan_shows_the_launches_of_a_call_with_segment_lengths():
    """1001 steps are no whole chunks, and each of 13 segments has chunks of its own."""
    sizes = 2, 4, 1001, *WIDE
    lengths = jnp.zeros((2, 13), int)
    options = dict(return_last_states=True, backend="triton")
    run = partial(mlstm_chunkwise, segment_lengths=lengths, **options)
    with for_device("NVIDIA H200"):
        traced = grids_in(jax.make_jaxpr(run)(*call_shapes(*sizes)))
    assert traced == grids_of(plan(sizes, num_segments=13, backend="triton"))


INSTEAD = "config.{} is not read: the call runs {} in its place"
FORWARD = "triton_parallel_fw_H", "triton_recurrent_fw_H"
# What a config and a backend that are not read get, and what is nothing to warn of.
UNREAD = [
    (dict(fused=True), FORWARD[:1], INSTEAD.format(FORWARD[0], "parallel_fw_P and recurrent_fw_H")),
    (
        dict(fused=False),
        FORWARD[1:],
        INSTEAD.format(FORWARD[1], "parallel_fw_H and recurrent_fw_C"),
    ),
    (
        dict(backend="mosaic_gpu"),
        ["mosaic_gpu_parallel_bw_dQKV"],
        INSTEAD.format("mosaic_gpu_parallel_bw_dQKV", "chunk_gradients"),
    ),
    (
        dict(backend="mosaic_gpu", dtype="float32"),
        [],
        "backend is 'mosaic_gpu' and products are in float32: its kernels are for bfloat16 and "
        "float16, so others run",
    ),
    (dict(fused=True), FORWARD, None),
    (dict(fused=True), ["triton_recurrent_step", "mosaic_gpu_parallel_fw_H"], None),
    (dict(backend="mosaic_gpu"), ["triton_parallel_bw_dQKV"], None),
    (dict(backend="fastest", dtype="float32"), [], None),
]


@pytest.mark.parametrize(("options", "tiles", "message"), UNREAD)
def test_what_a_plan_does_not_read_is_warned_of(any_jax, options, tiles, message):
    options, shape = dict(options), dict(B=8, NH=8, S=2048, DHQK=128, DHV=128, gpu="NVIDIA H200")
    config = KernelConfig(fused=options.pop("fused", None), **{x: {"num_stages": 2} for x in tiles})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mlstm_pallas.plan(**shape, **options, config=config)
    assert [str(x.message) for x in caught] == ([message] if message else [])
    assert {x.filename for x in caught} <= {__file__}


@pytest.mark.slow
def test_a_shard_is_decided_for_its_own_heads():
    """Two devices have eight heads each, in twice as many splits as 16; one head has too few."""
    for devices, NH in ((1, 16), (2, 8), (16, 1)):
        mesh = mesh_for("NVIDIA H200", (devices,), "x", AxisType.Explicit)
        shapes = call_shapes(1, 16, 8192, *WIDE, sharding=NamedSharding(mesh, P(None, "x")))
        with jax.sharding.use_abstract_mesh(mesh):
            traced = grids_in(jax.make_jaxpr(mlstm_chunkwise)(*shapes))
        assert grids_of(plan((1, NH, 8192, *WIDE))) <= traced


def test_only_hopper_gets_mosaic_gpu_kernels(any_jax, monkeypatch):
    """Of all known GPUs, older and newer, by a plan and by a call; without Triton by default."""
    names = (line.partition(": ")[2].split(", ") for line in NAMED.strip().splitlines())
    for kind in (f"NVIDIA {name}" for name in itertools.chain(*names)):
        gpu, sizes = known_gpu(kind), (64, 8, 256, 64, 128)
        hopper, chosen = gpu.capability == 90, requested_lowering("fastest", gpu, (64, 128))
        assert chosen == ("mosaic_gpu" if hopper else "triton")
        launches = plan(sizes, kind, backend="fastest").launches
        assert {x.lowering for x in launches} == {"mosaic_gpu" if hopper else "triton"}
        for heads, expected in ((16, 16), "triton"), ((16, 17), chosen), ((17, 16), chosen):
            assert spec_of((*sizes[:3], *heads), "bfloat16", gpu, "fastest").lowering == expected
        with monkeypatch.context() as patch:
            patch.setattr(backend, "HAS_TRITON", False)
            assert requested_lowering(None, gpu, (64, 128)) == (chosen if hopper else "xla")
        if not hopper:
            with pytest.raises(ValueError, match=rf"^backend is 'mosaic_gpu' and .* {kind},"):
                plan(sizes, kind, backend="mosaic_gpu")


# DHQK/DHV of published models, and sizes between them that models could have.
MODEL_HEADS = """
16/16 16/32 32/32 32/64 48/48 48/96 64/64 64/96 64/128 80/80 80/160 96/96 96/128 96/192 112/112
112/224 128/128 128/192 128/256 128/512 160/160 160/320 192/192 192/256 192/384 256/256 256/384
256/512 256/640 320/320 320/512 320/640 384/384 384/640 512/512 640/640
"""


@pytest.mark.parametrize(
    ("gpu", "backend"),
    [
        ("NVIDIA H200", "triton"),
        ("NVIDIA A100-SXM4-80GB", "triton"),
        ("NVIDIA H200", "mosaic_gpu"),
    ],
    ids=["H200", "A100", "mosaic_gpu"],
)
def test_narrower_heads_move_no_more_bytes_and_need_no_more_flops(any_jax, gpu, backend):
    """The sums over all launches, for all pairs of heads of which none is wider in a dimension.

    Not every multiple of 16 is a head here: where the chunk
    size doubles, half as many states are moved, which 16 columns more need not outweigh.
    """

    sums = {}
    for x in ((*map(int, x.split("/")),) for x in MODEL_HEADS.split()):
        kernels = spec_of((8, 8, 8192, *x), "bfloat16", known_gpu(gpu), backend).plan
        launches = *kernels.forward.items(), *kernels.backward.items()
        launches = [y for y in launches if y[0] not in SMALL]
        sums[x] = np.sum([costs.launch_cost(*y, itemsize=2) for y in launches], axis=0)
    ordered = itertools.permutations(sums, 2)
    pairs = [(x, y) for x, y in ordered if x[0] <= y[0] and x[1] <= y[1]]
    assert not [(x, y) for x, y in pairs if (sums[x] > sums[y]).any()]


# ---------------- values that a hand can check


def test_configs_are_joined_and_equal_by_value():
    """What one leaves None is from the other, all tiles of a kernel too; repr makes it."""
    P, H, rows = dict(num_warps=2), dict(siz_b_LQ=32), dict(siz_b_DHQK=16)
    one = KernelConfig(64, HIGH, False, 2, triton_parallel_fw_P=P)
    assert (one.tiles_of("triton_parallel_fw_P"), one.tiles_of("triton_parallel_fw_H")) == (P, {})
    assert KernelConfig(128, triton_parallel_fw_P=P) | KernelConfig(32, fused=True) == KernelConfig(
        32, fused=True, triton_parallel_fw_P=P
    )
    assert one | KernelConfig(triton_parallel_fw_P=rows) == KernelConfig(
        64, HIGH, False, 2, triton_parallel_fw_P=rows
    )
    same = KernelConfig(64, triton_parallel_fw_P=P, mosaic_gpu_parallel_fw_H=H)
    other = KernelConfig(
        64, mosaic_gpu_parallel_fw_H=H, triton_parallel_fw_P=P, triton_recurrent_fw_C=None
    )
    assert {same, other} == {same} != {KernelConfig(64, triton_parallel_fw_P=P)}
    alone = KernelConfig(precision=X3, fused=False, batch_invariant=True)
    assert all(eval(repr(x)) == x for x in (one, same, alone))
    with pytest.raises(TypeError, match=r"^config\.triton_parallel_fw_H is 3, expected a Map"):
        KernelConfig(triton_parallel_fw_H=3)


@pytest.mark.parametrize(
    ("precision", "compiled", "interpreted"),
    [(None, "BF16_BF16_F32_X6", "HIGHEST"), (HIGH, "HIGH", "HIGH"), (X3, X3.name, "HIGHEST")],
)
def test_the_precision_of_products(precision, compiled, interpreted):
    """Of float32; interpreted products are full float32, where the algorithms of tensor cores are
    not."""
    of = KernelConfig(precision=precision).dot_precision
    assert [of(jnp.dtype("float32"), x).name for x in (False, True)] == [compiled, interpreted]
    assert of(jnp.dtype("bfloat16"), False) is None
    assert of(jnp.dtype("bfloat16"), True).name == "HIGHEST"
