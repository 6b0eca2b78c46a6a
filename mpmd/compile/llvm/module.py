"""An LLVM module under construction: its functions, constants and declarations, printed in a fixed order."""

from __future__ import annotations

from mpmd.compile.llvm.target import CpuTarget

_ATTRIBUTES = (
    'attributes #0 = {{ nounwind "target-cpu"="{cpu}" "target-features"="{features}" '
    '"prefer-vector-width"="{bits}" "min-legal-vector-width"="{bits}" }}'
)


class Module:
    """Text of one LLVM module.

    Attributes:
        target: the CPU of its functions.
    """

    def __init__(self, target: CpuTarget) -> None:
        self.target = target
        self._functions: dict[str, str] = {}
        self._globals: dict[str, str] = {}
        self._declarations: dict[str, str] = {}
        self._streams = False

    def declare(self, name: str, result: str, arguments: tuple[str, ...]) -> None:
        """Make an intrinsic or outside function callable; repeating a declaration is free."""
        if name not in self._functions:
            self._declarations[name] = f"declare {result} @{name}({', '.join(arguments)})"

    def add_function(self, name: str, text: str) -> None:
        """Add a finished function; every name once."""
        if name in self._functions:
            raise AssertionError(f"function @{name} is defined twice in one module")
        self._functions[name] = text
        self._declarations.pop(name, None)

    def function(self, name: str) -> str:
        return self._functions[name]

    def replace_function(self, name: str, text: str) -> None:
        assert name in self._functions, name
        self._functions[name] = text

    def defines(self, name: str) -> bool:
        """Whether a function of this name is in the module."""
        return name in self._functions

    def names(self) -> tuple[str, ...]:
        """Names of the functions that others can call, in the order in which they were added."""
        return tuple(n for n, text in self._functions.items() if not text.startswith("define internal"))

    def imports(self) -> set[str]:
        """Declared functions of this backend that other loaded code must provide."""
        return {n for n in self._declarations if n.startswith("mpmd_")}

    def add_global(self, name: str, definition: str) -> None:
        """Add `@name = definition`; the same name twice must be the same text."""
        if self._globals.setdefault(name, definition) != definition:
            raise AssertionError(f"global @{name} is defined twice with different contents")

    def streaming_hint(self) -> str:
        self._streams = True
        return "!0"

    def text(self) -> str:
        """The module as LLVM assembly; the same functions in the same order give the same text."""
        attributes = _ATTRIBUTES.format(
            cpu=self.target.cpu, features=self.target.features, bits=8 * self.target.vector_bytes
        )
        parts = [
            f'target triple = "{self.target.triple}"',
            *(f"@{name} = {definition}" for name, definition in sorted(self._globals.items())),
            *(text for _, text in sorted(self._declarations.items())),
            *self._functions.values(),
            attributes,
            *(["!0 = !{i32 1}"] if self._streams else []),
        ]
        return "\n\n".join(parts) + "\n"
