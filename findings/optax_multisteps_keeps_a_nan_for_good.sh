#!/usr/bin/env bash
# optax 0.2.8: after one NaN in one micro-batch, MultiSteps of a guarded optimizer never trains
# again.
#
# zero_nans and apply_if_finite let a run survive a NaN. Inside MultiSteps they guard the inner
# optimizer, but not the mean of the gradients. The documentation says that it is set back to zero
# after each step, but the code multiplies it by zero, and NaN * 0 is NaN. With zero_nans all later
# updates are zero, and the loss stays where it is. apply_if_finite refuses them until it gives up,
# after max_consecutive_errors micro-batches, and then the parameters are NaN.
# apply_if_finite around MultiSteps leaves out the one micro-batch, and so does
# should_skip_update_fn=skip_not_finite.
#
# Seen (jax 0.10.2, CPU), a weight of 1 after 200 gradients of 1 of which the fourth is NaN, with a
# step of 0.01 after every second one, so 0.01 is right:
#     MultiSteps(zero_nans, sgd): 0.99, as after the first step
#     MultiSteps(apply_if_finite(sgd)): nan
#     apply_if_finite(MultiSteps(sgd)) and MultiSteps(sgd, skip_not_finite): 0.01
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

sgd = optax.sgd(0.01)
zeroed = optax.MultiSteps(optax.chain(optax.zero_nans(), sgd), 2)
inside = optax.MultiSteps(optax.apply_if_finite(sgd, 5), 2)
outside = optax.apply_if_finite(optax.MultiSteps(sgd, 2).gradient_transformation(), 5)
skipping = optax.MultiSteps(sgd, 2, should_skip_update_fn=optax.skip_not_finite)
gradients = jnp.ones(200).at[3].set(jnp.nan)


def trained(optimizer):
    def step(carry, gradient):
        weight, state = carry
        update, state = optimizer.update(gradient, state, weight)
        return (optax.apply_updates(weight, update), state), None

    (weight, _), _ = jax.lax.scan(step, (jnp.ones(()), optimizer.init(jnp.ones(()))), gradients)
    return float(weight)


seen = [trained(optimizer) for optimizer in (zeroed, inside, outside, skipping)]
print(seen)
if not np.allclose(seen, [0.99, np.nan, 0.01, 0.01], atol=1e-4, equal_nan=True):
    raise SystemExit("the behaviour has changed")
EOF
