"""Shapes of calls, and the names by which every benchmark and tool knows them."""

import re
from typing import NamedTuple


class Shape(NamedTuple):
    """Dimensions of one call; a recurrent step has S = 1."""

    B: int
    NH: int
    S: int
    DHQK: int
    DHV: int

    @property
    def steps(self):
        """Steps of all heads together."""
        return self.B * self.NH * self.S

    def __str__(self):
        return "x".join(map(str, self))


# The states of 256mib, 256mib-tfla and 1gib have that size in float32.
NAMED = {
    "7b-8k": "8x8x8192x256x512",
    "tfla-8k": "8x16x8192x128x256",
    "b1-8k": "1x8x8192x256x512",
    "small-8k": "8x32x8192x64x128",
    "p64": "1x8x65536x256x512",
    "r8": "8x8x8192x256x512",
    "few-2k": "1x4x2048x256x512",
    "x125m-2k": "32x4x2048x96x192",
    "x760m-2k": "16x4x2048x192x384",
    "x2b7-2k": "8x4x2048x320x640",
    "vil-t": "256x4x196x96x96",
    "small-64": "8x16x8192x64x64",
    "small-128": "8x16x8192x128x128",
    "256mib": "64x8x1x256x512",
    "256mib-tfla": "128x16x1x128x256",
    "1gib": "256x8x1x256x512",
    "tiny": "1x2x128x32x64",
    "seqlen": (
        "256x8x512x256x512 128x8x1024x256x512 64x8x2048x256x512 16x8x8192x256x512 "
        "4x8x32768x256x512 1x8x131072x256x512"
    ),
    "long": "1x8x65536x256x512 1x8x262144x256x512 1x8x1048576x256x512",
    "batch": (
        "1x8x8192x256x512 2x8x8192x256x512 4x8x8192x256x512 8x8x8192x256x512 16x8x8192x256x512"
    ),
    "decode": (
        "1x8x1x256x512 2x8x1x256x512 4x8x1x256x512 8x8x1x256x512 16x8x1x256x512 "
        "37x8x1x256x512 64x8x1x256x512 128x8x1x256x512"
    ),
    "heads": (
        "8x16x8192x64x64 8x16x8192x64x128 8x16x8192x128x128 8x16x8192x128x256 "
        "8x16x8192x256x256 8x8x8192x256x512 8x8x8192x512x512"
    ),
}
KNOWN = f"{', '.join(NAMED)} and BxNHxSxDHQKxDHV"


def parse(text):
    """The shapes of one name, or of BxNHxSxDHQKxDHV, each by its name in tables."""
    known = {}
    for shape in NAMED.get(text, text).split(" "):
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){4}", shape):
            raise ValueError(f"unknown shape {text!r}, known are {KNOWN}")
        known[shape] = Shape(*map(int, shape.split("x")))
    return known if len(known) > 1 else dict.fromkeys([text], *known.values())


def named(parts, *default):
    """The shapes of a flag, or the default ones if it has none."""
    return {k: x for part in parts or map(parse, default) for k, x in part.items()}
