"""What the `/rl` routes share: the service behind them, and who may use it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Annotated

from fastapi import Depends
from pydantic import BaseModel
from starlette.requests import Request

from any_agent.auth.access import Caller
from proxy_ext.idempotency import Receipt
from proxy_ext.journal.statements import KeepAnswer, no_receipt
from proxy_ext.service import RankService


def service_of(request: Request) -> RankService:
    service: RankService = request.app.state.service
    return service


# FastAPI runs plain functions in threads, which costs more than what these do.
async def _service(request: Request) -> RankService:
    return service_of(request)


async def _caller(request: Request) -> Caller:
    return service_of(request).auth.caller(request)


Anyone = Annotated[RankService, Depends(_service)]
Who = Annotated[Caller, Depends(_caller)]


async def receipt_of(request: Request, service: Anyone, caller: Who) -> AsyncIterator[Receipt]:
    async with service.answers.receipt(request, caller) as receipt:
        yield receipt


# For the time of the route's function: equal requests that wait go on as soon as it has returned.
Once = Annotated[Receipt, Depends(receipt_of, scope="function")]
"""Every POST and DELETE of `/rl` takes one; `proxy_ext.idempotency` says what for."""


def shaped(keep: KeepAnswer, shape: Callable[[BaseModel], BaseModel]) -> KeepAnswer:
    """Keeps an answer in another shape. Nothing stays nothing, which those who commit look at."""
    return keep if keep is no_receipt else lambda answer: keep(shape(answer))
