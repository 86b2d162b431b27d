"""Finds a race in Triton's pipelined loops for Hopper.

A copy overwrites an operand of a running product. Triton's pipeliner copies the tiles of later
iterations into a ring of buffers while wgmma, which is asynchronous, reads the tiles of earlier
ones. If a tile feeds both a product and plain arithmetic, the ring is one buffer too short. The
result is then wrong, differently in each run, and right when interpreted. The Triton GPU IR shows
the race, so no GPU is needed.
"""

import itertools
import re

_BUFFERS = re.compile(r"(%\w+) = ttg\.local_alloc\s*:.*memdesc<(\d+)x")
_VIEW = re.compile(r"(%\w+) = ttg\.memdesc_\w+ (%\w+)")
# A loop, up to the brace that is indented as it is; loops in it are found too.
_LOOP = re.compile(r"^(?=( *)[^\n]*scf\.for(.*?)^\1})", re.MULTILINE | re.DOTALL)
# Operands of a product, what a wait leaves running, and where a copy goes.
_STEP = re.compile(
    r"%\w+ = ttng\.warp_group_dot (%\w+), (%\w+),.*isAsync = true"
    r"|ttng\.warp_group_dot_wait .*pendings = (\d+)"
    r"|ttg\.async_copy_global_to_local %\w+, (%\w+)"
)


def overwritten_operands(ir, num_stages):
    """The buffers that a copy may overwrite while a product reads them, named as in the IR.

    A copy runs num_stages - 1 iterations ahead. It writes to the buffer of a product of d
    iterations before, which nothing has waited for, where num_stages - 1 + d is a multiple of the
    number of buffers.
    """
    number = {name: int(x) for name, x in _BUFFERS.findall(ir)}
    whole = {}  # view -> its buffers
    for view, of in _VIEW.findall(ir):
        whole[view] = whole.get(of, of)
    overwritten = set()
    for _, loop in _LOOP.findall(ir):
        # (iteration, buffers) of products that nothing has waited for, two operands each.
        running = []
        for iteration, step in itertools.product(range(2), _STEP.findall(loop)):
            *operands, pendings, target = step
            if pendings:
                running = running[len(running) - 2 * int(pendings) :] if int(pendings) else []
            elif target:
                buffers = whole.get(target, target)
                reads = [read for read, operand in running if operand == buffers]
                ahead = [num_stages - 1 + iteration - read for read in reads]
                if any(distance % number.get(buffers, 1) == 0 for distance in ahead):
                    overwritten.add(buffers)
            else:
                running += [(iteration, whole.get(x, x)) for x in operands]
    return sorted(overwritten)
