"""tools/plant_defects.py and anchors.py: planted defects apply to the files as they are; a patch
keeps its place when code moves."""

import re
import shlex
import textwrap
from collections import Counter
from pathlib import Path

import anchors
import pytest
from plant_defects import ROOT, check, headers

PATCHES = sorted((ROOT / "tools" / "planted_defects").glob("*.patch"))


def test_every_planted_defect_applies(capsys):
    stale = check(PATCHES, anchor=False)
    assert not stale, capsys.readouterr().out
    assert len(PATCHES) > 100


def test_a_mechanism_is_planted_once_for_the_same_tests():
    said = [headers(patch) for patch in PATCHES]
    planted = Counter((x.get("Mechanism"), x.get("Tests")) for x in said)
    assert max(planted.values()) == 1, planted.most_common(3)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda x: x.stem)
def test_a_defect_names_tests_that_exist(patch):
    said = headers(patch)
    assert {"Mechanism"} <= set(said) <= {"Mechanism", "Tests", "Needs"}
    named = [x for x in shlex.split(said.get("Tests", "")) if x.startswith("tests")]
    assert all((ROOT / x.partition("::")[0]).is_file() for x in named), named


FILE = '''\
def summed(x):
    total = 0
    for y in x:
        total += y
    return total


class Mean:
    def of(self, x):
        """Their mean."""
        total = summed(x)
        return total / len(x)
'''
PATCH = """\
Tests: tests/test_mean.py
--- a/mean.py
+++ b/mean.py
@@ Mean.of
     def of(self, x):
         \"\"\"Their mean.\"\"\"
         total = summed(x)
-        return total / len(x)
+        return total / (len(x) - 1)
"""
OTHER = "def other(x):\n    return total / len(x)\n"


def moved_to_a_function(file):
    """Indented otherwise, and with another name."""
    body = file.partition("class Mean:\n")[2]
    return file.replace(body, "    pass\n") + "\n\n" + textwrap.dedent(body).replace("of(", "mean(")


# What happens to the project, and where the defect is then.
CHANGES = {
    "nothing": (lambda x: {"mean.py": x}, "mean.py"),
    "lines in front": (lambda x: {"mean.py": "import math\n\n" + x}, "mean.py"),
    "lines nearby": (lambda x: {"mean.py": x.replace("Their", "The")}, "mean.py"),
    "all lines nearby": (
        lambda x: {"mean.py": re.sub('""".*\n.*', "total = sum(x)", x)},
        "mean.py",
    ),
    "another function with the line": (lambda x: {"mean.py": x + OTHER}, "mean.py"),
    "a function of its own": (lambda x: {"mean.py": moved_to_a_function(x)}, "mean.py"),
    "another file": (lambda x: {"mean.py": OTHER, "means.py": x}, "means.py"),
    "a file that is gone": (lambda x: {"means.py": x, "other.py": OTHER}, "means.py"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_patch_keeps_its_place(change):
    changed, there = CHANGES[change]
    sources = changed(FILE)
    right, wrong = "return total / len(x)", "return total / (len(x) - 1)"
    before, _, behind = sources[there].partition(right)
    if there == "mean.py" and change.startswith("another"):
        assert right in behind  # the other one stays
    texts = anchors.planted(PATCH, sources)
    assert texts == {there: before + wrong + behind}
    again = anchors.anchored(PATCH, sources)
    assert again.startswith(f"Tests: tests/test_mean.py\n--- a/{there}\n+++ b/{there}\n@@ ")
    assert anchors.planted(again, sources) == texts
    assert anchors.anchored(again, sources) == again


def test_a_change_without_a_place_says_which_line_it_misses():
    sources = {"mean.py": FILE.replace("/ len(x)", "/ max(len(x), 1)"), "other.py": OTHER}
    with pytest.raises(anchors.Stale, match=r"^not in Mean\.of of mean\.py: return total / len"):
        anchors.planted(PATCH, sources)


def test_a_change_with_two_places_is_not_made():
    text = FILE + "\n\n" + FILE.partition("class")[2].join(("class", ""))
    with pytest.raises(anchors.Stale, match=r"^2 times in Mean\.of of mean\.py: "):
        anchors.planted(PATCH, {"mean.py": text})


def test_the_output_of_git_diff_is_a_patch():
    """Its numbers are not read; changes of two places apply, and lines without context."""
    patch = """\
diff --git a/mean.py b/mean.py
index 1111111..2222222 100644
--- a/mean.py
+++ b/mean.py
@@ -102,3 +102,4 @@ def nothing
     total = 0
     for y in x:
         total += y
+        total -= 1
@@ -112 +113 @@
-        total = summed(x)
+        total = summed(x) + 1
"""
    [(path, text)] = anchors.planted(patch, {"mean.py": FILE}).items()
    first = FILE.replace("+= y\n", "+= y\n        total -= 1\n")
    assert (path, text) == ("mean.py", first.replace("summed(x)\n", "summed(x) + 1\n"))
    names = re.findall("^@@.*", anchors.anchored(patch, {"mean.py": FILE}), re.M)
    assert names == ["@@ summed", "@@ Mean.of"]


def test_a_stale_patch_is_named_and_the_others_are_written_anew(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("plant_defects.sources_of", lambda _: {"mean.py": "x = 1\n" + FILE})
    right, stale = tmp_path / "right.patch", tmp_path / "stale.patch"
    right.write_text(PATCH.replace("Mean.of", "mean").replace("Their", "A"))
    stale.write_text(PATCH.replace("-        return total", "-        return sum"))
    assert check([right, stale], anchor=True) == 1
    lines = capsys.readouterr().out.splitlines()
    assert re.match("stale +broken: not in Mean.of of mean.py: return sum", lines[0])
    assert lines[1:] == ["1 of 2 apply, 1 do not"]
    assert right.read_text() == PATCH
    assert Path(stale).read_text().count("return sum") == 1
