"""A headless Chromium, for tests of pages: real layout, scrolling and events.

It speaks the DevTools protocol over two pipes: JSON messages that end with a zero byte.  The browser reads
them from its file descriptor 3, and writes them to 4.

Source: https://chromedevtools.github.io/devtools-protocol/.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

FOUND = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")

_WITH_PIPES = """
import fcntl, os, sys
above = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]  # 3 and 4 may be either of them
for fd, number in zip(above, (3, 4)):
    os.dup2(fd, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


_COMPLAINTS = ("Runtime.exceptionThrown", "Log.entryAdded")
_CHECKS = (Path(__file__).parent / "page_checks.js").read_text(encoding="utf-8")


class Browser:
    """A browser with one page; a context manager, at whose end it is gone.

    Attributes:
        complaints: errors of scripts and entries of the log, of all pages so far.
    """

    def __init__(self, folder: Path, width: int = 1200, height: int = 800) -> None:
        """Starts it; `folder` is for its profile."""
        theirs, self._out = os.pipe()
        self._in, answers = os.pipe()
        size = f"--window-size={width},{height}"
        browser = [FOUND or "chromium", *_FLAGS, size, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WITH_PIPES, str(theirs), str(answers), *browser],
            pass_fds=(theirs, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(answers)
        self._read = b""
        self.complaints: list[str] = []
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}
        pages = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        target = pages[0] if pages else self.call("Target.createTarget", url="about:blank")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        self.call("Runtime.enable")
        self.call("Log.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol and waits for its result; of events only complaints are kept."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("method") in _COMPLAINTS:
                self.complaints.append(json.dumps(answer["params"]))
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            more = os.read(self._in, 1 << 16)
            assert more, "the browser ended"
            self._read += more
        text, self._read = self._read.split(b"\0", 1)
        found: dict[str, Any] = json.loads(text)
        return found

    def open(self, page: Path) -> None:
        """Opens a file and waits until it is loaded."""
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.run("if (document.readyState !== 'complete') await new Promise(done => onload = done);")

    def look(self, width: int, theme: str) -> None:
        """Sets the width of the screen in pixels, and the theme, `light` or `dark`, of pages opened later."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def faint_texts(self, least: float = 4.5) -> list[str]:
        """Texts with too little contrast, of those on the screen."""
        found: list[str] = self.run(f"{_CHECKS} return faintTexts({least});")
        return found

    def is_too_wide(self) -> bool:
        """Whether the page as a whole must be scrolled sideways."""
        return bool(self.run(f"{_CHECKS} return widerThanTheScreen();"))

    def wheel(self, x: float, y: float, by: float, *, ctrl: bool = False) -> None:
        """Turns the wheel, at a point of the screen."""
        where = {"x": x, "y": y, "deltaX": 0, "deltaY": by, "modifiers": 2 if ctrl else 0}
        self.call("Input.dispatchMouseEvent", type="mouseWheel", **where)

    def run(self, script: str) -> Any:
        """The result of a script, which may `await` and `return`; `frames(n)` waits until n frames are drawn.

        Raises:
            AssertionError: the script raised.
        """
        frames = (
            "const frames = async n => { for (let i = 0; i < n; i++)"
            " await new Promise(done => requestAnimationFrame(() => setTimeout(done, 0))); };"
        )
        done = self.call(
            "Runtime.evaluate",
            expression=f"(async () => {{ {frames} {script} }})()",
            awaitPromise=True,
            returnByValue=True,
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def key(self, key: str, *, text: str = "") -> None:
        """Presses a key where the focus is."""
        code = {"Enter": 13}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._in)
        os.close(self._out)
