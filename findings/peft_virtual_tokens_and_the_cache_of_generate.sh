#!/usr/bin/env bash
# peft 0.21.2, transformers 5.24.0: generate repeats the virtual tokens of prompt tuning before each
# new token, and ignores the prefix of prefix tuning.
#
# peft adds virtual tokens to the first call of a generation, and recognises that call by the cache
# in past_key_values. transformers 5.24 passes the cache as "cache", so each call looks like the
# first one. With prompt tuning and P-tuning, each step reads all virtual tokens again before its
# token. The prefix of prefix tuning goes into a past_key_values that the model does not read, and
# the text is the base model's. peft accepts any version of transformers, and nothing fails; the
# loss and direct calls are right. Pass use_cache=False to generate; prefix tuning of a Llama also
# needs a loop over direct calls.
#
# Seen (CPU, torch 2.13.0), six virtual tokens and prompts of 12 tokens: how many tokens the first
# calls read, and how many of 8 texts are those of a loop over direct calls, those of the base
# model, and, with use_cache=False, those of the loop
#     Qwen3, prompt tuning and P-tuning; Mamba-2, prompt tuning: 18, 7, 7; 0, 0, 8
#     Qwen3, prefix tuning: 12, 1, 1; 0, 8, 8
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    peft==0.21.2 transformers==5.24.0 torch==2.13.0 accelerate==1.15.0 numpy==2.4.6
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -I - <<'EOF' 2>log || { cat log; exit 1; }
import torch
from peft import PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import Mamba2Config, Mamba2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2)
heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=64)
qwen = (Qwen3ForCausalLM, Qwen3Config(**sizes, **heads))
heads = dict(num_heads=8, head_dim=8, n_groups=2, state_size=8, chunk_size=8)
mamba = (Mamba2ForCausalLM, Mamba2Config(**sizes, **heads, pad_token_id=0, eos_token_id=2))


def counts(model, adapter, **options):
    torch.manual_seed(0)
    kind, config = model
    base = kind(config)
    for weight in base.parameters():
        if weight.ndim == 2:
            weight.data.normal_(0, 0.3)
    lengths = []
    layer = base.get_decoder().layers[0]
    layer.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape[1]))
    config = adapter(task_type="CAUSAL_LM", num_virtual_tokens=6, **options)
    model = get_peft_model(base, config).eval()
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data.normal_()

    def generated(prompt, **options):
        lengths.clear()
        options.update(max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
        mask = torch.ones_like(prompt)
        return model.generate(input_ids=prompt, attention_mask=mask, **options)

    equal = [0, 0, 0]
    for prompt in torch.randint(3, 64, (8, 1, 12)):
        expected = prompt
        for _ in range(10):
            logits = model(input_ids=expected, attention_mask=torch.ones_like(expected)).logits
            expected = torch.cat([expected, logits[:, -1:].argmax(-1)], dim=1)
        with model.disable_adapter():
            of_base = generated(prompt)
        no_cache = generated(prompt, use_cache=False)
        text = generated(prompt)
        pairs = ((text, expected), (text, of_base), (no_cache, expected))
        equal = [count + torch.equal(*pair) for count, pair in zip(equal, pairs, strict=True)]
    print(kind.__name__, adapter.__name__, lengths[:3], equal)
    return lengths[:3], equal


with torch.no_grad():
    prompt = counts(qwen, PromptTuningConfig), counts(mamba, PromptTuningConfig)
    p_tuning = counts(qwen, PromptEncoderConfig, encoder_hidden_size=16)
    prefix = counts(qwen, PrefixTuningConfig)
for lengths, (as_loop, _, no_cache) in (*prompt, p_tuning):
    if lengths != [18, 7, 7] or as_loop > 4 or no_cache != 8:
        raise SystemExit("the behaviour has changed")
if prefix != ([12, 1, 1], [0, 8, 8]):
    raise SystemExit("the behaviour of prefix tuning has changed")
EOF
