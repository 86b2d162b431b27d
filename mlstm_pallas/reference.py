"""The mLSTM in plain jnp: the recurrence, step by step, and its chunkwise form.

Both are differentiable as often as wanted, in reverse and forward mode, and run in float64 where jax_enable_x64 is set.
``recurrence`` is the oracle of the tests. ``chunkwise`` is the backend "xla": what runs where there is no GPU.

Notation (after the TFLA paper, Beck et al. 2025, arXiv:2503.14376): B batch, NH heads, S sequence length, DHQK head dimension of q and k,
DHHV of v and h, NC chunks of L steps.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas.gate_gradients import RowGradients, RowSums, suffix_sums
from mlstm_pallas.gates import ChunkGates, chunk_gates, log_input_gate, log_sigmoid_gate
from mlstm_pallas.problem import MAX_TILE, InputGate

_INF = float("inf")
States = tuple[jax.Array, jax.Array, jax.Array]


def normalise(num: jax.Array, z: jax.Array, m: jax.Array, *, eps: float, stabilize_correctly: bool, norm_val: float):
    """h = num / (max(|z|, norm_val exp(-m)) + eps), or with norm_val alone as the floor; 0/0 is 0.

    num: (..., DHHV); z, m: (...). Both sides are scaled by exp(min(m, 0)), so that neither the floor nor its derivative overflows.
    """
    if stabilize_correctly and norm_val > 0:
        m = jnp.maximum(m, -1e30)
        factor = jnp.exp(jnp.minimum(m, 0.0))
        floor = norm_val * jnp.exp(jnp.minimum(-m, 0.0))
    else:
        factor, floor = jnp.ones_like(m), jnp.full_like(m, norm_val)
    den = jnp.maximum(jnp.abs(z) * factor, floor) + eps * factor
    stored = den > 0
    return num * jnp.where(stored, factor / jnp.where(stored, den, 1.0), 0.0)[..., None]


def recurrence(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    i: jax.Array,
    f: jax.Array,
    c_initial: jax.Array | None = None,
    n_initial: jax.Array | None = None,
    m_initial: jax.Array | None = None,
    *,
    segment_ids: jax.Array | None = None,
    eps: float = 1e-6,
    stabilize_correctly: bool = True,
    norm_val: float = 1.0,
    input_gate: str = "exp",
    normalize: bool = True,
) -> tuple[jax.Array, States]:
    """The mLSTM as it is defined, one step at a time (xLSTM, Beck et al. 2024, arXiv:2405.04517, equations 19 to 27).

    Computes in the common dtype of the inputs, at least float32.

    Args:
      q, k: (B, NH, S, DHQK); v: (B, NH, S, DHHV); i, f: gate pre-activations (B, NH, S).
      c_initial, n_initial, m_initial: (B, NH, DHQK, DHHV), (B, NH, DHQK), (B, NH); zeros when None.
      segment_ids: (B, S); eps, stabilize_correctly, norm_val, input_gate, normalize: as for ``mlstm_pallas.mlstm_chunkwise``.

    Returns:
      h (B, NH, S, DHHV) and the last states (c, n, m), shaped as the initial ones.
    """
    dtype = jnp.promote_types(jnp.result_type(q, k, v, i, f), jnp.float32)
    B, NH, _, DHQK = q.shape
    C = jnp.zeros((B, NH, DHQK, v.shape[-1]), dtype) if c_initial is None else c_initial.astype(dtype)
    n = jnp.zeros((B, NH, DHQK), dtype) if n_initial is None else n_initial.astype(dtype)
    m = jnp.zeros((B, NH), dtype) if m_initial is None else m_initial.astype(dtype)
    scale = DHQK**-0.5
    fbar, reset = log_sigmoid_gate(f.astype(dtype))
    gate = InputGate(input_gate)
    i = log_input_gate(i.astype(dtype), gate)
    starts = jnp.zeros(f.shape, bool) if segment_ids is None else jnp.broadcast_to(segment_starts(segment_ids)[:, None], f.shape)

    def step(states, x):
        q, k, v, i, fbar, reset, start = x
        C, n, m = (jnp.where(start.reshape(start.shape + (1,) * (y.ndim - 2)), 0.0, y) for y in states)
        carried = jnp.where(reset, -_INF, fbar + m)
        m_new = jnp.maximum(carried, i) if gate is InputGate.EXP else m
        m_safe = jnp.where(m_new == -_INF, 0.0, m_new)
        decay, gain = jnp.exp(carried - m_safe), jnp.exp(i - m_safe)
        C = decay[..., None, None] * C + gain[..., None, None] * k[..., :, None] * v[..., None, :]
        n = decay[..., None] * n + gain[..., None] * k
        num = scale * jnp.einsum("bhk,bhkv->bhv", q, C, precision="highest")
        z = scale * jnp.einsum("bhk,bhk->bh", q, n, precision="highest")
        h = normalise(num, z, m_new, eps=eps, stabilize_correctly=stabilize_correctly, norm_val=norm_val) if normalize else num
        return (C, n, m_new), h

    xs = [jnp.moveaxis(x.astype(dtype), 2, 0) for x in (q, k, v, i, fbar)] + [jnp.moveaxis(x, 2, 0) for x in (reset, starts)]
    states, h = lax.scan(step, (C, n, m), tuple(xs))
    return jnp.moveaxis(h, 0, 2), states


def segment_starts(segment_ids: jax.Array) -> jax.Array:
    """Where the id differs from that of the step before: (..., S) bool, as the ids; the first step has none before it."""
    return jnp.pad(segment_ids[..., 1:] != segment_ids[..., :-1], [(0, 0)] * (segment_ids.ndim - 1) + [(1, 0)])


def decay_matrix(gates: ChunkGates) -> jax.Array:
    """D_ts = exp(e_s - u_t) for s <= t, else 0: (B, NH, NC, L, L)."""
    (e_hi, e_lo), (u_hi, u_lo) = gates.vecE, gates.vecU
    L = e_hi.shape[-1]
    exponent = (e_hi[..., None, :] - u_hi[..., :, None]) + (e_lo[..., None, :] - u_lo[..., :, None])
    return jnp.exp(jnp.where(jnp.tri(L, dtype=bool), exponent, -_INF))


def chunk_states(matK, matV, gates: ChunkGates, matC_initial, vecN_initial) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """C and n at the chunk borders: the recurrence over chunks.

    matK: (B, NH, NC, L, DHQK); matV: (B, NH, NC, L, DHHV); initial states in the accumulator's dtype.

    Returns:
      matC_states (B, NH, NC, DHQK, DHHV) in the dtype of matK, vecN_states (B, NH, NC, DHQK), and the last C and n.
    """
    acc = gates.vecAbar.dtype
    Kbar = matK * gates.vecAbar[..., None]
    updates = jnp.einsum("bhclk,bhclv->cbhkv", Kbar.astype(matK.dtype), matV, preferred_element_type=acc, precision="highest")
    n_updates = jnp.moveaxis(jnp.sum(Kbar, axis=3), 2, 0)

    def step(states, x):
        C, n = states
        update, n_update, gamma = x
        new = (gamma[..., None, None] * C + update, gamma[..., None] * n + n_update)
        return new, (C.astype(matK.dtype), n)

    gammas = jnp.moveaxis(gates.scaGamma, 2, 0)
    (C, n), (Cs, ns) = lax.scan(step, (matC_initial, vecN_initial), (updates, n_updates, gammas))
    return jnp.moveaxis(Cs, 0, 2), jnp.moveaxis(ns, 0, 2), C, n


def chunk_outputs(matQ, matK, matV, gates: ChunkGates, matC_states, vecN_states, qk_scale: float) -> tuple[jax.Array, jax.Array]:
    """num (B, NH, NC, L, DHHV) and z (B, NH, NC, L) of every row from the state before its chunk."""
    acc = gates.vecW.dtype
    einsum = functools.partial(jnp.einsum, preferred_element_type=acc, precision="highest")
    P = einsum("bhctk,bhcsk->bhcts", matQ, matK) * (decay_matrix(gates) * qk_scale)
    P = jnp.where(jnp.tri(P.shape[-1], dtype=bool), P, 0.0)  # 0 times a NaN in k is none
    w = gates.vecW * qk_scale
    num = einsum("bhctk,bhckv->bhctv", matQ, matC_states) * w[..., None]
    num += einsum("bhcts,bhcsv->bhctv", P.astype(matQ.dtype), matV)
    z = jnp.sum(matQ * vecN_states[..., None, :], axis=-1) * w + jnp.sum(P, axis=-1)
    return num, z


def chunkwise(
    matQ: jax.Array,
    matK: jax.Array,
    matV: jax.Array,
    vecI: jax.Array,
    vecF: jax.Array,
    matC_initial: jax.Array,
    vecN_initial: jax.Array,
    scaM_initial: jax.Array,
    *,
    chunk_size: int,
    segment_ids: jax.Array | None = None,
    eps: float = 1e-6,
    stabilize_correctly: bool = True,
    norm_val: float = 1.0,
    input_gate: str = "exp",
    normalize: bool = True,
) -> tuple[jax.Array, States]:
    """The chunkwise form (TFLA paper, section 3): equal to ``recurrence`` up to rounding.

    q, k, v enter the products in their own dtype; sums, gates and states are float32 (float64 for float64 gates).

    Args:
      matQ, matK: (B, NH, S, DHQK); matV: (B, NH, S, DHHV); vecI, vecF: (B, NH, S). S must be a multiple of chunk_size.
      matC_initial, vecN_initial, scaM_initial: (B, NH, DHQK, DHHV), (B, NH, DHQK), (B, NH), in the dtype of the gates.
      segment_ids: (B, S); the rest as for ``mlstm_pallas.mlstm_chunkwise``.

    Returns:
      h (B, NH, S, DHHV) in the accumulator's dtype, and the last states (c, n, m).
    """

    def chunks(x):
        return x.reshape(*x.shape[:2], x.shape[2] // chunk_size, chunk_size, *x.shape[3:])

    q, k, v = chunks(matQ), chunks(matK), chunks(matV)
    starts = None if segment_ids is None else chunks(jnp.broadcast_to(segment_starts(segment_ids)[:, None], vecI.shape))
    gates = chunk_gates(chunks(vecI), chunks(vecF), scaM_initial, starts, InputGate(input_gate))
    matC_states, vecN_states, C, n = chunk_states(k, v, gates, matC_initial, vecN_initial)
    num, z = chunk_outputs(q, k, v, gates, matC_states, vecN_states, matQ.shape[-1] ** -0.5)
    h = normalise(num, z, gates.vecM, eps=eps, stabilize_correctly=stabilize_correctly, norm_val=norm_val) if normalize else num
    return h.reshape(matV.shape), (C, n, gates.scaM_states[..., -1])


def chunk_state_gradients(
    matQ, matDeltaH, gates: ChunkGates, rows: RowGradients, matDeltaC_last, vecDeltaN_last, matC_states, vecN_states, qk_scale: float
):
    """Gradients of C and n at the chunk borders: the recurrence over chunks, backwards.

    matQ: (B, NH, NC, L, DHQK); matDeltaH: (B, NH, NC, L, DHHV); rows: (B, NH, NC, L); the rest as in stages/recurrent_bw_dC.py.

    Returns:
      matDeltaC_states (B, NH, NC, DHQK, DHHV) in the dtype of matQ and vecDeltaN_states (B, NH, NC, DHQK), after each chunk; the
      gradients of the initial C and n; gamma_c (<C_c, dC_{c+1}> + n_c . dn_{c+1}) (B, NH, NC), None without the states.
    """
    acc = gates.vecW.dtype
    weight = gates.vecW * qk_scale if rows.vecInvDen is None else gates.vecW * rows.vecInvDen * qk_scale
    scaled = matQ * weight[..., None]
    einsum = functools.partial(jnp.einsum, preferred_element_type=acc, precision="highest")
    updates = einsum("bhclk,bhclv->cbhkv", scaled.astype(matQ.dtype), matDeltaH)
    dz_den = jnp.zeros_like(weight) if rows.vecDzDen is None else rows.vecDzDen
    n_updates = jnp.moveaxis(jnp.sum(scaled * dz_den[..., None], axis=3), 2, 0)

    def step(gradients, x):
        dC, dn = gradients
        update, n_update, gamma, C, n = x
        through = None if C is None else gamma * (jnp.sum(C * dC, axis=(-2, -1)) + jnp.sum(n * dn, axis=-1))
        new = (gamma[..., None, None] * dC + update, gamma[..., None] * dn + n_update)
        return new, (dC.astype(matQ.dtype), dn, through)

    states = (None if x is None else jnp.moveaxis(x, 2, 0) for x in (matC_states, vecN_states))
    xs = (updates, n_updates, jnp.moveaxis(gates.scaGamma, 2, 0), *states)
    (dC, dn), (dCs, dns, through) = lax.scan(step, (matDeltaC_last, vecDeltaN_last), xs, reverse=True)
    return jnp.moveaxis(dCs, 0, 2), jnp.moveaxis(dns, 0, 2), dC, dn, None if through is None else jnp.moveaxis(through, 0, 2)


def chunk_gradients(
    matQ,
    matK,
    matV,
    matDeltaH,
    gates: ChunkGates,
    rows: RowGradients,
    matC_states,
    vecN_states,
    matDeltaC_states,
    vecDeltaN_states,
    qk_scale: float,
):
    """dq, dk, dv in the accumulator's dtype and the row sums of whole chunks, which are shaped as in chunk_outputs."""
    acc, dtype = gates.vecW.dtype, matQ.dtype
    einsum = functools.partial(jnp.einsum, preferred_element_type=acc, precision="highest")
    none = jnp.zeros_like(gates.vecW)
    inv_den = none + 1.0 if rows.vecInvDen is None else rows.vecInvDen
    dz = none if rows.vecDz is None else rows.vecDz
    inv_den, dz, abar = inv_den[..., None], dz[..., None], gates.vecAbar[..., None]
    w = gates.vecW[..., None] * qk_scale
    D = decay_matrix(gates)
    scores = einsum("bhctk,bhcsk->bhcts", matQ, matK) * qk_scale
    P = (D * scores * inv_den).astype(dtype)
    dP = D * (einsum("bhctv,bhcsv->bhcts", matDeltaH, matV) * inv_den + dz)
    W = dP * scores
    dP = dP.astype(dtype)

    q_inter = einsum("bhctv,bhckv->bhctk", matDeltaH, matC_states) * (w * inv_den)
    q_inter += (w * dz) * vecN_states[..., None, :]
    q_intra = einsum("bhcts,bhcsk->bhctk", dP, matK) * qk_scale
    k_inter = (einsum("bhcsv,bhckv->bhcsk", matV, matDeltaC_states) + vecDeltaN_states[..., None, :]) * abar
    k_intra = einsum("bhcts,bhctk->bhcsk", dP, matQ) * qk_scale
    dv = einsum("bhcsk,bhckv->bhcsv", matK, matDeltaC_states) * abar + einsum("bhcts,bhctv->bhcsv", P, matDeltaH)

    L = W.shape[-1]
    if L <= MAX_TILE:
        strict = jnp.where(jnp.tri(L, k=-1, dtype=bool), W, 0.0)  # the diagonal cancels, and may be all there is
        pairs = suffix_sums(jnp.sum(strict, axis=-1) - jnp.sum(strict, axis=-2))
    else:
        earlier = jnp.pad(jnp.cumsum(W[..., :-1], axis=-1), [(0, 0)] * (W.ndim - 1) + [(1, 0)])  # [t, r]: sum over s < r
        pairs = jnp.sum(jnp.where(jnp.tri(L, dtype=bool), earlier, 0.0), axis=-2)
    sums = RowSums(jnp.sum(matQ * q_inter, axis=-1), jnp.sum(matK * k_inter, axis=-1), jnp.sum(W, axis=-2), pairs)
    return (q_inter + q_intra, k_inter + k_intra, dv), sums
