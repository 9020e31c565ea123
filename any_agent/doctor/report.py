"""The doctor's findings for people, and for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

from any_agent.doctor.verdict import CheckOutcome, Verdict, broken

_HEAD = ("LAW", "CASE", "VERDICT", "SEEN")
_ORDER = (CheckOutcome.PASSED, CheckOutcome.FAILED, CheckOutcome.DECLINED, CheckOutcome.UNCHECKED)


def as_text(subject: Mapping[str, str], verdicts: Sequence[Verdict]) -> str:
    """A table, then each failure with what to do about it."""
    lines = [f"{name:<10} {_plain(value)}" for name, value in subject.items()]
    rows = [_HEAD, *((v.law, v.case, v.outcome.value, _plain(v.seen)) for v in verdicts)]
    widths = [max(len(row[k]) for row in rows) for k in range(3)]
    lines += ["", *("  ".join((*map(str.ljust, row, widths), row[3])).rstrip() for row in rows)]
    for failure in broken(verdicts):
        lines += ["", f"FAILED {failure.law}, {failure.case}: {_plain(failure.seen)}"]
        lines.append(f"to do: {_plain(failure.do)}")
    counts = Counter(v.outcome for v in verdicts)
    told = ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in _ORDER if counts[outcome])
    return "\n".join([*lines, "", told])


def as_json(subject: Mapping[str, str], verdicts: Sequence[Verdict]) -> str:
    """``sound``, what was examined, and ``verdicts``, a list of objects."""
    rows = [
        {"law": v.law, "case": v.case, "verdict": v.outcome.value, "seen": v.seen, "do": v.do}
        for v in verdicts
    ]
    data = {"sound": not broken(verdicts), "subject": dict(subject), "verdicts": rows}
    return json.dumps(data, indent=2)


def _plain(text: str) -> str:
    """On one line, and without what would move a terminal's cursor: models write some of these."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
