#!/usr/bin/env bash
# xlstm 2.0.6: in an sLSTM layer, fgate computes the input gate, and igate the forget gate.
#
# The cell reads the outputs of the layer's projections in the order i, f, z, o, in which its bias
# and its recurrent kernel are. sLSTMLayer passes them in the order fgate, igate, zgate, ogate. The
# weights of both are initialised alike, so training is not affected. A checkpoint that is
# converted by the names of its weights becomes another model. The bias and the recurrent kernel
# are not swapped.
#
# Seen (torch 2.13.0, CPU), after the first token, where m is the input gate's preactivation:
#     m - fgate(x): 0; m - igate(x): 0.98
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
from xlstm.blocks.slstm.layer import sLSTMLayer, sLSTMLayerConfig

torch.manual_seed(0)
config = sLSTMLayerConfig(
    embedding_dim=32, num_heads=4, conv1d_kernel_size=0, backend="vanilla", dtype="float32"
)
layer = sLSTMLayer(config).eval()
layer.reset_parameters()
x = torch.randn(1, 1, 32)
with torch.no_grad():
    _, state = layer(x, return_last_state=True)
    y, c, n, m = state["slstm_state"]
    seen = [(m - gate(x)[0]).abs().max().item() for gate in (layer.fgate, layer.igate)]
    bias = layer.slstm_cell.bias[:, :2].abs().amax((0, 2)).tolist()
print("m - fgate(x), m - igate(x):", *(f"{x:.2g}" for x in seen), "bias of i and f:", bias)
if bias[0] != 0 or bias[1] == 0:
    raise SystemExit("the second bias is not the forget gate's")
if seen[0] > 1e-5 or seen[1] < 0.1:
    raise SystemExit("the behaviour has changed")
EOF
