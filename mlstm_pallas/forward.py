"""The forward schedule: which stages run, and what goes from one to the next. Arrays are those of a shard, (B * NH, ...)."""

from mlstm_pallas.call_spec import CallSpec, Forward, Inputs, States, StoredStates
from mlstm_pallas.splits import SplitProducts, decays_in_splits, heads_of_splits, split_states, splits_as_heads
from mlstm_pallas.stage import Lowering
from mlstm_pallas.stages.chunk_gates import chunk_gates
from mlstm_pallas.stages.parallel_fw_H import parallel_fw_H
from mlstm_pallas.stages.parallel_fw_P import PER_STEP, parallel_fw_P
from mlstm_pallas.stages.recurrence import split_products
from mlstm_pallas.stages.recurrent_fw_C import recurrent_fw_C
from mlstm_pallas.stages.recurrent_fw_H import recurrent_fw_H


def forward(spec: CallSpec, lowering: Lowering, x: Inputs, products: SplitProducts | None = None) -> Forward:
    """The forward pass. products: of the splits of the sequence, where they are known."""
    if not spec.has_initial_state:
        x = x._replace(c_initial=None)
    if lowering is Lowering.XLA:
        return materialised(spec, lowering, x)
    x = x._replace(q=spec.strided(x.q), k=spec.strided(x.k), v=spec.strided(x.v))
    outputs = fused(spec, lowering, x, products) if spec.fused else materialised(spec, lowering, x)
    return outputs._replace(h=spec.flat(outputs.h))


def materialised(spec: CallSpec, lowering: Lowering, x: Inputs) -> Forward:
    """With the state of every chunk in memory."""
    gates = chunk_gates(x.i, x.f, x.m_initial, x.starts, spec.input_gate, call=spec.call("chunk_gates", lowering))
    abar, gamma = gates.per_step().vecAbar, gates.scaGamma
    states_call = spec.call("recurrent_fw_C", lowering)
    C, C_last, n, n_last = recurrent_fw_C(
        x.k, x.v, abar, gamma, x.c_initial, x.n_initial, return_last=spec.return_last_states, call=states_call
    )
    h, z = parallel_fw_H(x.q, x.k, x.v, gates, C, n, normaliser=spec.normaliser, call=spec.call("parallel_fw_H", lowering))
    last = States(C_last, n_last, gates.scaM_states[:, -1]) if C_last is not None else None
    stored = StoredStates(C, n, gates.scaM_states, C_last, n_last)
    return Forward(h, last, z, stored._replace(C=None, C_last=None) if spec.recompute_states_in_bw else stored)


def fused(spec: CallSpec, lowering: Lowering, x: Inputs, products: SplitProducts | None) -> Forward:
    """With the state on the chip, in the chunks of the fused scan; its splits count as heads.

    Stored states are those at the boundaries of the backward pass's chunks.
    """
    p, num_splits = spec.fused_problem, spec.num_splits
    gates = chunk_gates(x.i, x.f, x.m_initial, x.starts, spec.input_gate, call=spec.call("chunk_gates", lowering, p))
    scores_call = spec.call("parallel_fw_P", lowering, p)
    scan_call = spec.call("recurrent_fw_H", lowering, p.split(num_splits))
    scale_keys = not scan_call.lowering.mosaic_gpu
    scores = parallel_fw_P(x.q, x.k, gates, x.n_initial, normaliser=spec.normaliser, scale_keys=scale_keys, call=scores_call)
    C_initial = x.c_initial
    q, v, gamma = x.q, x.v, gates.scaGamma
    if num_splits > 1:
        added = None if products is None else products.all_but_last(num_splits, gates.scaM_states)
        if added is None:
            decays = decays_in_splits(gates.scaGamma, num_splits, p.S)
            if scores.vecAbar is not None:  # the keys are not scaled: the weights of a split's steps are
                decays *= scores.vecAbar
            products_call = spec.call("recurrent_fw_C", lowering, p, clamp=False)
            added = split_products(scores.matK_scaled, x.v, decays, num_splits, call=products_call)
        C_initial = split_states(added, gates.scaGamma, C_initial)
        q, v, gamma = (splits_as_heads(y, num_splits) for y in (q, v, gamma))
        of_splits = {name: splits_as_heads(y, num_splits) for name in PER_STEP if (y := getattr(scores, name)) is not None}
        scores = scores._replace(**of_splits)
    stride = spec.problem.L // p.L
    H, C_last, C = recurrent_fw_H(
        *(q, v, scores, gamma, C_initial),
        return_last=spec.return_last_states,
        store_every=0 if spec.recompute_states_in_bw else stride,
        call=scan_call,
    )
    last = None
    if C_last is not None:
        C_last = heads_of_splits(C_last, num_splits)[:, -1]
        last = States(C_last, scores.vecN_last, gates.scaM_states[:, -1])
    stored = StoredStates(None, scores.vecN_states[:, ::stride], gates.scaM_states[:, ::stride], None, scores.vecN_last)
    if C is not None:
        stored = stored._replace(C=C.reshape(p.BNH, spec.problem.NC, *C.shape[2:]), C_last=C_last)
    return Forward(H.reshape(x.v.shape), last, scores.vecZ, stored)
