"""The memory of a step, mesh by mesh, as a table that prints and draws itself."""

from __future__ import annotations

from html import escape

from mpmd.brief import BriefTable, as_html, bytes_text, card, few
from mpmd.runtime.program.stream_memory import MeshMemory
from mpmd.scheduling.render_html import memory_colours
from mpmd.scheduling.render_svg import PAGE_WIDTH

_LEFT, _RIGHT, _BAR, _LETTER = 110, 90, 20, 6.5


class MemoryTable(BriefTable[str, MeshMemory]):
    """Mesh -> its `MeshMemory`."""

    def __repr__(self) -> str:
        peaks = sorted(self.values(), key=lambda memory: -memory.peak_bytes)
        held: dict[str, int] = {}
        for memory in peaks[:1]:
            held |= memory.by_category
        rows = [
            ("at most", few(f"{bytes_text(memory.peak_bytes)} on {memory.mesh}" for memory in peaks)),
            ("of these", ", ".join(f"{bytes_text(n)} {name}" for name, n in _largest_first(held))),
            ("on the host", few(f"{bytes_text(m.host_bytes)} of {m.mesh}" for m in peaks if m.host_bytes)),
        ]
        total = bytes_text(sum(memory.peak_bytes for memory in peaks))
        return card(f"MemoryTable: {total} on all meshes, at their peaks", rows)

    def _repr_svg_(self) -> str:
        """A bar for each mesh, at its peak, in the colours of what it holds; for notebooks."""
        longest = max((memory.peak_bytes for memory in self.values()), default=0) or 1
        scale = (PAGE_WIDTH - _LEFT - _RIGHT) / longest
        kinds = list(dict.fromkeys(k for m in self.values() for k, size in _largest_first(m.by_category)))
        colours = {kind: memory_colours(kinds)[kind] for kind in kinds}
        parts, top = list[str](), 4
        for memory in self.values():
            parts += _bar(memory, top, scale, colours)
            top += _BAR + 5
        legend, top = _legend(colours, top + 6)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{PAGE_WIDTH}" height="{top}" '
            f'viewBox="0 0 {PAGE_WIDTH} {top}" font-family="sans-serif" font-size="11">'
            f'<rect width="{PAGE_WIDTH}" height="{top}" fill="white"/>'
        )
        return "\n".join([head, *parts, *legend, "</svg>\n"])

    def _repr_html_(self) -> str:
        """The lines of its `repr` above the picture, for notebooks."""
        return as_html(repr(self), self._repr_svg_())


def _largest_first(held: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(((name, size) for name, size in held.items() if size), key=lambda of: (-of[1], of[0]))


def _bar(memory: MeshMemory, top: int, scale: float, colours: dict[str, str]) -> list[str]:
    parts, left = [f'<text x="8" y="{top + 14}">{escape(memory.mesh)}</text>'], float(_LEFT)
    for category, size in memory.by_category.items():
        if size:
            parts.append(
                f'<rect x="{left:.1f}" y="{top}" width="{size * scale:.1f}" height="{_BAR}" '
                f'fill="{colours[category]}"><title>{category}: {size:,} bytes</title></rect>'
            )
            left += size * scale
    return [*parts, f'<text x="{left + 6:.1f}" y="{top + 14}">{bytes_text(memory.peak_bytes)}</text>']


def _legend(colours: dict[str, str], top: int) -> tuple[list[str], int]:
    """What each colour is, in as many lines as it takes; and where the picture ends."""
    parts, left = list[str](), float(_LEFT)
    for category, colour in colours.items():
        wide = 17 + _LETTER * len(category) + 18
        if left + wide > PAGE_WIDTH:
            left, top = float(_LEFT), top + 18
        parts.append(f'<rect x="{left:.0f}" y="{top}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{left + 17:.0f}" y="{top + 10}" fill="#555">{category}</text>')
        left += wide
    return parts, top + 22
