#!/usr/bin/env bash
# flax 0.12.8: nnx.GRUCell has no b_hn, which its documentation has in the formula.
#
# The reset gate multiplies b_hn in the formulas of nnx, linen and PyTorch, so no other bias can
# stand in for it. linen and PyTorch have this bias; nnx computes without it. A new cell does not
# show that, because biases start at 0, and an import that fills every parameter of the nnx cell
# ends without a complaint. A GRU that was trained in linen or PyTorch then has other outputs, and
# goes on training with fewer parameters. Write the cell with a parameter b_hn, or keep it in linen.
#
# Seen (jax 0.10.2; also flax 0.12.12), the largest difference of h over 50 tokens between a linen
# cell and the nnx cell with its weights:
#     b_hn = 0 0e+00, b_hn of about 1 dropped 0.96, half of it in b_in 0.65
# Upstream: google/flax#5594 (open).
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    flax==0.12.8 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0
cd "$folder"
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I - <<'EOF'
import jax
import jax.numpy as jnp
from flax import linen, nnx

size, zeros = 32, jnp.zeros(32)
keys = jax.random.split(jax.random.key(0), 3)
tokens = jax.random.normal(keys[0], (50, size))
older = linen.GRUCell(size)
params = older.init(keys[1], zeros, tokens[0])["params"]
b_hn = jax.random.normal(keys[2], (size,))


def difference(b_hn, share):
    """The largest difference of h, with `share` of b_hn added to b_in."""
    weights = params | {"hn": params["hn"] | {"bias": b_hn}}
    cell = nnx.GRUCell(size, size, rngs=nnx.Rngs(0))

    def joined(names, leaf):
        return jnp.concatenate([weights[name][leaf] for name in names], axis=-1)

    cell.dense_i.kernel[...] = joined(["ir", "iz", "in"], "kernel")
    cell.dense_h.kernel[...] = joined(["hr", "hz", "hn"], "kernel")
    cell.dense_i.bias[...] = joined(["ir", "iz", "in"], "bias").at[2 * size :].add(share * b_hn)
    old, new, largest = zeros, zeros, 0.0
    for x in tokens:
        old = older.apply({"params": weights}, old, x)[0]
        new = cell(new, x)[0]
        largest = max(largest, float(jnp.abs(old - new).max()))
    return largest


leaves = jax.tree.leaves(nnx.state(nnx.GRUCell(size, size, rngs=nnx.Rngs(0)), nnx.Param))
expected, dropped, added = difference(zeros, 0), difference(b_hn, 0), difference(b_hn, 0.5)
print(f"b_hn = 0 {expected:.0e}, b_hn of about 1 dropped {dropped:.2g}", end=", ")
print(f"half of it in b_in {added:.2g}")
if expected > 1e-5:
    raise SystemExit("the cells differ without b_hn, too")
if len(leaves) != 3 or min(dropped, added) < 0.1:
    raise SystemExit("the behaviour has changed")
EOF
