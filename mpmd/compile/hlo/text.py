"""Reading HLO text: errors that show the place, and scanning over balanced brackets.

The scanner works on offsets into one string, so that every problem can be reported with its line and a caret.
"""

from __future__ import annotations

import re

from mpmd.errors import HloError

_MARK = re.compile(r'[(){}\[\]"]')
_SPLIT = re.compile(r'[({\[",]')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*"|/\*.*?\*/|//[^\r\n]*', re.DOTALL)
_OPENS = {"(": ")", "{": "}", "[": "]"}


class TextError(HloError):
    """A problem at one offset of the text being read; the parser turns it into a located `HloError`."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.message = message
        self.offset = offset


def located(text: str, offset: int, message: str, name: str = "") -> str:
    """A message with line, column, the source line and a caret under the spot."""
    offset = min(max(offset, 0), len(text))
    line = text.count("\n", 0, offset) + 1
    start = text.rfind("\n", 0, offset) + 1
    end = text.find("\n", offset)
    source = text[start : end if end >= 0 else len(text)]
    column = offset - start
    shown, caret = source, column
    if len(source) > 160:
        first = max(0, column - 80)
        shown = ("..." if first else "") + source[first : first + 160]
        caret = column - first + (3 if first else 0)
    where = f"{name or 'HLO text'}:{line}:{column + 1}"
    return f"{where}: {message}\n  {shown}\n  {' ' * caret}^"


def closing(text: str, start: int) -> int:
    """Offset of the bracket that closes the one at `start`; quoted strings are skipped.

    Raises:
        TextError: the bracket is never closed, or closed by another kind.
    """
    stack: list[tuple[str, int]] = []
    position = start
    while True:
        mark = _MARK.search(text, position)
        if mark is None:
            opened, at = stack[-1] if stack else (_OPENS.get(text[start], ")"), start)
            raise TextError(f"this bracket is never closed by {opened!r}", at)
        char, at = mark.group(), mark.start()
        if char == '"':
            string = _STRING.match(text, at)
            if string is None:
                raise TextError("this string never ends", at)
            position = string.end()
            continue
        if char in _OPENS:
            stack.append((_OPENS[char], at))
        else:
            if not stack or stack[-1][0] != char:
                expected = f"expected {stack[-1][0]!r}" if stack else "nothing is open"
                raise TextError(f"{char!r} closes nothing here: {expected}", at)
            stack.pop()
            if not stack:
                return at
        position = at + 1


def split_top(text: str) -> list[str]:
    """Parts of `text` between commas outside of brackets and strings, stripped.  An empty text has none."""
    return [part for _, part in placed_parts(text)]


def placed_parts(text: str) -> list[tuple[int, str]]:
    """As `split_top`, each with its offset."""
    parts: list[tuple[int, str]] = []
    if not text.strip():
        return parts
    position = start = 0
    while True:
        mark = _SPLIT.search(text, position)
        if mark is None:
            return [*parts, _placed(text, start, len(text))]
        at = mark.start()
        if mark.group() == ",":
            parts.append(_placed(text, start, at))
            position = start = at + 1
        elif mark.group() == '"':
            string = _STRING.match(text, at)
            if string is None:
                raise TextError("this string never ends", at)
            position = string.end()
        else:
            position = closing(text, at) + 1


def _placed(text: str, start: int, end: int) -> tuple[int, str]:
    part = text[start:end]
    return start + len(part) - len(part.lstrip()), part.strip()


def blank_comments(text: str) -> str:
    """Comments outside of strings replaced by blanks; every other character keeps its offset and line."""
    if "/*" not in text and "//" not in text:
        return text
    return _COMMENT.sub(_blank, text)


def _blank(match: re.Match[str]) -> str:
    taken = match.group()
    return taken if taken[0] == '"' else re.sub(r"[^\n]", " ", taken)


def quote(text: str) -> str:
    """A quoted string as XLA writes it: C escapes, octal for other bytes."""
    simple = {"\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "'": "\\'", "\\": "\\\\"}
    out = []
    for char in text:
        if char in simple:
            out.append(simple[char])
        elif " " <= char < "\x7f":
            out.append(char)
        else:
            out.extend(f"\\{byte:03o}" for byte in char.encode())
    return '"' + "".join(out) + '"'


_ESCAPE = re.compile(rb"\\([0-7]{1,3}|x[0-9a-fA-F]{1,2}|.)", re.DOTALL)
_ESCAPED = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def unquote(text: str) -> str:
    """The inverse of `quote`; also accepts hexadecimal escapes."""

    def plain(match: re.Match[bytes]) -> bytes:
        code = match.group(1)
        if code[:1].isdigit():
            return bytes([int(code, 8) & 255])
        if code[:1] == b"x" and len(code) > 1:
            return bytes([int(code[1:], 16)])
        return _ESCAPED.get(code, code)

    body = text[1:-1] if len(text) >= 2 and text[0] == text[-1] == '"' else text
    return _ESCAPE.sub(plain, body.encode()).decode(errors="surrogateescape")


def read_int(text: str) -> int:
    """An integer of 64 bits.

    Raises:
        TextError: the text is not one.
    """
    try:
        value = int(text)
    except ValueError:
        raise TextError(f"expected an integer, got {text!r}", 0) from None
    if not -(1 << 63) <= value < 1 << 63:
        raise TextError(f"{text.strip()} does not fit in 64 bits", 0)
    return value


def integers(text: str) -> tuple[int, ...]:
    """`{1,2}` or `1,2` as a tuple; `{}` as ().

    Raises:
        TextError: something between the commas is not an integer, or takes more than 64 bits.
    """
    body = text.strip()
    if body[:1] == "{" and body[-1:] == "}":
        body = body[1:-1]
    if not body.strip():
        return ()
    try:
        numbers = tuple(int(part) for part in body.split(","))
    except ValueError:
        raise TextError(f"expected a list of integers such as {{0,1}}, got {text!r}", 0) from None
    if any(not -(1 << 63) <= number < 1 << 63 for number in numbers):
        raise TextError(f"a number of {text.strip()} does not fit in 64 bits", 0)
    return numbers
