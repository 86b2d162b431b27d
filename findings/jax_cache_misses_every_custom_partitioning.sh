#!/usr/bin/env bash
# jax 0.10.2 and 0.12.0.1: the persistent compilation cache grows at each start of the same program.
#
# With jax_compilation_cache_dir, a second start of a program is expected to find what the first one
# compiled. If the program has a custom_partitioning on a mesh, the key of its entry contains the
# address of a Python object: each start compiles again and adds an entry, without a warning. The
# flag jax_remove_custom_partitioning_ptr_from_cache_key mends it, for programs of which no two
# differ only in what they partition.
#
# Seen (two CPU devices), entries after each of three starts:
#     custom_partitioning: 1, 2, 3; the same with the flag: 1, 1, 1; a plain function: 1, 1, 1
# Upstream: jax-ml/jax#21159 (open in November 2026).
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
import subprocess
import sys
import tempfile

PROGRAM = """
import os
import sys

import jax

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
if sys.argv[2] == "flag":
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

sine = custom_partitioning(jnp.sin)
sine.def_partition(
    partition=lambda mesh, args, out: (mesh, jnp.sin, out.sharding, (args[0].sharding,)),
    infer_sharding_from_operands=lambda mesh, args, out: args[0].sharding,
    sharding_rule="i -> i",
)
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
sharding = NamedSharding(mesh, PartitionSpec("x"))


def program(x):
    return (jnp.sin if sys.argv[2] == "plain" else sine)(x)


run = jax.jit(program, in_shardings=sharding, out_shardings=sharding)
run.lower(jax.ShapeDtypeStruct((8,), jnp.float32)).compile()
entries = os.listdir(sys.argv[1])
print(sum("jit_program" in name and name.endswith("-cache") for name in entries))
"""
seen = {}
for kind in ("custom_partitioning", "flag", "plain"):
    with tempfile.TemporaryDirectory() as cache:
        start = [sys.executable, "-I", "-c", PROGRAM, cache, kind]
        runs = [subprocess.run(start, check=True, capture_output=True) for _ in range(3)]
    seen[kind] = [int(run.stdout) for run in runs]
print(seen)
if seen != dict(custom_partitioning=[1, 2, 3], flag=[1, 1, 1], plain=[1, 1, 1]):
    raise SystemExit("the behaviour has changed")
EOF
