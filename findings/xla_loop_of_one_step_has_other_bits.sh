#!/usr/bin/env bash
# jaxlib 0.12.0.1 on a CPU: the first element of lax.map has other bits if it is the only one.
#
# lax.map runs the elements one after the other, so a user takes it for what makes results
# independent of the batch size. XLA unrolls a loop of one step and fuses its body with what is
# before and after it; from two steps on, the bits of an element do not depend on their number.
# Two copies of the element, of which one is dropped, give the bits of a batch.
#
# Seen (CPU), seeds of 20 for which the first result is bitwise that of a batch of 8, by batch size:
#     1: 0, 2: 20, 3: 20, 8: 20. Loops in the compiled program: 0 for one element, 1 for two.
#     With jaxlib 0.10.2 and 0.11.2 the loop is unrolled too, but these bits are equal.
#
# Needs Python 3.12 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 12) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.5 ml_dtypes==0.6.0
cd "$folder"
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I - <<'EOF'
import re

import jax
import jax.numpy as jnp

weights = jax.random.normal(jax.random.key(99), (64, 64))


def layer(x):
    y = jnp.tanh(weights @ x)
    return y / jnp.sqrt(jnp.sum(y * y) + 1e-6)


run = jax.jit(lambda batch: jax.lax.map(layer, batch * 1.1 + 0.3))
equal, sizes = [0] * 4, (1, 2, 3, 8)
for seed in range(20):
    batch = jax.random.normal(jax.random.key(seed), (8, 64))
    for i, n in enumerate(sizes):
        equal[i] += bool((run(batch)[0] == run(batch[:n])[0]).all())
loops = [len(re.findall(r" while\(", run.lower(batch[:n]).compile().as_text())) for n in (1, 2)]
print("equal:", dict(zip(sizes, equal)), "loops:", loops)
if equal[0] == 20 or equal[1:] != [20] * 3 or loops != [0, 1]:
    raise SystemExit("the behaviour has changed")
EOF
