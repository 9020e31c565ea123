"""A rank's sessions and archives over a journal on disk, without HTTP; and their export."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from any_agent.config import Config, load_config
from any_agent.types import SessionState
from proxy_ext.archive.archiver import Archiver
from proxy_ext.export.__main__ import main
from proxy_ext.journal import PutInteraction, PutSession, SetReward, SQLiteJournal
from proxy_ext.sessions.ids import SessionIds
from proxy_ext.sessions.session_store import SessionStore
from tests.support.journal import make_interaction, make_row
from tests.support.proxy import Proxy

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

CALLS = 3


@dataclass(eq=False)
class Rank:
    """One start of a rank."""

    folder: Path
    oldest_step: int | None = None
    keep_seconds: float = 0.0
    number: int = 0
    settings: tuple[str, ...] = ()

    async def start(self) -> Rank:
        self.journal = SQLiteJournal(self.folder / "journal" / f"rank-{self.number}.sqlite")
        config = load_config(None, self.settings, {}).sessions
        self.sessions = SessionStore(
            self.journal, config, SessionIds(self.number), rank=self.number
        )
        await self.sessions.recover(lease_ttl=60)
        self.archive = Archiver(
            self.sessions,
            self.folder / "archive",
            about={"experiment": "e", "trial": "t"},
            keep_seconds=self.keep_seconds,
            oldest_step=lambda: self.oldest_step,
        )
        await self.archive.recover()
        return self

    async def stop(self) -> None:
        await self.journal.close()

    async def add(
        self,
        id: str,
        state: SessionState = SessionState.ABORTED,
        *,
        step: int | None = None,
        text: str = "hi",
        **fields: Any,
    ) -> None:
        """An ended session of some calls, each of them rewarded."""
        fields |= {"ended_at": time.time() - 10, "final_reward": 2.0}
        row = make_row(id, state=state, step=step, **fields)
        calls = [
            replace(
                make_interaction(f"{id}-{k}", id, f"{id}-{k - 1}" if k else None),
                message_delta=[{"role": "user", "content": text}],
                reward=k / 8,
            )
            for k in range(CALLS)
        ]
        await self.journal.commit(
            PutSession(row),
            *(PutInteraction(call) for call in calls),
            *(SetReward(id, c.id, None, k / 8, "me", 5.0, k / 8) for k, c in enumerate(calls)),
        )

    async def add_turns(
        self,
        id: str,
        *turns: tuple[str, str | dict[str, Any]],
        reward: float | None = 0.0,
        state: SessionState = SessionState.TRAINED,
        call: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        """A session of turns, each a user's text and an answer; ``call``: fields of every call."""
        row = make_row(id, state=state, final_reward=reward, ended_at=time.time(), **fields)
        calls = []
        for k, (asked, said) in enumerate(turns or [("hi", f"ho {id}")]):
            answer = {"content": said} if isinstance(said, str) else said
            made = make_interaction(f"{id}-{k}", id, f"{id}-{k - 1}" if k else None)
            message = {"role": "assistant", **answer}
            texts = {
                "message_delta": [{"role": "user", "content": asked}],
                "output_message": message,
            }
            calls.append(PutInteraction(replace(made, **texts | (call or {}))))
        await self.journal.commit(PutSession(row), *calls)

    async def add_call(
        self,
        id: str,
        session_id: str,
        asked: list[dict[str, Any]],
        said: dict[str, Any],
        parent: str | None = None,
        **fields: Any,
    ) -> None:
        """One more call of a session, a root without a parent."""
        answer = {"role": "assistant", **said}
        made = make_interaction(id, session_id, parent)
        made = replace(made, message_delta=asked, output_message=answer, **fields)
        await self.journal.commit(PutInteraction(made))

    @property
    def files(self) -> list[str]:
        folder = self.folder / "archive"
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


class Exported:
    """What one run of `any-agent export` did."""

    def __init__(self, config: Config, *arguments: str, open_files: int | None = None) -> None:
        names = ("root", "user", "experiment", "trial")
        settings = [f"{name}={getattr(config, name)}" for name in names]
        command = [sys.executable, "-m", "any_agent.cli", "export", *settings, *arguments]
        if open_files is not None:
            # Of that process alone: this one has more of them open already.
            command = ["sh", "-c", f'ulimit -S -n {open_files}; exec "$@"', "sh", *command]
        done = subprocess.run(command, capture_output=True, timeout=60)
        self.code, self.said = done.returncode, done.stderr.decode()
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]

    @property
    def ids(self) -> list[str]:
        return [line["session"]["id"] for line in self.lines]


def settings_of(root: Path) -> list[str]:
    """Name the trial e/t of the user u."""
    return [f"root={root}", "user=u", "experiment=e", "trial=t"]


class ExportedHere(NamedTuple):
    code: int
    lines: list[dict[str, Any]]
    said: str

    @property
    def ids(self) -> list[str]:
        return [line.get("session_id") or line["session"]["id"] for line in self.lines]


def export_trial(root: Path, *arguments: str) -> ExportedHere:
    """Run the program in this process."""
    out = root / "exported.jsonl"
    out.unlink(missing_ok=True)
    named = () if "--out" in arguments else ("--out", str(out))
    with redirect_stderr(io.StringIO()) as said:
        try:
            code = main([*arguments, *named, *settings_of(root)])
        except SystemExit as error:
            code = int(error.code or 0)
    lines = out.read_text().splitlines() if out.exists() else []
    return ExportedHere(code, list(map(json.loads, lines)), said.getvalue())


async def archive_now(proxy: Proxy) -> int:
    """A sweep over all that has ended, however lately."""
    archive = proxy.service.archive
    archive.keep_seconds = 0.0
    return await archive.sweep()
