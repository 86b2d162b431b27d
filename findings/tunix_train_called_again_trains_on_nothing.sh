#!/usr/bin/env bash
# tunix 0.1.7: a second call of PeftTrainer.train skips as many batches as the first one trained on.
#
# To go on after a restart, train() skips the batches that the restored steps have seen. It counts
# the steps of the trainer, and begins to count batches at each call. So a loop that calls train()
# once per epoch trains on the first epoch only, and a second stage on other data leaves out their
# start. No message says so. Call train() once, with a data set that repeats itself; for a second
# stage make a new trainer. The same holds for DPOTrainer and ORPOTrainer, which inherit train().
#
# Seen (jax 0.10.2, CPU), the steps of one trainer that is given 5 batches three times and then 8
# others, and the same batches in a single call:
#     three calls: 5, 5, 5 steps; 8 others: 3 more
#     one call: 15 steps
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    google-tunix==0.1.7 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0 flax==0.12.8 \
    optax==0.2.8 qwix==0.1.8 orbax-checkpoint==0.12.8 grain==0.2.18 transformers==5.12.1 \
    tokenizers==0.22.2 sentencepiece==0.2.3 datasets==5.2.0
cd "$folder"
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I -W ignore - <<'EOF'
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix import PeftTrainer, TrainingConfig

VOCABULARY = 4


class Model(nnx.Module):
    def __init__(self):
        self.bias = nnx.Param(jnp.zeros(VOCABULARY))

    def __call__(self, tokens, positions, cache, attention_mask):
        return jnp.broadcast_to(self.bias[...], (*tokens.shape, VOCABULARY)), cache


def batches(token, number):
    tokens = np.full((2, 8), token)
    return [{"input_tokens": tokens, "input_mask": np.ones_like(tokens)}] * number


def model_inputs(batch):
    return {**batch, "positions": None, "attention_mask": None}


def trainer():
    made = PeftTrainer(Model(), optax.sgd(0.1), TrainingConfig(eval_every_n_steps=1000))
    return made.with_gen_model_input_fn(model_inputs)


epochs = trainer()
steps = []
for data in [batches(1, 5)] * 3 + [batches(2, 8)]:
    epochs.train(data)
    steps.append(epochs.train_steps)
once = trainer()
once.train(batches(1, 5) * 3)
print(steps, once.train_steps)
if once.train_steps != 15:
    raise SystemExit("one call does not train on all batches")
if steps != [5, 5, 5, 8]:
    raise SystemExit("the behaviour has changed")
EOF
