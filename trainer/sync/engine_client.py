"""The client of one rank's engine for weight updates, and the verification that it has the weights.

A status code is no proof. The embedded engine reports checksums of a checkpoint's own tensors, so
they must equal those of the tensors sent. SGLang's are of its own layout (fused, cut, perhaps
quantised). There an engine's first update is compared with what its own loader makes of the same
version's folder, after the weights were made random in between; later updates are compared with
the other engines.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from any_agent.engine.sglang.requests import EngineRefused, SGLangControl, bearer
from any_agent.errors import ConfigError, EngineUnavailable, NotFound, TrainingError
from trainer.sync.base import NewWeights

log = logging.getLogger(__name__)

_IDLE_TIMEOUT = 20.0  # seconds that an engine waits for its last calls before it flushes

Sums = list[dict[str, str]]


def control_session(key: str | None) -> aiohttp.ClientSession:
    """Return a session for the control routes of engines, in a running event loop; close it.

    Bodies may be large, with the weights inside; standard JSON is slow at these.
    """
    return aiohttp.ClientSession(
        headers=bearer(key), json_serialize=lambda data: orjson.dumps(data).decode()
    )


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The properties that an engine reports."""

    embedded: bool
    """The embedded engine: it replaces all weights at once, and its checksums are those of a
    checkpoint's tensors."""
    cuda: bool
    dtype: str
    """`float32`, `bfloat16`, ...; `auto` if SGLang was to choose."""
    processes: int
    """The processes that share the model's layers; each is a member of a process group."""
    started: str = ""
    """The time of its start, which distinguishes two processes at one URL."""


class EngineClient:
    """One engine's control routes. Errors name the engine; EngineUnavailable may be retried."""

    def __init__(self, rank: int, url: str, http: aiohttp.ClientSession, *, timeout: float) -> None:
        self.rank, self.url = rank, url
        self._http = http
        self._control = SGLangControl(http, url)
        self._timeout = timeout
        self.info = EngineInfo(False, False, "auto", 1)

    def at(self, url: str) -> EngineClient:
        """Return the client of the same process at another URL."""
        return EngineClient(self.rank, url, self._http, timeout=self._timeout)

    @property
    def identity(self) -> tuple[str, str]:
        """The engine's process, by its URL and start; valid after :meth:`fetch_info`."""
        return self.url, self.info.started

    async def fetch_info(self) -> None:
        """Read the engine's properties."""
        with self._named("/server_info"):
            reply = await self._control.info("server_info")
        try:
            self.info = EngineInfo(
                embedded=reply.get("engine") == "any-agent embedded",
                cuda=str(reply.get("device", "")).startswith("cuda"),
                dtype=str(reply.get("dtype", "auto")),
                processes=int(reply.get("tp_size") or 1),
                started=str(reply.get("startup_time", "")),
            )
        except (TypeError, ValueError) as error:
            raise self._unreadable("/server_info") from error

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the reply; EngineUnavailable without a good one, TrainingError for a refusal."""
        with self._named(path):
            reply = await self._control.request("POST", path, body, limit=self._timeout)
        if reply.get("success") is False:
            raise self._refused(path, str(reply.get("message"))[:300])
        return reply

    async def rename(self, version: str) -> None:
        """Name the engine's weights. A name other than a number is no version: no call samples."""
        body = {"new_version": version, "abort_all_requests": False}
        await self.post("/update_weight_version", body)

    async def flush(self) -> None:
        """Empty the engine's cache; EngineUnavailable while it has calls.

        SGLang may still be at the last step of calls that a pause has ended; it waits for that.
        """
        try:
            await self.post(f"/flush_cache?timeout={_IDLE_TIMEOUT:g}", {})
        except TrainingError as error:
            raise EngineUnavailable(error.message) from error

    async def checksums(self) -> Sums:
        """Return each process's checksums by the engine's weight names; [] without such a route."""
        try:
            reply = await self.post("/weights_checker", {"action": "checksum"})
        except NotFound:
            return []
        try:
            return [dict(each["checksums"]) for each in reply.get("ranks") or []]
        except (LookupError, TypeError, ValueError) as error:
            raise self._unreadable("/weights_checker") from error

    def _unreadable(self, path: str) -> EngineUnavailable:
        return EngineUnavailable(f"the engine at {self.url} answered {path} in an unknown form")

    def _refused(self, path: str, why: str) -> TrainingError:
        return TrainingError(f"the engine at {self.url} refused {path}: {why}")

    @contextmanager
    def _named(self, path: str) -> Iterator[None]:
        """Raise errors with the engine's URL; NotFound for a route that it lacks, TrainingError for
        any other refusal."""
        try:
            yield
        except EngineRefused as error:
            if error.answered == 404:
                raise NotFound(f"the engine at {self.url} has no route {path}") from error
            if error.answered < 500:
                raise self._refused(path, error.message) from error
            raise EngineUnavailable(
                f"the engine at {self.url} failed at {path}: {error.message}"
            ) from error
        except ConfigError as error:
            raise TrainingError(f"{error.message}, at {self.url}") from error
        except EngineUnavailable as error:
            raise EngineUnavailable(f"the engine at {self.url}: {error.message}") from error


