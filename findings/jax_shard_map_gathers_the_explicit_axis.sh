#!/usr/bin/env bash
# jax 0.10.2: a shard_map over one explicit axis gathers its operand and its result over the other.
#
# An array is sharded over x and y, both of which are explicit axes. A jitted sine inside a
# jax.shard_map over x alone compiles to two all-gathers over y: each device computes all columns and
# throws the others' away. The result and its sharding are right, so nothing shows it but time and
# memory. The same sine without a shard_map, or with automatic axes, exchanges nothing.
#
# Seen (four CPU devices):
#     explicit: 2 all-gathers, automatic: 0, without a shard_map: 0
#
# jax 0.11.2 and 0.12.0.1 compile it without an exchange.
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

jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def gathers(kind, mapped):
    """all-gathers in the compiled sine of an array that is sharded over both axes."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        run = jnp.sin
        if mapped:
            run = jax.shard_map(run, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
        x = jax.ShapeDtypeStruct((2, 4), "float32", sharding=NamedSharding(mesh, P("x", "y")))
        return jax.jit(run).lower(x).compile().as_text().count(" all-gather(")


seen = {
    "explicit": gathers(AxisType.Explicit, True),
    "automatic": gathers(AxisType.Auto, True),
    "without a shard_map": gathers(AxisType.Explicit, False),
}
print(seen)
if seen != {"explicit": 2, "automatic": 0, "without a shard_map": 0}:
    raise SystemExit("the behaviour has changed")
EOF
