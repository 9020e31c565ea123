"""All processes of one machine: each rank's engine and proxy, the router, the trainer.

::

    engine-0 ... engine-N   embedded engines; none for `engine.urls`
    rank-0 ... rank-N       each rank's proxy
    router                  the public URL
    trainer

In a service on several machines, each runs the parts of its :class:`NodeRole`; they find the others
by the registry in the run's folder, which the machines share.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

import yaml

from any_agent.auth.access import require_key
from any_agent.config import Config
from any_agent.errors import StartupError
from any_agent.launcher import journal_storage
from any_agent.launcher.component import Component
from any_agent.launcher.engines import require_engines, require_weights
from any_agent.launcher.gpu_assignment import require_devices
from any_agent.launcher.node_role import WHOLE, NodeRole
from any_agent.launcher.reachability import from_here, reachable
from any_agent.launcher.registry_monitor import RegistryMonitor
from any_agent.launcher.shutdown import Terminated, drain, stop, uninterrupted
from any_agent.launcher.starter import Starter, port_of
from any_agent.launcher.training_progress import TrainingProgress
from any_agent.launcher.trial import ServedModel, TrialWeights, latest_weights, trial_dir
from any_agent.runtime.atomic_files import write_atomic
from any_agent.runtime.ports import reserve, url_of

_POLL_INTERVAL = 0.1


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Which parts a node starts, and with which weights."""

    train: bool = True
    trainer_outside: bool = False
    """With ``train``: the process that enters the node trains itself; no trainer is started."""
    weights: TrialWeights | None = None
    """The weights that engines always serve; None: the newest at each start of an engine."""
    place: NodeRole = WHOLE
    """This machine's share of the service."""
    configured: Config | None = None
    """The settings to save for the trial, if ``config`` has settings of this start only."""
    say: Callable[[str], None] = print
    """Called with a line when a part is ready, ends, or is started again."""


