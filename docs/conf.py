"""Sphinx's settings. python -m sphinx -W --keep-going -b html docs docs/_build/html"""

import html
import os
import re
import sys
import textwrap
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert
from sphinx import addnodes
from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).resolve().parents[1]
# The tutorial's kernel, which runs in docs/, finds the package and the models too.
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import mlstm_pallas  # noqa: E402, sys.path has it now

project, release = "mlstm_pallas", mlstm_pallas.__version__
html_title = f"{project} {release}"
author = "The mlstm_pallas authors"
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_nb",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
highlight_language = "pycon"  # of literal blocks: examples, and equations as they are
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(ROOT / "docs/scorer.js")
html_copy_source = html_show_copyright = False
html_math_renderer = "mathml"  # which browsers draw, without a script from elsewhere
copybutton_prompt_text = ">>> |... "

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_fence_as_directive = ["math"]  # as GitHub writes it
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_timeout = 600  # seconds per cell
nb_execution_raise_on_error = True

add_module_names = False  # most are internal
autodoc_default_options = {"member-order": "bysource"}
nitpicky = True  # a reference without a target is a warning
nitpick_ignore_regex = [("py:class", ".*")]  # types in docstrings are prose
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
TYPES = {  # as one writes them
    "~jax.jaxlib._jax.Array": "jax.Array",  # of jax < 0.11
    "~jax.Array": "jax.Array",
    "~numpy.ndarray": "numpy.ndarray",
    "<class 'jax.numpy.float32'>": "jax.numpy.float32",
    "str | type[~typing.Any] | ~numpy.dtype | ~jax._src.typing.SupportsDType": "DTypeLike",
    "~mlstm_pallas.planning.config.KernelConfig": "~mlstm_pallas.KernelConfig",
    "~mlstm_pallas.problem.gpu.Gpu": "~mlstm_pallas.Gpu",
    "~mlstm_pallas.stages.ring_step.RingStates": "~mlstm_pallas.RingStates",
}
napoleon_numpy_docstring = False
napoleon_use_rtype = napoleon_attr_annotations = False
napoleon_use_ivar = True  # attributes as a list
smartquotes = False  # of flags, --name

# Of pages that begin with something else.
DESCRIPTIONS = {
    "background": "The mLSTM and its chunkwise form in equations, its lowerings, and words.",
    "build_notes": "The design of the package, its equations, rules and decisions; how to release.",
    "contributing": "The tests of mlstm_pallas, and where each file is.",
    "devices": "Batch, heads and sequence of the mLSTM over a mesh, and what gathers.",
    "licence": "The package has the Apache licence, version 2.0.",
    "migrating": "From xlstm-jax, mlstm_kernels, transformers, xlstm or FLA to mlstm_pallas.",
    "numerics": "The rounding errors of the mLSTM: bounds, measured errors, where n . q cancels.",
    "serving": "Prefill, steps, ragged batches, slots, prefix caches and speculative decoding.",
    "training": "Mixed precision, gradient accumulation, remat, meshes, orbax checkpoints and MFU.",
}
# The words for which the search shows a page first.
SEARCH = {
    "bidirectional": ["bidirectional"],
    "devices": ["sharding", "mesh", "sequence parallelism"],
    "index": ["TPU"],
    "licence": ["license"],
    "packing": ["segment"],
    "plans": ["memory"],
    "serving": ["slots"],
    "training": ["accumulation", "checkpoint", "mixed precision", "remat"],
}
NAME = re.compile(rf"(?:mlstm_pallas\.)?((?:{'|'.join(mlstm_pallas.__all__)})(?:\.(?!py$)\w+)*)")
TEX = {
    r"(?m)= (.*) / \((.*)\)$": r"= \\frac{\1}{\2}",
    r"\b(exp|log|max)\b": r"\\\1",
    r"\bsigmoid\b": r"\\sigma",
    r"\bnorm_val\b": r"\\mathrm{norm\\_val}\\,",
    r"\beps\b": r"\\epsilon",
    r"\^T\b": r"^\\top",
    r" \. ": r" \\cdot ",
}
FOLDERS = "benchmarks", "docs", "examples", "tests", "tools"
PROGRAMS = "|".join(str(x.relative_to(ROOT)) for y in FOLDERS for x in ROOT.glob(f"{y}/*.py"))
FILE = re.compile(
    rf"\b(?:(docs/\w+|BUILD_NOTES|CONTRIBUTING|benchmarks/README)\.md|({PROGRAMS}))\b"
)
# Links to documents outside of docs/, of which a page there includes all or a part.
OUTSIDE = re.compile(r"\]\(((?:\.\./)*)\.\./(README|benchmarks/README)\.md\b")
ROOT_PAGE = re.compile(r"\]\((BUILD_NOTES|CONTRIBUTING)\.md\)")
# What a page shows where directives are not run, such as on a forge.
OFF_SITE = re.compile(r"^Outside of the site .*\n\n", re.MULTILINE)


