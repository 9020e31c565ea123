"""Print what one request enters in a rank: files, functions, and the calls from file to file.

A rank runs in this process before a scripted engine. The second turn of a chat and a reward are
traced, each after one like it, so that no import and no first use counts.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PACKAGES = tuple(f"{ROOT / name}/" for name in ("any_agent", "proxy_ext"))


class Trace:
    """The product's functions that were called, and who called them."""

    def __init__(self) -> None:
        self.functions: Counter[tuple[str, str]] = Counter()
        """Calls by file and function."""
        self.moves: Counter[tuple[str, str]] = Counter()
        """Calls of one file's functions by another file's."""
        self._seen: set[FrameType] = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGES) or frame in self._seen:
            return
        # A coroutine is entered again after each wait.
        self._seen.add(frame)
        here = code.co_filename.removeprefix(f"{ROOT}/")
        self.functions[here, code.co_qualname] += 1
        back = frame.f_back
        if back is not None and back.f_code.co_filename.startswith(PACKAGES):
            there = back.f_code.co_filename.removeprefix(f"{ROOT}/")
            if there != here:
                self.moves[there, here] += 1

    async def of(self, request: Callable[[], Awaitable[Any]]) -> None:
        """Trace until the request is answered, on the event loop's thread."""
        sys.setprofile(self)
        try:
            await request()
        finally:
            sys.setprofile(None)

    def show(self, name: str, *, whole: bool) -> None:
        files = Counter(file for file, _ in self.functions)
        print(
            f"{name}: {len(files)} files, {len(self.functions)} functions, "
            f"{sum(self.functions.values())} calls, {sum(self.moves.values())} moves"
        )
        if not whole:
            return
        for file in sorted(files):
            names = [
                f"{n} x{c}" if c > 1 else n for (f, n), c in self.functions.items() if f == file
            ]
            into = sum(count for (_, to), count in self.moves.items() if to == file)
            print(f"  {file} ({into} moves): {', '.join(names)}")
        for (there, here), count in self.moves.most_common():
            print(f"  {count:3d}  {there} -> {here}")


async def main(whole: bool) -> None:
    from any_agent.chat import load_chat_format
    from any_agent.demo.models.tiny import save_tiny_model
    from tests.support.proxy import HELLO, config_for, running_proxy
    from tests.support.scripted_engine import ScriptedEngine

    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_model(Path(folder) / "model", seed=0)
        chat = load_chat_format(str(model))
        engine = ScriptedEngine()
        async with engine.serve():
            config = config_for(Path(folder), "server.admin_key=sk-trace-0123456789abcdef")
            async with running_proxy(config, chat, engine_url=engine.url) as proxy:
                await proxy.admit(10)
                # The second pair alone is shown.
                traces = [await pair(proxy, HELLO) for _ in range(2)][1]
    for name, trace in zip(("second turn of a chat", "reward"), traces, strict=True):
        trace.show(name, whole=whole)


async def pair(proxy: Any, hello: list[dict[str, Any]]) -> tuple[Trace, Trace]:
    """Trace the second turn of a session, and a reward for its first."""
    session = await proxy.open(task_id="t", group_size=1)
    key = session["api_key"]
    first = await proxy.complete(key)
    talk = [*hello, first["choices"][0]["message"], {"role": "user", "content": "Another."}]
    reward = {"reward": 1.0, "interaction_id": first["id"]}
    chat, rewarded = Trace(), Trace()
    await chat.of(lambda: proxy.call(key, talk))
    await rewarded.of(lambda: proxy.post("/rl/v1/set_reward", reward, key))
    return chat, rewarded


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--whole", action="store_true", help="name every file and function")
    asyncio.run(main(parser.parse_args().whole))
