"""The result of a compilation: everything that loading, running and inspecting a fragment needs.

    lookup by the fragment's text ──▶ name of the program ──▶ artefact
    lookup by the program's canonical fingerprint ───────────▶ artefact

Source: `xla/service/executable.h` names the same parts: code, thunk sequence, buffer assignment, module.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping

from mpmd.brief import brief
from mpmd.compile.cache import DiskCache, key_of
from mpmd.compile.executable import MemoryStats, unknown_text
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.hlo import HloModule, fingerprint
from mpmd.compile.target import Code, Target
from mpmd.errors import CompileError

_FORMAT = 3
TEXT_FILES = {
    "hlo": "after_optimizations.txt",
    "buffers": "buffer-assignment.txt",
    "memory": "memory.svg",
    "thunks": "thunk_sequence.txt",
    "kernels": "kernels.txt",
    "costs": "costs.txt",
    "bars": "costs.svg",
}
"""Texts of every compiled fragment, as `Executable.as_text` names them → their file names in a dump."""
_SIZES = struct.Struct("<4Q")


class Texts(Mapping[str, str]):
    """File name → text, generated on the first access.

    Args:
        write: generates all of them.
    """

    __repr__ = brief

    def __init__(self, write: Callable[[], dict[str, str]]) -> None:
        self._write = write

    @functools.cached_property
    def _made(self) -> dict[str, str]:
        return self._write()

    def __getitem__(self, name: str) -> str:
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


@dataclasses.dataclass(frozen=True)
class Artefact:
    """A compiled fragment, independent of this process.

    Attributes:
        code: the target's code.
        arena_bytes: temporary memory of a call, constants included.
        constants: initial and constant content of the arena.
        aliases: argument → the result that takes its memory.
        costs: work of a call: `flops`, `transcendentals`, `bytes accessed`, compute-bound and memory-bound
            seconds.
        memory: bytes that a call takes.
        texts: file name → readable text: HLO, buffers, thunks, kernels; the code has texts of its own.
    """

    code: Code
    arena_bytes: int
    constants: bytes
    aliases: dict[int, int]
    costs: dict[str, float]
    memory: MemoryStats
    texts: Mapping[str, str]

    __repr__ = brief

    def text(self, what: str, target: Target) -> str:
        """One of its texts.

        Args:
            what: `"hlo"`, `"buffers"`, `"memory"`, `"thunks"`, `"kernels"`, `"costs"`, `"bars"`, or a text of
                the target's code.
            target: its target.

        Raises:
            CompileError: another word.
        """
        if what in target.code_texts:
            return target.code_text(self.code, what)
        if what not in TEXT_FILES:
            return unknown_text(what, "native fragments")
        return self.texts[TEXT_FILES[what]]

    def to_bytes(self) -> bytes:
        """The artefact as bytes; equal ones give equal bytes."""
        texts = zlib.compress(json.dumps(dict(self.texts)).encode(), 1)
        head = {
            "format": _FORMAT,
            "arena_bytes": self.arena_bytes,
            "aliases": sorted(self.aliases.items()),
            "costs": self.costs,
            "memory": dataclasses.asdict(self.memory),
        }
        parts = [json.dumps(head).encode(), self.code.to_bytes(), self.constants, texts]
        return b"".join([_SIZES.pack(*map(len, parts)), *parts])

    @staticmethod
    def from_bytes(data: bytes, target: Target) -> Artefact:
        """The artefact in the bytes that `to_bytes` wrote.

        Raises:
            CompileError: the bytes are something else.
        """
        try:
            sizes = _SIZES.unpack_from(data)
            if sum(sizes, _SIZES.size) != len(data):
                raise ValueError(f"{len(data)} bytes, expected {sum(sizes, _SIZES.size)}")
            ends = itertools.accumulate(sizes, initial=_SIZES.size)
            parts = [data[start : start + size] for start, size in zip(ends, sizes)]
            head, code, constants, texts = parts
            said = json.loads(head)
            if said["format"] != _FORMAT:
                raise ValueError(f"format {said['format']}, expected {_FORMAT}")
            return Artefact(
                target.code_from_bytes(code),
                said["arena_bytes"],
                constants,
                {int(argument): int(result) for argument, result in said["aliases"]},
                said["costs"],
                MemoryStats(**said["memory"]),
                json.loads(zlib.decompress(texts)),
            )
        except (ValueError, KeyError, TypeError, struct.error, zlib.error) as error:
            raise CompileError(f"these bytes are not a compiled fragment: {error}") from error


class KeptArtefacts:
    """Artefacts of one target and one set of options in a cache.

    Args:
        cache: the cache.
        target: their target.
        settings: further text that their code depends on.
    """

    def __init__(self, cache: DiskCache, target: Target, settings: str) -> None:
        self.cache = cache
        self.target = target
        self.place = (target.key(), settings)

    def of_fragment(self, fragment: FragmentModule) -> Artefact | None:
        key = self._fragment_key(fragment)
        named = self.cache.get(key)
        if named is None:
            return None
        if not re.fullmatch(rb"[0-9a-f]{64}", named):
            self.cache.discard(key, "it does not name a program")
            return None
        return self._artefact(named.decode())

    def of_program(self, fragment: FragmentModule, program: str) -> Artefact | None:
        artefact = self._artefact(program)
        if artefact is not None:
            self.cache.put(self._fragment_key(fragment), program.encode())
        return artefact

    def keep(self, fragment: FragmentModule, program: str, artefact: Artefact) -> None:
        self.cache.put(program, artefact.to_bytes())
        self.cache.put(self._fragment_key(fragment), program.encode())

    def _artefact(self, key: str) -> Artefact | None:
        data = self.cache.get(key)
        if data is None:
            return None
        try:
            return Artefact.from_bytes(data, self.target)
        except CompileError as error:
            self.cache.discard(key, str(error))
            return None

    def _fragment_key(self, fragment: FragmentModule) -> str:
        return key_of("fragment", *self.place, fragment.fingerprint, fragment.reserved_bytes)

    def program_key(self, fragment: FragmentModule, module: HloModule) -> str:
        """The name of a program: `fragment`, lowered to `module`, which no pass has changed yet."""
        signature = (fragment.arguments, fragment.results, fragment.donated, fragment.reserved_bytes)
        return key_of("program", *self.place, fingerprint(module), *signature)
