#!/usr/bin/env bash
# flax 0.12.8: nnx.update adds weights of unknown names to a model, and takes weights of any shape.
#
# The guide for PyTorch users loads weights with nnx.update and likens it to load_state_dict, which
# reports unknown names, missing ones and other shapes. nnx.update reports none of them. A weight
# under its PyTorch name becomes a new variable that no layer reads, and the layer keeps its random
# kernel. A table of 50 rows replaces one of 100, and later tokens read NaN. Only an unknown module
# raises an error, which speaks of static attributes. Compare names and shapes before the call:
# jax.tree.map(jnp.shape, weights) should equal
# jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(model, nnx.Param))).
#
# Seen (jax 0.10.2, CPU), a Linear layer that is updated with "weight" alone, and an Embed of 100
# rows that is updated with 50:
#     the layer has bias, kernel and weight, and computes what it did before
#     token 49 reads 1, token 50 reads NaN, and num_embeddings is still 100
#     names and shapes equal those of the model: False
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0 flax==0.12.8
cd "$folder"
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I - <<'EOF'
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(100, 4, rngs=rngs)
        self.out = nnx.Linear(4, 3, rngs=rngs)


def shapes(weights):
    return jax.tree.map(jnp.shape, weights)


model = Model(nnx.Rngs(0))
x = jnp.ones((1, 4))
before = model.out(x)
weights = dict(embed=dict(embedding=jnp.ones((50, 4))), out=dict(weight=jnp.ones((4, 3))))
same = shapes(weights) == shapes(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
nnx.update(model, weights)
names = sorted(nnx.to_pure_dict(nnx.state(model))["out"])
unchanged = bool((model.out(x) == before).all())
rows = np.asarray(model.embed(jnp.array([49, 50])))[:, 0]
print(names, unchanged, rows, model.embed.num_embeddings, same)
if names != ["bias", "kernel", "weight"] or not unchanged or same:
    raise SystemExit("the behaviour has changed")
if not np.array_equal(rows, [1, np.nan], equal_nan=True) or model.embed.num_embeddings != 100:
    raise SystemExit("the behaviour has changed")
EOF
