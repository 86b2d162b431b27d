"""mlstm_chunkwise: validate, cast, pad, choose backend and config, run."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mlstm_pallas import problem as problems
from mlstm_pallas.backend import requested_backend, target_device_kind
from mlstm_pallas.config import KernelConfig, config_for
from mlstm_pallas.fwbw import NO_SUCH_DERIVATIVE, Inputs, Outputs, Plan, mlstm_forward
from mlstm_pallas.sharding import aligned


def _pad(x: jax.Array, sizes: dict[int, int], value: float = 0.0) -> jax.Array:
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
    recompute_states_in_bw: bool = True,
    backend: str | None = None,
    config: KernelConfig | None = None,
    _forward: Callable[[Plan, Inputs], Outputs] = mlstm_forward,  # distributed.py has another
) -> jax.Array | tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """The mLSTM of xLSTM in its chunkwise-parallel form (arXiv:2405.04517, equations 19 to 27; arXiv:2503.14376).

        m_t = max(log sigmoid(f_t) + m_{t-1}, i_t)
        C_t = exp(log sigmoid(f_t) + m_{t-1} - m_t) C_{t-1} + exp(i_t - m_t) k_t v_t^T        (n_t alike, with k_t)
        h_t = scale C_t^T q_t / (max(|scale q_t . n_t|, norm_val exp(-m_t)) + eps)             scale = DHQK ** -0.5

    f = -inf resets the state, i = -inf stores nothing; values of -1e6 and below count as -inf. Works under jit, grad, vmap, remat, scan.

    Args:
      q, k: (B, NH, S, DHQK); v: (B, NH, S, DHV); one dtype: bfloat16, float32, float16 with an
        autocast_kernel_dtype, float64 with backend "xla".
      i, f: input and forget gate pre-activations (B, NH, S), natural log; computed with in float32.
      c_initial, n_initial, m_initial: initial states (B, NH, DHQK, DHV), (B, NH, DHQK), (B, NH); all three, or none for zeros.
      return_last_states: whether to return the states after the last step as well.
      eps: added to the denominator.
      chunk_size: L, a power of two >= 16; one beyond S is shortened. None: the tuned one.
      autocast_kernel_dtype: dtype of q, k, v in the matrix products, "float32" or "bfloat16" (sums are float32 always). None: that of q.
      stabilize_correctly: False takes norm_val instead of norm_val exp(-m_t) as the floor of the denominator.
      norm_val: see above.
      recompute_states_in_bw: False keeps the chunk-border states for the backward pass: faster, at NC DHQK DHV elements a head.
      backend: "triton" (GPU kernels), "interpret" (the same kernels interpreted: slow, for tests), "xla" (plain jnp).
        None: triton where the computation is lowered for an NVIDIA GPU, else xla.
      config: tiles and launch parameters in place of the tuned ones.

    Returns:
      h (B, NH, S, DHV) in the dtype of q; with return_last_states (h, (c, n, m)), the states in float32, shaped as the initial ones.

    Raises:
      TypeError, ValueError: at trace time, naming the argument, what came and what was expected.
    """
    problems.check_arrays(q, k, v, i, f, c_initial, n_initial, m_initial)
    problems.check_flag("return_last_states", return_last_states)
    problems.check_flag("stabilize_correctly", stabilize_correctly)
    problems.check_flag("recompute_states_in_bw", recompute_states_in_bw)
    problems.check_scalars(eps, norm_val)
    problems.check_chunk_size(chunk_size)
    problems.check_backend(backend)
    backend = requested_backend(backend)
    if config is not None and not isinstance(config, KernelConfig):
        raise TypeError(f"config is a {type(config).__name__}, expected a KernelConfig or None")
    dtype = problems.kernel_dtype(autocast_kernel_dtype, q.dtype, backend)

    B, NH, S, DHQK = q.shape
    DHV = v.shape[-1]
    if B * NH == 0:
        backend = "xla"  # a kernel has no empty grid
    filled = config_for(DHQK, DHV, S, dtype, device_kind=target_device_kind(), chunk_size=chunk_size, explicit=config)
    p = problems.make_problem(q.shape, DHV, filled.L, pad_heads=backend != "xla")
    plan = Plan(p, filled, float(eps), stabilize_correctly, float(norm_val), recompute_states_in_bw, backend)

    acc = jnp.promote_types(dtype, jnp.float32)
    if c_initial is None or n_initial is None or m_initial is None:
        c_initial, n_initial, m_initial = (jnp.zeros(shape, acc) for shape in ((B, NH, DHQK, DHV), (B, NH, DHQK), (B, NH)))
    q, k, v, i, f, c_initial, n_initial, m_initial = aligned(q, k, v, i, f, c_initial, n_initial, m_initial)
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
    )
    try:
        h, (c, n, m) = _forward(plan, inputs)
    except TypeError as error:
        if "forward-mode" in str(error):  # what jax says of every custom_vjp
            raise TypeError(NO_SUCH_DERIVATIVE) from error
        raise
    h = h[:, :, :S, :DHV].astype(q.dtype)
    if not return_last_states:
        return h
    return h, (c[:, :, :DHQK, :DHV], n[:, :, :DHQK], m)
