"""Configs that cannot have their shared memory are refused before the compiler sees them, and only those."""

import dataclasses

import compile_report
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from mlstm_pallas import KernelConfig, StageConfig, api, mlstm_chunkwise
from mlstm_pallas.config import CHUNK_OF, PLANS, config_for
from mlstm_pallas.problem import make_problem
from mlstm_pallas.shared_memory import available_shared_bytes, check_fits, least_shared_bytes

KIB = 1024
HEADS = [(16, 16), (64, 64), (80, 96), (128, 256), (192, 320), (256, 512), (512, 256), (512, 512), (384, 768), (1024, 1024)]


def problem(heads, L):
    DHQK, DHHV = heads
    return make_problem((1, 8, 1024, DHQK), DHHV, L, pad_heads=True)


@pytest.mark.parametrize(
    ("kind", "kib"),
    [
        *((device.kind, {80: 163, 90: 227, 100: 227}.get(device.capability, 99)) for device in compile_report.DEVICES.values()),
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


@pytest.mark.parametrize("device", compile_report.DEVICES)
def test_default_configs_are_never_refused(device):
    kind = compile_report.DEVICES[device].kind
    for heads in HEADS:
        for dtype in map(jnp.dtype, ("bfloat16", "float32")):
            for chunk_size in (None, 16, 32, 128, 256, 1024):
                for plan in ({}, *({name: True} for name in PLANS)):
                    config = config_for(*heads, 1024, dtype, device_kind=kind, chunk_size=chunk_size, explicit=KernelConfig(**plan))
                    check_fits(config, problem(heads, config.L), dtype, kind)


def tiles(LQ, LKV, BK, BV, loop=64, num_warps=4, num_stages=2, keep_q=True):
    return StageConfig(LQ, LKV, BK, BV, loop, num_warps, num_stages, keep_q)


# stage, heads, dtype, chunk size, config, device, whether it is refused
COMPILED = [
    ("recurrent_fw_C", (128, 128), "bfloat16", 128, tiles(64, 64, 64, 128, num_stages=3), "H200", False),
    ("recurrent_fw_C", (64, 64), "float32", 256, tiles(64, 128, 64, 64, num_stages=4), "RTX4090", True),
    ("recurrent_fw_C", (64, 64), "bfloat16", 256, tiles(64, 64, 64, 64, num_stages=4), "RTX4090", False),
    ("parallel_fw_H", (128, 128), "bfloat16", 128, tiles(64, 32, 64, 128), "H200", False),
    ("parallel_fw_H", (128, 128), "bfloat16", 256, tiles(64, 128, 64, 128, num_stages=4), "H200", True),
    ("parallel_fw_H", (64, 64), "float32", 64, tiles(64, 32, 64, 32, num_stages=4, keep_q=False), "H200", False),
    ("parallel_fw_H", (192, 320), "bfloat16", 64, tiles(64, 64, 64, 64, num_warps=8, num_stages=4), "A100", False),
    ("parallel_bw_dP", (64, 64), "bfloat16", 64, tiles(64, 64, 64, 64, 16, num_stages=3), "RTX4090", False),
    ("parallel_bw_dP", (128, 256), "float32", 256, tiles(64, 64, 64, 64, 32), "H200", False),
    ("parallel_bw_dP", (128, 256), "bfloat16", 128, tiles(128, 64, 64, 64, 64, 8, 5), "RTX5090", True),
    ("recurrent_bw_dC", (64, 64), "bfloat16", 256, tiles(64, 64, 64, 64, num_stages=3), "RTX4090", False),
    ("recurrent_bw_dC", (256, 512), "bfloat16", 256, tiles(64, 64, 128, 128, num_stages=3), "H200", False),
    ("parallel_bw_dQKV", (64, 64), "bfloat16", 64, tiles(64, 64, 64, 64, 16, num_stages=3), "RTX4090", False),
    ("parallel_bw_dQKV", (256, 512), "bfloat16", 256, tiles(128, 64, 128, 128, 64, num_stages=3), "H200", False),
    ("parallel_bw_dP", (128, 256), "bfloat16", 256, tiles(256, 64, 64, 64, 64, num_stages=3), "A10", False),
    ("parallel_bw_dQKV", (256, 512), "bfloat16", 256, tiles(256, 64, 128, 128, 64, num_stages=4), "A10", False),
    ("parallel_bw_dQKV", (128, 128), "bfloat16", 128, tiles(128, 64, 128, 128, 64, 8, 5), "A10", True),
    ("parallel_fw_P", (256, 64), "float32", 128, tiles(64, 64, 64, 64), "RTX4090", False),
    ("recurrent_fw_H", (256, 512), "bfloat16", 128, tiles(64, 64, 128, 64, 256), "H200", False),
    ("recurrent_fw_H", (64, 64), "float32", 64, tiles(64, 64, 64, 16, 64, 8, 4), "A100", False),
    ("recurrent_fw_H", (16, 16), "bfloat16", 64, tiles(64, 16, 16, 16, 64, 8, 3), "B200", False),
    ("recurrent_fw_H", (256, 64), "bfloat16", 128, tiles(64, 128, 64, 64, 256, 8, 3), "RTX5090", True),
    ("parallel_bw_P", (64, 256), "bfloat16", 64, tiles(64, 64, 64, 64, 64, num_stages=3), "H200", False),
    ("recurrent_bw_dQ", (64, 128), "bfloat16", 64, tiles(64, 64, 64, 64, 128), "H200", False),
    ("recurrent_bw_dK", (128, 128), "bfloat16", 128, tiles(64, 128, 64, 64, 128, 8, 3), "L4", True),
    ("recurrent_bw_dV", (64, 64), "float32", 32, tiles(64, 32, 64, 64, 64, 4, 3), "B200", False),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "heads", "dtype", "L", "config", "device", "refused"),
    COMPILED,
    ids=[f"{x[0]}-{x[1][0]}-{x[2]}-{x[5]}-{x[6]}" for x in COMPILED],
)
def test_the_bound_is_one_and_what_it_refuses_does_not_fit(stage, heads, dtype, L, config, device, refused, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(api, "check_fits", lambda *_: None)
    target, config = compile_report.DEVICES[device], dataclasses.replace(config, num_segments=1)
    plan = dict(stateless_forward=stage in CHUNK_OF, stateless_backward=stage in CHUNK_OF)
    chunks = {CHUNK_OF[stage]: config} if stage in CHUNK_OF else {}
    whole = KernelConfig(chunk_size=L, **plan, **chunks | {stage: config})
    direction = "fwd" if "fw" in stage else "fwbw"
    [row] = compile_report.report(device, [heads], [dtype], stages=[stage], seqlen=1024, config=whole, direction=direction)
    of_stage = config_for(*heads, 1024, jnp.dtype(dtype), explicit=whole).problem_of(stage, problem(heads, L))
    needed = least_shared_bytes(stage, config, of_stage, jnp.dtype(dtype), wgmma=target.capability == 90)
    assert needed <= row.usage.shared_bytes
    assert (needed > target.shared_bytes) == refused
    assert bool(row.cause) == refused


LARGE = KernelConfig(chunk_size=256, recurrent_fw_C=dataclasses.replace(tiles(64, 128, 64, 64, num_stages=8), num_segments=1))
SHAPES = [jax.ShapeDtypeStruct(s, "float32") for s in ((1, 2, 256, 128), (1, 2, 256, 128), (1, 2, 256, 256), (1, 2, 256), (1, 2, 256))]


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
    config = dataclasses.replace(LARGE, precision=precision)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(kind, None, "gpu"))):

        def trace():
            return jax.eval_shape(lambda *x: mlstm_chunkwise(*x, backend=backend, config=config), *SHAPES)

        if refused:
            with pytest.raises(ValueError, match=r"config\.recurrent_fw_C needs at least 507904 bytes"):
                trace()
        else:
            trace()


