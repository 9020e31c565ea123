"""The cost of a service for many: ``python benchmarks/cloud.py``.

First many accounts, each with an idle run: the memory and the start that they cost, and how long a
look at one takes. Then calls of 2 KB with answers of 2 KB of one account's session, through the
cloud to its run, and through the obvious proxy (aiohttp on both sides, a client session for each
request, the key checked alike). Counted is the CPU time of the process in between alone.

The calls of a real run go through its own router, too: `benchmarks/router.py` has that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop
import yaml
from common import child, cpu_seconds, finish, machine, median, parser, ratio, resident_mib
from common import wait_until_up as wait
from wire import Connection, connections, request

SIZE = 2048
CONCURRENT = 32
_PEERS = Path(__file__).with_name("peers")
_ADMIN = "the-key-of-this-benchmark"


def ask(url: str, key: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)


class Lab:
    def __init__(self, root: Path, stack: ExitStack) -> None:
        self._root = root
        self._stack = stack

    def cloud(self, name: str, accounts: int) -> tuple[str, int, float]:
        """Start a cloud with so many accounts; return its URL, its process, and the seconds."""
        from any_agent.runtime.ports import free_port

        root, port = self._root / name, free_port("127.0.0.1")
        program = str(_PEERS / "cloud.py")
        subprocess.run([sys.executable, program, "--fill", str(root), str(accounts)], check=True)
        settings = {
            "root": str(root),
            "server": {"port": port},
            "models": {"tiny": {"model.path": str(self._root)}},
            "presets": {"grpo": {}},
            "default": {"model": "tiny", "preset": "grpo"},
        }
        path = self._root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(settings))
        environ = {"ANY_AGENT_SERVER__ADMIN_KEY": _ADMIN}
        environ["PYTHONPATH"] = os.pathsep.join((str(_PEERS), os.environ.get("PYTHONPATH", "")))
        began, url, log = time.monotonic(), f"http://127.0.0.1:{port}", self._root / f"{name}.log"
        command = [program, "--config", str(path)]
        process = self._stack.enter_context(child(command, log, environ))
        wait(process, f"{url}/healthz", log)
        return url, process.pid, time.monotonic() - began

    def obvious(self, url: str, run: Path) -> tuple[str, int]:
        """Start the obvious proxy before a run's ranks."""
        from any_agent.runtime.ports import free_port

        port, log = free_port("127.0.0.1"), self._root / "obvious.log"
        command = [str(_PEERS / "obvious.py"), "--run-dir", str(run)]
        command += ["--ranks", url, "--port", str(port)]
        process = self._stack.enter_context(child(command, log))
        wait(process, f"http://127.0.0.1:{port}/healthz", log)
        return f"http://127.0.0.1:{port}", process.pid


def idle(lab: Lab, accounts: int) -> None:
    """Print what idle accounts cost."""
    _, few_pid, few_seconds = lab.cloud("few", 1)
    many, many_pid, many_seconds = lab.cloud("many", accounts)
    key = ask(f"{many}/rl/v1/accounts", _ADMIN, {"name": "alice"})["api_key"]
    run = ask(f"{many}/rl/v1/runs", key, {"experiment": "exp"})
    looks = []
    for _ in range(100):
        began = time.perf_counter()
        ask(f"{many}/rl/v1/runs/{run['id']}", key)
        looks.append(time.perf_counter() - began)
    before = cpu_seconds(many_pid)
    time.sleep(3)
    busy = (cpu_seconds(many_pid) - before) / 3
    more = (resident_mib(many_pid) - resident_mib(few_pid)) / accounts * 1024
    print(
        f"{accounts} accounts, each with an idle run: {more:.1f} KiB of memory each, "
        f"{(many_seconds - few_seconds) / accounts * 1e6:.0f} us of the start each; "
        f"a look at a run takes {median(looks) * 1e3:.1f} ms; {busy * 100:.2f} % of a core\n"
    )


def calls(lab: Lab, requests: int, rounds: int) -> None:
    """Print the CPU of a call through the cloud, and through the obvious proxy."""
    from any_agent.auth.access import signer_of
    from any_agent.rundir.layout import RunDir

    url, pid, _ = lab.cloud("calls", 1)
    key = ask(f"{url}/rl/v1/accounts", _ADMIN, {"name": "alice"})["api_key"]
    run = ask(f"{url}/rl/v1/runs", key, {"experiment": "exp"})
    ask(f"{url}/rl/v1/start_session", key, {})
    folder = RunDir.of(lab._root / "calls", "alice", "exp", "trial-1")
    ranks = yaml.safe_load((lab._root / "calls" / ".cloud" / f"{run['id']}.yaml").read_text())
    behind = f"http://127.0.0.1:{ranks['server']['port']}"
    signer = signer_of(folder, run["id"])
    contenders = {"any-agent": (url, pid), "obvious": lab.obvious(behind, folder.path)}
    us: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, (to, process) in contenders.items():
            keys = [signer.mint(0)[1] for _ in range(CONCURRENT)]
            before = cpu_seconds(process)
            uvloop.run(load(to, keys, requests))
            if number:
                us[name].append((cpu_seconds(process) - before) / requests * 1e6)
    for name, figures in us.items():
        print(f"{name:<12}{median(figures):>8.1f} us of CPU a call")
    ratio("call / obvious", median(us["any-agent"]), median(us["obvious"]))
    print(f"obvious, x any-agent: {median(us['obvious']) / median(us['any-agent']):.1f}")


async def load(url: str, keys: list[str], count: int) -> None:
    """Make so many calls, as many at once as there are keys; RuntimeError for one that failed."""
    todo = iter(range(count))
    async with connections([url], len(keys)) as opened:

        async def work(connection: Connection, key: str) -> None:
            data = request(key, SIZE)
            for _ in todo:
                answer = await connection.call(data)
                if answer.status != 200 or not answer.complete:
                    raise RuntimeError(f"{url} answered {answer}")

        await asyncio.gather(*map(work, opened, keys))


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--accounts", type=int, default=10_000)
    flags.add_argument("--requests", type=int, default=4000)
    flags.add_argument("--rounds", type=int, default=5)
    args: argparse.Namespace = flags.parse_args()
    if args.quick:
        args.requests, args.rounds = 1000, 2
    if args.smoke:
        args.accounts, args.requests, args.rounds = 50, 64, 1
    print(f"{machine()}\n", flush=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        lab = Lab(Path(folder), stack)
        idle(lab, args.accounts)
        calls(lab, args.requests, args.rounds)
    finish(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
