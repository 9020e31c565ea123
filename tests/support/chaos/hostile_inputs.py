"""What hostile clients send, by kind."""

from __future__ import annotations

import os
from pathlib import Path

MODEL_CALLS = (
    "/v1/chat/completions",
    "/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
)
POSTS = (
    *MODEL_CALLS,
    "/rl/v1/start_session",
    "/rl/v1/set_reward",
    "/rl/v1/feedback",
    "/rl/v1/finalize",
    "/rl/v1/lease",
    "/rl/v1/ack",
    "/rl/v1/export_trajectories",
    "/rl/v1/pause",
    "/rl/v1/version",
    "/rl/v1/sessions/ses-0-0123456789abcdef/abort",
)
"""Every kind of route that reads a body."""


DEEP = {
    "lists": b"[" * 1000 + b"]" * 1000,
    "objects": b'{"a":' * 1000 + b"1" + b"}" * 1000,
    "metadata": b'{"metadata": ' + b'{"a":' * 1000 + b"1" + b"}" * 1001,
    "100,000 levels": b"[" * 100_000,
    "closed, 100,000 levels": b"[" * 100_000 + b"]" * 100_000,
}


"""Nested JSON."""

NUMBERS = {
    b"NaN": False,
    b"Infinity": False,
    b"-Infinity": False,
    b"1e400": False,
    b"-1e400": False,
    b"1e308": False,
    b"-0.0": True,
    b"9" * 30: False,
    b"9" * 5000: False,
    b"-" + b"9" * 30: False,
    b"1" + b"0" * 400: False,
    b"0x10": False,
    b"01": False,
    b"1_000": False,
    b".5": False,
    b'"1"': False,
    b"true": False,
    b"[1]": False,
    "١".encode(): False,
}
"""What is written where a number belongs, and whether a reward may be that."""
REWARDED = ("/rl/v1/set_reward", "/rl/v1/feedback", "/rl/v1/finalize")
NUMERIC = {
    "/rl/v1/set_reward": (b"reward",),
    "/rl/v1/feedback": (b"score",),
    "/rl/v1/finalize": (b"final_reward",),
    "/rl/v1/start_session": (b"ttl", b"wait", b"group_size"),
    "/rl/v1/pause": (b"ttl",),
    "/rl/v1/version": (b"version", b"step"),
    "/rl/v1/lease": (b"wait", b"max_groups"),
    "/rl/v1/export_trajectories": (b"discount",),
}


TRAVERSAL = (
    "../../../../etc/passwd",
    "..",
    ".",
    "/etc/passwd",
    "....//....//etc/passwd",
    "..\\..\\windows\\win.ini",
    "file:///etc/passwd",
    "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "..%c0%af..%c0%afetc/passwd",
    "ses-0-../../../etc",
    "~root",
    "$(touch /tmp/x)",
    "`id`",
    "'; DROP TABLE sessions; --",
)
UNICODE = (
    "a\0b",
    "\ud800",
    "\u202egnp.exe",
    "\u200b",
    "\ufeff",
    "\u0661",
    "\U0001f4a9" * 10,
    "e\u0301",
    "a" * 65,
    "a" * 1_000_000,
    "\r\nX-Injected: 1",
    " ",
    "",
)
MARKUP = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "{{7*7}}",
    "${jndi:ldap://127.0.0.1/a}",
    "javascript:alert(1)",
)
NAMES = (*TRAVERSAL, *UNICODE, *MARKUP)


HIDDEN = b"GET /rl/v1/sessions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n\r\n"
SMUGGLED = {
    "two lengths": [b"Content-Length: 4", b"Content-Length: 400"],
    "two lengths in one": [b"Content-Length: 4, 400"],
    "length and chunked": [b"Content-Length: 400", b"Transfer-Encoding: chunked"],
    "chunked, then not": [b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity"],
    "almost chunked": [b"Transfer-Encoding: xchunked"],
    "chunked twice": [b"Transfer-Encoding: chunked, chunked"],
    "a space before the colon": [b"Transfer-Encoding : chunked", b"Content-Length: 4"],
    "a tab": [b"Transfer-Encoding:\tchunked", b"Content-Length: 4"],
    "folded": [b"Transfer-Encoding:\r\n chunked", b"Content-Length: 4"],
    "vertical tab": [b"Transfer-Encoding:\x0bchunked", b"Content-Length: 4"],
    "negative": [b"Content-Length: -1"],
    "plus": [b"Content-Length: +4"],
    "hexadecimal": [b"Content-Length: 0x4"],
    "huge": [b"Content-Length: 99999999999999999999999"],
    "bare line feed": [b"Content-Length: 4\nX: 1"],
    "carriage return": [b"X: 1\rContent-Length: 400", b"Content-Length: 4"],
    "a null": [b"X: a\0b", b"Content-Length: 4"],
    "nameless": [b": 4", b"Content-Length: 4"],
}


"""By what is wrong with the framing."""

ALIEN = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "nulls": b"\0" * 4096,
    "another host": b"GET http://169.254.169.254/latest/meta-data HTTP/1.1\r\nHost: x\r\n\r\n",
    "CONNECT": b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: 127.0.0.1:22\r\n\r\n",
    "HTTP/9.9": b"GET / HTTP/9.9\r\n\r\n",
    "TRACE": b"TRACE / HTTP/1.1\r\nHost: localhost\r\nX-Secret: 1\r\n\r\n",
    "no end": b"G" * 100_000,
}
"""What is no request of ours."""


class Canary:
    """Unpickled, it writes a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self._file}",)
