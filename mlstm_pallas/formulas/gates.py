"""Gates and stabilisers of the chunkwise form: all that depends on the gate pre-activations alone.

Inside a chunk of L steps, with b_t the running sum of log sigmoid(f) through t and e_t = i_t - b_t:

    u_t     = max(m_c, max_{s <= t} e_s)        m_t = b_t + u_t
    D_ts    = exp(e_s - u_t)                    w_t = exp(m_c - u_t)
    m_{c+1} = m_L                               p   = m_{c+1} - b_L
    abar_t  = exp(e_t - p)                      gamma = exp(m_c - p)

The stabilisers need no matrix product, so the kernels never rescale an accumulator. The functions
come in the order in which ``vectors/chunk_gates.py`` calls them, and lower to Triton and to Mosaic
GPU, but for those of packed segments.

With the sigmoid input gate (mLSTMsig of the TFLA paper) log sigmoid(i_t) replaces i_t, every m_t is
0 and u_t = -b_t. A packed segment that begins at step r starts from m = 0, so m_r is at least
log sigmoid(f_r), and the maxima have a second source beside e_r.

Two precautions keep the matrix kernels simple:

* Running sums are carried in two floats. The sum over a long chunk is large, the differences that
  enter the exponentials are small, and one float would lose their digits. Each log gate is split
  into a multiple of a coarse grid, whose sums are exact, and a small rest (Rump, Ogita, Oishi:
  "Accurate floating-point summation", 2008).
* A reset (f at or below MASKED, or the first step of a packed segment) adds an offset to every
  later e_t of its chunk. The offset exceeds the spread of e: decays across the reset underflow to
  exactly 0, and later ones keep all digits. Where nothing is stored yet u_t is +inf, and all
  decays to it are 0.

Arrays are (B * NH, NC, L), or (B * NH, NC) for one number per chunk. Any leading axes will do.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mlstm_pallas.problem.dimensions import InputGate

TwoFloat = tuple[Array, Array]  # an unevaluated sum hi + lo

_INF = float("inf")
# A gate at or below this counts as -inf: i stores nothing, f resets. Callers mask with finite
# values (-1e9, the least of a dtype), which as ordinary gates would cost the chunk's sums their
# digits.
MASKED = -1e6
# i and f of a step that carries the states on. They count as infinite, and pass jax_debug_infs.
CARRIES_ON = -1e30, 1e30
# exp of the negative is 0 in float32 and float64.
_UNDERFLOW = 1024.0
# exp of anything below these is 0, subnormals included.
LEAST_EXPONENT = {"float32": -104.0, "float64": -746.0}


class LocalGates(NamedTuple):
    """The gates of chunks without their initial states: (B * NH, NC, L), dtypes as ChunkGates."""

    vecB: TwoFloat  # b_t, resets left out
    vecE: TwoFloat  # e_t, reset offset included
    vecEmax: TwoFloat  # max of e_s over s <= t and since the last reset
    vecOffset: Array  # reset offset in e_t: > 0 where a reset is between the chunk's start and t


class ChunkGates(NamedTuple):
    """Gates of all chunks: float32 (float64 for float64 gates)."""

    vecE: TwoFloat  # (B * NH, NC, L) e_t
    vecU: TwoFloat  # (B * NH, NC, L) u_t; +inf where nothing is stored
    vecW: Array  # (B * NH, NC, L) w_t
    vecM: Array  # (B * NH, NC, L) m_t
    vecAbar: Array  # (B * NH, NC, L) abar_t
    scaGamma: Array  # (B * NH, NC) gamma_c
    scaM_states: Array  # (B * NH, NC + 1) m_c at the chunk boundaries
    # (B * NH, NC, L) int32, of ``join_flags``; None: not computed
    vecFlags: Any = None

    def per_step(self) -> "ChunkGates":
        """The gates of every step as (B * NH, S)."""
        BNH, NC, L = self.vecW.shape
        return jax.tree.map(lambda x: x.reshape(BNH, NC * L) if x.ndim == 3 else x, self)


def as_chunk_gates(per_step: Any, gamma: Array, m: Array) -> ChunkGates:
    """per_step: arrays (B * NH, NC, L) in the order of ``ChunkGates``, with or without flags."""
    e_hi, e_lo, u_hi, u_lo, w, m_steps, abar, *flags = per_step
    return ChunkGates((e_hi, e_lo), (u_hi, u_lo), w, m_steps, abar, gamma, m, *flags)


def two_sum(a: Array, b: Array) -> TwoFloat:
    """fl(a + b) and its rounding error (Knuth); the error is 0 where the sum is not finite."""
    s = a + b
    t = s - a
    return s, jnp.where(jnp.abs(s) < _INF, (a - (s - t)) + (b - t), 0.0)


def add_two_floats(a: TwoFloat, b: TwoFloat) -> TwoFloat:
    s, error = two_sum(a[0], b[0])
    return two_sum(s, error + (a[1] + b[1]))


def where_two_float(where: Array, x: Any, y: Any = (-_INF, 0.0)) -> TwoFloat:
    """x, and y elsewhere: two floats each, arrays or numbers."""
    return jnp.where(where, x[0], y[0]), jnp.where(where, x[1], y[1])


def max_two_floats(a: TwoFloat, b: TwoFloat) -> TwoFloat:
    return where_two_float((a[0] > b[0]) | ((a[0] == b[0]) & (a[1] >= b[1])), a, b)


def least_power_of_two(x: Array) -> Array:
    """The least power of two >= x, a positive normal number; without a derivative."""
    bits, integer = jnp.finfo(x.dtype), jnp.dtype(f"int{8 * x.dtype.itemsize}")
    below = np.array((1 << bits.nmant) - 1, integer)  # the bits of the mantissa
    up = (lax.bitcast_convert_type(x, integer) + below) & ~below
    return lax.bitcast_convert_type(up, x.dtype)


def exact_sum_grid(largest: Array, count: int) -> Array:
    """The ``split_at`` grid for which sums of up to ``count`` hi are exact; ``largest`` >= |x|."""
    return 3.0 * least_power_of_two(jnp.maximum(largest, 1e-30) * count)


def split_at(x: Array, grid: Array) -> TwoFloat:
    """x = hi + lo, with hi a multiple of the spacing of floats at ``grid``."""
    hi = (x + grid) - grid
    return hi, x - hi


def log_sigmoid(f: Array) -> Array:
    """log sigmoid(f). Without abs and minimum its derivative is right at 0 too."""
    below = f <= 0
    return jnp.where(below, f, 0.0) - branchless_log1p(jnp.exp(jnp.where(below, f, -f)))


def branchless_log1p(x: Array) -> Array:
    """log1p(x) for x in [0, 1]: log(y) with a correction for the rounding of y = 1 + x.

    Mosaic GPU has no log1p. Triton's branches, and its compiler moves earlier loads behind the
    branch.
    """
    one = jnp.where(x > 1.0, x, 1.0)  # XLA cancels (1 + x) - 1
    y = one + x
    return jnp.log(y) + (x - (y - one)) / y


def log_forget_gate(f: Array) -> tuple[Array, Array]:
    """log sigmoid(f), 0 at a reset, and where the resets are."""
    reset = f <= MASKED
    return jnp.where(reset, 0.0, log_sigmoid(jnp.where(reset, 0.0, f))), reset


# The logarithm of each input gate but exp, and its derivative, by the pre-activation.
_LOG_INPUT_GATES: dict[InputGate, Any] = {
    InputGate.SIGMOID: (lambda i: log_forget_gate(i)[0], lambda i: jax.nn.sigmoid(-i)),
}


def log_input_gate(i: Array, input_gate: InputGate) -> Array:
    """The logarithm of the input gate, -inf where nothing is stored. A NaN stays."""
    log, _ = _LOG_INPUT_GATES.get(input_gate, (lambda i: i, None))
    return jnp.where(i <= MASKED, -_INF, log(i))


def input_gate_gradient(d_log: Array, i: Array, input_gate: InputGate) -> Array:
    """The gradient of the pre-activation i from that of ``log_input_gate``."""
    if input_gate not in _LOG_INPUT_GATES:
        return d_log
    return jnp.where(i <= MASKED, 0.0, d_log * _LOG_INPUT_GATES[input_gate][1](i))


def log_gates(i: Array, f: Array, input_gate: InputGate) -> tuple[Array, Array, Array]:
    """The logarithms of the input and the forget gate, and where the resets are.

    A NaN in f is moved to i. There it reaches every later step but no sum over the chunk, and so no
    earlier step.
    """
    nan = jnp.isnan(f)
    return log_input_gate(jnp.where(nan, f, i), input_gate), *log_forget_gate(
        jnp.where(nan, 0.0, f)
    )


def mark_segment_starts(segment_ids: Array) -> Array:
    """Where the id, (..., S), differs from the previous step's; False at the first step."""
    return jnp.pad(
        segment_ids[..., 1:] != segment_ids[..., :-1], [(0, 0)] * (segment_ids.ndim - 1) + [(1, 0)]
    )


