"""The words of the project are those of its field; class names are unique; limits are MAX_ and MIN_."""

from __future__ import annotations

import collections
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repo.tree import text, tracked

INSTEAD = {
    r"homes?": "its output buffer",
    r"wish(es)?": "coalescing candidate",
    r"loans?|borrow\w*|lend\w*|lent": "reuse of output buffers",
    r"borders?(?![-:])": "entry parameters and results; boundary",
    r"chance": "random generator",
    r"rows to come|asked for|asks for|ask for": "next rows; prefetched; requested, requires",
    r"claimed": "prefetched for write",
    r"(past|pass|passes|passing) the caches": "non-temporal; larger than the last-level cache",
    r"dear": "expensive; transcendental",
    r"squares in registers": "in-register transpose tile",
    r"crossing (dim|row|load)s?": "strided dim",
    r"circles?": "cycle",
    r"naps?|patience(?! sort)": "back-off; timeout",
    r"takes? back its arrival": "withdraws from the barrier",
    r"hand(s|ed)? over": "dispatched; passed to",
    r"cuts?|cutting": "sharded; tiled; split; sliced",
    r"graves?|defer_deletion|buried|buries": "deferred deletion",
    r"(stands?|stood)(?! for\b)(?!-)": "is, comes, is placed",
    r"told|tells?": "reported, reports; distinguishes",
    r"nobody|no one": "no caller, no other thread, nothing",
    r"walks?|walked": "iteration, traversal; visits",
    r"(?<!there )(?<!There )(is|are|was|were) no (?!\w+er\b|more\b|less\b)": "is not a",
    r"what (is|are|was|were) (?!(wrong|not wrong|it|there|this|the|a|each|every|in)\b)": "a noun",
    r"remember\w*": "memoisation, caches; records",
    r"whoever": "the caller, the thread that",
    r"that which": "the one that",
    r"of use": "useful",
    r"anyhow": "in any case",
}
"""Patterns of words and phrases, each with the field's words for them; docs/concepts.md is the glossary."""

LEGAL_NAMES = {"walk"}
"""Names of others: `Operation.walk` of MLIR, `ast.walk`, `os.walk`."""

_BANNED = re.compile("|".join(rf"(?P<w{number}>\b(?:{word})\b)" for number, word in enumerate(INSTEAD)), re.I)
_POINTERS = re.compile(r"\b(?:that of|those of|of which|what the)\b", re.I)
"""Where they are many, a sentence points at nouns instead of naming them."""
VAGUE_CLASSES = {"Unit", "Place", "Form", "Kind", "Way", "Piece", "Site", "Thing"}
SHARED_NAMES = {"Block", "Fetch", "Run", "_Row"}

PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
GENERATED = ("docs/passes.md", "docs/hlo_passes.md", "docs/preconditions.md")
ROOTS = ("mpmd", "docs", "examples", "benchmarks")
_TEXT_TOKENS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def room(path: Path) -> str:
    """`mpmd/compile/hlo`, `mpmd/api`, `docs`; the pages at the top are one room."""
    depth = 3 if path.parts[:2] == ("mpmd", "compile") else 2 if path.parts[0] == "mpmd" else 1
    return "/".join(path.parts[: min(depth, len(path.parts) - 1)]) or "pages"


def rooms() -> dict[str, list[Path]]:
    """Room → its files."""
    found = collections.defaultdict(list)
    for path in tracked(".py", ".md"):
        if path.parts[0] in ROOTS or str(path) in PAGES:
            found[room(path)].append(path)
    return found


def tokens(path: Path) -> Iterator[tokenize.TokenInfo]:
    """Of a Python file; none of a page."""
    return tokenize.generate_tokens(io.StringIO(text(path)).readline) if path.suffix == ".py" else iter(())


@functools.cache
def prose_and_names(path: Path) -> list[tuple[int, str]]:
    """Line number and text: the lines of a page; comments, strings and names, each once, of a Python file.

    A name is its words: `is_asked_for` is `is asked for`.
    """
    if path.suffix != ".py":
        return list(enumerate(text(path).splitlines(), 1))
    found = []
    first: dict[str, int] = {}
    for token in tokens(path):
        if token.type in _TEXT_TOKENS:
            found += [(token.start[0] + i, line) for i, line in enumerate(token.string.splitlines())]
        elif token.type == tokenize.NAME and token.string not in LEGAL_NAMES:
            first.setdefault(token.string, token.start[0])
    return found + [(line, name.replace("_", " ").strip()) for name, line in first.items()]


