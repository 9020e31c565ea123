"""A client as AReaL's documents describe one: it knows their routes, and nothing of ours."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass
from typing import Any, Self

import httpx
import numpy as np
import numpy.typing as npt

_TYPES = {"torch.int32": "<i4", "torch.float32": "<f4", "torch.bool": "?"}
_AGAIN = (429, 502, 503)


@dataclass
class Episode:
    """One session of the client's: opened with the admin key, used with its own."""

    client: ArealClient
    session_id: str
    api_key: str
    prefixed: bool = False
    """As the first documents had it: the session's id in the path, and no key at all."""

    async def chat(self, *contents: str) -> dict[str, Any]:
        """One turn; alternately the user's and the model's words."""
        roles = ("user", "assistant")
        messages = [{"role": roles[k % 2], "content": c} for k, c in enumerate(contents)]
        body = {"model": "default", "messages": messages, "temperature": 0.7, "max_tokens": 8}
        return await self._post("chat/completions", body)

    async def set_reward(self, reward: float, interaction_id: str | None = None) -> dict[str, Any]:
        body = {"interaction_id": interaction_id, "reward": reward}
        return await self._post("rl/set_reward", body)

    async def set_last_reward(self, reward: float) -> dict[str, Any]:
        return await self._post("rl/set_reward", {"reward": reward})

    async def end(self) -> dict[str, Any]:
        return await self._post("rl/end_session", {})

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.prefixed:
            return await self.client.post(f"{self.session_id}/{path}", body, None)
        return await self.client.post(path, body, self.api_key)


class ArealClient:
    def __init__(self, url: str, admin_key: str | None) -> None:
        self._admin_key = admin_key
        self._http = httpx.AsyncClient(base_url=url, timeout=60, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def post(self, path: str, body: Any, key: str | None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        response = await self._http.post(path, json=body, headers=headers)
        response.raise_for_status()
        return dict(response.json())

    async def health(self) -> dict[str, Any]:
        return dict((await self._http.get("health")).json())

    async def grant_capacity(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._admin_key}"} if self._admin_key else {}
        response = await self._http.post("grant_capacity", headers=headers)
        response.raise_for_status()
        return dict(response.json())

    async def start(
        self, task_id: str, *, api_key: str | None = None, prefixed: bool = False
    ) -> Episode:
        body = {"task_id": task_id, "api_key": api_key}
        data = await self.post("rl/start_session", body, self._admin_key)
        return Episode(self, data["session_id"], data["api_key"], prefixed)

    async def start_when_there_is_room(self, task_id: str) -> Episode:
        """As its library does: for as long as the answer is 429."""
        while True:
            try:
                return await self.start(task_id)
            except httpx.HTTPStatusError as error:
                if error.response.status_code not in _AGAIN:
                    raise
            await asyncio.sleep(0.05)

    async def export(
        self, session_id: str, *, discount: float = 1.0, style: str = "individual"
    ) -> dict[str, dict[str, Any]]:
        """By interaction: its reward and its tensors."""
        body = {
            "session_id": session_id,
            "discount": discount,
            "style": style,
            "drop_retry_orphans": False,
        }
        data = await self.post("export_trajectories", body, self._admin_key)
        out = {}
        for name, item in data["interactions"].items():
            assert item["interaction_id"] == name
            tensors = {key: _array(value) for key, value in item["tensor_dict"].items()}
            out[name] = {"reward": item["reward"], **tensors}
        return out


def _array(tensor: dict[str, Any]) -> npt.NDArray[Any]:
    assert tensor["type"] == "tensor"
    flat = np.frombuffer(base64.b64decode(tensor["data"]), _TYPES[tensor["dtype"]])
    return flat.reshape(tensor["shape"])
