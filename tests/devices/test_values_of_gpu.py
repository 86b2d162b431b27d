"""The facts of a device: values that a hand can check."""

import dataclasses
import types

from mlstm_pallas.problem.gpu import HOPPER, UNKNOWN, gpu_of


def facts(kind, platform="gpu", **its_own):
    x = gpu_of(types.SimpleNamespace(platform=platform, device_kind=kind, **its_own))
    return x.name, x.capability, x.sms, x.shared_bytes


def test_known_gpus():
    assert repr(UNKNOWN) == "Gpu(name='unknown', capability=80, sms=108, shared_bytes=101376)"
    assert repr(HOPPER) == "Gpu(name='NVIDIA H100', capability=90, sms=132, shared_bytes=232448)"


def test_facts_of_a_device_before_those_of_its_name():
    """They are the device's own before those of its name, and of its capability where the name
    is unknown."""
    mig = dict(compute_capability="9.0", core_count=16, shared_memory_per_block_optin=232_448)
    assert facts("NVIDIA H200 MIG 1g.18gb", **mig) == ("NVIDIA H200 MIG 1g.18gb", 90, 16, 232448)
    assert facts("NVIDIA H200", "cuda") == ("NVIDIA H200", 90, 132, 232448)
    assert facts("NVIDIA H200", core_count=16, shared_memory_per_block_optin=100 * 1024) == (
        "NVIDIA H200",
        90,
        16,
        102400,
    )
    assert facts(
        "NVIDIA H200", core_count=0, shared_memory_per_block_optin=0, compute_capability=""
    ) == ("NVIDIA H200", 90, 132, 232448)
    assert (
        facts("NVIDIA H200", compute_capability="9.0"),
        facts("NVIDIA H200", compute_capability="12.0"),
    ) == (("NVIDIA H200", 90, 132, 232448), ("NVIDIA H200", 120, 132, 101376))
    assert facts("NVIDIA H200", compute_capability="13.0") == ("NVIDIA H200", 130, 132, 101376)
    assert (facts("NVIDIA FOO"), facts("NVIDIA FOO", compute_capability="10.3")) == (
        ("NVIDIA FOO", 80, 108, 101376),
        ("NVIDIA FOO", 103, 108, 232448),
    )
    assert (facts("Foo", compute_capability="gfx942"), facts("cpu", "cpu")) == (
        ("Foo", 0, 108, 65536),
        ("unknown", 80, 108, 101376),
    )
    assert (facts("AMD Instinct MI300X", "rocm"), facts("TPU v6 lite", "tpu")) == (
        ("AMD Instinct MI300X", 0, 304, 65536),
        ("TPU", 0, 108, 101376),
    )


def test_a_gpu_of_another_vendor_has_no_compute_capability_even_if_it_reports_numbers():
    def client(version):
        return types.SimpleNamespace(platform_version=version)

    x = dict(compute_capability="9.4")
    for version in "rocm 60300", "PJRT C API\nrocm 60300", "another 1":
        assert facts("Foo", client=client(version), **x) == ("Foo", 0, 108, 65536)
        assert facts("Foo", client=client(version)) == ("Foo", 0, 108, 65536)
    assert facts("Foo", "rocm", **x) == ("Foo", 0, 108, 65536)
    for others in {}, dict(client=client("PJRT C API\nAMD Instinct MI300X")):
        assert facts("AMD Instinct MI300X", **x, **others)[1:] == (0, 304, 65536)
    for version in "cuda 12090", "PJRT C API\ncuda 13000", "PJRT C API\nNVIDIA Foo":
        assert facts("NVIDIA Foo", client=client(version), **x)[1:3] == (94, 108)


def test_what_follows_from_the_facts():
    """What follows from them: CTAs that fill a GPU, bytes per SM, and what kernels may use."""
    assert [
        (x, HOPPER.filled_by(x), HOPPER.filled_by(x, per_sm=2)) for x in (125, 126, 250, 251)
    ] == [(125, False, False), (126, True, False), (250, True, False), (251, True, True)]
    assert HOPPER.sm_shared_bytes // 1024 == 228
    gpus = [dataclasses.replace(HOPPER, capability=x) for x in (80, 89, 90, 100, 103, 120)]
    assert [x.capability for x in gpus if x.hopper] == [90]
    assert [x.capability for x in gpus if x.multiplies_from_shared] == [90, 100, 103]
