#!/usr/bin/env bash
# jax 0.10.2 and 0.12.0.1 on a CPU: jnp.max of 4,096 and more floats drops a NaN, and may be -inf.
#
# jnp.max and jnp.min are NaN where an element is, as in NumPy, so a program compares the largest
# error with a bound to see that a result is right. From 4,096 elements of the operand on, along
# whichever axes, XLA's maximum is one of the other elements, or -inf, which is below every bound. A
# test that works with a small array then passes with a NaN in a large one.
# np.max of a jax array is jnp.max. sum, argmax, isfinite and elementwise maximum keep the NaN.
# XLA_FLAGS=--xla_cpu_enable_fast_min_max=false changes nothing.
#
# Seen (CPU), the maximum of ones of which the last is NaN, in float32 and float64:
#     4095: nan, 4096: -inf, the last of (64, 64) along axis 1: -inf; minimum: inf
#     with the NaN first: 1.0; sum: nan; argmax: 4095; np.max of a NumPy array: nan
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0
cd "$folder"
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I - <<'EOF'
import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)
inf, nan = np.inf, np.nan


def ones(size, dtype, at=-1):
    x = np.ones(size, dtype)
    x[at] = nan
    return jnp.asarray(x)


for dtype in ("float32", "float64"):
    small, large, first = ones(4095, dtype), ones(4096, dtype), ones(4096, dtype, 0)
    rows = large.reshape(64, 64)
    lost = jnp.max(large), jnp.max(rows, axis=1)[-1], np.max(large), jnp.min(large), jnp.max(first)
    kept = jnp.max(small), jnp.sum(large), np.max(np.asarray(large)), jnp.maximum(large, 1)[-1]
    lost, kept, index = [*map(float, lost)], [*map(float, kept)], int(jnp.argmax(large))
    print(dtype, "lost:", lost, "kept:", kept, "argmax:", index)
    if lost != [-inf, -inf, -inf, inf, 1.0] or not np.isnan(kept).all() or index != 4095:
        raise SystemExit("the behaviour has changed")
EOF
