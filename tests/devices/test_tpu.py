"""Plain jnp as it is planned for TPUs: a few heads at a time, with its values on the CPU, and
compiled for several TPUs by libtpu."""

import importlib.util
import os
import sys

import jax
import mesh_table
import pytest
from engine import program
from oracle import for_device, random_inputs, run_python, slow
from relations import clean, value
from relations_devices import on_mesh
from table import CALLS
from test_table import shown

from mlstm_pallas import mlstm_chunkwise
from mlstm_pallas.problem.gpu import TPU, export_gpu
from mlstm_pallas.sharding import work

AUTOMATIC = "x and y automatic"
# On other axes what is compiled differs less.
COMPILED = [*mesh_table.AXES][::2]


@pytest.fixture
def tpu(monkeypatch):
    """One or two heads at a time."""
    monkeypatch.setattr(work, "VMEM_STATES", 2**11)
    for cached in (program, clean):
        cached.cache_clear()
    with for_device("TPU v6 lite"):
        yield
    for cached in (program, clean):
        cached.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("call", [CALLS[n] for n in (2, 12, 28)], ids=shown)
def test_against_float64(tpu, call):
    value(call, "xla", ("model",))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gradient inside", slow("`segment_lengths`"), slow("ring step")])
def test_calls_on_automatic_axes_have_their_values(name):
    """On CPU devices. XLA partitions the axes that libtpu has no custom_partitioning for."""
    token = export_gpu.set(TPU)
    try:
        on_mesh(name, AUTOMATIC)
    finally:
        export_gpu.reset(token)


COMPILE = """
import sys
import mesh_table
for axes in sys.argv[1:]:
    print(mesh_table.tpu_cell(axes))
print(mesh_table.tpu_cell(sys.argv[1], *mesh_table.COLUMNS[4:6], "ring step", topology="v6e:2x2"))
"""


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_calls_compile_for_several_tpus_and_exchange_nothing():
    settings = dict(ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_SKIP_MDS_QUERY="1")
    settings |= dict(PYTHONPATH=os.pathsep.join(sys.path), JAX_PLATFORMS="cpu")
    *said, other = run_python("-c", COMPILE, *COMPILED, **settings).splitlines()[-6:]
    assert said == [mesh_table.cells_of_page()[axes, mesh_table.TPU] for axes in COMPILED]
    assert other == mesh_table.COMPILES


@pytest.mark.slow
@pytest.mark.parametrize("vmem", [2**15, 2**15 - 1])
def test_a_few_heads_at_a_time(tpu, monkeypatch, vmem):
    """14 heads, 32 KiB of states each, which fit or do not: one at a time, under vmap too; on a CPU
    all at once."""
    monkeypatch.setattr(work, "VMEM_STATES", vmem)
    jax.clear_caches()  # it is in no key
    x = random_inputs(1, 2, 7, 128, 32, 64, states=False).values()

    def call(*x):
        return mlstm_chunkwise(*x, chunk_size=32, backend="xla")

    mapped = jax.vmap(lambda *x: call(*(y[None] for y in x))[0])
    for function in (call, mapped):
        assert "length=14" in str(jax.make_jaxpr(function)(*x))
    with for_device("cpu"):
        assert "length=14" not in str(jax.make_jaxpr(call)(*x))
