"""mlstm_chunkwise: the chunkwise mLSTM of whole sequences; pack_lengths: its packed prompts."""

from collections.abc import Sequence
from typing import Literal, Unpack, overload

import jax
import numpy as np
from jax.typing import DTypeLike

from mlstm_pallas import validation
from mlstm_pallas.annotations import Array, BackendName, InputGateName, LayoutName, States
from mlstm_pallas.config import KernelConfig
from mlstm_pallas.entry import Keywords, SequenceKeywords, run
from mlstm_pallas.fwbw import mlstm_forward, mlstm_with_segments
from mlstm_pallas.gates import segment_starts
from mlstm_pallas.validation import DEFAULT_LAYOUT, names_arguments


@overload
def mlstm_chunkwise(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None,
    n_initial: Array | None = None, m_initial: Array | None = None, *,
    return_last_states: Literal[False] = False, num_segments: int | None = None,
    **keywords: Unpack[Keywords],
) -> jax.Array: ...  # fmt: skip
@overload
def mlstm_chunkwise(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None,
    n_initial: Array | None = None, m_initial: Array | None = None, *,
    return_last_states: Literal[True], num_segments: int | None = None,
    **keywords: Unpack[Keywords],
) -> tuple[jax.Array, States]: ...  # fmt: skip
@overload
def mlstm_chunkwise(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None,
    n_initial: Array | None, m_initial: Array | None, return_last_states: Literal[True],
    eps: float = 1e-6, chunk_size: int | None = None,
    autocast_kernel_dtype: DTypeLike | None = None, stabilize_correctly: bool = True,
    norm_val: float = 1.0, *, num_segments: int | None = None, **keywords: Unpack[SequenceKeywords],
) -> tuple[jax.Array, States]: ...  # fmt: skip
@overload
def mlstm_chunkwise(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None,
    n_initial: Array | None = None, m_initial: Array | None = None,
    return_last_states: bool = ..., eps: float = 1e-6, chunk_size: int | None = None,
    autocast_kernel_dtype: DTypeLike | None = None, stabilize_correctly: bool = True,
    norm_val: float = 1.0, *, num_segments: int | None = None, **keywords: Unpack[SequenceKeywords],
) -> jax.Array | tuple[jax.Array, States]: ...  # fmt: skip
@names_arguments
def mlstm_chunkwise(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None,
    n_initial: Array | None = None, m_initial: Array | None = None,
    return_last_states: bool = False, eps: float = 1e-6, chunk_size: int | None = None,
    autocast_kernel_dtype: DTypeLike | None = None, stabilize_correctly: bool = True,
    norm_val: float = 1.0, *, segment_ids: Array | None = None,
    sequence_lengths: Array | None = None, num_segments: int | None = None,
    input_gate: InputGateName = "exp", normalize: bool = True, recompute_states_in_bw: bool = True,
    layout: LayoutName = DEFAULT_LAYOUT, backend: BackendName | None = None,
    config: KernelConfig | None = None,
) -> jax.Array | tuple[jax.Array, States]:  # fmt: skip
    """The mLSTM of xLSTM, computed in chunks of the sequence.

    For every batch entry and head (arXiv:2405.04517, equations 19 to 27; the
    chunkwise form is that of arXiv:2503.14376), with scale = DHQK ** -0.5::

      m_t = max(log sigmoid(f_t) + m_{t-1}, i_t)
      d_t = exp(log sigmoid(f_t) + m_{t-1} - m_t)
      C_t = d_t C_{t-1} + exp(i_t - m_t) k_t v_t^T
      n_t = d_t n_{t-1} + exp(i_t - m_t) k_t
      h_t = scale C_t^T q_t
            / (max(|scale n_t . q_t|, norm_val exp(-m_t)) + eps)

    B is the batch, S the steps of a sequence (any number from 1), NH the
    heads, DHQK the head dimension of q and k, DHV that of v and h.
    f_t = -inf resets the state and i_t = -inf stores nothing; values of -1e6
    and below count as -inf. A NaN stays in its batch entry and head.

    Derivatives by all float arrays are exact, of first order, in reverse
    mode. Others raise a TypeError; ``mlstm_pallas.reference.chunkwise`` has
    them. jit, vmap, remat, scan and shard_map work. Shards of B and NH stay
    on their devices; ``mlstm_pallas.distributed`` shards S. What holds at the
    edges is in docs/arguments.md of the repository.

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
      q: queries, unscaled, (B, NH, S, DHQK), or (B, S, NH, DHQK) with layout
        "BTNH", in bfloat16, float16 or float32; in float64 with backend "xla".
      k: keys, shaped as q. k and v have its dtype, unless
        autocast_kernel_dtype is set.
      v: values, (B, NH, S, DHV) or (B, S, NH, DHV).
      i: input gate pre-activations, natural log, (B, NH, S) or (B, S, NH), of
        any float dtype; computed with in float32.
      f: forget gate pre-activations, shaped as i; sigmoid is applied here.
      c_initial: state C before the first step, (B, NH, DHQK, DHV). None:
        zeros. Initial states come all three or not at all.
      n_initial: state n before the first step, (B, NH, DHQK).
      m_initial: stabiliser m before the first step, (B, NH). The true states
        are exp(m) C and exp(m) n.
      return_last_states: whether to return the states after the last step.
      eps: added to the denominator; 0 or a normal number of float32, as
        norm_val.
      chunk_size: steps of a chunk, a power of two from 16 up; None: by rule.
      autocast_kernel_dtype: of q, k, v in matrix products. None: that of q.
      stabilize_correctly: False: norm_val is the floor of the denominator.
      norm_val: of the floor of the denominator, at least 0.
      segment_ids: (B, S) integers, for packed segments. A step whose id
        differs from that of the step before starts from zero states. Initial
        states belong to the first segment, last states to the last.
      sequence_lengths: (B,) integers, clipped to 0..S, for padded batches. The
        last states are those after sequence_lengths[b] steps. Beyond them h
        and all gradients are 0, whatever gates, NaN included, and finite
        values up to 1e10 stand there.
      num_segments: N, with segment_ids and return_last_states. The states
        returned are those at the ends of the first N segments of each batch
        entry, (B, N, NH, ...), zeros for segments that do not occur. Such a
        call has no derivatives.
      input_gate: "exp", or "sigmoid" (mLSTMsig, arXiv:2503.14376): then
        log sigmoid(i_t) stands for i_t, m_t is 0, m_initial None or zeros.
      normalize: False leaves out the denominator; with the sigmoid gate only.
      recompute_states_in_bw: False keeps C at the chunk boundaries for the
        backward pass, which is then faster. Take it where a layer is
        rematerialised (jax.checkpoint), or where memory is left.
      layout: "BNTH", or "BTNH" as a model's projections make q, k and v.
      backend: "triton", "mosaic_gpu", "xla" or one for tests: ``use_backend``
        has the list. None: Triton on an NVIDIA GPU and plain jnp elsewhere,
        unless use_backend or MLSTM_PALLAS_BACKEND names one.
      config: overrides of the plan, which mlstm_pallas.plan shows.

    Returns:
      h, shaped as v, in the dtype of q; with return_last_states
      (h, (c, n, m)), the states in float32 and shaped as the initial ones.

    Raises:
      TypeError, ValueError: at trace time, naming the argument, what came and
        what was expected.

    Warns:
      UserWarning: once, where layout is left out and S < NH: the arrays
        may be "BTNH". Initial states and segment_ids tell.
    """
    forward = mlstm_forward if num_segments is None else mlstm_with_segments
    return run(forward, segment_starts, locals())


