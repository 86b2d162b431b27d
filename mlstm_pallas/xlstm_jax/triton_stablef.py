"""The system triton_stablef of xlstm_jax: the one whose backward stages, generator and entry are documented.

Documented ("xlstm_jax public API documents of triton_stablef._triton_bw and .triton_fwbw"): ``_mlstm_chunkwise__recurrent_bw_dC``,
``_mlstm_chunkwise__parallel_bw_dQKV``, ``_mlstm_chunkwise_bw``, ``_mlstm_chunkwise_fwbw_generator``, ``_get_chunkwise_fwbw_kernel``,
``mlstm_chunkwise_triton_stablef``. The forward stages are their counterparts in the same style.

* m is in natural log here, as in the other systems; the original works in base 2 and hands its m out so.
* vecF of a stage is log sigmoid(f), not summed, (B, NH, NT, BT), and finite: a reset, f = -inf, needs a function that takes f itself.
* vecN_out is the denominator of h as a whole, eps included: no backward function of this system has an eps. In one place the document
  calls it (B, H, NT * DHQK); it is (B, H, T).
"""

import jax.numpy as jnp

from mlstm_pallas.fwbw import _get_chunkwise_fwbw_kernel, _mlstm_chunkwise_fwbw_generator
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
    "mlstm_chunkwise_triton_stablef",
]


def _gates(dims, dtype, vecI, vecF, scaM_inter):
    dims.check(CHUNKS, vecI=vecI, vecF=vecF)
    acc = _common.acc_dtype(dtype)
    m = dims.borders("scaM_inter", scaM_inter).astype(acc)
    return _common.gates_from_sums(vecI.astype(acc), _common.running_sum(vecF.astype(acc)), m)


def _mlstm_chunkwise__recurrent_fw_C(
    matK,
    matV,
    vecF,
    vecI,
    matC_initial=None,
    vecN_initial=None,
    scaMinter_initial=None,
    qk_scale=None,
    chunk_size=64,
    num_chunks=1,
):
    """The states at the chunk borders: C (B, H, (NT + 1) * DHQK, DHHV) in the dtype of matK, N (B, H, (NT + 1) * DHQK), M (B, H, NT + 1).

    No state depends on qk_scale.
    """
    del qk_scale
    dims = dims_of(matK=matK, matV=matV, chunk_size=chunk_size, num_chunks=num_chunks)
    dims.check(CHUNKS, vecI=vecI, vecF=vecF)
    names = ("matC_initial", "vecN_initial", "scaMinter_initial")
    C, n, m = _common.initial_states(dims, matK.dtype, names, (matC_initial, vecN_initial, scaMinter_initial))
    gates = _common.gates_from_start(vecI.astype(m.dtype), _common.running_sum(vecF.astype(m.dtype)), m)
    Cs, ns, C_last, n_last = _common.fw_states(plan_for(dims, matK.dtype), matK, matV.astype(matK.dtype), gates, C, n)
    return _common.join_borders(Cs, C_last), _common.join_borders(ns, n_last), gates.scaM_states


