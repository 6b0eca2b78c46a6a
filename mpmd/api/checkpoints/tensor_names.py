"""Which arrays of files make a leaf: names with numbers, stacks, and axes in another order."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from mpmd.api.checkpoints.pieces import Box, LeafKind
from mpmd.errors import CheckpointError, collect

_WORD = re.compile(r"\{([A-Za-z]\w*)\}")


@dataclasses.dataclass(frozen=True)
class Stored:
    """How files hold a leaf, or each array of a leaf that is a stack.

    Attributes:
        name: of the array.
        axes: of the array, in the order of the dims of the leaf, stacked dims aside: `(1, 0)` for the
            weight of a `torch.nn.Linear`, which has a row for each output.
    """

    name: str
    axes: tuple[int, ...] | None = None


Names: TypeAlias = Mapping[str, str | Stored]


@dataclasses.dataclass(frozen=True)
class LocatedLeaf:
    """The arrays of a leaf: their name, the words in it that count along dims of the leaf, and their axes."""

    name: str
    words: tuple[str, ...]
    axes: tuple[int, ...] | None

    def name_at(self, index: Sequence[int]) -> str:
        known = dict(zip(self.words, map(str, index), strict=True))
        return _filled(self.name, known)

    def as_leaf(self, array: np.ndarray) -> np.ndarray:
        """An array of a file with the dims of the leaf."""
        return array if self.axes is None else array.transpose(self.axes)

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape in the file of an array that has this shape in the leaf."""
        return (
            tuple(shape) if self.axes is None else tuple(shape[self.axes.index(k)] for k in range(len(shape)))
        )

    def indices(self, box: Box) -> Iterator[tuple[int, ...]]:
        """Which arrays of a stack have some of a box."""
        return itertools.product(*(range(*ends) for ends in box[: len(self.words)]))


class TensorNames:
    """Where the leaves of a state are, by the names that the user gave."""

    def __init__(self, names: Names) -> None:
        """Takes the names.

        Raises:
            CheckpointError: some make no sense; lists all.
        """
        self._entries: list[tuple[re.Pattern[str], Stored]] = []
        problems = []
        for path, given in names.items():
            stored = given if isinstance(given, Stored) else Stored(given)
            texts: tuple[Any, Any] = path, stored.name
            if not all(isinstance(text, str) for text in texts):
                problems.append(f"{stored.name!r} is given for {path!r}; give texts, or a Stored")
                continue
            if wrong := [text for text in texts if "{" in _WORD.sub("", text)]:
                problems.append(f"{wrong[0]!r} has braces without a word, such as {{k}}")
            if stored.axes is not None and sorted(stored.axes) != list(range(len(stored.axes))):
                problems.append(
                    f"axes {stored.axes} of {path} are not each of 0 to {len(stored.axes) - 1} once"
                )
            if missing := set(_WORD.findall(path)) - set(_WORD.findall(stored.name)):
                problems.append(f"{stored.name!r} lacks {{{sorted(missing)[0]}}}, which is in {path}")
            self._entries.append((_pattern(path), stored))
        if problems:
            raise collect(CheckpointError, problems, "these names make no sense:")

    def find(self, kind: LeafKind) -> LocatedLeaf | str:
        """The arrays of a leaf, or what is wrong."""
        for pattern, stored in self._entries:
            if found := pattern.fullmatch(kind.path):
                known = found.groupdict()
                name = _filled(stored.name, known)
                words = tuple(dict.fromkeys(_WORD.findall(name)))
                rank = len(kind.shape) - len(words)
                if rank < 0 or (stored.axes is not None and len(stored.axes) != rank):
                    return f"{kind} has other dims than {name!r} with axes {stored.axes}"
                return LocatedLeaf(name, words, stored.axes)
        return f"{kind} has no name"

    def find_all(self, kinds: Sequence[LeafKind]) -> tuple[dict[str, LocatedLeaf], list[str]]:
        """For each path its arrays, and what is wrong with the others."""
        found = {kind.path: self.find(kind) for kind in kinds}
        located = {path: of for path, of in found.items() if isinstance(of, LocatedLeaf)}
        return located, [of for of in found.values() if isinstance(of, str)]

    def unnamed(self, tensors: Iterable[str]) -> list[str]:
        """The arrays that no name means."""
        patterns = [_pattern(stored.name) for _, stored in self._entries]
        return [name for name in tensors if not any(pattern.fullmatch(name) for pattern in patterns)]


def _filled(text: str, known: Mapping[str, str]) -> str:
    """A text with numbers in place of those words in braces that are known."""
    return _WORD.sub(lambda word: known.get(word[1], word[0]), text)


def _pattern(text: str) -> re.Pattern[str]:
    """What a text with numbers in place of words in braces looks like."""
    known, parts = set[str](), []
    for k, part in enumerate(_WORD.split(text)):
        if k % 2 == 0:
            parts.append(re.escape(part))
        else:
            parts.append(f"(?P={part})" if part in known else f"(?P<{part}>\\d+)")
            known.add(part)
    return re.compile("".join(parts))
