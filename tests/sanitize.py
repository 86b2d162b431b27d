"""Runs every kernel at small shapes, forward and backward, for compute-sanitizer.

--run: what runs, "shapes" or one of FEATURES, with --backend. With --eager every array between
kernels is an allocation of its own, so that an access beyond it is found. With --fault, a kernel
that reads out of bounds.

tests/large/test_gpu_sanitizer.py runs this under every tool.
"""

import argparse
import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from oracle import HELPERS, cotangents_for, gradients_of_call, random_inputs, token_at

from mlstm_pallas import (
    KernelConfig,
    mlstm_chunkwise,
    mlstm_recurrent_step,
)
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


# Of three rows, the first and the last one have no steps: what is read before or beyond the chunks
# of these rows is before or beyond the array.
LENGTHS = np.array([0, 77, 0])
DOCUMENTS = np.array([[0, 90, 0], [37, 50, 60], [0, 0, 0]])
FEATURES = {
    "lengths": dict(sequence_lengths=LENGTHS),
    "reverse": dict(sequence_lengths=LENGTHS, reverse=True),
    "segments": dict(segment_ids=np.arange(200) // np.array([[90], [37], [200]])),
    "documents": dict(segment_lengths=DOCUMENTS),
    "slots": None,
}


def run_feature(name, backend):
    """Calls with a feature, and their gradients: the fused scan and materialised states.

    Heads of 64 and 128, for which there are all Mosaic GPU kernels.
    """
    inputs = random_inputs(0, 3, 2, 200, 64, 128, dtype="bfloat16", resets=True)
    if name == "slots":
        return run_slots(inputs, backend)
    for fused in (True, False):
        run = functools.partial(
            mlstm_chunkwise,
            return_last_states=True,
            backend=backend,
            config=KernelConfig(fused=fused),
            **FEATURES[name],
        )

        @jax.jit
        def both(*x, run=run):
            results, vjp = jax.vjp(run, *x)
            return results, vjp(results)

        for x in jax.tree.leaves(both(*inputs.values())):
            assert not jnp.isnan(x).any(), (name, fused)


def run_slots(inputs, backend):
    """Rows of pools, of which a slot of -1 and one beyond the pool have none."""
    slots = jnp.array([2, -1, 3])  # of NumPy 3 is refused
    step = jax.jit(functools.partial(mlstm_recurrent_step, slots=slots, backend=backend))
    for x in jax.tree.leaves(step(**token_at(inputs, 0))):
        assert not jnp.isnan(x).any()


def run_fault():
    def reads_beyond(x, y):
        y[...] = x[pl.ds(pl.program_id(0) * 2**20, 1024)]

    x = jnp.zeros((1024,))
    params = triton.CompilerParams()
    run = pl.pallas_call(reads_beyond, out_shape=x, grid=(2,), compiler_params=params)
    jax.block_until_ready(run(x))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", choices=["shapes", *FEATURES], nargs="*", default=["shapes"])
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--fault", action="store_true")
    options = parser.parse_args()
    with jax.disable_jit() if options.eager else contextlib.nullcontext():
        for name in [] if options.fault else options.run:
            run_kernels() if name == "shapes" else run_feature(name, options.backend)
    if options.fault:
        run_fault()
    print("all ran")
