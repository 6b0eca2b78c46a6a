"""Output of several processes in lines; a reader that is gone, slow, or of a full disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time

import pytest

from mpmd.tools.output import Printer, Reader, wait_for_output
from tests.repo.tree import ROOT


class Written:
    """What a reader passes on of some bytes that a process wrote."""

    def __init__(self, data: bytes, printer: Printer) -> None:
        source, end = os.pipe()
        self.file, target = os.pipe()
        threading.Thread(target=self._write, args=(end, data), daemon=True).start()
        self.reader = Reader(os.fdopen(source, "rb"), target, 3, printer)
        self.target = target
        self.reader.start()

    def _write(self, end, data):
        with os.fdopen(end, "wb") as pipe:
            pipe.write(data)

    def text(self) -> bytes:
        wait_for_output([self.reader], lambda: False)
        os.close(self.target)
        with os.fdopen(self.file, "rb") as pipe:
            return pipe.read()


def test_lines_get_the_number_of_their_process_and_long_ones_are_divided(monkeypatch):
    noise = b"[Gloo] Rank 1 is connected\n"
    monkeypatch.setattr("mpmd.tools.output._LINE_BYTES", 30)
    written = Written(b"one\n" + noise + b"x" * 40 + b"\n\xff\xfe\nno end", Printer())
    assert written.text().splitlines() == [
        b"[3] one",
        b"[3] " + b"x" * 30,
        b"[3] " + b"x" * 10,
        b"[3] \xff\xfe",
        b"[3] no end",
    ]


def test_a_reader_that_is_gone_is_noticed_and_the_process_is_still_read():
    printer = Printer()
    written = Written(b"line\n" * 100_000, printer)
    os.close(written.file)
    wait_for_output([written.reader], lambda: False)
    assert printer.failure.errno == errno.EPIPE and not written.reader.is_alive()


def test_a_slow_reader_gets_everything_and_is_waited_for(monkeypatch):
    monkeypatch.setattr("mpmd.tools.output._IDLE_SECONDS", 0.05)
    written = Written(b"".join(b"%06d\n" % k for k in range(20_000)), Printer())
    time.sleep(0.2)  # the pipe is full
    assert written.reader.prints and not written.reader.is_idle()
    found = []
    consumer = threading.Thread(target=lambda: found.append(os.fdopen(written.file, "rb").read()))
    consumer.start()
    wait_for_output([written.reader], lambda: False)
    os.close(written.target)
    consumer.join(5)
    assert found[0].splitlines() == [b"[3] %06d" % k for k in range(20_000)]


def test_an_output_that_another_program_made_non_blocking_is_waited_for():
    written = Written(b"x" * 60 + b"\n", Printer())
    written.text()
    source, target = os.pipe()
    os.set_blocking(target, False)
    printer, done = Printer(), threading.Event()
    line = b"y" * 200_000 + b"\n"

    def work():
        printer.print(line, target)
        done.set()

    threading.Thread(target=work, daemon=True).start()
    got = b""
    while len(got) < len(line):
        got += os.read(source, 1 << 16)
    assert done.wait(5) and got == line and printer.failure is None
    os.close(source)
    os.close(target)


def test_a_pipe_that_a_child_of_an_ended_process_holds_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("mpmd.tools.output._IDLE_SECONDS", 0.05)
    source, end = os.pipe()
    reader = Reader(os.fdopen(source, "rb"), 1, 0, Printer())
    reader.start()
    wait_for_output([reader], lambda: False)
    assert reader.is_alive()
    os.close(end)
    reader.join(5)


def test_hurry_ends_the_wait_for_a_reader_that_reads_nothing():
    written = Written(b"line\n" * 100_000, Printer())
    start = time.monotonic()
    wait_for_output([written.reader], lambda: time.monotonic() > start + 0.2)
    assert written.reader.is_alive()
    os.close(written.file)
    written.reader.join(5)


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_program_without_standard_files_gets_them(closed):
    """Or the next socket would be file 1, and what is printed would be sent."""
    code = (
        "import importlib.util, os, sys; "
        "spec = importlib.util.spec_from_file_location('output', sys.argv[1]); "
        "made = importlib.util.module_from_spec(spec); spec.loader.exec_module(made); "
        "made.open_standard_files(); os._exit(os.open(os.devnull, os.O_RDWR))"
    )
    script = f'exec "$0" -S -c "$1" "$2" {closed}'
    file = str(ROOT / "mpmd" / "tools" / "output.py")
    done = subprocess.run(["sh", "-c", script, sys.executable, code, file], check=False, timeout=20)
    assert done.returncode == 3
