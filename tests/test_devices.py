"""What is known of GPUs by their names."""

import compile_report
from mlstm_pallas.devices import available_shared_bytes

KIB = {80: 163, 90: 227, 100: 227}  # by compute capability, else 99
NAMED = {
    "NVIDIA GH200 480GB": 227,
    "NVIDIA GB200": 227,
    "NVIDIA L40S": 99,
    "NVIDIA A10G": 99,
    "NVIDIA RTX A6000": 99,
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": 99,
    "NVIDIA GeForce RTX 2080 Ti": None,
    "Tesla V100-SXM2-16GB": None,
    "unknown": None,
}


def test_shared_memory_of_a_device():
    devices = compile_report.DEVICES.values()
    expected = NAMED | {device.kind: KIB.get(device.capability, 99) for device in devices}
    assert {
        kind: (available_shared_bytes(kind) or 0) // 1024 or None for kind in expected
    } == expected
