"""Logging of every process: one line for each event, to standard error, without secrets.

Lines are text, or JSON objects with ``time`` (UTC), ``level``, ``logger``, ``message``, ``part``
(``rank-0``, ``router``, ...), ``pid``, ``exception`` if there is one, and the call's ``extra``.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import quote

from any_agent.runtime.atomic_files import owner_only

LogFormat = Literal["text", "json"]

_SESSION_KEY = re.compile(r"sk-[A-Za-z0-9._%-]{8,}")
_MAX_DEPTH = 6
_PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {
    "asctime",
    "message",
    "taskName",
    # uvicorn's copy of the message with colours, and a mark of LiteLLM's.
    "color_message",
    "litellm_redacted",
}
"""Attributes of every record; all others are a call's ``extra``."""
_FRAME = re.compile(r'^ +File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_LIBRARIES = ("<", f"{Path(__file__).resolve().parents[1]}/", f"{Path(os.__file__).parent}/")
"""How the names of files begin that are not the user's own code; nor is what is installed."""


def own_place(trace: str) -> str:
    """Return the last line of a formatted trace that is in the user's own code, "" without any."""
    frames = [
        found
        for found in _FRAME.findall(trace)
        if not found[0].startswith(_LIBRARIES) and "-packages/" not in found[0]
    ]
    return "{}:{} in {}".format(*frames[-1]) if frames else ""


class Redactor:
    """Removes session keys, and the given secrets in every form in which they may appear."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        forms = {
            form
            for secret in secrets
            for form in (
                secret,
                repr(secret)[1:-1],
                json.dumps(secret)[1:-1],
                quote(secret, safe=""),
            )
            if form
        }
        # The longest first: a secret that is part of another one must not leave its rest.
        ordered = sorted(forms, key=len, reverse=True)
        self._given = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def text(self, text: str) -> str:
        if self._given is not None:
            text = self._given.sub("***", text)
        return _SESSION_KEY.sub("sk-***", text)

    def data(self, value: Any, depth: int = 0) -> Any:
        """Return the value in JSON's types, with every text in it redacted."""
        match value:
            case None | bool() | int():
                return value
            case float():
                return value if math.isfinite(value) else str(value)
            case str():
                return self.text(value)
            case dict() if depth < _MAX_DEPTH:
                return {self.text(str(k)): self.data(v, depth + 1) for k, v in value.items()}
            case list() | tuple() | set() | frozenset() if depth < _MAX_DEPTH:
                return [self.data(item, depth + 1) for item in value]
        return self.text(str(value))


class _Text(logging.Formatter):
    def __init__(self, redactor: Redactor) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        _settle(record)
        return self._redactor.text(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        extra = self._redactor.data(_extra(record))
        return super().formatMessage(record) + "".join(f" {k}={v}" for k, v in extra.items())


class _Json(logging.Formatter):
    def __init__(self, redactor: Redactor, part: str) -> None:
        super().__init__()
        self._redactor = redactor
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        _settle(record)
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "part": self._part,
            "pid": record.process,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(self._redactor.data(_extra(record) | line), ensure_ascii=False)


def _settle(record: logging.LogRecord) -> None:
    """Make the message formattable: logging's own report would show the raw arguments."""
    try:
        record.getMessage()
    except Exception:
        record.msg, record.args = f"{record.msg} (with {record.args!r})", None


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in record.__dict__.items() if key not in _PLAIN}


class _Handler(logging.StreamHandler[Any]):
    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing: logging's own handler would print the raw arguments."""


class FloodFilter(logging.Filter):
    """Passes a few records a second that are no errors; the next one has the number of the others.

    It is for loggers of which a client can provoke a line by each request.
    """

    _PER_SECOND = 1.0
    _BURST = 20.0

    def __init__(self) -> None:
        super().__init__()
        self._tokens, self._filled = self._BURST, time.monotonic()
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return True
        now = time.monotonic()
        refilled = self._tokens + (now - self._filled) * self._PER_SECOND
        self._tokens, self._filled = min(self._BURST, refilled), now
        if self._tokens < 1:
            self._left_out += 1
            return False
        self._tokens -= 1
        if self._left_out:
            record.msg = f"{record.getMessage()} (and {self._left_out} such lines were left out)"
            record.args, self._left_out = None, 0
        return True


def set_up_logging(
    level: str,
    log_format: LogFormat = "text",
    *,
    part: str = "",
    secrets: Iterable[str] = (),
    before: Callable[[logging.LogRecord], bool] = lambda _: True,
) -> None:
    """Log to standard error, uncaught exceptions and warnings included.

    ``part`` is the process's name in JSON lines; ``secrets`` are removed wherever they appear.
    ``before`` is called before each line, and may leave it out by returning false.
    """
    handler = _Handler()
    handler.addFilter(before)
    handler.setFormatter(_formatter(log_format, part, secrets))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("httpx", "httpcore", "urllib3", "transformers"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # It logs each retry twice; the caller reports the result.
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


@contextmanager
def logging_to(
    file: Path,
    level: str,
    log_format: LogFormat = "text",
    *,
    names: Sequence[str],
    part: str = "",
    secrets: Iterable[str] = (),
) -> Iterator[None]:
    """Write the records of these loggers to a file, in a program that may set up its own logging.

    If it does not, their warnings also go to standard error.
    """
    with open(file, "a", encoding="utf-8", opener=owner_only) as out:
        handlers: list[logging.Handler] = [_Handler(out)]
        if not logging.getLogger().handlers:
            handlers.append(_Handler())
            handlers[-1].setLevel(logging.WARNING)
        formatter = _formatter(log_format, part, secrets)
        loggers = [logging.getLogger(name) for name in names]
        levels = [logger.level for logger in loggers]
        for handler in handlers:
            handler.setFormatter(formatter)
        for logger in loggers:
            logger.setLevel(level.upper())
            for handler in handlers:
                logger.addHandler(handler)
        try:
            yield
        finally:
            for logger, before in zip(loggers, levels, strict=True):
                logger.setLevel(before)
                for handler in handlers:
                    logger.removeHandler(handler)


def _formatter(log_format: LogFormat, part: str, secrets: Iterable[str]) -> logging.Formatter:
    redactor = Redactor(secrets)
    return _Json(redactor, part) if log_format == "json" else _Text(redactor)


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        logging.getLogger(__name__).critical("uncaught error", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is not SystemExit and args.exc_value is not None:
        thread = args.thread.name if args.thread is not None else "?"
        logging.getLogger(__name__).critical(
            "uncaught error in thread %s",
            thread,
            exc_info=(args.exc_type, args.exc_value, args.exc_traceback),
        )
