#!/usr/bin/env bash
# flax 0.12.8: nnx.metrics with a mask of whole rows report an accuracy of 800 %, and a loss eight
# times too large.
#
# The documentation of Average and Accuracy says that a mask should be broadcastable to the shape of
# the values. Their sum broadcasts it, but the count is mask.sum(), before the broadcast. A mask
# (B, 1) leaves out the rows that fill up the last batch of an evaluation. With it each result is S
# times too large, for rows of S steps. A mean loss then looks like that of a bad model, and nothing
# is raised. jnp.broadcast_to(mask, values.shape) is right.
#
# Seen (jax 0.10.2, CPU), rows of 8 tokens, all predicted, losses of 1, the last row masked:
#     mask (3, 1): accuracy 8.0, loss 8.0
#     the mask broadcast to (3, 8): accuracy 1.0, loss 1.0
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
from flax import nnx

labels = jnp.arange(24, dtype=jnp.int32).reshape(3, 8) % 5
logits = jax.nn.one_hot(labels, 5)
rows = jnp.array([[True], [True], [False]])


def means(mask):
    accuracy, loss = nnx.metrics.Accuracy(), nnx.metrics.Average("loss")
    accuracy.update(logits=logits, labels=labels, mask=mask)
    loss.update(loss=jnp.ones(labels.shape), mask=mask)
    return float(accuracy.compute()), float(loss.compute())


seen = means(rows), means(jnp.broadcast_to(rows, labels.shape))
print(*seen)
if seen != ((8.0, 8.0), (1.0, 1.0)):
    raise SystemExit("the behaviour has changed")
EOF
