"""The training loop: wait for a batch, step, publish, acknowledge, write a checkpoint.

The batches come from a :class:`trainer.batch_source.BatchSource`.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from any_agent.auth.access import signer_of
from any_agent.config import Config
from any_agent.errors import NotFound, StartupError
from any_agent.protocol.training import Rejection
from any_agent.rollout import LeaseExecutor, RankClients
from any_agent.rundir.fleet import FleetFile
from any_agent.rundir.layout import RunDir
from any_agent.rundir.registry import Registry
from any_agent.rundir.store_beside import store_beside
from any_agent.runtime.disk_space import DiskSpace, DiskWaitEnded
from trainer.batch import (
    Group,
    TrainingBatch,
    ZeroVarianceGroups,
    in_stable_order,
    sampled_in,
    tokens_of,
)
from trainer.batch_source import BatchSource, LeasedBatches
from trainer.command_channel import Leader
from trainer.manifests import ConsumedSessions, Manifest, ManifestStore
from trainer.metrics_server import TrainerHeartbeat
from trainer.policy import Policy, StepResult
from trainer.publisher import (
    TIMEOUT,
    Publisher,
    RunStatus,
    TrainingState,
    announce,
    announce_best_effort,
)
from trainer.report import RunReport
from trainer.run_checkpoints import RunCheckpoints
from trainer.step_maker import StepMaker

log = logging.getLogger(__name__)
T = TypeVar("T")

ANNOUNCE_INTERVAL = 60.0  # seconds of waiting for a batch between two lines on the console
LOOK_INTERVAL = 5.0
"""Seconds of waiting for a batch between two looks for ranks that need weights."""
FIRST_ANNOUNCE = 10.0  # the same before the first step: who starts needs to know what comes next


class TrainingLoop:
    """Trains the policy of one run, whose service is running.

    ``source`` is by default that of external agents, whose sessions the ranks have.
    ``say`` gets the lines for the console. ``leader`` commands the processes that train with this
    one.
    """

    def __init__(
        self,
        config: Config,
        *,
        source: BatchSource | None = None,
        say: Callable[[str], None] = log.info,
        leader: Leader | None = None,
    ) -> None:
        self.config = config
        self.dir = RunDir.of(config.root, config.user, config.experiment, config.trial)
        self.evaluate: Callable[[int, bool], object] = lambda step, last: None
        """Called at the start, after every step, and at the end, with the number of steps behind
        the served weights, and True if no more steps follow."""
        self.interrupt_evaluation: Callable[[], object] = lambda: None
        """Ends this and any later evaluation; safe in a signal handler."""
        self.consumed = ConsumedSessions()
        zero_variance = ZeroVarianceGroups(config.train)
        self._epoch: int | None = None
        self._signer = signer = signer_of(self.dir)
        self.executor = LeaseExecutor(
            lambda: RankClients(
                self.dir.registry,
                FleetFile(self.dir.fleet, config.server.ranks),
                also=store_beside(config),
                admin_key=lambda: signer.run_key,
                epoch=self._epoch,
                retry_for=TIMEOUT,
            ),
            config.rollout,
            owner=f"trainer-{uuid.uuid4().hex[:12]}",
            consumed=self.consumed,
            reject=zero_variance.reject_reason,
        )
        self.source = source or LeasedBatches(self.executor, zero_variance)
        self.disk = DiskSpace()
        """Every write of the loop goes through it: a full disk is waited out."""
        self.report = RunReport(config, self.dir, self.disk, lambda: self.source, say)
        self.metrics = self.report.metrics
        self.publisher = Publisher(config, self.dir, self.executor, self.disk, self.source.updating)
        self.manifests = ManifestStore(self.dir.manifests)
        self._checkpoints = RunCheckpoints(config, self.dir, self.disk)
        self._steps = StepMaker(config, self.manifests, self._checkpoints)
        self.policy: Policy
        self.loaded = False
        """True once model, optimizer and counters are loaded."""
        self._begun = False
        """True once the repeated steps and the weights are where they were."""
        self._stopping = False
        self._exhausted = False
        """True once the dataset has no items left."""
        self._failure: BaseException | None = None
        self._leader = leader
        if leader is not None:
            leader.lost = self.fail

    def heartbeat(self, *, host: str = "127.0.0.1", pid: int | None = None) -> TrainerHeartbeat:
        """Return a context manager that shows the loop to the other parts of the run."""
        return TrainerHeartbeat(
            self.dir.registry,
            self.metrics,
            signer=self._signer,
            ready=lambda: self.loaded,
            admits=lambda: self._begun and (self._done or self.source.admits),
            host=host,
            pid=pid,
            also=store_beside(self.config),
            on_lost=lambda why: self.fail(StartupError(why)),
        )

    def stop(self) -> None:
        """End after the current step, with a checkpoint; safe in a signal handler."""
        self._stopping = True
        self._interrupt()

    def fail(self, error: BaseException) -> None:
        """Let :meth:`train` raise ``error`` instead of waiting on: the service is gone."""
        self._failure = error
        self._interrupt()

    def _interrupt(self) -> None:
        self.disk.stop()
        self.source.interrupt()
        self.interrupt_evaluation()

    def train(self) -> bool:
        """Make the configured number of train steps, from the latest checkpoint if any.

        Returns False if it was stopped before the last step.
        """
        self.load()
        try:
            self._epoch = self._write(
                lambda: self.dir.next_epoch(self._seen_epoch()), "the trainer's epoch"
            )
            self.loaded = True
            self.executor.start()
            with ExitStack() as stack:
                for end in (self.executor.stop, self.publisher.close, self.source.stop):
                    stack.callback(end)
                stack.enter_context(self.report.trackers.following(self._hurries))
                self._run()
                return self._done
        except DiskWaitEnded as wait:
            if self._failure is not None:
                raise self._failure from None
            # As after a kill: what is not saved is made again from the manifests.
            log.warning("stopped at step %d without a checkpoint: %s", self.policy.steps, wait)
            return False

    def _hurries(self) -> bool:
        return self._stopping or self._failure is not None

    def _seen_epoch(self) -> int:
        """Return the highest number of a start that the ranks, which are up, know of."""
        registry = Registry(self.dir.registry)
        registry.refresh()
        return max((entry.epoch for entry in registry.entries()), default=0)

    def _run(self) -> None:
        self.policy.clock.start()
        self.catch_up()
        if not self._done:
            self._announce_state("training")
            self.source.begin(self.publisher.version)
        self._begun = True
        try:
            if not self._done:
                self._evaluate()
            while not self._done:
                self.step()
        except InterruptedError:
            if self._failure is not None:
                raise self._failure from None
            log.info("stopped at step %d", self.policy.steps)
        saved = self._checkpoints
        if saved.step != self.policy.steps and (self.policy.steps or not self._stopping):
            self.save()
        elif self._exhausted and self.source.state() != saved.dataset:
            # The last items gave nothing to train on: a restart must not run them again.
            self.save()
        if self._done:
            self._finish()

    def _announce_state(self, state: TrainingState) -> None:
        """Tell every rank, whose journal may be full."""
        self._write(lambda: announce(self.executor, state, self._status), "the ranks' journals")

    def _write(self, work: Callable[[], T], what: str, folder: Path | None = None) -> T:
        """``folder``: where it writes, as folders of the run may be links to other disks."""
        return self.disk.write(work, folder or self.dir.path, what)

    def _finish(self) -> None:
        self._announce_state("finished")
        self.executor.flush()
        with suppress(InterruptedError):
            self.evaluate(self.policy.steps, True)
        if self._failure is not None:
            raise self._failure

    @property
    def _done(self) -> bool:
        return self._exhausted or self.policy.steps >= self.config.train.steps

    # -- one step ------------------------------------------------------------------------------

    def step(self) -> None:
        """Wait for a batch and train on it: a step, or none if nothing of it is left."""
        clock = self.policy.clock
        groups = self._wait()
        clock.lap("wait")
        if not groups:
            self._exhausted = True
            self.report.say(f"data      all items are finished, at step {self.policy.steps}")
            return
        if notices := self.source.zero_variance.trainability.take_notices():
            self.report.announce(*(f"untrained {notice}" for notice in notices))
        versions, positions = self.publisher.versions, self.source.positions_of(groups)
        taken = self._steps.manifest(self.policy, groups, versions, positions)
        batch = self._steps.batch(self.policy, groups, taken)
        taken = replace(
            taken, trained=batch.trained, rejected=batch.rejected, tokens=tokens_of(batch)
        )
        if batch.rows:
            # The manifest is on disk before the step changes anything.
            sampled = sampled_in(groups, self.config.sampling.temperature)
            self._write(
                lambda: self.manifests.write(taken, sampled),
                f"the manifest of step {taken.step}",
                folder=self.dir.manifests,
            )
        result = self._steps.optimize(self.policy, batch, taken)
        if result is not None:
            self.publish()
        self.settle(batch, taken, self.policy.steps if result is not None else None)
        clock.lap("sync")
        if result is None:
            reasons = dict(Counter(batch.rejected.values()))
            log.warning("a batch gave no step; its sessions were rejected: %s", reasons)
            # All sessions may have been too old because an engine lost its weights.
            self.publisher.repair()
            return
        self._report(batch, result)
        if self.policy.steps % self.config.train.checkpoint_every == 0:
            self.save()
            announce_best_effort(self.executor, self._status)
            clock.lap("checkpoint")
        if not self._done:
            self._evaluate()

    def _evaluate(self) -> None:
        self.evaluate(self.policy.steps, False)
        self.policy.clock.lap("evaluate")

    def _report(self, batch: TrainingBatch, result: StepResult) -> None:
        # A repeated step is not published by itself.
        self.report.step(self.policy, self.publisher.versions.highest, batch, result)

    def publish(self) -> None:
        """Give every rank the policy's weights."""
        self.publisher.publish(self.policy, self._checkpoints.tokenizer)
        self.metrics.record_position(step=self.policy.steps, version=self.publisher.version)

    def settle(self, batch: TrainingBatch, taken: Manifest, step: int | None) -> None:
        """Record the sessions that this step, or no step, consumed; acknowledge them."""
        leased = [id for id in batch.trained if id not in batch.sampled]
        refused = {id: why for id, why in batch.rejected.items() if id not in batch.sampled}
        self.consumed.add(leased, refused, step)
        if leased or refused:
            reasons = [Rejection(session_id=id, reason=why) for id, why in refused.items()]
            self.executor.ack(leased, reasons, step=step)
        self.source.settle(taken, step)
        self.metrics.record_sessions(batch.trained, batch.rejected)

    def _wait(self) -> list[Group]:
        """Wait for the next batch; empty if there will be no more."""
        patience = left = ANNOUNCE_INTERVAL if self.policy.steps else FIRST_ANNOUNCE
        while True:
            self.publisher.bring_joining()
            try:
                groups = self.source.next_batch(timeout=min(left, LOOK_INTERVAL))
                deterministic = self.config.rollout.deterministic
                return [in_stable_order(g) for g in groups] if deterministic else groups
            except TimeoutError as error:
                left -= LOOK_INTERVAL
                if left <= 0:
                    self.report.waiting(error, early=patience < ANNOUNCE_INTERVAL)
                    patience = left = ANNOUNCE_INTERVAL

    # -- resume --------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Repeat the steps that came after the checkpoint, and bring the ranks up to date.

        Each is repeated from its manifest: the same sessions in the same order, masked and scored
        with the same settings. So whatever a killed trainer was doing, the run continues as if it
        had not been killed, and no session has an effect twice. Only where a rank's journal is lost
        with its machine does the run continue from before the first step that needs it.
        """
        replayed = {}
        for step in (later := self.manifests.after(self.policy.steps)):
            if self._done or self._stopping:
                break
            try:
                replayed[step] = self._replay(self.manifests.read(step))
            except NotFound as error:
                if error.code != "session_not_found":
                    raise
                self._abandon([taken for taken in later if taken >= step], error)
                break
        # Repeated steps may have had others.
        self._load_frozen()
        self.publisher.resume(
            self.policy, self._checkpoints.tokenizer, fresh=self.checkpoint is None and not replayed
        )
        self.metrics.record_position(step=self.policy.steps, version=self.publisher.version)
        if replayed:
            for step, (batch, taken) in replayed.items():
                # A step whose loss was not finite was not made.
                self.settle(batch, taken, step if batch.trained else None)
            self.report.say(f"trainer   repeated {_steps(list(replayed))} from the manifests")
            if self.policy.steps % self.config.train.checkpoint_every == 0:
                self.save()

    def _abandon(self, steps: list[int], error: NotFound) -> None:
        """Begin another history before these steps. Nothing is trained on twice: the checkpoint
        lists the sessions it contains, and contains none of these steps."""
        self.manifests.set_aside(steps)
        self.report.announce(
            f"trainer   {_steps(steps)} cannot be repeated, because a rank has lost its journal "
            f"({error.message}): resuming at step {self.policy.steps}; the sessions of these steps "
            f"are listed in {self.dir.manifests / 'lost-*.json'}"
        )

    def _replay(self, taken: Manifest) -> tuple[TrainingBatch, Manifest]:
        where = f"step {taken.step} ({self.manifests.path(taken.step)})"
        self._checkpoints.require_same_origin(where, taken.origin, self.policy)
        found: dict[str, Any] = dict(self.manifests.sampled(taken.step))
        if leased := [id for id in taken.sessions if id not in found]:
            found |= self._write(
                lambda: self.executor.replay(leased, timeout=10 * TIMEOUT), "the ranks' journals"
            )
        self.policy.clock.lap("wait")
        groups: list[Group] = [[found[id] for id in group] for group in taken.groups]
        batch = self._steps.batch(self.policy, groups, taken)
        taken.require_same(batch.trained, batch.rejected, tokens_of(batch))
        result = self._steps.optimize(self.policy, batch, taken)
        if result is not None and taken.step > self.report.reported:
            # The trainer was killed before it could report this step.
            self._report(batch, result)
        # Without the rows, which would fill memory until all steps are published.
        return replace(batch, rows=[], ages=[]), taken

    # -- weights, checkpoints, files -----------------------------------------------------------

    def load(self) -> None:
        """Load the policy from the latest checkpoint, else from the configured model."""
        self.report.load()
        self.policy, state = self._checkpoints.load(self._leader)
        self._load_frozen()
        if state is not None:
            self.consumed.load(state)
            self.source.load(state.get("dataset"))
            self._checkpoints.dataset = self.source.state()
            self.report.say(
                f"trainer   resuming at step {self.policy.steps}, from {self.checkpoint}"
            )
        if (last := self.source.last_step(self.policy.steps)) is not None:
            self._steps.last_step = min(last, self._steps.last_step)

    def _load_frozen(self) -> None:
        """Load reference model and teacher of the settings, in the place of any others."""
        wanted = self.config.train.frozen_models
        self._checkpoints.drop_frozen(self.policy, wanted)
        self._checkpoints.load_frozen(self.policy, wanted)

    def save(self) -> None:
        """Write a checkpoint: beside weights and optimizer it has versions, sessions, dataset."""
        state = {"version": self.publisher.version, **self.consumed.dump()}
        dataset = self.source.state()
        self._checkpoints.save(
            self.policy, state if dataset is None else state | {"dataset": dataset}
        )
        self.manifests.prune(self._checkpoints.oldest_step or 0)

    @property
    def checkpoint(self) -> Path | None:
        """The latest checkpoint."""
        return self._checkpoints.latest

    @property
    def _status(self) -> RunStatus:
        return RunStatus(
            step=self.policy.steps,
            checkpoint=str(self.checkpoint) if self.checkpoint else None,
            oldest_step=self._checkpoints.oldest_step,
        )


def _steps(steps: list[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
