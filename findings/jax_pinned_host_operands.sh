#!/usr/bin/env bash
# jax 0.10.2 and 0.12.0.1: an array in pinned_host memory runs alone and fails beside another one.
#
# Arrays are parked in host memory to free an accelerator. On one of them, x * 2 and x.astype run
# without a word; x + y with y in device memory is refused, in jit too, where one would expect the
# compiler to move it, and so is a NumPy array as the other operand. The error speaks of
# memory_space and of a primitive, not of the argument.
#
# Seen (CPU, which has the memory kinds of a GPU):
#     x * 2, x.astype: run; x + y, jit of x + y, x + numpy:
#     ValueError: memory_space of all inputs passed to `add` must be the same.
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
from jax.sharding import SingleDeviceSharding

host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
x, y = jax.device_put(jnp.ones(4), host), jnp.ones(4)


def outcome(call):
    try:
        call()
    except ValueError as error:
        return str(error).split(".")[0]
    return "runs"


seen = {
    "x * 2": outcome(lambda: x * 2),
    "x.astype": outcome(lambda: x.astype(jnp.bfloat16)),
    "x + y": outcome(lambda: x + y),
    "jit of x + y": outcome(lambda: jax.jit(jnp.add)(x, y)),
    "x + numpy": outcome(lambda: x + np.ones(4, np.float32)),
}
print(seen)
refused = ["memory_space" in text for text in seen.values()]
if refused != [False, False, True, True, True]:
    raise SystemExit("the behaviour has changed")
EOF
