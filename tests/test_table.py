"""Every call of the table, in each lowering that a CPU runs: all relations that it has."""

import jax
import numpy as np
import pytest
from engine import Documents
from oracle import slow
from relations import RELATIONS, has
from table import CALLS, missing, name_of

BACKENDS = "xla", "interpret"
# The quick selection has each function, kind of steps and relation, in a second or two.
QUICK = {
    *("0-chunkwise-1-16/16---float32-xla", "12-chunkwise-65-16/16-Lengths-bfloat16-xla"),
    "20-chunkwise-64-37/50-Ids+Lengths-float32-xla",
    "28-chunkwise-64-16/16-Documents-float32-xla",
    "47-chunkwise_states-64-16/16-Lengths-float32-xla",
    "1-chunkwise-16-37/50---float32-interpret",
    "66-recurrent_step-6-16/16---float32-interpret",
    "70-recurrent_step-4-16/16-Slots-float32-interpret",
    "75-ring_step-24-16/16-Drafts-float32-interpret",
}


def shown(call):
    """The number of a row, the function, S, the heads, the kind of steps and the dtype."""
    place = f"{CALLS.index(call)}-" if call in CALLS else ""
    heads = "/".join(map(str, call.shape[3:]))
    name = call.function.removeprefix("mlstm_")
    return f"{place}{name}-{call.shape[2]}-{heads}-{name_of(call.steps)}-{call.dtype}"


def runs(call, backend):
    """Whether a call is small enough for the interpreter; shards of sequences have its kernels, and
    some of these rows are enough."""
    several = call.get(Documents)
    heads = np.prod(call.shape[3:])
    return backend != "interpret" or (
        np.prod(call.shape[:3]) <= 1000
        and heads <= 10_000
        and not (several and (heads > 256 or several.count > 8))
        and call.options.get("shards", 4) == 4
    )


def check(call, backend):
    """All relations of a call; a failure has a line that makes the call again."""
    for relation in RELATIONS:
        if has(call, relation, backend):
            try:
                relation(call, backend)
            except Exception as failure:
                failure.add_note(f"{relation.__name__} of {call!r} on {backend}")
                raise


ROWS = {
    f"{shown(call)}-{backend}": (call, backend)
    for call in CALLS
    for backend in BACKENDS
    if runs(call, backend)
}


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in ROWS])
def test_call(name):
    check(*ROWS[name])


def test_the_table_has_every_pair():
    assert len(set(map(repr, CALLS))) == len(CALLS)
    assert all(eval(repr(x), vars(__import__("engine"))) == x for x in CALLS)
    assert not missing()
    assert ROWS.keys() >= QUICK
    assert jax.device_count() >= 4  # of sequences in shards
