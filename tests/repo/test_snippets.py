"""The Python in README and docs runs as it stands, each file from top to bottom in a process of its own."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags

import mpmd.flags  # noqa: F401 - defines a flag for every option
from mpmd.compile.passes import PASSES as HLO_PASSES
from mpmd.compile.pipelines import GROUPS
from mpmd.partition import pipeline
from mpmd.passes import PASSES as MPMD_PASSES
from tests.repo.tree import ROOT, text, tracked

SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
CELL = re.compile(r"^```\{code-cell\} ipython3\n(?::tags:[^\n]*\n)?(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")

RECIPES = Path("docs/guides/recipes.md")
PAGES = [path for path in tracked(".md") if SNIPPET.search(text(path)) and path != RECIPES]
NOTEBOOKS = {path: "\n".join(CELL.findall(text(path))) for path in tracked(".md") if CELL.search(text(path))}
WITH_PICTURES = [path for path, cells in NOTEBOOKS.items() if "IPython" in cells]  # `make docs` runs them
LIBRARIES = {Path("docs/guides/hugging-face.md"): "transformers"}
"""Pages about a library that the tests do not install: they run where it is."""
GUIDES = "docs/guides"
QUICK = ("README.md", *(f"{GUIDES}/{n}.md" for n in ("look-inside", "when-it-fails")))


def snippets(page) -> str:
    return "\n".join(SNIPPET.findall(text(page)))


def recipes() -> dict[str, str]:
    """Heading → its recipe, after the common part of the page."""
    common, *sections = text(RECIPES).split("\n## ")
    found = {section.partition("\n")[0]: SNIPPET.findall(section) for section in sections}
    return {name: "\n".join(SNIPPET.findall(common) + own) for name, own in found.items() if own}


def test_readme_shows_code():
    assert "README.md" in map(str, PAGES)


@pytest.mark.fast_cases(*QUICK)
@pytest.mark.parametrize("page", PAGES, ids=str)
def test_snippets_run(page, tmp_path):
    if page in LIBRARIES:
        pytest.importorskip(LIBRARIES[page])
    run(snippets(page), tmp_path)


@pytest.mark.fast_cases("docs/mpmd-from-scratch.md")
@pytest.mark.parametrize("page", sorted(NOTEBOOKS.keys() - set(WITH_PICTURES)), ids=str)
def test_notebooks_run(page, tmp_path):
    run(NOTEBOOKS[page], tmp_path, folder=ROOT / page.parent)


@pytest.mark.slow
@pytest.mark.parametrize("name", recipes())
def test_recipes_run(name, tmp_path):
    library = re.findall(r"^(?:import|from) (\w+)", recipes()[name], re.MULTILINE)[-1]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    run(recipes()[name], tmp_path)


def test_each_recipe_is_of_a_library():
    assert list(recipes()) == [
        "flax linen",
        "flax nnx, functional",
        "flax nnx, dropout and an optimizer",
        "equinox",
        "haiku",
        "keras",
    ]


def run(snippet, tmp_path, folder=None):
    """Runs a program of several devices in a process of its own, with the packages that this one has."""
    program = "import jax\njax.config.update('jax_num_cpu_devices', 8)\n" + snippet
    path = os.pathsep.join([str(ROOT), *(folder for folder in sys.path if folder)])
    environment = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "PATH": "", "HOME": str(tmp_path)}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # for the time they take
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder or tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", tracked(".md"), ids=str)
def test_links_lead_somewhere(page):
    lost = [target for target in LINK.findall(text(page)) if not (ROOT / page.parent / target).exists()]
    assert lost == []


INCLUDED = re.compile(r"^```\{literalinclude\} (\S+)\n:pyobject: (\S+)\n```$", re.MULTILINE)
INCLUDING = [path for path in tracked(".md") if "{literalinclude}" in text(path)]


@pytest.mark.parametrize("page", INCLUDING, ids=str)
def test_code_that_pages_include_exists(page):
    included = INCLUDED.findall(text(page))
    assert len(included) == text(page).count("{literalinclude}") > 0
    for file, name in included:
        body = ast.parse((ROOT / page.parent / file).read_text()).body
        for part in name.split("."):
            (found,) = [node for node in body if getattr(node, "name", None) == part]
            body = found.body


def test_the_readme_begins_with_the_two_commands():
    commands = re.search(r"^```(?:sh|bash)?\n(.*?)^```", text(PAGES[0].__class__("README.md")), re.M | re.S)
    words = [line.partition("#")[0].strip() for line in commands[1].splitlines() if line.strip()]
    assert words[:2] == ["make train", "make test"]


def test_every_make_target_that_the_docs_name_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = "\n".join(
        piece
        for page in tracked(".md")
        for piece in re.findall(r"^```sh\n.*?^```|`make [^`]*`", text(page), re.MULTILINE | re.DOTALL)
    )
    named = set(re.findall(r"^`?make ([a-z-]+)", shown, re.MULTILINE))
    assert {"train", "test"} <= named
    assert named <= targets


FILE = re.compile(
    r"`((?:mpmd|api|tracing|passes|scheduling|runtime|compile|tests|docs|examples)/[\w./-]*[\w/])`"
)


@pytest.mark.parametrize("page", tracked(".md"), ids=str)
def test_files_that_the_docs_name_exist(page):
    bases = (ROOT, ROOT / "mpmd", ROOT / "mpmd" / "compile", ROOT / page.parent)

    def is_there(name):
        return any((base / name).exists() for base in bases)

    assert [name for name in FILE.findall(text(page)) if not is_there(name)] == []


NAME = re.compile(r"(?<![\w/.-])(?:mpmd|hlo)-[a-z][a-z-]*[a-z]")
FLAG = re.compile(r"--(?:no)?((?:mpmd|hlo)_[a-z_0-9]*[a-z0-9])")
SCRIPTS = re.findall(r"^([a-z-]+) = \"mpmd\.tools", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
PAGE_NAMES = {path.stem for path in tracked(".md")}
KNOWN_NAMES = {*MPMD_PASSES, *HLO_PASSES, *GROUPS, *pipeline.PIPELINES, *SCRIPTS, *PAGE_NAMES}
TAUGHT = {"mpmd-forget-stages"}  # what a reader of CONTRIBUTING adds
GENERATED = {"docs/flags.md", "docs/passes.md", "docs/hlo_passes.md"}
WRITTEN = [page for page in tracked(".md") if str(page) not in GENERATED]


@pytest.mark.parametrize("page", WRITTEN, ids=str)
def test_passes_and_flags_that_the_docs_name_exist(page):
    names, named_flags = set(NAME.findall(text(page))), set(FLAG.findall(text(page)))
    assert sorted(names - KNOWN_NAMES - TAUGHT) == []
    assert sorted(name for name in named_flags if name not in flags.FLAGS) == []
