"""Code earns its place: passes are in pipelines, names have callers outside of tests, options are read."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpmd
from mpmd.compile.options import CompileOptions
from mpmd.compile.passes import PASSES as HLO_PASSES
from mpmd.partition import pipeline
from mpmd.passes import PASSES as MPMD_PASSES
from tests.repo.tree import module_name, nodes, text, tracked

CODE = [path for path in tracked(".py") if path.parts[0] in ("mpmd", "examples", "benchmarks")]
LIBRARY = [path for path in CODE if path.parts[0] == "mpmd"]
MODULES = {module_name(path) for path in CODE}
ROWS = text(Path("docs/hlo_rows.md"))
PAGES = "\n".join(text(path) for path in tracked(".md"))
ENTRIES = {n for names in re.findall(r"^from mpmd[\w.]* import (.+)", PAGES, re.M) for n in names.split(", ")}
"""What users are shown to import."""

PASSES = {**MPMD_PASSES, **HLO_PASSES}
FOR_TESTS = {
    "named_target": "CPUs that are not here, for which tests compile",
    "runs_here": "likewise: whether this machine runs their code",
    "emit_assembly": "the instructions of a kernel",
    "H200": "the device of the GPU target",
}
"""Names of the library that only tests use, and what they are for."""
GIVEN = {
    *("Timeline", "MeshMemory", "MemoryTable", "MemoryCurve", "Compiled", "Lowered", "Traced", "StepStage"),
    *vars(mpmd),
    *mpmd.__all__,
}
"""Classes whose values users are given: they call the methods."""
CALLED_BY_OTHERS = ("__", "_repr_", "repr_")
"""Begins of methods that Python, notebooks and `reprlib` call."""
REGISTERS = re.compile(r"(?!functools|contextlib|dataclasses)")
"""Decorators that may give what they decorate to a table."""
KEPT_PASSES = {
    "hlo-spmd-partitioner": "makes programs of one device from HLO that XLA dumped with shardings",
    "mpmd-split-and-prioritize-transfer-independent-computations": "a pass of the dialect",
}
"""Passes that no pipeline runs; those over HLO have a row in `docs/hlo_rows.md`."""


def test_every_pass_is_in_a_pipeline_or_a_group():
    """By its class, as over HLO and inside of other passes, or by its name, as in `pipeline.py`."""
    used = set(re.findall(r'"(mpmd-[\w-]+)"', inspect.getsource(pipeline)))
    used |= {name for name, kind in PASSES.items() if (kind.__module__, kind.__name__) in uses().imported}
    assert sorted(set(PASSES) - used) == sorted(KEPT_PASSES)
    assert [name for name in KEPT_PASSES if name in HLO_PASSES and name not in ROWS] == []


@dataclasses.dataclass(frozen=True)
class Uses:
    """What code outside of tests names.

    Attributes:
        imported: (module, name) of what a module defines and another one uses.
        inside: by module and name the lines in which the module uses it itself.
        attributes: names after a dot, and words in short strings, as for `getattr`.
    """

    imported: set[tuple[str, str]]
    inside: dict[tuple[str, str], list[int]]
    attributes: set[str]

    def has(self, path: Path, name: str, node: ast.stmt) -> bool:
        """Whether a name of a module is used, not counting what defines it."""
        key = (module_name(path), name)
        return key in self.imported or any(
            not node.lineno <= line <= node.end_lineno for line in self.inside.get(key, ())
        )


@functools.cache
def uses() -> Uses:
    found = Uses(set(), {}, set())
    exported: dict[tuple[str, str], tuple[str, str]] = {}
    for path in CODE:
        here, modules = module_name(path), {}
        for node in nodes(path):
            if isinstance(node, ast.Name):
                if isinstance(node.ctx, ast.Load):
                    found.inside.setdefault((here, node.id), []).append(node.lineno)
            elif isinstance(node, ast.Attribute):
                found.attributes.add(node.attr)
                if isinstance(node.value, ast.Name) and node.value.id in modules:
                    found.imported.add((modules[node.value.id], node.attr))
            elif isinstance(node, ast.Constant):
                if isinstance(node.value, str) and len(node.value) < 80:
                    found.attributes.update(re.findall(r"\w+", node.value))
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    origin, name = (node.module, alias.name), alias.asname or alias.name
                    if ".".join(origin) in MODULES:
                        modules[name] = ".".join(origin)
                    if path.name == "__init__.py":
                        exported[here, name] = origin
                    else:
                        found.imported.add(origin)
    for _ in range(2):  # a package may export what another one exports
        used = found.imported | set(found.inside)
        found.imported.update(origin for name, origin in exported.items() if name in used)
    return found


def definitions(path: Path) -> Iterator[tuple[str, ast.stmt]]:
    """What a module defines at its top: functions, classes, constants."""
    for node in nodes(path)[0].body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if not any(REGISTERS.match(ast.unparse(decorator)) for decorator in node.decorator_list):
                yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found = (name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
            yield from ((name.id, node) for name in found if isinstance(name.ctx, ast.Store))


def test_every_name_has_a_use_outside_of_tests():
    known = {kind.__name__ for kind in PASSES.values()} | {*vars(mpmd), *mpmd.__all__, *vars(mpmd.checkpoint)}
    known |= {"PASSES", "RULES"}  # read from each package, or module, of a family
    known |= {*FOR_TESTS, *ENTRIES}
    unused = [
        f"{path}:{node.lineno} {name}"
        for path in LIBRARY
        for name, node in definitions(path)
        if name not in known and not name.startswith("__") and not uses().has(path, name, node)
    ]
    assert unused == [], "delete it, or move it to tests/support"


def test_every_method_and_field_has_a_use_outside_of_tests():
    unused = []
    for path in LIBRARY:
        for kind in (node for node in nodes(path) if isinstance(node, ast.ClassDef)):
            for node in kind.body if kind.name not in GIVEN else ():
                name = getattr(node, "name", None) or getattr(getattr(node, "target", None), "id", "__")
                if name.startswith(CALLED_BY_OTHERS) or name in FOR_TESTS:
                    continue
                if name not in uses().attributes:
                    unused.append(f"{path}:{node.lineno} {kind.name}.{name}")
    assert unused == []


OPTIONS = {kind.__name__: kind for kind in (mpmd.PipelineOptions, mpmd.RuntimeOptions, CompileOptions)}


@pytest.mark.parametrize("kind", [*OPTIONS.values(), *PASSES.values()], ids=[*OPTIONS, *PASSES])
def test_every_option_is_read(kind):
    modules = {base.__module__ for base in kind.__mro__}
    sources = [path for path in LIBRARY if kind.__name__ in OPTIONS or module_name(path) in modules]
    read = {node.attr for path in sources for node in nodes(path) if isinstance(node, ast.Attribute)}
    assert [field.name for field in dataclasses.fields(kind) if field.name not in read] == []
