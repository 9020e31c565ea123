"""What the doctor says of one case of one law."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from enum import StrEnum

from any_agent.errors import AnyAgentError


class CheckOutcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    DECLINED = "declined"
    """Not done here, and said so where it matters: nothing wrong comes of it."""
    UNCHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row of the report."""

    law: str
    case: str
    outcome: CheckOutcome
    seen: str = ""
    """What was seen; of a failure what is wrong, of `not checked` why."""
    do: str = ""
    """What to do about a failure."""

    @property
    def failed(self) -> bool:
        return self.outcome is CheckOutcome.FAILED


@dataclass(frozen=True, slots=True)
class Check:
    """Makes verdicts on the cases of one law."""

    name: str

    def passed(self, case: str, seen: str = "") -> Verdict:
        return Verdict(self.name, case, CheckOutcome.PASSED, seen)

    def failed(self, case: str, seen: str, do: str) -> Verdict:
        return Verdict(self.name, case, CheckOutcome.FAILED, seen, do)

    def declined(self, case: str, seen: str) -> Verdict:
        return Verdict(self.name, case, CheckOutcome.DECLINED, seen)

    def unchecked(self, case: str, why: str) -> Verdict:
        return Verdict(self.name, case, CheckOutcome.UNCHECKED, why)


def broken(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """The failures."""
    return [verdict for verdict in verdicts if verdict.failed]


async def guarded(
    law: Check, case: str, do: str, verdicts: AsyncIterator[Verdict]
) -> list[Verdict]:
    """Collect the verdicts of a law; an engine's error is one more failure."""
    out = []
    try:
        async for verdict in verdicts:
            out.append(verdict)  # noqa: PERF401 - what came before an error counts
    except AnyAgentError as error:
        out.append(law.failed(case, error.message, do))
    return out
