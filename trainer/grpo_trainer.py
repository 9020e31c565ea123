"""What a researcher's script calls: the service and the training of one run, in one object."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Self

from transformers.utils import logging as transformers_logging

from any_agent.auth.access import run_dir_of, signer_of
from any_agent.config import Config, import_plugins
from any_agent.data import as_dataset
from any_agent.errors import ConfigError
from any_agent.launcher.reachability import listening
from any_agent.launcher.trial import require_same_trial
from any_agent.rollout import LeaseExecutor
from any_agent.rollout.workflow_executor import WorkflowExecutor
from any_agent.runtime.command_line import one_line_errors
from any_agent.runtime.logs import logging_to
from any_agent.workflow import RolloutWorkflow, WorkflowLike, resolve_workflow
from any_agent.workflow.resolve import require_workflow
from trainer.batch_source import BatchSource, LeasedBatches
from trainer.dataset_batches import DatasetBatches, TrainingDataset
from trainer.evaluation import TrialEvaluation
from trainer.from_config import (
    agent_service,
    chosen_workflow,
    policy_config,
    require_algorithm,
    workflow_executor,
)
from trainer.loop import TrainingLoop
from trainer.metrics_server import TrainerHeartbeat
from trainer.parallel.roles import follow, join_processes, lead
from trainer.parallel.trainer_group import TrainerGroup
from trainer.service import LocalService
from trainer.signals import StopRequested, StopSignals
from trainer.world import World


def _print(line: str) -> None:
    print(line, flush=True)


class GRPOTrainer:
    """Serves a model and trains it, on a dataset or on what external agents do.

    ::

        config, _ = load_expr_config(sys.argv[1:], GRPOConfig)
        with GRPOTrainer(config, train_dataset=dataset) as trainer:
            trainer.train(workflow="my_agent.MathAgent")

    Entering it starts the run's service (engines, proxies, router) as processes of this one, and
    leaving it ends them. With a ``train_dataset`` it is :meth:`train` that starts it, once it has
    seen that the workflow can be run, or whoever asks for the ``url`` before. Started again with
    the same experiment and trial it goes on from the latest checkpoint, and makes the steps after
    it again just as they were.

    Under torchrun, with as many processes as `train.processes` says, all of them train together:
    the first one does everything else, and in the others :meth:`train` returns when the first one
    leaves the trainer.

    ``say`` gets one line for whatever a person wants to know: what is started, each step, what is
    waited for.
    """

    def __init__(
        self,
        config: Config,
        train_dataset: TrainingDataset | None = None,
        valid_dataset: TrainingDataset | None = None,
        *,
        say: Callable[[str], None] = _print,
    ) -> None:
        if not isinstance(config, Config):
            raise ConfigError(
                f"the trainer's config is a {type(config).__name__}: give it what "
                "load_expr_config(sys.argv[1:], GRPOConfig) returns first"
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
        self._group: TrainerGroup | None = None
        self._loop: TrainingLoop | None = None
        self._evaluation: TrialEvaluation | None = None
        self._evaluator: WorkflowExecutor | None = None
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        """The service's public one, for agents and for whoever wants to try the model; empty in a
        process that is led by another one."""
        if self._led:
            return ""
        if self._entered:
            self._serve()
        return self._service.url

    def __enter__(self) -> Self:
        require_same_trial(self.config)
        import_plugins(self.config)
        require_algorithm(self.config.train)
        policy_config(self.config.train)
        # The lines of a run are its steps.
        transformers_logging.disable_progress_bar()
        self._world = join_processes(self.config.train)
        if self._led:
            self._entered = True
            return self
        # Before anything is encoded: the children are forked from a process that has.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._signals.take()
        self._entered = True
        try:
            self._group = self._stack.enter_context(lead(self._world))
            if self.train_dataset is None:
                self._serve()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered = False
        if self._led:
            return
        self._signals.ignore()
        try:
            self._service.stop(drain=isinstance(error, StopRequested) and error.gently)
        finally:
            self._stack.close()
            self._signals.give_back()

    def train(
        self,
        workflow: WorkflowLike | None = None,
        eval_workflow: WorkflowLike | None = None,
        workflow_kwargs: Mapping[str, Any] | None = None,
        eval_workflow_kwargs: Mapping[str, Any] | None = None,
        dynamic_filter_fn: Callable[[dict[str, Any]], bool] | None = None,
    ) -> bool:
        """Train until the configured steps or epochs are done; True then.

        ``workflow`` is run on the items of the dataset: a RolloutWorkflow, an agent with
        ``async def run(data, **extra_kwargs)``, a class of either, which gets
        ``workflow_kwargs``, or its dotted name. Without a dataset and a workflow the service's
        external agents are trained on. ``dynamic_filter_fn`` looks at an item's trajectories, as
        one batch of tensors, and says whether they are to be trained on.

        Where ``eval.every`` says so, ``eval_workflow`` (else ``workflow``) runs on all items of the
        validation dataset, with ``eval_workflow_kwargs``, before training goes on.

        What is not given here is what the settings `workflow` and `eval_workflow` name.

        Raises ConfigError for what cannot be run, and for two different workflows, before anything
        is started for it, TrainingError when nothing but failures comes of it, or nothing to learn
        from, StartupError when a part of the service ends for good, and Stopped, a SystemExit, when
        Ctrl-C or SIGTERM ended it, after the step under way and with a checkpoint.
        """
        workflow = chosen_workflow(self.config, "workflow", workflow)
        eval_workflow = chosen_workflow(self.config, "eval_workflow", eval_workflow)
        self._require_runnable(workflow, workflow_kwargs, eval_workflow, eval_workflow_kwargs)
        if self._led:
            return self._follow()
        self._serve()
        loop = self._make_loop(
            workflow,
            workflow_kwargs,
            dynamic_filter_fn,
            eval_workflow,
            eval_workflow_kwargs,
        )
        self._loop = loop
        self._signals.stop = self._stop
        with ExitStack() as stack:
            stack.callback(self._trained)
            stack.enter_context(
                TrainerHeartbeat(
                    self.dir.registry,
                    loop.metrics,
                    signer=signer_of(self.dir),
                    ready=lambda: loop.loaded,
                )
            )
            done = loop.train()
        if self._signals.asked is not None and not done:
            raise StopRequested(self._signals.asked)
        if done:
            self._say(f"trainer   done; checkpoints in {self.dir.checkpoints}")
        return done

    # ------------------------------------------------------------------------------------------

    @property
    def _led(self) -> bool:
        return self._world is not None and not self._world.leads

    def _follow(self) -> bool:
        """Until the leader has left its trainer; at once if it has."""
        if self._world is not None and not self._followed:
            self._followed = True
            follow(self._world, self.config.train)
        return True

    def _serve(self) -> None:
        """Start the service, if it is not there."""
        if not self._serving:
            self._service.start()
            self._serving = True
            self._stack.enter_context(self._logging())
            self._say(listening(self._service.url))

    def _require_runnable(
        self,
        workflow: WorkflowLike | None,
        kwargs: Mapping[str, Any] | None,
        eval_workflow: WorkflowLike | None,
        eval_kwargs: Mapping[str, Any] | None,
    ) -> None:
        """ConfigError for a workflow without data, data without one, and what is no workflow."""
        if (workflow is None) != (self.train_dataset is None):
            has, lacks = ("workflow", "train_dataset")
            if workflow is None:
                has, lacks = lacks, has
            raise ConfigError(
                f"a {has} was given, but no {lacks}: a workflow is run on the items of a dataset, "
                "GRPOTrainer(config, train_dataset=...).train(workflow=...), or the setting "
                "workflow=my_agent.MyAgent. With neither, agents outside are trained on"
            )
        if workflow is not None:
            require_workflow(workflow, kwargs)
        if eval_workflow is not None:
            require_workflow(eval_workflow, eval_kwargs)
        nothing_to_run = workflow is None and eval_workflow is None
        if self._evaluates and (self.valid_dataset is None or nothing_to_run):
            lacks = "valid_dataset" if self.valid_dataset is None else "eval_workflow"
            raise ConfigError(
                f"eval.every or eval.at_start is set, but there is no {lacks}: an evaluation "
                "needs GRPOTrainer(config, valid_dataset=...).train(eval_workflow=...)"
            )

    @property
    def _evaluates(self) -> bool:
        return self.config.eval.every > 0 or self.config.eval.at_start

    def _make_loop(
        self,
        workflow: WorkflowLike | None,
        kwargs: Mapping[str, Any] | None,
        accept: Callable[[Any], bool] | None,
        eval_workflow: WorkflowLike | None,
        eval_kwargs: Mapping[str, Any] | None,
    ) -> TrainingLoop:
        dataset = self.train_dataset
        # Before the model is loaded: what cannot be run is told at once.
        runs, eval_runs = self._resolve(workflow, kwargs, eval_workflow, eval_kwargs)
        source: DatasetBatches | None = None
        if runs is not None and dataset is not None:
            source = DatasetBatches(self.config, dataset, runs, accept, self._make_executor())
        self._evaluation = self._make_evaluation(eval_runs, source)
        make_source: Callable[[LeaseExecutor], BatchSource] = LeasedBatches
        if source is not None:
            make_source = partial(_given, source)
        return TrainingLoop(
            self.config,
            make_source=make_source,
            say=self._say,
            evaluate=self._evaluation or (lambda step, last: None),
            group=self._group,
        )

    def _resolve(
        self,
        workflow: WorkflowLike | None,
        kwargs: Mapping[str, Any] | None,
        eval_workflow: WorkflowLike | None,
        eval_kwargs: Mapping[str, Any] | None,
    ) -> tuple[RolloutWorkflow | None, RolloutWorkflow | None]:
        """What is trained on and what is evaluated; one object where both are the same.

        Without a workflow of its own an evaluation runs the one that is trained, with its arguments
        unless it has others.
        """
        agents = agent_service(self.config, self.dir, self._service.local_url)
        runs = None
        if workflow is not None:
            runs = resolve_workflow(workflow, kwargs, agents=agents)
        if eval_workflow is None:
            eval_workflow, eval_kwargs = workflow, kwargs if eval_kwargs is None else eval_kwargs
        if eval_workflow is None or (eval_workflow == workflow and eval_kwargs is kwargs):
            return runs, runs
        return runs, resolve_workflow(eval_workflow, eval_kwargs, agents=agents)

    def _make_evaluation(
        self, workflow: RolloutWorkflow | None, source: DatasetBatches | None
    ) -> TrialEvaluation | None:
        c = self.config.eval
        if self.valid_dataset is None or workflow is None:
            return None
        if not self._evaluates:
            self._say("eval      never: set eval.every to a number of steps")
            return None

        def opened() -> AbstractContextManager[WorkflowExecutor]:
            if source is not None and source.started:
                return nullcontext(source.executor)
            return nullcontext(self._own_executor())

        def reported(line: dict[str, Any]) -> None:
            assert self._loop is not None
            self._loop.metrics.evaluated(line)

        return TrialEvaluation(
            c,
            as_dataset(self.valid_dataset, "valid_dataset"),
            workflow,
            None,
            opened,
            metrics=self.dir.metrics,
            reported=reported,
        )

    def _make_executor(self) -> WorkflowExecutor:
        return workflow_executor(self.config, self._service.engine_urls)

    def _own_executor(self) -> WorkflowExecutor:
        """Of evaluations where nothing else runs workflows: one for all, as these may hold on to
        its event loop."""
        if self._evaluator is None:
            self._evaluator = self._make_executor().start()
        if self._loop is not None:
            self._evaluator.release(self._loop.metrics.version)
        return self._evaluator

    def _logging(self) -> AbstractContextManager[None]:
        c = self.config
        return logging_to(
            self.dir.logs / "trainer.log",
            c.log_level,
            c.log_format,
            names=("any_agent", "trainer"),
            part="trainer",
            secrets=c.secrets(),
        )

    def _stop(self) -> None:
        if self._loop is not None:
            self._loop.stop()
        if self._evaluation is not None:
            self._evaluation.interrupt()

    def _trained(self) -> None:
        self._signals.stop = None
        self._loop = self._evaluation = None
        if self._evaluator is not None:
            self._evaluator.stop()
            self._evaluator = None

    def _service_failed(self, error: BaseException) -> None:
        """In the service's thread: training must not wait for what will not come."""
        if self._loop is not None:
            self._loop.fail(error)
        if self._evaluation is not None:
            self._evaluation.interrupt()
        if self._signals.taken:
            # A wait that knows nothing of it ends, too: the handler raises the error.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _checked(data: TrainingDataset | None, name: str) -> TrainingDataset | None:
    """The same; DatasetError, before anything is started, for items that nothing can run on."""
    if data is not None:
        rows = as_dataset(data, name)
        # What others read or compute each item for is looked at once only.
        for k in range(len(rows) if isinstance(data, list) else 1):
            _ = rows[k]
    return data


def _given(source: BatchSource, _: LeaseExecutor) -> BatchSource:
    return source


PPOTrainer = GRPOTrainer
"""Its documented name at AReaL."""
