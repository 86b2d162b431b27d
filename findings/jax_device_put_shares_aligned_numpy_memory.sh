#!/usr/bin/env bash
# jax 0.10.2 and 0.12.0.1 on a CPU: jax.device_put shares a NumPy array's memory if it is aligned.
#
# A loader that fills one buffer again and again and hands it to device_put sees batches change
# after the fact: the array, which cannot be changed through jax, follows the buffer. Whether it
# does depends on the buffer's address: at a multiple of 64 bytes it is shared, 4 bytes further it
# is copied, so a program is right or wrong by chance of the allocator. jnp.asarray, whose namesake
# in NumPy shares memory, copies both.
#
# Seen (CPU), the value after the buffer was overwritten by 1:
#     device_put: 1.0 aligned, 0.0 otherwise; jnp.asarray: 0.0 and 0.0
# Upstream: jax-ml/jax#37830 (open in November 2026; it puts the difference down to the size).
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


def value_after_overwriting(put, offset):
    memory = np.zeros(4096 + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    buffer = memory[start : start + 4096].view(np.float32)
    array = jax.block_until_ready(put(buffer))
    buffer[:] = 1
    return float(array[0])


seen = {
    put.__name__: [value_after_overwriting(put, offset) for offset in (0, 4)]
    for put in (jax.device_put, jnp.asarray)
}
print(seen)
if seen != dict(device_put=[1.0, 0.0], asarray=[0.0, 0.0]):
    raise SystemExit("the behaviour has changed")
EOF
