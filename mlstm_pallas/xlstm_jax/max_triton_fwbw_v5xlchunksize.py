"""The system max_triton_fwbw_v5xlchunksize of xlstm_jax: chunks of any size, dQ, dK and dV by a kernel each.

Documented ("xlstm_jax public API documents of max_triton_fwbw_v5xlchunksize._parallel_fw and ._parallel_bw_dV"):
``mlstm_chunkwise__parallel_fw_Hintra``, ``mlstm_chunkwise__parallel_bw_dV``. The rest are their counterparts in the same style.

vecI of a stage is (B, NH, NC, L), and vecF of a stage the pre-activation (B, NH, S), f = -inf included. siz_b_*, num_warps and num_stages
replace those of the config, None leaves them; a tile that does not divide its axis is shortened. vecN_out is max(|q . n|, exp(-m)), the
denominator of h without eps. Results are computed in the dtype of matQ, with float32 sums, and handed out in output_dtype.
"""

import jax.numpy as jnp

from mlstm_pallas.fwbw import _get_chunkwise_fwbw_kernel, _mlstm_chunkwise_fwbw_generator
from mlstm_pallas.gates import local_gates
from mlstm_pallas.xlstm_jax import _common
from mlstm_pallas.xlstm_jax._common import CHUNKS, STEPS, dims_of, plan_for

__all__ = [
    "_get_chunkwise_fwbw_kernel",
    "_mlstm_chunkwise_fwbw_generator",
    "mlstm_chunkwise__parallel_bw_dK",
    "mlstm_chunkwise__parallel_bw_dQ",
    "mlstm_chunkwise__parallel_bw_dV",
    "mlstm_chunkwise__parallel_fw_Hintra",
    "mlstm_chunkwise__recurrent_bw_dC",
    "mlstm_chunkwise__recurrent_fw_C",
    "mlstm_chunkwise__xl_chunk",
    "mlstm_chunkwise_bw",
    "mlstm_chunkwise_fw",
]


def _gates(dims, dtype, vecI, vecF, scaM_all):
    dims.check(CHUNKS, vecI=vecI)
    dims.check(STEPS, vecF=vecF)
    acc = _common.acc_dtype(dtype)
    local = local_gates(vecI.astype(acc), vecF.astype(acc).reshape(vecI.shape))
    return _common.with_borders(local, dims.borders("scaM_all", scaM_all).astype(acc))


def _tiles(siz_b_LQ, siz_b_LKV, siz_b_DHQK, siz_b_DHHV, num_warps, num_stages):
    sizes = dict(siz_b_LQ=siz_b_LQ, siz_b_LKV=siz_b_LKV, siz_b_DHQK=siz_b_DHQK, siz_b_DHHV=siz_b_DHHV)
    return sizes | dict(num_warps=num_warps, num_stages=num_stages)


def mlstm_chunkwise__recurrent_fw_C(
    matK,
    matV,
    vecF,
    vecI,
    matC_initial=None,
    vecN_initial=None,
    scaM_initial=None,
    qk_scale=None,
    chunk_size=64,
    siz_b_LKV=None,
    siz_b_DHQK=None,
    siz_b_DHHV=None,
    num_warps=None,
    num_stages=None,
):
    """The states at the chunk borders: C (B, NH, (NC+1) * DHQK, DHHV) in the dtype of matK, N (B, NH, (NC+1) * DHQK), M (B, NH, NC+1).

    No state depends on qk_scale.
    """
    del qk_scale
    dims = dims_of(matK=matK, matV=matV, chunk_size=chunk_size)
    dims.check(CHUNKS, vecI=vecI)
    dims.check(STEPS, vecF=vecF)
    names = ("matC_initial", "vecN_initial", "scaM_initial")
    C, n, m = _common.initial_states(dims, matK.dtype, names, (matC_initial, vecN_initial, scaM_initial))
    tiles = _tiles(None, siz_b_LKV, siz_b_DHQK, siz_b_DHHV, num_warps, num_stages)
    plan = plan_for(dims, matK.dtype, stage="recurrent_fw_C", tiles=tiles)
    gates = _common.fw_gates(plan, vecI.astype(m.dtype).reshape(vecF.shape), vecF.astype(m.dtype), m)
    Cs, ns, C_last, n_last = _common.fw_states(plan, matK, matV.astype(matK.dtype), gates, C, n)
    return _common.join_borders(Cs, C_last), _common.join_borders(ns, n_last), gates.scaM_states


