"""The trainer of a researcher's script: the service and the training of one run in one object."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, Self

from transformers.utils import logging as transformers_logging

from any_agent.auth.access import run_dir_of
from any_agent.config import Config, import_plugins
from any_agent.data import RowSource, as_dataset
from any_agent.errors import ConfigError
from any_agent.launcher.node import listening
from any_agent.launcher.trial import (
    latest_weights,
    require_no_dataset_settings,
    require_same_trial,
    require_training,
)
from any_agent.rollout.workflow_executor import WorkflowExecutor
from any_agent.runtime.command_line import one_line_errors
from any_agent.runtime.logs import logging_to
from any_agent.workflow import RolloutWorkflow, WorkflowLike, resolve_workflow
from any_agent.workflow.resolve import require_workflow
from trainer.batch_source import DatasetBatches
from trainer.command_channel import Leader
from trainer.evaluation import TrialEvaluation
from trainer.from_config import (
    agent_service,
    chosen_workflow,
    policy_config,
    require_algorithm,
    workflow_executor,
)
from trainer.loop import TrainingLoop
from trainer.parallel.trainer_group import follow, join_processes, lead
from trainer.service import LocalService
from trainer.signals import StopRequested, StopSignals
from trainer.trackers import require_trackers
from trainer.world import World

_print = partial(print, flush=True)


class _Given(NamedTuple):
    """A workflow of one call of :meth:`GRPOTrainer.train`, with its arguments."""

    workflow: WorkflowLike | None
    kwargs: Mapping[str, Any] | None


class GRPOTrainer:
    """Serves a model and trains it, on a dataset or on the sessions of external agents.

    ::

        config, _ = load_expr_config(sys.argv[1:], GRPOConfig)
        with GRPOTrainer(config, train_dataset=dataset) as trainer:
            trainer.train(workflow="my_agent.MathAgent")

    Entering it starts the run's service (engines, proxies, router) as child processes, and leaving
    it ends them. With a ``train_dataset`` the service starts later: at the first use of ``url``, or
    in :meth:`train` once the workflow is known to be runnable. A new start with the same experiment
    and trial resumes from the latest checkpoint, and repeats the steps after it exactly.

    Under torchrun, with as many processes as `train.processes` says, all of them train together:
    the first one does everything else, and in the others :meth:`train` returns when the first one
    leaves the trainer.

    ``say`` gets the lines for a person: the parts that start, each step, each wait.
    """

    def __init__(
        self,
        config: Config,
        train_dataset: RowSource | None = None,
        valid_dataset: RowSource | None = None,
        *,
        say: Callable[[str], None] = _print,
    ) -> None:
        if not isinstance(config, Config):
            raise ConfigError(
                f"the trainer's config is a {type(config).__name__}: pass the first value that "
                "load_expr_config(sys.argv[1:], GRPOConfig) returns"
            )
        one_line_errors(debug=config.log_level == "debug")
        self.config = config
        self.train_dataset = _checked(train_dataset, "train_dataset")
        self.valid_dataset = _checked(valid_dataset, "valid_dataset")
        self.dir = run_dir_of(config)
        self._say = say
        self._signals = StopSignals(say)
        self._signals.failure = lambda: self._service.error
        self._service = LocalService(config, say=say, failed=self._service_failed)
        self._entered = self._serving = self._followed = False
        self._world: World | None = None
        self._leader: Leader | None = None
        self._loop: TrainingLoop | None = None
        self._evaluator: WorkflowExecutor | None = None
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        """The service's public URL; empty in a process that follows another one."""
        if self._follows:
            return ""
        if self._entered:
            self._serve()
        return self._service.node.url

    def __enter__(self) -> Self:
        require_same_trial(self.config)
        import_plugins(self.config)
        require_algorithm(self.config.train)
        if self.train_dataset is None:
            require_no_dataset_settings(self.config)
        require_training(self.config)
        policy_config(self.config.train)  # raises for a device that is missing
        require_trackers(self.config.tracking.to)
        # The console is for the lines of the run's steps.
        transformers_logging.disable_progress_bar()
        self._world = join_processes(self.config.train)
        if self._follows:
            self._entered = True
            return self
        # Set before the first use of a tokenizer, which warns in processes forked after it.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._stack.enter_context(self._signals.handled())
        self._entered = True
        try:
            self._leader = self._stack.enter_context(lead(self._world))
            if self.train_dataset is None:
                self._serve()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._entered = False
        if self._follows:
            return
        self._signals.ignore()
        try:
            self._service.stop(drain=isinstance(error, StopRequested) and error.gently)
        finally:
            self._stack.close()
        if isinstance(error, StopRequested):
            saved = latest_weights(self.config)
            kept = f"the checkpoint of step {saved.step} is {saved.path}" if saved else None
            again = shlex.join(sys.orig_argv)
            self._say(f"trainer   stopped; {kept or 'no checkpoint'}; to go on: {again}")

    def train(
        self,
        workflow: WorkflowLike | None = None,
        eval_workflow: WorkflowLike | None = None,
        workflow_kwargs: Mapping[str, Any] | None = None,
        eval_workflow_kwargs: Mapping[str, Any] | None = None,
        dynamic_filter_fn: Callable[[dict[str, Any]], bool] | None = None,
    ) -> bool:
        """Train until the configured steps or epochs are done; return True then.

        ``workflow`` runs on the items of the dataset: a RolloutWorkflow, an agent with
        ``async def run(data, **extra_kwargs)``, a class of either, which gets
        ``workflow_kwargs``, or its dotted name. Without a dataset and a workflow the sessions of
        external agents are trained on. ``dynamic_filter_fn`` gets an item's trajectories as one
        batch of tensors, and returns True if they are to be trained on.

        After every ``eval.every`` steps ``eval_workflow`` (else ``workflow``) runs on all items of
        the validation dataset, with ``eval_workflow_kwargs``, before training continues.

        The settings `workflow` and `eval_workflow` name the workflows that are not given here.

        Raises ConfigError, before anything is started, for a workflow that cannot be run or that
        contradicts the settings; TrainingError when only failures come of it, or nothing to learn
        from; StartupError when a part of the service ends for good; and StopRequested, a
        SystemExit, when Ctrl-C or SIGTERM ended it, after the current step and with a checkpoint.
        """
        trained = _Given(chosen_workflow(self.config, "workflow", workflow), workflow_kwargs)
        evaluated = _Given(
            chosen_workflow(self.config, "eval_workflow", eval_workflow), eval_workflow_kwargs
        )
        self._require_runnable(trained, evaluated)
        if self._follows:
            return self._follow()
        self._serve()
        self._loop = loop = self._make_loop(trained, evaluated, dynamic_filter_fn)
        self._signals.stop = loop.stop
        with ExitStack() as stack:
            stack.callback(self._trained)
            stack.enter_context(loop.heartbeat())
            done = loop.train()
        if self._signals.received is not None and not done:
            raise StopRequested(self._signals.received)
        if done:
            self._say(f"trainer   done; checkpoints in {self.dir.checkpoints}")
        return done

    # ------------------------------------------------------------------------------------------

    @property
    def _follows(self) -> bool:
        return self._world is not None and not self._world.leads

    def _follow(self) -> bool:
        """Execute the leader's commands until it has left its trainer."""
        if self._world is not None and not self._followed:
            self._followed = True
            follow(self._world, self.config.train)
        return True

    def _serve(self) -> None:
        if not self._serving:
            self._service.start()
            self._serving = True
            c = self.config
            self._stack.enter_context(
                logging_to(
                    self.dir.logs / "trainer.log",
                    c.log_level,
                    c.log_format,
                    names=("any_agent", "trainer"),
                    part="trainer",
                    secrets=c.secrets(),
                )
            )
            for line in listening(c, self._service.node.url):
                self._say(line)

    def _require_runnable(self, trained: _Given, evaluated: _Given) -> None:
        """Raise ConfigError for a workflow without data, data without one, or no workflow."""
        if (trained.workflow is None) != (self.train_dataset is None):
            has, lacks = ("workflow", "train_dataset")
            if trained.workflow is None:
                has, lacks = lacks, has
            raise ConfigError(
                f"a {has} was given, but no {lacks}: a workflow runs on the items of a dataset, "
                "GRPOTrainer(config, train_dataset=...).train(workflow=...), or the setting "
                "workflow=my_agent.MyAgent. With neither, external agents are trained on"
            )
        given = [one for one in (trained, evaluated) if one.workflow is not None]
        for one in given:
            require_workflow(*one)
        if self._evaluates and (self.valid_dataset is None or not given):
            lacks = "valid_dataset" if self.valid_dataset is None else "eval_workflow"
            raise ConfigError(
                f"eval.every or eval.at_start is set, but there is no {lacks}: an evaluation "
                "needs GRPOTrainer(config, valid_dataset=...).train(eval_workflow=...)"
            )

    @property
    def _evaluates(self) -> bool:
        return self.config.eval.every > 0 or self.config.eval.at_start

    def _make_loop(
        self, trained: _Given, evaluated: _Given, accept: Callable[[Any], bool] | None
    ) -> TrainingLoop:
        dataset = self.train_dataset
        # Before the model is loaded, so that a workflow that cannot be run fails at once.
        workflow, eval_workflow = self._resolve(trained, evaluated)
        source = None
        if workflow is not None and dataset is not None:
            source = DatasetBatches(self.config, dataset, workflow, accept, self._make_executor())
        loop = TrainingLoop(self.config, source=source, say=self._say, leader=self._leader)
        evaluation = self._make_evaluation(eval_workflow, source, loop)
        if evaluation is not None:
            loop.evaluate, loop.interrupt_evaluation = evaluation, evaluation.interrupt
        return loop

    def _resolve(
        self, trained: _Given, evaluated: _Given
    ) -> tuple[RolloutWorkflow | None, RolloutWorkflow | None]:
        """Return the workflows to train on and to evaluate; one object where both are the same.

        Without a workflow of its own an evaluation runs the one that is trained, with its arguments
        unless it has others.
        """
        agents = agent_service(self.config, self.dir, self._service.node.local_url)
        workflow = None
        if trained.workflow is not None:
            workflow = resolve_workflow(*trained, agents=agents)
        if evaluated.workflow is None:
            own = trained.kwargs if evaluated.kwargs is None else evaluated.kwargs
            evaluated = _Given(trained.workflow, own)
        same = evaluated.workflow == trained.workflow and evaluated.kwargs is trained.kwargs
        if evaluated.workflow is None or same:
            return workflow, workflow
        return workflow, resolve_workflow(*evaluated, agents=agents)

    def _make_evaluation(
        self,
        workflow: RolloutWorkflow | None,
        source: DatasetBatches | None,
        loop: TrainingLoop,
    ) -> TrialEvaluation | None:
        if self.valid_dataset is None or workflow is None:
            return None
        if not self._evaluates:
            self._say("eval      never: set eval.every to a number of steps")
            return None

        def executor() -> WorkflowExecutor:
            running = source is not None and source.started
            return source.executor if source is not None and running else self._own_executor()

        return TrialEvaluation(
            self.config.eval,
            as_dataset(self.valid_dataset, "valid_dataset"),
            workflow,
            executor,
            loop.report,
        )

    def _make_executor(self) -> WorkflowExecutor:
        return workflow_executor(self.config, self._service.node.engine_urls)

    def _own_executor(self) -> WorkflowExecutor:
        """Return the executor of evaluations where nothing else runs workflows.

        One serves all evaluations, because workflows may keep its event loop.
        """
        if self._evaluator is None:
            self._evaluator = self._make_executor().start()
        if self._loop is not None:
            self._evaluator.release(self._loop.metrics.version)
        return self._evaluator

    def _trained(self) -> None:
        self._signals.stop = None
        self._loop = None
        if self._evaluator is not None:
            self._evaluator.stop()
            self._evaluator = None

    def _service_failed(self, error: BaseException) -> None:
        """End training, from the service's thread: it would wait for ever."""
        if self._loop is not None:
            self._loop.fail(error)
        if self._signals.installed:
            # This ends any other wait, too: the handler raises the error.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _checked(data: RowSource | None, name: str) -> RowSource | None:
    """Return the dataset; DatasetError, before anything is started, for unusable items."""
    if data is not None:
        rows = as_dataset(data, name)
        # All items of a list, but only the first of a dataset that reads or computes each one.
        for k in range(len(rows) if isinstance(data, list) else 1):
            _ = rows[k]
    return data


PPOTrainer = GRPOTrainer
"""The name that AReaL documents."""
