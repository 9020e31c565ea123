"""What went through the router since it began; a few additions per request."""

from __future__ import annotations

from collections import Counter

from aiohttp import web

from any_agent.completions.apis import all_apis

CLIENT_LEFT = 499
"""Counted as the status of requests whose client left before its answer was whole, as nginx has
it."""
FAILED = 500
_ROUTES = frozenset(
    {
        "abort",
        "ack",
        "capacity",
        "count_tokens",
        "end_session",
        "export_trajectories",
        "finalize",
        "grant_capacity",
        "healthz",
        "heartbeat",
        "lease",
        "metrics",
        "models",
        "pause",
        "readyz",
        "resume",
        "run",
        "sessions",
        "set_reward",
        "start_session",
        "version",
        "veto",
    }
)
"""The last words of our own paths; the words of clients must not become labels."""
OTHER = "other"


def known_routes() -> frozenset[str]:
    """Return the last words of paths that are counted each for itself, the APIs' among them."""
    return _ROUTES | {api.path.rpartition("/")[2] for api in all_apis()}


class RouterStats:
    """Tallies over requests."""

    def __init__(self) -> None:
        self._routes = known_routes()
        self.running = 0
        self.ended: Counter[tuple[str, int]] = Counter()
        """By route and status."""
        self.bytes_in = 0
        """Of requests' bodies."""
        self.bytes_out = 0
        """Of answers, their heads included."""

    def end(self, request: web.BaseRequest, status: int) -> None:
        """A request is over."""
        self.running -= 1
        last = request.raw_path.partition("?")[0].rpartition("/")[2]
        self.ended[last if last in self._routes else OTHER, status] += 1
        self.bytes_in += request.content.total_bytes
        self.bytes_out += request.writer.output_size
