#!/usr/bin/env bash
# optax 0.2.8: reduce_on_plateau of bfloat16 parameters rounds the loss to bfloat16, and stops a
# training that makes progress.
#
# The state keeps the best loss in the widest dtype of the parameters, and update casts each loss to
# it, also a float32 one. Between 2 and 4, neighbouring bfloat16 numbers differ by 1/64. A loss that
# falls by less over patience values counts as a plateau, and the learning rate is reduced again and
# again. The documentation names only rtol and atol as tolerances. One float32 leaf among the
# parameters hides it. Initialise the state with float32 copies of the parameters.
#
# Seen (jax 0.10.2, CPU), factor 0.1 and patience 10, a loss that falls by 0.001 at each of 100
# values from 2.6 on:
#     float32 parameters: scale 1, best loss 2.501
#     bfloat16 parameters: scale 1e-06, reduced after 11, 26, 41, 57, 72 and 88 values, best 2.5
#     bfloat16 parameters, float32 state: scale 1, best loss 2.501
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
import jax
import jax.numpy as jnp
import numpy as np
from optax.contrib import reduce_on_plateau

losses = 2.6 - 0.001 * jnp.arange(100, dtype=jnp.float32)


def final_scale(dtype, state_dtype):
    optimizer = reduce_on_plateau(factor=0.1, patience=10)

    def step(state, loss):
        _, state = optimizer.update(jnp.ones((), dtype), state, value=loss)
        return state, state.scale.astype(jnp.float32)

    state, scales = jax.lax.scan(step, optimizer.init(jnp.ones((), state_dtype)), losses)
    reductions = np.flatnonzero(np.diff(scales)) + 2  # values seen so far
    print(dtype.__name__, state_dtype.__name__, scales[-1], state.best_value, reductions)
    return float(scales[-1])


seen = [
    final_scale(jnp.float32, jnp.float32),
    final_scale(jnp.bfloat16, jnp.bfloat16),
    final_scale(jnp.bfloat16, jnp.float32),
]
if not np.allclose(seen, [1, 1e-6, 1], rtol=0.01):
    raise SystemExit("the behaviour has changed")
EOF
