#!/usr/bin/env bash
# jax 0.10.2 and 0.12.0.1: exporting a custom_partitioning on two devices blames host callbacks.
#
# A program with a custom_partitioning and no callback at all is exported on one device. On two
# devices with automatic axes, jax.export refuses it, because jax counts the partitioning among the
# callbacks. A user who looks for the callback of the message finds none.
#
# Seen (two CPU devices):
#     one device: exported
#     two: NotImplementedError: serialization of host_callbacks is not yet implemented
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

jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

sine = custom_partitioning(jnp.sin)
sine.def_partition(
    partition=lambda mesh, args, out: (mesh, jnp.sin, out.sharding, (args[0].sharding,)),
    infer_sharding_from_operands=lambda mesh, args, out: args[0].sharding,
    sharding_rule="i -> i",
)
x = jax.ShapeDtypeStruct((8,), jnp.float32)
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
sharded = jax.jit(sine, in_shardings=NamedSharding(mesh, PartitionSpec("x")))
print("one device:", jax.export.export(jax.jit(sine))(x).nr_devices)
try:
    jax.export.export(sharded)(x)
    message = "exported"
except NotImplementedError as error:
    message = f"NotImplementedError: {error}"
print("two devices:", message)
if "host_callbacks" not in message:
    raise SystemExit("the behaviour has changed")
EOF
