"""mlstm_recurrent_step, mlstm_recurrent_sequence: the mLSTM one token at a time, as in generation."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas import validation
from mlstm_pallas.backend import on_backend, requested_backend, target_device_kind
from mlstm_pallas.config import KernelConfig, config_for
from mlstm_pallas.launch import without_mosaic_gpu
from mlstm_pallas.normaliser import Normaliser
from mlstm_pallas.problem import InputGate, Problem, accumulator_dtype
from mlstm_pallas.sharding import aligned, over_shards
from mlstm_pallas.stage import Lowering, StageCall, StageConfig
from mlstm_pallas.stages.recurrent_step import recurrent_step

NO_DERIVATIVE = 'the kernels of mlstm_recurrent_step and mlstm_recurrent_sequence have no derivatives; backend="xla" has them'


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """Everything static about a step."""

    problem: Problem
    tiles: StageConfig
    normaliser: Normaliser | None
    backend: str | None

    def with_heads(self, B: int, NH: int) -> "StepSpec":
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, B=B, NH=NH))


class States(NamedTuple):
    c: jax.Array  # (B, NH, DHQK, DHV)
    n: jax.Array  # (B, NH, DHQK)
    m: jax.Array | None  # (B, NH); None: the sigmoid input gate


class Token(NamedTuple):
    """q, k (B, NH, DHQK), v (B, NH, DHV), i, f (B, NH); of several tokens with S after NH."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    i: jax.Array
    f: jax.Array


def _step(spec: StepSpec, x: Token, states: States) -> tuple[jax.Array, States]:
    def run(lowering: Lowering, x: Token, states: States):
        call = StageCall(spec.problem, spec.tiles, None, without_mosaic_gpu(lowering))
        h, c, n, m = recurrent_step(*x, *states, normaliser=spec.normaliser, call=call)
        return h, States(c, n, m)

    return on_backend(spec.backend, run, x, states)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _step_on_shards(spec: StepSpec, x: Token, states: States) -> tuple[jax.Array, States]:
    return over_shards(_step, spec, x, states)


@_step_on_shards.defjvp
def _no_jvp(spec: StepSpec, primals, tangents):
    raise TypeError(NO_DERIVATIVE)


@functools.partial(jax.jit, static_argnums=0)
def step(spec: StepSpec, x: Token, states: States) -> tuple[jax.Array, States]:
    """h (B, NH, DHV) and the new states. B and NH lead everywhere."""
    # The plain form alone is differentiable.
    return (_step if spec.backend == "xla" else _step_on_shards)(spec, x, states)


@functools.partial(jax.jit, static_argnums=0)
def sequence(spec: StepSpec, x: Token, states: States) -> tuple[jax.Array, States]:
    """h (B, NH, S, DHV) and the last states."""

    def one(states, x):
        h, states = step(spec, x, states)
        return states, h

    states, h = lax.scan(one, states, jax.tree.map(lambda y: jnp.moveaxis(y, 2, 0), x))
    return jnp.moveaxis(h, 0, 2), states


def _check_dtype(name: str, dtype: Any, expected: tuple[str, ...], backend: str | None) -> None:
    if jnp.dtype(dtype).name in expected or (dtype == jnp.float64 and backend == "xla"):
        return
    hint = '; float64 runs on backend="xla" only' if dtype == jnp.float64 else ""
    raise TypeError(f"{name} has dtype {dtype}, expected one of {', '.join(expected)}{hint}")


def _check_arrays(x: Token, c, n, m, *, steps: bool, input_gate: InputGate, backend: str | None) -> None:
    states = dict(c=c, n=n) | ({} if m is None and input_gate is InputGate.SIGMOID else dict(m=m))
    given = validation.check_states_complete(states)
    arrays = x._asdict() | (states if given else {})
    for name, y in arrays.items():
        validation.check_is_array(name, y)
        if name in "if":
            _check_dtype(name, y.dtype, validation.INPUT_DTYPES, backend)
        else:
            _check_dtype(name, y.dtype, validation.KERNEL_DTYPES, backend)
    of_token = {name: [dim for dim in dims if steps or dim != "S"] for name, dims in validation.SEQUENCE_DIMS.items()}
    validation.check_shapes(arrays, of_token | validation.STATE_DIMS)
    validation.check_one_dtype(arrays)


