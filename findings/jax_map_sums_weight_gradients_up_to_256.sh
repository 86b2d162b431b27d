#!/usr/bin/env bash
# jax 0.10.2: the gradient of a bfloat16 weight stops at 256 steps of lax.map and scan, not in vmap.
#
# The documentation calls lax.map with a batch_size a memory-efficient version of vmap. The backward
# pass of a scan, which map is, adds the gradient of what all steps share in the dtype of that
# weight, and 256 + 1 is 256 in bfloat16; vmap has one sum or product, which adds in float32. So a
# recurrent cell whose weights are cast before the scan over its steps learns too little from long
# sequences, and so does a head that goes through the tokens in parts. Cast the weight inside the
# function: then its gradient is summed in float32.
#
# Seen (CPU; also jax 0.12.0.1), the gradient of w in the sum of w * x over 4,000 ones:
#     vmap 4000, map and scan 256, map with batch_size=8 2048, w cast inside map 4000
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

x = jnp.ones(4000, jnp.bfloat16)


def of_map(w, **options):
    return jax.lax.map(lambda x: w * x, x, **options)


def of_scan(w):
    return jax.lax.scan(lambda carry, x: (carry, w * x), None, x)[1]


def cast_inside(w):
    return jax.lax.map(lambda x: w.astype(jnp.bfloat16) * x, x)


def gradient(function, dtype=jnp.bfloat16):
    total = jax.jit(jax.grad(lambda w: function(w).astype(jnp.float32).sum()))
    return float(total(jnp.ones((), dtype)))


seen = dict(
    vmap=gradient(lambda w: jax.vmap(lambda x: w * x)(x)),
    map=gradient(of_map),
    scan=gradient(of_scan),
    batches=gradient(lambda w: of_map(w, batch_size=8)),
    cast_inside=gradient(cast_inside, jnp.float32),
)
print(seen)
if list(seen.values()) != [4000, 256, 256, 2048, 4000]:
    raise SystemExit("the behaviour has changed")
EOF
