"""mlstm_recurrent_step, mlstm_recurrent_sequence: the mLSTM one token at a time, as in generation."""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas import problem as problems
from mlstm_pallas.backend import on_backend, requested_backend, target_device_kind
from mlstm_pallas.config import KernelConfig, config_for
from mlstm_pallas.reference import normalise
from mlstm_pallas.stages.recurrent_step import recurrent_step, rounded, step_gates

InputGate = Literal["exp", "sigmoid"]
INPUT_GATES = ("exp", "sigmoid")

NO_DERIVATIVE = 'the kernels of mlstm_recurrent_step and mlstm_recurrent_sequence have no derivatives; backend="xla" has them'


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """Everything static about a step."""

    config: KernelConfig
    qk_scale: float
    eps: float
    stabilize_correctly: bool
    norm_val: float
    normalize: bool
    backend: str | None

    @property
    def normaliser(self) -> dict[str, Any]:
        return dict(eps=self.eps, stabilize_correctly=self.stabilize_correctly, norm_val=self.norm_val)


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


def _step_triton(plan: StepPlan, interpret: bool, x: Token, states: States) -> tuple[jax.Array, States]:
    launch: dict[str, Any] = dict(config=plan.config, qk_scale=plan.qk_scale, normalize=plan.normalize, interpret=interpret)
    h, c, n, m = recurrent_step(x.q, x.k, x.v, x.i, x.f, states.c, states.n, states.m, **plan.normaliser, **launch)
    return h, States(c, n, m)


def _step_xla(plan: StepPlan, x: Token, states: States) -> tuple[jax.Array, States]:
    acc = jnp.promote_types(jnp.result_type(*x, states.c, states.n), jnp.float32)
    (q, k, v, i, f), (c, n, m) = jax.tree.map(lambda y: y.astype(acc), (x, states))
    m_dtype = acc if states.m is None else states.m.dtype
    decay, gain, m_new = step_gates(i, f, m, lambda y: rounded(y, m_dtype, compiled=False))
    stored = gain[..., None] * k
    c = decay[..., None, None] * c + stored[..., :, None] * v[..., None, :]
    n = decay[..., None] * n + stored
    num = jnp.einsum("bhk,bhkv->bhv", q, c, precision="highest") * plan.qk_scale
    z = jnp.sum(q * n, axis=-1) * plan.qk_scale
    h = normalise(num, z, m_new, **plan.normaliser) if plan.normalize else num
    new = States(c, n, None if m is None else m_new)
    return h.astype(x.q.dtype), jax.tree.map(lambda y, old: y.astype(old.dtype), new, states)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _step_kernels(plan: StepPlan, x: Token, states: States) -> tuple[jax.Array, States]:
    return on_backend(plan.backend, functools.partial(_step_triton, plan), functools.partial(_step_xla, plan), x, states)


@_step_kernels.defjvp
def _no_jvp(plan: StepPlan, primals, tangents):
    raise TypeError(NO_DERIVATIVE)


@functools.partial(jax.jit, static_argnums=0)
def step(plan: StepPlan, x: Token, states: States) -> tuple[jax.Array, States]:
    """h (B, NH, DHV) and the new states. B and NH lead everywhere."""
    return (_step_xla if plan.backend == "xla" else _step_kernels)(plan, x, states)


@functools.partial(jax.jit, static_argnums=0)
def sequence(plan: StepPlan, x: Token, states: States) -> tuple[jax.Array, States]:
    """h (B, NH, S, DHV) and the last states."""

    def one(states, x):
        h, states = step(plan, x, states)
        return states, h

    states, h = lax.scan(one, states, jax.tree.map(lambda y: jnp.moveaxis(y, 2, 0), x))
    return jnp.moveaxis(h, 0, 2), states


def _check_dtype(name: str, dtype: Any, expected: tuple[str, ...], backend: str | None) -> None:
    if jnp.dtype(dtype).name in expected or (dtype == jnp.float64 and backend == "xla"):
        return
    hint = '; float64 runs on backend="xla" only' if dtype == jnp.float64 else ""
    raise TypeError(f"{name} has dtype {dtype}, expected one of {', '.join(expected)}{hint}")


