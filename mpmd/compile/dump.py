"""Dumps of compilation: one folder per fragment, one file per step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from mpmd.compile.fragment import FragmentModule


@dataclasses.dataclass(frozen=True)
class Dump:
    """Settings of the dump.

    Attributes:
        folder: where the fragments' folders are made.
        passes: regular expression on the names of the passes after which the module is written.
    """

    folder: Path
    passes: str = ".*"

    def folder_of(self, fragment: FragmentModule) -> Path:
        return self.folder / fragment.name.replace("/", "_")

    def write(self, fragment: FragmentModule, name: str, text: str) -> None:
        folder = self.folder_of(fragment)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    def write_all(self, fragment: FragmentModule, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            self.write(fragment, name, text)
