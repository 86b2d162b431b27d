#!/usr/bin/env bash
# numpy 2.4.6 with ml_dtypes 0.6.0: nan_to_num and nanmean do not see a NaN in bfloat16.
#
# NumPy replaces or skips a NaN only in floating-point arrays, and for it bfloat16, a dtype of
# ml_dtypes, is none. nan_to_num returns the array as it is, with its NaN and inf, so a guard of
# gradients or logits that came from a model as bfloat16 guards nothing; nansum and nanmean are NaN.
# There is no warning. isnan, nanmax, float16 and jnp are right. Cast to float32 before.
#
# Seen, [1, NaN, 3]: nan_to_num [1, NaN, 3], nansum NaN, nanmean NaN, nanmax 3
#     float16, and bfloat16 in jnp (jax 0.10.2): [1, 0, 3], 4, 2, 3
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0
cd "$folder"
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I - <<'EOF'
import jax.numpy as jnp
import ml_dtypes
import numpy as np

values = [1, np.nan, 3]


def results(library, x):
    names = "nan_to_num", "nansum", "nanmean", "nanmax"
    return np.hstack([np.asarray(getattr(library, name)(x), np.float32) for name in names])


seen = [
    results(np, np.array(values, ml_dtypes.bfloat16)),
    results(np, np.array(values, np.float16)),
    results(jnp, jnp.array(values, jnp.bfloat16)),
]
print(*seen, sep="\n")
wrong, right = [1, np.nan, 3, np.nan, np.nan, 3], [1, 0, 3, 4, 2, 3]
if not np.array_equal(seen, [wrong, right, right], equal_nan=True):
    raise SystemExit("the behaviour has changed")
EOF
