"""Draws the pictures of README: the step of its snippets, measured, and a page of the explorer.

    python docs/pictures.py

The step is run as README writes it, so that the pictures are of the code beside them.  Chromium draws pages.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mpmd.scheduling.render_svg import render_svg
from mpmd.tools.explorer import explore

DOCS = Path(__file__).resolve().parent
STEP = 50  # where tasks are ordered
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Writes `step.svg` and `explorer.png` beside this file."""
    with tempfile.TemporaryDirectory() as folder:
        script, page = Path(folder) / "train.py", Path(folder) / "step.html"
        script.write_text("\n".join(SNIPPET.findall((DOCS.parent / "README.md").read_text())))
        named = runpy.run_path(str(script))
        (DOCS / "step.svg").write_text(render_svg(named["timeline"]))
        explore(named["train_step"].trace(named["layers"], named["x"], named["y"]), page)
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,760")
        picture = f"--screenshot={DOCS / 'explorer.png'}"
        subprocess.run(["chromium", *flags, picture, f"{page.as_uri()}#{STEP}"], check=True, timeout=120)


if __name__ == "__main__":
    main()
