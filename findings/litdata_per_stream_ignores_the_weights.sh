#!/usr/bin/env bash
# litdata 0.2.76: batching_method="per_stream" mixes two corpora half and half, whatever their
# weights are.
#
# The documentation says that per_stream takes each batch from one randomly selected data set. After
# each batch, CombinedStreamingDataset draws until it has another data set than before. So two data
# sets alternate, and of several none can have more than half of the batches. A run whose mixture is
# 90 % web text and 10 % code reads five times as much code as it should, and ends when the code
# ends, with most of the web text unread. The default, "stratified", keeps to the weights. If the
# data sets cannot share a batch, draw the one of each batch yourself, from one StreamingDataLoader
# per data set.
#
# Seen (torch 2.14.1, Python 3.11), corpora of 3,600 and 400 windows with weights of 0.9 and 0.1,
# batches of 8: how many windows of each an epoch reads:
#     stratified: 3,600 and 398
#     per_stream: 408 and 400
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    litdata==0.2.76 torch==2.14.1 torchvision==0.29.1 numpy==2.4.6 lightning-utilities==0.15.3 \
    filelock==4.3.1 boto3==1.44.8 requests==2.34.2 urllib3==2.8.0 tifffile==2026.3.3 obstore==0.12.1
cd "$folder"
cat > mixture.py <<'EOF'
import sys

import numpy as np
from litdata import (
    CombinedStreamingDataset,
    StreamingDataLoader,
    StreamingDataset,
    TokensLoader,
    optimize,
)

WINDOW = 8


def document(token):
    return np.full(100 * WINDOW, token, np.int32)


def write(name, token, documents):
    optimize(
        fn=document,
        inputs=[token] * documents,
        output_dir=name,
        chunk_bytes="1MB",
        num_workers=1,
        item_loader=TokensLoader(WINDOW),
    )


def read(method):
    corpora = [
        StreamingDataset(name, item_loader=TokensLoader(WINDOW), shuffle=True)
        for name in ("web", "code")
    ]
    mixture = CombinedStreamingDataset(
        corpora, weights=[0.9, 0.1], iterate_over_all=False, batching_method=method
    )
    counts = np.zeros(2, int)
    for batch in StreamingDataLoader(mixture, batch_size=8, num_workers=0):
        counts += np.bincount(np.asarray(batch)[:, 0], minlength=2)
    print(method, counts.tolist())
    return counts


if __name__ == "__main__" and sys.argv[1] == "write":
    write("web", 0, documents=36)
    write("code", 1, documents=4)
elif __name__ == "__main__":
    stratified, per_stream = read("stratified"), read("per_stream")
    if not 0.85 < stratified[0] / stratified.sum() < 0.95 or stratified.sum() < 3000:
        raise SystemExit("stratified batches ignore the weights, too")
    if abs(per_stream - 400).max() > 8:
        raise SystemExit("the behaviour has changed")
EOF
export HOME=$folder
"$folder/venv/bin/python" -I mixture.py write > log 2>&1 || { cat log; exit 1; }
"$folder/venv/bin/python" -I -W ignore mixture.py read
