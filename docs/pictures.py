"""Draws the pictures of README: the step of its snippets, measured, and a page of the explorer.

    python docs/pictures.py

The step is run as README writes it, so that the pictures are of the code beside them.  The page is photographed
by Chromium.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from mpmd.scheduling.render_svg import render_svg
from mpmd.tools.explorer import explore

SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Writes `step.svg` and `explorer.png` beside this file."""
    named: dict[str, Any] = {}
    for number, code in enumerate(SNIPPET.findall((DOCS.parent / "README.md").read_text())):
        exec(compile(code, f"train_{number}.py", "exec"), named)
    (DOCS / "step.svg").write_text(render_svg(named["timeline"]))
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "step.html"
        explore(named["train_step"].trace(named["layers"], named["x"], named["y"]), page)
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,760")
        picture = f"--screenshot={DOCS / 'explorer.png'}"
        subprocess.run(["chromium", *flags, picture, page.as_uri()], check=True, timeout=120)


if __name__ == "__main__":
    main()
