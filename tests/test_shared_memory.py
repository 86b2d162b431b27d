"""Configs that cannot have their shared memory are refused before the compiler sees them, and only
those."""

import itertools

import compile_report
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from mlstm_pallas import KernelConfig, StageConfig, entry, mlstm_chunkwise
from mlstm_pallas.call_spec import CallSpec
from mlstm_pallas.config import config_for
from mlstm_pallas.entry import check_spec_fits
from mlstm_pallas.normaliser import DEFAULT_NORMALISER
from mlstm_pallas.problem import make_problem
from mlstm_pallas.shared_memory import available_shared_bytes, least_shared_bytes
from mlstm_pallas.stages import STAGES

KIB = 1024
HEADS = [
    (16, 16),
    (64, 64),
    (80, 96),
    (128, 256),
    (192, 320),
    (256, 512),
    (512, 256),
    (512, 512),
    (384, 768),
    (1024, 1024),
]


def spec_of(heads, dtype, config=None, *, kind="unknown", recompute=True, **options):
    DHQK, DHHV = heads
    config = config_for(
        DHQK, DHHV, 1024, jnp.dtype(dtype), device_kind=kind, explicit=config, **options
    )
    problem = make_problem((1, 8, 1024, DHQK), DHHV, config.L, pad_heads=True)
    return CallSpec(
        problem, config, jnp.dtype(dtype), DEFAULT_NORMALISER, recompute, backend="triton"
    )


@pytest.mark.parametrize(
    ("kind", "kib"),
    [
        *(
            (device.kind, {80: 163, 90: 227, 100: 227}.get(device.capability, 99))
            for device in compile_report.DEVICES.values()
        ),
        ("NVIDIA GH200 480GB", 227),
        ("NVIDIA GB200", 227),
        ("NVIDIA L40S", 99),
        ("NVIDIA A10G", 99),
        ("NVIDIA RTX A6000", 99),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 99),
        ("NVIDIA GeForce RTX 2080 Ti", None),
        ("Tesla V100-SXM2-16GB", None),
        ("unknown", None),
    ],
)
def test_shared_memory_of_a_device(kind, kib):
    assert available_shared_bytes(kind) == (None if kib is None else kib * KIB)


@pytest.mark.parametrize("fused_min_heads", [None, 0, 1])
@pytest.mark.parametrize("device", compile_report.DEVICES)
def test_default_configs_are_never_refused(device, fused_min_heads):
    kind, config = (
        compile_report.DEVICES[device].kind,
        KernelConfig(fused_min_heads=fused_min_heads),
    )
    for heads, dtype, chunk_size in itertools.product(
        HEADS, ("bfloat16", "float32"), (None, 16, 32, 128, 256, 1024)
    ):
        check_spec_fits(spec_of(heads, dtype, config, kind=kind, chunk_size=chunk_size), kind)


def tiles(LQ, LKV, BK, BV, loop=64, num_warps=4, num_stages=2, keep_q=True):
    return StageConfig(LQ, LKV, BK, BV, loop, num_warps, num_stages, keep_q)


# stage, heads, dtype, chunk size, config, device, whether it is refused
COMPILED = [
    (
        "recurrent_fw_C",
        (64, 64),
        "float32",
        256,
        tiles(64, 128, 64, 64, num_stages=4),
        "RTX4090",
        True,
    ),
    (
        "recurrent_fw_C",
        (64, 64),
        "bfloat16",
        256,
        tiles(64, 64, 64, 64, num_stages=4),
        "RTX4090",
        False,
    ),
    (
        "parallel_fw_H",
        (128, 128),
        "bfloat16",
        256,
        tiles(64, 128, 64, 128, num_stages=4),
        "H200",
        True,
    ),
    (
        "parallel_fw_H",
        (192, 320),
        "bfloat16",
        64,
        tiles(64, 64, 64, 64, num_warps=8, num_stages=4),
        "A100",
        False,
    ),
    (
        "parallel_bw_dP",
        (128, 256),
        "bfloat16",
        128,
        tiles(128, 64, 64, 64, 64, 8, 5),
        "RTX5090",
        True,
    ),
    (
        "recurrent_bw_dC",
        (64, 64),
        "bfloat16",
        256,
        tiles(64, 64, 64, 64, num_stages=3),
        "RTX4090",
        False,
    ),
    (
        "parallel_bw_dQKV",
        (256, 512),
        "bfloat16",
        256,
        tiles(128, 64, 128, 128, 64, num_stages=3),
        "H200",
        False,
    ),
    (
        "parallel_bw_dQKV",
        (128, 128),
        "bfloat16",
        128,
        tiles(128, 64, 128, 128, 64, 8, 5),
        "A10",
        True,
    ),
    ("parallel_fw_P", (256, 64), "float32", 128, tiles(64, 64, 64, 64), "RTX4090", False),
    ("recurrent_fw_H", (256, 512), "bfloat16", 128, tiles(64, 64, 128, 64, 256), "H200", False),
    (
        "recurrent_fw_H",
        (256, 64),
        "bfloat16",
        128,
        tiles(64, 128, 64, 64, 256, 8, 3),
        "RTX5090",
        True,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "heads", "dtype", "L", "config", "device", "refused"),
    COMPILED,
    ids=[
        f"{x[0]}-{x[1][0]}_{x[1][1]}-{x[2]}-L{x[3]}-{x[5]}-{'refused' if x[6] else 'fits'}"
        for x in COMPILED
    ],
)
def test_the_bound_is_one_and_what_it_refuses_does_not_fit(
    stage, heads, dtype, L, config, device, refused, monkeypatch
):
    pytest.importorskip("triton")
    monkeypatch.setattr(entry, "check_fits", lambda *_: None)
    target, config = compile_report.DEVICES[device], config.replace(num_splits=1)
    fused = STAGES[stage].fused
    scan = dict(recurrent_fw_H=config) if fused else {}  # which has the chunk size of the scan
    config = KernelConfig(chunk_size=L, fused_min_heads=int(fused), **scan | {stage: config})
    direction = "fwbw" if STAGES[stage].backward else "fwd"
    [row] = compile_report.report(
        device, [heads], [dtype], stages=[stage], seqlen=1024, config=config, direction=direction
    )
    [(tiles, problem)] = [
        launch[1:] for launch in spec_of(heads, dtype, config).launches() if launch[0] == stage
    ]
    needed = least_shared_bytes(
        STAGES[stage], tiles, problem, jnp.dtype(dtype), wgmma=target.capability == 90
    )
    assert needed <= row.usage.shared_bytes
    assert (needed > target.shared_bytes) == refused
    assert bool(row.cause) == refused


