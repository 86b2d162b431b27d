"""The recurrence over chunks that recurrent_fw_C and recurrent_bw_dC share.

    X_{next} = gamma_c X + sum_t r_t a_t b_t^T        x_{next} = gamma_c x + sum_t r_t a_t

chunk by chunk, forward or backward in time: (X, a, b, r) = (C, k, v, abar), or with operands that come scaled, without r and x,
(C, kbar, v) or (dC, qbar, dh).

Grid (DHHV / siz_b_DHHV, DHQK / siz_b_DHQK, B * NH), as often as recurrences are given: one launch may do several. A program owns a
siz_b_DHQK x siz_b_DHHV block of X, in fp32 registers, and walks over the sequence in tiles of siz_b_LKV rows. Where it enters a chunk
it stores the block in the kernel dtype. Within a chunk no sum is read before the last tile. The block is kept transposed: where a has
to be scaled it passes through registers, and goes from there to shared memory row by row as the right operand, while b is read
transposed from where the copy put it. The programs of the first column block own x.

Where that makes too few programs for a GPU, the sequence is split in num_segments parts, which are further heads; the states before
them follow from what each adds (segments.py), which the same kernel makes, a segment being a chunk then.

FLOPs: 2 B NH S DHQK DHHV. Bytes: a and b once for each column and row block (the repeats mostly from L2), the states once:
B NH (S (DHQK + DHHV) + NC DHQK DHHV) itemsize.
"""

import dataclasses
import functools
from collections.abc import Sequence
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


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """One recurrence.

    Attributes:
      a, b: (B, NH, S, DHQK), (B, NH, S, DHHV) in the kernel dtype.
      gamma: (B, NH, NC), X_initial: (B, NH, DHQK, DHHV), None: zeros; float32.
      last: whether X behind the last chunk is wanted.
      backward: in time.
      r, x_initial: (B, NH, S), (B, NH, DHQK), float32; both, or none where a is scaled.
    """

    a: jax.Array
    b: jax.Array
    gamma: jax.Array
    X_initial: jax.Array | None
    last: bool
    backward: bool = False
    r: jax.Array | None = None
    x_initial: jax.Array | None = None

    @property
    def weighted(self) -> bool:
        return self.r is not None


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


_INPUTS = 6  # references of the kernel


def _recurrences_kernel(*refs, each: Sequence[tuple[int, dict[str, Any]]], heads: int, **statics):
    """The inputs, then the outputs of each recurrence; ``each``: how many outputs, and what is static."""
    of, out = divide(pl.program_id(2), heads), len(each) * _INPUTS
    for index, (outputs, own) in enumerate(each):
        mine = *refs[index * _INPUTS : (index + 1) * _INPUTS], *refs[out : out + outputs]
        run: Any = functools.partial(_recurrence_kernel, **own, **statics)
        if len(each) == 1:
            run(*mine)
        else:
            pl.when(of == index)(functools.partial(run, *mine))
        out += outputs


class _Made(NamedTuple):
    """float32 but for X; of n heads. What is not wanted is None."""

    X: jax.Array  # (n, stored, DHQK, DHHV) in the kernel dtype
    X_last: Any  # (n, DHQK, DHHV)
    x: Any  # (n, stored, DHQK)
    x_last: Any  # (n, DHQK)


