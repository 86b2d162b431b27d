"""mlstm_chunkwise."""

from typing import Any

import jax

from mlstm_pallas.config import KernelConfig
from mlstm_pallas.entry import Options, run
from mlstm_pallas.fwbw import mlstm_forward
from mlstm_pallas.gates import segment_starts


def mlstm_chunkwise(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    i: jax.Array,
    f: jax.Array,
    c_initial: jax.Array | None = None,
    n_initial: jax.Array | None = None,
    m_initial: jax.Array | None = None,
    return_last_states: bool = False,
    eps: float = 1e-6,
    chunk_size: int | None = None,
    autocast_kernel_dtype: Any = None,
    stabilize_correctly: bool = True,
    norm_val: float = 1.0,
    *,
    segment_ids: jax.Array | None = None,
    input_gate: str = "exp",
    normalize: bool = True,
    recompute_states_in_bw: bool = True,
    layout: str = "BNTH",
    backend: str | None = None,
    config: KernelConfig | None = None,
) -> jax.Array | tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """The mLSTM of xLSTM in its chunkwise-parallel form (arXiv:2405.04517, equations 19 to 27; arXiv:2503.14376).

        m_t = max(log sigmoid(f_t) + m_{t-1}, i_t)
        C_t = exp(log sigmoid(f_t) + m_{t-1} - m_t) C_{t-1} + exp(i_t - m_t) k_t v_t^T        (n_t alike, with k_t)
        h_t = scale C_t^T q_t / (max(|scale q_t . n_t|, norm_val exp(-m_t)) + eps)             scale = DHQK ** -0.5

    f = -inf resets the state, i = -inf stores nothing; values of -1e6 and below count as -inf. Works under jit, grad, vmap, remat, scan,
    shard_map; shards of B and NH stay on their devices. A NaN reaches h of its own batch element and head only, and no step before its
    own; one in v reaches earlier steps too, those of its chunk, in its own column.

    With input_gate="sigmoid" (mLSTMsig, arXiv:2503.14376) log sigmoid(i_t) stands for i_t and m_t is 0: no stabiliser is needed.

    Args:
      q, k: (B, NH, S, DHQK); v: (B, NH, S, DHV); one dtype: bfloat16, float16, float32, or float64 with backend "xla".
      i, f: input and forget gate pre-activations (B, NH, S), natural log; computed with in float32.
      c_initial, n_initial, m_initial: initial states (B, NH, DHQK, DHV), (B, NH, DHQK), (B, NH); all three, or none for zeros.
        With the sigmoid gate m_initial is None always.
      return_last_states: whether to return the states after the last step as well.
      eps: added to the denominator.
      chunk_size: L, a power of two >= 16; one beyond S is clamped. None: the tuned one; without a GPU 64 to 256, by the heads and S. The
        backward pass holds 2 S L elements a head beside the states of the chunks.
      autocast_kernel_dtype: dtype of q, k, v in the matrix products, "float32", "bfloat16" or "float16" (sums are float32 always). None:
        that of q. In float16, states and tiles beyond 65504 are inf, and so is what follows from them.
      stabilize_correctly: False takes norm_val instead of norm_val exp(-m_t) as the floor of the denominator.
      norm_val: see above.
      segment_ids: (B, S) integers, for packed segments: a step whose id differs from that of the step before starts from zero states,
        exactly, for finite inputs (an inf or NaN reaches the later segments of its batch entry). Initial states belong to the first
        segment, last states to the last. 64-bit ids are compared as 32 bits unless jax_enable_x64 is set.
      input_gate: "exp" or "sigmoid".
      normalize: False leaves out the denominator: h_t = scale C_t^T q_t. For the sigmoid gate only.
      recompute_states_in_bw: False keeps the states at the chunk boundaries for the backward pass, NC DHQK DHV elements of the kernel
        dtype a head, which then has less to compute. n and m of every chunk, NC (DHQK + 1) floats a head, are kept in any case. Where
        nothing is differentiated no states are stored.
      layout: "BNTH", or "BTNH": q, k (B, S, NH, DHQK), v and h (B, S, NH, DHV), i and f (B, S, NH), as a model's projections make them;
        the kernels read and write these as they are. States and segment_ids have the same shapes with both.
      backend: "triton" (GPU kernels), "interpret" (the same kernels interpreted: slow, for tests; in a shard_map with check_vma=False),
        "xla" (plain jnp).
        "mosaic_gpu": on a Hopper GPU, with jax >= 0.11.2 and < 0.12, 16-bit stages that have a Mosaic GPU kernel run it, the others the
        Triton one (plain jnp where jax has no Triton backend).
        "mosaic_gpu_interpret": the same kernels interpreted on a CPU (slow, for tests; on one device).
        None: triton where the computation is lowered for an NVIDIA GPU, else xla.
      config: tiles and launch parameters in place of the tuned ones.

    Returns:
      h (B, NH, S, DHV) in the dtype of q; with return_last_states (h, (c, n, m)), the states in float32, shaped as the initial ones. The
      true states are exp(m) (c, n), with the m that is returned. With the sigmoid gate m is zeros, and c and n alone are taken back.

    Raises:
      TypeError, ValueError: at trace time, naming the argument, what came and what was expected.
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
    )
    return run(mlstm_forward, segment_starts, options, (q, k, v, i, f, c_initial, n_initial, m_initial), segment_ids)
