"""Splits of a sequence that run at the same time: the states before them, and what they add to
those.

The recurrences in splits: test_stages.py.
"""

import pytest
from stage_calls import (
    Lowering,
    Problem,
    check_small,
    rows_of,
    tiles_class,
)
from test_packed_sequences import check_prompts

from mlstm_pallas import KernelConfig

HEADS, S, L = 2, 128, 16


# Of every split but the last, backward but the first; or of all. Then in three blocks of columns.
STAGES = """
split_products 1-2-128-32-64-16 num_splits=4, tiles=dict(siz_b_DHQK=16, siz_b_DHHV=32, siz_b_L=16)
split_products 1-2-128-32-64-16 backward=True, num_splits=4, \
tiles=dict(siz_b_DHQK=16, siz_b_DHHV=32, siz_b_L=16)
split_products 1-2-128-32-64-16 all_splits=True, num_splits=4, \
tiles=dict(siz_b_DHQK=16, siz_b_DHHV=32, siz_b_L=16)
step_sums 2-2-64-48-16-32 tiles=dict(siz_b_DHQK=16)
step_sums 2-2-64-48-16-32 tiles=dict(siz_b_DHQK=16), layout="BTNH"
"""


@pytest.mark.parametrize("line", rows_of(STAGES))
def test_small_stages(line):
    check_small(line, Lowering.INTERPRET)


@pytest.mark.slow
def test_states_of_packed_prompts_in_several_blocks():
    """Two launches of the scan, each with two blocks of columns."""
    tiles = dict(siz_b_DHQK=16, siz_b_DHHV=16, state_rows=16)
    config = KernelConfig(chunk_size=16, triton_recurrent_fw_H=tiles)
    rows = [1, 2, 15, 16, 17], [33]
    check_prompts(0, 32, 32, rows=rows, go_on=True, backend="interpret", config=config)


def test_a_number_of_splits_is_cut_to_what_divides_the_chunks():
    tiles = tiles_class("recurrent_fw_C", "triton")(64, 64, 64, 4, 3, num_splits=8)
    for chunks, expected in ((2, 2), (63, 1), (12, 4), (64, 8)):
        problem = Problem(1, 8, 128 * chunks, 256, 512, 128, 1.0)
        assert tiles.clamped(problem).num_splits == expected, chunks
