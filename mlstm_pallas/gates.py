"""Gates and stabilisers of the chunkwise form: everything that depends on the gate pre-activations alone.

Inside a chunk of L steps, with b_t the running sum of log sigmoid(f) through t and e_t = i_t - b_t:

    u_t = max(m_c, max_{s <= t} e_s)        m_t = b_t + u_t
    D_ts = exp(e_s - u_t)                   w_t = exp(m_c - u_t)
    m_{c+1} = m_L      p = m_{c+1} - b_L    abar_t = exp(e_t - p)     gamma = exp(m_c - p)

No matrix product is needed for any of it, so the kernels never rescale an accumulator.

With the sigmoid input gate (mLSTMsig of the TFLA paper) log sigmoid(i_t) stands for i_t and m_t is 0 throughout: u_t = -b_t. A packed
sequence that begins at step r starts from m = 0 like any other, so m_r is at least log sigmoid(f_r): for the maxima a source beside e_r.

Two things are done here so that the kernels need not care:

* Running sums are carried in two floats. A sum over a long chunk is large while the differences that enter the
  exponentials are small: in one float they would lose the digits that the result needs. Each log gate is split into a multiple
  of a coarse grid, whose sums are exact, and a small rest (Rump, Ogita, Oishi: "Accurate floating-point summation", 2008).
* A reset (f = -inf, or below MASKED, or the first step of a packed sequence) adds an offset to every later e_t of its chunk, larger than
  the spread of e: decays across the reset underflow to exactly 0 while those behind it keep all digits. Rows with nothing stored get
  u_t = +inf: all their decays are 0.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas.problem import InputGate

Pair = tuple[jax.Array, jax.Array]  # an unevaluated sum hi + lo

_INF = float("inf")
# A gate at or below this is one at -inf: i stores nothing, f resets. Finite values that mask (-1e9, the least of a dtype) are meant
# so, and as ordinary gates they would take the digits of all others in the chunk's sums.
MASKED = -1e6
# Above both of these.
_UNDERFLOW = 1024.0


class LocalGates(NamedTuple):
    """What a chunk knows without its initial state; all of shape (B, NH, NC, L), float32 (float64 for float64 gates)."""

    vecB: Pair  # b_t, resets left out
    vecE: Pair  # e_t, reset offset included
    vecEmax: Pair  # max of e_s over s <= t and since the last reset
    vecOffset: jax.Array  # reset offset in e_t: > 0 where a reset lies between the chunk's start and t


class ChunkGates(NamedTuple):
    """Gates of all chunks: float32 (float64 for float64 gates)."""

    vecE: Pair  # (B, NH, NC, L) e_t
    vecU: Pair  # (B, NH, NC, L) u_t; +inf where nothing is stored
    vecW: jax.Array  # (B, NH, NC, L) w_t
    vecM: jax.Array  # (B, NH, NC, L) m_t
    vecAbar: jax.Array  # (B, NH, NC, L) abar_t
    scaGamma: jax.Array  # (B, NH, NC) gamma_c
    scaM_states: jax.Array  # (B, NH, NC + 1) m_c at the chunk borders


def two_sum(a: jax.Array, b: jax.Array) -> Pair:
    """fl(a + b) and its rounding error (Knuth); the error is 0 where the sum is not finite."""
    s = a + b
    t = s - a
    return s, jnp.where(jnp.isfinite(s), (a - (s - t)) + (b - t), 0.0)


def pair_add(a: Pair, b: Pair) -> Pair:
    s, error = two_sum(a[0], b[0])
    return two_sum(s, error + (a[1] + b[1]))


def pair_max(a: Pair, b: Pair) -> Pair:
    first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] >= b[1]))
    return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])


def split_for_exact_sums(x: jax.Array, largest: jax.Array, count: int) -> Pair:
    """x = hi + lo, where every sum of up to ``count`` hi is exact; ``largest`` bounds |x|."""
    largest = lax.stop_gradient(largest)
    grid = 1.5 * jnp.exp2(jnp.ceil(jnp.log2(jnp.maximum(largest, 1e-30) * count)) + 1.0)
    hi = (x + grid) - grid
    return hi, x - hi


def log_sigmoid_gate(f: jax.Array) -> tuple[jax.Array, jax.Array]:
    """log sigmoid(f), 0 at a reset, and where the resets are."""
    reset = f <= MASKED
    f = jnp.where(reset, 0.0, f)
    below = f <= 0  # neither abs nor minimum, whose derivatives at 0 are not those of the sum
    return jnp.where(reset, 0.0, jnp.where(below, f, 0.0) - jnp.log1p(jnp.exp(jnp.where(below, f, -f)))), reset


def log_input_gate(i: jax.Array, input_gate: InputGate) -> jax.Array:
    """Logarithm of the input gate; -inf where nothing is stored. A NaN stays."""
    stored = ~(i <= MASKED)
    if input_gate is InputGate.SIGMOID:
        i = log_sigmoid_gate(i)[0]
    return jnp.where(stored, i, -_INF)


def nan_to_input_gate(i: jax.Array, f: jax.Array) -> Pair:
    """A NaN in f is moved to i: there it spoils every later row and no sum over the chunk, hence no earlier row."""
    nan = jnp.isnan(f)
    return jnp.where(nan, f, i), jnp.where(nan, 0.0, f)


def reset_offset(i_min: jax.Array, i_max: jax.Array, total_decay: jax.Array) -> jax.Array:
    """A power of two above the spread of e_t in a chunk by enough for exp to underflow.

    i_min and i_max bound the finite input gates (inf, -inf when there are none), total_decay = sum |log sigmoid(f)|.
    """
    spread = jnp.maximum(i_max - i_min, 0.0) + total_decay + _UNDERFLOW
    return jnp.exp2(jnp.ceil(jnp.log2(lax.stop_gradient(spread))))


def local_gates(vecI: jax.Array, vecF: jax.Array, starts: jax.Array | None = None, input_gate: InputGate = InputGate.EXP) -> LocalGates:
    """Gates of every chunk on its own. vecI, vecF: pre-activations (B, NH, NC, L); starts: 1 where a packed sequence begins."""
    L = vecI.shape[-1]
    vecI, vecF = nan_to_input_gate(vecI, vecF)
    i = log_input_gate(vecI, input_gate)
    fbar, reset = log_sigmoid_gate(vecF)
    hi, lo = split_for_exact_sums(fbar, jnp.max(jnp.abs(fbar), axis=-1, keepdims=True), L)
    b = two_sum(jnp.cumsum(hi, axis=-1), jnp.cumsum(lo, axis=-1))
    stored = i != -_INF
    i_min = jnp.min(jnp.where(i > -_INF, i, _INF), axis=-1, keepdims=True)
    i_max = jnp.max(jnp.where(i > -_INF, i, -_INF), axis=-1, keepdims=True)
    begins = None if starts is None else starts > 0
    if begins is not None or input_gate is InputGate.SIGMOID:
        i_min, i_max = jnp.minimum(i_min, 0.0), jnp.maximum(i_max, 0.0)  # m = 0 is a source as well
    restarts = reset if begins is None else reset | begins
    offset = jnp.cumsum(restarts, axis=-1, dtype=vecI.dtype) * reset_offset(i_min, i_max, jnp.sum(-fbar, axis=-1, keepdims=True))

    def source(log_gate):
        return pair_add(two_sum(offset, log_gate), (-b[0], -b[1]))

    def only(where, pair):
        return jnp.where(where, pair[0], -_INF), jnp.where(where, pair[1], 0.0)

    e = only(stored, source(jnp.where(stored, i, 0.0)))
    if input_gate is InputGate.SIGMOID:
        return LocalGates(b, e, source(jnp.zeros_like(i)), offset)

    def since_reset(left, right):
        best = pair_max(left[:2], right[:2])
        return jnp.where(right[2], right[0], best[0]), jnp.where(right[2], right[1], best[1]), left[2] | right[2]

    sources = e if begins is None else pair_max(e, only(begins & ~reset, source(fbar)))
    emax_hi, emax_lo, _ = lax.associative_scan(since_reset, (*sources, restarts), axis=-1)
    return LocalGates(b, e, (emax_hi, emax_lo), offset)


def chunk_summaries(local: LocalGates) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What each chunk does to m: m_{c+1} = max(g + m_c, a), or a alone behind a reset. (g, a, reset), (B, NH, NC) each."""

    def last(x):
        return x[..., -1]

    b_hi, b_lo, offset = last(local.vecB[0]), last(local.vecB[1]), last(local.vecOffset)
    a = (last(local.vecEmax[0]) - offset) + b_hi + (last(local.vecEmax[1]) + b_lo)
    return b_hi + b_lo, a, offset > 0


