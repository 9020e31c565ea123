"""One start of a run's service, from its settings to the end of its last process."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

import yaml
from aiohttp import hdrs
from multidict import CIMultiDict

from any_agent.auth.key_store import StoredKey, StoredKeys
from any_agent.config.cloud import CloudConfig
from any_agent.config.load import ADMIN_KEY_VARIABLE
from any_agent.errors import AnyAgentError
from any_agent.launcher.engines import visible_gpus
from any_agent.launcher.process import Command, SupervisedProcess
from any_agent.rundir.layout import RunDir
from any_agent.rundir.registry import read_entry
from any_agent.runtime.atomic_files import make_folder, make_shared_folder, write_atomic
from any_agent.runtime.ports import keep, port_of, url_of
from router.body import json_object
from router.cloud.store import Run
from router.upstream import NeverSent, Upstream

log = logging.getLogger(__name__)

T = TypeVar("T")
PROGRAM = ("any_agent.cli", "serve")
"""The module that serves a run, and its first arguments."""
_HOST = "127.0.0.1"
_READY_EVERY = 0.25
"""Seconds between two looks whether a run that starts is ready."""
_MAX_LOG = 1 << 20
"""Bytes of a run's console above which its next start begins another file; one is kept."""
_NOT_STARTED = "it cannot be started, for a reason that the operator of this service sees"
_LAUNCHER_ENDS = 10.0
"""Seconds of `stop_timeout` that a run's launcher has for itself."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a run's service."""

    words: str
    """For its account: nothing of the operator's machine."""
    details: str = ""
    """For the operator, beside the words."""


class _Service:
    """The process of one start, and what it holds."""

    def __init__(self, run: Run, folder: RunDir) -> None:
        self.run = run
        self.dir = folder
        self.admin_key = secrets.token_hex(24)
        """The cloud's own key at this service."""
        self.origin = ""
        self.process: SupervisedProcess | None = None
        self.kept: socket.socket | None = None
        """Keeps its port from other users of the machine."""

    def clean_up(self) -> None:
        if self.process is not None:
            self.process.stop(grace=0)
        if self.kept is not None:
            self.kept.close()


