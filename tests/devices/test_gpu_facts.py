"""gpu.py: every GPU by its name and by its own facts, and what a call, a plan and an export do for
it."""

import dataclasses
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from oracle import assert_same_bits, call_shapes, for_device, refused, results_of

from mlstm_pallas import (
    Gpu,
    mlstm_chunkwise,
    mlstm_recurrent_step,
    mlstm_ring_states,
    mlstm_ring_step,
    plan,
)
from mlstm_pallas.export import CUSTOM_CALL_TARGET, export
from mlstm_pallas.planning.backend import requested_lowering
from mlstm_pallas.problem.gpu import TPU, UNKNOWN, gpu_of, known_gpu, target_gpu

H200 = Gpu("NVIDIA H200", 90, 132, 227 * 1024)

# Compute capability times ten, SMs, KiB of shared memory that a CTA may have.
NAMED = """
80 108 163: A100-SXM4-80GB, A800-SXM4-80GB, A100X
80 56 163: A30
86 72 99: A10, A10G
86 10 99: A2, A16
86 82 99: A40, RTX A6000, RTX A5000, RTX A5500, GeForce RTX 3090
86 46 99: RTX A4000, RTX A2000, GeForce RTX 3070
87 16 163: Orin, Jetson AGX Orin
89 58 99: L4
89 142 99: L20, L40, L40S, RTX 6000 Ada Generation
89 128 99: GeForce RTX 4090
89 46 99: RTX 2000 Ada Generation, RTX 5000 Ada Generation, GeForce RTX 4070
90 78 227: H20
90 114 227: H100 PCIe
90 132 227: H100 80GB HBM3, H100 NVL, H800, H200, GH200 480GB
100 148 227: B100, B200, GB200
103 148 227: B300, GB300
110 20 227: Thor
120 188 99: RTX PRO 6000 Blackwell Server Edition
120 170 99: GeForce RTX 5090
120 70 99: RTX PRO 4500 Blackwell, GeForce RTX 5080
121 48 99: GB10
"""
# Slices of a GPU have their share of its SMs, as nvidia-smi mig -lgip lists them for 1g and 2g.
SHARED = """
80 14 163: NVIDIA A100-SXM4-40GB MIG 1g.5gb, GRID A100-1-5C
80 42 163: NVIDIA A100-SXM4-40GB MIG 3g.20gb, GRID A100D-3-40C
80 98 163: NVIDIA A100-SXM4-40GB MIG 7g.40gb
80 14 163: NVIDIA A30 MIG 1g.6gb
90 16 227: NVIDIA H100 80GB HBM3 MIG 1g.10gb, NVIDIA H200 MIG 1g.18gb, NVIDIA H100XM-1-10C
90 32 227: NVIDIA H100 80GB HBM3 MIG 2g.20gb
100 18 227: NVIDIA B200 MIG 1g.23gb
80 108 163: GRID A100-10C, GRID A100D-80C, NVIDIA A100-40C
86 72 99: NVIDIA A10-24Q
86 82 99: NVIDIA A40-48Q, NVIDIA RTXA6000-48Q
89 58 99: NVIDIA L4-24Q
89 142 99: NVIDIA L40S-48Q, NVIDIA RTX6000-Ada-48Q
90 132 227: NVIDIA H100-80C, NVIDIA H100XM-80C, NVIDIA H100L-94C, NVIDIA H200X-141C
120 188 99: NVIDIA RTX Pro 6000 Blackwell DC-96Q
"""
# Kernels run on none of these.
PLAIN = """
70 80 96: Tesla V100-SXM2-16GB, Tesla V100S-PCIE-32GB, GRID V100D-32Q
75 40 64: Tesla T4, GRID T4-16Q, NVIDIA GeForce RTX 2080 Ti, Quadro RTX 4000, TITAN RTX
75 40 64: GRID RTX6000-24Q, GRID RTX8000P-8Q
0 304 64: AMD Instinct MI300X, AMD Radeon PRO W7900, gfx942
"""
OTHERS = """
NVIDIA A1000
NVIDIA H2000
NVIDIA XL4
NVIDIA Foo 9
cpu
unknown
"""


def rows(text, prefix=""):
    """The facts in a table."""
    for line in text.strip().splitlines():
        numbers, _, names = line.partition(": ")
        capability, sms, KiB = map(int, numbers.split())
        for name in names.split(", "):
            yield Gpu(prefix + name, capability, sms, KiB * 1024)


WITH_KERNELS = [*rows(NAMED, "NVIDIA "), *rows(SHARED)]
ALL = [*WITH_KERNELS, *rows(PLAIN)]
UNKNOWN_TO_US = Gpu("NVIDIA Foo 9", 95, 77, 150 * 1024)
SIZES = dict(B=2, NH=4, S=2048, DHQK=64, DHV=128)
TOKEN = [jax.ShapeDtypeStruct((2, 4, *x), "float32") for x in ((16,), (16,), (16,), (), ())]


def name_of(gpu):
    return gpu.name


