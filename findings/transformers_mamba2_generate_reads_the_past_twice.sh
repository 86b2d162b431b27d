#!/usr/bin/env bash
# transformers 5.24.0: generate reads the past a second time if it goes on from the cache of a
# Mamba-2.
#
# The documentation continues a conversation by a call of generate with the text up to now and the
# cache that the last call returned. generate then leaves out what the cache has read, by the length
# of its attention layers. The cache of a pure Mamba-2 has no such layer, and the model reads the
# text from its first token on a state that has that text already. The result is another text, and
# no message says so; hybrids such as Bamba read the new tokens only. Pass the tokens that the cache
# has not read, which are the last one generated and the new ones, and put the texts together.
#
# Seen (CPU, torch 2.13.0), 20 tokens, 12 generated ones, then 12 new ones; 8 conversations:
#     the whole text: reads 44 tokens, and 3 conversations go on as without a cache
#     the unread tokens: reads 13, and 8 go on as without a cache
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
import copy

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

torch.manual_seed(0)
torch.set_grad_enabled(False)
sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8, chunk_size=8)
heads = dict(num_heads=8, head_dim=8, n_groups=2)
tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
model = Mamba2ForCausalLM(Mamba2Config(**sizes, **heads, **tokens)).eval()
for weight in model.parameters():
    if weight.ndim == 2:
        weight.normal_(0, 0.3)
lengths = []
model.get_input_embeddings().register_forward_pre_hook(
    lambda module, inputs: lengths.append(inputs[0].shape[1])
)


def generated(text, cache=None):
    """The output of generate, its 12 new tokens, and how many tokens its first step read."""
    lengths.clear()
    outputs = model.generate(
        text,
        attention_mask=torch.ones_like(text),
        cache=cache,
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
    )
    return outputs, outputs.sequences[:, text.shape[1] :], lengths[0]


equal = {"whole": 0, "unread": 0}
for number in range(8):
    torch.manual_seed(number)
    turn = generated(torch.randint(3, 64, (1, 20)))[0]
    text = torch.cat([turn.sequences, torch.randint(3, 64, (1, 12))], dim=1)
    expected = generated(text)[1]
    _, whole, read_whole = generated(text, copy.deepcopy(turn.cache))
    _, unread, read_unread = generated(text[:, 31:], turn.cache)
    equal["whole"] += torch.equal(whole, expected)
    equal["unread"] += torch.equal(unread, expected)
print(f"whole text: reads {read_whole}, {equal['whole']} of 8 equal")
print(f"unread tokens: reads {read_unread}, {equal['unread']} of 8 equal")
if (equal["unread"], read_unread) != (8, 13):
    raise SystemExit("the unread tokens do not continue the conversation, either")
if equal["whole"] == 8 or read_whole != 44:
    raise SystemExit("the behaviour has changed")
EOF
