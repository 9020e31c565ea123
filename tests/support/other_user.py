"""A list of all that another user can reach: the program of `tests/e2e/test_two_users.py`.

``python other_user.py UID`` reads a JSON object from standard input, becomes that user, tries
everything that the object names, and writes what it got as JSON. It imports nothing of ours: the
other user may not even be able to read our sources.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - imported now: later the files of Python may be out of reach
import http.client
import itertools
import json
import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TIMEOUT = 20.0
_SILENCE = 1.0
_MOST = 100_000
_SHARES = (socket.SO_REUSEADDR, socket.SO_REUSEPORT)


def request(host: str, port: int, method: str, path: str, headers: dict[str, str]) -> int | str:
    """Return the status of an answer, or the name of the error."""
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT)
    try:
        connection.request(method, path, body=b"{}" if method != "GET" else None, headers=headers)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


def speak(host: str, port: int, said: bytes) -> str:
    """Return what a port answers to these bytes: "refused", "closed", "silent", or the answer."""
    try:
        with socket.create_connection((host, port), timeout=_TIMEOUT) as connection:
            connection.sendall(said)
            connection.settimeout(_SILENCE)
            answer = connection.recv(4096)
    except TimeoutError:
        return "silent"
    except OSError:
        return "refused"
    return answer.decode("latin-1") if answer else "closed"


def listen(port: int) -> Iterator[int]:
    """Yield 0, or the number of the error, of each way to listen at a port of loopback."""
    hosts = ("127.0.0.1", "0.0.0.0", "::ffff:127.0.0.1", "::")
    for host, *options in itertools.product(hosts, (0, 1), (0, 1)):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as made:
            if ":" in host:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            for name, value in zip(_SHARES, options, strict=True):
                made.setsockopt(socket.SOL_SOCKET, name, value)
            try:
                made.bind((host, port))
                made.listen()
                yield 0
            except OSError as error:
                yield error.errno or -1


def open_files(root: str) -> Iterator[str]:
    """Yield everything below a folder that this user can read, list or write."""
    todo = [Path(root)]
    seen = 0
    while todo and seen < _MOST:
        path = todo.pop()
        seen += 1
        with contextlib.suppress(OSError):
            todo += [Path(entry.path) for entry in os.scandir(path)]
            yield f"list {path}"
        with contextlib.suppress(OSError), open(path, "rb"):
            yield f"read {path}"
        with contextlib.suppress(OSError), open(path, "ab"):
            yield f"write {path}"


def named_files(paths: list[str]) -> Iterator[str]:
    """Yield the files, whose names this user was told, that it can read or write."""
    for path in paths:
        for mode, does in (("rb", "read"), ("ab", "write")):
            with contextlib.suppress(OSError), open(path, mode):
                yield f"{does} {path}"


def as_nobody(**work: Any) -> dict[str, Any]:
    """Run this program as the user `nobody`; return what it got."""
    none = {"requests": [], "ports": [], "said": {}, "folders": [], "files": [], "listen": []}
    done = subprocess.run(
        [sys.executable, __file__, str(pwd.getpwnam("nobody").pw_uid)],
        input=json.dumps(none | work),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def main() -> None:
    user = int(sys.argv[1])
    work: dict[str, Any] = json.load(sys.stdin)
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    assert os.getuid() == os.geteuid() == user
    requests = [[*one, request(*one)] for one in work["requests"]]
    spoken = [
        [host, port, name, speak(host, port, bytes.fromhex(said))]
        for host, port in work["ports"]
        for name, said in work["said"].items()
    ]
    files = sorted({found for root in work["folders"] for found in open_files(root)})
    files += sorted(named_files(work["files"]))
    listened = [[port, *listen(port)] for port in work["listen"]]
    found = {"requests": requests, "spoken": spoken, "files": files, "listened": listened}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
