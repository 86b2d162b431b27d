"""What a reference selects of its array, for copies in MLIR."""

from typing import Any

from jax.experimental import pallas as pl

Region = list[tuple[Any, Any]]  # start and size along the first axes; all other axes are whole


def base(x):
    """The buffer, or the array of barriers, to which a reference belongs."""
    return x.ref if hasattr(x, "transforms") else x


def selected(x) -> tuple[Region, list[int]]:
    """The part of an array that a reference selects, and the axes that the reference has."""
    region: Region = [(0, size) for size in base(x).shape]
    axes = [*range(len(region))]
    for transform in getattr(x, "transforms", ()):
        if hasattr(transform, "permutation"):
            axes = [axes[axis] for axis in transform.permutation]
        elif hasattr(transform, "indices"):  # of all axes, of which tiled memory has more
            kept = []
            for axis, index in zip(axes, transform.indices, strict=False):
                first = region[axis][0]
                if isinstance(index, pl.Slice):
                    region[axis] = first + index.start, index.size
                    kept.append(axis)
                else:
                    region[axis] = first + index, 1
            axes = kept
    return region, axes


def tiling(tile) -> tuple[int, ...]:
    """The rows and the columns of a swizzle atom of a tile; empty: it has none."""
    transforms = getattr(tile, "transforms", ())
    return next((x.tiling for x in transforms if hasattr(x, "tiling")), ())
