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

import math
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import yaml

from any_agent.auth.access import require_key, signer_of
from any_agent.auth.engine_key import write_engine_key
from any_agent.config import (
    ADMIN_KEY_VARIABLE,
    ENGINE_KEY_VARIABLE,
    JOURNAL_VARIABLE,
    SECRET_VARIABLES,
    Config,
    secret_variables,
)
from any_agent.errors import ConfigError, StartupError
from any_agent.launcher import journal_storage
from any_agent.launcher.component import Component
from any_agent.launcher.engines import (
    SHARED_GPUS,
    GpuAssignment,
    assign_gpus,
    require_devices,
    require_engines,
    require_weights,
    visible_gpus,
)
from any_agent.launcher.fleet_control import FleetController
from any_agent.launcher.health import HealthReport, HealthWatch
from any_agent.launcher.hub_model import bring_model, on_hub, parts_variables
from any_agent.launcher.node_role import WHOLE, NodeRole, trainer_arguments
from any_agent.launcher.process import Command, SupervisedProcess, answers
from any_agent.launcher.rank_parts import RankParts
from any_agent.launcher.registry_monitor import RegistryMonitor
from any_agent.launcher.shutdown import Terminated, drain, stop, uninterrupted
from any_agent.launcher.training_progress import TrainingProgress
from any_agent.launcher.trial import (
    ServedModel,
    TrialWeights,
    fleet_before,
    latest_weights,
    require_grader,
    require_no_dataset_settings,
    require_same_ranks,
    require_training,
    trial_dir,
)
from any_agent.rundir.fleet import Fleet, load_fleet
from any_agent.rundir.layout import latest_step
from any_agent.rundir.registry import HEARTBEAT, read_entry, run_is_gone
from any_agent.rundir.store_beside import store_beside
from any_agent.runtime.atomic_files import write_atomic
from any_agent.runtime.command_line import SLOW, told_if_slow
from any_agent.runtime.disk_space import has_space
from any_agent.runtime.file_watcher import WatchedPath
from any_agent.runtime.ports import accept_on, from_here, port_of, reachable, reserve, url_of

