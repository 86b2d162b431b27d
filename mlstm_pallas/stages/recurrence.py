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

from mlstm_pallas.formulas.tiles import weighted
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.operands.scaled_rows import ScaledRows
from mlstm_pallas.stages.vector_states import Operands, vector_states

_STATIC = dict(static=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recurrence:
    """One recurrence; in a kernel, of references.

    Attributes:
      a, b: (B * NH, S, DHQK), (B * NH, S, DHV) in the kernel dtype, or (B, S, NH, ...).
      gamma: (B * NH, NC) float32.
      matX_initial: (B * NH, DHQK, DHV) float32; None: zeros.
      return_last: whether to return X after the last chunk.
      backward: whether it runs backward in time.
      r: (B * NH, S) float32; None: a is already scaled.
      vecX_initial: (B * NH, DHQK) float32; needs r. None: x is not computed.
      h: shaped as b; None: the inner products are not computed.
      num_active: (B * NH,) int32, the number of leading chunks that may change X. In the others
        gamma is 1 and the products are 0; a kernel skips them and leaves their states and inner
        products undefined. None: all.
    """

    a: Array
    b: Array
    gamma: Array
    matX_initial: Array | None
    return_last: bool = dataclasses.field(metadata=_STATIC)
    backward: bool = dataclasses.field(default=False, metadata=_STATIC)
    r: Array | None = None
    vecX_initial: Array | None = None
    h: Array | None = None
    num_active: Array | None = None

    def scaled(self) -> Self:
        """The recurrence with a already scaled, without r and x."""
        a = ScaledRows(self.a, self.r).product()
        return dataclasses.replace(self, a=a, r=None, vecX_initial=None)


class RecurrenceOutputs(NamedTuple):
    """The states; X is in the kernel dtype, the rest float32.

    With backward, the states are those after each chunk, the last ones before the first chunk.
    """

    matX: Any  # (B * NH, NC, DHQK, DHV) before each chunk
    matX_last: Any  # (B * NH, DHQK, DHV) after the last chunk; None without return_last
    vecX: Any  # (B * NH, NC, DHQK); None without vecX_initial
    vecX_last: Any  # (B * NH, DHQK); None without vecX_initial
    inner: Any = None  # (B * NH, S) b_t . h_t; None without h, and where no kernel computes it


def run(x: Recurrence, call: Launch) -> RecurrenceOutputs:
    """The recurrence in plain jnp."""
    a = call.chunks(x.a)
    if x.r is not None:
        a = a.astype(x.gamma.dtype) * call.chunks(x.r)[..., None]
    products = call.product("nclk,nclv->nckv", a.astype(x.a.dtype), call.chunks(x.b))
    matX_initial = jnp.zeros_like(products[:, 0]) if x.matX_initial is None else x.matX_initial

    def step(carry: Any, chunk: Any) -> tuple[Any, None]:
        matX, states = carry
        index, gamma = chunk
        matX = weighted(gamma[:, None, None], matX, call.problem) + lax.dynamic_index_in_dim(
            states, index, 1, keepdims=False
        )
        return (matX, lax.dynamic_update_index_in_dim(states, matX, index, 1)), None

    chunks = jnp.arange(x.gamma.shape[1]), x.gamma.T
    (matX_last, after), _ = lax.scan(step, (matX_initial, products), chunks, reverse=x.backward)
    states = (
        [after[:, 1:], matX_initial[:, None]]
        if x.backward
        else [matX_initial[:, None], after[:, :-1]]
    )
    matX = jnp.concatenate([y.astype(x.a.dtype) for y in states], axis=1)
    vectors: tuple[Any, Any] = (None, None)
    if x.vecX_initial is not None:
        added = Operands(jnp.sum(a, axis=2), x.gamma, x.vecX_initial)
        vectors = vector_states(added, backward=x.backward, call=call)
    return RecurrenceOutputs(matX, matX_last if x.return_last else None, *vectors)
