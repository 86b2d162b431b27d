"""Facts of GPUs, by their names."""

import re

# Compute capability times ten by device_kind, and the KiB of shared memory that a block may have
# there (the opt-in maximum). 86 stands for 89 and 120 too, which have as much.
_CAPABILITY = (
    (r"\b(A100|A800|A30)\b", 80),
    (r"\b(A2|A10G?|A16|A40|L4|L20|L40S?)\b|^NVIDIA .*RTX (PRO )?[A3-9]", 86),
    (r"\bG?H(100|200|800|20)\b", 90),
    (r"\bG?B(100|200|300)\b", 100),
)
_SHARED_KIB = {80: 163, 86: 99, 90: 227, 100: 227}


def compute_capability(device_kind: str) -> int | None:
    """The compute capability times ten; None for an unknown device."""
    return next(
        (number for pattern, number in _CAPABILITY if re.search(pattern, device_kind)), None
    )


def available_shared_bytes(device_kind: str) -> int | None:
    """Shared memory that a block may have; None for an unknown device."""
    capability = compute_capability(device_kind)
    return None if capability is None else _SHARED_KIB[capability] * 1024
