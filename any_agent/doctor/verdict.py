"""Verdicts on the cases of a law, and the report of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from any_agent.errors import AnyAgentError
from any_agent.runtime.command_line import printable


class CheckOutcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    DECLINED = "declined"
    """The case is not supported and is refused openly, so no harm comes of it."""
    UNCHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row of the report."""

    law: str
    case: str
    outcome: CheckOutcome
    seen: str = ""
    """The observation; for `not checked` the reason."""
    do: str = ""
    """The advice after a failure."""

    @property
    def failed(self) -> bool:
        return self.outcome is CheckOutcome.FAILED


class CheckEnded(Exception):
    """The check of a case did not pass; the text is the observation, or the reason."""

    outcome: CheckOutcome


class Failed(CheckEnded):
    outcome = CheckOutcome.FAILED


class Declined(CheckEnded):
    outcome = CheckOutcome.DECLINED


class Unchecked(CheckEnded):
    outcome = CheckOutcome.UNCHECKED


@dataclass(frozen=True, slots=True)
class Check:
    """A law; it makes the verdicts on its cases."""

    name: str
    do: str = ""
    """The usual advice after a failure."""

    def passed(self, case: str, seen: str = "") -> Verdict:
        return Verdict(self.name, case, CheckOutcome.PASSED, seen)

    def failed(self, case: str, seen: str, do: str | None = None) -> Verdict:
        return Verdict(self.name, case, CheckOutcome.FAILED, seen, self.do if do is None else do)

    def declined(self, case: str, seen: str) -> Verdict:
        return Verdict(self.name, case, CheckOutcome.DECLINED, seen)

    def unchecked(self, case: str, why: str) -> Verdict:
        return Verdict(self.name, case, CheckOutcome.UNCHECKED, why)

    async def judge(self, case: str, check: Awaitable[str], do: str | None = None) -> Verdict:
        """Return the verdict on a case, of which ``check`` returns the observation.

        It may raise CheckEnded; an error of ours is a failure.
        """
        try:
            return self.passed(case, await check)
        except CheckEnded as ended:
            if isinstance(ended, Failed):
                return self.failed(case, str(ended), do)
            return Verdict(self.name, case, ended.outcome, str(ended))
        except AnyAgentError as error:
            return self.failed(case, error.message, do)

    async def collect(self, verdicts: AsyncIterator[Verdict]) -> list[Verdict]:
        """Collect the verdicts of a law; an engine's error is one more failure."""
        out = []
        try:
            async for verdict in verdicts:
                out.append(verdict)  # noqa: PERF401 - verdicts before an error count
        except AnyAgentError as error:
            out.append(self.failed("all", error.message))
        return out


def broken(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Return the failures."""
    return [verdict for verdict in verdicts if verdict.failed]


def as_text(subject: Mapping[str, str], verdicts: Sequence[Verdict]) -> str:
    """Return a table, then each failure with its advice."""
    lines = [f"{name:<10} {printable(value)}" for name, value in subject.items()]
    rows = [
        ("LAW", "CASE", "VERDICT", "SEEN"),
        *((v.law, v.case, v.outcome.value, printable(v.seen)) for v in verdicts),
    ]
    widths = [max(len(row[k]) for row in rows) for k in range(3)]
    lines += ["", *("  ".join((*map(str.ljust, row, widths), row[3])).rstrip() for row in rows)]
    for failure in broken(verdicts):
        lines += ["", f"FAILED {failure.law}, {failure.case}: {printable(failure.seen)}"]
        lines.append(f"to do: {printable(failure.do)}")
    counts = Counter(v.outcome for v in verdicts)
    totals = ", ".join(f"{counts[each]} {each.value}" for each in CheckOutcome if counts[each])
    return "\n".join([*lines, "", totals])


def as_json(subject: Mapping[str, str], verdicts: Sequence[Verdict]) -> str:
    """Return an object with ``sound``, ``subject`` and ``verdicts``, a list of objects."""
    rows = [
        {"law": v.law, "case": v.case, "verdict": v.outcome.value, "seen": v.seen, "do": v.do}
        for v in verdicts
    ]
    data = {"sound": not broken(verdicts), "subject": dict(subject), "verdicts": rows}
    return json.dumps(data, indent=2)
