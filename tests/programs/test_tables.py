"""The figures in the tables of the pages are those of the rows, and pages name their commits."""

import re
import subprocess

import pytest
import tables


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.stem)
def test_the_tables_are_those_of_the_rows(page):
    text = page.read_text()
    assert tables.TABLE.sub(tables.written, text) == text
    others = tables.TABLE.sub("", text)
    assert not re.findall(r"^\|.*\| \**[\d.,]+[%* ]*\|", others, re.M), "tables without rows"


@pytest.mark.parametrize("page", tables.DATED, ids=lambda page: f"{page.parent.stem}-{page.stem}")
def test_figures_have_their_commits_beside_them(page):
    assert [*tables.without_commit(page.read_text())] == []


def test_commits_that_are_named_exist():
    """In the repository's history; a copy of its files has none."""
    if subprocess.run(
        ["git", "rev-parse", "--git-dir"], cwd=tables.HERE, capture_output=True
    ).returncode:
        pytest.skip("no git repository")
    names = {x for page in tables.DATED for x in tables.COMMIT.findall(page.read_text())}
    request = "".join(f"{name}^{{commit}}\n" for name in sorted(names))
    command = ["git", "cat-file", "--batch-check"]
    options = dict(cwd=tables.HERE, capture_output=True, text=True, check=True)
    answers = subprocess.run(command, input=request, **options).stdout.splitlines()
    assert [x for x in answers if x.endswith("missing")] == []
