"""What is known of GPUs by their names."""

import re

# Compute capability times ten by what device_kind says, and the KiB of shared memory that one block may have there (opt-in maximum).
_CAPABILITY = (
    (r"\b(A100|A800|A30)\b", 80),
    (
        r"\b(A2|A10G?|A16|A40|L4|L20|L40S?)\b|^NVIDIA .*RTX (PRO )?[A3-9]",
        86,
    ),  # and 89, 120, which have as much
    (r"\bG?H(100|200|800|20)\b", 90),
    (r"\bG?B(100|200|300)\b", 100),
)
_SHARED_KIB = {80: 163, 86: 99, 90: 227, 100: 227}


def compute_capability(device_kind: str) -> int | None:
    """Times ten; None for a device that is not known."""
    return next(
        (number for pattern, number in _CAPABILITY if re.search(pattern, device_kind)), None
    )


def available_shared_bytes(device_kind: str) -> int | None:
    """Shared memory that one block may have; None for a device that is not known."""
    capability = compute_capability(device_kind)
    return None if capability is None else _SHARED_KIB[capability] * 1024
