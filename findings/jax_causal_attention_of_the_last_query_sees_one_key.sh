#!/usr/bin/env bash
# jax 0.10.2: with is_causal=True, dot_product_attention takes its first query for position 0, so a
# query beside a cache of keys attends to the oldest key alone.
#
# If there are fewer queries than keys, the queries are usually the last positions: one token and a
# cache, or a piece of a prompt. is_causal and local_window_size number queries and keys from 0, and
# the docstring does not say so (PyTorch's does; flash-attn aligns the last query with the last
# key). A step of generation then returns the value of the first token for every query, and no shape
# is wrong. Leave is_causal out for one query; pass a mask for several, in which query i sees key j
# if i + keys - queries >= j.
#
# Seen (CPU; also jax 0.12.0.1), the largest error against the same rows of all 8 queries and keys:
#     the last query, is_causal=True: 2.0, and its output is the first value
#     the last 4 queries: is_causal=True 2.0, with the mask below 1e-6
#     the last query, local_window_size=(2, 0): 2.6
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

q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 16))  # batch, steps, heads, width


def attention(queries, **options):
    return jax.nn.dot_product_attention(q[:, -queries:], k, v, **options)


def error(queries, all_options, options):
    expected = attention(8, **all_options)[:, -queries:]
    return float(jnp.abs(attention(queries, **options) - expected).max())


causal, window = dict(is_causal=True), dict(local_window_size=(2, 0))
mask = jnp.arange(4)[:, None] + 8 - 4 >= jnp.arange(8)
seen = dict(
    last=error(1, causal, causal),
    last_four=error(4, causal, causal),
    window=error(1, window, window),
    mask=error(4, causal, dict(mask=mask[None, None])),
)
first_value = bool((attention(1, **causal) == v[:, :1]).all())
print(seen, "is the first value:", first_value)
if seen.pop("mask") > 1e-5:
    raise SystemExit("an explicit mask gives other numbers, too")
if min(seen.values()) < 0.1 or not first_value:
    raise SystemExit("the behaviour has changed")
EOF