def reset_offset(i_min: Array, i_max: Array, total_decay: Array) -> Array:
    """A power of two that exceeds the spread of e_t in a chunk by enough for exp to underflow.

    i_min and i_max bound the finite input gates (inf, -inf if there are none), and total_decay is
    the sum of |log sigmoid(f)|.
    """
    return least_power_of_two(jnp.maximum(i_max - i_min, 0.0) + total_decay + _UNDERFLOW)


def stabiliser_sources(
    i: Array,
    fbar: Array,
    b: TwoFloat,
    offset: Array,
    reset: Array,
    is_start: Array | None,
    input_gate: InputGate,
) -> tuple[TwoFloat, TwoFloat]:
    """e_t, and the values whose running maximum is emax; with the sigmoid gate emax itself.

    i, fbar: logarithms of the gates; offset: reset offset of e_t; is_start: where packed segments
    begin. Lowers to Triton and Mosaic GPU.
    """

    def source(log_gate: Array) -> TwoFloat:
        return add_two_floats(two_sum(offset, log_gate), (-b[0], -b[1]))

    stored = i != -_INF
    e = where_two_float(stored, source(jnp.where(stored, i, 0.0)))
    if not input_gate.stabilised:
        return e, source(jnp.zeros_like(i))
    if is_start is None:
        return e, e
    sources = max_two_floats(e, where_two_float(is_start, source(fbar)))
    return e, where_two_float(reset, e, sources)


