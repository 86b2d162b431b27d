"""The parts that the documented systems share: argument checks, gates, stages, both passes.

Notation: B batch, NH heads, S sequence length, DHQK head dimension of q and k, DHHV head dimension
of v and h, NC chunks of L steps.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas.formulas import gates
from mlstm_pallas.formulas.gates import ChunkGates, LocalGates
from mlstm_pallas.formulas.normaliser import at_least, normaliser_gradients, query_scale
from mlstm_pallas.launches.kernel_tiles import FIELDS
from mlstm_pallas.operands.scaled_rows import ScaledRows
from mlstm_pallas.planning.backend import requested_lowering
from mlstm_pallas.planning.call_spec import CallSpec, Plan, call_spec, launch_of
from mlstm_pallas.planning.config import KernelConfig
from mlstm_pallas.planning.dispatch import lowerings, stage
from mlstm_pallas.planning.options import CHECKS, Options
from mlstm_pallas.prepare import pad
from mlstm_pallas.problem.arrays import Cotangents, Inputs, Residuals, States, StoredStates
from mlstm_pallas.problem.dimensions import InputGate, accumulator_dtype
from mlstm_pallas.problem.gpu import target_gpu
from mlstm_pallas.problem.signatures import bind
from mlstm_pallas.problem.validation import (
    INPUT_DTYPES,
    KERNEL_DTYPES,
    Shapes,
    check_array,
    check_chunk_size,
    check_dtype,
    check_flag,
    check_integer,
    check_scalar,
    check_shapes,
    check_states_complete,
    shapes_by_name,
)
from mlstm_pallas.schedules.backward import backward as backward_schedule
from mlstm_pallas.sharding.axes import sharded_alike
from mlstm_pallas.sharding.on_shards import on_shards
from mlstm_pallas.stages import STAGES
from mlstm_pallas.vectors.chunk_gates import joined_gates, local_gates, stabilisers
from mlstm_pallas.vectors.scan import PrefixScan, by_chunk

# The dimensions of arguments and results. States at chunk boundaries may include the last one.
CONTRACTS = shapes_by_name(
    {
        "B, NH, S, DHQK": "matQ matK matDeltaQ matDeltaK",
        "B, NH, S, DHHV": "matV matH matDeltaH matDeltaV",
        "B, NH, NC, L": "vecI vecF vecA vecB",
        "B, NH, S": "vecN_out vecN_with_eps vecM_out vecM vecM_combine vecDeltaI vecDeltaF",
        "B, NH, NC * DHQK, DHHV or B, NH, (NC + 1) * DHQK, DHHV": (
            "matC_states matC_all matDeltaC_states matDeltaC_all"
        ),
        "B, NH, NC * DHQK or B, NH, (NC + 1) * DHQK": "vecN_states vecN_all",
        "B, NH, NC or B, NH, (NC + 1)": "scaM_states scaM_all scaM_inter scaMinter_states",
        "B, NH, DHQK, DHHV": "matC_initial matC_last matDeltaC_initial matDeltaC_last",
        "B, NH, DHQK": "vecN_initial vecN_last vecDeltaN_initial",
        "B, NH": "scaM_initial scaMinter_initial scaM_last scaDeltaM_initial",
    }
)
SEQUENCES = "matQ", "matK", "matV", "matDeltaH"
STATES = "matC_states", "vecN_states", "scaM_states"
INPUTS = "matQ", "matK", "matV", "vecI", "vecF", "matC_initial", "vecN_initial", "scaM_initial"
GRADIENTS = {name: f"{name[:3]}Delta{name[3:]}" for name in INPUTS}
# What the flags add to the results.
ASKED = {"return_last_states": ("matC_last", "vecN_last", "scaM_last"), "return_all_states": STATES}

Function = TypeVar("Function", bound=Callable[..., Any])
Arrays = dict[str, Any]  # by name, of a documented function with its other arguments
Names = tuple[str, ...]


def with_name(function: Function, name: str, module: str) -> Function:
    """The function under the name that a system documents, which errors of its arguments show."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        return function(**bind(call, signature, args, keywords))

    call.__name__ = call.__qualname__ = name
    call.__module__ = module
    return cast(Function, call)


