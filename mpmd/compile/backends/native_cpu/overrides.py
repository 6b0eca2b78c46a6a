"""Kernels from files: a user's LLVM assembly in place of a generated kernel's.

    DIR/FRAGMENT/KERNEL.ll      one `define` of @KERNEL, and `declare`s of what it calls

`dump_to` writes every fragment's `module.ll`; a kernel copied from there, changed, and put into such a file
is compiled instead of the generated one, as long as it takes the same arguments.

Source: XLA loads a module's LLVM or PTX from files in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from mpmd.compile.fragment import FragmentModule
from mpmd.compile.llvm.function_builder import Module
from mpmd.compile.options import Dump
from mpmd.errors import CompileError, collect

_DEFINE = re.compile(r"^define [^@\n]*@([\w.$-]+)\((.*?)\)[^{]*\{.*?^\}", re.DOTALL | re.MULTILINE)
_DECLARE = re.compile(r"^declare ([^@\n]*)@([\w.$-]+)\((.*?)\)", re.MULTILINE)


@dataclass(frozen=True)
class Override:
    """A kernel from a file.

    Attributes:
        path: the file.
        text: the function.
        declarations: (name, result, argument types) of what it calls.
    """

    path: Path
    text: str
    declarations: tuple[tuple[str, str, tuple[str, ...]], ...]


def overrides_of(fragment: FragmentModule, folder: Path | None) -> dict[str, Override]:
    """The kernels of a fragment that are in a folder, by their names.

    Raises:
        CompileError: a file does not define the kernel that it is named after.
    """
    if folder is None:
        return {}
    files = sorted(Dump(folder).folder_of(fragment).glob("*.ll"))
    return {path.stem: _read(path) for path in files}


def _read(path: Path) -> Override:
    text = path.read_text(encoding="utf-8")
    functions = list(_DEFINE.finditer(text))
    if [f[1] for f in functions] != [path.stem]:
        defined = ", ".join(f"@{f[1]}" for f in functions) or "nothing"
        raise CompileError(
            f"{path} defines {defined}\n"
            f"  a file of kernel_overrides defines one function, the kernel @{path.stem}"
        )
    declared = tuple((d[2], d[1].strip(), tuple(_types(d[3]))) for d in _DECLARE.finditer(text))
    return Override(path, functions[0][0], declared)


def apply_overrides(module: Module, kernels: Collection[str], overrides: Mapping[str, Override]) -> None:
    """Replace kernels of a module by those from files.

    Args:
        module: the finished module.
        kernels: names of the kernels in it.
        overrides: by name.

    Raises:
        CompileError: there is no such kernel, or it takes other arguments; all problems at once.
    """
    problems = []
    for name, override in overrides.items():
        if name not in kernels:
            there = ", ".join(sorted(set(kernels))) or "none"
            problems.append(f"{override.path}: the fragment has no kernel {name!r}; it has {there}")
            continue
        wanted, given = _signature(module.function(name)), _signature(override.text)
        if wanted != given:
            problems.append(f"{override.path}: expected {wanted}, got {given}")
    if problems:
        raise collect(CompileError, problems, "kernels from files cannot be used:")
    for name, override in overrides.items():
        module.replace_function(name, override.text)
        for declaration in override.declarations:
            module.declare(*declaration)


def _signature(text: str) -> str:
    """A function's result and argument types, without names and attributes."""
    match = _DEFINE.match(text)
    assert match is not None
    result = text[len("define ") : text.index("@")].split()[-1]
    return f"{result} @{match[1]}({', '.join(_types(match[2]))})"


def _types(arguments: str) -> list[str]:
    return [argument.split()[0] for argument in arguments.split(",") if argument.strip()]
