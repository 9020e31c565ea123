"""The `/rl` routes of agents: open, reward, end and read sessions."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Body, Query
from starlette.requests import Request
from starlette.responses import Response

from any_agent.errors import NotFound
from any_agent.protocol.rl import (
    Abort,
    Feedback,
    FeedbackGiven,
    Finalize,
    Heartbeat,
    RewardSet,
    SessionContent,
    SessionDetails,
    SessionFinalized,
    SessionInfo,
    SessionStarted,
    SetReward,
    StartByQuery,
    StartSession,
    Veto,
)
from any_agent.protocol.training import RunInfo
from proxy_ext.admission.fleet_place import choice_of
from proxy_ext.api.rl.strict_body import Anyone, Once, StrictRoute, Who, shaped
from proxy_ext.service import RankService
from proxy_ext.sessions.grading import content_of
from proxy_ext.sessions.rewards import (
    FEEDBACK,
    Parts,
    author,
    is_agent,
    parts_of,
    require_judge,
)
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.web.exchange import while_present

router = APIRouter(prefix="/rl/v1", route_class=StrictRoute)
# Every field of these bodies has a default, so a request may have no body.
Start = Annotated[StartSession, Body(default_factory=StartSession)]
End = Annotated[Finalize, Body(default_factory=Finalize)]
Stop = Annotated[Abort, Body(default_factory=Abort)]
Refuse = Annotated[Veto, Body(default_factory=Veto)]


@router.post("/start_session", response_model=SessionStarted)
async def start_session(
    body: Start, request: Request, service: Anyone, caller: Who, receipt: Once
) -> Response:
    """Open a session; its key takes the place of the OpenAI key."""
    opening = service.opening.open(body, caller, receipt.keep, choice=choice_of(request))
    return receipt.response(await while_present(request, opening))


@router.get("/start_session")
async def start_session_by_query(
    request: Request, service: Anyone, caller: Who, query: Annotated[StartByQuery, Query()]
) -> SessionStarted:
    """Open a session as POST does, for people who type URLs; a URL cannot carry a key."""
    opening = service.opening.open(query, caller, choice=choice_of(request))
    return await while_present(request, opening)


@router.post("/set_reward", response_model=RewardSet)
async def set_reward(
    body: SetReward, request: Request, service: Anyone, caller: Who, receipt: Once
) -> Response:
    """Reward a completion (by default the last one), or the whole session; it may be repeated."""
    session = await service.auth.session(request, body.session_id)
    given = parts_of(body.reward if body.final_reward is None else body.final_reward, body.name)
    by, keep = author(session.row, caller, gives=True), receipt.keep
    if body.reward is None:
        return receipt.response(
            await service.rewards.set_final_reward(session, given, by=by, keep=keep)
        )
    wanted = body.interaction_id or body.completion_id
    return receipt.response(
        await service.rewards.set_reward(session, given, wanted, by=by, keep=keep)
    )


@router.post("/feedback", response_model=FeedbackGiven)
async def feedback(
    body: Feedback, request: Request, service: Anyone, caller: Who, receipt: Once
) -> Response:
    """Set the reward `feedback` of a completion, or of a session; the last one counts. Words are
    kept beside it, and alone they set none.

    The id of an answer is enough under its tenant's key: the session need not be named.
    """
    session = await _with_answer(body, request, service)
    rewards = service.rewards
    given: Parts = {} if body.value is None else {FEEDBACK: body.value}
    text = rewards.kept_text(body.text, alone=not given)

    def shape(answer: RewardSet) -> FeedbackGiven:
        return FeedbackGiven(**answer.model_dump(), text_stored=text is not None)

    by, keep = author(session.row, caller, gives=True), shaped(receipt.keep, shape)
    if body.completion_id is None:
        done = rewards.set_final_reward(session, given, by=by, text=text, keep=keep)
    else:
        id = body.completion_id
        done = rewards.set_reward(session, given, id, by=by, text=text, keep=keep)
    return receipt.response(shape(await done))


async def _with_answer(body: Feedback, request: Request, service: RankService) -> RecordedSession:
    """Return the session that a body or its sender's key names, else that of the answer."""
    id = body.completion_id
    if body.session_id is not None or id is None:
        return await service.auth.session(request, body.session_id)
    owner = service.journal.session_of_interaction
    # The first one where the call had several choices, which the refusal then names.
    found = await owner(id) or await owner(f"{id}.0")
    with suppress(NotFound):
        # Of another tenant's session not even the id may be shown.
        if (session := await service.auth.session_or_none(request, found)) is not None:
            return session
    raise NotFound(
        f"no session of yours has the completion {id[:80]!r}; check completion_id",
        code="completion_not_found",
    )


