#!/usr/bin/env bash
# jax 0.11.2: a Mosaic GPU kernel that is lowered again is another kernel, and is compiled again.
#
# jaxlib keeps compiled Mosaic GPU kernels by a hash of their module. In jax 0.11.2 the module has
# an attribute, mosaic_gpu.dump_basename, with the number of its lowering in the process. So the
# hash of one kernel differs between two programs of a process, such as a training step and an
# evaluation, each of which compiles it. The number is also in the program from which the key of
# the persistent compilation cache is made: a process that lowers its programs in another order
# finds none of them. jax 0.12.0.1 leaves the attribute out of the hash and of the program.
#
# Seen, the hashes of a kernel that copies 128 floats, in two programs:
#     jax 0.11.2: differ; 0.12.0.1: equal. No GPU is needed: both are lowered only
#
# Needs Python 3.12 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 12) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat >two_programs.py <<'EOF'
import re
import sys

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh


def copy(source, target):
    target[...] = source[...]


x = jax.ShapeDtypeStruct((128,), jnp.float32)
kernel = plgpu.kernel(copy, out_type=x, kernel_name="copy")
device = AbstractDevice("NVIDIA H200", None, "gpu")
hashes = []
with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
    for program in (lambda x: kernel(x) + 1, lambda x: kernel(x) + 2):
        text = jax.jit(program).trace(x).lower(lowering_platforms=("cuda",)).as_text()
        hashes += re.findall(r'kernel_hash = "(.*?)", ', text)
assert len(hashes) == 2, hashes
equal = hashes[0] == hashes[1]
print(f"jax {jax.__version__}: the hashes {'are equal' if equal else 'differ'}")
sys.exit(equal != (jax.__version__ != "0.11.2"))
EOF
for version in 0.11.2 0.12.0.1; do
    "$python" -m venv "venv-$version"
    "venv-$version/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
        jax=="$version" jaxlib=="$version" numpy==2.4.6
    env -u XLA_FLAGS JAX_PLATFORMS=cpu "venv-$version/bin/python" -I two_programs.py
done