class Node:
    """The service on one machine; a context manager that stops everything it started.

    `Terminated`, which `terminate` raises at SIGTERM, drains the service first.
    Call :meth:`check` or :meth:`watch` while it runs, always in the thread that entered it:
    children end with the thread that started them.
    """

    def __init__(self, config: Config, options: NodeOptions | None = None) -> None:
        self.config = config
        self.options = options or NodeOptions()
        self.dir = trial_dir(config)
        self.url = ""
        """The public URL."""
        self.local_url = ""
        """The router's URL, as this machine reaches it."""
        self.engine_urls: Sequence[str] = ()
        """URLs of the engines of this machine's ranks."""
        self.parts: dict[str, Component] = {}
        """The parts by name, in the order of starting."""
        self._monitor = RegistryMonitor(self.dir.registry, self.parts, self.options.say)
        self._stack = ExitStack()
        self._lock: int | None = None
        self._journals_here = False
        """True while this machine's journals are here and may change."""
        self._public: socket.socket
        self._model = ServedModel(config, self.options.weights)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException as error:
            self._end(error, drains=False)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(error, drains=isinstance(error, Terminated))

    def _end(self, error: BaseException | None, *, drains: bool) -> None:
        """End every process; after a signal, print how running calls end."""
        signalled = isinstance(error, Terminated | KeyboardInterrupt)
        say = self.options.say if signalled else lambda _: None
        cut = False
        try:
            if drains:
                within = self._drain_within(error)
                say(
                    f"service   draining: new work is refused, running work has {within:g} s to end"
                )
                # The proxies need little of a longer time than usual.
                usual = self.config.server.drain_timeout
                longer = within - usual if within > 2 * usual else None
                cut = not drain(self.parts, self._refuse_connections, within, trainer_within=longer)
                self._warn_of_cut_trainer(say)
            else:
                say("service   stopping: running calls are cut off")
        finally:
            self.stop()
        say(f"service   stopped{'; unfinished work was cut off' if cut else ''}")

    def _warn_of_cut_trainer(self, say: Callable[[str], None]) -> None:
        if any(part.kind == "trainer" and part.running for part in self.parts.values()):
            say(
                "trainer   is cut off: its steps since the last checkpoint will be repeated; a "
                "step with its checkpoint needs more time (server.drain_timeout, or in a Slurm job "
                "cluster.warning)"
            )

    def _drain_within(self, error: BaseException | None) -> float:
        within = error.within if isinstance(error, Terminated) else None
        return self.config.server.drain_timeout if within is None else within

    def stop(self) -> None:
        """End every process within seconds, for certain, and store the journals."""
        with uninterrupted():
            stop(self.parts, self._refuse_connections)
            if self._journals_here:
                self._journals_here = False
                place, say = self.options.place, self.options.say
                journal_storage.store_journals(
                    self.dir, place.ranks_of(self.config), place.machine, say
                )
            self._stack.close()

    def _refuse_connections(self) -> None:
        """Close the public socket, once its router is gone."""
        if "router" in self.parts:
            self._public.close()

    def watch(self, *, until_trained: bool = False) -> None:
        """Keep the parts running; with ``until_trained`` return when training has ended.

        Raises what :meth:`check` raises.
        """
        progress = TrainingProgress(self.dir.metrics, self.config.train.steps, self.dir.waiting)
        announced = False
        while True:
            trained = self.check()
            for line in progress.new_lines():
                self.options.say(line)
            if trained and not announced:
                announced = True
                self.options.say(f"trainer   done; checkpoints in {self.dir.checkpoints}")
            if trained and until_trained:
                return
            time.sleep(_POLL_INTERVAL)

    def check(self) -> bool:
        """Check every part once, start dead ones again; return whether training has ended.

        It never waits. A part that hangs is killed. A restarted proxy has everything that it
        acknowledged in its journal, a restarted engine gets the newest weights, a restarted trainer
        continues from its checkpoint. Raises ConfigError or StartupError for a part that cannot go
        on.
        """
        for part in self.parts.values():
            part.check()
        self._monitor.poll()
        trainers = [part for part in self.parts.values() if part.kind == "trainer"]
        return bool(trainers) and all(part.finished for part in trainers)

    # ------------------------------------------------------------------------------------------

    def _start(self) -> None:
        config, options, place = self.config, self.options, self.options.place
        self._model.require(trains=options.train)
        require_devices(config, trains=options.train and place.trainer)
        if place.ranks_of(config):
            require_engines(config)
            journal_storage.require_local(self.dir)
        require_key(config, config.server.host)
        if place.router:
            self._claim_folder(_as_yaml(config))
        self._claim_address()
        if place.router:
            options.say(f"run       {self.dir.path}")
            self._warn_if_trained()
        self.starter = self._make_starter()
        self._before_parts()
        journal_storage.fetch_journals(self.dir, place.ranks_of(config), place.machine, options.say)
        self._journals_here = True
        self.engine_urls = self.starter.engines()
        if config.engine.urls and place.router and not options.train:
            # A trainer would send them the run's weights.
            require_weights(config, self.dir.resolved, options.say)
        self.starter.proxies(self.engine_urls, self.url)
        if place.router:
            self.starter.router(self._public, self.url)
            # Agents find the service by this file.
            write_atomic(self.dir.url, f"{self.url}\n", mode=0o644)
            if options.train:
                # Not earlier: a failed start must not bind the trial to a mistyped model.
                saved = options.configured or config
                write_atomic(self.dir.path / "config.yaml", _as_yaml(saved))
        if options.train and not options.trainer_outside:
            self._start_trainer()

    def _before_parts(self) -> None:
        """Prepare the start of the parts; the address and the folder are there. For subclasses."""

    def _start_trainer(self) -> None:
        """Start this machine's trainer, if it has one; the service is ready."""
        if self.options.place.trainer:
            self.starter.trainer()

    def _make_starter(self) -> Starter:
        return Starter(
            self.config,
            self.dir,
            self.options.place,
            self._model,
            self.parts,
            say=self.options.say,
            check=self.check,
            stack=self._stack,
            training=self.options.train,
            lock=self._lock,
        )

    def _claim_address(self) -> None:
        """Reserve the public address; ConfigError for a port that is in use."""
        server, place = self.config.server, self.options.place
        if not place.router:
            self.url = self.local_url = place.public_url
            return
        self._public = self._stack.enter_context(reserve(server.host, server.port))
        port = port_of(self._public)
        self.url = server.public_url or url_of(reachable(server.host), port)
        self.local_url = url_of(from_here(server.host), port)

    def _claim_folder(self, settings: str) -> None:
        """Lock the trial's folder for this service; StartupError if that is not possible."""
        try:
            self.dir.create()
            self._lock = self._stack.enter_context(self.dir.lock())
            for old in self.dir.registry.iterdir():
                old.unlink()
            write_atomic(self.dir.resolved, settings)
        except OSError as error:
            raise StartupError(
                f"cannot write in {self.dir.path}: {error.strerror}; choose another root"
            ) from None

    def _warn_if_trained(self) -> None:
        saved = latest_weights(self.config)
        if saved is not None and saved.step >= self.config.train.steps:
            self.options.say(
                f"run       train.steps={self.config.train.steps} are done, so train sessions are "
                f"refused: raise train.steps, or choose another trial; checkpoint {saved.path}"
            )


def _as_yaml(config: Config) -> str:
    """Return the settings without secrets."""
    return yaml.safe_dump(config.dump(), sort_keys=False)
