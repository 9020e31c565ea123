"""The start of a rank's engine, by its kind, and the GPUs of a machine's parts, without torch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from any_agent.auth.engine_key import read_key_file
from any_agent.config import Config, secret_variables
from any_agent.errors import ConfigError
from any_agent.launcher.process import Command, SupervisedProcess, answers
from any_agent.runtime.private_address import require_private_url
from any_agent.runtime.signals import die_with_parent

_SIGNS = ("nvidiactl", "nvidia0", "dxg", "kfd", "nvhost-gpu", "nvgpu")
"""Devices in `/dev` of NVIDIA's driver, of WSL, of AMD's driver, and of small boards."""


def visible_gpus(dev: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the GPUs that child processes see; () for none, or none that can be counted."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        names = [name.strip() for name in hidden.split(",") if name.strip()]
        return () if "-1" in names else tuple(names)
    found = [path for path in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    # CUDA counts from 0, also in a container whose devices have the numbers 2 and 3.
    return tuple(str(k) for k in range(len(found)))


def sees_gpu(dev: Path = Path("/dev")) -> bool:
    """Return False where there is no GPU for certain."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    return not sys.platform.startswith("linux") or any((dev / name).exists() for name in _SIGNS)


_FIND_SGLANG = "import importlib.util as u; raise SystemExit(u.find_spec('sglang') is None)"
_START_SGLANG = Path(__file__).with_name("start_sglang.py")
_EMBEDDED_TIMEOUT = 300.0
_COMPARE_TIMEOUT = 600.0


def engine_command(
    config: Config,
    path: str,
    version: int,
    host: str,
    port: int,
    name: str,
    *,
    key_file: Path,
    gpus: Sequence[str] | None = None,
) -> Command:
    """Return the command of an engine that serves these weights as this version.

    ``key_file`` has the key that the engine requires, so that no list of processes shows it.
    ``gpus``: the GPUs that it sees; None: all.
    """
    arguments = ["--model-path", path, "--weight-version", str(version)]
    arguments += ["--host", host, "--port", str(port), "--dtype", config.model.dtype]
    arguments += ["--max-running-requests", str(config.engine.max_running_requests)]
    arguments += ["--max-queued-requests", str(config.engine.max_queued_requests)]
    arguments += ["--incremental-streaming-output", "--log-level", config.log_level]
    if config.engine.context_length:
        arguments += ["--context-length", str(config.engine.context_length)]
    arguments += ["--config" if _is_sglang(config) else "--key-file", str(key_file)]
    command = (_sglang if _is_sglang(config) else _embedded)(config, arguments, name)
    variables = {**command.variables, **config.engine.environment}
    if gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return replace(command, variables=variables)


def engine_ready(config: Config, url: str, process: SupervisedProcess, *, key_file: Path) -> bool:
    """Return whether the engine that was started at the URL has its weights and samples."""
    if not _is_sglang(config):
        return answers(f"{url}/health")
    # SGLang takes up to 20 seconds to report a failure.
    ready = answers(f"{url}/health_generate", within=25.0)
    # At its start SGLang writes all of its settings to its log, also if it is never ready. A log
    # that cannot be written is no reason to do without the engine.
    with suppress(OSError):
        process.mask(read_key_file(key_file))
    return ready


def start_timeout(config: Config) -> float:
    """Return the seconds until an engine that was started must be ready."""
    # SGLang loads its weights, then compiles and captures graphs for about as long.
    more = 2 * config.engine.load_timeout if _is_sglang(config) else 0.0
    return _EMBEDDED_TIMEOUT + more


def require_engines(config: Config, *, trains: bool = False) -> None:
    """Raise ConfigError if the engines cannot be started here, or must not be used.

    ``trains``: their model is trained.
    """
    if config.engine.adapters and trains:
        raise ConfigError(
            "engine.adapters belong to the model as it is, and training changes it: start with "
            "--no-train, or leave them out"
        )
    if config.engine.adapters:
        # Imported where it is used: the package of engines imports aiohttp and numpy.
        from any_agent.engine.embedded.adapter_files import check_adapter

        for name, folder in config.engine.adapters.items():
            check_adapter(name, folder)
    for url in config.engine.urls:
        require_private_url(url)
    if config.engine.urls:
        _require_adapter_urls(config, trains=trains)
    if not config.engine.urls and _is_sglang(config):
        _require_sglang(config)