class Launching:
    """Starts the services of runs and waits for their ends."""

    def __init__(
        self,
        config: CloudConfig,
        folder: Path,
        upstream: Upstream,
        keys_of: Callable[[str], Iterable[StoredKey]],
        public_url: str,
    ) -> None:
        """``folder``: for settings and consoles; ``keys_of`` returns an account's keys."""
        self._config = config
        self._folder = folder
        self._upstream = upstream
        self._keys_of = keys_of
        self._public_url = public_url
        self._gpus = visible_gpus()
        # Children end with the thread that started them, so that one lives as long as we do.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="launching")

    def log_of(self, run: Run) -> Path:
        return self._folder / f"{run.id}.log"

    async def write_keys(self, account: str, folders: Iterable[RunDir]) -> None:
        """Give runs of an account its present keys, which those that run follow at once."""

        def write() -> None:
            for folder in folders:
                if folder.path.is_dir():
                    self._write_keys(account, folder)

        await self._in_thread(write)

    def _write_keys(self, account: str, folder: RunDir) -> None:
        keys = StoredKeys(keys=tuple(self._keys_of(account)))
        write_atomic(folder.keys, keys.model_dump_json(exclude_none=True) + "\n")

    async def serve(
        self,
        run: Run,
        folder: RunDir,
        place: int,
        leaves: asyncio.Event,
        became_ready: Callable[[str], None],
    ) -> Failure | None:
        """Start a run in a place, and wait until no process of it is left.

        ``leaves`` tells it to finish what is under way and to end; ``became_ready`` is called with
        its router's URL. Returns what went wrong, None if it left as it was told.
        """
        service = _Service(run, folder)
        try:
            await self._in_thread(lambda: self._start(service, place))
            return await self._until_ended(service, leaves, became_ready)
        except AnyAgentError as error:
            return Failure(_NOT_STARTED, error.message)
        except OSError as error:
            return Failure(f"it cannot be started: {error.strerror}", str(error))
        except Exception as error:
            log.exception("run %s (%s)", run.id, run.name)
            return Failure(_NOT_STARTED, f"{type(error).__name__}: {error}")
        finally:
            await asyncio.shield(self._in_thread(service.clean_up))

    def _start(self, service: _Service, place: int) -> None:
        run, folder = service.run, service.dir
        make_shared_folder(folder.path.parent)
        make_folder(folder.path)
        self._write_keys(run.account, folder)
        service.kept = keep(_HOST)
        port = port_of(service.kept)
        service.origin = url_of(_HOST, port)
        own = {
            "root": str(self._config.root.absolute()),
            "user": run.account,
            "experiment": run.experiment,
            "trial": run.trial,
            "server.host": _HOST,
            "server.port": port,
            "server.public_url": self._public_url,
            "server.lane_tag": run.id,
            "server.ui": False,
            # Half of it is for the trainer's step and checkpoint.
            "server.drain_timeout": max(0.0, self._config.stop_timeout - _LAUNCHER_ENDS),
        }
        settings = self._config.run_settings(run.model, run.preset, run.settings, own)
        path = self._folder / f"{run.id}.yaml"
        write_atomic(path, yaml.safe_dump(settings, sort_keys=False))
        command = Command(
            [*PROGRAM, "--config", str(path)],
            variables=self._variables(place),
            secrets={ADMIN_KEY_VARIABLE: service.admin_key},
        )
        console = self.log_of(run)
        if console.exists() and console.stat().st_size > _MAX_LOG:
            console.replace(console.with_suffix(".log.1"))
        service.process = SupervisedProcess(f"run {run.id}", command, console)
        log.info("run %s (%s) starts", run.id, run.name)
        service.process.start()

    async def _until_ended(
        self, service: _Service, leaves: asyncio.Event, became_ready: Callable[[str], None]
    ) -> Failure | None:
        process, first = service.process, asyncio.FIRST_COMPLETED
        assert process is not None
        async with _exit_of(process.pid) as exited:
            ended = asyncio.create_task(exited.wait())
            told = asyncio.create_task(leaves.wait())
            ready = asyncio.create_task(self._until_ready(service))
            try:
                within = self._config.start_timeout
                await asyncio.wait({ended, told, ready}, timeout=within, return_when=first)
                if ready.done():
                    # Raises what has stopped it from looking.
                    ready.result()
                    if not (ended.done() or told.done()):
                        became_ready(service.origin)
                elif not (ended.done() or told.done()):
                    return Failure(f"it was not ready after {within:g} s")
                elif not told.done():
                    code = process.poll()
                    return Failure(f"its service ended with code {code} before it was ready")
                await asyncio.wait({ended, told}, return_when=first)
                if not ended.done():
                    process.drain()
                    await asyncio.wait({ended}, timeout=self._config.stop_timeout)
                    if not ended.done():
                        log.warning(
                            "run %s (%s) is killed: it has not ended within stop_timeout=%g",
                            *(service.run.id, service.run.name, self._config.stop_timeout),
                        )
            finally:
                for task in (ended, told, ready):
                    task.cancel()
        if leaves.is_set():
            return None
        return Failure(f"its service ended with code {process.poll()}")

    async def _until_ready(self, service: _Service) -> None:
        while True:
            if await self._is_ready(service):
                return
            await asyncio.sleep(_READY_EVERY)

    async def _is_ready(self, service: _Service) -> bool:
        """Return whether the ranks answer and the trainer has let them admit sessions, or has no
        step left to make."""
        if await self._get(service, "/readyz") is None:
            return False
        trainer = await asyncio.to_thread(read_entry, service.dir.registry, "trainer")
        if trainer is not None and trainer.admits:
            return True
        run = json_object(await self._get(service, "/rl/v1/run") or b"null")
        return run is not None and run.get("state") == "finished"

    async def _get(self, service: _Service, path: str) -> bytes | None:
        """Return what a run answers to the operator; None unless it is a 200."""
        headers = CIMultiDict({hdrs.AUTHORIZATION: f"Bearer {service.admin_key}"})
        with suppress(NeverSent, AnyAgentError):
            sent = self._upstream.send("GET", service.origin, path, headers, None)
            async with await sent as answer:
                content = await answer.read()
                return content if answer.status == HTTPStatus.OK else None
        return None

    def gpus_of(self, place: int) -> int:
        """Return the number of GPUs that a place has."""
        devices = self._variables(place).get("CUDA_VISIBLE_DEVICES", "")
        return len(devices.split(",")) if devices else 0

    def _variables(self, place: int) -> dict[str, str]:
        return gpu_share(self._gpus, place, self._config.places)

    def close(self) -> None:
        """Let the thread end that started the services, and with it those that are left."""
        self._thread.shutdown(wait=False)

    async def _in_thread(self, act: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, act)


def gpu_share(gpus: tuple[str, ...], place: int, places: int) -> dict[str, str]:
    """Return the variables that give a place its share of the GPUs; {} without any."""
    if not gpus:
        return {}
    share = gpus[place * len(gpus) // places : (place + 1) * len(gpus) // places]
    return {"CUDA_VISIBLE_DEVICES": ",".join(share)}


@asynccontextmanager
async def _exit_of(pid: int) -> AsyncIterator[asyncio.Event]:
    """Yield an event that is set when a process has ended."""
    exited = asyncio.Event()
    descriptor = os.pidfd_open(pid)
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, exited.set)
    try:
        yield exited
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
