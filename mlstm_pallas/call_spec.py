"""A call: its static choices, made once, its arrays, and the residuals of its forward pass."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mlstm_pallas import planning
from mlstm_pallas.config import KernelConfig
from mlstm_pallas.gpu import Gpu
from mlstm_pallas.normaliser import Normaliser
from mlstm_pallas.planning import Options, Plan
from mlstm_pallas.problem import InputGate, Layout, Problem
from mlstm_pallas.stage import Launch, Lowering


@dataclasses.dataclass(frozen=True)
class CallSpec:
    """What a call is asked for, from which its plan follows.

    Attributes:
      problem: padded.
      config: the caller's overrides.
      dtype: of q, k, v in the matrix products.
      normaliser: None: h is the numerator.
      gpu: that the kernels are planned for.
      backend: the caller's; None: by the platform of the lowering.
      has_initial_state: False: the states start from zeros, which have no gradients.
      return_last_states: whether the call returns the last states.
      layout: of q, k, v, h and their gradients.
    """

    problem: Problem
    config: KernelConfig
    dtype: jnp.dtype
    normaliser: Normaliser | None
    gpu: Gpu
    recompute_states_in_bw: bool = True
    backend: str | None = None
    input_gate: InputGate = InputGate.EXP
    has_initial_state: bool = True
    return_last_states: bool = True
    layout: Layout = Layout.BNTH

    @property
    def options(self) -> Options:
        """What its plan depends on."""
        lowering = Lowering(self.backend or Lowering.TRITON)
        return Options(self.dtype, lowering, self.config, self.recompute_states_in_bw)

    @property
    def plan(self) -> Plan:
        """The plan of the call's kernels."""
        return planning.plan(self.problem, self.options, self.gpu)

    def launch(
        self,
        name: str,
        lowering: Lowering,
        problem: Problem | None = None,
        num_splits: int = 1,
    ) -> Launch:
        """How a function of ``dispatch.py`` runs.

        Args:
          lowering: where the call runs, or the kernel whose outputs the function reads.
          problem: replaces the call's.
          num_splits: of split_products.
        """
        p = problem or self.problem
        if lowering is Lowering.XLA:
            return planning.plain(p)
        return planning.launch(name, p, self.options, self.gpu, lowering, num_splits)

    def recomputes_scores(self, lowering: Lowering) -> bool:
        """As ``Plan``; in plain jnp P and dP are in memory."""
        return lowering is not Lowering.XLA and self.plan.recomputes_scores

    def __str__(self) -> str:
        p, plan = self.problem, self.plan
        fused = f"fused scan in chunks of {plan.scan_problem.L} and {plan.num_splits} splits"
        return (
            f"{self.layout}, B {p.B}, NH {p.NH}, S {p.S}, {self.dtype.name} heads of "
            f"{p.DHQK}/{p.DHHV} in chunks of {p.L}, backend {self.backend}; "
            f"forward: {fused if plan.fused else 'materialised states'}; "
            f"P and dP: {'recomputed' if plan.recomputes_scores else 'in memory'}"
        )

    @property
    def stabilised(self) -> bool:
        return self.input_gate is InputGate.EXP

    @property
    def forward_only(self) -> "CallSpec":
        """The spec of a forward pass without a backward pass, which stores no states."""
        return dataclasses.replace(self, recompute_states_in_bw=True)

    def with_heads(self, B: int, NH: int) -> "CallSpec":
        """The spec of a shard."""
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, B=B, NH=NH))

    def chunks(self, x: jax.Array) -> jax.Array:
        """(B * NH, S, ...) to (B * NH, NC, L, ...)."""
        return x.reshape(x.shape[0], self.problem.NC, self.problem.L, *x.shape[2:])


class Inputs(NamedTuple):
    """Padded and cast: q, k, v in the kernel dtype, gates and states float32.

    Gates and starts have whole chunks of steps; q, k and v have the caller's steps and layout.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    i: jax.Array
    f: jax.Array
    c_initial: Any  # an array; None inside a pass that starts from zeros
    n_initial: jax.Array
    m_initial: jax.Array
    starts: jax.Array | None = None  # int32, 1 where a packed segment begins
    lengths: jax.Array | None = None  # (B, NH) int32, h is 0 from this step on; None: nowhere
    # (B, NH, N) int32, of ``gates.segment_ends``; None where no states of segments are asked for
    segment_ends: Any = None


class LastStates(NamedTuple):
    """The last states, or their cotangents, whose c and m may be None: zeros."""

    c: Any  # (B, NH, DHQK, DHHV)
    n: jax.Array  # (B, NH, DHQK)
    m: Any  # (B, NH)


class StoredStates(NamedTuple):
    """The states at the boundaries of the call's chunks; the true ones are these times exp(m).

    C is in the kernel dtype, the rest float32.
    """

    C: Any  # (B, NH, NC, DHQK, DHHV); None: recomputed
    n: Any  # (B, NH, NC, DHQK)
    m: Any  # (B, NH, NC + 1); None: recomputed
    C_last: Any  # (B, NH, DHQK, DHHV); None where C is None or the last states are not returned
    n_last: Any  # (B, NH, DHQK)


class Forward(NamedTuple):
    """The outputs of a forward pass."""

    h: jax.Array  # (B, NH, S, DHHV) or (B, S, NH, DHHV)
    last: LastStates | None  # None where they are not returned
    z: jax.Array | None  # (B, NH, S); None without a normaliser
    states: StoredStates


class Cotangents(NamedTuple):
    h: jax.Array
    last: Any  # LastStates; None where the last states are not returned


class Residuals(NamedTuple):
    """The parts of the forward pass that the backward pass reads; h and z are the normaliser's."""

    inputs: Inputs
    h: jax.Array | None  # None without a normaliser, or where the denominator is a constant
    z: jax.Array | None
    states: StoredStates
