"""The run's service, started by the process that trains: engines, proxies and router.

One thread starts, watches and ends them, because children end with the thread that started them,
and the trainer's own is busy with steps.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from any_agent.config import Config
from any_agent.launcher import Node, NodeOptions
from any_agent.launcher.gpu_assignment import SHARED_GPUS
from any_agent.launcher.shutdown import Terminated
from any_agent.launcher.training_progress import TrainingProgress

_POLL_INTERVAL = 0.1


class LocalService:
    """A :class:`Node` without a trainer of its own, in a thread.

    ``failed`` is called, in that thread, with what ended the service once it was there.
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
        self._node = _Node(config, options, self._over)
        self._failed = failed
        self._ready = threading.Event()
        self._drains = False
        self._thread = threading.Thread(target=self._run, name="service", daemon=True)
        self.error: BaseException | None = None
        """What ended it, if it did not end as it should."""

    @property
    def url(self) -> str:
        """The public one."""
        return self._node.url

    @property
    def local_url(self) -> str:
        """The same service's, as this machine reaches it."""
        return self._node.local_url

    @property
    def engine_urls(self) -> Sequence[str]:
        return self._node.engine_urls

    def start(self) -> None:
        """Return when all parts are ready; ConfigError or StartupError if one cannot be."""
        self._thread.start()
        try:
            self._ready.wait()
        except BaseException:
            # Ctrl-C, say: nothing may stay that was started so far.
            self.stop()
            raise
        if self.error is not None:
            self._thread.join()
            raise self.error

    def stop(self, *, drain: bool = False) -> None:
        """End every process, within seconds; ``drain``: calls under way may end first."""
        self._drains = drain
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    # ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._node as node:
                os.environ[SHARED_GPUS] = node.starter.sharing
                self._ready.set()
                self._watch(node)
                if self._drains:
                    raise Terminated
        except (_ServiceEnded, Terminated):
            pass
        except BaseException as error:
            self.error = error
            if self._ready.is_set():
                self._failed(error)
        finally:
            self._ready.set()

    def _watch(self, node: Node) -> None:
        """Keep the parts running, and show the steps, until it is to end."""
        progress = TrainingProgress(node.dir.metrics, node.config.train.steps)
        while True:
            # Looked at before the lines are read: so those of the last step are shown, too.
            over = self._over.wait(_POLL_INTERVAL)
            for line in progress.new_lines():
                node.options.say(line)
            if over:
                return
            node.check()


class _ServiceEnded(Exception):
    """The service is to end before it was there."""


class _Node(Node):
    """Whose start can be given up."""

    def __init__(self, config: Config, options: NodeOptions, over: threading.Event) -> None:
        super().__init__(config, options)
        self._over = over

    def check(self) -> bool:
        if self._over.is_set():
            raise _ServiceEnded
        return super().check()
