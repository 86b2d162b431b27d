#!/usr/bin/env bash
# optax 0.2.8: Adam trains bfloat16 parameters, but gives NaN under inject_hyperparams.
#
# inject_hyperparams casts all hyperparameters to the widest dtype of the parameters. In bfloat16
# the default b2 = 0.999 is 1, so the second moment stays 0 and its bias correction divides 0 by 0.
# A user wraps Adam to log or to set the learning rate, and did not pass b2. One float32 leaf among
# the parameters, such as the weight of a gate, hides it. The documentation says what
# hyperparam_dtype does, but not what happens without it. hyperparam_dtype=jnp.float32 is right.
#
# Seen (jax 0.10.2, CPU), the first update of a gradient of 1 at a learning rate of 0.01:
#     adam -0.01, inject_hyperparams(adam) nan
#     beside a float32 leaf -0.01; with hyperparam_dtype=float32 -0.01
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
import numpy as np
import optax

matrix = dict(w=jnp.ones(2, jnp.bfloat16))
with_gate = matrix | dict(gate=jnp.ones(2))
injected = optax.inject_hyperparams(optax.adam)(0.01)
in_float32 = optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(0.01)
seen = []
for optimizer, params in (
    (optax.adam(0.01), matrix),
    (injected, matrix),
    (injected, with_gate),
    (in_float32, matrix),
):
    updates, _ = optimizer.update(params, optimizer.init(params), params)  # gradients of 1
    seen.append(float(updates["w"][0]))
print(seen)
if not np.allclose(seen, [-0.01, np.nan, -0.01, -0.01], rtol=0.01, equal_nan=True):
    raise SystemExit("the behaviour has changed")
EOF
