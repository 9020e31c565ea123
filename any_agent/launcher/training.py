"""How the trainer's processes are started."""

from __future__ import annotations

from pathlib import Path

from any_agent.config import Config
from any_agent.launcher.node_role import NodeRole


def trainer_arguments(config: Config, settings: Path, place: NodeRole) -> list[str]:
    """What follows `python -m`: a trainer of the run with these resolved settings.

    Where several processes train it is one that starts this machine's share of them, ends with
    them, and whose process id they tell as the trainer's.
    """
    each = ["--config", str(settings), "--host", place.host]
    together = place.training
    if config.train.processes == 1 and (together is None or together.count == 1):
        return ["trainer", *each]
    arguments = ["trainer.parallel", "--processes", str(config.train.processes)]
    arguments += ["--host", place.host]
    if together is not None:
        arguments += ["--machines", str(together.count), "--machine", str(together.index)]
        arguments += ["--address", together.address, "--port", str(together.port)]
    return [*arguments, "--", *each]
