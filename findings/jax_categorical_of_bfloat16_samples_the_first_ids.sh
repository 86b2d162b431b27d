#!/usr/bin/env bash
# jax 0.10.2: categorical samples only the first thousand of 32,000 equal logits in bfloat16.
#
# The noise has the dtype of the logits. In bfloat16 it has 128 values, so hundreds of a vocabulary
# share the largest one, and argmax takes the first of them. A language model whose head returns
# bfloat16 leaves out rare tokens and prefers small ids, and nothing else shows it. The
# documentation of categorical tells of a bias for probabilities below 1e-7 in float32, and of none
# in other dtypes. mode="high" draws more bits and still prefers small ids. logits.astype(float32)
# is right.
#
# Seen (also jax 0.12.0.1; CPU), 1,000 samples:
#     32,000 equal logits: float32 has the median 14,947 and the largest id 31,987;
#     bfloat16 has the median 80 and the largest id 922
#     logits of N(0, 9), rounded to bfloat16, whose entropy is 6.75: the mean of -log p is 6.61 if
#     they are cast to float32 before, and 4.72 if they are not
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

keys = jax.random.split(jax.random.key(0), 1000)
equal = jnp.zeros(32000, jnp.bfloat16)
logits = (3 * jax.random.normal(jax.random.key(1), 32000)).astype(jnp.bfloat16)
log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
entropy = -float(jnp.exp(log_p) @ log_p)
seen = {}
for dtype in (jnp.float32, jnp.bfloat16):
    sample = jax.jit(jax.vmap(jax.random.categorical, (0, None)))
    ids = sample(keys, equal.astype(dtype))
    surprise = -float(log_p[sample(keys, logits.astype(dtype))].mean())
    seen[dtype.__name__] = int(jnp.median(ids)), int(ids.max()), surprise
print(entropy, seen)
right, wrong = seen["float32"], seen["bfloat16"]
as_expected = right[0] > 12000 and right[1] > 31000 and abs(right[2] - entropy) < 0.3
if not as_expected or wrong[0] > 200 or wrong[1] > 2000 or wrong[2] > entropy - 1.5:
    raise SystemExit("the behaviour has changed")
EOF
