#!/usr/bin/env bash
# jax 0.10.2, 0.11.2 and 0.12.0.1: jax.checking_leaks refuses the gradient of a loss' psum.
#
# jax.checking_leaks finds tracers that a user's function has stored outside. It also raises for a
# jitted gradient of a shard_map that sums 2 * x over a mesh axis, or anything else that was
# computed there, so the switch is of no use for data-parallel training. The forward pass passes it,
# and so do the gradients of psum(x) and of 2 * x without a psum.
#
# Seen (two CPU devices):
#     psum(2 * x): forward passes, gradient: Exception: Leaked trace DynamicJaxprTrace
#     psum(x), 2 * x: forward and gradient pass
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
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))


def outcome(function, out_specs, gradient):
    run = jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=out_specs)
    if gradient:
        run = jax.grad(lambda x, run=run: run(x).sum())
    with jax.checking_leaks():
        try:
            jax.jit(run)(jnp.ones(4))
        except Exception as error:  # jax raises Exception itself
            return str(error).split(".")[0]
    return "passes"


seen = {}
for gradient in (False, True):
    seen["psum(2 * x)", gradient] = outcome(lambda x: jax.lax.psum(2 * x, "data"), P(), gradient)
    seen["psum(x)", gradient] = outcome(lambda x: jax.lax.psum(x, "data"), P(), gradient)
    seen["2 * x", gradient] = outcome(lambda x: 2 * x, P("data"), gradient)
print(seen)
leaks = [case for case, text in seen.items() if "Leaked trace" in text]
if leaks != [("psum(2 * x)", True)] or sum(text == "passes" for text in seen.values()) != 5:
    raise SystemExit("the behaviour has changed")
EOF
