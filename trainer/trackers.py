"""Trackers: trackio, Weights & Biases, and TensorBoard show what `metrics.jsonl` says.

Each configured tracker has a thread that reads the file's new lines and remembers how many it has
sent. So training never waits for a tracker, a tracker that failed or that is configured later gets
all lines, and none is sent twice after a restart.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

from any_agent.config import Config
from any_agent.errors import ConfigError
from any_agent.rundir.layout import RunDir, read_json, write_json
from any_agent.runtime.atomic_files import make_folder
from any_agent.runtime.log_tail import LogTail
from any_agent.runtime.logs import Redactor

log = logging.getLogger(__name__)
_Line: TypeAlias = Mapping[str, Any]
"""A record of `metrics.jsonl`."""

FIRST_DELAY = 10.0
MAX_DELAY = 600.0
"""Seconds after a failure until a tracker is tried again: at first, and after many failures."""
_SECTIONS = ("model", "sampling", "sessions", "rollout", "train", "train_dataset", "eval")
"""The settings that trackers get: those that describe the training. Keys are in other sections."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run as trackers know it. ``id`` distinguishes it from a removed one of the same name."""

    project: str
    name: str
    id: str
    folder: Path
    """The place of a tracker's own files."""
    config: Mapping[str, Any]


class Tracker(Protocol):
    """A run opened at a tracker, from a line of this step on. All calls come from one thread."""

    replaces: ClassVar[bool]
    """Opening it removes what it has of the step, and of later ones."""

    def __init__(self, run: TrackedRun, step: int) -> None: ...

    def send(self, number: int, line: _Line) -> None:
        """Show a line of `metrics.jsonl`, the file's ``number``-th."""

    def flush(self) -> bool:
        """Return True if what was sent survives the death of this process."""

    def close(self) -> None: ...


def figures(line: _Line) -> dict[str, float]:
    """Return a line's numbers by names such as `train/seconds/wait` and `eval/reward`.

    The statistics of workflows keep their names. Numbers that are not finite are left out.
    """
    kind = "eval" if "eval" in line else "train"
    rest = dict(line["eval"] if kind == "eval" else line)
    stats = rest.pop("stats", {})
    for name in ("step", "time"):
        rest.pop(name, None)
    return dict([*_numbers(kind, rest), *_numbers("", stats)])


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    match value:
        case bool():
            pass
        case int() | float():
            if math.isfinite(value):
                yield name, float(value)
        case Mapping():
            for key, part in value.items():
                yield from _numbers(f"{name}/{key}" if name else key, part)
        case list():
            for k, part in enumerate(value):
                yield from _numbers(f"{name}/{k}", part)


class TensorBoard:
    """Event files in the trial's folder `tracking/tensorboard`."""

    replaces: ClassVar[bool] = True

    def __init__(self, run: TrackedRun, step: int) -> None:
        board = import_module("torch.utils.tensorboard")
        self._writer = board.SummaryWriter(str(run.folder / "tensorboard"), purge_step=step)
        text = json.dumps(run.config, indent=2)
        self._writer.add_text("config", f"```json\n{text}\n```", step)

    def send(self, number: int, line: _Line) -> None:
        for name, value in figures(line).items():
            self._writer.add_scalar(name, value, line["step"], walltime=line.get("time"))

    def flush(self) -> bool:
        self._writer.flush()
        return True

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run at Weights & Biases, or in `tracking/wandb` (WANDB_MODE=offline).

    The number of a line is wandb's own step, which may not repeat; the curves are over ours.
    """

    replaces: ClassVar[bool] = False

    def __init__(self, run: TrackedRun, step: int) -> None:
        wandb: Any = import_module("wandb")
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            raise ConfigError("no key: set WANDB_API_KEY, or WANDB_MODE=offline")
        self._run = wandb.init(
            project=run.project,
            id=run.id,
            name=run.name,
            resume="allow",
            config=dict(run.config),
            dir=str(run.folder),
            # Neither console nor command line nor code: they may contain secrets.
            settings=wandb.Settings(
                console="off",
                disable_code=True,
                disable_git=True,
                finish_timeout=CLOSE_TIMEOUT,
                silent=True,
                x_disable_meta=True,
                x_save_requirements=False,
            ),
        )
        self._run.define_metric("*", step_metric="step")

    def send(self, number: int, line: _Line) -> None:
        if number >= self._run.starting_step:  # else the service has it from an earlier start
            self._run.log({**figures(line), "step": line["step"]}, step=number)

    def flush(self) -> bool:
        # Its own process dies with this one, and forgets what it has not written.
        return False

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run in trackio's store: on this machine (TRACKIO_DIR), or a Space (TRACKIO_SPACE_ID)."""

    replaces: ClassVar[bool] = False

    def __init__(self, run: TrackedRun, step: int) -> None:
        self._run = import_module("trackio").init(
            project=run.project,
            # It continues runs by name.
            name=f"{run.name}-{run.id[:6]}",
            resume="allow",
            config=dict(run.config),
            embed=False,
            auto_log_cpu=False,
        )

    def send(self, number: int, line: _Line) -> None:
        self._run.log(figures(line), step=line["step"])

    def flush(self) -> bool:
        # Its thread writes twice a second.
        return True

    def close(self) -> None:
        self._run.finish()


TRACKERS: Mapping[str, type[Tracker]] = {
    "trackio": Trackio,
    "wandb": Wandb,
    "tensorboard": TensorBoard,
}
"""Trackers by their names in `tracking.to`, which are those of their packages and extras, too."""
CLOSE_TIMEOUT = 30.0
"""Seconds at the end of training in which trackers may send what is left."""
HURRIED_TIMEOUT = 2.0
"""The same where the training is stopped."""


