"""The `/rl` routes that show a session call by call, and a call token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from any_agent.errors import Conflict, NotFound
from any_agent.protocol.interactions import (
    InteractionPage,
    InteractionTokens,
    ListInteractions,
    ListTokens,
)
from any_agent.record import propagate_rewards
from any_agent.record.reward_propagation import discarded, session_score
from any_agent.record.trainability import DISCARDED
from any_agent.types import Interaction, SessionMode
from proxy_ext.api.rl.strict_body import Anyone, StrictRoute
from proxy_ext.journal import SessionRow
from proxy_ext.service import RankService

router = APIRouter(prefix="/rl/v1/sessions/{session_id}", route_class=StrictRoute)

MAX_TEXT = 20_000  # characters of one text of a message
MAX_PAGE_TEXT = 500_000  # characters after which a page ends


@router.get("/interactions", response_model=InteractionPage)
async def list_interactions(
    session_id: str,
    request: Request,
    service: Anyone,
    query: Annotated[ListInteractions, Query()],
) -> Response:
    """Return a page of a session's calls, with rewards as they ran back through the tree."""
    row, nodes = await _content(service, request, session_id)
    discount = service.config.train.discount
    return await _json(lambda: _page(row, nodes, query.start, query.limit, discount))


@router.get("/interactions/{interaction_id}/tokens", response_model=InteractionTokens)
async def list_tokens(
    session_id: str,
    interaction_id: str,
    request: Request,
    service: Anyone,
    query: Annotated[ListTokens, Query()],
) -> Response:
    """Return a part of a call's tokens: ids, texts, log-probabilities and weight versions."""
    row, nodes = await _content(service, request, session_id)
    found = next((i for i in nodes if i.id == interaction_id), None)
    if found is None:
        raise NotFound(
            f"session {session_id} has no such interaction", code="interaction_not_found"
        )
    texts = service.sessions.config.store_content
    new_detokenizer = service.completer.chat.new_detokenizer if texts else None
    trained = found.trainable and row.mode == SessionMode.TRAIN
    return await _json(lambda: _tokens(found, trained, query, new_detokenizer))


async def _content(
    service: RankService, request: Request, session_id: str
) -> tuple[SessionRow, list[Interaction]]:
    """Return the caller's session and its calls; Conflict if its content is not here."""
    session = await service.auth.session(request, session_id)
    if session.row.content != "stored":
        raise Conflict(
            f"the content of session {session.id} is {session.row.content}, so it cannot be shown "
            "here; `any-agent export` reads archived sessions",
            code="content_not_stored",
        )
    await service.sessions.load(session)
    return session.row, list(session.tree)


async def _json(make: Callable[[], dict[str, Any]]) -> Response:
    body = await asyncio.to_thread(lambda: orjson.dumps(make()))
    return Response(body, media_type="application/json")


def _page(
    row: SessionRow, nodes: list[Interaction], start: int, limit: int, discount: float
) -> dict[str, Any]:
    final = row.final_reward
    rewarded = final is not None or any(i.reward is not None for i in nodes)
    credit = propagate_rewards(nodes, discount=discount, final_reward=final)
    unused = discarded(nodes)
    before = _before(nodes)
    cutter = _Cutter()
    shown = []
    for number, i in enumerate(nodes[start : start + limit], start + 1):
        depth, tokens = before[i.id]
        n = len(i.output_ids)
        shown.append(
            {
                "id": i.id,
                "parent_id": i.parent_id,
                "number": number,
                "depth": depth,
                "role": i.role,
                "adapter": i.request.get("adapter"),
                "created_at": i.created_at,
                "message_delta": cutter.cut(i.message_delta),
                "output_message": cutter.cut(i.output_message),
                "finish_reason": i.finish_reason,
                "continuation": str(i.continuation),
                "branch_reason": i.branch_reason,
                "untrainable_reason": i.untrainable_reason
                or (DISCARDED if i.id in unused else None),
                "reward": i.reward,
                "propagated": credit[i.id] if rewarded else None,
                "prompt_tokens": tokens + len(i.prompt_delta_ids),
                "new_prompt_tokens": len(i.prompt_delta_ids),
                "output_tokens": n,
                "first_version": int(i.output_versions[0]) if n else None,
                "last_version": int(i.output_versions[-1]) if n else None,
                "logprob_mean": float(i.output_logprobs.mean()) if n else None,
            }
        )
        if cutter.taken > MAX_PAGE_TEXT:
            break
    end = start + len(shown)
    return {
        "session_id": row.id,
        "total": len(nodes),
        "start": start,
        "next": end if end < len(nodes) else None,
        "score": session_score(nodes, credit),
        "cut": cutter.shortened,
        "interactions": shown,
    }


def _before(nodes: list[Interaction]) -> dict[str, tuple[int, int]]:
    """Return the number of each interaction's ancestors, and of their tokens."""
    here: dict[str, tuple[int, int]] = {}
    through: dict[str | None, tuple[int, int]] = {None: (0, 0)}
    for i in nodes:
        depth, tokens = here[i.id] = through[i.parent_id]
        through[i.id] = depth + 1, tokens + len(i.prompt_delta_ids) + len(i.output_ids)
    return here


class _Cutter:
    """Copies plain data with its long texts cut, and counts the characters that it keeps."""

    def __init__(self) -> None:
        self.taken = 0
        self.shortened = False

    def cut(self, value: Any) -> Any:
        if isinstance(value, str):
            kept = value[:MAX_TEXT]
            self.taken += len(kept)
            if kept != value:
                self.shortened = True
                kept += f" … ({len(value) - MAX_TEXT} more characters)"
            # JSON has no halves of characters.
            return kept.encode(errors="replace").decode()
        if isinstance(value, dict):
            return {self.cut(key): self.cut(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.cut(item) for item in value]
        return value


def _tokens(
    i: Interaction, trained: bool, part: ListTokens, new_detokenizer: Callable[[], Any] | None
) -> dict[str, Any]:
    prompt, n = i.prompt_delta_ids.tolist(), len(i.prompt_delta_ids)
    start, end = part.start, part.start + part.limit
    at, to = max(0, start - n), max(0, end - n)  # the part of the output
    before = [None] * len(prompt[start:end])
    mask = i.loss_mask()[at:to].tolist() if trained else [0] * len(i.output_ids[at:to])
    texts = None
    if new_detokenizer is not None:
        # Decoded from the beginning: a character may begin in an earlier part.
        both = [_texts(ids, new_detokenizer()) for ids in (prompt, i.output_ids[:to].tolist())]
        texts = [text for each in both for text in each][start:end]
    return {
        "interaction_id": i.id,
        "start": start,
        "total": n + len(i.output_ids),
        "prompt": n,
        "trained": trained,
        "loss_mask": [*(0 for _ in before), *mask],
        "ids": [*prompt[start:end], *i.output_ids[at:to].tolist()],
        "texts": texts,
        "logprobs": [*before, *i.output_logprobs[at:to].tolist()],
        "versions": [*before, *i.output_versions[at:to].tolist()],
    }


def _texts(ids: list[int], detokenizer: Any) -> list[str]:
    """Return the text that each token completes; the last one gets what is left."""
    texts = [detokenizer.push([id]) for id in ids]
    if texts:
        texts[-1] += detokenizer.flush()
    return texts
