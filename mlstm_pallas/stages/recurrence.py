"""The recurrence over chunks that recurrent_fw_C and recurrent_bw_dC share.

    X_{next} = gamma_c X + sum_t r_t a_t b_t^T        x_{next} = gamma_c x + sum_t r_t s_t a_t

chunk by chunk, forward or backward in time: (X, a, b, r, s) = (C, k, v, abar, 1) or (dC, q, dh, w scale / den, dz den).

Grid (DHHV / siz_b_DHHV, DHQK / siz_b_DHQK, B * NH). A program owns a siz_b_DHQK x siz_b_DHHV block of X, in fp32 registers, and walks
over the sequence in tiles of siz_b_LKV rows. Where it enters a chunk it stores the block in the kernel dtype. The programs of the first
column block also own x. The block is kept transposed: a has to be scaled, hence to pass through registers, and goes from there to
shared memory row by row as the right operand, while b is read transposed from where the copy put it.

Where that makes too few programs for a GPU, the sequence is split in num_segments parts. One launch makes what each part adds to X,
starting from zeros; a short prefix over the parts gives each its X_initial; a second launch is the usual one, with the parts as further
heads. That is twice the work at num_segments times the programs.

FLOPs: 2 B NH S DHQK DHHV. Bytes: a and b once for each column and row block (the repeats mostly from L2), the states once:
B NH (S (DHQK + DHHV) + NC DHQK DHHV) itemsize; as much again as the states take where the product with other states is asked for.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.config import StageConfig
from mlstm_pallas.launch import kernel_call
from mlstm_pallas.problem import Problem
from mlstm_pallas.tiles import Precision, blocks, divide, dot, loop, remainder


def _recurrence_kernel(
    a_ref,  # (S, siz_b_DHQK)
    b_ref,  # (S, siz_b_DHHV)
    r_ref,  # (S,)
    s_ref,  # (S,), or absent: s = 1
    gamma_ref,  # (NC,)
    X_initial_ref,  # (siz_b_DHQK, siz_b_DHHV)
    x_initial_ref,  # (siz_b_DHQK,)
    other_ref,  # (stored, siz_b_DHQK, siz_b_DHHV), or absent
    X_ref,  # out (stored, siz_b_DHQK, siz_b_DHHV)
    x_ref,  # out (stored, siz_b_DHQK)
    X_last_ref,  # out (siz_b_DHQK, siz_b_DHHV)
    x_last_ref,  # out (siz_b_DHQK,)
    product_ref=None,  # out (stored,): <other, X>, of this block
    *,
    num_chunks: int,
    tiles: int,
    siz_b_L: int,
    save_every: int,
    backward: bool,
    precision: Precision,
):
    owns_x = pl.program_id(0) == 0
    steps = num_chunks * tiles

    def tile_at(index):
        return steps - 1 - index if backward else index

    # The pipeline copies what feeds products. This does not: it is asked for a tile ahead, or each tile would wait for memory.
    def gamma_at(index):
        return gamma_ref[divide(tile_at(lax.min(index, np.int32(steps - 1))), tiles)]

    def step(index, carry):
        XT, x, gamma = carry
        following = gamma_at(index + 1)
        tile = tile_at(index)
        chunk = divide(tile, tiles)
        enters = remainder(index, tiles) == 0

        @pl.when(enters & (remainder(chunk, save_every) == 0) if save_every > 1 else enters)
        def _store_border():
            slot = divide(chunk, save_every)
            X = XT.astype(X_ref.dtype).T
            X_ref[slot, :, :] = X
            if product_ref is not None:
                product_ref[slot] = jnp.sum(X.astype(jnp.float32) * other_ref[slot, :, :].astype(jnp.float32))

            @pl.when(owns_x)
            def _():
                x_ref[slot, :] = x

        rows = pl.ds(tile * siz_b_L, siz_b_L)
        a = a_ref[rows, :]
        scaled = a.astype(jnp.float32) * r_ref[rows][:, None]
        gamma = jnp.where(enters, gamma, 1.0)
        XT = XT * gamma + dot(b_ref[rows, :], scaled.astype(a.dtype), precision, a_axis=0)
        weighted = scaled if s_ref is None else scaled * s_ref[rows][:, None]
        return XT, x * gamma + jnp.sum(weighted, axis=0), following

    XT, x = loop(steps, step, (X_initial_ref[...].T, x_initial_ref[...], gamma_at(np.int32(0))))[:2]
    X_last_ref[...] = XT.T

    @pl.when(owns_x)
    def _():
        x_last_ref[...] = x


def recurrence(
    name: str,
    a: jax.Array,
    b: jax.Array,
    r: jax.Array,
    s: jax.Array | None,
    gamma: jax.Array,
    X_initial: jax.Array,
    x_initial: jax.Array,
    *,
    other: jax.Array | None = None,
    backward: bool,
    problem: Problem,
    stage: StageConfig,
    precision: Precision,
    save_every: int = 1,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Launches the kernel under ``name``. Config: siz_b_LKV, siz_b_DHQK, siz_b_DHHV, num_segments.

    Args:
      a, b: (B, NH, S, DHQK), (B, NH, S, DHHV) in the kernel dtype; r, s: (B, NH, S); gamma: (B, NH, NC).
      X_initial, x_initial: (B, NH, DHQK, DHHV), (B, NH, DHQK), float32.
      other: (B, NH, stored, DHQK, DHHV): its products <other, X> with the float32 block are wanted as well.
      save_every: only what enters chunks 0, n, 2n, ... is stored: stored = ceil(NC / n).

    Returns:
      What enters each chunk, X (B, NH, stored, DHQK, DHHV) in the kernel dtype and x (B, NH, stored, DHQK) float32; what leaves the last
      one, in float32; with ``other`` the products (B, NH, stored).
    """
    p, stage = problem, stage.fitted(problem)
    launch = functools.partial(_launch, name, stage=stage, precision=precision, interpret=interpret, backward=backward)
    segments = stage.segments(p) if save_every == 1 else 1
    if segments == 1:
        return launch((a, b, r, s, gamma, X_initial, x_initial), other, problem=p, save_every=save_every)

    def split(y):
        """(B, NH, axis, ...) to (B, NH segments, axis / segments, ...)"""
        return None if y is None else y.reshape(p.B, p.NH * segments, y.shape[2] // segments, *y.shape[3:])

    def joined(y):
        return y.reshape(p.B, p.NH, y.shape[1] // p.NH * y.shape[2], *y.shape[3:])

    part = dataclasses.replace(p, NH=p.NH * segments, S=p.S // segments)
    arrays = [split(y) for y in (a, b, r, s, gamma)]
    zeros = (jnp.zeros((p.B, part.NH, *y.shape[2:]), y.dtype) for y in (X_initial, x_initial))
    _, _, *added = launch((*arrays, *zeros), None, problem=part, save_every=part.NC)
    decays = jnp.prod(arrays[4], axis=-1).reshape(p.B, p.NH, segments)
    order = range(segments - 1, -1, -1) if backward else range(segments)

    def entering(initial, added):
        """What enters each part: (B, NH segments, ...)."""
        added, entered = added.reshape(p.B, p.NH, segments, *initial.shape[2:]), {}
        for j in order:
            entered[j] = initial
            initial = initial * decays[:, :, j].reshape(p.B, p.NH, *(1,) * (initial.ndim - 2)) + added[:, :, j]
        return jnp.stack([entered[j] for j in range(segments)], axis=2).reshape(p.B, part.NH, *initial.shape[2:])

    starts = [entering(initial, y) for initial, y in zip((X_initial, x_initial), added, strict=True)]
    X, x, X_last, x_last, *products = launch((*arrays, *starts), split(other), problem=part, save_every=1)
    X_last, x_last = (y.reshape(p.B, p.NH, segments, *y.shape[2:])[:, :, order[-1]] for y in (X_last, x_last))
    return joined(X), joined(x), X_last, x_last, *map(joined, products)


def _launch(
    name: str, arrays: tuple, other, *, problem: Problem, stage: StageConfig, precision, save_every: int, interpret: bool, backward: bool
):
    """One launch of the kernel; arrays: (a, b, r, s, gamma, X_initial, x_initial). All else as for ``recurrence``."""
    p, (a, b, r, s, gamma, X_initial, x_initial) = problem, arrays
    BK, BV = stage.siz_b_DHQK, stage.siz_b_DHHV
    stored = -(-p.NC // save_every)
    columns, row_blocks = blocks(p.DHHV, BV), blocks(p.DHQK, BK)

    row = pl.BlockSpec((None, p.S), lambda iv, ik, n: (n, 0))
    state = pl.BlockSpec((None, BK, BV), lambda iv, ik, n: (n, ik, iv))
    norm = pl.BlockSpec((None, BK), lambda iv, ik, n: (n, ik))
    states = pl.BlockSpec((None, stored, BK, BV), lambda iv, ik, n: (n, 0, ik, iv))
    out_specs = [states, pl.BlockSpec((None, stored, BK), lambda iv, ik, n: (n, 0, ik)), state, norm]
    out_shape = [
        jax.ShapeDtypeStruct((p.BNH, stored, p.DHQK, p.DHHV), a.dtype),
        jax.ShapeDtypeStruct((p.BNH, stored, p.DHQK), jnp.float32),
        jax.ShapeDtypeStruct((p.BNH, p.DHQK, p.DHHV), jnp.float32),
        jax.ShapeDtypeStruct((p.BNH, p.DHQK), jnp.float32),
    ]
    if other is not None:
        out_specs.append(pl.BlockSpec((None, None, None, stored), lambda iv, ik, n: (n, ik, iv, 0)))
        out_shape.append(jax.ShapeDtypeStruct((p.BNH, row_blocks, columns, stored), jnp.float32))
    X, x, X_last, x_last, *products = kernel_call(
        _recurrence_kernel,
        name=name,
        grid=(columns, row_blocks, p.BNH),
        in_specs=[
            pl.BlockSpec((None, p.S, BK), lambda iv, ik, n: (n, 0, ik)),
            pl.BlockSpec((None, p.S, BV), lambda iv, ik, n: (n, 0, iv)),
            row,
            None if s is None else row,
            pl.BlockSpec((None, p.NC), lambda iv, ik, n: (n, 0)),
            state,
            norm,
            None if other is None else states,
        ],
        out_specs=out_specs,
        out_shape=out_shape,
        stage=stage,
        interpret=interpret,
        num_chunks=p.NC,
        tiles=blocks(p.L, stage.siz_b_LKV),
        siz_b_L=stage.siz_b_LKV,
        save_every=save_every,
        backward=backward,
        precision=precision,
    )(
        a.reshape(p.BNH, p.S, p.DHQK),
        b.reshape(p.BNH, p.S, p.DHHV),
        r.reshape(p.BNH, p.S),
        None if s is None else s.reshape(p.BNH, p.S),
        gamma.reshape(p.BNH, p.NC),
        X_initial.reshape(p.BNH, p.DHQK, p.DHHV),
        x_initial.reshape(p.BNH, p.DHQK),
        None if other is None else other.reshape(p.BNH, stored, p.DHQK, p.DHHV),
    )
    return (
        X.reshape(p.B, p.NH, stored, p.DHQK, p.DHHV),
        x.reshape(p.B, p.NH, stored, p.DHQK),
        X_last.reshape(p.B, p.NH, p.DHQK, p.DHHV),
        x_last.reshape(p.B, p.NH, p.DHQK),
        *(y.sum((1, 2)).reshape(p.B, p.NH, stored) for y in products),
    )
