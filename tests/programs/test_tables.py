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
        ("", "Rows are of abcdef1 and 2222222.", ["abcdef2"]),
        ("", "Rows are of commits abcdef2 and abcdef1.", []),
        (" and abcdef2", "Rows are of abcdef1.", []),
        ("", "`abcdef1` are rows of its own: 1048576.", ["abcdef2"]),
        ("", "It says nothing.", ["abcdef1", "abcdef2"]),
        ("", "<!-- of abcdef1 and abcdef2 -->", ["abcdef1", "abcdef2"]),
        ("", "Of abcdef1.\n\n## Other\n\nOf abcdef2.\n\n## Section", ["abcdef1", "abcdef2"]),
    ],
)
def test_a_commit_that_a_section_does_not_name(tmp_path, monkeypatch, page, section, missing):
    monkeypatch.setattr(tables, "HERE", tmp_path)
    (tmp_path / "results").mkdir()
    rows = '{"impl": "a", "ms": 1, "commit": "abcdef1"}\n'
    rows += '{"impl": "b", "ms": 2, "commit": "abcdef234567"}\n'
    (tmp_path / "results" / "x.jsonl").write_text(rows)
    text = PAGE.format(page=page, section=section)
    expected = [f"## Section: it does not name the commit {x}" for x in missing]
    assert [*tables.without_commit(text)] == expected


UNITS = "ms", "us", "tokens/s", "TFLOP/s", "TB/s", "MiB", "%"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("It takes 1.5 ms.", True),
        ("It takes 1.5 ms (commit 1234567).", False),
        ("It takes 1234567 us.", True),
        ("It takes 30 % less (abc1234).", False),
        ("It needs 3 GPUs.", False),
        ("```\nIt takes 3 ms\n```", False),
        ("It takes 3 ms. <!-- at abc1234 -->", True),
        ("It takes 3 ms (commit 123456) or 30 % (abcdefa).", True),
        *((f"At abc1234.\n\n## Other\n\nIt does 3 {unit}.", True) for unit in UNITS),
        ("It takes 3 ms/step, 3 msec or 3 MiBs.", False),
    ],
)
def test_a_figure_without_a_commit(text, wrong):
    assert bool([*tables.without_commit(f"# Page\n\n## Section\n\n{text}\n")]) == wrong


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """A folder for a page x.md and its rows: a of 2 ms, and b, which is wrong."""
    monkeypatch.setattr(tables, "HERE", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "x.jsonl").write_text(
        '{"impl": "a", "ms": 2, "versions": {"jax": "9"}, "shape": [1, 2, 30, 4, 5]}\n'
        '{"impl": "b", "ms": null, "status": "wrong", "commit": "1234567890ab"}\n'
    )
    monkeypatch.setattr(tables, "PAGES", [tmp_path / "x.md"])
    monkeypatch.setattr(tables, "DATED", tables.PAGES)
    return tmp_path


def test_a_figure_of_a_row_replaces_what_is_there(pages):
    """The version of jax and the sizes are values of a row. A wrong one has no figure."""
    head = "<!-- rows x.jsonl | {a,b} a+:us | 9 - 1x2x30x4x5 1234567890ab -->\n"
    text = f"{head}| | ms | of b | us |\n|---|---|---|---|\n"
    new = "| x | **2.00** | | 2,000 |\n| *others* | | | |\n| y | 2.00 | | 2,000 |\n"
    old = "| x | **3** | | |\n| *others* | | | |\n| y | 3 | 4 | |\n"
    new, old = f"{new}| z | | wrong | |\n", f"{old}| z | 5 | 6 | |\n"
    assert tables.TABLE.sub(tables.written, text + old) == text + new
    with pytest.raises(ValueError, match="argument 2 is longer"):
        tables.TABLE.sub(tables.written, text + old.partition("| z")[0])


@pytest.mark.parametrize("commit", ["abcdef234567-dirty", "abcdef2-dirty"])
def test_a_row_of_a_tree_with_changes_is_refused(commit):
    rows = [dict(impl="a", ms=2, commit=commit), dict(impl="b", ms=2, commit=commit[:7])]
    with pytest.raises(ValueError, match=f"^a has a row of a tree with changes, {commit}$"):
        tables.figure(rows, "a", False)
    assert tables.figure(rows, "b", False) == "2.00"


@pytest.mark.parametrize(("named", "code"), [("", 1), (" (commit 1234567)", 0)])
def test_pages_are_written_and_lack_no_commit(named, code, pages, capsys):
    text = "# Rows{}\n\n<!-- rows x.jsonl | :us | a b -->\n| | us |\n|---|---|\n"
    text += "| a | {} |\n| b | {} |\n"
    page = pages / "x.md"
    page.write_text(text.format(named, 3, ""))
    assert tables.main(None) == code
    assert page.read_text() == text.format(named, "2,000", "wrong")
    missing = "x.md: # Rows: it does not name the commit 1234567\n"
    assert capsys.readouterr().err == ("\n" if named else missing)


@pytest.mark.parametrize(
    ("row", "cell"),
    [
        (dict(status="ok", x_pct=None), ""),
        (dict(status="ok"), "ok"),  # no such key, or another spelling
        (dict(status="wrong", x_pct=None), "wrong"),
    ],
)
def test_a_cell_without_a_figure(row, cell):
    assert tables.figure([row | {"impl": "a"}], "a+:x_pct", False) == cell


# Three digits, from 1,000 on all before the point.
FIGURES = """
0.0 0.00
0.099949 0.0999
0.0999501 0.100
1.0 1.00
9.994 9.99
9.996 10.0
99.94 99.9
99.96 100
999.4 999
999.5 1,000
999.99 1,000
1000 1,000
1000.6 1,001
1234567.5 1,234,568
"""


@pytest.mark.parametrize("line", FIGURES.strip().splitlines())
def test_figures_have_three_digits(line):
    x, text = line.split()
    rows = [{"impl": "a", "ms": float(x), "of_pct": float(x)}]
    shown = [tables.figure(rows, f"a+{key}", False) for key in ("", ":of_pct")]
    assert shown == [text, f"{text} %"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        *[(1.23e-4, "1.2e-4"), (3.44, "3.4"), (3.46, "3.5"), (9.96, "1.0e1")],
        *[(12345.6, "1.2e4"), (9.96e-10, "1.0e-9"), (1e-10, "1.0e-10"), (1e400, "inf")],
    ],
)
def test_errors_have_two_digits(error, text):
    assert tables.figure([{"h_error": error, "impl": "a"}], "a+:h_error", False) == text