def test_the_facts_by_name():
    for gpu in ALL:
        assert known_gpu(gpu.name) == gpu
    assert not any(map(known_gpu, OTHERS.splitlines()))  # the first one is ""


def device_of(gpu, **others):
    """What jax tells of such a device."""
    version = f"{gpu.capability // 10}.{gpu.capability % 10}" if gpu.capability else "gfx942"
    facts = dict(core_count=gpu.sms, shared_memory_per_block_optin=gpu.shared_bytes)
    names = dict(platform="gpu", device_kind=gpu.name, compute_capability=version)
    return SimpleNamespace(**names | facts | others)


@pytest.mark.parametrize("gpu", [*ALL, UNKNOWN_TO_US], ids=name_of)
def test_the_default_and_the_plan_of_a_gpu(gpu):
    """By its name, by its facts, and at hand: Triton, or plain jnp below 8.0 and on other vendors'
    GPUs, where Triton and Mosaic GPU are refused by the GPU's name."""
    known = gpu is not UNKNOWN_TO_US
    assert gpu_of(device_of(gpu)) == gpu
    if known:
        by_name = dict.fromkeys(("core_count", "shared_memory_per_block_optin"))
        assert gpu_of(device_of(gpu, **by_name)) == gpu
    for heads in (16, 16), None:  # of a call, of a step
        chosen = {x: requested_lowering(x, gpu, heads) for x in (None, "xla", "interpret")}
        default = "triton" if gpu.runs_kernels else "xla"
        assert chosen == {None: default, "xla": "xla", "interpret": "interpret"}
        for backend in () if gpu.runs_kernels else ("triton", "mosaic_gpu"):
            message = f"backend is '{backend}' and the device is {gpu.name}, expected an NVIDIA "
            with pytest.raises(ValueError, match=f"^{re.escape(message)}GPU from compute cap"):
                requested_lowering(backend, gpu, heads)
    planned = [plan(**SIZES, gpu=x) for x in ([gpu.name] if known else []) + [gpu]]
    lowerings = {x.lowering for call in planned for x in call.launches}
    assert lowerings == {"triton" if gpu.runs_kernels else "xla"}
    assert {x.gpu for x in planned} == {gpu}
    assert len({str(x) for x in planned}) == 1
    assert re.match(rf"{re.escape(gpu.name)}, (about )?{gpu.sms} SMs: ", str(planned[0]))
    available = [x.shared_bytes <= gpu.shared_bytes for x in planned[0].launches]
    assert all(available)


def test_a_plan_by_name_says_whether_the_name_tells_the_sms():
    """One of a family has the pattern of GPUs with other numbers; its own facts are exact."""
    about = {x.name for x in ALL if "about" in str(plan(**SIZES, gpu=x.name)).splitlines()[0]}
    of_families = "NVIDIA GeForce RTX 4070", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "GRID A100-1-5C"
    exact = "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA B200", "Tesla V100-SXM2-16GB"
    assert about.issuperset(of_families)
    assert about.isdisjoint(exact)
    mine = dataclasses.replace(known_gpu("NVIDIA GeForce RTX 4070"), sms=36)
    assert str(plan(**SIZES, gpu=mine)).startswith("NVIDIA GeForce RTX 4070, 36 SMs: ")


def lowered_for(run, x, kind):
    """The text of an export for the GPU."""
    return export(run, *x, platform="cuda", device_kind=kind).mlir_module()


# One GPU per compute capability and form of name.
FEW = {gpu.capability: gpu.name for gpu in reversed(WITH_KERNELS)}
FEW = [*FEW.values(), "GRID A100-10C", "NVIDIA A40-48Q", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]


@pytest.mark.parametrize("kind", FEW)
def test_an_export_for_a_gpu_has_the_kernels(kind):
    assert CUSTOM_CALL_TARGET in lowered_for(mlstm_recurrent_step, TOKEN, kind)


@pytest.mark.parametrize("kind", [x.name for x in rows(PLAIN) if x.capability])
def test_an_export_for_a_gpu_without_kernels_is_plain_jnp(kind):
    assert "custom_call" not in lowered_for(mlstm_recurrent_step, TOKEN, kind)
    message = f"^backend is 'triton' and the device is {kind}, expected"
    with pytest.raises(ValueError, match=message):
        lowered_for(partial(mlstm_recurrent_step, backend="triton"), TOKEN, kind)


@pytest.mark.parametrize("kind", ["NVIDIA Foo 9", "NVIDIA A1000", "AMD Instinct MI300X", "cpu"])
def test_an_export_for_an_unknown_gpu_names_what_works(kind):
    message = (
        f"device_kind is {kind!r}, expected the name of a known NVIDIA GPU, such as 'NVIDIA H200' "
        "or 'NVIDIA A100-SXM4-80GB', or of this process's; for an unknown one, that of a known GPU "
        "of its compute capability"
    )
    refused(ValueError, message, lowered_for, mlstm_recurrent_step, TOKEN, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FEW[-2:])
