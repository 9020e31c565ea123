"""A scripted engine whose model adds: with a tool if it has one, and wrong every second time."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from any_agent.chat import ChatFormat, load_chat_format
from tests.support.in_thread import served_in_thread
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_run import Fault, Running

_LIMIT = 60.0
_CONTEXT = 16384


class Calculator(ScriptedEngine):
    """What it says follows from the prompt, so it may be asked by any number of agents at once.

    Asked "What is 2 and 3?" it calls ``add`` if it is told of that tool; else, and when it has the
    tool's result, it says 5 and 6 in turn. So a group of two has one right and one wrong answer.
    """

    def __init__(self, chat: ChatFormat) -> None:
        super().__init__(decode=chat.decode, context_length=_CONTEXT)
        self.told = {"max_req_input_len": _CONTEXT - 6}
        self._chat = chat
        self._asked: Counter[str] = Counter()

    def _begin(self, body: dict[str, Any], fault: Fault | None) -> Running:
        text = self._said(self.decode(body["input_ids"]))
        if text is not None:
            ids = self._chat.tokenizer.encode(text, add_special_tokens=False)
            self.say([*ids, self._chat.stop_token_ids[0]])
        return super()._begin(body, fault)

    def _said(self, prompt: str) -> str | None:
        asked = re.findall(r"(\d+) and (\d+)", prompt)
        if not asked:
            # A rank's start: does it know the model's ids?
            return None
        (a, b) = asked[-1]
        if "<tools>" in prompt and "<tool_response>" not in prompt:
            arguments = f'{{"a": {a}, "b": {b}}}'
            return f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
        self._asked[f"{a} and {b}"] += 1
        wrong = 1 - self._asked[f"{a} and {b}"] % 2
        return str(int(a) + int(b) + wrong)


@contextlib.contextmanager
def calculator(model: Path) -> Iterator[Calculator]:
    """It serves in a thread."""
    engine = Calculator(load_chat_format(str(model), enable_thinking=False))
    with served_in_thread(engine, within=_LIMIT):
        yield engine