_POLL_INTERVAL = 0.1
_NOTICE_INTERVAL = 10.0  # seconds between two lines about a wait
_BACKLOG = 2048  # connections that may wait for a router that restarts
LISTENING = "any-agent server listening at "
"""The text before the URL in the first line of :func:`listening`."""


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
    show: Callable[[str], None] | None = None
    """On a terminal: called with a line on the run's health, which replaces the one before."""


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
        self.gpus: GpuAssignment
        """The GPUs of this machine's parts at the start."""
        self._offline: Mapping[str, str] = {}
        """Variables of parts that load models from the hub's cache."""
        self._started = False
        self._watched: WatchedPath | None = None
        """The run's registry, which must stay in its place."""
        self._look_at = 0.0
        self._monitor = RegistryMonitor(
            self.dir.registry, self.parts, self.options.say, hung_after=config.engine.hung_after
        )
        self._stack = ExitStack()
        self._lock: int | None = None
        """The run's locked file, which every child inherits."""
        self._public: socket.socket
        self._model = ServedModel(config, self.options.weights)
        self._settings = ["--config", str(self.dir.resolved)]
        self._ranks = RankParts(
            config,
            self.dir,
            self.options.place,
            self._model,
            training=self.options.train,
            add=self._add,
            registered=self.registered,
            say=self.options.say,
        )
        self._stack.enter_context(self._ranks)
        self._fleet = FleetController(
            self.dir,
            self.parts,
            self._ranks,
            say=self.options.say,
            save=self._save_fleet,
            drain_timeout=config.server.drain_timeout,
        )

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException as error:
            self._end(error, drain_first=None)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(error, drain_first=error if isinstance(error, Terminated) else None)

    def _end(self, error: BaseException | None, *, drain_first: Terminated | None) -> None:
        """End every process; after a signal, print how running calls end."""
        signalled = isinstance(error, Terminated | KeyboardInterrupt)
        say = self.options.say if signalled else lambda _: None
        cut = False
        try:
            if drain_first is not None:
                usual = self.config.server.drain_timeout
                within = usual if drain_first.within is None else drain_first.within
                say(
                    f"service   draining: new work is refused, running work has {within:g} s to end"
                )
                # The proxies need little of a longer time than usual.
                longer = within - usual if within > 2 * usual else None
                cut = not drain(self.parts, self._refuse_connections, within, trainer_within=longer)
                self._warn_of_cut_trainer(say)
            else:
                say("service   stopping: running calls are cut off")
        finally:
            self.stop()
        step = latest_step(self.dir.checkpoints) if self.options.train else None
        kept = ""
        if step is not None:
            done = step >= self.config.train.steps
            kept = (
                f"; {step} steps are done"
                if done
                else (f"; the same command goes on from step {step}")
            )
        say(f"service   stopped{'; unfinished work was cut off' if cut else ''}{kept}")

    def _warn_of_cut_trainer(self, say: Callable[[str], None]) -> None:
        if any(part.kind == "trainer" and part.running for part in self.parts.values()):
            say(
                "trainer   is cut off: its steps since the last checkpoint will be repeated; a "
                "step with its checkpoint needs more time (server.drain_timeout, or in a Slurm job "
                "cluster.warning)"
            )

    def stop(self) -> None:
        """End every process within seconds, for certain, and store the journals."""
        with uninterrupted():
            stop(self.parts, self._refuse_connections)
            if not self._folder_is_gone():
                self._ranks.store_journals()
            self._stack.close()

    def _refuse_connections(self) -> None:
        """Close the public socket, once its router is gone."""
        if "router" in self.parts:
            self._public.close()

    def watch(self, *, until_trained: bool = False) -> None:
        """Keep the parts running; with ``until_trained`` return when training has ended.

        Raises what :meth:`check` raises.
        """
        steps = self.config.train.steps if self.options.train else 0
        progress = TrainingProgress(self.dir.metrics, steps, self.dir.waiting)
        report = HealthReport(self.options.say, self.options.show)
        key = signer_of(self.dir)
        announced = False
        with HealthWatch(self.local_url, lambda: key.run_key, steps) as health:
            while True:
                trained = self.check()
                for line in progress.new_lines():
                    self.options.say(line)
                if trained and not announced:
                    announced = True
                    report.renew()
                    self.options.say(f"trainer   done; checkpoints in {self.dir.checkpoints}")
                    if not until_trained:
                        self.options.say(
                            f"serving   the trained model goes on at {self.url}/v1: calls need no "
                            "session now, only an admin's key where keys are required; Ctrl-C "
                            "ends it"
                        )
                if trained and until_trained:
                    return
                report.update(health.latest)
                time.sleep(_POLL_INTERVAL)

    def check(self) -> bool:
        """Check every part once, start dead ones again; return whether training has ended.

        It never waits. A part that hangs is killed. A restarted proxy has everything that it
        acknowledged in its journal, a restarted engine gets the newest weights, a restarted trainer
        continues from its checkpoint. Raises ConfigError or StartupError for a part that cannot go
        on, and once the run's folder is gone.
        """
        self._require_folder()
        for part in list(self.parts.values()):
            try:
                part.check()
            except (ConfigError, StartupError) as error:
                if not self._fleet.abandon(part.name, error):
                    raise
        self._monitor.poll()
        if self._started:
            self._fleet.poll()
        trainers = [part for part in self.parts.values() if part.kind == "trainer"]
        return bool(trainers) and all(part.finished for part in trainers)

    # ------------------------------------------------------------------------------------------

    def _start(self) -> None:
        config, options, place = self.config, self.options, self.options.place
        trains = options.train and place.trainer
        self._model.require(trains=options.train)
        if trains:
            require_training(config)
            if not options.trainer_outside:
                require_no_dataset_settings(config)
        require_devices(config, trains=trains)
        if place.ranks_of(config):
            require_grader(config)
            require_engines(config, trains=options.train)
            journal_storage.require_local(self.dir)
        require_key(config, config.server.host)
        fresh = not self.dir.path.exists()
        if fresh:
            # A port that is in use leaves no trial behind.
            self._claim_address()
        if place.router:
            self._claim_folder(_as_yaml(config))
        if not fresh:
            self._claim_address()
        if place.router:
            options.say(f"run       {self.dir.path}")
            self._warn_if_trained()
        fleet = self._begin_fleet()
        here = place.ranks_of(config, fleet)
        # A rank that is drained samples no more.
        sampling = [rank for rank in here if fleet.state(rank) != "drained"]
        visible = visible_gpus()
        free = visible[: len(visible) - place.gpus_taken]
        self.gpus = assign_gpus(config, free, engines=len(sampling), trains=trains)
        self._bring_models(trains=trains, engines=bool(sampling))
        self._before_parts()
        self._watched = WatchedPath(self.dir.registry)
        self._stack.callback(self._watched.close)
        if place.router and (beside := store_beside(config)) is not None:
            beside.forget()
        self._ranks.public_url = self.url
        self._ranks.bring_journals(here)
        self.engine_urls = self._ranks.start_engines(sampling, fleet, self.gpus)
        self._until_ready()
        if config.engine.urls and place.router and not options.train:
            # A trainer would send them the run's weights.
            with told_if_slow(options.say, "waiting   for a comparison of the engines' weights"):
                require_weights(config, self.dir.resolved, options.say)
        for rank in here:
            self._ranks.start_proxy(rank)
        self._until_ready()
        if place.router:
            self._start_router()
            # Agents find the service by this file.
            write_atomic(self.dir.url, f"{self.url}\n")
            if options.train:
                # Not earlier: a failed start must not bind the trial to a mistyped model.
                saved = options.configured or config
                write_atomic(self.dir.path / "config.yaml", _as_yaml(saved))
        if options.train and not options.trainer_outside:
            self._start_trainer()
        self._started = True

    def _bring_models(self, *, trains: bool, engines: bool) -> None:
        """Download the models that this machine's engines and trainer load from a hub.

        A process that trains itself finds them in the cache, too.
        """
        loads = engines and not self.config.engine.urls and self.options.weights is None
        wanted = [self.config.model.path] if loads or trains else []
        if trains:
            wanted += [self.config.train.reference_model, self.config.train.teacher]
        for model in dict.fromkeys(filter(on_hub, wanted)):
            bring_model(model, self.options.say, check=self.check)
            self._offline = parts_variables()

    def _begin_fleet(self) -> Fleet:
        """Return the ranks of this start; ConfigError where they cannot be those of the last."""
        config, place = self.config, self.options.place
        if not place.router:
            return load_fleet(self.dir.fleet) or Fleet.of(config.server.ranks)
        if place.ranks is not None:
            self._fleet.fixed = (
                "the ranks of a Slurm job are those of its nodes: they change with server.ranks "
                "or the number of nodes of another trial, or with a service on one machine"
            )
            require_same_ranks(config, fleet_before(config))
        fleet = self._fleet.begin(fleet_before(config), config.server.ranks)
        if config.engine.urls and "draining" in fleet.others.values():
            raise ConfigError(
                "engine.urls has no engine for the ranks that go, which may have sessions: start "
                "with the engines of all ranks, drain ranks by `any-agent ranks drain N`, and "
                "leave out their engines once they have ended"
            )
        return fleet

    def _save_fleet(self, fleet: Fleet) -> None:
        """Save the ranks that serve for a restart without a file of settings."""
        config = self.options.configured or self.config
        server = config.server.model_copy(update={"ranks": len(fleet.serving)})
        engine = config.engine
        if engine.urls:
            urls = tuple(self._ranks.engines[rank].url for rank in fleet.serving)
            engine = engine.model_copy(update={"urls": urls})
        if self.options.train:
            saved = config.model_copy(update={"server": server, "engine": engine})
            write_atomic(self.dir.path / "config.yaml", _as_yaml(saved))

    # ------------------------------------------------------------------------------------------

    def _require_folder(self) -> None:
        """Raise StartupError once the run's folder is gone: no part may start anew in another."""
        restarts = any(part.state == "restarting" for part in self.parts.values())
        if restarts or time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + HEARTBEAT
            if self._folder_is_gone():
                raise StartupError(run_is_gone(self.dir.path))

    def _folder_is_gone(self) -> bool:
        return self._watched is not None and self._watched.is_gone()

    def _before_parts(self) -> None:
        """Prepare the start of the parts; the address and the folder are there. For subclasses."""

    def _start_router(self) -> None:
        """Start the router on the public socket and wait until it is ready."""
        public = self._public
        host, port = self.config.server.host, port_of(public)
        # The launcher already listens: a client that connects while no router runs waits for the
        # next one instead of being refused.
        accept_on(public, _BACKLOG)
        arguments = ["router", *self._settings, "--host", host, "--port", str(port)]
        arguments += ["--listener", str(public.fileno()), "--public-url", self.url]
        command = Command(arguments, listener=public.fileno(), quick=signal.SIGINT)
        self._add(
            "router",
            lambda: command,
            ready=self.registered("router", url_of(from_here(host), port)),
            where=f" at {self.url}",
            # It calls ranks, never an engine. The journal's Redis has the registry.
            secrets=(ADMIN_KEY_VARIABLE, JOURNAL_VARIABLE),
        )
        self._until_ready()

    def _start_trainer(self) -> None:
        """Start this machine's trainer, if it has one; the service is ready.

        It is not waited for: its model may take any time to load.
        """
        place = self.options.place
        if not place.trainer:
            return
        # Of several machines that train, the first one's process reports for all of them.
        leads = place.training is None or place.training.index == 0
        gpus = self.gpus.trainer
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus is not None else {}
        # The trainer chooses by it how weights go to the engines.
        variables[SHARED_GPUS] = self.gpus.sharing
        arguments = trainer_arguments(self.config, self.dir.resolved, place)
        self._add(
            "trainer",
            lambda: Command(arguments, variables=variables),
            ready=self.registered("trainer") if leads else lambda _: True,
            opened=self._admits if leads else lambda: True,
            timeout=math.inf,
            progress=lambda: _size(self.dir.metrics),
            finishes=True,
            # The trainer has a key of its own, derived from the run's signing secret.
            secrets=(ENGINE_KEY_VARIABLE, JOURNAL_VARIABLE),
        )
        if leads:
            self.options.say(
                "trainer   loads its model; until it is ready, train sessions wait to be opened "
                "(as long as `wait` says, then 429)"
            )

    def _add(
        self,
        name: str,
        command: Callable[[], Command],
        *,
        secrets: Sequence[str] = SECRET_VARIABLES,
        **options: Any,
    ) -> None:
        """Start a part that runs ``command`` with these secret variables."""
        given = {k: v for k, v in secret_variables(self.config).items() if k in secrets}
        log = self.dir.logs / f"{name}.log"

        # A grader may load what it likes from a hub.
        offline = {} if self.config.sessions.grader and name.startswith("rank-") else self._offline

        def make() -> SupervisedProcess:
            made = command()
            made = replace(made, secrets=given, variables={**offline, **made.variables})
            return SupervisedProcess(name, made, log, lock=self._lock)

        part = Component(name, make, say=self.options.say, starved=self._starved, **options)
        self.parts[name] = part
        part.start()

    def _starved(self) -> bool:
        """Return whether the disk of the run, or of its journals, is full."""
        return not has_space(self.dir.path, self.dir.journal(0).parent)

    def _until_ready(self) -> None:
        """Wait until all parts are ready; ones that die meanwhile are started again.

        A line on the console says what is waited for, after some seconds and then every ten.
        """
        began = time.monotonic()
        told = began + SLOW - _NOTICE_INTERVAL
        while waiting := [p.label for p in self.parts.values() if p.state != "ready"]:
            self.check()
            now = time.monotonic()
            if now - told > _NOTICE_INTERVAL:
                told = now
                self.options.say(
                    f"waiting   for {', '.join(waiting)} to be ready ({now - began:.0f} s so far; "
                    f"logs in {self.dir.logs})"
                )
            time.sleep(0.02)

    def registered(self, name: str, url: str | None = None) -> Callable[[SupervisedProcess], bool]:
        """Return a check that the process itself has registered as ready, and answers.

        Its predecessor or another program could answer at the same address.
        """

        def ready(process: SupervisedProcess) -> bool:
            entry = read_entry(self.dir.registry, name)
            own = entry is not None and entry.pid == process.pid and entry.state == "ready"
            return own and (url is None or answers(f"{url}/healthz"))

        return ready

    def _admits(self) -> bool:
        """Return whether the trainer has let the ranks admit sessions."""
        entry = read_entry(self.dir.registry, "trainer")
        return entry is not None and entry.admits

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
            write_engine_key(self.dir)
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


def listening(config: Config, url: str) -> list[str]:
    """Return the lines that name the URLs at which agents and people find a service."""
    lines = [f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] INFO: {LISTENING}{url}"]
    if config.server.ui:
        lines.append(f"dashboard {url}/ui")
    return lines


def _as_yaml(config: Config) -> str:
    """Return the settings without secrets."""
    return yaml.safe_dump(config.dump(), sort_keys=False)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
