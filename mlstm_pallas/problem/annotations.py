"""The types of the public functions' arguments and results."""

from typing import Literal, TypeAlias

import jax
import numpy as np

Array: TypeAlias = jax.Array | np.ndarray
StatesTuple: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]  # c, n, m
BackendName: TypeAlias = Literal["triton", "mosaic_gpu", "interpret", "xla", "fastest"]
LayoutName: TypeAlias = Literal["BNTH", "BTNH"]
InputGateName: TypeAlias = Literal["exp", "sigmoid"]
