"""Runs every kernel at small shapes, forward and backward, for compute-sanitizer.

With --fault, a kernel that reads out of bounds.

tests/test_gpu_sanitizer.py runs this under every tool.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from oracle import HELPERS, cotangents_for, gradients_of_call, random_inputs, token_at

from mlstm_pallas import KernelConfig, mlstm_recurrent_step
from mlstm_pallas.stages import STAGES

KERNELS = (*STAGES, *HELPERS)
FUSED = KernelConfig(
    fused=True, triton_recurrent_fw_H=dict(siz_b_L=32, state_rows=64)
)  # two launches at 128 rows
SPLIT = dict(num_splits=2)
SPLITS = KernelConfig(triton_recurrent_fw_C=SPLIT, triton_recurrent_bw_dC=SPLIT)
SIGMOID = dict(input_gate="sigmoid")  # which takes no m_initial
# S, DHQK, DHV, chunk size, config, gate, whether sequences are packed; with padding of steps and
# of columns, one chunk and several, a chunk of several tiles
CASES = [
    (100, 24, 40, 16, None, {}, False),
    (200, 80, 96, 64, FUSED, {}, True),
    (300, 32, 64, 256, SPLITS, SIGMOID, False),
    (150, 128, 256, None, FUSED, SIGMOID | dict(normalize=False), False),
]


def run_kernels():
    for dtype in ("bfloat16", "float32"):
        for S, *heads, chunk_size, config, gate, packed in CASES:
            inputs = random_inputs(0, 1, 2, S, *heads, dtype=dtype, resets=True, m_initial=not gate)
            ids = jnp.arange(S)[None] // 37 if packed else None
            run = gradients_of_call(chunk_size=chunk_size, config=config, backend="triton", **gate)
            step = jax.jit(functools.partial(mlstm_recurrent_step, backend="triton", **gate))
            _, gradients = run(inputs, cotangents_for(inputs, dtype), segment_ids=ids)
            h, _ = step(**token_at(inputs, 0))
            for x in (*gradients.values(), h):
                assert jnp.isfinite(x).all(), (dtype, S)


def run_fault():
    def reads_beyond(x, y):
        y[...] = x[pl.ds(pl.program_id(0) * 2**20, 1024)]

    x = jnp.zeros((1024,))
    params = triton.CompilerParams()
    run = pl.pallas_call(reads_beyond, out_shape=x, grid=(2,), compiler_params=params)
    jax.block_until_ready(run(x))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    run_fault() if parser.parse_args().fault else run_kernels()
    print("all ran")
