#!/usr/bin/env bash
# optax 0.2.8: the label -1 trains the last token of the vocabulary, -100 makes the loss NaN.
#
# PyTorch's cross entropy skips -100, and loaders mark padding so, or by -1.
# softmax_cross_entropy_with_integer_labels indexes the logits like an array: -1 is the last class,
# whose probability the model then learns to raise at each padded step, without any sign; a label
# beyond the classes on either side is NaN. Neither is an error, under jit or outside.
#
# Seen (jax 0.10.2, CPU), logits of 8 classes, of which the last one is 5 and the others are 0:
#     label 7: 0.046, label -1: 0.046, label -100: nan, label 8: nan
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
import jax.numpy as jnp
import optax

logits = jnp.zeros((1, 8)).at[0, 7].set(5.0)
seen = {
    label: float(optax.softmax_cross_entropy_with_integer_labels(logits, jnp.array([label]))[0])
    for label in (7, -1, -100, 8)
}
print(seen)
if seen[-1] != seen[7] or seen[7] > 0.1 or seen[-100] == seen[-100] or seen[8] == seen[8]:
    raise SystemExit("the behaviour has changed")
EOF
