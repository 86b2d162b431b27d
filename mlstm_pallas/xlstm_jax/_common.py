"""What the documented systems share: checks and reshapes, gates from what each system hands over, the stages, and the entry.

Notation: B batch, NH heads, S sequence length, DHQK and DHHV head dimensions of q, k and of v, h, NC chunks of L steps. The documents have
chunks and rows of a state on one axis, (NC + 1) * DHQK; the stages have them on two. Every logarithm is natural.

The kernels run where a computation is lowered for an NVIDIA GPU, plain jnp elsewhere; ``mlstm_pallas.use_backend`` overrides that.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas import fwbw, reference
from mlstm_pallas import gates as gate_forms
from mlstm_pallas.backend import on_backend, requested_backend, target_device_kind
from mlstm_pallas.config import config_for
from mlstm_pallas.gate_gradients import RowGradients
from mlstm_pallas.gates import ChunkGates, LocalGates, Pair, pair_add, pair_max, two_sum
from mlstm_pallas.plan import Inputs, KeptStates, Plan, Residuals
from mlstm_pallas.problem import KERNEL_DTYPES, MIN_CHUNK_SIZE, Problem, is_power_of_two, padded_head_dim
from mlstm_pallas.shared_memory import check_fits
from mlstm_pallas.stages.chunk_gates import chunk_gates
from mlstm_pallas.stages.parallel_bw_dP import parallel_bw_dP
from mlstm_pallas.stages.parallel_bw_dQKV import parallel_bw_dQKV
from mlstm_pallas.stages.parallel_fw_H import parallel_fw_H
from mlstm_pallas.stages.recurrent_bw_dC import recurrent_bw_dC
from mlstm_pallas.stages.recurrent_fw_C import recurrent_fw_C

States = tuple[jax.Array, jax.Array, jax.Array]  # C, n, m
MaybeStates = tuple[jax.Array | None, jax.Array | None, jax.Array | None]

# Shapes.

_SHAPES = {
    "matQ": ("B", "NH", "S", "DHQK"),
    "matK": ("B", "NH", "S", "DHQK"),
    "matV": ("B", "NH", "S", "DHHV"),
    "matDeltaH": ("B", "NH", "S", "DHHV"),
    "vecN_out": ("B", "NH", "S"),
    "vecM_out": ("B", "NH", "S"),
    "vecM": ("B", "NH", "S"),
    "vecM_combine": ("B", "NH", "S"),
    "matC_initial": ("B", "NH", "DHQK", "DHHV"),
    "vecN_initial": ("B", "NH", "DHQK"),
    "scaM_initial": ("B", "NH"),
    "scaMinter_initial": ("B", "NH"),
    "matDeltaC_last": ("B", "NH", "DHQK", "DHHV"),
}
STEPS = ("B", "NH", "S")
CHUNKS = ("B", "NH", "NC", "L")


class Dims(NamedTuple):
    B: int
    NH: int
    S: int
    DHQK: int
    DHHV: int
    NC: int
    L: int

    def check(self, named_shape: tuple[str, ...] | None = None, /, **arrays: jax.Array | None) -> None:
        """Raises where an array that is not None has not the shape of its name, or ``named_shape``."""
        for name, x in arrays.items():
            names = _SHAPES[name] if named_shape is None else named_shape
            expected = tuple(getattr(self, dim) for dim in names)
            if x is not None and tuple(x.shape) != expected:
                raise ValueError(f"{name} has shape {tuple(x.shape)}, expected ({', '.join(names)}) = {expected}")

    def require(self, **arrays: jax.Array | None) -> None:
        for name, x in arrays.items():
            if x is None:
                raise ValueError(f"{name} is None, expected an array of shape ({', '.join(_SHAPES[name])})")
        self.check(**arrays)

    def borders(self, name: str, x: jax.Array, *inner: str) -> jax.Array:
        """States at chunk borders with their chunks on an axis of their own, (B, NH, NC or NC + 1, *inner)."""
        sizes = tuple(getattr(self, dim) for dim in inner)
        rows = sizes[0] if sizes else 1
        expected = [(self.B, self.NH, n * rows, *sizes[1:]) for n in (self.NC, self.NC + 1)]
        if tuple(x.shape) not in expected:
            times = f" * {inner[0]}" if inner else ""
            said = [f"(B, NH, {', '.join((n + times, *inner[1:]))})" for n in ("NC", "(NC + 1)")]
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected {said[0]} = {expected[0]} or {said[1]} = {expected[1]}")
        return x.reshape(self.B, self.NH, -1, *sizes)

    def before(self, name: str, x: jax.Array, *inner: str) -> jax.Array:
        """The states before each chunk."""
        return self.borders(name, x, *inner)[:, :, : self.NC]

    def after(self, name: str, x: jax.Array, *inner: str) -> jax.Array:
        """The states after each chunk: NC blocks are taken as these, NC + 1 start at the first border."""
        return self.borders(name, x, *inner)[:, :, -self.NC :]


def dims_of(*, chunk_size: int, num_chunks: int | None = None, **arrays: jax.Array) -> Dims:
    """Dimensions from matQ or matK, given first, and from an array whose last axis is DHHV."""
    (name, keys), (_, values) = arrays.items()
    for array, x in arrays.items():
        if getattr(x, "ndim", None) != 4:
            shape = tuple(getattr(x, "shape", ()))
            raise ValueError(f"{array} has shape {shape}, expected ({', '.join(_SHAPES[array])})")
    B, NH, S, DHQK = keys.shape
    if not is_power_of_two(chunk_size) or chunk_size < MIN_CHUNK_SIZE:
        raise ValueError(f"the chunk size is {chunk_size!r}, expected a power of two >= {MIN_CHUNK_SIZE}")
    if S < 1 or S % chunk_size or num_chunks not in (None, S // chunk_size):
        many = "chunks" if num_chunks is None else f"{num_chunks} chunks"
        raise ValueError(f"{name} has shape {tuple(keys.shape)}, expected S = {S} to be {many} of {chunk_size} steps")
    dims = Dims(B, NH, S, DHQK, values.shape[-1], S // chunk_size, chunk_size)
    dims.check(**arrays)
    return dims


def plan_for(
    dims: Dims, dtype: Any, qk_scale: float | None = None, *, stage: str = "", tiles: dict[str, int | None] | None = None, **normaliser: Any
) -> Plan:
    """Everything static about a call. qk_scale None: DHQK ** -0.5. ``tiles`` replace those of ``stage``, None leaves the config's."""
    backend = requested_backend()
    dtype = jnp.dtype(dtype)
    if dtype.name not in KERNEL_DTYPES and not (dtype.name == "float64" and backend == "xla"):
        raise TypeError(f"matQ, matK, matV have dtype {dtype.name}, expected one of {', '.join(KERNEL_DTYPES)}")
    device_kind = target_device_kind()
    config = config_for(dims.DHQK, dims.DHHV, dims.S, dtype, device_kind=device_kind, chunk_size=dims.L)
    if tiles:
        given: dict[str, Any] = {name: size for name, size in tiles.items() if size is not None}
        changed: dict[str, Any] = {stage: dataclasses.replace(config.stage(stage), **given)}
        config = dataclasses.replace(config, **changed)
    if dims.B * dims.NH == 0:
        backend = "xla"  # a kernel has no empty grid
    scale = dims.DHQK**-0.5 if qk_scale is None else float(qk_scale)
    problem = Problem(dims.B, dims.NH, dims.S, padded_head_dim(dims.DHQK), padded_head_dim(dims.DHHV), dims.L, scale)
    if backend in ("triton", None):
        check_fits(config, problem, dtype, device_kind, False)
    normaliser = dict(eps=1e-6, stabilize_correctly=True, norm_val=1.0) | normaliser
    return Plan(problem, config, recompute_states_in_bw=False, backend=backend, **normaliser)


