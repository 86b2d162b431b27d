"""The system max_triton_fwbw_v3noslice of xlstm_jax: forward in two stages, backward in two, chunks of one tile.

Documented ("xlstm_jax public API document of max_triton_fwbw_v3noslice._triton_fw"): ``_mlstm_chunkwise__recurrent_fw_C``,
``_mlstm_chunkwise__parallel_fw_H``, ``_mlstm_chunkwise_fw``. The rest are their counterparts in the same style.

vecB and vecI here are (B, NH, NC, L): vecB the running sum of log sigmoid(f) within each chunk, finite (a reset, f = -inf, needs a function
that takes f itself), vecI the input gate's pre-activation. q, k, v: float32 or bfloat16. The scale belongs to q and to nothing else. Arrays
given as state buffers set the dtype of what is returned in their place; they are not written to, as no jax array is.
"""

import jax
import jax.numpy as jnp

from mlstm_pallas.fwbw import _get_chunkwise_fwbw_kernel, _mlstm_chunkwise_fwbw_generator
from mlstm_pallas.gates import Pair
from mlstm_pallas.xlstm_jax import _common
from mlstm_pallas.xlstm_jax._common import CHUNKS, dims_of, plan_for

__all__ = [
    "_get_chunkwise_fwbw_kernel",
    "_mlstm_chunkwise__parallel_bw_dQKV",
    "_mlstm_chunkwise__parallel_fw_H",
    "_mlstm_chunkwise__recurrent_bw_dC",
    "_mlstm_chunkwise__recurrent_fw_C",
    "_mlstm_chunkwise_bw",
    "_mlstm_chunkwise_fw",
    "_mlstm_chunkwise_fwbw_generator",
    "mlstm_chunkwise_max_triton",
]


def _sums(vecB: jax.Array, dtype) -> Pair:
    b = vecB.astype(dtype)
    return b, jnp.zeros_like(b)


def _gates(dims, dtype, vecI, vecB, scaMinter_states):
    dims.check(CHUNKS, vecI=vecI, vecB=vecB)
    acc = _common.acc_dtype(dtype)
    m = dims.borders("scaMinter_states", scaMinter_states).astype(acc)
    return _common.gates_from_sums(vecI.astype(acc), _sums(vecB, acc), m)


def _mlstm_chunkwise__recurrent_fw_C(
    matK,
    matV,
    vecB,
    vecI,
    matC_states=None,
    vecN_states=None,
    scaMinter_states=None,
    matC_initial=None,
    vecN_initial=None,
    scaMinter_initial=None,
    qk_scale=None,
    CHUNK_SIZE=64,
    NUM_CHUNKS=1,
):
    """The states at the chunk borders.

    Args:
      matK, matV: (B, NH, S, DHQK), (B, NH, S, DHHV), S = NUM_CHUNKS * CHUNK_SIZE; vecB, vecI: (B, NH, NC, L).
      matC_states, vecN_states, scaMinter_states: shaped as what is returned; only their dtypes count.
      matC_initial, vecN_initial, scaMinter_initial: (B, NH, DHQK, DHHV), (B, NH, DHQK), (B, NH): all or none (zeros).
      qk_scale: no state depends on it.

    Returns:
      C (B, NH, (NC + 1) * DHQK, DHHV) in the dtype of matK, N (B, NH, (NC + 1) * DHQK) and M (B, NH, NC + 1) in float32, where no buffer
      says otherwise. C is rounded to the dtype of matK in any case.
    """
    del qk_scale
    dims = dims_of(matK=matK, matV=matV, chunk_size=CHUNK_SIZE, num_chunks=NUM_CHUNKS)
    dims.check(CHUNKS, vecI=vecI, vecB=vecB)
    names = ("matC_initial", "vecN_initial", "scaMinter_initial")
    C, n, m = _common.initial_states(dims, matK.dtype, names, (matC_initial, vecN_initial, scaMinter_initial))
    plan = plan_for(dims, matK.dtype)
    gates = _common.gates_from_start(vecI.astype(m.dtype), _sums(vecB, m.dtype), m)
    Cs, ns, C_last, n_last = _common.fw_states(plan, matK, matV.astype(matK.dtype), gates, C, n)
    return (
        _common.like_buffer("matC_states", matC_states, _common.join_borders(Cs, C_last)),
        _common.like_buffer("vecN_states", vecN_states, _common.join_borders(ns, n_last)),
        _common.like_buffer("scaMinter_states", scaMinter_states, gates.scaM_states),
    )


