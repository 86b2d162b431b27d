"""Writes the figures in the tables of the pages from the rows in results/, and says which figures
have no commit beside them.

  python benchmarks/tables.py

A comment in front of a table says which rows its figures are of:

  <!-- rows FILES | COLUMNS | LINES -->

A figure is of the row that has all words of its column and of its line, joined by +, among its
values. KEY=VALUE asks for one key's value, KEY= for none. :KEY names the key that is shown, instead
of ms; us is ms in microseconds. {a,b} stands for a and for b. The line "-" stays as it is, and so
do labels in the columns before the figures, and bold type. A row whose commit ends in -dirty is
refused.

A section names the commits of the rows of its tables, and a commit if it has a figure in ms, us,
tokens/s, TFLOP/s, TB/s, MiB or %. What a page says before its first heading, table or picture holds
for all of its sections.
"""

import itertools
import json
import re
import sys
from pathlib import Path

import command

HERE = Path(__file__).resolve().parent
DOCUMENTS = HERE.parent
DATED = DOCUMENTS / "README.md", HERE / "README.md", *sorted((DOCUMENTS / "docs").glob("*.md"))
PAGES = [path for path in DATED if "<!-- rows" in path.read_text()]
TABLE = re.compile(r"<!-- rows ([^>]*) -->\n(?:\|.*\n)+")
# Seven digits, with a letter or after the word.
COMMIT = re.compile(r"\b(?=\w*\d)(?=\w*[a-f])[\da-f]{7}\b|(?<=commit )\d{7}\b")
FIGURE = re.compile(r"\d (?:ms|us|tokens/s|TFLOP/s|TB/s|MiB|%)(?![\w/])")


def expanded(text):
    """The words of a text in which {a,b} stands for a and for b."""
    for word in text.split():
        yield from map("".join, itertools.product(*(x.split(",") for x in re.split("[{}]", word))))


def rows(names):
    """The rows of files, each with its versions and BxNHxSxDHQKxDHV among its values."""
    texts = [(HERE / "results" / name).read_text() for name in expanded(names)]
    read = [json.loads(line) for line in "".join(texts).splitlines()]
    for row in read:
        row |= row.get("versions", {})
        row["us"] = row.get("ms") and 1e3 * row["ms"]
        row["sizes"] = "x".join(map(str, row.get("shape", "")))
    return read


def has(row, word):
    key, equals, value = word.partition("=")
    return str(row.get(key) or "") == value if equals else word in map(str, row.values())


def setting(row):
    """All of a row but what was measured: two runs of one setting have the same."""
    return str([x for x in row.values() if isinstance(x, str | int)])


def row_of(run, selector):
    """The row of a cell, or none.

    Raises ValueError if the cell could show several settings, or if nobody has the row's tree.
    """
    words = re.sub(r":[a-z]\w*", "", selector).strip("+").split("+")
    found = [row for row in run if all(has(row, word) for word in words)]
    if len({*map(setting, found)}) > 1:
        raise ValueError(f"rows of several settings have {selector}")
    row = found[0] if found else None
    if row and str(row.get("commit")).endswith("-dirty"):
        raise ValueError(f"{selector} has a row of a tree with changes, {row['commit']}")
    return row


def figure(run, selector, bold):
    """A cell, which is empty without a row or its figure."""
    if (row := row_of(run, selector)) is None:
        return ""
    key = (re.findall(r":([a-z]\w*)", selector) or ["ms"])[0]
    if (x := row.get(key)) is None:  # null where a right row has no such figure
        return "" if key in row and row["status"] == "ok" else row["status"]
    text = (f"{x:,.0f}" if x >= 999.5 else f"{x:#.3g}").rstrip(".")
    text += " %" * key.endswith("pct")
    if key.endswith("error"):  # 1.2e-4, 3.4
        text = re.sub(r"e\+?(-?)0(\d)", r"e\1\2", f"{x:.1e}").removesuffix("e0")
    return f"**{text}**" if bold else text


def selectors(table):
    """The rows of a table, and for each line the selectors of its cells."""
    files, *parts = table[1].split("|")
    columns, lines = (list(expanded(x)) for x in parts)
    cells = [[f"{x}+{column}" for column in columns if x != "-"] for x in lines]
    return rows(files), len(columns), cells


def written(table):
    """A table and the comment in front of it, with the figures of the rows."""
    run, count, lines = selectors(table)
    head, body = re.split(r"(?<=-\|\n)", table[0], maxsplit=1)
    for line, cells_of_line in zip(body.splitlines(), lines, strict=True):
        cells = [x.strip() for x in line.split("|")[1:-1]]
        for n, selector in enumerate(cells_of_line, len(cells) - count):
            cells[n] = figure(run, selector, "**" in cells[n])
        head += "|" + "".join(f" {x} |" if x else " |" for x in cells) + "\n"
    return head


def commits(table):
    """The commits of the rows in a table, of seven digits."""
    run, _, lines = selectors(table)
    shown = [row for row in (row_of(run, x) for line in lines for x in line) if row]
    return {str(row["commit"])[:7] for row in shown if "commit" in row}


def without_commit(text):
    """What a page has to say: for each section, the commits of rows that it does not name."""
    head = re.split(r"^(?:## |<!-- rows|!\[)", text, flags=re.M)[0]
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    for section in re.split(r"^(?=## )", text, flags=re.M):
        title = section.partition("\n")[0]
        tables = [*TABLE.finditer(section)]
        named = {*COMMIT.findall(head + re.sub(r"<!--.*?-->", "", section))}
        missing = set().union(*map(commits, tables)) - named
        if not named and FIGURE.search(section):
            missing.add("of its figures")
        yield from (f"{title}: it does not name the commit {x}" for x in sorted(missing))


def main(_):
    for path in PAGES:
        path.write_text(TABLE.sub(written, path.read_text()))
    lines = [f"{path.name}: {x}" for path in DATED for x in without_commit(path.read_text())]
    print(*lines, sep="\n", file=sys.stderr)
    return int(bool(lines))


if __name__ == "__main__":
    command.main(lambda define: None, main)
