#!/usr/bin/env bash
# mlstm_kernels 2.0.6: the custom backward pass of the native chunkwise kernel is not the gradient.
#
# chunkwise--native_autograd and chunkwise--native_custbw compute the same h and last states, and a
# user would take the second one as the faster form of the first. Its gradients differ: the
# cotangents of the states n and m are dropped (all gradients are zeros), and the denominator of h
# is a constant for it, which is right only if a norm over each head follows.
#
# Seen (torch 2.13.0, CPU, float32), norms of the gradients of q, k, v, i, f, autograd / custbw:
#     sum of h: 13.8 14.7 15.9 7.7 2.2 / 16.2 15.3 15.9 12.5 2.6
#     sum of n: none 3.2 none 2.3 0.6 / 0 0 0 0 0
#     sum of m: none none none 1.0 0 / 0 0 0 0 0
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
from mlstm_kernels.torch.chunkwise.native import (
    mlstm_chunkwise__native_autograd,
    mlstm_chunkwise__native_custbw,
)

B, NH, S, D = 1, 1, 32, 8
options = dict(return_last_states=True, chunk_size=16, autocast_kernel_dtype=torch.float32)
norms, results = {}, {}
for kernel in (mlstm_chunkwise__native_autograd, mlstm_chunkwise__native_custbw):
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, NH, S, D)] * 3 + [(B, NH, S)] * 2
    x = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    h, (c, n, m) = kernel(*x, **options)
    results[kernel] = torch.cat([y.detach().flatten() for y in (h, c, n, m)])
    norms[kernel] = {}
    for name, y in dict(h=h, n=n, m=m).items():
        grads = torch.autograd.grad(y.sum(), x, retain_graph=True, allow_unused=True)
        norms[kernel][name] = [0.0 if g is None else g.norm().item() for g in grads]
        print(kernel.__name__, name, [round(g, 2) for g in norms[kernel][name]])
exact, custom = norms.values()
if not torch.allclose(*results.values(), atol=1e-4):
    raise SystemExit("the forward passes differ")
dropped = all(sum(custom[x]) == 0 and sum(exact[x]) > 0.5 for x in ("n", "m"))
if not dropped or abs(exact["h"][3] / custom["h"][3] - 1) < 0.2:
    raise SystemExit("the behaviour has changed")
EOF
