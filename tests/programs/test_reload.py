"""A second import of the package in a process, as notebooks and reloaders make it.

As a script it reloads every module, one at a time, each in a package that is imported anew.
"""

import functools
import importlib
import os
import pkgutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import refused, run_python

import mlstm_pallas
from mlstm_pallas.planning.backend import jax_has_mosaic_gpu

NAME = "mlstm_pallas"
SHAPES = (2, 4, 16, 16), (2, 4, 16), (2, 4)


def imported_again():
    """A package whose modules are all new."""
    for name in modules():
        del sys.modules[name]
    return importlib.import_module(NAME)


def modules():
    return {name: x for name, x in sys.modules.items() if name.partition(".")[0] == NAME}


def token():
    q, gate = jnp.ones((2, 4, 16)), jnp.zeros((2, 4))
    return q, q, q, gate, gate


def check(package, before):
    """Traces a call and exports a step of a ring; returns what runs it from earlier states."""
    q, gate = jnp.ones((1, 32, 2, 16), "bfloat16"), jnp.zeros((1, 32, 2))
    shape = jax.eval_shape(
        lambda q, gate: package.mlstm_chunkwise(
            q, q, q, gate, gate, layout="BTNH", segment_ids=np.zeros((1, 32), int)
        ),
        *(q, gate),
    )
    assert shape.shape == q.shape
    states = package.mlstm_ring_states(*map(jnp.zeros, SHAPES), dtype="float32")
    assert type(states) is type(before) is package.RingStates
    exported = package.export.export(
        lambda *x: package.mlstm_ring_step(*x), *token(), states, platform="cpu"
    )
    loaded = jax.export.deserialize(exported.serialize())
    return lambda: jax.jit(lambda *x: loaded.call(*x))(*token(), before)


def test_a_config_of_another_import_is_refused_with_the_cause():
    before, old = modules(), mlstm_pallas.KernelConfig()
    q, *_, gate = (x[:, :, None] for x in token())
    message = (
        "config is KernelConfig(), expected a KernelConfig or None of the same import of "
        "mlstm_pallas, which has been imported again"
    )
    try:
        package = imported_again()
        for call, config in (package, old), (mlstm_pallas, package.KernelConfig()):
            run = functools.partial(call.mlstm_chunkwise, layout="BNTH", config=config)
            refused(TypeError, message, run, q, q, q, gate, gate)
    finally:
        for name in modules():
            del sys.modules[name]
        sys.modules.update(before)


@pytest.mark.slow
def test_a_package_imported_again_goes_on_with_states_of_before():
    before, old = (
        modules(),
        mlstm_pallas.mlstm_ring_states(*map(jnp.zeros, SHAPES), dtype="float32"),
    )
    expected = jax.tree.leaves(mlstm_pallas.mlstm_ring_step(*token(), old))
    try:
        package = imported_again()
        assert package is not mlstm_pallas
        results = [check(package, old)(), check(mlstm_pallas, old)()]
        importlib.reload(sys.modules["mlstm_pallas.stages.ring_step"])
        importlib.reload(sys.modules["mlstm_pallas.ring"])
        results.append(check(package, old)())
    finally:
        for name in modules():
            del sys.modules[name]
        sys.modules.update(before)
    for result in results:
        for x, y in zip(jax.tree.leaves(result), expected, strict=True):
            assert jnp.allclose(x, y, rtol=1e-5)


@pytest.mark.slow
def test_every_module_is_reloaded():
    output = run_python(__file__, PYTHONPATH=os.pathsep.join(sys.path))
    assert output.splitlines()[-1] == "all modules were reloaded"


if __name__ == "__main__":
    names = [x.name for x in pkgutil.walk_packages(mlstm_pallas.__path__, f"{NAME}.")]
    if not jax_has_mosaic_gpu():
        names = [x for x in names if ".mosaic_gpu" not in x]
    old = mlstm_pallas.mlstm_ring_states(*map(jnp.zeros, SHAPES), dtype="float32")
    for name in [NAME, *names]:
        package = imported_again()
        importlib.reload(importlib.import_module(name))
        print(name, flush=True)
        check(package, old)
    print("all modules were reloaded")