# Each checks an argument that is no array, under the name that it has in a function.
STATICS: dict[str, Any] = {
    **CHECKS,
    **FIELDS,
    "return_all_states": check_flag,
    "store_initial_state": check_flag,
    "qk_scale": functools.partial(check_scalar, signed=True),
    "output_dtype": functools.partial(check_dtype, backend="xla"),
    "chunk_size": check_chunk_size,
    "num_chunks": functools.partial(check_integer, least=1),
}


def canonical(name: str) -> str:
    """The name of an argument of a stage in all systems."""
    return re.sub("_(all|inter)$", "_states", name.replace("scaMinter", "scaM"))


def check_statics(arguments: Arrays) -> dict[str, Any]:
    """Checks the arguments that are no arrays; returns them by lower-case name, a None left out."""
    checked = {}
    for name, x in arguments.items():
        key = name if name in STATICS else name.lower()
        if key in STATICS and not (x is None and key in ("qk_scale", *FIELDS)):
            checked[key] = STATICS[key](name, x)
    return checked


def check_arrays(arrays: Arrays, contracts: dict[str, Shapes], statics: Arrays) -> dict[str, int]:
    """Checks the arrays, of which some may be None; returns the sizes of the dimensions.

    The first is q or k, in whose dtype the stages compute.
    """
    initial = {name: x for name, x in arrays.items() if name.endswith("_initial")}
    check_states_complete(initial)
    first = next(iter(arrays))
    backend = requested_lowering(None, target_gpu(arrays[first]))
    optional = "vecM_out|matDeltaC_last|.*_initial"
    if initial:  # from which the other states follow
        optional += "|.*_states|.*_all"
    for name, x in arrays.items():
        if x is not None or not re.fullmatch(optional, name):
            check_array(
                name,
                x,
                KERNEL_DTYPES if name == first else INPUT_DTYPES,
                backend,
            )
    sizes = check_shapes({name: arrays[name] for name in SEQUENCES if name in arrays}, contracts)
    S, DHQK, L = sizes["S"], sizes["DHQK"], statics["chunk_size"]
    NC = S // L
    if S % L or statics.get("num_chunks", NC) != NC:
        count = f"{statics['num_chunks']} " if "num_chunks" in statics else ""
        raise ValueError(
            f"{first} has shape {tuple(arrays[first].shape)}, expected S = {S} to be {count}chunks "
            f"of {L} steps"
        )
    sizes |= {
        "NC": NC,
        "(NC + 1)": NC + 1,
        "NC * DHQK": NC * DHQK,
        "(NC + 1) * DHQK": (NC + 1) * DHQK,
        "L": L,
        "DHV": sizes["DHHV"],
    }
    return check_shapes(arrays, contracts, sizes)


