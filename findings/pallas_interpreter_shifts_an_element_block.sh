#!/usr/bin/env bash
# jax 0.10.2 and 0.12.0.1: an interpreted Pallas kernel reads an Element block that reaches beyond
# its array from a place before the one that the index map names.
#
# pl.Element(16) counts an index map in elements. At element 32 of 40 an interpreted kernel gets
# elements 32 to 39 and NaN behind them, which it masks, as in a last block that is partial. At
# element 40 of 48 it gets elements 32 to 47: the block is moved forward until it fits, because the
# array is padded to a multiple of 16 and 48 is one. Results are those of other elements, finite and
# without a warning. Triton's lowering adds the index to the pointer, so compiled for a GPU a masked
# load reads elements 40 to 47.
#
# Seen (CPU, interpreted):
#     at 32 of 40: 32 to 39, then NaN; at 40 of 48: 32 to 47
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
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl


def kernel(block, out):
    out[...] = block[...]


def read(size, start):
    return pl.pallas_call(
        kernel, in_specs=[pl.BlockSpec((pl.Element(16),), lambda i: (start,))],
        out_specs=pl.BlockSpec((16,), lambda i: (0,)), grid=(1,),
        out_shape=jax.ShapeDtypeStruct((16,), jnp.float32), interpret=True,
    )(jnp.arange(size, dtype=jnp.float32))


padded, shifted = read(40, 32), read(48, 40)
print("at 32 of 40:", padded)
print("at 40 of 48:", shifted)
if not np.array_equal(padded, [*range(32, 40), *[np.nan] * 8], equal_nan=True):
    raise SystemExit("the block at 32 of 40 has changed")
if not np.array_equal(shifted, np.arange(32.0, 48)):
    raise SystemExit("the behaviour has changed")
EOF
