"""A picture of a fragment's time: a bar per kernel, coloured by its limit."""

from __future__ import annotations

from html import escape

from mpmd.compile.thunks.costs import COMPUTE, MEMORY, FragmentCosts

_WIDTH, _MARGIN, _ROW, _LABELS, _FIGURES = 960, 20, 18, 360, 150
_COLOURS = {COMPUTE: "#0072b2", MEMORY: "#d55e00"}  # of Okabe and Ito; no phase has these
_MAX_ROWS = 40


def cost_plot(costs: FragmentCosts) -> str:
    """An SVG: above, the compute-bound and memory-bound shares of a call; below, its kernels.

    Args:
        costs: of a fragment.  Of more than 40 kernels the fastest share one bar per limit.
    """
    rows = _rows(costs)
    height = 3 * _MARGIN + _ROW * (len(rows) + 2)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        *_division(costs),
    ]
    longest = max(seconds for _, seconds, _, _ in rows)
    scale = (_WIDTH - 2 * _MARGIN - _LABELS - _FIGURES) / longest
    whole = costs.all_seconds
    for number, (label, seconds, light, limit) in enumerate(rows):
        y = 2 * _MARGIN + _ROW * (number + 1)
        x = _MARGIN + _LABELS
        title = escape(f"{label}: {seconds * 1e6:.2f} us, at the speed of light {light * 1e6:.2f} us")
        short = escape(label if len(label) <= 58 else label[:57] + "…")
        lines += [
            f'<text x="{_MARGIN}" y="{y + 12}">{short}</text>',
            f'<rect x="{x}" y="{y + 2}" width="{seconds * scale:.1f}" height="{_ROW - 4}" '
            f'fill="{_COLOURS[limit]}" fill-opacity="0.55"><title>{title}</title></rect>',
            f'<rect x="{x}" y="{y + 2}" width="{light * scale:.1f}" height="{_ROW - 4}" '
            f'fill="{_COLOURS[limit]}"><title>{title}</title></rect>',
            f'<text x="{x + seconds * scale + 4:.1f}" y="{y + 12}">{seconds * 1e6:.1f} us, '
            f"{seconds / whole:.1%}</text>",
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _division(costs: FragmentCosts) -> list[str]:
    whole, at, lines = costs.all_seconds, float(_MARGIN), []
    for limit in (COMPUTE, MEMORY):
        part = costs.seconds(limit)
        width = (_WIDTH - 2 * _MARGIN) * part / whole
        said = f"{limit}-bound {part * 1e6:.1f} us, {part / whole:.0%}"
        lines.append(
            f'<rect x="{at:.1f}" y="{_MARGIN}" width="{width:.1f}" height="{_ROW}" '
            f'fill="{_COLOURS[limit]}"><title>{said}</title></rect>'
        )
        at += width
    said = ", ".join(
        f"{limit}-bound {costs.seconds(limit) * 1e6:.1f} us ({costs.seconds(limit) / whole:.0%})"
        for limit in (COMPUTE, MEMORY)
    )
    lines.append(
        f'<text x="{_MARGIN}" y="{_MARGIN - 6}">{said}, on {escape(costs.device.name)}; '
        "the full colour is the speed of light</text>"
    )
    return lines


def _rows(costs: FragmentCosts) -> list[tuple[str, float, float, str]]:
    """(label, projected seconds, those at the speed of light, limit) of each bar, longest first."""
    rows = [(k.label, k.seconds, k.times * k.light.seconds, k.limit) for k in costs.kernels]
    rows.sort(key=lambda row: -row[1])
    shown, rest = rows[:_MAX_ROWS], rows[_MAX_ROWS:]
    for limit in (COMPUTE, MEMORY):
        small = [row for row in rest if row[3] == limit]
        if small:
            seconds, light = sum(row[1] for row in small), sum(row[2] for row in small)
            shown.append((f"{len(small)} more kernels", seconds, light, limit))
    return [*shown, ("the call itself", costs.device.call_seconds, 0.0, MEMORY)]
