"""A second import of the package in a process, as notebooks and reloaders make it."""

import contextlib
import functools
import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import refused

import mlstm_pallas

SHAPES = (2, 4, 16, 16), (2, 4, 16), (2, 4)


@contextlib.contextmanager
def imported_again():
    """A package whose modules are all new, beside the old one."""
    before = {name: x for name, x in sys.modules.items() if name.startswith("mlstm_pallas")}
    try:
        for name in before:
            del sys.modules[name]
        yield importlib.import_module("mlstm_pallas")
    finally:
        for name in [x for x in sys.modules if x.startswith("mlstm_pallas")]:
            del sys.modules[name]
        sys.modules.update(before)


def token():
    q, gate = jnp.ones((2, 4, 16)), jnp.zeros((2, 4))
    return q, q, q, gate, gate


def check(package, before):
    """Traces a call and exports a step of a ring, which it runs from earlier states."""
    q, gate = jnp.ones((1, 32, 2, 16), "bfloat16"), jnp.zeros((1, 32, 2))
    ids = dict(layout="BTNH", segment_ids=np.zeros((1, 32), int))
    run = functools.partial(package.mlstm_chunkwise, **ids)
    assert jax.eval_shape(run, q, q, q, gate, gate).shape == q.shape
    states = package.mlstm_ring_states(*map(jnp.zeros, SHAPES), dtype="float32")
    assert type(states) is type(before) is package.RingStates
    exported = package.export.export(package.mlstm_ring_step, *token(), states, platform="cpu")
    loaded = jax.export.deserialize(exported.serialize())
    return jax.jit(lambda *x: loaded.call(*x))(*token(), before)


def test_a_config_of_another_import_is_refused_with_the_cause():
    q, *_, gate = (x[:, :, None] for x in token())
    message = (
        "config is KernelConfig(), expected a KernelConfig or None of the same import of "
        "mlstm_pallas, which has been imported again"
    )
    with imported_again() as package:
        for call, other in (package, mlstm_pallas), (mlstm_pallas, package):
            run = functools.partial(call.mlstm_chunkwise, config=other.KernelConfig())
            refused(TypeError, message, run, q, q, q, gate, gate)


@pytest.mark.slow
def test_a_package_imported_again_goes_on_with_states_of_before():
    old = mlstm_pallas.mlstm_ring_states(*map(jnp.zeros, SHAPES), dtype="float32")
    expected = jax.tree.leaves(mlstm_pallas.mlstm_ring_step(*token(), old))
    with imported_again() as package:
        assert package is not mlstm_pallas
        results = [check(package, old), check(mlstm_pallas, old)]
        for name in ("stages.ring_step", "ring"):
            importlib.reload(sys.modules[f"mlstm_pallas.{name}"])
        results.append(check(package, old))
    for result in results:
        for x, y in zip(jax.tree.leaves(result), expected, strict=True):
            assert jnp.allclose(x, y, rtol=1e-5)
