#!/usr/bin/env bash
# jax-linear-attention 0.1.0: Muon also trains the output matrix, which its documentation excludes.
#
# Muon is for hidden matrices; embeddings and the matrix of the logits are for Adam. The docstring
# of `muon_eligible` says so: "not embeddings/heads/norms/routers/convs". It looks for the names
# "lm_head" and "unembed", but a LanguageModel with tie_embeddings=False calls the matrix `head`. So
# its updates are orthogonalised like those of a hidden matrix, and embedding_lr_scale, which has
# the same names, leaves it out. The loss falls all the same.
#
# Seen (jax 0.11.2, CPU), a step with the learning rate 1 and random gradients: the elements of
# the embedding's update all have the size 1.5, as Adam's have; those of `head` range from 1e-5 to
# 0.7, and its singular values differ by a factor of 1.5, as Muon's do.
#
# Needs Python 3.12 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 12) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.11.2 jaxlib==0.11.2 numpy==2.5.5 ml_dtypes==0.6.0 equinox==0.13.8 optax==0.2.8 \
    safetensors==0.8.0 jax-linear-attention==0.1.0
cd "$folder"
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I - <<'EOF'
import equinox as eqx
import jax
import jax.numpy as jnp
from jla.models import build_model, get_preset
from jla.training.optimizers import create_optimizer

config = get_preset("tiny-mlstm").replace(tie_embeddings=False)
params = eqx.filter(build_model(config, key=jax.random.key(0)), eqx.is_inexact_array)
gradients = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), params)
optimizer = create_optimizer(optimizer_type="muon", lr=1.0, weight_decay=0.0, max_grad_norm=0.0)
updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
sizes = [jnp.abs(x) for x in (updates.embed.weight, updates.head)]
spread = [float(x.max() / x.min()) for x in sizes]
values = jnp.linalg.svd(updates.head, compute_uv=False)
print("largest / smallest element: embed", spread[0], "head", spread[1])
print("largest / smallest singular value of head:", float(values[0] / values[-1]))
if spread[0] > 1.01 or spread[1] < 100 or values[0] > 2 * values[-1]:
    raise SystemExit("the behaviour has changed")
EOF
