"""What a GPU does in a call: milliseconds by kind of kernel, from a profile."""

import re
import tempfile
from pathlib import Path

import jax

# The first that has a part of a kernel's name. Elementwise are XLA's fusions without a product,
# reductions among them.
KINDS = {
    "products": re.compile("nvjet|gemm|cublas|cutlass"),
    "copies": re.compile("memcpy|memset|copy|dynamic_slice|dynamic_update_slice", re.IGNORECASE),
    "elementwise": re.compile("fusion|wrapped_"),
}
MLSTM = "mlstm"  # all other kernels


def kind(name):
    return next((x for x, part in KINDS.items() if part.search(name)), MLSTM)


def milliseconds(call):
    """Of the kernels in one call, by kind; those that run side by side count twice."""
    times = dict.fromkeys((*KINDS, MLSTM), 0.0)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        for path in Path(folder).rglob("*.xplane.pb"):
            for name, nanoseconds in kernels(jax.profiler.ProfileData.from_file(str(path))):
                times[kind(name)] += nanoseconds / 1e6
    return times


def kernels(profile):
    """The names and nanoseconds of what ran on GPUs."""
    for plane in profile.planes:
        for line in plane.lines:
            if plane.name.startswith("/device:GPU") and line.name.startswith("Stream"):
                yield from ((event.name, event.duration_ns) for event in line.events)
