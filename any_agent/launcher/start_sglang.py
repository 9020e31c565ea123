"""The start of SGLang at a port that the launcher keeps: ``python FILE MODULE ARGUMENTS``.

SGLang's own interpreter runs this file, so that it imports nothing of ours. SGLang binds its port
by itself, with SO_REUSEADDR alone; :func:`any_agent.runtime.ports.keep` says what it needs.
"""

import os
import runpy
import socket
import sys
from typing import Any

_set_option = socket.socket.setsockopt


def _set_shared(made: socket.socket, level: int, option: int, *value: Any) -> None:
    """Set an option of a socket, and SO_REUSEPORT where a server sets SO_REUSEADDR."""
    _set_option(made, level, option, *value)
    server = (level, option) == (socket.SOL_SOCKET, socket.SO_REUSEADDR)
    if server and made.family in (socket.AF_INET, socket.AF_INET6):
        _set_option(made, socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()  # as for `python -m`
    socket.socket.setsockopt = _set_shared  # type: ignore[method-assign, assignment]
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
