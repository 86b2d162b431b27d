#!/usr/bin/env bash
# xlstm 2.0.6: xLSTMLarge.generate overwrites the state that it is passed.
#
# A state is what a prompt leaves behind, so a user computes it once and starts several answers from
# it. generate writes the state of its own answer into the tensors of the caller: with the same
# arguments, the second greedy answer differs from the first one.
#
# Seen (torch 2.13.0, mlstm_kernels 2.0.6, CPU):
#     state changed by 3
#     answers [8, 6, 7, 13, 8] and [29, 18, 24, 47, 63]
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    torch==2.13.0 xlstm==2.0.6 mlstm_kernels==2.0.6 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -I - <<'EOF'
import torch
from xlstm.xlstm_large.model import xLSTMLarge, xLSTMLargeConfig

torch.manual_seed(0)
config = xLSTMLargeConfig(
    embedding_dim=128,
    num_heads=2,
    num_blocks=1,
    vocab_size=64,
    chunkwise_kernel="chunkwise--native_autograd",
    sequence_kernel="native_sequence__native",
    step_kernel="native",
    mode="inference",
    return_last_states=True,
)
model = xLSTMLarge(config)
start = torch.tensor([[9]])
with torch.no_grad():
    _, state = model(torch.arange(8)[None])
    before = [x.clone() for block in state.values() for x in block]
    answers = [
        model.generate(prefill_tokens=start, max_length=5, state=state)[0][0].tolist()
        for _ in range(2)
    ]
after = [x for block in state.values() for x in block]
change = max((x - y).abs().max().item() for x, y in zip(before, after))
print(f"state changed by {change:.2g}; answers {answers[0]} and {answers[1]}")
if change == 0 or answers[0] == answers[1]:
    raise SystemExit("the behaviour has changed")
EOF
