#!/usr/bin/env bash
# transformers 5.24.0: xLSTM and Mamba-2 accept packed documents with seq_idx, and read across them.
#
# DataCollatorWithFlattening(return_seq_idx=True, return_flash_attn_kwargs=True) puts documents one
# after another and says where each begins, by seq_idx, cu_seq_lens_q and position_ids. Bamba keeps
# the documents apart by seq_idx, and raises ValueError if its kernels are missing. Mamba2Model does
# the same, but Mamba2ForCausalLM does not pass seq_idx on, and no layer of an xLSTM reads it. Each
# document then starts from the state of the one before, and training goes on without a message.
# Train these two on batches with padding on the right.
#
# Seen (CPU, torch 2.13.0), how much the logits of the second of two documents depend on the first:
# their largest change, in standard deviations of the logits
#     xLSTMForCausalLM 3.9, Mamba2ForCausalLM 4.1
#     Mamba2Model and BambaForCausalLM: ValueError, they need causal_conv1d
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
from transformers import BambaConfig, BambaForCausalLM, DataCollatorWithFlattening
from transformers import Mamba2Config, Mamba2ForCausalLM, Mamba2Model
from transformers import xLSTMConfig, xLSTMForCausalLM

torch.set_grad_enabled(False)
sizes = dict(vocab_size=64, hidden_size=64, num_hidden_layers=2)
kernels = dict(
    chunkwise_kernel="chunkwise--native_autograd",
    sequence_kernel="native_sequence__native",
    step_kernel="native",
)
xlstm = xLSTMConfig(**sizes, **kernels, num_blocks=2, num_heads=4, qk_dim_factor=1.0)
mamba2 = Mamba2Config(**sizes, state_size=8, num_heads=8, head_dim=16, n_groups=2)
heads = dict(num_attention_heads=4, num_key_value_heads=2, mamba_n_heads=8, mamba_d_head=16)
bamba = BambaConfig(**sizes, **heads, attn_layer_indices=[1], mamba_d_state=8)
collate = DataCollatorWithFlattening(
    return_seq_idx=True, return_flash_attn_kwargs=True, return_tensors="pt"
)


def change_of_the_second_document(kind, config):
    torch.manual_seed(0)
    model = kind(config).eval()
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.normal_(0, 0.15)
    first, other, second = torch.randint(3, 64, (3, 12)).tolist()
    outputs = []
    for document in (first, other):
        batch = collate([{"input_ids": document}, {"input_ids": second}])
        if kind is Mamba2Model:
            batch.pop("labels")
        try:
            outputs.append(model(**batch, use_cache=False)[-1][0, 12:])
        except ValueError as error:
            print(kind.__name__, error)
            return "refused"
    difference = ((outputs[0] - outputs[1]).abs().max() / outputs[0].std()).item()
    print(kind.__name__, difference)
    return difference


models = ((xLSTMForCausalLM, xlstm), (Mamba2ForCausalLM, mamba2))
accepted = [change_of_the_second_document(*model) for model in models]
models = ((Mamba2Model, mamba2), (BambaForCausalLM, bamba))
refused = [change_of_the_second_document(*model) for model in models]
if refused != 2 * ["refused"]:
    raise SystemExit("Mamba2Model and Bamba do not refuse seq_idx, either")
if "refused" in accepted or min(accepted) < 0.1:
    raise SystemExit("the behaviour has changed")
EOF
