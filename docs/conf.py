"""How Sphinx builds the site from these pages: `make docs`."""

import logging
import re
import sys
import tomllib
from pathlib import Path

from docutils import nodes
from pygments.lexers.special import TextLexer
from sphinx.transforms.post_transforms import SphinxPostTransform

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from before_after import page

from mpmd import passes
from mpmd.compile import passes as hlo_passes
from mpmd.tools import hlo_opt, opt
from mpmd.version import __version__

ROOT = Path(__file__).resolve().parent.parent

project = "mpmd"
author = "the mpmd authors"
project_copyright = "the mpmd authors"
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
nitpicky = False

html_theme = "furo"
html_title = f"mpmd {__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
repository = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
html_theme_options = {
    "source_view_link": f"{repository}/blob/main/docs/{{filename}}",
    "footer_icons": [{"name": "repository", "url": repository, "html": "Repository", "class": ""}],
}
copybutton_exclude = ".linenos, .gp, .go"

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
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
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


NOTEBOOK = re.compile(r"\A---\nfile_format: mystnb\n.*?^# [^\n]*\n", re.DOTALL | re.MULTILINE)
BREAKABLE = re.compile(r"(?<=[_./])(?=\w)")


class BreakAtUnderscores(SphinxPostTransform):
    """Code in tables may be broken behind `_`, `.` and `/`, and nowhere else within a word (`site.css`)."""

    default_priority = 900  # behind all that makes links of code
    formats = ("html",)

    def run(self, **kwargs):
        for entry in self.document.findall(nodes.entry):
            for code in list(entry.findall(nodes.literal)):
                for text in list(code.findall(nodes.Text)):
                    pieces = []
                    for part in BREAKABLE.split(text.astext()):
                        pieces += [nodes.raw("", "<wbr>", format="html"), nodes.Text(part)]
                    text.parent.replace(text, pieces[1:])


def setup(app):
    """Docstrings write plurals and code as in Markdown; two pages end with examples of all passes."""

    def as_restructured_text(app, what, name, obj, options, lines):
        lines[:] = with_literal_blocks(PLURAL.sub(r"`\1`\ ", line) for line in lines)

    def add_examples(app, docname, source):
        if docname in EXAMPLES:
            source[0] = "\n\n".join([source[0], *page(*EXAMPLES[docname])])

    def offer_notebook(app, docname, source):
        link = f"\nOn your machine: {{nb-download}}`this page as a notebook <{Path(docname).name}.ipynb>`.\n"
        source[0] = NOTEBOOK.sub(lambda heading: heading.group() + link, source[0])

    logging.getLogger("mpmd").propagate = False  # the log of mpmd-opt, which the pages leave out
    app.connect("autodoc-process-docstring", as_restructured_text)
    app.connect("source-read", add_examples)
    app.connect("source-read", offer_notebook)
    app.add_lexer("mlir", TextLexer)
    app.add_post_transform(BreakAtUnderscores)
