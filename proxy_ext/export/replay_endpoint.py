"""`any-agent replay --url`: recorded calls, answered by another service, answer by answer."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections import Counter, deque
from collections.abc import AsyncGenerator, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from any_agent.config import Config
from any_agent.errors import AnyAgentError, Unprocessable
from any_agent.inference.text_codec import words_of
from any_agent.record import InteractionTree, is_frozen, lacks_texts
from any_agent.runtime.command_line import printable
from any_agent.types import Interaction
from proxy_ext.archive.records import ArchiveRecord
from proxy_ext.export.answered_call import (
    AnsweredCall,
    Spelling,
    Sums,
    compare,
    compare_logprobs,
    unanswered,
    why_not,
)
from proxy_ext.export.comparison import not_comparable, sampling_of, shown_message
from proxy_ext.export.endpoint import KEY_FROM, CallFailed, Endpoint
from proxy_ext.export.forced_logprobs import Progress
from proxy_ext.export.recorded_request import request_body


class EndpointReplay:
    """One replay of sessions at a service."""

    def __init__(self, arguments: argparse.Namespace, config: Config) -> None:
        self._arguments = arguments
        self._endpoint = Endpoint(
            arguments.url,
            os.environ.get(KEY_FROM),
            seconds=arguments.timeout or 120.0,
            at_once=arguments.concurrency or 8,
        )
        # Each of them may have but one call.
        self._ahead = arguments.concurrency or 8
        self._say = Progress()
        self._spelling, self._no_spelling = _spelling_of(config)
        self.sums = Sums()
        self.problems: Counter[str] = Counter()
        """The calls and sessions that were not sent, by the reason."""

    def report(self, problem: str) -> None:
        """Count and print a session that cannot be read."""
        self.problems["sessions that cannot be read"] += 1
        print(printable(problem), file=sys.stderr)

    def run(self, records: Generator[ArchiveRecord], *, whole: bool) -> int:
        """Ask for answers to all calls, print the comparison, and return the exit code.

        ``whole``: show every answer, else the calls that differ.
        """
        if not self._arguments.json:
            model = self._arguments.other
            print(f"against   {self._endpoint.url}, model {model or 'as recorded'}")
        asyncio.run(self._run(records, whole))
        if not self.sums.calls:
            print("error: there is no call to compare", file=sys.stderr)
        if self._arguments.json:
            print(json.dumps(self._figures()))
        elif self.sums.calls:
            print("\n".join(self._shown_sums()))
        failed = self.problems.total() + self._endpoint.failures.total()
        return 0 if self.sums.answered and not failed else 1

    async def _run(self, records: Generator[ArchiveRecord], whole: bool) -> None:
        async with self._endpoint, aclosing(self._results(records)) as results:
            async for session, calls in results:
                self.sums.sessions += 1
                for call in calls:
                    self.sums.add(call)
                if self._arguments.json:
                    about = {"session_id": session["id"], "state": session["state"]}
                    print(json.dumps({**about, "calls": [call.as_json() for call in calls]}))
                    continue
                for call in calls:
                    lines = _shown_whole(call) if whole else _shown_short(session["id"], call)
                    for line in lines:
                        print(line)

    async def _results(
        self, records: Generator[ArchiveRecord]
    ) -> AsyncGenerator[tuple[Any, list[AnsweredCall]]]:
        """Yield each session with its calls, in order; few are in memory at once."""
        waiting: deque[asyncio.Task[tuple[Any, list[AnsweredCall]]]] = deque()
        try:
            async with aclosing(_read(records)) as found:
                async for record in found:
                    tree = self._tree(record)
                    if tree is None:
                        continue
                    waiting.append(asyncio.create_task(self._session(record, tree)))
                    if len(waiting) >= self._ahead:
                        yield await waiting.popleft()
            while waiting:
                yield await waiting.popleft()
        finally:
            for task in waiting:
                task.cancel()

    def _tree(self, record: ArchiveRecord) -> InteractionTree | None:
        """Return a session's calls of the policy; None, with a word, where they cannot be sent."""
        calls = [call for call in record.interactions if not is_frozen(call)]
        if any(map(lacks_texts, calls)):
            self.problems["sessions whose texts were not kept (sessions.store_content)"] += 1
            id = record.session["id"]
            print(
                f"session {id} is left out: its texts were not kept (sessions.store_content)",
                file=sys.stderr,
            )
            return None
        return InteractionTree.from_interactions(calls) if calls else None

    async def _session(
        self, record: ArchiveRecord, tree: InteractionTree
    ) -> tuple[Any, list[AnsweredCall]]:
        calls = [unanswered(tree, node, number) for number, node in enumerate(tree, 1)]
        async with asyncio.TaskGroup() as tasks:
            for call in calls:
                tasks.create_task(self._call(tree, tree[call.interaction_id], call))
        return record.session, calls

    async def _call(self, tree: InteractionTree, node: Interaction, call: AnsweredCall) -> None:
        gconfig, model = sampling_of(node.gconfig, self._arguments), self._arguments.other
        if (adapter := node.request.get("adapter")) is not None:
            call.problem = not_comparable(adapter)
            self.problems["calls that an adapter sampled"] += 1
            return
        try:
            answer = await self._endpoint.ask(lambda: request_body(tree, node, gconfig, model))
        except Unprocessable as error:
            self.problems[error.message] += 1
            call.problem = error.message
        except CallFailed as error:
            call.problem = str(error)
        else:
            compare(call, answer)
            call.not_compared = why_not(node, gconfig, call, answer) or self._no_spelling
            if call.not_compared is None:
                assert answer.tokens is not None and self._spelling is not None
                compare_logprobs(call, node, answer.tokens, self._spelling)
        failed = self._endpoint.failures.total()
        self._say(f"{self._endpoint.answered} calls answered, {failed} failed")

    # -- the report

    def _figures(self) -> dict[str, Any]:
        said = self._endpoint.said
        failed = {
            kind: {"calls": count, "said": said[kind]}
            for kind, count in self._endpoint.failures.items()
        }
        against = {"url": self._endpoint.url, "model": self._arguments.other}
        sums = {"all": asdict(self.sums), "failed": failed, "left_out": dict(self.problems)}
        return {"against": against, **sums}

    def _shown_sums(self) -> Iterator[str]:
        sums = self.sums
        yield ""
        yield (
            f"all       {sums.sessions} sessions, {sums.calls} calls, {sums.answered} answered: "
            f"{sums.same} the same; text equal {sums.text_equal}, tool calls equal "
            f"{sums.calls_equal}, finish reason equal {sums.finish_reason_equal}; "
            f"{sums.output_tokens} tokens, recorded {sums.recorded_output_tokens}"
        )
        if sums.compared_calls:
            yield (
                f"logprobs  {sums.compared_calls} calls, {sums.compared_tokens} tokens: a token "
                f"differs by {sums.difference_mean:.2g} nats on average, by "
                f"{sums.difference_max:.2g} at most"
            )
        for why, count in sums.not_compared.items():
            yield f"logprobs  not compared in {count} calls: {why}"
        for kind, count in self._endpoint.failures.most_common():
            said = self._endpoint.said[kind]
            why = f"{kind} ({said})" if said else kind
            yield f"failed    {count} calls at {self._endpoint.url}: {why}"
        for why, count in self.problems.most_common():
            yield f"left out  {count}: {why}"


