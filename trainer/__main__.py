"""The training process: ``python -m trainer --config FILE``."""

from __future__ import annotations

import argparse
import logging
import os
import signal
from typing import TYPE_CHECKING

from any_agent.auth.access import signer_of
from any_agent.config import Config, load_resolved
from any_agent.errors import AnyAgentError, ConfigError
from any_agent.runtime.logs import set_up_logging
from any_agent.runtime.parent_death import die_with_parent

if TYPE_CHECKING:
    from trainer.parallel.trainer_group import TrainerGroup

_STOPPED = 143


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer", description="Trains one run.")
    parser.add_argument("--config", required=True, help="the run's resolved YAML")
    parser.add_argument(
        "--host", default="127.0.0.1", help="where the service's other machines ask for metrics"
    )
    args = parser.parse_args()
    try:
        config = load_resolved(args.config)
        set_up_logging(
            config.log_level, config.log_format, part="trainer", secrets=config.secrets()
        )
        return _train(config, args.host)
    except AnyAgentError as error:
        logging.getLogger(__name__).error("%s", error.message)
        return 2 if isinstance(error, ConfigError) else 1


def _train(config: Config, host: str) -> int:
    import transformers

    from trainer.parallel.roles import follow, joined, leading
    from trainer.world import started_together

    transformers.utils.logging.disable_progress_bar()
    launched = os.getpid()
    if started_together() > 1:
        # These are in sessions of their own: nobody else would end them with who started them.
        launched = os.getppid()
        die_with_parent(launched, signal.SIGKILL)
    world = joined(config.train)
    if world is not None and not world.leads:
        follow(world, config.train)
        return 0
    with leading(world) as crew:
        return _lead(config, host, crew, launched)


def _lead(config: Config, host: str, crew: TrainerGroup | None, launched: int) -> int:
    from trainer.loop import TrainingLoop
    from trainer.metrics_server import TrainerHeartbeat

    trainer = TrainingLoop(config, crew=crew)
    # After the step under way, so that what was trained is kept.
    signal.signal(signal.SIGTERM, lambda *_: trainer.stop())
    present = TrainerHeartbeat(
        trainer.dir.registry,
        trainer.metrics,
        signer=signer_of(trainer.dir),
        ready=lambda: trainer.loaded,
        host=host,
        pid=launched,
    )
    with present:
        return 0 if trainer.train() else _STOPPED


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # Taking torch apart would cost the interpreter seconds that a stop does not have.
    os._exit(code)
