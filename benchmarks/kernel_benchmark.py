r"""Times a stage, the forward, or forward and backward of the mLSTM, beside other implementations.

    python benchmarks/kernel_benchmark.py                                               # the three 8k shapes on a GPU, a tiny one without
    python benchmarks/kernel_benchmark.py --shape=7b-8k,8x16x8192x128x128 --direction=fwd,fwbw --impl=all --markdown
    python benchmarks/kernel_benchmark.py --shape=seqlen --impl=all --jsonl=seqlen.jsonl --plot=seqlen.png
    python benchmarks/kernel_benchmark.py --stage=recurrent_fw_C,parallel_bw_dQKV --impl=triton,xla --dtype=bfloat16,float32
    python benchmarks/kernel_benchmark.py --from_jsonl=seqlen.jsonl,more.jsonl --plot=seqlen.png --markdown         # measures nothing

Outputs are checked before they are timed, on the first, a middle and the last head (of more than 32768 steps on the last alone): ours
against the recurrence in its parallel form, peers against what they define, in float64; what is wrong is not timed. A time is the median
of batches of calls in flight between two synchronisations, the spread (slowest - fastest) / median of the batches. TFLOP/s, TB/s and
roofline count what has to be computed and moved (the formulas are in roofline.py), whatever an implementation does. Memory is the peak
beyond the inputs. The first call is traced, compiled (unless --compilation_cache_dir has it) and run once.

Exit code 1 when an output is wrong or ours fails, 2 when the request makes no sense, 130 after Ctrl-C.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import command
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import peers
import roofline
from absl import flags
from compile_report import VARIANTS, RequestError, parse_config
from jax.experimental.compilation_cache import compilation_cache
from peers import NORMALISER, Inputs, random_inputs
from reporting import Row, markdown, plot, progress, read_rows, table
from roofline import Shape

from mlstm_pallas import gates, mlstm_chunkwise, reference
from mlstm_pallas.backend import target_device_kind
from mlstm_pallas.config import CHUNK_OF, KernelConfig, config_for
from mlstm_pallas.gate_gradients import TilePairs, row_gradients
from mlstm_pallas.problem import BACKENDS, KERNEL_DTYPES, MAX_TILE, check_chunk_size, make_problem
from mlstm_pallas.stages.chunk_gates import chunk_gates
from mlstm_pallas.stages.parallel_bw_dP import AddedNorms, GradientTiles, parallel_bw_dP
from mlstm_pallas.stages.parallel_bw_dQKV import Gradients, parallel_bw_dQKV
from mlstm_pallas.stages.parallel_bw_P import GradientScores, NormSums, PairSums, parallel_bw_P
from mlstm_pallas.stages.parallel_fw_H import parallel_fw_H
from mlstm_pallas.stages.parallel_fw_P import Scores, parallel_fw_P
from mlstm_pallas.stages.recurrent_bw_dC import recurrent_bw_dC
from mlstm_pallas.stages.recurrent_bw_dK import recurrent_bw_dK
from mlstm_pallas.stages.recurrent_bw_dQ import recurrent_bw_dQ
from mlstm_pallas.stages.recurrent_bw_dV import recurrent_bw_dV
from mlstm_pallas.stages.recurrent_fw_C import recurrent_fw_C
from mlstm_pallas.stages.recurrent_fw_H import recurrent_fw_H

HEADS = [(64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512), (512, 512)]
SHAPES = {
    "7b-8k": [Shape(8, 8, 8192, 256, 512)],
    "tfla-8k": [Shape(8, 16, 8192, 128, 256)],
    "b1-8k": [Shape(1, 8, 8192, 256, 512)],
    "small-64": [Shape(8, 16, 8192, 64, 64)],
    "small-128": [Shape(8, 16, 8192, 128, 128)],
    "seqlen": [Shape(2**17 // S, 8, S, 256, 512) for S in (2**n for n in range(9, 18))],
    "batch": [Shape(B, 8, 8192, 256, 512) for B in (1, 2, 4, 8, 16)],
    "heads": [Shape(8, 4096 // max(V, 256), 8192, K, V) for K, V in HEADS],
    "tiny": [Shape(1, 2, 128, 32, 64)],
}
# Relative norms of the error. bfloat16 has steps of 2**-8, and its gradients are made of products of rounded products; float32 has room
# for sums of a few thousand terms.
TOLERANCES = {"bfloat16": (5e-3, 2e-2), "float32": (1e-5, 1e-4)}  # of outputs, of gradients
BATCH_SECONDS, MAX_CALLS = 0.05, 100  # calls in flight between two synchronisations

Rates = tuple[float | None, float | None]  # FLOP/s, bytes/s


# ---------------------------------------------------------------- what is measured


# Of the arrays that a stage takes, those with an axis of S steps: the plain functions have chunks instead.
STEPWISE = ("matQ", "matK", "matV", "matDeltaH", "matQ_scaled", "matK_scaled", "vecI", "vecF", "rows", "scores", "gradient_scores")
STEPWISE += ("vecR", "vecAbar")


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage by itself.

    Attributes:
      kernel: (*inputs, problem=, config=, interpret=) -> outputs.
      plain: the same in jnp, in the precision of the inputs and in chunks.
      inputs: names in stage_arrays.
      outputs: their names; () for a NamedTuple, which has its own, those of NamedTuples inside included.
      dtype: that decides on the tolerance; None: that of q.
      seen: what of its outputs is to be looked at, of those of plain too.
    """

    kernel: Callable[..., Any]
    plain: Callable[..., Any]
    inputs: Sequence[str]
    outputs: Sequence[str] = ()
    dtype: str | None = None
    seen: Callable[[Any], Any] = lambda outputs: outputs

    def run_plain(self, L: int, *inputs: Any) -> Any:
        chunks = functools.partial(jax.tree.map, lambda x: x.reshape(*x.shape[:2], x.shape[2] // L, L, *x.shape[3:]))
        return self.plain(*(chunks(x) if name in STEPWISE else x for name, x in zip(self.inputs, inputs, strict=True)))

    def expected(self, L: int, *inputs: Any) -> Any:
        return self.seen(self.run_plain(L, *inputs))


def _plain_recurrence(a, b, gamma, X, *, backward=False):
    updates = jnp.einsum("bhclk,bhclv->cbhkv", a, b, preferred_element_type=X.dtype, precision="highest")

    def step(X, chunk):
        gamma, update = chunk
        return gamma[..., None, None] * X + update, X.astype(a.dtype)

    X, states = jax.lax.scan(step, X, (jnp.moveaxis(gamma, 2, 0), updates), reverse=backward)
    return jnp.moveaxis(states, 0, 2), X


def _outputs_kernel(q, *rest, **launch):
    return parallel_fw_H(q, *rest, output_dtype=q.dtype, **NORMALISER, **launch)


def _plain_outputs(q, k, v, stabilisers, C, n):
    num, z = reference.chunk_outputs(q, k, v, stabilisers, C, n, q.shape[-1] ** -0.5)
    return reference.normalise(num, z, stabilisers.vecM, **NORMALISER), z


def _scores_kernel(*args, **launch):
    scores, z, (_, n_last) = parallel_fw_P(*args, **NORMALISER, **launch)
    return *scores, z, n_last


def _plain_scores(q, k, stabilisers, n_initial):
    """P is what h would be without a state, for values that are the identity."""
    *chunks, L, K = q.shape
    _, n, _, n_last = reference.chunk_states(k, k[..., :1], stabilisers, jnp.zeros_like(n_initial)[..., None], n_initial)
    identity = jnp.broadcast_to(jnp.eye(L, dtype=q.dtype), (*chunks, L, L))
    num, z = reference.chunk_outputs(q, k, identity, stabilisers, jnp.zeros((*chunks, K, L), q.dtype), n, K**-0.5)
    num = jnp.concatenate([num, K**-0.5 * stabilisers.vecW[..., None]], axis=-1)
    made = reference.normalise(num, z, stabilisers.vecM, **NORMALISER)
    return made[..., :-1].astype(q.dtype), (k * stabilisers.vecAbar[..., None]).astype(k.dtype), made[..., -1], z, n_last


def _walk(read, write, values, r, gamma, X, *, tile=None, own=None, x=None, weigh=None, backward=False):
    """The walk of stages/walk.py in jnp, in chunks."""
    einsum = functools.partial(jnp.einsum, preferred_element_type=X.dtype, precision="highest")

    def step(X, chunk):
        read, write, values, r, gamma, tile, own, x, weigh = chunk
        from_state = einsum("bhtr,bhrn->bhtn", read, X)
        if x is not None:
            from_state += x[:, :, None]
        out = from_state * r[..., None] + (0.0 if own is None else own)
        if tile is not None:
            out += einsum("bhts,bhtn->bhsn" if backward else "bhts,bhsn->bhtn", tile, values)
        weighed = None if weigh is None else jnp.sum(from_state * weigh, axis=-1)
        return gamma[..., None, None] * X + einsum("bhsr,bhsn->bhrn", write, values), (out, weighed)

    chunks = jax.tree.map(lambda y: jnp.moveaxis(y, 2, 0), (read, write, values, r, gamma, tile, own, x, weigh))
    X, made = jax.lax.scan(step, X, chunks, reverse=backward)
    return *jax.tree.map(lambda y: jnp.moveaxis(y, 0, 2), made), X


def _fw_H_kernel(q, v, scores, stabilisers, C_initial, **launch):
    return recurrent_fw_H(q, v, scores, stabilisers.scaGamma, C_initial, output_dtype=q.dtype, **launch)


def _plain_fw_H(q, v, scores, stabilisers, C_initial):
    h, _, C_last = _walk(q, scores.matK_scaled, v, scores.vecR, stabilisers.scaGamma, C_initial, tile=scores.matP)
    return h, C_last


def _tiles(q, k, v, dh, stabilisers, rows):
    """P, dP, W_ts = dP_ts scale q_t . k_s, qbar and kbar, in the precision of the sums."""
    wide, scale = stabilisers.vecW.dtype, q.shape[-1] ** -0.5
    einsum = functools.partial(jnp.einsum, preferred_element_type=wide, precision="highest")
    D, inv_den, dz = reference.decay_matrix(stabilisers), rows.vecInvDen[..., None], rows.vecDz[..., None]
    scores = scale * einsum("bhctk,bhcsk->bhcts", q, k)
    dP = D * (einsum("bhctv,bhcsv->bhcts", dh, v) * inv_den + dz)
    return D * scores * inv_den, dP, dP * scores, q * (scale * stabilisers.vecW)[..., None] * inv_den, k * stabilisers.vecAbar[..., None]


def _sums_of_pairs(W):
    """Of W_ts over s < t, over t > s, and W_tt."""
    diagonal = jnp.diagonal(W, axis1=-2, axis2=-1)
    return jnp.sum(W, -1) - diagonal, jnp.sum(W, -2) - diagonal, diagonal


def _gradient_scores_kernel(*args, **launch):
    return tuple(itertools.chain(*parallel_bw_P(*args, **launch)))


def _plain_gradient_scores(q, k, v, dh, stabilisers, rows, n):
    P, dP, W, qbar, kbar = _tiles(q, k, v, dh, stabilisers, rows)
    scale, n, qbar = q.shape[-1] ** -0.5, n[..., None, :], qbar.astype(q.dtype)
    einsum = functools.partial(jnp.einsum, preferred_element_type=P.dtype, precision="highest")
    weighted = qbar.astype(P.dtype) * rows.vecDzDen[..., None]
    own_dq = scale * einsum("bhcts,bhcsk->bhctk", dP, k) + (scale * stabilisers.vecW * rows.vecDz)[..., None] * n
    own_dk = scale * einsum("bhcts,bhctk->bhcsk", dP, q)
    tiles = (x.astype(q.dtype) for x in (P, qbar, kbar, own_dq, own_dk))
    return *tiles, jnp.sum(weighted, axis=-2), jnp.sum(weighted * n, axis=-1), *_sums_of_pairs(W)


def _plain_gradient_tiles(q, k, v, dh, stabilisers, rows):
    """In one tile a chunk."""
    P, dP, W, qbar, kbar = _tiles(q, k, v, dh, stabilisers, rows)
    norms = AddedNorms(jnp.sum(kbar, axis=-2), jnp.sum(qbar * rows.vecDzDen[..., None], axis=-2))
    before, behind, diagonal = _sums_of_pairs(W)
    pairs = TilePairs(*(x[:, :, None, :, None] for x in (before, behind)), diagonal[:, :, :, None])
    scores = GradientTiles(*(x.astype(q.dtype) for x in (P, q.shape[-1] ** -0.5 * dP, qbar, kbar)))
    return scores, norms, pairs


def _written(outputs):
    """The outputs of parallel_bw_dP without what it does not write, and sums over whole chunks for those over tiles."""
    (P, dP, *scaled), norms, pairs = outputs
    *heads, NC, n, T = pairs.diagonal.shape
    block, tile = jnp.arange(n * T) // MAX_TILE, jnp.arange(n)

    def lower(x):
        return jnp.where(block[:, None] >= block, x.reshape(*heads, NC, n * T, n * T), 0.0)

    def total(x, where):
        return jnp.sum(jnp.where(where.reshape(n, 1, n, 1), x, 0.0), axis=2)

    before, behind = total(pairs.from_tiles, tile[:, None] <= tile), total(pairs.to_tiles, tile[:, None] >= tile)
    return lower(P), lower(dP), *scaled, *norms, before, behind, pairs.diagonal


def _plain_bw_dQ(v, dh, scores, r, gamma, C_initial):
    x = dict(own=scores.matDeltaQ_own, weigh=scores.matQ_scaled)
    dq, weighed, C = _walk(dh, v, scores.matK_scaled, r, gamma, jnp.swapaxes(C_initial, -1, -2), **x)
    return dq, weighed, jnp.swapaxes(C, -1, -2)


def _plain_bw_dK(v, dh, scores, abar, gamma, dC_last, dn):
    x = dict(own=scores.matDeltaK_own, x=dn, weigh=scores.matK_scaled, backward=True)
    dk, weighed, dC = _walk(v, dh, scores.matQ_scaled, abar, gamma, jnp.swapaxes(dC_last, -1, -2), **x)
    return dk, weighed, jnp.swapaxes(dC, -1, -2)


def _bw_dV_kernel(*args, **launch):
    return (recurrent_bw_dV(*args, **launch),)


def _plain_bw_dV(k, dh, scores, abar, gamma, dC_last):
    return _walk(k, scores.matQ_scaled, dh, abar, gamma, dC_last, tile=scores.matP, backward=True)[:1]


def _plain_gradients(q, k, v, dh, stabilisers, rows, scores, C, n, dC, dn):
    einsum = functools.partial(jnp.einsum, preferred_element_type=stabilisers.vecW.dtype, precision="highest")
    r, abar = (q.shape[-1] ** -0.5 * stabilisers.vecW * rows.vecInvDen)[..., None], stabilisers.vecAbar[..., None]
    dq = r * (einsum("bhctv,bhckv->bhctk", dh, C) + rows.vecDzDen[..., None] * n[..., None, :])
    dk = abar * (einsum("bhcsv,bhckv->bhcsk", v, dC) + dn[..., None, :])
    dv = abar * einsum("bhcsk,bhckv->bhcsv", k, dC) + einsum("bhcts,bhctv->bhcsv", scores.matP, dh)
    acc = dq.dtype
    sums = jnp.sum(q * dq, axis=-1), jnp.sum(k * dk, axis=-1), jnp.sum(C.astype(acc) * dC.astype(acc), axis=(-2, -1))
    dq += einsum("bhcts,bhcsk->bhctk", scores.matDeltaP, k)
    dk += einsum("bhcts,bhctk->bhcsk", scores.matDeltaP, q)
    return Gradients(dq, dk, dv, *sums)


QKV, STATES = ("matQ", "matK", "matV"), ("matC_states", "vecN_states")
GRADIENTS = (*QKV, "matDeltaH", "gates", "rows", "gradient_scores", *STATES, "matDeltaC_states", "vecDeltaN_states")
STAGES = {
    "chunk_gates": Stage(chunk_gates, gates.chunk_gates, ("vecI", "vecF", "scaM_initial"), dtype="float32"),
    "recurrent_fw_C": Stage(recurrent_fw_C, _plain_recurrence, ("matK_scaled", "matV", "scaGamma", "matC_initial"), ("C", "C_last")),
    "parallel_fw_H": Stage(_outputs_kernel, _plain_outputs, (*QKV, "gates", *STATES), ("h", "z")),
    "parallel_fw_P": Stage(_scores_kernel, _plain_scores, ("matQ", "matK", "gates", "vecN_initial"), (*Scores._fields, "z", "n_last")),
    "recurrent_fw_H": Stage(_fw_H_kernel, _plain_fw_H, ("matQ", "matV", "scores", "gates", "matC_initial"), ("h", "C_last")),
    "parallel_bw_dP": Stage(
        parallel_bw_dP,
        _plain_gradient_tiles,
        (*QKV, "matDeltaH", "gates", "rows"),
        (*GradientTiles._fields, *AddedNorms._fields, "before", "behind", "diagonal"),
        seen=_written,
    ),
    "recurrent_bw_dC": Stage(
        recurrent_bw_dC,
        functools.partial(_plain_recurrence, backward=True),
        ("matQ_scaled", "matDeltaH", "scaGamma", "matDeltaC_last"),
        ("dC", "dC_initial"),
    ),
    "parallel_bw_dQKV": Stage(functools.partial(parallel_bw_dQKV, wanted="QKVC"), _plain_gradients, GRADIENTS),
    "parallel_bw_P": Stage(
        _gradient_scores_kernel,
        _plain_gradient_scores,
        (*QKV, "matDeltaH", "gates", "rows", "vecN_states"),
        (*GradientScores._fields, *NormSums._fields, *PairSums._fields),
    ),
    "recurrent_bw_dQ": Stage(
        recurrent_bw_dQ,
        _plain_bw_dQ,
        ("matV", "matDeltaH", "gradient_scores", "vecR", "scaGamma", "matC_initial"),
        ("dq", "from_state", "C_last"),
    ),
    "recurrent_bw_dK": Stage(
        recurrent_bw_dK,
        _plain_bw_dK,
        ("matV", "matDeltaH", "gradient_scores", "vecAbar", "scaGamma", "matDeltaC_last", "vecDeltaN_states"),
        ("dk", "to_state", "dC_initial"),
    ),
    "recurrent_bw_dV": Stage(
        _bw_dV_kernel, _plain_bw_dV, ("matK", "matDeltaH", "gradient_scores", "vecAbar", "scaGamma", "matDeltaC_last"), ("dv",)
    ),
}


@functools.partial(jax.jit, static_argnums=(1, 2))
def stage_arrays(x: Inputs, L: int, stateless: bool) -> dict[str, Any]:
    """Everything that a stage may take, by its documented name, as the plain functions make it.

    stateless: stages in CHUNK_OF, whose chunks are too short to have a state of each.
    """
    B, NH, S, K, V = x.shape
    C, n, m = (jnp.zeros((B, NH, *dims), jnp.float32) for dims in ((K, V), (K,), ()))
    found = dict(matQ=x.q, matK=x.k, matV=x.v, vecI=x.i, vecF=x.f, matDeltaH=x.dh, scaM_initial=m)
    found |= dict(matC_initial=C, vecN_initial=n, matDeltaC_last=C)

    def run(stage):
        return STAGES[stage].run_plain(L, *(found[name] for name in STAGES[stage].inputs))

    def steps(*arrays):
        return [y.reshape(B, NH, S, *y.shape[4:]) for y in arrays]

    def rows_of(h, z):
        return row_gradients(jnp.sum(x.dh * h, -1), z, found["gates"].vecM.reshape(z.shape), **NORMALISER)

    found["gates"] = run("chunk_gates")
    found["scaGamma"] = gamma = found["gates"].scaGamma
    kbar = x.k.reshape(*gamma.shape, L, K) * found["gates"].vecAbar[..., None]
    found["vecN_states"], _ = gates.vector_states(jnp.sum(kbar, axis=-2), gamma, n)
    if stateless:
        *scores, z, _ = run("parallel_fw_P")
        found["scores"] = Scores(*steps(*scores))
        found["rows"] = rows = rows_of(*steps(run("recurrent_fw_H")[0], z))
        w, abar = steps(found["gates"].vecW * K**-0.5, found["gates"].vecAbar)
        found |= dict(vecR=w * rows.vecInvDen, vecAbar=abar)
        *scores, added_dn, _, _, _, _ = run("parallel_bw_P")
        found["gradient_scores"] = GradientScores(*steps(*scores))
    else:
        found["matK_scaled"] = kbar.astype(x.k.dtype).reshape(x.k.shape)
        found["matC_states"], _ = run("recurrent_fw_C")
        found["rows"] = rows_of(*steps(*run("parallel_fw_H")))
        scores, (_, added_dn), _ = run("parallel_bw_dP")
        found["gradient_scores"] = GradientTiles(*steps(*scores))
        found["matQ_scaled"] = found["gradient_scores"].matQ_scaled
        found["matDeltaC_states"], _ = run("recurrent_bw_dC")
    found["vecDeltaN_states"], _ = gates.vector_states(added_dn, gamma, n, backward=True)
    return found


ORACLE_OF = {"exp": "exact", "packed": "packed", "sigmoid": "sigmoid_normalised", "unnormalised": "sigmoid_input_gate"}  # of VARIANTS


class Ours(peers.JaxImplementation):
    """A backend of mlstm_chunkwise, or of one of its stages."""

    def __init__(
        self,
        backend: str,
        shape: Shape,
        dtype: str,
        chunk_size: int | None,
        stage: str,
        config: KernelConfig | None = None,
        recompute_states_in_bw: bool = True,
        variant: str = "exp",
    ):
        self.variant, self.oracle = variant, ORACLE_OF[variant]
        self.name, self.stage, self.recompute_states_in_bw = backend, stage, recompute_states_in_bw
        kind = target_device_kind()
        self.filled = config_for(*shape[3:], shape.S, jnp.dtype(dtype), device_kind=kind, chunk_size=chunk_size, explicit=config)
        self.config = dataclasses.asdict(self.filled)
        p = make_problem(shape[:4], shape.DHHV, self.filled.L, pad_heads=backend != "xla")
        self.problem = self.filled.problem_of(stage, p)
        if stage and shape != (p.B, p.NH, p.S, p.DHQK, p.DHHV):
            raise ValueError(f"a stage by itself is not padded: its tiles need S, DHQK, DHHV = {p.S}, {p.DHQK}, {p.DHHV}")

    def phases(self, shape, itemsize, direction):
        if self.stage:
            return (roofline.STAGES[self.stage](shape, self.problem.L, itemsize),)
        return super().phases(shape, itemsize, direction)

    def finite(self, outputs):
        return super().finite(STAGES[self.stage].seen(outputs) if self.stage else outputs)

    def heads(self, outputs, index):
        return super().heads(STAGES[self.stage].seen(outputs) if self.stage else outputs, index)

    def computation(self, inputs, direction):
        if self.stage:
            stage, L = STAGES[self.stage], self.problem.L
            launch = dict(problem=self.problem, config=self.filled, interpret=self.name == "interpret")
            kernel = functools.partial(stage.run_plain, L) if self.name == "xla" else functools.partial(stage.kernel, **launch)
            return kernel, [inputs[name] for name in stage.inputs]
        how = dict(backend=self.name, config=self.filled, recompute_states_in_bw=self.recompute_states_in_bw, **VARIANTS[self.variant])
        if self.variant == "packed":
            B, _, S, *_ = inputs.shape
            if S % peers.PACKED:
                raise ValueError(f"packed: {peers.PACKED} sequences do not fill {S} steps")
            how["segment_ids"] = jnp.broadcast_to(jnp.arange(S) // (S // peers.PACKED), (B, S))
        forward = functools.partial(mlstm_chunkwise, **how, **NORMALISER)

        def forward_backward(q, k, v, i, f, dh):
            h, vjp = jax.vjp(forward, q, k, v, i, f)
            return h, *vjp(dh)

        return (lambda *args: (forward(*args),), inputs[:5]) if direction == "fwd" else (forward_backward, inputs)


# ---------------------------------------------------------------- what it is checked against


class Case:
    """Inputs of one shape and dtype, and what should come out of them; made once for all implementations.

    gradients: whether those will be asked for.
    """

    def __init__(self, shape: Shape, dtype: str, stage: str = "", *, gradients: bool = False):
        self.shape, self.dtype, self.stage, self.gradients = shape, dtype, stage, gradients
        self._arrays: dict[tuple[int, bool], dict[str, Any]] = {}
        self._expected: dict[Any, tuple[np.ndarray, Any]] = {}

    @functools.cached_property
    def inputs(self) -> Inputs:
        return jax.block_until_ready(random_inputs(jax.random.key(0), self.shape, self.dtype))

    def arrays(self, L: int) -> dict[str, Any]:
        """What the stage and its like take at chunks of L steps; kept for the last L."""
        key = L, self.stage in CHUNK_OF
        if key not in self._arrays:
            self._arrays.clear()
            self._arrays[key] = jax.block_until_ready(stage_arrays(self.inputs, *key))
        return self._arrays[key]

    def given(self, impl: peers.Implementation) -> Any:
        """What impl.build takes."""
        return self.arrays(impl.problem.L) if isinstance(impl, Ours) and self.stage else self.inputs

    def expected(self, impl: peers.Implementation) -> tuple[np.ndarray, Any]:
        """Indices of some heads, and what impl should return of these, float64."""
        if isinstance(impl, Ours) and self.stage:
            stage, key = STAGES[self.stage], str(impl.problem.L)
            function, given = functools.partial(stage.expected, impl.problem.L), self.given(impl)
            args, cotangent = [given[x] for x in stage.inputs], None
        else:
            key, function = impl.oracle, peers.ORACLES[impl.oracle]
            args, cotangent = impl.oracle_arguments(self.inputs)
        if key not in self._expected:
            index = self.checked_heads(args[0].shape[0] * args[0].shape[1])

            @jax.jit
            def outputs(args, cotangent):
                if self.gradients:
                    h, vjp = jax.vjp(function, *args)
                    return h, *vjp(cotangent)
                return function(*args) if self.stage else (function(*args),)

            args, cotangent = jax.tree.map(lambda x: x[None], peers.take_heads((args, cotangent), index))
            with jax.enable_x64(True):
                self._expected[key] = index, jax.tree.map(lambda x: np.asarray(x)[0], outputs(args, cotangent))
        return self._expected[key]

    def checked_heads(self, heads: int) -> np.ndarray:
        return np.unique([0, heads // 2, heads - 1])[0 if self.shape.S <= 2**15 else -1 :]

    def named(self, outputs: Any, names: Sequence[str] = ()) -> dict[str, Any]:
        """Outputs by name; those in two floats as their sum."""
        if not hasattr(outputs, "_asdict"):
            return dict(zip(STAGES[self.stage].outputs if self.stage else names, outputs, strict=False))
        found: dict[str, Any] = {}
        for name, x in outputs._asdict().items():
            found |= self.named(x) if hasattr(x, "_asdict") else {name: sum(x) if isinstance(x, tuple) else x}
        return found

    def errors(self, impl: peers.Implementation, outputs: Any, direction: str = "") -> dict[str, float]:
        """Of each output, the norm of its error over its own."""
        index, wanted = self.expected(impl)
        expected, found = self.named(wanted, impl.outputs), self.named(impl.heads(outputs, index), impl.outputs)
        if direction == "fwd" and not self.stage:
            expected = dict(list(expected.items())[:1])
        # A plain function has chunks where a kernel has steps.
        wrong_by = {name: found[name] - x.reshape(found[name].shape) for name, x in expected.items()}
        return {name: float(np.linalg.norm(x) / max(np.linalg.norm(expected[name]), 1e-30)) for name, x in wrong_by.items()}

    def tolerance(self, name: str) -> float:
        dtype = (STAGES[self.stage].dtype if self.stage else None) or self.dtype
        return TOLERANCES[dtype]["_bw_" in self.stage if self.stage else name.startswith("d")]


# ---------------------------------------------------------------- measuring


def time_calls(call: Callable[[], Any], synchronise: Callable[[Any], None], repeats: int) -> list[float]:
    """Seconds a call, in each of so many batches of calls with one synchronisation."""

    def batch(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            outputs = call()
        synchronise(outputs)
        return (time.perf_counter() - start) / calls

    batch(2)
    calls = min(max(round(BATCH_SECONDS / batch(1)), 1), MAX_CALLS)
    return [batch(calls) for _ in range(repeats)]


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def wrong_outputs(case: Case, errors: Mapping[str, float], checked: Sequence[str] = ()) -> str:
    """What is beyond its tolerance, by how much; "" when nothing is."""
    limits = {name: case.tolerance(name) for name in checked or errors if name in errors}
    return "; ".join(f"error {errors[name]:.1e} in {name}, at most {x:.0e}" for name, x in limits.items() if not errors[name] <= x)


def measure(row: Row, case: Case, impl: peers.Implementation, repeats: int, rates: Rates) -> None:
    """Fills the row; refuses to time a wrong output."""
    given = case.given(impl)
    start = time.perf_counter()
    call = impl.build(given, row.direction)
    outputs = call()
    impl.synchronise(outputs)
    row.first_call_s = time.perf_counter() - start
    row.config, row.versions = dict(impl.config), row.versions | impl.versions()
    if not impl.finite(outputs):
        row.status, row.note = "wrong", "wrong: not finite"
        return
    row.errors = case.errors(impl, outputs, row.direction)
    row.error = max(row.errors.values())
    if wrong := wrong_outputs(case, row.errors, impl.checked):
        row.status, row.note = "wrong", f"wrong: {wrong}"
        return
    row.note = "" if impl.oracle in peers.MLSTM else "other function"
    del outputs
    row.peak_mib = impl.peak_memory_bytes(call) / 2**20
    times = time_calls(call, impl.synchronise, repeats)
    seconds = statistics.median(times)
    phases = impl.phases(case.shape, jnp.dtype(case.dtype).itemsize, row.direction)
    row.ms, row.spread = 1e3 * seconds, (max(times) - min(times)) / seconds
    row.tflops, row.tbps = (sum(x) / seconds / 1e12 for x in zip(*phases, strict=True))
    if None not in rates:
        row.roofline_pct = 100 * roofline.floor_seconds(phases, *rates) / seconds


def git_commit() -> str | None:
    describe = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(describe, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


class Request(NamedTuple):
    """What the flags ask for on this machine."""

    shapes: dict[str, Shape]
    impls: Sequence[str]
    directions: Sequence[str]
    dtypes: Sequence[str]
    stages: Sequence[str]
    recompute: Sequence[bool]
    variants: Sequence[str]
    config: KernelConfig | None
    rates: dict[str, Rates]


def measured_rows(options: flags.FlagValues, request: Request) -> Iterator[Row]:
    """A row for each shape, dtype, stage or direction, and implementation, as soon as it is measured."""
    common = dict(device=jax.devices()[0].device_kind, commit=options.commit or git_commit())
    for (name, shape), dtype, stage in itertools.product(request.shapes.items(), request.dtypes, request.stages or [""]):
        directions = ["bwd" if "_bw_" in stage else "fwd"] if stage else request.directions
        case = Case(shape, dtype, stage, gradients="fwbw" in directions)
        for direction, impl in itertools.product(directions, request.impls):
            ours = impl in BACKENDS
            variants = request.variants if ours and not stage else [None]
            for variant, recompute in itertools.product(variants, request.recompute if ours and direction == "fwbw" else [None]):
                versions = dict(jax=jax.__version__, jaxlib=jaxlib.__version__)
                how = dict(recompute_states_in_bw=recompute, variant=variant)
                row = Row(name, shape, impl, stage, direction, dtype, versions=versions, **how, **common)
                try:
                    if stage and not ours:
                        raise ValueError("it has other stages than ours")
                    built = (
                        Ours(impl, shape, dtype, options.chunk_size, stage, request.config, recompute is not False, variant or "exp")
                        if ours
                        else peers.PEERS[impl]()
                    )
                    measure(row, case, built, options.repeats, request.rates[dtype])
                except Exception as error:
                    row.status = "failed" if ours else "skipped"
                    row.note = f"{row.status}: {one_line(error)}"
                yield row


def parse_shapes(texts: Sequence[str]) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for text in texts:
        if text in SHAPES:
            shapes |= {text if len(SHAPES[text]) == 1 else str(shape): shape for shape in SHAPES[text]}
        elif re.fullmatch(r"[1-9]\d*(x[1-9]\d*){4}", text):
            shapes[text] = Shape(*map(int, text.split("x")))
        else:
            raise RequestError(f"unknown shape {text!r}, known are {', '.join(SHAPES)} and BxNHxSxDHQKxDHHV")
    return shapes


def check_names(kind: str, asked: Sequence[str], known: Sequence[str]) -> None:
    if unknown := [name for name in asked if name not in known]:
        raise RequestError(f"unknown {kind} {', '.join(unknown)}, known are {', '.join(known)}")


def check_plot(path: str | None) -> None:
    if path and importlib.util.find_spec("matplotlib") is None:
        raise RequestError("--plot needs matplotlib: pip install 'mlstm_pallas[benchmark]'")
    if path and not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise RequestError(f"no folder for {path}")


def parse_request(options: flags.FlagValues) -> Request:
    device = jax.devices()[0]
    gpu = device.platform == "gpu"
    default = "triton" if gpu else "xla"
    impls = [default, *peers.PEERS] if options.impl == ["all"] else options.impl or [default]
    check_names("impl", impls, [*BACKENDS, *peers.PEERS])
    check_names("stage", options.stage, list(STAGES))
    check_names("variant", options.variant, list(VARIANTS))
    check_names("direction", options.direction, ["fwd", "fwbw"])
    check_names("dtype", options.dtype, KERNEL_DTYPES)
    check_names("recompute_states_in_bw", options.recompute_states_in_bw, ["true", "false"])
    if "triton" in impls and not gpu:
        raise RequestError("impl triton needs a GPU, JAX has none here; xla and interpret run anywhere")
    if options.stage and options["direction"].present:
        raise RequestError("a stage has a direction of its own: give --stage or --direction, not both")
    check_plot(options.plot)
    try:
        check_chunk_size(options.chunk_size)
    except ValueError as error:
        raise RequestError(str(error)) from None
    config = parse_config(options.config) if options.config else None
    shapes = parse_shapes(options.shape or (["7b-8k", "tfla-8k", "b1-8k"] if gpu else ["tiny"]))
    given, rates = (options.peak_tflops, options.peak_tbps), {}
    for dtype in options.dtype:
        known = roofline.device_rates(device.device_kind, dtype)
        flops, bandwidth = (rate if x is None else x * 1e12 for x, rate in zip(given, known, strict=True))
        rates[dtype] = flops, bandwidth
    if not gpu:
        print(f"no GPU here: measuring {', '.join(impls)} on the CPU, at {', '.join(shapes)}; these are not the speeds of the kernels")
    recompute = [x == "true" for x in options.recompute_states_in_bw]
    return Request(shapes, impls, options.direction, options.dtype, options.stage, recompute, options.variant, config, rates)


@contextlib.contextmanager
def persistent_cache(folder: str | None) -> Iterator[None]:
    """Inside, compiled programs are kept in the folder and taken from there; without one nothing changes."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes")
    before = [getattr(jax.config, name) for name in names]

    def use(values):
        for name, value in zip(names, values, strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # which remembers the folder of its first use

    if folder:
        use((folder, 0.0, -1))
    try:
        yield
    finally:
        if folder:
            use(before)


# ---------------------------------------------------------------- the command


def define_flags(values: flags.FlagValues) -> None:
    """Not at import: whoever imports this module has flags of their own."""
    define = dict(flag_values=values)
    flags.DEFINE_list("shape", [], f"{', '.join(SHAPES)}, or BxNHxSxDHQKxDHHV; none: the 8k ones, without a GPU tiny.", **define)
    impls = f"{', '.join(BACKENDS)}, {', '.join(peers.PEERS)}; all: ours and every peer; none: triton, without a GPU xla."
    flags.DEFINE_list("impl", [], impls, **define)
    flags.DEFINE_list("stage", [], f"Stages by themselves, not the whole: {', '.join(STAGES)}.", **define)
    flags.DEFINE_list("direction", ["fwd"], "fwd: forward; fwbw: forward and backward.", **define)
    flags.DEFINE_list("dtype", ["bfloat16"], f"Of q, k, v: {', '.join(KERNEL_DTYPES)}.", **define)
    flags.DEFINE_integer("chunk_size", None, "Steps of a chunk of ours; none: the default config's.", **define)
    flags.DEFINE_string(
        "config", None, "Of ours: a part of a row of mlstm_pallas/tuning, '{\"chunk_size\": 64}', or a file of it.", **define
    )
    flags.DEFINE_list("recompute_states_in_bw", ["true"], "Of ours, forward and backward: true, false.", **define)
    flags.DEFINE_list("variant", ["exp"], f"Of ours: {', '.join(VARIANTS)}; packed: exp with {peers.PACKED} sequences in a row.", **define)
    flags.DEFINE_integer("repeats", 10, "Batches of calls; the median counts.", lower_bound=1, **define)
    flags.DEFINE_string("compilation_cache_dir", None, "Folder in which compiled programs are kept between processes.", **define)
    flags.DEFINE_string("commit", None, "For the rows; none: what git says of the working tree, if it is one.", **define)
    flags.DEFINE_list("from_jsonl", [], "Measure nothing; report the rows of these files.", **define)
    flags.DEFINE_string("jsonl", None, "File to append the rows to, as they come.", **define)
    flags.DEFINE_string("plot", None, "PNG to write at the end.", **define)
    flags.DEFINE_bool("markdown", False, "Print a table of the medians in Markdown at the end.", **define)
    flags.DEFINE_float("peak_tflops", None, "The device's rate of matrix products, for the roofline.", lower_bound=1e-9, **define)
    flags.DEFINE_float("peak_tbps", None, "The device's memory bandwidth, for the roofline.", lower_bound=1e-9, **define)


def stored_rows(paths: Sequence[str]) -> list[Row]:
    try:
        return [row for path in paths for row in read_rows(path)]
    except ValueError as error:
        raise RequestError(str(error)) from None


def run(options: flags.FlagValues) -> int:
    """Measures and prints what the flags ask for; returns the exit code."""
    with contextlib.ExitStack() as stack:
        try:
            if options.from_jsonl:
                check_plot(options.plot)
                measured: Iterator[Row] = iter(stored_rows(options.from_jsonl))
            else:
                measured = measured_rows(options, parse_request(options))
            jsonl = stack.enter_context(open(options.jsonl, "a")) if options.jsonl else None
        except (RequestError, OSError) as error:
            print(f"kernel_benchmark: {error}", file=sys.stderr)
            return 2
        stack.enter_context(persistent_cache(options.compilation_cache_dir))
        rows, code = command.collect(measured, None if options.from_jsonl else progress, jsonl)
    print(f"\n{table(rows)}")
    if options.markdown and rows:
        print(f"\n{markdown(rows)}")
    if options.plot and any(row.ms for row in rows):
        plot(rows, options.plot)
    elif options.plot:
        print(f"nothing was measured: {options.plot} is not written")
    return code


if __name__ == "__main__":
    # Peers in torch need memory on the same device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    command.main(define_flags, run)
