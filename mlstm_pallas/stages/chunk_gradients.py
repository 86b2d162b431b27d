"""Stage chunk_gradients: parallel_bw_dP and parallel_bw_dQKV in one, without P and dP in memory.

Nothing before it computes P and dP, so recurrent_bw_dC weights q and k itself and computes delta,
of which the normaliser's gradients are multiples.
"""

from typing import NamedTuple

from jax import Array

from mlstm_pallas.formulas.gate_gradients import TileSums
from mlstm_pallas.formulas.gates import ChunkGates
from mlstm_pallas.formulas.normaliser import NormaliserGradients
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.operands.chunk_list import ChunkList
from mlstm_pallas.stages import parallel_bw_dQKV
from mlstm_pallas.stages.parallel_bw_dP import score_tiles
from mlstm_pallas.stages.parallel_bw_dQKV import Gradients


class Operands(NamedTuple):
    matQ: Array  # (B * NH, S, DHQK) in the kernel dtype, like all matrices
    matK: Array  # (B * NH, S, DHQK)
    matV: Array  # (B * NH, S, DHV)
    matDeltaH: Array  # (B * NH, S, DHV)
    gates: ChunkGates
    normaliser_gradients: NormaliserGradients
    matC_states: Array  # (B * NH, NC, DHQK, DHV) before each chunk
    vecN_states: Array  # (B * NH, NC, DHQK) float32
    matDeltaC_states: Array  # (B * NH, NC, DHQK, DHV) after each chunk
    vecDeltaN_states: Array  # (B * NH, NC, DHQK) float32
    active: ChunkList | None = None  # the chunks with steps are active; None: all


class ChunkGradients(NamedTuple):
    gradients: Gradients
    tile_sums: TileSums  # may be undefined in inactive chunks


def chunk_gradients(x: Operands, *, call: Launch) -> ChunkGradients:
    """Runs the stage."""
    scores = score_tiles(x, x.normaliser_gradients, call)
    operands = parallel_bw_dQKV.Operands(**x._asdict(), scores=scores)
    return ChunkGradients(parallel_bw_dQKV.parallel_bw_dQKV(operands, call=call), scores.tile_sums)
