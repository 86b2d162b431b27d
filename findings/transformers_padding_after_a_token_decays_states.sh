#!/usr/bin/env bash
# transformers 5.24.0: padding that follows a token decays the recurrent states, whatever the mask.
#
# An attention_mask may have zeros anywhere: between two turns of a batch of conversations, or
# behind the shorter prompts of a batch whose cache is continued. A Llama gives the logits of the
# text without padding. Recurrent layers set masked inputs to zero, so the state does not read them.
# But time steps and forget gates have biases and decay the state, and zeros replace the last tokens
# in the window of the convolution. Only padding before the first token has no effect, in calls of
# two or more tokens. Pad on the left, and compute the cache anew for turns of unequal lengths.
#
# Seen (CPU, torch 2.13.0), 12 tokens, then padding and 12 tokens with the cache: the largest error
# of the last 12 logits, in standard deviations, for 1 and 64 tokens of padding
#     Llama 3e-06, 0; Mamba-2 4, 4; Qwen3-Next 4, 5; OLMo-Hybrid 5, 5
#     padding before the first token: at most 1e-05
# Upstream: huggingface/transformers#47086 (closed), where such padding was read as tokens.
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
"$folder/venv/bin/python" -I - <<'EOF' 2>log || { cat log; exit 1; }
import torch
import transformers

torch.set_grad_enabled(False)
sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=4, pad_token_id=0, eos_token_id=2)
attention = dict(num_attention_heads=4, num_key_value_heads=4, intermediate_size=64)
linear = dict(num_key_heads=4, num_value_heads=4, key_head_dim=8, value_head_dim=8)
delta = {f"linear_{name}": size for name, size in linear.items()}
delta["layer_types"] = 3 * ["linear_attention"] + ["full_attention"]
experts = dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32)
configs = dict(
    Llama=attention,
    Mamba2=dict(num_heads=8, head_dim=8, n_groups=2, state_size=16),
    Qwen3Next=attention | delta | experts | dict(head_dim=8),
    OlmoHybrid=attention | delta,
)


def logits_of_12(model, *calls):
    """The last 12 logits after one call per (tokens, mask), at the positions of the mask."""
    cache, masks = None, []
    for tokens, mask in calls:
        masks.append(mask)
        mask = torch.cat(masks, dim=1)
        options = dict(attention_mask=mask, cache=cache, use_cache=True)
        if "Mamba2" not in type(model).__name__:
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            options["position_ids"] = positions[:, -tokens.shape[1] :]
        outputs = model(tokens, **options)
        cache = outputs.cache
    return outputs.logits[:, -12:]


def errors(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes, **configs[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for weight_name, weight in model.named_parameters():
        if weight.ndim == 2 or weight_name.endswith("bias"):
            weight.normal_(0, 0.3)
    first, second = torch.randint(3, 64, (2, 4, 12))
    ones = torch.ones_like(first)
    expected = logits_of_12(model, (first, ones), (second, ones))
    found = []
    for n in (1, 64):
        padding, zeros = torch.zeros(2, 4, n, dtype=torch.int64)
        mask = torch.cat([zeros, ones], dim=1)
        between = (first, ones), (torch.cat([padding, second], dim=1), mask)
        before = (torch.cat([padding, first], dim=1), mask), (second, ones)
        for calls in (between, before):
            error = (logits_of_12(model, *calls) - expected).abs().max()
            found.append((error / expected.std()).item())
    print(name, *(f"{error:.1g}" for error in found))
    return found


for name in configs:
    between_1, before_1, between_64, before_64 = errors(name)
    if max(before_1, before_64) > 1e-3 or (name == "Llama" and between_64 > 1e-3):
        raise SystemExit("padding has an effect on a Llama, or before the first token")
    if name != "Llama" and min(between_1, between_64) < 0.5:
        raise SystemExit("the behaviour has changed")
EOF
