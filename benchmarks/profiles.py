"""What GPUs do in a call: milliseconds by kind of kernel, and of waiting; and their memory."""

import contextlib
import re
import tempfile
import threading
from pathlib import Path

import jax

# The first that has a part of a kernel's name. Elementwise are XLA's fusions without a product,
# reductions among them.
KINDS = {
    "collectives": re.compile("nccl|all_?reduce_?kernel|collective", re.IGNORECASE),
    "products": re.compile("nvjet|gemm|cublas|cutlass"),
    "copies": re.compile("memcpy|memset|copy|dynamic_slice|dynamic_update_slice", re.IGNORECASE),
    "elementwise": re.compile("fusion|wrapped_"),
}
MLSTM = "mlstm"  # all other kernels


def kind(name):
    return next((x for x, part in KINDS.items() if part.search(name)), MLSTM)


def milliseconds(call):
    """Of the kernels in one call, by kind; those that run side by side count twice.

    "exposed" is how long nothing but collectives runs, "idle" how long nothing runs between the
    first kernel and the last. Of several GPUs it is the mean.
    """
    times = dict.fromkeys((*KINDS, MLSTM, "exposed", "idle"), 0.0)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        paths = [str(path) for path in Path(folder).rglob("*.xplane.pb")]
        profiles = map(jax.profiler.ProfileData.from_file, paths)
        gpus = [kernels for profile in profiles for kernels in kernels_by_gpu(profile)]
    for kernels in gpus:
        of_gpu = [(kind(name), nanoseconds) for name, _, nanoseconds in kernels]
        of_gpu += waiting([(start, start + x, kind(name)) for name, start, x in kernels])
        for name, nanoseconds in of_gpu:
            times[name] += nanoseconds / 1e6 / len(gpus)
    return times


def kernels_by_gpu(profile):
    """The names, starts and durations in nanoseconds of what ran on each GPU."""
    for plane in profile.planes:
        if plane.name.startswith("/device:GPU"):
            streams = [line for line in plane.lines if line.name.startswith("Stream")]
            events = [event for line in streams for event in line.events]
            if events:
                yield [(event.name, event.start_ns, event.duration_ns) for event in events]


def waiting(intervals):
    """How long only collectives run, and how long nothing does; intervals: start, end and kind."""
    busy = covered((start, end) for start, end, _ in intervals)
    working = covered((start, end) for start, end, x in intervals if x != "collectives")
    starts, ends, _ = zip(*intervals, strict=True)
    return [("exposed", busy - working), ("idle", max(ends) - min(starts) - busy)]


def covered(intervals):
    """The length of the union of intervals."""
    length, last = 0, float("-inf")
    for start, end in sorted(intervals):
        length += max(0, end - max(start, last))
        last = max(last, end)
    return length


@contextlib.contextmanager
def peak_memory():
    """A list with the most bytes in use on the device meanwhile; empty where it tells none."""
    device, peak, done = jax.devices()[0], [], threading.Event()

    def watch():
        while (stats := device.memory_stats()) and not done.wait(0.002):
            peak[:] = [max([stats["bytes_in_use"], *peak])]

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
