"""The dimensions of a call and every check of its arguments.

Notation: B batch, NH heads, S sequence length, DHQK head dimension of q and k, DHHV head dimension of v and h,
NC chunks of L steps.
"""

import dataclasses
import enum
import math
import numbers
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

KERNEL_DTYPES = ("float32", "bfloat16")
INPUT_DTYPES = ("float16", "bfloat16", "float32", "float64")
BACKENDS = ("triton", "interpret", "xla")
MIN_CHUNK_SIZE = 16
MIN_TILE = 16
MAX_TILE = 128


class InputGate(enum.StrEnum):
    """exp(i) behind a stabiliser (xLSTM), or sigmoid(i), which needs none (mLSTMsig of the TFLA paper)."""

    EXP = "exp"
    SIGMOID = "sigmoid"


def next_power_of_two(x: int) -> int:
    return 1 << max(x - 1, 0).bit_length()


def as_integer(x: Any) -> Any:
    """An integer of any kind (NumPy's, a concrete JAX scalar) as an int; anything else, bools too, as it is."""
    if isinstance(x, bool | np.bool_ | jax.core.Tracer):
        return x
    try:
        return operator.index(x)
    except TypeError:
        return x


def is_power_of_two(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x > 0 and x & (x - 1) == 0


def padded_head_dim(dim: int) -> int:
    """The head dimension that the kernels see: a power of two from 16 up to 64, beyond that a multiple of 64."""
    return max(next_power_of_two(dim), MIN_TILE) if dim <= 64 else -(-dim // 64) * 64


@dataclasses.dataclass(frozen=True)
class Problem:
    """Dimensions of one call, as the kernels see them: padded, so that tiles divide everything."""

    B: int
    NH: int
    S: int
    DHQK: int
    DHHV: int
    L: int
    qk_scale: float  # DHQK ** -0.5 of the unpadded head dimension

    def __post_init__(self):
        if self.S % self.L:
            raise ValueError(f"S = {self.S} is not a multiple of the chunk size L = {self.L}")

    @property
    def NC(self) -> int:
        return self.S // self.L

    @property
    def T(self) -> int:
        """Steps of a tile: no difference of sums over more than this is taken."""
        return min(self.L, MAX_TILE)

    @property
    def BNH(self) -> int:
        return self.B * self.NH


def _shape_error(name: str, shape: tuple[int, ...], expected: str) -> ValueError:
    return ValueError(f"{name} has shape {shape}, expected {expected}")


def check_arrays(q, k, v, i, f, c_initial, n_initial, m_initial, input_gate: InputGate = InputGate.EXP) -> None:
    """Raises TypeError or ValueError, naming the argument, what came and what was expected."""
    arrays = dict(q=q, k=k, v=v, i=i, f=f)
    states = dict(c_initial=c_initial, n_initial=n_initial, m_initial=m_initial)
    if input_gate is InputGate.SIGMOID and states.pop("m_initial") is not None:
        raise ValueError('m_initial is given, expected None: with input_gate="sigmoid" m is 0 throughout')
    given = [name for name, x in states.items() if x is not None]
    if given and len(given) < len(states):
        missing = [name for name in states if name not in given]
        count = "all three" if len(states) == 3 else "both"
        raise ValueError(f"initial states come {count} or not at all: got {', '.join(given)} without {', '.join(missing)}")
    if given:
        arrays |= states
    for name, x in arrays.items():
        if not hasattr(x, "dtype") or not hasattr(x, "shape"):
            raise TypeError(f"{name} is a {type(x).__name__}, expected an array")
        if str(x.dtype) not in INPUT_DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}, expected one of {', '.join(INPUT_DTYPES)}")
    if len(q.shape) != 4:
        raise _shape_error("q", q.shape, "(B, NH, S, DHQK)")
    B, NH, S, DHQK = q.shape
    if len(v.shape) != 4:
        raise _shape_error("v", v.shape, f"(B, NH, S, DHV) = ({B}, {NH}, {S}, DHV)")
    DHV = v.shape[-1]
    for dim, size in (("S", S), ("DHQK", DHQK)):
        if size < 1:
            raise _shape_error("q", q.shape, f"(B, NH, S, DHQK) with {dim} >= 1")
    if DHV < 1:
        raise _shape_error("v", v.shape, "(B, NH, S, DHV) with DHV >= 1")
    for name, x, dims, expected in (
        ("k", k, "(B, NH, S, DHQK)", (B, NH, S, DHQK)),
        ("v", v, "(B, NH, S, DHV)", (B, NH, S, DHV)),
        ("i", i, "(B, NH, S)", (B, NH, S)),
        ("f", f, "(B, NH, S)", (B, NH, S)),
        ("c_initial", c_initial, "(B, NH, DHQK, DHV)", (B, NH, DHQK, DHV)),
        ("n_initial", n_initial, "(B, NH, DHQK)", (B, NH, DHQK)),
        ("m_initial", m_initial, "(B, NH)", (B, NH)),
    ):
        if x is not None and tuple(x.shape) != expected:
            raise _shape_error(name, tuple(x.shape), f"{dims} = {expected}, as q has shape {tuple(q.shape)}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, expected {q.dtype}, the dtype of q")


def check_input_gate(input_gate: Any, normalize: Any) -> tuple[InputGate, bool]:
    if input_gate not in list(InputGate):
        raise ValueError(f"input_gate is {input_gate!r}, expected one of {', '.join(InputGate)}")
    normalize = check_flag("normalize", normalize)
    if not normalize and input_gate != InputGate.SIGMOID:
        raise ValueError(f'normalize is False with input_gate {input_gate!r}, expected input_gate="sigmoid"')
    return InputGate(input_gate), normalize


def check_segment_ids(segment_ids: Any, q_shape: tuple[int, ...]) -> None:
    if segment_ids is None:
        return
    if not hasattr(segment_ids, "dtype") or not hasattr(segment_ids, "shape"):
        raise TypeError(f"segment_ids is a {type(segment_ids).__name__}, expected an array")
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise TypeError(f"segment_ids has dtype {segment_ids.dtype}, expected an integer dtype")
    B, _, S, _ = q_shape
    if tuple(segment_ids.shape) != (B, S):
        raise _shape_error("segment_ids", tuple(segment_ids.shape), f"(B, S) = ({B}, {S}), as q has shape {tuple(q_shape)}")


def check_chunk_size(chunk_size: Any) -> int | None:
    """The chunk size as an int or None."""
    size = as_integer(chunk_size)
    if size is not None and (not is_power_of_two(size) or size < MIN_CHUNK_SIZE):
        expected = f"expected None or a power of two >= {MIN_CHUNK_SIZE}"
        if isinstance(size, jax.core.Tracer):
            raise TypeError(f"chunk_size is traced, {expected}: mark it static in jit")
        raise ValueError(f"chunk_size is {chunk_size!r}, {expected}")
    return size


def check_scalars(eps: float, norm_val: float) -> None:
    for name, x in (("eps", eps), ("norm_val", norm_val)):
        if isinstance(x, jax.core.Tracer):
            raise TypeError(f"{name} is traced, expected a Python float: mark it static in jit")
        if not isinstance(x, numbers.Real) or isinstance(x, bool):
            raise TypeError(f"{name} is a {type(x).__name__}, expected a float")
        if not math.isfinite(x) or x < 0:
            raise ValueError(f"{name} is {x}, expected a finite number >= 0")


def check_flag(name: str, x: Any) -> bool:
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"{name} is traced, expected a Python bool: mark it static in jit")
    if not isinstance(x, bool | np.bool_):
        raise TypeError(f"{name} is a {type(x).__name__}, expected a Python bool")
    return bool(x)


