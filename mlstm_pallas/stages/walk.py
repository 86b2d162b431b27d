"""The walk over the sequence that recurrent_fw_H, recurrent_bw_dQ, recurrent_bw_dK and recurrent_bw_dV share: no state goes through memory.

    o_t = r_t X_c^T a_t + g_t x_c + sum_s A_ts y_s        X_{next} = gamma_c X_c + sum_s b_s ybar_s^T

chunk by chunk, forward or backward in time (then A_st for A_ts, and X_c is what enters the chunk from behind).

    stage             o    X      a   b     y   ybar  A                r              g         x
    recurrent_fw_H    h    C      q   kbar  v   v     P                r
    recurrent_bw_dQ   dq   C^T    dh  v     k   kbar  scale dP         w scale / den  w scale dz  n
    recurrent_bw_dK   dk   dC^T   v   dh    q   qbar  scale dP, back   abar           abar        dn
    recurrent_bw_dV   dv   dC     k   qbar  dh  dh    P, back          abar

P, dP, kbar = abar k and qbar = w scale / den q come from parallel_fw_P and parallel_bw_P.

Grid (columns of o, B * NH). A program owns a block of columns of X, in fp32 registers, and of o. The block is kept transposed, so that it
is the left operand of X^T a: what one product leaves in registers the next takes from there, rounded to the kernel dtype, and nothing of
it goes through shared memory. It is held as several tiles: one of them rounded at a time is all that fits beside it. Where X has more rows
than a program can hold, a launch for each part of them adds to what the one before made.

No tile that the pipeline loads feeds plain arithmetic as well as a product (see parallel_fw_H), so what is only weighted comes by itself.

FLOPs: 4 B NH S rows columns of X, and 2 B NH S L columns. Bytes: all that is named above once, a, b and A again for each column block,
these mostly from L2; o twice more for each further part.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mlstm_pallas.config import StageConfig
from mlstm_pallas.launch import kernel_call
from mlstm_pallas.problem import Problem
from mlstm_pallas.tiles import Precision, block_at, blocks, divide, dot, loop, remainder


@dataclasses.dataclass(frozen=True)
class Walk:
    """What a stage walks with; R rows and N columns of the state X.

    Attributes:
      read, write: a and b, (B, NH, S, R) in the kernel dtype.
      values, added: ybar and y, (B, NH, S, N) in the kernel dtype; added may be values.
      tile: A, (B, NH, S, L) in the kernel dtype, row t, column s - the chunk's first step, in either direction.
      r: (B, NH, S); gamma: (B, NH, NC); float32.
      initial: X where the walk begins, float32: (B, NH, R, N), or (B, NH, N, R) where ``turned``.
      x, g: (B, NH, NC, N) and (B, NH, S), float32.
      weigh: (B, NH, S, N): its inner products with the state's part of o are wanted.
      store: X is wanted where it enters chunks 0, store_every, 2 store_every, ..., in the kernel dtype.
      other: such states, of the opposite walk: their products <other, X> are wanted there.
    """

    read: jax.Array
    write: jax.Array
    values: jax.Array
    added: jax.Array
    tile: jax.Array
    r: jax.Array
    gamma: jax.Array
    initial: jax.Array
    x: jax.Array | None = None
    g: jax.Array | None = None
    weigh: jax.Array | None = None
    other: jax.Array | None = None
    store: bool = False
    store_every: int = 1
    turned: bool = False
    backward: bool = False


@dataclasses.dataclass(frozen=True)
class Walked:
    """o (B, NH, S, N) in the output dtype; X where the walk ended, as the initial one; what is weighed (B, NH, S); at the borders the
    states (B, NH, stored, N, R) or the products (B, NH, stored)."""

    out: jax.Array
    last: jax.Array
    weighed: jax.Array | None
    borders: jax.Array | None


def _walk_kernel(
    read_ref,  # (S, R)
    write_ref,  # (S, R)
    values_ref,  # (S, N)
    added_ref,  # (S, N), absent where values are added
    tile_ref,  # (S, L), absent in further parts, as x and g
    r_ref,  # (S,)
    gamma_ref,  # (NC,)
    initial_ref,  # (R, N) or (N, R)
    x_ref,  # (NC, N)
    g_ref,  # (S,)
    weigh_ref,  # (S, N)
    before_ref,  # (S, N), what earlier parts made
    other_ref,  # (stored, N, R)
    out_ref,  # out (S, N)
    last_ref,  # out, as initial
    *more_refs,  # out: (S,) weighed; (stored, N, R) or (stored,)
    L: int,
    part: int,
    every: int,
    turned: bool,
    backward: bool,
    precision: Precision,
):
    S, R = read_ref.shape
    parts = [pl.ds(start, part) for start in range(0, R, part)]
    chunks = S // L
    more = list(more_refs)
    weighed_ref = more.pop(0) if weigh_ref is not None else None
    border_ref = more.pop(0) if more else None

    def step(index, XT):
        chunk = chunks - 1 - index if backward else index
        rows = block_at(chunk, L)
        if border_ref is not None:

            @pl.when(remainder(chunk, every) == 0)
            def _at_border():
                slot = divide(chunk, every)
                if other_ref is None:
                    for columns, block in zip(parts, XT, strict=True):
                        border_ref[slot, :, columns] = block.astype(border_ref.dtype)
                else:
                    products = [jnp.sum(y * other_ref[slot, :, columns].astype(jnp.float32)) for columns, y in zip(parts, XT, strict=True)]
                    border_ref[slot] = sum(products[1:], products[0])

        weigh = None if weigh_ref is None else weigh_ref[rows, :]
        values = values_ref[rows, :]
        out = jnp.zeros((values.shape[1], L), jnp.float32)
        for columns, block in zip(parts, XT, strict=True):
            out += dot(block.astype(values.dtype), read_ref[rows, columns], precision, b_axis=1)
        out = out * r_ref[rows][None, :]
        if x_ref is not None:
            out += x_ref[chunk, :][:, None] * g_ref[rows][None, :]
        if weighed_ref is not None:
            weighed_ref[rows] = jnp.sum(out * weigh.astype(jnp.float32).T, axis=0)
        if tile_ref is not None:
            added = values if added_ref is None else added_ref[rows, :]
            out += dot(added, tile_ref[rows, :], precision, a_axis=0, b_axis=0 if backward else 1)
        if before_ref is None:
            out_ref[rows, :] = out.astype(out_ref.dtype).T
        else:
            out_ref[rows, :] = (out.T + before_ref[rows, :].astype(jnp.float32)).astype(out_ref.dtype)
        gamma = gamma_ref[chunk]
        return tuple(
            block * gamma + dot(values, write_ref[rows, columns], precision, a_axis=0) for columns, block in zip(parts, XT, strict=True)
        )

    XT = loop(chunks, step, tuple(initial_ref[:, y] if turned else initial_ref[y, :].T for y in parts))
    for columns, block in zip(parts, XT, strict=True):
        if turned:
            last_ref[:, columns] = block
        else:
            last_ref[columns, :] = block.T


def walk(
    name: str,
    x: Walk,
    *,
    columns: int,
    rows: int,
    part: int,
    problem: Problem,
    stage: StageConfig,
    precision: Precision,
    output_dtype: jnp.dtype,
    interpret: bool,
) -> Walked:
    """Launches the kernel under ``name``: blocks of ``columns`` columns and ``rows`` rows of X, held as tiles of ``part`` rows."""
    p, R, N = problem, x.read.shape[-1], x.values.shape[-1]
    columns, rows = min(columns, N & -N), min(rows, R & -R)
    stored = -(-p.NC // x.store_every)
    row = pl.BlockSpec((None, p.S), lambda i, b: (b, 0))
    values = pl.BlockSpec((None, p.S, columns), lambda i, b: (b, 0, i))
    out, lasts, weighed, borders = None, [], [], []

    for index in range(blocks(R, rows)):
        first = index == 0
        operand = pl.BlockSpec((None, p.S, rows), lambda i, b, index=index: (b, 0, index))
        arrays = [
            (x.read, operand),
            (x.write, operand),
            (x.values, values),
            (x.added if first and x.added is not x.values else None, values),
            (x.tile if first else None, pl.BlockSpec((None, p.S, p.L), lambda i, b: (b, 0, 0))),
            (x.r, row),
            (x.gamma, pl.BlockSpec((None, p.NC), lambda i, b: (b, 0))),
            (x.initial, _state_spec(x.turned, columns, rows, index)),
            (x.x if first else None, pl.BlockSpec((None, p.NC, columns), lambda i, b: (b, 0, i))),
            (x.g if first else None, row),
            (x.weigh, values),
            (out, values),
            (x.other, pl.BlockSpec((None, stored, columns, rows), lambda i, b, index=index: (b, 0, i, index))),
        ]
        made = [
            ((p.S, N), output_dtype, values),
            ((N, rows) if x.turned else (rows, N), jnp.float32, _state_spec(x.turned, columns, rows, 0)),
        ]
        if x.weigh is not None:
            made.append(((blocks(N, columns), p.S), jnp.float32, pl.BlockSpec((None, None, p.S), lambda i, b: (b, i, 0))))
        if x.other is not None:
            made.append(((blocks(N, columns), stored), jnp.float32, pl.BlockSpec((None, None, stored), lambda i, b: (b, i, 0))))
        elif x.store:
            border = pl.BlockSpec((None, stored, columns, rows), lambda i, b: (b, 0, i, 0))
            made.append(((stored, N, rows), x.read.dtype, border))
        out, last, *more = kernel_call(
            _walk_kernel,
            name=name,
            grid=(blocks(N, columns), p.BNH),
            in_specs=[None if y is None else spec for y, spec in arrays],
            out_specs=[spec for _, _, spec in made],
            out_shape=[jax.ShapeDtypeStruct((p.BNH, *shape), dtype) for shape, dtype, _ in made],
            stage=stage,
            interpret=interpret,
            L=p.L,
            part=min(part, rows),
            every=x.store_every,
            turned=x.turned,
            backward=x.backward,
            precision=precision,
        )(*(None if y is None else y.reshape(p.BNH, *y.shape[y.ndim - len(spec.block_shape) + 1 :]) for y, spec in arrays))
        lasts.append(last)
        if x.weigh is not None:
            weighed.append(more.pop(0).sum(1))
        borders += more

    def heads(y):
        return None if y is None else y.reshape(p.B, p.NH, *y.shape[1:])

    last = heads(jnp.concatenate(lasts, axis=-1 if x.turned else -2))
    if x.other is not None:
        borders = [sum(y.sum(1) for y in borders)]
    elif borders:
        borders = [jnp.concatenate(borders, axis=-1)]
    return Walked(heads(out), last, heads(sum(weighed)) if weighed else None, heads(borders[0]) if borders else None)


def _state_spec(turned: bool, columns: int, rows: int, index: int) -> pl.BlockSpec:
    if turned:
        return pl.BlockSpec((None, columns, rows), lambda i, b: (b, i, index))
    return pl.BlockSpec((None, rows, columns), lambda i, b: (b, index, i))
