"""The recurrence over chunks that recurrent_fw_C and recurrent_bw_dC share.

    X_{next} = gamma_c X + sum_t r_t a_t b_t^T        x_{next} = gamma_c x + sum_t r_t a_t

chunk by chunk, forward or backward in time: (X, a, b, r) = (C, k, v, abar), or with operands that come scaled, without r and x,
(C, kbar, v) or (dC, qbar, dh).

Grid (DHHV / siz_b_DHHV, DHQK / siz_b_DHQK, B * NH). A program owns a siz_b_DHQK x siz_b_DHHV block of X, in fp32 registers, and walks
over the sequence in tiles of siz_b_LKV rows. Where it enters a chunk it stores the block in the kernel dtype. Within a chunk no sum is read
before the last tile. The block is kept transposed: where a has to be scaled it passes through registers, and goes from there to shared
memory row by row as the right operand, while b is read transposed from where the copy put it. The programs of the first column block
own x.

Where that makes too few programs for a GPU, the sequence is split in num_segments parts, which are further heads; the states before
them follow from what each adds (segments.py), which the same kernel makes, a segment being a chunk then.

FLOPs: 2 B NH S DHQK DHHV. Bytes: a and b once for each column and row block (the repeats mostly from L2), the states once:
B NH (S (DHQK + DHHV) + NC DHQK DHHV) itemsize.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mlstm_pallas.config import StageConfig
from mlstm_pallas.gates import vector_states
from mlstm_pallas.launch import kernel_call
from mlstm_pallas.problem import Problem
from mlstm_pallas.segments import decays_in_segments, segment_states
from mlstm_pallas.tiles import Precision, blocks, divide, dot, loop, remainder


def _recurrence_kernel(
    a_ref,  # (S, siz_b_DHQK)
    b_ref,  # (S, siz_b_DHHV)
    r_ref,  # (S,), absent where a is scaled; so are x_initial, x and x_last
    gamma_ref,  # (NC,)
    X_initial_ref,  # (siz_b_DHQK, siz_b_DHHV), may be absent
    x_initial_ref,  # (siz_b_DHQK,)
    X_ref,  # out (stored, siz_b_DHQK, siz_b_DHHV)
    *more_refs,  # out, what is wanted of these: X_last (siz_b_DHQK, siz_b_DHHV); x (stored, siz_b_DHQK) and x_last (siz_b_DHQK,)
    tiles: int,
    siz_b_L: int,
    save_every: int,
    backward: bool,
    last: bool,
    precision: Precision,
):
    num_chunks, more = gamma_ref.shape[0], iter(more_refs)
    X_last_ref: Any = next(more) if last else None
    x_ref: Any = next(more, None)
    x_last_ref: Any = next(more, None)
    owns_x = pl.program_id(0) == 0

    def step(index, carry):
        XT, x = carry
        chunk = num_chunks - 1 - index if backward else index

        def store():
            slot = divide(chunk, save_every)
            X_ref[slot, :, :] = XT.astype(X_ref.dtype).T
            if r_ref is not None:

                @pl.when(owns_x)
                def _():
                    x_ref[slot, :] = x

        if save_every > 1:
            pl.when(remainder(chunk, save_every) == 0)(store)
        else:
            store()

        def add(tile, carry):
            XT, x = carry
            rows = pl.ds((chunk * tiles + tile) * siz_b_L, siz_b_L)
            a = a_ref[rows, :]
            if r_ref is not None:
                scaled = a.astype(jnp.float32) * r_ref[rows][:, None]
                a, x = scaled.astype(a.dtype), x + jnp.sum(scaled, axis=0)
            return XT + dot(b_ref[rows, :], a, precision, a_axis=0), x

        gamma = gamma_ref[chunk]
        return loop(tiles, add, (XT * gamma, None if x is None else x * gamma))

    x = None if r_ref is None else x_initial_ref[...]
    XT = jnp.zeros((b_ref.shape[1], a_ref.shape[1]), jnp.float32) if X_initial_ref is None else X_initial_ref[...].T
    XT, x = loop(num_chunks, step, (XT, x))
    if X_last_ref is not None:
        X_last_ref[...] = XT.T
    if r_ref is not None:

        @pl.when(owns_x)
        def _():
            x_last_ref[...] = x


class _Made(NamedTuple):
    """float32 but for X; of n heads. What is not wanted is None."""

    X: jax.Array  # (n, stored, DHQK, DHHV) in the kernel dtype
    X_last: Any  # (n, DHQK, DHHV)
    x: Any  # (n, stored, DHQK)
    x_last: Any  # (n, DHQK)


def _launch(
    name: str,
    a: jax.Array,
    b: jax.Array,
    r: jax.Array | None,
    gamma: jax.Array,
    X_initial: jax.Array | None,
    x_initial: jax.Array | None,
    *,
    last: bool,
    backward: bool,
    problem: Problem,
    stage: StageConfig,
    precision: Precision,
    save_every: int = 1,
    interpret: bool,
) -> _Made:
    """One launch of the kernel, on arrays whose leading axes hold the problem's heads."""
    p, BK, BV, weighted = problem, stage.siz_b_DHQK, stage.siz_b_DHHV, r is not None
    stored = -(-p.NC // save_every)
    state = pl.BlockSpec((None, BK, BV), lambda iv, ik, n: (n, ik, iv))
    norm = pl.BlockSpec((None, BK), lambda iv, ik, n: (n, ik))
    specs = [pl.BlockSpec((None, stored, BK, BV), lambda iv, ik, n: (n, 0, ik, iv)), *[state] * last]
    shapes = [((stored, p.DHQK, p.DHHV), a.dtype), *[((p.DHQK, p.DHHV), jnp.float32)] * last]
    if weighted:
        specs += [pl.BlockSpec((None, stored, BK), lambda iv, ik, n: (n, 0, ik)), norm]
        shapes += [((stored, p.DHQK), jnp.float32), ((p.DHQK,), jnp.float32)]

    def flat(y, *shape):
        return None if y is None else y.reshape(p.BNH, *shape)

    X, *more = kernel_call(
        _recurrence_kernel,
        name=name,
        grid=(blocks(p.DHHV, BV), blocks(p.DHQK, BK), p.BNH),
        in_specs=[
            pl.BlockSpec((None, p.S, BK), lambda iv, ik, n: (n, 0, ik)),
            pl.BlockSpec((None, p.S, BV), lambda iv, ik, n: (n, 0, iv)),
            pl.BlockSpec((None, p.S), lambda iv, ik, n: (n, 0)) if weighted else None,
            pl.BlockSpec((None, p.NC), lambda iv, ik, n: (n, 0)),
            None if X_initial is None else state,
            norm if weighted else None,
        ],
        out_specs=specs,
        out_shape=[jax.ShapeDtypeStruct((p.BNH, *shape), dtype) for shape, dtype in shapes],
        stage=stage,
        interpret=interpret,
        tiles=blocks(p.L, stage.siz_b_LKV),
        siz_b_L=stage.siz_b_LKV,
        save_every=save_every,
        backward=backward,
        last=last,
        precision=precision,
    )(
        flat(a, p.S, p.DHQK),
        flat(b, p.S, p.DHHV),
        flat(r, p.S),
        flat(gamma, p.NC),
        flat(X_initial, p.DHQK, p.DHHV),
        flat(x_initial, p.DHQK) if weighted else None,
    )
    X_last = more.pop(0) if last else None
    return _Made(X, X_last, *(more or (None, None)))


def segment_products(
    a: jax.Array,
    b: jax.Array,
    r: jax.Array,
    segments: int,
    *,
    problem: Problem,
    stage: StageConfig,
    precision: Precision,
    interpret: bool,
) -> jax.Array:
    """sum_t r_t a_t b_t^T over each segment, (B, NH, segments, DHQK, DHHV) float32; arguments as for ``recurrence``."""
    length = problem.S // segments
    p = dataclasses.replace(problem, NH=problem.NH * segments, S=length, L=length)
    stage = stage.fitted(p).narrowed(p)
    one, none = jnp.ones((p.BNH, 1), jnp.float32), jnp.zeros((p.BNH, p.DHQK), jnp.float32)
    launch: dict[str, Any] = dict(problem=p, stage=stage, precision=precision, interpret=interpret)
    made = _launch("segment_products", a, b, r, one, None, none, last=True, backward=False, **launch)
    return made.X_last.reshape(problem.B, problem.NH, segments, p.DHQK, p.DHHV)


def recurrence(
    name: str,
    a: jax.Array,
    b: jax.Array,
    gamma: jax.Array,
    X_initial: jax.Array | None,
    *,
    last: bool,
    r: jax.Array | None = None,
    x_initial: jax.Array | None = None,
    backward: bool,
    problem: Problem,
    stage: StageConfig,
    precision: Precision,
    save_every: int = 1,
    interpret: bool,
) -> tuple[Any, ...]:
    """Launches the kernel under ``name``. Config: siz_b_LKV, siz_b_DHQK, siz_b_DHHV, num_segments.

    Args:
      a, b: (B, NH, S, DHQK), (B, NH, S, DHHV) in the kernel dtype.
      gamma: (B, NH, NC), X_initial: (B, NH, DHQK, DHHV), None: zeros; float32.
      last: whether X behind the last chunk is wanted.
      r, x_initial: (B, NH, S), (B, NH, DHQK), float32; both, or none where a is scaled.
      save_every: only what enters chunks 0, n, 2n, ... is stored: stored = ceil(NC / n).

    Returns:
      What enters each chunk, X (B, NH, stored, DHQK, DHHV) in the kernel dtype; what leaves the last one, (B, NH, DHQK, DHHV) float32, or
      None; with r likewise x, (B, NH, stored, DHQK) and (B, NH, DHQK), float32.
    """
    whole = stage.fitted(problem)
    stage = whole.narrowed(problem)
    segments = stage.segments(problem) if save_every == 1 else 1
    launch: dict[str, Any] = dict(stage=stage, precision=precision, interpret=interpret)
    x: tuple[jax.Array, ...] = ()
    if segments > 1:
        if r is not None and x_initial is not None:
            scaled = a.astype(jnp.float32) * r[..., None]
            added_x = jnp.sum(scaled.reshape(*a.shape[:2], problem.NC, problem.L, problem.DHQK), axis=-2)
            x, a, r = vector_states(added_x, gamma, x_initial, backward=backward), scaled.astype(a.dtype), None
        decays = decays_in_segments(gamma, segments, problem.S, backward=backward)
        added = segment_products(a, b, decays, segments, problem=problem, **launch | {"stage": whole})
        X_initial = segment_states(added, gamma, X_initial, backward=backward)
    p = dataclasses.replace(problem, NH=problem.NH * segments, S=problem.S // segments)
    options: dict[str, Any] = dict(last=last, backward=backward, save_every=save_every)
    made = _launch(name, a, b, r, gamma, X_initial, x_initial, problem=p, **options, **launch)
    heads = problem.B, problem.NH
    X_last = None if made.X_last is None else made.X_last.reshape(*heads, segments, p.DHQK, p.DHHV)[:, :, 0 if backward else -1]
    if made.x is not None:
        x = made.x.reshape(*heads, -1, p.DHQK), made.x_last.reshape(*heads, p.DHQK)
    return made.X.reshape(*heads, -1, p.DHQK, p.DHHV), X_last, *x
