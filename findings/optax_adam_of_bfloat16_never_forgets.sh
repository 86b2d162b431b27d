#!/usr/bin/env bash
# optax 0.2.8: the second moment of Adam never falls in bfloat16, so early gradients set the step
# size for good.
#
# The second moment has the dtype of the parameters. In bfloat16 the default b2 = 0.999 is 1, so a
# step only adds to the moment, and adds nothing once the addend is below half a unit in its last
# place. After a spike of the gradients, or a start with large ones, all updates stay small, and the
# loss seems to have reached a plateau. The same holds for AdamW, for mu_dtype=float32 and for each
# b2 above 0.998. The documentation says nothing of bfloat16. Initialise the state with float32
# copies of the parameters, which keeps both moments in float32, or use b2=0.99.
#
# Seen (jax 0.10.2, CPU), the update of a gradient of 1 after 20,000 steps, in units of the learning
# rate, if the first 100 gradients were 1 and if they were 100:
#     float32 1.00 and 1.00
#     bfloat16 1.39 and 0.03, with mu_dtype=float32 1.42 and 0.03
#     bfloat16 with b2=0.99 1.08 and 1.02, with a float32 state 1.00 and 1.00
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
import optax


def last_updates(dtype, state_dtype, **options):
    optimizer = optax.adam(1.0, **options)

    def step(state, gradient):
        update, state = optimizer.update(gradient.astype(dtype), state)
        return state, -update

    def last(first_gradients):
        gradients = jnp.ones(20_000).at[:100].set(first_gradients)
        return jax.lax.scan(step, optimizer.init(jnp.ones((), state_dtype)), gradients)[1][-1]

    return [float(jax.jit(last)(first_gradients)) for first_gradients in (1, 100)]


seen = {
    "float32": last_updates(jnp.float32, jnp.float32),
    "bfloat16": last_updates(jnp.bfloat16, jnp.bfloat16),
    "mu_dtype": last_updates(jnp.bfloat16, jnp.bfloat16, mu_dtype=jnp.float32),
    "b2": last_updates(jnp.bfloat16, jnp.bfloat16, b2=0.99),
    "float32 state": last_updates(jnp.bfloat16, jnp.float32),
}
for name, updates in seen.items():
    print(name, *(f"{update:.2f}" for update in updates))
expected = [[1, 1], [1.39, 0.03], [1.42, 0.03], [1.08, 1.02], [1, 1]]
if not np.allclose(list(seen.values()), expected, atol=0.02):
    raise SystemExit("the behaviour has changed")
EOF
