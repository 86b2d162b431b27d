"""Tiles of scores: the decays D, the scores P, and in the backward pass P, dP and W.

A tile has the queries t in its rows and the keys s in its columns. Tiles that are called P have
P_ts / den_t in the backward pass and in parallel_fw_P, and those called dP have scale dP_ts. The
functions serve plain jnp, where tiles have leading axes, Triton and Mosaic GPU.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from mlstm_pallas.formulas.tiles import weighted
from mlstm_pallas.problem.dimensions import Problem

_NEG_INF = float("-inf")
_LOG2_E = math.log2(math.e)

Shape = tuple[int, ...]


def tile_steps(
    shape: Shape, distance: Array | int, p: Problem, iota: Callable[..., Any] = lax.broadcasted_iota
) -> tuple[Any, Any]:
    """(t, s), the steps of each element's query and key in processing order, from any first step.

    A query sees the keys with s <= t.

    Args:
      distance: from the first key of the tile to the first query, in memory.
      iota: the lowering's form of ``lax.broadcasted_iota``.
    """
    rows, columns = (iota(jnp.int32, shape, len(shape) - axis) for axis in (2, 1))
    rows = distance + rows
    return (columns, rows) if p.reverse else (rows, columns)


def _per_query(x: Array, shape: Shape) -> Array:
    """x (..., t) for every key of a tile (..., t, s)."""
    return lax.broadcast_in_dim(x, shape, range(x.ndim))


def _per_key(x: Array, shape: Shape) -> Array:
    """x (..., s) for every query of a tile (..., t, s)."""
    return lax.broadcast_in_dim(x, shape, (*range(x.ndim - 1), x.ndim))


def decays(e: Iterable[Any], u: Iterable[Any], mask: Any = None, *, in_kernel: bool = True) -> Any:
    """D_ts = exp(e_s - u_t), and 0 where the mask is False.

    Args:
      e, u: (hi, lo), (..., s) and (..., t).
      mask: None: the caller masks what it computes from D, because D is unbounded where s > t.
      in_kernel: a GPU has powers of 2 alone; exp of other devices has no rounded product before it.
    """
    factor, power = (_LOG2_E, jnp.exp2) if in_kernel else (1.0, jnp.exp)
    (e_hi, e_lo), (u_hi, u_lo) = e, u
    shape = *u_hi.shape, e_hi.shape[-1]
    hi = _per_key(e_hi, shape) - _per_query(u_hi, shape)
    lo = _per_key(e_lo * factor, shape) - _per_query(u_lo * factor, shape)
    exponent = hi * factor + lo
    return power(exponent if mask is None else jnp.where(mask, exponent, _NEG_INF))


def causal_scores(qk: Array, D: Array, mask: Any, p: Problem) -> Array:
    """P_ts = D_ts scale q_t . k_s where the mask is True, else 0; qk: the products q_t . k_s.

    It is masked after the product, not before, so that a NaN in k reaches no earlier step.
    """
    return jnp.where(mask, weighted(D * p.qk_scale, qk, p), 0.0)


def score_gradients(
    qk: Array, dh_v: Array, D: Array, p: Problem, inv_den: Any = None, dz_den: Any = None
) -> tuple[Array, Array, Array]:
    """P_ts / den_t, scale dP_ts and W_ts of the backward pass.

        P_ts  = D_ts scale q_t . k_s
        dP_ts = D_ts (dh_t . v_s + dz_t den_t) / den_t
        W_ts  = scale dP_ts q_t . k_s

    Args:
      qk, dh_v: the products q_t . k_s and dh_t . v_s.
      D: 0 where s > t.
      inv_den, dz_den: 1 / den_t and dz_t den_t, (..., t); without a normaliser None. dz_den is also
        None if it is 0 everywhere.
    """
    scale: Any = p.qk_scale
    if inv_den is not None:
        scale = _per_query(inv_den * scale, qk.shape)
    if dz_den is not None:
        dh_v = dh_v + _per_query(dz_den, qk.shape)
    P, dP = weighted(D, qk * scale, p), weighted(D, dh_v * scale, p)
    return P, dP, weighted(dP, qk, p)
