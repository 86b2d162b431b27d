#!/usr/bin/env bash
# optax 0.2.8: Prodigy and D-Adapt AdamW make NaN of all parameters if their warmup starts at zero.
#
# The docstrings of optax.contrib.prodigy and dadapt_adamw recommend a learning rate warmup, and the
# warmup schedules of optax start at an init_value, for which 0 is usual: Adam then does nothing in
# its first step. These two optimizers divide by a sum of gradients that are weighted with the
# learning rate. A rate of 0 makes that 0 / 0, the estimate of the step size is NaN from then on,
# and so are the parameters, after the first step with Prodigy and after the second one with
# D-Adapt. The loss is finite in the first step, so a mixed-precision setup is easily blamed. Start
# the warmup at a small number, such as 1e-3. safeguard_warmup=True helps Prodigy as well; it is
# off by default, and D-Adapt has no such argument.
#
# Seen (jax 0.10.2, CPU), the loss of a linear regression (150 at the start) after 1 step and 1,000:
#     warmup from 0: prodigy nan, nan; dadapt_adamw 150, nan; prodigy with the safeguard 150, 0
#     warmup from 1e-3: prodigy 150, 0; dadapt_adamw 150, 0
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
from optax import contrib

x = jax.random.normal(jax.random.key(0), (64, 8))
y = x @ jnp.arange(8.0)


def loss(weights):
    return jnp.mean((x @ weights - y) ** 2)


def losses(optimizer, start, **options):
    rate = optax.warmup_cosine_decay_schedule(start, 1.0, warmup_steps=20, decay_steps=1000)
    transform = optimizer(rate, **options)

    def step(carry, _):
        weights, state = carry
        updates, state = transform.update(jax.grad(loss)(weights), state, weights)
        weights = optax.apply_updates(weights, updates)
        return (weights, state), loss(weights)

    weights = jnp.zeros(8)
    _, seen = jax.lax.scan(step, (weights, transform.init(weights)), length=1000)
    seen = [round(float(seen[n]), 3) for n in (0, -1)]
    print(optimizer.__name__, start, options, seen)
    return seen


from_zero = [
    losses(contrib.prodigy, 0.0),
    losses(contrib.dadapt_adamw, 0.0),
    losses(contrib.prodigy, 0.0, safeguard_warmup=True),
]
later = [losses(contrib.prodigy, 1e-3), losses(contrib.dadapt_adamw, 1e-3)]
if not np.allclose(later, [[150, 0], [150, 0]], atol=0.5):
    raise SystemExit("a warmup from 1e-3 does not train, either")
expected = [[np.nan, np.nan], [150, np.nan], [150, 0]]
if not np.allclose(from_zero, expected, atol=0.5, equal_nan=True):
    raise SystemExit("the behaviour has changed")
EOF
