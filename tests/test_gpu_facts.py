"""gpu.py: the facts of a GPU, from its device or by its name."""

import types

import pytest

from mlstm_pallas.gpu import UNKNOWN, Gpu, gpu_of, known_gpu

# Compute capability times ten, SMs, KiB of shared memory that a CTA may have.
NAMED = {
    "NVIDIA A100-SXM4-80GB": "80 108 163",
    "NVIDIA RTX A6000": "86 82 99",
    "NVIDIA L4": "89 58 99",
    "NVIDIA GeForce RTX 4090": "89 128 99",
    "NVIDIA RTX 4000 Ada Generation": "89 46 99",
    "NVIDIA H20": "90 78 227",
    "NVIDIA H200": "90 132 227",
    "NVIDIA GH200 480GB": "90 132 227",
    "NVIDIA GB200": "100 148 227",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "120 188 99",
}
OTHERS = "NVIDIA GeForce RTX 2080 Ti", "Quadro RTX 4000", "Tesla V100-SXM2-16GB", "unknown", ""


@pytest.mark.parametrize("name", NAMED)
def test_the_facts_by_name(name):
    capability, sms, KiB = map(int, NAMED[name].split())
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