def _mlstm_chunkwise__parallel_fw_H(
    matQ,
    matK,
    matV,
    matC_states,
    vecN_states,
    scaMinter_states,
    vecI,
    vecB,
    qk_scale=None,
    CHUNK_SIZE=64,
    NUM_CHUNKS=1,
    EPS=1e-6,
):
    """The outputs of all chunks from the states before them.

    Args:
      matQ, matK, matV: (B, NH, S, DHQK) twice, (B, NH, S, DHHV); vecI, vecB: (B, NH, NC, L).
      matC_states, vecN_states, scaMinter_states: the states before each chunk, (B, NH, NC * DHQK, DHHV), (B, NH, NC * DHQK), (B, NH, NC).
        NC + 1 blocks will do as well; the last one is not read.

    Returns:
      H (B, NH, S, DHHV) in the dtype of matQ and, float32, what the document calls the N vector (B, NH, S): max(|q . n|, exp(-m)), the
      denominator without EPS.
    """
    dims = dims_of(matQ=matQ, matV=matV, chunk_size=CHUNK_SIZE, num_chunks=NUM_CHUNKS)
    dims.check(matK=matK)
    gates = _gates(dims, matQ.dtype, vecI, vecB, scaMinter_states)
    C, n = dims.before("matC_states", matC_states, "DHQK", "DHHV"), dims.before("vecN_states", vecN_states, "DHQK")
    k, v = matK.astype(matQ.dtype), matV.astype(matQ.dtype)
    return _common.fw_outputs(plan_for(dims, matQ.dtype, qk_scale, eps=EPS), matQ.dtype, matQ, k, v, gates, C, n)


def _mlstm_chunkwise_fw(
    matQ,
    matK,
    matV,
    vecI,
    vecF,
    matC_initial=None,
    vecN_initial=None,
    scaM_initial=None,
    qk_scale=None,
    return_last_states=False,
    return_all_states=False,
    CHUNK_SIZE=64,
    EPS=1e-6,
):
    """The forward pass. vecI, vecF: pre-activations (B, NH, S); the rest as in the stages.

    Returns:
      H (B, NH, S, DHV), the denominator without EPS (B, NH, S), the last m (B, NH); then, each if asked for, the last states (C, N, M),
      (B, NH, DHQK, DHV), (B, NH, DHQK), (B, NH), float32, and the states at all chunk borders as from ``_mlstm_chunkwise__recurrent_fw_C``.
    """
    initial = matC_initial, vecN_initial, scaM_initial
    made = _common.forward(matQ, matK, matV, vecI, vecF, initial, qk_scale, CHUNK_SIZE, eps=EPS)
    optional = ((return_last_states, made.last_states), (return_all_states, made.all_states))
    return made.matH, made.vecN_out, made.last_states[2], *(states for asked, states in optional if asked)


