"""The `/rl` routes of the trainer: slots, trajectories, weights."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header
from starlette.requests import Request
from starlette.responses import Response

from any_agent.protocol.rl import (
    EPOCH_HEADER,
    Ack,
    Acked,
    Capacity,
    Lease,
    Pause,
    PublishedVersion,
    RunInfo,
    SetCapacity,
    SetRun,
    VersionInfo,
)
from any_agent.record import pack_trajectories
from proxy_ext.api.rl.dependencies import Anyone, Once, service_of
from proxy_ext.api.rl.strict_body import StrictRoute
from proxy_ext.web.exchange import while_present

router = APIRouter(prefix="/rl/v1", route_class=StrictRoute)
MSGPACK = "application/x-msgpack"
Epoch = Annotated[int | None, Header(alias=EPOCH_HEADER, ge=0, le=2**53)]


async def fenced(request: Request, epoch: Epoch = None) -> int | None:
    """The number of the trainer's start; StaleOwner if a later one has taken over."""
    await service_of(request).fence.admit(epoch)
    return epoch


Start = Annotated[int | None, Depends(fenced)]
"""What the trainer does needs one, so that a trainer that was replaced does no more."""


@router.get("/capacity")
async def get_capacity(service: Anyone) -> Capacity:
    """Slots taken, and asked for."""
    return service.leases.capacity()


@router.put("/capacity")
async def set_capacity(body: SetCapacity, service: Anyone, _: Start) -> Capacity:
    """Cap the train sessions ever admitted here; renews the owner's leases."""
    return await service.leases.set_capacity(body)


@router.post("/lease", response_class=Response)
async def lease(body: Lease, request: Request, service: Anyone, start: Start) -> Response:
    """Closed groups as msgpack (`any_agent.record.codec`); 204 when none came in time."""
    trajectories = await while_present(request, service.leases.lease(body, epoch=start))
    if not trajectories:
        return Response(status_code=204)
    return Response(pack_trajectories(trajectories), media_type=MSGPACK)


@router.post("/ack", response_model=Acked)
async def ack(body: Ack, service: Anyone, _: Start, receipt: Once) -> Response:
    """Sessions trained on, or rejected with a reason."""
    return await receipt.store(Acked(acked=await service.leases.ack(body)))


@router.post("/pause", response_model=RunInfo)
async def pause(body: Pause, service: Anyone, _: Start, receipt: Once) -> Response:
    """Stop sampling for a weight update; calls wait."""
    await service.run.pause(body.ttl)
    return await receipt.store(service.run.info)


@router.post("/version", response_model=RunInfo)
async def publish_version(
    body: PublishedVersion, service: Anyone, _: Start, receipt: Once
) -> Response:
    """The engine holds these weights now."""
    await service.run.publish(body)
    return await receipt.store(service.run.info)


@router.get("/version")
async def get_version(request: Request, service: Anyone) -> VersionInfo:
    """What the engine samples with, and how many steps made it."""
    await service.auth.session_or_none(request)
    return VersionInfo(version=service.run.version, step=service.run.step)


@router.post("/resume", response_model=RunInfo)
async def resume(service: Anyone, _: Start, receipt: Once) -> Response:
    """Go on sampling."""
    await service.run.resume()
    return await receipt.store(service.run.info)


@router.put("/run")
async def set_run(body: SetRun, service: Anyone, _: Start) -> RunInfo:
    """The run's state and newest checkpoint, told by the trainer."""
    await service.run.set_run(body)
    if service.run.state == "training":
        service.sessions.admission.reopen()
    else:
        service.sessions.admission.close(service.run.not_training())
    return service.run.info
