"""mlstm_recurrent_step: the mLSTM token by token, as in generation."""

import functools

import jax
import jax.numpy as jnp

from mlstm_pallas.planning.call_spec import CallSpec
from mlstm_pallas.planning.config import KernelConfig
from mlstm_pallas.planning.options import Options
from mlstm_pallas.prepare import Arguments, constants, in_parts, prepare_steps
from mlstm_pallas.problem.annotations import Array, BackendName, InputGateName, StatesTuple
from mlstm_pallas.problem.arrays import States
from mlstm_pallas.problem.dimensions import accumulator_dtype
from mlstm_pallas.sharding.axes import sharded_alike
from mlstm_pallas.sharding.on_shards import run_step
from mlstm_pallas.stages.recurrent_step import Operands


# One program also where the caller does not jit: no array is transferred for it.
@functools.partial(jax.jit, static_argnums=0)
def _mlstm(spec: CallSpec, x: Arguments) -> tuple[jax.Array, StatesTuple]:
    p, acc = spec.problem, accumulator_dtype(x.q.dtype)
    c, n, m = x.initial
    if c is None:
        c, n = jnp.zeros((p.B, p.NH, p.DHQK, p.DHV), acc), jnp.zeros((p.B, p.NH, p.DHQK), acc)
    if m is None:
        m = jnp.zeros(c.shape[:2], acc)
    operands = sharded_alike(spec, Operands(x.steps, States(c, n, m), x.slots))
    m = operands.states.m
    if not spec.stabilised:  # the sigmoid gate has no m
        operands = operands._replace(states=operands.states._replace(m=None))
    h, (c, n, m_after) = run_step(spec, operands)
    return h, (c, n, m if m_after is None else m_after)


