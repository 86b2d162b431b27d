"""Shapes of calls, and the names by which every benchmark and tool knows them."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """Dimensions of one call; a recurrent step has S = 1."""

    B: int
    NH: int
    S: int
    DHQK: int
    DHHV: int

    @property
    def steps(self) -> int:
        """Steps of all heads together."""
        return self.B * self.NH * self.S

    def __str__(self) -> str:
        return "x".join(map(str, self))


HEADS = [(64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512), (512, 512)]
# The states of 256mib, 256mib-tfla and 1gib have that size in float32.
SHAPES: dict[str, Any] = {
    "7b-8k": Shape(8, 8, 8192, 256, 512),
    "tfla-8k": Shape(8, 16, 8192, 128, 256),
    "b1-8k": Shape(1, 8, 8192, 256, 512),
    "small-8k": Shape(8, 32, 8192, 64, 128),
    "p64": Shape(1, 8, 65536, 256, 512),
    "r8": Shape(8, 8, 8192, 256, 512),
    "few-2k": Shape(1, 4, 2048, 256, 512),
    "small-64": Shape(8, 16, 8192, 64, 64),
    "small-128": Shape(8, 16, 8192, 128, 128),
    "256mib": Shape(64, 8, 1, 256, 512),
    "256mib-tfla": Shape(128, 16, 1, 128, 256),
    "1gib": Shape(256, 8, 1, 256, 512),
    "tiny": Shape(1, 2, 128, 32, 64),
    "seqlen": [Shape(2**17 // S, 8, S, 256, 512) for S in (2**n for n in range(9, 18))],
    "long": [Shape(1, 8, S, 256, 512) for S in (2**16, 2**18, 2**20)],
    "batch": [Shape(B, 8, 8192, 256, 512) for B in (1, 2, 4, 8, 16)],
    "decode": [Shape(B, 8, 1, 256, 512) for B in (1, 2, 4, 8, 16, 37, 64, 128)],
    "heads": [Shape(8, 4096 // max(V, 256), 8192, K, V) for K, V in HEADS],
}
KNOWN = f"{', '.join(SHAPES)} and BxNHxSxDHQKxDHHV"


def parse(text: str) -> dict[str, Shape]:
    """The shapes of one name, or of BxNHxSxDHQKxDHHV, each by its name in tables."""
    if isinstance(shape := SHAPES.get(text), list):
        return {str(x): x for x in shape}
    if shape is None:
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){4}", text):
            raise ValueError(f"unknown shape {text!r}, known are {KNOWN}")
        shape = Shape(*map(int, text.split("x")))
    return {text: shape}


def named(parts: Sequence[dict[str, Shape]], *default: str) -> dict[str, Shape]:
    """The shapes of a flag, or the default ones if it has none."""
    return {k: x for part in parts or map(parse, default) for k, x in part.items()}
