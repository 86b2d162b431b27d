#!/usr/bin/env bash
# equinox 0.13.8: RotaryPositionalEmbedding uses the theta of the layer that is called first.
#
# The cosines and sines are cached for the process by embedding size and dtype, without theta. So a
# model with a theta of 10,000 in its local layers and one of 1,000,000 in its global layers rotates
# both alike, and so do two models in one process. A longer sequence replaces the cached values by
# those of the layer that reads it first. What a checkpoint computes therefore depends on what ran
# before it, and weights that were trained beside another layer or model have other positions when
# they are served alone. Compute the rotation in a function of your own.
#
# Seen (jax 0.10.2), the largest error of four calls on ones, one after another:
#     512 tokens: theta 1e4 3e-05, theta 1e6 2.8
#     1024 tokens: theta 1e6 5e-05, theta 1e4 2.8
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    equinox==0.13.8 jax==0.10.2 jaxlib==0.10.2 jaxtyping==0.3.11 numpy==2.4.6 ml_dtypes==0.6.0
cd "$folder"
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I - <<'EOF'
import equinox as eqx
import jax.numpy as jnp
import numpy as np

size = 64


def rotated_ones(steps, theta):
    angles = np.outer(np.arange(steps), theta ** -(np.arange(0, size, 2) / size))
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([cos - sin, cos + sin], axis=-1)


def error(theta, steps):
    rope = eqx.nn.RotaryPositionalEmbedding(size, theta=theta)
    y = np.asarray(rope(jnp.ones((steps, size))), np.float64)
    return np.abs(y - rotated_ones(steps, theta)).max()


first, second = error(1e4, 512), error(1e6, 512)
longer, after = error(1e6, 1024), error(1e4, 1024)
print(f"512 tokens: theta 1e4 {first:.0e}, theta 1e6 {second:.1f}")
print(f"1024 tokens: theta 1e6 {longer:.0e}, theta 1e4 {after:.1f}")
if first > 1e-3 or longer > 1e-3:
    raise SystemExit("the layer that is called first has another theta, too")
if second < 1 or after < 1:
    raise SystemExit("the behaviour has changed")
EOF
