#!/usr/bin/env bash
# transformers 5.24.0: RWKV continues each prompt of a batch with the previous token of the last.
#
# With a cache, each step reads one token per prompt, of shape (batch, 1, hidden_size), and mixes it
# with the state of the previous token, of shape (batch, hidden_size). The two broadcast, so a step
# returns one position for each prompt of the batch. generate samples from the last position, in
# which every prompt is mixed with the previous token of the last prompt. Nothing fails, but the
# text of a prompt depends on the rest of its batch. Pass use_cache=False, or generate one prompt at
# a time.
#
# Seen (CPU, torch 2.13.0), the shape of the logits of one step for four prompts:
#     (4, 4, 64), not (4, 1, 64)
# Of 12 greedy tokens, how many precede the first that differs from the prompt's text alone:
#     batch of four: 1, 1, 12 and 4; batch of four with use_cache=False: 12, 12, 12 and 12
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
from transformers import RwkvConfig, RwkvForCausalLM

torch.manual_seed(0)
torch.set_grad_enabled(False)
model = RwkvForCausalLM(
    RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, context_length=64)
).eval()
for weight in model.parameters():
    if weight.ndim == 2:
        weight.normal_(0, 0.15)
prompts = torch.randint(3, 64, (4, 10))


def generated(prompts, **options):
    text = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )
    return text[:, prompts.shape[1] :]


def common(texts):
    """How many tokens each text shares with the text of its prompt alone, without a cache."""
    equal = texts == expected[: len(texts)]
    return equal.long().cumprod(1).sum(1).tolist()


state = model(prompts, use_cache=True).state
shape = tuple(model(prompts[:, :1], state=state, use_cache=True).logits.shape)
expected = torch.cat([generated(row[None], use_cache=False) for row in prompts])
alone = common(generated(prompts[:1]))
batch = common(generated(prompts))
without_cache = common(generated(prompts, use_cache=False))
print("step", shape, "alone", alone, "batch", batch, "without a cache", without_cache)
if alone != [12] or without_cache != 4 * [12]:
    raise SystemExit("prompts that are alone, or have no cache, have another text, too")
if shape != (4, 4, 64) or min(batch) == 12:
    raise SystemExit("the behaviour has changed")
EOF