def _launch(
    name: str,
    recurrences: Sequence[Recurrence],
    *,
    problem: Problem,
    stage: StageConfig,
    precision: Precision,
    save_every: int = 1,
    taken: range | None = None,
    segments: int = 1,
    interpret: bool,
) -> list[_Made]:
    """One launch of the kernel, on arrays whose leading axes hold the problem's heads; taken: of each ``segments`` of them, else all."""
    p, BK, BV = problem, stage.siz_b_DHQK, stage.siz_b_DHHV
    stored = -(-p.NC // save_every)
    heads = p.BNH if taken is None else p.BNH // segments * len(taken)

    def program(n):
        return n if len(recurrences) == 1 else remainder(n, heads)

    def head(n):
        n = program(n)
        return n if taken is None else divide(n, len(taken)) * segments + remainder(n, len(taken)) + taken.start

    def block(shape, index, of=head):
        return pl.BlockSpec((None, *shape), lambda iv, ik, n: (of(n), *index(iv, ik)))

    state, norm = (lambda iv, ik: (ik, iv)), (lambda iv, ik: (ik,))
    arrays: list[tuple[jax.Array | None, pl.BlockSpec]] = []
    made: list[tuple[tuple[int, ...], Any, pl.BlockSpec]] = []
    each: list[tuple[int, dict[str, Any]]] = []

    def flat(y, *shape):
        return None if y is None else y.reshape(p.BNH, *shape)

    for x in recurrences:
        arrays += [
            (flat(x.a, p.S, p.DHQK), block((p.S, BK), lambda iv, ik: (0, ik))),
            (flat(x.b, p.S, p.DHHV), block((p.S, BV), lambda iv, ik: (0, iv))),
            (flat(x.r, p.S), block((p.S,), lambda iv, ik: (0,))),
            (flat(x.gamma, p.NC), block((p.NC,), lambda iv, ik: (0,))),
            (flat(x.X_initial, p.DHQK, p.DHHV), block((BK, BV), state)),
            (flat(x.x_initial, p.DHQK), block((BK,), norm)),
        ]
        outs: Any = [((stored, p.DHQK, p.DHHV), x.a.dtype, block((stored, BK, BV), lambda iv, ik: (0, ik, iv), program))]
        if x.last:
            outs.append(((p.DHQK, p.DHHV), jnp.float32, block((BK, BV), state, program)))
        if x.weighted:
            outs.append(((stored, p.DHQK), jnp.float32, block((stored, BK), lambda iv, ik: (0, ik), program)))
            outs.append(((p.DHQK,), jnp.float32, block((BK,), norm, program)))
        made += outs
        each.append((len(outs), dict(backward=x.backward, last=x.last)))
    found = iter(
        kernel_call(
            _recurrences_kernel,
            name=name,
            grid=(blocks(p.DHHV, BV), blocks(p.DHQK, BK), len(recurrences) * heads),
            in_specs=[None if y is None else spec for y, spec in arrays],
            out_specs=[spec for *_, spec in made],
            out_shape=[jax.ShapeDtypeStruct((heads, *shape), dtype) for shape, dtype, _ in made],
            stage=stage,
            interpret=interpret,
            each=tuple(each),
            heads=heads,
            tiles=blocks(p.L, stage.siz_b_LKV),
            siz_b_L=stage.siz_b_LKV,
            save_every=save_every,
            precision=precision,
        )(*(y for y, _ in arrays))
    )

    def outputs(x: Recurrence) -> _Made:
        X, X_last = next(found), next(found) if x.last else None
        return _Made(X, X_last, *((next(found), next(found)) if x.weighted else (None, None)))

    return [outputs(x) for x in recurrences]


def segment_products(
    a: jax.Array,
    b: jax.Array,
    r: jax.Array,
    segments: int,
    *,
    backward: bool = False,
    problem: Problem,
    stage: StageConfig,
    precision: Precision,
    interpret: bool,
) -> jax.Array:
    """sum_t r_t a_t b_t^T over each segment but the last one, with backward the first: (B, NH, segments - 1, DHQK, DHHV) float32.

    Arguments as of a ``Recurrence``.
    """
    length, taken = problem.S // segments, range(1, segments) if backward else range(segments - 1)
    p = dataclasses.replace(problem, NH=problem.NH * segments, S=length, L=length)
    stage = stage.fitted(p).narrowed(p)
    one, none = jnp.ones((p.BNH, 1), jnp.float32), jnp.zeros((p.BNH, p.DHQK), jnp.float32)
    whole = Recurrence(a, b, one, None, last=True, r=r, x_initial=none)
    launch: dict[str, Any] = dict(stage=stage, precision=precision, interpret=interpret)
    (made,) = _launch("segment_products", [whole], problem=p, taken=taken, segments=segments, **launch)
    return made.X_last.reshape(problem.B, problem.NH, segments - 1, p.DHQK, p.DHHV)


def recurrences(
    name: str,
    *given: Recurrence,
    problem: Problem,
    stage: StageConfig,
    precision: Precision,
    save_every: int = 1,
    interpret: bool,
) -> list[tuple[Any, ...]]:
    """Launches the kernel under ``name``. Config: siz_b_LKV, siz_b_DHQK, siz_b_DHHV, num_segments.

    Args:
      given: that do not depend on each other.
      save_every: only what enters chunks 0, n, 2n, ... is stored: stored = ceil(NC / n).

    Returns:
      For each what enters each chunk, X (B, NH, stored, DHQK, DHHV) in the kernel dtype; what leaves the last one, (B, NH, DHQK, DHHV)
      float32, or None; with r likewise x, (B, NH, stored, DHQK) and (B, NH, DHQK), float32.
    """
    whole = stage.fitted(problem)
    stage = whole.narrowed(problem, len(given))
    segments = stage.segments(problem, len(given)) if save_every == 1 else 1
    launch: dict[str, Any] = dict(precision=precision, interpret=interpret)
    vectors: list[tuple[jax.Array, ...]] = [()] * len(given)
    if segments > 1:
        parts = [_in_segments(x, segments, problem, whole, launch) for x in given]
        given, vectors = tuple(x for x, _ in parts), [x for _, x in parts]
    p = dataclasses.replace(problem, NH=problem.NH * segments, S=problem.S // segments)
    heads, results = (problem.B, problem.NH), []
    for x, vector, made in zip(given, vectors, _launch(name, given, problem=p, stage=stage, save_every=save_every, **launch), strict=True):
        X_last = made.X_last
        if X_last is not None:
            X_last = X_last.reshape(*heads, segments, p.DHQK, p.DHHV)[:, :, 0 if x.backward else -1]
        if made.x is not None:
            vector = made.x.reshape(*heads, -1, p.DHQK), made.x_last.reshape(*heads, p.DHQK)
        results.append((made.X.reshape(*heads, -1, p.DHQK, p.DHHV), X_last, *vector))
    return results


def _in_segments(
    x: Recurrence, segments: int, problem: Problem, stage: StageConfig, launch: dict[str, Any]
) -> tuple[Recurrence, tuple[jax.Array, ...]]:
    """The recurrence with the states before its segments for X_initial; where it has x, that is made here."""
    vectors: tuple[jax.Array, ...] = ()
    if x.r is not None and x.x_initial is not None:
        scaled = x.a.astype(jnp.float32) * x.r[..., None]
        added = jnp.sum(scaled.reshape(*x.a.shape[:2], problem.NC, problem.L, problem.DHQK), axis=-2)
        vectors = vector_states(added, x.gamma, x.x_initial, backward=x.backward)
        x = dataclasses.replace(x, a=scaled.astype(x.a.dtype), r=None, x_initial=None)
    decays = decays_in_segments(x.gamma, segments, problem.S, backward=x.backward)
    products = segment_products(x.a, x.b, decays, segments, backward=x.backward, problem=problem, stage=stage, **launch)
    return dataclasses.replace(x, X_initial=segment_states(products, x.gamma, x.X_initial, backward=x.backward)), vectors
