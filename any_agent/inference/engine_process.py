"""A script's own engine: embedded, or an SGLang that is started and ended with the script."""

from __future__ import annotations

import logging
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from any_agent.auth.engine_key import write_key_file
from any_agent.config import LOOPBACK, Config
from any_agent.engine import InferenceEngine, load_engine_in_process
from any_agent.errors import ConfigError, StartupError
from any_agent.inference.weights_source import WeightsSource
from any_agent.keys import engine_key
from any_agent.launcher.engines import (
    engine_command,
    engine_ready,
    require_engines,
    sees_gpu,
    start_timeout,
)
from any_agent.launcher.process import SupervisedProcess
from any_agent.launcher.trial import TrialWeights
from any_agent.runtime.event_loop import LoopThread
from any_agent.runtime.ports import keep, port_of, url_of

log = logging.getLogger(__name__)

_NAME = "inference-engine"
_GRACE = 10.0  # seconds for the engine to end
_POLL_INTERVAL = 0.2


def chosen(
    kept: WeightsSource, kind: str | None, python: str | None, device: str | None
) -> WeightsSource:
    """Return the weights with the caller's choice of an engine over the trial's settings."""
    if kind not in (None, "embedded", "sglang"):
        raise ValueError(f"kind is {kind!r}: use embedded or sglang")
    if python is not None and kind == "embedded":
        raise ValueError("python is the interpreter of an SGLang: leave kind out")
    changes = {"kind": "sglang" if python else kind, "python": python, "device": device}
    if changes["kind"] == "sglang" and kept.config.engine.adapters:
        raise ValueError("the settings have engine.adapters, which SGLang does not serve here")
    engine = kept.config.engine.model_copy(
        update={name: value for name, value in changes.items() if value is not None}
        # The engine is started here, so the addresses of running ones are dropped.
        | {"urls": ()}
    )
    return WeightsSource(kept.config.model_copy(update={"engine": engine}), kept.weights)


def own_engine(
    kept: WeightsSource, asked: str | None, stack: ExitStack
) -> tuple[str | InferenceEngine, str | None]:
    """Start an SGLang and return its URL and key, or return the embedded engine."""
    if _can_start(kept.config, asked=asked is not None):
        return stack.enter_context(_started(kept.config, kept.weights))
    engine, weights = kept.config.engine, kept.weights
    loaded = load_engine_in_process(
        str(weights.path),
        device=engine.device,
        dtype=kept.config.model.dtype,
        context_length=engine.context_length,
        weight_version=weights.version,
        adapters=engine.adapters,
    )
    return loaded, None


def _can_start(config: Config, *, asked: bool) -> bool:
    """Return whether to start SGLang; ConfigError if the caller wants it and it cannot start.

    A trial's settings may come from another machine: without a GPU, or without its SGLang, the
    embedded engine serves the same weights.
    """
    if config.engine.kind != "sglang":
        return False
    try:
        if not asked and config.engine.device != "cpu" and not sees_gpu():
            raise ConfigError("there is no GPU on this machine")
        require_engines(config)
    except ConfigError as error:
        if asked:
            raise
        log.warning("using the embedded engine, as the trial's SGLang cannot run here: %s", error)
        return False
    return True


@contextmanager
def _started(config: Config, weights: TrialWeights) -> Iterator[tuple[str, str]]:
    """Yield SGLang's URL and key once it has loaded the weights.

    StartupError shows the end of its log.
    """
    host, key = LOOPBACK[0], engine_key(secrets.token_bytes(32))
    # Children end with the thread that started them, so this thread lives as long as the engine.
    keeper = LoopThread(_NAME)
    with (
        tempfile.TemporaryDirectory(prefix="any-agent-engine-") as folder,
        keep(host) as kept_port,
    ):
        port = port_of(kept_port)
        write_key_file(key_file := Path(folder) / "engine-key.yaml", key)
        command = engine_command(
            config, str(weights.path), weights.version, host, port, _NAME, key_file=key_file
        )
        process = SupervisedProcess(_NAME, command, Path(folder) / "engine.log")
        keeper.start()
        try:
            keeper.call(_start(process))
            url = url_of(host, port)
            _until_ready(process, config, url, key_file)
            yield url, key
        finally:
            process.stop(grace=_GRACE)
            keeper.stop()


async def _start(process: SupervisedProcess) -> None:
    process.start()


def _until_ready(process: SupervisedProcess, config: Config, url: str, key_file: Path) -> None:
    patience = start_timeout(config)
    deadline = time.monotonic() + patience
    while not engine_ready(config, url, process, key_file=key_file):
        code = process.poll()
        if code is not None or time.monotonic() > deadline:
            did = f"ended with {code}" if code is not None else f"took more than {patience:g} s"
            raise StartupError(f"SGLang {did} before it was ready:\n{process.last_lines()}")
        time.sleep(_POLL_INTERVAL)
