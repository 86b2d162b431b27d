#!/usr/bin/env bash
# rwkv 0.8.32: top_p=1 may sample the most probable token only, and so may 0.9999.
#
# A top_p of 1 is how one turns nucleus sampling off. PIPELINE.sample_logits adds up the sorted
# probabilities in float32. Over the 65,536 tokens of the world models the sum stays below 1 for
# most logits, because the last terms are too small to change it. Then no sum reaches top_p, and
# argmax, which looks for the first that does, returns index 0: the nucleus is the most probable
# token alone. A user takes the repetitions for the model's. Set top_p to at most 0.999.
#
# Seen (torch 2.13.0, CPU) for 20 rows of logits, 3 * randn(65536), with 20 draws from each: the
# fewest and the most distinct tokens of a row, and the rows that have only their best token:
#     top_p 0.9: 14 to 20, none
#     top_p 0.999: 15 to 20, none
#     top_p 0.9999: 1 to 20, 11 rows
#     top_p 1.0: 1, all rows
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    rwkv==0.8.32 torch==2.13.0 numpy==2.4.6 tokenizers==0.23.3
cd "$folder"
"$folder/venv/bin/python" -I - <<'EOF'
import numpy as np
import torch
from rwkv.utils import PIPELINE

pipeline = PIPELINE(None, "rwkv_vocab_v20230424")
rows = 3 * torch.randn(20, 65536, generator=torch.Generator().manual_seed(0))


def greedy_rows(top_p):
    np.random.seed(0)
    drawn = [{pipeline.sample_logits(row.clone(), top_p=top_p) for _ in range(20)} for row in rows]
    best = rows.argmax(-1).tolist()
    greedy = sum(tokens == {token} for tokens, token in zip(drawn, best, strict=True))
    distinct = [len(tokens) for tokens in drawn]
    print(f"top_p {top_p}: {min(distinct)} to {max(distinct)} tokens, greedy in {greedy} rows")
    return greedy


seen = [greedy_rows(top_p) for top_p in (0.9, 0.999, 0.9999, 1.0)]
if seen[:2] != [0, 0] or not 0 < seen[2] < 20 or seen[3] != 20:
    raise SystemExit("the behaviour has changed")
EOF