def check_backend(backend: str | None) -> None:
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, expected None or one of {', '.join(BACKENDS)}")


def as_dtype(autocast_kernel_dtype: Any) -> jnp.dtype:
    try:
        return jnp.dtype(autocast_kernel_dtype)
    except TypeError:
        raise TypeError(f"autocast_kernel_dtype is {autocast_kernel_dtype!r}, expected None or one of {', '.join(KERNEL_DTYPES)}") from None


def kernel_dtype(autocast_kernel_dtype: Any, q_dtype: Any, backend: str | None) -> jnp.dtype:
    """The dtype of q, k, v in the matrix products."""
    dtype = jnp.dtype(q_dtype) if autocast_kernel_dtype is None else as_dtype(autocast_kernel_dtype)
    said = f"autocast_kernel_dtype is {dtype.name}" if autocast_kernel_dtype is not None else f"q has dtype {dtype.name}"
    if dtype.name == "float64" and backend == "xla":
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise TypeError(f"{said}, expected one of {', '.join(KERNEL_DTYPES)}: jax_enable_x64, which float64 needs, is not set")
        return dtype
    if dtype.name in KERNEL_DTYPES:
        return dtype
    if dtype.name == "float64":
        hint = '; float64 runs on backend="xla" only'
    else:
        hint = "; pass autocast_kernel_dtype to compute in another dtype" if autocast_kernel_dtype is None else ""
    raise TypeError(f"{said}, expected one of {', '.join(KERNEL_DTYPES)}{hint}")


def clamp_chunk_size(chunk_size: int, S: int) -> int:
    """A chunk beyond S is shortened to the next power of two >= S."""
    return min(chunk_size, max(next_power_of_two(S), MIN_CHUNK_SIZE))


def make_problem(q_shape: tuple[int, ...], DHHV: int, chunk_size: int, *, pad_heads: bool) -> Problem:
    """The padded problem of q (B, NH, S, DHQK) with value dimension DHHV at a chunk size that is already clamped."""
    B, NH, S, DHQK = q_shape
    pad = padded_head_dim if pad_heads else int
    return Problem(B, NH, -(-S // chunk_size) * chunk_size, pad(DHQK), pad(DHHV), chunk_size, DHQK**-0.5)