def border_maxima(summaries: tuple[jax.Array, jax.Array, jax.Array], scaM_initial: jax.Array) -> jax.Array:
    """m_c at all chunk borders (B, NH, NC + 1): a prefix in (max, +) over the chunks."""
    g, a, reset = summaries
    g = jnp.where(reset, -_INF, g)

    def join(left, right):
        return left[0] + right[0], jnp.maximum(left[1] + right[0], right[1])

    g = jnp.concatenate([jnp.zeros_like(scaM_initial)[..., None], g], axis=-1)
    a = jnp.concatenate([scaM_initial[..., None], a], axis=-1)
    return lax.associative_scan(join, (g, a), axis=-1)[1]


def stabilisers_at_borders(local: LocalGates, scaM_initial: jax.Array, input_gate: InputGate) -> jax.Array:
    if input_gate is InputGate.SIGMOID:
        return jnp.zeros((*scaM_initial.shape, local.vecOffset.shape[2] + 1), scaM_initial.dtype)
    return border_maxima(chunk_summaries(local), scaM_initial)


def join_chunks(local: LocalGates, scaM_states: jax.Array, input_gate: InputGate = InputGate.EXP) -> ChunkGates:
    """Completes the local gates with the stabilisers m_c of the chunk borders, scaM_states: (B, NH, NC + 1)."""
    (b_hi, b_lo), e, emax, offset = local
    m_start = scaM_states[..., :-1, None]
    carried = offset == 0

    u = pair_max(emax, (jnp.where(carried, m_start, -_INF), jnp.zeros_like(m_start)))
    empty = u[0] == -_INF
    u = (jnp.where(empty, _INF, u[0]), u[1])
    w = jnp.where(carried, jnp.exp((m_start - u[0]) - u[1]), 0.0)
    if input_gate is InputGate.SIGMOID:
        m = jnp.zeros_like(b_hi)
    else:
        m = jnp.where(empty, -_INF, ((jnp.where(empty, 0.0, u[0]) - offset) + b_hi) + (u[1] + b_lo))

    m_end = scaM_states[..., 1:, None]
    nothing = m_end == -_INF
    p = pair_add(two_sum(offset[..., -1:], jnp.where(nothing, 0.0, m_end)), (-b_hi[..., -1:], -b_lo[..., -1:]))
    p_hi, p_lo = jnp.where(nothing, _INF, p[0]), jnp.where(nothing, 0.0, p[1])
    abar = jnp.exp((e[0] - p_hi) + (e[1] - p_lo))
    gamma = jnp.where(carried[..., -1], jnp.exp((m_start - p_hi) - p_lo)[..., 0], 0.0)
    return ChunkGates(e, u, w, m, abar, gamma, scaM_states)


