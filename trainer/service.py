"""The run's service, started by the process that trains: engines, proxies and router.

One thread starts, watches and ends them, because children end with the thread that started them,
and the trainer's own is busy with steps.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from any_agent.config import Config
from any_agent.launcher import Node, NodeOptions
from any_agent.launcher.engines import SHARED_GPUS
from any_agent.launcher.shutdown import Terminated
from any_agent.launcher.training_progress import TrainingProgress

_POLL_INTERVAL = 0.1


class LocalService:
    """A :class:`Node` without a trainer of its own, in a thread.

    ``failed`` is called, in that thread, with the error that ended the running service.
    """

    def __init__(
        self,
        config: Config,
        *,
        say: Callable[[str], None],
        failed: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        options = NodeOptions(train=True, trainer_outside=True, say=say)
        self._over = threading.Event()
        self.node: Node = AbandonableNode(config, options, self._over)
        self._failed = failed
        self.ready = threading.Event()
        self._drains = False
        self._thread = threading.Thread(target=self._run, name="service", daemon=True)
        self.error: BaseException | None = None
        """The error that ended the service, if one did."""

    def start(self) -> None:
        """Return when all parts are ready; raise ConfigError or StartupError if one cannot be."""
        self._thread.start()
        try:
            self.ready.wait()
        except BaseException:
            # Such as Ctrl-C: no part that was started so far may stay.
            self.stop()
            raise
        if self.error is not None:
            self._thread.join()
            raise self.error

    def stop(self, *, drain: bool = False) -> None:
        """End every process, within seconds; with ``drain`` running calls may end first."""
        self._drains = drain
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    # ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self.node as node:
                os.environ[SHARED_GPUS] = node.gpus.sharing
                self.ready.set()
                self._watch(node)
                if self._drains:
                    raise Terminated
        except (_ServiceEnded, Terminated):
            pass
        except BaseException as error:
            self.error = error
            if self.ready.is_set():
                self._failed(error)
        finally:
            self.ready.set()

    def _watch(self, node: Node) -> None:
        """Keep the parts running, and show the steps, until the service is to end."""
        progress = TrainingProgress(node.dir.metrics, node.config.train.steps)
        while True:
            # Checked before the lines are read, so that those of the last step are shown, too.
            over = self._over.wait(_POLL_INTERVAL)
            for line in progress.new_lines():
                node.options.say(line)
            if over:
                return
            node.check()


class _ServiceEnded(Exception):
    """The service was stopped before it was ready."""


class AbandonableNode(Node):
    """A node whose start can be abandoned."""

    def __init__(self, config: Config, options: NodeOptions, over: threading.Event) -> None:
        super().__init__(config, options)
        self._over = over

    def check(self) -> bool:
        if self._over.is_set():
            raise _ServiceEnded
        return super().check()
