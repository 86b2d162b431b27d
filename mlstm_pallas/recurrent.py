"""mlstm_recurrent_step, mlstm_recurrent_sequence: the mLSTM token by token, as in generation."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas.planning.call_spec import CallSpec
from mlstm_pallas.planning.config import KernelConfig
from mlstm_pallas.planning.options import Options
from mlstm_pallas.prepare import Arguments, constants, in_parts, per_head, prepare_steps
from mlstm_pallas.problem import validation
from mlstm_pallas.problem.annotations import (
    Array,
    BackendName,
    InputGateName,
    LayoutName,
    StatesTuple,
)
from mlstm_pallas.problem.arrays import States, Token
from mlstm_pallas.problem.callers import warn_caller
from mlstm_pallas.problem.dimensions import Layout, accumulator_dtype
from mlstm_pallas.problem.steps import Steps
from mlstm_pallas.schedules.sharding import run_step, sharded_alike
from mlstm_pallas.stages.recurrent_step import Operands


def _sequence(
    spec: CallSpec, x: Operands, lengths: jax.Array | None, return_all: bool
) -> tuple[jax.Array, States]:
    """h (B, NH, S, DHV) and the last states, or those after each token, (B, S, NH, ...).

    x: of a token, with an axis S behind NH; lengths: (B, NH), beyond which states stay and h is 0;
    None: all tokens count.
    """
    tokens, within = x.token, Steps(lengths).that_count(x.token.i.shape[2])
    if within is not None:
        q, k, v, i, f = tokens
        q, k, v = (jnp.where(within[..., None], y, 0) for y in (q, k, v))  # 0 times NaN is NaN
        tokens = Token(q, k, v, jnp.where(within, i, -jnp.inf), jnp.where(within, f, jnp.inf))

    def one(states: States, token: Token) -> tuple[States, Any]:
        h, after = run_step(spec, Operands(token, states, x.slots))
        return after, (h, after if return_all else None)

    tokens = jax.tree.map(lambda y: jnp.moveaxis(y, 2, 0), tokens)
    last, (h, every) = lax.scan(one, x.states, tokens)
    h = jnp.moveaxis(h, 0, 2)
    if within is not None:
        h = jnp.where(within[..., None], h, 0)
    return h, jax.tree.map(lambda y: jnp.moveaxis(y, 0, 1), every) if return_all else last


# One program also where the caller does not jit: no array is transferred for it.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _mlstm(
    spec: CallSpec, layout: Layout | None, return_all: bool, x: Arguments
) -> tuple[jax.Array, StatesTuple]:
    """h and the last states, or those after each token; layout: of x, None: x is one token."""

    def heads_first(y: jax.Array) -> jax.Array:
        return jnp.swapaxes(y, 1, 2) if layout is Layout.BTNH else y

    p, acc = spec.problem, accumulator_dtype(x.q.dtype)
    (c, n, m), lengths = x.initial, per_head(x.sequence_lengths, (p.B, p.NH))
    if c is None:
        c, n = jnp.zeros((p.B, p.NH, p.DHQK, p.DHV), acc), jnp.zeros((p.B, p.NH, p.DHQK), acc)
    if m is None:
        m = jnp.zeros(c.shape[:2], acc)
    operands = Operands(jax.tree.map(heads_first, x.steps), States(c, n, m), x.slots)
    operands, lengths = sharded_alike(spec, (operands, lengths))
    m = operands.states.m
    if not spec.stabilised:
        operands = operands._replace(states=operands.states._replace(m=None))
    if layout is None:
        h, after = run_step(spec, operands)
    else:
        h, after = _sequence(spec, operands, lengths, return_all)
    c, n, m_after = after
    if m_after is None:  # the sigmoid gate has no m
        m_after = jnp.broadcast_to(m[:, None], n.shape[:-1]) if return_all else m
    return heads_first(h), (c, n, m_after)


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
    return _mlstm(spec, None, False, constants(x))


def mlstm_recurrent_sequence(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None,
    n_initial: Array | None = None, m_initial: Array | None = None, *, eps: float = 1e-6,
    norm_val: float = 1.0, stabilize_correctly: bool = True, input_gate: InputGateName = "exp",
    normalize: bool = True, sequence_lengths: Array | None = None,
    return_all_states: bool = False, slots: Array | None = None,
    layout: LayoutName = validation.DEFAULT_LAYOUT, backend: BackendName | None = None,
    config: KernelConfig | None = None,
) -> tuple[jax.Array, StatesTuple]:  # fmt: skip
    """Advances the mLSTM by a few tokens, one after the other. Deprecated.

    ``mlstm_ring_step`` checks drafts in one call and takes them back to the
    bit, ``mlstm_chunkwise`` reads short prompts, with sequence_lengths too, and
    ``jax.lax.scan`` over ``mlstm_recurrent_step`` is this loop.

    Args:
      q: queries, (B, NH, S, DHQK), or (B, S, NH, DHQK) with layout "BTNH".
      k: keys, shaped as q.
      v: values, (B, NH, S, DHV), or (B, S, NH, DHV) with layout "BTNH".
      i: input gate pre-activations, (B, NH, S), or (B, S, NH) with "BTNH".
      f: forget gate pre-activations, shaped as i.
      sequence_lengths: (B,) integers, 0 to S: entry b advances by its first
        tokens. Beyond them h is 0 and the states stay as they are, to the
        bit, whatever the arrays hold there. None: all S tokens.
      return_all_states: whether the states returned are those after each token;
        not with slots, where rows of the pools can be passed as states.
      layout: "BNTH" or "BTNH", of q, k, v, i, f and h. The states have the
        same shapes in both.
      c_initial, n_initial, m_initial, eps, norm_val: as for
        ``mlstm_recurrent_step``.
      stabilize_correctly, input_gate, normalize, slots, backend, config: as for
        ``mlstm_recurrent_step``.

    Returns:
      h, shaped as v, in the dtype of q, and the states (c, n, m) after the last
      token, in the dtypes of the states before the first token. With
      return_all_states they have an axis of tokens behind that of the batch:
      c (B, S, NH, DHQK, DHV), n (B, S, NH, DHQK), m (B, S, NH).

    Raises:
      TypeError, ValueError: as ``mlstm_recurrent_step``.

    Warns:
      DeprecationWarning: always.
      UserWarning: as ``mlstm_chunkwise``, where layout is left out.
    """
    warn_caller(
        "mlstm_recurrent_sequence is deprecated: use mlstm_ring_step for drafts, mlstm_chunkwise "
        "for short prompts, or jax.lax.scan over mlstm_recurrent_step",
        DeprecationWarning,
    )
    options = Options(
        eps=eps, stabilize_correctly=stabilize_correctly, norm_val=norm_val,
        input_gate=input_gate, normalize=normalize, layout=layout, backend=backend, config=config,
    )  # fmt: skip
    return_all = validation.check_flag("return_all_states", return_all_states)
    x = Arguments(
        q, k, v, i, f, c_initial, n_initial, m_initial, None, sequence_lengths, slots
    )  # fmt: skip
    spec = prepare_steps("recurrent_step", x._asdict(), options, steps=True, layout=layout)
    if slots is not None and return_all:
        raise ValueError(
            "return_all_states is True with slots, expected False: without slots, pass the rows "
            "of the pools, c_initial[slots] and so on"
        )
    return _mlstm(spec, options.layout, return_all, constants(x))