def pack_lengths(
    lengths: Sequence[int] | Sequence[Sequence[int]] | Array, S: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Where prompts are that are packed into rows, one after the other.

    Prompt n of row b has steps ends[b, n] - lengths[b][n] to ends[b, n] - 1.
    h of its last token and its last states, to generate from::

      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> from mlstm_pallas import mlstm_chunkwise, pack_lengths
      >>> segment_ids, ends = pack_lengths([[3, 5], [6]], S=10)
      >>> segment_ids
      array([[0, 0, 0, 1, 1, 1, 1, 1, 2, 2],
             [0, 0, 0, 0, 0, 0, 2, 2, 2, 2]], dtype=int32)
      >>> ends
      array([[3, 8],
             [6, 6]], dtype=int32)
      >>> q = k = v = jnp.ones((2, 10, 4, 16))  # B, S, NH, DHQK
      >>> i, f = jnp.zeros((2, 10, 4)), jnp.ones((2, 10, 4))
      >>> h, (c, n, m) = mlstm_chunkwise(
      ...     q, k, v, i, f, return_last_states=True, layout="BTNH",
      ...     segment_ids=segment_ids, num_segments=ends.shape[1],
      ...     sequence_lengths=ends[:, -1],  # h is 0 beyond the prompts
      ... )
      >>> h_last = h[np.arange(2)[:, None], ends - 1]
      >>> h_last.shape, c.shape, m.shape  # (B, N, NH, ...)
      ((2, 2, 4, 16), (2, 2, 4, 16, 16), (2, 2, 4))

    c[1, 1] is zeros here, as row 1 has one prompt, and h_last[1, 1] is
    h_last[1, 0] again.

    Args:
      lengths: steps of each prompt, at least 1: those of one row, (N,), or of
        each of B rows, as lists or (B, N) with zeros behind the last prompt.
      S: steps of a row. None: those of the longest row.

    Returns:
      segment_ids (B, S), n at the steps of prompt n and N behind the last one,
      and ends (B, N), the steps up to the end of each prompt, which stay the
      same behind the last one; NumPy arrays, int32.

    Raises:
      TypeError, ValueError: naming the argument and what was expected.
    """
    rows = validation.check_lengths(lengths)
    sizes = np.zeros((len(rows), max(map(len, rows))), int)
    for b, row in enumerate(rows):
        sizes[b, : len(row)] = row
    ends = np.cumsum(sizes, axis=1)
    longest = int(ends.max())
    steps = np.arange(longest if S is None else validation.check_integer("S", S, longest))
    segment_ids = [np.searchsorted(row, steps, side="right") for row in ends]
    return np.asarray(segment_ids, np.int32), ends.astype(np.int32)
