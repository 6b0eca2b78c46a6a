"""How Sphinx builds the site from these pages: `make docs`."""

import logging
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from before_after import page

from mpmd import passes
from mpmd.compile import passes as hlo_passes
from mpmd.tools import hlo_opt, opt
from mpmd.version import __version__

project = "mpmd"
author = "the mpmd authors"
project_copyright = "the mpmd authors"
version = release = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nitpicky = False

html_theme = "furo"
html_title = f"mpmd {__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]

myst_enable_extensions = ["colon_fence", "deflist"]
nb_render_markdown_format = "gfm"
myst_heading_anchors = 3
# Links to files of the repository that the site does not hold.
suppress_warnings = ["myst.xref_missing"]

nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True, "undoc-members": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
default_role = "code"  # single backticks, as in the pages


PLURAL = re.compile(r"`([^`\n]+)`(?=s\b)")
EXAMPLES = {
    "pass-examples": (opt, passes.FAMILIES, ".mlir"),
    "pass-examples-hlo": (hlo_opt, hlo_passes.FAMILIES, ".hlo"),
}
"""Pages that end with what passes do to programs."""


def with_literal_blocks(lines):
    """Indented lines after a paragraph are code, as in Markdown; reStructuredText would quote them."""
    found, paragraph = [], ""
    for line in lines:
        begins = line.startswith("    ") and found and not found[-1].strip()
        if begins and paragraph and not paragraph.startswith((" ", ":", "..", "*", "-")):
            found += ["::", ""]
        if line.strip():
            paragraph = line
        found.append(line)
    return found


def setup(app):
    """Docstrings write plurals and code as in Markdown; two pages end with examples of all passes."""

    def as_restructured_text(app, what, name, obj, options, lines):
        lines[:] = with_literal_blocks(PLURAL.sub(r"`\1`\ ", line) for line in lines)

    def add_examples(app, docname, source):
        if docname in EXAMPLES:
            source[0] = "\n\n".join([source[0], *page(*EXAMPLES[docname])])

    logging.getLogger("mpmd").propagate = False  # the log of mpmd-opt, which the pages leave out
    app.connect("autodoc-process-docstring", as_restructured_text)
    app.connect("source-read", add_examples)
