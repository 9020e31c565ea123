"""`GET /rl/v1/usage`: what accounts have used, by run and day."""

from __future__ import annotations

from datetime import date
from typing import Any
from urllib.parse import parse_qsl

from any_agent.auth.access import Scope
from any_agent.errors import Forbidden, InvalidRequest
from router.cloud.asked import Act, Asked
from router.cloud.jobs import Jobs
from router.cloud.metering import Metering, total_of

_FIELDS = ("from", "to", "account")
_MAX_FIELDS = 10


class UsageRoutes:
    """Answers an account with its own bill, and the operator with all."""

    def __init__(self, jobs: Jobs, metering: Metering) -> None:
        self._jobs = jobs
        self._metering = metering
        self.table: tuple[tuple[str, str, Act], ...] = (("GET", "/rl/v1/usage", self._show),)

    async def _show(self, asked: Asked) -> tuple[int, Any]:
        first, last, named = _choice(asked.query)
        operator = asked.caller.scope is Scope.ADMIN
        if named is not None and not operator:
            raise Forbidden("account in the query is for the operator: leave it out")
        account = named if operator else asked.account
        for job in [j for j in self._jobs.by_id.values() if account in (None, j.account)]:
            await self._metering.copy(job.run, job.usage)
        bill = await self._metering.bill(account, first, last, own=not operator)
        total = total_of(each["total"] for each in bill)
        return 200, {"from": first, "to": last, "total": total, "accounts": bill}


def _choice(query: str) -> tuple[str, str, str | None]:
    """Return the first and the last day, and the account that a query names."""
    try:
        given = parse_qsl(query, keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError:
        raise InvalidRequest(f"the query has more than {_MAX_FIELDS} fields") from None
    fields = dict(given)
    if unknown := [name for name in fields if name not in _FIELDS]:
        raise InvalidRequest(
            f"unknown query parameter {unknown[0][:80]!r}; this route takes {', '.join(_FIELDS)}",
            param=unknown[0][:80],
        )
    if len(fields) < len(given):
        raise InvalidRequest("the query has a parameter twice: give each once")
    first, last = _day(fields, "from", date.min), _day(fields, "to", date.max)
    if first > last:
        raise InvalidRequest(f"from={first} is after to={last}", param="from")
    return first, last, fields.get("account")


def _day(fields: dict[str, str], name: str, without: date) -> str:
    text = fields.get(name)
    if text is None:
        return without.isoformat()
    try:
        day = date.fromisoformat(text)
    except ValueError:
        day = None
    if day is None or day.isoformat() != text:
        raise InvalidRequest(
            f"{name}={text[:80]!r} is no day: write it as 2026-11-30, by UTC", param=name
        )
    return text
