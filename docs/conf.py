"""How Sphinx builds the site from these pages: `make docs`."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

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


def setup(app):
    """Docstrings write plurals as in Markdown, which reStructuredText takes for an open quote."""

    def separate_plurals(app, what, name, obj, options, lines):
        lines[:] = [PLURAL.sub(r"`\1`\\ ", line) for line in lines]

    app.connect("autodoc-process-docstring", separate_plurals)
