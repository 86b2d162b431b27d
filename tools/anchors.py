"""Patches without line numbers: a change has its place by the name of the function around it and by
up to three lines on each side. It keeps its place when code moves, is indented otherwise, or when
lines near it change.

    --- a/mlstm_pallas/formulas/splits.py
    +++ b/mlstm_pallas/formulas/splits.py
    @@ split_states
         gamma = jnp.expand_dims(gamma, tuple(range(2, added.ndim)))
    -    gamma = gamma[:, 1:] if backward else gamma[:, :-1]
    +    gamma = gamma[:, :-1]
         states = [jnp.zeros_like(added[:, 0]) if initial is None else initial]

The output of git diff is one, too: its numbers are not read.
"""

import ast
import functools
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

CONTEXT = 3  # lines on each side


class Stale(ValueError):
    """A change that has no place any more, or several."""


class Change(NamedTuple):
    path: str
    function: str  # such as CopyRing.product; "" outside of functions, or in the output of git diff
    lines: list[str]  # those of a diff, each with " ", "-" or "+" in front

    def trimmed(self, context):
        """The lines, with so many lines of context at most."""
        changed = [i for i, line in enumerate(self.lines) if line[0] != " "]
        return self.lines[max(changed[0] - context, 0) : changed[-1] + 1 + context]


def old(lines):
    return [line[1:] for line in lines if line[0] != "+"]


def new(lines):
    return [line[1:] for line in lines if line[0] != "-"]


def context_before(lines):
    return next(i for i, line in enumerate(lines) if line[0] != " ")


class Place(NamedTuple):
    """Lines of a change in a file, indented as they are there."""

    path: str
    start: int
    lines: list[str]

    def first_changed(self):
        return self.start + context_before(self.lines)


def parsed(patch):
    """What is before the diff, and the changes."""
    head, *_ = re.split(r"^(?:diff|---) ", patch, maxsplit=1, flags=re.MULTILINE)
    path, changes = "", []
    for line in patch[len(head) :].splitlines():
        if line.startswith("+++ b/"):
            path = line.removeprefix("+++ b/")
        elif line.startswith("@@"):
            function = "" if line.startswith("@@ -") else line[2:].strip()
            changes.append(Change(path, function, []))
        elif changes and not line.startswith(("--- a/", "diff ", "index ")):
            changes[-1].lines.append(line or " ")
    return head, changes


@functools.cache
def functions(source):
    """(name, first line, end) of functions and classes, the outer ones first; the file is ""."""
    found = [("", 0, len(source.splitlines()))]

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                name = f"{prefix}.{child.name}".strip(".")
                first = min(x.lineno for x in (child, *child.decorator_list))
                found.append((name, first - 1, child.end_lineno))
            visit(child, name)

    visit(ast.parse(source), "")
    return found


def matches(path, source, change, spans, least_context):
    """Where the old lines of a change are, with as many lines of context as there are."""
    there = source.splitlines()
    for context in range(CONTEXT, least_context - 1, -1):
        lines = change.trimmed(context)
        if not (pattern := textwrap.dedent("\n".join(old(lines)))):
            continue  # only new lines
        size, places = len(old(lines)), []
        for start in range(len(there) - size + 1):
            window = "\n".join(there[start : start + size])
            if textwrap.dedent(window) != pattern:
                continue
            place = Place(path, start, indented(lines, window))
            if any(first <= place.first_changed() < end for _, first, end in spans):
                places.append(place)
        if places:
            return places
    return []


def indentation(text):
    return min((len(x) - len(x.lstrip()) for x in text.split("\n") if x.strip()), default=0)


def indented(lines, window):
    """The lines of a change, indented as the window is."""
    before = indentation("\n".join(old(lines)))
    margin = " " * indentation(window)
    shifted = (x[1:] if len(x) - 1 <= before else margin + x[1 + before :] for x in lines)
    return [x[0] + y for x, y in zip(lines, shifted, strict=True)]


def place(change, sources):
    """Where a change has to be made in the sources, {path: text}: in its function; anywhere in its
    file, with a line of context; in a function of this name in another file."""
    path, name = change.path, change.function
    here = {path: sources[path]} if path in sources else {}
    searches = [(here, lambda x: x == name, 0), (here, lambda x: not x, 1)]
    if name:
        last = name.rpartition(".")[2]
        searches.append((sources, lambda x: x.rpartition(".")[2] == last, 0))
    for files, has_name, least_context in searches:
        places = []
        for file, source in files.items():
            spans = [x for x in functions(source) if has_name(x[0])]
            places += matches(file, source, change, spans, least_context)
        if len(places) == 1:
            return places[0]
        if places:
            break
    found = f"{len(places)} times" if places else "not"
    line = next(x[1:].strip() for x in change.lines if x[0] != " ")
    raise Stale(f"{found} in {name or 'a function'} of {path}: {line}")


def planted(patch, sources):
    """{path: text} of the files that a patch changes."""
    places = [place(change, sources) for change in parsed(patch)[1]]
    texts = {}
    for path, start, lines in sorted(places, key=lambda x: x.start, reverse=True):
        there = texts.get(path, sources[path]).split("\n")
        there[start : start + len(old(lines))] = new(lines)
        texts[path] = "\n".join(there)
    return texts


def anchored(patch, sources):
    """The patch with the names and lines that are around its changes now."""
    text, changes = parsed(patch)
    last = None
    for change in changes:
        path, start, lines = place(change, sources)
        changed = Change(path, "", lines).trimmed(0)
        first = start + context_before(lines)
        end = first + len(old(changed))
        there = sources[path].splitlines()
        before, behind = there[max(first - CONTEXT, 0) : first], there[end : end + CONTEXT]
        lines = [*(" " + x for x in before), *changed, *(" " + x for x in behind)]
        *_, inside = (x for x, begin, stop in functions(sources[path]) if begin <= first < stop)
        if path != last:
            text += f"--- a/{path}\n+++ b/{path}\n"
        text += "\n".join((f"@@ {inside}".rstrip(), *lines, ""))
        last = path
    return text


def sources_of(root):
    """{path: text} of what a patch may change."""
    folders = "mlstm_pallas", "benchmarks", "examples", "tools", "tests"
    paths = (x for folder in folders for x in sorted(Path(root, folder).glob("**/*.py")))
    return {str(x.relative_to(root)): x.read_text() for x in paths}
