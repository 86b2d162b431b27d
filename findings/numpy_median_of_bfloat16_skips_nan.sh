#!/usr/bin/env bash
# numpy 2.4.6, ml_dtypes 0.6.0: a NaN spoils the sort and the median of bfloat16 without a sign.
#
# numpy.sort is documented to place NaN at the end, and the median and the percentiles of float16,
# float32 and float64 with a NaN are NaN. For bfloat16 and float8 the comparison of ml_dtypes,
# which NumPy sorts by, has no order for a NaN. sort leaves it within the array, with one sorted
# part before it and another behind it. median and percentile look for NaN at the end of what they
# sorted and mostly return numbers, so statistics of activations or gradients hide it. max and mean
# are NaN. x.astype(numpy.float32) and jax.numpy have the right results.
#
# Seen: the sort of [3, 1, nan, 2, -1]; median and percentile 99 of 1,000 numbers with one NaN:
#     float16:       [-1, 1, 2, 3, nan], nan, nan
#     bfloat16:      [1, 3, nan, -1, 2], 0.498, 0.988
#     float8_e4m3fn: [1, 3, nan, -1, 2], 0.5, 1
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    numpy==2.4.6 ml_dtypes==0.6.0
cd "$folder"
"$folder/venv/bin/python" -I - <<'EOF'
import ml_dtypes
import numpy as np

nan = float("nan")
results = {}
for dtype in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
    few = np.sort(np.array([3, 1, nan, 2, -1], dtype)).astype(np.float32).tolist()
    many = (np.arange(1000) * 389 % 1000 / 1000).astype(dtype)
    many[500] = nan
    results[dtype] = few, float(np.median(many)), float(np.percentile(many, 99))
    print(np.dtype(dtype), *results[dtype])
few, *statistics = results[np.float16]
if few[:4] != [-1, 1, 2, 3] or not np.isnan(statistics).all():
    raise SystemExit("float16 does the same")
few, *statistics = results[ml_dtypes.bfloat16]
if few[:4] == [-1, 1, 2, 3] or np.isnan(statistics).any():
    raise SystemExit("the behaviour has changed")
EOF
