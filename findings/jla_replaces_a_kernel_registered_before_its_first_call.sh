#!/usr/bin/env bash
# jax-linear-attention 0.1.0: a kernel that is registered before the first call is replaced.
#
# `register("mosaic_gpu", kind, function, auto=True)` is how a kernel joins impl="auto". The library
# registers its own kernels when the first call or `available` looks for one, in place of what is
# there already. A program that registers its kernel at its start, as one does, therefore never runs
# it: on a CPU "auto" falls through to the chunked implementation, on a Hopper GPU the library's own
# kernel runs, and neither says so. Registered after `available("simple_gla")`, the kernel runs.
#
# Seen (jax 0.11.2, CPU), whether "auto" runs the kernel:
#     registered before the first call: False; after it: True
#
# Needs Python 3.12 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 12) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.11.2 jaxlib==0.11.2 numpy==2.5.5 ml_dtypes==0.6.0 equinox==0.13.8 optax==0.2.8 \
    safetensors==0.8.0 jax-linear-attention==0.1.0
cd "$folder"
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I - <<'EOF'
import jax.numpy as jnp
from jla.ops import chunked, linear_attention, register

calls = []


def kernel(*arrays, **options):
    calls.append(options)
    return chunked.simple_gla(*arrays, **options)


q, g = jnp.ones((1, 64, 1, 16)), -jnp.ones((1, 64, 1))
seen = []
for _ in range(2):
    calls.clear()
    register("mosaic_gpu", "simple_gla", kernel, auto=True)
    linear_attention("simple_gla", q, q, q, g=g)
    seen.append(bool(calls))
print("registered before the first call:", seen[0], "after it:", seen[1])
if seen != [False, True]:
    raise SystemExit("the behaviour has changed")
EOF
