"""The recurrence over chunks in Triton, for recurrent_fw_C and recurrent_bw_dC.

Grid (DHHV / siz_b_DHHV, DHQK / siz_b_DHQK, B * NH), times the number of recurrences: one launch may run several. A CTA owns a
siz_b_DHQK x siz_b_DHHV block of X, in float32 registers, and loops over the sequence in tiles of siz_b_LKV steps. At each chunk
boundary it stores the block in the kernel dtype. Within a chunk no sum is read before the last tile. The block is kept transposed:
where a has to be scaled it passes through registers, and goes from there to shared memory row by row as the right operand, while b is
read transposed from where the copy put it. The CTAs of the first column block own x.

Where that makes too few CTAs for a GPU, the sequence is cut into num_splits parts, which count as heads; the states before them follow
from what each adds (splits.py). The same kernel computes that, with a split for a chunk.

FLOPs: 2 R K V. Bytes: a and b once for each column and row block (the repeats mostly from L2), the states once:
(R (K + V) + B NH NC K V) itemsize.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mlstm_pallas.gates import vector_states
from mlstm_pallas.problem import Problem
from mlstm_pallas.splits import decays_in_splits, heads_of_splits, split_states, splits_as_heads
from mlstm_pallas.stage import Kernel, StageCall, StageConfig, search_of, sequence_spec, steps_like
from mlstm_pallas.stages.recurrence import Recurrence, RecurrenceOutputs, chunk_sums, with_inner
from mlstm_pallas.tiles import Precision, blocks, divide, dot, loop, remainder
from mlstm_pallas.triton.launch import kernel_call

# CTAs that leave no SM of a large GPU without two. Splitting pays for its second launch only from four splits on.
ENOUGH_CTAS, MIN_SPLITS, MAX_SPLITS = 256, 4, 16


def _recurrence_kernel(
    a_ref: Any,  # (S, siz_b_DHQK)
    b_ref: Any,  # (S, siz_b_DHHV)
    r_ref: Any,  # (S,), absent where a is scaled
    gamma_ref: Any,  # (NC,)
    X_initial_ref: Any,  # (siz_b_DHQK, siz_b_DHHV), may be absent
    x_initial_ref: Any,  # (siz_b_DHQK,), absent where x is not wanted; so are x and x_last
    X_ref: Any,  # out (NC, siz_b_DHQK, siz_b_DHHV)
    *more_refs: Any,  # out, as wanted: X_last (siz_b_DHQK, siz_b_DHHV); x (NC, siz_b_DHQK) and x_last (siz_b_DHQK,)
    tiles: int,
    siz_b_L: int,
    backward: bool,
    return_last: bool,
    precision: Precision,
) -> None:
    num_chunks, more = gamma_ref.shape[0], iter(more_refs)
    X_last_ref: Any = next(more) if return_last else None
    x_ref: Any = next(more, None)
    x_last_ref: Any = next(more, None)
    owns_x = pl.program_id(0) == 0

    def step(index: jax.Array, carry: Any) -> jax.Array:
        XT, x = carry
        chunk = num_chunks - 1 - index if backward else index
        X_ref[chunk, :, :] = XT.astype(X_ref.dtype).T
        if x_initial_ref is not None:

            @pl.when(owns_x)
            def _() -> None:
                x_ref[chunk, :] = x

        def add(tile: jax.Array, carry: Any) -> tuple[Any, ...]:
            XT, x = carry
            steps = pl.ds((chunk * tiles + tile) * siz_b_L, siz_b_L)
            a = a_ref[steps, :]
            if r_ref is not None:
                scaled = a.astype(jnp.float32) * r_ref[steps][:, None]
                a, x = scaled.astype(a.dtype), None if x is None else x + jnp.sum(scaled, axis=0)
            return XT + dot(b_ref[steps, :], a, precision, a_axis=0), x

        gamma = gamma_ref[chunk]
        return loop(tiles, add, (XT * gamma, None if x is None else x * gamma))

    x = None if x_initial_ref is None else x_initial_ref[...]
    XT = (
        jnp.zeros((b_ref.shape[1], a_ref.shape[1]), jnp.float32)
        if X_initial_ref is None
        else X_initial_ref[...].T
    )
    XT, x = loop(num_chunks, step, (XT, x))
    if X_last_ref is not None:
        X_last_ref[...] = XT.T
    if x_initial_ref is not None:

        @pl.when(owns_x)
        def _() -> None:
            x_last_ref[...] = x


_INPUTS = 6  # references of the kernel


def _recurrences_kernel(
    *refs: Any, each: Sequence[tuple[int, dict[str, Any]]], heads: int, **statics: Any
) -> None:
    """The inputs, then the outputs of each recurrence; ``each``: how many outputs, and what is static."""
    of, out = divide(pl.program_id(2), heads), len(each) * _INPUTS
    for index, (outputs, own) in enumerate(each):
        own_refs = *refs[index * _INPUTS : (index + 1) * _INPUTS], *refs[out : out + outputs]
        run: Any = functools.partial(_recurrence_kernel, **own, **statics)
        if len(each) == 1:
            run(*own_refs)
        else:
            pl.when(of == index)(functools.partial(run, *own_refs))
        out += outputs


def _launch(
    name: str,
    recurrences: Sequence[Recurrence],
    call: StageCall,
    taken: tuple[range, int] | None = None,
) -> list[RecurrenceOutputs]:
    """One launch of the kernel. taken: (these, of each n) heads alone."""
    p, BK, BV = call.problem, call.tiles.siz_b_DHQK, call.tiles.siz_b_DHHV
    these, of_each = taken or (range(1), 1)
    heads = p.BNH // of_each * len(these)

    def output_head(n: jax.Array) -> jax.Array:
        return n if len(recurrences) == 1 else remainder(n, heads)

    def head(n: jax.Array) -> jax.Array:
        n = output_head(n)
        return (
            n
            if taken is None
            else divide(n, len(these)) * of_each + remainder(n, len(these)) + these.start
        )

    def block(shape: Any, index: jax.Array, of: Any = head) -> jax.Array:
        return pl.BlockSpec((None, *shape), lambda iv, ik, n: (of(n), *index(iv, ik)))

    state, norm = (lambda iv, ik: (ik, iv)), (lambda iv, ik: (ik,))
    arrays: list[tuple[jax.Array | None, pl.BlockSpec]] = []
    outputs: list[tuple[tuple[int, ...], Any, pl.BlockSpec]] = []
    each: list[tuple[int, dict[str, Any]]] = []
    for x in recurrences:
        arrays += [
            (x.a, sequence_spec(x.a, p, p.S, BK, lambda iv, ik, n: (head(n), 0, ik))),
            (x.b, sequence_spec(x.b, p, p.S, BV, lambda iv, ik, n: (head(n), 0, iv))),
            (x.r, block((p.S,), lambda iv, ik: (0,))),
            (x.gamma, block((p.NC,), lambda iv, ik: (0,))),
            (x.X_initial, block((BK, BV), state)),
            (x.x_initial, block((BK,), norm)),
        ]
        own: Any = [
            (
                (p.NC, p.DHQK, p.DHHV),
                x.a.dtype,
                block((p.NC, BK, BV), lambda iv, ik: (0, ik, iv), output_head),
            )
        ]
        if x.return_last:
            own.append(((p.DHQK, p.DHHV), jnp.float32, block((BK, BV), state, output_head)))
        if x.x_initial is not None:
            own.append(
                (
                    (p.NC, p.DHQK),
                    jnp.float32,
                    block((p.NC, BK), lambda iv, ik: (0, ik), output_head),
                )
            )
            own.append(((p.DHQK,), jnp.float32, block((BK,), norm, output_head)))
        outputs += own
        each.append((len(own), dict(backward=x.backward, return_last=x.return_last)))
    found = iter(
        kernel_call(
            _recurrences_kernel,
            name=name,
            grid=(blocks(p.DHHV, BV), blocks(p.DHQK, BK), len(recurrences) * heads),
            in_specs=[None if y is None else spec for y, spec in arrays],
            out_specs=[spec for *_, spec in outputs],
            out_shape=[jax.ShapeDtypeStruct((heads, *shape), dtype) for shape, dtype, _ in outputs],
            call=call,
            each=tuple(each),
            heads=heads,
            tiles=blocks(p.L, call.tiles.siz_b_LKV),
            siz_b_L=call.tiles.siz_b_LKV,
            precision=call.precision,
        )(*(y for y, _ in arrays))
    )

    def outputs_of(x: Recurrence) -> RecurrenceOutputs:
        X, X_last = next(found), next(found) if x.return_last else None
        return RecurrenceOutputs(
            X, X_last, *((next(found), next(found)) if x.x_initial is not None else (None, None))
        )

    return [outputs_of(x) for x in recurrences]


def split_products(
    a: jax.Array,
    b: jax.Array,
    r: jax.Array,
    num_splits: int,
    *,
    backward: bool = False,
    all_splits: bool = False,
    call: StageCall,
) -> jax.Array:
    """``stages/recurrence.py``."""
    p = call.problem.split(num_splits)
    p = dataclasses.replace(p, L=p.S)
    call = dataclasses.replace(call, problem=p, tiles=shrunk(call.tiles.clamped(p), p))
    a, b, r = (splits_as_heads(x, num_splits) for x in (a, b, r))
    whole = Recurrence(a, b, jnp.ones((p.BNH, 1), jnp.float32), None, return_last=True, r=r)
    taken = (
        range(num_splits)
        if all_splits
        else range(1, num_splits)
        if backward
        else range(num_splits - 1)
    )
    (outputs,) = _launch("split_products", [whole], call, (taken, num_splits))
    return heads_of_splits(outputs.X_last, len(taken))


def recurrences(name: str, *each: Recurrence, call: StageCall) -> list[RecurrenceOutputs]:
    """``stages/recurrence.py``, in one launch. XLA computes the inner products."""
    return [with_inner(x, y) for x, y in zip(each, _recurrences(name, each, call), strict=True)]


def _recurrences(name: str, each: Sequence[Recurrence], call: StageCall) -> list[RecurrenceOutputs]:
    """All but the inner products."""
    p, tiles = call.problem, shrunk(call.tiles, call.problem, len(each))
    num_splits = splits_of(tiles, p, len(each))
    if num_splits == 1:
        return _launch(name, each, dataclasses.replace(call, tiles=tiles))
    parts = [_in_splits(x, num_splits, call) for x in each]
    split_call = dataclasses.replace(call, problem=p.split(num_splits), tiles=tiles)
    outputs = _launch(name, [x for x, _ in parts], split_call)
    return [
        _whole(x, y, vectors, num_splits) for y, (x, vectors) in zip(outputs, parts, strict=True)
    ]


def _whole(
    x: Recurrence, outputs: RecurrenceOutputs, vectors: tuple[Any, Any], num_splits: int
) -> RecurrenceOutputs:
    """The outputs of whole sequences from those of splits; vectors: x and x_last."""
    X, X_last = heads_of_splits(outputs.X, num_splits), outputs.X_last
    if X_last is not None:
        X_last = heads_of_splits(X_last, num_splits)[:, 0 if x.backward else -1]
    return RecurrenceOutputs(X.reshape(X.shape[0], -1, *X.shape[3:]), X_last, *vectors)


def _in_splits(
    x: Recurrence, num_splits: int, call: StageCall
) -> tuple[Recurrence, tuple[Any, Any]]:
    """The recurrence on splits, from the states before them; where it has x, that is computed here."""
    vectors: tuple[Any, Any] = (None, None)
    if x.r is not None:
        scaled = x.a.astype(jnp.float32) * steps_like(x.r, x.a)
        if x.x_initial is not None:
            vectors = vector_states(
                chunk_sums(scaled, call), x.gamma, x.x_initial, backward=x.backward
            )
        x = dataclasses.replace(x, a=scaled.astype(x.a.dtype), r=None, x_initial=None)
    decays = decays_in_splits(x.gamma, num_splits, call.problem.S, backward=x.backward)
    products = split_products(x.a, x.b, decays, num_splits, backward=x.backward, call=call)
    states = split_states(products, x.gamma, x.X_initial, backward=x.backward)
    a, b, gamma = (splits_as_heads(y, num_splits) for y in (x.a, x.b, x.gamma))
    return dataclasses.replace(x, a=a, b=b, gamma=gamma, X_initial=states), vectors


def _ctas(tiles: StageConfig, p: Problem) -> int:
    """Of one recurrence over one split."""
    return p.BNH * blocks(p.DHHV, tiles.siz_b_DHHV) * blocks(p.DHQK, tiles.siz_b_DHQK)


def shrunk(tiles: StageConfig, p: Problem, recurrences: int = 1) -> StageConfig:
    """The (clamped) tiles with smaller blocks, down to 64 columns a side, where so many recurrences have few CTAs."""
    for name in ("siz_b_DHHV", "siz_b_DHQK") * 2:
        size = getattr(tiles, name)
        if size > 64 and recurrences * _ctas(tiles, p) < ENOUGH_CTAS:
            tiles = tiles.replace(**{name: size // 2})
    return tiles


def splits_of(tiles: StageConfig, p: Problem, recurrences: int = 1) -> int:
    """Splits of the sequence: num_splits, cut to what divides the chunks."""
    filling = max(ENOUGH_CTAS // max(recurrences * _ctas(tiles, p), 1), 1)
    wanted = filling if tiles.num_splits is None else tiles.num_splits
    splits = min(1 << (wanted.bit_length() - 1), MAX_SPLITS, p.NC & -p.NC)
    return splits if tiles.num_splits is not None or splits >= MIN_SPLITS else 1


KERNEL = Kernel(
    search=search_of("siz_b_LKV", "siz_b_DHQK", "siz_b_DHHV"),
    heuristic=lambda p, dtype: StageConfig(
        siz_b_LKV=64, siz_b_DHQK=64, siz_b_DHHV=64, num_warps=4, num_stages=2
    ),
)
