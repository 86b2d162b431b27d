#!/usr/bin/env bash
# transformers 5.24.0: RecurrentGemma keeps its recurrent states in the model, where beam search
# does not reorder them and each call of generate overwrites those of the others.
#
# The cache that generate returns has the keys and values of the attention layers only. The states
# of the RG-LRU and of its convolution are attributes of the layers. Beam search reorders the cache,
# so after the first change of beams each one goes on from the states of another. A conversation
# that continues from its cache gets the states of what the model read last, which in a server is
# another conversation. Nothing fails. Pass use_cache=False to beam search, and continue a
# conversation from its text without a cache.
#
# Seen (CPU, torch 2.13.0), how many of 16 texts are the same
#     with and without a cache: greedy 16, four beams 0
#     in a second turn from the cache, with and without another prompt before that turn: 0
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    torch==2.13.0 transformers==5.24.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -I - <<'EOF'
import torch
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

torch.manual_seed(0)
torch.set_grad_enabled(False)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=96, lru_width=32, head_dim=8)
layers = dict(num_hidden_layers=3, num_attention_heads=4, attention_window_size=64)
model = RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**sizes, **layers)).eval()
for name, weight in model.named_parameters():
    if weight.ndim > 1 and "conv" not in name:
        weight.normal_(0, 0.5)


def generated(text, **options):
    options.update(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    mask = torch.ones_like(text)
    return model.generate(text, attention_mask=mask, return_dict_in_generate=True, **options)


equal = dict(greedy=0, beams=0, second_turn=0)
for number in range(16):
    torch.manual_seed(number)
    prompt, turn, other = torch.randint(3, 64, (3, 1, 10))
    for name, beams in (("greedy", 1), ("beams", 4)):
        texts = [generated(prompt, num_beams=beams, use_cache=x).sequences for x in (True, False)]
        equal[name] += torch.equal(*texts)
    texts = []
    for between in ((), (other,)):
        first = generated(prompt)
        for another in between:
            generated(another)
        text = torch.cat([first.sequences, turn], dim=1)
        texts.append(generated(text, cache=first.cache).sequences)
    equal["second_turn"] += torch.equal(*texts)
print(equal)
if equal["greedy"] != 16:
    raise SystemExit("greedy texts depend on the cache, too")
if equal["beams"] > 12 or equal["second_turn"] > 12:
    raise SystemExit("the behaviour has changed")
EOF
