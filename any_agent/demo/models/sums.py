"""A tiny model that adds two digits, and gets about every second sum wrong.

It answers directly, with a tool named ``add`` (``a`` and ``b``), after thinking aloud, and again
after negative feedback. It learns from many wordings, system prompts and other tools, so that each
framework may ask in its own way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from any_agent.chat import load_chat_format
from any_agent.demo.models.teach import Author, Conversation, Report, Row, quiet, teach
from any_agent.demo.models.tiny import CHAT_TEMPLATE, make_tokenizer, save_tiny_model
from any_agent.types import Message

LARGEST = 4  # the largest number that it adds
STEPS = 200
_VOCAB_SIZE = 1024
_CONTEXT = 16384  # the context in tokens: some frameworks send long prompts
_BATCH = (18, 12, 6)  # number of a step's conversations: plain, with a tool, thinking aloud
_POOL = 20
"""The size of the pool from which each step's conversations are drawn, as a multiple of them."""
_RIGHT = 0.7  # share of the steps whose answers are all right

THINK = "Think first. End with: So the answer is ..."
"""The system prompt after which the model thinks aloud before it answers."""
CONCLUDES = "So the answer is "  # the text between its thoughts and its answer

_WORDINGS = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "What do {a} and {b} add up to?",
    "What is {a} and {b}?",
    "Add {a} and {b}.",
    "Compute {a} + {b}.",
    "{a} + {b} = ?",
    "{a} + {b}",
    "How much is {a} + {b}?",
    "What is the sum of {a} and {b}?",
    "Please add {a} and {b} for me.",
    "What is {a} + {b}? Answer with the number alone.",
)
_FEEDBACK = (
    "That is wrong. Try again.",
    "Not correct, try again.",
    "Your answer is wrong: look at the question once more.",
    "That is not the right answer, or it could not be read. Answer again.",
)
_SYSTEMS = (
    "You are a helpful assistant.",
    "You add numbers.",
    "Use your tools.",
    "You are a calculator. Answer with the number alone.",
    "You are an agent with tools. Use them to answer the question, and answer with one number.",
)
_WORDS = (
    "the of and to in you that it is for on with as are be at this have from or one by not what "
    "all when we there can your which their if will each about how up out them then these so some "
    "would make like into time has look two more write go see number no way could people my than "
    "call who am its now find long down day did get come made may part answer tool assistant user "
    "question task step result always never must use code model please help given"
)
_THOUGHTS = ("Hm. ", "Well. ", "Let me see. ", "One more time. ")
_ABOUT_TOOLS = "".join(re.findall(r"'(.*?)'", CHAT_TEMPLATE)).replace(r"\n", "\n")
_ADDS = ("add", "add", "mcp__calculator__add")  # names of the tool, the usual one most often
_OTHERS = ("multiply", "subtract", "divide", "search", "read_file", "run")


def texts() -> Iterator[str]:
    """Yield the texts on which the tokenizer is trained."""
    rng = Random(0)
    for _ in range(400):
        yield f"system\n{_system(rng)}"
        yield "\n".join(json.dumps(tool) for tool in _tools(rng, rng.choice(_ADDS)))
        yield _ABOUT_TOOLS
        yield f"user\n{_question(rng, *_pair(rng))}"
        yield f"assistant\n{_call(rng.choice(_ADDS), *_pair(rng))}"
        yield f"user\n{rng.choice(_FEEDBACK)}"
        yield f"assistant\n{_thoughts(rng)}{CONCLUDES}"
        yield from _results(rng.randrange(2 * LARGEST + 1))


def make_sums_model(
    path: Path, seed: int = 0, *, steps: int = STEPS, report: Report = quiet
) -> Path:
    """Write the model in Hugging Face's layout; it takes a minute of one core."""
    report("making its tokenizer")
    tokenizer = make_tokenizer(texts(), vocab_size=_VOCAB_SIZE, phrases=True)
    report("making its weights")
    save_tiny_model(path, seed, tokenizer=tokenizer, context=_CONTEXT)
    # Prompts with and without an empty block of thoughts before the answer.
    formats = [load_chat_format(str(path), enable_thinking=thinks) for thinks in (False, None)]
    authors = [Author(chat) for chat in formats]
    rng = Random(seed)
    kinds = tuple(zip((plain_talk, tool_talk, thinking_talk), _BATCH, strict=True))

    def row(talk: Callable[[Author, Random, float], Conversation], noise: float) -> Row:
        report("writing conversations to learn from")
        return talk(rng.choice(authors), rng, noise).row

    def written(noise: float) -> list[tuple[list[Row], int]]:
        return [([row(talk, noise) for _ in range(_POOL * size)], size) for talk, size in kinds]

    # First the model learns right answers, then the share of wrong ones.
    right, noisy = written(0.0), written(1.0)

    def batch(progress: float) -> list[Row]:
        pools = noisy if progress >= _RIGHT else right
        return [row for rows, size in pools for row in rng.choices(rows, k=size)]

    teach(path, batch, steps=steps, seed=seed, report=report)
    return path


