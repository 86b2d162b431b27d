"""gpu.py: the facts of a GPU by its name, of an abstract device; devices: test_values_of_gpu.py."""

import dataclasses

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from mlstm_pallas.problem.gpu import TPU, UNKNOWN, Gpu, known_gpu, target_gpu

H200 = Gpu("NVIDIA H200", 90, 132, 227 * 1024)

# Compute capability times ten, SMs, KiB of shared memory that a CTA may have.
NAMED = """
80 108 163: A100-SXM4-80GB, A800-SXM4-80GB
80 56 163: A30
86 72 99: A10, A10G
86 10 99: A2, A16
86 82 99: A40, RTX A6000, RTX A5000, RTX A5500, GeForce RTX 3090
86 46 99: RTX A4000, RTX A2000, GeForce RTX 3070
89 58 99: L4
89 142 99: L20, L40, L40S, RTX 6000 Ada Generation
89 128 99: GeForce RTX 4090
89 46 99: RTX 2000 Ada Generation, RTX 5000 Ada Generation, GeForce RTX 4070
90 78 227: H20
90 114 227: H100 PCIe
90 132 227: H100 80GB HBM3, H800, H200, GH200 480GB
100 148 227: B100, B200, GB200
103 148 227: B300, GB300
120 188 99: RTX PRO 6000 Blackwell Server Edition
120 170 99: GeForce RTX 5090
120 70 99: RTX PRO 4500 Blackwell, GeForce RTX 5080
"""
OTHERS = """
NVIDIA GeForce RTX 2080 Ti
Quadro RTX 4000
Quadro RTX A6000
Tesla V100-SXM2-16GB
Tesla T4
NVIDIA A1000
NVIDIA H2000
NVIDIA XL4
unknown
"""


def test_the_facts_by_name():
    for line in NAMED.strip().splitlines():
        numbers, _, names = line.partition(": ")
        capability, sms, KiB = map(int, numbers.split())
        for name in (f"NVIDIA {x}" for x in names.split(", ")):
            assert known_gpu(name) == Gpu(name, capability, sms, KiB * 1024)
    assert not any(map(known_gpu, OTHERS.splitlines()))  # the first one is ""


@pytest.mark.parametrize(
    ("kind", "cores", "expected"),
    [
        ("NVIDIA H200", 16, dataclasses.replace(H200, sms=16)),
        ("NVIDIA H200", None, H200),
        ("NVIDIA FOO", 16, UNKNOWN),
        ("TPU v6 lite", 1, TPU),
    ],
)
def test_the_target_is_the_abstract_device(kind, cores, expected):
    assert target_gpu() == UNKNOWN  # the CPU of this process
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(kind, cores, "gpu"))
    with jax.sharding.use_abstract_mesh(mesh):
        assert target_gpu() == expected
