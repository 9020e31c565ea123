"""The training process: ``python -m trainer --config FILE``."""

from __future__ import annotations

import argparse
import logging
import os
import signal

from any_agent.access import signer_of
from any_agent.config import load_resolved
from any_agent.errors import AnyAgentError, ConfigError
from any_agent.logs import set_up_logging

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
        import transformers

        from trainer.loop import TrainingLoop
        from trainer.presence import Presence

        transformers.utils.logging.disable_progress_bar()
        trainer = TrainingLoop(config)
        # After the step under way, so that what was trained is kept.
        signal.signal(signal.SIGTERM, lambda *_: trainer.stop())
        present = Presence(
            trainer.dir.registry,
            trainer.metrics,
            signer=signer_of(trainer.dir),
            ready=lambda: trainer.loaded,
            host=args.host,
        )
        with present:
            return 0 if trainer.train() else _STOPPED
    except AnyAgentError as error:
        logging.getLogger(__name__).error("%s", error.message)
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # Taking torch apart would cost the interpreter seconds that a stop does not have.
    os._exit(code)
