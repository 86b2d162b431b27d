"""mlstm_chunkwise: validate, cast, pad, choose backend and config, run."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mlstm_pallas import problem as problems
from mlstm_pallas.backend import requested_backend, target_device_kind
from mlstm_pallas.config import KernelConfig, config_for
from mlstm_pallas.fwbw import NO_SUCH_DERIVATIVE, mlstm_forward
from mlstm_pallas.plan import Inputs, Outputs, Plan
from mlstm_pallas.reference import segment_starts
from mlstm_pallas.sharding import aligned
from mlstm_pallas.shared_memory import check_fits


def _pad(x: jax.Array, sizes: dict[int, int], value: float = 0) -> jax.Array:
    """Fills axis a up to sizes[a]."""
    widths = [(0, sizes.get(axis, size) - size) for axis, size in enumerate(x.shape)]
    return jnp.pad(x, widths, constant_values=value) if any(high for _, high in widths) else x


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
      q, k: (B, NH, S, DHQK); v: (B, NH, S, DHV); one dtype: bfloat16, float32, float16 with an
        autocast_kernel_dtype, float64 with backend "xla".
      i, f: input and forget gate pre-activations (B, NH, S), natural log; computed with in float32.
      c_initial, n_initial, m_initial: initial states (B, NH, DHQK, DHV), (B, NH, DHQK), (B, NH); all three, or none for zeros.
        With the sigmoid gate m_initial is None always.
      return_last_states: whether to return the states after the last step as well.
      eps: added to the denominator.
      chunk_size: L, a power of two >= 16; one beyond S is shortened. None: the tuned one. The kernels' backward pass with states in memory
        holds 2 S L elements a head beside them.
      autocast_kernel_dtype: dtype of q, k, v in the matrix products, "float32" or "bfloat16" (sums are float32 always). None: that of q.
      stabilize_correctly: False takes norm_val instead of norm_val exp(-m_t) as the floor of the denominator.
      norm_val: see above.
      segment_ids: (B, S) integers, for sequences packed in a row: a step whose id differs from that of the step before starts from
        zero states, exactly, for finite inputs (an inf or NaN reaches the later sequences of its row). Initial states belong to the
        first sequence, last states to the last. 64-bit ids are compared as 32 bits unless jax_enable_x64 is set.
      input_gate: "exp" or "sigmoid".
      normalize: False leaves out the denominator: h_t = scale C_t^T q_t. For the sigmoid gate only.
      recompute_states_in_bw: False keeps the chunk-border states for the backward pass, NC DHQK DHV elements of the kernel dtype a head:
        less to compute than with them recomputed, and the backward pass is one with states in memory
        (``KernelConfig.stateless_backward``). Where nothing is differentiated no states are stored.
      backend: "triton" (GPU kernels), "interpret" (the same kernels interpreted: slow, for tests; in a shard_map with check_vma=False),
        "xla" (plain jnp).
        None: triton where the computation is lowered for an NVIDIA GPU, else xla.
      config: tiles and launch parameters in place of the tuned ones.

    Returns:
      h (B, NH, S, DHV) in the dtype of q; with return_last_states (h, (c, n, m)), the states in float32, shaped as the initial ones;
      m is zeros with the sigmoid gate, which takes c and n alone back.

    Raises:
      TypeError, ValueError: at trace time, naming the argument, what came and what was expected.
    """
    return run(
        mlstm_forward,
        segment_starts,
        *(q, k, v, i, f, c_initial, n_initial, m_initial),
        return_last_states=return_last_states,
        eps=eps,
        chunk_size=chunk_size,
        autocast_kernel_dtype=autocast_kernel_dtype,
        stabilize_correctly=stabilize_correctly,
        norm_val=norm_val,
        segment_ids=segment_ids,
        input_gate=input_gate,
        normalize=normalize,
        recompute_states_in_bw=recompute_states_in_bw,
        backend=backend,
        config=config,
    )


