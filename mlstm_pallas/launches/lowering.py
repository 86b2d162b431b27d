"""How a stage runs: as a kernel of one of the lowerings, or in plain jnp."""

import enum


class Lowering(enum.StrEnum):
    """How a stage runs: as a kernel, compiled or interpreted, or in plain jnp."""

    TRITON = "triton"
    INTERPRET = "interpret"
    MOSAIC_GPU = "mosaic_gpu"
    XLA = "xla"

    @property
    def interpret(self) -> bool:
        return self is Lowering.INTERPRET

    @property
    def folder(self) -> str:
        """The folder of its kernels."""
        return {"interpret": "triton", "xla": "stages"}.get(self, self)
