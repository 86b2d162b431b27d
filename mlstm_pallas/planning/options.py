"""What a call is asked for: the static arguments of the public functions, checked."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from mlstm_pallas.formulas.normaliser import Normaliser
from mlstm_pallas.planning.config import KernelConfig
from mlstm_pallas.problem import validation
from mlstm_pallas.problem.dimensions import InputGate, Layout
from mlstm_pallas.problem.validation import or_none


def _config(name: str, x: Any) -> KernelConfig:
    return validation.check_instance(name, x, KernelConfig) or KernelConfig()


# Each takes the name and the value of an option, and returns the value as a Python object.
CHECKS: dict[str, Callable[[str, Any], Any]] = dict(
    eps=validation.check_scalar,
    norm_val=validation.check_scalar,
    chunk_size=or_none(validation.check_chunk_size),
    autocast_kernel_dtype=or_none(
        functools.partial(validation.check_dtype, dtypes=validation.INPUT_DTYPES)
    ),
    input_gate=functools.partial(validation.check_choice, kind=InputGate),
    layout=lambda name, x: Layout.BNTH if x is None else validation.check_choice(name, x, Layout),
    backend=validation.check_backend,
    config=_config,
    state_dtype=or_none(validation.check_dtype),
    **dict.fromkeys(
        (
            "return_last_states",
            "stabilize_correctly",
            "normalize",
            "recompute_states_in_bw",
            "reverse",
        ),
        validation.check_flag,
    ),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """The static arguments of ``mlstm_chunkwise``, which documents them, as Python objects.

    The constructor applies ``CHECKS``, and ``api.py`` passes them in this order.
    """

    return_last_states: bool = False
    eps: float = 1e-6
    chunk_size: int | None = None
    autocast_kernel_dtype: Any = None
    stabilize_correctly: bool = True
    norm_val: float = 1.0
    input_gate: Any = InputGate.EXP
    normalize: bool = True
    recompute_states_in_bw: bool = True
    layout: Any = Layout.BNTH
    backend: str | None = None
    config: Any = None
    state_dtype: Any = None
    reverse: bool = False

    def __post_init__(self) -> None:
        vars(self).update(
            (name, check(name, getattr(self, name))) for name, check in CHECKS.items()
        )
        if self.input_gate.stabilised and not self.normalize:
            raise ValueError(
                f"normalize is False with input_gate {self.input_gate.value!r}, expected "
                'input_gate="sigmoid"'
            )
        if self.chunk_size and self.config.chunk_size not in (None, self.chunk_size):
            raise ValueError(
                f"chunk_size is {self.chunk_size} and config.chunk_size {self.config.chunk_size}, "
                "expected one of them"
            )

    @property
    def stabilised(self) -> bool:
        return self.input_gate.stabilised

    @property
    def normaliser(self) -> Normaliser | None:
        """None: h is the numerator."""
        # With the sigmoid gate m is 0, so the floor does not depend on it.
        correctly = self.stabilize_correctly and self.stabilised
        return Normaliser(self.eps, self.norm_val, correctly) if self.normalize else None
