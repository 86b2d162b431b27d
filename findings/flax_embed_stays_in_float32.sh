#!/usr/bin/env bash
# flax 0.12.8: after a cast of an nnx model's parameters to bfloat16, Embed computes in float32.
#
# Mixed precision by casting all parameters works for nnx's Linear, Conv, Einsum, LayerNorm and
# RMSNorm, whose dtype is None: they follow their parameters. Embed and LSTMCell store float32 as
# their dtype when they are made, convert back, and everything after an Embed is float32 by
# promotion: the model computes in full precision, at full cost, and the logits are right, so no
# test of values sees it. linen's Embed follows its parameters.
#
# Seen (jax 0.10.2, CPU), dtypes of results: Linear, LayerNorm, RMSNorm, linen.Embed bfloat16;
#     nnx.Embed float32, also with flax 0.12.12; Embed(dtype=jnp.bfloat16) bfloat16
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0 flax==0.12.8
cd "$folder"
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I - <<'EOF'
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

x, ids = jnp.ones((1, 4), jnp.bfloat16), jnp.zeros((1, 4), jnp.int32)


def after_cast(model, inputs):
    graph, state = nnx.split(model)
    state = jax.tree.map(lambda p: p.astype(jnp.bfloat16), state)
    return nnx.merge(graph, state)(inputs).dtype.name


embed = nn.Embed(8, 4)
params = embed.init(jax.random.key(0), ids)
params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
seen = dict(
    Linear=after_cast(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), x),
    LayerNorm=after_cast(nnx.LayerNorm(4, rngs=nnx.Rngs(0)), x),
    RMSNorm=after_cast(nnx.RMSNorm(4, rngs=nnx.Rngs(0)), x),
    linen=embed.apply(params, ids).dtype.name,
    with_dtype=after_cast(nnx.Embed(8, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), ids),
    Embed=after_cast(nnx.Embed(8, 4, rngs=nnx.Rngs(0)), ids),
)
print(seen)
if list(seen.values()) != ["bfloat16"] * 5 + ["float32"]:
    raise SystemExit("the behaviour has changed")
EOF