@functools.cache
def banned(words: str) -> tuple[tuple[str, int], ...]:
    """The banned words in some, and their numbers in the table: files have names in common."""
    return tuple((m.group(), int(str(m.lastgroup)[1:])) for m in _BANNED.finditer(words))


def violations(path: Path) -> list[str]:
    """Each banned word in a file, with its line and the words to use instead."""
    instead = list(INSTEAD.values())
    return [
        f"{path}:{line} {word!r}: {instead[number]}"
        for line, words in prose_and_names(path)
        for word, number in banned(words)
    ]


@pytest.mark.parametrize("name", sorted(rooms()))
def test_prose_uses_the_words_of_the_field(name):
    found = [found for path in rooms()[name] for found in violations(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", sorted(rooms()))
def test_sentences_name_what_they_speak_of(name):
    """A file may have one `that of`, `those of`, `of which` or `what the`."""
    found = {}
    for path in rooms()[name]:
        lines = [words for _, words in prose_and_names(path)] if str(path) not in GENERATED else []
        if len(hits := _POINTERS.findall(" ".join(lines))) > 1:
            found[str(path)] = hits
    assert found == {}


def test_the_pattern_finds_words_and_lets_others_be():
    banned = [
        "the wish of",
        "cut along dims",
        "it is no kernel",
        "what is sorted",
        "Nobody reads it",
        "a walk over",
    ]
    legal = [
        "there is no kernel",
        "is no longer",
        "cuticle",
        "stands for a value",
        "a standing wave",
        "untold",
    ]
    assert [words for words in banned if not _BANNED.search(words)] == []
    assert [words for words in legal if _BANNED.search(words)] == []


def classes() -> dict[str, list[str]]:
    """Name → where classes of this name are defined; models of users are called as they call them."""
    found = collections.defaultdict(list)
    for path in tracked(".py"):
        if path.is_relative_to("tests/third_party"):
            continue
        for match in re.finditer(r"^ *class (\w+)[(:]", text(path), re.M):
            found[match[1]].append(f"{path}:{text(path).count(chr(10), 0, match.start()) + 1}")
    return found


def test_class_names_are_unique():
    twice = {name: where for name, where in classes().items() if len(where) > 1}
    assert set(twice) <= SHARED_NAMES, twice


PHASES = {
    "__init__": "the map of a package",
    "attention": "its plan, its planner, its kernels",
    "backend": "one for each backend: its entry",
    "collectives": "the operations, in each phase",
    "elementwise": "the operations, in each phase",
    "handler": "of a target: the function that XLA calls",
    "loading": "of a target: a program in memory",
    "movement": "the operations, in each phase",
    "operations": "the operations of kernels, in each language",
    "options": "of passes, of the compiler",
    "products": "the operations, in each phase",
    "target": "the interface, and one for each target",
    "tiling": "of a target: sizes of tiles",
}
"""Names of several files in `mpmd/`, and the one meaning that each has."""


def test_file_names_are_unique():
    """So that a word leads to one file."""
    paths = collections.defaultdict(list)
    for path in tracked(".py"):
        if path.parts[0] == "mpmd":
            paths[path.stem].append(str(path))
    assert {name: where for name, where in paths.items() if len(where) > 1 and name not in PHASES} == {}
    assert [name for name in PHASES if len(paths[name]) < 2] == [], "a name that is not needed"


def test_class_names_say_something():
    assert {name: where for name, where in classes().items() if name in VAGUE_CLASSES} == {}


def test_limits_are_named_max_and_min():
    name = r"_?(?:MOST|FEWEST|LONGEST|LARGEST|SMALLEST|SHORTEST|LEAST)(?:_\w+)?"
    limit = re.compile(rf"^[\w ,]*\b({name})\b[\w ,:\[\]]*=(?!=)", re.M)
    assert limit.search("_A, _MOST_ROWS = 1, 2") and not limit.search("f(_MOST_ROWS == 2)")
    found = {f"{path} {match[1]}" for path in tracked(".py") for match in limit.finditer(text(path))}
    assert found - {"tests/repo/test_vocabulary.py _MOST_ROWS"} == set()
