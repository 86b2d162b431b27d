#!/usr/bin/env bash
# xlstm 2.0.6: a config.yaml with eps: 1e-6 is loaded, and the model fails at its first call.
#
# load_from_pretrained reads the file by yaml.safe_load and passes the fields to a dataclass, which
# checks no types. For PyYAML, which reads YAML 1.1, a number has a point before its exponent:
# 1.0e-6 is a number, 1e-6 is a string, and so is 1e-06, which is how Python prints the number.
#
# Seen (torch 2.13.0, mlstm_kernels 2.0.6, PyYAML 6.0.4, CPU):
#     1.0e-6: runs
#     1e-6 and 1e-06: TypeError: unsupported operand type(s) for +: 'Tensor' and 'str'
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    torch==2.13.0 xlstm==2.0.6 mlstm_kernels==2.0.6 numpy==2.4.6 PyYAML==6.0.4
cd "$folder"
"$folder/venv/bin/python" -I - <<'EOF'
import dataclasses
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file
from xlstm.xlstm_large.from_pretrained import load_from_pretrained
from xlstm.xlstm_large.model import xLSTMLarge, xLSTMLargeConfig

config = xLSTMLargeConfig(
    embedding_dim=128,
    num_heads=2,
    num_blocks=1,
    vocab_size=64,
    chunkwise_kernel="chunkwise--native_autograd",
    sequence_kernel="native_sequence__native",
    step_kernel="native",
    return_last_states=True,
)
save_file(xLSTMLarge(config).state_dict(), "model.safetensors")


def outcome(eps):
    fields = dataclasses.asdict(config)
    del fields["eps"]
    Path("config.yaml").write_text(yaml.safe_dump(fields) + f"eps: {eps}\n")
    model = load_from_pretrained(".")
    try:
        model(torch.arange(64)[None])
        return "runs"
    except TypeError as error:
        return f"TypeError: {error}"


seen = {eps: outcome(eps) for eps in ("1.0e-6", "1e-6", "1e-06")}
print(seen)
if seen["1.0e-6"] != "runs" or not all("'str'" in seen[x] for x in ("1e-6", "1e-06")):
    raise SystemExit("the behaviour has changed")
EOF
