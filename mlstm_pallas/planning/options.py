"""What a call is asked for: the static arguments of the public functions, checked."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

from mlstm_pallas.formulas.normaliser import Normaliser
from mlstm_pallas.planning.config import KernelConfig
from mlstm_pallas.problem import validation
from mlstm_pallas.problem.dimensions import MIN_CHUNK_SIZE, InputGate, Layout


def _config(name: str, x: Any) -> KernelConfig:
    return validation.check_instance(name, x, KernelConfig) or KernelConfig()


def _choice(kind: Any) -> Callable[[str, Any], Any]:
    return functools.partial(validation.check_choice, kind=kind)


_Flag = Annotated[bool, validation.check_flag]
_Scalar = Annotated[float, validation.check_scalar]
_ChunkSize = functools.partial(validation.check_power_of_two, least=MIN_CHUNK_SIZE)


@dataclasses.dataclass(frozen=True)
class Options:
    """The static arguments of ``mlstm_chunkwise``, which documents them, as Python objects.

    The constructor applies to each field the check in its annotation.
    """

    return_last_states: _Flag = False
    eps: _Scalar = 1e-6
    chunk_size: Annotated[int | None, _ChunkSize] = None
    autocast_kernel_dtype: Annotated[Any, validation.check_optional_dtype] = None
    stabilize_correctly: _Flag = True
    norm_val: _Scalar = 1.0
    input_gate: Annotated[Any, _choice(InputGate)] = InputGate.EXP
    normalize: _Flag = True
    recompute_states_in_bw: _Flag = True
    layout: Annotated[Any, _choice(Layout)] = Layout.BNTH
    backend: Annotated[str | None, validation.check_backend] = None
    config: Annotated[Any, _config] = None
    state_dtype: Annotated[Any, validation.check_state_dtype] = None
    num_segments: Annotated[int | None, validation.check_num_segments] = None
    reverse: _Flag = False

    def __post_init__(self) -> None:
        vars(self).update(
            (name, check(name, getattr(self, name))) for name, check in option_checks()
        )
        if not (self.normalize or self.input_gate is InputGate.SIGMOID):
            raise ValueError(
                "normalize is False with input_gate 'exp', expected input_gate=\"sigmoid\""
            )

        if self.reverse and self.num_segments:
            raise ValueError(
                f"reverse is True with num_segments {self.num_segments}, expected one of them"
            )

    @property
    def stabilised(self) -> bool:
        return self.input_gate is InputGate.EXP

    @property
    def normaliser(self) -> Normaliser | None:
        """None: h is the numerator."""
        # With the sigmoid gate m is 0, so the floor does not depend on it.
        correctly = self.stabilize_correctly and self.stabilised
        return Normaliser(self.eps, self.norm_val, correctly) if self.normalize else None


@functools.cache
def option_checks() -> tuple[tuple[str, Callable[[str, Any], Any]], ...]:
    hints = get_type_hints(Options, include_extras=True)
    return tuple(
        (name, x.__metadata__[0]) for name, x in hints.items() if hasattr(x, "__metadata__")
    )
