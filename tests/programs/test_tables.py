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


HEAD = "# Rows{}\n\n<!-- rows x.jsonl | {{a,b}} a+:us | 9 - 1x2x30x4x5 1234567890ab -->\n"
TABLE = "| | ms | of b | us |\n|---|---|---|---|\n"
OLD = "| x | **3** | | |\n| *others* | | | |\n| y | 3 | 4 | |\n| z | 5 | 6 | |\n"
NEW = "| x | **2.00** | | 2,000 |\n| *others* | | | |\n| y | 2.00 | | 2,000 |\n| z | | wrong | |\n"


@pytest.mark.parametrize(("named", "code"), [("", 1), (" (commit 1234567)", 0)])
def test_pages_are_written_and_lack_no_commit(named, code, tmp_path, monkeypatch, capsys):
    """The version of jax and the sizes are values of a row. A wrong one has no figure."""
    monkeypatch.setattr(tables, "HERE", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "x.jsonl").write_text(
        '{"impl": "a", "ms": 2, "versions": {"jax": "9"}, "shape": [1, 2, 30, 4, 5]}\n'
        '{"impl": "b", "ms": null, "status": "wrong", "commit": "1234567890ab"}\n'
    )
    page, head = tmp_path / "x.md", HEAD.format(named)
    for name in ("PAGES", "DATED"):
        monkeypatch.setattr(tables, name, [page])
    page.write_text(head + TABLE + OLD)
    assert tables.main(None) == code
    assert page.read_text() == head + TABLE + NEW
    missing = "x.md: # Rows: it does not name the commit 1234567\n"
    assert capsys.readouterr().err == ("\n" if named else missing)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("It takes 1.5 ms.", True),
        ("It takes 1.5 ms (commit 1234567).", False),
        ("It takes 1234567 us.", True),
        ("It needs 3 GPUs, or 3 ms/step.", False),
        ("```\nIt takes 3 ms\n```", False),
        ("At abc1234.\n\n## Other\n\nIt saves 30 %.", True),
    ],
)
def test_a_figure_without_a_commit(text, wrong):
    assert bool([*tables.without_commit(f"# Page\n\n## Section\n\n{text}\n")]) == wrong


def test_a_row_of_a_tree_with_changes_is_refused():
    row = dict(impl="a", ms=2, commit="abcdef2-dirty")
    with pytest.raises(ValueError, match=r"^a has a row of a tree with changes, abcdef2-dirty$"):
        tables.figure([row], "a", False)


# Three digits, from 1,000 on all before the point; of errors two.
FIGURES = """
0.0 0.00 0.0
0.099949 0.0999 1.0e-1
9.994 9.99 1.0e1
9.996 10.0 1.0e1
99.96 100 1.0e2
999.4 999 1.0e3
999.5 1,000 1.0e3
1234567.5 1,234,568 1.2e6
"""


@pytest.mark.parametrize("line", FIGURES.strip().splitlines())
def test_digits_of_figures(line):
    x, figure, error = line.split()
    row = dict(impl="a", status="ok", x_pct=None) | dict.fromkeys(("ms", "of_pct"), float(x))
    shown = [tables.figure([row | {"h_error": float(x)}], f"a+:{y}", False) for y in ROW_KEYS]
    assert shown == [figure, f"{figure} %", error, ""]


ROW_KEYS = "ms", "of_pct", "h_error", "x_pct"
