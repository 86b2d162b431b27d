#!/usr/bin/env bash
# torch 2.13.0, onnxruntime 1.32.0: logsigmoid is exported to ONNX as log(sigmoid), and a forget
# gate of -18 makes NaN.
#
# torch computes logsigmoid so that it is x for large negative x. torch.onnx.export, with dynamo or
# without, writes Log(Sigmoid(x)), which is -inf for onnxruntime from -18 on, where its Sigmoid is
# 0. Models with a forget gate (mLSTM, GLA, forgetting attention) subtract cumulative sums of it:
# -inf - -inf is NaN, so one closed gate, as between two packed documents, spoils all later tokens.
# An open gate loses digits: at 16, the decay is off by 47 %. The log of verify=True shows it only
# if the example has such a gate. Write -softplus(-x), which is exported as it is. (jax2onnx 0.17.1
# writes the same for jax.nn.log_sigmoid.)
#
# Seen (onnx 1.23.2, onnxscript 0.7.2, CPU), logsigmoid in onnxruntime, and in torch:
#     -50: -inf, -50; -18: -inf, -18; 16: -6e-08, -1.1e-07; 20: 0, -2.1e-09
#     tokens with NaN of 8 with a gate of -50 at the fifth: 4, with dynamo=False 4; torch 0
#     with -softplus(-x): 0, at most 5e-6 away from torch
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    torch==2.13.0 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -I -W ignore - <<'EOF'
import onnxruntime
import torch
from torch.nn import functional as F


class LogSigmoid(torch.nn.Module):
    def forward(self, x):
        return F.logsigmoid(x)


class GatedAttention(torch.nn.Module):
    def __init__(self, log_gate):
        super().__init__()
        self.log_gate = log_gate

    def forward(self, q, k, v, f):
        total = self.log_gate(f).cumsum(-1)
        causal = torch.ones(8, 8, dtype=torch.bool).tril()
        decay = torch.where(causal, total[:, :, None] - total[:, None, :], -float("inf")).exp()
        return (q @ k.transpose(1, 2) * decay) @ v


def exported(module, *inputs, dynamo=True):
    torch.onnx.export(module, inputs, "model.onnx", dynamo=dynamo, verbose=False)
    session = onnxruntime.InferenceSession("model.onnx")
    names = [value.name for value in session.get_inputs()]
    arrays = [value.numpy() for value in inputs]
    return torch.tensor(session.run(None, dict(zip(names, arrays, strict=True)))[0])


torch.manual_seed(0)
x = torch.tensor([-50.0, -18.0, 16.0, 20.0])
values = exported(LogSigmoid(), x)
for columns in zip(x, values, F.logsigmoid(x), strict=True):
    print(*(f"{value:.2g}" for value in columns))
q, k, v = torch.randn(3, 1, 8, 4)
f = torch.full((1, 8), 3.0)
f[0, 4] = -50
model = GatedAttention(F.logsigmoid)
right = model(q, k, v, f)
results = [exported(model, q, k, v, f, dynamo=dynamo) for dynamo in (True, False)]
counts = [int(result.isnan().any(-1).sum()) for result in (*results, right)]
other = exported(GatedAttention(lambda f: -F.softplus(-f)), q, k, v, f)
difference = float((other - right).abs().max())
print("tokens with NaN:", *counts, "softplus:", int(other.isnan().sum()), f"{difference:.1g}")
if counts != [4, 4, 0] or values[:2].isfinite().any() or difference > 1e-5:
    raise SystemExit("the behaviour has changed")
EOF
