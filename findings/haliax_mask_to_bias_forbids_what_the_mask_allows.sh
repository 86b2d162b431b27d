#!/usr/bin/env bash
# haliax 1.4.dev453: mask_to_bias of a causal mask makes attention look at the future only.
#
# In haliax.nn.attention a mask is True where a query may look: causal_mask and prefix_lm_mask make
# such masks, and dot_product_attention takes them. mask_to_bias multiplies a mask by -1e9, so as a
# bias it forbids what the mask allows. Its page lists it right after the masks, and it has no
# docstring. A model that adds this bias to an ALiBi bias reads the tokens that it should predict:
# its training loss looks better than it should, and generation fails. The last query may look
# everywhere, so all of its scores round to -1e9, and it takes the mean of all values. Pass mask=
# and bias= separately, or write hax.where(mask, 0.0, -1e9).
#
# Seen (jax 0.10.2, CPU), the share of attention to later positions, of the queries in turn:
#     mask=causal_mask:                        0    0    0    0
#     bias=mask_to_bias(causal_mask):          1    1    1    0 (0.25 for each position)
#     bias=hax.where(causal_mask, 0.0, -1e9):  0    0    0    0
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0 haliax==1.4.dev453 \
    equinox==0.13.8 jaxtyping==0.3.11 aqtp==0.9.0 jmp==0.0.4 safetensors==0.8.0
cd "$folder"
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I -W ignore - <<'EOF'
import haliax as hax
import jax
import numpy as np
from haliax.nn.attention import causal_mask, dot_product_attention_weights, mask_to_bias

Pos, Head = hax.Axis("position", 4), hax.Axis("head", 8)
KeyPos = Pos.alias("key_position")
query = hax.random.normal(jax.random.key(0), (Pos, Head))
key = hax.random.normal(jax.random.key(1), (KeyPos, Head))
mask = causal_mask(Pos, KeyPos)


def weights(**options):
    seen = dot_product_attention_weights(Head, KeyPos, query, key, **options)
    return np.asarray(seen.rearrange((Pos, KeyPos)).array)


cases = {
    "mask": weights(mask=mask),
    "mask_to_bias": weights(bias=mask_to_bias(mask)),
    "where": weights(bias=hax.where(mask, 0.0, -1e9)),
}
later = {name: np.triu(seen, 1).sum(-1).round(3).tolist() for name, seen in cases.items()}
print(later, cases["mask_to_bias"][-1])
if not np.allclose(cases["mask"], cases["where"]) or later["mask"] != [0, 0, 0, 0]:
    raise SystemExit("the mask is not causal, or the bias of where is another one")
if later["mask_to_bias"] != [1, 1, 1, 0] or (cases["mask_to_bias"][-1] != 0.25).any():
    raise SystemExit("the behaviour has changed")
EOF
