#!/usr/bin/env bash
# libtpu 0.0.52 with jax 0.12.0.1: a custom_partitioning compiles for one TPU and not for several.
#
# jax.experimental.custom_partitioning tells XLA how to split a function over automatic mesh axes.
# Its documentation names no platform. A program with one compiles for several CPUs, and for one
# TPU, where nothing is split, so tests there pass. For several TPUs libtpu refuses it, even if no
# array is split. The error says nothing of TPUs or of a way out; a shard_map compiles. No TPU is
# needed to see this: jax.experimental.topologies describes some to the compiler.
#
# Seen (TPU v5e, 2x2):
#     four CPUs, one TPU: compiled; shard_map on four TPUs: compiled
#     four TPUs, split or replicated: JaxRuntimeError: INVALID_ARGUMENT: Custom emitter for
#     CustomSPMDPartitioning not found
# Upstream: jax-ml/jax#38196 (open in November 2026).
#
# Needs Python 3.12 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 12) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.12.0.1 jaxlib==0.12.0.1 libtpu==0.0.52 numpy==2.4.6 ml_dtypes==0.6.0
cd "$folder"
cat >main.py <<'EOF'
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sine = custom_partitioning(jnp.sin)
sine.def_partition(
    partition=lambda mesh, args, out: (mesh, jnp.sin, out.sharding, (args[0].sharding,)),
    infer_sharding_from_operands=lambda mesh, args, out: args[0].sharding,
    sharding_rule="i -> i",
)


def outcome(devices, spec, manual=False):
    mesh = Mesh(np.array(devices), ("x",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, spec))
    run = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec) if manual else sine
    try:
        jax.jit(run).lower(x).compile()
    except jax.errors.JaxRuntimeError as error:
        return str(error).split("\n")[0]
    return "compiled"


jax.config.update("jax_num_cpu_devices", 4)
tpus = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
seen = dict(
    cpus=outcome(jax.devices(), P("x")),
    one_tpu=outcome(tpus[:1], P("x")),
    shard_map=outcome(tpus, P("x"), manual=True),
    split=outcome(tpus, P("x")),
    replicated=outcome(tpus, P()),
)
print(*seen.items(), sep="\n")
refused = {name for name, text in seen.items() if "Custom emitter for CustomSPMD" in text}
compiled = {name for name, text in seen.items() if text == "compiled"}
if refused != {"split", "replicated"} or compiled != {"cpus", "one_tpu", "shard_map"}:
    raise SystemExit("the behaviour has changed")
EOF
env -i PATH="$PATH" HOME="$folder" JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 \
    "$folder/venv/bin/python" -I main.py
