"""What is known of a session from its opening on, however its methods are called."""

from __future__ import annotations

from typing import Literal

from any_agent.client.environment import environment
from any_agent.protocol.rl import SessionStarted
from any_agent.sdk.find_service import ServiceAddress


class SessionBase:
    """A session that was opened at a service."""

    def __init__(self, service: ServiceAddress, started: SessionStarted) -> None:
        self._service = service
        self._started = started

    @property
    def session_id(self) -> str:
        return self._started.session_id

    @property
    def api_key(self) -> str:
        """The session's own key: what an OpenAI client takes as its API key."""
        return self._started.api_key

    @property
    def url(self) -> str:
        """The service, without `/v1`: what Anthropic's clients take as their base URL."""
        return self._service.url

    @property
    def base_url(self) -> str:
        """With `/v1`: what OpenAI's clients take as their base URL."""
        return f"{self._service.url}/v1"

    @property
    def session_url(self) -> str:
        """With `/v1`, for OpenAI's clients: it names the session, so whatever key they send."""
        return f"{self._service.url}/{self.api_key}/v1"

    @property
    def version(self) -> int:
        """The weight version that was served when it was opened."""
        return self._started.version

    @property
    def mode(self) -> Literal["train", "eval"]:
        return self._started.mode

    @property
    def task_id(self) -> str | None:
        return self._started.task_id

    @property
    def group_id(self) -> str | None:
        return self._started.group_id

    @property
    def expires_in(self) -> float:
        """Seconds from its opening until its time is up, whatever happens."""
        return self._started.expires_in

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.session_id} at {self.url}>"

    def env(self) -> dict[str, str]:
        """What another process needs for its OpenAI and Anthropic clients to be in the session."""
        return environment(self.url, self.api_key)