def _require_adapter_urls(config: Config, *, trains: bool) -> None:
    """Raise ConfigError for settings that do not fit engines that are live adapters of others."""
    from any_agent.engine import split_adapter
    from any_agent.engine.embedded.adapter_files import require_name

    names = [split_adapter(url)[1] for url in config.engine.urls]
    named = [name for name in names if name is not None]
    for name in named:
        require_name(name)
    if not named:
        return
    if len(named) < len(names):
        raise ConfigError(
            "engine.urls names whole engines and adapters (/adapters/NAME): give one kind of them"
        )
    if config.engine.update_mode == "in_place":
        raise ConfigError(
            "engine.update_mode=in_place is not possible for an adapter of a shared engine "
            "(engine.urls with /adapters/NAME): use resume"
        )
    if config.engine.weight_sync not in ("auto", "disk"):
        raise ConfigError(
            f"engine.weight_sync={config.engine.weight_sync} is not possible for an adapter of a "
            "shared engine (engine.urls with /adapters/NAME): use auto or disk"
        )
    if trains and config.train.lora is None:
        raise ConfigError(
            "engine.urls names an adapter of a shared engine (/adapters/NAME), and the run trains "
            "all weights: set train.lora.rank, or give the URL of an engine of its own"
        )


def _is_sglang(config: Config) -> bool:
    """Return True for SGLang, each of which fills the memory of `engine.gpus` GPUs.

    An embedded engine uses one GPU, which it may share.
    """
    return config.engine.kind == "sglang"


def _require_sglang(config: Config) -> None:
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
    """Raise ConfigError if an engine of `engine.urls` holds other weights than the run's.

    A process with torch compares log-probabilities of tokens, if the weights are on this machine
    and fit into its memory; otherwise a line reports that they were not compared. ``settings`` is
    the run's resolved file.
    """
    command = [sys.executable, "-m", "any_agent.doctor.verify_weights", "--config", str(settings)]
    try:
        done = subprocess.run(
            [*command, *config.engine.urls],
            capture_output=True,
            text=True,
            timeout=_COMPARE_TIMEOUT,
            env={**os.environ, **secret_variables(config)},
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGKILL),
        )
        results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        why = (done.stderr.strip().splitlines() or ["no output"])[-1]
    except subprocess.TimeoutExpired:
        results, why = [], f"it took more than {_COMPARE_TIMEOUT:g} s"
    if not results:
        say(f"engines   their weights could not be compared with the run's: {why}")
    for one in results:
        if one["outcome"] == "failed":
            raise ConfigError(
                f"the engine at {one['url']} holds other weights than the run's ({one['seen']}): "
                "load the run's into it, or give its own URL in engine.urls"
            )
        if one["outcome"] != "passed":
            say(f"engine    {one['url']}: its weights were not compared ({one['seen']})")


def _require_divisible(config: Config) -> None:
    """Raise ConfigError for heads that tensor parallelism cannot divide among the GPUs."""
    gpus = config.engine.gpus
    try:
        text = (Path(config.model.path).expanduser() / "config.json").read_text(encoding="utf-8")
        model = json.loads(text)
        heads = model.get("text_config", model).get("num_attention_heads")
    except (OSError, ValueError, AttributeError):
        return  # For example a name on the hub: SGLang checks it.
    if isinstance(heads, int) and heads % gpus:
        fits = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"engine.gpus={gpus} does not divide the {heads} attention heads of "
            f"{config.model.path}; choose one of {', '.join(fits)}"
        )


def _embedded(config: Config, arguments: list[str], name: str) -> Command:
    engine = config.engine
    arguments = ["any_agent.engine.embedded", *arguments, "--threads", str(engine.threads)]
    arguments += ["--device", engine.device]
    for adapter, folder in engine.adapters.items():
        arguments += ["--adapter", f"{adapter}={folder}"]
    # Unlike the other parts, an engine does not read the form of its logs from the settings.
    return Command([*arguments, "--log-format", config.log_format, "--log-part", name])


def _sglang(config: Config, arguments: list[str], name: str) -> Command:
    engine = config.engine
    # Its log of requests would grow by a line a second, as its rank asks it all the time.
    arguments = ["sglang.launch_server", *arguments, "--log-level-http", "warning"]
    variables = {}
    if engine.device == "cpu" or (engine.device == "auto" and not sees_gpu()):
        arguments += ["--device", "cpu"]
        variables["SGLANG_USE_CPU_ENGINE"] = "1"
    else:
        arguments += ["--tp-size", str(engine.gpus)]
    # SGLang's other processes end with the first one.
    return Command(
        [*arguments, *engine.arguments],
        launch=[str(_START_SGLANG)],
        python=engine.python,
        variables=variables,
    )


