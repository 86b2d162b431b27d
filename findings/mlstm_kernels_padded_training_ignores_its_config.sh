#!/usr/bin/env bash
# mlstm_kernels 2.0.6: mode "train_with_padding" ignores eps, chunk_size and autocast_kernel_dtype.
#
# mLSTMBackendConfig, and so xLSTMLargeConfig, has these fields for every mode; for chunk_size it
# says that this mode pads the inputs to multiples of it. The function that pads has defaults of its
# own, the backend does not pass it the fields, and it hands its defaults on to the kernel. So a
# model that trains with padding computes another h than it does in inference, and a model with
# autocast_kernel_dtype="float32" asks its kernel for bfloat16.
#
# Seen (torch 2.13.0, CPU) for eps 0.01, chunk_size 16 and "float32": what the kernel is called
# with, and the largest difference of h from the h of mode "train", relative to the largest h:
#     train: (0.01, 16, torch.float32), difference 0
#     train_with_padding: (1e-06, 64, torch.bfloat16), difference 0.0042
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
from mlstm_kernels.torch import backend_module
from mlstm_kernels.torch.chunkwise.native import mlstm_chunkwise__native_autograd

calls = []


def recorded(q, eps, chunk_size, autocast_kernel_dtype, **arguments):
    calls.append((eps, chunk_size, autocast_kernel_dtype))
    return mlstm_chunkwise__native_autograd(q=q, eps=eps, chunk_size=chunk_size, **arguments)


backend_module.get_mlstm_kernel = lambda name: recorded
torch.manual_seed(0)
B, NH, S, D = 1, 2, 128, 16
q, k, v = torch.randn(3, B, NH, S, D)
i, f = torch.randn(B, NH, S) - 3, torch.randn(B, NH, S) + 3
h = {}
for mode in ("train", "train_with_padding"):
    config = backend_module.mLSTMBackendConfig(
        chunkwise_kernel="chunkwise--native_autograd",
        sequence_kernel="native_sequence__native",
        step_kernel="native",
        mode=mode,
        return_last_states=False,
        eps=1e-2,
        chunk_size=16,
        autocast_kernel_dtype="float32",
    )
    h[mode] = backend_module.mLSTMBackend(config)(q, k, v, i, f)
    difference = (h[mode] - h["train"]).abs().max() / h["train"].abs().max()
    print(f"{mode}: {calls[-1]}, difference {difference:.2g}")
if calls[0] != (1e-2, 16, torch.float32):
    raise SystemExit("mode train has other arguments, too")
if calls[1] != (1e-6, 64, torch.bfloat16):
    raise SystemExit("the behaviour has changed")
EOF
