"""Small functions of numbers and arrays, on values that a hand can check: ``by_hand/*.txt``."""

import doctest
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).with_name("by_hand").glob("*.txt"))


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_the_values_of(file):
    result = doctest.testfile(f"by_hand/{file.name}", optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0
    assert result.failed == 0, "the output has the values"