class WeightVerifier:
    """Compares checksums, and remembers the engine processes that passed."""

    def __init__(self) -> None:
        self._proven: set[tuple[str, str]] = set()

    def forget(self, engine: EngineClient) -> None:
        """Forget an engine that failed."""
        self._proven.discard(engine.identity)

    def needs_proof(self, engine: EngineClient) -> bool:
        """Return True if :meth:`expected` must run before weights are sent to the engine."""
        return not engine.info.embedded and engine.identity not in self._proven

    async def expected(self, engine: EngineClient, new: NewWeights) -> Sums | None:
        """Return the checksums that the weights must give; the engine's are random afterwards.

        None if the engine cannot read the folder: then they are unknown.
        """
        body = {"model_path": str(new.folder), "weight_version": new.loading, "flush_cache": False}
        try:
            await engine.post("/update_weights_from_disk", body)
        except TrainingError as error:
            log.warning(
                "the weights of the engine at %s cannot be verified: %s", engine.url, error.message
            )
            return None
        sums = await engine.checksums()
        if not sums:
            log.warning("the engine at %s reports no checksums of its weights", engine.url)
            return None
        await engine.post("/weights_checker", {"action": "reset_tensors"})
        if sums == await engine.checksums():
            raise TrainingError(
                f"the engine at {engine.url} reports the same checksums for random weights; set "
                "engine.weight_sync=disk"
            )
        return sums

    async def require(
        self, engine: EngineClient, sent: Mapping[str, str], expected: Sums | None, dtype: str
    ) -> Sums:
        """Return the engine's checksums, once they prove that it has the weights.

        ``sent`` are the checksums of the tensors sent, in ``dtype``. Raises EngineUnavailable or
        TrainingError if the engine has other weights.
        """
        sums = await engine.checksums()
        if engine.info.embedded:
            mine = sums[0] if sums else {}
            if engine.info.dtype == dtype and sent.keys() <= mine.keys():
                wrong = [name for name, value in sent.items() if mine[name] != value]
                if wrong:
                    raise EngineUnavailable(
                        f"the engine at {engine.url} has other values than were sent, in "
                        f"{len(wrong)} weights, e.g. {wrong[0]}"
                    )
        elif expected is not None:
            if sums != expected:
                raise TrainingError(
                    f"the engine at {engine.url} has other weights than those of the same "
                    "version's folder: it does not take this model's weights this way; set "
                    "engine.weight_sync=disk"
                )
            self._proven.add(engine.identity)
        return sums


def require_alike(engines: Sequence[EngineClient], sums: Sequence[Sums]) -> None:
    """Raise EngineUnavailable unless engines of one kind have the same weights."""
    first: dict[tuple[bool, bool, str, int], tuple[EngineClient, Sums]] = {}
    for engine, own in zip(engines, sums, strict=True):
        info = engine.info
        kind = (info.embedded, info.cuda, info.dtype, info.processes)
        other, others = first.setdefault(kind, (engine, own))
        if own != others:
            raise EngineUnavailable(
                f"the engines at {other.url} and {engine.url} were sent the same weights, but have "
                "different ones"
            )
