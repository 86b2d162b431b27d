#!/usr/bin/env bash
# jmp 0.0.4: a DynamicLossScale that passes through jax.jit has min_loss_scale 1 again.
#
# The loss scale is a pytree so that a jitted training step can take and return it, with period and
# factor. min_loss_scale is not among the parts that it is flattened into, and is set to its default
# when it is put together again, as by tree_map and by a checkpoint. A run whose float16 gradients
# overflow at a scale of 1, because its loss is a sum over tokens, asks for a smaller minimum. In
# jit the scale stays at 1, all gradients stay infinite, and no step is ever made. A minimum above
# 1, against gradients that underflow, is lost as well. In the step call
#     dataclasses.replace(loss_scale, min_loss_scale=...).adjust(grads_finite)
#
# Seen (jax 0.10.2, CPU), a weight that should learn 20 and starts at 0, its loss scale, and how
# many of 200 steps were made, with min_loss_scale=2**-10:
#     without jit 20.0, 0.25, 183; with jit 0.0, 1, 0
#     with jit and dataclasses.replace 20.0, 0.25, 183
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0 jmp==0.0.4
cd "$folder"
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I - <<'EOF'
import dataclasses

import jax
import jax.numpy as jnp
import jmp
import numpy as np

MINIMUM = np.float32(2**-10)
tokens = jnp.ones(4096, jnp.float16)


def scaled_loss(weight, loss_scale):
    errors = weight.astype(jnp.float16) * tokens - 20
    return loss_scale.scale(jnp.sum(errors**2))


def step(weight, loss_scale, restore=False):
    gradient = loss_scale.unscale(jax.grad(scaled_loss)(weight, loss_scale))
    finite = jmp.all_finite(gradient)
    if restore:
        loss_scale = dataclasses.replace(loss_scale, min_loss_scale=MINIMUM)
    weight = jmp.select_tree(finite, weight - 3e-5 * gradient, weight)
    return weight, loss_scale.adjust(finite), finite


def trained(name, step):
    weight = jnp.zeros(())
    loss_scale = jmp.DynamicLossScale(jnp.float32(2**15), min_loss_scale=MINIMUM)
    made = 0
    for _ in range(200):
        weight, loss_scale, finite = step(weight, loss_scale)
        made += int(finite)
    seen = round(float(weight), 1), float(loss_scale.loss_scale), made
    print(name, *seen)
    return seen


plain = trained("without jit", step)
jitted = trained("with jit", jax.jit(step))
restored = trained("restored", jax.jit(lambda *carry: step(*carry, restore=True)))
if plain != restored or plain[:2] != (20, 0.25):
    raise SystemExit("the run does not train without jit, or replace does not help")
if jitted != (0, 1, 0):
    raise SystemExit("the behaviour has changed")
EOF
