"""Calls at the sizes of models, for a GPU: what users get, with other schedules, splits and tiles,
and heads of all kinds; in both lowerings."""

import itertools

from engine import Drafts, Ids, Lengths
from table import (
    ALONE,
    BF,
    F16,
    FUSED,
    HALF,
    KEPT,
    NT,
    PLAIN,
    SOME,
    UNFUSED,
    chunkwise,
    config,
    drafts,
    packed,
    prefixes,
    ring,
    step,
)

# ---------------- all relations; of some more heads than a GPU has multiprocessors

SHORT = tuple(1 + 7 * n % 10 for n in range(37))
MANY = tuple(1 + 37 * n % 160 for n in range(45))
CHUNKED = (
    chunkwise(220, "g", packed(SHORT, (5, 40, 1)), last=True, **BF, **NT),
    chunkwise(396, "h", packed((1, 2, 0, 63, 64, 65, 200), (0, 130), own=True), last=True, **BF,
        **NT),
    chunkwise(300, "c", Ids(((100, 200), (37, 64, 199))), last=True, **F16, **NT),
    chunkwise(257, "f", Lengths((257, 100)), last=True, reverse=True, **BF, **PLAIN, **KEPT),
    chunkwise(160, "c", Lengths(MANY), last=True, **BF, **NT, **ALONE, NH=3),
    prefixes(128, "c", Lengths(MANY[:31]), every=64, **F16, **ALONE, NH=5),
)  # fmt: skip
BY_TOKEN = (
    step(3, "g", **BF, joined=True),
    step(3, "f", SOME, **BF, states=("float16", "bfloat16", "float32"), NH=8),
    step(1, "e", **F16, states=("float16",) * 3),
    ring(24, "g", SOME, drafts(4, 4, 6, length=8), **BF, states=HALF, **NT),
    ring(24, "f", Drafts(1, phase=0), **ALONE, **BF, NH=40),
)

# ---------------- values and bits of a second call, for gates of a model; on Mosaic GPU of any
# heads also those beside a head that is NaN, which tiles beyond the last column reach

F32 = dict(dtype="float32")
# Multiples of 64, of 32, of 16, of 8 and of none, from 8 to 1,024, and the lowerings that run them,
# which are both for the smallest multiples of 16.
ANY_HEADS = {
    "triton": (
        *((8, 8), (16, 16), (24, 48), (32, 32), (40, 100), (48, 96), (64, 32), (64, 192)),
        *((80, 160), (112, 224), (160, 320), (192, 192), (448, 448)),
    ),
    "mosaic_gpu": (
        *((16, 16), (32, 32), (20, 37), (96, 96), (128, 192), (96, 192), (100, 200), (192, 384)),
        *((160, 320), (256, 640), (320, 640), (384, 768), (1024, 1024)),
    ),
}


def of_any_heads(backend):
    """Calls of odd and of even lengths, in both layouts, with both schedules."""
    lengths, layouts = (131, 256, 196, 391), (NT, {}, NT)
    others = map(itertools.cycle, (lengths, layouts, (FUSED, UNFUSED, FUSED, UNFUSED, FUSED)))
    for heads, S, layout, schedule in zip(ANY_HEADS[backend], *others, strict=False):
        yield chunkwise(S, heads, B=1, last=True, **BF, **layout, **schedule)


def model(S, heads, dtype=BF, B=1, NH=2, **options):
    return chunkwise(S, heads, B=B, NH=NH, last=True, **dtype, **options)


def splits(num_splits, **of_scan):
    """All recurrences in so many splits."""
    parts = dict(siz_b_L=32, num_splits=num_splits)
    return config(
        fused=True,
        num_splits=num_splits,
        triton_recurrent_fw_H=dict(siz_b_L=32) | of_scan,
        triton_recurrent_fw_C=parts,
        triton_recurrent_bw_dC=parts,
    )


def stored(num_splits, num_stages):
    """The states that the fused scan stored."""
    return splits(num_splits, state_rows=256, num_stages=num_stages) | KEPT


def unfused(chunk_size):
    return config(fused=False, chunk_size=chunk_size)


# Of the two dtypes those that the rows behind them do not have.
OF_HEADS = (
    *((D, BF) for D in ((64, 128), "f", (256, 256), (512, 512), (192, 320))),
    *((D, F32) for D in ((128, 128), "f", (512, 512), (80, 96), (96, 192))),
)
SMOKE = model(500, "f"), model(500, "f", F32)
ON_TRITON = (
    *(model(500, heads, dtype) for heads, dtype in OF_HEADS),
    *(model(200, (1024, 1024), dtype) for dtype in (BF, F32)),
    *(model(1024, heads, dtype) for heads in ((64, 64), "g") for dtype in (BF, F32)),
    model(1024, "g", **unfused(64)),
    model(1024, "f", F32, **unfused(64)),
    model(1024, "f", **unfused(256)),
    model(1024, (64, 64), F32, **unfused(256)),
    model(1024, "g", **FUSED),
    model(1024, (64, 64), **FUSED),
    model(1024, "f", F32, **FUSED),
    model(2048, "f", **splits(4)),
    model(2048, "g", F32, **splits(4)),
    model(1024, (64, 64), **stored(1, 3)),
    model(1024, "g", **stored(4, 3)),
    model(1024, "f", F32, **stored(1, 2)),
    model(1024, "f", F32, **stored(4, 2)),
    model(1024, "f", chunk_size=16),
    model(2048, (64, 128), F32, chunk_size=1024),
    model(2048, (64, 128), chunk_size=2048),
    model(32768, (64, 64), NH=1),  # one long cumulative sum would lose digits of the gradient of f
    chunkwise(1000, "f", Lengths((0, 700, 1000)), last=True, **BF, **FUSED),
    chunkwise(1000, "f", Lengths((0, 700, 1000)), last=True, **BF, **UNFUSED),
    model(1000, "f", F32, reverse=True),
    *(model(250, heads, F16) for heads in ((64, 64), "f", "g")),
    model(250, (64, 64), F16, **FUSED),
    model(250, "f", F16, **NT, **UNFUSED),
    model(250, "g", F16, **NT, **FUSED),
)
ON_BOTH = (
    # A store beyond an array would be in the next head.
    model(1, "c", B=4, NH=12, **FUSED),
    model(129, "c", B=4, NH=12, **FUSED),
    model(1001, (256, 256), NH=8, **FUSED),
    model(4095, "c", NH=8, **NT, **FUSED),
    # The backward pass skips whole chunks.
    chunkwise(1001, "f", Lengths((0, 1, 384, 700, 1001)), last=True, **BF),
    chunkwise(1000, "g", Lengths((0, 1, 700)), last=True, **BF, NH=1),
    chunkwise(1000, "f", Lengths((0, 1, 384, 700, 1000)), last=True, reverse=True, **BF),
    model(2048, "f", NH=8, reverse=True, **FUSED, **KEPT),
    model(1001, "g", NH=4, reverse=True, **NT),
    model(1500, (96, 192), NH=8, reverse=True, **NT, **FUSED, **KEPT),
    model(4096, "g", NH=1, reverse=True, **FUSED),  # in splits
)
# With the fused scan and as users get it; of 128/256 more chunks than a GPU has multiprocessors.
PLANS = (
    model(2040, "g", **FUSED, **NT),
    model(2040, "g", **KEPT),
    *(model(1024, (D, D), **FUSED, **KEPT) for D in (256, 512)),
    *(model(1024, (D, D), **NT) for D in (256, 512)),
    model(1024, "f", NH=20, **FUSED, **KEPT),
    model(1024, "f", NH=20, **NT),
)
