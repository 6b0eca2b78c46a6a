"""Pictures of the fragments of a step as one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape

_VIEW = re.compile(r'<svg ([^>]*)viewBox="0 0 (\d+) (\d+)"')
_HEADING = 26


def one_picture(texts: Mapping[str, str]) -> str:
    """One picture of several, one below the other under their names.

    Args:
        texts: SVGs with a `viewBox` from 0, by name; a text that is none is a remark, and is shown as such.
    """
    parts: list[str] = []
    top, widest = 0, 400
    for name, text in texts.items():
        view = _VIEW.match(text)
        title = name if view else f"{name}: {text.strip().removeprefix('// ')}"
        parts.append(f'<text x="12" y="{top + 18}" font-size="13" font-weight="bold">{escape(title)}</text>')
        top += _HEADING
        if view:
            wide, high = int(view[2]), int(view[3])
            parts.append(f'<svg y="{top}" width="{wide}" height="{high}" ' + text.strip()[len("<svg ") :])
            top, widest = top + high, max(widest, wide)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{widest}" height="{top}" '
    return "\n".join([f'{head}viewBox="0 0 {widest} {top}" font-family="sans-serif">', *parts, "</svg>\n"])
