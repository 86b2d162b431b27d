#!/usr/bin/env bash
# transformers 5.24.0: with its cache, slow heads of a bfloat16 xLSTM never forget.
#
# inference_state_dtype, float32 by default, is documented as the dtype of states in inference.
# Each step computes in it, but the cache has the dtype of the embeddings and rounds C, n and m to
# it after every call. m is a logarithm, which falls by -log(sigmoid(f)) per token. Where that is
# less than half the distance of two bfloat16 numbers, m stays, and what the head holds decays no
# more. A new model has such heads, because its forget gates have biases from 3 to 6. generate
# makes this cache, and so does every call with use_cache, which is the default. A float32
# xLSTMCache, which a call of the model takes, has the right states.
#
# Seen (torch 2.13.0, CPU), one token per call, in the head with a bias of 6; n is |n| exp(m) by the
# default cache, divided by the same by a float32 cache:
#      256 tokens: m -0.934 and -0.84, n 0.94, 3% of the likeliest tokens differ
#      512 tokens: m -1 and -1.68, n 1.68, 3% of the likeliest tokens differ
#     1024 tokens: m -1 and -3.36, n 3.00, 16% of the likeliest tokens differ
#     2048 tokens: m -1 and -6.72, n 6.52, 22% of the likeliest tokens differ
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
from transformers import xLSTMConfig, xLSTMForCausalLM
from transformers.models.xlstm.modeling_xlstm import xLSTMCache

torch.manual_seed(0)
config = xLSTMConfig(vocab_size=64, hidden_size=128, num_hidden_layers=1, num_heads=2)
assert config.inference_state_dtype == "float32"
model = xLSTMForCausalLM(config).eval().to(torch.bfloat16)
tokens = torch.randint(0, 64, (1, 2048))
counts = 256, 512, 1024, 2048


def answers(cache):
    likeliest, states = [], {}
    with torch.no_grad():
        for t in range(tokens.shape[1]):
            output = model(tokens[:, t : t + 1], cache=cache, use_cache=True)
            cache = output.cache
            likeliest.append(output.logits[0, -1].argmax().item())
            if t + 1 in counts:
                _, n, m = (x[0, -1].float() for x in cache.rnn_state[0])
                states[t + 1] = m.item(), (n * m.exp()).norm().item()
    return torch.tensor(likeliest), states


default, states = answers(None)
exact, exact_states = answers(xLSTMCache(config, 1, dtype=torch.float32))
for begin, end in zip((0, *counts), counts):
    (m, n), (exact_m, exact_n) = states[end], exact_states[end]
    differ = (default != exact)[begin:end].float().mean().item()
    print(f"{end} tokens: m {m:.3g} and {exact_m:.3g}, n {n / exact_n:.2f}, {differ:.0%} differ")
if not 1.9 < exact_states[2048][0] / exact_states[1024][0] < 2.1:
    raise SystemExit("m does not fall with a float32 cache, either")
if states[2048][0] != states[1024][0] or states[2048][1] < 2 * exact_states[2048][1]:
    raise SystemExit("the behaviour has changed")
EOF