def mlstm_chunkwise__parallel_fw_Hintra(
    matQ,
    matK,
    matV,
    vecI,
    vecF,
    matC_all,
    vecN_all,
    scaM_all,
    qk_scale=None,
    chunk_size=64,
    siz_b_LQ=32,
    siz_b_LKV=32,
    siz_b_DHQK=None,
    siz_b_DHHV=None,
    num_warps=None,
    num_stages=None,
    eps=1e-6,
    output_dtype=jnp.float32,
):
    """The outputs of all chunks, the part of the states included, for all that the name says.

    Args:
      matQ, matK, matV: (B, NH, S, DHQK) twice, (B, NH, S, DHHV); vecI: (B, NH, NC, L); vecF: pre-activations (B, NH, S).
      matC_all, vecN_all, scaM_all: the states at the chunk borders, (B, NH, (NC+1) * DHQK, DHHV), (B, NH, (NC+1) * DHQK), (B, NH, NC+1).

    Returns:
      H (B, NH, S, DHHV) in output_dtype and, float32, what the document calls the N vector (B, NH, S): vecN_out of the backward stages.
    """
    dims = dims_of(matQ=matQ, matV=matV, chunk_size=chunk_size)
    dims.check(matK=matK)
    gates = _gates(dims, matQ.dtype, vecI, vecF, scaM_all)
    C, n = dims.before("matC_all", matC_all, "DHQK", "DHHV"), dims.before("vecN_all", vecN_all, "DHQK")
    tiles = _tiles(siz_b_LQ, siz_b_LKV, siz_b_DHQK, siz_b_DHHV, num_warps, num_stages)
    plan = plan_for(dims, matQ.dtype, qk_scale, stage="parallel_fw_H", tiles=tiles, eps=eps)
    k, v = matK.astype(matQ.dtype), matV.astype(matQ.dtype)
    return _common.fw_outputs(plan, jnp.dtype(output_dtype), matQ, k, v, gates, C, n)


def mlstm_chunkwise_fw(
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
    output_dtype=jnp.float32,
):
    """The forward pass. vecI, vecF: pre-activations (B, NH, S).

    Returns:
      H (B, NH, S, DHHV) in output_dtype, vecN_out and vecM_out (B, NH, S); then, each if asked for, the last states (C, N, M), float32, and
      the states at all chunk borders as from ``mlstm_chunkwise__recurrent_fw_C``.
    """
    initial = matC_initial, vecN_initial, scaM_initial
    made = _common.forward(matQ, matK, matV, vecI, vecF, initial, qk_scale, chunk_size, eps=eps, output_dtype=output_dtype)
    optional = ((return_last_states, made.last_states), (return_all_states, made.all_states))
    return made.matH, made.vecN_out, made.vecM_out, *(states for asked, states in optional if asked)


