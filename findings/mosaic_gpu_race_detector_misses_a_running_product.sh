#!/usr/bin/env bash
# jax 0.12.0.1: GPU interpret mode finds no race in a kernel that overwrites a running product.
#
# On Hopper, wgmma reads its operands from shared memory while the warpgroup goes on, so a kernel
# has to wait before it overwrites one of them. The interpreter of Mosaic GPU kernels has a race
# detector, but computes a product when it is issued: a kernel that writes zeros into an operand
# before the wait passes with the right result, and is wrong on a GPU only.
#
# Seen (CPU, detect_races=True): no error, and the bits of the kernel that waits first.
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
from jax.experimental.pallas import mosaic_gpu as plgpu

TILED = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
N = 64


def product(a, b, wait_first):
    def kernel(a_gmem, b_gmem, out_gmem, a_smem, b_smem, out_smem, barrier):
        for source, target in ((a_gmem, a_smem), (b_gmem, b_smem)):
            plgpu.copy_gmem_to_smem(source, target, barrier.at[0])
        plgpu.barrier_wait(barrier.at[0])

        def body(acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            if wait_first:
                plgpu.wgmma_wait(0)
            b_smem[...] = jnp.zeros((N, N), jnp.bfloat16)
            plgpu.wgmma_wait(0)
            return acc[...]

        result = pl.run_scoped(body, plgpu.ACC((N, N), jnp.float32))
        out_smem[...] = result.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    tile = plgpu.SMEM((N, N), jnp.bfloat16, transforms=TILED)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((N, N), jnp.bfloat16),
        scratch_types=[tile] * 3 + [plgpu.Barrier(num_arrivals=2, num_barriers=1)],
        grid=(1,),
        grid_names=("i",),
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )(a, b)


a = jax.random.normal(jax.random.key(0), (N, N), jnp.bfloat16)
b = jax.random.normal(jax.random.key(1), (N, N), jnp.bfloat16)
right, racing = (product(a, b, wait).astype(jnp.float32) for wait in (True, False))
exact = a.astype(jnp.float32) @ b.astype(jnp.float32)
print("race:", float(abs(right - racing).max()), "rounding:", float(abs(right - exact).max()))
if (right != racing).any() or abs(right - exact).max() > 0.2:
    raise SystemExit("the behaviour has changed")
EOF
