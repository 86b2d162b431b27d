#!/usr/bin/env bash
# numpy 2.4.6 with ml_dtypes 0.6.0: 1,000 ones in bfloat16 have the sum 256.
#
# NumPy sums float16 pairwise in float32. For bfloat16, a dtype of ml_dtypes, it adds one element
# after the other in bfloat16, where 256 + 1 is 256. So np.sum, np.mean and np.cumsum of losses or
# logits that came from a model as bfloat16 stop growing, while x @ x and jnp.sum of the same array
# are right; a test that compares them with NumPy measures NumPy. x.sum(dtype=np.float32) mends it.
#
# Seen: sum 256, mean 0.256, x @ x 1000, float16 sum of 5,000 ones 5000, jnp.sum (jax 0.10.2) 1000.
# Upstream: jax-ml/ml_dtypes#63 (closed).
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
import jax.numpy as jnp
import ml_dtypes
import numpy as np

x = np.ones(1000, ml_dtypes.bfloat16)
seen = dict(
    sum=float(x.sum()),
    mean=round(float(x.mean()), 3),
    cumsum=float(np.cumsum(x)[-1]),
    dot=float(x @ x),
    in_float32=float(x.sum(dtype=np.float32)),
    float16=float(np.ones(5000, np.float16).sum()),
    jnp=float(jnp.sum(jnp.asarray(x))),
)
print(seen)
if list(seen.values()) != [256, 0.256, 256, 1000, 1000, 5000, 1000]:
    raise SystemExit("the behaviour has changed")
EOF
