"""mlstm_chunkwise: the chunkwise mLSTM of whole sequences."""

from typing import Literal, overload

import jax
from jax.typing import DTypeLike

from mlstm_pallas.annotations import Array, BackendName, InputGateName, LayoutName, States
from mlstm_pallas.config import KernelConfig
from mlstm_pallas.entry import Options, run
from mlstm_pallas.fwbw import mlstm_forward, mlstm_with_segments
from mlstm_pallas.gates import segment_starts


@overload
def mlstm_chunkwise(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None,
    n_initial: Array | None = None, m_initial: Array | None = None,
    return_last_states: Literal[False] = False, eps: float = 1e-6, chunk_size: int | None = None,
    autocast_kernel_dtype: DTypeLike | None = None, stabilize_correctly: bool = True,
    norm_val: float = 1.0, *, segment_ids: Array | None = None,
    sequence_lengths: Array | None = None, num_segments: int | None = None,
    input_gate: InputGateName = "exp", normalize: bool = True, recompute_states_in_bw: bool = True,
    layout: LayoutName = "BNTH", backend: BackendName | None = None,
    config: KernelConfig | None = None,
) -> jax.Array: ...  # fmt: skip
@overload
def mlstm_chunkwise(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None,
    n_initial: Array | None = None, m_initial: Array | None = None,
    return_last_states: Literal[True] = ..., eps: float = 1e-6, chunk_size: int | None = None,
    autocast_kernel_dtype: DTypeLike | None = None, stabilize_correctly: bool = True,
    norm_val: float = 1.0, *, segment_ids: Array | None = None,
    sequence_lengths: Array | None = None, num_segments: int | None = None,
    input_gate: InputGateName = "exp", normalize: bool = True, recompute_states_in_bw: bool = True,
    layout: LayoutName = "BNTH", backend: BackendName | None = None,
    config: KernelConfig | None = None,
) -> tuple[jax.Array, States]: ...  # fmt: skip
@overload
def mlstm_chunkwise(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None,
    n_initial: Array | None = None, m_initial: Array | None = None,
    return_last_states: bool = ..., eps: float = 1e-6, chunk_size: int | None = None,
    autocast_kernel_dtype: DTypeLike | None = None, stabilize_correctly: bool = True,
    norm_val: float = 1.0, *, segment_ids: Array | None = None,
    sequence_lengths: Array | None = None, num_segments: int | None = None,
    input_gate: InputGateName = "exp", normalize: bool = True, recompute_states_in_bw: bool = True,
    layout: LayoutName = "BNTH", backend: BackendName | None = None,
    config: KernelConfig | None = None,
) -> jax.Array | tuple[jax.Array, States]: ...  # fmt: skip
def mlstm_chunkwise(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None,
    n_initial: Array | None = None, m_initial: Array | None = None,
    return_last_states: bool = False, eps: float = 1e-6, chunk_size: int | None = None,
    autocast_kernel_dtype: DTypeLike | None = None, stabilize_correctly: bool = True,
    norm_val: float = 1.0, *, segment_ids: Array | None = None,
    sequence_lengths: Array | None = None, num_segments: int | None = None,
    input_gate: InputGateName = "exp", normalize: bool = True, recompute_states_in_bw: bool = True,
    layout: LayoutName = "BNTH", backend: BackendName | None = None,
    config: KernelConfig | None = None,
) -> jax.Array | tuple[jax.Array, States]:  # fmt: skip
    """The mLSTM of xLSTM, computed in chunks of the sequence.

    For every batch entry and head (arXiv:2405.04517, equations 19 to 27; the
    chunkwise form is that of arXiv:2503.14376)::

      m_t = max(log sigmoid(f_t) + m_{t-1}, i_t)
      d_t = exp(log sigmoid(f_t) + m_{t-1} - m_t)
      C_t = d_t C_{t-1} + exp(i_t - m_t) k_t v_t^T
      n_t = d_t n_{t-1} + exp(i_t - m_t) k_t
      h_t = scale C_t^T q_t
            / (max(|scale n_t . q_t|, norm_val exp(-m_t)) + eps)

    where scale = DHQK ** -0.5: pass q unscaled. The dimensions are::

      B     batch
      S     steps of a sequence, any number from 1
      NH    heads
      DHQK  head dimension of q and k
      DHV   head dimension of v and h
      L     steps of a chunk
      NC    chunks of a sequence, ceil(S / L)

    f_t = -inf resets the state and i_t = -inf stores nothing. Values of -1e6
    and below count as -inf.

    Derivatives are exact, of first order and in reverse mode: jax.grad and
    jax.vjp of h and of the last states, by all float arrays. Forward mode and
    second derivatives raise a TypeError; ``mlstm_pallas.reference.chunkwise``
    has them. jit, vmap, remat, scan and shard_map work. Shards of B and NH
    stay on their devices; ``mlstm_pallas.distributed`` shards S.

    A NaN reaches h of the same batch entry and head only, and no earlier
    step. One in v also reaches earlier steps of its chunk, in its column.

    Example::

      >>> import jax, jax.numpy as jnp
      >>> from mlstm_pallas import mlstm_chunkwise
      >>> B, S, NH, DHQK, DHV = 2, 100, 4, 16, 32
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> q, k = (jax.random.normal(x, (B, S, NH, DHQK)) for x in keys[:2])
      >>> v = jax.random.normal(keys[2], (B, S, NH, DHV))
      >>> i, f = jnp.zeros((B, S, NH)), jnp.full((B, S, NH), 4.0)
      >>> h = mlstm_chunkwise(q, k, v, i, f, layout="BTNH")
      >>> h.shape
      (2, 100, 4, 32)
      >>> h, (c, n, m) = mlstm_chunkwise(
      ...     q, k, v, i, f, return_last_states=True, layout="BTNH"
      ... )
      >>> c.shape, n.shape, m.shape
      ((2, 4, 16, 32), (2, 4, 16), (2, 4))

    Args:
      q: queries, (B, NH, S, DHQK), or (B, S, NH, DHQK) with layout "BTNH".
        bfloat16, float16 or float32; float64 with backend "xla" and
        jax_enable_x64. k and v have the dtype of q, unless
        autocast_kernel_dtype is set.
      k: keys, shaped as q.
      v: values, (B, NH, S, DHV), or (B, S, NH, DHV) with layout "BTNH".
      i: input gate pre-activations, natural log, (B, NH, S), or (B, S, NH)
        with layout "BTNH". Any float dtype; computed with in float32.
      f: forget gate pre-activations, shaped as i; sigmoid is applied here.
      c_initial: state C before the first step, (B, NH, DHQK, DHV), in both
        layouts. None: zeros. Initial states come all three or not at all.
      n_initial: state n before the first step, (B, NH, DHQK).
      m_initial: stabiliser m before the first step, (B, NH). The true states
        are exp(m) C and exp(m) n.
      return_last_states: whether the states after the last step are returned
        as well.
      eps: added to the denominator.
      chunk_size: L, a power of two from 16 up; one beyond S is clamped. h does
        not depend on it. None: the tuned one; without a GPU 64 to 256, by the
        heads and S. The backward pass holds 2 S L elements a head beside the
        states of the chunks.
      autocast_kernel_dtype: dtype of q, k and v in the matrix products,
        float32, bfloat16 or float16. None: that of q. Sums, gates and states
        are float32. In float16, states and tiles beyond 65504 are inf, and so
        is what follows from them.
      stabilize_correctly: False takes norm_val in place of
        norm_val exp(-m_t) as the floor of the denominator.
      norm_val: of the floor of the denominator, at least 0.
      segment_ids: (B, S) integers, for packed segments, in both layouts. A
        step whose id differs from that of the step before starts from zero
        states, exactly for finite inputs (an inf or NaN reaches the later
        segments of its batch entry). Initial states belong to the first
        segment, last states to the last. 64-bit ids are compared as 32 bits
        unless jax_enable_x64 is set.
      sequence_lengths: (B,) integers: batch entry b has its first
        sequence_lengths[b] steps, clipped to 0..S. The last states are those
        after its last step; for length 0 the initial ones. Beyond its length
        h is 0 and gradients are 0, whatever stands there: any gates, NaN
        included, and finite q, k, v and cotangents of h whose products are
        finite, as of values up to 1e10. segment_ids count within the length.
      num_segments: N, at least 1; with segment_ids and return_last_states,
        for generation. The states returned are those at the ends of the first
        N segments of each batch entry, in order of appearance: c
        (B, N, NH, DHQK, DHV), n (B, N, NH, DHQK), m (B, N, NH); zeros, as
        before a first step, for segments that do not occur. Such a call has
        no derivatives. It computes up to L steps a segment again.
      input_gate: "exp", or "sigmoid" (mLSTMsig, arXiv:2503.14376): then
        log sigmoid(i_t) stands for i_t and every m_t is 0. m_initial is then
        None or zeros; a traced one cannot be checked and is not read.
      normalize: False leaves out the denominator: h_t = scale C_t^T q_t. For
        the sigmoid gate only.
      recompute_states_in_bw: False keeps C at the chunk boundaries, NC DHQK
        DHV elements of the kernel dtype a head, from the forward to the
        backward pass, which is then faster. Take it where a layer is
        rematerialised (jax.checkpoint), or where memory is left. n and m of
        every chunk, NC (DHQK + 1) floats a head, are kept in any case. Where
        nothing is differentiated no states are stored.
      layout: "BNTH", or "BTNH" as a model's projections make q, k and v. The
        kernels read and write both as they are.
      backend: None, the default, is ``use_backend``'s, else that of the
        environment variable MLSTM_PALLAS_BACKEND, else "triton" where the
        computation is lowered for an NVIDIA GPU and "xla" elsewhere. The
        fastest are "mosaic_gpu" on Hopper GPUs in 16-bit dtypes, "triton" on
        other NVIDIA GPUs and in float32, and "xla" elsewhere.
        "triton": Triton kernels.
        "mosaic_gpu": on Hopper, 16-bit stages that have a Mosaic GPU kernel
        run it, the others the Triton one (plain jnp where jax has no Triton
        backend). Another GPU or an unfit jax is a ValueError.
        "xla": plain jnp, on any device.
        "interpret", "mosaic_gpu_interpret": the kernels interpreted on a CPU;
        slow, for tests; the former in a shard_map with check_vma=False, the
        latter on one device.
      config: tiles and launch parameters in place of the tuned ones.

    Returns:
      h, shaped as v, in the dtype of q. With return_last_states
      (h, (c, n, m)), the states in float32 and shaped as the initial ones,
      or with N after B where there is num_segments.
      With the sigmoid gate m is zeros and need not be passed back.

    Raises:
      TypeError, ValueError: at trace time, naming the argument, what came and
        what was expected.

    Warns:
      UserWarning: once, where S < NH as layout reads the arrays and neither
        initial states nor segment_ids have that S or NH: the arrays may have
        the other layout.
    """
    options = Options(
        return_last_states=return_last_states,
        eps=eps,
        chunk_size=chunk_size,
        autocast_kernel_dtype=autocast_kernel_dtype,
        stabilize_correctly=stabilize_correctly,
        norm_val=norm_val,
        input_gate=input_gate,
        normalize=normalize,
        recompute_states_in_bw=recompute_states_in_bw,
        layout=layout,
        backend=backend,
        config=config,
        num_segments=num_segments,
    )
    forward = mlstm_forward if num_segments is None else mlstm_with_segments
    arrays = q, k, v, i, f, c_initial, n_initial, m_initial
    return run(forward, segment_starts, options, arrays, segment_ids, sequence_lengths)
