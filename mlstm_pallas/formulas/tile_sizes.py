"""Sizes of tiles that divide or cover an axis."""

from mlstm_pallas.formulas.tiles import blocks_over
from mlstm_pallas.problem.dimensions import next_power_of_two


def dividing(tile: int, size: int) -> int:
    """The largest power of two up to the tile (itself a power of two) that divides the size."""
    return min(tile, size & -size)


def least_padding(tile: int, *sizes: int, overhead: int = 32) -> int:
    """The power of two up to the tile whose blocks cover axes of these sizes at the least cost.

    The last block may reach beyond the axis, where it is masked. A block costs as much as its own
    columns and ``overhead`` more.
    """
    tile = min(tile, next_power_of_two(min(sizes)))
    candidates = (tile >> n for n in range(tile.bit_length()))
    return min(candidates, key=lambda x: (x + overhead) * sum(blocks_over(y, x) for y in sizes))


def largest_block(size: int, most: int = 256, unit: int = 64) -> int:
    """The largest multiple of unit, up to most, that divides the size; 0: none."""
    return max((x for x in range(unit, most + 1, unit) if size % x == 0), default=0)
