"""Stand-ins for the parts of a node: they listen, register, and tell what happens to them.

Children import them instead of the real packages, because they lie in the working directory.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from any_agent.config import Config, load_config
from any_agent.launcher import Node, NodeOptions
from tests.support.launcher.children import until

_SOURCE = """
import contextlib, http.server, json, os, signal, socket, sys, threading, time

HOME = os.path.dirname(os.path.abspath(__file__))
ENDING = False


def flag(name):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else None


def tell(what, **more):
    line = json.dumps({"part": NAME, "what": what, "pid": os.getpid(), **more})
    with open(os.path.join(HOME, "events"), "a") as file:
        file.write(line + "\\n")


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def listen():
    class Server(http.server.ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in flag("--host") else socket.AF_INET
        allow_reuse_port = True  # the launcher keeps the port

    inherited = flag("--listener")
    server = Server((flag("--host"), int(flag("--port"))), Handler, bind_and_activate=not inherited)
    if inherited:
        server.socket = socket.socket(fileno=int(inherited))
    threading.Thread(target=server.serve_forever, daemon=True).start()


def entry(form="%s.json"):
    return os.path.join(os.path.dirname(flag("--config")), "registry", form % NAME)


def register():
    told = {"name": NAME, "boot_id": "b", "url": "http://unused", "pid": os.getpid()}
    with contextlib.suppress(FileNotFoundError):
        told |= json.load(open(os.path.join(HOME, NAME + ".entry")))
    with open(entry(".new-%s"), "w") as file:
        json.dump(told, file)
    os.replace(entry(".new-%s"), entry())


def end(code):
    global ENDING
    # A second signal may come while it tells of the first.
    if not ENDING:
        ENDING = True
        tell("ends", code=code)
        os._exit(code)


def drain():
    if os.path.exists(os.path.join(HOME, NAME + ".busy")):
        tell("drains")
    else:
        end(143)


def main(kind):
    global NAME
    NAME = kind if flag("--rank") is None else "rank-" + flag("--rank")
    signal.signal(signal.SIGTERM, lambda *_: drain())
    signal.signal(signal.SIGINT, lambda *_: end(130))
    signal.signal(signal.SIGUSR1, lambda *_: end(0))
    variables = sorted(name for name in os.environ if name.startswith("ANY_AGENT_"))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    tell("starts", argv=sys.argv[1:], variables=variables, gpus=gpus)
    bad = os.path.join(HOME, NAME + ".exit")
    if os.path.exists(bad):
        print("these are the last words of", NAME, flush=True)
        sys.exit(int(open(bad).read()))
    if kind != "trainer":
        listen()
    if kind == "engine":
        while True:
            signal.pause()
    register()
    while True:
        time.sleep(0.2)
        if os.path.exists(os.path.join(HOME, NAME + ".entry")):
            register()
        with contextlib.suppress(FileNotFoundError):
            os.utime(entry())
"""


class Lab:
    """A folder with stand-ins, a configuration, and what the stand-ins told."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.said: list[str] = []
        (home / "model").mkdir()
        (home / "model" / "config.json").write_text("{}")
        (home / "standin.py").write_text(_SOURCE)
        engine = home / "any_agent" / "engine" / "embedded.py"
        engine.parent.mkdir(parents=True)
        for folder in (engine.parent, engine.parent.parent):
            (folder / "__init__.py").touch()
        calls = {"proxy_ext.py": "rank", "router.py": "router", "trainer.py": "trainer"}
        for name, kind in calls.items():
            (home / name).write_text(f"import standin\nstandin.main({kind!r})\n")
        engine.write_text(f"import sys\nsys.path.insert(0, {str(home)!r})\n")
        with engine.open("a") as file:
            file.write("import standin\nstandin.main('engine')\n")

    def config(self, *settings: str) -> Config:
        own = [f"root={self.home / 'runs'}", f"model.path={self.home / 'model'}", "server.port=0"]
        return load_config(None, [*own, *settings], environ={})

    @contextmanager
    def node(self, *settings: str, **options: Any) -> Iterator[Node]:
        """A running one, of which nothing is left afterwards."""
        options = {"say": self.said.append, **options}
        with Node(self.config(*settings), NodeOptions(**options)) as node:
            yield node

    def events(self, what: str) -> list[dict[str, Any]]:
        path = self.home / "events"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["what"] == what]

    def names(self, what: str) -> list[str]:
        return [event["part"] for event in self.events(what)]

    def start_of(self, node: Node, name: str) -> dict[str, Any]:
        """How the part's present process was started."""
        pid = node.parts[name].pid
        (event,) = [event for event in self.events("starts") if event["pid"] == pid]
        return event

    def keep_busy(self, name: str) -> None:
        """Have the part do something that does not end, at SIGTERM neither."""
        (self.home / f"{name}.busy").touch()

    def enter(self, name: str, **fields: Any) -> None:
        """Have the part write these fields of its registry entry from now on."""
        path = self.home / f"{name}.entry"
        path.with_suffix(".new").write_text(json.dumps(fields))
        path.with_suffix(".new").replace(path)

    def refuse(self, name: str, code: int) -> None:
        """Have the part's next start end so."""
        (self.home / f"{name}.exit").write_text(str(code))


def flag(event: dict[str, Any], name: str) -> str:
    """What follows an option in a start's arguments."""
    argv: list[str] = event["argv"]
    return argv[argv.index(name) + 1]


def kill_and_wait(node: Node, name: str) -> None:
    """SIGKILL, and checks until it is ready again."""
    part = node.parts[name]
    restarts = part.restarts
    os.kill(part.pid, signal.SIGKILL)
    checked_until(node, lambda: part.restarts > restarts and part.state == "ready")


def checked_until(node: Node, condition: Callable[[], Any]) -> None:
    def met() -> bool:
        node.check()
        return bool(condition())

    until(met)