def documented(stage: str, *names: str, **tiles: str) -> Callable[[Function], Function]:
    """Gives a documented function, which is its signature and its docstring, what it runs.

    Args:
      stage: a method of ``_Shard``; the kernel of this name may have tiles among the arguments.
      names: of the results.
      tiles: the arguments that are fields of the kernel's tiles under another name, by field; "":
        none is.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            results = run(stage, bind(call, signature, args, keywords), names, tiles)
            return results if len(results) > 1 else results[0]

        return cast(Function, call)

    return decorate


def dtypes_of_results(stage: str, arrays: Arrays, names: Names, statics: Arrays) -> Arrays:
    """The dtypes of results that are documented with another one than their stage's, by name.

    Those of the backward pass are the gradients of the arguments that are not None.
    """
    if stage == "backward":
        return {y: arrays[x].dtype for x, y in GRADIENTS.items() if arrays[x] is not None}
    if stage == "parallel_bw_dQKV" and "output_dtype" in statics:
        return dict.fromkeys(names, statics["output_dtype"])
    buffers = {canonical(name): x for name, x in arrays.items() if x is not None}
    return {name: buffers[name].dtype for name in names if name in buffers}


def run(stage: str, arguments: Arrays, names: Names, tiles: dict[str, str]) -> tuple[Any, ...]:
    """The results of a stage for the arguments of a ``documented`` function, which it checks.

    Initial states that are None are zeros. An argument of the name of a result is a buffer at all
    chunk boundaries, which is not read. Flags among the arguments add ``ASKED``.
    """
    statics = check_statics(arguments)
    arrays = {name: x for name, x in arguments.items() if name in CONTRACTS}
    contracts = {
        name: CONTRACTS[name][-1:] if canonical(name) in names else CONTRACTS[name]
        for name in arrays
    }
    if "num_chunks" not in statics:
        contracts["vecF"] = CONTRACTS["vecM"]
    if stage not in STAGES:
        contracts["vecI"] = CONTRACTS["vecM"]
    sizes = check_arrays(arrays, contracts, statics)
    dtypes = dtypes_of_results(stage, arrays, names, statics)
    results: Any = *(names or dtypes), *(ASKED[flag] for flag in ASKED if statics.get(flag))
    fields: Arrays = {x: statics[name] for x in FIELDS if (name := tiles.get(x, x)) in statics}
    fields = {f"triton_{stage}": fields} if fields else {}
    # In the backward functions the denominator, to which eps is added, is a constant.
    options: Arrays = dict(
        eps=0.0,
        norm_val=0.0 if "vecN_out" in arrays else 1.0,
        recompute_states_in_bw=False,
        config=KernelConfig(**fields),
    )
    options |= statics
    first = next(iter(arrays.values()))
    of_call = Options(**{name: options[name] for name in vars(Options()) if name in options})
    spec = call_spec(of_call, sizes, first.dtype, target_gpu(first))
    if "qk_scale" in statics:
        problem = dataclasses.replace(spec.problem, qk_scale=statics["qk_scale"])
        spec = dataclasses.replace(spec, problem=problem)
    values = _run(
        spec,
        {canonical(name): x for name, x in arrays.items() if canonical(name) not in names},
        stage=stage,
        names=results,
        output_dtype=statics.get("output_dtype", spec.dtype),
    )
    return tuple(
        x.astype(dtypes[name]) if name in dtypes else x
        for name, x in zip(results, values, strict=True)
    )


@functools.partial(jax.jit, static_argnames=("spec", "stage", "names", "output_dtype"))
def _run(spec: CallSpec, x: Arrays, **statics: Any) -> Any:
    return on_shards(
        _on_shard,
        spec,
        sharded_alike(spec, x),
        message="the documented stages and passes have no derivatives; use those of "
        "mlstm_pallas.mlstm_chunkwise or of _mlstm_chunkwise_fwbw_generator",
        **statics,
    )


def _on_shard(plan: Plan, x: Arrays, *, stage: str, names: Any, output_dtype: Any) -> Any:
    """The results of a stage, as the documents have them.

    In the stage heads are padded, and chunks and rows of states are two axes. q, k, v, dh and C and
    dC before and after each chunk have the kernel dtype, all other arrays that of the accumulator.
    """
    spec = plan.spec
    p = spec.problem
    heads = {CONTRACTS[name][0][-1]: y.shape[-1] for name, y in x.items() if name in SEQUENCES}

    def head_dims(name: str) -> list[str]:
        return [dim[-4:] for dim in CONTRACTS[name][0] if dim[-4:] in heads]

    def padded(name: str, y: Any) -> jax.Array:
        if y is None:  # zeros that vary over the same axes of a shard_map as the other arrays
            dims = [heads[dim] for dim in head_dims(name)]
            y = jnp.zeros_like(jax.tree.leaves(x)[0].reshape(p.BNH, -1)[:, 0])
            y = jnp.broadcast_to(y.reshape(p.BNH, *(1 for _ in dims)), (p.BNH, *dims))
        if "NC * DHQK" in CONTRACTS[name][0]:
            rows = p.NC * heads["DHQK"]
            y = y[:, -rows:] if "Delta" in name else y[:, :rows]
            y = y.reshape(p.BNH, p.NC, heads["DHQK"], *y.shape[2:])
        in_kernel_dtype = name in SEQUENCES or name.endswith("C_states")
        dtype = spec.dtype if in_kernel_dtype else accumulator_dtype(spec.dtype)
        return pad(y, dtype, *(p.DHQK if dim == "DHQK" else p.DHV for dim in head_dims(name)))

    def documented(name: str) -> Any:
        y = results[name][(..., *(slice(heads[dim]) for dim in head_dims(name)))]
        return lax.collapse(y, 1, 3) if "NC * DHQK" in CONTRACTS[name][0] else y

    arrays = {name: padded(name, y) for name, y in x.items() if y is not None or "initial" in name}
    shard = _Shard(plan, arrays, output_dtype)
    if stage in STAGES:
        shard.set_gates(shard.gates())
    results = getattr(shard, stage)()
    return jax.tree.map(documented, names)


@dataclasses.dataclass
class _Shard:
    """The stages and passes of a shard: from x to results, arrays (B * NH, ...) by name.

    The arrays of a stage include its gates.
    """

    plan: Plan
    x: Arrays
    output_dtype: Any

    def core(self, name: str, **options: Any) -> Any:
        """Runs a stage of the core. Its operands are found in x by name; None: x lacks them."""
        operands = STAGES[name].Operands
        run = stage(name, {name: launch_of(self.spec, name, self.spec.lowering)})
        return run(operands(*map(self.x.get, operands._fields)), **options)

    @property
    def spec(self) -> CallSpec:
        return self.plan.spec

    def set_gates(self, g: ChunkGates) -> None:
        """Adds the gates, and their fields per step."""
        self.x |= dict(gates=g, **g.per_step()._asdict())

    def gates(self) -> ChunkGates:
        """The gates from vecI, vecF or vecB, and m.

        vecI may be the m_t of every step. m_t - b_t equals its running maximum, so with m_t all but
        e and abar are right. vecF is pre-activations (B * NH, S) or log sigmoid(f)
        (B * NH, NC, L). vecB is its running sums within each chunk, which are finite. m is the
        first one (B * NH,), or those of the chunk boundaries, (B * NH, NC) or (B * NH, NC + 1).
        """
        x, p, gate = self.x, self.spec.problem, InputGate.EXP
        i = x["vecI"] if "vecI" in x else x["vecM"].reshape(p.BNH, p.NC, p.L)
        m = x["scaM_initial"][:, None] if "scaM_initial" in x else x["scaM_states"]
        if "vecB" in x:
            e, zeros = gates.two_sum(i, -x["vecB"]), jnp.zeros_like(i)
            e_max = lax.associative_scan(gates.max_two_floats, e, axis=-1)
            local = LocalGates((x["vecB"], zeros), e, e_max, zeros)
        else:
            if x["vecF"].ndim == 2:
                logs = gates.log_gates(i, x["vecF"].reshape(i.shape), gate)
            else:
                reset = x["vecF"] <= gates.MASKED
                logs = i, jnp.where(reset, 0.0, x["vecF"]), reset
            chunk_gates = functools.partial(
                local_gates, PrefixScan(p.L), is_start=None, input_gate=gate
            )
            local = by_chunk(chunk_gates)(*logs)
        count = m.shape[1] - 1  # chunks with a known m
        if count < p.NC:
            g, a = (y[:, count:, -1] for y in gates.summary(local))
            m_after = jax.vmap(functools.partial(stabilisers, PrefixScan(p.NC - count)))
            m = jnp.append(m, m_after(g, a, m[:, count]), axis=1)
        joined = by_chunk(lambda local, *m: joined_gates(PrefixScan(p.L), local, m, gate))
        per_step, gamma = joined(local, m[:, :-1], m[:, 1:])
        return gates.as_chunk_gates(per_step, gamma, m)

    def recurrent_fw_C(self) -> Arrays:
        """The states at the chunk boundaries, C in the kernel dtype; the last ones in float32."""
        m = self.x["scaM_states"]
        C, C_last, n, n_last = self.core("recurrent_fw_C")
        return dict(
            matC_states=jnp.append(C, C_last[:, None].astype(C.dtype), axis=1),
            vecN_states=jnp.append(n, n_last[:, None], axis=1),
            scaM_states=m,
            matC_last=C_last,
            vecN_last=n_last,
            scaM_last=m[:, -1],
        )

    def parallel_fw_H(self) -> Arrays:
        """H in the output dtype; its denominator without and with eps; m of every step."""
        normaliser: Any = self.spec.normaliser
        options = dict(normaliser=normaliser)
        if self.output_dtype != self.spec.dtype:
            options |= dict(output_dtype=self.output_dtype)
            first = self.spec.lowering
            if first.folder == "mosaic_gpu":  # whose kernel writes H in its own dtype alone
                spec = dataclasses.replace(self.spec, lowering=lowerings(first)[1])
                self.plan = spec.plan
        H, z = self.core("parallel_fw_H", **options)
        m = self.x["vecM"]
        den = at_least(jnp.abs(z), normaliser.floor(m))
        return dict(matH=H, vecN_out=den, vecN_with_eps=den + normaliser.eps, vecM_out=m)

    def recurrent_bw_dC(self) -> Arrays:
        """The gradients of C after each chunk, in the kernel dtype, and of the first C, float32.

        Also those at all chunk boundaries, in the kernel dtype.
        """
        spec, x = self.spec, self.x
        gradients = normaliser_gradients(spec.normaliser, None, x["vecN_out"], x["vecM"])
        r = query_scale(x["vecW"], spec.problem.qk_scale, gradients.vecInvDen)
        x["queries"] = ScaledRows(x["matQ"], r)
        dC, dC_initial, *_ = self.core("recurrent_bw_dC")
        every = jnp.append(dC_initial[:, None].astype(dC.dtype), dC, axis=1)
        return dict(matDeltaC_states=dC, matDeltaC_initial=dC_initial, matDeltaC_all=every)

    def parallel_bw_dQKV(self) -> Arrays:
        """dQ, dK and dV in the kernel dtype, from C before and dC after each chunk."""
        spec, x = self.spec, self.x
        if not self.plan.by_chunk:
            x["vecZ"] = x["vecN_out"]
            x["scores"], *_ = self.core(
                "parallel_bw_dP", normaliser=spec.normaliser, return_keys=False
            )
        # dz is 0, so n does not matter, and its gradient is 0.
        p = spec.problem
        n = jnp.zeros((p.BNH, p.NC, p.DHQK), x["vecW"].dtype)
        x |= dict(
            normaliser_gradients=normaliser_gradients(
                spec.normaliser, None, x["vecN_out"], x["vecM"]
            ),
            vecN_states=n,
            vecDeltaN_states=n,
        )
        if self.plan.by_chunk:
            gradients, _ = self.core("chunk_gradients")
        else:
            gradients = self.core("parallel_bw_dQKV")
        dq, dk, dv, *_ = gradients
        return dict(matDeltaQ=dq, matDeltaK=dk, matDeltaV=dv)

    def forward(self) -> Arrays:
        """The results of recurrent_fw_C and parallel_fw_H."""
        self.set_gates(self.core("chunk_gates"))
        states, p = self.recurrent_fw_C(), self.spec.problem
        self.x |= {name: states[name][:, : p.NC] for name in ("matC_states", "vecN_states")}
        return states | self.parallel_fw_H()

    def backward(self) -> Arrays:
        """The exact backward pass with a constant denominator, vecN_out + eps."""
        x, p = self.x, self.spec.problem
        C, n = x.get("matC_states"), x["vecN_initial"]
        spec = dataclasses.replace(self.spec, recompute_states_in_bw=C is None)
        # dz is 0, so n does not matter.
        n_states = jnp.zeros((p.BNH, p.NC, p.DHQK), n.dtype)
        q, k, v, i, f, c, n, m = (x[name] for name in GRADIENTS)
        residuals = Residuals(
            Inputs(q, k, v, i, f, States(c, n, m)),
            None,
            x["vecN_out"],
            StoredStates(C, n_states),
        )
        last = States(x.get("matDeltaC_last"), jnp.zeros_like(n))
        dx = backward_schedule(spec.plan, residuals, Cotangents(x["matDeltaH"], last))
        gradients = dx.q, dx.k, dx.v, dx.i, dx.f, *dx.initial
        return dict(zip(GRADIENTS.values(), gradients, strict=True))
