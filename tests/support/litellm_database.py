"""A stand-in for LiteLLM's client of its database, which needs engines that no registry has.

It has the keys of the file ``TEST_KEYS``, by their hashes, and writes each row of LiteLLM's log of
spending to ``TEST_SPENDING``. LiteLLM's own code asks it, and decides. A configuration names it as
a callback: ``litellm_database.log``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from litellm.integrations.custom_logger import CustomLogger
from litellm.proxy import proxy_server
from litellm.proxy._types import LiteLLM_VerificationTokenView

_PACKAGE = ("prisma", "prisma.errors", "prisma.engine", "prisma.engine.errors")


def _key(token: str) -> Any:
    row = json.loads(Path(os.environ["TEST_KEYS"]).read_text()).get(token)
    return None if row is None else LiteLLM_VerificationTokenView(token=token, **row)


class _Table:
    """A table of which only keys are known."""

    async def find_unique(self, where: dict[str, Any], **_: Any) -> Any:
        return _key(where["token"]) if "token" in where else None

    find_first = find_unique


class _Tables:
    def __getattr__(self, name: str) -> _Table:
        return _Table()

    async def stop_token_refresh_task(self) -> None:
        pass


class _Rows(list[Any]):
    """Rows that wait to be written; they are at once."""

    def __setitem__(self, where: Any, rows: Any) -> None:
        with open(os.environ["TEST_SPENDING"], "a") as file:
            file.writelines(json.dumps(row, default=str) + "\n" for row in rows)


class Database:
    """See the module."""

    def __init__(self) -> None:
        self.db = _Tables()
        self.spend_log_transactions = _Rows()
        self.spend_logs_queue_monitor_task = None
        self._spend_log_transactions_lock = asyncio.Lock()

    async def disconnect(self) -> None:
        pass

    async def get_data(self, token: str, table_name: str, **_: Any) -> Any:
        assert table_name == "combined_view"
        return _key(token)


async def _connect() -> None:
    """Become LiteLLM's database, once it has started; the process of callbacks serves nothing."""
    for _ in range(1200):
        if proxy_server.user_custom_auth is not None:
            # LiteLLM asks whether an error is one of this package's.
            sys.modules.update(dict.fromkeys(_PACKAGE, MagicMock()))
            proxy_server.prisma_client = Database()  # type: ignore[assignment]
            proxy_server.cost_tracking()
            return
        await asyncio.sleep(0.1)


log = CustomLogger()
_connecting = asyncio.get_running_loop().create_task(_connect())