@router.post("/finalize", response_model=SessionFinalized)
async def finalize(
    body: End, request: Request, service: Anyone, caller: Who, receipt: Once
) -> Response:
    """End a session; training gets its trajectory at once, or when its reward is given.

    A repeated request, with the same final reward or none, gets the session's present state. Where
    others reward the session, its own key ends its calls, and the session awaits its reward.
    """
    session = await service.auth.session(request, body.session_id)
    final, by, keep = parts_of(body.final_reward), caller.name, shaped(receipt.keep, _finalized)
    if is_agent(session.row, caller):
        ending = service.endings.end_by_agent(
            session, caller, final, deadline=body.deadline, keep=keep
        )
    elif body.await_reward:
        until = body.deadline
        ending = service.endings.await_reward(session, until, final, by=by, keep=keep)
    else:
        ending = service.endings.finalize(session, final, by=by, keep=keep)
    return receipt.response(_finalized(await ending))


def _finalized(info: SessionInfo) -> SessionFinalized:
    return SessionFinalized(**info.model_dump())


@router.get("/sessions/{session_id}")
async def get_session(
    session_id: str, request: Request, service: Anyone, caller: Who
) -> SessionDetails:
    """Return the record of a session: the caller's own, or any for the operator."""
    session = await service.auth.session(request, session_id)
    # A judge's words may have the answer.
    texts = not is_agent(session.row, caller)
    return await service.rewards.history(session, texts=texts)


@router.get("/sessions/{session_id}/content", response_model=SessionContent)
async def get_content(session_id: str, request: Request, service: Anyone, caller: Who) -> Response:
    """Return a session's messages as graders get them."""
    session = await service.auth.session(request, session_id)
    # Its metadata may have the answer.
    require_judge(session.row, caller, "read the record of")
    texts = not is_agent(session.row, caller)
    content = await content_of(service.sessions, session, texts=texts)
    return Response(content, media_type="application/json")


@router.post("/sessions/{session_id}/heartbeat")
async def heartbeat(session_id: str, request: Request, service: Anyone) -> Heartbeat:
    """Keep an open session from expiring while nothing else happens in it.

    An `Idempotency-Key` has no effect: a repeated heartbeat is one more, and nothing is stored.
    """
    return (await service.auth.session(request, session_id)).heartbeat()


@router.post("/sessions/{session_id}/abort", response_model=SessionInfo)
async def abort(
    session_id: str, body: Stop, request: Request, service: Anyone, caller: Who, receipt: Once
) -> Response:
    """Discard a session, and abort its calls under way."""
    session = await service.auth.session(request, session_id)
    require_judge(session.row, caller, "abort")
    ending = service.endings.abort(
        session, body.reason, keep_place=body.keep_place, keep=receipt.keep
    )
    return receipt.response(await ending)


@router.post("/sessions/{session_id}/veto", response_model=SessionInfo)
async def veto(
    session_id: str, body: Refuse, request: Request, service: Anyone, caller: Who, receipt: Once
) -> Response:
    """Keep a finalized session out of training."""
    session = await service.auth.session(request, session_id)
    require_judge(session.row, caller, "veto")
    return receipt.response(await service.endings.veto(session, body.reason, keep=receipt.keep))


@router.delete("/sessions/{session_id}", response_model=SessionInfo)
async def delete(
    session_id: str, request: Request, service: Anyone, caller: Who, receipt: Once
) -> Response:
    """Erase a session's texts, tokens and metadata; end the session first if it is open."""
    session = await service.auth.session(request, session_id)
    require_judge(session.row, caller, "delete")
    return receipt.response(await service.endings.delete(session, keep=receipt.keep))


@router.get("/run")
async def run_info(request: Request, service: Anyone) -> RunInfo:
    """Return the run's state, its model and its newest checkpoint."""
    await service.auth.session_or_none(request, request.query_params.get("session_id"))
    return service.run.info
