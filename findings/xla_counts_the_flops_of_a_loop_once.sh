#!/usr/bin/env bash
# jax 0.10.2: cost_analysis counts the body of a loop once; 12 scanned layers have the FLOPs of one.
#
# cost_analysis, of a lowered and of a compiled function, is documented as a summary of cost
# estimates. Users divide its flops by a step's time to get the share of a GPU's peak. XLA counts
# the body of a scan, fori_loop or map once, whatever its length, so the share is too small by the
# number of layers, or of chunks of a sequence. Nothing says so. Layers that are unrolled are all
# counted.
#
# Seen (CPU), 12 layers with one product of 33,554,432 FLOPs each (0.12.0.1 differs in the last line
# only, where lowered has 1,177,485,312, too):
#     scan, forward: lowered, compiled 33,554,432 33,554,432
#     scan, gradient: lowered, compiled 100,925,440 100,925,440
#     unrolled, forward: lowered, compiled 402,653,184 402,653,184
#     unrolled, gradient: lowered, compiled 1,211,105,280 1,177,485,312
# Upstream: jax-ml/jax#18672.
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

LAYERS, SIZE = 12, 256
x, weights = jnp.ones((SIZE, SIZE)), jnp.ones((LAYERS, SIZE, SIZE))


def layers(unroll):
    def model(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights, unroll=unroll)[0]

    return model


flops = {}
for name, unroll in (("scan", 1), ("unrolled", True)):
    model = layers(unroll)
    gradient = jax.grad(lambda weights: model(x, weights).sum())
    for part, function, arguments in (
        ("forward", model, (x, weights)),
        ("gradient", gradient, (weights,)),
    ):
        lowered = jax.jit(function).lower(*arguments)
        costs = lowered.cost_analysis(), lowered.compile().cost_analysis()
        flops[name, part] = [int(cost["flops"]) for cost in costs]
        print(f"{name}, {part}: lowered, compiled", *(f"{x:,}" for x in flops[name, part]))
product = 2 * SIZE**3
if min(flops["unrolled", "forward"]) < LAYERS * product:
    raise SystemExit("unrolled layers are not counted, either")
if max(flops["scan", "forward"]) > 2 * product or max(flops["scan", "gradient"]) > 4 * product:
    raise SystemExit("the behaviour has changed")
EOF
