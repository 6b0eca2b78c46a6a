"""Programs from text, and places in the user's code from MLIR locations."""

from __future__ import annotations

import dataclasses
import linecache
import re
from pathlib import Path

from jax.extend.mlir import ir

from mpmd.errors import IRError
from mpmd.ir.context import context


def parse(text: str | bytes, verify: bool = True) -> ir.Module:
    """A module from MLIR text or bytecode.

    Raises:
        IRError: the text is no valid module; says where and why.
    """
    if isinstance(text, str):
        _require_known_callees(text)
    try:
        with context(), ir.Location.unknown():
            if verify:
                return ir.Module.parse(text, context())
            return ir.Operation.parse(text, context=context()).opview
    except ir.MLIRError as e:
        raise IRError(f"cannot read the program: {e}") from e


def _require_known_callees(text: str) -> None:
    """The dialect's verifier crashes the process on a call of an unknown function."""
    if "mpmd.call" not in text and "mpmd.fragment_call" not in text:
        return
    text = re.sub(r"(?m)^\s*//.*$", "", text)
    name = r'@("(?:[^"\\]|\\.)*"|[\w.$-]+)'
    known = set(re.findall(r"func\.func(?:\s+(?:public|private|nested))?\s+" + name, text))
    called = re.findall(r"mpmd\.(?:call|fragment_call<[^@]*>)\s+" + name, text)
    called += re.findall(r'"mpmd\.(?:fragment_)?call"\(.*\bcallee = ' + name, text)
    for callee in dict.fromkeys(c for c in called if c not in known):
        raise IRError(f"cannot read the program: it calls @{callee}, which it does not define")


@dataclasses.dataclass(frozen=True)
class Frame:
    """A place in the user's code: function (empty if not known), file, line."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f", in {self.function}" if self.function else "")

    @property
    def source(self) -> str:
        """The text of the line; empty if the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()


_FRAME = re.compile(r'(?:"((?:[^"\\]|\\.)*)"\()?"((?:[^"\\]|\\.)*)":(\d+):\d+')
_PACKAGE = str(Path(__file__).parents[1])


def frames_of(place: object) -> list[Frame]:
    """The calls that led to an op, innermost first, without those inside of JAX and of this package.

    Nor those inside of other installed packages, unless there are no others.
    """
    found = dict.fromkeys(
        Frame(function, file, int(line))
        for function, file, line in _FRAME.findall(str(getattr(place, "location", place)))
        if file != "-" and not file.startswith(_PACKAGE)
    )
    own = [frame for frame in found if not _INSTALLED & set(Path(frame.file).parts)]
    return own or [frame for frame in found if not {"jax", "jaxlib"} & set(Path(frame.file).parts)]


_INSTALLED = {"site-packages", "dist-packages"}


_FILE = re.compile(r'"((?:[^"\\]|\\.)*)":(\d+):(\d+)')


def location_of(place: object) -> tuple[str, int, int] | None:
    """File, line and column of an MLIR location (or of the op or value there); the innermost call's first."""
    location = getattr(place, "location", place)
    found = _FILE.search(str(location))
    return (found[1], int(found[2]), int(found[3])) if found else None


def name_of(location: ir.Location) -> str | None:
    """The name that a location gives to what is there, such as the path of an argument."""
    while isinstance(location, ir.CallSiteLoc):
        location = location.callee
    return str(location.name_str) if isinstance(location, ir.NameLoc) else None