def acc_dtype(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def initial_states(dims: Dims, dtype: Any, names: tuple[str, str, str], given: MaybeStates) -> States:
    """The initial states in the accumulator's dtype, zeros for none."""
    missing = [name for name, x in zip(names, given, strict=True) if x is None]
    if 0 < len(missing) < 3:
        raise ValueError(f"initial states come all three or not at all: {', '.join(missing)} is None")
    dims.check(**dict(zip(names, given, strict=True)))
    shapes = ((dims.B, dims.NH, dims.DHQK, dims.DHHV), (dims.B, dims.NH, dims.DHQK), (dims.B, dims.NH))
    acc = acc_dtype(dtype)
    C, n, m = (jnp.zeros(shape, acc) if x is None else x.astype(acc) for x, shape in zip(given, shapes, strict=True))
    return C, n, m


def join_borders(states: jax.Array, last: jax.Array) -> jax.Array:
    """(B, NH, NC, DHQK, ...) before each chunk and (B, NH, DHQK, ...) behind the last one, to (B, NH, (NC + 1) * DHQK, ...)."""
    joined = jnp.concatenate([states, last[:, :, None].astype(states.dtype)], axis=2)
    return joined.reshape(*joined.shape[:2], -1, *joined.shape[4:])


def join_first(first: jax.Array, after: jax.Array) -> jax.Array:
    """(B, NH, DHQK, DHHV) at the first border and (B, NH, NC, DHQK, DHHV) at the others, to (B, NH, (NC + 1) * DHQK, DHHV)."""
    joined = jnp.concatenate([first[:, :, None].astype(after.dtype), after], axis=2)
    return joined.reshape(*joined.shape[:2], -1, joined.shape[-1])


def like_buffer(name: str, buffer: jax.Array | None, x: jax.Array) -> jax.Array:
    """x in the dtype of the buffer that the caller has for it."""
    if buffer is None:
        return x
    if buffer.shape != x.shape:
        raise ValueError(f"{name} has shape {tuple(buffer.shape)}, expected {tuple(x.shape)}")
    return x.astype(buffer.dtype)


def _widen(x: jax.Array, *sizes: int) -> jax.Array:
    """Fills the last axes with zeros up to the sizes."""
    have = x.shape[-len(sizes) :]
    widths = [(0, 0)] * (x.ndim - len(sizes)) + [(0, size - old) for size, old in zip(sizes, have, strict=True)]
    return x if have == sizes else jnp.pad(x, widths)


# Gates.


def running_sum(vecFlog: jax.Array) -> Pair:
    """b_t within each chunk from log forget gates (B, NH, NC, L), which are finite."""
    largest = jnp.max(jnp.abs(vecFlog), axis=-1, keepdims=True)
    hi, lo = gate_forms.split_for_exact_sums(vecFlog, largest, vecFlog.shape[-1])
    return two_sum(jnp.cumsum(hi, axis=-1), jnp.cumsum(lo, axis=-1))


def with_borders(local: LocalGates, scaM_states: jax.Array) -> ChunkGates:
    """scaM_states: (B, NH, NC or NC + 1) stabilisers at the chunk borders; the last one follows where it is missing."""
    if scaM_states.shape[-1] == local.vecOffset.shape[-2]:
        g, a, reset = (x[..., -1:] for x in gate_forms.chunk_summaries(local))
        last = jnp.maximum(jnp.where(reset, -jnp.inf, g + scaM_states[..., -1:]), a)
        scaM_states = jnp.concatenate([scaM_states, last], axis=-1)
    return gate_forms.join_chunks(local, scaM_states)


def local_from_sums(vecI: jax.Array, vecB: Pair) -> LocalGates:
    """vecI: (B, NH, NC, L); vecB: running sums of the log forget gates within each chunk, finite: a reset cannot be told from them."""
    e = pair_add((vecI, jnp.zeros_like(vecI)), (-vecB[0], -vecB[1]))
    return LocalGates(vecB, e, lax.associative_scan(pair_max, e, axis=-1), jnp.zeros_like(vecI))


def gates_from_sums(vecI: jax.Array, vecB: Pair, scaM_states: jax.Array) -> ChunkGates:
    return with_borders(local_from_sums(vecI, vecB), scaM_states)


def gates_from_start(vecI: jax.Array, vecB: Pair, scaM_initial: jax.Array) -> ChunkGates:
    local = local_from_sums(vecI, vecB)
    return with_borders(local, gate_forms.border_maxima(gate_forms.chunk_summaries(local), scaM_initial))


def gates_from_stabilisers(vecB: Pair, vecM: jax.Array, scaM_states: jax.Array) -> ChunkGates:
    """w_t and gamma_c, which recurrent_bw_dC takes, without input gates; the rest is left at zero. vecM: m_t (B, NH, NC, L)."""

    def decay(b: Pair, m: jax.Array, m_start: jax.Array) -> jax.Array:
        stored = m > -jnp.inf
        since = pair_add(b, (-jnp.where(stored, m, 0.0), jnp.zeros_like(m)))
        return jnp.where(stored, jnp.exp((m_start + since[0]) + since[1]), 0.0)

    starts = scaM_states[..., : vecM.shape[-2]]
    w = decay(vecB, vecM, starts[..., None])
    gamma = decay((vecB[0][..., -1], vecB[1][..., -1]), vecM[..., -1], starts)
    zeros = jnp.zeros_like(w)
    return ChunkGates((zeros, zeros), (zeros, zeros), w, vecM, zeros, gamma, scaM_states)


def constant_rows(vecN_out: jax.Array, eps: float, dtype: Any) -> RowGradients:
    """The normaliser as a constant: it scales the gradient of h and passes nothing back."""
    den = vecN_out.astype(acc_dtype(dtype)) + eps
    zeros = jnp.zeros_like(den)
    return RowGradients(jnp.where(den > 0, 1.0 / jnp.where(den > 0, den, 1.0), 0.0), zeros, zeros, zeros)


# The stages, on the kernels or in plain jnp. Head dimensions come and go as they are and are padded inside.


@functools.partial(jax.jit, static_argnums=0)
def fw_gates(plan: Plan, vecI: jax.Array, vecF: jax.Array, scaM_initial: jax.Array) -> ChunkGates:
    """From pre-activations (B, NH, S)."""

    def triton(interpret, i, f, m):
        return chunk_gates(i, f, m, **plan.launch(interpret))

    def xla(i, f, m):
        return gate_forms.chunk_gates(plan.chunks(i), plan.chunks(f), m)

    return on_backend(plan.backend, triton, xla, vecI, vecF, scaM_initial)


@functools.partial(jax.jit, static_argnums=0)
def fw_states(plan: Plan, k: jax.Array, v: jax.Array, gates: ChunkGates, C: jax.Array, n: jax.Array) -> tuple[jax.Array, ...]:
    """C and n before each chunk, (B, NH, NC, DHQK, DHHV) and (B, NH, NC, DHQK), and behind the last one."""
    p, DHQK, DHHV = plan.problem, k.shape[-1], v.shape[-1]

    def triton(interpret, k, v, gates, C, n):
        abar = gates.vecAbar.reshape(k.shape[:3])
        C_states, C_last, n_states, n_last = recurrent_fw_C(k, v, gates.scaGamma, C, abar, n, **plan.launch(interpret))
        return C_states, n_states, C_last, n_last

    def xla(k, v, gates, C, n):
        return reference.chunk_states(plan.chunks(k), plan.chunks(v), gates, C, n)

    args = _widen(k, p.DHQK), _widen(v, p.DHHV), gates, _widen(C, p.DHQK, p.DHHV), _widen(n, p.DHQK)
    C, n, C_last, n_last = on_backend(plan.backend, triton, xla, *args)
    return C[..., :DHQK, :DHHV], n[..., :DHQK], C_last[..., :DHQK, :DHHV], n_last[..., :DHQK]


@functools.partial(jax.jit, static_argnums=(0, 1))
def fw_outputs(
    plan: Plan,
    output_dtype: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: ChunkGates,
    C: jax.Array,
    n: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """H (B, NH, S, DHHV) and max(|z|, floor) (B, NH, S), the denominator of H without eps."""
    p, DHHV = plan.problem, v.shape[-1]

    def triton(interpret, q, k, v, gates, C, n):
        return parallel_fw_H(q, k, v, gates, C, n, output_dtype=output_dtype, **plan.normaliser, **plan.launch(interpret))

    def xla(q, k, v, gates, C, n):
        num, z = reference.chunk_outputs(plan.chunks(q), plan.chunks(k), plan.chunks(v), gates, C, n, p.qk_scale)
        h = reference.normalise(num, z, gates.vecM, **plan.normaliser)
        return h.reshape(v.shape).astype(output_dtype), z.reshape(v.shape[:3])

    states = _widen(C.astype(q.dtype), p.DHQK, p.DHHV), _widen(n.astype(gates.vecW.dtype), p.DHQK)
    args = _widen(q, p.DHQK), _widen(k, p.DHQK), _widen(v, p.DHHV), gates, *states
    H, z = on_backend(plan.backend, triton, xla, *args)
    floor: Any = plan.norm_val
    if plan.stabilize_correctly and plan.norm_val > 0:
        floor = plan.norm_val * jnp.exp(-gates.vecM.reshape(z.shape))
    return H[..., :DHHV], jnp.maximum(jnp.abs(z), floor)


@functools.partial(jax.jit, static_argnums=0)
def bw_states(
    plan: Plan, q: jax.Array, dh: jax.Array, gates: ChunkGates, rows: RowGradients, dC_last: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Gradients of C after each chunk, (B, NH, NC, DHQK, DHHV), and of the initial C."""
    p, DHQK, DHHV = plan.problem, q.shape[-1], dh.shape[-1]
    acc = gates.vecW.dtype
    no_n = jnp.zeros((p.B, p.NH, p.DHQK), acc)

    def triton(interpret, q, dh, gates, rows, last):
        r = gates.vecW.reshape(rows.vecInvDen.shape) * p.qk_scale * rows.vecInvDen
        return recurrent_bw_dC((q * r[..., None]).astype(q.dtype), dh, gates.scaGamma, last, **plan.launch(interpret))

    def xla(q, dh, gates, rows, last):
        in_chunks = RowGradients(*map(plan.chunks, rows))
        made = reference.chunk_state_gradients(plan.chunks(q), plan.chunks(dh), gates, in_chunks, last, no_n, None, None, p.qk_scale)
        return made[0], made[2]

    last = jnp.zeros((p.B, p.NH, p.DHQK, p.DHHV), acc) if dC_last is None else _widen(dC_last.astype(acc), p.DHQK, p.DHHV)
    args = _widen(q, p.DHQK), _widen(dh.astype(q.dtype), p.DHHV), gates, rows, last
    dC, dC_initial = on_backend(plan.backend, triton, xla, *args)
    return dC[..., :DHQK, :DHHV], dC_initial[..., :DHQK, :DHHV]


@functools.partial(jax.jit, static_argnums=(0, 1))
def bw_inputs(
    plan: Plan,
    wanted: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dh: jax.Array,
    gates: ChunkGates,
    rows: RowGradients,
    C: jax.Array,
    dC: jax.Array,
) -> tuple[jax.Array, ...]:
    """Gradients of q, k, v, as far as ``wanted`` names them ("QKV", "Q", ...), in the dtype of q. C before, dC after each chunk."""
    p, sizes = plan.problem, dict(Q=q.shape[-1], K=k.shape[-1], V=v.shape[-1])
    n = jnp.zeros((p.B, p.NH, p.NC, p.DHQK), gates.vecW.dtype)  # meets dz = 0, as its gradient does

    def triton(interpret, q, k, v, dh, gates, rows, C, dC):
        launch = plan.launch(interpret)
        scores = parallel_bw_dP(q, k, v, dh, gates, rows, of_keys=False, **launch)[0]
        made = parallel_bw_dQKV(q, k, v, dh, gates, rows, scores, C, n, dC, n, wanted=wanted, **launch)
        return tuple(dx for dx in made[:3] if dx is not None)

    def xla(q, k, v, dh, gates, rows, C, dC):
        chunks, in_chunks = plan.chunks, RowGradients(*map(plan.chunks, rows))
        gradients, _ = reference.chunk_gradients(chunks(q), chunks(k), chunks(v), chunks(dh), gates, in_chunks, C, n, dC, n, p.qk_scale)
        made = {name: dx.reshape(x.shape).astype(x.dtype) for name, dx, x in zip("QKV", gradients, (q, k, v), strict=True)}
        return tuple(made[name] for name in wanted)

    values = _widen(v, p.DHHV), _widen(dh.astype(q.dtype), p.DHHV)
    states = (_widen(x.astype(q.dtype), p.DHQK, p.DHHV) for x in (C, dC))
    made = on_backend(plan.backend, triton, xla, _widen(q, p.DHQK), _widen(k, p.DHQK), *values, gates, rows, *states)
    return tuple(dx[..., : sizes[name]] for name, dx in zip(wanted, made, strict=True))


# Whole passes.


class Forward(NamedTuple):
    matH: jax.Array  # (B, NH, S, DHHV)
    vecN_out: jax.Array  # (B, NH, S) max(|z|, floor): the denominator without eps
    vecM_out: jax.Array  # (B, NH, S)
    last_states: States
    all_states: States  # at the chunk borders, chunks and rows on one axis


def forward(
    matQ, matK, matV, vecI, vecF, initial: MaybeStates, qk_scale, chunk_size: int, *, output_dtype: Any = None, **normaliser: Any
) -> Forward:
    """The forward pass of every documented system. vecI, vecF: pre-activations (B, NH, S); resets, f = -inf, are fine."""
    dims = dims_of(matQ=matQ, matV=matV, chunk_size=chunk_size)
    dims.check(matK=matK)
    dims.check(STEPS, vecI=vecI, vecF=vecF)
    plan = plan_for(dims, matQ.dtype, qk_scale, **normaliser)
    C, n, m = initial_states(dims, matQ.dtype, ("matC_initial", "vecN_initial", "scaM_initial"), initial)
    gates = fw_gates(plan, vecI.astype(m.dtype), vecF.astype(m.dtype), m)
    k, v = matK.astype(matQ.dtype), matV.astype(matQ.dtype)
    Cs, ns, C_last, n_last = fw_states(plan, k, v, gates, C, n)
    H, vecN = fw_outputs(plan, jnp.dtype(output_dtype or matQ.dtype), matQ, k, v, gates, Cs, ns)
    last = C_last, n_last, gates.scaM_states[..., -1]
    every = join_borders(Cs, C_last), join_borders(ns, n_last), gates.scaM_states
    return Forward(H, vecN, gates.vecM.reshape(vecN.shape), last, every)


def backward(
    matQ,
    matK,
    matV,
    vecI,
    vecF,
    initial: MaybeStates,
    qk_scale: float | None,
    matC_states: jax.Array | None,
    vecN_out: jax.Array | None,
    matDeltaH: jax.Array | None,
    matDeltaC_last: jax.Array | None,
    chunk_size: int,
    eps: float,
) -> tuple[jax.Array, ...]:
    """The backward pass of every documented system: the denominator of H, vecN_out + eps, and the stabilisers are constants.

    Returns dQ, dK, dV, dI, dF and, with initial states, the gradients of C (by C_0), of n (zero: only the denominator reads it) and of m
    (<dC_0, C_0>, as exp(m) scales the state). All are exact under that convention. matC_states None: made anew.
    """
    dims = dims_of(matQ=matQ, matV=matV, chunk_size=chunk_size)
    dims.check(matK=matK, matDeltaC_last=matDeltaC_last)
    dims.check(STEPS, vecI=vecI, vecF=vecF)
    dims.require(vecN_out=vecN_out, matDeltaH=matDeltaH)
    C_states = None if matC_states is None else dims.before("matC_states", matC_states, "DHQK", "DHHV")
    plan = plan_for(dims, matQ.dtype, qk_scale, eps=eps, norm_val=0.0)
    states = initial_states(dims, matQ.dtype, ("matC_initial", "vecN_initial", "scaM_initial"), initial)
    arrays = matQ, matK, matV, vecI, vecF, *states
    gradients = _backward(plan, arrays, C_states, vecN_out, matDeltaH, matDeltaC_last)
    made = tuple(dx.astype(x.dtype) for dx, x in zip(gradients, (*arrays[:5], *initial), strict=True) if x is not None)
    return made


@functools.partial(jax.jit, static_argnums=0)
def _backward(plan: Plan, arrays: tuple[jax.Array, ...], C, vecN_out, dh, dC_last) -> tuple[jax.Array, ...]:
    """The exact backward pass, of an h of zeros: nothing comes from the denominator then, and |z| = vecN_out with no floor makes it."""
    p = plan.problem
    q, k, v, i, f, C_initial, n_initial, m_initial = arrays
    (DHQK, DHHV), acc = C_initial.shape[-2:], m_initial.dtype
    k, v, dh = (x.astype(q.dtype) for x in (k, v, dh))
    i, f = i.astype(acc), f.astype(acc)
    if C is None:
        C = fw_states(plan, k, v, fw_gates(plan, i, f, m_initial), C_initial, n_initial)[0]
    wide = _widen(C_initial, p.DHQK, p.DHHV)
    x = Inputs(_widen(q, p.DHQK), _widen(k, p.DHQK), _widen(v, p.DHHV), i, f, wide, _widen(n_initial, p.DHQK), m_initial)
    no_C, no_n = jnp.zeros_like(x.c_initial), jnp.zeros_like(x.n_initial)
    states = KeptStates(_widen(C.astype(q.dtype), p.DHQK, p.DHHV), jnp.zeros((p.B, p.NH, p.NC, p.DHQK), acc), None, no_C, no_n)
    residuals = Residuals(x, jnp.zeros_like(x.v), vecN_out.astype(acc), states)
    last = no_C if dC_last is None else _widen(dC_last.astype(acc), p.DHQK, p.DHHV)
    made = fwbw.backward(plan, residuals, (_widen(dh, p.DHHV), (last, no_n, jnp.zeros_like(m_initial))))
    dC, dn = made.c_initial[..., :DHQK, :DHHV], made.n_initial[..., :DHQK]
    return made.q[..., :DHQK], made.k[..., :DHQK], made.v[..., :DHHV], made.i, made.f, dC, dn, made.m_initial


# The exact entry.


def entry(q, k, v, i, f, initial: MaybeStates, return_last_states: bool, autocast_kernel_dtype: Any, **kwargs: Any):
    kernel = fwbw._get_chunkwise_fwbw_kernel(autocast_kernel_dtype, return_last_states=return_last_states, **kwargs)
    H, *states = kernel(q, k, v, i, f, *initial)
    return (H, tuple(states)) if return_last_states else H
