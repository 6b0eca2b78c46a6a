"""The places of texts in an SVG, as far as they are known without a browser."""

from __future__ import annotations

from xml.etree import ElementTree

LETTER_PX = 6.8
"""Of 11 px: more than letters of Arial and DejaVu Sans take on average in such texts."""


def text_boxes(picture: str) -> list[tuple[str, float, float, float, float]]:
    """Text, left, right, top and bottom of each text of an SVG."""
    boxes = []
    for text in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text"):
        if "transform" in text.attrib:
            continue  # it is turned, at the edge
        size = float(text.attrib.get("font-size", 11))
        wide = LETTER_PX * size / 11 * len(text.text or "")
        x, y = float(text.attrib["x"]), float(text.attrib["y"])
        left = x - wide * {"middle": 0.5, "end": 1.0}.get(text.attrib.get("text-anchor", ""), 0.0)
        boxes.append((text.text or "", left, left + wide, y - 0.75 * size, y + 0.2 * size))
    return boxes


def overlaps(picture: str) -> list[tuple[str, str]]:
    """Texts that share a place, or leave the picture."""
    root, boxes = ElementTree.fromstring(picture), text_boxes(picture)
    wide, high = map(float, root.attrib["viewBox"].split()[2:])
    found = [(t, "the edge") for t, x0, x1, y0, y1 in boxes if x0 < 0 or x1 > wide or y0 < 0 or y1 > high]
    boxes.sort(key=lambda box: box[1])
    for k, (text, _, right, top, bottom) in enumerate(boxes):
        for other, left, _, above, below in boxes[k + 1 :]:
            if left >= right:
                break
            if above < bottom and top < below:
                found.append((text, other))
    return found
