#!/usr/bin/env bash
# jaxlib 0.10.2 and 0.11.2 on a CPU: jit cancels (x + 1e8) - 1e8 to x; eagerly the digits are lost.
#
# XLA folds two constants that are added one after the other, and two factors, into one, also in
# floating point, whose additions are not associative. So compensated sums, and tests that add and
# subtract a large number in order to round, compute something else in a jitted function than line
# by line, and the debugger (jax.disable_jit) shows other values than the program has. If the large
# number is an argument, both agree. jaxlib 0.12.0.1 rounds as written.
#
# Seen (CPU), for x = 0.1 in float32:
#     eager: 0.0, jit with a constant: 0.1, jit with an argument: 0.0
#     (1 + 1e-9) - 1, jit with a constant: 1e-09
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

x = jnp.float32(0.1)


def rounded(x, large=1e8):
    return (x + large) - large


eager, constant = float(rounded(x)), float(jax.jit(lambda x: rounded(x))(x))
argument = float(jax.jit(rounded)(x, jnp.float32(1e8)))
small = float(jax.jit(lambda x: (1.0 + x) - 1.0)(jnp.float32(1e-9)))
print(f"eager {eager}, constant {constant:.3g}, argument {argument}; 1e-9: {small:.3g}")
if eager != 0 or argument != 0 or abs(constant - 0.1) > 1e-6 or abs(small - 1e-9) > 1e-15:
    raise SystemExit("the behaviour has changed")
EOF