def largest_since_reset(left: Any, x: Any) -> tuple[Any, ...]:
    """Joins maxima (hi, lo, number of resets) of consecutive steps: none of before the last reset.

    Lowers to Mosaic GPU.
    """
    same = left[2] == x[2]
    return *where_two_float(same, max_two_floats(left[:2], x[:2]), x[:2]), x[2]


def summary(local: LocalGates) -> tuple[Array, Array]:
    """What a chunk does to m, at its last step: m_{c+1} = max(g + m_c, a).

    g is -inf where the chunk has a reset.
    """
    (b_hi, b_lo), _, (max_hi, max_lo), offset = local
    return jnp.where(offset > 0, -_INF, b_hi + b_lo), (max_hi - offset) + b_hi + (max_lo + b_lo)


def join_summaries(left: Any, x: Any) -> tuple[Array, Array]:
    """Joins the summaries of consecutive chunks."""
    return left[0] + x[0], jnp.maximum(left[1] + x[0], x[1])


def only_outputs(gates: ChunkGates, steps: Array | None) -> ChunkGates:
    """The gates with h_t = 0 where ``steps``, (B * NH, S), is False; None: unchanged.

    With u_t = +inf and w_t = 0 a step reads neither keys nor states, and its dh reaches nothing.
    """
    if steps is None:
        return gates
    steps = steps.reshape(gates.vecW.shape)
    return gates._replace(
        vecU=where_two_float(steps, gates.vecU, (_INF, 0.0)),
        vecW=jnp.where(steps, gates.vecW, 0.0),
    )


