"""Follows a run with its trackers, as the trainer does: ``-m tests.clients.trackers.follow ...``.

The arguments are the run's settings. It ends when its standard input does; killed, it cannot.
"""

from __future__ import annotations

import sys

from any_agent.config import load_config
from any_agent.rundir.layout import RunDir
from trainer.trackers import Trackers


def main() -> None:
    config = load_config(None, sys.argv[1:])
    run_dir = RunDir.of(config.root, config.user, config.experiment, config.trial)
    trackers = Trackers(config, run_dir)
    with trackers.following():
        for _ in sys.stdin:
            trackers.wake()
    if trackers.failures != dict.fromkeys(config.tracking.to, 0):
        sys.exit(str(trackers.take_notices()))


if __name__ == "__main__":
    main()
