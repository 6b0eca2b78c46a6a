"""A line on a terminal, and nothing anywhere else."""

from __future__ import annotations

import io
import types

import pytest

from mpmd.support import progress
from mpmd.support.progress import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when the test says so."""
    now = types.SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def work(clock, seconds):
    with ProgressLine("compiling") as line:
        for done in range(1, 5):
            clock.seconds += seconds
            line.show("fragments", done, 4)


def test_long_work_shows_a_bar_and_removes_it(clock, monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    work(clock, 0.3)
    shown = progress.sys.stderr.getvalue().split("\r\x1b[K")
    assert shown == [
        "",
        f"compiling: [{'█' * 12}{'·' * 12}] 2 of 4  fragments",
        f"compiling: [{'█' * 18}{'·' * 6}] 3 of 4  fragments",
        f"compiling: [{'█' * 24}] 4 of 4  fragments",
        "",
    ]


@pytest.mark.parametrize(("stream", "seconds"), [(Terminal, 0.01), (io.StringIO, 10.0)])
def test_short_work_and_files_show_nothing(clock, monkeypatch, stream, seconds):
    monkeypatch.setattr("sys.stderr", stream())
    work(clock, seconds)
    assert progress.sys.stderr.getvalue() == ""
