#!/usr/bin/env bash
# jax 0.12.0.1 (and 0.11.2): a Pallas kernel is lowered without a GPU for some GPUs' names only.
#
# jax.sharding.AbstractDevice takes the name of a device, so that a machine without a GPU can export
# a program. For an H200, an A100, an L4, an RTX 4090 and a T4 a Triton kernel is lowered; for an
# RTX 3090, an A10G, an L40S and an RTX 5090, which Triton compiles for as well, the error says that
# no abstract device was given. jax 0.10.2 lowers for every name.
#
# Seen (CPU):
#     RuntimeError: No supported GPU devices found, please specify an abstract GPU device using
#         AbstractDevice.
#
# Needs Python 3.12 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 12) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.5 ml_dtypes==0.6.0
cd "$folder"
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I - <<'EOF'
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu_triton
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh


def kernel(x, out):
    out[...] = 2 * x[...]


shape = jax.ShapeDtypeStruct((16,), jnp.float32)


def outcome(kind):
    params = plgpu_triton.CompilerParams()
    call = pl.pallas_call(kernel, out_shape=shape, compiler_params=params)
    device = AbstractDevice(device_kind=kind, platform="gpu", num_cores=None)
    with use_abstract_mesh(AbstractMesh((), (), (), abstract_device=device)):
        try:
            jax.jit(call).trace(shape).lower(lowering_platforms=("cuda",))
        except RuntimeError as error:
            return str(error)
    return "lowered"


known = ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA L4", "NVIDIA GeForce RTX 4090", "Tesla T4")
unknown = (
    "NVIDIA GeForce RTX 3090",
    "NVIDIA A10G",
    "NVIDIA L40S",
    "NVIDIA GeForce RTX 5090",
)
seen = {kind: outcome(kind) for kind in known + unknown}
for kind, text in seen.items():
    print(kind, "->", text)
if any(seen[kind] != "lowered" for kind in known):
    raise SystemExit("a known GPU is not lowered for")
if any("specify an abstract GPU device" not in seen[kind] for kind in unknown):
    raise SystemExit("the behaviour has changed")
EOF
