#!/usr/bin/env bash
# jax-linear-attention 0.1.0: one strong decay spoils the rest of its chunk, and -inf makes it NaN.
#
# The logarithm of a forget gate, g <= 0, may be as low as the model wants: a large negative number,
# or -inf, forgets what came before. The token-by-token reference does just that. The chunked
# implementations, which "auto" runs without a kernel, take differences of sums of g since the start
# of the chunk. Each step behind a strong decay thus loses the digits that the sum rounds off, and
# -inf - -inf is NaN. gla and mlstm have the same errors, gated_deltanet and kda smaller ones; -inf
# is NaN in all of them.
#
# Seen (jax 0.11.2, CPU), simple_gla in float32 with one decay at step 70 of 128, other decays
# in (-1, 0), chunks of 64: the relative error of the steps from 70 on is 1.3e-6 for -20, 2.8e-4
# for -1e4 and 1.9e-2 for -1e6; for -inf they are NaN, where the reference is finite.
#
# Needs Python 3.12 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 12) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.11.2 jaxlib==0.11.2 numpy==2.5.5 ml_dtypes==0.6.0 equinox==0.13.8 optax==0.2.8 \
    safetensors==0.8.0 jax-linear-attention==0.1.0
cd "$folder"
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I - <<'EOF'
import jax
import jax.numpy as jnp
from jla.ops import linear_attention

keys = jax.random.split(jax.random.key(0), 4)
q, k, v = (jax.random.normal(key, (1, 128, 1, 16)) for key in keys[:3])
g = -jax.random.uniform(keys[3], (1, 128, 1))


def error(decay):
    gates = g.at[:, 70].set(decay)
    chunked, exact = (
        linear_attention("simple_gla", q, k, v, g=gates, impl=impl)[0][:, 70:]
        for impl in ("auto", "reference")
    )
    assert jnp.isfinite(exact).all()
    return float(jnp.linalg.norm(chunked - exact) / jnp.linalg.norm(exact))


seen = {decay: error(decay) for decay in (-20.0, -1e4, -1e6, -jnp.inf)}
print(seen)
weak, strong, stronger, infinite = seen.values()
if weak > 1e-5 or strong < 1e-4 or stronger < 5e-3 or infinite == infinite:
    raise SystemExit("the behaviour has changed")
EOF
