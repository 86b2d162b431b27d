"""The figures in the tables of the pages are those of the rows."""

import re

import pytest
import tables


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.stem)
def test_the_tables_are_those_of_the_rows(page):
    text = page.read_text()
    assert tables.TABLE.sub(tables.written, text) == text
    others = tables.TABLE.sub("", text)
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
    ("error", "text"), [(1.23e-4, "1.2e-4"), (3.44, "3.4"), (12345.6, "1.2e4"), (1e400, "inf")]
)
def test_errors_have_two_digits(error, text):
    assert tables.figure([[{"h_error": error, "impl": "a"}]], "a+:h_error", False) == text
