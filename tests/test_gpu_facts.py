"""gpu.py: the facts of a GPU, from its device or by its name."""

import dataclasses
import types

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from mlstm_pallas.problem.gpu import UNKNOWN, Gpu, gpu_of, known_gpu, target_gpu

H200 = Gpu("NVIDIA H200", 90, 132, 227 * 1024)

# Compute capability times ten, SMs, KiB of shared memory that a CTA may have.
NAMED = {
    "NVIDIA A100-SXM4-80GB": "80 108 163",
    "NVIDIA A800-SXM4-80GB": "80 108 163",
    "NVIDIA A30": "80 56 163",
    "NVIDIA A10": "86 72 99",
    "NVIDIA A10G": "86 72 99",
    "NVIDIA A2": "86 10 99",
    "NVIDIA A16": "86 10 99",
    "NVIDIA A40": "86 82 99",
    "NVIDIA RTX A6000": "86 82 99",
    "NVIDIA RTX A5000": "86 82 99",
    "NVIDIA RTX A5500": "86 82 99",
    "NVIDIA GeForce RTX 3090": "86 82 99",
    "NVIDIA RTX A4000": "86 46 99",
    "NVIDIA RTX A2000": "86 46 99",
    "NVIDIA GeForce RTX 3070": "86 46 99",
    "NVIDIA L4": "89 58 99",
    "NVIDIA L20": "89 142 99",
    "NVIDIA L40": "89 142 99",
    "NVIDIA L40S": "89 142 99",
    "NVIDIA RTX 6000 Ada Generation": "89 142 99",
    "NVIDIA GeForce RTX 4090": "89 128 99",
    "NVIDIA RTX 2000 Ada Generation": "89 46 99",
    "NVIDIA RTX 5000 Ada Generation": "89 46 99",
    "NVIDIA GeForce RTX 4070": "89 46 99",
    "NVIDIA H20": "90 78 227",
    "NVIDIA H100 PCIe": "90 114 227",
    "NVIDIA H100 80GB HBM3": "90 132 227",
    "NVIDIA H800": "90 132 227",
    "NVIDIA H200": "90 132 227",
    "NVIDIA GH200 480GB": "90 132 227",
    "NVIDIA B100": "100 148 227",
    "NVIDIA B200": "100 148 227",
    "NVIDIA GB200": "100 148 227",
    "NVIDIA B300": "103 148 227",
    "NVIDIA GB300": "103 148 227",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "120 188 99",
    "NVIDIA GeForce RTX 5090": "120 170 99",
    "NVIDIA RTX PRO 4500 Blackwell": "120 70 99",
    "NVIDIA GeForce RTX 5080": "120 70 99",
}
OTHERS = (
    "NVIDIA GeForce RTX 2080 Ti",
    "Quadro RTX 4000",
    "Quadro RTX A6000",
    "Tesla V100-SXM2-16GB",
    "Tesla T4",
    "NVIDIA A1000",
    "NVIDIA H2000",
    "NVIDIA XL4",
    "unknown",
    "",
)


def test_the_facts_by_name():
    for name, numbers in NAMED.items():
        capability, sms, KiB = map(int, numbers.split())
        assert known_gpu(name) == Gpu(name, capability, sms, KiB * 1024)


def test_another_name_has_no_facts():
    assert not any(map(known_gpu, OTHERS))


PARTS = dict(compute_capability="9.0", core_count=16, shared_memory_per_block_optin=232_448)


@pytest.mark.parametrize(
    ("kind", "facts", "expected"),
    [
        ("NVIDIA H200 MIG 1g.18gb", PARTS, (90, 16, 232_448)),
        ("NVIDIA H200", {}, (90, 132, 232_448)),
        ("NVIDIA FOO", dict(compute_capability="10.0"), (100, UNKNOWN.sms, 232_448)),
        ("NVIDIA FOO", {}, (UNKNOWN.capability, UNKNOWN.sms, UNKNOWN.shared_bytes)),
        ("cpu", dict(platform="cpu"), None),
        ("AMD Instinct MI300X", dict(compute_capability="gfx942"), None),
    ],
    ids=["a_part", "by_name", "of_its_capability", "nothing", "cpu", "amd"],
)
def test_the_facts_of_a_device_are_its_own_before_those_of_its_name(kind, facts, expected):
    device = types.SimpleNamespace(**dict(platform="gpu", device_kind=kind) | facts)
    assert gpu_of(device) == (Gpu(kind, *expected) if expected else UNKNOWN)


@pytest.mark.parametrize(
    ("kind", "cores", "expected"),
    [
        ("NVIDIA H200", 16, dataclasses.replace(H200, sms=16)),
        ("NVIDIA H200", None, H200),
        ("NVIDIA FOO", 16, UNKNOWN),
    ],
)
def test_the_target_is_the_abstract_device(kind, cores, expected):
    assert target_gpu() == UNKNOWN  # the CPU of this process
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(kind, cores, "gpu"))
    with jax.sharding.use_abstract_mesh(mesh):
        assert target_gpu() == expected


def test_what_follows_from_the_facts():
    found = {x: (H200.filled_by(x), H200.filled_by(x, per_sm=2)) for x in (125, 126, 250, 251)}
    assert found == {
        125: (False, False),
        126: (True, False),
        250: (True, False),
        251: (True, True),
    }
    assert H200.sm_shared_bytes == 228 * 1024
    of_capability = {x: Gpu("", x, 1, 0) for x in (80, 89, 90, 100, 103, 120)}
    assert [x for x, gpu in of_capability.items() if gpu.hopper] == [90]
    assert [x for x, gpu in of_capability.items() if gpu.multiplies_from_shared] == [90, 100, 103]
