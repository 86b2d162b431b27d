"""The way of a call to its kernels: the package's frames on the stack when Pallas is called."""

import functools
import traceback

import jax
import pytest
from jax.experimental import pallas as pl
from oracle import call_shapes, for_device, results_of

import mlstm_pallas

PACKAGE = mlstm_pallas.__path__[0]
MOST_FRAMES, MOST_FILES = 12, 8  # those of chunk_gates


@pytest.mark.parametrize(
    "config",
    [dict(fused=True), dict(fused=False), dict(fused=True, num_splits=2)],
    ids=["fused", "materialised", "splits"],
)
def test_a_launch_is_at_most_twelve_frames_in_eight_files_from_the_call(config, monkeypatch):
    """On the default backend; a kernel is traced more than once."""
    pallas_call, seen = pl.pallas_call, {}

    def spy(kernel, *args, **kwargs):
        frames = [x for x in traceback.extract_stack() if x.filename.startswith(PACKAGE)]
        frames = [f"{x.filename.removeprefix(PACKAGE)}:{x.name}" for x in frames]
        seen[kwargs["name"]] = max(seen.get(kwargs["name"], []), frames, key=len)
        return pallas_call(kernel, *args, **kwargs)

    monkeypatch.setattr(pl, "pallas_call", spy)
    config = mlstm_pallas.KernelConfig(**config)
    run = functools.partial(mlstm_pallas.mlstm_chunkwise, layout="BTNH", config=config)
    with for_device("NVIDIA H200"):
        jax.make_jaxpr(results_of(run))(*call_shapes(1, 2, 128, 64, 64, layout="BTNH"))
    assert {"chunk_gates", "recurrent_bw_dC", "parallel_bw_dQKV"} < seen.keys()
    for frames in seen.values():
        assert len(frames) <= MOST_FRAMES, frames
        assert len({x.split(":")[0] for x in frames}) <= MOST_FILES, frames
