#!/usr/bin/env bash
# tunix 0.1.7: DPOTrainer puts a <bos> between prompt and response, and cuts prompts at their end.
#
# Given strings and a tokenizer, DPOTrainer tokenizes prompt and responses one by one, each as the
# start of a text. So the policy learns answers that follow a second <bos>, which generation never
# produces, and which tells a model that what came before is another text. The <bos> is among the
# tokens whose probability is trained. A prompt longer than max_prompt_length loses its end, which
# has the question and the turn marker, and keeps its start; the documentation only says that it is
# truncated. ORPOTrainer is the same class. Pass token ids and masks instead of strings (prompt_ids,
# prompt_mask, chosen_ids, ...): they are used as they are.
#
# Seen (jax 0.10.2, CPU), what the model reads for a prompt "q0 q1 q2" and a response "a0 a1", with
# max_prompt_length=6, the trained tokens in brackets; and for a prompt of q0 to q7:
#     <pad> <pad> <bos> q0 q1 q2 [<bos> a0 a1] <pad>
#     <bos> q0 q1 q2 q3 q4 [<bos> a0 a1] <pad>
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
import jax
import numpy as np
import optax
from flax import nnx
from tunix import DPOTrainer, DPOTrainingConfig

WORDS = ["<pad>", "<bos>", "<eos>", *(f"q{n}" for n in range(8)), *(f"a{n}" for n in range(4))]
read = []


class Tokenizer:
    def encode(self, text):
        return [WORDS.index(word) for word in text.split()]

    def decode(self, ids):
        return " ".join(WORDS[n] for n in ids)

    def pad_id(self):
        return WORDS.index("<pad>")

    def bos_id(self):
        return WORDS.index("<bos>")

    def eos_id(self):
        return WORDS.index("<eos>")


class Model(nnx.Module):
    def __init__(self):
        self.embed = nnx.Embed(len(WORDS), len(WORDS), rngs=nnx.Rngs(0))

    def __call__(self, tokens, positions, cache, attention_mask):
        jax.debug.callback(read.append, tokens)
        return self.embed(tokens), cache


config = DPOTrainingConfig(
    eval_every_n_steps=1, max_steps=1, max_prompt_length=6, max_response_length=4
)
batch = {
    "prompts": ["q0 q1 q2", "q0 q1 q2 q3 q4 q5 q6 q7"],
    "chosen_responses": ["a0 a1", "a0 a1"],
    "rejected_responses": ["a2", "a3"],
}
DPOTrainer(Model(), None, optax.sgd(0.1), config, tokenizer=Tokenizer()).train([batch])
jax.effects_barrier()
seen = [Tokenizer().decode(row) for row in np.asarray(read[0])[:2]]
print(*seen, sep="\n")
if seen != [
    "<pad> <pad> <bos> q0 q1 q2 <bos> a0 a1 <pad>",
    "<bos> q0 q1 q2 q3 q4 <bos> a0 a1 <pad>",
]:
    raise SystemExit("the behaviour has changed")
EOF
