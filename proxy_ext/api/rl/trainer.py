"""The `/rl` routes of the trainer: slots, trajectories, weights."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header
from starlette.requests import Request
from starlette.responses import Response

from any_agent.protocol.rl import EPOCH_HEADER
from any_agent.protocol.training import (
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
from proxy_ext.api.rl.strict_body import Anyone, Once, StrictRoute, service_of
from proxy_ext.web.exchange import while_present

router = APIRouter(prefix="/rl/v1", route_class=StrictRoute)
MSGPACK = "application/x-msgpack"
Epoch = Annotated[int | None, Header(alias=EPOCH_HEADER, ge=0, le=2**53)]


async def fenced(request: Request, epoch: Epoch = None) -> int | None:
    """Return the number of the trainer's start; StaleOwner if a later one has taken over."""
    await service_of(request).fence.admit(epoch)
    return epoch


Start = Annotated[int | None, Depends(fenced)]
"""The start of the trainer that sends the request: a trainer that was replaced is refused."""


@router.get("/capacity")
async def get_capacity(service: Anyone) -> Capacity:
    """Return the slots that are taken, and those that are waited for."""
    return service.leases.capacity()


@router.put("/capacity")
async def set_capacity(body: SetCapacity, service: Anyone, _: Start) -> Capacity:
    """Cap the train sessions ever admitted here; renew the owner's leases."""
    return await service.leases.set_capacity(body)


@router.post("/lease", response_class=Response)
async def lease(body: Lease, request: Request, service: Anyone, start: Start) -> Response:
    """Lease closed groups as msgpack (`any_agent.record.codec`); 204 if none closed in time."""
    trajectories = await while_present(request, service.leases.lease(body, epoch=start))
    if not trajectories:
        return Response(status_code=204)
    return Response(pack_trajectories(trajectories), media_type=MSGPACK)


@router.post("/ack", response_model=Acked)
async def ack(body: Ack, service: Anyone, _: Start, receipt: Once) -> Response:
    """Acknowledge sessions as trained on, or as rejected with a reason."""
    return await receipt.store(Acked(acked=await service.leases.ack(body)))


@router.post("/pause", response_model=RunInfo)
async def pause(body: Pause, service: Anyone, _: Start, receipt: Once) -> Response:
    """Stop sampling for a weight update; calls wait meanwhile."""
    await service.run.pause(body.ttl)
    return await receipt.store(service.run.info)


@router.post("/version", response_model=RunInfo)
async def publish_version(
    body: PublishedVersion, service: Anyone, _: Start, receipt: Once
) -> Response:
    """Publish the weight version that the engine has loaded."""
    await service.run.publish(body)
    return await receipt.store(service.run.info)


@router.get("/version")
async def get_version(request: Request, service: Anyone) -> VersionInfo:
    """Return the engine's weight version, and the number of steps that made it."""
    await service.auth.session_or_none(request)
    return VersionInfo(version=service.run.version, step=service.run.step)


@router.post("/resume", response_model=RunInfo)
async def resume(service: Anyone, _: Start, receipt: Once) -> Response:
    """Resume sampling."""
    await service.run.resume()
    return await receipt.store(service.run.info)


@router.put("/run")
async def set_run(body: SetRun, service: Anyone, _: Start) -> RunInfo:
    """Set the run's state and its newest checkpoint."""
    await service.run.set_run(body)
    if service.run.state == "training":
        service.sessions.admission.reopen()
    else:
        service.sessions.admission.close(service.run.not_training())
    return service.run.info
