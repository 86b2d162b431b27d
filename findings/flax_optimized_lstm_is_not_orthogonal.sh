#!/usr/bin/env bash
# flax 0.12.8: the recurrent matrices of nnx.OptimizedLSTMCell and GRUCell are not orthogonal.
#
# recurrent_kernel_init is orthogonal by default, as in nnx.LSTMCell, and the documentation calls
# OptimizedLSTMCell a faster form of that cell with compatible parameters. Both cells here hold the
# matrices of all gates in one array and initialise it as a whole: its rows are orthonormal, and the
# matrix of one gate has about half the norm and singular values from nearly 0 up. linen initialises
# each gate. So a model that moves from linen, or from LSTMCell to the faster cell, starts with
# gradients that fade much sooner. Pass a recurrent_kernel_init like split_orthogonal below.
#
# Seen (jax 0.10.2; also flax 0.12.12), 128 features: the singular values of one gate's matrix, and
# the norm of the derivative of h after 20 random tokens with respect to h before them:
#     nnx.LSTMCell 1.00 to 1.00, 2.4e-04
#     nnx.OptimizedLSTMCell 0.00 to 0.85, 1.4e-05
#     nnx.OptimizedLSTMCell, repaired 1.00 to 1.00, 2.0e-04
#     linen.OptimizedLSTMCell 1.00 to 1.00, 2.9e-04
#     nnx.GRUCell 0.00 to 0.94, 2.1e-04
#     linen.GRUCell 1.00 to 1.00, 2.0e-03
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

size, zeros = 128, jnp.zeros(128)
tokens = jax.random.normal(jax.random.key(0), (20, size))
orthogonal = jax.nn.initializers.orthogonal()


def split_orthogonal(key, shape, dtype=jnp.float32):
    keys = jax.random.split(key, shape[1] // shape[0])
    return jnp.concatenate([orthogonal(k, (shape[0],) * 2, dtype) for k in keys], axis=1)


def measure(name, cell, kernel, lstm=True):
    def last(h):
        carry = (zeros, h) if lstm else h
        for x in tokens:
            carry, y = cell(carry, x)
        return y

    values = jnp.linalg.svd(kernel[:, :size], compute_uv=False)
    reach = jnp.linalg.norm(jax.jit(jax.jacobian(last))(zeros))
    print(f"{name} {values[-1]:.2f} to {values[0]:.2f}, {reach:.1e}")
    return float(values[-1]), float(reach)


def of_nnx(name, Cell, kernel_of, lstm=True, **options):
    cell = Cell(size, size, rngs=nnx.Rngs(0), **options)
    return measure(name, cell, kernel_of(cell)[...], lstm)


def of_linen(name, Cell, kernel, carry, lstm=True):
    cell = Cell(size)
    params = cell.init(jax.random.key(0), carry, tokens[0])
    step = lambda carry, x: cell.apply(params, carry, x)  # noqa: E731
    return measure(name, step, params["params"][kernel]["kernel"], lstm)


lstm, gru = nnx.OptimizedLSTMCell, nnx.GRUCell
plain = of_nnx("nnx.LSTMCell", nnx.LSTMCell, lambda cell: cell.hi.kernel)
fast = of_nnx("nnx.OptimizedLSTMCell", lstm, lambda cell: cell.dense_h.kernel)
split = dict(recurrent_kernel_init=split_orthogonal)
repaired = of_nnx(
    "nnx.OptimizedLSTMCell, repaired", lstm, lambda cell: cell.dense_h.kernel, **split
)
older = of_linen("linen.OptimizedLSTMCell", linen.OptimizedLSTMCell, "hi", (zeros, zeros))
nnx_gru = of_nnx("nnx.GRUCell", gru, lambda cell: cell.dense_h.kernel, lstm=False)
linen_gru = of_linen("linen.GRUCell", linen.GRUCell, "hr", zeros, lstm=False)
if any(smallest < 0.99 for smallest, _ in (plain, repaired, older, linen_gru)):
    raise SystemExit("other cells have no orthogonal matrices, either")
if max(fast[0], nnx_gru[0]) > 0.1 or min(older[1] / fast[1], linen_gru[1] / nnx_gru[1]) < 4:
    raise SystemExit("the behaviour has changed")
EOF
