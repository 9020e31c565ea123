"""The engines and proxies of the ranks of one machine, with their ports, GPUs and journals."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

from any_agent.config import Config
from any_agent.errors import ConfigError
from any_agent.launcher import journal_storage
from any_agent.launcher.engines import (
    GpuAssignment,
    engine_command,
    engine_ready,
    gpus_of_another,
    start_timeout,
    visible_gpus,
)
from any_agent.launcher.node_role import NodeRole
from any_agent.launcher.process import Command, SupervisedProcess
from any_agent.launcher.trial import ServedModel
from any_agent.rundir.fleet import Fleet
from any_agent.rundir.layout import RunDir
from any_agent.rundir.registry import rank_name
from any_agent.runtime.ports import keep, port_of, url_of

_Ready: TypeAlias = Callable[[SupervisedProcess], bool]


class AddPart(Protocol):
    """Starts a part that runs a command."""

    def __call__(self, name: str, command: Callable[[], Command], **options: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """The place of a rank's engine."""

    url: str
    port: int = 0
    """The port of an engine that is started here."""
    gpus: tuple[str, ...] | None = None
    """The GPUs that it sees; None: all."""


class RankParts:
    """Starts the engines and proxies of this machine's ranks; a context manager that keeps their
    ports, so that a part comes back at its old address."""

    def __init__(
        self,
        config: Config,
        run: RunDir,
        place: NodeRole,
        model: ServedModel,
        *,
        training: bool,
        add: AddPart,
        registered: Callable[[str, str | None], _Ready],
        say: Callable[[str], None],
    ) -> None:
        """``registered`` makes the check that a part has registered itself, and answers."""
        self._config = config
        self._run = run
        self._place = place
        self._model = model
        self._training = training
        self._add = add
        self._registered = registered
        self._say = say
        self._stack = ExitStack()
        self._ports: dict[str, int] = {}
        self._journals: set[int] = set()
        """The ranks whose journals are here, may change, and are to be stored."""
        self._trainers: Sequence[str] | None = None
        """The trainer's GPUs."""
        self.engines: dict[int, EnginePlace] = {}
        """The engines by rank; a rank that is drained has none."""
        self.public_url = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._stack.close()

    # -- the start -----------------------------------------------------------------------------

    def bring_journals(self, ranks: Iterable[int]) -> None:
        """Bring the journals of these ranks to this machine, as the last service left them."""
        ranks, run, machine = list(ranks), self._run, self._place.machine
        logged = self._config.server.journal is not None
        # A rank brings its journal itself once it has a log; that begins with what is here.
        restored = [rank for rank in ranks if logged and run.log_note(rank).exists()]
        journal_storage.note_homes(run, restored, machine)
        others = [rank for rank in ranks if rank not in restored]
        journal_storage.fetch_journals(run, others, machine, self._say)
        if not logged:
            self._journals.update(ranks)

    def store_journals(self) -> None:
        """Store the journals, once no process uses them."""
        journals, self._journals = sorted(self._journals), set()
        if journals:
            journal_storage.store_journals(self._run, journals, self._place.machine, self._say)

    def start_engines(
        self, ranks: Sequence[int], fleet: Fleet, gpus: GpuAssignment
    ) -> Sequence[str]:
        """Start the engines of these ranks, and return their URLs; it does not wait for them."""
        self._trainers = gpus.trainer
        if urls := self._config.engine.urls:
            at = dict(zip(fleet.serving, urls, strict=True))
            self.engines = {rank: EnginePlace(at[rank]) for rank in ranks}
        else:
            if ranks:
                path, version = self._model.weights()
                self._say(f"model     {path}, version {version}")
            for rank, hand in zip(ranks, gpus.engines, strict=True):
                self.engines[rank] = self._own_engine(rank, hand)
            for rank in ranks:
                self.start_engine(rank)
        return [self.engines[rank].url for rank in ranks]

    # -- one rank, also later --------------------------------------------------------------------

    def prepare(self, rank: int) -> None:
        """Take what an added rank needs; ConfigError if there is not enough of it."""
        if self._config.engine.urls:
            raise ConfigError(
                "engine.urls names the engines: add the new rank's to it, raise server.ranks, and "
                "start the service again"
            )
        taken = [engine.gpus for engine in self.engines.values()]
        gpus = gpus_of_another(self._config, visible_gpus(), taken, self._trainers)
        self.bring_journals([rank])
        self.engines[rank] = self._own_engine(rank, gpus)

    def release(self, rank: int) -> None:
        """Give back what an engine that has ended had."""
        self.engines.pop(rank, None)

    def forget(self, rank: int) -> None:
        """Store what a rank that has ended left."""
        if rank in self._journals:
            self._journals.remove(rank)
            journal_storage.store_journals(self._run, [rank], self._place.machine, self._say)

    def start_engine(self, rank: int) -> None:
        config, host, name = self._config, self._place.host, f"engine-{rank}"
        url, port, gpus = self.engines[rank].url, self.engines[rank].port, self.engines[rank].gpus
        key = self._run.engine_key

        def command() -> Command:
            weights = self._model.weights()
            return engine_command(config, *weights, host, port, name, key_file=key, gpus=gpus)

        self._add(
            name,
            command,
            ready=lambda one: engine_ready(config, url, one, key_file=key),
            timeout=start_timeout(config),
            where=f" at {url}",
            secrets=(),
        )

    def start_proxy(self, rank: int) -> None:
        name, host = rank_name(rank), self._place.host
        port = self._keep_port(name)
        arguments = ["proxy_ext", "--config", str(self._run.resolved), "--rank", str(rank)]
        arguments += ["--host", host, "--port", str(port), "--public-url", self.public_url]
        if self._training:
            arguments += ["--training"]
        starts = 0

        def command() -> Command:
            nonlocal starts
            # The first start reports a wrong address at once; later the engine may be starting.
            wait = self._config.engine.update_wait if starts else 0.0
            starts += 1
            own = ["--engine-wait", f"{wait:g}", "--model-path", self._model.tokenizer()]
            own += ["--engine-url", self._engine_url(rank)]
            return Command([*arguments, *own], quick=signal.SIGINT)

        self._add(name, command, ready=self._registered(name, url_of(host, port)))

    def _engine_url(self, rank: int) -> str:
        """Return the URL of a rank's engine; of any other for a drained rank, which has none and
        asks it nothing but its model."""
        own = self.engines.get(rank)
        return (own or next(iter(self.engines.values()))).url

    def _own_engine(self, rank: int, gpus: tuple[str, ...] | None) -> EnginePlace:
        port = self._keep_port(f"engine-{rank}")
        return EnginePlace(url_of(self._place.host, port), port, gpus)

    def _keep_port(self, name: str) -> int:
        """Keep a port for all starts of a part until the service ends."""
        if name not in self._ports:
            self._ports[name] = port_of(self._stack.enter_context(keep(self._place.host)))
        return self._ports[name]
