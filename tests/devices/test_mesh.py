"""What runs on which kinds of mesh axes, with which numbers (tests/mesh_table.py), and that the
kernels of every public function are lowered there."""

import mesh_table
import pytest
from oracle import slow
from relations_devices import CALLS, OTHERS, lowered_on_mesh, on_mesh

pytestmark = pytest.mark.filterwarnings("ignore:mlstm_recurrent_sequence is deprecated")
CELLS = [(axes, call) for call in mesh_table.COLUMNS for axes in mesh_table.AXES]


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "call"), CELLS)
def test_the_table_of_kinds_of_axes_is_what_happens(axes, call):
    assert mesh_table.cells_of_page()[axes, call] == mesh_table.cell(axes, call)


def test_the_table_of_kinds_of_axes_has_every_call():
    assert [*mesh_table.cells_of_page()] == [
        (axes, call) for axes in mesh_table.AXES for call in (*mesh_table.COLUMNS, mesh_table.TPU)
    ]


AUTOMATIC, EXPLICIT, _, INSIDE, SOME, *_ = mesh_table.AXES
OTHER_CALLS = [("slots", EXPLICIT), *(slow(x, AUTOMATIC) for x in ("slots", "joined", "reverse"))]
OTHER_CALLS += [slow("joined", INSIDE), slow("reverse", SOME)]


@pytest.mark.parametrize(("name", "axes"), OTHER_CALLS)
def test_calls_that_are_not_in_the_table(name, axes):
    on_mesh(name, axes)


# Inside of a shard_map every other one is exported.
WITHOUT = "shards", "forward", "gradient outside", "reference", "recurrence"
NAMES = [x for x in (*CALLS, *OTHERS) if x not in WITHOUT]
LOWERED = [(name, AUTOMATIC, "cpu") for name in NAMES] + [(x, EXPLICIT, "cuda") for x in NAMES]
LOWERED = [x for x in LOWERED if x[0] != "sequence parallel"]
LOWERED += [(name, INSIDE, ("cpu", "cuda")[at % 2]) for at, name in enumerate(NAMES)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axes", "platform"), LOWERED)
def test_kernels_are_lowered(name, axes, platform):
    lowered_on_mesh(name, axes, platform)