def test_a_forward_pass_that_no_backward_pass_follows_is_checked_too():
    """It walks where one that stores states, of too many rows for a walk, does not."""
    walk = KernelConfig(chunk_size=256, stateless_forward=True, recurrent_fw_H=tiles(64, 64, 64, 64, 256, 8, 4))
    heads, dtype = (512, 512), jnp.dtype("bfloat16")
    arguments = config_for(*heads, 1024, dtype, explicit=walk), problem(heads, 256), dtype, "NVIDIA A10"
    assert "recurrent_fw_H" not in arguments[0].passes(arguments[1], recompute_states_in_bw=False)[0]
    with pytest.raises(ValueError, match=r"config\.recurrent_fw_H needs at least"):
        check_fits(*arguments, recompute_states_in_bw=False)


def test_only_what_runs_is_checked():
    heads, kind, dtype = (256, 512), "NVIDIA A10", jnp.dtype("bfloat16")
    large = {"parallel_fw_H": tiles(128, 128, 64, 256, num_warps=8, num_stages=3), "recurrent_fw_H": tiles(64, 64, 64, 64, 256, 8, 4)}
    for name, too_large in large.items():
        for stateless, recompute in ((False, True), (True, True), (True, False)):
            plan = KernelConfig(chunk_size=256, stateless_forward=stateless, **{name: too_large})
            arguments = config_for(*heads, 1024, dtype, explicit=plan), problem(heads, 256), dtype, kind, recompute
            if (name == "recurrent_fw_H") == stateless:
                with pytest.raises(ValueError, match=rf"config\.{name} needs at least"):
                    check_fits(*arguments)
            else:
                check_fits(*arguments)