def run(
    forward: Callable[[Plan, Inputs], Outputs],
    starts_of: Callable[[jax.Array], jax.Array],
    q,
    k,
    v,
    i,
    f,
    c_initial,
    n_initial,
    m_initial,
    *,
    return_last_states,
    eps,
    chunk_size,
    autocast_kernel_dtype,
    stabilize_correctly,
    norm_val,
    segment_ids,
    input_gate,
    normalize,
    recompute_states_in_bw,
    backend,
    config,
):
    """``mlstm_chunkwise`` by a forward function of its own; starts_of: ids (B, NH, S) to where sequences begin."""
    gate, normalize = problems.check_input_gate(input_gate, normalize)
    problems.check_arrays(q, k, v, i, f, c_initial, n_initial, m_initial, gate)
    problems.check_segment_ids(segment_ids, q.shape)
    return_last_states = problems.check_flag("return_last_states", return_last_states)
    stabilize_correctly = problems.check_flag("stabilize_correctly", stabilize_correctly)
    recompute_states_in_bw = problems.check_flag("recompute_states_in_bw", recompute_states_in_bw)
    problems.check_scalars(eps, norm_val)
    chunk_size = problems.check_chunk_size(chunk_size)
    problems.check_backend(backend)
    backend = requested_backend(backend)
    if config is not None and not isinstance(config, KernelConfig):
        raise TypeError(f"config is a {type(config).__name__}, expected a KernelConfig or None")
    dtype = problems.kernel_dtype(autocast_kernel_dtype, q.dtype, backend)

    B, NH, S, DHQK = q.shape
    DHV = v.shape[-1]
    if B * NH == 0:
        backend = "xla"  # a kernel has no empty grid
    device_kind = target_device_kind()
    filled = config_for(DHQK, DHV, S, dtype, device_kind=device_kind, chunk_size=chunk_size, explicit=config)
    p = problems.make_problem(q.shape, DHV, filled.L, pad_heads=backend != "xla")
    if backend in ("triton", None):
        check_fits(filled, p, dtype, device_kind, recompute_states_in_bw)
    plan = Plan(
        *(p, filled, float(eps), stabilize_correctly, float(norm_val), recompute_states_in_bw, backend, gate, normalize),
        starts_empty=c_initial is None,
        last_states=return_last_states,
    )

    acc = jnp.promote_types(dtype, jnp.float32)
    if c_initial is None or n_initial is None:
        c_initial, n_initial = jnp.zeros((B, NH, DHQK, DHV), acc), jnp.zeros((B, NH, DHQK), acc)
    if m_initial is None:
        m_initial = jnp.zeros((B, NH), acc)
    arrays = [q, k, v, i, f, c_initial, n_initial, m_initial]
    if segment_ids is not None:
        arrays.append(jnp.broadcast_to(segment_ids[:, None], (B, NH, S)))
    q, k, v, i, f, c_initial, n_initial, m_initial, *ids = aligned(*arrays)
    rows, qk, hv = {2: p.S}, {3: p.DHQK}, {3: p.DHHV}
    inputs = Inputs(
        _pad(q.astype(dtype), rows | qk),
        _pad(k.astype(dtype), rows | qk),
        _pad(v.astype(dtype), rows | hv),
        _pad(i.astype(acc), rows, -jnp.inf),
        _pad(f.astype(acc), rows, jnp.inf),
        _pad(c_initial.astype(acc), {2: p.DHQK} | hv),
        _pad(n_initial.astype(acc), {2: p.DHQK}),
        m_initial.astype(acc),
        _pad(starts_of(ids[0]).astype(jnp.int32), rows) if ids else None,
    )
    try:
        h, last = forward(plan, inputs)
    except TypeError as error:
        if "forward-mode" in str(error):  # what jax says of every custom_vjp
            raise TypeError(NO_SUCH_DERIVATIVE) from error
        raise
    h = h[:, :, :S, :DHV].astype(q.dtype)
    if last is None or not return_last_states:
        return h
    c, n, m = last
    return h, (c[:, :, :DHQK, :DHV], n[:, :, :DHQK], m)
