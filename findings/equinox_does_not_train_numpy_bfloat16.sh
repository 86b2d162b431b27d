#!/usr/bin/env bash
# equinox 0.13.8: NumPy weights in bfloat16 are never trained, and nothing says so.
#
# safetensors.numpy gives weights as NumPy arrays. The documentation of filter_grad says that it
# differentiates all floating-point JAX and NumPy arrays, and those in float32 it does. Of a NumPy
# array is_inexact_array asks NumPy, for which bfloat16, a dtype of ml_dtypes, is not
# floating-point: the gradient of such a leaf is None, apply_updates leaves it, and the loss falls
# by what the other leaves learn. A partition by is_inexact_array puts the leaf among the constants,
# so that an optimizer has no moments for it, either. Convert all leaves by jnp.asarray.
#
# Seen (jax 0.10.2, CPU), a Linear layer with a weight of ones:
#     NumPy float32, JAX float32, JAX bfloat16: inexact, with a gradient, trained
#     NumPy bfloat16: neither of these; after 10 steps of SGD only the bias has moved
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0 equinox==0.13.8
cd "$folder"
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I - <<'EOF'
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

layer = eqx.nn.Linear(4, 4, key=jax.random.key(0))


@eqx.filter_grad
def gradients_of(model):
    return jnp.square(model(jnp.ones(4)).astype(jnp.float32) - 1).sum()


def trained(weight):
    start = model = eqx.tree_at(lambda model: model.weight, layer, weight)
    for _ in range(10):
        updates = jax.tree.map(lambda x: -0.01 * x, gradients_of(model))
        model = eqx.apply_updates(model, updates)
    has_gradient = gradients_of(model).weight is not None
    pairs = (model.weight, start.weight), (model.bias, start.bias)
    return eqx.is_inexact_array(weight), has_gradient, *(bool((x != y).any()) for x, y in pairs)


seen = {
    (library.__name__, jnp.dtype(dtype).name): trained(library.ones((4, 4), dtype))
    for library in (np, jnp)
    for dtype in (jnp.float32, jnp.bfloat16)
}
print("inexact, has a gradient, weight moved, bias moved", *seen.items(), sep="\n")
wrong = seen.pop(("numpy", "bfloat16"))
if wrong != (False, False, False, True) or set(seen.values()) != {(True,) * 4}:
    raise SystemExit("the behaviour has changed")
EOF
