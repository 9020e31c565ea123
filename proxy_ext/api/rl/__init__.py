"""The `/rl` routes, one file for each kind of user."""

from fastapi import APIRouter

from proxy_ext.api.rl import agents, areal, interactions, operators, trainer

router = APIRouter()
for part in (agents, interactions, operators, trainer, areal):
    router.include_router(part.router)
