#!/usr/bin/env bash
# jax 0.10.2 and 0.12.0.1: jnp.maximum in a Pallas kernel drops a NaN on Triton, not interpreted.
#
# jnp.maximum(nan, 1) is NaN, in NumPy, in XLA, and in a kernel that Pallas interprets on a CPU. For
# a GPU, Pallas' Triton lowering takes arith.maxnumf, whose result is 1, so a kernel that was tested
# interpreted hides the NaN of a diverged run. The lowered program shows it without a GPU.
#
# Seen (CPU; lowered for an H200):
#     interpreted: nan; arith.maxnumf in the Triton IR, no arith.maximumf
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
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu_triton
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh


def kernel(x, out):
    out[...] = jnp.maximum(x[...], 1.0)


shape = jax.ShapeDtypeStruct((16,), jnp.float32)


def call(interpret):
    params = plgpu_triton.CompilerParams()
    return pl.pallas_call(
        kernel, out_shape=shape, compiler_params=params, interpret=interpret
    )


device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None)
with use_abstract_mesh(AbstractMesh((), (), (), abstract_device=device)):
    lowered = jax.jit(call(False)).trace(shape).lower(lowering_platforms=("cuda",))
text = lowered.as_text()
interpreted = call(True)(jnp.full(16, jnp.nan))[0]
print("interpreted:", interpreted, "maxnumf:", "maxnumf" in text, "maximumf:", "maximumf" in text)
if not jnp.isnan(interpreted) or "maxnumf" not in text or "maximumf" in text:
    raise SystemExit("the behaviour has changed")
EOF
