"""What runs with a jax that has no Triton backend of Pallas."""

import re
import subprocess
import sys

import pytest

SCRIPT = """
import sys
sys.modules["jax.experimental.pallas.triton"] = None  # importing it raises ImportError
import functools
import jax, jax.numpy as jnp
import mlstm_pallas
from mlstm_pallas import reference

keys = jax.random.split(jax.random.key(0), 5)
q, k, v = (jax.random.normal(key, (1, 2, 48, D)) for key, D in zip(keys, (16, 16, 32)))
i, f = (jax.random.normal(key, (1, 2, 48)) for key in keys[3:])

def gradients(function):
    return jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x))), argnums=(0, 1, 2, 3, 4)))(q, k, v, i, f)

{body}
"""
PLAIN = """
expected = gradients(reference.chunkwise)
for backend in (None, "xla"):
    found = gradients(functools.partial(mlstm_pallas.mlstm_chunkwise, backend=backend))
    for x, y in zip(found, expected, strict=True):
        assert jnp.linalg.norm(x - y) <= 1e-5 * jnp.linalg.norm(y)
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT.replace("{body}", body)], capture_output=True, text=True, timeout=300)


def test_the_plain_form_runs_on_the_backends_none_and_xla():
    result = run(PLAIN)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("backend", ["triton", pytest.param("interpret", marks=pytest.mark.slow)])
def test_a_triton_kernel_says_what_is_missing(backend):
    result = run(f"mlstm_pallas.mlstm_chunkwise(q, k, v, i, f, backend={backend!r})")
    message = "is a Triton kernel, and jax [0-9.]+ has no Triton backend: expected jax < 0.13, or backend 'xla'"
    assert result.returncode == 1
    assert re.search(message, result.stderr), result.stderr
