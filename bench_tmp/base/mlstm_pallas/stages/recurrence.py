"""The recurrence over chunks that recurrent_fw_C and recurrent_bw_dC share.

    X_{next} = gamma_c X + sum_t r_t a_t b_t^T
    x_{next} = gamma_c x + sum_t r_t a_t

It runs forward or backward in time. (X, a, b, r) is (C, k, v, abar) or, without x, (dC, q, dh, r).
With scaled operands there is no r: (X, a, b) is (C, kbar, v) or (dC, qbar, dh).
"""

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from mlstm_pallas.gates import vector_states
from mlstm_pallas.stage import Launch, ScaledRows

_STATIC = dict(static=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recurrence:
    """One recurrence; in a kernel, of references.

    Attributes:
      a, b: (B * NH, S, DHQK), (B * NH, S, DHHV) in the kernel dtype, or (B, S, NH, ...).
      gamma: (B * NH, NC) float32.
      X_initial: (B * NH, DHQK, DHHV) float32; None: zeros.
      return_last: whether to return X after the last chunk.
      backward: whether it runs backward in time.
      r: (B * NH, S) float32; None: a is already scaled.
      x_initial: (B * NH, DHQK) float32; needs r. None: x is not computed.
      h: shaped as b; None: the inner products are not computed.
      num_live: (B * NH,) int32, the number of leading chunks that may change X. In the others gamma
        is 1 and the products are 0; a kernel skips them and leaves their states and inner products
        undefined. None: all.
    """

    a: Array
    b: Array
    gamma: Array
    X_initial: Array | None
    return_last: bool = dataclasses.field(metadata=_STATIC)
    backward: bool = dataclasses.field(default=False, metadata=_STATIC)
    r: Array | None = None
    x_initial: Array | None = None
    h: Array | None = None
    num_live: Array | None = None

    def scaled(self) -> Self:
        """The recurrence with a already scaled, without r and x."""
        a = ScaledRows(self.a, self.r).product()
        return dataclasses.replace(self, a=a, r=None, x_initial=None)


class RecurrenceOutputs(NamedTuple):
    """The states; X is in the kernel dtype, the rest float32.

    With backward, X and x are states after each chunk, X_last and x_last before the first one.
    """

    X: Any  # (B * NH, NC, DHQK, DHHV) before each chunk
    X_last: Any  # (B * NH, DHQK, DHHV) after the last chunk; None without return_last
    x: Any  # (B * NH, NC, DHQK); None without x_initial
    x_last: Any  # (B * NH, DHQK); None without x_initial
    inner: Any = None  # (B * NH, S) b_t . h_t; None without h, and where no kernel computes it


def recurrences(name: str, *each: Recurrence, call: Launch) -> list[RecurrenceOutputs]:
    """The recurrences of the stage ``name``, which are independent of each other."""
    return [_recurrence(x, call) for x in each]


def _recurrence(x: Recurrence, call: Launch) -> RecurrenceOutputs:
    a = call.chunks(x.a)
    if x.r is not None:
        a = a.astype(x.gamma.dtype) * call.chunks(x.r)[..., None]
    products = call.product("nclk,nclv->nckv", a.astype(x.a.dtype), call.chunks(x.b))
    X_initial = jnp.zeros_like(products[:, 0]) if x.X_initial is None else x.X_initial

    def step(carry: Any, chunk: Any) -> tuple[Any, None]:
        X, states = carry
        index, gamma = chunk
        X = gamma[:, None, None] * X + lax.dynamic_index_in_dim(states, index, 1, keepdims=False)
        return (X, lax.dynamic_update_index_in_dim(states, X, index, 1)), None

    chunks = jnp.arange(x.gamma.shape[1]), x.gamma.T
    (X_last, after), _ = lax.scan(step, (X_initial, products), chunks, reverse=x.backward)
    states = (
        [after[:, 1:], X_initial[:, None]] if x.backward else [X_initial[:, None], after[:, :-1]]
    )
    X = jnp.concatenate([y.astype(x.a.dtype) for y in states], axis=1)
    vectors: tuple[Any, Any] = (None, None)
    if x.x_initial is not None:
        vectors = vector_states(jnp.sum(a, axis=2), x.gamma, x.x_initial, backward=x.backward)
    return RecurrenceOutputs(X, X_last if x.return_last else None, *vectors)
