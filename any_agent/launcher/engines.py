"""How a rank's engine is started: our own one, or SGLang from an environment of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from any_agent.config import Config
from any_agent.errors import ConfigError
from any_agent.launcher.gpu_assignment import sees_gpu
from any_agent.launcher.process import Command
from any_agent.launcher.reachability import answers
from any_agent.runtime.parent_death import die_with_parent
from any_agent.runtime.private_address import require_private_url

_FIND_SGLANG = "import importlib.util as u; raise SystemExit(u.find_spec('sglang') is None)"
_EMBEDDED_TIMEOUT = 300.0
_COMPARE_TIMEOUT = 600.0
_HEALTH_TIMEOUT = 25.0
"""Seconds; SGLang takes up to 20 to say that it is ill."""


def engine_command(
    config: Config,
    path: str,
    version: int,
    host: str,
    port: int,
    name: str,
    *,
    gpus: Sequence[str] | None = None,
) -> Command:
    """An engine that serves these weights as this version, on these GPUs; None: on any."""
    make = _sglang if config.engine.kind == "sglang" else _embedded
    arguments = ["--model-path", path, "--weight-version", str(version)]
    arguments += ["--host", host, "--port", str(port), "--dtype", config.model.dtype]
    arguments += ["--max-running-requests", str(config.engine.max_running_requests)]
    arguments += ["--max-queued-requests", str(config.engine.max_queued_requests)]
    arguments += ["--incremental-streaming-output", "--log-level", config.log_level]
    if config.engine.context_length:
        arguments += ["--context-length", str(config.engine.context_length)]
    variables = dict(config.engine.environment)
    if gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return make(config, arguments, variables, name)


def engine_ready(config: Config, url: str) -> Callable[[], bool]:
    """Whether the engine that was started at the URL has its weights and samples."""
    if config.engine.kind == "sglang":
        return lambda: answers(f"{url}/health_generate", within=_HEALTH_TIMEOUT)
    return lambda: answers(f"{url}/health")


def start_timeout(config: Config) -> float:
    """Seconds until an engine that was started must be ready."""
    if config.engine.kind == "sglang":
        # It loads its weights, then compiles and captures graphs for about as long.
        return _EMBEDDED_TIMEOUT + 2 * config.engine.load_timeout
    return _EMBEDDED_TIMEOUT


def require_engines(config: Config) -> None:
    """ConfigError where engines of this kind cannot be started here, or must not be used."""
    for url in config.engine.urls:
        require_private_url(url)
    if config.engine.urls or config.engine.kind != "sglang":
        return
    _require_divisible(config)
    python = config.engine.python or sys.executable
    try:
        found = subprocess.run([python, "-c", _FIND_SGLANG], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine.python={python} cannot be run: {error}") from None
    if found.returncode:
        raise ConfigError(
            f"there is no SGLang in the environment of {python}: install it in one of its own "
            "(python -m venv sgl; sgl/bin/pip install sglang), and set engine.python=sgl/bin/python"
        )


def require_weights(config: Config, settings: Path, say: Callable[[str], None]) -> None:
    """ConfigError where an engine that somebody else started holds other weights than the run's.

    Judged by what it says of tokens, in a process that has torch, where the weights are here and
    a CPU has the memory for them; else it is only said. ``settings`` is the run's resolved file.
    """
    command = [sys.executable, "-m", "any_agent.doctor.verify_weights", "--config", str(settings)]
    try:
        done = subprocess.run(
            [*command, *config.engine.urls],
            capture_output=True,
            text=True,
            timeout=_COMPARE_TIMEOUT,
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGKILL),
        )
        told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        why = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    except subprocess.TimeoutExpired:
        told, why = [], f"it took more than {_COMPARE_TIMEOUT:g} s"
    if not told:
        say(f"engines   whether they hold the run's weights was not found out: {why}")
    for one in told:
        if one["outcome"] == "failed":
            raise ConfigError(
                f"the engine at {one['url']} holds other weights than the run's ({one['seen']}): "
                "load the run's into it, or give its own URL in engine.urls"
            )
        if one["outcome"] != "passed":
            say(f"engine    {one['url']}: its weights were not compared ({one['seen']})")


def _require_divisible(config: Config) -> None:
    """Tensor parallelism gives each GPU as many of the attention's heads as any other."""
    gpus = config.engine.gpus
    try:
        text = (Path(config.model.path).expanduser() / "config.json").read_text(encoding="utf-8")
        told = json.loads(text)
        heads = told.get("text_config", told).get("num_attention_heads")
    except (OSError, ValueError, AttributeError):
        return  # a hub's name, say: SGLang will find out
    if isinstance(heads, int) and heads % gpus:
        fits = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"engine.gpus={gpus} does not divide the {heads} attention heads of "
            f"{config.model.path}; choose one of {', '.join(fits)}"
        )


def _embedded(
    config: Config, arguments: list[str], variables: dict[str, str], name: str
) -> Command:
    engine = config.engine
    arguments = ["any_agent.engine.embedded", *arguments, "--threads", str(engine.threads)]
    arguments += ["--device", engine.device]
    # The other parts read their logs' form from the settings; an engine knows none of ours.
    arguments += ["--log-format", config.log_format, "--log-part", name]
    return Command(arguments, variables=variables)


def _sglang(config: Config, arguments: list[str], variables: dict[str, str], name: str) -> Command:
    engine = config.engine
    arguments = ["sglang.launch_server", *arguments]
    if engine.device == "cpu" or (engine.device == "auto" and not sees_gpu()):
        arguments += ["--device", "cpu"]
        variables.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    else:
        arguments += ["--tp-size", str(engine.gpus)]
    # At SIGTERM it first ends what it does, and without a launcher nobody kills it then. Its own
    # processes end with the first of them.
    return Command(
        [*arguments, *engine.arguments], engine.python, variables, orphaned=signal.SIGKILL
    )
