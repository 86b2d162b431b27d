"""The figures in the tables of benchmarks/README.md are those of the rows."""

import re

import pytest
import tables

README = (tables.HERE / "README.md").read_text()
RUNS = [
    [dict(impl="a", direction="fwd", ms=0.04449), dict(impl="a", pooled="", ms=1999.6, pct=32.46)],
    [dict(impl="b", ms=4.0, x="fwd"), dict(impl="b", ms=5.0, x="fwd"), dict(impl="c", ms=1.0)],
    [dict(impl="a", ms=7.0), dict(impl="a", ms=None, status="wrong", x=True)],
]


def test_the_tables_are_those_of_the_rows():
    assert tables.TABLE.sub(tables.written, README) == README
    others = tables.TABLE.sub("", README)
    assert not re.findall(r"^\|.*\| \**[\d.,]+[%†* ]*\|", others, re.M), "tables without rows"


def test_a_figure_of_a_row_replaces_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "HERE", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "x.jsonl").write_text(
        '{"impl": "a", "ms": 2, "versions": {"jax": "9"}}'
    )
    text = "<!-- rows x.jsonl | a :us | 9 - b -->\n| | ms | us |\n|---|---|---|\n"
    new = text + "| x | **2.00** | 2,000 |\n| *others* | | |\n| y | | |\n"
    old = text + "| x | **3** | |\n| *others* | | |\n| y | 3 | |\n"
    assert tables.TABLE.sub(tables.written, old) == new


@pytest.mark.parametrize(
    ("selector", "cell"),
    [
        ("a+fwd", "**0.0445**"),  # three digits
        ("a+direction=", "**2,000**"),  # a key that the row lacks
        ("a+direction=:pct", "**32.5 %**"),
        ("b", "**4.00**†"),  # another run; the first of two rows of one setting
        ("x=True", "wrong"),
        ("d", ""),
    ],
)
def test_cells(selector, cell):
    assert tables.figure(RUNS, selector, bold=True) == cell


def test_rows_of_two_settings_are_refused():
    with pytest.raises(ValueError, match=r"rows of several settings have a"):
        tables.figure(RUNS, "a", bold=False)
