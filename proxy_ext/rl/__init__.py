"""The `/rl` routes, one file for each kind of user."""

from fastapi import APIRouter

from proxy_ext.rl import agents, operators, trainer

router = APIRouter()
for part in (agents, operators, trainer):
    router.include_router(part.router)
