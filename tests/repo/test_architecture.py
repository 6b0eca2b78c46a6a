"""The walls of the project: sizes, names, who may import what, and what every pass and error has."""

from __future__ import annotations

import ast
import configparser
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpmd import errors
from mpmd.compile.passes import PASSES as HLO_PASSES
from mpmd.passes import PASSES as MPMD_PASSES
from tests.repo.tree import ROOT, imports, module_name, nodes, text, tracked

PASSES = {**MPMD_PASSES, **HLO_PASSES}
MAX_LINES = 600
MAX_FUNCTION_LINES = 70
MAX_VOCABULARY_LINES = 1370
LONG_LISTS = {"mpmd/partition/pipeline.py"}  # each pipeline is one list, to be read from top to bottom
BAD_FILES = {"util", "utils", "helper", "helpers", "common", "misc"}
BAD_NAME = re.compile(r"(^|_)(v2|impl)$|^_?(new|handle|process)_")

# The rooms that may import a package from outside; every other room of mpmd may not.
MAY_IMPORT = {
    "jax": (
        "mpmd.planning", "mpmd.api", "mpmd.partition", "mpmd.estimate", "mpmd.config", "mpmd.tracing",
        "mpmd.ir", "mpmd.jax_calls", "mpmd.jax_compat", "mpmd.jax_distributed",
        "mpmd.runtime.channels", "mpmd.compile.backends", "mpmd.compile.comparison",
        "mpmd.compile.lowering.reader", "mpmd.tools",
    ),
    "jax._src": ("mpmd.jax_calls", "mpmd.jax_compat", "mpmd.jax_distributed"),
    "jax.experimental": ("mpmd.jax_calls", "mpmd.jax_compat", "mpmd.jax_distributed"),
    "jaxlib": ("mpmd.jax_calls", "mpmd.jax_compat", "mpmd.jax_distributed"),
    "absl": ("mpmd.flags", "mpmd.tools"),
}  # fmt: skip


def sources():
    """The Python files of the product, without tests."""
    return [path for path in tracked(".py") if path.parts[0] in ("mpmd", "examples", "benchmarks")]


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_no_file_is_longer_than_a_folder_should_be():
    sizes = {str(path): len(text(path).splitlines()) for path in tracked(".py")}
    assert {path: lines for path, lines in sizes.items() if lines > MAX_LINES} == {}


def test_no_function_is_too_long():
    too_long = {}
    for path in tracked(".py"):
        for node in nodes(path) if str(path) not in LONG_LISTS else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    too_long[f"{path}:{node.lineno} {node.name}"] = lines
    assert too_long == {}


def test_all_folders_with_python_are_looked_at():
    assert {"mpmd", "tests", "benchmarks", "examples"} <= {path.parts[0] for path in tracked(".py")}


def test_the_vocabulary_stays_small():
    lines = sum(len(text(path).splitlines()) for path in tracked(".py") if path.parts[:2] == ("mpmd", "ir"))
    assert lines <= MAX_VOCABULARY_LINES, "what only some passes need stands where they are"


def test_names_say_something():
    bad = [str(path) for path in tracked() if path.stem in BAD_FILES or BAD_NAME.search(path.stem)]
    for path in sources():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and BAD_NAME.search(node.name):
                bad.append(f"{path}:{node.lineno} {node.name}")
    assert bad == []


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_only_some_rooms_know(package):
    strangers = [
        f"{path}:{line} imports {name}"
        for path in tracked(".py")
        if path.parts[0] == "mpmd"
        for line, name in imports(path)
        if within(name, package) and not any(within(module_name(path), room) for room in MAY_IMPORT[package])
    ]
    assert strangers == []


