#!/usr/bin/env bash
# jax 0.10.2: tokens < 65536 is False for every token of a uint16 array.
#
# A Python integer takes the dtype of the array beside it, as documented, and one that does not fit
# is wrapped without a word: 65536 is 0 in uint16, and -1 is 65535. NumPy has the same rule, but
# compares with the number itself, and jnp.array([65536], jnp.uint16) raises an OverflowError.
# Corpora are stored in uint16, or in uint8 as bytes, and a vocabulary of 65,536 or 256 fits
# exactly. A mask of valid tokens that compares them with the size of the vocabulary is then False
# everywhere: loss and gradient are 0, and nothing is trained. jnp.minimum with the size makes all
# tokens 0, where NumPy raises an OverflowError. Cast the tokens to int32 first.
#
# Seen (CPU; also jax 0.12.0.1), of tokens 0, 5 and 65535 in uint16:
#     numpy < 65536 [True, True, True], >= -1 [True, True, True]
#     jax < 65536 [False, False, False], >= -1 [False, False, True], minimum [0, 0, 0]
#     loss with the mask 0, gradient 0; with int32 tokens 11.1, gradient 0.577
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0
cd "$folder"
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I - <<'EOF'
import jax
import jax.numpy as jnp
import numpy as np

vocab_size = 65536
stored = np.array([0, 5, 65535], np.uint16)
tokens = jnp.asarray(stored)


def loss(logits, tokens):
    mask = tokens < vocab_size
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], 1)[:, 0]
    return (losses * mask).sum() / jnp.maximum(mask.sum(), 1)


def step(tokens):
    value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.zeros((3, vocab_size)), tokens)
    return float(value), float(jnp.linalg.norm(gradient))


in_numpy = [(stored < vocab_size).tolist(), (stored >= -1).tolist()]
in_jax = [(tokens < vocab_size).tolist(), (tokens >= -1).tolist()]
smaller = jnp.minimum(tokens, vocab_size).tolist()
seen, expected = step(tokens), step(tokens.astype(jnp.int32))
print("numpy < 65536 {}, >= -1 {}".format(*in_numpy))
print("jax < 65536 {}, >= -1 {}, minimum {}".format(*in_jax, smaller))
line = "loss with the mask {:.3g}, gradient {:.3g}; with int32 tokens {:.3g}, gradient {:.3g}"
print(line.format(*seen, *expected))
if in_numpy != [[True] * 3] * 2 or expected[0] < 10 or expected[1] < 0.1:
    raise SystemExit("NumPy compares in another way, or int32 tokens are not trained, either")
if in_jax != [[False] * 3, [False, False, True]] or smaller != [0, 0, 0] or seen != (0, 0):
    raise SystemExit("the behaviour has changed")
EOF