def _spelling_of(config: Config) -> tuple[Spelling | None, str | None]:
    """Return how the recorded model spells its tokens, or why that is not known."""
    if not config.model.path:
        return None, "the recorded model's tokens are not known: the trial names no model.path"
    try:
        chat = words_of(None, Path(config.model.path), config.model).chat
    except AnyAgentError as error:
        return None, f"the recorded model's tokens are not known: {error.message}"
    return (lambda id: (chat.token_bytes(id), chat.token_text(id))), None


async def _read(records: Generator[ArchiveRecord]) -> AsyncGenerator[ArchiveRecord]:
    """Iterate in one other thread: reading waits for disks, and answers must not wait for it."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as thread:
        try:
            while (found := await loop.run_in_executor(thread, next, records, None)) is not None:
                yield found
        finally:
            await loop.run_in_executor(thread, records.close)


# -- the report of a call --------------------------------------------------------------------------


def _shown_short(session_id: str, call: AnsweredCall) -> Iterator[str]:
    said = call.differences() or (f"no answer: {call.problem}" if call.problem else "")
    if said:
        yield f"{session_id} call {call.number}  {printable(said)}"


def _shown_whole(call: AnsweredCall) -> Iterator[str]:
    def tokens(now: int | None, recorded: int, what: str) -> str:
        return f"{'?' if now is None else now} {what} ({recorded} recorded)"

    yield ""
    if call.problem is not None:
        yield f"call {call.number:<4} {call.interaction_id}: no answer: {printable(call.problem)}"
        return
    yield (
        f"call {call.number:<4} {call.interaction_id}: "
        f"{tokens(call.prompt_tokens, call.recorded_prompt_tokens, 'prompt tokens')}, "
        f"{tokens(call.output_tokens, call.recorded_output_tokens, 'sampled')}"
    )
    if (found := call.comparison) is not None:
        yield (
            f"logprobs  {call.compared_tokens} tokens: mean {found.mean:.4f} nats, recorded "
            f"{found.recorded_mean:.4f}; a token differs by {found.difference_mean:.2g} on "
            f"average, by {found.difference_max:.2g} at most (token {found.difference_max_at + 1})"
        )
    else:
        yield f"logprobs  not compared: {call.not_compared}"
    yield from shown_message("recorded", call.recorded)
    if call.same:
        yield "now       the same"
    elif call.answer is not None:
        yield from shown_message("now", call.answer)
        yield f"          {call.differences()}"
