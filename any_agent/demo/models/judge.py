"""A tiny model that judges answers: it answers :data:`QUESTION` with ``yes`` or ``no``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

from any_agent.chat import load_chat_format
from any_agent.demo.models.teach import Author, Conversation, Report, Row, quiet, teach
from any_agent.demo.models.tiny import make_tokenizer, save_tiny_model

QUESTION = (
    "Question: {question}\nRight answer: {answer}\nGiven answer: {given}\n"
    "Is the given answer right? Say yes or no."
)
STEPS = 160
_LARGEST = 4
_BATCH = 48
_POOL = 1500
_VOCAB_SIZE = 512


def make_judge_model(
    path: Path, seed: int = 0, *, steps: int = STEPS, report: Report = quiet
) -> Path:
    """Write the model in Hugging Face's layout; it takes half a minute of one core."""
    rng = Random(seed)
    report("making its tokenizer")
    tokenizer = make_tokenizer(_texts(rng), vocab_size=_VOCAB_SIZE, phrases=True)
    save_tiny_model(path, seed, tokenizer=tokenizer)
    formats = [load_chat_format(str(path), enable_thinking=thinks) for thinks in (False, None)]
    authors = [Author(chat) for chat in formats]
    rows = [verdict_row(rng.choice(authors), rng) for _ in range(_POOL)]

    def batch(progress: float) -> list[Row]:
        return rng.choices(rows, k=_BATCH)

    teach(path, batch, steps=steps, seed=seed, report=report)
    return path


def verdict_row(author: Author, rng: Random) -> Row:
    question, answer, given = _case(rng)
    text = QUESTION.format(question=question, answer=answer, given=given)
    talk = Conversation(author, [{"role": "user", "content": text}])
    return talk.says("yes" if answer == given else "no").row


def _case(rng: Random) -> tuple[str, str, str]:
    """Return a question, its answer, and a given answer that is right about half of the time."""
    a, b = rng.randint(0, _LARGEST), rng.randint(0, _LARGEST)
    given = a + b if rng.random() < 0.5 else rng.randint(0, 2 * _LARGEST)
    return f"What is {a} + {b}?", str(a + b), str(given)


def _texts(rng: Random) -> Iterator[str]:
    for _ in range(300):
        question, answer, given = _case(rng)
        yield "user\n" + QUESTION.format(question=question, answer=answer, given=given)
        yield "assistant\nyes"
        yield "assistant\nno"
