"""Archives a batch and dies at a boundary: `python -m tests.support.archive_killed DIR WHERE`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from proxy_ext.archive.files import ArchiveWriter
from proxy_ext.journal import ArchiveContent, PutMeta
from tests.support.archives import Rank


def die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


async def main(folder: Path, where: str) -> None:
    rank = await Rank(folder, oldest_step=99).start()
    commit, finish, add = rank.journal.commit, ArchiveWriter.finish, ArchiveWriter.add
    if where == "writing":
        ArchiveWriter.add = lambda *args: (add(*args), die())[1]  # type: ignore[method-assign]
    elif where == "unnamed":
        ArchiveWriter.finish = die  # type: ignore[method-assign,assignment]
    elif where == "named":
        ArchiveWriter.finish = lambda self: (finish(self), die())[1]  # type: ignore[method-assign]

    async def committed(*statements: Any) -> None:
        archives = any(isinstance(s, ArchiveContent) for s in statements)
        intends = not archives and any(isinstance(s, PutMeta) for s in statements)
        if where == "before the transaction" and archives:
            die()
        await commit(*statements)
        if (where == "after the transaction" and archives) or (where == "intended" and intends):
            die()

    rank.journal.commit = committed  # type: ignore[method-assign]
    while await rank.archive.sweep():
        pass
    raise SystemExit(f"nothing was done at {where!r}")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
