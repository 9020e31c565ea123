"""Tries a grammar in a process of its own, where it may run out of time or memory alone.

Some schemas, a few dozen ``allOf`` patterns say, take llguidance minutes and gigabytes before it
gives up, in a thread that nobody can stop. Run as a script: it reads llguidance's form of a grammar
and ends well, or is ended. As such it imports nothing of this package, which would take longer
than the check.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import resource
import sys
from collections import OrderedDict

SECONDS = 4
"""Of the processor; schemas of 100 KB take one or two."""
_TIMEOUT = 30.0
"""Seconds on the clock, on a machine that is busy."""
_MEMORY = 2 << 30
_AT_ONCE = 2
_MAX_WAITING = 32
_REMEMBERED = 256


class GrammarChecker:
    """Remembers which grammars are harmless: agents send the same few again and again."""

    def __init__(self, seconds: int = SECONDS) -> None:
        self._seconds = seconds
        self._harmless: OrderedDict[bytes, None] = OrderedDict()
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._waiting = 0

    async def require_harmless(self, grammar: str) -> None:
        """That it can be compiled at a bounded cost, else InvalidRequest; not that it is a grammar.

        EngineUnavailable if too many wait for this.
        """
        digest = hashlib.blake2b(grammar.encode(), digest_size=16).digest()
        if digest not in self._harmless:
            await self._try(grammar)
            self._harmless[digest] = None
            if len(self._harmless) > _REMEMBERED:
                self._harmless.popitem(last=False)
        self._harmless.move_to_end(digest)

    async def _try(self, grammar: str) -> None:
        from any_agent.errors import EngineUnavailable, InvalidRequest

        if self._waiting >= _MAX_WAITING:
            raise EngineUnavailable("too many new grammars at once", retry_after=2)
        self._waiting += 1
        try:
            async with self._places:
                survived = await self._survives(grammar)
        finally:
            self._waiting -= 1
        if not survived:
            raise InvalidRequest(
                f"not a grammar: it takes more than {self._seconds} s or "
                f"{_MEMORY >> 30} GiB to compile; make it simpler",
                param="grammar",
            )

    async def _survives(self, grammar: str) -> bool:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", __file__, str(self._seconds)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(_TIMEOUT):
                await process.communicate(grammar.encode())
        except TimeoutError:
            return False
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        return process.returncode == 0


def main() -> None:
    """Ends with another code than 0, or by a signal, if the limits were too narrow."""
    seconds = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from llguidance import LLMatcher

    LLMatcher.validate_grammar(sys.stdin.read())


if __name__ == "__main__":
    main()
