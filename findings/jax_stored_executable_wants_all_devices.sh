#!/usr/bin/env bash
# jax 0.10.2 and 0.12.0.1 on a CPU: a stored executable of one device is loaded for all devices.
#
# jax.experimental.serialize_executable.serialize keeps a program that was compiled for one device.
# In a process with several devices, as on a host with eight GPUs, deserialize_and_load takes it for
# a program of all of them: it loads without a word, and the first call, with the arguments that it
# was compiled for, ends in an error of the runtime about the number of shards, which names neither
# the file nor the argument. With execution_devices=jax.devices()[:1] it runs.
#
# Seen (eight CPU devices):
#     before: 4.0; loaded with execution_devices: 4.0
#     loaded: JaxRuntimeError: INVALID_ARGUMENT: Expected args to
#     execute_sharded_on_local_devices to have 8 shards, got: [1]
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

jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp
from jax.experimental import serialize_executable

x = jax.device_put(jnp.float32(2.0), jax.devices()[0])
compiled = jax.jit(lambda x: x * x).lower(x).compile()
stored = serialize_executable.serialize(compiled)
loaded = serialize_executable.deserialize_and_load(*stored)
one = serialize_executable.deserialize_and_load(*stored, execution_devices=jax.devices()[:1])
print(f"before: {float(compiled(x))}; loaded with execution_devices: {float(one(x))}")
try:
    loaded(x)
except Exception as error:
    message = " ".join(str(error).split())
    print(f"loaded: {type(error).__name__}: {message}")
else:
    message = ""
if float(one(x)) != 4.0 or "to have 8 shards, got: [1]" not in message:
    raise SystemExit("the behaviour has changed")
EOF
