#!/usr/bin/env bash
# qwix 0.1.8: eval() does not turn off the dropout of LoRA in an nnx model.
#
# model.eval() turns off every nnx.Dropout of a model. LoraProvider(dropout=...) makes a dropout
# with deterministic=False in each call, which neither eval() nor nnx.view(deterministic=True)
# reaches. So a fine-tuned model is validated and served with random adapters: two calls on one
# input differ, and a sum of log-probabilities changes from run to run. A model without a random
# stream raises an error that asks for one, in evaluation as well. For evaluation apply LoRA to the
# base model with dropout=0.0 and copy the adapters:
#     nnx.update(served, nnx.state(trained, nnx.LoRAParam))
#
# Seen (jax 0.10.2, flax 0.12.8, CPU), after eval(), how far the outputs of two calls are apart,
# relative to their norm, with a dropout of 0.1 in the layer and in its adapter:
#     no LoRA 0, LoRA 0.27, its adapters in a model with dropout=0.0 0
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0 flax==0.12.8 \
    qwix==0.1.8 opt_einsum==3.4.0 absl-py==2.5.1
cd "$folder"
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I - <<'EOF'
import jax
import jax.numpy as jnp
import qwix
from flax import nnx


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(64, 64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.up(x))


x = jax.random.normal(jax.random.key(0), (256, 64))
base = Layer(nnx.Rngs(0))


def with_lora(dropout):
    provider = qwix.LoraProvider(module_path=".*", rank=4, alpha=8.0, dropout=dropout)
    return qwix.apply_lora_to_model(base, provider, x, rngs=nnx.Rngs(1))


@nnx.jit
def called(model, x):
    return model(x)


def difference(model):
    model.eval()
    first, second = called(model, x), called(model, x)
    return round(float(jnp.linalg.norm(first - second) / jnp.linalg.norm(first)), 2)


trained = with_lora(0.1)
trained.up.kernel_lora_b[...] = jax.random.normal(jax.random.key(2), (4, 64)) / 8
try:
    trained.eval()
    trained(x)
    message = ""
except ValueError as error:
    message = str(error)
trained.set_attributes(qwix_rngs=nnx.Rngs(dropout=3))
served = with_lora(0.0)
nnx.update(served, nnx.state(trained, nnx.LoRAParam))
seen = [difference(model) for model in (base, trained, served)]
print(message, seen)
if "Please set rngs" not in message or seen[0] != 0 or seen[2] != 0 or not 0.2 < seen[1] < 0.4:
    raise SystemExit("the behaviour has changed")
EOF