def _mlstm_chunkwise__recurrent_bw_dC(
    matQ,
    vecI,
    vecB,
    scaMinter_states,
    vecN_out,
    matDeltaH,
    matDeltaC_last=None,
    qk_scale=None,
    CHUNK_SIZE=64,
    NUM_CHUNKS=1,
    EPS=1e-6,
):
    """Gradients of C at the chunk borders 0 to NC, (B, NH, (NC + 1) * DHQK, DHHV) in the dtype of matQ; the denominator is a constant.

    vecN_out: (B, NH, S) as from ``_mlstm_chunkwise__parallel_fw_H``; matDeltaH (B, NH, S, DHHV); scaMinter_states (B, NH, NC or NC + 1).
    """
    dims = dims_of(matQ=matQ, matDeltaH=matDeltaH, chunk_size=CHUNK_SIZE, num_chunks=NUM_CHUNKS)
    dims.check(vecN_out=vecN_out, matDeltaC_last=matDeltaC_last)
    gates = _gates(dims, matQ.dtype, vecI, vecB, scaMinter_states)
    rows = _common.constant_rows(vecN_out, EPS, matQ.dtype)
    dC, first = _common.bw_states(plan_for(dims, matQ.dtype, qk_scale), matQ, matDeltaH, gates, rows, matDeltaC_last)
    return _common.join_first(first, dC)


def _mlstm_chunkwise__parallel_bw_dQKV(
    matQ,
    matK,
    matV,
    vecI,
    vecB,
    scaMinter_states,
    matC_states,
    vecN_out,
    matDeltaH,
    matDeltaC_states,
    qk_scale=None,
    CHUNK_SIZE=64,
    NUM_CHUNKS=1,
    EPS=1e-6,
):
    """Gradients of q, k, v in the dtype of matQ; the denominator is a constant.

    matC_states: C before each chunk, NC or NC + 1 blocks of DHQK rows; matDeltaC_states: gradients of C at the borders 0 to NC, or from
    border 1 on in NC blocks. The other shapes are those of the other stages.
    """
    dims = dims_of(matQ=matQ, matV=matV, chunk_size=CHUNK_SIZE, num_chunks=NUM_CHUNKS)
    dims.check(matK=matK, vecN_out=vecN_out, matDeltaH=matDeltaH)
    gates = _gates(dims, matQ.dtype, vecI, vecB, scaMinter_states)
    rows = _common.constant_rows(vecN_out, EPS, matQ.dtype)
    C = dims.before("matC_states", matC_states, "DHQK", "DHHV")
    dC = dims.after("matDeltaC_states", matDeltaC_states, "DHQK", "DHHV")
    k, v = matK.astype(matQ.dtype), matV.astype(matQ.dtype)
    return _common.bw_inputs(plan_for(dims, matQ.dtype, qk_scale), "QKV", matQ, k, v, matDeltaH, gates, rows, C, dC)


def _mlstm_chunkwise_bw(
    matQ,
    matK,
    matV,
    vecI,
    vecF,
    matC_initial=None,
    vecN_initial=None,
    scaM_initial=None,
    qk_scale=None,
    matC_states=None,
    vecN_out=None,
    matDeltaH=None,
    matDeltaC_last=None,
    CHUNK_SIZE=64,
    EPS=1e-6,
):
    """dQ, dK, dV, dI, dF and, with initial states, dC, dN, dM of them: exact but for the denominator, which is a constant.

    vecN_out is that of ``_mlstm_chunkwise_fw``; matC_states, where not given, are made anew. dN is then zero and dM is <dC_0, C_0>.
    """
    initial = matC_initial, vecN_initial, scaM_initial
    args = matQ, matK, matV, vecI, vecF, initial, qk_scale, matC_states, vecN_out, matDeltaH, matDeltaC_last
    return _common.backward(*args, CHUNK_SIZE, EPS)


def mlstm_chunkwise_max_triton(
    q,
    k,
    v,
    i,
    f,
    c_initial=None,
    n_initial=None,
    m_initial=None,
    return_last_states=False,
    eps=1e-6,
    chunk_size=64,
    autocast_kernel_dtype=jnp.float32,
    stabilize_correctly=True,
    norm_val=1.0,
):
    """h, or (h, (c, n, m)) with return_last_states; exact gradients. Arguments as of ``triton_stablef.mlstm_chunkwise_triton_stablef``."""
    options = dict(eps=eps, chunk_size=chunk_size, stabilize_correctly=stabilize_correctly, norm_val=norm_val)
    return _common.entry(q, k, v, i, f, (c_initial, n_initial, m_initial), return_last_states, autocast_kernel_dtype, **options)
