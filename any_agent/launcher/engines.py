"""How a rank's engine is started."""

from __future__ import annotations

from any_agent.config import Config


def engine_arguments(
    config: Config, path: str, version: int, host: str, port: int, name: str
) -> list[str]:
    """What follows `python -m`: an engine that serves these weights as this version."""
    engine = config.engine
    arguments = ["any_agent.engine.embedded", "--model-path", path]
    arguments += ["--weight-version", str(version)]
    arguments += ["--host", host, "--port", str(port)]
    arguments += ["--dtype", config.model.dtype, "--threads", str(engine.threads)]
    arguments += ["--max-running-requests", str(engine.max_running_requests)]
    arguments += ["--max-queued-requests", str(engine.max_queued_requests)]
    arguments += ["--incremental-streaming-output", "--device", engine.device]
    if engine.context_length:
        arguments += ["--context-length", str(engine.context_length)]
    # The other parts read their logs' form from the settings; an engine knows none of ours.
    arguments += ["--log-level", config.log_level, "--log-format", config.log_format]
    return [*arguments, "--log-part", name]
