"""Random outputs of a family's models: well-formed, truncated, broken."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tests.support.families import Call, Family

_TEXT = """
the sum is what you asked for and so I call the tool now to think about weather in Paris
café 你好 🙂 naïve {json} "quoted" it's 42 3.14 a<b x>y [1, 2] &amp; \\n **bold** `code`
"""
_WORDS = _TEXT.split()
_BROKEN = (
    '{"a": 1, "b"',
    '{"a": 1}}',
    "{'a': 1}",
    "",
    "null",
    "[1, 2]",
    '{"a": NaN}',
    '{"a": "\\ud800"}',
    "not json at all",
)


@dataclass(frozen=True, slots=True)
class Output:
    """An output's ids and, where it is well-formed, what they mean."""

    kind: str
    ids: list[int]
    content: str | None = None
    reasoning: str | None = None
    calls: tuple[Call, ...] | None = None


def words(rng: random.Random, most: int = 12) -> str:
    lines = [
        " ".join(rng.choices(_WORDS, k=rng.randint(1, most))) for _ in range(rng.randint(1, 2))
    ]
    return "\n".join(lines)


def arguments(rng: random.Random) -> dict[str, Any]:
    """As the tool declares them: families that write values bare cannot tell "1" from 1."""
    values: dict[str, Any] = {
        "a": rng.randint(-9, 99),
        "b": rng.choice((-2.5, True, None, [1, "b"], {"k": {"v": []}}, "x")),
        "city": rng.choice((words(rng, 4), "", "7", "größer")),
    }
    return {name: values[name] for name in rng.sample(sorted(values), rng.randint(0, 3))}


def random_output(fam: Family, rng: random.Random, *, tools: bool) -> Output:
    """Six of ten are well-formed."""
    kind = rng.choices(
        ("sound", "cut", "broken_call", "noise", "empty", "unknown_tool"), (60, 15, 8, 8, 4, 5)
    )[0]
    if kind in ("broken_call", "unknown_tool") and not (tools and fam.spec.calls):
        kind = "sound"
    reasoning = words(rng) if fam.reasons and rng.random() < 0.7 else None
    match kind:
        case "noise":
            size = rng.randint(1, 30)
            return Output(kind, [rng.randrange(fam.chat.vocab_size) for _ in range(size)])
        case "empty":
            return Output(kind, fam.say("")[-1:])
        case "broken_call":
            call = Call("add", rng.choice(_BROKEN))
            return Output(kind, fam.say(_before(rng), reasoning=reasoning, calls=(call,)))
        case "unknown_tool":
            call = Call("no_such_tool", arguments(rng))
            return Output(kind, fam.say(_before(rng), reasoning=reasoning, calls=(call,)))
    calls: tuple[Call, ...] = ()
    if tools and fam.spec.calls and rng.random() < 0.6:
        most = min(2, fam.spec.calls)
        calls = tuple(Call("add", arguments(rng)) for _ in range(rng.randint(1, most)))
    text = _before(rng) if calls else words(rng)
    if calls and fam.name == "llama3":
        text = ""
    ids = fam.say(text, reasoning=reasoning, calls=calls)
    if kind == "cut":
        return Output(kind, ids[: rng.randint(1, len(ids) - 1)])
    return Output(kind, ids, text, reasoning, calls)


def _before(rng: random.Random) -> str:
    return rng.choice(("", words(rng, 4)))