def _run(
    x: Token, c, n, m, *, steps: bool, eps, norm_val, stabilize_correctly, input_gate, normalize, backend, config
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    stabilize_correctly = validation.check_flag("stabilize_correctly", stabilize_correctly)
    gate, normalize = validation.check_input_gate(input_gate, normalize)
    eps, norm_val = validation.check_scalar("eps", eps), validation.check_scalar("norm_val", norm_val)
    validation.check_backend(backend)
    backend = requested_backend(backend)
    validation.check_instance("config", config, KernelConfig)
    _check_arrays(x, c, n, m, steps=steps, input_gate=gate, backend=backend)

    (B, NH, *_, DHQK), DHV = x.q.shape, x.v.shape[-1]
    zeros = functools.partial(jnp.zeros, dtype=accumulator_dtype(x.q.dtype))
    if c is None:
        c, n = zeros((B, NH, DHQK, DHV)), zeros((B, NH, DHQK))
    if m is None:
        m = zeros((B, NH))
    filled = config_for(DHQK, DHV, 1, c.dtype, device_kind=target_device_kind(), explicit=config)
    if B * NH == 0:
        backend = "xla"  # a kernel has no empty grid
    *token, c, n, m = aligned(*x, c, n, m)
    normaliser = Normaliser(eps, norm_val, stabilize_correctly) if normalize else None
    problem = Problem(B, NH, 1, DHQK, DHV, 1, DHQK**-0.5)
    spec = StepSpec(problem, filled.stage("recurrent_step"), normaliser, backend)
    h, states = (sequence if steps else step)(spec, Token(*token), States(c, n, None if gate is InputGate.SIGMOID else m))
    return h, (states.c, states.n, m if states.m is None else states.m)


def mlstm_recurrent_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    i: jax.Array,
    f: jax.Array,
    c: jax.Array | None = None,
    n: jax.Array | None = None,
    m: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    norm_val: float = 1.0,
    stabilize_correctly: bool = True,
    input_gate: str = "exp",
    normalize: bool = True,
    backend: str | None = None,
    config: KernelConfig | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """One step of the mLSTM of xLSTM (arXiv:2405.04517, equations 19 to 27), from the states before the token to those after it.

        m' = max(log sigmoid(f) + m, i)
        C' = exp(log sigmoid(f) + m - m') C + exp(i - m') k v^T                                 (n' alike, with k)
        h  = scale C'^T q / (max(|scale q . n'|, norm_val exp(-m')) + eps)                      scale = DHQK ** -0.5

    With the sigmoid input gate (mLSTMsig, arXiv:2503.14376) exp(i - m') is sigmoid(i), the decay sigmoid(f), and m stays 0:

        h  = scale C'^T q / (max(|scale q . n'|, norm_val) + eps), or without normalize  scale C'^T q

    f = -inf resets the state, i = -inf stores nothing; values of -1e6 and below count as -inf. The arithmetic is float32 throughout.

    The kernel reads and writes every state once, c in place where the caller has no more use for it: in a jitted loop, or under
    jax.jit(..., donate_argnums) of c. Else c is copied first. n and m, which are small, go to new memory: donating them gains nothing, and
    a loop with two steps in an iteration (unroll=2) does without copying them back.

    Args:
      q, k: (B, NH, DHQK); v: (B, NH, DHV); one dtype: bfloat16, float32, float16, or float64 with backend "xla".
      i, f: input and forget gate pre-activations (B, NH), natural log.
      c, n, m: states (B, NH, DHQK, DHV), (B, NH, DHQK), (B, NH), float32, bfloat16 or float16 (float64 with backend "xla"), as
        ``mlstm_chunkwise`` and this function return them; all three, or none for zeros in float32.
      eps: added to the denominator.
      norm_val: see above.
      stabilize_correctly: False takes norm_val instead of norm_val exp(-m') as the floor of the denominator.
      input_gate: "exp" or "sigmoid". For "sigmoid" m is None or zeros; it is not read and comes back as it is.
      normalize: False leaves out the denominator; for the sigmoid input gate only.
      backend: "triton" (GPU kernel), "interpret" (the same kernel interpreted: slow, for tests), "xla" (plain jnp, differentiable).
        "mosaic_gpu" and "mosaic_gpu_interpret" run these two, as a step has no Mosaic GPU kernel, or where jax has no Triton backend, xla.
        None: triton where the computation is lowered for an NVIDIA GPU, else xla, without derivatives.
      config: tiles and launch parameters in place of the default ones; of its stages, recurrent_step.

    Returns:
      h (B, NH, DHV) in the dtype of q and the new states (c, n, m) in the dtypes of the old.

    Raises:
      TypeError, ValueError: at trace time, naming the argument, what came and what was expected. TypeError where a derivative is asked of
        any backend but "xla".
    """
    options = dict(input_gate=input_gate, normalize=normalize, backend=backend, config=config)
    normaliser = dict(eps=eps, norm_val=norm_val, stabilize_correctly=stabilize_correctly)
    return _run(Token(q, k, v, i, f), c, n, m, steps=False, **normaliser, **options)


def mlstm_recurrent_sequence(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    i: jax.Array,
    f: jax.Array,
    c: jax.Array | None = None,
    n: jax.Array | None = None,
    m: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    norm_val: float = 1.0,
    stabilize_correctly: bool = True,
    input_gate: str = "exp",
    normalize: bool = True,
    backend: str | None = None,
    config: KernelConfig | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """``mlstm_recurrent_step`` for a few tokens, one after the other; for many ``mlstm_chunkwise`` is the faster one.

    Args:
      q, k: (B, NH, S, DHQK); v: (B, NH, S, DHV); i, f: (B, NH, S). All else as for ``mlstm_recurrent_step``.

    Returns:
      h (B, NH, S, DHV) in the dtype of q and the states (c, n, m) after the last token, in the dtypes of the first.

    Raises:
      TypeError, ValueError: as ``mlstm_recurrent_step``.
    """
    options = dict(input_gate=input_gate, normalize=normalize, backend=backend, config=config)
    normaliser = dict(eps=eps, norm_val=norm_val, stabilize_correctly=stabilize_correctly)
    return _run(Token(q, k, v, i, f), c, n, m, steps=True, **normaliser, **options)
