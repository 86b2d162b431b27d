#!/usr/bin/env bash
# jax2onnx 0.17.1: an exported one_hot of -1 is the last class, and a dynamic_slice near the end of
# an array is short.
#
# JAX documents that one_hot has zeros for an index outside of the classes, and that dynamic_slice
# moves a start that is too large, so that its size never changes. The operators of ONNX count
# negative indices from the end, and clip a slice at the end, and the export adds nothing to them.
# So padding ids of -1 get the embedding of the last token, and a sum over the last window lacks
# elements, of which onnxruntime at most logs a warning. Mask the one_hot by (ids >= 0)[..., None],
# and clip the start.
#
# Seen (jax 0.10.2, onnxruntime 1.32.0, CPU), jax, and the exported function:
#     the sum of embeddings of 0, 1, -1, -1 from [[1, 2], [3, 4], [5, 6], [7, 8]]: 4 6, and 18 22
#     with a mask: 4 6, and 4 6
#     the mean of dynamic_slice_in_dim(arange(6), 4, 4): 3.5, and 2.25
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
import numpy as np
import onnxruntime
from jax2onnx import to_onnx

table = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
ids = np.array([0, 1, -1, -1], np.int32)


def embedding_bag(ids):
    return (jax.nn.one_hot(ids, 4) @ table).sum(0)


def masked_bag(ids):
    return ((jax.nn.one_hot(ids, 4) * (ids >= 0)[:, None]) @ table).sum(0)


def window_mean(x, start):
    return jax.lax.dynamic_slice_in_dim(x, start, 4).mean()


def both(function, *inputs):
    model = to_onnx(function, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs])
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    names = [value.name for value in session.get_inputs()]
    exported = session.run(None, dict(zip(names, inputs, strict=True)))[0]
    results = [np.asarray(result).tolist() for result in (function(*inputs), exported)]
    print(f"{function.__name__}:", *results)
    return results


seen = [
    both(embedding_bag, ids),
    both(masked_bag, ids),
    both(window_mean, np.arange(6, dtype=np.float32), np.array(4, np.int32)),
]
if seen != [[[4, 6], [18, 22]], [[4, 6], [4, 6]], [3.5, 2.25]]:
    raise SystemExit("the behaviour has changed")
EOF
