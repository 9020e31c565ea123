"""`any-agent demo`: a model learns from agents that know only a URL and a key."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from any_agent.config import Config, load_config
from any_agent.demo.demo import Demo
from any_agent.demo.display import Display
from any_agent.demo.driver import GROUP_SIZE
from any_agent.demo.setups import SETUPS, TINY, Setup
from any_agent.errors import ConfigError
from any_agent.runtime.signals import handle_signals, interrupt

STEPS = 25
RANKS = TINY.ranks
EXPERIMENT = "demo"


def run_demo(
    *,
    seed: int,
    model: str = TINY.name,
    steps: int | None = None,
    ranks: int | None = None,
    json_path: str | None = None,
    keep: str | None = None,
    permute: bool = False,
) -> int:
    """Run and show the demo, write its figures to ``json_path``, and return 0."""
    if json_path and not Path(json_path).absolute().parent.is_dir():
        raise ConfigError(f"--json {json_path} cannot be written: there is no such folder")
    setup = SETUPS[model]
    setup.require()
    root = _folder(keep)
    config = demo_config(
        root,
        seed=seed,
        steps=STEPS if steps is None else steps,
        ranks=setup.ranks if ranks is None else ranks,
        setup=setup,
    )
    demo = Demo(config, root, permute=permute, setup=setup)
    try:
        live = can_draw(sys.stdout, os.environ)
        with handle_signals(interrupt, signal.SIGTERM), Display(demo.state, live=live) as display:
            figures = demo.run(display)
    except BaseException:
        print(f"stopped   files are in {root}", flush=True)
        raise
    if json_path:
        Path(json_path).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def demo_config(root: Path, *, seed: int, steps: int, ranks: int, setup: Setup = TINY) -> Config:
    """Return the demo's settings; everything else is a default."""
    settings = {
        "root": root / "runs",
        "experiment": EXPERIMENT,
        "trial": f"seed-{seed}",
        "model.path": root / "model",
        "server.port": 0,
        "server.ranks": ranks,
        "log_level": "info",
        "sessions.group_size": GROUP_SIZE,
        "sessions.group_timeout": setup.patience,
        "rollout.batch_size": 64,
        "rollout.eta": 2,
        "train.steps": steps,
        "train.seed": seed,
        "train.checkpoint_every": 20,
        **setup.settings,
    }
    return load_config(None, [f"{key}={value}" for key, value in settings.items()], environ={})


def _folder(keep: str | None) -> Path:
    """Return an empty folder for the demo's files."""
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="any-agent-demo-"))
    root = Path(keep).absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()):
            raise ConfigError(f"{root} is not empty; choose another folder for --keep")
    except OSError as error:
        raise ConfigError(f"--keep {root} cannot be used: {error.strerror}") from None
    return root


def can_draw(out: TextIO, environ: Mapping[str, str]) -> bool:
    """Return whether the output is a terminal that can redraw a frame."""
    encoding = (out.encoding or "").lower().replace("-", "")
    return (
        out.isatty()
        and environ.get("TERM", "dumb") not in ("dumb", "unknown")
        and encoding == "utf8"
    )
