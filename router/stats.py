"""What went through the router since it began; a few additions per request."""

from __future__ import annotations

from collections import Counter

from aiohttp import web

CLIENT_LEFT = 499
"""Counted as the status of requests whose client left before its answer was whole, as nginx has
it."""
FAILED = 500
ROUTES = frozenset(
    {
        "abort",
        "ack",
        "capacity",
        "completions",
        "count_tokens",
        "embeddings",
        "end_session",
        "export_trajectories",
        "finalize",
        "grant_capacity",
        "healthz",
        "heartbeat",
        "lease",
        "messages",
        "metrics",
        "models",
        "pause",
        "readyz",
        "responses",
        "resume",
        "run",
        "sessions",
        "set_reward",
        "start_session",
        "version",
        "veto",
    }
)
"""The last words of paths that are told apart; a client's own inventions must not become labels."""
OTHER = "other"


class RouterStats:
    """Tallies over requests."""

    def __init__(self) -> None:
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
        self.ended[last if last in ROUTES else OTHER, status] += 1
        self.bytes_in += request.content.total_bytes
        self.bytes_out += request.writer.output_size
