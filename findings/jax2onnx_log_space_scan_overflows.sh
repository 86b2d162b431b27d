#!/usr/bin/env bash
# jax2onnx 0.17.1: cumlogsumexp is exported as log(cumsum(exp)), so a scan in log space is inf after
# a hundred tokens.
#
# lax.cumlogsumexp keeps a running maximum, because what it adds up need not fit into a float32.
# Recurrent models with positive states (minGRU and others) are one such sum over the whole
# sequence, whose terms grow by the inverse of each decay. The exported graph has them as they are:
# it is inf from 88.7 on, and -inf where all are below -104. A test with a short sequence passes.
# Export the recurrence as a lax.scan instead.
#
# Seen (jax 0.10.2, onnxruntime 1.32.0, CPU), h = f * h + (1 - f) * x for 256 tokens, where f is the
# sigmoid of a standard normal: the tokens that are not finite, and the largest error of the others
#     cumlogsumexp: 157, from token 99 on; 2e-05; in jax none, 5e-05
#     lax.scan: none; 2e-07
#     cumlogsumexp of [-110, -109, 5, 89]: [-inf, -inf, 5, inf]; in jax [-110, -108.7, 5, 89]
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax2onnx==0.17.1 jax==0.10.2 jaxlib==0.10.2 flax==0.12.8 onnx==1.23.2 onnxruntime==1.32.0 \
    numpy==2.4.6
cd "$folder"
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I -W ignore - <<'EOF'
import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
from jax2onnx import to_onnx

gates, hidden = np.random.default_rng(0).normal(size=(2, 256, 16)).astype(np.float32)
log_f = np.asarray(jax.nn.log_sigmoid(gates))
log_x = np.asarray(jax.nn.log_sigmoid(-gates)) + np.log(np.abs(hidden) + 0.5)


def in_log_space(log_f, log_x):
    total = jnp.cumsum(log_f, axis=0)
    return jnp.exp(total + jax.lax.cumlogsumexp(log_x - total, axis=0))


def step_by_step(log_f, log_x):
    def step(h, inputs):
        h = jnp.exp(inputs[0]) * h + jnp.exp(inputs[1])
        return h, h

    return jax.lax.scan(step, jnp.zeros(16), (log_f, log_x))[1]


def exported(function, *inputs):
    model = to_onnx(function, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs])
    session = onnxruntime.InferenceSession(model.SerializeToString())
    names = [value.name for value in session.get_inputs()]
    return session.run(None, dict(zip(names, inputs, strict=True)))[0]


right = np.asarray(step_by_step(log_f, log_x))
in_jax = float(np.abs(in_log_space(log_f, log_x) - right).max())
broken = []
for function in (in_log_space, step_by_step):
    h = exported(function, log_f, log_x)
    finite = np.isfinite(h).all(-1)
    error = np.abs(h - right)[finite].max()
    broken.append(int((~finite).sum()))
    first = int(finite.argmin()) if broken[-1] else None
    print(f"{function.__name__}: {broken[-1]} tokens are not finite, first {first}; {error:.0e}")
x = np.array([-110, -109, 5, 89], np.float32)
values = exported(jax.lax.cumlogsumexp, x)
print(values, jax.lax.cumlogsumexp(x), f"in_log_space in jax: {in_jax:.0e}")
if broken[1] or broken[0] < 100 or in_jax > 1e-3 or np.isfinite(values).tolist() != [0, 0, 1, 0]:
    raise SystemExit("the behaviour has changed")
EOF
