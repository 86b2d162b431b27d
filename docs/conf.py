"""Sphinx's settings. python -m sphinx -W --keep-going -b html docs docs/_build/html"""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The tutorial's kernel, which runs in docs/, finds the package and the models too.
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("JAX_PLATFORMS", "cpu")

project = html_title = "mlstm_pallas"
author = "The mlstm_pallas authors"
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "myst_nb",
    "sphinx_design",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
highlight_language = "pycon"  # of literal blocks: examples, and equations as they are
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_copyright = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_timeout = 600  # seconds per cell
nb_execution_raise_on_error = True

add_module_names = False  # most are internal
autodoc_default_options = {"member-order": "bysource"}
nitpicky = True  # a reference without a target is a warning
nitpick_ignore_regex = [("py:class", ".*")]  # types in docstrings are prose
autodoc_typehints = "none"  # the docstrings have types; without the overloads
napoleon_numpy_docstring = False
napoleon_use_rtype = napoleon_attr_annotations = False
napoleon_use_ivar = True  # attributes as a list
smartquotes = False  # of flags, --name


def setup(app):
    """Public names in docstrings are links."""
    import mlstm_pallas  # sys.path, above, has it

    names = "|".join(mlstm_pallas.__all__)
    literal = re.compile(rf"``(?:mlstm_pallas\.)?((?:{names})(?:\.\w+)*)``")

    def link(app, what, name, documented, options, lines):
        lines[:] = [literal.sub(r":py:obj:`\1 <mlstm_pallas.\1>`", line) for line in lines]

    app.connect("autodoc-process-docstring", link)
