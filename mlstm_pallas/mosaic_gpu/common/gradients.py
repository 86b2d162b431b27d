"""The operands and the results that the kernels of parallel_bw_dQKV and chunk_gradients share."""

from typing import Any

from jax import Array

from mlstm_pallas.formulas.rows import sequence_shape
from mlstm_pallas.formulas.tiles import weighted
from mlstm_pallas.mosaic_gpu.common.launch import float32
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.stages.parallel_bw_dQKV import Gradients


def gradient_operands(x: Any) -> dict[str, Any]:
    """The inputs, by name, of a kernel that computes the gradients from states and vectors."""
    g, normaliser = x.gates.per_step(), x.normaliser_gradients
    return dict(
        matC_states=x.matC_states,
        vecN_states=None if normaliser.vecInvDen is None else x.vecN_states,
        matDeltaC_states=x.matDeltaC_states,
        vecDeltaN_states=x.vecDeltaN_states,
        vecW=g.vecW,
        vecAbar=g.vecAbar,
        vecInvDen=normaliser.vecInvDen,
        vecDzDen=normaliser.vecDzDen,
    )


def gradient_shapes(x: Any, p: Problem, column_blocks: int, inner_parts: int) -> dict[str, Any]:
    """Its outputs, by name.

    column_blocks: of q_dot_dq_inter and k_dot_dk_inter; inner_parts: of <C_c, dC_{c+1}>.
    """
    dtype, sums = x.matQ.dtype, float32(p.BNH, column_blocks, p.S)
    return dict(
        matDeltaQ=sequence_shape(x.matQ, p.DHQK, dtype),
        q_dot_dq_inter=sums,
        matDeltaK=sequence_shape(x.matK, p.DHQK, dtype),
        k_dot_dk_inter=sums,
        matDeltaV=sequence_shape(x.matV, p.DHV, dtype),
        inner_C_dC=float32(p.BNH, p.NC, inner_parts),
    )


def gradients_of(x: Any, y: dict[str, Any], inner_states: Array) -> Gradients:
    """The results of the kernel; inner_states: parts of <C_c, dC_{c+1}> + n_c . dn_{c+1}."""
    pass_through = weighted(x.gates.scaGamma[..., None], inner_states).sum(-1)
    inter = y["q_dot_dq_inter"].sum(1), y["k_dot_dk_inter"].sum(1)
    return Gradients(y["matDeltaQ"], y["matDeltaK"], y["matDeltaV"], *inter, pass_through)