def test_every_stage_is_compared_with_its_compiled_kernels():
    """All that the shared memory of limits: chunk_gates and recurrent_step have no operands in
    it."""
    assert {x[0] for x in COMPILED} == {*STAGES} - {"chunk_gates", "recurrent_step"}


LARGE = KernelConfig(
    chunk_size=256, recurrent_fw_C=tiles(64, 128, 64, 64, num_stages=8).replace(num_splits=1)
)
SHAPES = [
    jax.ShapeDtypeStruct(s, "float32")
    for s in ((1, 2, 256, 128), (1, 2, 256, 128), (1, 2, 256, 256), (1, 2, 256), (1, 2, 256))
]


@pytest.mark.parametrize(
    ("kind", "backend", "precision", "refused"),
    [
        ("NVIDIA H200", None, None, True),
        ("NVIDIA H200", "triton", None, True),
        ("NVIDIA H200", "xla", None, False),
        ("NVIDIA H200", "interpret", None, False),
        ("NVIDIA H200", "triton", jax.lax.Precision.HIGHEST, False),
        ("NVIDIA Future", "triton", None, False),
    ],
)
def test_what_is_checked(kind, backend, precision, refused):
    config = LARGE.replace(precision=precision)
    with jax.sharding.use_abstract_mesh(
        AbstractMesh((), (), abstract_device=AbstractDevice(kind, None, "gpu"))
    ):

        def trace():
            return jax.eval_shape(
                lambda *x: mlstm_chunkwise(*x, backend=backend, config=config), *SHAPES
            )

        if refused:
            with pytest.raises(
                ValueError, match=r"config\.recurrent_fw_C needs at least 507904 bytes"
            ):
                trace()
        else:
            trace()


def test_a_forward_pass_that_no_backward_pass_follows_is_checked_too():
    """It is the fused scan where one that stores states is not: the state has more rows than a
    launch."""
    config = KernelConfig(
        chunk_size=256, fused_min_heads=1, recurrent_fw_H=tiles(64, 64, 64, 64, 256, 8, 4)
    )
    spec = spec_of((512, 512), "bfloat16", config, recompute=False)
    assert not spec.fused
    with pytest.raises(ValueError, match=r"config\.recurrent_fw_H needs at least"):
        check_spec_fits(spec, "NVIDIA A10")


@pytest.mark.parametrize(
    ("fused", "recompute"),
    [(0, True), (1, True), (1, False)],
    ids=["materialised", "fused", "fused-stored"],
)
@pytest.mark.parametrize("stage", ["parallel_fw_H", "recurrent_fw_H"])
def test_only_what_runs_is_checked(stage, fused, recompute):
    large = dict(
        parallel_fw_H=tiles(128, 128, 64, 256, num_warps=8, num_stages=3),
        recurrent_fw_H=tiles(64, 64, 64, 64, 256, 8, 4),
    )
    config = KernelConfig(chunk_size=256, fused_min_heads=fused, **{stage: large[stage]})
    spec = spec_of((256, 512), "bfloat16", config, recompute=recompute)
    if STAGES[stage].fused == bool(fused):
        with pytest.raises(ValueError, match=rf"config\.{stage} needs at least"):
            check_spec_fits(spec, "NVIDIA A10")
    else:
        check_spec_fits(spec, "NVIDIA A10")
