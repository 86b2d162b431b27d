"""Writes the figures in the tables of the pages from the rows in results/.

  python benchmarks/tables.py

A comment in front of a table says which rows its figures are of:

  <!-- rows FILES | COLUMNS | LINES -->

A figure is of the row that has all words of its column and of its line, joined by +, among its
values. KEY=VALUE asks for one key's value, KEY= for none. :KEY names the key that is shown, instead
of ms; us is ms in microseconds. {a,b} stands for a and for b. The first file that has such a row
counts, and figures of the others are marked with a dagger. The line "-" stays as it is, and so do
labels in the columns before the figures, and bold type.
"""

import itertools
import json
import re
from pathlib import Path

import command

HERE = Path(__file__).parent
PAGES = (
    HERE / "README.md",
    HERE.parent / "docs" / "background.md",
    HERE.parent / "docs" / "serving.md",
)
TABLE = re.compile(r"<!-- rows ([^>]*) -->\n(?:\|.*\n)+")


def expanded(text):
    """The words of a text in which {a,b} stands for a and for b."""
    for word in text.split():
        yield from map("".join, itertools.product(*(x.split(",") for x in re.split("[{}]", word))))


def rows(names):
    """The rows of files, each with its versions among its values."""
    texts = [(HERE / "results" / name).read_text() for name in expanded(names)]
    read = map(json.loads, "".join(texts).splitlines())
    return [row | row.get("versions", {}) | {"us": 1e3 * (row.get("ms") or 0)} for row in read]


def has(row, word):
    key, equals, value = word.partition("=")
    return str(row.get(key) or "") == value if equals else word in map(str, row.values())


def setting(row):
    """All of a row but what was measured: two runs of one setting have the same."""
    return str([x for x in row.values() if isinstance(x, str | int)])


def figure(runs, selector, bold):
    """A cell, which is empty without a row; raises ValueError if it could show several settings."""
    key = (re.findall(r":([a-z]\w*)", selector) or ["ms"])[0]
    words = re.sub(r":[a-z]\w*", "", selector).strip("+").split("+")
    for run, mark in zip(runs, " ††", strict=False):
        found = [row for row in run if all(has(row, word) for word in words)]
        if len({*map(setting, found)}) > 1:
            raise ValueError(f"rows of several settings have {selector}")
        if found and (x := found[0].get(key)) is None:
            return found[0]["status"]
        if found:
            text = (f"{x:,.0f}" if x >= 999.5 else f"{x:#.3g}").rstrip(".")
            if key.endswith("error"):  # 1.2e-4, 3.4
                text = re.sub(r"e\+?(-?)0(\d)", r"e\1\2", f"{x:.1e}").removesuffix("e0")
            text += " %" * key.endswith("pct")
            return (f"**{text}**" if bold else text) + mark.strip()
    return ""


def written(table):
    """A table and the comment in front of it, with the figures of the rows."""
    files, *selectors = table[1].split("|")
    columns, lines = (list(expanded(x)) for x in selectors)
    runs = [rows(name) for name in files.split()]
    head, body = re.split(r"(?<=-\|\n)", table[0], maxsplit=1)
    for line, selector in zip(body.splitlines(), lines, strict=True):
        cells = [x.strip() for x in line.split("|")[1:-1]]
        start = len(cells) - len(columns)
        for n, column in enumerate(columns if selector != "-" else (), start):
            cells[n] = figure(runs, f"{selector}+{column}", "**" in cells[n])
        head += "|" + "".join(f" {x} |" if x else " |" for x in cells) + "\n"
    return head


def main(_):
    for path in PAGES:
        path.write_text(TABLE.sub(written, path.read_text()))


if __name__ == "__main__":
    command.main(lambda define: None, main)