def _mlstm_chunkwise__parallel_fw_H(
    matQ,
    matK,
    matV,
    vecI,
    vecF,
    matC_states,
    vecN_states,
    scaM_inter,
    qk_scale=None,
    chunk_size=64,
    num_chunks=1,
    eps=1e-6,
    stabilize_correctly=True,
    norm_val=1.0,
):
    """The outputs from the states before each chunk (NT or NT + 1 blocks of DHQK rows; scaM_inter (B, H, NT or NT + 1)).

    Returns:
      H (B, H, T, V) in the dtype of matQ, vecN_out (B, H, T), the denominator, eps included, and vecM_out (B, H, T), m of every step.
    """
    dims = dims_of(matQ=matQ, matV=matV, chunk_size=chunk_size, num_chunks=num_chunks)
    dims.check(matK=matK)
    gates = _gates(dims, matQ.dtype, vecI, vecF, scaM_inter)
    C, n = dims.before("matC_states", matC_states, "DHQK", "DHHV"), dims.before("vecN_states", vecN_states, "DHQK")
    plan = plan_for(dims, matQ.dtype, qk_scale, eps=eps, stabilize_correctly=stabilize_correctly, norm_val=norm_val)
    k, v = matK.astype(matQ.dtype), matV.astype(matQ.dtype)
    H, vecN = _common.fw_outputs(plan, matQ.dtype, matQ, k, v, gates, C, n)
    return H, vecN + eps, gates.vecM.reshape(vecN.shape)


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
    chunk_size=64,
    eps=1e-6,
    stabilize_correctly=True,
    norm_val=1.0,
):
    """The forward pass. vecI, vecF: pre-activations (B, H, T).

    Returns:
      H, vecN_out, vecM_out as ``_mlstm_chunkwise__parallel_fw_H``; then, each if asked for, the last states (C, N, M), float32, and the
      states at all chunk borders as from ``_mlstm_chunkwise__recurrent_fw_C``.
    """
    initial = matC_initial, vecN_initial, scaM_initial
    normaliser = dict(eps=eps, stabilize_correctly=stabilize_correctly, norm_val=norm_val)
    made = _common.forward(matQ, matK, matV, vecI, vecF, initial, qk_scale, chunk_size, **normaliser)
    optional = ((return_last_states, made.last_states), (return_all_states, made.all_states))
    return made.matH, made.vecN_out + eps, made.vecM_out, *(states for asked, states in optional if asked)


def _mlstm_chunkwise__recurrent_bw_dC(
    matQ,
    vecF,
    scaM_inter,
    vecM,
    vecN_out,
    matDeltaH,
    matDeltaC_last=None,
    qk_scale=None,
    chunk_size=64,
    num_chunks=1,
    store_initial_state=False,
):
    """Gradients of C at the chunk borders; the denominator is a constant.

    Args:
      matQ, matDeltaH: (B, H, T, K), (B, H, T, V); vecF: log sigmoid(f) (B, H, NT, BT).
      scaM_inter: m at the chunk borders (B, H, NT + 1); vecM: m of every step (B, H, T); vecN_out: the denominator (B, H, T).
      matDeltaC_last: gradient of the last C (B, H, DHQK, DHHV).
      store_initial_state: of no effect, the gradient of the first C is returned always.

    Returns:
      The gradients of C after each chunk (B, H, NT * DHQK, DHHV), in the dtype of matQ, and of the first C (B, H, DHQK, DHHV), float32.
    """
    del store_initial_state
    dims = dims_of(matQ=matQ, matDeltaH=matDeltaH, chunk_size=chunk_size, num_chunks=num_chunks)
    dims.check(vecM=vecM, vecN_out=vecN_out, matDeltaC_last=matDeltaC_last)
    dims.check(CHUNKS, vecF=vecF)
    acc = _common.acc_dtype(matQ.dtype)
    m_borders = dims.borders("scaM_inter", scaM_inter).astype(acc)
    gates = _common.gates_from_stabilisers(_common.running_sum(vecF.astype(acc)), vecM.astype(acc).reshape(vecF.shape), m_borders)
    rows = _common.constant_rows(vecN_out, 0.0, matQ.dtype)
    dC, first = _common.bw_states(plan_for(dims, matQ.dtype, qk_scale), matQ, matDeltaH, gates, rows, matDeltaC_last)
    return dC.reshape(dims.B, dims.NH, -1, dims.DHHV), first


