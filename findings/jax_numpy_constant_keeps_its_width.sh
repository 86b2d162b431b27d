#!/usr/bin/env bash
# jax 0.10.2, 0.11.2 and 0.12.0.1: a NumPy array that one program has closed over fails in others.
#
# jax.enable_x64 can be switched inside one process, and a NumPy array is float64 with and without
# it. jax converts a closed-over array once and keeps the result while a program that uses it lives.
# A second program that closes over the same array under the other setting cannot be lowered; its
# error, of MLIR's verifier, names no array. A copy of the array, or a jax.Array, works.
#
# Seen (CPU, in either order of the settings):
#     ValueError: Cannot lower jaxpr with verifier errors: 'stablehlo.multiply' op requires
#         compatible types for all operands and results
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


def outcome(first, copied):
    table = np.linspace(0.0, 1.0, 5)
    with jax.enable_x64(first):
        program = jax.jit(lambda x: x + table)  # it stays alive
        program(jnp.asarray(2.0))
    other = table.copy() if copied else table
    with jax.enable_x64(not first):
        try:
            jax.jit(lambda x: x * other)(jnp.asarray(2.0))
        except ValueError as error:
            return str(error).split("\n")[0]
    return "runs"


seen = {(first, copied): outcome(first, copied) for first in (False, True) for copied in (0, 1)}
for (first, copied), text in seen.items():
    print(f"first program with x64 {first}, the second one has a copy {bool(copied)}: {text}")
if any(("verifier" in text) == bool(copied) for (_, copied), text in seen.items()):
    raise SystemExit("the behaviour has changed")
EOF
