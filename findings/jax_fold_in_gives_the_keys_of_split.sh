#!/usr/bin/env bash
# jax 0.10.2: fold_in(key, n) is split(key, num)[n], and the checker of key reuse accepts both.
#
# A program that folds the step into a key, and also splits this key for its layers or devices, has
# the same key at step n and in layer n: equal dropout masks, noise or batches. The documentation
# says of fold_in that its key is safe for a new stream, and does not name split there, nor the
# reverse; jax_debug_key_reuse, which refuses a key that is used twice, says nothing. Split first,
# and fold into one of the new keys. Keys of "unsafe_rbg" differ.
#
# Seen (CPU; also jax 0.12.0.1), with jax.debug_key_reuse(True):
#     normal(fold_in(key, 1)) == normal(split(key, 4)[1]): threefry2x32 and rbg True,
#     unsafe_rbg False; normal(key) twice: KeyReuseError
# Upstream: jax-ml/jax#13341 (merged), which made them equal on purpose.
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

seen = {}
with jax.debug_key_reuse(True):
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        key = jax.random.key(0, impl=impl)
        folded = jax.random.normal(jax.random.fold_in(key, 1), 8)
        split = jax.random.normal(jax.random.split(key, 4)[1], 8)
        seen[impl] = bool((folded == split).all())
    key = jax.random.key(0)
    jax.random.normal(key)
    try:
        jax.random.normal(key)
    except jax.errors.KeyReuseError as error:
        seen["twice"] = type(error).__name__
print(seen)
if list(seen.values()) != [True, True, False, "KeyReuseError"]:
    raise SystemExit("the behaviour has changed")
EOF