def write_types(app, what, name, obj, options, signature, returns):
    for long, short in TYPES.items():
        signature, returns = (x and x.replace(long, short) for x in (signature, returns))
    return signature, returns


def add_index(app, docname, source):
    for word in SEARCH.get(docname, ()):  # below the heading that has it, or the title
        text, flags = source[0], re.MULTILINE | re.IGNORECASE
        heading = re.search(f"^##+ .*{word}.*\n", text, flags) or re.search("^# .*\n", text, flags)
        entry = f"\n```{{index}} ! {word}\n```\n"
        source[0] = text[: heading.end()] + entry + text[heading.end() :]


def link_pages(app, docname, source):
    """Links to documents outside of docs/ lead to the pages that include them."""

    def link(match):
        return f"]({match[1]}{'benchmarks' if '/' in match[2] else 'index'}.md"

    source[0] = OUTSIDE.sub(link, OFF_SITE.sub("", source[0]))


def link_root(app, path, docname, source):
    """Links of an included text to documents beside it lead to the pages that include these."""
    source[0] = ROOT_PAGE.sub(lambda x: f"](docs/{x[1].lower()}.md)", source[0])


def add_links(app, doctree):
    """Public names, and pages and programs that the text names, are links."""
    here = app.env.docname

    def to(domain, kind, target, *children):
        about = dict(refdomain=domain, reftype=kind, reftarget=target, refdoc=here)
        return addnodes.pending_xref("", *children, refexplicit=True, refwarn=True, **about)

    def to_file(match, child):
        page, program = match.groups()
        if program:
            uri = app.builder.get_relative_uri(here, f"programs/{program}")
            return nodes.reference("", "", child, refuri=uri, internal=True)
        name = page.removeprefix("docs/").removesuffix("/README").lower()
        return to("std", "doc", f"/{name}", child)

    for text in list(doctree.findall(nodes.Text)):
        inside, node = set(), text
        while node := node.parent:
            inside.add(type(node))
        if inside & {nodes.title, nodes.reference, nodes.literal_block, addnodes.pending_xref}:
            continue
        code = text.parent
        if not isinstance(code, nodes.literal):
            links, end = [], 0
            for match in FILE.finditer(text):
                link = to_file(match, nodes.Text(match[0]))
                links += nodes.Text(text[end : match.start()]), link
                end = match.end()
            if links:
                code.replace(text, [*links, nodes.Text(text[end:])])
        elif match := FILE.fullmatch(text):
            code.replace_self(to_file(match, code.deepcopy()))
        elif match := NAME.fullmatch(text):
            code.replace_self(to("py", "obj", f"mlstm_pallas.{match[1]}", code.deepcopy()))


def program_pages(app):
    """The programs that the documents name, as pages."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks/README.md"]
    for name in sorted({x[2] for page in pages for x in FILE.finditer(page.read_text()) if x[2]}):
        code = app.builder.highlighter.highlight_block((ROOT / name).read_text(), "python")
        yield f"programs/{name}", {"title": name, "body": f"<h1>{name}</h1>{code}"}, "page.html"


def add_description(app, pagename, templatename, context, doctree):
    """The first paragraph of a page, for search engines."""
    inside = nodes.section | addnodes.desc_content
    paragraphs = doctree.findall(nodes.paragraph) if doctree else ()
    texts = (x.astext() for x in paragraphs if isinstance(x.parent, inside))
    if text := DESCRIPTIONS.get(pagename) or next(texts, None):
        content = html.escape(textwrap.shorten(text, 200))
        context["metatags"] += f'<meta name="description" content="{content}">'


def tex_of(text):
    """The equations of a docstring, which is Python's to read, one per line, in TeX."""
    if "\\" in text:
        return text
    for pattern, replacement in TEX.items():
        text = re.sub(pattern, replacement, text)
    lines = r" \\ ".join(line.replace("=", "&=", 1) for line in text.splitlines())
    return rf"\begin{{split}}{lines}\end{{split}}"


def visit_math(self, node):
    if isinstance(node, nodes.math):
        self.body.append(convert(node.astext()))
    else:
        equation = convert(tex_of(node.astext()), display="block")
        self.body.append(f'<div class="table-wrapper">{equation}</div>')  # which scrolls
    raise nodes.SkipNode


def setup(app):
    for module in "api", "xlstm_jax.triton_stablef":
        # The signature of the function is enough; its overloads repeat it.
        analyzer = ModuleAnalyzer.for_module(f"mlstm_pallas.{module}")
        analyzer.analyze()
        analyzer.overloads.clear()
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    app.connect("autodoc-process-signature", write_types)
    app.connect("source-read", add_index)
    app.connect("source-read", link_pages)
    app.connect("include-read", link_root)
    app.connect("doctree-read", add_links)
    app.connect("html-collect-pages", program_pages)
    app.connect("html-page-context", add_description)
