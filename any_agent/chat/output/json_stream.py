"""Incremental JSON scanning: the end of a value, and the text of a string."""

from __future__ import annotations

import json
import re

_IN_STRING = re.compile(r'["\\]')
_STRUCTURE = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r"[\s,}\]]")
_CLOSES = {"}": "{", "]": "["}
_ESCAPE = re.compile(
    r"\\u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|\\u(?P<code>[0-9a-fA-F]{4})|\\(?P<char>[^u])",
    re.DOTALL,
)
_UNFINISHED = re.compile(
    r"\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F]"
    r"[0-9a-fA-F]?)?)?)?)?))?"
)
_CHARACTERS = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class ValueScanner:
    """Finds the end of one JSON value by its brackets and strings."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False
        self._in_scalar = False
        self.broken_at: int | None = None
        """The position of a mismatched bracket in the last text; the value has no end then."""

    def feed(self, text: str, at: int = 0) -> int:
        """Return where in ``text`` the value ends, from ``at`` on, or -1 if it goes on.

        The first character must be the value's own first one.
        """
        while at < len(text):
            if self._in_string:
                at = self._string(text, at)
            elif self._in_scalar:
                end = _SCALAR_END.search(text, at)
                return end.start() if end else -1
            else:
                at = self._structure(text, at)
            if at < 0 or not (self._in_string or self._in_scalar or self._open):
                return at
        return -1

    def _string(self, text: str, at: int) -> int:
        """Return the position after the next quote or escape, or -1."""
        if self._escaped:
            self._escaped = False
            return at + 1
        match = _IN_STRING.search(text, at)
        if match is None:
            return -1
        if match[0] == '"':
            self._in_string = False
        else:
            self._escaped = True
        return match.end()

    def _structure(self, text: str, at: int) -> int:
        """Return the position after the next bracket or opening quote, or -1."""
        if not self._open and text[at] not in '"{[':
            self._in_scalar = True
            return at
        match = _STRUCTURE.search(text, at)
        if match is None:
            return -1
        mark = match[0]
        if mark == '"':
            self._in_string = True
        elif mark in "{[":
            self._open.append(mark)
        elif self._open[-1] == _CLOSES[mark]:
            self._open.pop()
        else:
            self.broken_at = match.start()
            return -1
        return match.end()


class StringReader:
    """Unescapes the text between a JSON string's quotes, piece by piece.

    A lone surrogate stays escaped: no UTF-8 can carry it. So does an invalid escape.
    """

    def __init__(self) -> None:
        self._pending = ""

    def push(self, text: str) -> str:
        if not self._pending and "\\" not in text:
            return text
        text = self._pending + text
        self._pending = ""
        out: list[str] = []
        at = 0
        while (escape := text.find("\\", at)) >= 0:
            out.append(text[at:escape])
            if _UNFINISHED.fullmatch(text, escape):
                self._pending = text[escape:]
                return "".join(out)
            match = _ESCAPE.match(text, escape)
            out.append(_unescape(match) if match else text[escape])
            at = match.end() if match else escape + 1
        out.append(text[at:])
        return "".join(out)

    def flush(self) -> str:
        """Return an unfinished escape, unescaped as far as it is valid."""
        pending, self._pending = self._pending, ""
        match = _ESCAPE.match(pending)
        return _unescape(match) + pending[match.end() :] if match else pending


def _unescape(match: re.Match[str]) -> str:
    if match["high"]:
        high, low = int(match["high"], 16), int(match["low"], 16)
        return chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00))
    if match["code"]:
        code = int(match["code"], 16)
        return match[0] if 0xD800 <= code < 0xE000 else chr(code)
    char = match["char"]
    return _CHARACTERS.get(char) or (char if char in '"\\/' else match[0])


def read_string(inner: str) -> str | None:
    """Unescape a string's inner text strictly; None if it is invalid or not UTF-8."""
    try:
        value = json.loads(f'"{inner}"')
    except ValueError:
        return None
    return str(value) if encodable(value) else None


def is_json(text: str) -> bool:
    """Return True for one JSON value, in UTF-8 and without NaN and the like."""
    try:
        json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    return encodable(text)


def quoted(text: str) -> str:
    """Return ``text`` as a JSON string, unescaped where UTF-8 has the characters."""
    return json.dumps(text, ensure_ascii=False)


def as_arguments(value: object) -> str | None:
    """Return parsed arguments as JSON text: an object, or a string as it is; else None."""
    if isinstance(value, str):
        return value if encodable(value) else None
    if not isinstance(value, dict):
        return None
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    # A lone surrogate (an escape that the model wrote) can only travel escaped.
    return text if encodable(text) else json.dumps(value)


def encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