def mlstm_chunkwise__recurrent_bw_dC(
    matQ,
    vecI,
    vecF,
    scaM_all,
    vecN_out,
    matDeltaH,
    matDeltaC_last=None,
    qk_scale=None,
    chunk_size=64,
    siz_b_LQ=None,
    siz_b_DHQK=None,
    siz_b_DHHV=None,
    num_warps=None,
    num_stages=None,
    eps=0.0,
):
    """Gradients of C at the chunk borders 0 to NC, (B, NH, (NC+1) * DHQK, DHHV) in the dtype of matQ; the denominator is a constant."""
    dims = dims_of(matQ=matQ, matDeltaH=matDeltaH, chunk_size=chunk_size)
    dims.check(vecN_out=vecN_out, matDeltaC_last=matDeltaC_last)
    gates = _gates(dims, matQ.dtype, vecI, vecF, scaM_all)
    rows = _common.constant_rows(vecN_out, eps, matQ.dtype)
    # The stage's rows are those of q and dh; its config has them as siz_b_LKV, for it shares a kernel with recurrent_fw_C.
    tiles = _tiles(None, siz_b_LQ, siz_b_DHQK, siz_b_DHHV, num_warps, num_stages)
    plan = plan_for(dims, matQ.dtype, qk_scale, stage="recurrent_bw_dC", tiles=tiles)
    dC, first = _common.bw_states(plan, matQ, matDeltaH, gates, rows, matDeltaC_last)
    return _common.join_first(first, dC)


def _gradient(name, arrays, states, qk_scale, chunk_size, tiles, eps, output_dtype):
    """The gradient of one of q, k, v. arrays: matQ to matDeltaH without the states."""
    matQ, matK, matV, vecI, vecA, vecB, vecN_out, vecM_out, matDeltaH = arrays
    matC_all, vecN_all, scaM_all, matDeltaC_states = states
    dims = dims_of(matQ=matQ, matV=matV, chunk_size=chunk_size)
    dims.check(matK=matK, matDeltaH=matDeltaH, vecN_out=vecN_out, vecM_out=vecM_out)
    dims.check(CHUNKS, vecI=vecI, vecA=vecA, vecB=vecB)
    dims.borders("vecN_all", vecN_all, "DHQK")
    C = dims.before("matC_all", matC_all, "DHQK", "DHHV")
    dC = dims.after("matDeltaC_states", matDeltaC_states, "DHQK", "DHHV")
    acc = _common.acc_dtype(matQ.dtype)
    m = dims.borders("scaM_all", scaM_all).astype(acc)
    gates = _common.gates_from_sums(vecI.astype(acc), (vecB.astype(acc), jnp.zeros(vecB.shape, acc)), m)
    rows = _common.constant_rows(vecN_out, eps, matQ.dtype)
    rows_of = "siz_b_LQ" if name == "Q" else "siz_b_LKV"
    plan = plan_for(dims, matQ.dtype, qk_scale, stage="parallel_bw_dQKV", tiles=tiles | {"siz_b_LQ": tiles[rows_of]})
    k, v = matK.astype(matQ.dtype), matV.astype(matQ.dtype)
    (made,) = _common.bw_inputs(plan, name, matQ, k, v, matDeltaH, gates, rows, C, dC)
    return made.astype(output_dtype)


def mlstm_chunkwise__parallel_bw_dV(
    matQ,
    matK,
    matV,
    vecI,
    vecA,
    vecB,
    matC_all,
    vecN_all,
    scaM_all,
    vecN_out,
    vecM_out,
    matDeltaH,
    matDeltaC_states,
    qk_scale=None,
    chunk_size=64,
    siz_b_LQ=32,
    siz_b_LKV=32,
    siz_b_DHQK=None,
    siz_b_DHHV=None,
    num_warps=None,
    num_stages=None,
    eps=0.0,
    output_dtype=jnp.float32,
):
    """The gradient of v, (B, NH, S, DHHV); the document speaks of "deltaK", of DHQK columns and of an eps of 1e-6, wrongly.

    Args:
      matQ, matK, matV, matDeltaH: (B, NH, S, DHQK) twice, (B, NH, S, DHHV) twice.
      vecI, vecB: (B, NH, NC, L), the input gate and the running sums of log sigmoid(f) within each chunk, finite.
      matC_all, vecN_all, scaM_all: the states at the chunk borders, (B, NH, (NC+1) * DHQK, DHHV), (B, NH, (NC+1) * DHQK), (B, NH, NC+1).
      vecN_out: (B, NH, S) the denominator without eps, a constant here.
      matDeltaC_states: gradients of C at the chunk borders 0 to NC, (B, NH, (NC+1) * DHQK, DHHV).
      vecA, vecM_out: (B, NH, NC, L), (B, NH, S); not read, they follow from vecI, vecB and scaM_all.
      eps: that of the forward pass, to divide by what it divided by.
    """
    arrays = matQ, matK, matV, vecI, vecA, vecB, vecN_out, vecM_out, matDeltaH
    states = matC_all, vecN_all, scaM_all, matDeltaC_states
    tiles = _tiles(siz_b_LQ, siz_b_LKV, siz_b_DHQK, siz_b_DHHV, num_warps, num_stages)
    return _gradient("V", arrays, states, qk_scale, chunk_size, tiles, eps, output_dtype)


