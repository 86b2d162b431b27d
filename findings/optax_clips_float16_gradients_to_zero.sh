#!/usr/bin/env bash
# optax 0.2.8: clip_by_global_norm turns finite float16 gradients into zeros, in silence.
#
# The norm is computed in the dtype of the gradients. From a norm of 256 on, the sum of squares
# exceeds the largest float16; loss scaling makes such gradients on purpose. The norm is then inf,
# and each gradient divided by inf is 0. Nothing is NaN, so nothing notices that no weight changes.
#
# Seen (jax 0.10.2, CPU), 1,000 gradients of 100, clipped to a norm of 1:
#     float16: norm inf, updates 0.0
#     float32: norm 3162.3, updates 0.0316
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0 optax==0.2.8
cd "$folder"
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I - <<'EOF'
import jax.numpy as jnp
import optax

seen = {}
for dtype in (jnp.float16, jnp.float32):
    gradients = dict(w=jnp.full((1000,), 100.0, dtype))
    clip = optax.clip_by_global_norm(1.0)
    updates, _ = clip.update(gradients, clip.init(gradients))
    norm = float(optax.global_norm(gradients))
    seen[dtype.__name__] = norm, float(updates["w"][0])
print(seen)
if seen["float16"] != (float("inf"), 0.0) or abs(seen["float32"][1] - 0.0316) > 1e-3:
    raise SystemExit("the behaviour has changed")
EOF
