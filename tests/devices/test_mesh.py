"""What runs on which kinds of mesh axes, with which numbers, and that kernels are lowered there.

tests/mesh_table.py runs all of the table of docs/devices.md."""

import mesh_table
import pytest
from oracle import slow
from relations_devices import lowered_on_mesh, on_mesh

AUTOMATIC, EXPLICIT, MIXED, INSIDE, SOME, SOME_EXPLICIT, OUTSIDE, NESTED, ALL = mesh_table.AXES
# Each kind of axes, and each call, comes with what differs in how it is partitioned.
CELLS = {
    AUTOMATIC: ("gradient inside", "`segment_lengths`"),
    EXPLICIT: ("gradient outside", "`segment_ids`"),
    MIXED: ("forward", "states of steps", "sequence parallel"),
    INSIDE: ("step", "sequence parallel"),
    SOME: ("gradient inside", "ring step"),
    SOME_EXPLICIT: ("`segment_ids`", "step"),
    OUTSIDE: ("gradient outside", "states of steps"),
    NESTED: ("forward", "sequence parallel"),
    ALL: ("gradient outside", "ring step"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "call"), [(x, y) for x, calls in CELLS.items() for y in calls])
def test_the_table_of_kinds_of_axes_is_what_happens(axes, call):
    assert mesh_table.cells_of_page()[axes, call] == mesh_table.cell(axes, call)


def test_the_table_of_kinds_of_axes_has_every_call():
    assert [*mesh_table.cells_of_page()] == [
        (axes, call) for axes in mesh_table.AXES for call in (*mesh_table.COLUMNS, mesh_table.TPU)
    ]
    assert {y for calls in CELLS.values() for y in calls} == {*mesh_table.COLUMNS}


@pytest.mark.slow
@pytest.mark.parametrize("axes", [EXPLICIT, slow(AUTOMATIC)])
def test_slots_are_not_in_the_table(axes):
    on_mesh("slots", axes)


# On automatic axes calls whose arrays have other axes than those of gradients.
LOWERED = {
    (AUTOMATIC, "cpu"): ("`segment_lengths`", "ring step", "slots"),
    (EXPLICIT, "cuda"): ("states of steps", "joined", "ring step", "slots", "generator"),
    (INSIDE, "cuda"): ("`segment_ids`", "sequence parallel"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes", "platform"), [(y, *x) for x, names in LOWERED.items() for y in names]
)
def test_kernels_are_lowered(name, axes, platform):
    lowered_on_mesh(name, axes, platform)
