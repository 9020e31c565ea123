"""An incremental reader of a call that is written as one JSON object."""

from __future__ import annotations

from collections.abc import Callable, Collection

from any_agent.chat.output.json_stream import StringReader, ValueScanner, read_string
from any_agent.chat.output.message import MessageBuilder, WhitespaceTrimmer

_WHITE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


class JsonCallReader:
    """Reads ``{"name": ..., "arguments": {...}}``, in any order of keys; other keys are ignored.

    The arguments are passed to the builder as written; a JSON string is unescaped. Of equal keys
    the first one counts. Invalid JSON before a tool is named makes it no call (``failed``); invalid
    JSON afterwards is passed on as written.
    """

    def __init__(self, builder: MessageBuilder, declared: Collection[str] | None = None) -> None:
        """``declared``: tools whose name alone makes a call; any other needs arguments, too."""
        self._builder = builder
        self._declared = declared
        self.opened = False
        self.failed = False
        self.complete = False
        """True once the closing brace was read."""
        self._name: str | None = None
        self._key: str | None = None
        self._pending: list[str] | None = None
        """Arguments that came before a call could open; None: none came yet."""
        self._arguments_complete = False
        self._scanner = ValueScanner()
        self._collected: list[str] = []
        self._string: StringReader | None = None
        self._raw: WhitespaceTrimmer | None = None
        self._step: Callable[[str, int], int] = self._before

    def feed(self, text: str) -> int:
        """Read a text; return how much of it belongs to the object."""
        at = 0
        while at < len(text) and not (self.complete or self.failed):
            at = self._step(text, at)
        return at

    def end(self) -> None:
        """End the reading: no more text comes."""
        if self._string is not None:
            self._emit(self._string.flush())
            self._string = None

    # -- steps: each reads the text from ``at`` on, and returns the position after it --------------

    def _before(self, text: str, at: int) -> int:
        return self._expect(text, at, "{", self._before_key)

    def _before_key(self, text: str, at: int) -> int:
        at = _skip_white(text, at)
        if at == len(text):
            return at
        if text[at] == "}":
            return self._close(at)
        if text[at] != '"':
            return self._fail(at)
        self._scanner, self._collected = ValueScanner(), []
        self._step = self._in_key
        return at

    def _in_key(self, text: str, at: int) -> int:
        end = self._collect(text, at)
        if end >= 0:
            self._key = read_string("".join(self._collected)[1:-1])
            self._step = self._before_colon
        return end if end >= 0 else len(text)

    def _before_colon(self, text: str, at: int) -> int:
        return self._expect(text, at, ":", self._before_value)

    def _before_value(self, text: str, at: int) -> int:
        at = _skip_white(text, at)
        if at == len(text):
            return at
        if text[at] in ",}]:":
            return self._fail(at)
        self._scanner, self._collected = ValueScanner(), []
        if self._key == "name" and self._name is None:
            if text[at] != '"':
                return self._fail(at)
            self._step = self._in_name
        elif self._key in _ARGUMENTS and self._pending is None:
            self._pending = []
            self._open_if_named()
            self._step = self._in_arguments
            if text[at] == '"':
                self._string = StringReader()
                self._scanner.feed('"')
                return at + 1
        else:
            self._step = self._in_other
        return at

    def _in_name(self, text: str, at: int) -> int:
        end = self._collect(text, at)
        if end < 0:
            return len(text)
        self._name = read_string("".join(self._collected)[1:-1])
        if not self._name:
            return self._fail(at)
        self._open_if_named()
        self._step = self._after_value
        return end

    def _in_arguments(self, text: str, at: int) -> int:
        end = self._scanner.feed(text, at)
        broken_at = self._scanner.broken_at
        if broken_at is not None:
            self._emit(text[at:broken_at])
            return self._fail(broken_at)
        value = text[at:] if end < 0 else text[at:end]
        if self._string is not None:
            self._emit(self._string.push(value if end < 0 else value[:-1]))
        else:
            self._emit(value)
        if end < 0:
            return len(text)
        self.end()
        self._arguments_complete = True
        self._step = self._after_value
        return end

    def _in_other(self, text: str, at: int) -> int:
        end = self._scanner.feed(text, at)
        if self._scanner.broken_at is not None:
            return self._fail(self._scanner.broken_at)
        if end < 0:
            return len(text)
        self._step = self._after_value
        return end

    def _after_value(self, text: str, at: int) -> int:
        at = _skip_white(text, at)
        if at == len(text):
            return at
        if text[at] == "}":
            return self._close(at)
        return self._expect(text, at, ",", self._before_key)

    def _as_written(self, text: str, at: int) -> int:
        if self._raw is not None:
            self._builder.arguments(self._raw.push(text[at:]))
        return len(text)

    # -- helpers of the steps ----------------------------------------------------------------------

    def _expect(self, text: str, at: int, char: str, then: Callable[[str, int], int]) -> int:
        at = _skip_white(text, at)
        if at == len(text):
            return at
        if text[at] != char:
            return self._fail(at)
        self._step = then
        return at + 1

    def _collect(self, text: str, at: int) -> int:
        end = self._scanner.feed(text, at)
        self._collected.append(text[at:] if end < 0 else text[at:end])
        return end

    def _open_if_named(self) -> None:
        if self.opened or self._name is None:
            return
        if self._declared is None or self._pending is not None or self._name in self._declared:
            self.opened = True
            self._builder.open_call(self._name)
            self._builder.arguments("".join(self._pending or ()))

    def _emit(self, text: str) -> None:
        if self.opened:
            self._builder.arguments(text)
        elif self._pending is not None:
            self._pending.append(text)

    def _close(self, at: int) -> int:
        self.complete = True
        self.failed = not self.opened
        return at + 1

    def _fail(self, at: int) -> int:
        """Treat the text from here on as no JSON."""
        if not self.opened:
            self.failed = True
            return at
        if not self._arguments_complete:
            self._raw = WhitespaceTrimmer()
        self._step = self._as_written
        return at


def _skip_white(text: str, at: int) -> int:
    while at < len(text) and text[at] in _WHITE:
        at += 1
    return at
