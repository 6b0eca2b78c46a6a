"""A pytest plugin that runs mutants in forks of a process that has imported everything and used no device.

In the fork the functions of the mutant get its code, so that whoever imported them runs it, and nothing is
imported again.  What this cannot show takes a new process (`mutant.py`): mutants of data, of classes, and of
what is done while a module is imported.
"""

from __future__ import annotations

import gc
import inspect
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType, FunctionType

import pytest
from _pytest.runner import runtestprotocol

from tests.preconditions import ROOT, Precondition, rows
from tests.preconditions.mutant import survives

_FAILED, _BROKEN = 1, 2  # exit codes of a fork
_MIN_S, _TIMES = 10, 10  # how long a mutant may run, of itself and by what its test takes without it
Functions = Mapping[CodeType, list[FunctionType]]


def unnoticed(room: str, numbers: Sequence[int], tell: Callable[[str], None]) -> list[str]:
    """What the tests of mutants that nothing notices print; tells of each mutant."""
    tests = {rows(room)[number].test: None for number in numbers}
    forks = _Forks(room, numbers, tell)
    options = ["-qq", "--no-header", "-p", "no:xdist", "-p", "no:cacheprovider"]
    pytest.main([*options, *(str(ROOT / test) for test in tests)], plugins=[forks])
    if forks.done < len(numbers):
        raise RuntimeError(f"{forks.done} of {len(numbers)} mutants of {room} were run")
    return forks.alive


class _Forks:
    """Runs mutants in the place of tests."""

    def __init__(self, room: str, numbers: Sequence[int], tell: Callable[[str], None]) -> None:
        self.room, self.numbers, self.tell = room, numbers, tell
        self.alive: list[str] = []
        self.done = 0

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed:
            return None  # pytest says which file has no tests
        _check_forks()
        functions = _functions()
        plain: dict[str, tuple[bool, float]] = {}
        for number in self.numbers:
            row = rows(self.room)[number]
            items = [i for i in session.items if i.nodeid == row.test or i.nodeid.startswith(f"{row.test}[")]
            if row.test not in plain:
                start = time.monotonic()
                plain[row.test] = _fails(items, lambda: True, 300), time.monotonic() - start
            fails_anyway, took = plain[row.test]
            mutant = partial(mutate, row, functions)
            forked = not fails_anyway and _fails(items, mutant, _MIN_S + _TIMES * took)
            problem = "" if forked else survives(self.room, number)
            self.alive += [problem] if problem else []
            self.done += 1
            how = f"SURVIVES {problem}" if problem else "noticed" if forked else "noticed, in a new process"
            self.tell(f"{number} {row.rewrite}: {how}")
        return True


def _check_forks() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _fails([], lambda: False, 10)
    if said:
        raise RuntimeError(f"a module of tests makes arrays of JAX while it is imported: {said[0].message}")


def _fails(items: list[pytest.Item], prepare: Callable[[], bool], seconds: float) -> bool:
    """Whether a test fails, crashes or does not end in a fork; False if the fork cannot be prepared."""
    child = os.fork()
    if child == 0:
        code = _BROKEN
        try:
            code = _FAILED if prepare() and any(map(_failed, items)) else 0
        finally:
            os._exit(code)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return code == _FAILED or code < 0  # a signal ended it
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def _failed(item: pytest.Item) -> bool:
    return any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))


def _functions() -> Functions:
    """The functions of `mpmd` that have been made, by their code."""
    gc.unfreeze()  # conftest.py hides them from the garbage collector
    found: dict[CodeType, list[FunctionType]] = {}
    for value in gc.get_objects():
        if type(value) is FunctionType and value.__code__.co_filename.startswith(f"{ROOT}{os.sep}mpmd"):
            found.setdefault(value.__code__, []).append(value)
    gc.freeze()
    return found


def mutate(row: Precondition, functions: Functions) -> bool:
    """Whether functions have the code of the mutant now; False if more than code of functions differs."""
    path = str(ROOT / row.file)
    source = (ROOT / row.file).read_text(encoding="utf-8")
    changed = False
    try:
        for old, new in _changes(compile(source, path, "exec"), compile(row.mutated(source), path, "exec")):
            for function in functions.get(old, ()):
                function.__code__ = new
                changed = True
    except ValueError:  # another variable of the function around it, too
        return False
    return changed


def _changes(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """The functions that differ, outer ones first.

    Raises:
        ValueError: what is done while the module is imported differs.
    """
    if old == new:
        return
    inner = [[c for c in code.co_consts if isinstance(c, CodeType)] for code in (old, new)]
    if old.co_flags & inspect.CO_OPTIMIZED:
        yield old, new
    elif _does(old) != _does(new) or len(inner[0]) != len(inner[1]):
        raise ValueError(f"{old.co_name} differs")
    for a, b in zip(*inner):
        yield from _changes(a, b)


def _does(code: CodeType) -> tuple[bytes, tuple[str, ...], list[object]]:
    """What code does besides the functions in it."""
    return code.co_code, code.co_names, [c for c in code.co_consts if not isinstance(c, CodeType)]
