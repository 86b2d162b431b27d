"""The states at the ends of packed segments, from those at the chunk boundaries.

A segment ends inside a chunk. That chunk is computed again up to the segment's end, as a sequence
of its own: a window of L steps, whose gates beyond the end carry the states on.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mlstm_pallas.arrays import Inputs, LastStates, StoredStates
from mlstm_pallas.dispatch import run
from mlstm_pallas.planning import CallSpec
from mlstm_pallas.stage import Lowering


def _at(x: Array, index: Array) -> Array:
    """x[b, index[b, j]] for every b; index: (B, n). Indices beyond the last read the last."""
    result: Array = jax.vmap(functools.partial(jnp.take, axis=0, mode="clip"))(x, index)
    return result


def segment_states(
    spec: CallSpec, lowering: Lowering, x: Inputs, stored: StoredStates
) -> LastStates:
    """The states at ``x.segment_ends``, (B * NH, N, ...); zeros for segments that do not occur.

    stored: of the forward pass, with C. Arrays belong to a shard, as in the forward schedule.
    """
    p, (heads, N) = spec.problem, x.segment_ends.shape
    last = jnp.maximum(x.segment_ends, 1) - 1
    chunk = lax.div(last, np.int32(p.L))
    steps = chunk[..., None] * p.L + lax.broadcasted_iota(jnp.int32, (1, 1, p.L), 2)
    rows, within = steps.reshape(heads, N * p.L), steps <= last[..., None]

    def window(vec: Any, beyond: float) -> Array:
        values = jnp.where(within, _at(vec, rows).reshape(within.shape), beyond)
        return values.reshape(heads * N, p.L)

    def window_of_tokens(y: Array) -> Array:
        if y.ndim == 3:
            tokens = _at(y, rows)
        else:
            of_batch = rows.reshape(p.B, p.NH, N * p.L)[:, 0]
            tokens = jnp.swapaxes(_at(y, of_batch), 1, 2)
        # A NaN of the next segment is not multiplied by 0.
        tokens = jnp.where(within[..., None], tokens.reshape(*within.shape, y.shape[-1]), 0)
        return tokens.reshape(heads * N, p.L, y.shape[-1])

    def before(states: Array) -> Array:
        """The states before the chunks, float32."""
        at = _at(states, chunk).astype(x.f.dtype)
        return at.reshape(heads * N, *states.shape[2:])

    windows = dataclasses.replace(p, NH=p.NH * N, S=p.L)
    gates = run(
        "chunk_gates",
        vecI=window(x.i, -jnp.inf),
        vecF=window(x.f, jnp.inf),
        scaM_initial=before(stored.m),
        starts=window(x.starts, 0),
        input_gate=spec.input_gate,
        call=spec.launch("chunk_gates", lowering, windows),
    )
    # In plain jnp: a kernel would also write the states before the chunks.
    states = run(
        "recurrent_fw_C",
        matK=window_of_tokens(x.k),
        matV=window_of_tokens(x.v),
        vecAbar=gates.per_step().vecAbar,
        scaGamma=gates.scaGamma,
        matC_initial=before(stored.C),
        vecN_initial=before(stored.n),
        call=spec.launch("recurrent_fw_C", Lowering.XLA, windows),
    )

    def where_it_occurs(y: Array) -> Array:
        y = y.reshape(heads, N, *y.shape[1:])
        occurs = (x.segment_ends > 0).reshape(heads, N, *(1,) * (y.ndim - 2))
        return jnp.where(occurs, y, 0.0)

    ends = states.matC_last, states.vecN_last, gates.scaM_states[:, -1]
    return LastStates(*map(where_it_occurs, ends))
