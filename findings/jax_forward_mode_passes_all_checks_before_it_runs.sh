#!/usr/bin/env bash
# jax 0.10.2 and 0.12.0.1: forward mode through a custom_vjp passes eval_shape and make_jaxpr.
#
# A function with a custom_vjp has no forward-mode derivative. jax.jvp of it raises when it runs,
# but not while it is traced: jax.eval_shape and jax.make_jaxpr of the same jvp return a result, so
# a check of shapes, or a dry run that plans memory, accepts a program that cannot run.
#
# Seen (CPU):
#     eval_shape, make_jaxpr: results
#     called, with and without jit: TypeError: can't apply forward-mode autodiff (jvp) to a
#         custom_vjp function.
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


@jax.custom_vjp
def double(x):
    return 2 * x


double.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


def forward_mode(x):
    return jax.jvp(double, (x,), (x,))


def outcome(call):
    try:
        call(jnp.float32(1))
    except TypeError as error:
        return f"TypeError: {error}".split("\n")[0]
    return "passes"


seen = dict(
    eval_shape=outcome(lambda x: jax.eval_shape(forward_mode, x)),
    make_jaxpr=outcome(jax.make_jaxpr(forward_mode)),
    call=outcome(forward_mode),
    jit=outcome(jax.jit(forward_mode)),
)
print(seen)
if [text == "passes" for text in seen.values()] != [True, True, False, False]:
    raise SystemExit("the behaviour has changed")
EOF
