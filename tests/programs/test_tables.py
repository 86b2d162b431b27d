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


PAGE = """# Rows are of commit 1111111{page}.

## Section

{section}

<!-- rows x.jsonl | :ms | a b -->
| | ms |
|---|---|
| a | 1.00 |
| b | 2.00 |
"""


@pytest.mark.parametrize(
    ("page", "section", "missing"),
    [
        ("", "Rows are of abcdef1 and 2222222-dirty.", ["abcdef2"]),
        ("", "Rows are of commits abcdef2 and abcdef1.", []),
        (" and abcdef2", "Rows are of abcdef1.", []),
        ("", "`abcdef1` are rows of its own: 1048576.", ["abcdef2"]),
        ("", "It says nothing.", ["abcdef1", "abcdef2"]),
    ],
)
def test_a_commit_that_a_section_does_not_name(tmp_path, monkeypatch, page, section, missing):
    monkeypatch.setattr(tables, "HERE", tmp_path)
    (tmp_path / "results").mkdir()
    rows = '{"impl": "a", "ms": 1, "commit": "abcdef1"}\n'
    rows += '{"impl": "b", "ms": 2, "commit": "abcdef234567-dirty"}\n'
    (tmp_path / "results" / "x.jsonl").write_text(rows)
    text = PAGE.format(page=page, section=section)
    expected = [f"## Section: it does not name the commit {x}" for x in missing]
    assert [*tables.without_commit(text)] == expected


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("It takes 1.5 ms.", True),
        ("It takes 1.5 ms (commit 1234567).", False),
        ("It takes 1234567 us.", True),
        ("It takes 30 % less (abc1234).", False),
        ("It needs 3 GPUs.", False),
        ("```\nIt takes 3 ms\n```", False),
    ],
)
def test_a_figure_without_a_commit(text, wrong):
    assert bool([*tables.without_commit(f"# Page\n\n## Section\n\n{text}\n")]) == wrong


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
    assert tables.figure([{"h_error": error, "impl": "a"}], "a+:h_error", False) == text
