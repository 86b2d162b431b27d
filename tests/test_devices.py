"""What is known of GPUs by their names."""

import compile_report
import pytest

from mlstm_pallas.devices import available_shared_bytes

KIB = 1024


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
