#!/usr/bin/env bash
# optax 0.2.8: under jax_numpy_dtype_promotion=strict, Adam fails and SGD runs.
#
# The strict setting finds accidental float32 in a bfloat16 model. Adam's correction of its moments
# raises a Python float to an int32 count, and MultiSteps divides float32 by int32, so adamw, lamb,
# ema and MultiSteps fail with float32 parameters and gradients; sgd with momentum, lion, rmsprop
# and adafactor run. A training step with Adam can only be checked without its optimiser.
#
# Seen (jax 0.10.2, CPU):
#     adamw: TypePromotionError: Input dtypes ("<class 'float'>", 'int32') have no available
#         implicit dtype promotion path when jax_numpy_dtype_promotion=strict.
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
import optax

optimisers = dict(
    adamw=optax.adamw(1e-3),
    lamb=optax.lamb(1e-3),
    ema=optax.ema(0.9),
    MultiSteps=optax.MultiSteps(optax.sgd(1.0), 2),
    sgd=optax.sgd(1e-2, momentum=0.9),
    lion=optax.lion(1e-3),
    rmsprop=optax.rmsprop(1e-3),
    adafactor=optax.adafactor(1e-3),
)
seen = {}
with jax.numpy_dtype_promotion("strict"):
    for name, optimiser in optimisers.items():
        params = dict(w=jnp.ones((4, 4)))
        try:
            state = optimiser.init(params)
            for _ in range(2):
                updates, state = optimiser.update(params, state, params)
                params = optax.apply_updates(params, updates)
            seen[name] = "runs"
        except Exception as error:  # jax's TypePromotionError is not public
            seen[name] = f"{type(error).__name__}: {error}".split(" Try")[0]
        print(name, "->", seen[name])
refused = [name for name, text in seen.items() if "TypePromotionError" in text]
if refused != ["adamw", "lamb", "ema", "MultiSteps"]:
    raise SystemExit("the behaviour has changed")
EOF