def materialised(tree, at_least_zero: jax.Array):
    """The tree as it is, but made before it is used; ``at_least_zero`` is an array of which that is known.

    XLA for CPUs fuses the making of row vectors into the loops over the L x L tiles that they enter, and makes them anew for every
    element: up to five times the time of the whole forward pass. It looks through optimization barriers, but not into a conditional.
    """
    return lax.cond(jnp.any(at_least_zero < 0), lambda x: jax.tree.map(jnp.zeros_like, x), lambda x: x, tree)


def chunk_gates(
    vecI: jax.Array, vecF: jax.Array, scaM_initial: jax.Array, starts: jax.Array | None = None, input_gate: InputGate = InputGate.EXP
) -> ChunkGates:
    """All gates in plain jnp. vecI, vecF, starts: (B, NH, NC, L); scaM_initial: (B, NH), zeros with the sigmoid gate."""
    local = local_gates(vecI, vecF, starts, input_gate)
    gates = join_chunks(local, stabilisers_at_borders(local, scaM_initial, input_gate), input_gate)
    return materialised(gates, gates.scaGamma)


def vector_states(added: jax.Array, gamma: jax.Array, initial: jax.Array, *, backward: bool = False) -> tuple[jax.Array, jax.Array]:
    """x_{next} = gamma_c x_c + added_c, in plain jnp: what n is to C.

    Args:
      added: (B, NH, NC, DHQK), gamma: (B, NH, NC), initial: (B, NH, DHQK), float32.

    Returns:
      What enters each chunk, (B, NH, NC, DHQK), and what leaves the last; float32.
    """

    def join(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    def entering(first, x):
        """What is before each chunk in place of what is at it; its last one is not needed."""
        return jnp.concatenate([x[:, :, 1:], first] if backward else [first, x[:, :, :-1]], axis=2)

    factors = entering(jnp.ones_like(gamma[:, :, :1]), gamma)[..., None]
    _, x = lax.associative_scan(join, (factors, entering(initial[:, :, None], added)), reverse=backward, axis=2)
    end = 0 if backward else -1
    return x, gamma[:, :, end, None] * x[:, :, end] + added[:, :, end]
