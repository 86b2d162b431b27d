"""What a call is made of: everything static about it, its arrays, and what its backward pass keeps."""

import dataclasses
from typing import Any, NamedTuple

import jax

from mlstm_pallas.config import KernelConfig
from mlstm_pallas.problem import InputGate, Problem


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a call."""

    problem: Problem
    config: KernelConfig
    eps: float
    stabilize_correctly: bool
    norm_val: float
    recompute_states_in_bw: bool
    backend: str | None
    input_gate: InputGate = InputGate.EXP
    normalize: bool = True
    starts_empty: bool = False  # no initial states were given: they are zeros, and have no gradients
    last_states: bool = True  # are wanted
    segments: int = 1  # of each sequence, in a forward pass without states and in the summary of a device's part

    @property
    def stabilised(self) -> bool:
        return self.input_gate is InputGate.EXP

    @property
    def normaliser(self) -> dict[str, Any]:
        # where m is 0, both floors are the same
        return dict(eps=self.eps, stabilize_correctly=self.stabilize_correctly and self.stabilised, norm_val=self.norm_val)

    def with_heads(self, B: int, NH: int) -> "Plan":
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, B=B, NH=NH))

    @property
    def alone(self) -> "Plan":
        """The plan of a forward pass that no backward pass follows: there are no states to keep."""
        return dataclasses.replace(self, recompute_states_in_bw=True)

    def launch(self, interpret: bool) -> dict[str, Any]:
        return dict(problem=self.problem, config=self.config, interpret=interpret)

    @property
    def stateless_forward(self) -> "Plan | None":
        """The plan of a forward pass that reads no states, in its shorter chunks and its segments; None where it does."""
        forward, _ = self.config.passes(self.problem, self.recompute_states_in_bw)
        return self._in_chunks_of("recurrent_fw_H", self.config.walk_segments(self.problem)) if "recurrent_fw_H" in forward else None

    @property
    def stateless_backward(self) -> "Plan | None":
        """Likewise of a backward pass, which has no segments."""
        _, backward = self.config.passes(self.problem, self.recompute_states_in_bw)
        return self._in_chunks_of("recurrent_bw_dQ", 1) if "recurrent_bw_dQ" in backward else None

    def _in_chunks_of(self, stage: str, segments: int) -> "Plan":
        return dataclasses.replace(self, problem=self.config.problem_of(stage, self.problem), segments=segments)

    @property
    def of_segments(self) -> "Plan":
        """The plan for segments as heads."""
        p = self.problem
        return dataclasses.replace(self, problem=dataclasses.replace(p, NH=p.NH * self.segments, S=p.S // self.segments), segments=1)

    def chunks(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], self.problem.NC, self.problem.L, *x.shape[3:])


class Inputs(NamedTuple):
    """Padded and cast: q, k, v in the kernel dtype, starts (1 where a packed sequence begins) int32, the rest float32."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    i: jax.Array
    f: jax.Array
    c_initial: Any  # an array; None within a pass that starts from zeros
    n_initial: jax.Array
    m_initial: jax.Array
    starts: jax.Array | None = None


Outputs = tuple[jax.Array, Any]  # h; (c, n, m), or None where they are not wanted


class KeptStates(NamedTuple):
    """At the chunk borders, of L steps: times exp(m)."""

    C: jax.Array  # (B, NH, NC, DHQK, DHHV) in the kernel dtype; float32 in plain jnp
    n: jax.Array  # (B, NH, NC, DHQK) float32, as what follows
    m: Any  # (B, NH, NC + 1); None: made anew
    C_last: Any  # (B, NH, DHQK, DHHV); None where the last states are not wanted
    n_last: jax.Array  # (B, NH, DHQK)


class Residuals(NamedTuple):
    """What the backward pass keeps: h and z for the normaliser, the states where they are not to be recomputed."""

    inputs: Inputs
    h: jax.Array | None
    z: jax.Array | None
    states: KeptStates | None
