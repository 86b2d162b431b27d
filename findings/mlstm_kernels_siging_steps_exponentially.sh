#!/usr/bin/env bash
# mlstm_kernels 2.0.6: a model with a sigmoid input gate is trained with it, and generates with an
# exponential one.
#
# The kernels whose names contain "siging" are values of chunkwise_kernel in mLSTMBackendConfig, and
# so in xLSTMLargeConfig. Mode "inference" passes a single token to step_kernel instead. All step
# kernels have the exponential gate, and nothing checks that both agree. So token by token, the
# backend computes what a model with exponential gates would. Several tokens at once raise an
# AssertionError in this mode with the siging kernels that run on a CPU.
#
# Seen (torch 2.13.0, CPU), the largest difference of h, 16 tokens one by one, from the h of mode
# "train", relative to the largest h:
#     parallel--native_autograd: 1.9e-07
#     parallel--native_siging_autograd: 1.9; from the h of parallel--native_autograd: 1.9e-07
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
from mlstm_kernels.torch.backend_module import mLSTMBackend, mLSTMBackendConfig

torch.manual_seed(0)
B, NH, S, D = 1, 2, 16, 16
q, k, v = torch.randn(3, B, NH, S, D)
i, f = torch.randn(B, NH, S), torch.randn(B, NH, S) + 3


def trained_and_stepped(kernel):
    config = mLSTMBackendConfig(
        chunkwise_kernel=kernel,
        sequence_kernel="native_sequence__native",
        step_kernel="native",
        return_last_states=False,
        autocast_kernel_dtype="float32",
    )
    backend = mLSTMBackend(config)
    state, outputs = (None, None, None), []
    for t in range(S):
        token = (x[:, :, t : t + 1] for x in (q, k, v, i, f))
        h, state = backend(*token, *state, mode="inference")
        outputs.append(h)
    return backend(q, k, v, i, f, mode="train"), torch.cat(outputs, dim=2)


def difference(h, expected):
    return ((h - expected).abs().max() / expected.abs().max()).item()


exponential, steps = trained_and_stepped("parallel--native_autograd")
sigmoid, siging_steps = trained_and_stepped("parallel--native_siging_autograd")
seen = [
    difference(steps, exponential),
    difference(siging_steps, sigmoid),
    difference(siging_steps, exponential),
]
print(*(f"{x:.2g}" for x in seen))
if seen[0] > 1e-5:
    raise SystemExit("the steps of the exponential gate differ, too")
if seen[1] < 1 or seen[2] > 1e-5:
    raise SystemExit("the behaviour has changed")
EOF