def _mlstm_chunkwise__parallel_bw_dQKV(
    matQ,
    matK,
    matV,
    vecI,
    vecF,
    vecM_combine,
    scaM_inter,
    matC_states,
    matDeltaH,
    vecN_out,
    matDeltaC_states,
    qk_scale=None,
    chunk_size=64,
    num_chunks=1,
):
    """Gradients of q, k and v in the dtype of matQ; the denominator is a constant.

    Args:
      matQ, matK, matV, matDeltaH: (B, H, T, K) twice, (B, H, T, V) twice.
      vecI, vecF: (B, H, NT, BT), the input gate and log sigmoid(f), which the document calls summed: it is not.
      vecM_combine: (B, H, T) m of every step; not read, it follows from the gates and scaM_inter, with more digits.
      scaM_inter: (B, H, NT + 1); vecN_out: the denominator (B, H, T).
      matC_states: C before each chunk, NT or NT + 1 blocks of DHQK rows.
      matDeltaC_states: gradients of C at the borders 0 to NT, or from border 1 on in NT blocks, as ``_mlstm_chunkwise__recurrent_bw_dC``
        makes them.
    """
    dims = dims_of(matQ=matQ, matV=matV, chunk_size=chunk_size, num_chunks=num_chunks)
    dims.check(matK=matK, matDeltaH=matDeltaH, vecM_combine=vecM_combine, vecN_out=vecN_out)
    gates = _gates(dims, matQ.dtype, vecI, vecF, scaM_inter)
    rows = _common.constant_rows(vecN_out, 0.0, matQ.dtype)
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
    scaM_states=None,
    vecN_out=None,
    vecM_out=None,
    matDeltaH=None,
    matDeltaC_last=None,
    chunk_size=64,
):
    """The backward pass: exact but for the denominator, which is a constant.

    Args:
      matQ, matK, matV: (B, H, T, K) twice, (B, H, T, V); vecI, vecF: pre-activations (B, H, T).
      matC_initial, vecN_initial, scaM_initial: (B, H, DHQK, DHV), (B, H, DHQK), (B, H): all or none.
      matC_states: C before each chunk, NT or NT + 1 blocks of DHQK rows; made anew where None.
      scaM_states, vecM_out: (B, H, NT or NT + 1), (B, H, T); not read, they follow from the gates and scaM_initial.
      vecN_out, matDeltaH: (B, H, T), (B, H, T, V); both are needed, for all that their defaults say.
      matDeltaC_last: gradient of the last C (B, H, DHQK, DHV).

    Returns:
      dQ, dK, dV, dI, dF, shaped and typed as their arguments; with initial states also their dC, dN and dM: dN is zero, as only the
      denominator reads n, and dM is <dC_0, C_0>, since exp(m) scales the state.
    """
    if scaM_states is not None or vecM_out is not None:
        dims = dims_of(matQ=matQ, matV=matV, chunk_size=chunk_size)
        dims.check(vecM_out=vecM_out)
        if scaM_states is not None:
            dims.borders("scaM_states", scaM_states)
    initial = matC_initial, vecN_initial, scaM_initial
    args = matQ, matK, matV, vecI, vecF, initial, qk_scale, matC_states, vecN_out, matDeltaH, matDeltaC_last
    return _common.backward(*args, chunk_size, 0.0)


def mlstm_chunkwise_triton_stablef(
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
    """The mLSTM, with exact gradients of all eight arrays.

    Args:
      q, k: (B, NH, S, DHQK); v: (B, NH, S, DHV); i, f: gate pre-activations (B, NH, S).
      c_initial, n_initial, m_initial: (B, NH, DHQK, DHV), (B, NH, DHQK), (B, NH); all or none.
      return_last_states: whether the states after the last step are returned as well.
      eps: added to the denominator; chunk_size: a power of two >= 16, one beyond S is shortened, S need not be a multiple.
      autocast_kernel_dtype: of q, k, v in the matrix products; gates and states stay float32.
      stabilize_correctly: the denominator is max(norm_val exp(-m), |q . n|); False: max(norm_val, |q . n|).

    Returns:
      h (B, NH, S, DHV) in the dtype of q, or (h, (c, n, m)), the states float32, m in natural log.
    """
    options = dict(eps=eps, chunk_size=chunk_size, stabilize_correctly=stabilize_correctly, norm_val=norm_val)
    return _common.entry(q, k, v, i, f, (c_initial, n_initial, m_initial), return_last_states, autocast_kernel_dtype, **options)