def mlstm_chunkwise__parallel_bw_dQ(
    matQ,
    matK,
    matV,
    vecI,
    vecA,
    vecB,
    matC_all,
    vecN_all,
    scaM_all,
    vecN_out,
    vecM_out,
    matDeltaH,
    matDeltaC_states,
    qk_scale=None,
    chunk_size=64,
    siz_b_LQ=32,
    siz_b_LKV=32,
    siz_b_DHQK=None,
    siz_b_DHHV=None,
    num_warps=None,
    num_stages=None,
    eps=0.0,
    output_dtype=jnp.float32,
):
    """The gradient of q, (B, NH, S, DHQK). Arguments as of ``mlstm_chunkwise__parallel_bw_dV``."""
    arrays = matQ, matK, matV, vecI, vecA, vecB, vecN_out, vecM_out, matDeltaH
    states = matC_all, vecN_all, scaM_all, matDeltaC_states
    tiles = _tiles(siz_b_LQ, siz_b_LKV, siz_b_DHQK, siz_b_DHHV, num_warps, num_stages)
    return _gradient("Q", arrays, states, qk_scale, chunk_size, tiles, eps, output_dtype)


def mlstm_chunkwise__parallel_bw_dK(
    matQ,
    matK,
    matV,
    vecI,
    vecA,
    vecB,
    matC_all,
    vecN_all,
    scaM_all,
    vecN_out,
    vecM_out,
    matDeltaH,
    matDeltaC_states,
    qk_scale=None,
    chunk_size=64,
    siz_b_LQ=32,
    siz_b_LKV=32,
    siz_b_DHQK=None,
    siz_b_DHHV=None,
    num_warps=None,
    num_stages=None,
    eps=0.0,
    output_dtype=jnp.float32,
):
    """The gradient of k, (B, NH, S, DHQK). Arguments as of ``mlstm_chunkwise__parallel_bw_dV``."""
    arrays = matQ, matK, matV, vecI, vecA, vecB, vecN_out, vecM_out, matDeltaH
    states = matC_all, vecN_all, scaM_all, matDeltaC_states
    tiles = _tiles(siz_b_LQ, siz_b_LKV, siz_b_DHQK, siz_b_DHHV, num_warps, num_stages)
    return _gradient("K", arrays, states, qk_scale, chunk_size, tiles, eps, output_dtype)


def mlstm_chunkwise_bw(
    matQ,
    matK,
    matV,
    vecI,
    vecF,
    matC_initial=None,
    vecN_initial=None,
    scaM_initial=None,
    qk_scale=None,
    matC_all=None,
    vecN_out=None,
    matDeltaH=None,
    matDeltaC_last=None,
    chunk_size=64,
    eps=0.0,
):
    """dQ, dK, dV, dI, dF and, with initial states, dC, dN, dM of them: exact but for the denominator, which is a constant.

    vecN_out is that of ``mlstm_chunkwise_fw``, eps the forward pass's; matC_all, where not given, is made anew. dN is zero, and dM is
    <dC_0, C_0>.
    """
    initial = matC_initial, vecN_initial, scaM_initial
    args = matQ, matK, matV, vecI, vecF, initial, qk_scale, matC_all, vecN_out, matDeltaH, matDeltaC_last
    return _common.backward(*args, chunk_size, eps)


def mlstm_chunkwise__xl_chunk(
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
