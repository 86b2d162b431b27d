"""What a stage is.

``stages/`` has one file per contract. ``triton/`` and ``mosaic_gpu/`` have the kernels, in files of
the same names, and ``dispatch.py`` finds them.
"""

from typing import Any, NamedTuple


class Stage(NamedTuple):
    """A stage, by whose name its contract, function, kernels and field of KernelConfig go.

    It is also the benchmark's flag, the test id and the name in a profile.
    """

    operands: type[Any]  # the NamedTuple of its operands
    file: str  # of its kernels in the folder of a lowering
