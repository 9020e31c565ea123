"""The check of a grammar's cost, in a process that alone may run out of time or memory.

Some schemas, such as a few dozen ``allOf`` patterns, take llguidance minutes and gigabytes before
it gives up, in a thread that cannot be stopped. Run as a script, this file reads a grammar in
llguidance's form, and exits with 0 unless a limit ends it. The script imports nothing of this
package, which would take longer than the check.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import resource
import sys
from collections import OrderedDict

CPU_SECONDS = 4  # processor time of a check; schemas of 100 KB take one or two seconds
_TIMEOUT = 30.0  # seconds of wall time, for a busy machine
_MAX_BYTES = 2 << 30
_MAX_CHECKS = 2
_MAX_WAITING = 32
_MAX_REMEMBERED = 256


class GrammarChecker:
    """Checks grammars, and remembers the harmless ones: agents send the same few repeatedly."""

    def __init__(self, seconds: int = CPU_SECONDS) -> None:
        self._seconds = seconds
        self._harmless: OrderedDict[bytes, None] = OrderedDict()
        self._places = asyncio.Semaphore(_MAX_CHECKS)
        self._waiting = 0

    async def require_harmless(self, grammar: str) -> None:
        """Raise InvalidRequest for a text that cannot be compiled at a bounded cost.

        The text may still be no grammar. Raises EngineUnavailable if too many checks wait.
        """
        digest = hashlib.blake2b(grammar.encode(), digest_size=16).digest()
        if digest not in self._harmless:
            await self._try(grammar)
            self._harmless[digest] = None
            if len(self._harmless) > _MAX_REMEMBERED:
                self._harmless.popitem(last=False)
        self._harmless.move_to_end(digest)

    async def _try(self, grammar: str) -> None:
        from any_agent.errors import EngineUnavailable, InvalidRequest

        if self._waiting >= _MAX_WAITING:
            raise EngineUnavailable("too many new grammars at once; try again", retry_after=2)
        self._waiting += 1
        try:
            async with self._places:
                survived = await self._survives(grammar)
        finally:
            self._waiting -= 1
        if not survived:
            raise InvalidRequest(
                f"not a grammar: it takes more than {self._seconds} s or "
                f"{_MAX_BYTES >> 30} GiB to compile; make it simpler",
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
    """Compile the grammar on standard input; a limit ends the process by a code or a signal."""
    seconds = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from llguidance import LLMatcher

    LLMatcher.validate_grammar(sys.stdin.read())


if __name__ == "__main__":
    main()
