#!/usr/bin/env bash
# flax 0.12.8: the carry that an RNN returns for a sequence of length 0 has read all of its padding.
#
# With seq_lengths, nn.RNN and nnx.RNN return the carry of the last valid element of each sequence,
# which they read at seq_lengths - 1. For a length of 0 that is -1, the last element of the padding,
# and initial_carry is lost. Prompts of several lengths meet this where they are read in chunks, or
# where some rows of a batch have no new tokens: the state of each sequence that has already ended
# goes on over padding tokens, and its text is generated from that state. Select the old carry of
# the rows without a step:
#     jnp.where((seq_lengths == 0)[:, None], old, new)
#
# Seen (jax 0.10.2, CPU), prompts of 3, 4 and 8 tokens, read in two chunks of 4: how far the carry
# of each is from the one after a single call, relative to its norm (a GRU):
#     nnx.RNN 1.24, 1.54, 0.00; nn.RNN 1.54, 1.55, 0.00; with jnp.where 0.00, 0.00, 0.00
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
from flax import linen as nn
from flax import nnx

CHUNK = 4
lengths = jnp.array([3, 4, 8])
prompts = jax.random.normal(jax.random.key(0), (3, 2 * CHUNK, 16))

nnx_rnn = nnx.RNN(nnx.GRUCell(16, 32, rngs=nnx.Rngs(0)), return_carry=True)
linen_rnn = nn.RNN(nn.GRUCell(32), return_carry=True)
variables = linen_rnn.init(jax.random.key(1), prompts)


def of_nnx(x, carry, seq_lengths):
    return nnx_rnn(x, initial_carry=carry, seq_lengths=seq_lengths)[0]


def of_linen(x, carry, seq_lengths):
    return linen_rnn.apply(variables, x, initial_carry=carry, seq_lengths=seq_lengths)[0]


def selected(x, carry, seq_lengths):
    new = of_nnx(x, carry, seq_lengths)
    return jnp.where((seq_lengths == 0)[:, None], carry, new)


def differences(read):
    carry = jnp.zeros((3, 32))
    expected = read(prompts, carry, lengths)
    for start in (0, CHUNK):
        chunk = prompts[:, start : start + CHUNK]
        carry = read(chunk, carry, jnp.clip(lengths - start, 0, CHUNK))
    norms = jnp.linalg.norm(carry - expected, axis=1) / jnp.linalg.norm(expected, axis=1)
    print(read.__name__, [f"{norm:.2f}" for norm in norms.tolist()])
    return norms


for read in (of_nnx, of_linen):
    norms = differences(read)
    if norms[2] > 1e-3 or norms[:2].min() < 0.5:
        raise SystemExit("the behaviour has changed")
if differences(selected).max() > 1e-3:
    raise SystemExit("jnp.where does not help")
EOF
