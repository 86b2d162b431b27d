"""Every call of the table, in each lowering that a CPU runs: all relations that it has."""

import jax
import numpy as np
import pytest
from relations import RELATIONS, has
from table import CALLS, missing, name_of

BACKENDS = "xla", "interpret"
# In the quick selection: each function, kind of steps and relation, in a second or two.
QUICK = {
    "xla": (0, 12, 20, 28, 46, 54, 67, 79, 91),
    "interpret": (1, 31, 64, 68, 84, 90),
}


def shown(call):
    """The function, S, the heads and the kind of steps, and the number of a row."""
    place = f"{CALLS.index(call)}-" if call in CALLS else ""
    heads = "/".join(map(str, call.shape[3:]))
    name = call.function.removeprefix("mlstm_")
    return f"{place}{name}-{call.shape[2]}-{heads}-{name_of(call.steps)}"


def runs(call, backend):
    """Whether a call is small enough for the interpreter."""
    return backend != "interpret" or np.prod(call.shape[:3]) <= 1000


def check(call, backend):
    """All relations of a call; a failure has a line that makes the call again."""
    for relation in RELATIONS:
        if has(call, relation, backend):
            try:
                relation(call, backend)
            except Exception as failure:
                failure.add_note(f"{relation.__name__} of {call!r} on {backend}")
                raise


ROWS = [
    pytest.param(call, backend, id=f"{shown(call)}-{backend}",
                 marks=[pytest.mark.slow] * (number not in QUICK[backend]))
    for number, call in enumerate(CALLS)
    for backend in BACKENDS
    if runs(call, backend)
]  # fmt: skip


@pytest.mark.parametrize(("call", "backend"), ROWS)
def test_call(call, backend):
    check(call, backend)


def test_the_table_has_every_pair():
    assert len(set(map(repr, CALLS))) == len(CALLS)
    assert all(eval(repr(x), vars(__import__("engine"))) == x for x in CALLS)
    assert not missing()
    assert jax.device_count() >= 4  # of sequences in shards
