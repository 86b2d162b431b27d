"""The recurrence of n and dn over the chunks on Mosaic GPU: ``stages/vector_states.py``.

Grid (B * NH * DHQK / columns). A CTA is one warpgroup and owns 64 or 32 columns; its four warps
compute the same numbers. It loads the terms of the next AHEAD chunks before it joins the present
ones, so it waits only once per AHEAD chunks.

Long sequences are cut into splits (splits.py), which count as heads. A first launch computes what
each split adds, and stores no states. A second one computes the states.

Bytes: the added terms and the states, 2 B NH NC DHQK float32; with splits the added terms once
more. There is no matrix product.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.splits import split_states, splits_of
from mlstm_pallas.formulas.tiles import blocks, loop, weighted
from mlstm_pallas.launches.kernel_tiles import KernelSpec
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.mosaic_gpu.common.launch import (
    block,
    by_lanes,
    float32,
    load,
    mosaic_call,
    unravel,
)
from mlstm_pallas.mosaic_gpu.common.limits import HopperTiles
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.stages.vector_states import Operands

AHEAD = 16  # chunks
# Shorter splits gain less than the second launch and joining their sums cost.
MIN_SPLIT_CHUNKS, MOST_CTAS = 128, 1024


def _columns(D: int) -> int:
    """The columns of a CTA."""
    return 32 if D % 64 else 64


def _kernel(
    added,  # (B * NH, NC, D)
    gamma,  # (B * NH, NC)
    initial,  # (B * NH, D)
    states,  # out (B * NH, NC, D), may be absent
    last,  # out (B * NH, D)
    *,
    p: Problem,
    backward: bool,
) -> None:
    _, NC, D = added.shape
    head, column = unravel(lax.axis_index("program"), blocks(D, _columns(D)))
    columns, layout = block(column, _columns(D)), by_lanes(_columns(D))
    groups, remaining = divmod(NC, AHEAD)

    def chunks_from(first, count):
        """``count`` chunks from ``first`` on in the recurrence's order, as a slice of memory."""
        return pl.ds(NC - first - count if backward else first, count)

    def terms(first, count):
        """gamma_c and the added terms of these chunks."""
        chunks = chunks_from(first, count)
        # One load for all, because Mosaic GPU computes the indices of each load anew, which takes
        # compile time.
        tile = load(added.at[head, chunks, columns], layout, optimized=False)
        return [gamma[head, chunks.start + j] for j in range(count)], tile

    def join(x, first, terms):
        gammas, tile = terms
        count, before = len(gammas), {}
        for j in reversed(range(count)) if backward else range(count):
            before[j] = x
            x = weighted(gammas[j], x, p) + lax.slice(tile, (j, 0), (j + 1, tile.shape[1]))
        if states is not None:
            x_before = jnp.concatenate([before[j] for j in range(count)])
            states.at[head, chunks_from(first, count), columns][...] = x_before
        return x

    def group(j, carry):
        x, present = carry
        following = terms(lax.min((j + 1) * AHEAD, np.int32((groups - 1) * AHEAD)), AHEAD)
        return join(x, j * AHEAD, present), following

    x = load(initial.at[pl.ds(head, 1), columns], layout, optimized=False)
    if groups:
        x, _ = loop(groups, group, (x, terms(0, AHEAD)))
    if remaining:
        x = join(x, groups * AHEAD, terms(groups * AHEAD, remaining))
    last.at[pl.ds(head, 1), columns][...] = x


def vector_states(
    x: Operands, *, backward: bool = False, call: Launch
) -> tuple[jax.Array, jax.Array]:
    """Runs the stage: ``stages/vector_states.py``."""
    added, gamma, initial = x
    BNH, NC, D = added.shape
    splits = call.tiles.num_splits
    heads = BNH * splits
    added, gamma = added.reshape(heads, NC // splits, D), gamma.reshape(heads, NC // splits)

    def run(initial, *, return_states):
        return mosaic_call(
            functools.partial(_kernel, p=call.problem, backward=backward),
            name="vector_states",
            grid={"program": heads * blocks(D, _columns(D))},
            outputs={
                "states": float32(*added.shape) if return_states else None,
                "last": float32(*initial.shape),
            },
            scratch={},
            infer_layouts=False,
        )(added=added, gamma=gamma, initial=initial)

    if splits > 1:
        sums = run(jnp.zeros((heads, D), jnp.float32), return_states=False)["last"]
        sums = sums.reshape(BNH, splits, D)
        others = sums[:, 1:] if backward else sums[:, :-1]
        initial = split_states(others, x.scaGamma, initial, backward=backward)
    y = run(initial, return_states=True)
    last = y["last"].reshape(BNH, splits, D)[:, 0 if backward else -1]
    return y["states"].reshape(BNH, NC, D), last


@dataclasses.dataclass(frozen=True)
class VectorStatesTiles(HopperTiles):
    num_splits: int

    @classmethod
    def candidates(cls, p: Problem, kernel: KernelSpec) -> Iterable[Self]:
        most = min(p.NC // MIN_SPLIT_CHUNKS, MOST_CTAS * _columns(p.DHQK) // (p.BNH * p.DHQK))
        yield cls(splits_of(p.NC, most))

    def divides(self, p: Problem) -> bool:
        return p.DHQK % 32 == 0 and p.NC % self.num_splits == 0
