"""Logging of every process: one line an event, to standard error, without secrets."""

from __future__ import annotations

import logging
import re

_SECRET = re.compile(r"sk-[A-Za-z0-9._-]{8,}")


class _Redacting(logging.Formatter):
    """Whatever looks like a key is cut, wherever it comes from."""

    def format(self, record: logging.LogRecord) -> str:
        return _SECRET.sub("sk-***", super().format(record))


def set_up_logging(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_Redacting("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("httpx", "httpcore", "urllib3", "transformers"):
        logging.getLogger(name).setLevel(logging.WARNING)
