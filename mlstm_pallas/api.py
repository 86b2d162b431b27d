"""mlstm_chunkwise: the chunkwise mLSTM of whole sequences."""

import dataclasses
from typing import Literal, Unpack, overload

import jax
from jax.typing import DTypeLike

from mlstm_pallas.fwbw import mlstm, mlstm_with_states
from mlstm_pallas.planning.config import KernelConfig
from mlstm_pallas.planning.options import Options
from mlstm_pallas.prepare import Arguments, Keywords, SequenceKeywords, prepare
from mlstm_pallas.problem import validation
from mlstm_pallas.problem.annotations import (
    Array,
    BackendName,
    InputGateName,
    LayoutName,
    StatesTuple,
)


@overload
def mlstm_chunkwise(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None,
    n_initial: Array | None = None, m_initial: Array | None = None, *,
    return_last_states: Literal[False] = False, **keywords: Unpack[Keywords],
) -> jax.Array: ...  # fmt: skip
@overload
def mlstm_chunkwise(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None,
    n_initial: Array | None = None, m_initial: Array | None = None,
    return_last_states: Literal[True] = ..., **keywords: Unpack[Keywords],
) -> tuple[jax.Array, StatesTuple]: ...  # fmt: skip
@overload
def mlstm_chunkwise(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None,
    n_initial: Array | None = None, m_initial: Array | None = None,
    return_last_states: bool = ..., eps: float = 1e-6, chunk_size: int | None = None,
    autocast_kernel_dtype: DTypeLike | None = None, stabilize_correctly: bool = True,
    norm_val: float = 1.0, **keywords: Unpack[SequenceKeywords],
) -> jax.Array | tuple[jax.Array, StatesTuple]: ...  # fmt: skip
def mlstm_chunkwise(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None,
    n_initial: Array | None = None, m_initial: Array | None = None,
    return_last_states: bool = False, eps: float = 1e-6, chunk_size: int | None = None,
    autocast_kernel_dtype: DTypeLike | None = None, stabilize_correctly: bool = True,
    norm_val: float = 1.0, *, segment_ids: Array | None = None,
    sequence_lengths: Array | None = None, segment_lengths: Array | None = None,
    reverse: bool = False, input_gate: InputGateName = "exp", normalize: bool = True,
    recompute_states_in_bw: bool = True, state_dtype: DTypeLike | None = None,
    layout: LayoutName | None = None, backend: BackendName | None = None,
    config: KernelConfig | None = None, num_segments: None = None,
) -> jax.Array | tuple[jax.Array, StatesTuple]:  # fmt: skip
    """Applies the mLSTM of xLSTM to whole sequences, for training and prefill.

    It is causal and scales q by s = DHQK ** -0.5. docs/migrating.md has what
    stands for scale, cu_seqlens, initial_state and head_first of others.

    For every batch entry and head it computes equations 19 to 27 of
    arXiv:2405.04517 in chunks (arXiv:2503.14376):

    .. math::

      m_t = max(log sigmoid(f_t) + m_{t-1}, i_t)
      d_t = exp(log sigmoid(f_t) + m_{t-1} - m_t)
      C_t = d_t C_{t-1} + exp(i_t - m_t) k_t v_t^T
      n_t = d_t n_{t-1} + exp(i_t - m_t) k_t
      h_t = s C_t^T q_t / (max(|s n_t . q_t|, norm_val exp(-m_t)) + eps)

    The dimensions are::

      B     batch
      S     steps of a sequence, any number from 1
      NH    heads
      DHQK  head dimension of q and k
      DHV   head dimension of v and h

    f_t = -inf resets the state and i_t = -inf stores nothing, as values of -1e6
    and below do. A NaN stays in its batch entry and head (docs/debugging.md).
    First derivatives in reverse mode are exact, for all float arrays;
    ``mlstm_pallas.reference.chunkwise`` has all others.

    Example::

      >>> import jax.numpy as jnp
      >>> from mlstm_pallas import mlstm_chunkwise
      >>> q = k = jnp.ones((2, 100, 4, 16))  # B, S, NH, DHQK
      >>> v, i = jnp.ones((2, 100, 4, 32)), jnp.zeros((2, 100, 4))
      >>> h, (c, n, m) = mlstm_chunkwise(
      ...     q, k, v, i, i + 4.0, return_last_states=True, layout="BTNH"
      ... )
      >>> h.shape, c.shape, n.shape, m.shape
      ((2, 100, 4, 32), (2, 4, 16, 32), (2, 4, 16), (2, 4))

    Args:
      q: unscaled queries, (B, NH, S, DHQK), or (B, S, NH, DHQK) with layout
        "BTNH", in bfloat16, float16 or float32; in float64 with backend "xla"
        and jax_enable_x64.
      k: keys, shaped as q. k and v have the dtype of q, unless
        autocast_kernel_dtype is set.
      v: values, (B, NH, S, DHV) or (B, S, NH, DHV).
      i: input gate pre-activations, natural log, (B, NH, S) or (B, S, NH), in
        any float dtype; the arithmetic is float32.
      f: forget gate pre-activations, shaped as i; sigmoid is applied here.
      c_initial: state C before the first step, (B, NH, DHQK, DHV). All three
        initial states are passed, or none: zeros.
      n_initial: state n before the first step, (B, NH, DHQK).
      m_initial: stabiliser m, (B, NH). True states are exp(m) C and exp(m) n.
      return_last_states: whether to return the states after the last step.
      eps: added to the denominator; it and norm_val: 0, or normal float32.
      chunk_size: steps per chunk, a power of two from 16 up, cut to the least
        that is >= S. None: config's, or planned by the heads, S and the GPU.
      autocast_kernel_dtype: dtype of q, k and v in products. None: that of q.
      stabilize_correctly: False: norm_val is the floor, not norm_val exp(-m_t).
      norm_val: factor in the floor of the denominator, at least 0.
      segment_ids: (B, S) integers, for packed segments: a change of the id sets
        states to 0. Initial states are the first's, last states the last's.
      sequence_lengths: (B,) integers, 0 to S, for padded batches. The last
        states are those after sequence_lengths[b] steps, beyond which h and all
        gradients are 0, even with NaN gates or any finite q, k and v there.
      segment_lengths: (B, N) integers, in place of these two and reverse, for
        documents one after the other, behind which h is 0. The last states are
        (B, N, NH, ...); initial ones too, or a row's, for its first document.
      reverse: True runs from the last step (of sequence_lengths) to the first:
        initial states enter at the last step, last states leave at step 0, and
        segments begin at their last steps.
      input_gate: "exp", or "sigmoid" (mLSTMsig, arXiv:2503.14376): i_t becomes
        log sigmoid(i_t), every m_t is 0, and m_initial None or zeros, which
        are not checked in a traced array. The m that is returned is zeros.
      normalize: False leaves out the denominator; with the sigmoid gate only.
      recompute_states_in_bw: False keeps C of every chunk: from 9 % less to 1 %
        more time on an H200.
      state_dtype: dtype of the returned c and its cotangent. None: that of n.
      layout: "BNTH", also if None, or "BTNH", as a model's projections have it.
      backend: one that ``use_backend`` lists, with what None means.
      config: overrides of the plan, which mlstm_pallas.plan shows.
      num_segments: removed; segment_lengths are in its place.

    Returns:
      h, shaped as v, in the dtype of q; with return_last_states (h, (c, n, m)),
      the states shaped as the initial ones, in float32 (float64 for float64).

    Raises:
      TypeError: for wrong dtypes, traced options and other derivatives.
      ValueError: for wrong shapes and values, and numbers of wrong types. Only
        MLSTM_PALLAS_CHECKS=1 reads lengths in other arrays than NumPy's.

    Warns:
      UserWarning: if layout is left out and S < NH, or S = NH > 1 with initial
        states or segment_ids, whose shapes tell the layout otherwise; for tiles
        in config of kernels that the call does not run.
    """
    options = Options(
        return_last_states, eps, chunk_size, autocast_kernel_dtype, stabilize_correctly, norm_val,
        input_gate, normalize, recompute_states_in_bw, layout, backend, config, state_dtype, reverse
    )  # fmt: skip
    validation.check_removed(num_segments)
    of_rows = segment_ids, sequence_lengths, segment_lengths
    x = Arguments(q, k, v, i, f, c_initial, n_initial, m_initial, *of_rows)
    spec, x = prepare(x, options, layout)
    return mlstm(spec, x)


