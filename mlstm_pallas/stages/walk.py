"""The walk over the sequence that recurrent_fw_H, recurrent_bw_dQ, recurrent_bw_dK and recurrent_bw_dV share: no state goes through memory.

    o_t = r_t (X_c^T a_t + x_c) + sum_s A_ts y_s + own_t        X_{next} = gamma_c X_c + sum_s b_s y_s^T

chunk by chunk, forward or backward in time (then A_st for A_ts, and X_c is what enters the chunk from behind).

    stage             o    X      a   b     y     r              x   A        own
    recurrent_fw_H    h    C      q   kbar  v     r                  P
    recurrent_bw_dQ   dq   C^T    dh  v     kbar  w scale / den               scale dP k + w scale dz n
    recurrent_bw_dK   dk   dC^T   v   dh    qbar  abar           dn           scale dP^T q
    recurrent_bw_dV   dv   dC     k   qbar  dh    abar               P, back

P, kbar = abar k, qbar = w scale / den q and own come from parallel_fw_P and parallel_bw_P.

Grid (columns of o, B * NH). A program owns a block of columns of X, in fp32 registers, and of o. The block is kept transposed, so that it
is the left operand of X^T a: what one product leaves in registers the next takes from there, rounded to the kernel dtype (in two parts,
where more digits are wanted), and nothing of it goes through shared memory. It is held as several tiles: one of them rounded at a time is
all that fits beside it. Where X has more rows than a program can hold, a launch for each part of them adds to what the one before made.

X at every n-th chunk may be stored on the way, between two loops over n chunks each.

No tile that the pipeline loads feeds plain arithmetic as well as a product (see parallel_fw_H), so what is only weighted comes by itself.

FLOPs: 4 B NH S rows columns of X, and with A 2 B NH S L columns. Bytes: all that is named above once, a, b and A again for each column
block, these mostly from L2; o twice more for each further part.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.config import WALKS, KernelConfig
from mlstm_pallas.launch import kernel_call
from mlstm_pallas.problem import Problem
from mlstm_pallas.tiles import Precision, block_at, blocks, dot, loop


@dataclasses.dataclass(frozen=True)
class Walk:
    """What a stage walks with; R rows and N columns of the state X.

    Attributes:
      read, write: a and b, (B, NH, S, R) in the kernel dtype.
      values: y, (B, NH, S, N) in the kernel dtype.
      tile: A, (B, NH, S, L) in the kernel dtype, row t, column s - the chunk's first step, in either direction.
      own: (B, NH, S, N) in the kernel dtype.
      r: (B, NH, S); gamma: (B, NH, NC); float32.
      initial: X where the walk begins, float32: (B, NH, R, N), or (B, NH, N, R) where ``turned``; None: zeros.
      last: whether X is wanted where the walk ends.
      x: (B, NH, NC, N), float32.
      weigh: (B, NH, S, N) in the kernel dtype: its inner products with X_c^T a + x are wanted, to more digits than the kernel dtype has.
      store_every: what enters chunks 0, n, 2n, ..., a divisor of their number, is stored; 0: nothing. For a walk of one launch.
    """

    read: jax.Array
    write: jax.Array
    values: jax.Array
    r: jax.Array
    gamma: jax.Array
    initial: jax.Array | None
    last: bool
    tile: jax.Array | None = None
    own: jax.Array | None = None
    x: jax.Array | None = None
    weigh: jax.Array | None = None
    turned: bool = False
    backward: bool = False
    store_every: int = 0


def _walk_kernel(
    read_ref,  # (S, R)
    write_ref,  # (S, R)
    values_ref,  # (S, N)
    tile_ref,  # (S, L); this and x in the first part
    r_ref,  # (S,)
    gamma_ref,  # (NC,)
    initial_ref,  # (R, N) or (N, R), may be absent
    x_ref,  # (NC, N)
    weigh_ref,  # (S, N)
    own_ref,  # (S, N); in further parts what those before made
    out_ref,  # out (S, N)
    *more_refs,  # out: X where the walk ends, as initial; what is weighed, (S,); X (stored, R, N); what is wanted of these
    L: int,
    part: int,
    turned: bool,
    backward: bool,
    last: bool,
    store_every: int,
    precision: Precision,
):
    S, R = read_ref.shape
    more = iter(more_refs)
    last_ref: Any = next(more) if last else None
    weighed_ref: Any = None if weigh_ref is None else next(more)
    X_ref: Any = next(more) if store_every else None
    parts = [pl.ds(start, part) for start in range(0, R, part)]
    chunks = S // L

    def rows_of(index):
        chunk = chunks - 1 - index if backward else index
        return chunk, block_at(chunk, L)

    # The pipeline copies operands of products alone. What else is of use to a chunk is asked for a chunk ahead, or each would wait for
    # memory; so is the tile, of which the pipeline would hold several, too much for two programs on a multiprocessor.
    def ahead(index):
        chunk, rows = rows_of(lax.min(index, np.int32(chunks - 1)))
        x = None if x_ref is None else x_ref[chunk, :]
        return gamma_ref[chunk], r_ref[rows], x, *(None if ref is None else ref[rows, :] for ref in (own_ref, tile_ref))

    def step(index, carry):
        XT, (gamma, r, x, own, tile) = carry
        _, rows = rows_of(index)
        following = ahead(index + 1)
        weigh = None if weigh_ref is None else weigh_ref[rows, :]  # as early, but in no register of the chunk before
        values = values_ref[rows, :]
        out = jnp.zeros((values.shape[1], L), jnp.float32)
        for columns, block in zip(parts, XT, strict=True):
            read = read_ref[rows, columns]
            if weigh is None or values.dtype == jnp.float32:
                out += dot(block.astype(values.dtype), read, precision, b_axis=1)
            else:
                high = lax.bitcast_convert_type(lax.bitcast_convert_type(block, jnp.int32) & np.int32(-65536), jnp.float32)
                out += dot((block - high).astype(values.dtype), read, precision, b_axis=1)
                out += dot(high.astype(values.dtype), read, precision, b_axis=1)
        if x is not None:
            out += x[:, None]
        if weigh is not None:
            weighed_ref[rows] = jnp.sum(out * weigh.astype(jnp.float32).T, axis=0)
        out = out * r[None, :]
        if tile is not None:
            out += dot(values, tile, precision, a_axis=0, b_axis=0 if backward else 1)
        if own is None:
            out_ref[rows, :] = out.astype(out_ref.dtype).T
        else:
            out_ref[rows, :] = (out.T + own.astype(jnp.float32)).astype(out_ref.dtype)
        XT = tuple(
            block * gamma + dot(values, write_ref[rows, columns], precision, a_axis=0) for columns, block in zip(parts, XT, strict=True)
        )
        return XT, following

    def initial(rows):
        if initial_ref is None:
            return jnp.zeros((values_ref.shape[1], part), jnp.float32)
        return initial_ref[:, rows] if turned else initial_ref[rows, :].T

    def stored(index, carry):
        for columns, block in zip(parts, carry[0], strict=True):
            X_ref[index, columns, :] = block.astype(X_ref.dtype).T
        return loop(store_every, lambda chunk, carry: step(index * store_every + chunk, carry), carry)

    carry = tuple(map(initial, parts)), ahead(np.int32(0))
    XT, _ = loop(chunks // store_every, stored, carry) if store_every else loop(chunks, step, carry)
    if last_ref is None:
        return
    for columns, block in zip(parts, XT, strict=True):
        if turned:
            last_ref[:, columns] = block
        else:
            last_ref[columns, :] = block.T


def walk(
    name: str,
    x: Walk,
    *,
    problem: Problem,
    config: KernelConfig,
    output_dtype: jnp.dtype,
    interpret: bool,
) -> tuple[Any, ...]:
    """Launches the kernel as the stage ``name``, a name in config.WALKS.

    Config: siz_b_DHQK and siz_b_DHHV, of which one is the columns of a block of X and the other the rows of a tile of it; siz_b_loop, the
    rows that a launch holds.

    Returns:
      o (B, NH, S, N) in the output dtype; X where the walk ended, as the initial one, or None; where asked for, what is weighed
      (B, NH, S); float32. Where asked for, X (B, NH, stored, R, N) in the kernel dtype.
    """
    p, R, N = problem, x.read.shape[-1], x.values.shape[-1]
    stage = config.stage(name).fitted(p, name)
    part, columns, rows = stage.siz_b_DHQK, stage.siz_b_DHHV, stage.siz_b_loop
    if WALKS[name] == "DHHV":
        part, columns = columns, part
    launches = blocks(R, rows)
    if x.store_every and launches > 1:
        raise ValueError(f"{name} stores states of {rows} rows at the most, expected {R}")
    row = pl.BlockSpec((None, p.S), lambda i, b: (b, 0))
    values = pl.BlockSpec((None, p.S, columns), lambda i, b: (b, 0, i))
    lasts, weighed, states = [], [], []

    def flat(y):
        return None if y is None else y.reshape(p.BNH, *y.shape[2:])

    def state(index):
        if x.turned:
            return pl.BlockSpec((None, columns, rows), lambda i, b: (b, i, index))
        return pl.BlockSpec((None, rows, columns), lambda i, b: (b, index, i))

    out = flat(x.own)
    for index in range(launches):
        first, last_one = index == 0, index == launches - 1
        operand = pl.BlockSpec((None, p.S, rows), lambda i, b, index=index: (b, 0, index))
        arrays = [
            (flat(x.read), operand),
            (flat(x.write), operand),
            (flat(x.values), values),
            (flat(x.tile) if first else None, pl.BlockSpec((None, p.S, p.L), lambda i, b: (b, 0, 0))),
            (flat(x.r), row),
            (flat(x.gamma), pl.BlockSpec((None, p.NC), lambda i, b: (b, 0))),
            (flat(x.initial), state(index)),
            (flat(x.x) if first else None, pl.BlockSpec((None, p.NC, columns), lambda i, b: (b, 0, i))),
            (flat(x.weigh), values),
            (out, values),
        ]
        # A few roundings of o are within what is promised, one a launch is not.
        dtype = output_dtype if last_one or launches == 2 else jnp.float32
        made: list[Any] = [((p.S, N), dtype, values)]
        if x.last:
            made.append(((N, rows) if x.turned else (rows, N), jnp.float32, state(0)))
        if x.weigh is not None:
            made.append(((blocks(N, columns), p.S), jnp.float32, pl.BlockSpec((None, None, p.S), lambda i, b: (b, i, 0))))
        if x.store_every:
            shape = blocks(p.NC, x.store_every), R, N
            made.append((shape, x.read.dtype, pl.BlockSpec((None, shape[0], R, columns), lambda i, b: (b, 0, 0, i))))
        out, *more = kernel_call(
            _walk_kernel,
            name=name,
            grid=(blocks(N, columns), p.BNH),
            in_specs=[None if y is None else spec for y, spec in arrays],
            out_specs=[spec for _, _, spec in made],
            out_shape=[jax.ShapeDtypeStruct((p.BNH, *shape), kind) for shape, kind, _ in made],
            stage=stage,
            interpret=interpret,
            L=p.L,
            part=part,
            turned=x.turned,
            backward=x.backward,
            last=x.last,
            store_every=x.store_every,
            precision=config.dot_precision(x.read.dtype, interpret),
        )(*(y for y, _ in arrays))
        if x.last:
            lasts.append(more.pop(0))
        if x.store_every:
            states.append(more.pop())
        weighed += [y.sum(1) for y in more]

    results = [out, jnp.concatenate(lasts, axis=-1 if x.turned else -2) if lasts else None]
    if weighed:
        results.append(sum(weighed[1:], weighed[0]))
    results += states
    return tuple(None if y is None else y.reshape(p.B, p.NH, *y.shape[1:]) for y in results)
