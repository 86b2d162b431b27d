#!/usr/bin/env bash
# xlstm 2.0.6: gradient_recurrent_clipval of an sLSTM also clips its outputs, and forward_clipval
# does nothing.
#
# The comments of sLSTMCellConfig say that the first clips the recurrent gradient, and the second y.
# The CUDA kernels are compiled with gradient_recurrent_clipval as both limits, so a small one,
# which only large gradients should meet, also clips most of y. Nothing reads forward_clipval.
# Backend "vanilla" ignores both fields, so on a CPU it evaluates another model than the CUDA
# kernels have trained.
#
# Seen (CPU), the flags of sLSTMCellConfig, and the largest |y| of backend "vanilla" (torch 2.13.0):
#     forward_clipval=0.01: no flag, 0.77, as without it
#     gradient_recurrent_clipval=0.01: both flags are 0.01; 0.77
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
from xlstm.blocks.slstm.cell import sLSTMCell, sLSTMCellConfig


def limits_and_largest(**options):
    torch.manual_seed(0)
    config = sLSTMCellConfig(
        hidden_size=32, num_heads=4, backend="vanilla", bias_init="standard", **options
    )
    flags = dict(flag.split("=") for flag in config.defines)
    limits = [
        flags[f"-DSLSTM_{name}_CLIPVAL"]
        for name in ("FORWARD", "GRADIENT_RECURRENT")
        if flags[f"-DSLSTM_{name}_CLIPVAL_VALID"] == "true"
    ]
    y, _ = sLSTMCell(config)(torch.randn(2, 6, 4 * 32))
    print(options, limits, f"{y.abs().max().item():.2g}")
    return limits, y.abs().max().item()


no_limits, expected = limits_and_largest()
if no_limits or expected < 0.1:
    raise SystemExit("there are limits by default, or y is too small to meet them")
forward = limits_and_largest(forward_clipval=0.01)
gradient = limits_and_largest(gradient_recurrent_clipval=0.01)
if forward != ([], expected) or gradient != (["0.01", "0.01"], expected):
    raise SystemExit("the behaviour has changed")
EOF