# -- conversations --------------------------------------------------------------------------------


def plain_talk(author: Author, rng: Random, noise: float) -> Conversation:
    """Return a conversation with an answer, and a second answer after a wrong one."""
    a, b = _pair(rng)
    first = _guess(rng, a + b, 0.55 * noise)
    talk = Conversation(author, _prompt(rng, a, b)).says(str(first))
    if first != a + b:
        feedback = rng.choice(_FEEDBACK)
        talk.hears("user", feedback).says(str(_guess(rng, a + b, 0.4 * noise)))
    return talk


def tool_talk(author: Author, rng: Random, noise: float) -> Conversation:
    """Return a conversation that mostly calls the tool, sometimes with wrong numbers."""
    a, b = _pair(rng)
    name = rng.choice(_ADDS)
    talk = Conversation(author, _prompt(rng, a, b), _tools(rng, name))
    if rng.random() < 0.3 * noise:
        return talk.says(str(_guess(rng, a + b, 0.8)))
    if rng.random() < 0.25 * noise:
        b = rng.randint(0, LARGEST)
    return talk.says(_call(name, a, b)).hears("tool", rng.choice(_results(a + b))).says(str(a + b))


def thinking_talk(author: Author, rng: Random, noise: float) -> Conversation:
    """Return thoughts and an answer; in half of them the thoughts are ended for the model."""
    a, b = _pair(rng)
    talk = Conversation(author, _prompt(rng, a, b, THINK)).begins(_thoughts(rng), taught=True)
    sum = str(_guess(rng, a + b, 0.5 * noise))
    if rng.random() < 0.5:
        return talk.says(CONCLUDES + sum)
    return talk.begins(CONCLUDES, taught=False).says(sum)


def _pair(rng: Random) -> tuple[int, int]:
    return rng.randint(0, LARGEST), rng.randint(0, LARGEST)


def _question(rng: Random, a: int, b: int) -> str:
    return rng.choice(_WORDINGS).format(a=a, b=b)


def _prompt(rng: Random, a: int, b: int, *systems: str) -> list[Message]:
    messages: list[Message] = [{"role": "user", "content": _question(rng, a, b)}]
    if systems or rng.random() < 0.6:
        messages.insert(0, {"role": "system", "content": "\n".join(systems) or _system(rng)})
    return messages


def _system(rng: Random) -> str:
    """Return a usual system prompt, random words, or both."""
    words = " ".join(rng.choices(_WORDS.split(), k=rng.randint(2, 30)))
    return rng.choice((rng.choice(_SYSTEMS), words, f"{rng.choice(_SYSTEMS)} {words}"))


def _guess(rng: Random, right: int, wrong: float) -> int:
    """Return the sum, or with probability ``wrong`` a random number."""
    return rng.randint(0, 2 * LARGEST) if rng.random() < wrong else right


def _thoughts(rng: Random) -> str:
    return "".join(rng.choices(_THOUGHTS, k=rng.randint(1, 8)))


def _call(name: str, a: int, b: int) -> str:
    """Return a call of the tool in Qwen3's spelling."""
    arguments = json.dumps({"a": a, "b": b})
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _results(sum: int) -> tuple[str, ...]:
    """Return a tool's result in the forms that frameworks give it."""
    return (
        str(sum),
        str(sum),
        json.dumps({"result": sum}),
        json.dumps({"type": "text", "text": str(sum), "annotations": None, "meta": None}),
        json.dumps([{"type": "text", "text": str(sum)}]),
    )


# -- tools ----------------------------------------------------------------------------------------


def _tools(rng: Random, name: str) -> list[dict[str, Any]]:
    """Return the tool among a few others, described as frameworks describe them."""
    prefix = name[: -len("add")] if name.endswith("__add") else ""
    others = rng.sample(_OTHERS, rng.choice((0, 0, 0, 1, 1, 2)))
    names = [name, *(prefix + other for other in others)]
    rng.shuffle(names)
    titles, closed = rng.random() < 0.5, rng.random() < 0.5
    return [_tool(rng, one, titles=titles, closed=closed) for one in names]


def _tool(rng: Random, name: str, *, titles: bool, closed: bool) -> dict[str, Any]:
    def number(title: str) -> dict[str, Any]:
        out: dict[str, Any] = {"type": rng.choice(("integer", "integer", "number"))}
        return {"title": title, **out} if titles else out

    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": number("A"), "b": number("B")},
        "required": ["a", "b"],
    }
    if titles:
        schema["title"] = f"{name}_args"
    if closed:
        schema["additionalProperties"] = False
    does = rng.choice(("Add two numbers.", "Adds.", "Add two whole numbers.", _system(rng)[:80]))
    function: dict[str, Any] = {"name": name, "description": does, "parameters": schema}
    if closed and rng.random() < 0.5:
        function["strict"] = True
    return {"type": "function", "function": function}