def mlstm_recurrent_step(
    q: Array, k: Array | None, v: Array | None, i: Array, f: Array | None,
    c_initial: Array | None = None, n_initial: Array | None = None,
    m_initial: Array | None = None, *, eps: float = 1e-6, norm_val: float = 1.0,
    stabilize_correctly: bool = True, input_gate: InputGateName = "exp", normalize: bool = True,
    slots: Array | None = None, backend: BackendName | None = None,
    config: KernelConfig | None = None,
) -> tuple[jax.Array, StatesTuple]:  # fmt: skip
    """Advances the mLSTM of xLSTM by one token, for generation.

    It returns h of the token and always the states after it, for every batch
    entry and head (arXiv:2405.04517, equations 19 to 27); there is no axis of
    steps and no layout. With s = DHQK ** -0.5:

    .. math::

      m' = max(log sigmoid(f) + m, i)
      C' = exp(log sigmoid(f) + m - m') C + exp(i - m') k v^T
      n' = exp(log sigmoid(f) + m - m') n + exp(i - m') k
      h = s C'^T q / (max(|s n' . q|, norm_val exp(-m')) + eps)

    The dimensions are::

      B     batch
      NH    heads
      DHQK  head dimension of q and k
      DHV   head dimension of v and h

    f = -inf resets the state, also one that is NaN or inf, and i = -inf stores
    nothing. Values of -1e6 and below count as -inf. The arithmetic is float32.

    The kernel reads and writes every state once. It updates c, n and m in place
    if the caller does not use them afterwards: in a jitted loop, or if they are
    donated to jax.jit (donate_argnums). Otherwise they are copied first.
    In a loop with few other operations, a CUDA graph
    (XLA_FLAGS=--xla_gpu_graph_min_graph_size=1) takes half the time at B = 1.

    States in bfloat16 have half the bytes: on an H200, with 8 heads of 256/512,
    a step at B = 128 takes 53 % of its time with float32 states. Each
    state has its own dtype: cast c alone, and keep n and m, 1 / DHV of the
    bytes, in float32. c is rounded at every step, and the errors add up over
    the memory of the forget gate: for heads of 64/128 after 8192 steps with f
    near 0, 4, 6 and 10, h is off by 1.9e-3, 7.8e-3, 1.9e-2 and 7.5e-2.

    A model that computes q, k and v in one product can pass them joined, which
    avoids copies of slices: q is (B, NH, 2 DHQK + DHV) or wider, with q, k, v
    and then anything else on its last axis; i is (B, NH, 2), with i and f; k, v
    and f are None; and the states are passed.

    A server that keeps the states of its requests in pools of P rows passes the
    pools as states and ``slots``, the row of each batch entry. The pools are
    returned whole and updated in place, as states are; nothing is gathered.
    Heads of pools may be sharded; shards of B and P are gathered first, and in
    shard_map slots are rows of the shard's pools. vmap joins its axis to the
    batch, in one launch; with ``slots`` elements run one after the other.

    The kernels have no derivatives; backend "xla" has them, of every order.

    Example::

      >>> import jax.numpy as jnp
      >>> from mlstm_pallas import mlstm_recurrent_step
      >>> B, NH, DHQK, DHV = 2, 4, 16, 32
      >>> q, k, v = (jnp.ones((B, NH, D)) for D in (DHQK, DHQK, DHV))
      >>> i, f = jnp.zeros((B, NH)), jnp.full((B, NH), 4.0)
      >>> h, states = mlstm_recurrent_step(q, k, v, i, f)
      >>> h, (c, n, m) = mlstm_recurrent_step(q, k, v, i, f, *states)
      >>> h.shape, c.shape, n.shape, m.shape
      ((2, 4, 32), (2, 4, 16, 32), (2, 4, 16), (2, 4))

    Args:
      q: unscaled query, (B, NH, DHQK), bfloat16, float16 or float32; float64
        with backend "xla" and jax_enable_x64.
      k: key, shaped as q, in its dtype. None: q and i are joined, see above.
      v: value, (B, NH, DHV), in the dtype of q.
      i: input gate pre-activation, natural log, (B, NH), any float dtype.
      f: forget gate pre-activation, (B, NH); sigmoid is applied here.
      c_initial: state C before the token, (B, NH, DHQK, DHV), float32, bfloat16
        or float16 (float64 with backend "xla"), as ``mlstm_chunkwise`` and this
        function return it. None: zeros, in float32. Pass all three states or
        none.
      n_initial: state n before the token, (B, NH, DHQK).
      m_initial: stabiliser m before the token, (B, NH). The true states are
        exp(m) C and exp(m) n.
      eps: added to the denominator.
      norm_val: factor in the floor of the denominator, at least 0.
      stabilize_correctly: False: norm_val is the floor, not norm_val exp(-m').
      input_gate: "exp", or "sigmoid" (mLSTMsig, arXiv:2503.14376), where
        sigmoid(i) replaces exp(i - m'), sigmoid(f) is the decay and the floor
        is norm_val. m_initial is None or zeros, and is returned unchanged.
      normalize: False leaves out the denominator: h = s C'^T q. For the
        sigmoid gate only.
      slots: (B,) integers, read as 32 bits: entry b reads and writes row
        slots[b] of pools of states, (P, NH, ...). An entry of slot -1 changes
        no row, and its h is 0. Other slots are below P and differ.
      backend: "triton" (GPU kernel), "xla" (plain jnp, with derivatives) or
        "interpret" (the kernel interpreted on a CPU; slow, for tests). A step
        has no Mosaic GPU kernel: "mosaic_gpu" runs the Triton kernel, or plain
        jnp if jax has no Triton backend. "fastest": "triton" on an NVIDIA GPU
        and "xla" elsewhere, without derivatives. None, the default: the backend
        of ``use_backend``, else of the environment variable
        MLSTM_PALLAS_BACKEND, else "fastest".
      config: overrides of the tiles of recurrent_step.

    Returns:
      h (B, NH, DHV) in the dtype of q, and the states (c, n, m) after the
      token, in the dtypes and shapes of the states before it.

    Raises:
      TypeError: as ``mlstm_chunkwise``, and for derivatives of kernels.
      ValueError: as ``mlstm_chunkwise``; the values of slots are read too.
    """
    options = Options(
        eps=eps, stabilize_correctly=stabilize_correctly, norm_val=norm_val,
        input_gate=input_gate, normalize=normalize, backend=backend, config=config,
    )  # fmt: skip
    x = Arguments(q, k, v, i, f, c_initial, n_initial, m_initial, slots=slots)
    spec = prepare_steps("recurrent_step", in_parts(x._asdict()), options, steps=False)
    return _mlstm(spec, constants(x))
