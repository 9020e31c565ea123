"""A rank's proxy whose model breaks a law does not start to train."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.real_parts import environment, write_config

pytestmark = pytest.mark.service


def test_a_broken_law_ends_the_start(
    with_template: Callable[[Callable[[str], str]], Path], tmp_path: Path
) -> None:
    model = with_template(lambda text: text.replace("<tool_response>\\n'", "<tool_response>'"))
    config = write_config(tmp_path, model)
    config.write_text(
        config.read_text().replace("enable_thinking:", "renderer: qwen3\n  enable_thinking:")
    )
    started = [sys.executable, "-m", "proxy_ext", "--config", str(config), "--port", "0"]

    def start(*more: str) -> subprocess.CompletedProcess[str]:
        # Nobody answers at that engine's URL; an unsound format is told before it is asked.
        return subprocess.run(
            [*started, "--engine-url", "http://127.0.0.1:1", *more],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment(),
        )

    refused = start("--training")
    assert refused.returncode == 2
    assert "nothing exact can be trained" in refused.stderr
    assert "rendering, tool result: " in refused.stderr
    assert f"any-agent doctor {model} model.renderer=qwen3" in refused.stderr
    assert "Traceback" not in refused.stderr
    served = start()
    assert "could not be trained exactly" in served.stderr
    assert served.returncode == 1 and "the engine at http://127.0.0.1:1" in served.stderr