def join_ends(
    b_hi: Array, b_lo: Array, offset: Array, m_start: Array, m_end: Array
) -> tuple[TwoFloat, Array]:
    """p (+inf where nothing is stored) and gamma of each chunk. Lowers to Mosaic GPU.

    b and offset are those of the chunk's last step, m_start and m_end those of its boundaries.
    """
    nothing = m_end == -_INF
    p = add_two_floats(two_sum(offset, jnp.where(nothing, 0.0, m_end)), (-b_hi, -b_lo))
    p = where_two_float(nothing, (_INF, 0.0), p)
    return p, jnp.where(offset == 0, jnp.exp((m_start - p[0]) - p[1]), 0.0)


def join_steps(
    local: LocalGates, m_start: Array, p: TwoFloat, input_gate: InputGate
) -> tuple[TwoFloat, Array, Array, Array]:
    """u, w, m and abar of every step; m_start and p as of ``join_ends``. Lowers to Mosaic GPU."""
    (b_hi, b_lo), e, emax, offset = local
    carried = offset == 0
    u = max_two_floats(emax, (jnp.where(carried, m_start, -_INF), jnp.zeros_like(m_start)))
    empty = u[0] == -_INF
    u = (jnp.where(empty, _INF, u[0]), u[1])
    w = jnp.where(carried, jnp.exp((m_start - u[0]) - u[1]), 0.0)
    if not input_gate.stabilised:
        m = jnp.zeros_like(b_hi)
    else:
        m = jnp.where(empty, -_INF, ((jnp.where(empty, 0.0, u[0]) - offset) + b_hi) + (u[1] + b_lo))
    return u, w, m, jnp.exp((e[0] - p[0]) + (e[1] - p[1]))


M_FROM_PREVIOUS, M_GRAD_FLOWS, DECAY_NONZERO = 1, 2, 4  # bits of ``join_flags``


def join_flags(
    e: TwoFloat,
    u: TwoFloat,
    m: Array,
    m_before: Array,
    f: Array,
    log_f: Array,
    is_boundary: Array,
    is_start: Array | None,
) -> Array:
    """The bits that the gate gradients read of every step, int32. Lowers to Mosaic GPU.

    M_FROM_PREVIOUS: m_t is log sigmoid(f_t) + m_{t-1}, not i_t.
    M_GRAD_FLOWS: M_FROM_PREVIOUS, and no packed segment begins at t, so the gradient of m_t reaches
    m_{t-1}.
    DECAY_NONZERO: some decay from before t to t or later is not 0. Without it the sums for f_t hold
    only rounding errors.

    Args:
      m_before: m_{t-1}.
      f, log_f: the pre-activation, and the logarithm of the gate.
      is_boundary: where resets are and where packed segments begin.
      is_start: where packed segments begin; None: nowhere.
    """

    def bits(where: Array, flag: int) -> Array:
        return jnp.where(where, jnp.full(m.shape, flag, jnp.int32), 0)

    from_previous = ((e[0] != u[0]) | (e[1] != u[1])) & (f > MASKED)
    # A NaN, hence False, where nothing was stored.
    nonzero = log_f + m_before - m > LEAST_EXPONENT[m.dtype.name]
    flows, flags = bits(from_previous, M_GRAD_FLOWS), bits(from_previous, M_FROM_PREVIOUS)
    flags += flows if is_start is None else jnp.where(is_start, 0, flows)
    return flags + jnp.where(is_boundary, 0, bits(nonzero, DECAY_NONZERO))


def fusion_barrier(tree: Any, at_least_zero: Array) -> Any:
    """The tree, unchanged, computed before it is used; ``at_least_zero`` is any array that is >= 0.

    XLA for CPUs fuses the computation of vectors into the loops over L x L tiles and repeats it for
    every element, which takes up to five times as long as the whole forward pass. It looks through
    optimization barriers, but not into a conditional.
    """
    return lax.cond(
        jnp.any(at_least_zero < 0), lambda x: jax.tree.map(jnp.zeros_like, x), lambda x: x, tree
    )