SHARED_GPUS = "ANY_AGENT_SHARED_GPUS"
"""The variable that tells a trainer how many of the machine's engines use its first GPU: `none`,
`some` or `all`."""


def require_devices(config: Config, *, trains: bool) -> None:
    """Raise ConfigError for `cuda` without a GPU, before each part fails."""
    wanted = {"engine.device": config.engine.device if not config.engine.urls else "auto"}
    if trains:
        wanted["train.device"] = config.train.device
    for name, device in wanted.items():
        if device == "cuda" and not sees_gpu():
            raise ConfigError(f"{name}=cuda, but there is no GPU {_where()}; use cpu or auto")
    several = _is_sglang(config) and not config.engine.urls and config.engine.gpus > 1
    if several and not sees_gpu():
        raise ConfigError(f"engine.gpus={config.engine.gpus}, but there is no GPU {_where()}")


@dataclass(frozen=True, slots=True)
class GpuAssignment:
    """The GPUs of each part, as `CUDA_VISIBLE_DEVICES` names them; None: all that are visible."""

    engines: tuple[tuple[str, ...] | None, ...]
    """GPUs of each engine of this machine, in their order."""
    trainer: tuple[str, ...] | None
    sends: str | None = None
    """The GPU that sends new weights: the trainer's first one."""

    @property
    def sharing(self) -> Literal["none", "some", "all"]:
        """Return how many of the engines use the GPU that sends new weights."""
        use = [self.sends in hand for hand in self.engines if hand is not None]
        return "none" if not any(use) else "all" if all(use) else "some"


def assign_gpus(
    config: Config, visible: Sequence[str], *, engines: int, trains: bool
) -> GpuAssignment:
    """Give each of this machine's engines its GPUs, and the trainer those that are left.

    The engines get the last GPUs: a script that trains in its own process takes the first. If none
    is left, the trainer shares the engines' GPUs. Embedded engines share GPUs if there are too few;
    SGLang fills the memory of its GPUs, so too few raise ConfigError.
    """
    if not visible or config.engine.device == "cpu" or config.engine.urls:
        return GpuAssignment((None,) * engines, None)
    each = config.engine.gpus if _is_sglang(config) else 1
    needed = each * engines
    if needed > len(visible):
        if _is_sglang(config):
            raise ConfigError(
                f"{engines} engines with engine.gpus={each} need {needed} GPUs, and there are "
                f"{len(visible)} ({','.join(visible)}): lower server.ranks or engine.gpus"
            )
        hands: tuple[tuple[str, ...], ...]
        hands = tuple((visible[k % len(visible)],) for k in range(engines))
        return GpuAssignment(hands, None, visible[0])
    left, theirs = tuple(visible[: len(visible) - needed]), visible[len(visible) - needed :]
    hands = tuple(tuple(theirs[k * each : (k + 1) * each]) for k in range(engines))
    return GpuAssignment(hands, left if trains and left else None, visible[0])


def gpus_of_another(
    config: Config,
    visible: Sequence[str],
    taken: Iterable[Sequence[str] | None],
    trainer: Sequence[str] | None,
) -> tuple[str, ...] | None:
    """Return the GPUs of an engine that is added to those that have ``taken`` theirs; None: all.

    ConfigError if too few are free. Embedded engines share the GPUs of the others then; the
    trainer's own stay its own, as it has chosen a way of weights that depends on them.
    """
    if not visible or config.engine.device == "cpu":
        return None
    used = [gpu for hand in taken for gpu in hand or ()]
    free = [gpu for gpu in visible if gpu not in used and gpu not in (trainer or ())]
    each = config.engine.gpus if _is_sglang(config) else 1
    if len(free) >= each:
        return tuple(free[-each:])
    if _is_sglang(config) or not used:
        raise ConfigError(
            f"another engine needs {each} GPUs, and {len(free)} of {len(visible)} are free: the "
            f"engines have {','.join(used) or 'none'}, the trainer has "
            f"{','.join(trainer or ()) or 'none of its own'}; drain a rank first"
        )
    return (min(dict.fromkeys(used), key=used.count),)


def _where() -> str:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and not sees_gpu():
        return f"to be seen (CUDA_VISIBLE_DEVICES={hidden!r})"
    return "on this machine"
