"""The facts of a GPU that plans depend on: from the device at hand, or by name."""

import dataclasses
import re
from contextvars import ContextVar
from typing import Any

import jax
from jax.sharding import AbstractMesh


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The facts of a GPU.

    Attributes:
      name: jax's ``device_kind``.
      capability: the compute capability times ten.
      sms: the number of SMs.
      shared_bytes: the most shared memory of a CTA. An SM has 1 KiB more, and each CTA takes 1 KiB
        beside its own.
    """

    name: str
    capability: int
    sms: int
    shared_bytes: int

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


_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}  # by capability
# Compute capability times ten and SMs, by a part of the device's name.
_GPUS = (
    (r"\bA(100|800)\b", 80, 108),
    (r"\bA30\b", 80, 56),
    (r"\bA10G?\b", 86, 72),
    (r"\bA(2|16)\b", 86, 10),
    (r"\bA40\b|RTX A6000|RTX A5[05]00|RTX 3090", 86, 82),
    (r"RTX A[2-4]\d\d\d|RTX 30\d\d", 86, 46),
    (r"\bL4\b", 89, 58),
    (r"\bL(20|40S?)\b|RTX 6000 Ada", 89, 142),
    (r"RTX 4090", 89, 128),
    (r"RTX [2-5]\d\d\d Ada|RTX 40\d\d", 89, 46),
    (r"\bH20\b", 90, 78),
    (r"\bH100 PCIe", 90, 114),
    (r"\bG?H(100|200|800)\b", 90, 132),
    (r"\bG?B(100|200)\b", 100, 148),
    (r"\bG?B300\b", 103, 148),
    (r"RTX PRO 6000", 120, 188),
    (r"RTX 5090", 120, 170),
    (r"RTX (PRO |50)\d\d", 120, 70),
)
# The least that every supported GPU has, for calls whose GPU is not known when they are traced.
UNKNOWN = Gpu("unknown", 80, 108, 99 * 1024)
TPU = dataclasses.replace(UNKNOWN, name="TPU")  # plain jnp runs there, a few heads at a time
HOPPER = Gpu("NVIDIA H100", 90, 132, 227 * 1024)
# An empty mesh with the device that a function is exported for. Inside a shard_map the mesh in use
# has a device of this process.
export_mesh: ContextVar[AbstractMesh | None] = ContextVar("export_mesh", default=None)


def known_gpu(device_kind: str) -> Gpu | None:
    """The facts of a GPU by its name; None for an unknown name."""
    for pattern, capability, sms in () if "Quadro" in device_kind else _GPUS:
        if re.search(pattern, device_kind):
            return Gpu(device_kind, capability, sms, _KIB[capability] * 1024)
    return None


def gpu_of(device: Any) -> Gpu:
    """The facts of a jax device; its name tells what it does not. UNKNOWN for another platform."""
    kind: str = device.device_kind
    if device.platform not in ("gpu", "cuda"):
        return TPU if device.platform == "tpu" else UNKNOWN
    known = known_gpu(kind) or dataclasses.replace(UNKNOWN, name=kind)
    reported = str(getattr(device, "compute_capability", None) or known.capability / 10)
    if not re.fullmatch(r"\d+\.\d+", reported):
        return UNKNOWN  # of another vendor: "gfx942"
    capability, shared_bytes = round(10 * float(reported)), known.shared_bytes
    if capability != known.capability:
        shared_bytes = _KIB.get(capability, shared_bytes // 1024) * 1024
    return Gpu(
        kind,
        capability,
        getattr(device, "core_count", None) or known.sms,
        getattr(device, "shared_memory_per_block_optin", None) or shared_bytes,
    )


def target_gpu() -> Gpu:
    """The GPU of the computation: of the abstract mesh in use, otherwise this process's first."""
    abstract = (export_mesh.get() or jax.sharding.get_abstract_mesh()).abstract_device
    first = jax.devices()[0]
    if abstract is None or abstract.device_kind == first.device_kind:
        return gpu_of(first)
    known = known_gpu(abstract.device_kind)
    if known is None:
        return TPU if abstract.device_kind.startswith("TPU") else UNKNOWN
    return dataclasses.replace(known, sms=getattr(abstract, "num_cores", None) or known.sms)