def require_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError, with the extra to install, for a tracker whose package is missing."""
    for name in names:
        spec = find_spec(name)
        # A folder `wandb` in the working directory is no package, though it can be imported.
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"tracking.to={name}: the package {name} is not installed; "
                f'pip install "any-agent-rl[{name}]", or leave {name} out'
            )


class Trackers:
    """The trackers of a run, from its start to the end of the training."""

    def __init__(self, config: Config, run_dir: RunDir) -> None:
        require_trackers(config.tracking.to)
        self._config = config
        self._dir = run_dir
        self._feeds: list[_Feed] = []

    @contextmanager
    def following(self, hurry: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Let the trackers follow inside the block, and send what is left at its end.

        What takes longer than the timeout, a shorter one in a ``hurry``, the next start sends.
        """
        if names := dict.fromkeys(self._config.tracking.to):
            run = _tracked_run(self._config, self._dir)
            self._feeds = [_Feed(name, self._dir.metrics, run) for name in names]
        try:
            yield
        finally:
            for feed in self._feeds:
                feed.over = True
            self.wake()
            deadline = time.monotonic() + (HURRIED_TIMEOUT if hurry() else CLOSE_TIMEOUT)
            for feed in self._feeds:
                feed.thread.join(max(0.0, deadline - time.monotonic()))
                if feed.thread.is_alive():
                    log.warning("%s has not got all lines; the next start sends them", feed.name)

    def wake(self) -> None:
        """Tell the trackers of new lines."""
        for feed in self._feeds:
            feed.news.set()

    @property
    def failures(self) -> Mapping[str, int]:
        """The number of failures of each tracker."""
        return {feed.name: feed.failures for feed in self._feeds}

    def take_notices(self) -> list[str]:
        """Return, once each, the reasons why trackers do not get what they should."""
        texts = [feed.notice for feed in self._feeds]
        for feed in self._feeds:
            feed.notice = None
        return [text for text in texts if text is not None]


def _tracked_run(config: Config, run_dir: RunDir) -> TrackedRun:
    folder = run_dir.path / "tracking"
    make_folder(folder)
    path = folder / "run.json"
    id = read_json(path)
    if id is None:
        write_json(path, id := secrets.token_hex(8))
    dump = config.dump()
    dump["train"] |= config.train.chosen
    settings = {name: dump[name] for name in ("experiment", "trial", *_SECTIONS)}
    return TrackedRun(
        project=config.tracking.project or config.experiment,
        name=config.trial,
        id=id,
        folder=folder,
        config=Redactor(config.secrets()).data(settings),
    )


class _Feed:
    """Sends the lines of `metrics.jsonl` to one tracker, each once, in a thread of its own."""

    def __init__(self, name: str, metrics: Path, run: TrackedRun) -> None:
        self.name = name
        self.news = threading.Event()
        self.over = False
        self.failures = 0
        self.notice: str | None = None
        self._metrics = metrics
        self._run = run
        self._tracker: Tracker | None = None
        self._position = run.folder / f"{name}.json"
        """The file that keeps the number of lines that the tracker has got."""
        self._sent = self._kept = int(read_json(self._position, 0))
        self.thread = threading.Thread(target=self._serve, name=f"tracker-{name}", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        delay = FIRST_DELAY
        while not self.over:
            before = self._sent
            try:
                self._follow()
            except Exception as error:
                self._fail(error)
            delay = FIRST_DELAY if self._sent > before else min(2 * delay, MAX_DELAY)
            until = time.monotonic() + delay
            while not self.over and (left := until - time.monotonic()) > 0:
                self.news.clear()
                self.news.wait(left)

    def _fail(self, error: Exception) -> None:
        self.failures += 1
        text = f"{self.name} fails ({type(error).__name__}: {error})"
        if self.failures > 1:
            log.debug("%s", text, exc_info=True)
            return
        log.warning("%s; training goes on, and the tracker gets all steps once it works", text)
        self.notice = text

    def _follow(self) -> None:
        """Send all lines that come, until training ends."""
        file = LogTail(self._metrics, from_start=True)
        number = 0
        last: tuple[int, _Line] | None = None
        try:
            while True:
                over = self.over
                self.news.clear()
                for text in file.new_lines():
                    number += 1
                    if (line := _parsed(text)) is not None:
                        if number > self._sent:
                            self._send(number, line, last)
                        last = number, line
                # A file that somebody emptied has fewer lines.
                self._sent = min(self._sent, number)
                if self._tracker is None or self._tracker.flush():
                    self._keep()
                if over:
                    return
                self.news.wait()
        finally:
            self._close()

    def _send(self, number: int, line: _Line, last: tuple[int, _Line] | None) -> None:
        """Send a line; ``last`` is the one before it."""
        step = line["step"]
        if last is not None and step < last[1]["step"]:
            # The run has gone back to an earlier step.
            self._close()
        if self._tracker is None:
            kind = TRACKERS[self.name]
            self._tracker = kind(self._run, step)
            if kind.replaces and last is not None and "eval" in line and last[1]["step"] == step:
                self._tracker.send(*last)
        self._tracker.send(number, line)
        self._sent = number

    def _keep(self) -> None:
        if self._sent != self._kept:
            write_json(self._position, self._sent)
            self._kept = self._sent

    def _close(self) -> None:
        """Close the tracker, which gets no line twice when it is opened again."""
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.close()
            self._keep()


def _parsed(text: str) -> _Line | None:
    """Return a line's record; None for one that a killed trainer left incomplete."""
    try:
        line = json.loads(text)
    except json.JSONDecodeError:
        return None
    return line if isinstance(line, dict) and "step" in line else None