@pytest.mark.slow
def test_layers_hold():
    """The contract file is checked as a whole, and names every room: `exhaustive` fails otherwise.

    `make test` checks it beside the tests.
    """
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command; lint_imports_command()",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_the_compiler_is_imported_where_it_is_needed():
    """It is more modules than all the rest; a program that only makes a topology needs none of them."""
    code = (
        "import sys, mpmd\n"
        "print([name for name in sys.modules if name.startswith('mpmd.compile')], mpmd.Compiled.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "Compiled"]


def test_every_target_is_protected():
    """A package that the table of targets imports, nothing else may import."""
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    protected = contracts["importlinter:contract:targets"]["protected_modules"].split()
    backends = "mpmd.compile.backends"
    names = [name for _, name in imports(Path("mpmd/compile/backends/targets.py")) if within(name, backends)]
    packages = {".".join(name.split(".")[:4]) for name in names if name.count(".") > 4}
    assert packages and packages <= set(protected)


def test_nothing_is_left_undone():
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError")
    found = [
        f"{path}:{number} {line.strip()}"
        for path in sources()
        for number, line in enumerate(text(path).splitlines(), 1)
        if marks.search(line)
    ]
    assert found == []


def swallows(handler: ast.ExceptHandler) -> bool:
    """Whether a handler catches everything, and neither raises it again nor hands it on."""
    if handler.type is not None and ast.unparse(handler.type) not in ("Exception", "BaseException"):
        return False
    inside = [node for statement in handler.body for node in ast.walk(statement)]
    raises = any(isinstance(node, ast.Raise) and node.exc is None for node in inside)
    return not raises and not any(isinstance(node, ast.Name) and node.id == handler.name for node in inside)


def test_no_error_is_swallowed():
    found = [
        f"{path}:{node.lineno}"
        for path in sources()
        for node in nodes(path)
        if isinstance(node, ast.ExceptHandler) and swallows(node)
    ]
    assert found == []


def test_the_project_names_no_machine():
    machine = re.compile(r"(?<![A-Za-z0-9_./-])/(work|root|home|tmp/\w+)/")
    found = [
        f"{path}:{number} {line.strip()}"
        for path in tracked(".py", ".md", ".toml", ".mlir", ".hlo", "")
        for number, line in enumerate(text(path).splitlines(), 1)
        if machine.search(line)
    ]
    assert found == []


def test_every_error_is_raised_and_expected_by_a_test():
    classes = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.MpmdError) and value is not errors.MpmdError
    ]
    raised = "\n".join(text(p) for p in tracked(".py") if p.parts[0] in ("mpmd", "examples"))
    tests = "\n".join(text(p) for p in tracked(".py") if p.parts[0] == "tests" and p.parts[1] != "repo")
    never = [n for n in classes if not re.search(rf"(raise |[(\[ ]){n}\b[(,]", raised)]
    untested = [n for n in classes if not re.search(rf"raises\(\(?[^)]*\b{n}\b", tests)]
    assert (never, untested) == ([], [])


def test_maps_of_packages_list_what_is_there():
    """A package whose docstring has a table of its files has all of them there."""
    wrong, maps = {}, 0
    for path in [path for path in tracked(".py") if path.name == "__init__.py"]:
        rows = "".join(re.findall(r"^\| `.*?\|", text(path), re.MULTILINE))
        listed = set(re.findall(r"`(\w+(?:\.py|/))`", rows))
        maps += bool(listed)
        below = [p.relative_to(path.parent) for p in tracked(".py") if p.is_relative_to(path.parent)]
        there = {f"{p.parts[0]}/" if len(p.parts) > 1 else p.name for p in below} - {"__init__.py"}
        if listed and listed != there:
            wrong[str(path)] = sorted(there ^ listed)
    assert wrong == {} and maps


PARTS = ("->", "Requires:", "Ensures:", "Cost:", "Source:")


def test_every_pass_says_what_it_does_and_what_it_costs():
    """One line, before -> after, and what it asks for, gives, costs and comes from."""
    docs = {name: kind.__dict__["__doc__"] or "" for name, kind in PASSES.items()}
    no_line = [name for name, doc in docs.items() if not re.match(r"[A-Z].*[.:]\n", doc)]
    unsaid = [f"{name}: {part}" for name, doc in docs.items() for part in PARTS if part not in doc]
    assert (no_line, unsaid) == ([], [])


def test_every_pass_is_named_after_its_class():
    wrong = []
    for name, kind in PASSES.items():
        stem = name.partition("-")[2].replace("-", "")
        if kind.__name__.lower() != stem:
            wrong.append(f"{name}: {kind.__module__}.{kind.__name__}")
    assert wrong == []


def options_that_tests_set() -> set[tuple[str, str]]:
    """(pass, option) wherever a test gives an option a value: `-name='a=1 b=2'`, `name{a=1}`, `Name(a=1)`."""
    classes = {kind.__name__: name for name, kind in PASSES.items()}
    found = set()
    for path in tracked(".mlir", ".hlo", ".py"):
        if path.parts[0] != "tests":
            continue
        for name, options in re.findall(r"""((?:mpmd|hlo)-[\w-]+)(?:='?|\{|", f?")([^|\n]*)""", text(path)):
            found |= {(name, option) for option in re.findall(r"([\w-]+)=", options)}
        for node in nodes(path) if path.suffix == ".py" else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes:
                name = classes[node.func.id]
                found |= {(name, (keyword.arg or "").replace("_", "-")) for keyword in node.keywords}
    return found


def test_every_option_of_a_pass_is_set_by_a_test():
    tried = options_that_tests_set()
    options = {(n, f.name.replace("_", "-")) for n, kind in PASSES.items() for f in dataclasses.fields(kind)}
    assert sorted(options - tried) == [], "show what it changes, or make it a constant"
