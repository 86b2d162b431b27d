"""Finds a race in Triton's pipelined loops for Hopper.

A copy overwrites an operand of a running product. Triton's pipeliner copies the tiles of later
iterations into a ring of buffers while wgmma, which is asynchronous, reads the tiles of earlier
ones. If a tile feeds both a product and plain arithmetic, the ring is one buffer too short. The
result is then wrong, differently in each run, and right when interpreted. The Triton GPU IR shows
the race, so no GPU is needed.
"""

import re

_BUFFERS = re.compile(r"(%\w+) = ttg\.local_alloc\s*:.*memdesc<(\d+)x")
_VIEW = re.compile(r"(%\w+) = ttg\.memdesc_\w+ (%\w+)")
_PRODUCT = re.compile(r"(%\w+) = ttng\.warp_group_dot (%\w+), (%\w+),.*isAsync = true")
_WAIT = re.compile(r"ttng\.warp_group_dot_wait .*pendings = (\d+)")
_COPY = re.compile(r"ttg\.async_copy_global_to_local %\w+, (%\w+)")


def overwritten_operands(ir: str, num_stages: int) -> list[str]:
    """The buffers that a copy may overwrite while a product reads them, named as in the IR.

    A copy runs num_stages - 1 iterations ahead. It writes to the buffer of a product of d
    iterations before, which nothing has waited for, where num_stages - 1 + d is a multiple of the
    number of buffers.
    """
    lines = ir.splitlines()
    number = {match[1]: int(match[2]) for match in map(_BUFFERS.search, lines) if match}
    whole: dict[str, str] = {}  # view -> its buffers
    for match in filter(None, map(_VIEW.search, lines)):
        whole[match[1]] = whole.get(match[2], match[2])
    overwritten = set()
    for start, line in enumerate(lines):
        if "scf.for" not in line:
            continue
        indent = line[: len(line) - len(line.lstrip())]
        end = next(n for n in range(start, len(lines)) if lines[n].startswith(indent + "}"))
        # (iteration, buffers) of products that nothing has waited for, two operands each.
        running: list[tuple[int, str]] = []
        for iteration in range(2):
            for inner in lines[start + 1 : end]:
                if wait := _WAIT.search(inner):
                    running = running[len(running) - 2 * int(wait[1]) :] if int(wait[1]) else []
                elif product := _PRODUCT.search(inner):
                    operands = (whole.get(product[n], product[n]) for n in (2, 3))
                    running += [(iteration, operand) for operand in operands]
                elif copy := _COPY.search(inner):
                    buffers = whole.get(copy[1], copy[1])
                    reads = [read for read, operand in running if operand == buffers]
                    ahead = [num_stages - 1 + iteration - read for read in reads]
                    if any(distance % number.get(buffers, 1) == 0 for distance in ahead):
                        overwritten.add(buffers)
    return sorted(overwritten)