def mlstm_chunkwise_states(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None,
    n_initial: Array | None = None, m_initial: Array | None = None, *, every: int,
    segment_ids: Array | None = None, sequence_lengths: Array | None = None, eps: float = 1e-6,
    norm_val: float = 1.0, stabilize_correctly: bool = True, input_gate: InputGateName = "exp",
    normalize: bool = True, autocast_kernel_dtype: DTypeLike | None = None,
    state_dtype: DTypeLike | None = None, layout: LayoutName | None = None,
    backend: BackendName | None = None, config: KernelConfig | None = None,
) -> tuple[jax.Array, StatesTuple, StatesTuple]:  # fmt: skip
    """``mlstm_chunkwise`` with the states after every N-th step.

    They are what a prefix cache stores. The forward pass writes them as it
    goes; nothing is computed twice. There are no derivatives.

    Args:
      every: N, a power of two from 16 up.
      sequence_lengths: beyond the length of an entry its states stay.
      q, k, v, i, f, c_initial, n_initial, m_initial, segment_ids: as for
        ``mlstm_chunkwise``.
      eps, norm_val, stabilize_correctly, input_gate, normalize: likewise.
      autocast_kernel_dtype, state_dtype, layout, backend, config: likewise.

    Returns:
      h, the last states, and the states after N, 2 N, ... steps, c
      (B, S // N, NH, DHQK, DHV), n (B, S // N, NH, DHQK) and m (B, S // N, NH).
      This c has been rounded to the dtype of q, once; n and m are float32.
    """
    N = validation.check_chunk_size("every", every)
    x = Arguments(q, k, v, i, f, c_initial, n_initial, m_initial, segment_ids, sequence_lengths)

    options = Options(
        return_last_states=True, recompute_states_in_bw=False, eps=eps, norm_val=norm_val,
        stabilize_correctly=stabilize_correctly, input_gate=input_gate, normalize=normalize,
        autocast_kernel_dtype=autocast_kernel_dtype, state_dtype=state_dtype, layout=layout,
        backend=backend, config=config,
    )  # fmt: skip
    if (options.config.chunk_size or 0) > N:
        L = options.config.chunk_size
        raise ValueError(f"config.chunk_size is {L}, expected at most every = {N}")
    spec, x = prepare(x, options, layout)
    # The fused scan has chunks of its own, and stores states at those of the call.
    if spec.plan.uses_fused_scan or spec.problem.L > N:
        config = options.config | KernelConfig(chunk_size=N)
        spec, x = prepare(x, dataclasses.replace(options, config=config), layout)
    return mlstm_with_states(spec, N, x)