def test_gradients_and_rings_are_exported_for_a_gpu(kind):
    x = call_shapes(1, 2, 128, 64, 64)
    assert CUSTOM_CALL_TARGET in lowered_for(results_of(mlstm_chunkwise), x, kind)
    c, n, m = jnp.zeros((2, 4, 16, 16)), jnp.zeros((2, 4, 16)), jnp.zeros((2, 4))
    rings = mlstm_ring_states(c, n, m, dtype="float32")
    assert CUSTOM_CALL_TARGET in lowered_for(mlstm_ring_step, [*TOKEN, rings], kind)


@pytest.mark.parametrize("kind", ["Tesla T4", "AMD Instinct MI300X", "TPU v6 lite"])
def test_a_call_traced_for_a_device_without_kernels_has_none(kind):
    with for_device(kind):
        for run, x in (
            (mlstm_chunkwise, call_shapes(1, 2, 128, 64, 64)),
            (mlstm_recurrent_step, TOKEN),
        ):
            assert "pallas_call" not in str(jax.make_jaxpr(run)(*x))
            with pytest.raises(ValueError, match=r"^backend is 'triton' and the device is "):
                jax.eval_shape(partial(run, backend="triton"), *x)


@pytest.mark.parametrize("platform", ["rocm", "tpu"])
def test_kernels_are_refused_where_the_platform_has_none(platform):
    """Lowered by a process that does not know for which device."""
    step = jax.jit(partial(mlstm_recurrent_step, backend="triton")).trace(*TOKEN)
    with pytest.raises(
        ValueError, match=r"^backend: a call was traced for the triton kernels, which are for NV"
    ):
        step.lower(lowering_platforms=(platform,))
    default = jax.jit(mlstm_recurrent_step).trace(*TOKEN)
    assert CUSTOM_CALL_TARGET not in default.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("kind", "cores", "platform", "expected"),
    [
        ("NVIDIA H200", 16, "gpu", dataclasses.replace(H200, sms=16)),
        ("NVIDIA H200", None, "gpu", H200),
        ("NVIDIA Foo 9", 16, "gpu", dataclasses.replace(UNKNOWN, name="NVIDIA Foo 9", sms=16)),
        ("TPU v6 lite", 1, "tpu", TPU),
    ],
)
def test_the_target_is_the_abstract_device(kind, cores, platform, expected):
    assert target_gpu() == UNKNOWN  # the CPU of this process
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(kind, cores, platform))
    with jax.sharding.use_abstract_mesh(mesh):
        assert target_gpu() == expected


@pytest.mark.gpu
def test_a_computation_on_the_cpu_of_a_machine_with_a_gpu():
    """It is plain jnp where the arrays or the default device say so. What is traced for the GPU is
    refused on the CPU in a sentence that says what to write."""
    cpu = jax.devices("cpu")[0]
    x = [jax.device_put(np.ones((1, 1, 32, *y), "float32"), cpu) for y in ((16,),) * 3 + ((),) * 2]
    with jax.default_device(cpu):
        expected = jax.jit(mlstm_chunkwise)(*map(np.asarray, x))
    assert_same_bits(mlstm_chunkwise(*x), expected)
    assert expected.devices() == {cpu}
    with pytest.raises(ValueError, match=r"^backend: a call was traced for the triton kernels, "):
        jax.jit(mlstm_chunkwise)(*x)


def client(version):
    return dict(client=SimpleNamespace(platform_version=version))


ROCM = client("PJRT C API\nrocm 60300")
# A name, what its device reports, the facts: its own before those of its name, or those of its
# capability. A GPU of another vendor has no capability, even if it reports numbers.
REPORTED = [
    ("NVIDIA H200", dict(core_count=16, shared_memory_per_block_optin=102_400), (90, 16, 100)),
    (
        "NVIDIA H200",
        dict(core_count=0, shared_memory_per_block_optin=0, compute_capability=""),
        (90, 132, 227),
    ),
    ("NVIDIA H200", dict(compute_capability="12.0"), (120, 132, 99)),
    ("NVIDIA FOO", {}, (80, 108, 99)),
    ("NVIDIA FOO", dict(compute_capability="10.3"), (103, 108, 227)),
    ("NVIDIA FOO", dict(compute_capability="9.4") | client("cuda 12090"), (94, 108, 227)),
    ("Foo", dict(compute_capability="gfx942"), (0, 108, 64)),
    ("Foo", dict(compute_capability="9.4", platform="rocm"), (0, 108, 64)),
    ("Foo", dict(compute_capability="9.4") | client("another 1"), (0, 108, 64)),
    ("AMD Instinct MI300X", dict(compute_capability="9.4") | ROCM, (0, 304, 64)),
]


@pytest.mark.parametrize(("kind", "reported", "expected"), REPORTED)
def test_the_facts_that_a_device_reports(kind, reported, expected):
    gpu = gpu_of(SimpleNamespace(**dict(platform="gpu", device_kind=kind) | reported))
    assert (gpu.name, gpu.capability, gpu.sms, gpu.shared_bytes / 1024) == (kind, *expected)
