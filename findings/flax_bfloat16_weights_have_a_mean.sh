#!/usr/bin/env bash
# flax 0.12.8, jax 0.10.2: weights that are initialised in bfloat16 have a mean other than zero, and
# it grows with the width in what a layer returns.
#
# jax.random draws a uniform number of as many bits as the mantissa of the dtype has: 7 in bfloat16.
# Its 128 values go from -1 to 1 - 2^-6, so their mean is -2^-7, and the initialisers of flax and
# jax.random.normal map these 128 values. An input whose mean is not zero, as behind an activation,
# moves all outputs of the layer alike. The documentation has param_dtype as the dtype that the
# initialisers get, and theirs has a normal distribution around zero; a user expects it rounded.
# Weights that are initialised in float32 and then cast have no such mean.
#
# Seen (CPU), nnx.Linear(4096, 256) of ones: outputs should be N(0, 1)
#     param_dtype=float32: mean -0.05, standard deviation 1.02
#     param_dtype=bfloat16: mean -1.14, standard deviation 1.02, from 128 different weights
#     float32, cast to bfloat16: mean -0.05, standard deviation 1.02
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0 flax==0.12.8
cd "$folder"
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I - <<'EOF'
import jax.numpy as jnp
import numpy as np
from flax import nnx


def outputs(param_dtype, cast_to):
    layer = nnx.Linear(4096, 256, param_dtype=param_dtype, rngs=nnx.Rngs(0))
    weights = layer.kernel[...].astype(cast_to).astype(jnp.float32)
    sums = jnp.ones(4096) @ weights  # the sums themselves are of float32
    return float(sums.mean()), float(sums.std()), len(np.unique(weights))


exact = outputs(jnp.float32, jnp.float32)
in_bfloat16 = outputs(jnp.bfloat16, jnp.bfloat16)
cast = outputs(jnp.float32, jnp.bfloat16)
print(exact, in_bfloat16, cast, sep="\n")
if max(abs(exact[0]), abs(cast[0])) > 0.2 or in_bfloat16[0] > -0.9 or in_bfloat16[2] != 128:
    raise SystemExit("the behaviour has changed")
EOF