def _check_arrays(x: Token, c, n, m, *, steps: bool, input_gate: str, backend: str | None) -> None:
    states = dict(c=c, n=n) | ({} if m is None and input_gate == "sigmoid" else dict(m=m))
    if (given := [name for name, y in states.items() if y is not None]) and len(given) < len(states):
        missing = [name for name in states if name not in given]
        raise ValueError(f"states come all or not at all: got {', '.join(given)} without {', '.join(missing)}")
    arrays = x._asdict() | {name: states[name] for name in given}
    for name, y in arrays.items():
        if not hasattr(y, "dtype") or not hasattr(y, "shape"):
            raise TypeError(f"{name} is a {type(y).__name__}, expected an array")
        if name in "if":
            _check_dtype(name, y.dtype, problems.INPUT_DTYPES, backend)
        else:
            _check_dtype(name, y.dtype, problems.KERNEL_DTYPES if name in states else ("float16", *problems.KERNEL_DTYPES), backend)
    S = ("S",) if steps else ()
    dims = dict(q=(*S, "DHQK"), k=(*S, "DHQK"), v=(*S, "DHV"), i=S, f=S, c=("DHQK", "DHV"), n=("DHQK",), m=())
    expected = {name: ("B", "NH", *rest) for name, rest in dims.items()}
    sizes: dict[str, int] = {}
    for name, y in arrays.items():
        text, shape = f"({', '.join(expected[name])})", tuple(y.shape)
        if len(shape) != len(expected[name]):
            raise ValueError(f"{name} has shape {shape}, expected {text}")
        for dim, size in zip(expected[name], shape, strict=True):
            if size < 1 and dim not in ("B", "NH"):
                raise ValueError(f"{name} has shape {shape}, expected {text} with {dim} >= 1")
            if sizes.setdefault(dim, size) != size:
                wanted = ", ".join(str(sizes.get(dim, dim)) for dim in expected[name])
                raise ValueError(f"{name} has shape {shape}, expected {text} = ({wanted}), by the arguments before it")
    for name in ("k", "v"):
        if arrays[name].dtype != x.q.dtype:
            raise TypeError(f"{name} has dtype {arrays[name].dtype}, expected {x.q.dtype}, the dtype of q")


def _run(
    x: Token, c, n, m, *, steps: bool, eps, norm_val, stabilize_correctly, input_gate, normalize, backend, config
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    problems.check_flag("stabilize_correctly", stabilize_correctly)
    problems.check_flag("normalize", normalize)
    problems.check_scalars(eps, norm_val)
    problems.check_backend(backend)
    backend = requested_backend(backend)
    if input_gate not in INPUT_GATES:
        raise ValueError(f"input_gate is {input_gate!r}, expected one of {', '.join(INPUT_GATES)}")
    if not normalize and input_gate != "sigmoid":
        raise ValueError(f'normalize is False with input_gate {input_gate!r}, expected input_gate="sigmoid"')
    if config is not None and not isinstance(config, KernelConfig):
        raise TypeError(f"config is a {type(config).__name__}, expected a KernelConfig or None")
    _check_arrays(x, c, n, m, steps=steps, input_gate=input_gate, backend=backend)

    (B, NH, *_, DHQK), DHV = x.q.shape, x.v.shape[-1]
    zeros = functools.partial(jnp.zeros, dtype=jnp.promote_types(x.q.dtype, jnp.float32))
    if c is None:
        c, n = zeros((B, NH, DHQK, DHV)), zeros((B, NH, DHQK))
    if m is None:
        m = zeros((B, NH))
    filled = config_for(DHQK, DHV, 1, c.dtype, device_kind=target_device_kind(), explicit=config)
    if B * NH == 0:
        backend = "xla"  # a kernel has no empty grid
    plan = StepPlan(filled, DHQK**-0.5, float(eps), stabilize_correctly, float(norm_val), normalize, backend)
    h, states = (sequence if steps else step)(plan, x, States(c, n, None if input_gate == "sigmoid" else m))
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
    input_gate: InputGate = "exp",
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
    jax.jit(..., donate_argnums) of c. Else c is copied first. n and m, which are small, go to new memory: donating them gains nothing.

    Args:
      q, k: (B, NH, DHQK); v: (B, NH, DHV); one dtype: bfloat16, float32, float16, or float64 with backend "xla".
      i, f: input and forget gate pre-activations (B, NH), natural log.
      c, n, m: states (B, NH, DHQK, DHV), (B, NH, DHQK), (B, NH), float32 or bfloat16 (float64 with backend "xla"), as ``mlstm_chunkwise``
        and this function return them; all three, or none for zeros in float32.
      eps: added to the denominator.
      norm_val: see above.
      stabilize_correctly: False takes norm_val instead of norm_val exp(-m') as the floor of the denominator.
      input_gate: "exp" or "sigmoid". For "sigmoid" m is None or zeros; it is not read and comes back as it is.
      normalize: False leaves out the denominator; for the sigmoid input gate only.
      backend: "triton" (GPU kernel), "interpret" (the same kernel interpreted: slow, for tests), "xla" (plain jnp, differentiable).
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
    input_gate: InputGate = "exp",
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
