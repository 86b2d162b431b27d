#!/usr/bin/env bash
# orbax-checkpoint 0.12.8: a bit that flips in a checkpoint's data is restored without an error.
#
# A checkpoint is compressed and lies in a format whose index has checksums, so a user expects a
# disk's fault to be found when it is read. The data of the arrays has none: in a file of 64 x 64
# random floats most flips of one bit are restored, as one to several hundred wrong numbers.
#
# Seen (jax 0.10.2, CPU), bits in 8 places between 30 and 90 % of the largest file, one at a time:
#     all 8 restored without an error, with 1 to 567 of 4,096 numbers wrong
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0 orbax-checkpoint==0.12.8
cd "$folder"
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I - <<'EOF'
import tempfile
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

weights = np.asarray(jax.random.normal(jax.random.key(0), (64, 64)))
target = dict(w=jax.ShapeDtypeStruct(weights.shape, weights.dtype))
seen = []
with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
    saved = Path(folder) / "step"
    checkpointer.save(saved, dict(w=weights))
    checkpointer.wait_until_finished()
    assert (checkpointer.restore(saved, target)["w"] == weights).all()
    data = max((p for p in saved.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    intact = data.read_bytes()
    for place in np.linspace(0.3, 0.9, 8) * len(intact):
        damaged = bytearray(intact)
        damaged[int(place)] ^= 1
        data.write_bytes(damaged)
        try:
            restored = np.asarray(checkpointer.restore(saved, target)["w"])
            seen.append(int((restored != weights).sum()))
        except Exception as error:  # whatever a reader of the format raises
            seen.append(type(error).__name__)
print("numbers changed:", seen)
if sum(isinstance(n, int) and n > 0 for n in seen) < 4:
    raise SystemExit("the behaviour has changed")
EOF
