"""The list of planted defects fits the code; plant_defects.py runs it."""

import pytest
from plant_defects import ROOT, defects

DEFECTS = defects()


@pytest.mark.parametrize("name", DEFECTS)
def test_the_pattern_of_a_defect_is_in_its_file_once(name):
    defect = DEFECTS[name]
    assert (ROOT / defect["file"]).read_text().count(defect["old"]) == 1
    assert defect["new"] != defect["old"]
    assert defect["tests"]
    assert all((ROOT / "tests" / file).is_file() for file in defect["tests"])
