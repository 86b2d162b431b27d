"""The facts of a GPU that plans depend on: of the device at hand, by name, or as passed."""

import dataclasses
import re
from contextvars import ContextVar
from typing import Any

import jax

from mlstm_pallas.problem.validation import check_integer


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The facts of a GPU, from which ``plan`` and all calls plan their kernels.

    Example::

      >>> from mlstm_pallas import Gpu, plan
      >>> gpu = Gpu("NVIDIA Foo", capability=89, sms=60, shared_bytes=99 * 1024)
      >>> plan(B=8, NH=8, S=8192, DHQK=256, DHV=512, gpu=gpu).gpu.sms
      60

    Attributes:
      name: jax's ``device_kind``.
      capability: the compute capability times ten, 89 for 8.9; 0: of another vendor than NVIDIA.
        From 80 on the kernels run; the others have plain jnp.
      sms: the number of SMs.
      shared_bytes: the most shared memory of a CTA. An SM has 1 KiB more, and each CTA takes 1 KiB
        beside its own.
    """

    name: str
    capability: int
    sms: int
    shared_bytes: int

    def __post_init__(self) -> None:
        ten_times = ", ten times the compute capability (89 for 8.9), or 0"
        capability = 10 if self.capability == 0 else self.capability
        check_integer("gpu.capability", capability, 10, unit=ten_times)
        check_integer("gpu.sms", self.sms, 1)
        check_integer("gpu.shared_bytes", self.shared_bytes, 1024, unit=" bytes")

    @property
    def runs_kernels(self) -> bool:
        return self.capability >= 80

    @property
    def hopper(self) -> bool:
        return self.capability == 90

    @property
    def sm_shared_bytes(self) -> int:
        return self.shared_bytes + 1024

    @property
    def multiplies_from_shared(self) -> bool:
        """Whether products read shared memory (wgmma, tcgen05), not registers (mma)."""
        return 90 <= self.capability < 120

    def filled_by(self, ctas: int, per_sm: int = 1) -> bool:
        """Whether so many CTAs fill the GPU; 128 CTAs fill the 132 SMs of an H200."""
        return ctas >= 0.95 * per_sm * self.sms


# KiB of shared memory that a CTA may have, by capability, where it is not 227 or 99.
_KIB = {0: 64, 70: 96, 75: 64, 80: 163, 87: 163}
# SMs by a part of the device's name, which virtual GPUs have in forms of their own
# ("GRID A100D-10C", "NVIDIA H100XM-80C", "NVIDIA RTXA6000-48Q"), by capability.
_SMS = {
    0: {r"\bAMD\b|\bRadeon\b|\bgfx\d": 304},
    70: {r"\bV100[A-Z]*\b": 80},
    75: {r"\bT4\b|RTX 20[678]0|(Quadro|TITAN) RTX( \d|$)|RTX[68]000P?-\d": 40},
    80: {r"\bA(100|800)[DX]?\b": 108, r"\bA30X?\b": 56},
    86: {
        r"\bA10G?\b": 72,
        r"\bA(2|16)\b": 10,
        r"\bA40\b|RTX ?A6000|RTX ?A5[05]00|RTX 3090": 82,
        r"RTX A[2-4]\d\d\d|RTX 30\d\d": 46,
    },
    87: {r"\bOrin\b": 16},
    89: {
        r"\bL4\b": 58,
        r"\bL(20|40S?)\b|RTX ?6000[ -]Ada": 142,
        r"RTX 4090": 128,
        r"RTX ?[2-5]\d\d\d[ -]Ada|RTX 40\d\d": 46,
    },
    90: {r"\bH20\b": 78, r"\bH100 PCIe": 114, r"\bG?H(100|200|800)[LMX]*\b": 132},
    100: {r"\bG?B(100|200)X?\b": 148},
    103: {r"\bG?B300X?\b": 148},
    110: {r"\bThor\b": 20},
    120: {r"RTX[ -](PRO|Pro) ?6000": 188, r"RTX 5090": 170, r"RTX (PRO |50)\d\d": 70},
    121: {r"\bGB10\b": 48},
}
# A slice of a GPU (MIG): "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "GRID A100-3-20C".
_SLICES = r"(?:MIG |-)(\d)(?:g|-\d+[CQ])"
# The least that every supported GPU has, for calls whose GPU is not known when they are traced.
UNKNOWN = Gpu("unknown", 80, 108, 99 * 1024)
# Plain jnp runs there, a few heads at a time.
TPU = dataclasses.replace(UNKNOWN, name="TPU", capability=0)
HOPPER = Gpu("NVIDIA H100", 90, 132, 227 * 1024)
# The GPU that a function is exported for. The mesh in use may have a device of this process.
export_gpu: ContextVar[Gpu | None] = ContextVar("export_gpu", default=None)


def _shared_bytes(capability: int) -> int:
    return 1024 * (227 if 90 <= capability < 120 else _KIB.get(capability, 99))


def known_gpu(device_kind: Any) -> Gpu | None:
    """The facts of a GPU, or of a slice of one, by its name; None for what is no known name."""
    for capability, names in _SMS.items() if isinstance(device_kind, str) else ():
        for pattern, sms in names.items():
            if re.search(pattern, device_kind):
                if slices := re.search(_SLICES, device_kind):  # each has about so many SMs
                    sms = int(slices[1]) * round(sms / (4 if sms in (56, 188) else 8))
                return Gpu(device_kind, capability, sms, _shared_bytes(capability))
    return None


def is_one_of_family(gpu: Gpu) -> bool:
    """Whether other GPUs, with other numbers of SMs, have the same pattern among the names."""
    data_center = gpu.capability in (70, 80, 90, 100, 103)
    return not data_center or bool(re.search(_SLICES, gpu.name))


def _is_nvidia(device: Any) -> bool:
    """Whether a GPU is NVIDIA's, as far as its client tells; jax calls ROCm's platform "gpu" too.

    The client of a device at hand says "cuda 12090", that of one to compile for the device's name.
    """
    client = getattr(device, "client", None)
    if client is None:  # an abstract device
        return bool(device.platform != "rocm")
    return "cuda" in client.platform_version or device.device_kind in client.platform_version


def gpu_of(device: Any) -> Gpu:
    """The facts of a jax device; its name tells what it does not. UNKNOWN for another platform."""
    kind = device.device_kind
    if device.platform not in ("gpu", "cuda", "rocm"):
        return TPU if device.platform == "tpu" else UNKNOWN
    gpu = known_gpu(kind) or dataclasses.replace(UNKNOWN, name=kind)
    if not _is_nvidia(device):
        gpu = dataclasses.replace(gpu, capability=0, shared_bytes=_shared_bytes(0))
    capability, shared_bytes = gpu.capability, gpu.shared_bytes
    if capability and (reported := getattr(device, "compute_capability", None)):
        numbers = re.fullmatch(r"\d+\.\d+", reported)  # not of another vendor: "gfx942"
        capability = round(10 * float(reported)) if numbers else 0
        shared_bytes = _shared_bytes(capability)
    sms = getattr(device, "core_count", None) or getattr(device, "num_cores", None) or gpu.sms
    optin = getattr(device, "shared_memory_per_block_optin", None)
    return Gpu(kind, capability, sms, optin or shared_bytes)


def target_gpu(x: Any = None) -> Gpu:
    """The GPU that a call of an array is traced for; UNKNOWN: another device than a GPU or TPU.

    It is that of an export, of x, if it is on a device, of the mesh that is set, or of jax's
    default device.
    """
    if gpu := export_gpu.get():
        return gpu
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed:
        return gpu_of(next(iter(x.sharding.device_set)))
    config: Any = jax.config
    first = config.jax_default_device or jax.devices()[0]
    first = jax.devices(first)[0] if isinstance(first, str) else first
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    here = abstract is None or abstract.device_kind == first.device_kind
    return gpu_of(first if here else abstract)
