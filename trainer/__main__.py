"""The training process: ``python -m trainer --config FILE``."""

from __future__ import annotations

import argparse
import logging
import os
import signal

from any_agent.config import Config, load_resolved
from any_agent.errors import AnyAgentError, ConfigError
from any_agent.runtime.logs import set_up_logging
from any_agent.runtime.open_files import raise_open_files_limit
from any_agent.runtime.signals import die_with_parent

_STOPPED = 143


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer", description="Train one run.")
    parser.add_argument("--config", required=True, help="the run's resolved YAML")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address at which other machines read the metrics"
    )
    parser.add_argument(
        "--parent", type=int, help="id of the process that starts several to train together"
    )
    args = parser.parse_args()
    if args.parent is not None:
        # The processes are in sessions of their own, so nothing else ends them with their parent.
        die_with_parent(args.parent, signal.SIGKILL)
    try:
        config = load_resolved(args.config)
        set_up_logging(
            config.log_level, config.log_format, part="trainer", secrets=config.secrets()
        )
        raise_open_files_limit()
        return _train(config, args.host, args.parent or os.getpid())
    except AnyAgentError as error:
        logging.getLogger(__name__).error("%s", error.message)
        return 2 if isinstance(error, ConfigError) else 1


def _train(config: Config, host: str, launched: int) -> int:
    import transformers

    from trainer.parallel.trainer_group import follow, join_processes, lead

    transformers.utils.logging.disable_progress_bar()
    world = join_processes(config.train)
    if world is not None and not world.leads:
        follow(world, config.train)
        return 0
    with lead(world) as leader:
        from trainer.loop import TrainingLoop

        trainer = TrainingLoop(config, leader=leader)
        # SIGTERM ends training after the current step, with a checkpoint.
        signal.signal(signal.SIGTERM, lambda *_: trainer.stop())
        with trainer.heartbeat(host=host, pid=launched):
            return 0 if trainer.train() else _STOPPED


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # Skip the interpreter's shutdown: unloading torch takes seconds that a stop does not have.
    os._exit(code)
